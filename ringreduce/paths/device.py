"""The allreduce of device memory inside one node, without a copy where the arrays lie in the ranks' device arenas.

Where ranks share GPUs, one rank of each GPU, the leader, launches a kernel that reduces its part of all ranks' arrays
and stores the result into all of them. No kernel waits for another, as processes that share a GPU may run in turns: the
ranks meet at the board, on the host, and their streams wait for each other's events. A call, on each rank:

    wait for the last call, which may have been on another stream      (all this is enqueued on the caller's stream)
    copy the source into the target, or into a block of the arena if peers cannot reach that
    record `ready`
    meet: the signature, and where the block lies
    a leader:   wait for the others' `ready`, launch, record `finished`
    meet: the leaders have recorded
    wait for the leaders' `finished`
    copy the block into the target, if it is not that

Where every rank has a GPU of its own, all launch kernels that meet on the device: a one-shot for small arrays, which
may lie anywhere, the two-shot for others. The ranks then meet on the host but once in a call.

The host waits for its peers' hosts, and for the device only where a plan is made or dropped, a block is outgrown, or
memory that users let go of is used again. It takes part in every call, so a call cannot be captured in a CUDA graph.
The order of summation is that of the ranks, for every element, so bits depend neither on the way nor on where arrays
lie.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Protocol

import numpy as np

from ringreduce.buffers import DType
from ringreduce.buffers.cuda.driver import Event, Stream
from ringreduce.buffers.cuda.kernels import (
    FEWEST_MULTIPROCESSORS,
    FLAGS_NBYTES,
    MAX_RANKS,
    ONE_SHOT_NBYTES,
    SCRATCH_NBYTES,
    Peers,
    Table,
    combine,
    one_shot,
    two_shot,
)
from ringreduce.errors import CollectiveTimeoutError, TransportError
from ringreduce.partition import Partition
from ringreduce.paths.cleanup import close_all, keep_mapped
from ringreduce.paths.context import Cache, Context, Signature
from ringreduce.paths.path import Choice
from ringreduce.reduce_ops import ReduceOp
from ringreduce.transport.board import NOWHERE
from ringreduce.transport.device import DeviceBlock, DeviceNode
from ringreduce.transport.messages import StepFailedError, exchange_json, together
from ringreduce.transport.shared import Location

__all__ = ["DeviceAllreduce"]

_log = logging.getLogger(__name__)

#: What a rank publishes in place of a location to say that it got that far.
_WELL = 0
#: Parts of the leaders begin on what the device's memory moves at once.
_LINE_NBYTES = 128
#: Blocks for private arrays come in multiples of this.
_GRAIN_NBYTES = 16 << 20
_PAGE = 4096
#: Kernels that wait for each other on the device take the order of memory that this architecture defines.
_CAPABILITY = 70


class DeviceAllreduce:
    """Carries out allreduces of one process set on device memory; one at a time, from one thread. See `of`.

    Attributes:
        transport, choice: what it is called.
        description: how it is done, for `explain` and the log.
    """

    transport = "device"

    def __init__(self, context: Context, devices: DeviceNode) -> None:
        self._context = context
        self._devices = devices
        self._driver = devices.driver
        self._done: Event = self._driver.make_event()  # with the last call
        self._plans: Cache[_Plan] = Cache()
        self._block: DeviceBlock | None = None  # for private arrays
        self._broken = False
        self._shots = self._set_up_shots()
        size, ngpus = context.topology.size, len(devices.leaders)
        kind = "kernels that meet" if self._shots is not None else "leaders' kernels"
        self.description = f"{kind}, over the memory of {size} ranks on {ngpus} {'GPU' if ngpus == 1 else 'GPUs'}"

    @property
    def choice(self) -> Choice:
        return Choice("kernels", type(self), "kernels reduce the ranks' arrays where they lie")

    @classmethod
    def of(cls, context: Context, devices: DeviceNode | None) -> DeviceAllreduce | None:
        """Return one if there can be one, None on all ranks otherwise. Collective.

        Args:
            context: the ranks; they must all be on one node, however they share its GPUs.
            devices: what `join_devices` gave for them.
        """
        return cls(context, devices) if devices is not None and context.topology.single_node else None

    def supports(self, dtype: DType, op: ReduceOp) -> bool:
        """Return whether `run` takes such elements; the same on all ranks."""
        return not self._broken and not (op is ReduceOp.AVERAGE and dtype.kind in ("int", "uint", "bool"))

    def run(
        self, source: int, target: int, count: int, dtype: DType, op: ReduceOp, stream: Stream, signature: Signature
    ) -> bool:
        """Reduce C-contiguous arrays over all ranks. Collective; ordered on the stream as if all of it ran there.

        Args:
            source: the address of this rank's array, on its GPU.
            target: that of the result, which is the source or apart from it. May be in the arena or anywhere else, on
                some ranks or on all.
            count: elements.
            dtype: of them; see `supports`.
            op: the operation.
            stream: the caller's.
            signature: of the call: says at least count, dtype and op.

        Returns:
            False, on all ranks, if one of them has no memory or does not reach that of a peer: the sources are as they
            were, and the call has to be made in another way.

        Raises:
            MismatchError, CollectiveTimeoutError, PeerLostError: see `Board.arrive`; other ranks may have called the
                collective with an array in host memory.
            CollectiveTimeoutError: a peer's kernel did not come in time to that of an earlier call; what that one and
                all since gave is undefined.
            TransportError: on all ranks, if the device of one failed; results are undefined. Where kernels meet, the
                others hear of it when theirs have waited in vain.
        """
        call = _Call(_Reduction(count, dtype, op), stream, signature)
        if self._shots is not None:
            self._shots.check(call.begin.text)
        if count == 0:
            self._meet(call.begin, _WELL)
            return True
        self._driver.wait(stream, self._done)
        try:
            if self._shots is not None and self._shots.takes(call.nbytes):
                return self._run_one_shot(self._shots, call, source, target)
            location = self._devices.arena.locate(target, call.nbytes)
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
        close_all(self._plans.close, partial(self._driver.free_event, self._done), *shots)

    def abandon(self) -> None:
        """Give up after a failure without waiting for the device; its memory stays until the process ends."""
        if self._shots is not None:
            keep_mapped(self._shots)

    def idle(self) -> bool:
        """Return whether the GPU has done all that it was given."""
        return self._driver.done(self._done)

    # ---- inside ----

    def _run_private(self, call: _Call, source: int, target: int) -> bool:
        """Reduce in a block of the arena."""
        if self._block is None or self._block.nbytes < call.nbytes:
            self._driver.synchronize(self._done)  # it may be in use until then
            self._block = None
            try:
                self._block = self._devices.arena.allocate(_ceil(call.nbytes, _GRAIN_NBYTES))
            except (MemoryError, TransportError) as error:
                return self._share(call, None, f": {error}") is not None
        if not self._run_located(call, source, self._block.address, self._block.location):
            return False
        self._driver.copy(target, self._block.address, call.nbytes, call.stream)
        return True

    def _run_located(self, call: _Call, source: int, target: int, location: Location) -> bool:
        """Reduce into a target that peers can reach."""
        driver, devices, shots = self._driver, self._devices, self._shots
        if source != target:
            driver.copy(target, source, call.nbytes, call.stream)
        if shots is None:
            driver.record(devices.ready[devices.rank], call.stream)
        places = self._share(call, location)
        if places is None:
            return False

        def make() -> _Plan:
            addresses = [
                target if rank == devices.rank else devices.arena.peer_address(rank, Location.unpack(place))
                for rank, place in places.items()
            ]
            if shots is not None:
                return _TwoShot(devices, shots.peers, addresses, call.reduction)
            return _Leader(devices, addresses, call.reduction) if devices.rank in devices.leaders else _Nothing()

        plan = self._plan((call.begin.code, *places.values()), make)
        if plan is None:
            return False
        if shots is not None:
            plan.launch(call.stream)
        else:
            self._lead(call, plan)
        self._step("enqueue")
        return True

    def _share(self, call: _Call, location: Location | None, problem: str = "") -> dict[int, int] | None:
        """Meet; return where all ranks' arrays lie, packed, or None on all ranks if one has no place."""
        places = self._meet(call.begin, NOWHERE if location is None else location.packed)
        self._step("meet")
        if min(places.values()) == NOWHERE:
            self._say(_first(places), f"has no device memory left for {call.begin.text}{problem}")
            return None
        return places

    def _lead(self, call: _Call, plan: _Plan) -> None:
        """Let the leaders launch, and the stream wait for them."""
        devices = self._devices
        problem: Exception | None = None
        try:
            plan.launch(call.stream)
        except (MemoryError, TransportError) as error:
            problem = error
        heard = self._meet(call.end, _WELL if problem is None else NOWHERE)
        if min(heard.values()) == NOWHERE:
            raise TransportError(f"the device of rank {_first(heard)} failed in {call.begin.text}") from problem
        for leader in devices.leaders:
            if leader != devices.rank:
                self._driver.wait(call.stream, devices.finished[leader])

    def _run_one_shot(self, shots: _Shots, call: _Call, source: int, target: int) -> bool:
        count, dtype, op = call.reduction.count, call.reduction.dtype, call.reduction.op

        def make() -> _Plan:
            self._driver.kernel("shots", f"one_shot<{dtype.name},{op.value}>")  # compiled now, if it has to be
            return _Nothing()

        self._meet(call.begin, _WELL)
        if self._plan((call.begin.code,), make) is None:
            return False
        one_shot(self._driver, dtype, op, shots.peers, source, target, count, shots.peers.count, call.stream)
        self._step("meet and enqueue")
        return True

    def _plan(self, key: tuple[int, ...], make: Callable[[], _Plan]) -> _Plan | None:
        """Return the plan of a key, None on all ranks if it cannot be made on one of them.

        Keys are the same on all ranks, so all of them keep the same plans, and make one at the same call.
        """
        try:
            return self._plans.get(key, lambda: together(self._context.messages, make, lambda plan: plan.close()))
        except StepFailedError as error:
            self._broken = True
            if self._context.rank == 0:
                _log.warning("arrays on GPUs go through host memory from now on: %s", error)
            return None

    def _meet(self, signature: Signature, said: int) -> dict[int, int]:
        """Meet at the board; return what every rank said, in rank order."""
        board = self._context.board
        heard = dict(zip(board.peers, board.arrive(signature.text, signature.code, said), strict=True))
        heard[self._devices.rank] = said
        return {member: heard[member] for member in self._devices.members}

    def _step(self, step: str) -> None:
        instruments = self._context.instruments
        if instruments.observers:
            instruments.step(step)

    def _say(self, rank: int, problem: str) -> None:
        """Let the rank that knows more say why all ranks go another way."""
        if rank == self._devices.rank:
            _log.warning("arrays on GPUs go through host memory: rank %d %s", rank, problem)

    def _set_up_shots(self) -> _Shots | None:
        """Make what kernels take that meet on the device, None on all ranks if they cannot."""
        devices, waiter = self._devices, self._context.waiter
        if not (1 < len(devices.members) == len(devices.leaders) <= MAX_RANKS):
            return None

        def make_area() -> _Area:
            device = devices.driver.device
            if device.capability < _CAPABILITY or device.multiprocessors < FEWEST_MULTIPROCESSORS:
                raise TransportError("its GPU does not run kernels that wait for others'")
            return _Area.allocate(devices)

        try:
            area = together(self._context.messages, make_area)
            packed = exchange_json(self._context.messages, area.location.packed)
            places = {member: packed[member] for member in devices.members}
            make = partial(_Shots, devices, area, places, waiter.timeout_s)
            return together(self._context.messages, make, lambda shots: shots.close())
        except StepFailedError as error:
            _log.debug("no kernels that meet: %s", error)
            return None


