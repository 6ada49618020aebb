"""Arrays in device memory by every path: staging, NCCL and CUDA-aware MPI, over drivers that do everything late.

What is the same for all paths is tested for all of them here; what only one has, in `test_staged` and `test_nccl`.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gpu_doubles.driver import HostArray, HostDriver
from gpu_doubles.ranks import run_gpu_ranks

import ringreduce as rr
from ringreduce.buffers import DTYPES
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.common.config import Config
from ringreduce.common.errors import MismatchError, TransportError, UnsupportedBufferError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu import aware_path, devices, staging
from ringreduce.testing import assert_close, assert_equal, caught, expected, sample

TRANSPORTS = {"staged": "staged", "nccl": "nccl", "mpi": "device+messages"}
PATHS = pytest.mark.parametrize("path", TRANSPORTS)
ASKED = pytest.mark.parametrize("path", ["nccl", "mpi"])
WORLDS = pytest.mark.parametrize(("size", "node_size"), [(1, None), (2, None), (3, None), (4, None), (4, 2), (3, 1)])
SAID = "arrays go through host memory, in segments"


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 4096 bytes, so that small arrays have many."""
    monkeypatch.setattr(staging, "_SEGMENT_NBYTES", 4096)
    monkeypatch.setattr(aware_path, "_SEGMENT_NBYTES", 4096)


def carried_by(path: str, dtype: str, op: ReduceOp = ReduceOp.SUM) -> str:
    """Return what carries an allreduce where a path is asked for: it may lack a dtype or an operation."""
    kind, integral = DTYPES[dtype].kind, DTYPES[dtype].integral
    if path == "nccl" and (dtype in ("int16", "uint16", "bool") or kind == "complex"):
        return "staged"
    ordered = op in (ReduceOp.MIN, ReduceOp.MAX)
    lacks = (op is ReduceOp.AVERAGE and integral) or (
        ordered and kind in ("complex", "float" if path == "nccl" else "")
    )
    return "staged" if lacks else TRANSPORTS[path]


def launches(driver: HostDriver) -> list[str]:
    """Return what was enqueued to reduce on the GPU."""
    return [line.removeprefix("launch ") for line in driver.log if line.startswith("launch")]


# ---- results ----


@PATHS
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("op", ReduceOp)
def test_every_op(op: ReduceOp, dtype: str, path: str) -> None:
    """Averages come out divided, 16-bit floats rounded once; what a path lacks is done through the host."""
    arrays = [sample(rank, (3, 23), dtype) for rank in range(3)]
    if DTYPES[dtype].kind == "complex" and op in (ReduceOp.MIN, ReduceOp.MAX):
        arrays = [array.real.astype(dtype) for array in arrays]

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        source = driver.put_late(arrays[communicator.rank])
        communicator.allreduce(source, op, out=source)
        assert_close(source.get(source.stream), expected(arrays, op))
        assert communicator.path_on_device(dtype, op).transport == carried_by(path, dtype, op)
        assert bool(launches(driver)) == (carried_by(path, dtype, op) != "staged")

    run_gpu_ranks(3, check, path=path)


