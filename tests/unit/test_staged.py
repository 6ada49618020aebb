"""Arrays in device memory through host memory, over a driver that does everything late and in any order."""

from __future__ import annotations

import logging
from collections.abc import Callable

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
from ringreduce.gpu import staging
from ringreduce.gpu.staging import Staging
from ringreduce.testing import assert_equal, caught, expected, run_ranks, sample
from ringreduce.transport.shared.arena import Arena
from ringreduce.transport.shared.segments import PrivateSegments

WORLDS = pytest.mark.parametrize(("size", "node_size"), [(1, None), (2, None), (3, None), (4, None), (4, 2), (3, 1)])


@pytest.fixture
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 4096 bytes, so that small arrays have many."""
    monkeypatch.setattr(staging, "_SEGMENT_NBYTES", 4096)


small_segments = pytest.mark.usefixtures("_small_segments")


def operand(array: HostArray) -> DeviceOperand:
    made = DeviceOperand.of(array)
    assert made is not None
    return made


def on_gpus(
    size: int,
    function: Callable[[rr.Communicator, HostDriver], object],
    *,
    node_size: int | None = None,
    seed: int = 0,
) -> list[object]:
    """Run ``function(communicator, driver)`` on ranks that use one GPU."""
    config = Config(timeout_s=20.0, segment_nbytes=32 << 10)
    return run_gpu_ranks(size, function, seed=seed, node_size=node_size, config=config)


# ---- order ----


@small_segments
def test_segments_come_down_and_go_up_while_others_are_reduced() -> None:
    """All that the first slots hold is asked for at once; a slot is filled again when it was emptied, on the GPU."""
    driver = HostDriver()
    source = driver.put(np.arange(5 * 1024 + 3, dtype=np.float32), driver.make_stream())
    source.stream = driver.make_stream()
    target = driver.put(np.zeros(5 * 1024 + 3, np.float32))
    target.stream = source.stream
    staging = Staging(driver, Arena(PrivateSegments()))
    driver.log.clear()
    given, taken = operand(source), operand(target)
    staging.allreduce(given, taken, staging.segments(given), lambda part: driver.log.append(f"reduce {part.count}"))
    assert driver.log == [
        *("record e1 on s2", "s3 waits for e1"),
        *("register h1 4096", "make e2", "make e3", "copy 4096 m1 -> h1 on s3", "record e2 on s3"),
        *("register h2 4096", "make e4", "make e5", "copy 4096 m1+4096 -> h2 on s3", "record e4 on s3"),
        *("register h3 4096", "make e6", "make e7", "copy 4096 m1+8192 -> h3 on s3", "record e6 on s3"),
        *("register h4 4096", "make e8", "make e9", "copy 4096 m1+12288 -> h4 on s3", "record e8 on s3"),
        *("synchronize e2", "reduce 1024", "copy 4096 h1 -> m2 on s4", "record e3 on s4"),
        *("s3 waits for e3", "copy 4096 m1+16384 -> h1 on s3", "record e2 on s3"),
        *("synchronize e4", "reduce 1024", "copy 4096 h2 -> m2+4096 on s4", "record e5 on s4"),
        *("s3 waits for e5", "copy 12 m1+20480 -> h2 on s3", "record e4 on s3"),
        *("synchronize e6", "reduce 1024", "copy 4096 h3 -> m2+8192 on s4", "record e7 on s4"),
        *("synchronize e8", "reduce 1024", "copy 4096 h4 -> m2+12288 on s4", "record e9 on s4"),
        *("synchronize e2", "reduce 1024", "copy 4096 h1 -> m2+16384 on s4", "record e3 on s4"),
        *("synchronize e4", "reduce 3", "copy 12 h2 -> m2+20480 on s4", "record e5 on s4"),
        "s2 waits for e5",
    ]


def test_what_is_lent_comes_down_before_and_goes_up_after() -> None:
    """The host waits for the input alone; the target's stream waits for the copy up, and the copy up for it."""
    driver = HostDriver()
    source, target = driver.put(np.arange(3, dtype=np.int16)), driver.put(np.zeros(2, np.int16))
    source.stream, target.stream = driver.make_stream(), driver.make_stream()
    source.stream, target.stream = target.stream, driver.make_stream()
    staging = Staging(driver, Arena(PrivateSegments()))
    for turn in range(2):
        if turn:
            with staging.lend(operand(source), operand(target)):
                pass  # in the other memory: what is lent alternates
        driver.log.clear()
        with staging.lend(operand(source), operand(target)) as (given, taken):
            driver.log.append("work")
            np.copyto(taken.view, given.view[1:] + turn)
        made = ["register h1 65536", "make e2", "make e3", "register h2 65536", "make e4", "make e5"]
        assert driver.log == [
            *(made if turn == 0 else ["synchronize e5"]),
            *("record e1 on s2", "s4 waits for e1", "copy 6 m1 -> h1 on s4", "record e2 on s4", "synchronize e2"),
            "work",
            *("record e1 on s3", "s5 waits for e1", "copy 4 h2 -> m2 on s5", "record e5 on s5", "s3 waits for e5"),
        ]
        assert target.get(target.stream).tolist() == [1 + turn, 2 + turn]
    driver.log.clear()
    staging.close()
    assert [line for line in driver.log if "register" in line] == [f"unregister h{number}" for number in (1, 2, 3, 4)]