@dataclass(frozen=True, slots=True)
class _Reduction:
    """What is done to how many elements."""

    count: int
    dtype: DType
    op: ReduceOp


class _Call:
    """A call on one rank.

    Attributes:
        reduction: what it does.
        nbytes: of an array.
        stream: the caller's.
        begin, end: signatures of its meetings. None is that of a call with arrays in host memory: nobody may take a
            place in one kind of memory for one in the other.
    """

    __slots__ = ("begin", "end", "nbytes", "reduction", "stream")

    def __init__(self, reduction: _Reduction, stream: Stream, signature: Signature) -> None:
        self.reduction = reduction
        self.nbytes = reduction.count * reduction.dtype.itemsize
        self.stream = stream
        self.begin, self.end = _meetings(signature.text)


@lru_cache(maxsize=4096)
def _meetings(text: str) -> tuple[Signature, Signature]:
    begin = f"{text} on GPUs"
    return Signature.of(begin), Signature.of(f"{begin}, reducing")


class _Table(Table):
    """A table of addresses in the arena, where it takes little: an allocation of its own has megabytes."""

    def __init__(self, devices: DeviceNode, addresses: Sequence[int], offset: int = 0) -> None:
        rows = np.array(addresses, np.uint64) + np.uint64(offset)
        self._block: DeviceBlock | None = devices.arena.allocate(rows.nbytes)
        self.count = len(rows)
        self.address = self._block.address
        devices.write(self.address, rows.tobytes())

    def close(self) -> None:
        """Give the memory back; no kernel may read it any more."""
        self._block = None


