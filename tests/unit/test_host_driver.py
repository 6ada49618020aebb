"""The GPU that is not there: does what a GPU may do, in every order that a GPU may take, and notices what it must."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from gpu_doubles.driver import HostArray, HostDriver, HostMachine, check_driver
from gpu_doubles.kernels import KernelCode, View

from ringreduce.buffers import DTYPES
from ringreduce.common.errors import TransportError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.testing import assert_close, expected, run_threads, sample

SEEDS = range(20)


def table(driver: HostDriver, *arrays: HostArray) -> int:
    """Return the address of a table of the arrays' addresses, in device memory."""
    return driver.put(np.array([array.address for array in arrays], np.uint64)).address


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_a_driver(seed: int):
    """The double passes what a driver of a real GPU has to pass, under every order of things."""
    driver = HostDriver(HostMachine(seed))
    check_driver(driver)
    assert driver.machine.leftovers() == []


def test_the_log_says_what_was_asked():
    """One line for each call, with names instead of addresses."""
    driver, host = HostDriver(), np.zeros(8, np.uint8)
    block = driver.allocate(8)
    stream, event = driver.make_stream(), driver.make_event(shared=True)
    driver.register(host.ctypes.data, 8)
    driver.copy(block + 2, host.ctypes.data, 4, stream)
    driver.record(event, stream)
    driver.wait(0, event)
    driver.synchronize(event)
    driver.export(block)
    driver.export_event(event)
    driver.free_event(event)
    driver.free_stream(stream)
    driver.unregister(host.ctypes.data)
    driver.free(block)
    assert driver.log == [
        "allocate m1 8",
        "make s1",
        "make shared e1",
        "register h1 8",
        "copy 4 h1 -> m1+2 on s1",
        "record e1 on s1",
        "s0 waits for e1",
        "synchronize e1",
        "export m1",
        "export e1",
        "free e1",
        "free s1",
        "unregister h1",
        "free m1",
    ]


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


def test_the_host_that_does_not_wait_sees_old_memory():
    """What is enqueued is done late under some seeds, at once under others: both must be expected."""
    seen = set()
    for seed in SEEDS:
        driver = HostDriver(HostMachine(seed))
        seen.add(driver.put(np.array([7]), driver.make_stream()).get().tolist()[0])
    assert seen == {7, -1}


def test_a_wait_binds_to_the_latest_record():
    """An event that is recorded again after the wait does not let the wait wait for that."""
    driver = HostDriver(HostMachine(3))
    first, second, event = driver.make_stream(), driver.make_stream(), driver.make_event()
    one = driver.put(np.array([1]), first)
    driver.record(event, first)
    driver.wait(second, event)
    never: list[bool] = []
    driver.machine.families["never"] = lambda name: lambda view, arguments: iter(lambda: None, never.append)
    driver.kernel("never", "never").launch(1, 1, (), first)
    driver.record(event, first)
    assert one.get(second) == [1]
    assert not driver.done(event)


def test_pageable_memory_is_copied_at_once():
    """Without pinning the call returns when the copy is done, and all that its stream had to do before."""
    for seed in SEEDS:
        driver = HostDriver(HostMachine(seed))
        stream, host = driver.make_stream(), np.zeros(3, np.int64)
        array = driver.put(np.array([1, 2, 3]), stream)
        driver.copy(host.ctypes.data, array.address, array.nbytes, stream)
        assert host.tolist() == [1, 2, 3]


def test_pageable_memory_leaves_at_once_and_arrives_late():
    """The host may write to it when the call has returned; what does not wait for the stream may see neither."""
    seen = set()
    for seed in SEEDS:
        driver = HostDriver(HostMachine(seed))
        stream, host, array = driver.make_stream(), np.array([5]), driver.put(np.array([3]))
        driver.copy(array.address, host.ctypes.data, array.nbytes, stream)
        host[:] = 4
        seen.add(array.get().tolist()[0])
        assert array.get(stream).tolist() == [5]
    assert seen == {3, 5}


REDUCTIONS = [
    (dtype, op)
    for dtype, row in DTYPES.items()
    for op in ReduceOp
    if op is not ReduceOp.AVERAGE or row.kind in ("float", "complex")
]


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_combine_reduces_in_place_and_elsewhere(dtype: str, op: ReduceOp):
    """Every target gets the reduction of all sources, also a target that is one of them."""
    driver, arrays = HostDriver(), [sample(rank, 13, dtype) for rank in range(3)]
    stream = driver.make_stream()
    sources = [driver.put(array, stream) for array in arrays]
    other = driver.put(np.zeros_like(arrays[0]))
    kernel = driver.kernel("reduce", f"combine<{dtype},{op.value}>")
    both = table(driver, other, sources[1])
    counts = np.uint32(3), np.uint32(2), np.uint64(13), np.uint32(3)
    kernel.launch(1, 128, (table(driver, *sources), counts[0], both, *counts[1:]), stream)
    for target in (other, sources[1]):
        assert_close(target.get(stream), expected(arrays, op))
    assert np.array_equal(sources[0].get(stream).view(np.uint8), arrays[0].view(np.uint8))


