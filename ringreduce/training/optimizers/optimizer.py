"""The part of a distributed optimizer that is the same in every framework: all that it does with other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy.typing as npt

from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.sums.adasum import adasum
from ringreduce.common.arguments import CheckingArguments, whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.common.finalizers import when_ended
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.engine import About, CollectiveOp, Engine, Operation, Reduction
from ringreduce.runtime import config, count, global_process_set
from ringreduce.runtime.process_sets import Membership, ProcessSet, alone
from ringreduce.training.binding.framework import Arrays, Hooks, Memory, Named
from ringreduce.training.binding.host import HOST, HostMemory
from ringreduce.training.binding.identity import Identity, meet
from ringreduce.training.calls.parameters import require_same_arrays
from ringreduce.training.calls.requests import set_to_notify
from ringreduce.training.compression import State
from ringreduce.training.gradients.checks import CheckedModel, Settings
from ringreduce.training.optimizers.reducer import GradientReducer
from ringreduce.training.optimizers.user_options import checked, named_options
from ringreduce.training.optimizers.watched import Gradients
from ringreduce.training.options.options import Options
from ringreduce.training.strategies.strategy import PendingAverages


class Training:
    """What one optimizer does with the other ranks of a process set.

    A process outside of the set trains alone.

    Args:
        kind: what errors call the wrapper.
        process_set: the ranks that train together.
        arrays: the framework's.
        bind: makes the framework's `Memory`; of one that has `Hooks` as well, gradients are watched.
        identity: as for `GradientReducer`.

    Attributes:
        communicator: the ranks; for what is done before the first step.
        kind: the argument.
        described: what errors call the optimizer; from `begin` on, and before that its class.
        named: returns all of its parameters by name; from `prepare` on.
    """

    described: str
    named: Callable[[], Named]

    def __init__(
        self,
        kind: str,
        process_set: object,
        arrays: Arrays,
        bind: Callable[[Communicator], Memory],
        identity: Identity | None = None,
    ) -> None:
        self.kind = kind
        self._identity = identity
        self._process_set = set_to_notify(process_set)
        self._arrays = arrays
        self._bind = bind
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

    def begin(self) -> None:
        """Check that all ranks train the same parameters with the same options, and watch the gradients. Collective.

        `prepare` comes before.

        Raises:
            MismatchError: the ranks have different parameters or options.
        """
        over = self.require_agreement()
        on_device = self._arrays.device_of([parameter for _, parameter in self.named()]) is not None
        communicator = self._engine.communicator
        settled = self.options.settled(communicator, on_device=on_device)
        memory = self._bind(communicator)
        if self._alone:
            settled = replace(settled, strategies={})
        reducer = GradientReducer(
            memory,
            self._engine,
            named=self.named,
            kind=self._optimizer,
            over=over,
            options=settled,
            settings=self._settings,
            identity=self._identity,
        )
        if reducer.sharding is not None and not self._alone:
            reducer.sharding.connect(self._process_set.ranks or ())
        if reducer.late is not None and self.late is not None:
            reducer.late.load(self.late.loaded())  # what was under way ended with its world
        self._gradients = Gradients(memory, reducer, weakref.ref(self)) if isinstance(memory, Hooks) else None
        self._reducer = reducer

    def prepare(self, optimizer: str, named: Callable[[], Named], options: Options, settings: Settings | None) -> None:
        """Take what `begin` needs; where nobody calls that, `rejoin` or the first use of `gradients` does.

        Args:
            optimizer: what errors call it: its class.
            named: returns all of its parameters. Neither this nor ``settings`` may keep the wrapper alive.
            options: how gradients are reduced.
            settings: as for `GradientReducer`.
        """
        self._optimizer = self.described = optimizer
        self.named = named
        self.options = options
        self._settings = settings

    @property
    def reducer(self) -> GradientReducer:
        """Of the optimizer's gradients. Collective if nothing has begun yet."""
        if self._reducer is None:
            self.rejoin()
        if self._reducer is None:
            raise ConfigError(f"the process set of this {self.kind} is not registered")
        return self._reducer

    @property
    def gradients(self) -> Gradients:
        """Of parameters that have hooks. Collective if nothing has begun yet."""
        if self._gradients is None:
            _ = self.reducer
            assert self._gradients is not None, "its framework has Hooks"
        return self._gradients

    @property
    def is_reduced(self) -> bool:
        """Whether the backward pass has reduced all gradients that there are."""
        return self._gradients is not None and not self._gradients.pending

    @property
    def late(self) -> PendingAverages | None:
        """The averages that later steps apply; None: each step applies its own, or nothing has begun yet."""
        return None if self._reducer is None else self._reducer.late

    def require_agreement(self) -> str:
        """Check that all ranks have the same parameters and options; return what errors call them. Collective.

        Raises:
            MismatchError: they have not.
        """
        named = self.named()
        options = self.options.in_words([parameter for _, parameter in named])
        require_same_arrays(
            self._arrays, self.communicator, caller=self.kind, named=named, devices=True, options=options
        )
        over = f"{len(named)} parameters, {named[0][0]} to {named[-1][0]}" if named else "no parameters"
        self.described = f"{self._optimizer} over {over}"
        return over

    def rejoin(self) -> bool:
        """Go on in the world there is now, if ``shutdown()`` and ``init()`` came since the last time. Collective.

        Begins what was only prepared. Drops what compression has kept: it was of other buckets, and perhaps of other
        ranks. Keeps late averages that `PendingAverages.state` has waited for, and drops others. Does nothing while the
        process set is not registered.

        Returns:
            Whether they came, or it began.

        Raises:
            MismatchError: the ranks have different parameters.
        """
        process_set = self._process_set
        if process_set.connected and process_set.engine is self._engine and self._reducer is not None:
            return False
        if not process_set.registered:
            return False
        in_place = process_set.engine is self._engine if process_set.included() else self._alone
        replaced = self._gradients
        if in_place and self._reducer is not None:
            return False
        self._waited_s = self.seconds  # the new ones count from zero
        if not in_place:
            self._take_place()
        with self.checking(self.kind):
            self._bind(self._engine.communicator).streams.require_usable([each for _, each in self.named()])
        self.begin()
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

    def reduce(self, what: str, op: ReduceOp, array: npt.NDArray[Any]) -> None:
        """Reduce an array of a step that is no gradient, in place; ``what``: in words, must agree. Collective."""
        title = f"the {what} of {self.described}"
        self._run(Reduction(f"{what} of {self.kind}", what, op, [array], [array], title=title))

    def combine(self, changes: Sequence[Any]) -> None:
        """Combine the changes of the ranks' steps by Adasum, each array by itself, in place. Collective."""
        with self._arrays.on_host(changes) as host:
            name = f"step of {self.kind}"
            about = About(f"the step of {self.described}")
            self._run(CollectiveOp(name, "step with Adasum", lambda ranks: adasum(ranks, host), about=about))

    def state_dict(self) -> dict[str, Any]:
        """Return what compression keeps on this rank, as ``buckets``, ``rank`` and ``size``; empty if nothing."""
        kept = {} if self._reducer is None else self._reducer.state_dict()
        return {"rank": self.communicator.rank, "size": self.communicator.size, "buckets": kept} if kept else {}

    def load_state_dict(self, rank: int, size: int, buckets: Mapping[int, State]) -> None:
        """Load what `state_dict` returned, unless it was on another rank or among another number of ranks."""
        if (rank, size) == (self.communicator.rank, self.communicator.size):
            self.reducer.load_state_dict(buckets)

    def _run(self, operation: Operation) -> None:
        started = perf_counter()
        self._engine.run(operation)
        self._waited_s += perf_counter() - started

    def _take_place(self) -> None:
        """Find the ranks to train with."""
        ranks: ProcessSet | Membership = self._process_set
        self._alone = not self._process_set.included()
        if self._alone:
            ranks = alone(config())
            when_ended(self, ranks.close)
        self.communicator: Communicator = ranks.communicator
        self._engine: Engine = ranks.engine


