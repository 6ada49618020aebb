"""The GPU that is not there: does what a GPU may do, in every order that a GPU may take, and notices what it must."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gpu_doubles.driver import HostArray, HostDriver, HostMachine, check_driver

SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_a_driver(seed: int):
    """The double passes what a driver of a real GPU has to pass, under every order of things; the log has names."""
    driver = HostDriver(HostMachine(seed))
    check_driver(driver)
    assert driver.machine.leftovers() == []
    assert driver.log[:3] == ["allocate m1 400012", "allocate m2 400012", "allocate m3 400016"]
    assert "launch combine float32 sum 100003 on s2" in driver.log


@pytest.mark.parametrize("waits", [True, False])
def test_an_order_that_is_missing_shows(waits: bool):
    """A second stream sees what the first wrote if it waits for its event; if it does not, some seeds show that."""
    seen = []
    for seed in SEEDS:
        driver = HostDriver(HostMachine(seed))
        first, second, event = driver.make_stream(), driver.make_stream(), driver.make_event()
        source = driver.put(np.arange(5), first)
        target = driver.put(np.zeros(5, np.int64))
        driver.record(event, first)
        if waits:
            driver.wait(second, event)
        driver.copy(target.address, source.address, source.nbytes, second)
        seen.append(target.get(second).tolist())
    good = [values == [0, 1, 2, 3, 4] for values in seen]
    assert all(good) if waits else not all(good)


def test_a_wait_binds_to_the_latest_record():
    """An event that is recorded again after the wait does not let the wait wait for that."""
    driver = HostDriver(HostMachine(3))
    first, second, event = driver.make_stream(), driver.make_stream(), driver.make_event()
    one = driver.put(np.array([1]), first)
    driver.record(event, first)
    driver.wait(second, event)
    driver.launch("never", lambda: iter(lambda: None, 0), first)
    driver.record(event, first)
    assert one.get(second) == [1]
    assert not driver.done(event)


def test_host_memory_is_copied_as_it_is_pinned_or_not():
    """Into memory that is not pinned at once; out of it at once too, to arrive late under some seeds."""
    seen = set()
    for seed in SEEDS:
        driver = HostDriver(HostMachine(seed))
        stream, host, array = driver.make_stream(), np.zeros(1, np.int64), driver.put(np.array([3]))
        driver.copy(host.ctypes.data, array.address, array.nbytes, stream)
        assert host.tolist() == [3]
        host[:] = 5
        driver.copy(array.address, host.ctypes.data, array.nbytes, stream)
        host[:] = 4
        seen.add(array.get().tolist()[0])
        assert array.get(stream).tolist() == [5]
    assert seen == {3, 5}


@pytest.mark.parametrize(
    ("breach", "complaint"),
    [
        (lambda driver, array: driver.copy(array.address, array.address + 4, 8, 0), "reach over its end"),
        (lambda driver, array: driver.free(array.address + 1), "no allocation begins there"),
        (lambda driver, array: (driver.free(array.address), array.get()), "was freed"),
        (lambda driver, array: driver.machine.driver().free(array.address), "not .or no longer. this driver's"),
        (lambda driver, array: driver.machine.driver().view(array.address, 1), "rank 0:m1 is another process's"),
    ],
)
def test_breaches_are_noticed(breach: Callable[[HostDriver, HostArray], object], complaint: str):
    """What would be a crash, garbage or nothing at all on a GPU is an assertion here."""
    driver = HostDriver()
    with pytest.raises(AssertionError, match=complaint):
        breach(driver, driver.put(np.array([1])))


def test_no_kernel_spins_on_a_shared_gpu():
    """Processes that share a GPU take turns: one that spins may keep the other from running at all."""
    machine = HostMachine()
    driver, _ = machine.driver(), machine.driver()
    block = driver.allocate(1)

    def spin() -> None:
        driver.launch("spin", lambda: iter(()), 0)
        driver.free(block)

    with pytest.raises(AssertionError, match="spins on a shared GPU"):
        spin()
