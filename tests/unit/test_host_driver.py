"""The GPU that is not there: does what a GPU may do, in every order that a GPU may take, and notices what it must."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gpu_doubles.driver import HostArray, HostDriver, HostMachine

SEEDS = range(20)


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
