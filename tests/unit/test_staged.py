"""Arrays in device memory through host memory, over a driver that does everything late and in any order."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from gpu_doubles.driver import HostArray, HostDriver
from gpu_doubles.ranks import run_gpu_ranks

import ringreduce as rr
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.gpu import staging
from ringreduce.gpu.staging import Staging
from ringreduce.testing import assert_equal, expected, sample
from ringreduce.transport.shared.arena import Arena
from ringreduce.transport.shared.segments import PrivateSegments


@pytest.fixture
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 4096 bytes, so that small arrays have many."""
    monkeypatch.setattr(staging, "_SEGMENT_NBYTES", 4096)


small_segments = pytest.mark.usefixtures("_small_segments")


def operand(array: HostArray) -> DeviceOperand:
    made = DeviceOperand.of(array)
    assert made is not None
    return made


# ---- order ----


@small_segments
def test_segments_come_down_and_go_up_while_others_are_reduced() -> None:
    """Four come down before the first is reduced; another one is asked for as soon as one was, and sent up."""
    driver = HostDriver()
    source, target = (driver.put_late(np.zeros(5 * 1024 + 3, np.float32)) for _ in range(2))
    staging = Staging(driver, Arena(PrivateSegments()))
    given, taken = operand(source), operand(target)
    driver.log.clear()
    staging.allreduce(given, taken, staging.segments(given), lambda part: driver.log.append(f"reduce {part.count}"))
    kinds = {"copy 4096 m": "down", "copy 12 m": "down", "copy 4096 h": "up", "copy 12 h": "up", "reduce": "reduce"}
    steps = [kind for line in driver.log for begin, kind in kinds.items() if line.startswith(begin)]
    turn = ["reduce", "up"]
    assert steps == ["down"] * 4 + 2 * [*turn, "down"] + 4 * turn


def test_large_arrays_need_no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger than what is kept travels through memory of the call's own, and the host waits for all of it."""
    monkeypatch.setattr(staging, "_KEPT_NBYTES", 100)

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        own = sample(communicator.rank, 101, "uint8")
        array = driver.put_late(own)
        communicator.broadcast(array, 1, out=array)
        assert_equal(array.get(), sample(1, 101, "uint8"))
        assert not [line for line in driver.log if line.startswith("register")]

    run_gpu_ranks(2, check)


# ---- what goes wrong ----


@small_segments
def test_memory_that_cannot_be_pinned_is_used_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Where the system pins nothing, be it on one rank alone, results are right and a line of the log says so."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        if communicator.rank == 1:
            driver.fail("register")
        array = driver.put_late(sample(communicator.rank, 3000, "float32"))
        communicator.allreduce(array, out=array)
        total = expected([sample(rank, 3000, "float32") for rank in range(2)], rr.SUM)
        assert_equal(array.get(array.stream), total)

    with caplog.at_level(logging.WARNING, "ringreduce"):
        run_gpu_ranks(2, check)
    assert "cannot be pinned" in caplog.text


def test_a_call_need_not_wait_for_the_last_copy_up() -> None:
    """The host writes what goes up next while the last result is still on its way; the one before has arrived."""
    driver = HostDriver()
    staging = Staging(driver, Arena(PrivateSegments()))
    first, second = driver.put_late(np.ones(3)), driver.put_late(np.full(3, 2.0))
    with staging.lend(operand(first), operand(first)):
        driver.launch("never", lambda: iter(lambda: None, 0), first.stream or 0)
    with staging.lend(operand(second), operand(second)) as (given, _):
        assert given.view.tolist() == [2.0] * 3
        given.view[:] = 4
    assert len(driver.machine.pending(driver)) > 1
