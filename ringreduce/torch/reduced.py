"""Whether the gradients of an optimizer are this rank's own or were reduced for its next step, and by whom."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import torch

from ringreduce.torch.own_methods import AdditionHooks, Arrivals
from ringreduce.torch.private import has_looked, scaler_state
from ringreduce.training.options.features import SCALER, SKIPPING


class ReductionState(Enum):
    """What the gradients are."""

    OWN = auto()  # this rank's: the step reduces them
    SYNCHRONIZED = auto()  # reduced, by `synchronize`: a step of the wrapped optimizer may take them, once
    SCALED = auto()  # reduced, for a GradScaler: the step that it is about to make takes them
    CLIPPED = auto()  # reduced and clipped: the step takes them


class Reduced:
    """The state of one optimizer's gradients, from step to step.

    Args:
        arrivals: notes when they are reduced, taken by a step or cleared; None: nothing does.

    Attributes:
        state: what they are.
    """

    def __init__(self, arrivals: Arrivals | None = None) -> None:
        self.state = ReductionState.OWN
        self._arrivals = arrivals
        self._additions = AdditionHooks(self._added_to)
        # The GradScaler for which they were reduced, and the state that it keeps for the step.
        self._scaler: tuple[weakref.ref[Any], dict[str, Any]] | None = None

    def _become_own(self) -> None:
        self.state = ReductionState.OWN
        self._scaler = None

    def forget(self) -> None:
        """Take the gradients for this rank's own from now on: they are cleared."""
        self._become_own()
        if self._arrivals is not None:
            self._arrivals.cleared()

    def taken(self) -> None:
        """Take the gradients for this rank's own from now on: a step takes what there is."""
        self._become_own()
        if self._arrivals is not None:
            self._arrivals.reduced()

    def synchronized(self) -> None:
        """Take note that they were reduced; what was clipped stays so."""
        self._scaler = None
        if self._arrivals is not None:
            self._arrivals.reduced()
        if self.state is not ReductionState.CLIPPED:
            self.state = ReductionState.SYNCHRONIZED

    def clipped(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take note that they were clipped; what later backward passes make is not."""
        self.state = ReductionState.CLIPPED
        self._additions.watch(parameters)

    def _added_to(self) -> None:
        if self.state is ReductionState.CLIPPED:
            self._become_own()

    def done_for(self, scaler: torch.amp.GradScaler, optimizer: int) -> None:
        """Take note that a GradScaler has had them reduced, for the next step of the optimizer with this ``id``."""
        self.state = ReductionState.SCALED
        self._scaler = weakref.ref(scaler), scaler_state(scaler, optimizer)

    def is_done_for(self, scaler: torch.amp.GradScaler, optimizer: int) -> bool:
        """Return whether a GradScaler may read them as they are."""
        # The method of a subclass may read the groups, and then call the one of GradScaler, which reads them again.
        same = self._scaler is not None and self._scaler[1] is scaler_state(scaler, optimizer)
        return same or self.state in (ReductionState.SYNCHRONIZED, ReductionState.CLIPPED)

    def is_final(self, optimizer: int) -> bool:
        """Return whether the next step takes them as they are: clipped, or reduced for a GradScaler's own step."""
        scaler = None if self._scaler is None else self._scaler[0]()
        if self.state is ReductionState.CLIPPED or scaler is None:
            return self.state is ReductionState.CLIPPED
        return has_looked(scaler_state(scaler, optimizer))  # forgotten once a step is over

    def by(self, optimizer: int) -> str | None:
        """Return, by its name in `refusals`, what reduced the gradients of the next step already; None: nothing."""
        if not self.is_final(optimizer):
            return None
        return SCALER if self.state is ReductionState.SCALED else SKIPPING

    def is_taken(self) -> bool:
        """Return whether a step of the wrapped optimizer itself may take them: only once."""
        taken = self.state in (ReductionState.SYNCHRONIZED, ReductionState.CLIPPED)
        if self.state is ReductionState.SYNCHRONIZED:
            self.state = ReductionState.OWN
        return taken


def warn_of_second_reduction(*, adds_up: bool) -> None:
    """Warn that a step reduces gradients that are reduced already; ``adds_up``: that changes them."""
    twice = " With op Sum the gradients are added up twice." if adds_up else ""
    warnings.warn(  # in Horovod's words, which programs filter by
        "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
        "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
        f"optimizer.synchronize() in your code.{twice}",
        stacklevel=3,
    )


def warn_of_own_step(described: str) -> None:
    """Warn that an optimizer that is wrapped has made a step by itself."""
    warnings.warn(
        f"step() of {described} was called, and not step() of the DistributedOptimizer that wraps it: its gradients "
        "are this rank's own, so that the ranks' weights drift apart; call step() of the DistributedOptimizer (or, if "
        "this is meant, within its skip_synchronize())",
        stacklevel=5,
    )


def warn_of_own_replica(described: str) -> None:
    """Warn that an optimizer has made a step by itself whose replicas are to exchange weights."""
    warnings.warn(
        f"step() of the optimizer in {described} was called, and not its own step(): then this rank exchanges no "
        "weights, and trains alone; call step() of the DiLoCo",
        stacklevel=5,
    )
