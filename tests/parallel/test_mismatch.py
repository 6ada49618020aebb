"""Ranks that call different things, as processes: one error on all ranks, and the next collective works."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr
from ringreduce.config import Config
from ringreduce.placement import Context
from ringreduce.testing import caught
from ringreduce.transport.mpi import MpiMessages
from ringreduce.transport.node import host_name, join
from ringreduce.transport.shared import MemfdSegments
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
    context.agreement.patience = 64  # a false suspicion costs a note, a test that waits for one costs a second
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


@pytest.mark.parametrize("count", [5, 70_000])
def test_shapes(communicator: rr.Communicator, count: int) -> None:
    """Different shapes are named."""
    length = count + 3 * last(communicator)
    error = mismatch(communicator, lambda: communicator.allreduce(np.ones(length)))
    assert_says(error, f"shape {count},", f"shape {count + 3},")


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


def test_roots(communicator: rr.Communicator) -> None:
    """Different roots are named."""
    root = int(last(communicator))
    assert_says(mismatch(communicator, lambda: communicator.broadcast(np.ones(4), root)), "root 0", "root 1")


def test_algorithms(communicator: rr.Communicator) -> None:
    """Different algorithms are named."""
    name = "double_tree" if last(communicator) else "ring"
    error = mismatch(communicator, lambda: communicator.allreduce(np.ones(11), algorithm=name))
    assert_says(error, "algorithm ring", "algorithm double_tree")


def test_collectives(communicator: rr.Communicator) -> None:
    """Different collectives are named, the barrier among them."""
    array = np.ones(12, np.uint8)
    size = communicator.size
    for name, call in (
        ("broadcast", lambda: communicator.broadcast(array)),
        ("allgather", lambda: communicator.allgather(array)),
        ("reduce_scatter", lambda: communicator.reduce_scatter(array)),
        ("alltoall", lambda: communicator.alltoall(array, [12, *[0] * (size - 1)])),
        ("barrier", communicator.barrier),
    ):
        error = mismatch(communicator, call if last(communicator) else lambda: communicator.allreduce(array))
        assert_says(error, "allreduce(", name)


def test_ragged_rows_may_differ_but_not_their_shape(communicator: rr.Communicator) -> None:
    """Rows of an allgather are each rank's own number; what a row is must agree."""
    columns = 4 if last(communicator) else 2
    error = mismatch(communicator, lambda: communicator.allgather(np.ones((communicator.rank, columns))))
    assert_says(error, "shape *x2", "shape *x4")


def test_known_calls_that_are_confused(communicator: rr.Communicator) -> None:
    """Calls that all ranks have made before are not compared between nodes each time; mixing them up is found too."""
    small, large = np.ones(40_000, np.float32), np.ones(40_001, np.float32)
    calls = [
        lambda: communicator.allreduce(small),
        lambda: communicator.allreduce(large),
        lambda: communicator.allreduce(small, algorithm="ring"),
        lambda: communicator.allreduce(small[:100]),  # the MPI library's own, between nodes
        communicator.barrier,
    ]
    for call in calls:
        call()
    for most, odd in ((0, 1), (0, 2), (3, 1), (4, 0), (0, 4)):
        mismatch(communicator, calls[odd if last(communicator) else most])


def test_confused_calls_of_the_librarys_own(communicator: rr.Communicator) -> None:
    """Two calls of the MPI library's allreduce, which all ranks know, do not mix their data."""
    shorter, longer = np.ones(50, np.float32), np.ones(60, np.float32)
    for array in (shorter, longer):
        communicator.allreduce(array, algorithm="mpi")
    array = longer if last(communicator) else shorter
    error = mismatch(communicator, lambda: communicator.allreduce(array, algorithm="mpi"))
    assert_says(error, "shape 50,", "shape 60,")
