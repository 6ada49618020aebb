"""Calls that come again: looked up once, and then made by the addresses of their arrays, for as long as these live."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ringreduce.buffers import DType, Operand, address_of
from ringreduce.collectives.operands import AnyOperand, Maker, Operands, PartReceived, can_be_watched, is_memory_of
from ringreduce.collectives.path import Again, Reduction, Result
from ringreduce.collectives.state import Standing, require_alone
from ringreduce.common.instruments import Instruments, Tally

__all__ = ["NOTHING", "NO_ROOT", "BoundCalls"]

#: What a repeated call returns that has no result on this rank.
NOTHING = object()
#: Of a call without a root, or with one whose result all ranks get.
NO_ROOT = -1

#: New results, by address, for which a repeated allreduce keeps what was looked up: few come in turn.
_RESULTS_KNOWN = 16


class _BoundCall(NamedTuple):
    """A call that was looked up.

    Attributes:
        argument, algorithm: two more arguments, as they were given.
        is_array: says whether an array is the one that was passed, with the memory and layout that it had then.
        is_out: the same of ``out``; None: that was ``array``, or nothing.
        run: makes the call again; returns a new array, if it makes one.
        tally: where it counts.
        nbytes: that it counts for.
        counts_result: whether it counts for those of its result instead, which the other ranks decide.
    """

    argument: Any
    algorithm: Any
    is_array: Callable[[Any], bool]
    is_out: Callable[[Any], bool] | None
    run: Callable[[], Any]
    tally: Tally
    nbytes: int
    counts_result: bool


class BoundCalls:
    """The calls of a communicator that can be repeated.

    Args:
        standing: says whether calls may be made, and what it means if one fails.
        operands: makes new results.
        instruments: where somebody observes, nothing is repeated.
        tallies: by the name of the collective.
    """

    def __init__(
        self, standing: Standing, operands: Operands, instruments: Instruments, tallies: Mapping[str, Tally]
    ) -> None:
        self._standing = standing
        self._operands = operands
        self._instruments = instruments
        self._recent = instruments.calls
        self._tallies = tallies
        #: By the ids of array and out, the collective, and the root where there is one.
        self._calls: dict[tuple[int, int, str, int], _BoundCall] = {}

    def clear(self) -> None:
        """Look everything up again."""
        self._calls.clear()

    def repeat(
        self, collective: str, array: Any, out: Any, argument: Any, algorithm: str | None, root: int = NO_ROOT
    ) -> Any:
        """Make a call again, if it was bound and nobody observes; return its result, None if it was not made.

        Args:
            collective: its name.
            array, out, argument, algorithm: what the caller passes, ``argument`` besides the others that have a name.
            root: of a call in which this rank may get nothing; then it returns `NOTHING`.
        """
        bound = self._calls.get((id(array), id(out), collective, root))
        if (
            bound is None
            or bound.argument is not argument
            or bound.algorithm is not algorithm
            or not bound.is_array(array)
            or not (bound.is_out is None or bound.is_out(out))
            or self._instruments.observers
        ):
            return None
        started = perf_counter()
        call = [started, 0.0, collective, bound.nbytes]
        self._recent.append(call)
        standing = self._standing
        if out is None:
            result = standing.call(collective, self._make, bound.run)
        else:
            result = out
            try:
                standing.quiet.run(bound.run)
            except BaseException as error:
                require_alone(error)
                standing.break_off(error)  # nothing can fail before the ranks have met
                raise
        tally, nbytes = bound.tally, bound.nbytes
        if bound.counts_result:
            call[3] = nbytes = result.nbytes
        tally.calls += 1
        tally.nbytes += nbytes
        call[1] = ended = perf_counter()
        tally.seconds += ended - started
        return result

    def _make(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except BaseException as error:
            self._standing.fail(error)
            raise

    def bind_reduction(
        self,
        array: Any,
        out: Any,
        arguments: tuple[Any, Any],
        reduction: Reduction,
        source: Operand,
        target: Operand,
    ) -> None:
        """Remember how to repeat an allreduce.

        Args:
            array: what the caller passed.
            out: the same; None: each call returns a new array.
            arguments: op and algorithm, as the caller passed them.
            reduction: what carried it out.
            source: what that has used as input; a copy cannot be bound.
            target: and where the result is.
        """
        if not is_memory_of(array, source) or not (out is None or is_memory_of(out, target)):
            return
        given = source.unowned()
        if out is None:
            make = partial(self._operands.maker(array), source.shape, source.dtype)
            run = _reducing_into_new(reduction, given, make)
        else:
            run = reduction.repetition(given, given if out is array else target.unowned())
        self._bind("allreduce", array, out, arguments, run, source.nbytes)

    def bind(
        self,
        collective: str,
        array: Any,
        out: Any,
        arguments: tuple[Any, Any],
        again: Again,
        source: Operand | None,
        target: AnyOperand | None,
        nbytes: int,
        root: int = NO_ROOT,
    ) -> None:
        """Remember how to repeat a call that is no allreduce.

        Args:
            collective: its name.
            array, out: as for `bind_reduction`.
            arguments: two more that the caller passed; None in place of what there is not.
            again: repeats it; None: nothing does.
            source: what was used as input; None: that of this rank has no meaning.
            target: where the result is.
            nbytes: what the call counts for.
            root: as for `repeat`.
        """
        if again is None or not isinstance(target, Operand) or not can_be_watched(array):
            return
        if source is not None and not is_memory_of(array, source):
            return
        counts_result = out is None and collective in ("allgather", "gather")
        if out is None:
            row = target.shape[1:] if counts_result or collective == "alltoall" else None
            make = self._operands.maker(array)
            run: Callable[[], Any] = partial(_again_into_new, again, make, row, target.shape, target.dtype)
        elif is_memory_of(out, target):
            same_memory = target.unowned()
            run = partial(again, lambda rows: same_memory)
        else:
            return
        self._bind(collective, array, out, arguments, run, nbytes, root, counts_result=counts_result)

    def bind_for_others(
        self, collective: str, array: Any, arguments: tuple[Any, Any], again: Again, source: Operand, root: int
    ) -> None:
        """Remember how to repeat a call in which another rank gets the result; arguments as for `bind`."""
        if again is not None and is_memory_of(array, source):
            run = partial(_again_for_others, again, Operand(np.empty(0, source.dtype.storage), source.dtype))
            self._bind(collective, array, None, arguments, run, source.nbytes, root)

    def bind_scatter(
        self,
        array: Any,
        out: Any,
        algorithm: str | None,
        again: Again,
        source: Operand | None,
        received: PartReceived,
        make: Maker,
        root: int,
    ) -> None:
        """Remember how to repeat a scatter; arguments as for `bind`.

        Args:
            array: None on a rank that has none.
            received: where the part is.
            make: makes a new result, if there is no ``out``.
        """
        target, flat = received.target, received.flat
        assert target is not None
        assert flat is not None
        if again is None or not (array is None or can_be_watched(array)):
            return
        if source is not None and not is_memory_of(array, source):
            return
        if out is None:
            run: Callable[[], Any] = partial(_again_into_part, again, make)
        elif is_memory_of(out, target):
            same_memory = flat.unowned()
            run = partial(again, lambda part: same_memory)
        else:
            return
        nbytes = target.nbytes if source is None else source.nbytes
        counts_result = out is None and source is None
        self._bind("scatter", array, out, (None, algorithm), run, nbytes, root, counts_result=counts_result)

    def _bind(
        self,
        collective: str,
        array: Any,
        out: Any,
        arguments: tuple[Any, Any],
        run: Callable[[], Any],
        nbytes: int,
        root: int = NO_ROOT,
        *,
        counts_result: bool = False,
    ) -> None:
        key = id(array), id(out), collective, root

        def forget(_: object) -> None:
            self._calls.pop(key, None)

        is_out = None if out is None or out is array else _same(out, forget, written=True)
        is_array = _same(array, forget, written=out is array)
        tally = self._tallies[collective]
        self._calls[key] = _BoundCall(*arguments, is_array, is_out, run, tally, nbytes, counts_result)


def _data_pointer(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    """Return a view of the field in which NumPy keeps an array's address; not to be read once the array is gone.

    `address_of` takes a microsecond, a fifth of a small call.
    """
    field = ctypes.c_void_p.from_address(id(array) + object.__basicsize__)
    assert field.value == address_of(array), "NumPy's array begins with its address, by its C interface"
    return field


def _same(array: Any, forget: Callable[[object], object], *, written: bool) -> Callable[[Any], bool]:
    """Return what says whether an array is this one, which is not held, and has the memory and layout that it has now.

    Args:
        array: of NumPy or torch; None: nothing was passed.
        forget: called when it is gone.
        written: whether it must be writable still.
    """
    if array is None:
        return lambda given: given is None
    known: Callable[[], Any] = weakref.ref(array, forget)
    if isinstance(array, np.ndarray):  # a weak reference forbids `resize`; all else can be assigned
        data = _data_pointer(array)
        address, shape, strides, dtype = data.value, array.shape, array.strides, array.dtype

        if written:
            return lambda given: (
                known() is given
                and data.value == address
                and given.strides == strides
                and given.shape == shape
                and given.dtype is dtype
                and given.flags.writeable
            )
        return lambda given: (
            known() is given
            and data.value == address
            and given.strides == strides
            and given.shape == shape
            and given.dtype is dtype
        )
    # `set_`, `resize_`, ``data =`` and `t_` change a tensor.
    address, kind, size, strides = array.data_ptr(), array.dtype, array.shape, array.stride()
    return lambda given: (
        known() is given
        and given.data_ptr() == address
        and given.dtype is kind
        and given.shape == size
        and given.stride() == strides
    )


def _reducing_into_new(
    reduction: Reduction, source: Operand, make: Callable[[], tuple[Any, Operand]]
) -> Callable[[], Any]:
    """Return what reduces the same memory into a new array each time."""
    known: dict[int, Callable[[], object]] = {}  # by the address of the result

    def run() -> Any:
        result, target = make()
        repetition = known.get(target.address)
        if repetition is None:
            if len(known) >= _RESULTS_KNOWN:
                known.clear()
            repetition = known[target.address] = reduction.repetition(source, target.unowned())
        repetition()
        return result

    return run


def _again_for_others(again: Callable[[Result], object], nothing: Operand) -> object:
    again(lambda rows: nothing)
    return NOTHING


def _again_into_part(again: Callable[[Result], object], make: Maker) -> Any:
    received = PartReceived(make)
    again(received)
    return received.store()


def _again_into_new(
    again: Callable[[Result], object],
    make: Maker,
    row: tuple[int, ...] | None,
    shape: tuple[int, ...],
    dtype: DType,
) -> Any:
    """Repeat a call into a new array: of a shape, or, where there is one, of rows of that shape."""
    made: Any = None

    def result(rows: list[int]) -> Operand:
        nonlocal made
        made, target = make(shape if row is None else (sum(rows), *row), dtype)
        return target

    again(result)
    return made