@small_segments
@pytest.mark.parametrize("seed", range(8))
def test_orders_of_the_gpu_do_not_show(seed: int) -> None:
    """Calls that follow each other on the caller's streams see each other's results, whatever the GPU does first."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        size, rank = communicator.size, communicator.rank
        count = 4500
        own, other = driver.make_stream(), driver.make_stream()
        array = driver.put(sample(rank, count, "int32"), own)
        out = driver.put(np.zeros(count, np.int32), own)
        total = expected([sample(each, count, "int32") for each in range(size)], rr.SUM)
        array.stream = out.stream = own
        communicator.allreduce(array, out=out)
        communicator.allreduce(out, "max", out=array)
        communicator.allreduce(array, out=array)
        driver.copy(out.address, array.address, array.nbytes, own)
        moved = driver.make_event()
        driver.record(moved, own)
        driver.wait(other, moved)
        array.stream = out.stream = other
        communicator.broadcast(out, out=array)
        assert_equal(array.get(other), total * size)

    on_gpus(3, check, seed=seed)


# ---- results ----


@small_segments
@pytest.mark.parametrize("dtype", list(DTYPES))
@WORLDS
def test_allreduce_of_every_dtype(size: int, node_size: int | None, dtype: str) -> None:
    """Sums in place and out of place, of no element, one, and an odd number in several segments, are exact."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        for count in (0, 1, 7, 2049):
            parts = [sample(rank, count, dtype) for rank in range(size)]
            own, total = parts[communicator.rank], expected(parts, rr.SUM)
            array, out = driver.put_late(own), driver.put_late(np.zeros_like(own))
            assert communicator.allreduce(array, out=out) is out
            assert_equal(out.get(out.stream), total)
            assert_equal(array.get(array.stream), own)
            communicator.allreduce(array, out=array)
            assert_equal(array.get(array.stream), total)

    on_gpus(size, check, node_size=node_size)


@small_segments
@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_allreduce_of_every_op(op: ReduceOp, dtype: str) -> None:
    """Every operation gives what it gives in host memory, averages of integers too."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        own = sample(communicator.rank, (3, 701), dtype)
        array = driver.put_late(own)
        out = driver.put_late(np.zeros_like(own))
        communicator.allreduce(array, op, out=out)
        assert_equal(out.get(out.stream), communicator.allreduce(own, op))

    on_gpus(3, check)


@WORLDS
def test_the_other_collectives(size: int, node_size: int | None) -> None:
    """Reduce-scatter and broadcast, in place too, give the same arrays as in host memory."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        rank = communicator.rank
        parts = [sample(each, (7, 3), "float64") for each in range(size)]
        array = driver.put_late(parts[rank])
        piece = np.array_split(expected(parts, rr.SUM), size)[rank]
        out = driver.put_late(np.zeros_like(piece))
        assert communicator.reduce_scatter(array, out=out) is out
        assert_equal(out.get(out.stream), piece)
        out = driver.put_late(np.zeros((7, 3)))
        for root in range(size):
            assert communicator.broadcast(array, root, out=out) is out
            assert_equal(out.get(out.stream), parts[root])
            assert_equal(array.get(array.stream), parts[rank])
        assert communicator.broadcast(array, size - 1, out=array) is array
        assert_equal(array.get(array.stream), parts[-1])

    on_gpus(size, check, node_size=node_size)


@small_segments
@pytest.mark.parametrize("how", [{"deterministic": True}, {"algorithm": "ring"}, {"wire": "bf16"}])
@pytest.mark.parametrize("node_size", [None, 1])
def test_options_of_the_allreduce(how: dict[str, object], node_size: int | None) -> None:
    """Algorithms, wire formats and determinism are those of host memory: small whole numbers are exact in all."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        parts = [sample(rank, 2500, "float32") for rank in range(communicator.size)]
        array = driver.put_late(parts[communicator.rank])
        communicator.allreduce(array, out=array, **how)
        assert_equal(array.get(array.stream), expected(parts, rr.SUM))

    on_gpus(2, check, node_size=node_size)


@small_segments
def test_results_may_overlap_the_input() -> None:
    """A broadcast from an array into a shifted part of the same memory is that of the array as it was."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        memory = driver.put_late(np.arange(3000, dtype=np.int32) * (communicator.rank + 1))
        parts = [HostArray(driver, memory.address + 4 * start, (2999,), np.int32) for start in (0, 1)]
        for part in parts:
            part.stream = memory.stream
        communicator.broadcast(parts[0], 1, out=parts[1])
        assert_equal(parts[1].get(memory.stream), np.arange(2999, dtype=np.int32) * 2)

    on_gpus(2, check)


