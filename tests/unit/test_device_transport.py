"""Device memory of a node: ranks find each other's, or all of them do without; and all of it is given back."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from gpu_doubles.driver import HostDriver, HostMachine

from ringreduce.buffers.device_driver import Driver
from ringreduce.common.config import Config
from ringreduce.common.errors import TransportError, UnsupportedBufferError
from ringreduce.gpu.ipc import DeviceArena, DeviceNode, join_devices
from ringreduce.testing import run_threads
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.messages import Messages
from ringreduce.transport.shared.arena import Arena, Location
from ringreduce.transport.shared.node import join
from ringreduce.transport.shared.segments import PrivateSegments
from ringreduce.transport.waiting import Waiter

CONFIG = Config(timeout_s=20.0)
LARGE = 65 << 20  # more than a segment of the arena

Found = Callable[[int], Driver]


def on_ranks(
    find: Found | Sequence[HostDriver], size: int, then: Callable[[DeviceNode | None, Messages, Waiter], Any]
) -> list[Any]:
    """Let ranks join that find their drivers like this, and go on with what they share."""
    world = MemoryWorld(size, CONFIG.timeout_s)
    find_driver = find if callable(find) else lambda rank: find[rank]

    def run(rank: int) -> Any:
        messages, waiter = world.messages(rank), Waiter(CONFIG.timeout_s, crowded=True)
        node = join(messages, waiter, CONFIG, "machine", lambda pids: world.segments_of(rank))
        return then(join_devices(messages, node, lambda: find_driver(rank)), messages, waiter)

    return run_threads(size, run, on_error=world.meeting.abort)


def drivers_on(gpus: Sequence[int], seed: int = 0) -> list[HostDriver]:
    """Return the drivers of ranks on one machine, each on a GPU."""
    machine = HostMachine(seed)
    return [machine.driver(gpu) for gpu in gpus]


@pytest.mark.parametrize("gpus", [(0,), (0, 0, 0), (0, 1, 2)])
def test_ranks_reach_each_others_memory(gpus: tuple[int, ...], caplog: pytest.LogCaptureFixture):
    """A block is found at its location by every peer, in segments that came later too, and nothing is left behind."""
    drivers = drivers_on(gpus)

    def then(devices: DeviceNode | None, messages: Messages, waiter: Waiter) -> set[bytes]:
        assert devices is not None
        rank, found = messages.rank, set()
        blocks = [devices.arena.allocate(nbytes) for nbytes in (3, LARGE, 5)]
        for block in blocks:
            devices.write(block.address, bytes([rank + 1] * 3))
        for peer, packed in enumerate(messages.exchange(b" ".join(b"%d" % b.location.packed for b in blocks))):
            if peer != rank:
                for place in packed.split():
                    location = Location.unpack(int(place))
                    found.add(devices.read(devices.arena.peer_address(peer, location), 3))
        messages.exchange(b"")
        del block
        blocks.clear()
        devices.close(waiter)
        return found

    for rank, found in enumerate(on_ranks(drivers, len(gpus), then)):
        assert found == {bytes([peer + 1] * 3) for peer in range(len(gpus)) if peer != rank}
    assert drivers[0].machine.leftovers() == []
    assert caplog.records == []


def test_what_is_asked_of_a_driver():
    """Two ranks: one allocation and two events each, the peer's opened once, all given back in order."""
    drivers = drivers_on((0, 0))

    def then(devices: DeviceNode | None, messages: Messages, waiter: Waiter) -> None:
        assert devices is not None
        for _ in range(3):
            devices.arena.peer_address(1 - messages.rank, Location(1, 8))
        devices.close(waiter)

    on_ranks(drivers, 2, then)
    assert drivers[0].log == [
        "make s1",
        "make e1",
        "make shared e2",
        "make shared e3",
        "export e2",
        "export e3",
        f"allocate m1 {8 << 20}",
        "export m1",
        "copy 32 host -> m1 on s1",
        "record e1 on s1",
        "synchronize e1",
        "open rank 1:m1",
        "copy 32 rank 1:m1 -> host on s1",
        "record e1 on s1",
        "synchronize e1",
        "open rank 1:e2",
        "open rank 1:e3",
        "free rank 1:e2",
        "free rank 1:e3",
        "close rank 1:m1",
        "free e2",
        "free e3",
        "free e1",
        "free s1",
        "free m1",
    ]


