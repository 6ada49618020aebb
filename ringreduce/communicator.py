"""Blocking collectives on one process set: validate, place, select, execute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from math import prod
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ringreduce import selection
from ringreduce.algorithms import Collective
from ringreduce.autotune import Table
from ringreduce.buffers import DType, Operand, like, narrow, new, quiet_context, widen
from ringreduce.config import Config
from ringreduce.errors import (
    ConfigError,
    MismatchError,
    RingReduceError,
    ShutdownError,
    TransportError,
    UnsupportedBufferError,
)
from ringreduce.instruments import Tally
from ringreduce.partition import Partition
from ringreduce.placement import Allreduce, BoundCall, Context, Feedback, Moves, Runner, Signature, WireAllreduce
from ringreduce.reduce_ops import SUM, ReduceOp
from ringreduce.selection import Choice
from ringreduce.topology import Topology
from ringreduce.wire import CODECS

__all__ = ["Communicator"]


_REMEMBERED = 4096  # kinds of calls

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _counting_refusals(method: _Method) -> _Method:
    """Take note of calls that this rank refuses before it meets the others; see `Board.refused`."""

    @wraps(method)
    def counting(self: Communicator, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (ConfigError, UnsupportedBufferError):
            self._context.board.refused += 1
            raise

    return cast("_Method", counting)


class Communicator:
    """The collectives of one process set.

    Every method but `empty`, `explain` and `choose` is collective: all ranks call it, in the same order, with arguments
    that agree where the method says so. Calls block until this rank's result is there. Not thread-safe.

    Arrays are NumPy arrays or torch CPU tensors of any dtype in `ringreduce.buffers.DTYPES`, of any strides; results
    come in the library of the input. Different libraries on different ranks are fine.

    All methods raise, besides what they list:

    * `UnsupportedBufferError`: an array cannot be used. Raised on the rank that has it, before anything moves.
    * `MismatchError`: the ranks' calls disagree. Raised on all ranks, before any of the user's data moves; only between
      nodes, where two calls that were both made before are confused, may an array that is reduced in place be partly
      reduced, and a rank that needed nothing from the others learn of it in its next call.
    * `CollectiveTimeoutError`, `PeerLostError`, `TransportError`: a peer did not take part. The contents of results
      are undefined then.
    * `ShutdownError`: the world was shut down.

    Args:
        context: the ranks and what connects them.

    Attributes:
        instruments: the observers of its collectives.
        tallies: what the calls of each collective add up to, by its name.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._allreduce = Allreduce(context)
        self._moves = Moves(context)
        self._wire = WireAllreduce(context)
        self._bound: dict[int, BoundCall] = {}  # by the id of the array
        self._signatures: dict[tuple[object, ...], tuple[Choice, Signature]] = {}
        self._reductions: dict[tuple[object, ...], tuple[Choice, Signature, Runner]] = {}
        self._table: Table | None = None
        self._closed = False
        self._failure: BaseException | None = None
        self._quiet = quiet_context()
        self.instruments = context.instruments
        self.tallies = {each.value: Tally() for each in Collective}
        self._reduced = self.tallies[Collective.ALLREDUCE.value]

    # ---- who and where ----

    @property
    def rank(self) -> int:
        return self._context.rank

    @property
    def size(self) -> int:
        return self._context.topology.size

    @property
    def topology(self) -> Topology:
        return self._context.topology

    @property
    def hosts(self) -> Topology:
        """Which ranks run on one machine; that they share memory, as the nodes of `topology` do, is not said."""
        return self._context.node.hosts

    @property
    def config(self) -> Config:
        return self._context.config

    def alive(self, rank: int) -> bool:
        """Return False if a rank's process is known to be gone; those of other nodes are always taken to be there."""
        topology = self.topology
        return rank not in topology.node_of(self.rank) or rank == self.rank or self._context.arena.alive(rank)

    # ---- collectives ----

    def allreduce(
        self,
        array: Any,
        op: ReduceOp | str = SUM,
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        wire: str | None = None,
        feedback: Feedback | None = None,
    ) -> Any:
        """Reduce arrays over all ranks, element by element; every rank gets the result, with the same bits.

        Args:
            array: any shape; shape and dtype must agree on all ranks.
            op: see `ringreduce.reduce_ops`; must agree.
            out: where the result goes, ``array`` itself for in place; same shape and dtype. None: a new array.
            algorithm: a name from `algorithms`, None for the best known; must agree.
            deterministic: add in the order of ranks, so that the bits depend on nothing but the ranks' values: not on
                size, algorithm, placement, fusion or segments. Between nodes with several ranks each this sends more.
                Also by ``RINGREDUCE_DETERMINISTIC``; must agree.
            wire: a format in `ringreduce.wire.CODECS` in which ranks of different nodes send each other floats, for
                sums and averages; must agree. Every element is encoded twice: when it is sent to the rank that sums
                it up, in float32, and when that one sends the sum to all. On one node nothing is encoded. None: as
                they are.
            feedback: keeps what rounding lost, and adds it the next time, for an array that is reduced again and
                again; on all ranks or none.

        Returns:
            ``out``, or the new array.

        Raises:
            ConfigError: no such op, algorithm or format, or they do not go together or cannot run here.
            UnsupportedBufferError: a wire format was asked for, and the array is not of floats.
        """
        if deterministic:
            if algorithm is not None:
                raise ConfigError(f"give deterministic=True or algorithm={algorithm!r}, not both")
            algorithm = selection.DETERMINISTIC
        if wire is not None:
            return self._allreduce_in_format(array, wire, op, out, algorithm, feedback)
        if out is array:
            bound = self._bound.get(id(array))
            if (
                bound is not None
                and bound.array() is array
                and bound.op is op
                and bound.algorithm is algorithm
                and bound.still_there(array)
                and not self.instruments.observers
            ):
                started = perf_counter()
                try:
                    self._quiet.run(bound.run, array)
                except BaseException as error:
                    self._failed(error)
                    raise
                reduced = self._reduced
                reduced.calls += 1
                reduced.nbytes += bound.nbytes
                reduced.seconds += perf_counter() - started
                return array
        return self._allreduce_unbound(array, op, out, algorithm)

    @_counting_refusals
    def reduce_scatter(
        self, array: Any, op: ReduceOp | str = SUM, *, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Reduce arrays over all ranks and give every rank its part of the result.

        Parts are cut along the first dimension as `numpy.array_split` does: the first ranks get one row more where it
        does not divide.

        Args:
            array: at least one dimension; shape and dtype must agree.
            op: as for `allreduce`.
            algorithm: as for `allreduce`.
            out: room for this rank's part; None: a new array.
        """
        op = ReduceOp.parse(op)
        source = Operand.of(array)
        _require_rows(source, "reduce_scatter")
        rows = Partition.first_larger(source.shape[0], self.size).segment
        row = prod(source.shape[1:])
        shape = (rows[self.rank].stop - rows[self.rank].start, *source.shape[1:])
        out, target = self._result(array, source, shape, out)
        counts = [(part.stop - part.start) * row for part in rows]
        choice, signature = self._choose(Collective.REDUCE_SCATTER, source, algorithm, op.value, shape=source.shape)
        with self._running(Collective.REDUCE_SCATTER, choice, source.nbytes), _flat_target(target) as flat:
            reduce_scatter = self._moves.reduce_scatter
            self._quiet.run(reduce_scatter, source.flat(), source.dtype, counts, flat, op, choice, signature)
        return out

    @_counting_refusals
    def allgather(self, array: Any, *, algorithm: str | None = None) -> Any:
        """Concatenate the ranks' arrays along the first dimension, in rank order; every rank gets all of it.

        Args:
            array: at least one dimension. The first may differ between ranks, and be 0; the others and the dtype
                must agree.
            algorithm: as for `allreduce`.
        """
        source = Operand.of(array)
        _require_rows(source, "allgather")
        rows = self._exchange_counts([source.shape[0]], source, Collective.ALLGATHER)[:, 0]
        out = like(array, (int(rows.sum()), *source.shape[1:]))
        target = Operand.of(out)
        row = prod(source.shape[1:])
        counts = [int(each) * row for each in rows]
        choice, signature = self._choose(Collective.ALLGATHER, source, algorithm, shape=_any_rows(source))
        with self._running(Collective.ALLGATHER, choice, target.nbytes):
            self._moves.allgather(source.flat(), counts, target.flat(), choice, signature)
        return out

    @_counting_refusals
    def broadcast(self, array: Any, root: int = 0, *, out: Any = None, algorithm: str | None = None) -> Any:
        """Give every rank the root's array.

        Args:
            array: any shape; shape and dtype must agree, the content matters at the root only.
            root: a rank; must agree.
            out: as for `allreduce`.
            algorithm: as for `allreduce`.

        Raises:
            ConfigError: there is no such rank.
        """
        if not 0 <= root < self.size:
            raise ConfigError(f"root must be a rank, 0 to {self.size - 1}, got {root}")
        source = Operand.of(array)
        out, target = self._result(array, source, source.shape, out)
        if self.rank == root and not _same(source, target):
            np.copyto(target.view, source.view)
        choice, signature = self._choose(Collective.BROADCAST, source, algorithm, f"root {root}", shape=source.shape)
        with self._running(Collective.BROADCAST, choice, source.nbytes), _flat_target(target) as flat:
            self._moves.broadcast(flat, root, choice, signature)
        return out

    @_counting_refusals
    def alltoall(self, array: Any, splits: Sequence[int] | None = None, *, algorithm: str | None = None) -> Any:
        """Send a part of one's array to every rank; get one's part of theirs.

        Args:
            array: at least one dimension; all but the first must agree, and the dtype.
            splits: rows for rank 0, 1, ...; may differ between ranks. None: equal parts.
            algorithm: as for `allreduce`.

        Returns:
            What the ranks sent here, concatenated in rank order; with ``splits`` a pair of that and a list of the rows
            that came from each rank.

        Raises:
            ConfigError: the splits do not add up to the rows, or the rows do not divide equally.
        """
        source = Operand.of(array)
        _require_rows(source, "alltoall")
        mine = _check_splits(splits, source.shape[0], self.size)
        rows = self._exchange_counts(mine, source, Collective.ALLTOALL)
        received = rows[:, self.rank]
        out = like(array, (int(received.sum()), *source.shape[1:]))
        target = Operand.of(out)
        choice, signature = self._choose(Collective.ALLTOALL, source, algorithm, shape=_any_rows(source))
        with self._running(Collective.ALLTOALL, choice, source.nbytes):
            row = prod(source.shape[1:])
            self._moves.alltoall(source.flat(), rows * row, target.flat(), choice, signature)
        return out if splits is None else (out, received.tolist())

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._require_open()
        try:
            self._context.barrier()
        except BaseException as error:
            self._failed(error)
            raise

    # ---- buffers, choices ----

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> npt.NDArray[Any]:
        """Return an uninitialised array that collectives use without a copy: a communication buffer.

        It lies in memory that the ranks of the node share, starts on a page, and goes back when the array and all its
        views are gone. Local: ranks may make different buffers, or none. ``dtype`` ``"bfloat16"`` takes ml_dtypes.
        """
        self._require_open()
        row = DType.of(dtype)
        dims = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        if any(length < 0 for length in dims):
            raise ConfigError(f"an array cannot have the shape {dims}")
        memory = self._context.arena.array(prod(dims) * row.itemsize)
        native: np.dtype[Any] = new((0,), row, "numpy").dtype
        return memory.view(native).reshape(dims)

    def algorithms(self, collective: Collective | str = Collective.ALLREDUCE) -> list[str]:
        """Return the names of the algorithms that can run ``collective`` here."""
        return selection.names(_collective(collective), self.topology, vendor=self._context.messages.has_allreduce)

    def use(self, table: Table | None) -> None:
        """Choose from a tuning table from now on, None: by the built-in rules. All ranks must use the same."""
        self._table = table
        for calls in (self._bound, self._signatures, self._reductions):
            calls.clear()

    def choose(
        self, collective: Collective | str, nbytes: int, dtype: Any = np.float32, algorithm: str | None = None
    ) -> Choice:
        """Return what would carry out ``collective`` on ``nbytes`` bytes per rank, and why."""
        kind, vendor = _collective(collective), self._context.messages.has_allreduce
        DType.of(dtype)
        if algorithm is not None and algorithm != "auto":
            if self.config.deterministic and kind is Collective.ALLREDUCE and algorithm != selection.DETERMINISTIC:
                raise ConfigError(f"RINGREDUCE_DETERMINISTIC is set, so algorithm={algorithm!r} cannot be asked for")
            return selection.forced(kind, algorithm, nbytes, self.topology, vendor=vendor)
        return selection.choose(kind, nbytes, self.topology, self.config, vendor=vendor, table=self._table)

    def transport_name(self, algorithm: str, collective: Collective | str = Collective.ALLREDUCE) -> str:
        """Return what moves the bytes of ``algorithm`` here: ``"shared"``, ``"mpi"``, ``"shared+mpi"``, ..."""
        choice = self.choose(collective, 1, algorithm=algorithm)
        return choice.transport.replace("messages", self._context.messages.name)

    def explain(self, nbytes: int, dtype: Any = np.float32, collective: Collective | str = Collective.ALLREDUCE) -> str:
        """Say in words what would carry out ``collective`` on ``nbytes`` bytes per rank, why, and what else could."""
        DType.of(dtype)
        vendor = self._context.messages.has_allreduce
        kind = _collective(collective)
        return selection.explain(kind, nbytes, self.topology, self.config, vendor=vendor, table=self._table)

    def close(self) -> None:
        """Give everything back; collectives raise `ShutdownError` from here on. Collective, and safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._bound.clear()
        self._reductions.clear()
        self._context.leave()
        if self._failure is None:
            self._allreduce.close()
            self._moves.close()
            self._wire.close()
            self._context.close()

    # ---- inside ----

    @_counting_refusals
    def _allreduce_unbound(self, array: Any, op: ReduceOp | str, out: Any, algorithm: str | None) -> Any:
        kind = ReduceOp.parse(op)
        source = Operand.of(array)
        in_place, new = out is array, out is None
        out, target = self._result(array, source, source.shape, out)
        if not (new or in_place) and np.may_share_memory(source.view, target.view) and not _same(source, target):
            source = Operand(source.view.copy(), source.dtype)
        choice, signature = self.allreduce_operands(source, target, kind, algorithm)
        if in_place:
            run = self._allreduce.repetition(array, target, kind, choice, signature)
            if run is not None:
                key = id(array)
                self._bound[key] = BoundCall(array, target, op, algorithm, run, lambda _: self._bound.pop(key, None))
        return out

    @_counting_refusals
    def _allreduce_in_format(
        self,
        array: Any,
        wire: str,
        op: ReduceOp | str,
        out: Any,
        algorithm: str | None,
        feedback: Feedback | None,
    ) -> Any:
        op = ReduceOp.parse(op)
        if algorithm is not None:
            raise ConfigError(f"a wire format is an algorithm of its own; give wire={wire!r} or algorithm, not both")
        source = Operand.of(array)
        codec = CODECS.get(wire)
        if codec is None:
            raise ConfigError(f"unknown wire format {wire!r}; choose one of {', '.join(CODECS)}")
        if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise ConfigError(f"{op.value} of rounded values makes no sense; wire formats are for sums and averages")
        if source.dtype.kind != "float":
            raise UnsupportedBufferError(f"wire formats are for floats, got {source.dtype.name}")
        if self.topology.single_node:
            if feedback is not None:
                feedback.begin(0, 0)
            return self._allreduce_unbound(array, op, out, None)
        out, target = self._result(array, source, source.shape, out)
        plain = source.dtype.name == "float32" and target.contiguous
        work = target.flat() if plain else np.empty(source.count, np.float32)
        wide = widen(source.view, source.dtype) if source.dtype.half else source.view
        if not (plain and _same(source, target)):
            np.copyto(work.reshape(source.shape), wide, casting="same_kind")
        argument = f"{op.value} as {wire}{' with feedback' if feedback is not None else ''}"
        choice, signature = self._choose(Collective.ALLREDUCE, source, None, argument, shape=source.shape)
        with self._running(Collective.ALLREDUCE, Choice(f"direct as {wire}", choice.transport, ""), source.nbytes):
            self._quiet.run(self._wire.run, work, op, codec, signature, feedback)
        if source.dtype.half:
            narrow(work.reshape(source.shape), target.dtype, target.view)
        elif not plain:
            np.copyto(target.view, work.reshape(target.shape), casting="same_kind")
        return out

    def allreduce_operands(
        self, source: Operand, target: Operand, op: ReduceOp, algorithm: str | None = None
    ) -> tuple[Choice, Signature]:
        """Do what `allreduce` does for operands that were checked: alike, writable, the same or apart.

        Returns:
            What carried it out.
        """
        self._require_open()
        key = op, algorithm, source.view.shape, source.dtype.name
        found = self._reductions.get(key)
        if found is None:
            choice, signature = self._choose(Collective.ALLREDUCE, source, algorithm, op.value, shape=source.shape)
            if len(self._reductions) > _REMEMBERED:
                self._reductions.clear()
            run = self._allreduce.runner(source.dtype, source.shape, op, choice, signature)
            found = self._reductions[key] = choice, signature, run
        choice, signature, run = found
        with self._running(Collective.ALLREDUCE, choice, source.view.nbytes):
            self._quiet.run(run, source, target)
        return choice, signature

    def _result(self, array: Any, source: Operand, shape: tuple[int, ...], out: Any) -> tuple[Any, Operand]:
        """Return where the result goes: ``out`` once it is checked, or a new array."""
        self._require_open()
        if out is None:
            out = like(array, shape)
            return out, Operand.of(out)
        target = source if out is array else Operand.of(out)
        if target.shape != shape or target.dtype != source.dtype:
            raise UnsupportedBufferError(
                f"out has shape {target.shape} and dtype {target.dtype.name}, "
                f"the result has shape {shape} and dtype {source.dtype.name}"
            )
        target.require_writable()
        return out, target

    def _choose(
        self,
        collective: Collective,
        source: Operand,
        algorithm: str | None,
        argument: str = "",
        *,
        shape: tuple[object, ...],
    ) -> tuple[Choice, Signature]:
        """Return the algorithm and the signature of a call; they depend on nothing that may differ between ranks."""
        key = collective.name, argument, algorithm, shape, source.dtype.name
        found = self._signatures.get(key)
        if found is None:
            nbytes = source.nbytes if collective is Collective.ALLREDUCE else 0  # the others' choice has no use for it
            choice = self.choose(collective, nbytes, source.dtype.name, algorithm)
            arguments = [argument, f"shape {_shape(shape)}", source.dtype.name]
            if algorithm is not None:
                arguments.append(f"algorithm {algorithm}")
            text = f"{collective.value}({', '.join(filter(None, arguments))})"
            if len(self._signatures) > _REMEMBERED:
                self._signatures.clear()
            found = self._signatures[key] = choice, Signature.of(text)
        return found

    def _exchange_counts(self, mine: Sequence[int], source: Operand, collective: Collective) -> npt.NDArray[np.int64]:
        """Gather a few numbers of every rank, as (size, len(mine)), that say how many rows will come from whom."""
        self._require_open()
        own = np.array(mine, np.int64)
        gathered = np.empty((self.size, own.size), np.int64)
        what = f"{collective.value}(rows of shape {_shape(_any_rows(source))}, {source.dtype.name})"
        choice = self.choose(Collective.ALLGATHER, own.nbytes)
        try:
            self._moves.allgather(own, [own.size] * self.size, gathered.reshape(-1), choice, Signature.of(what))
        except BaseException as error:
            self._failed(error)
            raise
        return gathered

    def _running(self, collective: Collective, choice: Choice, nbytes: int) -> _Running:
        """Return the context in which a collective runs."""
        return _Running(self, collective.value, choice.algorithm, nbytes)

    def _failed(self, error: BaseException) -> None:
        """After a mismatch, which all ranks see, go on with fresh channels; after anything else, refuse to go on.

        A call that was given up may have left messages under way, and a later one must not receive them.
        """
        self._bound.clear()
        self._reductions.clear()
        if not isinstance(error, MismatchError):
            self._failure = error
        elif not self.topology.single_node:  # at one board a mismatch is seen before any message
            self._allreduce, self._wire = Allreduce(self._context), WireAllreduce(self._context)
            try:
                self._context.renew()
            except RingReduceError as lost:
                self._failure = lost

    def _require_open(self) -> None:
        if self._closed:
            raise ShutdownError("this communicator was closed; call ringreduce.init() to start a new world")
        if self._failure is not None:
            raise TransportError(f"an earlier collective failed, so the ranks are out of step: {self._failure!r}")


class _Running:
    """While a collective runs: tells the observers, counts, and takes note of a failure.

    A class, as a generator for a context manager would take a microsecond of the three that a small call has.
    """

    __slots__ = ("_algorithm", "_collective", "_communicator", "_nbytes", "_started")

    def __init__(self, communicator: Communicator, collective: str, algorithm: str, nbytes: int) -> None:
        self._communicator = communicator
        self._collective = collective
        self._algorithm = algorithm
        self._nbytes = nbytes

    def __enter__(self) -> None:
        instruments = self._communicator.instruments
        if instruments.observers:
            instruments.tell("collective_started", self._collective, self._algorithm, self._nbytes)
        self._started = perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._communicator._failed(error)
            return
        seconds = perf_counter() - self._started
        tally = self._communicator.tallies[self._collective]
        tally.calls += 1
        tally.nbytes += self._nbytes
        tally.seconds += seconds
        instruments = self._communicator.instruments
        if instruments.observers:
            instruments.tell("collective_finished", self._collective, self._algorithm, self._nbytes, seconds)


def _same(source: Operand, target: Operand) -> bool:
    return source.address == target.address and source.view.strides == target.view.strides


@contextmanager
def _flat_target(target: Operand) -> Iterator[npt.NDArray[Any]]:
    """Lend the target as a flat array: itself, or, where it is not contiguous, a copy that is copied back."""
    flat = target.flat()
    yield flat
    if not target.contiguous:
        np.copyto(target.view, flat.reshape(target.shape))


def _collective(name: Collective | str) -> Collective:
    try:
        return Collective(name)
    except ValueError:
        names = ", ".join(each.value for each in Collective)
        raise ConfigError(f"unknown collective {name!r}; choose one of {names}") from None


def _require_rows(source: Operand, what: str) -> None:
    if not source.shape:
        raise UnsupportedBufferError(f"{what} needs an array with at least one dimension, got a scalar")


def _check_splits(splits: Sequence[int] | None, rows: int, size: int) -> list[int]:
    if splits is None:
        if rows % size:
            raise ConfigError(f"{rows} rows do not divide into {size} equal parts; give splits")
        return [rows // size] * size
    mine = [int(each) for each in splits]
    if len(mine) != size or min(mine) < 0 or sum(mine) != rows:
        raise ConfigError(f"splits must be {size} numbers >= 0 that add up to the {rows} rows, got {mine}")
    return mine


def _any_rows(source: Operand) -> tuple[object, ...]:
    """Return the shape with a star for the rows, which may differ between ranks."""
    return ("*", *source.shape[1:])


def _shape(shape: tuple[object, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"
