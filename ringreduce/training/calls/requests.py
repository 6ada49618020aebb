"""Requests: operations that are checked and only have to be started.

A binding turns the arguments of a call into a request within a context, a `RequestBuilder`. What it then returns to the
program is the `Handle` of `Request.submit` or the result of `Request.carry_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple, cast

from ringreduce.buffers import DTYPES, DType, Operand, operand_of, require_op
from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.sums.adasum import adasum
from ringreduce.collectives.sums.reproducible import reproducible_allreduce
from ringreduce.common.arguments import CheckingArguments, real_number, row_counts, shown
from ringreduce.common.conventions import Conventions
from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.reduce_ops import AVERAGE, INTEGER_OPS, ReduceOp
from ringreduce.engine import CollectiveOp, InPlaceAllreduce, Operation, Reduction, Refusal, unnamed
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet, require_process_set
from ringreduce.training.binding.framework import Arrays
from ringreduce.training.binding.host import HOST, laid_out
from ringreduce.training.calls.handles import Handle
from ringreduce.training.options.options import Adasum, Op, ReproducibleSum, require_no_op

#: Smaller results mostly travel together with others and are copied out of their buffer; alone, it makes no difference.
_LEAST_SHARED_NBYTES = 1 << 20

#: Several new results of so many bytes are made where they are reduced.
_LEAST_TOGETHER_NBYTES = 2 << 20


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks of the set have called it. Collective."""
    with RequestBuilder("barrier", None, process_set) as prepare:
        request = prepare.call("barrier", lambda communicator: None)
    request.carry_out()


# ---- requests ----


class Request(NamedTuple):
    """An operation that only has to be started.

    Attributes:
        operation: what is done; a `CollectiveOp` if arrays are on a device.
        process_set: the ranks that take part.
        unique: whether its name must not be under way already.
        arrays: the framework's.
        touched: the arrays that it reads or writes, but for new results in host memory.
        on_device: whether a device is to do it in order with the caller's stream.
    """

    operation: Operation
    process_set: ProcessSet
    unique: bool
    arrays: Arrays
    touched: Sequence[Any]
    on_device: bool = False

    def submit(self) -> Handle:
        """Start it; on another stream than the caller's."""
        engine = self.process_set.engine
        operation = self.operation
        finish = None
        release = self.arrays.keep_in_place(self.touched) if self.touched else None
        if self.on_device:
            assert isinstance(operation, CollectiveOp)
            run, finish = self.arrays.beside_callers_stream(operation.run, self.touched)
            operation = operation.running(run)
        try:
            engine.submit(operation, unique=self.unique)
        except BaseException:
            if release is not None:
                release()
            raise
        return Handle(operation, engine, finish=finish, release=release)

    def carry_out(self) -> Any:
        """Start it and wait for its result, on this thread: quicker than `submit` and `synchronize`.

        On a device it runs on the caller's stream, and the result is there once it is enqueued. In host memory it may
        be carried out again, for what its arrays hold then.
        """
        operation = self.operation
        if self.on_device:
            assert isinstance(operation, CollectiveOp)
            device = self.arrays.device_of(self.touched)
            operation = operation.running(self.arrays.on_callers_stream(operation.run, device))
        elif operation.done:
            operation.renew()
        return self.process_set.engine.run(operation, unique=self.unique)


