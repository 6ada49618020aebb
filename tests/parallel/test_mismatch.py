"""Ranks that call different things, as processes: one error on all ranks, and the next collective works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr
from ringreduce.collectives import Context
from ringreduce.common.config import Config
from ringreduce.common.processes import host_name
from ringreduce.testing import caught
from ringreduce.transport.mpi_messages import MpiMessages
from ringreduce.transport.shared.node import join
from ringreduce.transport.shared.segments import MemfdSegments
from ringreduce.transport.waiting import Waiter

PRIVATE = MPI.COMM_WORLD.Dup()
pytestmark = pytest.mark.sizes(2, 3, 4)


@pytest.fixture(scope="module", params=[None, 1, 2], ids=["one node", "messages", "hierarchy"])
def communicator(request: pytest.FixtureRequest) -> Iterator[rr.Communicator]:
    """A communicator of its own over all ranks, on one node and on several; all tests of a kind share it."""
    config = Config(timeout_s=20.0, node_size=request.param)
    waiter = Waiter(config.timeout_s)
    messages = MpiMessages(MPI.COMM_WORLD, waiter)
    context = Context(messages, waiter, join(messages, waiter, config, host_name(), MemfdSegments), config)
    context.agreement.patience_s = 0.003  # a false suspicion costs a note, a test that waits for one costs a second
    made = rr.Communicator(context)
    yield made
    made.close()


def last(communicator: rr.Communicator) -> bool:
    return communicator.rank == communicator.size - 1


def mismatch(communicator: rr.Communicator, call: Callable[[], object]) -> rr.MismatchError:
    """Return the error of this rank once it is the same on all ranks and the next collectives have worked."""
    size = communicator.size
    error = caught(call)
    everyone = PRIVATE.allgather((type(error).__name__, str(error), getattr(error, "values", None)))
    assert everyone == [everyone[0]] * size
    assert isinstance(error, rr.MismatchError)
    assert sorted(error.values) == list(range(size))
    assert len(set(error.values.values())) == 2
    assert communicator.allreduce(np.arange(3)).tolist() == [0, size, 2 * size]
    assert (communicator.allreduce(np.ones(70_000, np.float32)) == size).all()
    communicator.barrier()
    return error


def assert_says(error: rr.MismatchError, most: str, odd: str) -> None:
    """The last rank called the odd thing and all the others the other."""
    *others, one = error.values.values()
    assert all(most in text for text in others)
    assert odd in one


@pytest.mark.spread("communicator")
@pytest.mark.parametrize(("most", "odd"), [("5", "8"), ("70000", "70003"), ("2x3", "3x2")])
def test_shapes(communicator: rr.Communicator, most: str, odd: str) -> None:
    """Different shapes are named, also of equally many elements: no partial sums, no truncation."""
    shape = [int(length) for length in (odd if last(communicator) else most).split("x")]
    error = mismatch(communicator, lambda: communicator.allreduce(np.ones(shape)))
    assert_says(error, f"shape {most},", f"shape {odd},")


def test_dtypes(communicator: rr.Communicator) -> None:
    """Different dtypes are named, also of equal size."""
    for most, odd in (("float32", "float64"), ("float32", "int32"), ("float16", "uint16")):
        array = np.ones(6, odd if last(communicator) else most)
        assert_says(mismatch(communicator, lambda: communicator.allreduce(array)), most, odd)  # noqa: B023


def test_operations(communicator: rr.Communicator) -> None:
    """Different operations are named."""
    op = "max" if last(communicator) else "sum"
    error = mismatch(communicator, lambda: communicator.allreduce(np.ones(9, np.int16), op))
    assert_says(error, "sum", "max")


def test_collectives(communicator: rr.Communicator) -> None:
    """An allreduce does not meet another collective, also where one line calls either."""
    for other in ("broadcast", "allgather", "alltoall", "reduce_scatter", "barrier"):
        name = other if last(communicator) else "allreduce"
        call = partial(getattr(communicator, name), *[np.ones(12)] * (name != "barrier"))
        assert_says(mismatch(communicator, call), "allreduce(", other)


def test_roots(communicator: rr.Communicator) -> None:
    """Different roots are named."""
    root = int(last(communicator))
    assert_says(mismatch(communicator, lambda: communicator.broadcast(np.ones(4), root)), "root 0", "root 1")


def test_algorithms(communicator: rr.Communicator) -> None:
    """An algorithm on one rank and the automatic choice on the others."""
    name = "ring" if last(communicator) else None
    error = mismatch(communicator, lambda: communicator.allreduce(np.ones(11), algorithm=name))
    assert_says(error, "allreduce(", "algorithm ring")


@pytest.mark.spread("communicator")
@pytest.mark.parametrize("name", ["allgather", "alltoall"])
def test_ragged_rows_may_differ_but_not_their_shape(communicator: rr.Communicator, name: str) -> None:
    """How many rows there are is each rank's own affair; what a row is must agree."""
    rows = np.ones((communicator.rank * communicator.size, 4 if last(communicator) else 2))
    error = mismatch(communicator, lambda: getattr(communicator, name)(rows))
    assert_says(error, "shape *x2", "shape *x4")


def test_known_calls_that_are_confused(communicator: rr.Communicator) -> None:
    """Calls that all ranks have made before are not compared between nodes each time; mixing them up is found too."""
    small, large = np.ones(40_000, np.float32), np.ones(40_001, np.float32)
    calls: list[tuple[np.ndarray, dict[str, str]]] = [
        (small, {}),
        (large, {}),
        (small, {"algorithm": "ring"}),
        (small[:100], {"algorithm": "mpi"}),
    ]
    for array, options in calls:
        communicator.allreduce(array, **options)
    for most, odd in ((0, 1), (0, 2), (3, 1), (1, 3), (2, 0)):
        array, options = calls[odd if last(communicator) else most]
        mismatch(communicator, lambda: communicator.allreduce(array, **options))  # noqa: B023


def test_confused_calls_of_the_librarys_own(communicator: rr.Communicator) -> None:
    """Two calls of the MPI library's allreduce, which all ranks know, do not mix their data."""
    shorter, longer = np.ones(50, np.float32), np.ones(60, np.float32)
    for array in (shorter, longer):
        communicator.allreduce(array, algorithm="mpi")
    array = longer if last(communicator) else shorter
    error = mismatch(communicator, lambda: communicator.allreduce(array, algorithm="mpi"))
    assert_says(error, "shape 50,", "shape 60,")


@pytest.mark.spread
def test_memory_stays_where_it_is(communicator: rr.Communicator, growth: Callable[[Callable[[], object]], Any]) -> None:
    """Dozens of confused calls, with messages under way, leave nothing behind: plans are used again."""
    small, large = np.ones(40_000, np.float32), np.ones(40_001, np.float32)
    for array in (small, large):
        communicator.allreduce(array)

    def confuse(times: int) -> None:
        for _ in range(times):
            mismatch(communicator, lambda: communicator.allreduce(large if last(communicator) else small))

    confuse(10)
    grown = growth(lambda: confuse(25))
    assert grown.nbytes < 1 << 20  # a plan of each would have 4 MiB
    assert grown.blocks < 1250  # the last signatures are remembered
