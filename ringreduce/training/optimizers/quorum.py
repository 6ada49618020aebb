"""DiLoCo whose outer steps do not wait for all replicas: some make a step, and what comes late is a part of the next.

One rank, the first of the first replica, keeps the weights that replicas agree on. A replica that ends its period sends
it ``agreed - local``, and gets the weights after the outer step that this is a part of. The keeper makes a step when
``quorum`` replicas have come. If others came since the step before, it gives them a tenth of the time since then.

A replica that comes after the step is late. It gets the newest weights, whatever it has missed: at once, or with the
next step if more than half of the time of a step has gone by. What it has learnt is a part of the next step. Let t be
the outer steps made so far, s those made when the replica began its period, and n the number of its ranks:

    share = n / (1 + t - s)
    delta = sum(share * (agreed - local)) / sum(share)

The outer step is that of `ringreduce.training.optimizers.local`. So what is late by one step counts by half. Which
replicas are in time depends on the moment; all that get the weights of a step get the same bits.

Sources:
    A. Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv 2604.21428: a keeper of the
        weights, the quorum, and time for those who are nearly there.
    C. Xie, S. Koyejo, I. Gupta, "Asynchronous Federated Optimization", arXiv 1903.03934: shares by age.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import IntFlag
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.send_recv import PendingMessage
from ringreduce.common.errors import CollectiveError, CollectiveTimeoutError, ConfigError, RingReduceError
from ringreduce.common.reduce_ops import SUM
from ringreduce.runtime import global_process_set
from ringreduce.training.compression import State
from ringreduce.training.optimizers.local import Average, Flat, Fragment, Leaves, LocalTraining, broadcast, outer_step
from ringreduce.training.options.local_options import LocalOptions

_OWN_TAGS = 1 << 62  # Tags from here on are no program's; `ringreduce.scan` has the last.
_AT_ONCE = 0.5  # of the time of a step: a replica that is late by less gets weights at once
_GRACE = 0.1  # of the time since the last step, for replicas that are expected
_MOST_GRACE = 0.25  # of the time limit
_FAILED = -1  # in place of the number of outer steps
_NAP_S = 1e-3  # between two looks for messages, which have nothing to sleep on


class Kind(IntFlag):
    """What a replica wants; the last two are made of all replicas.

    Attributes:
        STEP: an outer step.
        AVERAGE: the average of what all have, without momentum.
        LOADED: it has loaded a state, which may have other weights and another number of steps than those of others.
    """

    STEP = 0
    AVERAGE = 1
    LOADED = 2


class Tags(NamedTuple):
    """The tags of messages to the keeper, from it, and to the first rank of a replica."""

    differences: int
    weights: int
    buffers: int


class _Count:
    """How many optimizers there were in a world; equal on all ranks."""

    def __init__(self) -> None:
        self._trainings = 0

    def next_tags(self) -> Tags:
        """Return tags that no other optimizer has."""
        self._trainings += 1
        return Tags(*(_OWN_TAGS + 3 * self._trainings + place for place in range(3)))


class Differences(NamedTuple):
    """What a replica has learnt in a period.

    Attributes:
        replica: its number.
        since: how many outer steps there were when it began.
        kind: what it wants.
        values: ``agreed - local``, by part.
        agreed: the weights that it began with, by part, if it has loaded them.
    """

    replica: int
    since: int
    kind: Kind
    values: Sequence[Flat]
    agreed: Sequence[Flat] = ()


class Rates(NamedTuple):
    """Learning rate and momentum of the outer steps of a part."""

    lr: float
    mu: float


class OuterSteps:
    """The weights that replicas agree on, and the steps that they make together. Local.

    Args:
        weights: by part.
        momentum: by part; None: zeros.
        rates: by part.
        ranks: how many each replica has.
        quorum: so many replicas make a step.
        count: how many steps there were.

    Attributes:
        count: as above.
        weights, momentum: by part; arrays that nothing writes to.
        waiting: the replicas whose weights come with the next step.
    """

    def __init__(
        self,
        weights: Sequence[Flat],
        momentum: Sequence[Flat | None],
        *,
        rates: Sequence[Rates],
        ranks: Sequence[int],
        quorum: int,
        count: int = 0,
    ) -> None:
        self.count = count
        self.weights = list(weights)
        self.momentum = [
            None if not rate.mu else np.zeros_like(flat) if kept is None else kept
            for flat, kept, rate in zip(weights, momentum, rates, strict=True)
        ]
        self.waiting: set[int] = set()
        self._expected = set(range(len(ranks)))
        self._come: list[Differences] = []
        self._rates = rates
        self._ranks = ranks
        self._quorum = quorum

    def take(self, differences: Differences) -> bool:
        """Take what a replica has learnt for the next step; return whether the replica is in time for that."""
        self._come.append(differences)
        self.waiting.add(differences.replica)
        return differences.since >= self.count

    def forget(self) -> list[Differences]:
        """Return what has come of replicas that wait, and forget all that has."""
        waiting = [each for each in self._come if each.replica in self.waiting]
        self._come, self.waiting = [], set()
        return waiting

    @property
    def complete(self) -> bool:
        """Whether enough replicas wait."""
        return len(self.waiting) >= self._quorum

    @property
    def all_here(self) -> bool:
        """Whether all wait that came for the last step, or since then for this one."""
        return self.waiting >= self._expected

    def possible(self, absent: int) -> bool:
        """Return whether there can be another step, if so many replicas do not come."""
        return len(self._ranks) - absent >= self._quorum

    def make(self) -> None:
        """Make a step."""
        self._expected = {each.replica for each in self._come}
        self._step(self._rates)

    def make_of_all(self, everyone: Sequence[Differences]) -> None:
        """Make a step of all replicas: an average if all want that; from the newest weights that one has loaded."""
        newest = max(everyone, key=lambda each: each.since if each.agreed else -1)
        if newest.agreed and newest.since > self.count:
            self.count, self.weights = newest.since, list(newest.agreed)
        self._come += everyone
        average = all(Kind.AVERAGE in each.kind for each in everyone)
        self._step([Rates(1.0, 0.0)] * len(self._rates) if average else self._rates)

    def _step(self, rates: Sequence[Rates]) -> None:
        shares = [self._ranks[each.replica] / (1 + max(0, self.count - each.since)) for each in self._come]
        for part, rate in enumerate(rates):
            delta = np.zeros_like(self.weights[part])
            for share, each in zip(shares, self._come, strict=True):
                delta += delta.dtype.type(share / sum(shares)) * each.values[part]
            changed = self.weights[part].copy()  # Others read the old ones, and messages are under way with them.
            momentum = self.momentum[part]
            if rate.mu and momentum is not None:
                self.momentum[part] = momentum = momentum.copy()
            outer_step(changed, momentum if rate.mu else None, delta, lr=rate.lr, mu=rate.mu)
            self.weights[part] = changed
        self.forget()
        self.count += 1


class _Incoming:
    """What a replica sends next, as it comes.

    Args:
        communicator: of all ranks.
        replica: its number.
        source: its first rank.
        like: arrays of the lengths and dtypes of its differences.
        tag: of its messages.
    """

    def __init__(self, communicator: Communicator, replica: int, source: int, like: Sequence[Flat], tag: int) -> None:
        self._communicator = communicator
        self._replica = replica
        self._source = source
        self._like = like
        self._tag = tag
        self._head = np.zeros(2, np.int64)
        self._values: list[Flat] = []
        self._coming = [self._receive(self._head)]

    def poll(self) -> Differences | None:
        """Return differences that have come."""
        if not all(message.test() for message in self._coming):
            return None
        for message in self._coming:
            message.wait()
        since, kind = self._head.tolist()
        count = len(self._like)
        if not self._values:
            self._values = [np.empty_like(each) for each in (*self._like, *(self._like if Kind.LOADED & kind else ()))]
            self._coming = list(map(self._receive, self._values))
            if self._coming:
                return None
        come = Differences(self._replica, since, Kind(kind), self._values[:count], self._values[count:])
        self._values = []
        self._coming = [self._receive(self._head)]
        return come

    def _receive(self, array: Flat) -> PendingMessage:
        return self._communicator.irecv(array, self._source, self._tag)


class Keeper:
    """Keeps the weights that replicas agree on, in a thread of its rank.

    Args:
        communicator: of all ranks.
        leaders: the first rank of each replica; the first of them is this rank.
        steps: the weights, which belong to this from now on.
        tags: of the messages.

    Attributes:
        steps: as above.
    """

    def __init__(self, communicator: Communicator, leaders: Sequence[int], steps: OuterSteps, tags: Tags) -> None:
        self._communicator = communicator
        self._leaders = leaders
        self.steps = steps
        self._tags = tags
        self._changed = threading.Condition()
        self._gathered: dict[int, Differences] = {}  # for a step of all replicas
        self._answer: tuple[int, Sequence[Flat]] | None = None  # to the replica of this rank
        self._error: Exception | None = None
        self._over = False
        self._began = time.monotonic()  # when replicas got the weights of the last step
        self._took_s = 0.0  # from one step to the next
        self._deadline: float | None = None  # when to make the next step, whoever is there
        self._thread = threading.Thread(target=self._work, name="ringreduce outer steps", daemon=True)
        self._thread.start()

    def exchange(self, differences: Differences) -> tuple[int, Sequence[Flat]]:
        """Take what the replica of this rank has learnt; return the number of steps and the weights it goes on from."""
        messages = self._communicator.point_to_point
        assert messages is not None
        with self._changed:
            self._answer = None
            self._take(differences)
            self._changed.notify()
        messages.waiter.until(self._outcome, lambda: "other replicas")
        outcome = self._outcome()
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome is not None
        return outcome

    def go_on_from(self, steps: OuterSteps) -> None:
        """Keep other weights, and forget what has come for the old ones."""
        with self._changed:
            self.steps = steps
            self._begin()

    def stop(self) -> None:
        """Let the thread end."""
        self._over = True

    def end(self) -> None:
        """End the thread."""
        self.stop()
        self._thread.join()

    def _outcome(self) -> tuple[int, Sequence[Flat]] | Exception | None:
        return self._error or self._answer

    def _work(self) -> None:
        try:
            incoming = [
                _Incoming(self._communicator, replica, leader, self.steps.weights, self._tags.differences)
                for replica, leader in enumerate(self._leaders)
                if replica > 0
            ]
            while not self._over and self._communicator.lifetime.open:
                come = [differences for each in incoming if (differences := each.poll()) is not None]
                with self._changed:
                    for differences in come:
                        self._take(differences)
                    if not (self._make_if_due() or come):
                        self._changed.wait(_NAP_S)
        except Exception as error:
            self._error = error
            for leader in self._leaders[1:]:
                with suppress(RingReduceError):  # They may have failed, too.
                    self._communicator.isend(np.array([_FAILED]), leader, self._tags.weights)

    def _take(self, differences: Differences) -> None:
        steps = self.steps
        loaded = any(Kind.LOADED in each.kind for each in (*self._gathered.values(), differences))
        if loaded:
            self._gathered |= {each.replica: each for each in steps.forget()}
        if loaded or Kind.AVERAGE in differences.kind:
            self._gathered[differences.replica] = differences
        elif not steps.take(differences) and time.monotonic() - self._began < _AT_ONCE * self._took_s:
            self._answer_to([differences.replica])
        if len(self._gathered) == len(self._leaders):
            steps.make_of_all([self._gathered[replica] for replica in range(len(self._leaders))])
            self._gathered = {}
            self._answer_to(range(len(self._leaders)))
            self._begin()
        elif not steps.possible(absent=len(self._gathered)):
            self._answer_to(steps.waiting)  # The step of all is the next.

    def _make_if_due(self) -> bool:
        if not self.steps.complete:
            return False
        now = time.monotonic()
        if self._deadline is None:
            most_s = _MOST_GRACE * self._communicator.config.timeout_s
            self._deadline = now + min(_GRACE * (now - self._began), most_s)
        if now < self._deadline and not self.steps.all_here:
            return False
        waiting = self.steps.waiting
        self.steps.make()
        self._answer_to(waiting)
        self._took_s = now - self._began
        self._begin()
        return True

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._deadline = None

    def _answer_to(self, replicas: Iterable[int]) -> None:
        answer = self.steps.count, list(self.steps.weights)
        for replica in list(replicas):
            self.steps.waiting.discard(replica)
            if replica == 0:
                self._answer = answer
            else:
                send_all(self._communicator, answer, self._leaders[replica], self._tags.weights)


def send_all(
    communicator: Communicator, answer: tuple[int, Sequence[Flat]], rank: int, tag: int
) -> list[PendingMessage]:
    """Begin to send a rank the number of outer steps and weights."""
    count, weights = answer
    arrays = [np.array([count]), *weights]
    return [communicator.isend(each, rank, tag) for each in arrays]


class QuorumTraining(LocalTraining):
    """What an optimizer of local steps does where an outer step does not wait for all replicas.

    Args, Attributes:
        as for `LocalTraining`; ``steps`` are those of the outer steps that this replica goes on from, and its own.

    Raises:
        ConfigError: there are fewer replicas than ``quorum``; or MPI allows one thread alone.
    """

    def __init__(
        self,
        described: str,
        options: LocalOptions,
        *,
        parameters: Sequence[Leaves],
        others: Sequence[Average],
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._keeper: Keeper | None = None
        self._finalizer: Any = None
        self._kept = False  # whether the keeper has the weights of this rank; False once these were loaded
        self._loaded = False  # whether this rank has loaded weights that others may not have
        self._begun = False  # whether replicas have agreed on weights
        self._failed: RingReduceError | None = None
        self._count = 0
        rates = Rates(options.outer_lr, options.outer_momentum)
        self._rates = [rates] * len(parameters) + [Rates(1.0, 0.0)] * len(others)
        self._buffers = [Fragment(each.leaves, each.what, options) for each in others]
        super().__init__(described, options, parameters=parameters, others=self._buffers, writing=writing)
        self._parts = [each for each in self._averages if isinstance(each, Fragment)]  # All are.
        most = len(self._replicas)
        if options.quorum > most:
            raise ConfigError(f"quorum must be at most {most}, as there are so many replicas; got {options.quorum}")

    @property
    def outer_steps(self) -> int:
        return self._count

    def before_step(self) -> None:
        super().before_step()
        if self._compares:  # This has been the first local step.
            self._begun = True
            for part in self._buffers:
                part.average()
            for part in self._parts:
                part.momentum = None  # The keeper has it.
        self._begin_to_keep()

    def after_step(self) -> None:
        self.steps += 1
        own = self.steps - self._options.warmup_steps
        if self._begun and own > 0 and own % self._options.period == 0:
            self._exchange(Kind.STEP)
            self.steps = self._options.warmup_steps + self._count * self._options.period

    def synchronize(self) -> None:
        if self._begun:
            self._exchange(Kind.AVERAGE)
        else:
            super().synchronize()

    def rejoin(self) -> bool:
        if global_process_set.engine is self._engine:
            return False
        self._connect()
        mine = np.array([[self._count if self._begun else -1, self._has_momentum, self.steps]])
        everyone = self._run("outer steps", "outer steps", lambda ranks: ranks.allgather(mine))
        newest = int(everyone[:, 0].max())
        if newest < 0:
            self.steps = int(everyone[:, 2].max())
            return True
        share = 1 / (1 + newest - self._count) if self._begun else 0.0
        with self._writing():
            for part in self._parts:
                self._average_again(part, share, root=int(everyone[:, 0].argmax()))
                self._share_momentum(part, everyone[:, 1])
        self._begun = True
        self._count = newest
        self.steps = self._options.warmup_steps + newest * self._options.period
        return True

    def state_dict(self) -> dict[str, Any]:
        self._keep_momentum()
        state = super().state_dict()
        for number, part in enumerate(self._parts):
            if part.momentum is not None:
                state["averages"][number]["momentum"] = part.momentum.copy()
        return {**state, "outer_steps": self._count}

    def require_fit(self, state: Mapping[str, Any]) -> None:
        if "outer_steps" not in state:
            raise ConfigError("this is a state of DiLoCo without a quorum")
        super().require_fit(state)
        for number, part in enumerate(self._parts):
            lengths = {name: values.size for name, values in state["averages"][number].items()}
            if {*lengths.values()} - {part.leaves.find()[0]}:
                raise ConfigError(f"the state has {lengths} elements of {part.what}, this optimizer others")

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        super().load_state_dict(state)
        self._kept = False
        self._count = 0 if state is None else state["outer_steps"]
        for number, part in enumerate(self._parts):
            kept: State = {} if state is None else state["averages"][number]
            part.momentum = kept.get("momentum")
        self._begun = self._loaded = all(part.agreed is not None for part in self._parts) and self.steps > 0

    @property
    def _compares(self) -> bool:
        return not self._begun and self.steps >= self._options.warmup_steps

    def _connect(self) -> None:
        self._end_keeper()
        super()._connect()
        for part in self._averages:
            part.kept = ("then", "agreed")
        self._failed = None
        self._loaded = False
        self._communicator = global_process_set.communicator
        messages = self._communicator.point_to_point
        if messages is None or not messages.concurrent:
            raise ConfigError("quorum needs MPI with threads (MPI_THREAD_MULTIPLE), and this process has one alone")
        self._tags = self._engine.attached[_Count].next_tags()
        self._replicas = self._options.replicas(self._communicator.topology.nodes)
        self._mine = next(members for members in self._replicas if self._communicator.rank in members)

    def _end_keeper(self) -> None:
        if self._keeper is not None:
            self._finalizer.detach()
            self._keeper.end()
            self._keep_momentum()
        self._keeper = None
        self._kept = False

    def _keep_momentum(self) -> None:
        if self._keeper is not None and self._kept:
            for part, momentum in zip(self._parts, self._keeper.steps.momentum, strict=True):
                part.momentum = momentum

    @property
    def _has_momentum(self) -> bool:
        return any(part.momentum is not None for part in self._parts)

    def _average_again(self, part: Fragment, share: float, root: int) -> None:
        """Let all ranks of a new world go on from the newest weights and the average of what each has learnt since.

        Args:
            part: whose weights.
            share: of what this rank has learnt; 0: it has not begun.
            root: a rank that has the newest weights.
        """
        newest = np.empty(*part.leaves.find())
        learnt = np.zeros_like(newest)
        if part.agreed is not None and share:
            part.leaves.read(learnt)
            np.subtract(part.agreed, learnt, out=learnt)
            newest[:] = part.agreed
        self._run("weights", "weights", partial(broadcast, newest, root))
        learnt *= share
        shares = np.array([share])
        self._run("learnt", "what each has learnt", lambda ranks: ranks.allreduce(learnt, SUM, out=learnt))
        self._run("shares", "shares", lambda ranks: ranks.allreduce(shares, SUM, out=shares))
        newest -= learnt / newest.dtype.type(shares[0])
        part.leaves.write(newest)
        part.agreed = newest

    def _share_momentum(self, part: Fragment, has_it: Sequence[int]) -> None:
        """Give the new keeper the momentum of the old one; without that rank it begins anew."""
        if not any(has_it):
            return
        assert part.agreed is not None
        momentum = np.zeros_like(part.agreed) if part.momentum is None else part.momentum.copy()
        self._run("momentum", "momentum", partial(broadcast, momentum, int(np.argmax(has_it))))
        part.momentum = momentum if self._communicator.rank == self._replicas[0][0] else None

    def _exchange(self, kind: Kind) -> None:
        """Give what this replica has learnt, and take over the weights that it goes on from."""
        if self._failed is not None:
            raise self._failed
        if self._loaded:
            kind |= Kind.LOADED
        try:
            count, weights = self._answer(kind)
        except CollectiveTimeoutError as error:
            needed = "all" if kind else f"{self._quorum}"
            self._failed = CollectiveTimeoutError(
                f"the outer step of the {self._described} needs {needed} of {len(self._replicas)} replicas, and was "
                f"not made in time: {error}"
            )
            raise self._failed from error
        self._count = count
        self._loaded = False
        with self._writing():
            for part, agreed in zip(self._parts, weights, strict=True):
                part.leaves.find()
                part.leaves.write(agreed)
                part.agreed = agreed

    def _answer(self, kind: Kind) -> tuple[int, Sequence[Flat]]:
        ranks = self._communicator
        leader, *members = self._mine
        keeper = self._replicas[0][0]
        local = [self._values_of(part) for part in self._parts]
        if ranks.rank != leader:
            for values in local[len(self._fragments) :]:
                ranks.send(values, leader, self._tags.buffers)
            return self._receive(leader)
        for values in local[len(self._fragments) :]:
            self._add_those_of(members, values)
        agreed = [part.agreed for part in self._parts if part.agreed is not None]
        learnt = [old - now for old, now in zip(agreed, local, strict=True)]
        if ranks.rank == keeper:
            self._begin_to_keep()
            assert self._keeper is not None
            loaded = agreed if Kind.LOADED in kind else ()
            answer = self._keeper.exchange(Differences(0, self._count, kind, learnt, loaded))
        else:
            arrays = [np.array([self._count, kind], np.int64), *learnt, *(agreed if Kind.LOADED in kind else ())]
            sent = [ranks.isend(each, keeper, self._tags.differences) for each in arrays]
            answer = self._receive(keeper)
            for message in sent:
                message.wait()
        for message in [each for member in members for each in send_all(ranks, answer, member, self._tags.weights)]:
            message.wait()
        return answer

    def _values_of(self, part: Fragment) -> Flat:
        values = np.empty(*part.leaves.find())
        part.leaves.read(values)
        return values

    def _add_those_of(self, members: Sequence[int], values: Flat) -> None:
        """Make buffers of this rank the average of the replica's."""
        theirs = np.empty_like(values)
        for member in members:
            self._communicator.recv(theirs, member, self._tags.buffers)
            values += theirs
        values /= 1 + len(members)

    def _receive(self, rank: int) -> tuple[int, Sequence[Flat]]:
        count = np.zeros(1, np.int64)
        weights = [np.empty(*part.leaves.find()) for part in self._parts]
        self._communicator.recv(count, rank, self._tags.weights)
        if count[0] == _FAILED:
            raise CollectiveError(f"rank {rank}, which makes the outer steps of the {self._described}, has failed")
        for each in weights:
            self._communicator.recv(each, rank, self._tags.weights)
        return int(count[0]), weights

    @property
    def _quorum(self) -> int:
        """After deaths there may be fewer replicas than were asked for."""
        return min(int(self._options.quorum), len(self._replicas))

    def _begin_to_keep(self) -> None:
        """Let the keeper keep the weights of this rank, if this is its rank and replicas have agreed on some."""
        if self._kept or not self._begun or self._communicator.rank != self._replicas[0][0]:
            return
        self._kept = True
        steps = OuterSteps(
            [part.agreed for part in self._parts if part.agreed is not None],
            [part.momentum for part in self._parts],
            rates=self._rates,
            ranks=list(map(len, self._replicas)),
            quorum=self._quorum,
            count=self._count,
        )
        if self._keeper is not None:
            self._keeper.go_on_from(steps)
            return
        leaders = [members[0] for members in self._replicas]
        self._keeper = Keeper(self._communicator, leaders, steps, self._tags)
        self._finalizer = weakref.finalize(self, self._keeper.stop)


def local_training(described: str, options: LocalOptions, **how: Any) -> LocalTraining:
    """Return what an optimizer of local steps does with others, by its options; see `LocalTraining`."""
    kind = LocalTraining if options.quorum is None else QuorumTraining
    return kind(described, options, **how)