class _IntoResults(InPlaceAllreduce):
    """A reduction of buffers; ``finish`` is called when it is done, and returns the result."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], Any], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._finish = finish

    def carry_out(self, *how: Any) -> None:
        super().carry_out(*how)
        self.result = self._finish()


class RequestBuilder(CheckingArguments):
    """A context in which the arguments of a collective become a request.

    If that fails on this rank, the operation ends on the others with the reason as its error, and the next ones match
    again. Every method raises `ConfigError` or `UnsupportedBufferError` at once for arguments that cannot be used.

    Args:
        kind: of collective; operations without a name are counted by it.
        name: that the program gave the operation; None: operations without a name match in the order of submission.
        process_set: the ranks that take part.
        arrays: the framework's.
        title: what errors call an allreduce; empty: by its name.

    Raises:
        ConfigError: the name is neither text nor None (raised also on ranks that gave none); or this is no process set,
            or one that is not registered (raised on all ranks).
    """

    __slots__ = ("_arrays", "_key", "_named", "_process_set", "_title")

    # Not by the method of the base: a call less.
    def __init__(self, kind: str, name: Any, process_set: Any, arrays: Arrays = HOST, title: str = "") -> None:
        self._name = kind
        self._text = None
        self._process_set = process_set
        self._arrays = arrays
        self._title = title
        self._named = isinstance(name, str)
        self._key = name if self._named else unnamed(kind)
        right = self._named or name is None
        if not (right and isinstance(process_set, ProcessSet) and process_set.connected):
            with self:
                require_process_set(process_set).included()  # raises unless it is registered
                if not right:
                    raise ConfigError(f"the name of an operation must be a str or None, got {shown(name)}")

    def _refuse(self, error: Exception) -> None:
        with suppress(ConfigError):  # outside of the set, or no world: no rank to notify
            set_to_notify(self._process_set).engine.refuse(Refusal(self._key, self._name, error))

    def call(
        self, text: str, run: Callable[[Communicator], Any], sources: Sequence[Any] = (), targets: Sequence[Any] = ()
    ) -> Request:
        """Return a request to run a function of blocking collectives, under the stall watch.

        Args:
            text: what this rank wants; must agree on all ranks.
            run: takes the communicator; returns the result.
            sources, targets: the arrays that it reads and writes.
        """
        both = [*sources, *targets]
        on_device = self._arrays.device_of(both) is not None
        operation = CollectiveOp(self._key, text, run)
        touched = both if on_device else sources
        return Request(
            operation, self._process_set, unique=self._named, arrays=self._arrays, touched=touched, on_device=on_device
        )

    def allreduce(
        self,
        sources: Sequence[Any],
        targets: Sequence[Any],
        op: Op,
        prescale: float,
        postscale: float,
        result: Callable[[], Any] | None = None,
        wire: str | None = None,
        part: str = "",
    ) -> Request:
        """Return a request to reduce one array, or several as one operation.

        Args:
            sources: this rank's.
            targets: where results go; the same list, or others of the same shapes and dtypes.
            op: `Adasum` and `ReproducibleSum` as well.
            prescale: multiplies what goes in.
            postscale: multiplies what comes out.
            result: makes the operation's result when it is done; None: that is ``targets``.
            wire: the format in which floating point numbers travel; None: as they are.
            part: which part of a larger collective this is, in words; must agree.
        """
        _require_some(sources)
        arrays = self._arrays
        if type(prescale) is not float or type(postscale) is not float:
            prescale = real_number("prescale_factor", prescale)
            postscale = real_number("postscale_factor", postscale)
        shapes = tuple([(each.shape, each.dtype) for each in sources])
        text = _allreduce_in_words(op, prescale, postscale, shapes, wire) + part
        on_host = arrays.device_of(sources) is None and (targets is sources or arrays.device_of(targets) is None)
        if not on_host:
            text = f"{text} on {', '.join(map(arrays.place, sources))}"
        if postscale != 1.0:
            op, postscale = self._scaled(op, postscale, sources)
        before = None if prescale == 1.0 else partial(_scale, arrays, sources, prescale, targets)
        after = result if postscale == 1.0 else partial(_scale, arrays, targets, postscale, targets, result)
        given = sources if before is None else targets
        if wire is not None or op in (Adasum, ReproducibleSum):
            reduce = _reduction_by_hand(arrays, op, wire)
        else:
            kind = op if isinstance(op, ReduceOp) else ReduceOp.parse(op)
            if on_host:
                reduction = Reduction(
                    self._key, text, kind, given, targets, before=before, after=after, title=self._title
                )
                return Request(reduction, self._process_set, unique=self._named, arrays=arrays, touched=sources)
            reduce = partial(arrays.reduce_on_device, op=kind)
        self.require_usable(sources, targets)

        def run(communicator: Communicator) -> Any:
            if before is not None:
                before()
            reduce(communicator, sources=given, targets=targets)
            return targets if after is None else after()

        return self.call(text, run, sources=sources, targets=targets)

    def allreduce_new(
        self, sources: Sequence[Any], op: Op, prescale: float, postscale: float, wire: str | None = None
    ) -> Request:
        """Return a request to reduce arrays into new ones; see `allreduce`.

        Several NumPy arrays of many bytes are copied into buffers for results now, and reduced there: results are parts
        of these. Such a request cannot be carried out again.
        """
        nbytes = sum([prod(each.shape) * each.dtype.itemsize for each in sources]) if self._arrays is HOST else 0
        if len(sources) == 1 or nbytes < _LEAST_TOGETHER_NBYTES or wire is not None or op in (Adasum, ReproducibleSum):
            return self.allreduce(sources, self.new_like(sources), op, prescale, postscale, wire=wire)
        prescale = real_number("prescale_factor", prescale)
        postscale = real_number("postscale_factor", postscale)
        self.require_usable(sources)
        text = _allreduce_in_words(op, prescale, postscale, tuple([(each.shape, each.dtype) for each in sources]), None)
        scaled, factor = (op, 1.0) if postscale == 1.0 else self._scaled(op, postscale, sources)
        buffers, results = laid_out(self._process_set.engine.communicator, sources)
        _scale(HOST, sources, factor=prescale, targets=results)
        kind = scaled if isinstance(scaled, ReduceOp) else ReduceOp.parse(scaled)
        finish = partial(_scale, HOST, results, factor, results) if factor != 1.0 else lambda: results
        operation = _IntoResults(finish, self._key, text, kind, buffers)
        return Request(operation, self._process_set, unique=self._named, arrays=HOST, touched=sources)

    def new_like(self, sources: Sequence[Any]) -> list[Any]:
        """Return new arrays for results, of the same shapes, strides and dtypes, in the same place."""
        return [self._new_like(each) for each in sources]

    def _new_like(self, array: Any) -> Any:
        large = prod(array.shape) * array.dtype.itemsize >= _LEAST_SHARED_NBYTES
        if large and self._arrays.device_of([array]) is None:
            operand = operand_of(array)
            if isinstance(operand, Operand) and operand.contiguous:
                return self._process_set.engine.communicator.empty_like(array)
        return self._arrays.empty_like(array)

    def allgather(self, sources: Sequence[Any], result: Callable[[list[Any]], Any]) -> Request:
        """Return a request to concatenate arrays along their first dimension; ``result`` is given the list."""
        self._require_rows(sources)
        self.require_usable(sources)

        def run(communicator: Communicator) -> Any:
            return result([communicator.allgather(each) for each in sources])

        return self.call(f"allgather({in_words(*sources, any_rows=True)})", run, sources)

    def broadcast(self, values: Any, root: int, in_place: Any = None) -> Request:
        """Return a request to broadcast from a rank of the set.

        Args:
            values: the root's are sent.
            root: in the set.
            in_place: what the user calls ``values``, if they are to be overwritten; None: they are not.
        """
        self.require_usable([values], [] if in_place is None else [values])

        def run(communicator: Communicator) -> Any:
            if in_place is None:
                return communicator.broadcast(values, root)
            communicator.broadcast(values, root, out=values)
            return self._arrays.changed(in_place)

        return self.call(f"broadcast(root {root}, {in_words(values)})", run, [values])

    def alltoall(self, values: Any, rows: list[int], result: Callable[[Any, list[int]], Any]) -> Request:
        """Return a request to send so many rows to each rank; ``result`` is given what came, and rows from each."""
        self.require_usable([values])

        def run(communicator: Communicator) -> Any:
            return result(*communicator.alltoall(values, rows))

        return self.call(f"alltoall({in_words(values, any_rows=True)})", run, [values])

    def reducescatter(
        self, sources: Sequence[Any], op: Op, prescale: float, postscale: float, result: Callable[[list[Any]], Any]
    ) -> Request:
        """Return a request to reduce arrays and scatter the results; ``result`` is given this rank's parts."""
        if op == Adasum:
            raise ConfigError("there is no reducescatter with Adasum, which looks at whole tensors; use allreduce")
        kind = ReduceOp.parse(op)
        if kind in INTEGER_OPS:
            for each in sources:
                require_op(kind, DTYPES[dtype_name(each.dtype)])
        if kind is AVERAGE and self._named:
            require_no_op(self._key)
        prescale = real_number("prescale_factor", prescale)
        postscale = real_number("postscale_factor", postscale)
        self._require_rows(sources)
        self.require_usable(sources)
        reduce_op, factor = self._scaled(kind, postscale, sources)

        def run(communicator: Communicator) -> Any:
            given = sources
            if prescale != 1.0:
                given = [self._arrays.empty_like(each) for each in sources]
                _scale(self._arrays, sources, factor=prescale, targets=given)
            parts = [communicator.reduce_scatter(each, reduce_op) for each in given]
            if factor != 1.0:
                _scale(self._arrays, parts, factor=factor, targets=parts)
            return result(parts)

        text = f"reducescatter({kind.value}, {in_words(*sources)}, scaled by {prescale} and {postscale})"
        return self.call(text, run, sources)

    def _scaled(self, op: Op, postscale: float, sources: Sequence[Any]) -> tuple[Op, float]:
        """Return the op and the factor with which these arrays are reduced, for those that the caller gave."""
        if postscale == 1.0 or op is not AVERAGE or not any(DType.of(each.dtype).integral for each in sources):
            return op, postscale
        conventions: Conventions = self._process_set.engine.communicator.config.conventions
        return conventions.scaled_average(postscale, self._process_set.size())

    def row_counts(self, array: Any, splits: Any) -> list[int]:
        """Return how many rows of an array go to each rank of the set in an alltoall; None: equal parts."""
        self._require_rows([array])
        given = splits.tolist() if hasattr(splits, "tolist") else splits
        return row_counts(given, array.shape[0], self._process_set.size())

    def listed(self, values: Any) -> Sequence[Any]:
        """Return the arrays of a group, which may come from a generator, as a sequence."""
        if isinstance(values, (list, tuple)):
            listed: Sequence[Any] = values
        elif hasattr(values, "shape") or not isinstance(values, Iterable):
            raise ConfigError(f"a group is a list of tensors, got one of type {type(values).__name__}; pass [tensor]")
        else:
            listed = list(values)
        self.require(*listed)
        return listed

    def group(self, values: Any) -> list[Any]:
        """Return the arrays of a group as a list, each as it is `without_graph`."""
        return [self._arrays.without_graph(each) for each in self.listed(values)]

    def require(self, *values: object) -> None:
        """Raise `UnsupportedBufferError` unless all are arrays of the framework."""
        for each in values:
            if not self._arrays.is_array(each):
                raise UnsupportedBufferError(
                    f"expected {self._arrays.expected}, got {type(each).__name__}; pass {self._arrays.conversion}, or "
                    "call the function of ringreduce itself, which takes NumPy arrays, too"
                )

    def require_usable(self, sources: Sequence[Any], targets: Sequence[Any] = ()) -> None:
        """Check that this rank can read the sources, and store results in the targets."""
        communicator = self._process_set.engine.communicator
        for source in sources:
            self._arrays.require_usable(communicator, source)
        for target in targets:
            self._arrays.require_usable(communicator, target, writable=True)

    def _require_rows(self, values: Sequence[Any]) -> None:
        _require_some(values)
        self.require(*values)
        if any(len(each.shape) == 0 for each in values):
            raise UnsupportedBufferError(f"{self._name} needs tensors with at least one dimension, got a scalar")


