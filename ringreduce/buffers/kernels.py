"""What is done to the elements: combine the ranks' blocks, divide, copy.

Kernels work on one-dimensional views in a dtype's storage type (or on views of any equal shape, where they are used
in mailboxes). They come bound: building one may be slow, calling it must not be.
"""

from __future__ import annotations

import contextvars
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from operator import setitem
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ringreduce.buffers.dtypes import DTYPES, Array, DType, ml_bfloat16
from ringreduce.buffers.integers import divide_toward_zero, divide_wrapped, quotient, sums_fit
from ringreduce.common.reduce_ops import ReduceOp

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]

_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
    ReduceOp.LAND: np.logical_and,
    ReduceOp.LOR: np.logical_or,
    ReduceOp.LXOR: np.logical_xor,
}

#: So many elements are averaged at a time: what they are summed in stays in a core's second-level cache.
_IN_CACHE = 32 << 10
#: Up to so many 64-bit integers are averaged one by one.
_FEW = 8


def divide(target: Array, size: int) -> None:
    """Divide floats in place, with one rounding; for powers of two the inverse is faster, and as exact."""
    if size & (size - 1) == 0:
        np.multiply(target, 1.0 / size, target)
    else:
        np.divide(target, size, target)


def copying(target: Array, source: Array) -> Call:
    """Return what copies between arrays of one dtype; `numpy.copyto` goes through Python, and takes twice as long."""
    return partial(setitem, target, ..., source)


def quiet_context() -> contextvars.Context:
    """Return a context to run reductions in: an overflow gives inf there, as with MPI, and no warning.

    Where warnings are errors, one on one rank would leave the others waiting in the middle of a collective.
    """
    context = contextvars.copy_context()
    context.run(partial(np.seterr, all="ignore"))
    return context


class Kernels(Protocol):
    """The kernels of one dtype and reduce op over ``size`` ranks."""

    def combine(self, sources: Sequence[Array], *, complete: bool = True) -> Callable[[Array], object]:
        """Bind the reduction of equal views, in rank order.

        The bound call stores into the view it is given, which may be one of the sources and nothing that overlaps one.
        A 16-bit float is rounded once.

        Args:
            sources: the terms of all ranks, or sums of these.
            complete: whether no term is missing: only then is an average divided.
        """


def kernels_for(dtype: DType, op: ReduceOp, size: int) -> Kernels:
    """Return the kernels that serve ``dtype``; cheap, but worth caching in a plan."""
    if dtype.half and importlib.util.find_spec("torch") is not None:
        return TorchHalfKernels(dtype, op, size)
    if dtype.is_long and op is ReduceOp.AVERAGE:
        return LongAverageKernels(dtype, op, size)
    if dtype.half or (op is ReduceOp.AVERAGE and dtype.integral):
        return WideKernels(dtype, op, size)
    return UfuncKernels(dtype, op, size)