@PATHS
@pytest.mark.parametrize("seed", range(8))
def test_orders_of_the_gpu_do_not_show(seed: int, path: str) -> None:
    """Calls in a row see each other's results, on one stream and on others, whatever the GPU does first."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        size, rank, count = communicator.size, communicator.rank, 4500
        own, other, moved = driver.make_stream(), driver.make_stream(), driver.make_event()
        array, out = driver.put(sample(rank, count, "int32"), own), driver.put(np.zeros(count, np.int32), own)
        total = expected([sample(each, count, "int32") for each in range(size)], rr.SUM)
        apart = [driver.put_late(sample(rank, 999, "float32", salt=turn)) for turn in range(4)]
        array.stream = out.stream = own
        communicator.allreduce(array, out=out)
        communicator.allreduce(out, "max", out=array)
        communicator.allreduce(array, out=array)
        for each in apart:  # a call that comes before the last one's result was fetched leaves that alone
            communicator.allreduce(each, out=each)
        driver.copy(out.address, array.address, array.nbytes, own)
        driver.record(moved, own)
        driver.wait(other, moved)
        array.stream = out.stream = other
        communicator.broadcast(out, out=array)
        assert_equal(array.get(other), total * size)
        for turn, each in enumerate(apart):
            parts = [sample(peer, 999, "float32", salt=turn) for peer in range(size)]
            assert_equal(each.get(each.stream), expected(parts, rr.SUM))

    run_gpu_ranks(3, check, path=path, seed=seed)


@PATHS
@pytest.mark.parametrize("how", [{"deterministic": True}, {"algorithm": "ring"}, {"wire": "bf16"}])
@pytest.mark.parametrize("node_size", [None, 1])
def test_options_are_those_of_host_memory(how: dict[str, Any], node_size: int | None, path: str) -> None:
    """Algorithms and determinism go through the host, whatever is asked for; small whole numbers are exact in all."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        parts = [sample(rank, 2500, "float32") for rank in range(communicator.size)]
        array = driver.put_late(parts[communicator.rank])
        communicator.allreduce(array, out=array, **how)
        assert_equal(array.get(array.stream), expected(parts, rr.SUM))
        assert "wire" in how or launches(driver) == []

    run_gpu_ranks(2, check, path=path, node_size=node_size)


def test_operands_may_be_kept() -> None:
    """An operand remembers the stream that was current when it was made: another thread may reduce it later."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.arange(11, dtype=np.float32))
        kept = DeviceOperand.of(array)
        assert kept is not None
        array.stream = None
        communicator.allreduce(kept, ReduceOp.SUM, out=kept)
        assert communicator.path_on_device("float32").algorithm == "staged"
        assert_equal(array.get(kept.stream), np.arange(11, dtype=np.float32) * 2)

    run_gpu_ranks(2, check)


# ---- what is asked for ----


def test_what_is_said_is_what_runs() -> None:
    """`path_on_device` follows the algorithm that a call names; without one it is staging, as `explain` says."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.ones(23, np.float32))
        assert "device memory" not in communicator.explain(20)
        for algorithm, way in (
            (None, ("staged", "staged")),
            ("deterministic", ("staged", "staged")),
            ("nccl", ("nccl", "nccl")),
            ("ring", ("ring", "staged")),
        ):
            before = len(launches(driver))
            communicator.allreduce(array, out=array, algorithm=algorithm)
            found = communicator.path_on_device("float32", algorithm=algorithm)
            assert (found.algorithm, found.transport) == way
            assert (len(launches(driver)) > before) == (algorithm == "nccl")
        said = f"{SAID}; also possible, where RINGREDUCE_GPU asks for it: nccl, mpi"
        assert communicator.explain(20).splitlines()[1] == f"in device memory: {said}"
        assert communicator.explain(20, device="cuda").endswith(said)
        assert communicator.explain(8, collective="broadcast", device="cuda:0").endswith("through host memory, whole")

    run_gpu_ranks(2, check, gpu=lambda rank: rank)


