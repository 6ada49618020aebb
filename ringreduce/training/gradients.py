"""The gradients of one optimizer, reduced over the ranks before each step."""

from __future__ import annotations

import itertools
import json
import logging
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.reduce_ops import AVERAGE, MAX, ReduceOp
from ringreduce.engine import Engine, Gather, InPlace, Operation
from ringreduce.training.buckets import Bucket, Buckets, names_in
from ringreduce.training.checks import Checks
from ringreduce.training.compression import Reducer, State, WireState, has_reducers
from ringreduce.training.framework import DENSE, NO_GRADIENT, SPARSE, UNSUPPORTED, Parameters
from ringreduce.training.overlap import Overlap, Watched
from ringreduce.training.parameters import differences

__all__ = ["Gradients", "Ranks"]

_log = logging.getLogger(__name__)

_numbers = itertools.count()

_UNSIGNED = bytes(8)  # what a rank that takes no part in a comparison says in place of `_signed`


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


class Gradients:
    """The gradients of one optimizer on all ranks: finds, places and reduces them.

    Ranks that have joined need none of this: the operations that it submits go on without them.

    Args:
        framework: the gradients'.
        engine: of the ranks that train together.
        named: returns names and parameters, all of the optimizer's, in registration order; equal on all ranks.
        kind: of the optimizer, for errors.
        over: its parameters, for errors; the same on all ranks.
        op: `AVERAGE` or `SUM`.
        bucket_nbytes: a bucket that holds so many bytes is closed; must agree on all ranks.
        compression: what travels in place of a bucket: a `BucketCompression`, or what has ``compress`` and
            ``decompress`` for the framework's arrays; None: the bucket itself.
        predivide_factor: of an average: gradients are divided by this before they are summed, and by the rest
            afterwards.
        groups: as for `Buckets`.
        skip_unused: whether trainable parameters that no rank used keep None instead of zeros.
        overlap: whether buckets are reduced during the backward pass; None: if that makes steps quicker. The same on
            all ranks.
        in_backward: whether gradients are reduced at the end of the backward pass; the same on all ranks.
        settings: returns this rank's hyper-parameters, as text by name. The ranks compare theirs in steps 1, 2, 4, 8
            and so on, as that takes a while.

    Attributes:
        number: greater than those of optimizers that were made earlier.
        passes: how many backward passes the program has declared for each step.
        ranks: its collectives.
    """

    def __init__(
        self,
        framework: Parameters,
        engine: Engine,
        named: Callable[[], Sequence[tuple[str, Any]]],
        kind: str,
        over: str,
        *,
        op: ReduceOp,
        bucket_nbytes: int,
        compression: Any = None,
        predivide_factor: float = 1.0,
        groups: Mapping[int, int] | None = None,
        skip_unused: bool = True,
        overlap: bool | None = False,
        in_backward: bool = False,
        passes: int = 1,
        settings: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        self._framework, self._engine = framework, engine
        self._named = named
        self._described = described = f"{kind} over {over}"
        self._op = op
        self._compressor = None if has_reducers(compression) else compression
        self._predivide_factor = predivide_factor
        self._skip_unused, self._in_backward = skip_unused, in_backward
        self._settings = settings
        self._name = engine.new_name(f"DistributedOptimizer over {over},")
        self.number = next(_numbers)
        self.passes = passes
        self.ranks = Ranks(engine, self._name, f"the {'backward pass' if in_backward else 'step'} of {described}")
        self._buckets = Buckets(framework, engine.communicator, bucket_nbytes, groups or {}, compression)
        self._checks = Checks(framework, self.ranks, named, described, engine.communicator.config)
        if self._checks.needs_own_gradients:
            overlap = False
        if not (engine.threaded and predivide_factor == 1.0 and self._compressor is None):
            overlap = False
        self._overlap = Overlap(
            framework, engine, self._name, described, op, self._buckets.moved, named=named, wanted=overlap
        )
        self._hooks: list[Any] = []
        self._steps = 0  # calls of `reduce` on this rank, counted anew when all ranks have joined
        self._joins = engine.joins
        self._stepped = 0  # so many steps of the optimizer, likewise
        self._compares = True  # weights, as long as they are equal
        self._found: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.watch()
        # The parameters keep their hooks, and the finalizer keeps what it retires; neither keeps this object.
        self._finalizer = weakref.finalize(self, _retire, self._buckets, self._overlap, self._hooks)
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
        self._overlap.before_adding(record)

    def added(self, record: Watched) -> None:
        """See `Watcher`."""
        self._overlap.added(record)

    def pass_ended(self, nested: bool = False) -> None:
        """See `Watcher`; with ``in_backward``, reduce the gradients after the last declared pass.

        Args:
            nested: whether it was made within another one, as by a checkpoint. The end of that one may go unheard, so
                where one pass makes a step, what this one has added is reduced at once.
        """
        passes = self._overlap.pass_ended(nested)
        complete = self.passes == 1 if nested else passes >= self.passes
        if self._in_backward and complete and not self._overlap.suspends:
            self.reduce()

    def stepped(self) -> None:
        """To be called when the optimizer has made a step."""
        self._stepped += 1

    # ---- what optimizers call ----

    @property
    def pending(self) -> bool:
        """Whether a step has gradients to reduce; without ``in_backward``, always."""
        return not self._in_backward or any(self._overlap.fresh(self._parameters()))

    def reduce(self) -> None:
        """Replace the gradients by their average or sum over the ranks. Collective.

        Gradients that some ranks lack count as zeros there.

        Raises:
            UnsupportedBufferError: on all ranks, if some rank has a gradient that cannot be reduced.
            ConfigError: on all ranks, if gradients are lost that were reduced during the backward pass, or if such a
                pass has added to sums over the ranks.
        """
        if self.ranks.size == 1:
            self._states(self._parameters())  # which may make gradients dense
            return
        if self._joins != self._engine.joins:
            self._joins, self._steps, self._stepped = self._engine.joins, 1, 0  # ranks that had joined made fewer
            self._checks.after_join()
        try:
            self._checks.look(self._steps)
            self._reduce_all(self._parameters())
        except BaseException:
            self._overlap.break_off()
            raise

    def _reduce_all(self, parameters: Sequence[Any]) -> None:
        agreed = self._agree(parameters)
        if self._in_backward and agreed.said[2]:
            raise ConfigError(
                f"a backward pass has added to sums over the ranks, of {self._described}: clear them first, make all "
                "passes of a step but the last within no_sync(), or declare them with backward_passes_per_step"
            )
        reduced = self._overlap.conclude(parameters, agreed.rows, agreed.active)
        dense = [parameter for parameter, state in zip(parameters, agreed.found, strict=True) if state == DENSE]
        used = frozenset(map(id, dense))
        for bucket in reduced:
            bucket.adopt(used)
        moved = self._buckets.update(parameters, dense)
        self._reduce([bucket for bucket in self._buckets if bucket not in reduced and bucket.holds(used)], used, agreed)
        for parameter, state in zip(parameters, agreed.found, strict=True):
            if state >= SPARSE:
                self._reduce_sparse(parameter, state - SPARSE, agreed)
        self._steps += 1
        again = moved or bool(agreed.rows[1:3].any()) or self._checks.needs_own_gradients_in(self._steps)
        everyone = agreed.active == self.ranks.size
        if self._overlap.next_step(agreed.said, self._buckets, again=again, everyone=everyone):
            self._warn_of_changes()
        self.watch()

    @contextmanager
    def clearing(self) -> Iterator[None]:
        """Return a context in which to clear the gradients; it first ends reductions that are under way."""
        self._overlap.stop()
        yield
        self._overlap.cleared()
        self.watch()  # a parameter may take gradients by now that took none

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not count as passes of the step, and reduce nothing."""
        return self._overlap.suspended()

    @property
    def overlaps(self) -> bool:
        """Whether complete buckets are reduced during the backward pass by now."""
        return self._overlap.begun

    @property
    def compression_error(self) -> float:
        """The largest relative error that compressing a bucket made on this rank in the last step."""
        return max((bucket.reducer.error for bucket in self._buckets if bucket.reducer is not None), default=0.0)

    def state_dict(self) -> dict[int, State]:
        """See `Buckets.state_dict`; ends reductions that are under way first."""
        self._overlap.stop()
        return self._buckets.state_dict()

    def load_state_dict(self, state: Mapping[int, State]) -> None:
        """See `Buckets.load_state_dict`."""
        self._overlap.stop()
        self._buckets.load_state_dict(state)

    # ---- inside ----

    def _parameters(self) -> list[Any]:
        return [parameter for _, parameter in self._named()]

    def watch(self) -> None:
        """Watch gradients that are not watched yet, as long as overlap or ``in_backward`` need it."""
        if not (self._overlap.watching or self._in_backward):
            _remove(self._hooks)
        elif self._engine.communicator.size > 1:
            for parameter in self._parameters():
                if not self._overlap.watches(parameter):
                    record = Watched(parameter)
                    if hooks := self._framework.watch(parameter, self, record):
                        self._hooks += hooks
                        self._overlap.watch(record)

    def _agree(self, parameters: Sequence[Any]) -> _Agreed:
        """Tell the other ranks which gradients this one has, and what it knows of them; return what all have told."""
        rows, said = self._overlap.report(parameters, self.passes)
        found = self._states(parameters)
        now_and_then = self._steps & (self._steps + 1) == 0
        weights = self._compares and now_and_then and (self._steps == 0 or (self._steps > 1 and self._overlap.begun))
        settings = self._settings() if self._settings is not None and now_and_then else None
        signatures = (
            _signed(self._framework.checksum(parameters)) if weights else _UNSIGNED,
            _UNSIGNED if settings is None else _signed(zlib.crc32(repr(settings).encode())),
            _signed(self._buckets.layout),
            _signed(self._stepped) if self._in_backward else _UNSIGNED,
        )
        mine = b"".join((found, rows.tobytes(), said, *signatures))
        if self._found.size != len(mine):
            self._found = self.ranks.empty(len(mine), np.uint8)
        self._found[:] = np.frombuffer(mine, np.uint8)
        operation = InPlace(f"{self._name}, step", f"the gradients of {self._name}", MAX, [self._found])
        self.ranks.run(operation)
        everyone, count = self._found, len(parameters)
        weight, setting, layout, stepped = everyone[-4 * len(_UNSIGNED) :].reshape(4, -1)
        agreed = _Agreed(
            everyone[:count].tolist(),
            everyone[count : count + rows.size].reshape(rows.shape).copy(),
            bytes(everyone[count + rows.size :][: len(said)]),
            operation.active,
        )
        if not _all_alike(weight):
            self._compares = False
            self._warn_of_weights()
        if settings is not None and not _all_alike(setting):
            self._warn_of_settings(settings)
        if not _all_alike(stepped):
            raise ConfigError(
                f"the ranks make the backward passes of different steps of {self._described}: with "
                'reduce_in="backward" every rank makes the same passes before each step, and each of them adds to a '
                "gradient of the optimizer"
            )
        if not _all_alike(layout):  # a rank has joined while others have placed gradients
            agreed.rows[:] = 0
            self._buckets.clear()
        if UNSUPPORTED in agreed.found:
            raise UnsupportedBufferError(
                f"the gradient of {self._named()[agreed.found.index(UNSUPPORTED)][0]} is neither on the CPU nor "
                "on a GPU that can be used (one for each process), or of a layout that is neither strided nor sparse "
                "COO, on some rank"
            )
        return agreed

    def _states(self, parameters: Sequence[Any]) -> bytes:
        """Return which kind of gradient this rank has for each parameter; all ranks go by the largest."""
        framework = self._framework
        states = map(framework.found, parameters)
        if self._in_backward:
            fresh = self._overlap.fresh(parameters)
            return bytes(state if new else NO_GRADIENT for state, new in zip(states, fresh, strict=True))
        if self._skip_unused:
            return bytes(states)
        return bytes(
            DENSE if state == NO_GRADIENT and framework.is_trainable(parameter) else state
            for state, parameter in zip(states, parameters, strict=True)
        )

    def _reduce(self, due: Sequence[Bucket], used: frozenset[int], agreed: _Agreed) -> None:
        """Fill buckets and reduce them: together, but one by one those that have a `Reducer`."""
        together: dict[tuple[str | None, bool], list[Bucket]] = {}
        taken_back = []
        for bucket in due:
            target = bucket
            if bucket.is_kept():
                target, placed = bucket.apart(), bucket.placed()
                taken_back.append((bucket, target, placed))
            target.fill(used)
            if bucket.reducer is not None and not isinstance(bucket.reducer, WireState):
                self._compress(bucket.reducer, target.flat, agreed.active)
                continue
            wire = None if bucket.reducer is None else bucket.reducer.wire
            together.setdefault((wire, self._framework.is_on_host(target.flat)), []).append(target)
        for (wire, _), buckets in together.items():
            self._reduce_together(wire, buckets)
        for bucket, target, placed in taken_back:
            bucket.take_back(target, placed)

    def _reduce_together(self, wire: str | None, buckets: Sequence[Bucket]) -> None:
        framework, flats = self._framework, [bucket.flat for bucket in buckets]
        if self._predivide_factor != 1.0:
            for flat in flats:
                framework.scale(flat, 1.0 / self._predivide_factor)
        compressor = self._compressor or _AsTheyAre
        sent, contexts = zip(*map(compressor.compress, flats), strict=True)
        feedbacks = [bucket.reducer.feedback for bucket in buckets if isinstance(bucket.reducer, WireState)]
        name = f"{self._name}, buckets" + (f" in {wire}" if wire else "")
        within = framework.around(flats)
        text = f"{len(flats)} buckets of {self._name}"
        operation = InPlace(name, text, self._op, sent, wire=wire, feedbacks=feedbacks, within=within)
        operation.parts = partial(names_in, buckets, self._named)
        self.ranks.run(operation)
        for flat, each, context in zip(flats, sent, contexts, strict=True):
            if each is not flat:
                framework.copy([flat], [compressor.decompress(each, context)])
        if self._predivide_factor != 1.0:
            for flat in flats:
                framework.scale(flat, self._predivide_factor)

    def _compress(self, reducer: Reducer, flat: Any, active: int) -> None:
        averages, divisor = self._op is AVERAGE, self._averaged_over(active)
        plain = self._predivide_factor == 1.0 and divisor == self.ranks.size
        if self._predivide_factor != 1.0:
            self._framework.scale(flat, 1.0 / self._predivide_factor)
        with self._framework.on_host(flat) as values:
            reducer.reduce(self.ranks, values, average=plain and averages)
        if averages and not plain:
            self._framework.scale(flat, self._predivide_factor / divisor)

    def _reduce_sparse(self, parameter: Any, sparse_dims: int, agreed: _Agreed) -> None:
        """Sum or average a gradient that is sparse on some rank: gather what the ranks have, make nothing dense."""
        rows = self._framework.rows(parameter, sparse_dims)
        gather = Gather(
            f"{self._name}, sparse", f"a sparse gradient of {self._name}", rows, self._framework.around(rows)
        )
        places, values = self.ranks.run(gather)
        divisor = self._averaged_over(agreed.active) if self._op is AVERAGE else 1
        self._framework.set_rows(parameter, places, values, divisor)

    def _averaged_over(self, active: int) -> int:
        return self._engine.communicator.config.conventions.averaged_over(active, self.ranks.size)

    def _warn_of_changes(self) -> None:
        if self.ranks.rank == 0 and not self._in_backward:
            _log.warning(
                "%s: gradients were changed between the backward pass and the step, on each rank its own, before they "
                "were averaged. To clip or look at averages, call synchronize() first and step within "
                'skip_synchronize(), or give DistributedOptimizer(..., reduce_in="backward")',
                self._described,
            )

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
                self._described,
            )

    def _warn_of_settings(self, mine: Mapping[str, str]) -> None:
        """Let rank 0 say which hyper-parameters differ between ranks, once."""
        self._settings = None
        said = json.dumps([self.ranks.rank, mine]) + "\n"
        everyone = self.ranks.allgather(np.frombuffer(said.encode(), np.uint8)[:, None])
        if self.ranks.rank == 0:
            _log.warning("%s", differences(dict(map(json.loads, everyone.tobytes().decode().splitlines()))))


class _AsTheyAre:
    """No compression."""

    @staticmethod
    def compress(flat: Any) -> tuple[Any, None]:
        return flat, None

    @staticmethod
    def decompress(flat: Any, context: None) -> Any:
        return flat


class _Agreed(NamedTuple):
    """What the ranks have said before a step; the same on all.

    Attributes:
        found: the largest that a rank has said of each gradient, as in `Parameters.found`.
        rows: see `Overlap.report`.
        said: likewise.
        active: how many ranks take part.
    """

    found: list[int]
    rows: npt.NDArray[np.uint8]
    said: bytes
    active: int


def _signed(checksum: int) -> bytes:
    """Return a checksum and its complement. The largest bytes of all ranks are complements only if all ranks agree."""
    said = checksum.to_bytes(len(_UNSIGNED) // 2, "little")
    return said + bytes(255 - each for each in said)


def _all_alike(largest: npt.NDArray[np.uint8]) -> bool:
    """Return whether all ranks that signed have sent the same, given the largest bytes of all."""
    said, complement = largest.astype(np.int32).reshape(2, -1)
    return bool((said + complement == 255).all() or not largest.any())


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _retire(buckets: Buckets, overlap: Overlap, hooks: list[Any]) -> None:
    overlap.abandon()
    buckets.clear()
    _remove(hooks)