class _Scratch:
    """One private array that all bindings of a plan share, so that it stays in the cache."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._memory: Array = np.empty(0, dtype)

    def like(self, view: Array) -> Array:
        if self._memory.size < view.size:
            self._memory = np.empty(view.size, self._memory.dtype)
        return self._memory[: view.size].reshape(view.shape)


#: Of a kernel: where sums grow, and where a term is made.
Scratches = tuple[_Scratch, _Scratch]


class UfuncKernels:
    """Every dtype that NumPy adds at memory speed."""

    def __init__(self, dtype: DType, op: ReduceOp, size: int) -> None:
        assert not (op is ReduceOp.AVERAGE and dtype.integral), "averaged in a wider type"
        self._ufunc = _UFUNCS[op]
        self._size = size if op is ReduceOp.AVERAGE and size > 1 else None
        self._scratch = _Scratch(dtype.storage)

    def combine(self, sources: Sequence[Array], *, complete: bool = True) -> Callable[[Array], object]:
        if len(sources) == 1:
            return partial(_copy_into, sources[0])
        ufunc = self._ufunc
        size = self._size if complete else None
        first, second, *middle = sources
        if not middle:
            if size is None and ufunc in (np.add, np.multiply):
                return partial(ufunc, first, second)  # Its next argument is where to store; minima have none.

            def combine_pair(target: Array) -> None:
                ufunc(first, second, out=target)
                if size is not None:
                    divide(target, size)

            return combine_pair
        last = middle.pop()
        scratch = self._scratch.like(first)

        def combine(target: Array) -> None:
            # Sums go to scratch as long as the target may be a source that is still to come.
            total = target if target is first or target is second else scratch
            ufunc(first, second, out=total)
            for source in middle:
                ufunc(total, source, out=total)
            ufunc(total, last, out=target)
            if size is not None:
                divide(target, size)

        return combine


class WideKernels:
    """Reductions in a wider type: averages of integers, rounded toward zero, and 16-bit floats without torch.

    Each term is cast into scratch, combined there, and the result is cast back. All of an average of integers has to be
    at hand. Floats of 64 bits are the quickest for those, and exact for integers of up to 32 bits of two million ranks;
    integers of 8 bits are quicker still in 16 bits, which hold the sums of 256 ranks.
    """

    def __init__(self, dtype: DType, op: ReduceOp, size: int) -> None:
        self._native = ml_bfloat16() if dtype.name == "bfloat16" else dtype.storage
        self._integral = dtype.integral
        self._ufunc = _UFUNCS[op]
        self._size = size if op is ReduceOp.AVERAGE else None
        wide = self._wide_enough(dtype, size)
        self._total = _Scratch(wide)
        self._term = _Scratch(wide)

    @staticmethod
    def _wide_enough(dtype: DType, size: int) -> np.dtype[Any]:
        if dtype.itemsize == 1 and size <= 256:
            return np.dtype(np.int16 if dtype.kind == "int" else np.uint16)
        if dtype.integral and dtype.itemsize <= 4 and dtype.kind != "bool":
            return np.dtype(np.float64)
        return wider(dtype).storage

    def combine(self, sources: Sequence[Array], *, complete: bool = True) -> Callable[[Array], object]:
        assert not self._integral or (complete and len(sources) == self._size), "a part of a sum cannot be divided"
        divisor = self._size if complete else None
        if sources[0].ndim != 1 or sources[0].size <= _IN_CACHE:
            return self._bound(sources, divisor)
        cuts = [slice(start, start + _IN_CACHE) for start in range(0, sources[0].size, _IN_CACHE)]
        parts = [(cut, self._bound([source[cut] for source in sources], divisor)) for cut in cuts]

        def combine(target: Array) -> None:
            for cut, part in parts:
                part(target[cut])

        return combine

    def _bound(self, sources: Sequence[Array], divisor: int | None) -> Callable[[Array], object]:
        first, *others = [source.view(self._native) for source in sources]
        total = self._total.like(first)
        term = self._term.like(first)
        ufunc = self._ufunc

        def combine(target: Array) -> None:
            np.copyto(total, first)
            for source in others:
                np.copyto(term, source)
                ufunc(total, term, out=total)
            if divisor is not None and total.dtype.kind == "f":
                divide(total, divisor)
            elif divisor is not None:
                divide_toward_zero(total, divisor, term)
            np.copyto(target.view(self._native), total, casting="unsafe")

        return combine


class LongAverageKernels(WideKernels):
    """Averages of 64-bit integers. If a sum could wrap around, the quotients of the terms are summed as well."""

    def _bound(self, sources: Sequence[Array], divisor: int | None) -> Callable[[Array], object]:
        assert divisor is not None
        if sources[0].size <= _FEW and sources[0].ndim == 1:
            return partial(_average_few, sources, divisor)
        first, *others = sources
        total = self._total.like(first)
        term = self._term.like(first)

        def combine(target: Array) -> None:
            fits = sums_fit(sources, divisor, term)
            summed = first
            for source in others:
                summed = np.add(summed, source, out=total)
            if summed is first:
                np.copyto(total, first)
            if fits:
                divide_toward_zero(total, divisor, term, out=target)
                return
            np.floor_divide(first, divisor, out=term)
            for source in others:
                np.add(term, source // divisor, out=term)
            divide_wrapped(total, term, divisor)
            np.copyto(target, total)

        return combine


def _average_few(sources: Sequence[Array], divisor: int, target: Array) -> None:
    """Average a few integers as Python's own: this is faster than calls of NumPy, and cannot overflow."""
    terms = zip(*[source.tolist() for source in sources], strict=True)
    target[:] = [quotient(sum(numbers), divisor) for numbers in terms]