@PATHS
def test_an_algorithm_of_the_cpu_for_all_calls_is_explained(path: str) -> None:
    """RINGREDUCE_ALGORITHM=ring reduces the segments, whatever RINGREDUCE_GPU says."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.ones(23, np.float32))
        communicator.allreduce(array, out=array)
        assert launches(driver) == []
        assert f"{SAID}, as ring is asked for by name" in communicator.explain(92, device="cuda")

    run_gpu_ranks(2, check, config=Config(timeout_s=20.0, algorithm="ring", gpu=path))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"gpu": "nccl"}, "NCCL 2.27.5"),
        ({"algorithm": "nccl"}, "NCCL 2.27.5"),
        ({"gpu": "mpi"}, "CUDA-aware MPI, with CuPy's sums (it says so)"),
    ],
)
def test_what_is_asked_for_is_explained(settings: dict[str, str], name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Before the first use and after it; one warning in a process says that no GPU is known to have run it."""
    devices._warn_of_no_report.cache_clear()

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        assert "is known after the first allreduce" in communicator.explain(8, device="cuda")
        source = driver.put_late(np.ones(2, np.float32))
        communicator.allreduce(source, out=source)
        where = "allreduce of 8 bytes in device memory on 2 ranks on 2 nodes x 1"
        said = f"{where}: {name}, as asked for; what it lacks goes through host memory"
        assert communicator.explain(8, device="cuda") == said
        assert communicator.allreduce(np.ones(2)).tolist() == [2, 2]  # in host memory as ever

    for aware in (True, None):  # a library that does not say is taken at the user's word
        config = Config(timeout_s=20.0, **settings)  # type: ignore[arg-type]
        run_gpu_ranks(2, check, gpu=lambda rank: rank, aware=aware, node_size=1, config=config)
    assert sum("no report of scripts/gpu_check" in line for line in caplog.messages) == 1


def test_a_library_that_is_not_aware_is_never_tried(caplog: pytest.LogCaptureFixture) -> None:
    """To try may end the program: arrays go through host memory; the log and `explain` say why."""
    arrays = [sample(rank, 23, "float32") for rank in range(2)]

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        if communicator.rank:
            communicator.gpu.awareness = lambda: devices._awareness(communicator._context)
        for _ in range(2):
            source = driver.put_late(arrays[communicator.rank])
            communicator.allreduce(source, out=source)
            assert_equal(source.get(source.stream), expected(arrays, ReduceOp.SUM))
        why = "as CUDA-aware MPI cannot be used: rank 1: the ranks do not talk over MPI"
        assert f"in segments, {why}" in communicator.explain(92, device="cuda")
        assert communicator.path_on_device("float32").transport == "staged"

    run_gpu_ranks(2, check, path="mpi")
    said = [line for line in caplog.messages if "is not used, though asked for" in line]
    assert said == ["CUDA-aware MPI is not used, though asked for: rank 1: the ranks do not talk over MPI"]


@ASKED
def test_first_uses_belong_together(path: str) -> None:
    """The ranks set it up at once; a rank that does something else then is named, and all go on."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.ones(5, np.float32))
        given = array if communicator.rank else np.ones(5, np.float32)
        error = caught(communicator.allreduce, given, out=given)
        assert isinstance(error, MismatchError)
        assert f"the first use of {devices._NAMES[path]}" in error.values[1]
        communicator.allreduce(array, out=array)
        assert array.get(array.stream).tolist() == [2] * 5

    run_gpu_ranks(2, check, path=path)


# ---- what goes wrong ----


@PATHS
@pytest.mark.parametrize("node_size", [None, 1])
def test_a_mismatch_is_seen_before_anything_moves(node_size: int | None, path: str) -> None:
    """Other shapes of the same count, other counts of which the first segments agree, and host memory, are refused."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.ones(4, np.float32))
        communicator.allreduce(array, out=array)
        for mine in ((40, 50), (2000, 1), 2100):
            values = sample(communicator.rank, mine if communicator.rank else (50, 40), "float32")
            array = driver.put_late(values)
            error = caught(communicator.allreduce, array, out=array)
            assert isinstance(error, MismatchError)
            assert "sum in device memory, shape 50x40, float32" in error.values[0]
            assert_equal(array.get(array.stream), values)
        array = driver.put_late(values) if communicator.rank else values
        assert isinstance(caught(communicator.allreduce, array, out=array), MismatchError)
        array = driver.put_late(np.ones(2100, np.float32))
        communicator.allreduce(array, out=array)
        assert_equal(array.get(array.stream), np.full(2100, 2, np.float32))

    run_gpu_ranks(2, check, path=path, node_size=node_size)


