"""Blocking collectives on one process set: validate, place, select, execute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from math import prod
from operator import index
from time import perf_counter
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ringreduce import selection
from ringreduce.algorithms import Collective
from ringreduce.arguments import row_counts, whole_number
from ringreduce.autotune import Table
from ringreduce.buffers import DType, Operand, as_given, like, narrow, new, operand_of, quiet_context, widen
from ringreduce.buffers.cuda.arrays import DeviceOperand
from ringreduce.buffers.cuda.cupy_driver import cuda_driver
from ringreduce.calls import GivenUp, refusal
from ringreduce.config import Config
from ringreduce.errors import (
    CollectiveError,
    ConfigError,
    MismatchError,
    RingReduceError,
    ShutdownError,
    TransportError,
    UnsupportedBufferError,
)
from ringreduce.instruments import Tally
from ringreduce.partition import Partition
from ringreduce.placement import (
    STAGED,
    Allreduce,
    BoundCall,
    Context,
    Feedback,
    Gpu,
    Moves,
    OnDevice,
    OperandReducer,
    Signature,
    WireAllreduce,
    close_all,
    ordinal,
)
from ringreduce.reduce_ops import SUM, ReduceOp
from ringreduce.selection import Choice
from ringreduce.topology import Topology
from ringreduce.transport.nccl import cupy_nccl
from ringreduce.wire import CODECS, Codec

__all__ = ["Communicator"]


_REMEMBERED = 4096  # kinds of calls

_BARRIER = "barrier"

_WHOLE = "arrays go through host memory, whole"


class Communicator:
    """The collectives of one process set.

    Every method but `empty`, `explain`, `choose` and `way_on_device` is collective: all ranks call it, in the same
    order, with arguments that agree where the method says so. Calls block until this rank's result is there. Not
    thread-safe.

    Arrays are NumPy or CuPy arrays or torch tensors of any dtype in `ringreduce.buffers.DTYPES`, of any strides;
    results come in the library of the input. Anything else with ``__cuda_array_interface__`` is taken, too; new arrays
    are CuPy's then. Different libraries on different ranks are fine. `allreduce` and `broadcast` also take numbers: of
    NumPy as they are, of Python as int64, float64, complex128 or bool; the result is a number of the same type.

    Arrays in device memory are ordered by streams: a collective begins, for the GPU, after what the caller has
    enqueued on its current stream, and what the caller enqueues there after the call sees the result. Where the data
    goes through host memory, the call itself returns when this rank's input was read and reduced, and the result may
    still be on its way. An allreduce takes arrays in device memory on all ranks or on none; in all other collectives
    the ranks may differ.

    All methods raise, besides what they list:

    * `UnsupportedBufferError`: an array cannot be used. Raised on the rank that has it, before anything moves; the
      other ranks get a `MismatchError` with the reason. So it is with every argument that a rank finds wrong: it meets
      the others all the same, to tell them, and all have that call behind them.
    * `MismatchError`: the ranks' calls disagree. Raised on all ranks, before any of the user's data moves; only between
      nodes, where two calls that were both made before are confused, may an array that is reduced in place be partly
      reduced. It says whether the ranks are in step; if not, all later calls raise a `TransportError`.
    * `ConfigError`: another call is under way in this process: on another thread, or below the signal handler that
      makes this one.
    * `CollectiveTimeoutError`, `PeerLostError`, `TransportError`: a peer did not take part. The contents of results
      are undefined then.
    * `ShutdownError`: the world was shut down.

    Args:
        context: the ranks and what connects them.

    Attributes:
        gpu: this rank's, once it is used.
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
        self._reductions: dict[tuple[object, ...], tuple[Choice, Signature, OperandReducer]] = {}
        self._table: Table | None = None
        self._closed = False
        self._failure: BaseException | None = None
        self._disowned = ""
        self._quiet = quiet_context()  # it can be entered only once at a time, and so keeps calls apart
        self._calls = context.calls
        self._behind = 0  # so many calls had been begun when the present one came in
        self.gpu = Gpu(context, cuda_driver, cupy_nccl)
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

    def find_lost(self, doing: str) -> CollectiveError | None:
        """Return what to raise about a rank of this node that is gone, None if there is none; ``doing`` is for that."""
        return self._context.board.find_lost(doing)

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
                they are. Where ``RINGREDUCE_DETERMINISTIC`` is set no format can be asked for, on one node either: what
                is rounded depends on which ranks share a node.
            feedback: keeps what rounding lost, and adds it the next time, for an array that is reduced again and
                again; on all ranks or none.

        Returns:
            ``out``, or the new array.

        Raises:
            ConfigError: no such op, algorithm or format, or they do not go together or cannot run here.
            UnsupportedBufferError: a wire format was asked for, and the array is not of floats.
        """
        if deterministic and algorithm is None and wire is None:
            algorithm, deterministic = selection.DETERMINISTIC, False
        if out is array and not (deterministic or wire):
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
                    _require_alone(error)
                    self._failed(error)
                    raise
                reduced = self._reduced
                reduced.calls += 1
                reduced.nbytes += bound.nbytes
                reduced.seconds += perf_counter() - started
                return array
        return self._call("allreduce", self._allreduce_anew, array, op, out, algorithm, deterministic, wire, feedback)

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
        return self._call("reduce_scatter", self._reduce_scatter, array, op, out, algorithm)

    def allgather(self, array: Any, *, algorithm: str | None = None) -> Any:
        """Concatenate the ranks' arrays along the first dimension, in rank order; every rank gets all of it.

        Args:
            array: at least one dimension. The first may differ between ranks, and be 0; the others and the dtype
                must agree.
            algorithm: as for `allreduce`.
        """
        return self._call("allgather", self._allgather, array, algorithm)

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
        return self._call("broadcast", self._broadcast, array, root, out, algorithm)

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
        return self._call("alltoall", self._alltoall, array, splits, algorithm)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._call(_BARRIER, self._meet, _BARRIER)

    def meet(self, text: str) -> None:
        """Return when every rank has called it with this text: before a call that is made of several collectives.

        Args:
            text: what is called, with all that must agree: the name, and the rest in brackets.
        """
        self._call(text.partition("(")[0], self._meet, text)

    def refuse(self, name: str, error: Exception) -> None:
        """Meet the others in place of a call of this name, made of several collectives, that this rank cannot make.

        Args:
            name: of the call; what it begins with is `meet`.
            error: why.
        """
        if self._is_open():
            try:
                self._quiet.run(self._refuse, refusal(name, error), error)
            except RuntimeError as raised:
                _require_alone(raised)
                raise

    # ---- buffers, choices ----

    @overload
    def empty(
        self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: None = None
    ) -> npt.NDArray[Any]: ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: str | None) -> Any: ...

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: str | None = None) -> Any:
        """Return an uninitialised array that collectives use without a copy: a communication buffer.

        It lies in memory that the ranks of the node share, starts on a page, and goes back when the array and all its
        views are gone. Local: ranks may make different buffers, or none. ``dtype`` ``"bfloat16"`` takes ml_dtypes.

        Args:
            shape: of the array.
            dtype: of its elements.
            device: ``"cuda"``, or ``"cuda:1"``, for a CuPy array in device memory. The ranks of a communicator begin
                to use device memory together: the first such buffer (or the first allreduce of arrays there) is made
                by all of them at once, all later ones by whoever likes. Let go of a buffer when the work on it is done.

        Returns:
            A NumPy array, or a CuPy array.

        Raises:
            UnsupportedBufferError: a device was asked for, and CuPy or the GPU is missing.
            MismatchError: this was the first use of device memory, and other ranks did something else.
        """
        self._require_open()
        row = DType.of(dtype)
        try:
            dims = tuple(map(index, shape)) if isinstance(shape, Sequence) else (index(shape),)
        except TypeError:
            raise ConfigError(f"shape must be made of whole numbers, got {shape!r}") from None
        if any(length < 0 for length in dims):
            raise ConfigError(f"an array cannot have the shape {dims}")
        if device not in (None, "cpu"):
            self._join_gpus(ordinal(device))
            return self.gpu.empty(dims, row)
        memory = self._context.arena.array(prod(dims) * row.itemsize)
        native: np.dtype[Any] = new((0,), row, "numpy").dtype
        return memory.view(native).reshape(dims)

    def algorithms(
        self, collective: Collective | str = Collective.ALLREDUCE, *, device: str | None = None
    ) -> list[str]:
        """Return the names of the algorithms that can run ``collective`` here.

        Args:
            collective: which.
            device: where the arrays lie, as for `empty`. In device memory ``"nccl"`` can be asked for, too; where that
                cannot run, the ranks do without.
        """
        kind = _collective(collective)
        names = selection.names(kind, self.topology, vendor=self._context.messages.has_allreduce)
        on_device = device not in (None, "cpu") and kind is Collective.ALLREDUCE
        return [*names, selection.NCCL] if on_device else names

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
        nbytes = whole_number("nbytes", nbytes, 0)
        DType.of(dtype)
        if algorithm is not None and algorithm != "auto":
            if self.config.deterministic and kind is Collective.ALLREDUCE and algorithm != selection.DETERMINISTIC:
                raise ConfigError(f"RINGREDUCE_DETERMINISTIC is set, so algorithm={algorithm!r} cannot be asked for")
            return selection.forced(kind, algorithm, nbytes, self.topology, vendor=vendor)
        return selection.choose(kind, nbytes, self.topology, self.config, vendor=vendor, table=self._table)

    def way_on_device(self, dtype: Any, op: ReduceOp | str = SUM, algorithm: str | None = None) -> Choice:
        """Return what carries out an allreduce of arrays in device memory, once there was one with this ``algorithm``.

        Args:
            dtype: of their elements.
            op: as for `allreduce`.
            algorithm: as for `allreduce`. That of the CPU which is asked for is named, its transport is ``"staged"``.
        """
        if self.size == 1:
            return self.choose(Collective.ALLREDUCE, 0, dtype)
        wanted = self._wanted_on_device(algorithm)
        if wanted is not None and not self.gpu.takes(wanted):
            return replace(STAGED, algorithm=wanted)
        way = self.gpu.find(DType.of(dtype), ReduceOp.parse(op), wanted)
        return STAGED if way is None else way.choice

    @property
    def library(self) -> str:
        """What moves messages between the ranks, with its version; ``"none"`` where no library does."""
        return self._context.messages.library

    def transport_name(self, algorithm: str, collective: Collective | str = Collective.ALLREDUCE) -> str:
        """Return what moves the bytes of ``algorithm`` here: ``"shared"``, ``"mpi"``, ``"shared+mpi"``, ..."""
        if algorithm == selection.NCCL:
            return algorithm
        vendor = self._context.messages.has_allreduce
        choice = selection.forced(_collective(collective), algorithm, 1, self.topology, vendor=vendor)
        return choice.transport.replace("messages", self._context.messages.name)

    def explain(
        self,
        nbytes: int,
        dtype: Any = np.float32,
        collective: Collective | str = Collective.ALLREDUCE,
        *,
        device: str | None = None,
    ) -> str:
        """Say in words what would carry out ``collective`` on ``nbytes`` bytes per rank, why, and what else could.

        Args:
            nbytes: of the array.
            dtype: of its elements.
            collective: which.
            device: ``"cuda"`` for an array in device memory; how that is reduced is known once there was one. None, or
                ``"cpu"``: in host memory, and device memory too where that was used.
        """
        DType.of(dtype)
        kind, nbytes = _collective(collective), whole_number("nbytes", nbytes, 0)
        if device not in (None, "cpu"):
            ordinal(device)
            return f"{kind.value} of {nbytes} bytes in device memory on {self.topology.describe()}: " + (
                self.gpu.explain(self._wanted_on_device()) if kind is Collective.ALLREDUCE else _WHOLE
            )
        vendor = self._context.messages.has_allreduce
        said = selection.explain(kind, nbytes, self.topology, self.config, vendor=vendor, table=self._table)
        if kind is not Collective.ALLREDUCE or self.gpu.way is None:
            return said
        way = self.gpu.way if self.gpu.takes(self._wanted_on_device()) else STAGED.reason
        return f"{said}\nin device memory: {way}"

    def give_up(self, error: BaseException) -> None:
        """Refuse all further calls, as what the ranks have under way is no longer known. Local.

        Args:
            error: why; the errors of those calls say so.
        """
        self._fail_for_good(error)

    def leave(self, why: GivenUp) -> bool:
        """Let nobody on this node wait for this rank any more; return whether it is the first of them that leaves."""
        return self._context.board.leave(why)

    def disown(self, reason: str) -> None:
        """Refuse all calls: this process was forked by the rank whose communicator this is.

        What this process writes to communication buffers stays its own.

        Args:
            reason: what the `ConfigError` of later calls says.
        """
        self._disowned = reason
        self._bound.clear()
        self._quiet = quiet_context()  # the rank may be in the midst of a call
        self._context.arena.disown()

    def close(self) -> None:
        """Give everything back; collectives raise `ShutdownError` from here on. Collective, and safe to call twice."""
        if self._closed or self._disowned:
            return
        self._closed = True
        self._bound.clear()
        self._reductions.clear()
        self._context.leave()
        if self._failure is not None:
            self.gpu.abandon()
            self._context.abandon()
            return
        parts = self.gpu, self._allreduce, self._moves, self._wire, self._context
        close_all(*(part.close for part in parts))

    # ---- inside ----

    def _call(self, collective: str, carry_out: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call that the program asks for, unless another one is under way."""
        try:
            return self._quiet.run(self._carry_out, collective, carry_out, arguments)
        except RuntimeError as error:
            _require_alone(error)
            raise

    def _carry_out(self, collective: str, carry_out: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        self._behind = self._calls.number
        try:
            return carry_out(*arguments)
        except Exception as error:
            if self._may_refuse(error):
                self._refuse(refusal(collective, error), error)
            raise

    def _may_refuse(self, error: BaseException | None) -> bool:
        """Return whether the other ranks do not know yet that this one is in a call, which has failed here alone."""
        begun = self._calls.number != self._behind
        ours = isinstance(error, Exception) and not isinstance(error, CollectiveError)
        return ours and self._is_open() and not begun

    def _is_open(self) -> bool:
        return not (self._disowned or self._closed) and self._failure is None

    def _refuse(self, reason: str, error: Exception) -> None:
        """Meet the others in a call that this rank cannot make, so that it ends for all of them."""
        if self.size == 1:
            return
        try:
            self._context.refuse(reason)
        except MismatchError as mismatch:
            self._failed(mismatch)
            if self._failure is not None:
                raise error from mismatch
        except BaseException as lost:
            self._failed(lost)
            raise error from lost

    def _reduce_scatter(self, array: Any, op: ReduceOp | str, out: Any, algorithm: str | None) -> Any:
        op = ReduceOp.parse(op)
        source = operand_of(array)
        _require_rows(source, "reduce_scatter")
        rows = Partition.first_larger(source.shape[0], self.size).segment
        row = prod(source.shape[1:])
        shape = (rows[self.rank].stop - rows[self.rank].start, *source.shape[1:])
        out, target = self._result(array, source, shape, out)
        counts = [(part.stop - part.start) * row for part in rows]
        choice, signature = self._choose(Collective.REDUCE_SCATTER, source, algorithm, op.value, shape=source.shape)
        running = self._running(Collective.REDUCE_SCATTER, choice.algorithm, source.nbytes)
        with running, self._on_host(source, target) as (given, taken), _flat_target(taken) as flat:
            reduce_scatter = self._moves.reduce_scatter
            reduce_scatter(given.flat(), given.dtype, counts, flat, op, choice, signature)
        return out

    def _allgather(self, array: Any, algorithm: str | None) -> Any:
        source = operand_of(array)
        _require_rows(source, "allgather")
        rows = self._exchange_counts([source.shape[0]], source, Collective.ALLGATHER)[:, 0]
        out, target = _new_result(array, source, (int(rows.sum()), *source.shape[1:]))
        row = prod(source.shape[1:])
        counts = [int(each) * row for each in rows]
        choice, signature = self._choose(Collective.ALLGATHER, source, algorithm, shape=_any_rows(source))
        running = self._running(Collective.ALLGATHER, choice.algorithm, target.nbytes)
        with running, self._on_host(source, target) as (given, taken):
            self._moves.allgather(given.flat(), counts, taken.flat(), choice, signature)
        return out

    def _broadcast(self, array: Any, root: int, out: Any, algorithm: str | None) -> Any:
        root = whole_number("root", root)
        if not 0 <= root < self.size:
            raise ConfigError(f"root must be a rank, 0 to {self.size - 1}, got {root}")
        source, new = operand_of(array), out is None
        out, target = self._result(array, source, source.shape, out)
        am_root = self.rank == root
        choice, signature = self._choose(Collective.BROADCAST, source, algorithm, f"root {root}", shape=source.shape)
        running = self._running(Collective.BROADCAST, choice.algorithm, source.nbytes)
        lent = self._on_host(source, target, fetch=am_root, store=not am_root or source is not target)
        with running, lent as (given, taken):
            if am_root and not _same(given, taken):
                np.copyto(taken.view, given.view)
            with _flat_target(taken) as flat:
                self._moves.broadcast(flat, root, choice, signature)
        return as_given(array, out) if new else out

    def _alltoall(self, array: Any, splits: Sequence[int] | None, algorithm: str | None) -> Any:
        source = operand_of(array)
        _require_rows(source, "alltoall")
        mine = row_counts(splits, source.shape[0], self.size)
        rows = self._exchange_counts(mine, source, Collective.ALLTOALL)
        received = rows[:, self.rank]
        out, target = _new_result(array, source, (int(received.sum()), *source.shape[1:]))
        choice, signature = self._choose(Collective.ALLTOALL, source, algorithm, shape=_any_rows(source))
        running = self._running(Collective.ALLTOALL, choice.algorithm, source.nbytes)
        with running, self._on_host(source, target) as (given, taken):
            row = prod(source.shape[1:])
            self._moves.alltoall(given.flat(), rows * row, taken.flat(), choice, signature)
        return out if splits is None else (out, received.tolist())

    def _meet(self, text: str) -> None:
        self._require_open()
        try:
            self._context.meet(Signature.of(text, waits=False))
        except BaseException as error:
            if not self._may_refuse(error):
                self._failed(error)
            raise

    def _allreduce_anew(
        self,
        array: Any,
        op: ReduceOp | str,
        out: Any,
        algorithm: str | None,
        deterministic: bool,
        wire: str | None,
        feedback: Feedback | None,
    ) -> Any:
        if deterministic:
            given = f"wire={wire!r}" if algorithm is None else f"algorithm={algorithm!r}"
            raise ConfigError(f"give deterministic=True or {given}, not both")
        if wire is not None:
            return self._allreduce_in_format(array, wire, op, out, algorithm, feedback)
        return self._allreduce_as_it_is(array, op, out, algorithm)

    def _allreduce_as_it_is(self, array: Any, op: ReduceOp | str, out: Any, algorithm: str | None) -> Any:
        kind = ReduceOp.parse(op)
        source = operand_of(array)
        if isinstance(source, DeviceOperand):
            return self._allreduce_on_device(array, source, kind, out, algorithm)
        in_place, new = out is array, out is None
        out, target = self._result(array, source, source.shape, out)
        assert isinstance(target, Operand)
        if not (new or in_place) and np.may_share_memory(source.view, target.view) and not _same(source, target):
            source = Operand(source.view.copy(), source.dtype)
        choice, signature = self._reduce_operands(source, target, kind, algorithm)
        if in_place:
            run = self._allreduce.repetition(array, target, kind, choice, signature)
            if run is not None:
                key = id(array)
                self._bound[key] = BoundCall(array, target, op, algorithm, run, lambda _: self._bound.pop(key, None))
        return as_given(array, out) if new else out

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
        source = operand_of(array)
        codec = CODECS.get(wire)
        if codec is None:
            raise ConfigError(f"unknown wire format {wire!r}; choose one of {', '.join(CODECS)}")
        if self.config.deterministic:
            raise ConfigError(f"RINGREDUCE_DETERMINISTIC is set, so wire={wire!r} cannot be asked for")
        if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise ConfigError(f"{op.value} of rounded values makes no sense; wire formats are for sums and averages")
        if source.dtype.kind != "float":
            raise UnsupportedBufferError(f"wire formats are for floats, got {source.dtype.name}")
        if self.topology.single_node:
            if feedback is not None:
                feedback.begin(0, 0)
            return self._allreduce_as_it_is(array, op, out, None)
        new = out is None
        out, target = self._result(array, source, source.shape, out)
        argument = f"{op.value} as {wire}{' with feedback' if feedback is not None else ''}"
        _, signature = self._choose(Collective.ALLREDUCE, source, None, argument, shape=source.shape)
        running = self._running(Collective.ALLREDUCE, f"direct as {wire}", source.nbytes)
        with running, self._on_host(source, target) as (given, taken):
            self._exchange_in_format(given, taken, op, codec, signature, feedback)
        return as_given(array, out) if new else out

    def _exchange_in_format(
        self,
        source: Operand,
        target: Operand,
        op: ReduceOp,
        codec: Codec,
        signature: Signature,
        feedback: Feedback | None,
    ) -> None:
        plain = source.dtype.name == "float32" and target.contiguous
        if source.dtype.half:
            work = widen(source.view, source.dtype).reshape(-1)
        elif plain:
            work = target.flat()
            if not _same(source, target):
                np.copyto(work.reshape(source.shape), source.view)
        else:
            work = source.view.astype(np.float32, order="C").reshape(-1)
        self._wire.run(work, op, codec, signature, feedback)
        if source.dtype.half:
            narrow(work.reshape(source.shape), target.dtype, target.view)
        elif not plain:
            np.copyto(target.view, work.reshape(target.shape), casting="same_kind")

    def allreduce_operands(
        self,
        source: Operand | DeviceOperand,
        target: Operand | DeviceOperand,
        op: ReduceOp,
        algorithm: str | None = None,
    ) -> tuple[Choice, Signature]:
        """Do what `allreduce` does for operands that were checked: alike, writable, the same or apart.

        Both lie in host memory, or both in device memory in C order.

        Returns:
            What carried it out.
        """
        return self._call("allreduce", self._reduce_operands, source, target, op, algorithm)  # type: ignore[no-any-return]

    def _reduce_operands(
        self,
        source: Operand | DeviceOperand,
        target: Operand | DeviceOperand,
        op: ReduceOp,
        algorithm: str | None,
    ) -> tuple[Choice, Signature]:
        self._require_open()
        if isinstance(source, DeviceOperand):
            assert isinstance(target, DeviceOperand) and source.contiguous and target.contiguous
            return self._reduce_on_device(source, target, op, algorithm)
        assert isinstance(target, Operand)
        key = op, algorithm, source.view.shape, source.dtype.name
        found = self._reductions.get(key)
        if found is None:
            choice, signature = self._choose(Collective.ALLREDUCE, source, algorithm, op.value, shape=source.shape)
            if len(self._reductions) > _REMEMBERED:
                self._reductions.clear()
            run = self._allreduce.reducer(source.dtype, source.shape, op, choice, signature)
            found = self._reductions[key] = choice, signature, run
        choice, signature, run = found
        with self._running(Collective.ALLREDUCE, choice.algorithm, source.view.nbytes):
            run(source, target)
        return choice, signature

    def _allreduce_on_device(
        self, array: Any, source: DeviceOperand, op: ReduceOp, out: Any, algorithm: str | None
    ) -> Any:
        out, target = self._result(array, source, source.shape, out)
        assert isinstance(target, DeviceOperand)
        staging = self.gpu.staging(source.device)
        given, taken = staging.in_c_order(source), target.room()
        if given.may_overlap(taken) and not given.same_memory(taken):
            given = staging.in_c_order(given, copy=True)
        self._reduce_on_device(given, taken, op, algorithm)
        staging.store(target, taken)
        return out

    def _reduce_on_device(
        self, source: DeviceOperand, target: DeviceOperand, op: ReduceOp, algorithm: str | None
    ) -> tuple[Choice, Signature]:
        """Reduce arrays in C order by kernels where the ranks share device memory, else through host memory.

        Kernels add in the order of ranks, so they may take the place of the deterministic algorithm.
        """
        staging = self.gpu.staging(source.device)
        parts = staging.segments(source)
        lengths = {_length(parts[0]), _length(parts[-1])}
        run = {count: self._segment_reducer(source, parts, count, op, algorithm) for count in lengths}
        signature = run[_length(parts[0])][0]
        if self.size == 1:
            choice = self.choose(Collective.ALLREDUCE, source.nbytes)
            with self._running(Collective.ALLREDUCE, choice.algorithm, source.nbytes):
                staging.copy(source, target)
            return choice, signature
        kernels = self._on_device(source, op, algorithm)

        def reduce(segment: Operand) -> None:
            run[segment.count][1](segment, segment)

        choice = STAGED if kernels is None else kernels.choice
        running = self._running(Collective.ALLREDUCE, choice.algorithm, source.nbytes)
        with running, staging.in_order(source, target) as stream:
            addresses = source.address, target.address
            if kernels is None:
                staging.allreduce(source, target, parts, reduce)
            elif not kernels.run(*addresses, source.count, source.dtype, op, stream, signature):
                choice = STAGED
                staging.allreduce(source, target, parts, reduce)
        return choice, signature

    def _on_device(self, source: DeviceOperand, op: ReduceOp, algorithm: str | None) -> OnDevice | None:
        """Return what reduces such an array without host memory; None if nothing does. The same on all ranks."""
        wanted = self._wanted_on_device(algorithm)
        if self.gpu.takes(wanted):
            self._join_gpus(source.device, nccl=wanted == selection.NCCL)
        return self.gpu.find(source.dtype, op, wanted)

    def _wanted_on_device(self, algorithm: str | None = None) -> str | None:
        """Return the name of what is asked for, of a call or of all."""
        return selection.DETERMINISTIC if self.config.deterministic else algorithm or self.config.algorithm

    def _segment_reducer(
        self, source: DeviceOperand, parts: Sequence[slice], count: int, op: ReduceOp, algorithm: str | None
    ) -> tuple[Signature, OperandReducer]:
        """Return the signature and what reduces a segment of an array in device memory, in place.

        Its signature says all that must agree about the whole array, so that a mismatch is seen at the first segment.
        A shorter last segment has a signature of its own, as plans go by signatures, and by lengths.
        """
        key = "staged", op, algorithm, source.shape, source.dtype.name, count
        found = self._reductions.get(key)
        if found is None:
            last = "" if count == _length(parts[0]) else f", its last {count} elements"
            by_nccl = algorithm == selection.NCCL
            if by_nccl and self.config.deterministic:
                raise ConfigError("RINGREDUCE_DETERMINISTIC is set, so algorithm='nccl' cannot be asked for")
            choice, signature = self._choose(
                Collective.ALLREDUCE,
                source,
                None if by_nccl else algorithm,
                f"{op.value} in device memory{' by nccl' if by_nccl else ''}{last}",
                shape=source.shape,
                nbytes=count * source.dtype.itemsize,
            )
            if len(self._reductions) > _REMEMBERED:
                self._reductions.clear()
            run = self._allreduce.reducer(source.dtype, (count,), op, choice, signature)
            found = self._reductions[key] = choice, signature, run
        return found[1], found[2]

    def _on_host(
        self,
        source: Operand | DeviceOperand,
        target: Operand | DeviceOperand,
        *,
        fetch: bool = True,
        store: bool = True,
    ) -> AbstractContextManager[tuple[Operand, Operand]]:
        """Lend arrays in host memory for these two, which `_result` checked: themselves, where they lie there.

        Args:
            source: what goes into the collective.
            target: what comes out of it.
            fetch: whether this rank's input is wanted.
            store: whether the result is new to this rank.
        """
        if isinstance(source, Operand):
            assert isinstance(target, Operand)
            return nullcontext((source, target))
        assert isinstance(target, DeviceOperand)
        return self._staged(source, target, fetch, store)

    @contextmanager
    def _staged(
        self, source: DeviceOperand, target: DeviceOperand, fetch: bool, store: bool
    ) -> Iterator[tuple[Operand, Operand]]:
        staging = self.gpu.staging(source.device)
        given = staging.in_c_order(source) if fetch else source
        taken = given if target is source and source.contiguous else target.room()
        with staging.lend(given, taken, fetch=fetch, store=store) as lent:
            yield lent
        if store:
            staging.store(target, taken)

    def _result(
        self, array: Any, source: Operand | DeviceOperand, shape: tuple[int, ...], out: Any
    ) -> tuple[Any, Operand | DeviceOperand]:
        """Return where the result goes: ``out`` once it is checked, or a new array."""
        self._require_usable(source)
        if out is None:
            return _new_result(array, source, shape)
        target = source
        if out is not array:
            target = operand_of(out)
            self._require_usable(target)
        if type(target) is not type(source):
            raise UnsupportedBufferError("array and out must both lie in host memory or both in device memory")
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
        source: Operand | DeviceOperand,
        algorithm: str | None,
        argument: str = "",
        *,
        shape: tuple[object, ...],
        nbytes: int | None = None,
    ) -> tuple[Choice, Signature]:
        """Return the algorithm and the signature of a call; they depend on nothing that may differ between ranks.

        The algorithm is that for ``nbytes``; None: for the whole source.
        """
        key = collective.name, argument, algorithm, shape, source.dtype.name
        found = self._signatures.get(key)
        if found is None:
            if collective is not Collective.ALLREDUCE:
                nbytes = 0  # the others' choice has no use for it
            elif nbytes is None:
                nbytes = source.nbytes
            choice = self.choose(collective, nbytes, source.dtype.name, algorithm)
            arguments = [argument, f"shape {_shape(shape)}", source.dtype.name]
            if algorithm is not None:
                arguments.append(f"algorithm {algorithm}")
            text = f"{collective.value}({', '.join(filter(None, arguments))})"
            if len(self._signatures) > _REMEMBERED:
                self._signatures.clear()
            waits = self._waits(collective, choice, shape)
            found = self._signatures[key] = choice, Signature.of(text, waits=waits)
        return found

    def _waits(self, collective: Collective, choice: Choice, shape: tuple[object, ...]) -> bool:
        """Return whether no rank can end a call before all have come to it; see `Signature`."""
        if collective is Collective.BROADCAST or choice.algorithm == selection.VENDOR or 0 in shape:
            return False  # who has its data goes on, whoever else is there; and of nothing nobody waits for any
        rows = shape[0] if collective is Collective.REDUCE_SCATTER else self.size
        return isinstance(rows, int) and rows >= self.size  # with fewer, some ranks get nothing

    def _exchange_counts(
        self, mine: Sequence[int], source: Operand | DeviceOperand, collective: Collective
    ) -> npt.NDArray[np.int64]:
        """Gather a few numbers of every rank, as (size, len(mine)), that say how many rows will come from whom."""
        self._require_usable(source)
        own = np.array(mine, np.int64)
        gathered = np.empty((self.size, own.size), np.int64)
        what = f"{collective.value}(rows of shape {_shape(_any_rows(source))}, {source.dtype.name})"
        choice = self.choose(Collective.ALLGATHER, own.nbytes)
        try:
            self._moves.allgather(own, [own.size] * self.size, gathered.reshape(-1), choice, Signature.of(what))
        except BaseException as error:
            if not self._may_refuse(error):
                self._failed(error)
            raise
        self._behind = self._calls.number
        return gathered

    def _running(self, collective: Collective, algorithm: str, nbytes: int) -> _Running:
        """Return the context in which a collective runs."""
        return _Running(self, collective.value, algorithm, nbytes)

    def _join_gpus(self, number: int | None, *, nccl: bool = False) -> None:
        """Find out what the ranks share of device memory, and of NCCL, if nobody did; collective then."""
        self.gpu.staging(number)  # which may be refused, and that is this rank's affair
        try:
            self.gpu.join()
            if nccl:
                self.gpu.join_nccl()
        except BaseException as error:
            self._failed(error)
            raise

    def _failed(self, error: BaseException) -> None:
        """Go on if all ranks know that the same call has failed on all of them; otherwise refuse to."""
        self._bound.clear()
        self._reductions.clear()
        if isinstance(error, MismatchError) and error.in_step and not self.topology.single_node:
            try:
                self._context.recover(error, self._calls.number)
            except BaseException as lost:  # also what a signal handler raises: messages are under way still
                error.in_step = False
                self._fail_for_good(lost)
                if not isinstance(lost, RingReduceError):
                    raise
                return
        if not (isinstance(error, MismatchError) and error.in_step):
            self._fail_for_good(error)

    def _fail_for_good(self, error: BaseException) -> None:
        """Refuse all further calls, and let no other rank wait for one: which calls belong together is not known."""
        if self._failure is None:
            self._failure = error
            with suppress(RingReduceError):
                self._context.leave(error)

    def _require_usable(self, operand: Operand | DeviceOperand) -> None:
        """Refuse what cannot be used here, before the ranks meet."""
        self._require_open()
        if isinstance(operand, DeviceOperand):
            self.gpu.staging(operand.device)

    def _require_open(self) -> None:
        if self._disowned:
            raise ConfigError(self._disowned)
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
            if not self._communicator._may_refuse(error):
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


def _require_alone(error: BaseException) -> None:
    """Say it in our words if a call could not begin, as another one was under way."""
    raised_here = error.__traceback__ is not None and error.__traceback__.tb_next is None
    if type(error) is RuntimeError and raised_here:
        raise ConfigError(
            "another collective is under way in this process, on another thread or interrupted by the signal handler "
            "that makes this call; the functions of ringreduce take one call at a time (those of ringreduce.torch may "
            "be called from any thread), and a signal handler sets a flag that the program looks at between its steps"
        ) from None


def _new_result(
    array: Any, source: Operand | DeviceOperand, shape: tuple[int, ...]
) -> tuple[Any, Operand | DeviceOperand]:
    out = like(array, shape) if isinstance(source, Operand) else source.like(shape)
    return out, operand_of(out)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


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


def _require_rows(source: Operand | DeviceOperand, what: str) -> None:
    if not source.shape:
        raise UnsupportedBufferError(f"{what} needs an array with at least one dimension, got a scalar")


def _any_rows(source: Operand | DeviceOperand) -> tuple[object, ...]:
    """Return the shape with a star for the rows, which may differ between ranks."""
    return ("*", *source.shape[1:])


def _shape(shape: tuple[object, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"