def test_a_kernel_checks_its_arguments():
    """Arguments of the wrong number or size would be read as others on a GPU."""
    driver = HostDriver()
    kernel = driver.kernel("reduce", "combine<float32,sum>")
    kernel.launch(1, 32, (0, 1, 0, 1, 4, 1), 0)
    event = driver.make_event()
    driver.record(event, 0)
    with pytest.raises(AssertionError, match="where I is expected"):
        driver.synchronize(event)


def test_memory_of_a_peer_must_be_open():
    """A rank reaches a peer's memory at the same address, between opening and closing it."""
    machine = HostMachine()
    mine, other = machine.driver(), machine.driver()
    block, own = other.put(np.array([5])), mine.put(np.array([0]))
    with pytest.raises(AssertionError, match="rank 1:m1 is not opened"):
        mine.copy(own.address, block.address, 8, 0)
    assert mine.open(other.export(block.address)) == block.address
    mine.copy(own.address, block.address, 8, 0)
    assert own.get(0) == [5]
    with pytest.raises(AssertionError, match="which rank 0 has open"):
        other.free(block.address)
    with pytest.raises(AssertionError, match="twice"):
        mine.open(other.export(block.address))
    mine.close(block.address)
    other.free(block.address)
    with pytest.raises(TransportError, match="was freed"):
        mine.open(b"rank 1:m1")


@pytest.mark.parametrize(
    ("breach", "complaint"),
    [
        (lambda driver, array: driver.copy(array.address, array.address + 4, 8, 0), "reach over its end"),
        (lambda driver, array: driver.free(array.address + 1), "no allocation begins there"),
        (lambda driver, array: driver.open(driver.export(array.address)), "cannot open what it exported"),
        (lambda driver, array: driver.close(array.address), "not open"),
        (lambda driver, array: driver.export_event(driver.make_event()), "only shared events"),
        (lambda driver, array: (driver.free(array.address), array.get()), "was freed"),
    ],
)
def test_breaches_are_noticed(breach: Callable[[HostDriver, HostArray], object], complaint: str):
    """What would be a crash, garbage or nothing at all on a GPU is an assertion here."""
    driver = HostDriver()
    with pytest.raises(AssertionError, match=complaint):
        breach(driver, driver.put(np.array([1])))


@pytest.mark.parametrize(("method", "error"), [("allocate", MemoryError), ("register", TransportError)])
def test_faults_come_when_told(method: str, error: type[Exception]):
    """A method fails after as many successes as asked for, with the error that the protocol names."""
    driver, host = HostDriver(), np.zeros(4096, np.uint8)
    calls = {"allocate": lambda: driver.allocate(4), "register": lambda: driver.register(host.ctypes.data, 4096)}
    driver.fail(method, after=1)
    calls[method]()
    with pytest.raises(error, match="told to fail"):
        calls[method]()


def test_memory_ends():
    """A GPU has as much memory as it was given, and drivers on it share that."""
    machine = HostMachine(nbytes=1000)
    mine, other = machine.driver(), machine.driver()
    block = mine.allocate(600)
    with pytest.raises(MemoryError, match="400 of 1000 free"):
        other.allocate(600)
    machine.driver(gpu=1).allocate(600)
    mine.free(block)
    other.allocate(600)


def meet(name: str) -> KernelCode:
    """Return a kernel that waits until as many kernels run as its name says."""
    arrived: list[View] = []

    def run(view: View, arguments: Sequence[object]) -> Iterator[None]:
        arrived.append(view)
        while len(arrived) < int(name):
            yield

    return run


@pytest.mark.parametrize("seed", range(3))
def test_kernels_wait_for_those_of_other_ranks(seed: int):
    """A kernel that spins goes on when the kernel that it waits for runs, launched by another thread."""
    machine = HostMachine(seed)
    code = meet("3")
    machine.families["meet"] = lambda name: code
    drivers = [machine.driver(gpu) for gpu in range(3)]
    gate = threading.Barrier(3)

    def run(rank: int) -> bool:
        driver = drivers[rank]
        gate.wait(20.0)
        driver.kernel("meet", "3").launch(1, 32, (), 0)
        event = driver.make_event()
        driver.record(event, 0)
        driver.synchronize(event)
        return driver.done(event)

    assert run_threads(3, run) == [True] * 3


def test_no_kernel_spins_on_a_shared_gpu():
    """Processes that share a GPU take turns: one that spins may keep the other from running at all."""
    machine = HostMachine()
    driver, _ = machine.driver(), machine.driver()
    machine.families["meet"] = meet
    block = driver.allocate(1)

    def spin() -> None:
        driver.kernel("meet", "1").launch(1, 32, (), 0)
        driver.free(block)

    with pytest.raises(AssertionError, match="spins on a shared GPU"):
        spin()


def test_the_array_interface_names_address_and_stream():
    """Libraries that read the interface find the array, and the stream to wait for where there is one."""
    driver = HostDriver()
    array = driver.put(np.ones((2, 3), np.float32), shift=4)
    interface = array.__cuda_array_interface__
    assert interface["data"] == (array.address, False)
    assert (interface["shape"], interface["typestr"], interface["stream"]) == ((2, 3), "<f4", None)
    array.stream = 0
    assert array.__cuda_array_interface__["stream"] == 1
    assert array.address % 256 == 4
