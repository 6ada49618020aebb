"""Local SGD and DiLoCo: replicas step by themselves, and once per period average what they have learnt.

A replica is one rank, or several that reduce their gradients in every step. Every ``period`` steps all ranks average
their weights, or make an outer step with the average of ``agreed - local``: the weights that all had after the last
exchange, minus those that this rank has now. ``agreed`` has the same bits on all ranks. With outer learning rate ``nu``
and outer momentum ``mu`` (Nesterov's):

    delta = mean(agreed - local)
    momentum = mu * momentum + delta
    agreed = agreed - nu * (delta + mu * momentum)

With nu = 1 and mu = 0 this is the average of the weights. With a delay, training goes on while the differences travel,
and what a rank has learnt meanwhile is kept: local = agreed + (now - then).

Sources:
    S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767.
    T. Lin, S. U. Stich, K. K. Patel, M. Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020,
        arXiv 1808.07217: synchronous steps first (post-local SGD), and replicas of several ranks (hierarchical SGD).
    J. Wang, V. Tantia, N. Ballas, M. Rabbat, "SlowMo", ICLR 2020, arXiv 1910.00643: momentum of the outer steps.
    A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105.
    A. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512: fragments, and the delay.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError, RingReduceError
from ringreduce.common.reduce_ops import AVERAGE
from ringreduce.engine import AS_THEY_ARE, About, CollectiveOp, Engine, InPlaceAllreduce, Travel
from ringreduce.runtime import global_process_set
from ringreduce.training.compression import State, WireState
from ringreduce.training.data.shares import is_by_speed
from ringreduce.training.optimizers.refusals import refusal
from ringreduce.training.options.features import LOCAL, SHARES
from ringreduce.training.options.local_options import LocalOptions

Flat = npt.NDArray[Any]


class Leaves(Protocol):
    """Some arrays of a framework, as one flat array in host memory."""

    def find(self) -> tuple[int, str]:
        """Find the arrays that there are now, which `read` and `write` are about from then on.

        Returns:
            How many elements they have, and the dtype of the flat array: ``float64`` if some have it, else ``float32``.
            Equal on all ranks.
        """

    def read(self, flat: Flat) -> None:
        """Copy their values to an array of this length and dtype."""

    def write(self, flat: Flat) -> None:
        """Overwrite their values."""


def values_of(leaves: Leaves) -> Flat:
    """Return the present values in memory of their own."""
    values = np.empty(*leaves.find())
    leaves.read(values)
    return values


class Average:
    """Arrays of which the ranks take the average, while each may go on to change its own.

    Args:
        leaves: the arrays.
        what: what errors call them; equal on all ranks, and different for each average of an optimizer.

    Attributes:
        leaves, what: the arguments.
        kept: the names of its attributes that are saved, as long as all values; the first only while it is there.
        operation: an exchange that was submitted and has not ended; None: there is none.
        then: this rank's values in the exchange that is under way, if the rank goes on meanwhile; else None.
    """

    def __init__(self, leaves: Leaves, what: str) -> None:
        self.leaves = leaves
        self.what = what
        self.kept: tuple[str, ...] = ("then",)
        self.then: Flat | None = None
        self.operation: InPlaceAllreduce | None = None

    def connect(self, engine: Engine, owner: str) -> None:
        """Go on with these ranks, and forget what was under way among others.

        Args:
            engine: of all ranks.
            owner: the name of the optimizer; equal on all ranks.
        """
        self.drop()
        self._engine = engine
        self._name = f"{owner}, {self.what}"
        self._flat: Flat | None = None
        self._compares = True  # whether the next exchange compares what the ranks go on from

    def start(self) -> int:
        """Prepare for the first exchange; return a checksum of the values."""
        flat = self._memory()
        self.leaves.read(flat)
        return zlib.crc32(flat.data)

    def begin(self, step: int, *, moving: bool) -> None:
        """Submit this rank's values; of an exchange that was under way when the state was saved, those of then.

        Args:
            step: in which; equal on all ranks.
            moving: whether this rank changes the values before the end.
        """
        flat = self._memory()
        if self._nothing:
            return
        if self.then is None:
            self.leaves.read(flat)
            self.then = flat.copy() if moving else None
        else:
            np.copyto(flat, self.then)
        note = f", in step {step} from the checksum {self._checksum():08x}" if self._compares else ""
        self.operation = self._exchange(flat, note)
        self._compares = False

    def end(self) -> None:
        """Wait for the exchange, and take over its result, with what this rank has changed since it began."""
        operation = self.operation
        self.operation = None
        assert operation is not None
        try:
            flat = self._finish(operation)
            then = self.then
        finally:
            self.then = None
        agreed = self._concluded(flat)
        self.leaves.find()  # they may be elsewhere than when it began: `writing` of `LocalTraining` moves them
        if then is None:
            self.leaves.write(agreed)
        else:
            now = np.empty_like(agreed)
            self.leaves.read(now)
            now -= then
            now += agreed
            self.leaves.write(now)

    def average(self) -> None:
        """Make the values of all ranks their average."""
        flat = self._memory()
        if self._nothing:
            return
        self.leaves.read(flat)
        self.leaves.write(self._finish(self._submitted(flat, "average")))

    def drop(self) -> None:
        """Forget an exchange that is under way. The values stay, so that the next one has what this one would have."""
        if self.operation is not None:
            with suppress(RingReduceError):
                self._engine.wait(self.operation)
        self.operation = self.then = None

    def state_dict(self) -> State:
        """Return copies of what is needed to go on."""
        return {name: each.copy() for name in self.kept if (each := getattr(self, name)) is not None}

    def load_state_dict(self, state: Mapping[str, Flat], own: bool) -> None:
        """Go on from what `state_dict` returned, which is copied; ``own``: on this rank, among as many."""
        self.drop()
        self._compares = True
        for name in self.kept:
            setattr(self, name, state[name].copy() if name in state else None)

    @property
    def _nothing(self) -> bool:
        """Whether there is nothing to exchange, on all ranks."""
        return self._flat is not None and not len(self._flat)

    def _memory(self) -> Flat:
        """Return communication memory for the values."""
        count, dtype = self.leaves.find()
        if self._flat is None or len(self._flat) != count or self._flat.dtype.name != dtype:
            self._flat = self._engine.communicator.empty(count, dtype)
        return self._flat

    def _checksum(self) -> int:
        """Return a checksum of what all ranks have agreed on and go on from."""
        return 0

    def _exchange(self, flat: Flat, note: str) -> InPlaceAllreduce:
        """Submit an exchange, given this rank's values, in whose place it may put others."""
        return self._submitted(flat, "exchange", note)

    def _submitted(self, flat: Flat, kind: str, note: str = "", travel: Travel = AS_THEY_ARE) -> InPlaceAllreduce:
        text = f"{kind} of {self._name}"
        name = f"{self._name}, {kind}"
        operation = InPlaceAllreduce(name, text + note, AVERAGE, [flat], travel=travel, about=About(f"the {text}"))
        self._engine.submit(operation)
        return operation

    def _finish(self, operation: InPlaceAllreduce) -> Flat:
        """Wait for the end of an operation, and return the averages."""
        self._engine.wait(operation)
        if operation.active < self._engine.communicator.size:
            raise ConfigError(
                f"a rank has joined and takes no part in {operation.title}: replicas make equally many steps, so give "
                "all ranks as many batches"
            )
        return np.asarray(operation.arrays[0])

    def _concluded(self, flat: Flat) -> Flat:
        """Return the values that all ranks agree on, given the result of an exchange."""
        return flat


