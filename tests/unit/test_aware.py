"""CUDA-aware MPI as what moves bytes: device memory by messages, over a driver that does everything late."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_doubles.driver import HostArray, HostDriver
from gpu_doubles.ranks import run_gpu_ranks

import ringreduce as rr
from ringreduce.buffers import DTYPES
from ringreduce.common.config import Config
from ringreduce.common.errors import MismatchError, TransportError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu import aware_path, devices
from ringreduce.gpu.awareness import CudaAwareness
from ringreduce.testing import (
    FailingMessages,
    assert_close,
    assert_equal,
    caught,
    expected,
    sample,
)

WORLDS = pytest.mark.parametrize(("size", "node_size"), [(2, 1), (3, 1), (4, 1), (3, None), (4, None)])


AWARE = CudaAwareness(True, "it says so")


def on_gpus(
    size: int,
    function: Callable[[rr.Communicator, HostDriver], object],
    *,
    seed: int = 0,
    found: CudaAwareness | None = AWARE,
    **options: Any,
) -> list[object]:
    """Run ``function(communicator, driver)`` on ranks that ask for MPI, which was found to take addresses or not."""

    def run(communicator: rr.Communicator, driver: HostDriver) -> object:
        if found is not None:
            communicator.gpu.awareness = lambda: found
        return function(communicator, driver)

    options = {"node_size": 1, "config": Config(timeout_s=20.0, gpu="mpi"), **options}
    return run_gpu_ranks(size, run, gpu=lambda rank: rank, seed=seed, **options)


def poisoned(driver: HostDriver, source: HostArray) -> HostArray:
    """Return room for a result on another stream."""
    target = driver.put(np.full(source.shape, 77, source.dtype))
    target.stream = driver.make_stream()
    return target


@pytest.mark.parametrize("dtype", DTYPES)
@WORLDS
def test_every_dtype(size: int, node_size: int | None, dtype: str) -> None:
    """Sums and maxima of every dtype are right on all ranks, by messages on the device's memory."""

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        for op in (ReduceOp.SUM, ReduceOp.MAX):  # of complex numbers through the host
            for count in (1, size - 1, 37):
                arrays = [sample(rank, count, dtype, salt=count) for rank in range(size)]
                source = driver.put_late(arrays[communicator.rank])
                target = poisoned(driver, source)
                communicator.allreduce(source, op, out=target)
                assert_equal(target.get(target.stream), expected(arrays, op))
        assert communicator.path_on_device(dtype).transport == "device+messages"

    on_gpus(size, function, node_size=node_size)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("op", ReduceOp)
def test_every_op_on_floats(op: ReduceOp, dtype: str) -> None:
    """Averages come out divided, 16-bit floats rounded once, whatever the op."""
    arrays = [sample(rank, 41, dtype) for rank in range(3)]
    if dtype == "complex64" and op in (ReduceOp.MIN, ReduceOp.MAX):
        arrays = [array.real.astype(dtype) for array in arrays]

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        source = driver.put_late(arrays[communicator.rank])
        communicator.allreduce(source, op, out=source)
        assert_close(source.get(source.stream), expected(arrays, op))

    on_gpus(3, function)


