"""What Horovod 0.28.1 costs and must not cost here; the table is in tests/parallel/test_horovod_defects.py."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.config import Config
from ringreduce.common.reduce_ops import SUM
from ringreduce.engine import Engine, Reduction
from ringreduce.testing import run_ranks
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.messages import Messages

SETTINGS = Config(timeout_s=30.0)


def summed(name: str) -> Reduction:
    """Return the sum of a one of each rank."""
    mine = np.ones(3)
    return Reduction(name, "sum", SUM, [mine], [mine])


class CountingChannel:
    """Counts the notes that a rank posts; otherwise as ``inner``."""

    def __init__(self, inner: Messages) -> None:
        self._inner = inner
        self.posted = 0

    def post(self, note: bytes, peer: int) -> None:
        self.posted += 1
        self._inner.post(note, peer)

    def poll(self) -> tuple[int, bytes] | None:
        return self._inner.poll()

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_operation_waits_for_no_clock(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations begin and end while the engine's clock stands still and nobody sleeps: there are no cycles."""
    notes = MemoryWorld(size)

    def program(communicator: Communicator) -> None:
        engine = Engine(communicator, notes.messages(communicator.rank), threads=False, clock=lambda: 0.0)
        for turn in range(8):
            handles = [summed(f"{turn % 2} {number}") for number in range(3)]
            for handle in handles:
                engine.submit(handle)
            assert [engine.wait(handle)[0].tolist() for handle in handles] == [[size] * 3] * 3
        engine.close()

    def never(*_: Any) -> NoReturn:
        raise AssertionError("slept")

    monkeypatch.setattr("ringreduce.engine.driver.time", SimpleNamespace(sleep=never))
    run_ranks(size, program, config=SETTINGS)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_wait_say_so_once(size: int) -> None:
    """However often they look and however long it takes, waiting ranks send nothing: there are no empty rounds."""
    notes = MemoryWorld(size)
    meeting = threading.Barrier(size, timeout=20.0)

    def program(communicator: Communicator) -> None:
        rank = communicator.rank
        counted = CountingChannel(notes.messages(rank))
        ticks = itertools.count()
        engine = Engine(communicator, counted, threads=False, clock=lambda: next(ticks) * 0.01)
        for turn in range(8):  # first the names are new, then all ranks know them
            mine = summed(f"rank {rank}")
            engine.submit(mine)
            for _ in range(2):  # what is still on its way from the last turn is heard first, and what comes of it
                for _ in range(50):
                    engine.poll(mine)
                meeting.wait()
            before = counted.posted
            for _ in range(300):
                assert not engine.poll(mine)
            assert counted.posted == before, f"in turn {turn}"
            meeting.wait()
            others = [summed(f"rank {each}") for each in range(size) if each != rank]
            for other in others:
                engine.submit(other)
            for each in (mine, *others):
                assert engine.wait(each)[0].tolist() == [size] * 3
            meeting.wait()
        engine.close()

    run_ranks(size, program, config=SETTINGS)
