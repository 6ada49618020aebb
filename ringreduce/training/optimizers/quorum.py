"""DiLoCo whose outer steps do not wait for all replicas: of some that have come, and with those that come late.

The first rank keeps the weights that replicas agree on. A replica that has ended its period sends it
``agreed - local``, and gets the weights after the outer step that this is a part of. The step is made once ``quorum``
replicas have come, and others that were in time for the step before had another tenth of the time that these took.

A replica that comes later gets the weights of that step at once and goes on from there, whatever it has missed. What it
had learnt is a part of the next step. With t steps made, s of them when a replica began its period, and n ranks of it,

    delta = sum(share * (agreed - local)) / sum(share),    share = n / (1 + t - s)

and the outer step is that of `ringreduce.training.optimizers.local`. So a difference counts by half if one step was
made without it, and by a third after two. Which replicas are in time depends on the moment; all that get the weights of
a step get the same bits.

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
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.send_recv import PendingMessage
from ringreduce.common.errors import CollectiveTimeoutError, ConfigError
from ringreduce.runtime import global_process_set
from ringreduce.training.compression import State
from ringreduce.training.optimizers.local import Average, Flat, Fragment, Leaves, LocalTraining, broadcast, outer_step
from ringreduce.training.options.local_options import LocalOptions

_OWN_TAGS = 1 << 62  # Tags from here on are no program's; `ringreduce.scan` has the last.

#: Replicas that were in time for the last step get so much more of the time that the quorum took.
_GRACE = 0.1

_NAP_S = 1e-3  # between two looks for messages, which have nothing to sleep on


class Tags(NamedTuple):
    """The tags of messages to the keeper of the weights, and from it."""

    differences: int
    weights: int


class _Count:
    """How many optimizers there were in a world; equal on all ranks."""

    def __init__(self) -> None:
        self._trainings = 0

    def next_tags(self) -> Tags:
        """Return tags that no other optimizer has."""
        self._trainings += 1
        return Tags(_OWN_TAGS + 2 * self._trainings, _OWN_TAGS + 2 * self._trainings + 1)


class Differences(NamedTuple):
    """What a replica has learnt in a period.

    Attributes:
        replica: its number.
        since: how many outer steps there were when it began.
        values: by part.
    """

    replica: int
    since: int
    values: Sequence[Flat]


class Rates(NamedTuple):
    """Learning rate and momentum of the outer steps of a part."""

    lr: float
    mu: float


class OuterSteps:
    """The weights that replicas agree on, and the steps that they make together. Local.

    Args:
        agreed: by part; copied.
        momentum: by part; None: zeros.
        rates: by part.
        ranks: how many each replica has.
        quorum: so many replicas make a step.
        count: how many steps there were.

    Attributes:
        count, momentum: as above.
        weights: by part; arrays that are not written to.
        waiting: the replicas that have come in time for the next step.
    """

    def __init__(
        self,
        agreed: Sequence[Flat],
        momentum: Sequence[Flat | None],
        *,
        rates: Sequence[Rates],
        ranks: Sequence[int],
        quorum: int,
        count: int = 0,
    ) -> None:
        self.count = count
        self.weights = [each.copy() for each in agreed]
        self.momentum = [
            None if not rate.mu else np.zeros_like(flat) if kept is None else kept.copy()
            for flat, kept, rate in zip(agreed, momentum, rates, strict=True)
        ]
        self.waiting: set[int] = set()
        self._expected = set(range(len(ranks)))
        self._come: list[Differences] = []
        self._rates = rates
        self._ranks = ranks
        self._quorum = quorum

    def take(self, differences: Differences) -> bool:
        """Take what a replica has learnt for the next step; return whether it came in time for that."""
        self._come.append(differences)
        if differences.since < self.count:
            return False
        self.waiting.add(differences.replica)
        return True

    @property
    def complete(self) -> bool:
        """Whether enough replicas have come."""
        return len(self.waiting) >= self._quorum

    @property
    def all_here(self) -> bool:
        """Whether all have come that were in time for the last step."""
        return self.waiting >= self._expected

    def make(self) -> None:
        """Make the step."""
        self._expected = self.waiting
        self._step(self._rates)

    def average(self, differences: Sequence[Differences]) -> None:
        """Make a step of all replicas, that averages what they have: of learning rate 1, without momentum."""
        self._come += differences
        self._step([Rates(1.0, 0.0)] * len(self._rates))

    def _step(self, rates: Sequence[Rates]) -> None:
        shares = [self._ranks[each.replica] / (1 + self.count - each.since) for each in self._come]
        made = []
        for part, (rate, agreed, momentum) in enumerate(zip(rates, self.weights, self.momentum, strict=True)):
            delta = np.zeros_like(agreed)
            for share, each in zip(shares, self._come, strict=True):
                delta += agreed.dtype.type(share / sum(shares)) * each.values[part]
            changed = agreed.copy()  # Messages may be under way with the old ones.
            outer_step(changed, momentum if rate.mu else None, delta, lr=rate.lr, mu=rate.mu)
            made.append(changed)
        self.weights = made
        self._come = []
        self.waiting = set()
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

    def poll(self) -> tuple[Differences, bool] | None:
        """Return differences that have come, and whether they are those of `QuorumTraining.synchronize`; else None."""
        if not all(message.test() for message in self._coming):
            return None
        for message in self._coming:
            message.wait()
        if not self._values:
            self._values = [np.empty_like(each) for each in self._like]
            self._coming = list(map(self._receive, self._values))
            return None
        since, last = self._head.tolist()
        come = Differences(self._replica, since, self._values)
        self._values = []
        self._coming = [self._receive(self._head)]
        return come, bool(last)

    def _receive(self, array: Flat) -> PendingMessage:
        return self._communicator.irecv(array, self._source, self._tag)


class Keeper:
    """Keeps the weights that replicas agree on, in a thread of the first rank.

    Args:
        communicator: of all ranks.
        leaders: the first rank of each replica; the first of them is this rank.
        steps: the weights, which belong to this from now on.
        tags: of the messages.
    """

    def __init__(self, communicator: Communicator, leaders: Sequence[int], steps: OuterSteps, tags: Tags) -> None:
        self._communicator = communicator
        self._leaders = leaders
        self.steps = steps
        self._tags = tags
        self._changed = threading.Condition()
        self._last: dict[int, Differences] = {}
        self._answer: tuple[int, Sequence[Flat]] | None = None  # to the replica of this rank
        self._error: Exception | None = None
        self._over = False
        self._thread = threading.Thread(target=self._work, name="ringreduce outer steps", daemon=True)
        self._thread.start()

    def exchange(self, since: int, values: Sequence[Flat], *, last: bool) -> tuple[int, Sequence[Flat]]:
        """Give what the replica of this rank has learnt; return the number of steps and the weights it goes on from."""
        messages = self._communicator.point_to_point
        assert messages is not None
        with self._changed:
            self._answer = None
            self._take(Differences(0, since, values), last=last)
            self._changed.notify()
        messages.waiter.until(self._outcome, lambda: "other replicas")
        outcome = self._outcome()
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome is not None
        return outcome

    def _outcome(self) -> tuple[int, Sequence[Flat]] | Exception | None:
        return self._error or self._answer

    def go_on_from(self, steps: OuterSteps) -> None:
        """Keep other weights, and forget what has come for the old ones."""
        with self._changed:
            self.steps = steps
            self._last = {}

    def end(self) -> None:
        """End the thread."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        ended = time.monotonic()
        deadline: float | None = None
        try:
            incoming = [
                _Incoming(self._communicator, replica, leader, self.steps.weights, self._tags.differences)
                for replica, leader in enumerate(self._leaders)
                if replica > 0
            ]
            while self._communicator.lifetime.open:
                come = [each.poll() for each in incoming]
                with self._changed:
                    if self._over:
                        return
                    for pair in come:
                        if pair is not None:
                            self._take(pair[0], last=pair[1])
                    now = time.monotonic()
                    if self.steps.complete and deadline is None:
                        deadline = now + _GRACE * (now - ended)
                    if deadline is not None and (self.steps.all_here or now >= deadline):
                        waiting = self.steps.waiting
                        self.steps.make()
                        self._send(waiting)
                        ended, deadline = time.monotonic(), None
                    elif not any(come):
                        self._changed.wait(_NAP_S)
        except Exception as error:
            self._error = error

    def _take(self, differences: Differences, *, last: bool) -> None:
        if not last:
            if not self.steps.take(differences):
                self._send([differences.replica])
            return
        self._last[differences.replica] = differences
        if len(self._last) == len(self._leaders):
            self.steps.average(list(self._last.values()))
            self._last = {}
            self._send(range(len(self._leaders)))

    def _send(self, replicas: Iterable[int]) -> None:
        answer = self.steps.count, self.steps.weights
        for replica in replicas:
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
        self._kept = False  # whether that has the weights of this training, not those before a state was loaded
        self._count = 0
        self._rates = [Rates(options.outer_lr, options.outer_momentum)] * len(parameters) + [Rates(1.0, 0.0)] * len(
            others
        )
        averaged = [Fragment(each.leaves, each.what, options) for each in others]
        super().__init__(described, options, parameters=parameters, others=averaged, writing=writing)
        self._parts = [each for each in self._averages if isinstance(each, Fragment)]  # All are.
        most = len(self._replicas)
        if options.quorum > most:
            raise ConfigError(f"quorum must be at most {most}, as there are so many replicas; got {options.quorum}")

    @property
    def outer_steps(self) -> int:
        return self._count

    def before_step(self) -> None:
        super().before_step()
        self._begin_to_keep()

    def after_step(self) -> None:
        self.steps += 1
        if (
            self.steps > self._options.warmup_steps
            and (self.steps - self._options.warmup_steps) % self._options.period == 0
        ):
            self._exchange(last=False)
            self.steps = self._options.warmup_steps + self._count * self._options.period

    def synchronize(self) -> None:
        if self.steps <= self._options.warmup_steps:
            return  # All have the same weights.
        self._exchange(last=True)

    def rejoin(self) -> bool:
        if global_process_set.engine is self._engine:
            return False
        self._connect()
        self._align()
        return True

    def state_dict(self) -> dict[str, Any]:
        self._keep_momentum()
        state = super().state_dict()
        for number, part in enumerate(self._parts):
            if part.momentum is not None:
                state["averages"][number]["momentum"] = part.momentum.copy()
        return {**state, "outer_steps": self._count}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self._kept = False
        super().load_state_dict(state)
        self._count = 0 if state is None else state["outer_steps"]
        for number, part in enumerate(self._parts):
            kept: State = {} if state is None else state["averages"][number]
            part.momentum = kept.get("momentum")

    def _started(self) -> str:
        started = ", ".join(f"{part.start():08x}" for part in self._parts)
        for part in self._parts:
            part.momentum = None  # The keeper has it.
        return started

    def _connect(self) -> None:
        self._end_keeper()
        super()._connect()
        for part in self._averages:
            part.kept = ("then", "agreed")
        self._communicator = global_process_set.communicator
        messages = self._communicator.point_to_point
        if messages is None or not messages.concurrent:
            raise ConfigError("quorum needs MPI with threads (MPI_THREAD_MULTIPLE), and this process has one alone")
        self._tags = self._engine.attached[_Count].next_tags()
        self._replicas = self._options.replicas(self._communicator.topology.nodes)
        self._mine = next(members for members in self._replicas if self._communicator.rank in members)

    def _end_keeper(self) -> None:
        if self._keeper is not None:
            self._keep_momentum()
            self._keeper.end()
        self._keeper = None
        self._kept = False

    def _keep_momentum(self) -> None:
        if self._keeper is not None and self._kept:
            for part, momentum in zip(self._parts, self._keeper.steps.momentum, strict=True):
                part.momentum = momentum

    def _align(self) -> None:
        """Let all go on from the weights of most outer steps, and keep what each has learnt since its own. Collective.

        A rank that has none takes those.
        """
        begun = self._parts[0].agreed is not None
        mine = np.array([[self._count if begun else -1, self._parts[0].momentum is not None, self.steps]])
        everyone = self._run("outer steps", "outer steps", lambda ranks: ranks.allgather(mine))
        self._count, root = int(everyone[:, 0].max()), int(everyone[:, 0].argmax())
        if self._count < 0:
            self._count, self.steps = 0, int(everyone[:, 2].max())
            return
        self.steps = self._options.warmup_steps + self._count * self._options.period
        with self._writing():
            for part in self._parts:
                newest = np.empty(*part.leaves.find())
                local = newest.copy()
                part.leaves.read(local)
                if self._communicator.rank == root:
                    assert part.agreed is not None
                    np.copyto(newest, part.agreed)
                self._run("weights", "weights", partial(broadcast, newest, root))
                part.leaves.write(newest if part.agreed is None else newest + (local - part.agreed))
                part.agreed = newest
                self._share_momentum(part, everyone[:, 1])

    def _share_momentum(self, part: Fragment, has_it: Sequence[int]) -> None:
        """Give the new keeper the momentum of the old one; without that rank it begins anew."""
        if not any(has_it):
            return
        assert part.agreed is not None
        momentum = np.zeros_like(part.agreed) if part.momentum is None else part.momentum
        self._run("momentum", "momentum", partial(broadcast, momentum, int(np.argmax(has_it))))
        part.momentum = momentum if self._communicator.rank == self._replicas[0][0] else None

    def _exchange(self, *, last: bool) -> None:
        """Give what this replica has learnt, and take over the weights that it goes on from."""
        values = []
        for part in self._parts:
            local = np.empty(*part.leaves.find())
            part.leaves.read(local)
            assert part.agreed is not None
            values.append(part.agreed - local)
        try:
            self._count, weights = self._answer(values, last=last)
        except CollectiveTimeoutError as error:
            needed = len(self._replicas) if last else self._quorum
            raise CollectiveTimeoutError(
                f"fewer than {needed} of {len(self._replicas)} replicas of the {self._described} came in time: {error}"
            ) from error
        with self._writing():
            for part, agreed in zip(self._parts, weights, strict=True):
                part.leaves.find()
                part.leaves.write(agreed)
                part.agreed = agreed

    def _answer(self, values: Sequence[Flat], *, last: bool) -> tuple[int, Sequence[Flat]]:
        ranks = self._communicator
        leader = self._mine[0]
        keeper = self._replicas[0][0]
        if ranks.rank != leader:
            return self._receive(leader)
        if ranks.rank == keeper:
            self._begin_to_keep()
            assert self._keeper is not None
            answer = self._keeper.exchange(self._count, values, last=last)
        else:
            arrays = [np.array([self._count, last], np.int64), *values]
            sent = [ranks.isend(each, keeper, self._tags.differences) for each in arrays]
            answer = self._receive(keeper)
            for message in sent:
                message.wait()
        for message in [
            each for member in self._mine[1:] for each in send_all(ranks, answer, member, self._tags.weights)
        ]:
            message.wait()
        return answer

    def _receive(self, rank: int) -> tuple[int, Sequence[Flat]]:
        count = np.zeros(1, np.int64)
        weights = [np.empty(*part.leaves.find()) for part in self._parts]
        for each in (count, *weights):
            self._communicator.recv(each, rank, self._tags.weights)
        return int(count[0]), weights

    @property
    def _quorum(self) -> int:
        """After deaths there may be fewer replicas than were asked for."""
        return min(int(self._options.quorum), len(self._replicas))

    def _begin_to_keep(self) -> None:
        """Let the first rank keep the weights, once local training has begun."""
        begun = self.steps >= self._options.warmup_steps
        if self._kept or not begun or self._communicator.rank != self._replicas[0][0]:
            return
        self._kept = True
        agreed = [part.agreed for part in self._parts if part.agreed is not None]
        steps = OuterSteps(
            agreed,
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
        weakref.finalize(self, self._keeper.end)


def local_training(described: str, options: LocalOptions, **how: Any) -> LocalTraining:
    """Return what an optimizer of local steps does with others, by its options; see `LocalTraining`."""
    kind = LocalTraining if options.quorum is None else QuorumTraining
    return kind(described, options, **how)
