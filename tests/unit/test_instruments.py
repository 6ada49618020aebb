"""Observers: told of every collective in order, and unable to spoil one."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.common.instruments import Instruments
from ringreduce.testing import run_ranks


class Recorder(rr.Instrument):
    """Writes down what it is told."""

    def __init__(self, log: list[tuple[object, ...]], name: str = "") -> None:
        self.log = log
        self.name = name

    def collective_started(self, *what: object) -> None:
        self.log.append((self.name, "started", *what))

    def collective_finished(self, collective: str, algorithm: str, nbytes: int, duration_s: float) -> None:
        assert duration_s >= 0
        self.log.append((self.name, "finished", collective, algorithm, nbytes))


class Raising(rr.Instrument):
    """Raises at the start or at the end of a collective."""

    def __init__(self, when: str) -> None:
        self.when = when

    def collective_started(self, *what: object) -> None:
        assert self.when != "started"

    def collective_finished(self, *what: object) -> None:
        assert self.when != "finished"


def test_observers_are_called_in_order() -> None:
    """Every observer hears of start and end, in the order in which they were added, until it is removed."""
    instruments, log = Instruments(), []
    first, second = Recorder(log, "first"), Recorder(log, "second")
    instruments.add(first)
    instruments.add(second)
    instruments.notify("collective_started", "allreduce", "ring", 8)
    instruments.notify("collective_finished", "allreduce", "ring", 8, 0.5)
    instruments.remove(first)
    instruments.notify("collective_started", "barrier", "", 0)
    assert log == [
        ("first", "started", "allreduce", "ring", 8),
        ("second", "started", "allreduce", "ring", 8),
        ("first", "finished", "allreduce", "ring", 8),
        ("second", "finished", "allreduce", "ring", 8),
        ("second", "started", "barrier", "", 0),
    ]


def test_an_instrument_need_not_override_anything() -> None:
    """The base class listens and does nothing; removing what is not there is harmless."""
    instruments = Instruments()
    instruments.add(rr.Instrument())
    instruments.notify("collective_started", "allreduce", "ring", 8)
    instruments.notify("collective_finished", "allreduce", "ring", 8, 0.5)
    instruments.remove(rr.Instrument())
    assert len(instruments.observers) == 1


@pytest.mark.parametrize("when", ["started", "finished"])
def test_an_observer_that_raises_is_removed_and_logged(when: str, caplog: pytest.LogCaptureFixture) -> None:
    """The others are still told, the log says which it was, and the result is right on all ranks."""

    def check(communicator: rr.Communicator) -> list[float]:
        log: list[tuple[object, ...]] = []
        recorder = Recorder(log)
        if communicator.rank == 1:
            communicator.instruments.add(Raising(when))
            communicator.instruments.add(recorder)
        array = np.full(3, communicator.rank + 1.0)
        for _ in range(3):
            communicator.allreduce(array, "max", out=array)
        assert [each[1] for each in log] == ["started", "finished"] * 3 * communicator.rank
        assert communicator.instruments.observers == (recorder,) * communicator.rank
        return array.tolist()

    with caplog.at_level(logging.ERROR):
        assert run_ranks(2, check) == [[2.0] * 3] * 2
    assert len(caplog.records) == 1
    assert "Raising" in caplog.text


def test_what_the_user_calls_is_what_observers_see() -> None:
    """One event of start and end for each call, with collective, algorithm and bytes; in-place repeats too."""

    def check(communicator: rr.Communicator) -> None:
        log: list[tuple[object, ...]] = []
        array = np.ones(6)
        communicator.allreduce(array, out=array)
        communicator.allreduce(array, out=array)
        recorder = Recorder(log)
        communicator.instruments.add(recorder)
        communicator.allreduce(array, out=array)
        names = ["allreduce", "allgather", "alltoall", "broadcast", "reduce_scatter", "reduce", "gather", "scatter"]
        for name in names[1:]:
            getattr(communicator, name)(array)
        communicator.instruments.remove(recorder)
        communicator.allreduce(array, out=array)
        assert [each[2] for each in log[::2]] == names
        assert [each[1] for each in log] == ["started", "finished"] * 8
        of_root = [96, 48] if communicator.rank == 0 else [48, 24]
        assert [each[4] for each in log[::2]] == [48, 96, 48, 48, 48, 48, *of_root]
        assert all(start[2:] == end[2:] for start, end in zip(log[::2], log[1::2], strict=True))

    run_ranks(2, check)


def test_a_failed_collective_has_no_end() -> None:
    """A collective that raises is started and not finished."""

    def check(communicator: rr.Communicator) -> None:
        log: list[tuple[object, ...]] = []
        communicator.instruments.add(Recorder(log))
        with pytest.raises(rr.MismatchError):
            communicator.allreduce(np.ones(3 + communicator.rank))
        assert [each[1] for each in log] == ["started"]

    run_ranks(2, check)
