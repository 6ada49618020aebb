"""Arrays in device memory by every path: staging, NCCL and CUDA-aware MPI, over drivers that do everything late.

What is the same for all paths is tested for all of them; then what only one has. NCCL's own is in `test_nccl`.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_doubles.driver import HostArray, HostDriver, HostMachine
from gpu_doubles.ranks import reduced, run_gpu_ranks
from suites.conformance import assert_close, assert_equal, expected, ops_of, sample

import ringreduce as rr
from ringreduce.buffers import DTYPES
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.collectives import Feedback
from ringreduce.common.config import Config
from ringreduce.common.errors import MismatchError, TransportError, UnsupportedBufferError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.engine.fused import Executor, Travel, neutral_array
from ringreduce.gpu import aware_path, devices, staging
from ringreduce.gpu.staging import Staging
from ringreduce.testing import caught
from ringreduce.transport.shared.arena import Arena
from ringreduce.transport.shared.segments import PrivateSegments

TRANSPORTS = {"staged": "staged", "nccl": "nccl", "mpi": "device+messages"}
PATHS = pytest.mark.parametrize("path", TRANSPORTS)
ASKED = pytest.mark.parametrize("path", ["nccl", "mpi"])
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
    lacks = (
        (op is ReduceOp.AVERAGE and integral)
        or not op.takes("float")
        or (ordered and kind in ("complex", "float" if path == "nccl" else ""))
    )
    return "staged" if lacks else TRANSPORTS[path]


def launches(driver: HostDriver) -> list[str]:
    """Return what was enqueued to reduce on the GPU."""
    return [line.removeprefix("launch ") for line in driver.log if line.startswith("launch")]


@pytest.mark.parametrize("waits", [True, False])
def test_an_order_that_is_missing_shows(waits: bool) -> None:
    """A second stream sees what the first wrote if it waits for its event; if it does not, some seeds show that."""
    seen = []
    for seed in range(20):
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


# ---- results ----


@PATHS
@pytest.mark.parametrize(("op", "dtype"), [(op, dtype) for dtype in DTYPES for op in ops_of(dtype)])
def test_every_op(op: ReduceOp, dtype: str, path: str) -> None:
    """Averages come out divided, 16-bit floats rounded once; what a path lacks is done through the host."""
    arrays = [sample(rank, (3, 23), dtype) for rank in range(3)]
    if DTYPES[dtype].kind == "complex" and op in (ReduceOp.MIN, ReduceOp.MAX):
        arrays = [array.real.astype(dtype) for array in arrays]

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        assert_close(reduced(communicator, driver, arrays[communicator.rank], op), expected(arrays, op))
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
@pytest.mark.parametrize("how", [{"deterministic": True}, {"algorithm": "ring"}, {"compression": "bf16"}])
@pytest.mark.parametrize("node_size", [None, 1])
def test_options_are_those_of_host_memory(how: dict[str, Any], node_size: int | None, path: str) -> None:
    """Algorithms and determinism go through the host, whatever is asked for; small whole numbers are exact in all."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        parts = [sample(rank, 2500, "float32") for rank in range(communicator.size)]
        assert_equal(reduced(communicator, driver, parts[communicator.rank], **how), expected(parts, rr.SUM))
        assert "compression" in how or launches(driver) == []

    run_gpu_ranks(2, check, path=path, node_size=node_size)


@PATHS
@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.SUM])
@pytest.mark.parametrize(
    ("dtype", "wire"), [("float32", None), ("bfloat16", None), ("int64", None), ("float32", "bf16")]
)
def test_ranks_that_have_joined_reduce_in_host_memory(dtype: str, wire: str | None, op: ReduceOp, path: str) -> None:
    """They contribute nothing, and have no array on a GPU: all ranks do as they do, and averages leave them out."""
    arrays = [sample(rank, 1001, dtype) for rank in range(2)]

    def function(communicator: rr.Communicator, driver: HostDriver) -> Any:
        executor = Executor(communicator)
        joined = communicator.rank == 2
        mine = neutral_array(op, DTYPES[dtype], 1001) if joined else driver.put_late(arrays[communicator.rank])
        feedbacks = [Feedback(keep=not joined)] if wire else []
        executor.reduce_in_place(op, [mine], Travel(wire, feedbacks), active=2)
        return None if joined else mine.get(mine.stream)

    found = run_gpu_ranks(3, function, path=path, node_size=1 if wire else None)
    assert_equal(found[0], found[1])
    if wire:
        assert np.allclose(found[0], expected(arrays, op), rtol=2e-2, atol=2e-2)
    else:
        assert_close(found[0], expected(arrays, op))


