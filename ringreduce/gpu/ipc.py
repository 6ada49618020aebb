"""Device memory that the ranks of a node share, and the events by which they order their work on it.

A rank's exported memory is handed out by an `Arena` like that of host memory, in segments that are one allocation of
the driver each. What names a segment to the peers is a handle, and the handles stand in a directory in shared host
memory:

    entry 0      1 once this rank has closed all that it opened
    entry 1 ...  of each segment: bytes of its handle, bytes of the segment, the handle

An entry is written before its segment's number is told to anybody (at the board, which orders the two), and never
again.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import address_of
from ringreduce.buffers.device_driver import Driver, Event, Stream
from ringreduce.common.errors import CollectiveTimeoutError, TransportError
from ringreduce.transport.messages import Messages, StepFailedError, exchange_json, together
from ringreduce.transport.shared.arena import Arena, Block, Location
from ringreduce.transport.shared.node import Node
from ringreduce.transport.shared.segments import Segments
from ringreduce.transport.waiting import Waiter

__all__ = ["DeviceArena", "DeviceBlock", "DeviceNode", "join_devices", "untouchable"]

Array = npt.NDArray[Any]

_log = logging.getLogger(__name__)

_ENTRY_NBYTES = 128  # CUDA's handles have 64
_SEGMENTS = 4096
_SECRET_NBYTES = 32
_CLOSING_S = 2.0  # how long memory that a peer has open is waited for before it is left to the end of the process


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBlock:
    """A piece of device memory; the arena takes it back when the block is gone.

    A block may go while work on it is under way, as long as all of that is enqueued on this process's streams, or what
    they wait for: the arena lets the host wait for the device before it hands the memory out again.

    Attributes:
        address: where it begins, on this rank; aligned to 256 bytes.
        nbytes: how many were asked for.
        location: where the peers of the node find it.
    """

    address: int
    nbytes: int
    location: Location
    _owner: Array = field(repr=False)


class DeviceArena:
    """Hands out exportable device memory of this rank and finds that of the peers. Local, not collective.

    Args:
        driver: this rank's GPU.
        host: memory that the ranks of the node share, for the directory.

    Attributes:
        segments: what it hands out pieces of, and what is open of the peers'.
        directory: where the directory is in ``host``; peers are told before they open anything.
    """

    def __init__(self, driver: Driver, host: Arena) -> None:
        self.segments = _DeviceSegments(driver, host)
        self._arena = Arena(self.segments)
        self.directory = self.segments.block.location
        self._lent: list[tuple[weakref.ref[Array], int]] = []  # what is not back yet, and the segment it is in

    def allocate(self, nbytes: int) -> DeviceBlock:
        """Return a block of undefined content.

        Raises:
            MemoryError: the GPU has no more.
            TransportError: what it has cannot be exported.
        """
        owner = self._arena.array(nbytes)
        address = address_of(owner)
        location = self._arena.locate(address, nbytes)
        assert location is not None
        self._lent = [(lent, segment) for lent, segment in self._lent if lent() is not None]
        self._lent.append((weakref.ref(owner), location.segment))
        return DeviceBlock(address, nbytes, location, owner)

    def locate(self, address: int, nbytes: int) -> Location | None:
        """Return where ``nbytes`` bytes at ``address`` are in the arena, None if they are not part of it."""
        return self._arena.locate(address, nbytes)

    def peer_address(self, rank: int, location: Location) -> int:
        """Return where something in a peer's arena is for this rank; opens the segment when it is asked for first.

        Raises:
            TransportError: it cannot be reached.
        """
        return address_of(self.segments.open(rank, location.segment)) + location.offset

    def free(self) -> None:
        """Free what no peer has open; what a user still has stays until the process ends."""
        self.segments.free({segment for lent, segment in self._lent if lent() is not None})


class DeviceNode:
    """The GPUs of a node's ranks, and what this rank shares with the others.

    Attributes:
        driver: this rank's GPU.
        arena: exportable memory on it.
        rank: this one.
        members: the ranks of the node, ascending.
        launching: the ranks that launch kernels for all of their GPU: the lowest on each, ascending.
        ready, finished: events of each member, by rank, which it records and the others wait for. An event stands for
            what it was recorded for last, so a rank must know (from the board) that it was recorded, and must have
            begun to wait before it is recorded again.
    """

    def __init__(
        self, driver: Driver, arena: DeviceArena, rank: int, members: Sequence[int], uuids: Sequence[str]
    ) -> None:
        self.driver = driver
        self.arena = arena
        self.rank = rank
        self.members = tuple(members)
        lowest: dict[str, int] = {}
        for member, uuid in zip(members, uuids, strict=True):
            lowest.setdefault(uuid, member)
        self.launching = tuple(lowest.values())
        self.ready: dict[int, Event] = {}
        self.finished: dict[int, Event] = {}
        self._stream: Stream = driver.make_stream()  # for copies that must not wait for the user's
        self._copied: Event | None = None

    def make_events(self) -> list[bytes]:
        """Make this rank's events; return what the peers open them with."""
        self._copied = self.driver.make_event()
        for events in (self.ready, self.finished):
            events[self.rank] = self.driver.make_event(shared=True)
        return [self.driver.export_event(events[self.rank]) for events in (self.ready, self.finished)]

    def open_events(self, peer: int, handles: Sequence[bytes]) -> None:
        """Open a peer's events."""
        for events, handle in zip((self.ready, self.finished), handles, strict=True):
            events[peer] = self.driver.open_event(handle)

    def addresses(self, own: int, places: Mapping[int, int]) -> list[int]:
        """Return where things in the ranks' arenas are for this rank.

        Args:
            own: of this rank's.
            places: of all ranks', by rank: packed locations.

        Raises:
            TransportError: one cannot be reached.
        """
        return [
            own if rank == self.rank else self.arena.peer_address(rank, Location.unpack(place))
            for rank, place in places.items()
        ]

    def read(self, address: int, nbytes: int) -> bytes:
        """Return bytes of device memory, as they are now."""
        content = np.zeros(nbytes, np.uint8)
        self._copy(address_of(content), address, nbytes)
        return content.tobytes()

    def write(self, address: int, content: bytes) -> None:
        """Store bytes into device memory; returns when they are there."""
        self._copy(address, address_of(np.frombuffer(content, np.uint8)), len(content))

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        assert self._copied is not None
        self.driver.copy(target, source, nbytes, self._stream)
        # A copy from host memory that is not pinned may return when it has left that, and is not yet on the device.
        self.driver.record(self._copied, self._stream)
        self.driver.synchronize(self._copied)

    def close_opened(self) -> None:
        """Give back what is of the peers; nothing enqueued may still use it."""
        for events in (self.ready, self.finished):
            for peer in [peer for peer in events if peer != self.rank]:
                self.driver.free_event(events.pop(peer))
        self.arena.segments.close_opened()

    def free(self) -> None:
        """Give back what is this rank's, once the peers have closed it."""
        own = [*self.ready.values(), *self.finished.values()]
        for event in own if self._copied is None else (*own, self._copied):
            self.driver.free_event(event)
        self.ready.clear()
        self.finished.clear()
        self._copied = None
        self.driver.free_stream(self._stream)
        self.arena.free()

    def close(self, waiter: Waiter) -> None:
        """Give everything back, as soon as the peers have closed it; while the host arena still exists.

        Every rank does, but they need not meet: what a peer does not close stays until the process ends.
        """
        self.close_opened()
        if self.arena.segments.wait_for_peers(waiter):
            self.free()