@pytest.mark.parametrize(("gpus", "launching"), [((0, 0, 0), (0,)), ((0, 1, 2), (0, 1, 2)), ((1, 0, 1, 0), (0, 1))])
def test_one_rank_launches_on_every_gpu(gpus: tuple[int, ...], launching: tuple[int, ...]):
    """Ranks that share a GPU know that from its name, and its lowest rank leads."""
    found = on_ranks(drivers_on(gpus), len(gpus), lambda devices, *_: devices and devices.launching)
    assert found == [launching] * len(gpus)


FAULTS = ("make_stream", "make_event", "export_event", "allocate", "export", "open", "open_event", "copy")


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("method", FAULTS)
def test_a_failure_on_one_rank_ends_the_attempt_on_all(method: str, after: int, caplog: pytest.LogCaptureFixture):
    """Whatever fails: no rank shares device memory, one line in the log says why, and all is given back."""
    drivers = drivers_on((0, 0, 1))
    drivers[1].fail(method, after=after)
    found = on_ranks(drivers, 3, lambda devices, *_: devices)
    if (method, after) in (("make_stream", 1), ("allocate", 1), ("export", 1)):
        assert None not in found  # each is needed but once
        return
    assert found == [None] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"rank 1: rank 1 was told to fail to {method}" in record.getMessage()
    assert drivers[0].machine.leftovers() == []


class Elsewhere(HostDriver):
    """What it opens is memory of its own."""

    def open(self, handle: bytes) -> int:
        super().open(handle)
        return self.allocate(8 << 20)


def test_other_memory_is_not_taken_for_a_peers(caplog: pytest.LogCaptureFixture):
    """A rank that opens something, but not what its peer made, finds that out before anything is written there."""
    machine = HostMachine()
    drivers = [machine.driver(), Elsewhere(machine)]
    with pytest.raises(AssertionError, match="not open"):  # the double does not let this driver close what it opened
        on_ranks(drivers, 2, lambda devices, *_: devices)
    drivers = [machine.driver(), Elsewhere(machine)]
    drivers[1].close = lambda address: None  # type: ignore[method-assign]
    drivers[0].free = lambda address: None  # type: ignore[method-assign]
    assert on_ranks(drivers, 2, lambda devices, *_: devices) == [None, None]
    assert "rank 1: it finds other device memory in place of rank 0's" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("without", [{1}, {0, 1, 2}])
def test_without_gpus_nothing_is_tried(without: set[int], caplog: pytest.LogCaptureFixture):
    """Ranks without a GPU are a line in the log if others have one, and nothing to speak of if none has."""
    drivers = drivers_on((0, 0, 0))

    def find(rank: int) -> Driver:
        if rank in without:
            raise UnsupportedBufferError("CuPy is not installed")
        return drivers[rank]

    assert on_ranks(find, 3, lambda devices, *_: devices) == [None] * 3
    lines = [record.getMessage() for record in caplog.records]
    assert ["rank 1: CuPy is not installed" in line for line in lines] == [True] * (len(without) == 1)
    assert all(driver.log == [] for driver in drivers)


def test_memory_that_a_peer_has_open_is_not_freed():
    """A rank that does not close keeps its peers from freeing what it may use, and from waiting for long."""
    drivers = drivers_on((0, 0))

    def then(devices: DeviceNode | None, messages: Messages, waiter: Waiter) -> None:
        assert devices is not None
        if messages.rank == 0:
            devices.close(Waiter(0.01, crowded=True))
        messages.exchange(b"")

    on_ranks(drivers, 2, then)
    assert "close rank 1:m1" in drivers[0].log
    assert "free m1" not in drivers[0].log


