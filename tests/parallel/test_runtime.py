"""The world of a job: numbers as MPI has them, settings that must agree, ends and new beginnings."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from mpi4py import MPI
from trainees.toy import Toy

import ringreduce as rr
from ringreduce.testing import caught
from ringreduce.transport import mpi_messages
from ringreduce.transport.waiting import Waiter

PRIVATE = MPI.COMM_WORLD.Dup()


def test_numbers_are_those_of_mpi(world: rr.Communicator) -> None:
    """Rank and size are MPI's; local ones are those of MPI's shared-memory split, cross ones of the split across it."""
    assert (rr.rank(), rr.size()) == (PRIVATE.rank, PRIVATE.size) == (world.rank, world.size)
    local = PRIVATE.Split_type(MPI.COMM_TYPE_SHARED, key=PRIVATE.rank)
    cross = PRIVATE.Split(local.rank, PRIVATE.rank)
    assert (rr.local_rank(), rr.local_size()) == (local.rank, local.size)
    assert (rr.cross_rank(), rr.cross_size()) == (cross.rank, cross.size)
    local.Free()
    cross.Free()


def test_the_launcher_is_seen(world: rr.Communicator) -> None:
    """The size that the launcher announced is the size of the world."""
    assert world.config.launched_size == world.size


@pytest.mark.parametrize("node_size", [1, 2])
def test_local_numbers_follow_the_node_size(node_size: int, no_world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With RINGREDUCE_NODE_SIZE every so many consecutive ranks are a node: for topology and numbers alike."""
    monkeypatch.setenv("RINGREDUCE_NODE_SIZE", str(node_size))
    rr.init()
    node, place = divmod(rr.rank(), node_size)
    assert rr.local_rank() == place
    assert rr.local_size() == min(node_size, rr.size() - node * node_size)
    assert rr.cross_rank() == node
    assert rr.world().topology.node_of(rr.rank())[0] == node * node_size
    assert rr.allreduce(np.ones(5)).tolist() == [rr.size()] * 5


def test_shutdown_and_init_again(no_world: None) -> None:
    """Worlds follow one another; buffers and results of an old one stay what they are."""
    kept = []
    for turn in range(5):
        assert not rr.is_initialized()
        rr.init()
        buffer = rr.empty(30_000)
        buffer[:] = turn
        rr.allreduce(buffer, out=buffer)
        kept.append(buffer)
        rr.shutdown()
    assert [buffer[[0, -1]].tolist() for buffer in kept] == [[turn * PRIVATE.size] * 2 for turn in range(5)]


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("name", "value"), [("RINGREDUCE_BUCKET", "64K"), ("RINGREDUCE_ALGORITHM", "ring"), ("RINGREDUCE_TIMEOUT", "19")]
)
def test_different_settings_are_a_mismatch(
    name: str, value: str, no_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks with different settings all refuse to start, with the settings of each in the error."""
    if PRIVATE.rank == PRIVATE.size - 1:
        monkeypatch.setenv(name, value)
    error = caught(rr.init)
    assert isinstance(error, rr.MismatchError)
    assert PRIVATE.allgather(str(error)) == [str(error)] * PRIVATE.size
    assert sorted(error.values) == list(range(PRIVATE.size))
    assert all(said.startswith(f"{name}=") for said in error.values.values())  # as the user has set it
    assert not rr.is_initialized()


def test_gradients_of_a_world_that_failed_are_let_go(no_world: None) -> None:
    """An optimizer that goes on in a new world keeps nothing of the old one, not even by the error that ended it."""
    rr.init()
    toy = Toy({"matrix": np.zeros((3, 2)), "bias": np.zeros(2), "more": np.zeros(2)})

    def step() -> None:
        toy.backward(np.ones((4, 3)), np.ones((4, 2)))
        toy.step()

    def fail() -> Exception:
        gradients = toy.training.gradients
        with pytest.raises(rr.TransportError) as caught:
            raise rr.TransportError(f"as if {gradients} had met it")
        return caught.value

    step()
    rr.global_process_set.engine.fail(fail())
    replaced = weakref.ref(toy.training.gradients)
    rr.shutdown()
    rr.init()
    step()
    gc.collect()
    assert replaced() is None


def test_a_closed_transport_is_let_go() -> None:
    """A transport that was closed with nothing under way does not outlive its user."""
    messages = mpi_messages.MpiMessages(PRIVATE, Waiter(20.0))
    assert messages.exchange(b"x" * messages.rank) == [b"x" * rank for rank in range(messages.size)]
    messages.close()
    watched = weakref.ref(messages)
    del messages
    gc.collect()
    assert watched() is None


@pytest.mark.sizes(2, 3, 4)
def test_a_transport_whose_exchange_failed_stays() -> None:
    """After a time-out MPI may still write to the memory of an exchange: nothing of it is freed, not even at close."""
    waiter = Waiter(20.0)
    messages = mpi_messages.MpiMessages(PRIVATE, waiter)
    waiter.timeout_s = 0.05
    late = messages.rank == messages.size - 1
    if not late:
        assert isinstance(caught(messages.exchange, b"early"), rr.CollectiveTimeoutError)
    PRIVATE.Barrier()
    if late:
        caught(messages.exchange, b"late")
    PRIVATE.Barrier()
    watched = weakref.ref(messages)
    messages.close()
    del messages
    gc.collect()
    assert watched() is not None or late
