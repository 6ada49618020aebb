"""Which compression reduces which buckets, what reducers ask of the ranks, and reducers for wire formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ringreduce.collectives.communicator import Communicator
from ringreduce.testing import run_ranks
from ringreduce.training.compression import (
    BucketCompression,
    ReducingRanks,
    WireFormat,
    WireState,
    has_reducers,
    reduces,
    signature_of,
)
from ringreduce.training.compression.powersgd import PowerSGD
from ringreduce.training.compression.topk import TopK


class Int4(WireFormat):
    """A wire format with error feedback."""

    wire = "int4"


class Int4WithoutFeedback(Int4):
    """What rounding loses is lost."""

    error_feedback = False


class Overridden(Int4):
    """A user's own, made of one of ours."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None


class Unprintable:
    """A compression that is no dataclass."""

    reducer = TopK().reducer


class Few:
    """All that a reducer may ask of a communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.empty, self.allreduce, self.allgather = communicator.empty, communicator.allreduce, communicator.allgather


def gradients(rank: int, step: int) -> npt.NDArray[np.float32]:
    """Return a bucket of 300 entries that is different on each rank and in each step."""
    return np.random.default_rng([31, rank, step]).standard_normal(300).astype(np.float32)


def reduce(
    reducer: Any, communicator: Communicator, ranks: ReducingRanks, flat: npt.NDArray[Any], average: bool
) -> None:
    """Do what is done with a bucket in a step; in a wire format, buckets travel by the communicator itself."""
    reducer.reduce(communicator if isinstance(reducer, WireState) else ranks, flat, average)


ALL: list[BucketCompression] = [PowerSGD(), TopK(0.1), Int4, Int4WithoutFeedback]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "int32", "bool"])
def test_who_reduces_buckets_of_which_dtypes(dtype: str) -> None:
    """Wire formats take all floats, what keeps float32 residuals takes float32, what a user has overridden nothing."""
    assert reduces(PowerSGD(), dtype) is reduces(TopK(), dtype) is (dtype == "float32")
    assert reduces(Int4, dtype) is ("float" in dtype)
    assert not reduces(Overridden, dtype)
    assert not reduces("int4", dtype)


def test_what_has_reducers() -> None:
    """All that reduces buckets of some dtype."""
    assert all(map(has_reducers, ALL))
    assert not has_reducers(Overridden)
    assert not has_reducers(object)


def test_a_signature_tells_settings_apart_but_not_objects() -> None:
    """So that it is equal on all ranks exactly if they compress in the same way."""
    assert signature_of(PowerSGD(rank=3)) == signature_of(PowerSGD(rank=3)) != signature_of(PowerSGD(rank=4))
    assert signature_of(Int4) == "Int4"
    assert signature_of(Unprintable()) == signature_of(Unprintable()) == "Unprintable"


@pytest.mark.parametrize("compression", ALL, ids=signature_of)
@pytest.mark.parametrize("size", [1, 3])
def test_reducers_ask_few_things_of_the_ranks(compression: BucketCompression, size: int) -> None:
    """What `ReducingRanks` has is enough, and the result and the state have the same bits as with a communicator."""

    def run(communicator: Communicator) -> bool:
        few: ReducingRanks = Few(communicator)
        results = []
        for ranks in (communicator, few):
            reducer = compression.reducer([(15, 20)], [slice(0, 300)])
            for step in range(2):
                flat = gradients(communicator.rank, step)
                reduce(reducer, communicator, ranks, flat, average=True)
            state = reducer.state_dict()
            results.append([flat.tobytes(), *(state[name].tobytes() for name in sorted(state))])
        return results[0] == results[1]

    assert run_ranks(size, run, node_size=1) == [True] * size


@pytest.mark.parametrize(
    ("compression", "names"),
    [
        (PowerSGD(2), ["factors", "residual"]),
        (PowerSGD(2, error_feedback=False), ["factors"]),
        (TopK(0.1), ["residual"]),
        (Int4, ["sent", "summed"]),
    ],
    ids=["powersgd", "powersgd without feedback", "topk", "int4"],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_reducer_goes_on_from_a_saved_state(
    compression: BucketCompression, names: list[str], dtype: npt.DTypeLike
) -> None:
    """A new reducer with the state of another gives the same bits, for averages and sums; the state is a copy."""

    def run(communicator: Communicator) -> tuple[list[bytes], float]:
        first, second = (compression.reducer([(15, 20)], [slice(0, 300)]) for _ in range(2))
        assert first.error == 0.0
        for step in range(3):
            reduce(first, communicator, communicator, gradients(communicator.rank, step).astype(dtype), average=True)
        state, error, results = first.state_dict(), first.error, []
        assert sorted(state) == names
        for each in (first, second):
            if each is second:
                second.load_state_dict(state)
            for average in (True, False):
                flat = gradients(communicator.rank, 3).astype(dtype)
                reduce(each, communicator, communicator, flat, average)
            results.append(flat.tobytes())
        return results, error

    if not reduces(compression, np.dtype(dtype).name):
        return
    for (first, second), error in run_ranks(3, run, node_size=1):
        assert first == second
        assert error > 0.01


def test_without_error_feedback_a_wire_reducer_keeps_nothing() -> None:
    """It measures the error all the same."""

    def run(communicator: Communicator) -> tuple[bool, bool]:
        reducer = Int4WithoutFeedback.reducer([(300,)], [slice(0, 300)])
        reduce(reducer, communicator, communicator, gradients(communicator.rank, 0), average=True)
        return reducer.state_dict() == {}, 0.01 < reducer.error < 0.2

    assert run_ranks(2, run, node_size=1) == [(True, True)] * 2


@pytest.mark.parametrize("compression", [PowerSGD(2), TopK(1.0)], ids=signature_of)
@pytest.mark.parametrize("shapes", [[], [(0,)], [(0, 3), (2, 0)], [(4,)], [(9, 9)]])
def test_buckets_of_one_kind(layout: Any, compression: BucketCompression, shapes: list[tuple[int, ...]]) -> None:
    """A bucket may have no parameters, none with elements, none to compress, or none to leave as they are."""

    def run(communicator: Communicator) -> tuple[bool, bool]:
        sizes, places, length = layout(shapes, gap=0)
        reducer = compression.reducer(sizes, places)
        flat = np.ones(length, np.float32)
        reducer.reduce(communicator, flat, average=True)
        reducer.load_state_dict(reducer.state_dict())
        return np.allclose(flat, 1.0, rtol=0, atol=2e-5), reducer.error < 1e-5

    assert run_ranks(2, run) == [(True, True)] * 2