def test_ranks_may_differ_where_nothing_is_reduced_in_segments() -> None:
    """A broadcast from host memory into device memory is the same broadcast."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        values = sample(communicator.rank, 11, "float32")
        array = driver.put_late(values) if communicator.rank else values
        communicator.broadcast(array, 0, out=array)
        if isinstance(array, HostArray):
            assert_equal(array.get(array.stream), sample(0, 11, "float32"))

    run_gpu_ranks(2, check)


class _ReadOnly:
    def __init__(self, array: HostArray) -> None:
        given = array.__cuda_array_interface__
        self.__cuda_array_interface__ = {**given, "data": (given["data"][0], True)}


def test_arrays_that_cannot_be_used_are_refused() -> None:
    """Without reaching the others: a read-only result, host memory for a device's result, and other elements."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.ones(4, np.float32))
        for out in (np.ones(4, np.float32), driver.put_late(np.ones(4)), driver.put_late(np.ones(5, np.float32))):
            with pytest.raises(UnsupportedBufferError, match=r"device memory|out has shape"):
                communicator.allreduce(array, out=out)
        with pytest.raises(UnsupportedBufferError, match="no result can be stored"):
            communicator.allreduce(array, out=_ReadOnly(array))
        with pytest.raises(UnsupportedBufferError, match="wire formats are for floats"):
            communicator.allreduce(driver.put_late(np.ones(4, np.int32)), wire="bf16")
        communicator.allreduce(array, out=array)
        assert array.get(array.stream).tolist() == [2] * 4

    run_gpu_ranks(2, check)


@PATHS
def test_an_error_of_the_gpu_ends_the_communicator(path: str) -> None:
    """It is raised where it shows, and later calls do not begin."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.ones(4, np.float32))
        communicator.allreduce(array, out=array)
        driver.fail("launch" if path == "nccl" else "copy")
        with pytest.raises(TransportError, match="told to fail"):
            communicator.allreduce(array, out=array)
        with pytest.raises(TransportError, match="out of step"):
            communicator.allreduce(array, out=array)

    run_gpu_ranks(2, check, path=path)


# ---- CUDA-aware MPI ----


def test_the_same_memory_serves_all_plans() -> None:
    """Arrays of many sizes take no more pieces than the largest; all of it is given back."""
    drivers = []

    def check(communicator: rr.Communicator, driver: HostDriver) -> int:
        drivers.append(driver)
        for count in (1000, 10, 999, 1000, 500):
            array = driver.put(sample(communicator.rank, count, "float32"))
            communicator.allreduce(array, out=array)
            driver.free(array.address)
        return sum(line.startswith("allocate") and line.endswith(str(2 << 20)) for line in driver.log)

    assert run_gpu_ranks(2, check, path="mpi", node_size=1) == [2, 2]
    assert drivers[0].machine.leftovers() == ["rank 0:s1", "rank 1:s1"]  # which `run_gpu_ranks` has made


def test_a_rank_without_memory_takes_all_to_the_host(caplog: pytest.LogCaptureFixture) -> None:
    """If a plan cannot be made on one rank, all ranks fall back, in that call and later, with one line in the log."""
    arrays = [sample(rank, 23, "float32") for rank in range(3)]

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        for turn in range(2):
            source = driver.put_late(arrays[communicator.rank])
            if communicator.rank == 1 and turn == 0:
                driver.fail("allocate")
            communicator.allreduce(source, out=source)
            driver.faults.discard("allocate")
            assert_equal(source.get(source.stream), expected(arrays, ReduceOp.SUM))
        assert launches(driver) == []

    run_gpu_ranks(3, check, path="mpi", node_size=1)
    said = [line for line in caplog.messages if "through host memory from now on" in line]
    reason = "rank 1: rank 1 was told to fail to allocate"
    assert said == [f"arrays on GPUs go through host memory from now on: {reason}"]


DESCRIBING = """
import ctypes, mmap
import numpy as np
from mpi4py import MPI
from ringreduce.buffers import address_of
from ringreduce.gpu.aware_path import untouchable
from ringreduce.transport.mpi_messages import MpiMessages
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