class _Plan(Protocol):
    """What a rank enqueues for arrays at certain places; making one may raise `MemoryError` or `TransportError`."""

    def launch(self, stream: Stream) -> None: ...

    def close(self) -> None: ...


class _Nothing:
    """The plan of a rank whose leader does it all, and where nothing has to be prepared."""

    def launch(self, stream: Stream) -> None:
        pass

    def close(self) -> None:
        pass


class _Leader:
    """A leader's part of all ranks' arrays, which are at ``addresses`` in rank order."""

    def __init__(self, devices: DeviceNode, addresses: Sequence[int], reduction: _Reduction) -> None:
        self._devices, self._reduction = devices, reduction
        dtype, op = reduction.dtype, reduction.op
        bounds = Partition.even(reduction.count, len(devices.leaders), _LINE_NBYTES // dtype.itemsize).bounds
        index = devices.leaders.index(devices.rank)
        begin, self._count = bounds[index], bounds[index + 1] - bounds[index]
        devices.driver.kernel("reduce", f"combine<{dtype.name},{op.value}>")  # compiled now, if it has to be
        self._table = _Table(devices, addresses, begin * dtype.itemsize)

    def launch(self, stream: Stream) -> None:
        """Enqueue it, after all ranks' arrays are ready; then this rank's event."""
        devices, table = self._devices, self._table
        for peer in devices.members:
            if peer != devices.rank:
                devices.driver.wait(stream, devices.ready[peer])
        dtype, op = self._reduction.dtype, self._reduction.op
        combine(devices.driver, dtype, op, table, table, self._count, table.count, stream)
        devices.driver.record(devices.finished[devices.rank], stream)

    def close(self) -> None:
        """Give the table back when no kernel reads it any more."""
        self._devices.driver.synchronize(self._devices.finished[self._devices.rank])
        self._table.close()


class _TwoShot:
    """A rank's kernel of those that meet, for all ranks' arrays at ``addresses`` in rank order."""

    def __init__(self, devices: DeviceNode, peers: Peers, addresses: Sequence[int], reduction: _Reduction) -> None:
        self._driver, self._peers, self._reduction = devices.driver, peers, reduction
        self._driver.kernel("shots", f"two_shot<{reduction.dtype.name},{reduction.op.value}>")
        self._table = _Table(devices, addresses)
        self._launched: Event = self._driver.make_event()

    def launch(self, stream: Stream) -> None:
        dtype, op, count = self._reduction.dtype, self._reduction.op, self._reduction.count
        two_shot(self._driver, dtype, op, self._peers, self._table, self._table, count, self._peers.count, stream)
        self._driver.record(self._launched, stream)

    def close(self) -> None:
        self._driver.synchronize(self._launched)
        self._driver.free_event(self._launched)
        self._table.close()


@dataclass(frozen=True, slots=True)
class _Area:
    """A rank's flags and scratch for kernels that meet, one after the other in one block."""

    block: DeviceBlock

    @classmethod
    def allocate(cls, devices: DeviceNode) -> _Area:
        block = devices.arena.allocate(_ceil(FLAGS_NBYTES, _PAGE) + SCRATCH_NBYTES)
        devices.write(block.address, bytes(FLAGS_NBYTES))
        return cls(block)

    @property
    def location(self) -> Location:
        return self.block.location


@dataclass(slots=True)
class _Shots:
    """What kernels that meet on the device take, and where they say what went wrong.

    Args:
        devices: the ranks, each on its own GPU.
        area: of this rank.
        places: those of all ranks, by rank, packed.
        timeout_s: how long a kernel waits for a peer's.
    """

    devices: DeviceNode
    area: _Area
    places: Mapping[int, int]
    timeout_s: float
    peers: Peers = field(init=False)
    _page: np.ndarray[tuple[int, ...], np.dtype[np.uint32]] = field(init=False)

    def __post_init__(self) -> None:
        devices = self.devices
        areas = [
            self.area.block.address
            if rank == devices.rank
            else devices.arena.peer_address(rank, Location.unpack(place))
            for rank, place in self.places.items()
        ]
        flags, scratch = _Table(devices, areas), _Table(devices, areas, _ceil(FLAGS_NBYTES, _PAGE))
        # The error word is in pinned memory, where the host sees it without asking the device.
        room = np.zeros(2 * _PAGE, np.uint8)
        skip = -room.ctypes.data % _PAGE
        self._page = room[skip : skip + _PAGE].view(np.uint32)
        devices.driver.register(self._page.ctypes.data, _PAGE)
        rank = devices.members.index(devices.rank)
        self.peers = Peers(rank, flags, scratch, self._page.ctypes.data, self.timeout_s)

    def takes(self, nbytes: int) -> bool:
        """Return whether arrays of this size take the one-shot; the same on all ranks.

        It reads P - 1 arrays where the two-shot moves two, but has one barrier less and copies no private arrays.
        """
        limit = ONE_SHOT_NBYTES if self.peers.count == 2 else ONE_SHOT_NBYTES // self.peers.count
        return nbytes <= limit

    def check(self, called: str) -> None:
        """Raise if a kernel of this rank gave up waiting."""
        if self._page[0]:
            late = self.devices.members[int(self._page[0]) - 1]
            raise CollectiveTimeoutError(
                f"before {called}, a kernel waited {self.timeout_s:g} s for that of rank {late}; results are undefined"
            )

    def close(self) -> None:
        try:
            self.devices.driver.unregister(self._page.ctypes.data)
        except TransportError:
            keep_mapped(self._page)
            raise


def _ceil(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _first(heard: Mapping[int, int]) -> int:
    """Return the first rank that did not get that far."""
    return next(rank for rank, said in heard.items() if said == NOWHERE)
