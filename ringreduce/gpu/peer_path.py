"""The allreduce of device memory inside one node, without a copy where the arrays are in the ranks' device arenas.

Where ranks share GPUs, the lowest rank on each GPU launches a kernel that reduces its part of all ranks' arrays
and stores the result into all of them. No kernel waits for another, as processes that share a GPU may run in turns: the
ranks meet at the board, on the host, and their streams wait for each other's events. A call, on each rank:

    wait for the last call, which may have been on another stream      (all this is enqueued on the caller's stream)
    copy the source into the target, or into a block of the arena if peers cannot reach that
    record `ready`
    rendezvous: the signature, and where the block is
    if it is to launch: wait for the others' `ready`, launch, record `finished`
    rendezvous: those that launch have recorded
    wait for their `finished`
    copy the block into the target, if it is not that

Where every rank has a GPU of its own, all launch kernels that meet on the device: a one-shot for small arrays, which
may be anywhere, the two-shot for others. The ranks then meet on the host but once in a call.

The host waits for its peers' hosts, and for the device only where a plan is made or dropped, a block is outgrown, or
memory that users gave back is used again. It takes part in every call, so a call cannot be captured in a CUDA graph.
The order of summation is that of the ranks, for every element, so bits depend neither on the path nor on where arrays
are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ringreduce.buffers.device_driver import Stream
from ringreduce.collectives.context import Context, Signature
from ringreduce.common.cleanup import close_all, keep_mapped
from ringreduce.common.errors import CollectiveTimeoutError, TransportError
from ringreduce.common.partition import Partition
from ringreduce.gpu.ipc import DeviceBlock, DeviceNode
from ringreduce.gpu.kernels import (
    FEWEST_MULTIPROCESSORS,
    FLAGS_NBYTES,
    MAX_RANKS,
    ONE_SHOT_NBYTES,
    SCRATCH_NBYTES,
    Arithmetic,
    Peers,
    Rows,
    combine,
    one_shot,
    two_shot,
)
from ringreduce.gpu.path import OnDevice
from ringreduce.transport.messages import StepFailedError, exchange_json, together
from ringreduce.transport.shared.arena import NOWHERE, Location
from ringreduce.transport.shared.board import Arrival

__all__ = ["DeviceAllreduce"]

_log = logging.getLogger(__name__)

#: What a rank publishes in place of a location to say that it got that far.
_WELL = 0
#: The GPUs' parts begin on what the device's memory moves at once.
_LINE_NBYTES = 128
#: Blocks for private arrays come in multiples of this.
_GRAIN_NBYTES = 16 << 20
_PAGE = 4096
#: Kernels that wait for each other on the device take the order of memory that this architecture defines.
_CAPABILITY = 70


class DeviceAllreduce(OnDevice):
    """Carries out allreduces of one process set that is on one node, however its ranks share the GPUs.

    Args:
        context: the ranks.
        devices: what `join_devices` gave for them.
    """

    transport = "device"
    algorithm = "kernels"
    reason = "kernels reduce the ranks' arrays where they are"

    def __init__(self, context: Context, devices: DeviceNode) -> None:
        super().__init__(context, devices.driver)
        self._devices = devices
        self._block: DeviceBlock | None = None  # for private arrays
        self._shots = self._set_up_shots()
        size, ngpus = context.topology.size, len(devices.launching)
        kind = "kernels that meet" if self._shots is not None else "one kernel per GPU"
        self.description = f"{kind}, over the memory of {size} ranks on {ngpus} {'GPU' if ngpus == 1 else 'GPUs'}"

    def run(self, source: int, target: int, reduction: Arithmetic, stream: Stream, signature: Signature) -> bool:
        """Reduce; see `OnDevice.run`. The arrays may be in the arena or anywhere else, on some ranks or on all.

        Raises:
            MismatchError, CollectiveTimeoutError, PeerLostError: see `Board.arrive`; other ranks may have called the
                collective with an array in host memory.
            CollectiveTimeoutError: a peer's kernel did not come in time to that of an earlier call; what that one and
                all since gave is undefined.
            TransportError: on all ranks, if the device of one failed; results are undefined. Where kernels meet, the
                others hear of it when theirs have waited in vain.
        """
        call = _Call(reduction, stream, *_meetings(signature.text))
        if self._shots is not None:
            self._shots.check(call.begin.text)
        if reduction.count == 0:
            self._meet(call.begin, _WELL)
            return True
        self._driver.wait(stream, self._done)
        try:
            if self._shots is not None and self._shots.takes(reduction.nbytes):
                return self._run_one_shot(self._shots.peers, call, source, target)
            location = self._devices.arena.locate(target, reduction.nbytes)
            if location is not None:
                return self._run_located(call, source, target, location)
            return self._run_private(call, source, target)
        finally:
            self._driver.record(self._done, stream)

    def close(self) -> None:
        """Give everything back once it is no longer used, and before `DeviceNode.close`."""
        try:
            self._driver.synchronize(self._done)
        except TransportError:
            self.abandon()
            raise
        self._block = None
        shots = [] if self._shots is None else [self._shots.close]
        close_all(self._plans.close, lambda: self._driver.free_event(self._done), *shots)

    def abandon(self) -> None:
        """Give up after a failure without waiting for the device; its memory stays until the process ends."""
        if self._shots is not None:
            keep_mapped(self._shots)

    # ---- inside ----

    def _run_private(self, call: _Call, source: int, target: int) -> bool:
        """Reduce in a block of the arena."""
        nbytes = call.reduction.nbytes
        if self._block is None or self._block.nbytes < nbytes:
            self._driver.synchronize(self._done)  # it may be in use until then
            self._block = None
            try:
                self._block = self._devices.arena.allocate(_ceil(nbytes, _GRAIN_NBYTES))
            except (MemoryError, TransportError) as error:
                return self._share(call, None, f": {error}") is not None
        if not self._run_located(call, source, self._block.address, self._block.location):
            return False
        self._driver.copy(target, self._block.address, nbytes, call.stream)
        return True

    def _run_located(self, call: _Call, source: int, target: int, location: Location) -> bool:
        """Reduce into a target that peers can reach."""
        driver, devices, shots = self._driver, self._devices, self._shots
        if source != target:
            driver.copy(target, source, call.reduction.nbytes, call.stream)
        if shots is None:
            driver.record(devices.ready[devices.rank], call.stream)
        places = self._share(call, location)
        if places is None:
            return False

        def make() -> _Plan:
            addresses = devices.addresses(target, places)
            if shots is not None:
                return _TwoShot(devices, shots.peers, addresses, call.reduction)
            return _Part(devices, addresses, call.reduction) if devices.rank in devices.launching else _Plan()

        plan = self._plan((call.begin.code, *places.values()), make)
        if plan is None:
            return False
        if shots is not None:
            plan.launch(call.stream)
        else:
            self._launch(call, plan)
        self._step("enqueue")
        return True

    def _share(self, call: _Call, location: Location | None, problem: str = "") -> dict[int, int] | None:
        """Meet; return where all ranks' arrays are, packed, or None on all ranks if one has no place."""
        places = self._meet(call.begin, NOWHERE if location is None else location.packed)
        self._step("meet")
        if min(places.values()) == NOWHERE:
            rank = _first(places)
            if rank == self._devices.rank:  # which knows more than the others
                what = f"rank {rank} has no device memory left for {call.begin.text}{problem}"
                _log.warning("arrays on GPUs go through host memory: %s", what)
            return None
        return places

    def _launch(self, call: _Call, plan: _Plan) -> None:
        """Launch, where this rank is to, and let the stream wait for those that do."""
        devices = self._devices
        problem: Exception | None = None
        try:
            plan.launch(call.stream)
        except (MemoryError, TransportError) as error:
            problem = error
        heard = self._meet(call.end, _WELL if problem is None else NOWHERE)
        if min(heard.values()) == NOWHERE:
            raise TransportError(f"the device of rank {_first(heard)} failed in {call.begin.text}") from problem
        for rank in devices.launching:
            if rank != devices.rank:
                self._driver.wait(call.stream, devices.finished[rank])

    def _run_one_shot(self, peers: Peers, call: _Call, source: int, target: int) -> bool:
        def make() -> _Plan:
            call.reduction.compile(self._driver, "shots", "one_shot")  # now, if it has to be
            return _Plan()

        self._meet(call.begin, _WELL)
        if self._plan((call.begin.code,), make) is None:
            return False
        one_shot(self._driver, call.reduction, peers, source, target, call.stream)
        self._step("meet and enqueue")
        return True

    def _meet(self, signature: Signature, said: int) -> dict[int, int]:
        """Meet at the board; return what every rank said, in rank order."""
        board = self._context.board
        heard = dict(zip(board.peers, board.arrive(Arrival(signature.text, signature.code, said))[::2], strict=True))
        heard[self._devices.rank] = said
        return {member: heard[member] for member in self._devices.members}

    def _step(self, step: str) -> None:
        instruments = self._context.instruments
        if instruments.observers:
            instruments.step(step)

    def _set_up_shots(self) -> _Shots | None:
        """Make what kernels take that meet on the device, None on all ranks if they cannot."""
        devices, messages, timeout_s = self._devices, self._context.messages, self._context.waiter.timeout_s
        if not (1 < len(devices.members) == len(devices.launching) <= MAX_RANKS):
            return None

        def make_area() -> DeviceBlock:
            device = devices.driver.device
            if device.capability < _CAPABILITY or device.multiprocessors < FEWEST_MULTIPROCESSORS:
                raise TransportError("its GPU does not run kernels that wait for others'")
            area = devices.arena.allocate(_ceil(FLAGS_NBYTES, _PAGE) + SCRATCH_NBYTES)
            devices.write(area.address, bytes(FLAGS_NBYTES))
            return area

        try:
            area = together(messages, make_area)
            packed = exchange_json(messages, area.location.packed)
            places = {member: packed[member] for member in devices.members}
            return together(messages, lambda: _Shots(devices, area, places, timeout_s), lambda shots: shots.close())
        except StepFailedError as error:
            _log.debug("no kernels that meet: %s", error)
            return None


