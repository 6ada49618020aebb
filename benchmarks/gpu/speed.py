"""Figures against what the GPU itself can do, measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
from gpu.report import Check, allreduce_bound_s, ranks, staged_bound_s

from ringreduce.bench import bench
from ringreduce.bench.measure import Contender, time_in_turn
from ringreduce.bench.places import OnDevice, device_operand
from ringreduce.bench.results import Report, Result, Settings
from ringreduce.buffers import DTYPES
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.reduce_ops import MAX, ReduceOp
from ringreduce.gpu.kernels import Arithmetic, Table, combine

LEADER_SHARE = 0.70
STAGED_SHARE = 0.70
OVER_GLOO = 10.0
LEADER_NBYTES = 256 << 20
STAGED_NBYTES = 64 << 20
#: What staging takes through host memory at once.
SEGMENT_NBYTES = 4 << 20
_TURNS = 10
_PAGE = 4096


def check_one_kernel(
    world: Communicator, place: OnDevice, write: Callable[[str], None], nbytes: int = LEADER_NBYTES
) -> Iterator[Check]:
    """Measure the allreduce by one kernel per GPU beside Gloo and MPI by hand, and the copy that bounds it. Collective.

    Args:
        world: the ranks, several on one GPU.
        place: their GPU.
        write: gets the table.
        nbytes: of each rank's array.
    """
    alone = _bench(world, place, write, nbytes, "auto", shared=True, peers=())
    result, rate = alone.rows[-1].in_place, _copy_rate(alone, place)
    assert result is not None
    bound = allreduce_bound_s(nbytes, place.sharing, rate)
    label = f"allreduce of {nbytes >> 20} MiB float32, {ranks(world.size)} on one GPU"
    yield Check(f"{label}: results", alone.nwrong == 0, f"{alone.nwrong} wrong elements")
    yield Check(f"{label}: by kernels", result.algorithm == "kernels", place.describe() or "")
    yield Check.stated("device copy bandwidth, read and write, beside the allreduce", rate / 1e9, "GB/s")
    for what, seconds in zip(("events", "wall clock"), _kernel_alone(world, place, nbytes), strict=True):
        how = f"one process, {world.size} arrays; bound {bound * 1e3:.3f} ms"
        yield Check.stated(f"{label}: the kernel alone, {what}", seconds * 1e3, "ms", how)
    events, wall = _both_times(world, place, nbytes)
    # Events of one process may miss what other processes do; neither clock may flatter us.
    longest = max(result.time.median / 1e6, events, wall)
    how = f"bound {bound * 1e3:.3f} ms; events {events * 1e3:.3f} ms, wall clock {wall * 1e3:.3f} ms"
    yield Check.stated(f"{label}: time", longest * 1e3, "ms", how)
    share = bound / longest
    yield Check.at_least(f"{label}: share of 2 P n / copy bandwidth", share, LEADER_SHARE, "", place.describe() or "")
    report = _bench(world, place, write, nbytes, "auto", shared=True)
    beside = report.rows[-1].in_place
    assert beside is not None
    yield Check(f"{label}: results beside the others", report.nwrong == 0, f"{report.nwrong} wrong elements")
    yield from _compared(label, beside, "ours in ringreduce.empty's arrays, theirs in private ones")


def check_staged(
    world: Communicator,
    place: OnDevice,
    write: Callable[[str], None],
    nbytes: int = STAGED_NBYTES,
    segment_nbytes: int = SEGMENT_NBYTES,
) -> Iterator[Check]:
    """Measure the allreduce through host memory beside what the link to the GPU can do. Collective.

    Args:
        world: the ranks.
        place: their GPU.
        write: gets the table.
        nbytes: of each rank's array.
        segment_nbytes: of what is taken through host memory at once.
    """
    rate = float(world.broadcast(np.array([_link_rate(place, nbytes) if world.rank == 0 else 0.0]))[0])
    algorithm = world.choose("allreduce", segment_nbytes).algorithm
    alone = _bench(world, place, write, nbytes, algorithm, shared=False, peers=())
    result = alone.rows[-1].in_place
    assert result is not None
    bound = staged_bound_s(nbytes, place.sharing, rate)
    label = f"allreduce of {nbytes >> 20} MiB float32 through host memory, {ranks(world.size)}"
    yield Check(f"{label}: results", alone.nwrong == 0, f"{alone.nwrong} wrong elements")
    staged = result.transport == "staged" and result.algorithm != "kernels"
    yield Check(
        f"{label}: not by kernels", staged, f"{result.algorithm} over {result.transport}; {world.gpu.description}"
    )
    yield Check.stated("pinned copies, each way while both are under way", rate / 1e9, "GB/s")
    for each in (segment_nbytes, nbytes):
        times = _on_host(world, each, algorithm)
        name = f"allreduce of {each >> 20} MiB float32 on the host alone, {ranks(world.size)}"
        yield Check.stated(name, times * 1e3, "ms", f"{algorithm}, in shared memory")
    share = bound / (result.time.median / 1e6)
    how = f"{result.time.median / 1e3:.2f} ms, bound {bound * 1e3:.2f} ms, {algorithm} on the host"
    yield Check.at_least(f"{label}: share of the pinned copies' bound", share, STAGED_SHARE, "", how)
    report = _bench(world, place, write, nbytes, algorithm, shared=False)
    beside = report.rows[-1].in_place
    assert beside is not None
    yield Check(f"{label}: results beside the others", report.nwrong == 0, f"{report.nwrong} wrong elements")
    yield from _compared(label, beside, "all in private arrays", over_gloo=None)


def _bench(
    world: Communicator,
    place: OnDevice,
    write: Callable[[str], None],
    nbytes: int,
    algorithm: str,
    *,
    shared: bool,
    peers: tuple[str, ...] = ("mpi", "gloo"),
) -> Report:
    settings = Settings(
        "allreduce",
        min_nbytes=nbytes,
        max_nbytes=nbytes,
        iterations=10,
        warmup=1,
        algorithm=algorithm,
        shared_buffers=shared,
        peers=peers,
        device="cuda",
    )
    return bench.run(world, settings, write, place)


def _both_times(world: Communicator, place: OnDevice, nbytes: int) -> tuple[float, float]:
    """Return medians of the slowest rank's seconds of an allreduce: between events, and by the wall clock."""
    array = place.empty(nbytes, shared=True).view(np.float32)
    place.store(array, lambda values: values.fill(0))
    times = np.empty((2, _TURNS))
    for turn in range(-2, _TURNS):  # the first ones are not kept
        place.watch.ready()
        world.barrier()
        begin = time.perf_counter()
        events = place.watch.time(lambda: world.allreduce(array, out=array))
        times[:, turn] = events, time.perf_counter() - begin
    events, wall = np.median(world.allreduce(times, MAX), axis=1)
    return float(events), float(wall)


