"""Joining: ranks share memory where all of them see the right memory, and none of them does otherwise."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from ringreduce.common.config import Config
from ringreduce.common.errors import TransportError
from ringreduce.testing import run_threads
from ringreduce.transport.memory import MemorySegments, MemoryWorld
from ringreduce.transport.shared import node
from ringreduce.transport.shared.arena import Array
from ringreduce.transport.shared.node import Node, join
from ringreduce.transport.waiting import Waiter

SIZE = 3
CONFIG = Config(timeout_s=20.0)


class Broken(MemorySegments):
    """No memory can be made."""

    def create(self, nbytes: int) -> tuple[int, Array]:
        raise TransportError("the reason")


class Unreachable(MemorySegments):
    """What is there in place of a peer's memory cannot be mapped."""

    def open(self, rank: int, segment_id: int) -> Array:
        raise ValueError("the reason")


class Mirror(MemorySegments):
    """The pids and descriptors of the peers are those of this rank too: it finds its own memory."""

    def open(self, rank: int, segment_id: int) -> Array:
        return super().open(self._rank, segment_id)


class Short(MemorySegments):
    """The peer's descriptor is that of some small file."""

    def open(self, rank: int, segment_id: int) -> Array:
        return super().open(rank, segment_id)[:100]


def join_all(
    special: Callable[[MemoryWorld, int], MemorySegments] = MemorySegments, config: Config = CONFIG
) -> list[Node]:
    """Let three ranks of one machine join; rank 1 has ``special`` segments."""
    world = MemoryWorld(SIZE, config.timeout_s)

    def run(rank: int) -> Node:
        kind = special if rank == 1 else MemorySegments
        return join(world.messages(rank), Waiter(20.0), config, "machine", lambda pids: kind(world, rank))

    return run_threads(SIZE, run, on_error=world.meeting.abort)


def reason_not_to_share(nodes: list[Node], log: pytest.LogCaptureFixture) -> str:
    """Check that every rank is a node of its own on the one machine; return what the one line in the log says."""
    for each in nodes:
        assert each.topology.nodes == ((0,), (1,), (2,))
        assert each.hosts.nodes == ((0, 1, 2),)
        assert each.board.peers == []
    (record,) = log.records
    assert record.levelno == logging.WARNING
    return record.getMessage()


def test_ranks_of_a_machine_share_memory(caplog: pytest.LogCaptureFixture) -> None:
    """One node, one board, and nothing in the log."""
    for rank, each in enumerate(join_all()):
        assert each.topology.nodes == each.hosts.nodes == ((0, 1, 2),)
        assert each.board.peers == [peer for peer in range(SIZE) if peer != rank]
    assert caplog.records == []


@pytest.mark.parametrize("special", [Broken, Unreachable])
def test_a_problem_of_one_rank_is_everyones(special: type[MemorySegments], caplog: pytest.LogCaptureFixture) -> None:
    """Where one rank cannot make or map memory, all ranks use messages, and the log gives that rank's reason once."""
    assert "the reason" in reason_not_to_share(join_all(special), caplog)


@pytest.mark.parametrize("special", [Mirror, Short])
def test_other_memory_is_not_taken_for_a_peers(special: type[MemorySegments], caplog: pytest.LogCaptureFixture) -> None:
    """A rank that maps something, but not what its peer made, finds that out before anything is written there."""
    assert "rank 1: it finds other memory in place of rank 0's" in reason_not_to_share(join_all(special), caplog)


def test_ranks_in_other_pid_namespaces_share_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks with other pid namespaces are on one machine and not on one node: their pids mean nothing to each other."""
    monkeypatch.setattr(node, "pid_namespace", lambda: threading.current_thread().name)
    assert "separate pid namespaces" in reason_not_to_share(join_all(), caplog)


def test_switched_off_makes_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Without shared memory nobody tries to make any, so nothing of it can fail."""
    nodes = join_all(Broken, replace(CONFIG, shared_memory=False))
    assert "it is switched off" in reason_not_to_share(nodes, caplog)