@dataclass(frozen=True, slots=True)
class _Call:
    """A call on one rank.

    Attributes:
        reduction: what it does.
        stream: the caller's.
        begin, end: signatures of its meetings. None is that of a call with arrays in host memory: nobody may take a
            place in one kind of memory for one in the other.
    """

    reduction: Arithmetic
    stream: Stream
    begin: Signature
    end: Signature


@lru_cache(maxsize=4096)
def _meetings(text: str) -> tuple[Signature, Signature]:
    begin = f"{text} on GPUs"
    return Signature.of(begin), Signature.of(f"{begin}, reducing")


class _Table(Rows):
    """A table of addresses in the arena, where it takes little: an allocation of its own has megabytes.

    The memory goes back with this object; no kernel may read it any more then.
    """

    def __init__(self, devices: DeviceNode, addresses: Sequence[int], offset: int = 0) -> None:
        rows = np.array(addresses, np.uint64) + np.uint64(offset)
        self._block = devices.arena.allocate(rows.nbytes)
        super().__init__(self._block.address, len(rows))
        devices.write(self.address, rows.tobytes())


class _Plan:
    """What a rank enqueues for arrays at certain places; making one may raise `MemoryError` or `TransportError`.

    This one is that of a rank that launches nothing, and where nothing has to be prepared.
    """

    def launch(self, stream: Stream) -> None:
        pass

    def close(self) -> None:
        """Return when no kernel uses it any more."""


