"""Figures against what the GPU itself can do, measured in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gpu.report import Check, allreduce_bound_s, staged_bound_s

from ringreduce.buffers import DTYPES
from ringreduce.buffers.cuda.arrays import DeviceOperand
from ringreduce.buffers.cuda.driver import Driver
from ringreduce.buffers.cuda.kernels import Packer, Slot
from ringreduce.cli import bench
from ringreduce.cli.places import OnDevice, Tools
from ringreduce.cli.results import Report, Result, Settings
from ringreduce.communicator import Communicator

LEADER_SHARE = 0.70
PACK_SHARE = 0.60
STAGED_SHARE = 0.70
OVER_GLOO = 10.0
LEADER_NBYTES = 256 << 20
STAGED_NBYTES = 64 << 20
NTENSORS = 200
_TIMED = 30
_PAGE = 4096


def check_packing(tools: Tools, smallest: int = 1 << 8, largest: int = 1 << 21) -> Iterator[Check]:
    """Pack tensors of mixed sizes into one buffer, and compare the time with that of plain copies.

    Args:
        tools: of the GPU.
        smallest: float32 elements of the smallest tensor.
        largest: of the largest; those between grow by a constant factor, and all are odd.
    """
    row, driver = DTYPES["float32"], tools.driver
    counts = [int(count) | 1 for count in np.geomspace(smallest, largest, NTENSORS)]
    total = sum(counts)
    values = np.random.default_rng(5).standard_normal(total).astype(np.float32)
    tensors = [tools.empty(4 * count) for count in counts]
    buffer, source, target = (tools.empty(4 * total) for _ in range(3))
    stream = _place(buffer).stream
    slots, begin = [], 0
    for tensor, count in zip(tensors, counts, strict=True):
        driver.copy(_place(tensor).address, values.ctypes.data + 4 * begin, 4 * count, stream)
        slots.append(Slot(_place(tensor).address, _place(buffer).address + 4 * begin, count))
        begin += count
    packer = Packer(driver, slots, row, row, stream)
    tools.ready()
    copied = _median(tools, lambda: driver.copy(_place(target).address, _place(source).address, 4 * total, stream))
    packed = _median(tools, lambda: packer.pack(stream))
    scaled = _median(tools, lambda: packer.pack(stream, 0.5))
    packer.pack(stream)
    got = np.zeros_like(values)
    driver.copy(got.ctypes.data, _place(buffer).address, got.nbytes, stream)
    tools.ready()
    packer.close()
    yield Check("packed tensors are what they were", bool(np.array_equal(got, values)), f"{total} elements")
    yield Check.stated("device copy bandwidth, read and write", 8 * total / copied / 1e9, "GB/s", f"{4 * total} bytes")
    how = f"{NTENSORS} float32 tensors of {counts[0]} to {counts[-1]}, {_us(packed)}; a copy of as much {_us(copied)}"
    yield Check.at_least("pack, share of the copy bandwidth", copied / packed, PACK_SHARE, "", how)
    yield Check.stated("pack and scale, share of the copy bandwidth", copied / scaled, "", _us(scaled))


def check_leader(world: Communicator, place: OnDevice, write: Callable[[str], None]) -> Iterator[Check]:
    """Measure the allreduce by a leader's kernel beside Gloo and MPI by hand, and the copy that bounds it. Collective.

    Args:
        world: the ranks, several on one GPU.
        place: their GPU.
        write: gets the table.
    """
    report = _bench(world, place, write, LEADER_NBYTES, "auto", shared=True)
    result, rate = report.rows[-1].in_place, _copy_rate(report, place)
    assert result is not None
    bound = allreduce_bound_s(LEADER_NBYTES, place.sharing, rate)
    label = f"allreduce of {LEADER_NBYTES >> 20} MiB float32, {world.size} ranks on one GPU"
    yield Check(f"{label}: results", report.nwrong == 0, f"{report.nwrong} wrong elements")
    yield Check(f"{label}: by kernels", result.algorithm == "kernels", place.describe() or "")
    yield Check.stated("device copy bandwidth, read and write, beside the allreduce", rate / 1e9, "GB/s")
    yield Check.stated(f"{label}: time", result.time.median / 1e3, "ms", f"bound {bound * 1e3:.3f} ms")
    share = bound / (result.time.median / 1e6)
    yield Check.at_least(f"{label}: share of 2 P n / copy bandwidth", share, LEADER_SHARE, "", place.describe() or "")
    yield from _compared(label, result)


def check_staged(world: Communicator, place: OnDevice, write: Callable[[str], None]) -> Iterator[Check]:
    """Measure the allreduce through host memory beside what the link to the GPU can do. Collective."""
    rate = float(world.broadcast(np.array([_link_rate(place) if world.rank == 0 else 0.0]))[0])
    algorithm = world.choose("allreduce", 4 << 20).algorithm
    report = _bench(world, place, write, STAGED_NBYTES, algorithm, shared=False)
    result = report.rows[-1].in_place
    assert result is not None
    bound = staged_bound_s(STAGED_NBYTES, place.sharing, rate)
    label = f"allreduce of {STAGED_NBYTES >> 20} MiB float32 through host memory, {world.size} ranks"
    yield Check(f"{label}: results", report.nwrong == 0, f"{report.nwrong} wrong elements")
    yield Check.stated("pinned copies, each way while both are under way", rate / 1e9, "GB/s")
    share = bound / (result.time.median / 1e6)
    how = f"{result.time.median / 1e3:.2f} ms, bound {bound * 1e3:.2f} ms, {algorithm} on the host"
    yield Check.at_least(f"{label}: share of the pinned copies' bound", share, STAGED_SHARE, "", how)
    yield from _compared(label, result, over_gloo=None)


def _bench(
    world: Communicator, place: OnDevice, write: Callable[[str], None], nbytes: int, algorithm: str, *, shared: bool
) -> Report:
    settings = Settings(
        "allreduce",
        min_nbytes=nbytes,
        max_nbytes=nbytes,
        iterations=10,
        warmup=1,
        algorithm=algorithm,
        shared_buffers=shared,
        peers=("mpi", "gloo"),
        device="cuda",
    )
    return bench.run(world, settings, write, place)


def _compared(label: str, result: Result, over_gloo: float | None = OVER_GLOO) -> Iterator[Check]:
    for peer, what in (("gloo", "torch's Gloo on CUDA tensors"), ("mpi", "MPI by hand through pinned memory")):
        speedup, time = result.speedup(peer), result.peers[peer]
        name = f"{label}: times as fast as {what}"
        if speedup is None or time is None:
            yield Check(name, peer != "gloo" or over_gloo is None, "could not do it, or got it wrong")
        elif peer == "gloo" and over_gloo is not None:
            yield Check.at_least(name, speedup, over_gloo, "x", f"{time.median / 1e3:.1f} ms")
        else:
            yield Check.stated(name, speedup, "x", f"{time.median / 1e3:.1f} ms")


def _copy_rate(report: Report, place: OnDevice) -> float:
    """Return the GPU's copy bandwidth in bytes per second, read and written; the bound is a copy for each rank."""
    bound = report.bounds[-1]
    return 2 * bound.nbytes * place.sharing / (bound.time_us / 1e6)


