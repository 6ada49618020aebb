"""What tests in one process share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod

import pytest
from hypothesis import settings

import ringreduce as rr

settings.register_profile("no deadline", deadline=None)  # on a loaded machine any example may take long
settings.load_profile("no deadline")


@pytest.fixture
def world() -> Iterator[None]:
    """A world of this process alone."""
    rr.init()
    yield
    rr.shutdown()


@pytest.fixture
def layout() -> Callable[..., tuple[list[tuple[int, ...]], list[slice], int]]:
    """A function that lays out a bucket: ``layout([(7,), (5, 3)], gap=3)``.

    It returns shapes and places of parameters that lie in it with gaps after each, and its length.
    """

    def lay_out(shapes: Sequence[tuple[int, ...]], gap: int = 3) -> tuple[list[tuple[int, ...]], list[slice], int]:
        starts = list(accumulate((prod(shape) + gap for shape in shapes), initial=0))
        places = [slice(start, start + prod(shape)) for shape, start in zip(shapes, starts, strict=False)]
        return list(shapes), places, starts[-1]

    return lay_out
