"""The allreduce of device memory: right under every order that a GPU may take, and given up by all ranks together."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gpu_doubles.driver import HostArray, HostDriver, HostMachine
from gpu_doubles.ranks import run_gpu_ranks

import ringreduce as rr
from ringreduce.buffers import DTYPES, DType
from ringreduce.collectives import Context, Signature
from ringreduce.collectives.context import Cache
from ringreduce.common.config import Config
from ringreduce.common.errors import CollectiveTimeoutError, MismatchError, TransportError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.ipc import DeviceBlock, DeviceNode, join_devices
from ringreduce.gpu.kernels import Arithmetic
from ringreduce.gpu.peer_path import DeviceAllreduce, _Shots
from ringreduce.testing import assert_close, caught, expected, run_threads, sample
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.shared.node import join
from ringreduce.transport.waiting import Waiter

CONFIG = Config(timeout_s=20.0)
#: Ranks on GPUs: one GPU for all, GPUs with several ranks each, a GPU for each rank.
ONE_GPU, SOME_GPUS, OWN_GPUS = (0, 0, 0), (0, 1, 0, 1), (0, 1, 2)
LAYOUTS = [(0,), (0, 0), ONE_GPU, (0, 0, 0, 0), (0, 1), OWN_GPUS, SOME_GPUS, (0, 0, 1), (3, 2, 1, 0)]

Array = npt.NDArray[Any]


@dataclass
class Rank:
    """What a test has on each rank."""

    rank: int
    size: int
    driver: HostDriver
    devices: DeviceNode
    context: Context
    allreduce: DeviceAllreduce

    def located(self, values: Array, shift: int = 0) -> tuple[HostArray, DeviceBlock]:
        """Return an array in the arena with these values, and what keeps its memory."""
        block = self.devices.arena.allocate(values.nbytes + shift)
        self.devices.write(block.address + shift, values.tobytes())
        return HostArray(self.driver, block.address + shift, values.shape, values.dtype), block

    def run(self, source: HostArray, target: HostArray, op: ReduceOp = ReduceOp.SUM, stream: int = 0) -> bool:
        """Reduce one array into another."""
        dtype = DType.of(source.dtype)
        signature = Signature.of(f"allreduce of {source.size} {dtype.name}, {op.value}")
        return self.allreduce.run(source.address, target.address, Arithmetic(dtype, op, source.size), stream, signature)


def on_ranks(
    gpus: Sequence[int],
    function: Callable[[Rank], Any],
    *,
    seed: int = 0,
    prepare: Callable[[list[HostDriver]], object] = lambda drivers: None,
) -> list[Any]:
    """Call ``function`` on ranks that have their drivers on these GPUs of one machine, which is clean afterwards."""
    machine = HostMachine(seed)
    drivers = [machine.driver(gpu) for gpu in gpus]
    prepare(drivers)
    world = MemoryWorld(len(gpus), CONFIG.timeout_s)

    def run(rank: int) -> Any:
        messages, waiter = world.messages(rank), Waiter(CONFIG.timeout_s, crowded=True)
        node = join(messages, waiter, CONFIG, "machine", lambda pids: world.segments_of(rank))
        waiter.crowded = True
        context = Context(messages, waiter, node, CONFIG)
        devices = join_devices(messages, node, lambda: drivers[rank])
        assert devices is not None
        made = Rank(rank, len(gpus), drivers[rank], devices, context, DeviceAllreduce(context, devices))
        result = function(made)
        made.allreduce.close()
        devices.close(waiter)
        return result

    results = run_threads(len(gpus), run, on_error=world.meeting.abort)
    assert [left for left in machine.leftovers() if not re.fullmatch(r"rank \d:m\d+", left)] == []  # but the arrays
    return results


def ops_of(dtype: str) -> list[ReduceOp]:
    """Return the operations that devices offer for a dtype."""
    averaged = DTYPES[dtype].kind in ("float", "complex")
    return [op for op in ReduceOp if averaged or op is not ReduceOp.AVERAGE]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gpus", [ONE_GPU, SOME_GPUS, OWN_GPUS])
def test_every_dtype_and_op(gpus: tuple[int, ...], dtype: str):
    """Results are those of NumPy, the same bits on all ranks, for arrays in the arena and elsewhere."""

    def function(rank: Rank) -> None:
        stream = rank.driver.make_stream()
        for op in ops_of(dtype):
            arrays = [sample(each, 37, dtype) for each in range(rank.size)]
            private = rank.driver.put(arrays[rank.rank], stream)
            located, _block = rank.located(arrays[rank.rank])
            assert rank.run(private, private, op, stream)
            assert rank.run(located, located, op, stream)
            for array in (private, located):
                assert_close(array.get(stream), expected(arrays, op))
        rank.driver.free_stream(stream)

    on_ranks(gpus, function)


@pytest.mark.parametrize("gpus", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 2, 127, 129, 1023, 500_003])
def test_every_count_on_every_layout(gpus: tuple[int, ...], count: int):
    """Any number of elements on any number of ranks, however these share GPUs; some in the arena, some not."""
    arrays = [sample(each, count, "float32", salt=count) for each in range(len(gpus))]

    def function(rank: Rank) -> HostArray:
        if rank.rank % 2:
            array: HostArray = rank.driver.put(arrays[rank.rank], 0, shift=4)
        else:
            array, _block = rank.located(arrays[rank.rank], shift=8)
        assert rank.run(array, array)
        assert_close(array.get(0), expected(arrays, ReduceOp.SUM))
        return array

    on_ranks(gpus, function)


@pytest.mark.parametrize("gpus", [ONE_GPU, OWN_GPUS])
@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_streams(gpus: tuple[int, ...], seed: int):
    """Inputs that are written late, calls on several streams, results that are read at once on theirs: all right."""
    count = 400_001 if seed % 2 else 1001  # kernels that meet: a two-shot, a one-shot

    def function(rank: Rank) -> None:
        streams = [rank.driver.make_stream() for _ in range(2)]
        shared, _block = rank.located(np.zeros(count, np.float32))
        sources, targets, wanted = [], [], []
        for turn in range(4):
            arrays = [sample(each, count, "float32", salt=turn) for each in range(rank.size)]
            stream = streams[(turn + rank.rank) % 2]
            sources.append(rank.driver.put(arrays[rank.rank], stream))
            targets.append(rank.driver.put(np.zeros(count, np.float32)))
            wanted.append(expected(arrays, ReduceOp.SUM))
            if turn % 2:
                assert rank.run(sources[-1], targets[-1], stream=stream)
            else:
                assert rank.run(sources[-1], shared, stream=stream)
                rank.driver.copy(targets[-1].address, shared.address, shared.nbytes, stream)
        for turn, (target, values) in enumerate(zip(targets, wanted, strict=True)):
            stream = streams[(turn + rank.rank) % 2]
            assert_close(target.get(stream), values)
            assert np.array_equal(sources[turn].get(stream), sample(rank.rank, count, "float32", salt=turn))
        for stream in streams:
            rank.driver.free_stream(stream)

    on_ranks(gpus, function, seed=seed)


def log_of_a_call(gpus: tuple[int, ...], private: bool, count: int = 5) -> list[list[str]]:
    """Return what a second call, with everything looked up, asks of each rank's driver."""

    def function(rank: Rank) -> list[str]:
        array, _block = rank.located(np.ones(count, np.float32))
        if private:
            array = rank.driver.put(np.ones(count, np.float32))
        assert rank.run(array, array)
        begin = len(rank.driver.log)
        assert rank.run(array, array)
        return rank.driver.log[begin:]

    return on_ranks(gpus, function)