def _link_rate(place: OnDevice, nbytes: int = STAGED_NBYTES) -> float:
    """Return bytes per second between the GPU and pinned memory, each way, while both are under way. Local."""
    driver = place.driver
    streams = [driver.make_stream(), driver.make_stream()]
    memory = np.zeros(2 * nbytes + 2 * _PAGE, np.uint8)
    host = memory.ctypes.data + -memory.ctypes.data % _PAGE
    device = [_place(place.new(nbytes, np.dtype(np.uint8))).array for _ in range(2)]
    near = [_place(each).address for each in device]
    driver.register(host, 2 * nbytes)
    ways = ((host, near[0]), (near[1], host + nbytes))

    def both() -> None:
        for (target, source), stream in zip(ways, streams, strict=True):
            driver.copy(target, source, nbytes, stream)
        _wait(driver, streams)

    both()
    times = sorted(place.watch.time(both) for _ in range(7))
    driver.unregister(host)
    for stream in streams:
        driver.free_stream(stream)
    return nbytes / times[len(times) // 2]


def _wait(driver: Driver, streams: list[int]) -> None:
    for stream in streams:
        event = driver.make_event()
        driver.record(event, stream)
        driver.synchronize(event)
        driver.free_event(event)


def _median(tools: Tools, call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    tools.ready()
    return float(np.median([tools.time(call) for _ in range(_TIMED)]))


def _place(array: Any) -> DeviceOperand:
    operand = DeviceOperand.of(array)
    assert operand is not None
    return operand


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"