def _kernel_alone(world: Communicator, place: OnDevice, nbytes: int) -> tuple[float, float]:
    """Return what the kernel takes on arrays of its own process, the others idle: events, wall clock."""
    times = np.zeros(2)
    if world.rank == 0:
        driver, count = place.driver, nbytes // 4
        reduction = Arithmetic(DTYPES["float32"], ReduceOp.SUM, count)
        arrays = [place.new(count, np.dtype(np.float32)) for _ in range(world.size)]
        for array in arrays:
            place.store(array, lambda values: values.fill(0))
        stream = device_operand(arrays[0]).stream
        table = Table(driver, [device_operand(array).address for array in arrays], stream)
        taken = np.empty((2, _TURNS))
        for turn in range(-2, _TURNS):
            place.watch.ready()
            begin = time.perf_counter()
            events = place.watch.time(lambda: combine(driver, reduction, table, table, world.size, stream))
            taken[:, turn] = events, time.perf_counter() - begin
        table.close()
        times[:] = np.median(taken, axis=1)
    events, wall = world.broadcast(times)
    return float(events), float(wall)


def _on_host(world: Communicator, nbytes: int, algorithm: str) -> float:
    """Return the median seconds of an allreduce of arrays in host memory, those that staging passes through."""
    array = world.empty(nbytes // 4, np.float32)
    array.fill(0)
    call = Contender("ringreduce", array, lambda: world.allreduce(array, out=array, algorithm=algorithm))
    return float(np.median(time_in_turn(world, [call], _TURNS, 2)[0]))


def _compared(label: str, result: Result, where: str, over_gloo: float | None = OVER_GLOO) -> Iterator[Check]:
    for peer, what in (("gloo", "torch's Gloo on CUDA tensors"), ("mpi", "MPI by hand through pinned memory")):
        speedup, taken = result.speedup(peer), result.peers[peer]
        name = f"{label}: times as fast as {what}"
        if speedup is None or taken is None:
            yield Check(name, peer != "gloo" or over_gloo is None, "could not do it, or got it wrong")
        elif peer == "gloo" and over_gloo is not None:
            yield Check.at_least(name, speedup, over_gloo, "x", f"{taken.median / 1e3:.1f} ms; {where}")
        else:
            yield Check.stated(name, speedup, "x", f"{taken.median / 1e3:.1f} ms; {where}")


def _copy_rate(report: Report, place: OnDevice) -> float:
    """Return the GPU's copy bandwidth in bytes per second, read and written; the bound is a copy for each rank."""
    bound = report.bounds[-1]
    return 2 * bound.nbytes * place.sharing / (bound.time_us / 1e6)


def _link_rate(place: OnDevice, nbytes: int) -> float:
    """Return bytes per second between the GPU and pinned memory, each way, while both are under way. Local."""
    driver = place.driver
    streams = [driver.make_stream(), driver.make_stream()]
    memory = np.zeros(2 * nbytes + 2 * _PAGE, np.uint8)
    host = memory.ctypes.data + -memory.ctypes.data % _PAGE
    device = [place.new(nbytes, np.dtype(np.uint8)) for _ in range(2)]
    near = [device_operand(each).address for each in device]
    driver.register(host, 2 * nbytes)
    copies = ((host, near[0]), (near[1], host + nbytes))

    def both() -> None:
        for (target, source), stream in zip(copies, streams, strict=True):
            driver.copy(target, source, nbytes, stream)
        for stream in streams:
            place.wait(stream)

    both()
    times = sorted(place.watch.time(both) for _ in range(7))
    driver.unregister(host)
    for stream in streams:
        driver.free_stream(stream)
    return nbytes / times[len(times) // 2]