def alone() -> tuple[HostDriver, DeviceArena]:
    """Return the arena of a rank that has no peers."""
    driver = HostDriver()
    return driver, DeviceArena(driver, Arena(PrivateSegments()))


def test_blocks_are_used_again():
    """A block that is gone makes room for the next one; one in use does not, and outlives the arena."""
    driver, arena = alone()
    first, second = arena.allocate(100), arena.allocate(100)
    address = first.address
    del first
    gc.collect()
    assert arena.allocate(50).address == address
    assert second.address not in (address, address + 100)
    arena.segments.close_opened()
    arena.free()
    driver.view(second.address, 100)


def test_addresses_are_located():
    """An address in the arena has a location; others, and what reaches over the end, have none."""
    driver, arena = alone()
    block, other = arena.allocate(100), driver.allocate(100)
    assert (block.address % 256, block.nbytes) == (0, 100)
    assert arena.locate(block.address, 100) == block.location
    assert arena.locate(block.address + 7, 1) == Location(block.location.segment, block.location.offset + 7)
    assert arena.locate(other, 100) is None
    assert arena.locate(block.address, LARGE) is None


def test_nothing_is_kept_of_memory_that_cannot_be_exported():
    """Memory is no use to the arena if peers cannot open it."""
    driver, arena = alone()
    driver.fail("export")
    with pytest.raises(TransportError, match="told to fail to export"):
        arena.allocate(1)
    assert driver.machine.leftovers() == []


def test_the_device_has_no_more_memory():
    """Lack of memory is a `MemoryError`, and a later block may still be had."""
    driver = HostDriver(HostMachine(nbytes=100 << 20))
    arena = DeviceArena(driver, Arena(PrivateSegments()))
    with pytest.raises(MemoryError):
        arena.allocate(200 << 20)
    assert np.all(driver.view(arena.allocate(8).address, 8) == 0xFF)


@pytest.mark.parametrize("seed", range(20))
def test_a_block_is_used_again_when_the_device_is_done_with_it(seed: int):
    """What was enqueued before a block went is done before the next owner has it, whatever stream it is on."""
    driver = HostDriver(HostMachine(seed))
    arena = DeviceArena(driver, Arena(PrivateSegments()))
    stream, block = driver.make_stream(), arena.allocate(4096)
    address, late = block.address, driver.put(np.full(4096, 7, np.uint8), driver.make_stream())
    driver.copy(address, late.address, 4096, stream)
    del block
    gc.collect()
    again = arena.allocate(4096)
    assert again.address == address
    assert driver.machine.pending(driver) == []
    assert driver.log.count("synchronize the device") == 1
    arena.allocate(4096)
    assert driver.log.count("synchronize the device") == 1  # nothing came back since


def test_segments_begin_small():
    """A process set that shares little takes little of the GPU; one that shares much has few segments to open."""
    driver, arena = alone()
    blocks = [arena.allocate(1 << 20) for _ in range(100)]
    taken = [int(line.split()[-1]) >> 20 for line in driver.log if line.startswith("allocate")]
    assert taken == [8, 16, 32, 64]
    assert len(blocks) == 100


@pytest.mark.parametrize("method", ["close", "free_event"])
def test_a_failure_while_an_attempt_ends_leaves_nobody_waiting(method: str, caplog: pytest.LogCaptureFixture):
    """A rank that cannot even let go: all ranks do without device memory, and what it has open is not freed."""
    drivers = drivers_on((0, 0, 1))
    drivers[2].fail("open_event", after=1)
    drivers[1].fail(method)
    assert on_ranks(drivers, 3, lambda devices, *_: devices) == [None] * 3
    (record,) = caplog.records
    assert "rank 2 was told to fail to open_event" in record.getMessage()
    assert not [line for driver in drivers for line in driver.log if line.startswith("free m")]
