"""Whether a call comes again: with the same array in the same memory, or with a tensor that can stand in for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringreduce.buffers.same import same_kind, same_memory


def forget(_: object) -> None:
    """Nothing reads the function afterwards."""


def test_none_is_the_same_as_none():
    """A call without an array is repeated by one without."""
    is_same = same_memory(None, forget, written=False)
    assert is_same(None)
    assert not is_same(np.zeros(3))


def test_the_end_of_an_array_is_noticed():
    """The function does not keep it."""
    array, ended = np.zeros(3), []
    is_same = same_memory(array, ended.append, written=False)
    assert is_same(array)
    del array
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("name", "make", "expected"),
    [
        ("another one", lambda torch: torch.ones(4, 3), True),
        ("a part of a larger one", lambda torch: torch.zeros(9, 3)[2:6], True),
        ("another shape", lambda torch: torch.zeros(3, 4), False),
        ("another dtype", lambda torch: torch.zeros(4, 3, dtype=torch.int32), False),
        ("other strides", lambda torch: torch.zeros(3, 4).t(), False),
        ("a leaf of autograd", lambda torch: torch.zeros(4, 3, requires_grad=True), False),
        ("a parameter", lambda torch: torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False), False),
        ("rows", lambda torch: torch.zeros(4, 3).to_sparse(), False),
        ("without memory", lambda torch: torch.zeros(4, 3, device="meta"), False),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_tensor_of_the_same_kind_can_stand_in(name: str, make: Callable[[Any], Any], expected: bool):
    """Contiguous, in host memory, out of autograd's sight, and of the same type, dtype and shape."""
    torch = pytest.importorskip("torch")
    first = torch.zeros(4, 3)
    assert same_kind(first, first.nbytes)(make(torch)) is expected


def test_a_tensor_whose_storage_is_too_small_cannot_stand_in():
    """Its shape says more than there is."""
    torch = pytest.importorskip("torch")
    first = torch.zeros(4, 3)
    other = torch.zeros(4, 3)
    other.untyped_storage().resize_(4)
    assert not same_kind(first, first.nbytes)(other)