class TorchHalfKernels:
    """float16 and bfloat16 through torch's vector code: three to twenty times NumPy's speed."""

    def __init__(self, dtype: DType, op: ReduceOp, size: int) -> None:
        import torch

        self._dtype = getattr(torch, dtype.name)
        self._op = op
        self._size = size
        self._scratch = _Scratch(np.float32)

    def _tensor(self, array: Array) -> torch.Tensor:
        import torch

        return torch.from_numpy(array.view(np.int16)).view(self._dtype)

    def combine(self, sources: Sequence[Array], *, complete: bool = True) -> Callable[[Array], object]:
        import torch

        if len(sources) == 1:
            return partial(_copy_into, sources[0])
        tensors = [self._tensor(source) for source in sources]
        divides = self._op is ReduceOp.AVERAGE and complete
        if len(tensors) == 2 and self._op in (ReduceOp.SUM, ReduceOp.AVERAGE) and not divides:
            # One pass: torch computes a 16-bit sum in float32 and rounds it once.
            return lambda target: torch.add(tensors[0], tensors[1], out=self._tensor(target))
        scratch = torch.from_numpy(self._scratch.like(sources[0]))
        fold = self._fold_into(scratch)

        def combine(target: Array) -> None:
            scratch.copy_(tensors[0])
            for tensor in tensors[1:]:
                fold(tensor)
            if divides:
                scratch.div_(self._size)
            self._tensor(target).copy_(scratch)

        return combine

    def _fold_into(self, scratch: torch.Tensor) -> Callable[[torch.Tensor], object]:
        import torch

        if self._op is ReduceOp.PRODUCT:
            return scratch.mul_
        if self._op in (ReduceOp.MIN, ReduceOp.MAX):
            choose = torch.minimum if self._op is ReduceOp.MIN else torch.maximum
            return lambda tensor: choose(scratch, tensor.float(), out=scratch)
        return scratch.add_


class WeightedKernels:
    """Weighted sums of floats and complex numbers, those of 16 bits in float32, piece by piece in the cache.

    Args:
        dtype: of the elements.
        weights: what the terms of all ranks are multiplied by, in rank order; none of them may be a sum already.
        scratch: shared by all of a dtype.
    """

    def __init__(self, dtype: DType, weights: Sequence[float], scratch: dict[str, Scratches]) -> None:
        self._dtype = dtype
        self._weights = weights
        wide = wider(dtype).storage if dtype.half else dtype.storage
        self._scratch = scratch.setdefault(dtype.name, (_Scratch(wide), _Scratch(wide)))

    def combine(self, sources: Sequence[Array], *, complete: bool = True) -> Callable[[Array], object]:
        assert complete and len(sources) == len(self._weights) > 1
        total, term = (scratch.like(sources[0]) for scratch in self._scratch)
        last = sources[-1]
        (first, weight), *others = zip(sources, self._weights, strict=True)
        dtype = self._dtype
        half = self._dtype.half

        def combine(target: Array) -> None:
            np.multiply(widen(first, dtype, total) if half else first, weight, out=total)
            for source, other in others:
                np.multiply(widen(source, dtype, term) if half else source, other, out=term)
                np.add(total, term, out=target if source is last and not half else total)
            if half:
                narrow(total, dtype, target)

        return combine


def _copy_into(source: Array, target: Array) -> None:
    if target is not source:
        np.copyto(target, source)


# ---- casts to and from a wider type, where a sum in the array's own would overflow or be rounded at every hop ----


def wider(dtype: DType) -> DType:
    """Return the type in which elements of ``dtype`` are summed when they leave it: float32, int64 or uint64."""
    if dtype.half:
        return DTYPES["float32"]
    return DTYPES["uint64"] if dtype.name == "uint64" else DTYPES["int64"]


def widen(view: Array, dtype: DType, out: Array | None = None) -> Array:
    """Return the elements of a view (in ``dtype.storage``) in the wider type, C-contiguous; in ``out`` if given."""
    wide = np.empty(view.shape, wider(dtype).storage) if out is None else out
    if dtype.name == "bfloat16":  # It is the upper half of a float32.
        bits = wide.view(np.uint32)
        np.copyto(bits, view)
        np.left_shift(bits, np.uint32(16), out=bits)
    else:
        np.copyto(wide, view)
    return wide


def narrow(wide: Array, dtype: DType, target: Array) -> None:
    """Store elements of the wider type into a view of ``dtype``; floats round to nearest even."""
    if dtype.name == "bfloat16":
        np.copyto(target, _round_to_bfloat16(wide))
    else:
        np.copyto(target, wide, casting="unsafe")


def _round_to_bfloat16(wide: Array) -> Array:
    bits = wide.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    # Rounding would carry a NaN's payload into the exponent; a quiet NaN keeps its sign.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    chosen: Array = np.where(np.isnan(wide), quiet, rounded)
    return chosen.astype(np.uint16)
