"""How work on a GPU ends, well or not: what is given back, and what must stay as it is until the process ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_doubles.driver import HostDriver
from gpu_doubles.ranks import run_gpu_ranks

import ringreduce as rr
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.common.errors import PeerLostError, TransportError
from ringreduce.engine import CollectiveOp
from ringreduce.gpu import nccl as transport
from ringreduce.gpu.staging import Staging
from ringreduce.testing import caught, run_engines
from ringreduce.transport.shared.arena import Arena
from ringreduce.transport.shared.segments import PrivateSegments
from ringreduce.transport.waiting import Waiter


def mapped(address: int) -> bool:
    """Return whether an address means memory of this process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        bounds = [[int(each, 16) for each in line.split()[0].split("-")] for line in maps]
    return any(low <= address < high for low, high in bounds)


def staging_of(driver: HostDriver) -> Staging:
    """Return one with host memory that is unmapped when nobody refers to it."""
    return Staging(driver, Arena(PrivateSegments()))


def lend(staging: Staging, driver: HostDriver, during: Callable[[], object] = lambda: None) -> None:
    """Bring an array down and up, on the default stream."""
    array = DeviceOperand.of(driver.put(np.ones(10, np.float32)))
    assert array is not None
    with staging.lend(array, array):
        during()


def stick(driver: HostDriver) -> None:
    """Let the default stream hold a kernel that does not end."""
    driver.launch("never", lambda: iter(lambda: None, 0), 0)


@pytest.mark.parametrize("busy", [False, True])
def test_pinned_memory_stays_mapped(busy: bool) -> None:
    """What is given up stays pinned and mapped, and the GPU is asked nothing, as any answer may take for ever."""
    driver = HostDriver()
    staging = staging_of(driver)
    lend(staging, driver, (lambda: stick(driver)) if busy else lambda: None)
    (address,) = driver._pinned
    begin = len(driver.log)
    staging.abandon()
    del staging
    gc.collect()
    assert mapped(address)
    assert driver.log[begin:] == []


def test_a_failure_does_not_stop_the_closing() -> None:
    """An event that cannot be waited for: its memory is neither unmapped nor used again, and all else goes back."""
    driver = HostDriver()
    staging = staging_of(driver)
    lend(staging, driver)
    (address,) = driver._pinned
    driver.fail("synchronize")
    assert isinstance(caught(staging.close), TransportError)
    del staging
    gc.collect()
    assert mapped(address)
    assert driver.log[-2:] == ["free s1", "free s2"]


@pytest.mark.parametrize("ending", ["failed", "failed and busy", "busy"])
def test_what_does_not_end_keeps_nobody_waiting(ending: str) -> None:
    """NCCL is aborted, as Python would destroy it, which waits for all ranks; the GPU is asked nothing else.

    After a failure at once; else when the GPU, which may wait for a rank that is gone, has not ended in time.
    """

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        for how in ({}, {"algorithm": "nccl"}, {"algorithm": "ring"}):
            array = driver.put(np.ones(10, np.float32))
            communicator.allreduce(array, out=array, **how)
            assert array.get(0).tolist() == [2.0] * 10
        if "failed" in ending:
            communicator.lifetime.fail(TransportError("a peer is gone"))
        if "busy" in ending:
            stick(driver)
            driver.record(communicator.gpu._paths["nccl"]._done, 0)
            communicator._context.waiter.timeout_s = 0.05
        begin = len(driver.log)
        communicator.close()
        assert driver.log[begin:] == ["nccl abort"]

    run_gpu_ranks(2, function, gpu=lambda rank: rank)


def test_an_engine_that_fails_gives_its_communicator_up() -> None:
    """A rank that is lost may be waited for by the GPU, so that is not waited for in turn."""

    def function(engine: Any) -> bool:
        engine.wait(engine.submit(operation := CollectiveOp("x", "x", lambda communicator: None)) or operation)
        asked: list[str] = []
        gpu = engine.communicator.gpu
        gpu.close, gpu.abandon = lambda: asked.append("close"), lambda: asked.append("abandon")
        engine._progress.fail(PeerLostError(1, "its process has ended"))
        return asked == ["abandon"]

    assert run_engines(1, function) == [True]


def test_a_connection_that_comes_late_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have given NCCL up by then, and to destroy what this one got would wait for them."""
    monkeypatch.setattr(transport, "_CONNECTING_S", 0.01)
    gate, aborted = threading.Event(), threading.Event()

    def connect(size: int, unique_id: bytes, rank: int) -> Any:
        gate.wait(20.0)
        return SimpleNamespace(abort=aborted.set)

    nccl: Any = SimpleNamespace(connect=connect)
    messages: Any = SimpleNamespace(size=2, rank=0)
    with pytest.raises(TransportError, match="to connect over NCCL"):
        transport._connect(nccl, messages, Waiter(20.0, crowded=True), b"id")
    assert not aborted.is_set()
    gate.set()
    assert aborted.wait(20.0)


def test_nccl_is_aborted_where_the_gpu_fails_after_it_connected() -> None:
    """The rank's error is raised, and its connection does not wait for the others."""

    def run(communicator: rr.Communicator, driver: HostDriver) -> None:
        communicator.gpu.require_usable(None)
        driver.fail("make_event")
        assert isinstance(caught(communicator.gpu._set_up, "nccl"), TransportError)
        assert driver.log[-1] == "nccl abort"
        communicator.lifetime.fail(TransportError("NCCL"))

    run_gpu_ranks(2, run, path="nccl")
