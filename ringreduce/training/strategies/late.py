"""Late averages: step t applies the average of the gradients of step t - s, and does not wait for later ones.

While s averages travel, the program computes the next gradients. Ranks are at most s steps apart: the bound of a
parameter server, without a server. All ranks apply the same averages in the same order, so that weights have the same
bits everywhere and do not depend on timing: a run that is made again is the same. Each of s + 1 sets of buckets is used
again once its average was applied.

What a step applies was computed with weights that are s steps older, which costs accuracy, and stability: with plain
gradient descent on a quadratic of curvature a, the learning rate must be below (2 / a) sin(pi / (2 (2 s + 1))).

Sources:
    J. Langford, A. J. Smola, M. Zinkevich, "Slow Learners are Fast", NIPS 2009, arXiv 0911.0491: delayed gradients.
    Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013: the
        bound.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ringreduce.common.arguments import whole_number
from ringreduce.common.errors import ConfigError, RingReduceError
from ringreduce.engine import InPlaceAllreduce, Refusal
from ringreduce.training.binding.framework import Found, Look
from ringreduce.training.data.shares import counts_of
from ringreduce.training.gradients.buckets import Bucket
from ringreduce.training.options.features import (
    ACCUMULATION,
    ADASUM,
    BACKWARD,
    CLOSURE,
    COMPRESSION,
    FIRST_TENSORFLOW,
    JOIN,
    LOCAL,
    LOSS_SCALES,
    NO_SCALES,
    OVERLAP,
    PREDIVISION,
    SAMPLER_KNOWS,
    SAMPLES,
    SCALER,
    SHARD,
    SKIP_UNUSED,
    SKIPPING,
    SPARSE,
    StrategyOption,
    refused,
)
from ringreduce.training.options.options import Options
from ringreduce.training.strategies.step_agreement import StepAgreement
from ringreduce.training.strategies.strategy import Averages, Contribution, PendingAverages, StepContext, Strategy

STALENESS = StrategyOption(
    name="staleness",
    default=0,
    annotation="int",
    meaning="by how many steps averages are applied late; the first steps change nothing. See "
    "docs/recipes/staleness.md.",
    feature="staleness",
    check=lambda value: whole_number("staleness", value, 0),
    refuses={
        ADASUM: "it combines the changes of steps, not gradients",
        LOCAL: "`delay` already lets steps go on during an exchange",
        COMPRESSION: "it reduces a bucket in several collectives, which wait for all ranks",
        JOIN: "a rank that joins would lack the last averages",
        OVERLAP: "the reduction already goes on during the next step",
        PREDIVISION: "buckets are scaled before and after a reduction for which the step waits",
        BACKWARD: "a gradient is replaced by an older average, to which the next pass must not add",
        SCALER: "the scale would be that of another step",
        SHARD: "the ranks of a node read each other's buckets, so that each step waits for all of them",
        SKIPPING: "a step applies what another step has submitted",
        SKIP_UNUSED: "whether other ranks use a parameter is known too late",
        SPARSE: "rows are gathered by all ranks together; use sparse_as_dense=True",
        CLOSURE: "a closure is called again for gradients of the same step",
        SAMPLES: f"ranks would wait for each other's numbers; {SAMPLER_KNOWS}",
        FIRST_TENSORFLOW: "it is for optimizers of Keras",
        LOSS_SCALES: f"the scale would be that of another step; {NO_SCALES}",
        ACCUMULATION: "each backward pass makes a step",
    },
    overlaps=False,
    is_late=True,
)


def staleness_of(options: Options) -> int:
    """Return by how many steps averages are applied late; 0: none is."""
    return int(options.strategies.get(STALENESS, 0))


def require_room(averages: Averages, staleness: int) -> None:
    """Raise a `ConfigError` for more averages than there can be, which were saved with another staleness."""
    if len(averages) > staleness:
        raise ConfigError(
            f"{len(averages)} averages that were saved are still to be applied, and with staleness={staleness} there "
            "is no place for them; call synchronize() before you save"
        )


class _LateGradients(NamedTuple):
    """Gradients of one step, under way or averaged.

    Attributes:
        parameters: all of the optimizer's then, in registration order.
        gradients: by the number of the parameter, among these.
        operations: which reduce them; none if they are known to be averages on all ranks.
    """

    parameters: Sequence[Any]
    gradients: Mapping[int, Any]
    operations: Sequence[InPlaceAllreduce]

    def of(self, parameters: Sequence[Any]) -> dict[int, Any]:
        """Return the gradients by the number of the parameter among those that there are now."""
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        now = ((numbers.get(id(self.parameters[number])), each) for number, each in self.gradients.items())
        return {number: each for number, each in now if number is not None}


class LateAverages(Strategy, PendingAverages):
    """Submits the gradients of a step, and returns the averages of one that was made ``staleness`` steps before.

    Args:
        context: of the optimizer.
        agreement: of the ranks; before the first step, the only one in which a rank waits for all others.
    """

    def __init__(self, context: StepContext, agreement: StepAgreement) -> None:
        self._staleness = context.options.strategies[STALENESS]
        self._memory = context.memory
        self._ranks = context.ranks
        self._buckets = context.buckets
        self._named = context.named
        self._checks = context.checks
        self._count = context.count
        self._agreement = agreement
        self._rings: dict[int, deque[Bucket]] = {}  # by the id of a bucket: it and others in turn, the next one first
        self._pending: deque[_LateGradients] = deque()
        self._steps = 0

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    @property
    def late(self) -> LateAverages:
        return self

    def reduce(self, contribution: Contribution) -> list[Any]:
        """Submit gradients, and return the averages to apply in this step: None in the first steps. Collective.

        Trainable parameters without a gradient count as zeros.

        Raises:
            ConfigError: some rank has a sparse gradient or a number of samples, or has joined.
        """
        if not self._checks.idle:
            self._checks.look(self._count.reduced, contribution.gradients)
            if self._count.reduced:  # the agreement of the first step compares data itself
                self._checks.compare_data(self._count.reduced, contribution.gradients)
        counts = dict(enumerate(counts_of(self._ranks.engine) or ()))  # all ranks know all of them
        self._buckets.weigh(counts, self._ranks.size)
        error = None if contribution.samples is None else refused(SAMPLES, "staleness", STALENESS.refuses[SAMPLES])
        if self._count.reduced == 0:
            self._agreement.agree(contribution._replace(samples=error))
        self._count.add()  # a step that this rank alone refuses counts, too, as it does on the others
        self._pending.append(self._submitted(contribution, error))
        if len(self._pending) <= self._staleness:  # torch's optimizers skip None; `ListTraining` makes it zeros
            return [None] * len(contribution.parameters)
        return self.next()

    def next(self) -> list[Any]:
        exchange = self._pending.popleft()
        self._wait(exchange)
        parameters = self._parameters()
        gradients = exchange.of(parameters)
        return [gradients.get(number) for number in range(len(parameters))]

    def state(self) -> list[dict[int, Any]]:
        for exchange in self._pending:
            self._wait(exchange)
        self._pending = deque(exchange._replace(operations=()) for exchange in self._pending)
        return [{number: self._memory.clone(each) for number, each in those.items()} for those in self.loaded()]

    def load(self, averages: Averages) -> None:
        for exchange in self._pending:
            for operation in exchange.operations:
                with suppress(RingReduceError):
                    self._ranks.engine.wait(operation)
        parameters = self._parameters()
        self._pending = deque(_LateGradients(parameters, each, ()) for each in averages)

    def loaded(self) -> Averages:
        parameters = self._parameters()
        return [exchange.of(parameters) for exchange in self._pending if not exchange.operations]

    def _parameters(self) -> list[Any]:
        return [parameter for _, parameter in self._named()]

    def _submitted(self, contribution: Contribution, error: ConfigError | None) -> _LateGradients:
        """Submit gradients; ``error``: of this rank's arguments, raised on all ranks."""
        parameters = contribution.parameters
        gradients = contribution.gradients
        trainable = self._memory.is_trainable
        wanted = bytes(
            max(each, Found.DENSE) if each or trainable(parameter) else each
            for each, parameter in zip(contribution.found, parameters, strict=True)
        )
        name = f"{self._ranks.name}, late {self._steps % (self._staleness + 1)}"
        self._steps += 1
        if max(wanted, default=0) > Found.DENSE:
            error = ConfigError("staleness is for dense gradients, and some rank has another; use sparse_as_dense=True")
        if error is not None:
            self._ranks.engine.refuse(Refusal(f"{name}, 0", "late step", error))
            raise error
        self._buckets.number(parameters)
        if self._buckets.update(parameters, wanted):
            there = {id(bucket) for bucket in self._buckets}
            self._rings = {number: ring for number, ring in self._rings.items() if number in there}
        filled = []
        placed = dict[int, Any]()
        for bucket in self._buckets:
            target = self._free(bucket, gradients)
            mine = list(gradients)
            target.fill(mine, wanted)
            placed |= {number: mine[number] for number in target.numbers if wanted[number]}
            filled.append(target)
        used = f"{len(wanted) - wanted.count(0)} of {len(wanted)} parameters, {zlib.crc32(wanted):08x}"
        return _LateGradients(parameters, placed, self._operations(name, filled, used))

    def _free(self, bucket: Bucket, gradients: Sequence[Any]) -> Bucket:
        """Return the next bucket of the ring; a new one, if the program still holds a gradient in it."""
        ring = self._rings.get(id(bucket))
        if ring is None:
            ring = self._rings[id(bucket)] = deque([bucket, *(bucket.apart() for _ in range(self._staleness))])
        target = ring[0]
        target.follow(bucket)
        if Look.ALIASED in target.look(gradients):
            target = ring[0] = bucket.apart()
        ring.rotate(-1)
        return target

    def _operations(self, name: str, filled: Sequence[Bucket], used: str) -> list[InPlaceAllreduce]:
        """Submit the reduction of buckets: together, but those of another format or place by themselves.

        Args:
            name: of the operations.
            filled: the buckets.
            used: which parameters are trained, in words; must agree.
        """
        operations = []
        for number, kind in enumerate(dict.fromkeys(bucket.travels for bucket in filled)):
            these = [bucket for bucket in filled if bucket.travels == kind]
            shares = self._buckets.weights
            weights = "" if shares is None else f", weights {zlib.crc32(repr(shares.of_ranks).encode()):08x}"
            text = f"{len(these)} buckets of {self._ranks.name}, {self._buckets.layout:08x}, of {used}{weights}"
            title = f"late gradients of {self._ranks.described}"
            made = self._buckets.operation(
                f"{name}, {number}", text, these, [bucket.flat for bucket in these], title=title
            )
            self._ranks.engine.submit(made)
            operations.append(made)
        return operations

    def _wait(self, exchange: _LateGradients) -> None:
        for operation in exchange.operations:
            self._ranks.wait(operation)
            if operation.active < self._ranks.size:
                raise ConfigError(
                    "with staleness no rank may join while others go on, as its last averages would be missing; give "
                    "all ranks as many batches"
                )
