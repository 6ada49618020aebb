"""What tests in one process share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest


@pytest.fixture
def layout() -> Callable[..., tuple[list[Any], list[slice], int]]:
    """A function that lays out a bucket: ``layout([(7,), (5, 3)], gap=3)``.

    It returns shapes and places of parameters that lie in it with gaps after each, and its length.
    """
    torch = pytest.importorskip("torch")

    def lay_out(shapes: Sequence[Sequence[int]], gap: int = 3) -> tuple[list[Any], list[slice], int]:
        sizes = [torch.Size(shape) for shape in shapes]
        starts = list(accumulate((size.numel() + gap for size in sizes), initial=0))
        places = [slice(start, start + size.numel()) for size, start in zip(sizes, starts, strict=False)]
        return sizes, places, starts[-1]

    return lay_out
