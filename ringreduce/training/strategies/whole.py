"""Gradients in, gradients out: lists of arrays, sparse rows or None, reduced over the ranks before each step.

A step begins with an agreement: in one small reduction the ranks exchange which gradients they have. Then the buckets
are reduced. A step in which nothing has changed since the last one needs no agreement. Each rank submits the reduction
of the buckets at once, under the name of the agreement and with a signature that holds the rank's record. If a rank
submits another record, or the agreement itself, the negotiation refuses the operation on all ranks before a byte has
moved, and all agree first. The more often that happens, the longer they wait before they try again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Any
from weakref import WeakMethod

import numpy as np

from ringreduce.common.arguments import whole_number
from ringreduce.common.errors import ConfigError, MismatchError, UnsupportedBufferError
from ringreduce.common.reduce_ops import AVERAGE, MAX, SUM
from ringreduce.engine import Engine, InPlaceAllreduce, Operation
from ringreduce.training.binding.framework import Found, Look, Memory, Named
from ringreduce.training.binding.identity import Identity, name_in
from ringreduce.training.compression import State
from ringreduce.training.data.shares import Shares, counts_of
from ringreduce.training.gradients.buckets import Buckets
from ringreduce.training.gradients.checks import Checks, settings_of
from ringreduce.training.gradients.record import Ranks, Record
from ringreduce.training.gradients.weights import Weights
from ringreduce.training.options.options import Options
from ringreduce.training.options.refusals import ADASUM, BACKWARD, SAMPLES, STALENESS, refusal, require_together
from ringreduce.training.strategies.late import LateAverages
from ringreduce.training.strategies.overlapped import Overlap
from ringreduce.training.strategies.parts import Sharding
from ringreduce.training.strategies.repeats import RepeatedStep


class GradientReducer:
    """Reduces the gradients of one optimizer over the ranks.

    Ranks that have joined need none of this: the operations that it submits go on without them.

    Args:
        memory: the framework's.
        engine: of the ranks that train together.
        named: returns names and parameters, all of the optimizer's, in registration order; equal on all ranks.
        kind: of the optimizer, for errors.
        over: its parameters, for errors; the same on all ranks.
        options: settled; the same on all ranks.
        settings: returns this rank's hyper-parameters, as text by name; None: `Checks.model` has them. The ranks
            compare theirs in steps 1, 2, 4, 8 and so on, as that takes a while.
        identity: of the optimizer, for names of operations; None: it is made in the same order on all ranks.

    Attributes:
        memory, named, options: the arguments.
        ranks: its collectives.
        buckets: its buckets.
        early: what reduces buckets before the step; None: nothing.
        sharding: what has the parameters in memory of the node; None: each rank has its own.
        late: the averages that later steps apply; None: each step applies its own.
        stepped: so many steps the optimizer has made; counted from 0 again when all ranks have joined.
        samples: over how many samples this rank's gradients are a mean; averages are weighted by these numbers. On all
            ranks or none. None: as a sampler says that divides by speed; where none does, ranks count alike.
    """

    def __init__(
        self,
        memory: Memory,
        engine: Engine,
        named: Callable[[], Named],
        kind: str,
        over: str,
        options: Options,
        settings: Callable[[], Mapping[str, str]] | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.memory = memory
        self.named = named
        self.options = options
        name = name_in(engine, identity or f"DistributedOptimizer over {over},")
        self.ranks = Ranks(engine, name, f"{kind} over {over}", "backward pass" if options.in_backward else "step")
        self.buckets = Buckets(memory, self.ranks, named, options)
        self.checks = Checks(memory, self.ranks, named)
        self.early: Overlap | None = None
        self.sharding: Sharding | None = None
        if options.shard is not None:
            self.sharding = Sharding(memory, self.ranks, self.buckets, options)
            self.buckets.parts = WeakMethod(self.sharding.operation)  # which has the buckets
        self.late: LateAverages | None = None
        if options.staleness:
            self.late = LateAverages(options.staleness, memory, self.ranks, self.buckets, named)
        self.stepped = 0
        self.samples: Any = None
        self._counted_in = -1  # the step for which a sampler was last asked
        self._told: int | None = None  # this rank's samples, and those of all, when they were last agreed on
        self._counts: dict[int, int] = {}
        checks = self.checks
        self._settings: Callable[[], Mapping[str, str]] | None = settings or (lambda: settings_of(checks.model))
        self._steps = 0  # calls of `reduce` on this rank, from 0 again when all ranks have joined
        self._joins = engine.joins
        self._compares = memory.advice.first is None  # weights, as long as they are equal
        self._record: Record | None = None
        self._found = b""  # what the last agreement has found
        self._alike = 0  # agreements in a row that have found the same
        self._patience = 1  # how many of them it takes to repeat the last one
        self._last: RepeatedStep | None = None
        self._refused = False  # whether the ranks have come to this step in different ways

    def reduce(self, gradients: Sequence[Any], fresh: Sequence[bool] | None = None) -> list[Any]:
        """Return the gradients' averages or sums over the ranks. Collective.

        Gradients that some ranks lack count as zeros there. With staleness, those of an earlier step are returned.

        Args:
            gradients: of all parameters, in registration order; None where there is none.
            fresh: which of them count; None: all.

        Raises:
            UnsupportedBufferError: on all ranks, if some rank has a gradient that cannot be reduced.
            ConfigError: on all ranks, if gradients reduced before the step were overwritten or cleared on some, or
                numbers of samples are wrong or missing on some.
        """
        reduced = list(gradients)
        found = self.memory.found(reduced)
        pacemaker = self.ranks.engine.pacemaker
        if self.late is not None:
            pacemaker.lags = True
            pacemaker.arrive(0)
            averages = self._reduce_late(self.late, reduced, found)
            self._leave()
            return averages
        if self.ranks.size == 1:
            if self.samples is not None and isinstance(error := self._samples(), ConfigError):
                raise error
            return reduced
        if self._joins != self.ranks.engine.joins:
            self._joins = self.ranks.engine.joins
            self._steps = 1  # ranks that had joined made fewer steps
            self.stepped = 0
            self.checks.after_join()
        pacemaker.arrive(self._joins)
        parameters = [parameter for _, parameter in self.named()]
        self._refused = False
        try:
            if not self.checks.idle:
                self.checks.look(self._steps, reduced)
            found = self._counted(found, parameters, fresh)
            samples = None if self.samples is None and Shares not in self.ranks.engine.attached else self._samples()
            same = self._last is not None and samples == self._told
            if self.sharding is not None:
                same &= self.sharding.uncleared.settle()
            if not (same and self._repeats(parameters, reduced, found)):
                self._agree_and_reduce(parameters, reduced, found, samples)
        except BaseException as error:
            self._last = None
            self._alike = 0
            self.samples = None
            if self.early is not None:
                self.early.break_off()
                if self.early.wanted and isinstance(error, MismatchError) and error.advice:
                    # On other ranks a step of another optimizer has failed: what overlaps is not the same any more.
                    self.ranks.engine.fail(error)
            raise
        self._steps += 1
        if self.sharding is not None:
            self.sharding.uncleared.reduced(reduced)
        self._leave()
        return reduced

    def _leave(self) -> None:
        pacemaker = self.ranks.engine.pacemaker
        pacemaker.leave()
        if pacemaker.reported:
            self.checks.look_at_paces(weighs=self.options.weighs)

    def _reduce_late(self, late: LateAverages, gradients: list[Any], found: bytes) -> list[Any]:
        parameters = [parameter for _, parameter in self.named()]
        ranks = self.ranks
        if not self.checks.idle:
            self.checks.look(self._steps, gradients)
        counts = dict(enumerate(counts_of(ranks.engine) or ()))  # all ranks know all of them
        self.buckets.weights = Weights.of(counts, ranks.rank, ranks.size, self.buckets.divisor(ranks.size))
        error = None if self.samples is None else refusal(SAMPLES, STALENESS)
        if self._steps == 0:  # the only step in which a rank waits for all others
            self._agree(parameters, found, error)
        self._steps += 1
        return late.reduce(parameters, gradients, found, error)

    def count(self, samples: object, reduced: str | None) -> None:
        """Weight the averages of the next step by this rank's number of samples; on all ranks or none.

        Args:
            samples: the number.
            reduced: what reduced the gradients of that step already, by its name in `combinations`; None: nothing.

        Raises:
            ConfigError: they are reduced already, or averaged late, or steps are combined by Adasum. On all ranks.
        """
        options = self.options
        used = {ADASUM: options.adasum, BACKWARD: options.in_backward, STALENESS: self.late is not None, reduced: True}
        require_together([SAMPLES, *(name for name, is_used in used.items() if name is not None and is_used)])
        self.samples = samples

    def own_parts(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are reduced that this rank needs: with shards, those of its own parts."""
        return nullcontext() if self.sharding is None else self.sharding.uncleared.own_parts()

    def state_dict(self) -> dict[int, State]:
        """See `Buckets.state_dict`; ends reductions that are under way first."""
        if self.early is not None:
            self.early.stop()
        return self.buckets.state_dict()

    def load_state_dict(self, state: Mapping[int, State]) -> None:
        """See `Buckets.load_state_dict`."""
        if self.early is not None:
            self.early.stop()
        self.buckets.load_state_dict(state)

    @property
    def compression_error(self) -> float:
        """The largest relative error that compressing a bucket made on this rank in the last step."""
        return max((bucket.reducer.error for bucket in self.buckets if bucket.reducer is not None), default=0.0)

    def _counted(self, found: bytes, parameters: Sequence[Any], fresh: Sequence[bool] | None) -> bytes:
        """Return what was found of each gradient that counts."""
        if fresh is not None:
            return bytes([each if new else Found.NO_GRADIENT for each, new in zip(found, fresh, strict=True)])
        if self.options.skip_unused or Found.NO_GRADIENT not in found:
            return found
        return bytes(
            Found.DENSE if each == Found.NO_GRADIENT and self.memory.is_trainable(parameter) else each
            for each, parameter in zip(found, parameters, strict=True)
        )

    @property
    def _looks_closer(self) -> bool:
        """Whether the ranks compare more than gradients: in the 1st, 2nd, 4th, 8th step and so on."""
        return self._steps & (self._steps + 1) == 0

    # ---- a step like the last one ----

    def _repeats(self, parameters: Sequence[Any], gradients: list[Any], found: bytes) -> bool:
        """Reduce the buckets as in the last step; return False if a rank does something else, and nothing was done."""
        last = self._last
        assert last is not None
        if found != last.found or self._looks_closer or len(parameters) != len(last.parameters):
            return False
        if not all(map(is_, parameters, last.parameters)):
            return False
        places = []
        moving = []
        for number, slot in last.slots:
            look = slot.look(gradients[number])
            if look == Look.MOVABLE:
                places.append(slot.place)
                moving.append(number)
            elif look != Look.IN_PLACE:
                return False
        if moving:
            self.memory.pack(places, [gradients[number] for number in moving])
            for number, place in zip(moving, places, strict=True):
                gradients[number] = place
        text = f"{last.text}, {self.stepped - self._steps}" if self.options.in_backward else last.text
        operation = self.buckets.reduction(f"{self.ranks.name}, step", text, last.buckets, last.flats)
        try:
            self.ranks.run(operation)
        except MismatchError as error:
            self._heed(error, operation)
            return False
        if self.early is not None:
            self.early.forget_step()
        return True

    def _heed(self, error: MismatchError, operation: Operation) -> None:
        """Take note that some ranks would repeat a step, and others not; raise any other error."""
        if self._refused or not operation.refused:
            raise error
        self._refused = True
        operation.error = None  # else its traceback and the operation keep each other, and gradients, alive
        self._alike, self._patience, self._last = 0, 2 * self._patience, None

    def _remember(self, parameters: Sequence[Any], found: bytes) -> None:
        """Let the next step repeat this one, if it was like those before and nothing about it is special."""
        self._alike = self._alike + 1 if found == self._found else 0
        self._found = found
        self._last = None
        buckets = list(self.buckets)
        options = self.options
        slots = [(number, slot) for each in buckets for number, slot in zip(each.numbers, each.slots, strict=True)]
        if (
            self._alike >= self._patience
            and (self.early is None or not self.early.watching)
            and not (options.in_backward and options.op is SUM)
            and options.predivide_factor == 1.0
            and options.compressor is None
            and len(slots) == sum(found) > 0  # all that have a gradient have a place
            and max(found) == Found.DENSE
            and not any(bucket.is_compressed for bucket in buckets)
            and len({bucket.travels for bucket in buckets}) == 1
            and (self.buckets.weights is None or self.buckets.weights.everyone)
        ):
            alike = zlib.crc32(found + repr(self._counts).encode(), self.buckets.layout)
            text = f"a step of {self.ranks.name} like the last, {alike:08x}"
            self._last = RepeatedStep(found, parameters, buckets, [each.flat for each in buckets], slots, text)

    # ---- any other step ----

    def _agree_and_reduce(
        self, parameters: Sequence[Any], gradients: list[Any], found: bytes, samples: int | ConfigError | None
    ) -> None:
        record, active = self._agree(parameters, found, samples)
        if self.options.in_backward and record.again.any():
            raise ConfigError(
                f"a backward pass has added to sums over the ranks, of {self.ranks.described}: clear them first, make "
                "all passes of a step but the last within no_sync(), or declare them with backward_passes_per_step"
            )
        self.buckets.number(parameters)
        reduced = [] if self.early is None else self.early.conclude(record, active, gradients)
        self._weigh(samples, active, early=bool(reduced))
        everyone = record.found.tobytes()
        moved = self.buckets.update(parameters, everyone)
        if moved and self.sharding is not None:
            self.sharding.update()
        self.buckets.reduce(reduced, gradients, everyone, active)
        for number, state in enumerate(everyone):
            if state >= Found.SPARSE:
                gradients[number] = self.buckets.sparse(
                    parameters[number], gradients[number], state - Found.SPARSE, active
                )
        if self.early is not None:
            again = (
                bool(moved or self._counts) or record.is_again or self.checks.needs_own_gradients_in(self._steps + 1)
            )
            if self.early.next_step(record, again=again, everyone=active == self.ranks.size):
                self.checks.warn_of_changes(in_backward=self.options.in_backward)
        self._remember(parameters, everyone)

    def _samples(self) -> int | ConfigError | None:
        """Return the number of samples of this rank's gradients; None: not needed. An error is raised on all ranks."""
        try:
            if self.samples is not None:
                samples = whole_number("samples", self.samples, 0)
            else:
                counts = counts_of(self.ranks.engine, again=self._counted_in == self.stepped)
                if counts is None:
                    return None
                samples = counts[self.ranks.rank]
                self._counted_in = self.stepped
            if self.options.op is not AVERAGE or self.options.adasum:
                raise ConfigError("numbers of samples are weights of an average; use op=Average with them")
        except ConfigError as error:
            return error
        return samples

    def _weigh(self, samples: int | ConfigError | None, active: int, *, early: bool) -> None:
        """Weight averages by the samples of all ranks; on all ranks these are numbers, or on none."""
        counts: dict[int, int] = {}
        if isinstance(samples, int):
            if early:
                raise ConfigError(
                    "buckets were averaged in the backward pass without weights; with samples, overlap=False"
                )
            rows = self.ranks.allgather(np.array([[self.ranks.rank, samples]], np.int64))
            counts = dict(rows.tolist())
        if self._refused and counts != self._counts:
            self._patience = max(self._patience // 2, 1)  # steps were as alike as before
        self._told = samples if isinstance(samples, int) else None
        self._counts = counts
        size = self.ranks.size
        divisor = self.buckets.divisor(active)
        self.buckets.weights = Weights.of(counts, self.ranks.rank, size, divisor)

    def _agree(self, parameters: Sequence[Any], found: bytes, samples: int | ConfigError | None) -> tuple[Record, int]:
        """Exchange with the other ranks which gradients each has, and what it knows of them.

        Returns:
            The record of all ranks, and how many contribute to the step.
        """
        overlaps = self.early is not None and self.early.wanted
        record = self._record
        if record is None or record.key != (len(found), overlaps):
            record = self._record = Record(self.ranks.engine.communicator, len(found), overlaps)
        record.begin(found)
        if self.early is not None:
            self.early.report(record, parameters)
        if self.sharding is not None:
            self.sharding.uncleared.report(record, parameters)
        early = self.early is not None and self.early.begun and self._steps > 1
        if self._compares and self._looks_closer and (self._steps == 0 or early):
            record.sign("weights", self.memory.checksum(parameters))
        begun = self.late is not None or self._steps >= (self.memory.advice.first or 0)
        settings = self._settings() if self._settings is not None and self._looks_closer and begun else None
        if settings is not None:
            record.sign("settings", zlib.crc32(repr(settings).encode()))
        record.sign("layout", self.buckets.layout)
        if self.options.in_backward:
            record.sign("stepped", self.stepped)
        record.counted[:], record.uncounted[:] = isinstance(samples, int), samples is None
        record.miscounted[:] = isinstance(samples, ConfigError)
        active = self._exchange(record)
        if isinstance(samples, ConfigError):
            raise samples
        self._judge(record, settings)
        return record, active

    def _exchange(self, record: Record) -> int:
        """Make the record that of all ranks; return how many contribute to the step."""
        while True:
            text = f"the gradients of {self.ranks.name}"
            operation = InPlaceAllreduce(f"{self.ranks.name}, step", text, MAX, [record.memory])
            try:
                self.ranks.run(operation)
            except MismatchError as error:
                self._heed(error, operation)
            else:
                return operation.active

    def _judge(self, record: Record, settings: Mapping[str, str] | None) -> None:
        """Warn of what differs between the ranks, or raise."""
        if record.miscounted.any() or (record.counted.any() and record.uncounted.any()):
            raise ConfigError(
                f"some rank gives a wrong number of samples, or none, in a step of {self.ranks.described}: give it on "
                "all ranks, or on none"
            )
        if self.sharding is not None:
            self.sharding.uncleared.heed(record, self.ranks.described)
        if record.differs("weights"):
            self._compares = False
            self.checks.warn_of_weights(self._steps)
        if settings is not None and record.differs("settings"):
            self._settings = None  # once
            self.checks.warn_of_settings(settings)
        if record.differs("stepped"):
            raise ConfigError(
                f"the ranks make the backward passes of different steps of {self.ranks.described}: with "
                'reduce_in="backward" every rank makes the same passes before each step, and each of them adds to a '
                "gradient of the optimizer"
            )
        if record.differs("layout"):  # a rank has joined while others have placed gradients
            record.forget_early()
            self.buckets.clear()
        if Found.UNSUPPORTED in record.found:
            number = record.found.tolist().index(Found.UNSUPPORTED)
            raise UnsupportedBufferError(
                f"the gradient of {self.named()[number][0]} is neither on the CPU "
                "nor on a GPU that can be used (one for each process), or of a layout that is neither strided nor "
                "sparse COO, on some rank"
            )
