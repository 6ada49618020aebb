"""Gradients in, gradients out: lists of arrays, sparse rows or None, reduced over the ranks before each step.

A step begins with an agreement: in one small reduction the ranks tell each other which gradients they have. Then the
buckets are reduced. A step that finds all as the last one has left it needs no agreement. Each rank submits the
reduction itself, under the name of the agreement and with a signature that says what it would have told. So if a rank
has something else to say, or says it of something else, the negotiation refuses both before a byte has moved, all
ranks hear of it, and all agree first. The more often that happens, the longer they wait before they try again.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringreduce.common.errors import ConfigError, MismatchError, UnsupportedBufferError
from ringreduce.common.reduce_ops import AVERAGE, MAX, SUM, ReduceOp
from ringreduce.engine import Engine, Gather, InPlace, Operation
from ringreduce.training.agreement import Record, is_refused
from ringreduce.training.buckets import Bucket, Buckets, names_in
from ringreduce.training.checks import Checks
from ringreduce.training.compression import Reducer, State, WireState
from ringreduce.training.framework import (
    DENSE,
    FILLED,
    KEPT,
    MOVABLE,
    NO_GRADIENT,
    SPARSE,
    UNSUPPORTED,
    Memory,
    Slot,
    Sparse,
)
from ringreduce.training.options import Options
from ringreduce.training.parameters import Named, differences

__all__ = ["Early", "GradientReducer", "Ranks"]

_log = logging.getLogger(__name__)


class Ranks:
    """Collectives for reducers of compressed buckets, as operations of an engine: ranks that have joined take part.

    Args:
        engine: carries them out.
        name: the optimizer's.
        title: what errors call these operations.

    Attributes:
        seconds: spent in them so far, waiting for others included.
    """

    def __init__(self, engine: Engine, name: str, title: str) -> None:
        self._engine, self._name, self._title = engine, name, title
        self.rank, self.size = engine.communicator.rank, engine.communicator.size
        self.empty = engine.communicator.empty
        self.seconds = 0.0

    def allreduce(self, array: Any, op: ReduceOp, *, out: Any) -> None:
        """Reduce an array in place; see `InPlace`."""
        assert out is array, "buckets are reduced where they are"
        self.run(InPlace(f"{self._name}, {len(array)}", f"a part of {self._name}", op, [array]))

    def allgather(self, rows: Any) -> Any:
        """Return the rows of all ranks, one after the other; see `Gather`."""
        (gathered,) = self.run(Gather(f"{self._name}, rows", f"rows of {self._name}", [rows]))
        return gathered

    def run(self, operation: Operation) -> Any:
        """Carry out an operation and return its result."""
        operation.title = self._title
        started = perf_counter()
        try:
            return self._engine.run(operation)
        finally:
            self.seconds += perf_counter() - started


class Early(Protocol):
    """What reduces buckets before the step.

    Attributes:
        wanted: whether it may do so; the same on all ranks.
        begun: whether it does; the same on all ranks.
        watching: whether steps are to be told apart for it; the same on all ranks.
    """

    wanted: bool
    begun: bool
    watching: bool

    def report(self, record: Record, parameters: Sequence[Any]) -> None:
        """Say what was reduced and what the program has done since."""

    def conclude(self, record: Record, active: int) -> list[Bucket]:
        """Return the buckets that are reduced, given what all ranks have said."""

    def next_step(self, record: Record, buckets: Buckets, *, again: bool, everyone: bool) -> None:
        """Prepare for the next step."""

    def forget_step(self) -> None:
        """Prepare for a next step that nothing is to be reduced before."""

    def break_off(self) -> None:
        """End a step that has failed on all ranks."""

    def stop(self) -> None:
        """Withdraw, or wait for, all that is under way."""


class _Repeat(NamedTuple):
    """A step that can be made again without an agreement.

    Attributes:
        found: what every rank must find, again.
        parameters: all of them.
        buckets: all of them.
        slots: all of these, with the number of the parameter.
        text: says all of this, to compare it between ranks.
    """

    found: bytes
    parameters: Sequence[Any]
    buckets: Sequence[Bucket]
    slots: Sequence[tuple[int, Slot]]
    text: str


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
        settings: returns this rank's hyper-parameters, as text by name. The ranks compare theirs in steps 1, 2, 4, 8
            and so on, as that takes a while.

    Attributes:
        ranks: its collectives.
        early: what reduces buckets before the step; None: nothing.
        stepped: so many steps the optimizer has made; counted anew when all ranks have joined.
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
    ) -> None:
        self.memory, self.engine, self.named, self.options = memory, engine, named, options
        self.described = f"{kind} over {over}"
        self.name = engine.new_name(f"DistributedOptimizer over {over},")
        where = "backward pass" if options.in_backward else "step"
        self.ranks = Ranks(engine, self.name, f"the {where} of {self.described}")
        self.buckets = Buckets(memory, engine.communicator, options)
        self.checks = Checks(memory, self.ranks, named, self.described, engine.communicator.config)
        self.early: Early | None = None
        self.stepped = 0
        self._settings = settings
        self._steps = 0  # calls of `reduce` on this rank, counted anew when all ranks have joined
        self._joins = engine.joins
        self._compares = True  # weights, as long as they are equal
        self._record: Record | None = None
        self._found = b""  # what the last agreement has found
        self._alike, self._patience = 0, 1  # so many agreements have found the same; so many are needed to repeat it
        self._last: _Repeat | None = None
        self._refused = False  # whether the ranks have come to this step in different ways

    def reduce(self, gradients: Sequence[Any], fresh: Sequence[bool] | None = None) -> list[Any]:
        """Return the gradients' averages or sums over the ranks. Collective.

        Gradients that some ranks lack count as zeros there.

        Args:
            gradients: of all parameters, in registration order; None where there is none.
            fresh: which of them count; None: all.

        Raises:
            UnsupportedBufferError: on all ranks, if some rank has a gradient that cannot be reduced.
            ConfigError: on all ranks, if gradients are lost that were reduced before the step.
        """
        reduced = list(gradients)
        found = self.memory.found(reduced)
        if self.ranks.size == 1:
            return reduced
        if self._joins != self.engine.joins:
            self._joins, self._steps, self.stepped = self.engine.joins, 1, 0  # ranks that had joined made fewer
            self.checks.after_join()
        parameters = [parameter for _, parameter in self.named()]
        self._refused = False
        try:
            if not self.checks.idle:
                self.checks.look(self._steps, reduced)
            found = self._counted(found, parameters, fresh)
            if self._last is None or not self._repeats(self._last, parameters, reduced, found):
                self._agree_and_reduce(parameters, reduced, found)
        except BaseException:
            self._last, self._alike = None, 0
            if self.early is not None:
                self.early.break_off()
            raise
        self._steps += 1
        return reduced

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
            return bytes([each if new else NO_GRADIENT for each, new in zip(found, fresh, strict=True)])
        if self.options.skip_unused or NO_GRADIENT not in found:
            return found
        return bytes(
            DENSE if each == NO_GRADIENT and self.memory.is_trainable(parameter) else each
            for each, parameter in zip(found, parameters, strict=True)
        )

    @property
    def _looks_closer(self) -> bool:
        """Whether the ranks compare more than gradients: in the 1st, 2nd, 4th, 8th step and so on."""
        return self._steps & (self._steps + 1) == 0

    # ---- a step like the last one ----

    def _repeats(self, last: _Repeat, parameters: Sequence[Any], gradients: list[Any], found: bytes) -> bool:
        """Reduce the buckets as in the last step; return False if a rank does something else, and nothing was done."""
        same = found == last.found and len(parameters) == len(last.parameters)
        if self._looks_closer or not same or not all(map(is_, parameters, last.parameters)):
            return False
        moving = []
        for number, slot in last.slots:
            look = slot.look(gradients[number])
            if look == MOVABLE:
                moving.append((slot.place, number))
            elif look != FILLED:
                return False
        if moving:
            self.memory.pack([place for place, _ in moving], [gradients[number] for _, number in moving])
            for place, number in moving:
                gradients[number] = place
        text = f"{last.text}, {self.stepped - self._steps}" if self.options.in_backward else last.text
        flats = [bucket.flat for bucket in last.buckets]
        operation = self._operation(f"{self.name}, step", text, last.buckets, flats)
        try:
            self.ranks.run(operation)
        except MismatchError as error:
            self._heed(error, operation)
            return False
        if self.early is not None:
            self.early.forget_step()
        return True

    def _heed(self, error: MismatchError, operation: InPlace) -> None:
        """Take note that some ranks would repeat a step, and others not; raise any other error."""
        if self._refused or not is_refused(error, operation):
            raise error
        self._refused = True
        self._alike, self._patience, self._last = 0, 2 * self._patience, None

    def _remember(self, parameters: Sequence[Any], found: bytes) -> None:
        """Let the next step repeat this one, if it was like those before and nothing about it is special."""
        self._alike = self._alike + 1 if found == self._found else 0
        self._found, self._last = found, None
        buckets, options = list(self.buckets), self.options
        slots = [(number, slot) for each in buckets for number, slot in zip(each.numbers, each.slots, strict=True)]
        if (
            self._alike >= self._patience
            and (self.early is None or not self.early.watching)
            and not (options.in_backward and options.op is SUM)
            and options.predivide_factor == 1.0
            and options.compressor is None
            and len(slots) == sum(found) > 0  # all that have a gradient have a place
            and max(found) == DENSE
            and not any(bucket.is_compressed for bucket in buckets)
            and len({self._travels(bucket) for bucket in buckets}) == 1
        ):
            said = zlib.crc32(found, self.buckets.layout)
            self._last = _Repeat(found, parameters, buckets, slots, f"a step of {self.name} like the last, {said:08x}")

    # ---- any other step ----

    def _agree_and_reduce(self, parameters: Sequence[Any], gradients: list[Any], found: bytes) -> None:
        record, active = self._agree(parameters, found)
        if self.options.in_backward and record.again.any():
            raise ConfigError(
                f"a backward pass has added to sums over the ranks, of {self.described}: clear them first, make all "
                "passes of a step but the last within no_sync(), or declare them with backward_passes_per_step"
            )
        self.buckets.number(parameters)
        reduced = [] if self.early is None else self.early.conclude(record, active)
        everyone = record.found.tobytes()
        dense = [parameter for parameter, state in zip(parameters, everyone, strict=True) if state == DENSE]
        used = frozenset(map(id, dense))
        for bucket in reduced:
            self._in_bucket(bucket, gradients, partial(bucket.adopt, used=used))
        moved = self.buckets.update(parameters, dense)
        self._reduce(
            [bucket for bucket in self.buckets if bucket not in reduced and bucket.holds(used)], gradients, used, active
        )
        for number, state in enumerate(everyone):
            if state >= SPARSE:
                gradients[number] = self._reduce_sparse(parameters[number], gradients[number], state - SPARSE, active)
        if self.early is not None:
            again = bool(moved) or record.is_again or self.checks.needs_own_gradients_in(self._steps + 1)
            self.early.next_step(record, self.buckets, again=again, everyone=active == self.ranks.size)
        self._remember(parameters, everyone)

    def _in_bucket(self, bucket: Bucket, gradients: list[Any], change: Callable[[list[Any]], object]) -> None:
        """Change the gradients of a bucket."""
        mine = [gradients[number] for number in bucket.numbers]
        change(mine)
        for number, gradient in zip(bucket.numbers, mine, strict=True):
            gradients[number] = gradient

    def _agree(self, parameters: Sequence[Any], found: bytes) -> tuple[Record, int]:
        """Tell the other ranks which gradients this one has, and what it knows of them.

        Returns:
            What all have told, and how many ranks contribute to the step.
        """
        overlaps = self.early is not None and self.early.wanted
        record = self._record
        if record is None or record.key != (len(found), overlaps):
            record = self._record = Record(self.engine.communicator, len(found), overlaps)
        record.begin(found)
        if self.early is not None:
            self.early.report(record, parameters)
        early = self.early is not None and self.early.begun and self._steps > 1
        if self._compares and self._looks_closer and (self._steps == 0 or early):
            record.sign("weights", self.memory.checksum(parameters))
        settings = self._settings() if self._settings is not None and self._looks_closer else None
        if settings is not None:
            record.sign("settings", zlib.crc32(repr(settings).encode()))
        record.sign("layout", self.buckets.layout)
        if self.options.in_backward:
            record.sign("stepped", self.stepped)
        active = self._exchange(record)
        self._judge(record, settings)
        return record, active

    def _exchange(self, record: Record) -> int:
        """Make the record that of all ranks; return how many contribute to the step."""
        while True:
            text = f"the gradients of {self.name}"
            operation = InPlace(f"{self.name}, step", text, MAX, [record.memory])
            try:
                self.ranks.run(operation)
            except MismatchError as error:
                self._heed(error, operation)
            else:
                return operation.active

    def _judge(self, record: Record, settings: Mapping[str, str] | None) -> None:
        """Warn of what differs between the ranks, or raise."""
        if record.differs("weights"):
            self._compares = False
            self._warn_of_weights()
        if settings is not None and record.differs("settings"):
            self._warn_of_settings(settings)
        if record.differs("stepped"):
            raise ConfigError(
                f"the ranks make the backward passes of different steps of {self.described}: with "
                'reduce_in="backward" every rank makes the same passes before each step, and each of them adds to a '
                "gradient of the optimizer"
            )
        if record.differs("layout"):  # a rank has joined while others have placed gradients
            record.forget_early()
            self.buckets.clear()
        if UNSUPPORTED in record.found:
            raise UnsupportedBufferError(
                f"the gradient of {self.named()[record.found.tolist().index(UNSUPPORTED)][0]} is neither on the CPU "
                "nor on a GPU that can be used (one for each process), or of a layout that is neither strided nor "
                "sparse COO, on some rank"
            )

    # ---- reductions ----

    def _travels(self, bucket: Bucket) -> tuple[str | None, bool]:
        """Return what is equal for buckets that travel together."""
        return bucket.wire, self.memory.streams.is_on_host(bucket.flat)

    def _reduce(self, due: Sequence[Bucket], gradients: list[Any], used: frozenset[int], active: int) -> None:
        """Fill buckets and reduce them: together, but one by one those that have a `Reducer`."""
        together: dict[tuple[str | None, bool], list[Bucket]] = {}
        taken_back = []
        for bucket in due:
            target, before = bucket, [gradients[number] for number in bucket.numbers]
            if KEPT in bucket.look(before):
                target = bucket.apart()
                target.numbers = bucket.numbers
                taken_back.append((bucket, target, before))
            self._in_bucket(target, gradients, partial(target.fill, used=used))
            if isinstance(target.reducer, WireState) or target.reducer is None:
                together.setdefault(self._travels(target), []).append(target)
            else:
                self._compress(target.reducer, target.flat, active)
        for buckets in together.values():
            self._reduce_together(buckets)
        for bucket, target, before in taken_back:
            self._in_bucket(bucket, gradients, partial(bucket.take_back, apart=target, before=before))

    def _reduce_together(self, buckets: Sequence[Bucket]) -> None:
        factor, compressor = self.options.predivide_factor, self.options.compressor
        flats = [bucket.flat for bucket in buckets]
        if factor != 1.0:
            for flat in flats:
                self.memory.scale(flat, 1.0 / factor)
        compressed = [(flat, None) if compressor is None else compressor.compress(flat) for flat in flats]
        wire = buckets[0].wire
        name = f"{self.name}, buckets" + (f" in {wire}" if wire else "")
        sent = [each for each, _ in compressed]
        self.ranks.run(self._operation(name, f"{len(flats)} buckets of {self.name}", buckets, sent))
        for flat, (each, context) in zip(flats, compressed, strict=True):
            if each is not flat:
                self.memory.pack([flat], [compressor.decompress(each, context)])
            if factor != 1.0:
                self.memory.scale(flat, factor)

    def _compress(self, reducer: Reducer, flat: Any, active: int) -> None:
        factor, divisor = self.options.predivide_factor, self._averaged_over(active)
        averages = self.options.op is AVERAGE
        plain = factor == 1.0 and divisor == self.ranks.size
        if factor != 1.0:
            self.memory.scale(flat, 1.0 / factor)
        with self.memory.streams.on_host(flat) as values:
            reducer.reduce(self.ranks, values, average=plain and averages)
        if averages and not plain:
            self.memory.scale(flat, factor / divisor)

    def _reduce_sparse(self, parameter: Any, gradient: Any, sparse_dims: int, active: int) -> Any:
        """Sum or average a gradient that is sparse on some rank: gather what the ranks have, make nothing dense."""
        memory = self.memory
        if not isinstance(memory, Sparse):
            raise UnsupportedBufferError("sparse gradients are not supported on this rank")
        rows = memory.rows(parameter, gradient, sparse_dims)
        within = memory.streams.around(rows)
        gather = Gather(f"{self.name}, sparse", f"a sparse gradient of {self.name}", rows, within)
        places, values = self.ranks.run(gather)
        divisor = self._averaged_over(active) if self.options.op is AVERAGE else 1
        return memory.of_rows(parameter, places, values, divisor)

    def _averaged_over(self, active: int) -> int:
        return self.engine.communicator.config.conventions.averaged_over(active, self.ranks.size)

    def _operation(self, name: str, text: str, buckets: Sequence[Bucket], sent: Sequence[Any]) -> InPlace:
        """Return the reduction of buckets, given what travels of each."""
        operation = InPlace(
            name,
            text,
            self.options.op,
            sent,
            wire=buckets[0].wire,
            feedbacks=[feedback for bucket in buckets for feedback in bucket.feedbacks],
            within=self.memory.streams.around(sent),
        )
        operation.parts = partial(names_in, buckets, self.named)
        return operation

    # ---- warnings ----

    def _warn_of_weights(self) -> None:
        if self.ranks.rank == 0 and self._steps == 0:
            _log.warning(
                "the ranks begin with different weights, and will end with different ones; call broadcast_parameters("
                "model.state_dict(), root_rank=0) before the first step"
            )
        elif self.ranks.rank == 0:
            _log.warning(
                "%s: the ranks have different weights by now. Is a gradient written to through .data or NumPy between "
                "the backward pass and the step (overlap=False allows that), or are weights changed on some ranks?",
                self.described,
            )

    def _warn_of_settings(self, mine: Mapping[str, str]) -> None:
        """Let rank 0 say which hyper-parameters differ between ranks, once."""
        self._settings = None
        said = json.dumps([self.ranks.rank, mine]) + "\n"
        everyone = self.ranks.allgather(np.frombuffer(said.encode(), np.uint8)[:, None])
        if self.ranks.rank == 0:
            _log.warning("%s", differences(dict(map(json.loads, everyone.tobytes().decode().splitlines()))))
