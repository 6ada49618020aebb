"""Gradients that parameters keep: found, watched during backward passes, and replaced by what they are reduced to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from ringreduce.common.finalizers import when_ended
from ringreduce.training.binding.framework import Hooks, Removable, remove_all
from ringreduce.training.gradients.buckets import Buckets
from ringreduce.training.gradients.checks import look_at_the_end
from ringreduce.training.optimizers.reducer import GradientReducer
from ringreduce.training.strategies.overlapped import Overlap
from ringreduce.training.strategies.stages import GradientState

_numbers = itertools.count()
_NOTHING_TO_DO = nullcontext()


class Gradients:
    """The gradients that parameters keep in an attribute ``grad``: finds, watches and replaces them.

    They are reduced before the step or in the backward pass. The parameters' hooks call this as a `Watcher`.

    Args:
        hooks: the framework's.
        reducer: reduces them.
        training: returns what this belongs to, until another world begins.

    Attributes:
        number: greater than those of optimizers that were made earlier.
        reducer: the same.
        overlap: reduces buckets during the backward pass.
        before_adding, added: see `Watcher`.
        stepped: see `GradientReducer.stepped`.
    """

    def __init__(self, hooks: Hooks, reducer: GradientReducer, training: Callable[[], Any]) -> None:
        assert reducer.overlap is not None, "its memory has hooks"
        self._framework = hooks
        self.reducer = reducer
        self._training = training
        self.number = next(_numbers)
        self._in_backward = reducer.options.in_backward
        self.overlap = reducer.overlap
        self.before_adding = self.overlap.before_adding
        self.added = self.overlap.added
        self.stepped = reducer.stepped
        self._hooks: list[Removable] = []
        self.watch()
        # The parameters keep their hooks, and the finalizer keeps what it retires; neither keeps this object.
        self._look = partial(look_at_the_end, reducer.memory, reducer.ranks, reducer.named)
        self._finalizer = when_ended(self, _retire, self._look, reducer.buckets, self.overlap, self._hooks)
        reducer.ranks.engine.communicator.lifetime.listen_while_held("closed", self._world_ends)

    def retire(self) -> None:
        """Watch no parameter any more, and let go of buckets. Local.

        To drop the last reference is not enough after a failure: the finalizer keeps the engine, and with it the error
        whose traceback may hold this object.
        """
        self._finalizer()

    # ---- what frameworks' hooks call ----

    def pass_ended(self, nested: bool = False) -> None:
        """See `Watcher`; with ``in_backward``, reduce the gradients after the last declared pass.

        Args:
            nested: whether it was made within another one, whose end may go unheard. Where one pass makes a step, what
                this one has added is reduced at once.
        """
        passes = self.overlap.pass_ended(nested)
        declared = self.overlap.declared
        complete = declared == 1 if nested else passes >= declared
        if self._in_backward and complete and not self.overlap.suspends:
            training = self._training()
            assert training is not None, "it keeps this"
            training.rejoin()
            training.gradients.reduce(self.overlap.fresh(self._parameters()))

    # ---- what optimizers call ----

    @property
    def pending(self) -> bool:
        """Whether a step has gradients to reduce; without ``in_backward``, always."""
        return not self._in_backward or any(self.overlap.fresh(self._parameters()))

    def reduce(self, fresh: Sequence[bool] | None = None, samples: Any = None) -> None:
        """Replace the gradients by their average or sum over the ranks. Collective.

        Args:
            fresh: which of them count; None: all, or with ``in_backward`` those that were added to.
            samples: as for `GradientReducer.reduce`.

        Raises:
            what `GradientReducer.reduce` raises.
        """
        reducer = self.reducer
        parameters = self._parameters()
        if fresh is None and self._in_backward:
            fresh = self.overlap.fresh(parameters)
        gradients = [parameter.grad for parameter in parameters]
        try:
            reduced = reducer.reduce(gradients, fresh, samples, parameters=parameters)
            for parameter, before, after in zip(parameters, gradients, reduced, strict=True):
                if before is not after:
                    parameter.grad = after
        finally:
            if self._in_backward:
                for record in self.overlap.watched.values():
                    record.reduced()
        if self._hooks or self.overlap.is_learning or self._in_backward:
            self.watch(parameters)

    def clearing(self) -> AbstractContextManager[None]:
        """Return a context in which to clear the gradients; it first ends reductions that are under way."""
        return self._clearing() if self.overlap.is_learning or self._in_backward else _NOTHING_TO_DO

    @contextmanager
    def _clearing(self) -> Iterator[None]:
        self.overlap.stop()
        yield
        self.overlap.cleared()
        self.watch()  # a parameter may take gradients by now that took none

    def watch(self, parameters: Sequence[Any] | None = None) -> None:
        """Watch gradients that are not watched yet, as long as overlap or ``in_backward`` need it.

        Args:
            parameters: all of the optimizer's; None: this asks for them.
        """
        overlap = self.overlap
        if not (overlap.is_learning or self._in_backward):
            remove_all(self._hooks)
            overlap.watched.clear()
        elif self.reducer.ranks.size > 1:
            for parameter in self._parameters() if parameters is None else parameters:
                if id(parameter) not in overlap.watched:
                    record = GradientState(parameter)
                    if hooks := self._framework.watch(parameter, self, record):
                        self._hooks += hooks
                        overlap.watched[id(parameter)] = record

    # ---- inside ----

    def _world_ends(self) -> None:
        self._look()

    def _parameters(self) -> list[Any]:
        return [parameter for _, parameter in self.reducer.named()]


def _retire(look: Callable[[], None], buckets: Buckets, overlap: Overlap, hooks: list[Removable]) -> None:
    overlap.abandon()
    buckets.clear()
    remove_all(hooks)
    look()