def test_large_arrays_need_no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger than what is kept travels through memory of the call's own, and the host waits for all of it."""
    monkeypatch.setattr(staging, "_KEPT_NBYTES", 100)

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        own = sample(communicator.rank, 101, "uint8")
        array = driver.put_late(own)
        communicator.broadcast(array, 1, out=array)
        assert_equal(array.get(), sample(1, 101, "uint8"))
        assert not [line for line in driver.log if line.startswith("register")]

    on_gpus(2, check)


# ---- the choice ----


def test_it_is_what_runs_unless_something_else_is_asked_for() -> None:
    """`explain` says so, of arrays in host memory too once a GPU was used; nobody is asked about NCCL or MPI."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.ones(5, np.float32))
        assert "device memory" not in communicator.explain(20)
        communicator.allreduce(array, out=array)
        said = "arrays go through host memory, in segments; also possible, where RINGREDUCE_GPU asks for it: nccl, mpi"
        assert communicator.explain(20).splitlines()[1] == f"in device memory: {said}"
        assert communicator.explain(20, device="cuda").endswith(said)
        assert communicator.explain(8, collective="broadcast", device="cuda:0").endswith("through host memory, whole")
        communicator.allreduce(array, out=array, algorithm="ring")
        assert communicator.path_on_device("float32", algorithm="ring").algorithm == "ring"
        communicator.allreduce(array, "average", out=array, deterministic=True)
        assert array.get(array.stream).tolist() == [4] * 5
        assert [line for line in driver.log if line.startswith("register")] == ["register h1 4194304"]

    on_gpus(2, check)


def test_an_algorithm_of_the_cpu_for_all_calls_is_explained() -> None:
    """RINGREDUCE_ALGORITHM=ring reduces the segments, whatever RINGREDUCE_GPU says."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.ones(23, np.float32))
        communicator.allreduce(array, out=array)
        choice = communicator.path_on_device("float32")
        assert (choice.algorithm, choice.transport) == ("ring", "staged")
        said = communicator.explain(92, device="cuda")
        assert "arrays go through host memory, in segments, as ring is asked for by name" in said

    run_gpu_ranks(2, check, config=Config(timeout_s=20.0, algorithm="ring", gpu="nccl"))


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
        on_gpus(2, check)
    assert "cannot be pinned" in caplog.text


@small_segments
@pytest.mark.parametrize("node_size", [None, 1])
def test_a_mismatch_is_seen_before_anything_moves(node_size: int | None) -> None:
    """Other shapes of the same count, other counts of which the first segments agree, and host memory, are refused."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
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

    on_gpus(2, check, node_size=node_size)


def test_ranks_may_differ_where_nothing_is_reduced_in_segments() -> None:
    """A broadcast from host memory into device memory is the same broadcast."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        values = sample(communicator.rank, 11, "float32")
        array = driver.put_late(values) if communicator.rank else values
        communicator.broadcast(array, 0, out=array)
        if isinstance(array, HostArray):
            assert_equal(array.get(array.stream), sample(0, 11, "float32"))

    on_gpus(2, check)


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

    on_gpus(2, check)


class _ReadOnly:
    def __init__(self, array: HostArray) -> None:
        given = array.__cuda_array_interface__
        self.__cuda_array_interface__ = {**given, "data": (given["data"][0], True)}


def test_operands_may_be_kept(seed: int) -> None:
    """An operand remembers the stream that was current when it was made: another thread may reduce it later."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.arange(11, dtype=np.float32))
        kept = operand(array)
        array.stream = None
        choice, signature = communicator.allreduce_operands(kept, kept, ReduceOp.SUM)
        assert choice.algorithm == "staged"
        assert "sum in device memory, shape 11" in signature.text
        assert_equal(array.get(kept.stream), np.arange(11, dtype=np.float32) * 2)

    on_gpus(2, check, seed=seed)


def test_a_copy_that_fails_ends_the_communicator() -> None:
    """An error of the GPU in the middle of a call is raised there, and later calls do not begin."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        array = driver.put_late(np.ones(4, np.float32))
        driver.fail("copy")
        with pytest.raises(TransportError, match="told to fail"):
            communicator.allreduce(array, out=array)
        with pytest.raises(TransportError, match="out of step"):
            communicator.allreduce(array, out=array)

    on_gpus(2, check)


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array on a GPU and a machine without CuPy: the packages are named, and the ranks stay in step."""
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)

    def check(communicator: rr.Communicator) -> None:
        driver = HostDriver()
        with pytest.raises(UnsupportedBufferError, match=r"cupy-cuda12x\[ctk\].*cupy-cuda13x\[ctk\]"):
            communicator.allreduce(driver.put(np.ones(3)))
        assert communicator.allreduce(np.ones(3)).tolist() == [2, 2, 2]

    run_ranks(2, check)


def test_segments_are_cut_by_elements() -> None:
    """Every element is in one segment, in order; an empty array has one empty segment."""
    driver = HostDriver()
    staging = Staging(driver, Arena(PrivateSegments()))
    assert staging.segments(operand(driver.put(np.ones(0)))) == [slice(0, 0)]
    room = (4 << 20) // 8
    assert staging.segments(operand(HostArray(driver, 256, (room + 1,), np.float64))) == [
        slice(0, room),
        slice(room, room + 1),
    ]


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