class Fragment(Average):
    """Weights, and what all ranks have agreed on in their last outer step.

    Args:
        leaves, what: as for `Average`.
        options: of the outer step.

    Attributes:
        agreed: the weights after the last exchange, the same bits on all ranks; None before the first step.
        momentum: of the outer steps, the same bits on all ranks; None before the first step, and if there is none.
    """

    def __init__(self, leaves: Leaves, what: str, options: LocalOptions) -> None:
        super().__init__(leaves, what)
        self._lr = options.outer_lr
        self._mu = options.outer_momentum
        wire = options.compression
        self._wire: WireState | None = None if wire is None else wire.reducer((), ())
        self.kept += ("agreed", "momentum") if self._mu else ("agreed",)
        self._unsent: State = {}  # what the wire format has kept, before the exchange that is under way
        self.agreed: Flat | None = None
        self.momentum: Flat | None = None

    def connect(self, engine: Engine, owner: str) -> None:
        super().connect(engine, owner)
        if self._wire is not None:
            self._wire.load_state_dict({})  # it was of another exchange, and perhaps of other ranks

    def start(self) -> int:
        self.agreed = values_of(self.leaves)
        if self._mu and self.momentum is None:
            self.momentum = np.zeros_like(self.agreed)
        return zlib.crc32(self.agreed.data)

    def average(self) -> None:
        super().average()
        self.start()

    def state_dict(self) -> State:
        kept = super().state_dict()
        if self._wire is not None:
            kept |= self._unsent if self.operation is not None else self._wire.state_dict()
        return kept

    def load_state_dict(self, state: Mapping[str, Flat], own: bool) -> None:
        super().load_state_dict(state, own)
        if self._wire is not None:
            self._wire.load_state_dict(dict(state) if own else {})

    def _checksum(self) -> int:
        assert self.agreed is not None
        return zlib.crc32(b"" if self.momentum is None else self.momentum.data, zlib.crc32(self.agreed.data))

    def _exchange(self, flat: Flat, note: str) -> InPlaceAllreduce:
        assert self.agreed is not None
        np.subtract(self.agreed, flat, out=flat)
        if self._wire is None:
            return self._submitted(flat, "exchange", note)
        self._unsent = {} if self.then is None else self._wire.state_dict()
        return self._submitted(flat, "exchange", note, Travel(self._wire.wire, [self._wire.feedback]))

    def _concluded(self, flat: Flat) -> Flat:
        """Make the outer step; uses up the average of the differences."""
        assert self.agreed is not None
        outer_step(self.agreed, self.momentum, flat, lr=self._lr, mu=self._mu)
        return self.agreed