def _scale(
    arrays: Arrays,
    sources: Sequence[Any],
    factor: float,
    targets: Sequence[Any],
    result: Callable[[], Any] | None = None,
) -> Any:
    for source, target in zip(sources, targets, strict=True):
        arrays.scale(source, factor, target)
    return targets if result is None else result()


def _reduction_by_hand(arrays: Arrays, op: Op, wire: str | None) -> Callable[..., object]:
    """Return a function that reduces arrays where a `Reduction` cannot: for Adasum, exact sums and wire formats."""

    def reduce(communicator: Communicator, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        _scale(arrays, sources, factor=1.0, targets=targets)
        if op == Adasum:
            with arrays.on_host(targets) as host:
                adasum(communicator, host)
        elif op == ReproducibleSum:
            with arrays.on_host(targets) as host:
                for each in host:
                    reproducible_allreduce(communicator, each, out=each)
        else:
            for each in targets:
                floating = DTYPES[dtype_name(each.dtype)].kind == "float"
                communicator.allreduce(each, op, out=each, compression=wire if floating else None)

    return reduce


# ---- arguments ----


def set_to_notify(process_set: object) -> ProcessSet:
    """Return the set whose ranks are notified of wrong arguments: this one, or all if it is none or not registered."""
    registered = isinstance(process_set, ProcessSet) and process_set.registered
    return cast(ProcessSet, process_set) if registered else global_process_set


def _require_some(group: Sequence[Any]) -> None:
    if not group:
        raise ConfigError("a group must have at least one tensor")


# ---- arrays in words ----


@lru_cache(maxsize=4096)
def _allreduce_in_words(
    op: Op, prescale: float, postscale: float, arrays: tuple[tuple[Any, Any], ...], wire: str | None
) -> str:
    kind = "allreduce" if len(arrays) == 1 else "grouped allreduce"
    word = op if isinstance(op, str) else op.value
    kind_of_op = op if isinstance(op, ReduceOp) or op in (Adasum, ReproducibleSum) else ReduceOp.parse(op)
    if kind_of_op in INTEGER_OPS:
        for _, dtype in arrays:
            require_op(kind_of_op, DTYPES[dtype_name(dtype)])
    words = ", ".join(_in_words(shape, dtype) for shape, dtype in arrays)
    scales = f", scaled by {prescale} and {postscale}" if (prescale, postscale) != (1.0, 1.0) else ""
    return f"{kind}({word}, {words}{scales})" + (f" as {wire}" if wire is not None else "")


def in_words(*arrays: Any, any_rows: bool = False) -> str:
    """Return the shapes and dtypes of arrays; with a star for rows that may differ between ranks."""
    return ", ".join(_in_words(["*", *each.shape[1:]] if any_rows else each.shape, each.dtype) for each in arrays)


def _in_words(dims: Sequence[int | str], dtype: object) -> str:
    return f"{'x'.join(map(str, dims)) if dims else 'scalar'} {dtype_name(dtype)}"


def dtype_name(dtype: Any) -> str:
    """Return NumPy's name for a dtype of any library: ``"float32"``."""
    return getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