def test_what_a_call_enqueues_on_one_gpu():
    """One rank waits for its peer, launches once and tells it; the peer waits for that. The host waits for nobody."""
    assert log_of_a_call((0, 0), private=False) == [
        [
            "s0 waits for e6",
            "record e2 on s0",
            "s0 waits for rank 1:e2",
            "launch reduce combine<float32,sum> on s0",
            "record e3 on s0",
            "record e6 on s0",
        ],
        ["s0 waits for e6", "record e2 on s0", "s0 waits for rank 0:e3", "record e6 on s0"],
    ]


def test_what_a_call_enqueues_for_private_arrays():
    """They are copied into a block of the arena first, and back last, on the same stream."""
    launching, follower = log_of_a_call((0, 0), private=True)
    copied_in = ["s0 waits for e6", "copy 20 m2 -> m3 on s0", "record e2 on s0"]
    copied_back = ["copy 20 m3 -> m2 on s0", "record e6 on s0"]
    launched = ["s0 waits for rank 1:e2", "launch reduce combine<float32,sum> on s0", "record e3 on s0"]
    assert launching == [*copied_in, *launched, *copied_back]
    assert follower == [*copied_in, "s0 waits for rank 0:e3", *copied_back]


def test_what_a_call_enqueues_on_own_gpus():
    """One kernel on each rank and no events between ranks; a large array takes the two-shot, in place."""
    for log in log_of_a_call((0, 1), private=False):
        assert log == ["s0 waits for e6", "launch shots one_shot<float32,sum> on s0", "record e6 on s0"]
    for log in log_of_a_call((0, 1), private=False, count=300_001):
        assert log == [
            "s0 waits for e6",
            "launch shots two_shot<float32,sum> on s0",
            "record e7 on s0",
            "record e6 on s0",
        ]