def outer_step(agreed: Flat, momentum: Flat | None, delta: Flat, *, lr: float, mu: float) -> None:
    """Change weights and momentum by the average of the differences, which this uses up; see the head of the module."""
    if momentum is not None:
        momentum *= mu
        momentum += delta
    delta *= lr
    agreed -= delta
    if momentum is not None:
        np.multiply(momentum, lr * mu, out=delta)
        agreed -= delta


class LocalTraining:
    """What an optimizer of local steps does with the other ranks of the world, and when.

    Args:
        described: the optimizer; equal on all ranks.
        options: checked; equal on all ranks.
        parameters: those of each fragment.
        others: what else is averaged; the same on all ranks.
        writing: returns a context in which this rank may write to the parameters. Collective.

    Attributes:
        steps: so many the optimizer has made; equal on all ranks.
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
        self._described = described
        self._options = options
        make = Average if options.averages_weights else partial(Fragment, options=options)
        self._fragments = [make(leaves, f"fragment {number}") for number, leaves in enumerate(parameters)]
        self._averages = [*self._fragments, *others]
        #: At which step of a period each of them is exchanged.
        self._starts = [number * options.period // options.fragments for number in range(len(parameters))]
        self._starts += [0] * len(others)
        self.steps = 0
        self._weights: str | None = None  # checksums of those at the call of `start`
        self._writing = writing
        self._connect()

    @property
    def warming(self) -> bool:
        """Whether the next step is one of the first, which are synchronous."""
        return bool(self.steps < self._options.warmup_steps)

    @property
    def outer_steps(self) -> int:
        """How many outer steps the weights have that this rank goes on from."""
        since = self.steps - self._options.warmup_steps - self._options.delay
        return max(0, int(since // self._options.period))

    def start(self) -> None:
        """Let training begin with the weights at this call, not with those before the first local step. Local."""
        self._weights = self._started()

    def _started(self) -> str:
        return ", ".join(f"{each.start():08x}" for each in self._fragments)

    def before_step(self) -> None:
        """To be called before each step; the first local step compares the weights. Collective then.

        After `start` it may also be called after the step, just before `after_step`.

        Raises:
            ConfigError: a sampler divides samples by speed.
        """
        if is_by_speed(self._engine):
            raise refusal(LOCAL, SHARES)
        if self._compares:
            weights = self._weights or self._started()
            text = f"weights with the checksums {weights}; call broadcast_parameters before the first step"
            self._run("start", text, lambda ranks: ranks.barrier())
        self._resume()

    @property
    def _compares(self) -> bool:
        """Whether the next step is the first local one."""
        return bool(self.steps == self._options.warmup_steps)

    def _resume(self) -> None:
        """Begin exchanges again that were under way when the state was saved."""
        for each in self._averages:
            if each.then is not None and each.operation is None:
                each.begin(self.steps, moving=True)

    def after_step(self) -> None:
        """To be called after each step: begin the exchanges that are due, and end those that are. Collective."""
        self.steps += 1
        if self.steps <= self._options.warmup_steps:
            return
        self._end(self._due(0))  # begun with another delay, and loaded
        for each in self._due(0):
            each.begin(self.steps, moving=self._options.delay > 0)
        self._end(self._due(self._options.delay))

    def _end(self, averages: Sequence[Average]) -> None:
        """End the exchanges of some averages that are under way."""
        ending = [each for each in averages if each.operation is not None]
        with self._writing() if ending else nullcontext():
            for each in ending:
                each.end()

    def _due(self, late: int) -> list[Average]:
        """Return what has begun so many steps ago, or would have."""
        step = self.steps - self._options.warmup_steps - late
        averages = zip(self._averages, self._starts, strict=True)
        return [each for each, start in averages if (step - start) % self._options.period == 0]

    def synchronize(self) -> None:
        """End what is under way, and make all values the averages. Collective."""
        self._resume()
        self._end(self._averages)
        with self._writing():
            for each in self._averages:
                each.average()

    def rejoin(self) -> bool:
        """Go on in the world there is now, if ``shutdown()`` and ``init()`` came since the last time. Collective.

        The ranks average what each has learnt. Steps and momentum are those of the rank with the most steps.

        Returns:
            Whether they came.
        """
        if global_process_set.engine is self._engine:
            return False
        self._connect()
        mine = np.array([self.steps])
        counts = self._run("steps", "steps", lambda ranks: ranks.allgather(mine))
        self.steps, root = int(counts.max()), int(counts.argmax())
        for each in self._averages if self.steps else ():
            each.average()
            if isinstance(each, Fragment) and each.momentum is not None:
                self._run("momentum", "momentum", partial(broadcast, each.momentum, root))
        return True

    def _connect(self) -> None:
        self._engine = global_process_set.engine
        self._name = self._engine.new_name(f"{self._described},")
        for each in self._averages:
            each.connect(self._engine, self._name)

    def _run(self, what: str, text: str, run: Callable[[Communicator], Any]) -> Any:
        about = About(f"the {what} of {self._name}")
        return self._engine.run(CollectiveOp(f"{self._name}, {what}", text, run, about=about))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what is needed to go on in the middle of a period. Local.

        Returns:
            ``steps``; ``rank`` and ``size``, as what was not sent yet is this rank's own; and ``averages``, arrays by
            number and name.
        """
        ranks = self._engine.communicator
        averages = {number: each.state_dict() for number, each in enumerate(self._averages)}
        return {"steps": self.steps, "rank": ranks.rank, "size": ranks.size, "averages": averages}

    def require_fit(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless `load_state_dict` can take this."""
        if not {"steps", "averages"} <= {*state}:
            raise ConfigError(f"this is no state of DiLoCo: it has {sorted(map(str, state))}")
        averages = state["averages"]
        if len(averages) != len(self._averages):
            raise ConfigError(f"the state has {len(averages)} averages, this optimizer {len(self._averages)}")
        begun = state["steps"] > self._options.warmup_steps
        for number, each in enumerate(self._fragments):
            lengths = {name: averages[number][name].size for name in each.kept if name in averages[number]}
            count, _ = each.leaves.find()
            if (begun and not {*each.kept[1:]} <= lengths.keys()) or {*lengths.values()} - {count}:
                raise ConfigError(
                    f"the state of fragment {number} has {lengths}, this optimizer {count} elements of each of "
                    f"{each.kept[1:]}: it has other parameters or options"
                )

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what `state_dict` returned, on all ranks; None: begin anew. Local."""
        if state is None:
            state = {"steps": 0, "rank": 0, "size": 0, "averages": {n: {} for n in range(len(self._averages))}}
        ranks = self._engine.communicator
        own = (state["rank"], state["size"]) == (ranks.rank, ranks.size)
        self.steps = state["steps"]
        for number, each in enumerate(self._averages):
            each.load_state_dict(state["averages"][number], own)


def broadcast(array: Flat, root: int, ranks: Communicator) -> None:
    """Overwrite an array by the root's. Collective."""
    ranks.broadcast(array, root, out=array)
