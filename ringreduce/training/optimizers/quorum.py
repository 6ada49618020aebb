"""DiLoCo whose outer steps do not wait for all replicas: some make a step, and what comes late is a part of the next.

The syncer, on the first rank of the first replica, keeps the weights that replicas agree on. A replica that ends its
period sends it its difference, ``agreed - local``, and gets the weights after the outer step that this difference is a
part of. The syncer makes a step when ``quorum`` replicas wait for it. Before that, it gives those that took part in the
last step a tenth of the time since that step, at most a quarter of the time limit.

A replica whose difference comes after the step is late. It gets the newest weights, however many steps it has missed:
at once, or with the next step if more than half of the duration of the last step has passed. Its difference is a part
of the next step. Let t be the number of outer steps so far, s that at the start of the replica's period, and n the
number of its ranks:

    factor = n / (1 + t - s)
    delta = sum(factor * (agreed - local)) / sum(factor)

The outer step is that of `ringreduce.training.optimizers.local`. So a difference that is one step late counts by half.
Which replicas are late may differ from run to run; all that get the weights of a step get the same bits.

Sources:
    A. Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv 2604.21428: a syncer of the
        weights, the quorum, and time for those who are nearly there.
    C. Xie, S. Koyejo, I. Gupta, "Asynchronous Federated Optimization", arXiv 1903.03934: factors by age.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ringreduce.common.errors import CollectiveError, CollectiveTimeoutError, ConfigError, RingReduceError
from ringreduce.common.reduce_ops import SUM
from ringreduce.runtime import global_process_set
from ringreduce.training.compression import State
from ringreduce.training.optimizers.local import Average, Flat, Fragment, Leaves, LocalTraining, broadcast, values_of
from ringreduce.training.optimizers.outer_steps import Differences, OuterRates, OuterSteps, Wanted
from ringreduce.training.optimizers.syncer import FAILED, Syncer, TagCount, send_all
from ringreduce.training.options.local_options import LocalOptions


class QuorumTraining(LocalTraining):
    """Local training whose outer steps do not wait for all replicas.

    Args, Attributes:
        as for `LocalTraining`, but ``steps`` differ between replicas: those of the outer steps in this replica's
        weights, and its own since then.

    Raises:
        ConfigError: there are fewer replicas than ``quorum``; or MPI lacks MPI_THREAD_MULTIPLE.
    """

    def __init__(
        self,
        described: str,
        options: LocalOptions,
        *,
        parameters: Sequence[Leaves],
        others: Sequence[Average],
        **how: Any,
    ) -> None:
        self._syncer: Syncer | None = None
        self._begun = False  # whether replicas have agreed on weights
        self._count = 0
        rates = OuterRates(options.outer_lr, options.outer_momentum)
        self._rates = [rates] * len(parameters) + [OuterRates(1.0, 0.0)] * len(others)
        self._buffers = [Fragment(each.leaves, each.what, options) for each in others]
        super().__init__(described, options, parameters=parameters, others=self._buffers, **how)
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
                part.momentum = None  # The syncer has it.
        self._begin_to_sync()

    def after_step(self) -> None:
        self.steps += 1
        own = self.steps - self._options.warmup_steps
        if self._begun and own > 0 and own % self._options.period == 0:
            self._exchange(Wanted.STEP)
            self.steps = self._options.warmup_steps + self._count * self._options.period

    def synchronize(self) -> None:
        if self._begun:
            self._exchange(Wanted.AVERAGE)
        else:
            super().synchronize()

    def rejoin(self) -> bool:
        if global_process_set.engine is self._engine:
            return False
        self._connect()
        has_momentum = any(part.momentum is not None for part in self._parts)
        mine = np.array([[self._count if self._begun else -1, has_momentum, self.steps]])
        everyone = self._run("outer steps", "outer steps", lambda ranks: ranks.allgather(mine))
        newest = int(everyone[:, 0].max())
        if newest < 0:
            self.steps = int(everyone[:, 2].max())
            return True
        factor = 1 / (1 + newest - self._count) if self._begun else 0.0
        with self._writing():
            for part in self._parts:
                self._average_again(part, factor, root=int(everyone[:, 0].argmax()))
                self._hand_over_momentum(part, everyone[:, 1])
        self._begun = True
        self._count = newest
        self.steps = self._options.warmup_steps + newest * self._options.period
        return True

    def state_dict(self) -> dict[str, Any]:
        self._take_momentum()
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
        self._end_syncer()
        super()._connect()
        for part in self._averages:
            part.kept = ("then", "agreed")
        self._failed: RingReduceError | None = None
        self._loaded = False  # whether this rank has loaded weights that others may not have
        self._communicator = global_process_set.communicator
        messages = self._communicator.point_to_point
        if messages is None or not messages.concurrent:
            raise ConfigError("quorum needs MPI with threads (MPI_THREAD_MULTIPLE), and this process has one alone")
        self._tags = self._engine.attached[TagCount].next_tags()
        self._replicas = self._options.replicas(self._communicator.topology.nodes)
        self._quorum = min(int(self._options.quorum), len(self._replicas))  # After deaths there may be fewer.
        self._mine = next(members for members in self._replicas if self._communicator.rank in members)

    def _end_syncer(self) -> None:
        if self._syncer is not None:
            self._finalizer.detach()
            self._syncer.end()
            self._take_momentum()
        self._syncer = None
        self._kept = False  # whether the syncer has the weights of this rank; False once these were loaded

    def _take_momentum(self) -> None:
        if self._syncer is not None and self._kept:
            for part, momentum in zip(self._parts, self._syncer.steps.momentum, strict=True):
                part.momentum = momentum

    def _average_again(self, part: Fragment, factor: float, root: int) -> None:
        """Make the weights of all ranks of a new world the newest ones minus the average of the ranks' differences.

        Args:
            part: whose weights.
            factor: of this rank's difference in the average; 0: this rank has not begun.
            root: a rank that has the newest weights.
        """
        newest = np.empty(*part.leaves.find())
        learnt = np.zeros_like(newest)
        if part.agreed is not None and factor:
            part.leaves.read(learnt)
            np.subtract(part.agreed, learnt, out=learnt)
            newest[:] = part.agreed
        self._run("weights", "weights", partial(broadcast, newest, root))
        learnt *= factor
        factors = np.array([factor])
        self._run("learnt", "what each has learnt", lambda ranks: ranks.allreduce(learnt, SUM, out=learnt))
        self._run("factors", "factors", lambda ranks: ranks.allreduce(factors, SUM, out=factors))
        newest -= learnt / newest.dtype.type(factors[0])
        part.leaves.write(newest)
        part.agreed = newest

    def _hand_over_momentum(self, part: Fragment, has_it: Sequence[int]) -> None:
        """Give the new syncer the momentum of the old one; without that rank it begins anew."""
        if not any(has_it):
            return
        assert part.agreed is not None
        momentum = np.zeros_like(part.agreed) if part.momentum is None else part.momentum.copy()
        self._run("momentum", "momentum", partial(broadcast, momentum, int(np.argmax(has_it))))
        part.momentum = momentum if self._communicator.rank == self._replicas[0][0] else None

    def _exchange(self, wanted: Wanted) -> None:
        """Give the difference of this replica to the syncer, and take over the weights that it sends."""
        if self._failed is not None:
            raise self._failed
        if self._loaded:
            wanted |= Wanted.LOADED
        try:
            count, weights = self._answer(wanted)
        except CollectiveTimeoutError as error:
            needed = "all" if wanted else f"{self._quorum}"
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

    def _answer(self, wanted: Wanted) -> tuple[int, Sequence[Flat]]:
        ranks = self._communicator
        leader, *members = self._mine
        syncer = self._replicas[0][0]
        local = [values_of(part.leaves) for part in self._parts]
        if ranks.rank != leader:
            for values in local[len(self._fragments) :]:
                ranks.send(values, leader, self._tags.buffers)
            return self._receive(leader)
        for values in local[len(self._fragments) :]:
            self._add_those_of(members, values)
        agreed = [part.agreed for part in self._parts if part.agreed is not None]
        learnt = [old - now for old, now in zip(agreed, local, strict=True)]
        if ranks.rank == syncer:
            self._begin_to_sync()
            assert self._syncer is not None
            loaded = agreed if Wanted.LOADED in wanted else ()
            answer = self._syncer.exchange(Differences(0, self._count, wanted, learnt, loaded))
        else:
            arrays = [np.array([self._count, wanted], np.int64), *learnt, *(agreed if Wanted.LOADED in wanted else ())]
            sent = [ranks.isend(each, syncer, self._tags.differences) for each in arrays]
            answer = self._receive(syncer)
            for message in sent:
                message.wait()
        for message in [each for member in members for each in send_all(ranks, answer, member, self._tags.weights)]:
            message.wait()
        return answer

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
        if count[0] == FAILED:
            raise CollectiveError(f"rank {rank}, which makes the outer steps of the {self._described}, has failed")
        for each in weights:
            self._communicator.recv(each, rank, self._tags.weights)
        return int(count[0]), weights

    def _begin_to_sync(self) -> None:
        """Let the syncer keep the weights of this rank, if this is its rank and replicas have agreed on some."""
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
        if self._syncer is not None:
            self._syncer.go_on_from(steps)
            return
        leaders = [members[0] for members in self._replicas]
        self._syncer = Syncer(self._communicator, leaders, steps, self._tags)
        self._finalizer = weakref.finalize(self, self._syncer.stop)


def local_training(described: str, options: LocalOptions, **how: Any) -> LocalTraining:
    """Return what an optimizer of local steps does with others, by its options; see `LocalTraining`."""
    kind = LocalTraining if options.quorum is None else QuorumTraining
    return kind(described, options, **how)
