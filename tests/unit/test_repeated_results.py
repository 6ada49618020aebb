"""Calls that come again: how they are known, new results of all kinds, and ranks that differ in private arrays."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import ringreduce as rr
from ringreduce.buffers import DTYPES
from ringreduce.buffers.same import same_kind, same_memory
from ringreduce.common.config import Config
from ringreduce.testing import run_ranks
from ringreduce.transport.shared.arena import NOWHERE

#: Elements of 1 to 8 bytes, on both sides of the size from which results are in shared memory.
SHAPES = [(), (3,), (5, 819), (4097,), (3, 5500)]


def small(rank: int, turn: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return whole numbers so small that every dtype holds their sums over four ranks."""
    count = int(np.prod(shape, dtype=int))
    return ((np.arange(count) + 3 * rank + turn) % 7).reshape(shape)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "uint8", "int64", "complex64", "bool"])
def test_new_results_of_a_repeated_call(dtype: str, size: int) -> None:
    """Each is an array of its own, right, and stays as it is: of NumPy, of torch, from private and shared memory."""

    def body(communicator: rr.Communicator) -> None:
        rank = communicator.rank
        for shape in SHAPES:
            arrays: list[Any] = [communicator.empty(shape, dtype)]
            if dtype != "bfloat16":
                arrays.append(np.empty(shape, dtype))
            arrays.append(torch.empty(shape, dtype=getattr(torch, dtype)))
            for array in arrays:
                kept = []
                for turn in range(11):
                    values = [small(each, turn, shape) for each in range(size)]
                    wanted = np.any(values, axis=0) if dtype == "bool" else np.sum(values, axis=0)
                    array[...] = torch.as_tensor(values[rank]) if isinstance(array, torch.Tensor) else values[rank]
                    result = communicator.allreduce(array)
                    assert type(result) is type(array)
                    assert result.dtype == array.dtype
                    if turn % 3:
                        kept.append((result, wanted))
                    del result
                for result, wanted in kept:
                    found = result.double() if isinstance(result, torch.Tensor) and dtype == "bfloat16" else result
                    np.testing.assert_array_equal(np.asarray(found).astype(complex), wanted)

    assert dtype in DTYPES
    run_ranks(size, body)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [1024, 8192, 16384, 16385, 65537])
def test_ranks_may_differ_in_which_arrays_are_private(count: int, size: int) -> None:
    """The first rank's input and result are private or not, or one array; so are the others', in all combinations."""
    kinds = [*product((False, True), (False, True)), None]  # (input, result) is in shared memory; None: in place

    def body(communicator: rr.Communicator) -> None:
        def make(shared: bool) -> np.ndarray:
            return communicator.empty(count) if shared else np.empty(count, np.float32)

        for first, others in product(kinds, kinds):
            mine = others if communicator.rank else first
            given = make(communicator.rank == 0 if mine is None else mine[0])
            out = given if mine is None else make(mine[1])
            for turn in range(3):
                given[:] = small(communicator.rank, turn, (count,))
                communicator.allreduce(given, out=out)
                np.testing.assert_array_equal(out, sum(small(each, turn, (count,)) for each in range(size)))

    run_ranks(size, body)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("out_overlaps", [False, True])
def test_rows_that_a_rank_keeps_are_right_if_only_the_others_are_mailed(size: int, out_overlaps: bool) -> None:
    """Alltoalls with unequal rows, with none, and with a result that begins in the input; and reduce-scatters."""

    def body(communicator: rr.Communicator) -> None:
        rank = communicator.rank
        for rows in ([0, 5, 2], [5, 0, 2], [1, 1, 0], [7, 7, 7]):
            splits = rows[:size]
            memory = np.empty((3 * sum(splits) * size + 1, 2), np.float32)
            given = memory[: sum(splits)]
            room = memory[1 if out_overlaps else sum(splits) :]
            for turn in range(3):
                memory[:] = -1
                given[:] = small(rank, turn, given.shape)
                sent = [small(each, turn, given.shape) for each in range(size)]
                start = sum(splits[:rank])
                wanted = np.concatenate([each[start : start + splits[rank]] for each in sent])
                communicator.alltoall(given, splits, out=room[: len(wanted)])
                np.testing.assert_array_equal(room[: len(wanted)], wanted)
                array = np.array(small(rank, turn, (size * 3, 2)), np.float32)
                part = communicator.reduce_scatter(array)
                total = sum(small(each, turn, (size * 3, 2)) for each in range(size))
                np.testing.assert_array_equal(part, total[3 * rank :][:3])

    run_ranks(size, body)


def test_a_repeated_call_whose_scratch_is_too_large_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are in shared memory until that is full; the plans for the private ones after that are used once."""
    monkeypatch.setattr("ringreduce.collectives.plans.reductions._KEPT_NBYTES", 64 << 10)
    count = 65536

    def body(communicator: rr.Communicator) -> None:
        array = np.empty(count, np.float32)
        locate = communicator._context.arena.locate
        kept, shared, plans = [], [], []
        for turn in range(9):
            array[:] = small(communicator.rank, turn, (count,))
            result = communicator.allreduce(array)
            kept.append(result)
            shared.append(locate(result.ctypes.data, result.nbytes) != NOWHERE)
            plans.append(len(communicator._context.plans._plans))
        full = shared.index(False)
        assert full > 1
        assert not any(shared[full:])
        assert plans[full - 1] == plans[-1]
        for turn, result in enumerate(kept):
            np.testing.assert_array_equal(result, sum(small(each, turn, (count,)) for each in range(2)))

    run_ranks(2, body, node_size=1, config=Config(timeout_s=30.0, results_nbytes=1 << 20))


def test_none_is_the_same_as_none():
    """A call without an array is repeated by one without."""
    is_same = same_memory(None, [].append, written=False)
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