@pytest.mark.parametrize("seed", range(12))
def test_orders_of_the_gpu_do_not_show(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many segments at once, the same plan again, in place and not: right under every order that a GPU may take."""
    monkeypatch.setattr(aware_path, "_SEGMENT_NBYTES", 256)
    counts = (1003, 5, 1003, 64)

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        for turn, count in enumerate(counts):
            arrays = [sample(rank, count, "float32", salt=turn) for rank in range(3)]
            source = driver.put_late(arrays[communicator.rank])
            target = source if turn % 2 else poisoned(driver, source)
            communicator.allreduce(source, out=target)
            assert_equal(target.get(target.stream), expected(arrays, ReduceOp.SUM))
            if target is not source:
                assert_equal(source.get(source.stream), arrays[communicator.rank])

    on_gpus(3, function, seed=seed)


@pytest.mark.parametrize("seed", range(8))
def test_calls_on_different_streams_do_not_mix(seed: int) -> None:
    """A call that comes before the last one's result was fetched, and on another stream, leaves that result alone."""
    arrays = [[sample(rank, 999, "float32", salt=turn) for rank in range(2)] for turn in range(4)]

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        made = [driver.put_late(each[communicator.rank]) for each in arrays]
        for array in made:
            communicator.allreduce(array, out=array)
        for array, each in zip(made, arrays, strict=True):
            assert_equal(array.get(array.stream), expected(each, ReduceOp.SUM))

    on_gpus(2, function, seed=seed)


def test_deterministic_sums_go_through_the_host() -> None:
    """CuPy flushes the smallest floats to zero, so bits may not be those of other paths."""

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        source = driver.put_late(np.full(7, (1e8, 1.0, -1e8, 1.0)[communicator.rank], np.float32))
        communicator.allreduce(source, out=source, deterministic=True)
        assert_equal(source.get(source.stream), np.ones(7, np.float32))
        assert not any("combine" in line for line in driver.log)

    on_gpus(4, function)


def test_the_host_waits_before_messages_and_after_kernels() -> None:
    """The exact order: what the caller enqueued is awaited before a message starts, a kernel before the next one."""

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        source = driver.put(sample(communicator.rank, 8, "float32"))
        source.stream = driver.make_stream()
        communicator.allreduce(source, out=source)
        driver.log.clear()
        communicator.allreduce(source, out=source)
        memory, work = driver.place(source.address), driver.log[1].split(" -> ")[1].split()[0]
        assert driver.log == [
            "s2 waits for e2",
            f"copy 32 {memory} -> {work} on s2",
            "record e4 on s2",
            "synchronize e4",
            "launch combine float32 sum 4 on s5",
            "record e3 on s5",
            "synchronize e3",
            f"copy 32 {work} -> {memory} on s2",
            "record e2 on s2",
        ]

    on_gpus(2, function)


def test_the_same_memory_serves_all_plans() -> None:
    """Arrays of many sizes take no more pieces than the largest; all of it is given back."""
    drivers = []

    def run(communicator: rr.Communicator, driver: HostDriver) -> int:
        drivers.append(driver)
        for count in (1000, 10, 999, 1000, 500):
            array = driver.put(sample(communicator.rank, count, "float32"))
            communicator.allreduce(array, out=array)
            driver.free(array.address)
        return sum(line.startswith("allocate") and line.endswith(str(2 << 20)) for line in driver.log)

    assert on_gpus(2, run) == [2, 2]
    assert drivers[0].machine.leftovers() == ["rank 0:s1", "rank 1:s1"]  # which `run_gpu_ranks` has made


def test_integer_averages_and_named_algorithms_go_through_the_host() -> None:
    """What the kernels do not do, and what is asked for by name, is done as without CUDA-aware MPI."""
    arrays = [sample(rank, 23, "int32") for rank in range(3)]

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        for options in ({"op": "average"}, {"algorithm": "ring"}):
            source = driver.put_late(arrays[communicator.rank])
            communicator.allreduce(source, out=source, **options)
            op = ReduceOp.AVERAGE if "op" in options else ReduceOp.SUM
            assert_equal(source.get(source.stream), expected(arrays, op))
            assert not any("combine" in line for line in driver.log)

    on_gpus(3, function)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (CudaAwareness(False, "it says no"), "rank 0: it says no"),
        (None, "rank 0: the ranks do not talk over MPI"),
    ],
)
def test_without_it_arrays_go_through_the_host(
    found: CudaAwareness | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A library that is not aware is never tried, as that may end the program; the log and `explain` say why."""
    arrays = [sample(rank, 23, "float32") for rank in range(2)]

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        for _ in range(2):
            source = driver.put_late(arrays[communicator.rank])
            communicator.allreduce(source, out=source)
            assert_equal(source.get(source.stream), expected(arrays, ReduceOp.SUM))
        assert f"in segments, as CUDA-aware MPI cannot be used: {why}" in communicator.explain(92, device="cuda")
        assert communicator.path_on_device("float32").transport == "staged"

    on_gpus(2, function, found=found)
    assert caplog.messages.count(f"CUDA-aware MPI is not used, though asked for: {why}") == 1


def test_a_library_that_does_not_say_is_taken_at_the_users_word(caplog: pytest.LogCaptureFixture) -> None:
    """`explain` says what is known; one warning in a process says that no GPU is known to have run it."""
    devices._warn_of_no_report.cache_clear()

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        assert "is known after the first allreduce" in communicator.explain(8, device="cuda")
        source = driver.put_late(np.ones(2, np.float32))
        communicator.allreduce(source, out=source)
        assert communicator.explain(8, device="cuda") == (
            "allreduce of 8 bytes in device memory on 2 ranks on 2 nodes x 1: CUDA-aware MPI, with CuPy's sums (it does"
            " not say), as asked for; what it lacks goes through host memory"
        )

    for _ in range(2):
        on_gpus(2, function, found=CudaAwareness(None, "it does not say"))
    assert sum("no report of scripts/gpu_check" in line for line in caplog.messages) == 1


def test_first_uses_belong_together() -> None:
    """The ranks set it up at once; a rank that does something else then is named, and all go on."""

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.ones(5, np.float32))
        given = array if communicator.rank else np.ones(5, np.float32)
        error = caught(communicator.allreduce, given, out=given)
        assert isinstance(error, MismatchError)
        assert "the first use of CUDA-aware MPI" in error.values[1]
        communicator.allreduce(array, out=array)
        assert array.get(array.stream).tolist() == [2] * 5

    on_gpus(2, function)


def test_a_rank_without_memory_takes_all_to_the_host(caplog: pytest.LogCaptureFixture) -> None:
    """If a plan cannot be made on one rank, all ranks fall back, in that call and later, with one line in the log."""
    arrays = [sample(rank, 23, "float32") for rank in range(3)]

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        for turn in range(2):
            source = driver.put_late(arrays[communicator.rank])
            if communicator.rank == 1 and turn == 0:
                driver.fail("allocate")
            communicator.allreduce(source, out=source)
            driver._faults.pop("allocate", None)
            assert_equal(source.get(source.stream), expected(arrays, ReduceOp.SUM))
        assert not any("launch" in line for line in driver.log)

    on_gpus(3, function)
    said = [line for line in caplog.messages if "through host memory from now on" in line]
    reason = "rank 1: rank 1 was told to fail to allocate"
    assert said == [f"arrays on GPUs go through host memory from now on: {reason}"]


def test_a_mismatch_is_seen_before_anything_moves() -> None:
    """Ranks that reduce arrays of different shapes all hear of it, and go on afterwards."""

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        source = driver.put_late(np.ones(4, np.float32))
        communicator.allreduce(source, out=source)
        other = driver.put_late(np.ones(5 + communicator.rank, np.float32))
        assert isinstance(caught(communicator.allreduce, other, out=other), MismatchError)
        assert_equal(other.get(other.stream), np.ones(5 + communicator.rank, np.float32))
        communicator.allreduce(source, out=source)
        assert_equal(source.get(source.stream), np.full(4, 4, np.float32))

    on_gpus(2, function)


def test_messages_that_fail_end_the_communicator() -> None:
    """An error of the transport comes out as it is, and later calls are refused."""

    def function(communicator: rr.Communicator, driver: HostDriver) -> None:
        source = driver.put_late(np.ones(4, np.float32))
        for _ in range(2):
            assert isinstance(caught(communicator.allreduce, source, out=source), TransportError)

    on_gpus(2, function, wrap=lambda messages: FailingMessages(messages, after=0))


DESCRIBING = """
import ctypes, mmap
import numpy as np
from mpi4py import MPI
from ringreduce.buffers import address_of
from ringreduce.gpu.aware_path import untouchable
from ringreduce.transport.mpi import MpiMessages
from ringreduce.transport.waiting import Waiter

memory = mmap.mmap(-1, mmap.PAGESIZE)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
messages = MpiMessages(MPI.COMM_SELF, Waiter(5.0))
data = untouchable(address, mmap.PAGESIZE).view(np.float32)[3:100]
assert address_of(data) == address + 12
messages.free([messages.send(data, 0, 1), messages.recv(data, 0, 1)])
messages.close()
print("described")
"""


def test_mpi_is_given_addresses_that_nobody_looks_into() -> None:
    """Describing messages of memory that nobody may read touches none of it: an access would end the process."""
    pytest.importorskip("mpi4py")
    done = subprocess.run([sys.executable, "-c", DESCRIBING], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "described\n", done.stderr
