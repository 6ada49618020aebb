"""What an engine does while somebody drives it: talk to the other ranks, and run what is ready on all of them."""

from __future__ import annotations

import logging
import marshal
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.call_sites import Called, GivenUp, disagreement
from ringreduce.common.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigError,
    MismatchError,
    PeerLostError,
    ShutdownError,
    TransportError,
    UnsupportedBufferError,
    name_ranks,
)
from ringreduce.common.instruments import EngineTally
from ringreduce.engine.execution import Executor, RefusedError
from ringreduce.engine.negotiation import Coordinator, Note, Participant
from ringreduce.engine.operations import Join, Operation, Refusal, UnderWay, Withdrawal, WithdrawnError, is_unnamed
from ringreduce.engine.orders import Expired, Joined, Late, Lost, Order, Refuse, Run, Stalled, Withdrawn
from ringreduce.engine.stall import StallWatch
from ringreduce.transport.control import ControlChannel

__all__ = ["Progress"]

_log = logging.getLogger(__name__)

_COORDINATOR = 0
_CHECK_S = 0.1
_GRACE_S = 10.0  # how long after the time limit a rank waits for the coordinator to say so


class Progress:
    """Reads what the program and the other ranks say, and does what is decided. Used by one thread at a time.

    Args:
        communicator: carries the operations out; closed by `end` and `fail`.
        channel: carries what the ranks say to each other about them.
        under_way: what the program has submitted.
        find_lost, clock: as for `Engine`.

    Attributes:
        joins: how often all ranks have joined.
        tally: what was done so far.
        coordinates: whether this rank decides for all.
        followers: the ranks for which it does, besides itself.
        news_s: the clock when there was last something to do.
        overlaps: whether the program does something else meanwhile; for the tally.
    """

    def __init__(
        self,
        communicator: Communicator,
        channel: ControlChannel,
        under_way: UnderWay,
        find_lost: Callable[[str], CollectiveError | None],
        clock: Callable[[], float],
    ) -> None:
        config = communicator.config
        self._executor = Executor(communicator)
        self.tally = EngineTally()
        self.coordinates = communicator.rank == _COORDINATOR
        self.followers = range(1, communicator.size) if self.coordinates else range(0)
        self.joins = 0
        self.overlaps = False
        self.news_s = self._checked_s = clock()
        self._communicator = communicator
        self._instruments = communicator.instruments
        self._channel = channel
        self._under_way = under_way
        self._find_lost = find_lost
        self._clock = clock
        self._participant = Participant(communicator.size, plans=self.coordinates)
        self._coordinator = Coordinator(communicator.size, config.fusion_nbytes) if self.coordinates else None
        self._stall = StallWatch(config.stall_warning_s, config.timeout_s)
        self._pending: defaultdict[str, deque[Operation]] = defaultdict(deque)  # by name, in order of submission
        self._intact = False  # whether `end` came before any failure
        self._lost: Lost | None = None  # a rank that takes part in nothing any more: nothing can run then

    def step(self) -> bool:
        """Do what can be done now; return whether there was anything. If it fails, everything ends."""
        try:
            moved = self._advance()
            now = self._clock()
            if moved:
                self.news_s = now
            if now - self._checked_s >= _CHECK_S:
                self._checked_s = now
                self._look_around(now)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
            return True
        return moved

    def _advance(self) -> bool:
        """Read what the program did and one message of another rank; return whether there was anything."""
        moved = False
        outgoing: list[Note] = []
        inbox = self._under_way.inbox
        for _ in range(len(inbox)):  # not until it is empty, for other threads go on filling it
            did = inbox.popleft()
            moved = moved or did is not None  # a program that polls only asks again: that is no news
            outgoing += self._read(did)
        if self._lost is not None:
            self._end_lost(self._lost)
        elif outgoing:
            self._say(_merged(outgoing) if len(outgoing) > 1 else outgoing)
        arrived = self._channel.poll()  # one at a time: whoever drives may have what it waits for then
        if arrived is not None:
            moved = True
            rank, data = arrived
            for note in marshal.loads(data):
                if self._coordinator is not None:
                    self._tell_all(self._coordinator.hear(rank, note, self._clock()))
                else:
                    self._obey(self._participant.hear(note))
        return moved

    # ---- what the ranks say to each other ----

    def _read(self, did: Operation | Withdrawal | None) -> list[Note]:
        """Return what the coordinator has to hear of something that the program did; None: it waited."""
        if did is None:
            return self._participant.wait()
        if isinstance(did, Withdrawal):
            return [note for each in did.operations if not each.done for note in self._participant.withdraw(each.name)]
        if isinstance(did, Join):
            return self._participant.join()
        self._pending[did.name].append(did)
        if self._instruments.observers:
            self._instruments.tell("operation_announced", did.name)
        return self._participant.submit(did.name, did.signature)

    def _say(self, notes: list[Note]) -> None:
        """Let the coordinator hear notes of this rank."""
        if self._coordinator is None:
            self._channel.post(_encode(notes), _COORDINATOR)
            return
        for note in notes:
            self._tell_all(self._coordinator.hear(_COORDINATOR, note, self._clock()))

    def _tell_all(self, notes: list[Note]) -> None:
        """Let all ranks hear what the coordinator has decided, then do it here."""
        if not notes:
            return
        if self.followers:
            data = _encode(notes)
            for rank in self.followers:
                self._channel.post(data, rank)
        for note in notes:
            self._obey(self._participant.hear(note))

    # ---- orders ----

    def _obey(self, order: Order | None) -> None:
        if order is None:
            return
        if isinstance(order, Run):
            self._run(order)
        elif isinstance(order, Refuse):
            self._refuse(order)
        elif isinstance(order, Joined):
            self.joins += 1
            if (join := self._under_way.join) is not None:
                join.result = order.last
                self._finish([join])
        elif isinstance(order, Withdrawn):
            if order.rank == self._communicator.rank and (operation := self._next(order.name)) is not None:
                operation.withdrawn = True
                self._end_with([operation], WithdrawnError(f"{operation.title} was withdrawn"))
        elif isinstance(order, Late):
            self.tally.late = self._clock(), order.rank, order.seconds
            if self._instruments.observers:
                self._instruments.tell("rank_was_late", order.rank, order.seconds, self.tally.batches)
        elif isinstance(order, Lost):
            self._lost = order
            self._end_lost(order)
        elif isinstance(order, Expired):
            raise self._expired(order)
        else:
            self._warn(order)

    def _run(self, order: Run) -> None:
        """Run operations as one and end them; an error that leaves the ranks in step ends these alone."""
        operations = [self._next(named.name) for named in order.operations]
        own = [operation for operation in operations if operation is not None]
        try:
            self._carry_out(order, operations, own)
        except RefusedError as refused:
            self._end_with(own, refused.reason)
        except (ConfigError, MismatchError, UnsupportedBufferError) as error:
            self._end_with(own, error)  # on all ranks, or the communicator has let them know
        except BaseException as error:
            self._end_with(own, error)
            raise
        else:
            self._finish(own)

    def _carry_out(self, order: Run, operations: list[Operation | None], own: list[Operation]) -> None:
        if self._instruments.observers:
            self._instruments.tell("operations_started", [operation.name for operation in own])
        started = time.perf_counter()
        for operation in own:
            operation.record[1] = started
        try:
            self._executor.run(order, operations)
        finally:
            seconds = time.perf_counter() - started
            self.tally.batches += 1
            self.tally.seconds += seconds
            if self.overlaps:
                self.tally.overlapped_s += seconds

    def _refuse(self, order: Refuse) -> None:
        """End an operation that differs between the ranks; end all if a rank may have left out an earlier call.

        A name says which operations belong together, so nothing but that name is concerned. Operations without one
        match in order: then the ranks are in step if all submitted from the same lines.
        """
        if not is_unnamed(order.name):
            self._end(order.name, MismatchError({rank: f"{order.name}: {text}" for rank, text in order.values.items()}))
            return
        queue = self._pending.get(order.name)  # it stays there, to be ended with all others if this fails
        mine = Called.at("", queue[0].stack).to_json() if queue else b""
        places = self._communicator.allgather(np.array([[len(mine)]], np.int64))[:-1, 0].cumsum()
        everyone = np.split(self._communicator.allgather(np.frombuffer(mine, np.uint8)), places)
        error = disagreement(
            {rank: Called.from_json(everyone[rank].tobytes()) for rank in order.submitted}, order.values
        )
        self._end(order.name, error)
        if not error.in_step:
            with suppress(Exception):  # who gave up at once would end the allgather of those that are slower
                self._communicator.barrier()
            raise error

    def _expired(self, order: Expired) -> CollectiveTimeoutError:
        missing, present = name_ranks(list(order.missing)), name_ranks(list(order.present))
        waited = f"waited {order.seconds:.3g} s"
        mine = self._pending.get(order.name)
        title = mine[0].title if mine else repr(order.name)
        if self._communicator.rank not in order.present:
            what = "join or submit anything" if order.is_join else f"submit {title}"
            own = f"; {self._waits_for()}" if self._pending else ""
            return CollectiveTimeoutError(f"{present} {waited} for this rank to {what}{own}")
        if order.is_join:
            return CollectiveTimeoutError(f"{waited} since {missing} last submitted anything, and has not joined")
        hint = "; if it has no more data, it must call join()"
        others = "".join(f"; rank {rank} waits for {name!r} instead" for rank, name in order.instead.items())
        return CollectiveTimeoutError(f"{waited} for {missing} to submit {title}{others or hint}")

    def _warn(self, order: Stalled) -> None:
        if order.first != self._communicator.rank:
            return
        missing = name_ranks(list(order.missing))
        if order.is_join:
            _log.warning("stalled: join has waited for %.0f s since %s last submitted anything", order.seconds, missing)
        elif queue := self._pending.get(order.name):
            _log.warning(
                "stalled: %s has waited for %.0f s; missing: %s. Submitted at %s",
                queue[0].title,
                order.seconds,
                missing,
                queue[0].site,
            )

    # ---- the end of operations ----

    def _next(self, name: str) -> Operation | None:
        """Take the oldest operation of a name; None if this rank, which has joined, has submitted none."""
        queue = self._pending.get(name)
        if not queue:
            return None
        operation = queue.popleft()
        if not queue:
            del self._pending[name]
        return operation

    def _end(self, name: str, error: Exception) -> None:
        operation = self._next(name)
        if operation is not None:
            self._end_with([operation], error)

    def _end_with(self, operations: list[Operation], error: BaseException) -> None:
        for operation in operations:
            operation.error = error if isinstance(error, Exception) else TransportError(f"interrupted: {error!r}")
        self._finish(operations)

    def _finish(self, operations: list[Operation]) -> None:
        if self._instruments.observers:
            self._instruments.tell("operations_finished", [operation.name for operation in operations])
        self.tally.operations += len(operations)
        self._under_way.end(operations)

    # ---- the end of everything ----

    def end(self) -> None:
        """End what is under way in a `ShutdownError`; unless all failed before, let the other ranks know."""
        self._intact = self._under_way.failure is None
        ended = self._end_all(ShutdownError("ringreduce was shut down while the operation was under way"))
        if self._intact:
            refused = (each.signature.text for each in ended if isinstance(each, Refusal))
            self._take_leave(GivenUp(next(refused, "")))  # the others may wait for that call

    def close(self) -> None:
        """Give the channel back, unless a failure has left messages under way."""
        if self._intact:
            self._channel.close()

    def fail(self, error: BaseException) -> None:
        """End everything, here and on the other ranks: what the ranks have under way is no longer known."""
        if self._under_way.failure is None:
            self._end_all(error)
            self._communicator.give_up(error)
            with suppress(Exception):  # the channel may be what fails; the others then notice by their time limit
                self._take_leave(GivenUp.after(error))

    def disown(self, reason: str) -> None:
        """End what is under way and tell nobody: this process was forked by the rank."""
        inbox = self._under_way.inbox
        while inbox:
            if isinstance(did := inbox.popleft(), Operation):
                self._pending[did.name].append(did)
        for operation in self._take_all():
            operation.error, operation.done = ConfigError(reason), True

    def _end_all(self, error: BaseException) -> list[Operation]:
        """End everything that is under way and return it; nothing is submitted from here on."""
        with self._under_way.lock:
            self._under_way.failure = self._under_way.failure or error
        while self._under_way.inbox:
            self._read(self._under_way.inbox.popleft())
        operations = self._take_all()
        self._end_with(operations, error)
        return operations

    def _end_lost(self, lost: Lost) -> None:
        hint = " (a rank that has no more data calls join(), and the others go on without it)" * (not lost.why.reason)
        for operation in self._take_all():
            self._end_with([operation], lost.why.error(lost.rank, f"this rank waits for {operation.title}{hint}"))

    def _take_all(self) -> list[Operation]:
        """Take all operations that the program has submitted and that are not done."""
        operations = [operation for queue in self._pending.values() for operation in queue]
        self._pending.clear()
        join = self._under_way.join
        return operations if join is None else [*operations, join]

    def _take_leave(self, why: GivenUp) -> None:
        """Let the others know that this rank takes part in nothing any more, also those that wait for its data."""
        try:
            self._say(self._participant.leave(why))
        finally:
            self._communicator.close()

    # ---- the clock ----

    def _look_around(self, now: float) -> None:
        """Warn about operations that wait for long; end those that have waited for too long."""
        if self._under_way.count and (lost := self._find_lost(self._waits_for())) is not None:
            raise lost
        if self._coordinator is not None:
            late, expired = self._stall.check(self._coordinator.waiting(), now)
            self._tell_all([self._coordinator.stalled(each, now) for each in late])
            self._tell_all([self._coordinator.expire(each, now) for each in expired[:1]])  # which ends everything
        elif now - self.news_s > self._communicator.config.timeout_s + _GRACE_S and self._awaits_word():
            raise PeerLostError(_COORDINATOR, f"it has said nothing for {now - self.news_s:.0f} s")

    def _waits_for(self) -> str:
        operations = [queue[0].title for queue in self._pending.values()]
        more = f" and {len(operations) - 1} more" * (len(operations) > 1)
        return f"this rank waits for {operations[0] if operations else 'a join'}{more}"

    def _awaits_word(self) -> bool:
        """Return whether the coordinator owes this rank an answer: to speculative operations it need not give one.

        To a join it does: it ends the join if no other rank submits anything within the time limit.
        """
        joined = self._under_way.join is not None
        return joined or any(not queue[0].signature.speculative for queue in self._pending.values())


def _encode(notes: list[Note]) -> bytes:
    # Many times faster than JSON, for lists, numbers and strings; this version of the format is that of every Python.
    return marshal.dumps(notes, 2)


def _merged(notes: list[Note]) -> list[Note]:
    """Make one note of several in a row that announce known operations."""
    merged: list[Note] = []
    for note in notes:
        if note[0] == "known" and merged and merged[-1][0] == "known":
            merged[-1] = merged[-1] + note[1:]
        else:
            merged.append(note)
    return merged