def test_small_private_arrays_are_not_copied_on_own_gpus():
    """The one-shot takes arrays wherever they lie."""
    for log in log_of_a_call((0, 1), private=True):
        assert log == ["s0 waits for e6", "launch shots one_shot<float32,sum> on s0", "record e6 on s0"]


def test_sums_do_not_depend_on_the_way():
    """One GPU or several, in the arena or not: elements are added in rank order, so bits are the same."""
    arrays = [np.random.default_rng(each).normal(size=300_007).astype(np.float32) for each in range(4)]

    def function(rank: Rank) -> bytes:
        array = rank.driver.put(arrays[rank.rank])
        assert rank.run(array, array)
        return bytes(array.get(0).tobytes())

    assert len({bits for gpus in ((0, 0, 0, 0), SOME_GPUS, (0, 1, 2, 3)) for bits in on_ranks(gpus, function)}) == 1


def test_what_is_not_offered():
    """Averages of integers and bools are made elsewhere: they need a wider type."""

    def function(rank: Rank) -> list[str]:
        return [row.name for row in DTYPES.values() if not rank.allreduce.supports(row, ReduceOp.AVERAGE)]

    (names,) = on_ranks((0,), function)
    assert set(names) == {name for name, row in DTYPES.items() if row.kind in ("int", "uint", "bool")}


@pytest.mark.parametrize(
    ("gpus", "description"),
    [
        (ONE_GPU, "one kernel per GPU, over the memory of 3 ranks on 1 GPU"),
        (SOME_GPUS, "one kernel per GPU, over the memory of 4 ranks on 2 GPUs"),
        (OWN_GPUS, "kernels that meet, over the memory of 3 ranks on 3 GPUs"),
    ],
)
def test_the_way_has_a_description(gpus: tuple[int, ...], description: str):
    """A sentence says how it is done."""
    assert set(on_ranks(gpus, lambda rank: rank.allreduce.description)) == {description}


def test_ranks_of_several_nodes_share_memory_within_each():
    """Every node has ranks that launch."""
    config, machines = replace(CONFIG, node_size=2), [HostMachine(), HostMachine()]
    drivers = [machine.driver() for machine in machines for _ in range(2)]
    world = MemoryWorld(4, CONFIG.timeout_s)

    def run(rank: int) -> tuple[int, ...]:
        messages, waiter = world.messages(rank), Waiter(CONFIG.timeout_s, crowded=True)
        node = join(messages, waiter, config, "machine", lambda pids: world.segments_of(rank))
        devices = join_devices(messages, node, lambda: drivers[rank])
        assert devices is not None
        return devices.launching

    assert run_threads(4, run, on_error=world.meeting.abort) == [(0,)] * 2 + [(2,)] * 2


def test_several_nodes_are_left_to_others():
    """An allreduce over nodes takes another path, on all ranks."""

    def function(communicator: rr.Communicator, driver: HostDriver) -> bool:
        communicator.gpu.use(None)
        return communicator.gpu.kernels is None

    assert run_gpu_ranks(4, function, node_size=2, config=CONFIG) == [True] * 4


def test_mismatched_calls_are_noticed():
    """Ranks that call different things get a `MismatchError`, before any kernel runs; so does one with a host array."""

    def function(rank: Rank) -> list[str]:
        array = rank.driver.put(np.ones(3 + rank.rank, np.float32))
        first = caught(rank.run, array, array)
        same = rank.driver.put(np.ones(3, np.float32))
        if rank.rank == 1:
            signature = Signature.of("allreduce of 3 float32, sum")
            second = caught(rank.context.board.arrive, signature.arrival)
        else:
            second = caught(rank.run, same, same)
        assert rank.run(same, same)
        assert same.get(0).tolist() == [3.0] * 3
        assert isinstance(first, MismatchError)
        assert isinstance(second, MismatchError)
        return [first.values[1], second.values[1]]

    assert on_ranks(ONE_GPU, function) == [["allreduce of 4 float32, sum on GPUs", "allreduce of 3 float32, sum"]] * 3