def join_devices(messages: Messages, node: Node, find_driver: Callable[[], Driver]) -> DeviceNode | None:
    """Find out whether all ranks of every node reach each other's device memory. Collective over ``messages``.

    Args:
        messages: the ranks.
        node: where this one is.
        find_driver: gives this rank's GPU, or raises `RingReduceError` saying why there is none.

    Returns:
        What this rank shares; None on all ranks if any of them failed, with the reason in one line of the log, unless
        there is no GPU at all.
    """
    driver = None
    try:
        driver = together(messages, find_driver)
        return _join(messages, node, driver)
    except StepFailedError as error:
        no_gpu = driver is None and len(error.reasons) == messages.size
        if messages.rank == 0 and not no_gpu:
            _log.warning("no device memory is shared between ranks, arrays on GPUs go through host memory: %s", error)
        return None


def _join(messages: Messages, node: Node, driver: Driver) -> DeviceNode:
    """Take the steps of `join_devices` that need a GPU.

    Raises:
        StepFailedError: on all ranks, if one of them failed; what was made is given back, unless one cannot close what
            it opened of its peers'. Then all of it stays until the processes end.
    """
    members = node.board.members
    uuids = exchange_json(messages, driver.device.uuid)
    secret = secrets.token_hex(_SECRET_NBYTES // 2)
    made: list[DeviceNode] = []
    blocks: list[DeviceBlock] = []

    def make() -> dict[str, Any]:
        """Make memory with a secret in it, and events; return what the peers need to find them."""
        arena = DeviceArena(driver, node.arena)
        devices = DeviceNode(driver, arena, messages.rank, members, [uuids[member] for member in members])
        made.append(devices)
        handles = devices.make_events()
        block = arena.allocate(_SECRET_NBYTES)
        blocks.append(block)
        devices.write(block.address, secret.encode())
        return {
            "directory": astuple(arena.directory),
            "place": astuple(block.location),
            "secret": secret,
            "events": [handle.hex() for handle in handles],
        }

    def look() -> None:
        """Open what the peers made and look whether it is that."""
        (devices,) = made
        peers = {member: everyone[member] for member in members if member != messages.rank}
        devices.arena.segments.directories = {peer: Location(*said["directory"]) for peer, said in peers.items()}
        for peer, said in peers.items():
            address = devices.arena.peer_address(peer, Location(*said["place"]))
            if devices.read(address, _SECRET_NBYTES) != said["secret"].encode():
                raise TransportError(f"it finds other device memory in place of rank {peer}'s")
            devices.open_events(peer, [bytes.fromhex(each) for each in said["events"]])

    try:
        everyone = exchange_json(messages, together(messages, make))
        together(messages, look)
    except StepFailedError:
        blocks.clear()

        def close_opened() -> None:
            for devices in made:
                devices.close_opened()

        try:
            together(messages, close_opened)  # nobody frees what a peer has open
            for devices in made:
                devices.free()
        except (StepFailedError, TransportError) as error:
            _log.debug("device memory stays until the process ends: %s", error)
        raise
    return made[0]


class _DeviceSegments(Segments):
    """Segments of device memory, as arrays of addresses: nothing may look into them.

    An `Arena` only cuts its arrays into pieces. No array of these leaves this module but as the owner of a block.
    """

    nbytes = 8 << 20  # of memory, which every process set takes; who needs more gets larger ones

    def __init__(self, driver: Driver, host: Arena) -> None:
        self._driver = driver
        self._host = host
        self.block: Block = host.allocate(_SEGMENTS * _ENTRY_NBYTES)
        self._entries = self.block.memory[: _SEGMENTS * _ENTRY_NBYTES].reshape(_SEGMENTS, _ENTRY_NBYTES)
        self._entries[0, :8].view(np.int64)[0] = 0
        self.directories: dict[int, Location] = {}  # where those of the peers are, by rank
        self._own: list[Array] = []
        self._opened: dict[tuple[int, int], Array] = {}

    def create(self, nbytes: int) -> tuple[int, Array]:
        number = len(self._own) + 1
        if number == _SEGMENTS:
            raise TransportError(f"this rank has {_SEGMENTS - 1} pieces of device memory to share, which is the limit")
        address = self._driver.allocate(nbytes)
        try:
            handle = self._driver.export(address)
        except TransportError:
            self._driver.free(address)
            raise
        assert 0 < len(handle) <= _ENTRY_NBYTES - 16
        entry = self._entries[number]
        entry[:16].view(np.int64)[:] = len(handle), nbytes
        entry[16 : 16 + len(handle)] = np.frombuffer(handle, np.uint8)
        self._own.append(untouchable(address, nbytes))
        self.nbytes = min(2 * self.nbytes, Segments.nbytes)
        return number, self._own[-1]

    def settle(self) -> None:
        """Wait for the device.

        Arrays of `ringreduce.empty` come back when Python drops them, while copies and kernels on any stream may
        still be under way. This ends, for nothing that is enqueued waits for a host: kernels that wait for those of
        peers are launched when all ranks have met on the host, and no rank waits on the host between that and its own
        launch; events of peers were recorded before that. Kernels of a peer that is lost are given up after a while.
        """
        self._driver.synchronize_device()

    def discard(self, segment_id: int, offset: int, nbytes: int) -> None:
        pass  # device memory has no pages to give back

    def open(self, rank: int, segment_id: int) -> Array:
        key = rank, segment_id
        if key not in self._opened:
            entry = self._directory(rank)[segment_id]
            length, nbytes = (int(each) for each in entry[:16].view(np.int64))
            address = self._driver.open(entry[16 : 16 + length].tobytes())
            self._opened[key] = untouchable(address, nbytes)
        return self._opened[key]

    def alive(self, rank: int) -> bool:
        return self._host.alive(rank)

    def close_opened(self) -> None:
        """Close what was opened of the peers', and tell them; nothing enqueued may still use it."""
        while self._opened:
            self._driver.close(address_of(self._opened.popitem()[1]))
        self._entries[0, :8].view(np.int64)[0] = 1

    def wait_for_peers(self, waiter: Waiter) -> bool:
        """Return whether all peers that live have closed what they opened, some of which may be this rank's.

        They are waited for, but not long.
        """
        flags = {rank: self._directory(rank)[0, :8].view(np.int64) for rank in self.directories}

        def left() -> list[int]:
            return [rank for rank, flag in flags.items() if not flag[0] and self.alive(rank)]

        brief = Waiter(min(_CLOSING_S, waiter.timeout_s), waiter.crowded)
        try:
            brief.until(lambda: not left(), lambda: f"ranks {left()} to close device memory")
        except CollectiveTimeoutError as error:
            _log.debug("device memory stays until the process ends: %s", error)
            return False
        return True

    def free(self, used: Collection[int]) -> None:
        """Free all segments but those that are in use."""
        for number, memory in enumerate(self._own, 1):
            if number not in used:
                self._driver.free(address_of(memory))
        self._own.clear()

    def close(self) -> None:
        self.free(())

    def _directory(self, rank: int) -> Array:
        nbytes = _SEGMENTS * _ENTRY_NBYTES
        found = self._host.peer_view(rank, self.directories[rank], np.dtype(np.uint8), nbytes)
        return found.reshape(_SEGMENTS, _ENTRY_NBYTES)


def untouchable(address: int, nbytes: int) -> Array:
    """Return an array that stands for device memory: it has an address and can be cut; nothing may look into it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