def test_operands_may_be_kept() -> None:
    """An operand remembers the stream that was current when it was made: another thread may reduce it later."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.arange(11, dtype=np.float32))
        kept = DeviceOperand.of(array)
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
        reduced(communicator, driver, np.ones(23, np.float32))
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
    """Before the first use and after it; one warning in a process says of MPI that no GPU is known to have run it."""
    devices._warn_of_no_report.cache_clear()

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        assert "is known after the first allreduce" in communicator.explain(8, device="cuda")
        reduced(communicator, driver, np.ones(2, np.float32))
        where = "allreduce of 8 bytes in device memory on 2 ranks on 2 nodes x 1"
        said = f"{where}: {name}, as asked for; what it lacks goes through host memory"
        assert communicator.explain(8, device="cuda") == said
        assert communicator.allreduce(np.ones(2)).tolist() == [2, 2]  # in host memory as ever

    for aware in (True, None):  # a library that does not say is taken at the user's word
        config = Config(timeout_s=20.0, **settings)  # type: ignore[arg-type]
        run_gpu_ranks(2, check, gpu=lambda rank: rank, aware=aware, node_size=1, config=config)
    assert sum("no report of scripts/gpu_check" in line for line in caplog.messages) == ("mpi" in settings.values())


def test_a_library_that_is_not_aware_is_never_tried(caplog: pytest.LogCaptureFixture) -> None:
    """To try may end the program: arrays go through host memory; the log and `explain` say why."""
    arrays = [sample(rank, 23, "float32") for rank in range(2)]

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        if communicator.rank:
            communicator.gpu.awareness = lambda: devices._awareness(communicator._context)
        for _ in range(2):
            assert_equal(reduced(communicator, driver, arrays[communicator.rank]), expected(arrays, ReduceOp.SUM))
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
        reduced(communicator, driver, np.ones(4, np.float32))
        for mine in ((40, 50), (2000, 1), 2100):
            values = sample(communicator.rank, mine if communicator.rank else (50, 40), "float32")
            array = driver.put_late(values)
            error = caught(communicator.allreduce, array, out=array)
            assert isinstance(error, MismatchError)
            assert "sum in device memory, shape 50x40, float32" in error.values[0]
            assert_equal(array.get(array.stream), values)
        array = driver.put_late(values) if communicator.rank else values
        assert isinstance(caught(communicator.allreduce, array, out=array), MismatchError)
        assert_equal(reduced(communicator, driver, np.ones(2100, np.float32)), np.full(2100, 2, np.float32))

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


def test_arrays_that_cannot_be_used_are_refused() -> None:
    """Without reaching the others: a read-only result, host memory for a device's result, and other elements."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.ones(4, np.float32))
        frozen = {**array.__cuda_array_interface__, "data": (array.address, True)}
        for out in (np.ones(4, np.float32), driver.put_late(np.ones(4)), driver.put_late(np.ones(5, np.float32))):
            with pytest.raises(UnsupportedBufferError, match=r"device memory|out has shape"):
                communicator.allreduce(array, out=out)
        with pytest.raises(UnsupportedBufferError, match="no result can be stored"):
            communicator.allreduce(array, out=SimpleNamespace(__cuda_array_interface__=frozen))
        with pytest.raises(UnsupportedBufferError, match="wire formats are for floats"):
            communicator.allreduce(driver.put_late(np.ones(4, np.int32)), compression="bf16")
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


# ---- staging ----


def test_segments_come_down_and_go_up_while_others_are_reduced() -> None:
    """Four come down before the first is reduced; another one is asked for as soon as one was, and sent up."""
    driver = HostDriver()
    source, target = (driver.put_late(np.zeros(5 * 1024 + 3, np.float32)) for _ in range(2))
    staging = Staging(driver, Arena(PrivateSegments()))
    given, taken = DeviceOperand.of(source), DeviceOperand.of(target)
    driver.log.clear()
    staging.allreduce(given, taken, lambda part: driver.log.append(f"reduce {part.count}"))
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


