"""What an engine does while a thread drives it: reads submissions and notes, and carries out decisions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.call_sites import AbortReason, CallSite, disagreement, is_refusal, place_of
from ringreduce.common.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigError,
    MismatchError,
    PeerLostError,
    ShutdownError,
    UnsupportedBufferError,
    name_ranks,
)
from ringreduce.engine import decisions
from ringreduce.engine.decisions import Note
from ringreduce.engine.exchange import COORDINATOR, Exchange
from ringreduce.engine.fused import Executor
from ringreduce.engine.operations import (
    Join,
    Operation,
    Refusal,
    RefusedError,
    Withdrawal,
    WithdrawnError,
    contribute_neutral,
    is_unnamed,
)
from ringreduce.engine.pending import PendingOperations

_log = logging.getLogger(__name__)

_CHECK_S = 0.1
_BLOCKED_S = 1.0  # after so long without news, a rank says that it waits: no other thread of it has submitted anything
_GRACE_S = 10.0  # how long after the time limit a rank waits for the coordinator to say so


class Outcomes:
    """Carries decisions out, the same ones in the same order on all ranks. Used by one thread at a time.

    Args:
        communicator: runs the operations.
        pending: what the program has submitted.
        clock: as for `Engine`.

    Attributes:
        joins: how often all ranks have joined.
        mismatches: how often the ranks have disagreed; all ranks know of each.
        detached: a rank that takes part in nothing any more: nothing can run then. None: there is none.
    """

    def __init__(self, communicator: Communicator, pending: PendingOperations, clock: Callable[[], float]) -> None:
        self.joins = self.mismatches = 0
        self.detached: decisions.Detached | None = None
        self._communicator = communicator
        self._executor = Executor(communicator)
        self._instruments = communicator.instruments
        self._pending = pending
        self._clock = clock

    def _run(self, run: decisions.Run) -> None:
        """Run operations as one and end them; an error that leaves the ranks in step ends these alone."""
        pending = self._pending
        own = pending.take(run.names)
        if self._instruments.observers:
            self._instruments.notify("operations_started", [operation.name for operation in own])
        started = time.perf_counter()
        for operation in own:
            operation.record[1] = started
        try:
            try:
                if own:
                    own[0].carry_out(self._executor, run, own)
                else:
                    contribute_neutral(self._executor, run)
            finally:
                pending.tally.count_batch(time.perf_counter() - started, overlapped=pending.overlaps)
        except RefusedError as refused:
            pending.end(own, refused.reason)
        except (ConfigError, MismatchError, UnsupportedBufferError) as error:
            pending.end(own, error)  # on all ranks, or the communicator has let them know
        except BaseException as error:
            pending.end(own, error)
            raise
        else:
            pending.end(own)

    def _refuse(self, refused: decisions.Refuse) -> None:
        """End an operation that differs between the ranks; end all if a rank may have left out an earlier call.

        Operations of one name belong together, so that this concerns no other name. Operations without a name are
        matched in order: then the ranks are in step if all submitted from the same lines.
        """
        name = refused.name
        self.mismatches += 1
        if not is_unnamed(name):
            texts = {rank: f"{name}: {text}" for rank, text in refused.values.items()}
            nobody_refuses = not any(map(is_refusal, refused.values.values()))
            self._pending.end(self._pending.take([name]), MismatchError(texts), refused=nobody_refuses)
            return
        queue = self._pending.queues.get(name)  # it stays there, to be ended with all others if this fails
        mine = CallSite.at("", queue[0].stack).to_json() if queue else b""
        places = self._communicator.allgather(np.array([[len(mine)]], np.int64))[:-1, 0].cumsum()
        everyone = np.split(self._communicator.allgather(np.frombuffer(mine, np.uint8)), places)
        error = disagreement(
            {rank: CallSite.from_json(everyone[rank].tobytes()) for rank in refused.submitted}, refused.values
        )
        self._pending.end(self._pending.take([name]), error)
        if not error.in_step:
            with suppress(Exception):  # who gave up at once would end the allgather of those that are slower
                self._communicator.barrier()
            raise error

    def _cross(self, crossed: decisions.Crossed) -> None:
        """End the operations that the ranks wait for, each for another one; all, if one of these has no name."""
        self.mismatches += 1
        in_step = not any(map(is_unnamed, crossed.names))
        error = MismatchError(
            crossed.values,
            in_step=in_step,
            places=crossed.places,
            advice="each rank waits for what another one has not submitted: make these calls in one order on all ranks,"
            " or submit all of them before you wait for one",
        )
        self._pending.end(self._pending.take(crossed.names), error)
        if not in_step:
            with suppress(Exception):  # as in `_refuse`
                self._communicator.barrier()
            raise error

    def _end_join(self, joined: decisions.Joined) -> None:
        self.joins += 1
        if (join := self._pending.join) is not None:
            join.result = joined.last
            self._pending.end([join])

    def _end_withdrawn(self, withdrawn: decisions.Withdrawn) -> None:
        if withdrawn.rank == self._communicator.rank:
            for operation in self._pending.take([withdrawn.name]):
                self._pending.end([operation], WithdrawnError(f"{operation.title} was withdrawn"))

    def _count_late(self, late: decisions.Late) -> None:
        self._pending.tally.count_late(self._clock(), late.rank, late.seconds)
        if self._instruments.observers:
            self._instruments.notify("rank_was_late", late.rank, late.seconds, self._pending.tally.batches)

    def _add_paces(self, paced: decisions.Paced) -> None:
        self._pending.tally.add_paces(paced.paces)

    def on_detached(self, detached: decisions.Detached) -> None:
        """End all operations: they need a rank that takes part in nothing any more."""
        self.detached = detached
        why = detached.why
        hint = " (a rank that has no more data calls join(), and the others go on without it)" * (not why.reason)
        for each in self._pending.take_all():
            self._pending.end([each], why.error(detached.rank, f"this rank waits for {each.title}{hint}"))

    def _expire(self, expired: decisions.Expired) -> None:
        missing = name_ranks(list(expired.missing))
        present = name_ranks(list(expired.present))
        waited = f"waited {expired.seconds:.3g} s"
        mine = self._pending.queues.get(expired.name)
        title = mine[0].title if mine else repr(expired.name)
        if self._communicator.rank not in expired.present:
            what = "join or submit anything" if expired.is_join else f"submit {title}"
            own = f"; {self._pending.waits_for()}" if self._pending.queues else ""
            raise CollectiveTimeoutError(f"{present} {waited} for this rank to {what}{own}")
        if expired.is_join:
            raise CollectiveTimeoutError(f"{waited} since {missing} last submitted anything, and has not joined")
        hint = "; if it has no more data, it must call join()"
        others = "".join(f"; rank {rank} waits for {name!r} instead" for rank, name in expired.instead.items())
        raise CollectiveTimeoutError(f"{waited} for {missing} to submit {title}{others or hint}")

    def _warn(self, stalled: decisions.Stalled) -> None:
        if stalled.first != self._communicator.rank:
            return
        missing = name_ranks(list(stalled.missing))
        seconds = stalled.seconds
        if stalled.is_join:
            _log.warning("stalled: join has waited for %.0f s since %s last submitted anything", seconds, missing)
        elif queue := self._pending.queues.get(stalled.name):
            _log.warning(
                "stalled: %s has waited for %.0f s; missing: %s. Submitted at %s",
                queue[0].title,
                seconds,
                missing,
                queue[0].site,
            )


#: What carries out a decision of the ranks.
_METHODS: dict[type[decisions.Decision], Callable[[Outcomes, Any], None]] = {
    decisions.Run: Outcomes._run,
    decisions.Refuse: Outcomes._refuse,
    decisions.Crossed: Outcomes._cross,
    decisions.Joined: Outcomes._end_join,
    decisions.Withdrawn: Outcomes._end_withdrawn,
    decisions.Late: Outcomes._count_late,
    decisions.Paced: Outcomes._add_paces,
    decisions.Detached: Outcomes.on_detached,
    decisions.Expired: Outcomes._expire,
    decisions.Stalled: Outcomes._warn,
}


class Progress:
    """Carries out what the ranks have decided, and ends everything if that fails. Used by one thread at a time.

    Args:
        communicator: runs the operations; closed by `end` and `fail`.
        exchange: between the ranks.
        pending: what the program has submitted.
        find_failed, clock: as for `Engine`.

    Attributes:
        outcomes: carries decisions out.
        news_s: the clock when there was last something to do.
    """

    def __init__(
        self,
        communicator: Communicator,
        exchange: Exchange,
        pending: PendingOperations,
        find_failed: Callable[[str], CollectiveError | None],
        clock: Callable[[], float],
    ) -> None:
        self.outcomes = Outcomes(communicator, pending, clock)
        self.news_s = self._checked_s = clock()
        self._communicator = communicator
        self._exchange = exchange
        self._pending = pending
        self._find_failed = find_failed
        self._clock = clock
        self._blocked_in: Operation | None = None  # the coordinator knows that this rank waits for it
        self._intact = False  # whether `end` came before any failure

    def step(self) -> bool:
        """Do what can be done now; return whether there was anything. If it fails, everything ends."""
        exchange = self._exchange
        try:
            moved = bool(self._pending.inbox) and self._read_inbox()
            if exchange.poll():
                moved = True
            while exchange.decisions:
                decision = exchange.decisions.popleft()
                _METHODS[type(decision)](self.outcomes, decision)
            now = self._clock()
            if moved:
                self.news_s = now
                self._blocked_in = None
            if now - self._checked_s >= _CHECK_S:
                self._checked_s = now
                self._check_timeouts(now)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
            return True
        return moved or bool(exchange.decisions)  # what the time has decided

    # ---- what the program did ----

    def _read_inbox(self) -> bool:
        """Let the coordinator know what the program did; return whether that was more than to wait."""
        inbox = self._pending.inbox
        moved = False
        notes: list[Note] = []
        for _ in range(len(inbox)):  # not until it is empty, for other threads go on filling it
            did = inbox.popleft()
            if did is None:  # a program that polls only asks again
                notes += self._exchange.participant.wait()
            else:
                moved = True
                notes += self._read(did)
        if (detached := self.outcomes.detached) is not None:
            self.outcomes.on_detached(detached)
        elif notes:
            self._exchange.send(notes)
        return moved

    def _read(self, did: Operation | Withdrawal | Note) -> list[Note]:
        """Take in what the program did; return what the coordinator has to know of it."""
        participant = self._exchange.participant
        if isinstance(did, list):
            return [did]
        if isinstance(did, Withdrawal):
            return [note for each in did.operations if not each.done for note in participant.withdraw(each.name)]
        if isinstance(did, Join):
            return participant.join()
        self._pending.queues[did.name].append(did)
        if self._communicator.instruments.observers:
            self._communicator.instruments.notify("operation_announced", did.name)
        return participant.submit(did.name, did.signature)

    # ---- the end of everything ----

    def end(self) -> None:
        """End all operations in a `ShutdownError`; unless a failure has ended them before, notify the other ranks."""
        self._intact = self._pending.lifetime.failure is None
        ended = self._end_all(ShutdownError("ringreduce was shut down while the operation was under way"))
        if self._intact:
            refused = (each.signature.text for each in ended if isinstance(each, Refusal))
            self._detach(AbortReason(next(refused, "")))  # the others may wait for that call

    def close(self) -> None:
        """Close the exchange, unless a failure has left messages under way."""
        if self._intact:
            self._exchange.close()
        else:
            self._exchange.abandon()

    def fail(self, error: BaseException) -> None:
        """End all operations, here and on the other ranks: which of them are under way is no longer known."""
        if self._pending.lifetime.failure is None:
            with self._pending.lock:
                self._pending.lifetime.fail(error)
            self._end_all(error)
            self._communicator.abort(error)
            with suppress(Exception):  # the channel may be what fails; the others then notice by their time limit
                self._detach(AbortReason.after(error))

    def _end_all(self, error: BaseException) -> list[Operation]:
        """End all operations and return them; nothing is submitted any more."""
        pending = self._pending
        while pending.inbox:
            if (did := pending.inbox.popleft()) is not None:
                self._read(did)
        operations = pending.take_all()
        pending.end(operations, error)
        return operations

    def _detach(self, why: AbortReason) -> None:
        """Notify the others that this rank takes part in no further operation, also those that wait for its data."""
        try:
            self._exchange.detach(why)
        finally:
            self._exchange.decisions.clear()
            self._communicator.close()

    # ---- time ----

    def _check_timeouts(self, now: float) -> None:
        """Warn about operations that wait for long, end those that have for too long; say what the program waits for.

        That is, if it has waited for it for a while, and has submitted nothing since.
        """
        if self._pending.count and (failed := self._find_failed(self._pending.waits_for())) is not None:
            raise failed
        operation = self._pending.sole_wait
        quiet = self.outcomes.detached is None and now - self.news_s >= _BLOCKED_S
        if quiet and operation is not None and operation is not self._blocked_in:
            self._blocked_in, named = operation, repr(operation.name)
            described = operation.title if operation.title == named else f"{operation.title} ({named})"
            place = place_of(operation.stack).rpartition("/")[2] if operation.stack else ""
            self._exchange.send(self._exchange.participant.block(operation.name, f"waits for {described}", place))
        self._exchange.check_timeouts(now)
        silent_s = now - self.news_s
        if silent_s > self._communicator.config.timeout_s + _GRACE_S and self._expects_answer():
            raise PeerLostError(COORDINATOR, f"it has sent nothing for {silent_s:.0f} s")

    def _expects_answer(self) -> bool:
        """Return whether another rank, which decides, must answer: to speculative operations it need not.

        To a join it must: it ends the join if no other rank submits anything within the time limit.
        """
        pending = self._pending
        return not self._exchange.coordinates and (
            pending.join is not None or any(not queue[0].signature.speculative for queue in pending.queues.values())
        )