@pytest.mark.parametrize(("gpus", "failing"), [(ONE_GPU, 0), (SOME_GPUS, 1), (OWN_GPUS, 2)])
def test_a_segment_that_cannot_be_opened_is_given_up_by_all(
    gpus: tuple[int, ...], failing: int, caplog: pytest.LogCaptureFixture
):
    """A rank that does not reach a peer's new segment: all go another way, with their arrays as they were."""

    def function(rank: Rank) -> None:
        values = np.full(1 << 20, rank.rank, np.float32)
        _hold = rank.devices.arena.allocate(5 << 20)  # leaves less than that in the arena's first segment
        array, _block = rank.located(values)
        if rank.rank == failing:
            rank.driver.fail("open")
        assert rank.allreduce.supports(DTYPES["float32"], ReduceOp.SUM)
        assert not rank.run(array, array)
        assert not rank.allreduce.supports(DTYPES["float32"], ReduceOp.SUM)
        assert np.array_equal(array.get(0), values)

    on_ranks(gpus, function)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    reason = f"rank {failing}: rank {failing} was told to fail to open"
    assert record.getMessage() == f"arrays on GPUs go through host memory from now on: {reason}"


def test_memory_that_a_rank_lacks_is_no_error(caplog: pytest.LogCaptureFixture):
    """A private array for which one rank has no block: this call goes another way, later ones need not."""

    def function(rank: Rank) -> None:
        large, small = (rank.driver.put(np.ones(count, np.float32)) for count in (5 << 20, 9))
        rank.devices.arena.allocate(20 << 20)  # and given back: less than a block for the large array
        if rank.rank == 1:
            rank.driver.fail("allocate")
        assert not rank.run(large, large)
        assert rank.run(small, small)
        assert small.get(0).tolist() == [3.0] * 9
        assert large.get(0)[-1] == 1.0

    on_ranks(ONE_GPU, function)
    (record,) = caplog.records
    assert "rank 1 has no device memory left for allreduce of 5242880 float32" in record.getMessage()


def test_a_device_that_fails_fails_the_call_on_all_ranks():
    """A kernel that cannot be launched is an error everywhere, which names the rank."""

    def function(rank: Rank) -> str:
        array = rank.driver.put(np.ones(3, np.float32))
        if rank.rank == 0:
            rank.driver.fail("launch")
        error = caught(rank.run, array, array)
        assert isinstance(error, TransportError)
        return str(error)

    assert on_ranks(ONE_GPU, function) == ["the device of rank 0 failed in allreduce of 3 float32, sum on GPUs"] * 3


def refuse_to_pin(driver: HostDriver) -> None:
    """Let the error word find no pinned memory."""
    driver.fail("register")


def age(driver: HostDriver) -> None:
    """Make the GPU one of before Volta."""
    driver._device = replace(driver.device, capability=61)


def shrink(driver: HostDriver) -> None:
    """Make the GPU so small that not all blocks of kernels that meet run at once."""
    driver._device = replace(driver.device, multiprocessors=31)


@pytest.mark.parametrize("change", [refuse_to_pin, age, shrink])
def test_without_kernels_that_meet_there_is_one_per_gpu(change: Callable[[HostDriver], None]):
    """Where one of several GPUs cannot run kernels that meet, all ranks do without."""

    def function(rank: Rank) -> str:
        array = rank.driver.put(np.ones(3, np.float32))
        assert rank.run(array, array)
        assert array.get(0).tolist() == [3.0] * 3
        return rank.allreduce.description

    found = on_ranks(OWN_GPUS, function, prepare=lambda drivers: change(drivers[1]))
    assert set(found) == {"one kernel per GPU, over the memory of 3 ranks on 3 GPUs"}