def test_memory_that_cannot_be_pinned_is_used_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Where the system pins nothing, be it on one rank alone, results are right and a line of the log says so."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        if communicator.rank == 1:
            driver.fail("register")
        parts = [sample(rank, 3000, "float32") for rank in range(2)]
        assert_equal(reduced(communicator, driver, parts[communicator.rank]), expected(parts, rr.SUM))

    run_gpu_ranks(2, check)
    assert "cannot be pinned" in caplog.text


def test_a_call_need_not_wait_for_the_last_copy_up() -> None:
    """The host writes what goes up next while the last result is still on its way; the one before has arrived."""
    driver = HostDriver()
    staging = Staging(driver, Arena(PrivateSegments()))
    first, second = driver.put_late(np.ones(3)), driver.put_late(np.full(3, 2.0))
    with staging.on_host(DeviceOperand.of(first)):
        driver.launch("never", lambda: iter(lambda: None, 0), first.stream or 0)
    with staging.on_host(DeviceOperand.of(second)) as given:
        assert given.view.tolist() == [2.0] * 3
        given.view[:] = 4
    assert len(driver.machine.pending(driver)) > 1


def mapped(address: int) -> bool:
    """Return whether an address means memory of this process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        bounds = [[int(each, 16) for each in line.split()[0].split("-")] for line in maps]
    return any(low <= address < high for low, high in bounds)


def lend(staging: Staging, driver: HostDriver, busy: bool = False) -> None:
    """Bring an array down and up, on the default stream, where something may not end."""
    array = DeviceOperand.of(driver.put(np.ones(10, np.float32)))
    with staging.on_host(array):
        if busy:
            driver.launch("never", lambda: iter(lambda: None, 0), 0)


@pytest.mark.parametrize("busy", [False, True])
def test_pinned_memory_stays_mapped(busy: bool) -> None:
    """What is given up stays pinned and mapped, and the GPU is asked nothing, as any answer may take for ever."""
    driver = HostDriver()
    staging = Staging(driver, Arena(PrivateSegments()))
    lend(staging, driver, busy=busy)
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
    staging = Staging(driver, Arena(PrivateSegments()))
    lend(staging, driver)
    (address,) = driver._pinned
    driver.fail("synchronize")
    assert isinstance(caught(staging.close), TransportError)
    del staging
    gc.collect()
    assert mapped(address)
    assert driver.log[-2:] == ["free s1", "free s2"]


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
    for driver in drivers:
        taken, given_back = (sum(line.startswith(word) for line in driver.log) for word in ("allocate m", "free m"))
        assert (taken, driver._pinned) == (given_back, {})


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


def test_what_carries_checksums_goes_through_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    """The host cannot read device memory to compute them: CUDA-aware MPI is not used, though asked for, and a warning
    says so.
    """

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        assert reduced(communicator, driver, np.ones(5, np.float32)).tolist() == [2] * 5
        assert communicator.path_on_device("float32").transport == "staged"

    run_gpu_ranks(2, check, node_size=1, config=Config(timeout_s=20.0, gpu="mpi", checksum=True))
    assert "CUDA-aware MPI is not used, though asked for: rank 0: RINGREDUCE_CHECKSUM" in caplog.text


@pytest.mark.parametrize("gpu", ["mpi", "nccl"])
@pytest.mark.parametrize("options", [{"node_size": 1}, {"shared_memory": False}, {}])
def test_what_is_sealed_goes_through_host_memory(
    options: dict[str, Any], gpu: str, caplog: pytest.LogCaptureFixture
) -> None:
    """MPI gets no address of device memory, though asked for, and a warning says so; nor does NCCL, unless all ranks
    share memory: that two ranks say that they are on one host is no proof.
    """

    def check(communicator: rr.Communicator, driver: HostDriver) -> str:
        assert reduced(communicator, driver, np.ones(5, np.float32)).tolist() == [2] * 5
        return communicator.path_on_device("float32").transport

    config = Config(timeout_s=20.0, gpu=gpu, key_file="key", **options)
    path = "nccl" if gpu == "nccl" and not options else "staged"
    assert run_gpu_ranks(2, check, gpu=lambda rank: rank, config=config) == [path] * 2
    if path == "staged":
        assert f"{'NCCL' if gpu == 'nccl' else 'CUDA-aware MPI'} is not used, though asked for: " in caplog.text
        assert "RINGREDUCE_KEY_FILE" in caplog.text


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
