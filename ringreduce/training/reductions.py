"""The reductions of a step: buckets together, or one by one where a reducer compresses them, and sparse gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.common.reduce_ops import AVERAGE
from ringreduce.engine import Engine, Gather, InPlaceAllreduce
from ringreduce.training.agreement import Ranks, Record
from ringreduce.training.buckets import Bucket, Buckets, names_in
from ringreduce.training.compression import Reducer, WireState
from ringreduce.training.framework import KEPT, Memory, Sparse
from ringreduce.training.options import Options
from ringreduce.training.parameters import Named

__all__ = ["Early", "Reductions"]


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

    def next_step(self, record: Record, buckets: Buckets, *, again: bool, everyone: bool) -> bool:
        """Prepare for the next step; return whether the program changes its gradients, so that this is given up."""

    def forget_step(self) -> None:
        """Prepare for a next step that nothing is to be reduced before."""

    def break_off(self) -> None:
        """End a step that has failed on all ranks."""

    def stop(self) -> None:
        """Withdraw, or wait for, all that is under way."""


class Reductions:
    """Reduces what the ranks have agreed to reduce. Collective.

    Args:
        memory: the gradients'.
        engine: of the ranks that train together.
        ranks: carry operations out.
        name: the optimizer's.
        named: returns names and parameters.
        options: settled; the same on all ranks.
    """

    def __init__(
        self,
        memory: Memory,
        engine: Engine,
        ranks: Ranks,
        name: str,
        named: Callable[[], Named],
        options: Options,
    ) -> None:
        self._memory, self._engine, self._ranks = memory, engine, ranks
        self._name, self._named, self._options = name, named, options

    def travels(self, bucket: Bucket) -> tuple[str | None, bool]:
        """Return what is equal for buckets that travel together."""
        return bucket.wire, self._memory.streams.is_on_host(bucket.flat)

    def reduce(self, due: Sequence[Bucket], gradients: list[Any], used: frozenset[int], active: int) -> None:
        """Fill buckets and reduce them: together, but one by one those that have a `Reducer`."""
        together: dict[tuple[str | None, bool], list[Bucket]] = {}
        taken_back = []
        for bucket in due:
            target, before = bucket, [gradients[number] for number in bucket.numbers]
            if KEPT in bucket.look(before):
                target = bucket.apart()
                target.numbers = bucket.numbers
                taken_back.append((bucket, target, before))
            target.change(gradients, partial(target.fill, used=used))
            if isinstance(target.reducer, WireState) or target.reducer is None:
                together.setdefault(self.travels(target), []).append(target)
            else:
                self._compress(target.reducer, target.flat, active)
        for buckets in together.values():
            self._together(buckets)
        for bucket, target, before in taken_back:
            bucket.change(gradients, partial(bucket.take_back, apart=target, before=before))

    def _together(self, buckets: Sequence[Bucket]) -> None:
        factor, compressor = self._options.predivide_factor, self._options.compressor
        flats = [bucket.flat for bucket in buckets]
        if factor != 1.0:
            for flat in flats:
                self._memory.scale(flat, 1.0 / factor)
        compressed = [(flat, None) if compressor is None else compressor.compress(flat) for flat in flats]
        wire = buckets[0].wire
        name = f"{self._name}, buckets" + (f" in {wire}" if wire else "")
        sent = [each for each, _ in compressed]
        self._ranks.run(self.operation(name, f"{len(flats)} buckets of {self._name}", buckets, sent))
        for flat, (each, context) in zip(flats, compressed, strict=True):
            if each is not flat:
                self._memory.pack([flat], [compressor.decompress(each, context)])
            if factor != 1.0:
                self._memory.scale(flat, factor)

    def _compress(self, reducer: Reducer, flat: Any, active: int) -> None:
        factor, divisor = self._options.predivide_factor, self._averaged_over(active)
        averages = self._options.op is AVERAGE
        plain = factor == 1.0 and divisor == self._ranks.size
        if factor != 1.0:
            self._memory.scale(flat, 1.0 / factor)
        with self._memory.streams.on_host(flat) as values:
            reducer.reduce(self._ranks, values, average=plain and averages)
        if averages and not plain:
            self._memory.scale(flat, factor / divisor)

    def sparse(self, parameter: Any, gradient: Any, sparse_dims: int, active: int) -> Any:
        """Sum or average a gradient that is sparse on some rank: gather what the ranks have, make nothing dense."""
        memory = self._memory
        if not isinstance(memory, Sparse):
            raise UnsupportedBufferError("sparse gradients are not supported on this rank")
        rows = memory.rows(parameter, gradient, sparse_dims)
        within = memory.streams.around(rows)
        gather = Gather(f"{self._name}, sparse", f"a sparse gradient of {self._name}", rows, within)
        places, values = self._ranks.run(gather)
        divisor = self._averaged_over(active) if self._options.op is AVERAGE else 1
        return memory.of_rows(parameter, places, values, divisor)

    def _averaged_over(self, active: int) -> int:
        return self._engine.communicator.config.conventions.averaged_over(active, self._ranks.size)

    def operation(
        self, name: str, text: str, buckets: Sequence[Bucket], sent: Sequence[Any], **early: Any
    ) -> InPlaceAllreduce:
        """Return the reduction of buckets.

        Args:
            name: as for `InPlaceAllreduce`.
            text: likewise.
            buckets: they travel in one format.
            sent: what travels of each.
            early: of a reduction before the step: ``speculative`` and ``within``, as for `InPlaceAllreduce`.
        """
        operation = InPlaceAllreduce(
            name,
            text,
            self._options.op,
            sent,
            wire=buckets[0].wire,
            feedbacks=[feedback for bucket in buckets for feedback in bucket.feedbacks],
            **(early or {"within": self._memory.streams.around(sent)}),
        )
        operation.parts = partial(names_in, buckets, self._named)
        return operation