def test_a_kernel_that_gave_up_waiting_is_an_error_later():
    """What a kernel wrote into the error word is raised by the next call, and names the peer."""

    def function(rank: Rank) -> str:
        array = rank.driver.put(np.ones(3, np.float32))
        assert rank.run(array, array)
        shots = rank.allreduce._shots
        assert shots is not None
        rank.driver.synchronize(rank.allreduce._done)  # a kernel that still runs would give up at what is written now
        rank.driver.view(shots.peers.error, 4)[0] = 1 + 2
        error = caught(rank.run, array, array)
        assert isinstance(error, CollectiveTimeoutError)
        return str(error)

    for text in on_ranks(OWN_GPUS, function):
        assert "a kernel waited 20 s for that of rank 2" in text


@pytest.mark.parametrize("gpus", [(0, 0), (0, 1)])
def test_memory_of_plans_that_are_dropped_waits_for_their_kernels(
    gpus: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    """More calls than plans are kept, none of them awaited: no kernel finds a table that is another's by now."""
    monkeypatch.setattr(_Shots, "takes", lambda shots, nbytes: False)

    def function(rank: Rank) -> None:
        stream = rank.driver.make_stream()
        rank.allreduce._plans = Cache(limit=2)
        made = [rank.located(np.full(count, count, np.float32)) for count in range(1, 20)]
        for array, _ in made:
            assert rank.run(array, array, stream=stream)
        for array, _ in made:
            assert array.get(stream).tolist() == [2.0 * array.size] * array.size
        rank.driver.free_stream(stream)

    on_ranks(gpus, function)


@pytest.mark.parametrize("seed", range(4))
def test_a_block_that_is_outgrown_waits_for_its_use(seed: int):
    """A larger private array comes while the block of the last one is in use: what is made of its memory waits."""

    def function(rank: Rank) -> None:
        stream = rank.driver.make_stream()
        arrays = [rank.driver.put(np.ones(count, np.float32), stream) for count in (1000, 5 << 20)]
        for array in arrays:
            assert rank.run(array, array, stream=stream)
        for array in arrays:
            assert np.array_equal(array.get(stream), np.full(array.size, 2.0, np.float32))
        rank.driver.free_stream(stream)

    on_ranks((0, 0), function, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_closing_waits_for_what_is_under_way(seed: int):
    """Memory that the arena has back after the end of the allreduce is no longer used by it."""

    def function(rank: Rank) -> None:
        array = rank.driver.put(np.ones(1000, np.float32), 0)
        assert rank.run(array, array)
        rank.context.meet(Signature.of("barrier"))
        other = DeviceAllreduce(rank.context, rank.devices)
        rank.allreduce.close()
        rank.allreduce = other
        block = rank.devices.arena.allocate(16 << 20)
        rank.devices.write(block.address, bytes(1 << 20))
        assert array.get(0).tolist() == [2.0] * 1000

    on_ranks((0, 0), function, seed=seed)


@pytest.mark.parametrize("gpus", [ONE_GPU, SOME_GPUS, OWN_GPUS])
@pytest.mark.parametrize("seed", range(12))
def test_memory_goes_while_work_on_it_is_under_way(gpus: tuple[int, ...], seed: int):
    """Python may let go of an array as soon as what reads it is enqueued; what comes to lie there waits for that."""

    def function(rank: Rank) -> list[float]:
        stream = rank.driver.make_stream()
        array, block = rank.located(np.full(300_000, rank.rank + 1.0, np.float32))
        copy = rank.driver.put(np.zeros(300_000, np.float32))
        assert rank.run(array, array, stream=stream)
        rank.driver.copy(copy.address, array.address, array.nbytes, stream)
        del array, block
        other = rank.driver.put(np.ones(400_000, np.float32), stream)
        assert rank.run(other, other, stream=stream)  # of another length: a plan, whose table takes memory
        _, _block = rank.located(np.zeros(300_000, np.float32))
        found = np.unique(copy.get(stream)).tolist()
        rank.driver.free_stream(stream)
        return found

    assert on_ranks(gpus, function, seed=seed) == [[sum(range(1, len(gpus) + 1))]] * len(gpus)


@pytest.mark.parametrize("error", [MemoryError, TransportError])
def test_no_failure_of_a_launch_leaves_the_others_waiting(error: type[Exception]):
    """Whatever a launch raises, all ranks hear of it at once."""

    def function(rank: Rank) -> Exception | None:
        array = rank.driver.put(np.ones(3, np.float32))
        if rank.rank == 0:
            rank.driver.fail("launch", error=error)
        return caught(rank.run, array, array)

    for failed in on_ranks(ONE_GPU, function):
        assert isinstance(failed, TransportError)
        assert "the device of rank 0 failed" in str(failed)