class ListTraining:
    """Reduces lists of arrays over the ranks. Collective.

    Args:
        kind: what errors call it.
        named: names and specs; equal on all ranks.
        process_set: the ranks that train together.
        arrays, bind: as for `Training`; those of NumPy.
        identity: of the lists; None: all ranks make those of equal names in one order.
        model: what the checks of the settings look at besides; None: nothing, or what `reduce` gets.
        options: of `Options`. Nothing overlaps, and ``reduce_in="backward"`` is the same as ``"step"``.

    Raises:
        ConfigError: an option is wrong; the other ranks get a `MismatchError`.
        MismatchError: the ranks have different names, shapes, dtypes or options.
    """

    def __init__(
        self,
        kind: str,
        named: Named,
        process_set: ProcessSet = global_process_set,
        arrays: Arrays = HOST,
        bind: Callable[[Communicator], Memory] = lambda _: HostMemory(),
        identity: Identity | None = None,
        model: CheckedModel | None = None,
        **options: Any,
    ) -> None:
        self._model = model
        self.training = Training(kind, process_set, arrays=arrays, bind=bind, identity=identity)
        if identity is not None:
            meet(kind, identity, process_set)
        self._zeros = arrays.zeros_like
        self._specs = [each for _, each in named]
        with self.training.checking(kind):
            chosen = checked(named_options(**options), self.training.communicator.config, self._specs)
        self.training.prepare(kind, lambda: named, chosen, None)
        self.training.begin()

    def reduce(self, gradients: Sequence[Any], samples: Any = None, model: CheckedModel | None = None) -> list[Any]:
        """Return the averages, or sums, of gradients over the ranks. Collective.

        Args:
            gradients: one array, or None, for each spec; they are only read. Gradients that a rank lacks count as
                zeros there; what no rank has stays None.
            samples: of how many samples this rank's gradients are means; on all ranks or none.
            model: as for the class, for this step.

        Returns:
            Arrays that keep their values while they are held, or views of them. With staleness, those of an earlier
            step, and zeros where there are none yet.

        Raises:
            as `GradientReducer.reduce`.
        """
        self.training.rejoin()
        reducer = self.training.reducer
        with reducer.checks.looking_at(model or self._model):
            reduced = reducer.reduce(gradients, samples=samples)
        reducer.stepped()
        count(steps=1)
        return reduced if reducer.late is None else self._whole(reduced)

    def pending(self) -> Iterator[list[Any]]:
        """Wait for the averages that `reduce` has not returned yet, and yield them, oldest first. Collective."""
        self.training.rejoin()
        late = self.training.late
        while late is not None and late.pending:
            yield self._whole(late.next())

    def _whole(self, averages: Sequence[Any]) -> list[Any]:
        return [self._zeros(spec) if each is None else each for each, spec in zip(averages, self._specs, strict=True)]
