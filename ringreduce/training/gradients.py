"""Gradients that parameters keep in an attribute ``grad``, reduced before the step or in the backward pass."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ringreduce.training.buckets import Buckets
from ringreduce.training.framework import Hooks, Removable
from ringreduce.training.overlap import Overlap
from ringreduce.training.reducer import GradientReducer
from ringreduce.training.stages import Watched

__all__ = ["Gradients"]

_numbers = itertools.count()
_NOTHING_TO_DO = nullcontext()


class Gradients:
    """The gradients of one optimizer on all ranks: finds, watches and replaces them.

    Args:
        hooks: the framework's.
        reducer: reduces them.

    Attributes:
        number: greater than those of optimizers that were made earlier.
        reducer: the same.
        overlap: reduces buckets during the backward pass.
    """

    def __init__(self, hooks: Hooks, reducer: GradientReducer) -> None:
        self._framework, self.reducer = hooks, reducer
        self.number = next(_numbers)
        self._in_backward = reducer.options.in_backward
        self.overlap = reducer.early = Overlap(hooks, reducer)
        self._hooks: list[Removable] = []
        self.watch()
        # The parameters keep their hooks, and the finalizer keeps what it retires; neither keeps this object.
        self._finalizer = weakref.finalize(self, _retire, reducer.buckets, self.overlap, self._hooks)
        self._finalizer.atexit = False

    def retire(self) -> None:
        """Watch no parameter any more, and let go of buckets. Local.

        To drop the last reference is not enough after a failure: the finalizer keeps the engine, and with it the error
        whose traceback may hold this object.
        """
        self._finalizer()

    # ---- what frameworks' hooks call ----

    def before_adding(self, record: Watched) -> None:
        """See `Watcher`."""
        self.overlap.before_adding(record)

    def added(self, record: Watched) -> None:
        """See `Watcher`."""
        self.overlap.added(record)

    def pass_ended(self, nested: bool = False) -> None:
        """See `Watcher`; with ``in_backward``, reduce the gradients after the last declared pass.

        Args:
            nested: whether it was made within another one, as by a checkpoint. The end of that one may go unheard, so
                where one pass makes a step, what this one has added is reduced at once.
        """
        passes, declared = self.overlap.pass_ended(nested), self.overlap.declared
        complete = declared == 1 if nested else passes >= declared
        if self._in_backward and complete and not self.overlap.suspends:
            self.reduce()

    # ---- what optimizers call ----

    def stepped(self) -> None:
        """To be called when the optimizer has made a step."""
        self.reducer.stepped += 1

    @property
    def pending(self) -> bool:
        """Whether a step has gradients to reduce; without ``in_backward``, always."""
        return not self._in_backward or any(self.overlap.fresh(self._parameters()))

    def reduce(self) -> None:
        """Replace the gradients by their average or sum over the ranks. Collective.

        Raises:
            what `GradientReducer.reduce` raises.
        """
        reducer, parameters = self.reducer, self._parameters()
        fresh = self.overlap.fresh(parameters) if self._in_backward else None
        gradients = [parameter.grad for parameter in parameters]
        try:
            for parameter, before, after in zip(parameters, gradients, reducer.reduce(gradients, fresh), strict=True):
                if before is not after:
                    parameter.grad = after
        finally:
            if self._in_backward:
                for record in self.overlap.watched.values():
                    record.reduced()
        if self._hooks or self.overlap.watching or self._in_backward:
            self.watch()

    def clearing(self) -> AbstractContextManager[None]:
        """Return a context in which to clear the gradients; it first ends reductions that are under way."""
        return self._clearing() if self.overlap.watching or self._in_backward else _NOTHING_TO_DO

    @contextmanager
    def _clearing(self) -> Iterator[None]:
        self.overlap.stop()
        yield
        self.overlap.cleared()
        self.watch()  # a parameter may take gradients by now that took none

    def watch(self) -> None:
        """Watch gradients that are not watched yet, as long as overlap or ``in_backward`` need it."""
        overlap = self.overlap
        if not (overlap.watching or self._in_backward):
            _remove(self._hooks)
            overlap.watched.clear()
        elif self.reducer.ranks.size > 1:
            for parameter in self._parameters():
                if id(parameter) not in overlap.watched:
                    record = Watched(parameter)
                    if hooks := self._framework.watch(parameter, self, record):
                        self._hooks += hooks
                        overlap.watched[id(parameter)] = record

    # ---- inside ----

    def _parameters(self) -> list[Any]:
        return [parameter for _, parameter in self.reducer.named()]


def _remove(hooks: list[Removable]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _retire(buckets: Buckets, overlap: Overlap, hooks: list[Removable]) -> None:
    overlap.abandon()
    buckets.clear()
    _remove(hooks)
