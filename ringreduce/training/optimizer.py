"""The part of a distributed optimizer that is the same in every framework: all that it does with other ranks."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.collectives.adasum import adasum
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.arguments import CheckingArguments, real_number, shown, whole_number
from ringreduce.common.config import Config
from ringreduce.common.conventions import Conventions
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, MAX, SUM, ReduceOp
from ringreduce.engine import BlockingCall, Engine, Operation, Reduction
from ringreduce.runtime import config
from ringreduce.runtime.process_sets import Parts, ProcessSet, connect
from ringreduce.training.compression import State, has_reducers, signature_of
from ringreduce.training.framework import Arrays, Parameters
from ringreduce.training.gradients import Gradients
from ringreduce.training.parameters import Named, require_same_arrays
from ringreduce.training.requests import Adasum, Op, ReproducibleSum, set_to_tell
from ringreduce.transport.memory import MemoryWorld

__all__ = ["Named", "Options", "Training", "checked_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How gradients are reduced, as a user says it; `checked` returns what is meant. All must agree on all ranks.

    Attributes:
        op: `AVERAGE`, `SUM` or `Adasum`; checked, how losses are reduced: `AVERAGE` with Adasum.
        adasum: whether it is Adasum that combines what steps change; by `checked`.
        passes: how many backward passes come before each step.
        compression: as for `Gradients`, or the class of a compression that takes settings, for those it has by itself.
        groups: lists of parameters, or the number of lists to make; checked, as for `Gradients`.
        bucket_nbytes: as for `Gradients`; None: as the settings say.
        predivide_factor: as for `Gradients`.
        skip_unused: likewise; None: as the conventions say.
        overlap: likewise; None: with parameters on a device, yes; on one node, no; else if it makes steps quicker.
        reduce_in: ``"step"`` or ``"backward"``.
    """

    op: Any = AVERAGE
    adasum: bool = False
    passes: int = 1
    compression: Any = None
    predivide_factor: Any = 1.0
    groups: Any = None
    bucket_nbytes: Any = None
    skip_unused: bool | None = None
    overlap: bool | None = None
    reduce_in: Any = "step"

    def checked(self, settings: Config, parameters: Sequence[Any]) -> Options:
        """Return the options with all that a user left open, given all parameters of the optimizer.

        Raises:
            ConfigError: one is wrong, or two do not go together.
        """
        op, adasum = _checked_op(self.op), self.op == Adasum
        factor = real_number("gradient_predivide_factor", self.predivide_factor)
        if not 0.0 < factor < math.inf:
            raise ConfigError(f"gradient_predivide_factor must be a positive number, got {factor}")
        if factor != 1.0 and (op is not AVERAGE or adasum):
            raise ConfigError("gradient_predivide_factor is a part of averaging; use it with op=Average")
        if self.reduce_in not in ("step", "backward"):
            raise ConfigError(f'reduce_in is "step" or "backward", got {shown(self.reduce_in)}')
        nbytes = settings.bucket_nbytes if self.bucket_nbytes is None else self.bucket_nbytes
        return replace(
            self,
            op=op,
            adasum=adasum,
            passes=whole_number("backward_passes_per_step", self.passes, 1),
            compression=_checked_compression(self.compression),
            predivide_factor=factor,
            groups=_checked_groups(parameters, self.groups),
            bucket_nbytes=whole_number("bucket_nbytes", nbytes, 1),
        )

    def in_words(self, parameters: Sequence[Any]) -> dict[str, object]:
        """Return the options that must agree, by the names that users know; ranks compare them as text."""
        return {
            "op": Adasum if self.adasum else self.op.value,
            "backward_passes_per_step": self.passes,
            "bucket_nbytes": self.bucket_nbytes,
            "compression": "none" if self.compression is None else signature_of(self.compression),
            "gradient_predivide_factor": self.predivide_factor,
            "groups": [self.groups.get(id(each)) for each in parameters] if self.groups else None,
            "overlap": self.overlap,
            "reduce_in": self.reduce_in,
        }


