"""Gradients in, gradients out: lists of arrays, sparse rows or None, reduced over the ranks before each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ringreduce.engine import Engine
from ringreduce.training.binding.framework import Found, Hooks, Memory, Named
from ringreduce.training.binding.identity import Identity, name_in
from ringreduce.training.compression import State
from ringreduce.training.gradients.buckets import Buckets
from ringreduce.training.gradients.checks import Checks, Settings
from ringreduce.training.gradients.record import OptimizerRanks
from ringreduce.training.optimizers.refusals import require_together
from ringreduce.training.options.features import ADASUM, BACKWARD, SAMPLES
from ringreduce.training.options.options import Options
from ringreduce.training.strategies.chosen import strategy_for
from ringreduce.training.strategies.overlapped import Overlap
from ringreduce.training.strategies.parts import Sharding
from ringreduce.training.strategies.strategy import Contribution, PendingAverages, StepContext, StepCount


class GradientReducer:
    """Reduces the gradients of one optimizer over the ranks, by the strategy that its options choose.

    Ranks that have joined need none of this: the operations that it submits go on without them.

    Args:
        memory: the framework's.
        engine: of the ranks that train together.
        named: returns names and parameters, all of the optimizer's, in registration order; equal on all ranks.
        kind: of the optimizer, for errors.
        over: its parameters, for errors; the same on all ranks.
        options: settled; the same on all ranks.
        settings: returns this rank's hyper-parameters, as text by name; None: the model of `Checks` has them. The ranks
            compare theirs in steps 1, 2, 4, 8 and so on, as that takes a while.
        identity: of the optimizer, for names of operations; None: it is made in the same order on all ranks.

    Attributes:
        memory, named, options: the arguments.
        ranks: its collectives.
        buckets: its buckets.
        checks: of its gradients.
        overlap: what reduces buckets before the step; None: the framework calls no hooks in a backward pass.
        sharding: what has the parameters in memory of the node; None: each rank has its own.
        late: the averages that later steps apply; None: each step applies its own.
    """

    def __init__(
        self,
        memory: Memory,
        engine: Engine,
        named: Callable[[], Named],
        kind: str,
        over: str,
        options: Options,
        settings: Settings | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.memory = memory
        self.named = named
        self.options = options
        name = name_in(engine, identity or f"DistributedOptimizer over {over},")
        self.ranks = OptimizerRanks(
            engine, name, described=f"{kind} over {over}", where="backward pass" if options.in_backward else "step"
        )
        self.buckets = Buckets(memory, self.ranks, named=named, options=options)
        self.checks = checks = Checks(memory, self.ranks, named, settings)
        self.overlap = Overlap(memory, self.buckets, checks) if isinstance(memory, Hooks) else None
        self.sharding = (
            None if options.shard is None else Sharding(memory, self.ranks, buckets=self.buckets, options=options)
        )
        self._count = StepCount()
        context = StepContext(
            memory, self.ranks, named=named, options=options, buckets=self.buckets, checks=checks, count=self._count
        )
        self._strategy = strategy_for(context, checks.settings, overlap=self.overlap, sharding=self.sharding)
        self.late: PendingAverages | None = self._strategy.late

    def reduce(
        self,
        gradients: Sequence[Any],
        fresh: Sequence[bool] | None = None,
        samples: Any = None,
        parameters: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Return the gradients' averages or sums over the ranks. Collective.

        Gradients that some ranks lack count as zeros there. With staleness, those of an earlier step are returned.

        Args:
            gradients: of all parameters, in registration order; None where there is none.
            fresh: which of them count; None: all.
            samples: over how many samples this rank's gradients are a mean; averages are weighted by these numbers. On
                all ranks or none. None: as a sampler says that divides by speed; where none does, ranks weigh equally.
            parameters: all of them, as ``named`` returns them now; None: this asks it.

        Raises:
            UnsupportedBufferError: on all ranks, if some rank has a gradient that cannot be reduced.
            ConfigError: on all ranks, if gradients reduced before the step were overwritten or cleared on some, or
                numbers of samples are wrong or missing on some.
        """
        if parameters is None:
            parameters = [parameter for _, parameter in self.named()]
        given = list(gradients)
        found = self.memory.found(given)
        if fresh is not None:
            found = bytes([each if new else Found.NO_GRADIENT for each, new in zip(found, fresh, strict=True)])
        elif Found.NO_GRADIENT in found and not self.options.skip_unused:
            found = self._with_zeros(found, parameters)
        return self._strategy.reduce(Contribution(parameters, given, found=found, samples=samples))

    def stepped(self) -> None:
        """Take note that the optimizer has made a step."""
        self._count.stepped += 1

    @property
    def steps(self) -> int:
        """How many steps the optimizer has made; counted from 0 again when all ranks have joined."""
        return self._count.stepped

    def require_samples_allowed(self, reduced: str | None) -> None:
        """Raise a `ConfigError` unless the next step may have numbers of samples. Local.

        With staleness `reduce` raises it, on all ranks.

        Args:
            reduced: what reduced the gradients of that step already, by its name in `refusals`; None: nothing.
        """
        options = self.options
        used = {ADASUM: options.adasum, BACKWARD: options.in_backward, reduced: True}
        require_together([SAMPLES, *(name for name, is_used in used.items() if name is not None and is_used)])

    def own_parts(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are reduced that this rank needs: with shards, those of its own parts."""
        return nullcontext() if self.sharding is None else self.sharding.uncleared.own_parts()

    def state_dict(self) -> dict[int, State]:
        """See `Buckets.state_dict`; ends reductions that are under way first."""
        if self.overlap is not None:
            self.overlap.stop()
        return self.buckets.state_dict()

    def load_state_dict(self, state: Mapping[int, State]) -> None:
        """See `Buckets.load_state_dict`."""
        if self.overlap is not None:
            self.overlap.stop()
        self.buckets.load_state_dict(state)

    @property
    def compression_error(self) -> float:
        """The largest relative error that compressing a bucket made on this rank in the last step."""
        return max((bucket.reducer.error for bucket in self.buckets if bucket.reducer is not None), default=0.0)

    def _with_zeros(self, found: bytes, parameters: Sequence[Any]) -> bytes:
        """Return what was found, where gradients that trainable parameters lack count as zeros."""
        return bytes(
            Found.DENSE if each == Found.NO_GRADIENT and self.memory.is_trainable(parameter) else each
            for each, parameter in zip(found, parameters, strict=True)
        )