class _Part(_Plan):
    """What the lowest rank on a GPU reduces: a part of all ranks' arrays, which are at ``addresses`` in rank order."""

    def __init__(self, devices: DeviceNode, addresses: Sequence[int], reduction: Arithmetic) -> None:
        self._devices = devices
        dtype = reduction.dtype
        bounds = Partition.even(reduction.count, len(devices.launching), _LINE_NBYTES // dtype.itemsize).bounds
        index = devices.launching.index(devices.rank)
        self._part = Arithmetic(dtype, reduction.op, bounds[index + 1] - bounds[index])
        reduction.compile(devices.driver, "reduce", "combine")  # now, if it has to be
        self._table = _Table(devices, addresses, bounds[index] * dtype.itemsize)

    def launch(self, stream: Stream) -> None:
        """Enqueue it, after all ranks' arrays are ready; then this rank's event."""
        devices, table = self._devices, self._table
        for peer in devices.members:
            if peer != devices.rank:
                devices.driver.wait(stream, devices.ready[peer])
        combine(devices.driver, self._part, table, table, table.count, stream)
        devices.driver.record(devices.finished[devices.rank], stream)

    def close(self) -> None:
        self._devices.driver.synchronize(self._devices.finished[self._devices.rank])


class _TwoShot(_Plan):
    """A rank's kernel of those that meet, for all ranks' arrays at ``addresses`` in rank order."""

    def __init__(self, devices: DeviceNode, peers: Peers, addresses: Sequence[int], reduction: Arithmetic) -> None:
        self._driver, self._peers, self._reduction = devices.driver, peers, reduction
        reduction.compile(self._driver, "shots", "two_shot")
        self._table = _Table(devices, addresses)
        self._launched = self._driver.make_event()

    def launch(self, stream: Stream) -> None:
        two_shot(self._driver, self._reduction, self._peers, self._table, self._table, stream)
        self._driver.record(self._launched, stream)

    def close(self) -> None:
        self._driver.synchronize(self._launched)
        self._driver.free_event(self._launched)


class _Shots:
    """What kernels that meet on the device take, and where they say what went wrong.

    Args:
        devices: the ranks, each on its own GPU.
        area: of this rank: flags and scratch for kernels that meet, one after the other.
        places: those of all ranks, by rank, packed.
        timeout_s: how long a kernel waits for a peer's.
    """

    def __init__(self, devices: DeviceNode, area: DeviceBlock, places: Mapping[int, int], timeout_s: float) -> None:
        self._devices, self._area = devices, area
        areas = devices.addresses(area.address, places)
        flags, scratch = _Table(devices, areas), _Table(devices, areas, _ceil(FLAGS_NBYTES, _PAGE))
        # The error word is in pinned memory, where the host sees it without asking the device.
        pages = np.zeros(2 * _PAGE, np.uint8)
        skip = -pages.ctypes.data % _PAGE
        self._page = pages[skip : skip + _PAGE].view(np.uint32)
        devices.driver.register(self._page.ctypes.data, _PAGE)
        rank = devices.members.index(devices.rank)
        self.peers = Peers(rank, flags, scratch, self._page.ctypes.data, timeout_s)

    def takes(self, nbytes: int) -> bool:
        """Return whether arrays of this size take the one-shot; the same on all ranks.

        It reads P - 1 arrays where the two-shot moves two, but has one barrier less and copies no private arrays.
        """
        limit = ONE_SHOT_NBYTES if self.peers.count == 2 else ONE_SHOT_NBYTES // self.peers.count
        return nbytes <= limit

    def check(self, called: str) -> None:
        """Raise if a kernel of this rank gave up waiting."""
        if self._page[0]:
            late, timeout_s = self._devices.members[int(self._page[0]) - 1], self.peers.timeout_s
            raise CollectiveTimeoutError(
                f"before {called}, a kernel waited {timeout_s:g} s for that of rank {late}; results are undefined"
            )

    def close(self) -> None:
        try:
            self._devices.driver.unregister(self._page.ctypes.data)
        except TransportError:
            keep_mapped(self._page)
            raise


def _ceil(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _first(heard: Mapping[int, int]) -> int:
    """Return the first rank that did not get that far."""
    return next(rank for rank, said in heard.items() if said == NOWHERE)