class Training:
    """What one optimizer does with the other ranks of a process set.

    A process outside of the set trains alone.

    Args:
        kind: what errors call the wrapper.
        process_set: the ranks that train together.
        arrays: the framework's.
        bind: makes the framework's `Parameters`.

    Attributes:
        communicator: the ranks; for what is done before the first step.
        described: what errors call the optimizer; from `begin` on.
    """

    described: str

    def __init__(
        self, kind: str, process_set: object, arrays: Arrays, bind: Callable[[Communicator], Parameters]
    ) -> None:
        self._kind = kind
        self._process_set = set_to_tell(process_set)
        self._arrays, self._bind = arrays, bind
        self._gradients: Gradients | None = None
        self._waited_s = 0.0
        self._take_place()

    def checking(self, call: str) -> CheckingArguments:
        """Return a context in which to check the arguments of a call, before its first collective. Collective.

        If it fails on one rank, it fails on all: the others get a `MismatchError` with the reason, and all have the
        call behind them.
        """
        communicator = self.communicator
        return CheckingArguments(partial(communicator.refuse, call), partial(communicator.meet, call))

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
            settings: as for `Gradients`.

        Raises:
            MismatchError: the ranks have different parameters or options.
        """
        self.prepare(optimizer, named, options, settings)
        over = self.require_agreement()
        engine, topology = self._engine, self._engine.communicator.topology
        parameters = [parameter for _, parameter in named()]
        on_device = self._arrays.device_of(parameters) is not None
        conventions: Conventions = engine.communicator.config.conventions
        skip_unused = not conventions.zeroes_unused if options.skip_unused is None else options.skip_unused
        overlap = options.overlap
        if overlap is None and (on_device or topology.single_node):
            overlap = on_device
        self._gradients = Gradients(
            self._bind(engine.communicator),
            engine,
            named,
            optimizer,
            over,
            op=options.op,
            bucket_nbytes=options.bucket_nbytes,
            compression=options.compression,
            predivide_factor=options.predivide_factor,
            groups=options.groups,
            skip_unused=skip_unused,
            overlap=False if options.adasum else overlap,
            in_backward=options.reduce_in == "backward" and not options.adasum,
            passes=options.passes,
            settings=settings,
        )

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
    def gradients(self) -> Gradients:
        """Of the optimizer. Collective if nothing has begun yet."""
        if self._gradients is None:
            self.rejoin()
        if self._gradients is None:
            raise ConfigError(f"the process set of this {self._kind} is not registered")
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
        if process_set.process_set_id is None:
            return False
        in_place = process_set.engine is self._engine if process_set.included() else self._alone
        replaced = self._gradients
        if in_place and replaced is not None:
            return False
        self._waited_s = self.seconds  # the new ones count from zero
        if not in_place:
            self._take_place()
        with self.checking(self._kind):
            self._bind(self._engine.communicator).require_usable([parameter for _, parameter in self._named()])
        self.begin(self._optimizer, self._named, self.options, self._settings)
        if replaced is not None:
            replaced.retire()
        return True

    def declare_passes(self, passes: int) -> None:
        """Change how many backward passes come before each step; the same on all ranks."""
        self.options = replace(self.options, passes=whole_number("backward_passes_per_step", passes, 1))
        if self._gradients is not None:
            self._gradients.passes = self.options.passes

    @property
    def seconds(self) -> float:
        """Spent in collectives of this optimizer, waiting for others included."""
        return self._waited_s + (0.0 if self._gradients is None else self._gradients.ranks.seconds)

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
            call = BlockingCall(f"step of {self._kind}", "step with Adasum", lambda ranks: adasum(ranks, lent))
            self._run(call, f"the step of {self.described}")

    def state_dict(self) -> dict[str, Any]:
        """Return what compression keeps on this rank, as ``buckets``, ``rank`` and ``size``; empty if nothing."""
        kept = {} if self._gradients is None else self._gradients.state_dict()
        return {"rank": self.communicator.rank, "size": self.communicator.size, "buckets": kept} if kept else {}

    def load_state_dict(self, rank: int, size: int, buckets: Mapping[int, State]) -> None:
        """Load what `state_dict` returned, unless it was on another rank or among another number of ranks."""
        if (rank, size) == (self.communicator.rank, self.communicator.size):
            self.gradients.load_state_dict(buckets)

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


def _checked_op(op: Op) -> ReduceOp:
    if op == Adasum:
        return AVERAGE
    kind = None
    with suppress(ConfigError):
        kind = ReduceOp.parse(op)
    if kind not in (AVERAGE, SUM):
        word = op.value if isinstance(op, ReduceOp) else op
        hint = "; RINGREDUCE_DETERMINISTIC=1 fixes the order of sums" if op == ReproducibleSum else ""
        raise ConfigError(
            f"DistributedOptimizer can average or sum gradients (op Average or Sum), or use Adasum; got op {word}{hint}"
        )
    return kind


def _checked_compression(compression: Any) -> Any:
    if compression is None or hasattr(compression, "compress"):
        return compression
    if has_reducers(compression):
        return compression() if isinstance(compression, type) else compression
    raise ConfigError(f"compression is one of hvd.Compression, or a Compressor class; got {compression!r}")


def _checked_groups(parameters: Sequence[Any], groups: Any) -> dict[int, int]:
    """Return the group of each parameter that has one, by id."""
    if groups is None:
        return {}
    if hasattr(groups, "shape") or not isinstance(groups, Iterable):
        number = whole_number("groups (or num_groups), unless it is lists of parameters,", groups, 0)
        length = -(-len(parameters) // number) if number else 0
        return {id(parameter): index // length for index, parameter in enumerate(parameters)} if number else {}
    known = set(map(id, parameters))
    found: dict[int, int] = {}
    for index, group in enumerate(groups):
        if hasattr(group, "shape"):
            raise ConfigError(f"groups are lists of parameters, but number {index} is a parameter; write [[...], ...]")
        for parameter in group:
            if id(parameter) not in known:
                raise ConfigError(f"group {index} holds something that is no parameter of the optimizer")
            if id(parameter) in found:
                raise ConfigError(f"a parameter is in groups {found[id(parameter)]} and {index}; it can be in one")
            found[id(parameter)] = index
    return found
