"""The part of a distributed optimizer that is the same in every framework: all that it does with other ranks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.collectives.adasum import adasum
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.arguments import CheckingArguments, whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import MAX
from ringreduce.engine import CollectiveOp, Engine, Operation, Reduction
from ringreduce.runtime import config
from ringreduce.runtime.process_sets import Parts, ProcessSet, connect
from ringreduce.training.compression import State
from ringreduce.training.framework import Arrays, Hooks, Memory
from ringreduce.training.gradients import Gradients
from ringreduce.training.options import Options
from ringreduce.training.parameters import Named, require_same_arrays
from ringreduce.training.reducer import GradientReducer
from ringreduce.training.requests import set_to_tell
from ringreduce.transport.memory import MemoryWorld

__all__ = ["Named", "Options", "Training", "checked_names"]


class Training:
    """What one optimizer does with the other ranks of a process set.

    A process outside of the set trains alone.

    Args:
        kind: what errors call the wrapper.
        process_set: the ranks that train together.
        arrays: the framework's.
        bind: makes the framework's `Memory`; of one that has `Hooks` as well, gradients are watched.

    Attributes:
        communicator: the ranks; for what is done before the first step.
        described: what errors call the optimizer; from `begin` on.
    """

    described: str

    def __init__(self, kind: str, process_set: object, arrays: Arrays, bind: Callable[[Communicator], Memory]) -> None:
        self._kind = kind
        self._process_set = set_to_tell(process_set)
        self._arrays, self._bind = arrays, bind
        self._reducer: GradientReducer | None = None
        self._gradients: Gradients | None = None
        self._waited_s = 0.0
        self._take_place()

    def checking(self, call: str) -> CheckingArguments:
        """Return a context in which to check the arguments of a call, before its first collective. Collective.

        If it fails on one rank, it fails on all: the others get a `MismatchError` with the reason, and all have the
        call behind them.
        """
        return CheckingArguments(self.communicator, call, call)

    def begin(
        self,
        optimizer: str,
        named: Callable[[], Named],
        options: Options,
        settings: Callable[[], Mapping[str, str]] | None,
    ) -> None:
        """Check that all ranks train the same parameters with the same options, and watch the gradients. Collective.

        Args:
            optimizer: what errors call it: its class.
            named: returns all of its parameters. Neither this nor ``settings`` may keep the wrapper alive.
            options: how gradients are reduced.
            settings: as for `GradientReducer`.

        Raises:
            MismatchError: the ranks have different parameters or options.
        """
        self.prepare(optimizer, named, options, settings)
        over = self.require_agreement()
        on_device = self._arrays.device_of([parameter for _, parameter in named()]) is not None
        communicator = self._engine.communicator
        settled, memory = options.settled(communicator, on_device=on_device), self._bind(communicator)
        reducer = GradientReducer(memory, self._engine, named, optimizer, over, settled, settings)
        self._gradients = Gradients(memory, reducer) if isinstance(memory, Hooks) else None
        self._reducer = reducer

    def prepare(
        self,
        optimizer: str,
        named: Callable[[], Named],
        options: Options,
        settings: Callable[[], Mapping[str, str]] | None,
    ) -> None:
        """Note what `begin` takes, for `rejoin` or the first use of `gradients` to begin with."""
        self._optimizer, self._named, self.options, self._settings = optimizer, named, options, settings

    @property
    def reducer(self) -> GradientReducer:
        """Of the optimizer's gradients. Collective if nothing has begun yet."""
        if self._reducer is None:
            self.rejoin()
        if self._reducer is None:
            raise ConfigError(f"the process set of this {self._kind} is not registered")
        return self._reducer

    @property
    def gradients(self) -> Gradients:
        """Of parameters that have hooks. Collective if nothing has begun yet."""
        if self._gradients is None:
            _ = self.reducer
            assert self._gradients is not None, "its framework has Hooks"
        return self._gradients

    def require_agreement(self) -> str:
        """Check that all ranks have the same parameters and options; return what errors call them. Collective.

        Raises:
            MismatchError: they have not.
        """
        named = self._named()
        options = self.options.in_words([parameter for _, parameter in named])
        require_same_arrays(self._arrays, self.communicator, self._kind, named, devices=True, options=options)
        over = f"{len(named)} parameters, {named[0][0]} to {named[-1][0]}" if named else "no parameters"
        self.described = f"{self._optimizer} over {over}"
        return over

    def rejoin(self) -> bool:
        """Go on in the world there is now, if ``shutdown()`` and ``init()`` came since the last time. Collective.

        Begins what was only prepared. What compression has kept is lost: it was of other buckets, and perhaps of other
        ranks. Does nothing while the process set is not registered.

        Returns:
            Whether they came, or it began.

        Raises:
            MismatchError: the ranks have different parameters.
        """
        process_set = self._process_set
        if process_set.connected and process_set.engine is self._engine and self._reducer is not None:
            return False
        if process_set.process_set_id is None:
            return False
        in_place = process_set.engine is self._engine if process_set.included() else self._alone
        replaced = self._gradients
        if in_place and self._reducer is not None:
            return False
        self._waited_s = self.seconds  # the new ones count from zero
        if not in_place:
            self._take_place()
        with self.checking(self._kind):
            self._bind(self._engine.communicator).streams.require_usable([each for _, each in self._named()])
        self.begin(self._optimizer, self._named, self.options, self._settings)
        if replaced is not None:
            replaced.retire()
        return True

    def declare_passes(self, passes: int) -> None:
        """Change how many backward passes come before each step; the same on all ranks."""
        self.options = replace(self.options, passes=whole_number("backward_passes_per_step", passes, 1))
        if self._gradients is not None:
            self._gradients.overlap.declared = self.options.passes

    @property
    def seconds(self) -> float:
        """Spent in collectives of this optimizer, waiting for others included."""
        return self._waited_s + (0.0 if self._reducer is None else self._reducer.ranks.seconds)

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.communicator.size == 1

    def reduce_loss(self, loss: npt.NDArray[np.float64]) -> None:
        """Reduce the loss of a closure like gradients, in place. Collective."""
        mean = Reduction(f"loss of {self._kind}", "loss of a closure", self.options.op, [loss], [loss])
        self._run(mean, f"the loss of a closure of {self.described}")

    def any_rank(self, answer: bool) -> bool:
        """Return whether any rank has found an overflow. Collective."""
        found = np.array([answer])
        overflow = Reduction(f"overflow of {self._kind}", "overflow of gradients", MAX, [found], [found])
        self._run(overflow, f"the overflows of {self.described}")
        return bool(found[0])

    def combine(self, changes: Sequence[Any]) -> None:
        """Combine by Adasum the changes that the ranks' steps have made, each array by itself, in place. Collective."""
        with self._arrays.on_host(changes) as lent:
            call = CollectiveOp(f"step of {self._kind}", "step with Adasum", lambda ranks: adasum(ranks, lent))
            self._run(call, f"the step of {self.described}")

    def state_dict(self) -> dict[str, Any]:
        """Return what compression keeps on this rank, as ``buckets``, ``rank`` and ``size``; empty if nothing."""
        kept = {} if self._reducer is None else self._reducer.state_dict()
        return {"rank": self.communicator.rank, "size": self.communicator.size, "buckets": kept} if kept else {}

    def load_state_dict(self, rank: int, size: int, buckets: Mapping[int, State]) -> None:
        """Load what `state_dict` returned, unless it was on another rank or among another number of ranks."""
        if (rank, size) == (self.communicator.rank, self.communicator.size):
            self.reducer.load_state_dict(buckets)

    def _run(self, operation: Operation, title: str) -> None:
        operation.title = title
        started = perf_counter()
        self._engine.run(operation)
        self._waited_s += perf_counter() - started

    def _take_place(self) -> None:
        """Find the ranks to train with."""
        ranks: ProcessSet | Parts = self._process_set
        self._alone = not self._process_set.included()
        if self._alone:
            ranks = connect(lambda waiter: MemoryWorld(1).messages(0), config())
            weakref.finalize(self, ranks.close).atexit = False
        self.communicator: Communicator = ranks.communicator
        self._engine: Engine = ranks.engine


def checked_names(parameters: Sequence[Any], named: Any) -> dict[int, str]:
    """Return the name of each parameter, by id; nothing if none were given.

    Args:
        parameters: all of the optimizer's.
        named: names and parameters, as pairs or as a mapping; None.

    Raises:
        ConfigError: it is neither; or names are missing or used twice.
    """
    if named is None:
        return {}
    if isinstance(named, Mapping):
        named = named.items()
    pairs: list[Any] = list(named) if isinstance(named, Iterable) else [named]
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ConfigError("named_parameters must be (name, parameter) pairs, as from model.named_parameters()")
    twice = sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
    if twice:
        raise ConfigError(f"named_parameters uses names more than once: {', '.join(twice)}")
    names = {id(parameter): name for name, parameter in pairs}
    unnamed = sum(id(parameter) not in names for parameter in parameters)
    if unnamed:
        raise ConfigError(
            f"named_parameters leaves {unnamed} of the optimizer's parameters without a name; name all or none"
        )
    return names
