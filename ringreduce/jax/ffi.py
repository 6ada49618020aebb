"""XLA's foreign function interface, spoken from Python: compiled programs call a function on their memory.

A program that runs on a device copies its arrays to the host and back: JAX's callbacks do that, and call the function.

XLA calls a C function with one frame: arguments, results, attributes. `ctypes` makes such a function of a Python one:
nothing is compiled and nothing is copied. The structures are those of ``xla/ffi/api/c_api.h`` in jaxlib, which are
stable within a major version of that API.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from struct import Struct, pack, unpack
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import io_callback

from ringreduce.training.binding.error_text import described

TARGET = "ringreduce"
ORDERED = "ringreduce_in_order"  # It takes a token behind its arguments, and returns one.
_API_VERSION = 1  # Version of the interface to JAX, not of XLA's.
_METADATA = 1  # The type of the extension that asks what a target was made for.
_INTERNAL = 13  # The code of errors, as of absl.

#: Takes the text of a `call`, the memory of its arguments, that of its results, and what returns the memory of the
#: arrays that the call is ``after``.
Handler = Callable[[bytes, "XlaArrays", "XlaArrays", Callable[[], "XlaArrays"]], None]

# All structures begin with their size and the address of an extension.
_FRAME = Struct("@NP PPi NPqPP NPqPP NPqPPP")  # API, context, stage; arguments, results, attributes: see `XlaArrays.of`
_BUFFER = Struct("@NP iPqP")  # Fields: dtype, address, number of dimensions, dimensions.
_EXTENSION = Struct("@NiPP")  # Fields, with type `_METADATA`: type, the next one, the structure to fill.
_ERROR = Struct("@NP Pi")  # Fields: message, code.
_TEXT = Struct("@PN")  # Fields: address, length.
_ADDRESS = Struct("@P")
#: Where in that structure the version is that a target was made for; where the API has its own, and what makes errors.
_MADE_FOR_OFFSET = 24
_VERSION_OFFSET = 32
_CREATE_ERROR_OFFSET = 48
_VERSION_NBYTES = 8  # Major and minor, whole numbers of 32 bits.

#: XLA's numbers of the dtypes that collectives take.
_DTYPES: dict[int, npt.DTypeLike] = {
    **{1: np.bool_, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.uint8, 7: np.uint16, 8: np.uint32},
    **{9: np.uint64, 10: np.float16, 11: np.float32, 12: np.float64, 15: np.complex64, 16: jnp.bfloat16},
    **{18: np.complex128},
}
_NUMBERS = {np.dtype(dtype): number for number, dtype in _DTYPES.items()}


class XlaArrays(NamedTuple):
    """Arrays by their addresses; those of a compiled program are there as long as it waits for a call.

    Attributes:
        layout: of each array XLA's number of the dtype, and the shape as 64-bit numbers.
        addresses: of the arrays.
    """

    layout: tuple[tuple[int, bytes], ...]
    addresses: list[int]

    @classmethod
    def of(cls, count: int, buffers: int) -> XlaArrays:
        """Read XLA's descriptions of so many arrays, which are at this address."""
        layout = []
        addresses = []
        for buffer in unpack(f"{count}P", ctypes.string_at(buffers, count * _ADDRESS.size)):
            _, _, dtype, address, rank, dims = _read(_BUFFER, buffer)
            layout.append((dtype, ctypes.string_at(dims, 8 * rank)))
            addresses.append(address)
        return cls(tuple(layout), addresses)

    @classmethod
    def holding(cls, arrays: Sequence[npt.NDArray[Any]]) -> XlaArrays:
        """Return the memory of contiguous arrays, which is there as long as they are."""
        layout = [(_NUMBERS[array.dtype], pack(f"{array.ndim}q", *array.shape)) for array in arrays]
        return cls(tuple(layout), [array.ctypes.data for array in arrays])

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum([ctypes.sizeof(_described(*entry)[2]) for entry in self.layout])

    def views(self) -> list[npt.NDArray[Any]]:
        """Return the arrays."""
        described = [_described(*entry) for entry in self.layout]
        return [
            np.ndarray(shape, dtype, memory.from_address(address))
            for (shape, dtype, memory), address in zip(described, self.addresses, strict=True)
        ]

    def copy_to(self, other: XlaArrays) -> None:
        """Overwrite arrays of the same shapes and dtypes."""
        for entry, source, target in zip(self.layout, self.addresses, other.addresses, strict=True):
            ctypes.memmove(target, source, ctypes.sizeof(_described(*entry)[2]))

    def beside(self) -> tuple[XlaArrays, list[npt.NDArray[Any]]]:
        """Return new arrays of the same shapes and dtypes; their memory is there as long as they are."""
        arrays = [np.empty(*_described(*entry)[:2]) for entry in self.layout]
        return XlaArrays(self.layout, [array.ctypes.data for array in arrays]), arrays


@lru_cache(4096)
def _described(number: int, dims: bytes) -> tuple[tuple[int, ...], np.dtype[Any], Any]:
    shape = unpack(f"{len(dims) // 8}q", dims)
    dtype = np.dtype(_DTYPES[number])
    return shape, dtype, ctypes.c_byte * (prod(shape) * dtype.itemsize)


def _read(structure: Struct, address: int) -> tuple[Any, ...]:
    return structure.unpack(ctypes.string_at(address, structure.size))


def register(handler: Handler) -> None:
    """Let compiled programs call a function; once in a process.

    Args:
        handler: what they call. XLA calls it on the thread of the program, which waits then, or on one of its own. JAX
            raises an error of its own with the text of the handler's.
    """

    def target(tokens: int, frame: int) -> int | None:
        _, extension, api, _, _, *spans = _read(_FRAME, frame)
        if extension:
            _, kind, _, metadata = _read(_EXTENSION, extension)
            if kind == _METADATA:
                ctypes.memmove(metadata + _MADE_FOR_OFFSET, api + _VERSION_OFFSET, _VERSION_NBYTES)
                return None
        try:
            _, _, count, _, arguments, _, _, results_count, _, results, *_, attributes = spans
            count -= tokens
            results_count -= tokens
            text = ctypes.string_at(*_read(_TEXT, *_read(_ADDRESS, attributes)))

            def others() -> XlaArrays:
                return XlaArrays.of(count - results_count, arguments + results_count * _ADDRESS.size)

            handler(text, XlaArrays.of(results_count, arguments), XlaArrays.of(results_count, results), others)
        except BaseException as error:
            # Without a caller in Python this is a thread of XLA.
            awaited = getattr(inspect.currentframe(), "f_back", None) is not None
            message = ctypes.create_string_buffer(described(error, awaited=awaited).encode(errors="replace"))
            call_frame = _ERROR.pack(_ERROR.size, 0, ctypes.addressof(message), _INTERNAL)
            create: Any = _create_error(*_read(_ADDRESS, api + _CREATE_ERROR_OFFSET))
            return create(call_frame)  # type: ignore[no-any-return]
        return None

    _handlers.append(handler)
    for tokens, name in enumerate((TARGET, ORDERED)):
        target_function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(partial(target, tokens))
        _kept.append(target_function)
        address = jax.ffi.pycapsule(ctypes.cast(target_function, ctypes.c_void_p).value)
        jax.ffi.register_ffi_target(name, address, platform="cpu", api_version=_API_VERSION)


_create_error = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
_kept: list[Any] = []  # C does not know that it holds a function of Python
_handlers: list[Handler] = []  # It has the one that is registered.


def call(
    text: str,
    arguments: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    *,
    batched: str | None,
    in_place: bool = False,
    after: Sequence[Any] = (),
    always: bool = False,
) -> list[Any]:
    """Return arrays of these shapes and the dtypes of the arguments, which the handler fills.

    JAX may leave out a call whose results nobody uses, and make it again in a backward pass; it does so on all ranks
    alike, as they trace the same program. Calls of one program on the CPU are made in its order: see `put_in_order`.

    Args:
        text: passed to the handler. It is a part of the compiled program, which other processes may run.
        arguments: arrays.
        shapes: of as many results.
        batched: as `jax.ffi.ffi_call` has ``vmap_method``.
        in_place: whether results are in the memory of the arguments, which JAX copies if they are needed afterwards.
        after: arrays that are there when the handler is called, which may read those of dtypes that collectives take.
        always: whether JAX may neither drop this call nor merge it with an equal one.
    """
    results = [jax.ShapeDtypeStruct(shape, argument.dtype) for shape, argument in zip(shapes, arguments, strict=True)]
    aliases = {number: number for number in range(len(results))} if in_place else None
    how: dict[str, Any] = {"vmap_method": batched, "input_output_aliases": aliases, "has_side_effect": always}
    here = partial(jax.ffi.ffi_call(TARGET, results, **how), text=text)
    if jax.default_backend() == "cpu":
        return list(here(*arguments, *after))
    carry_out = partial(_carry_out, text, [argument.ndim for argument in arguments], shapes, in_place)
    if always:
        elsewhere = partial(io_callback, carry_out, results, ordered=True)
    else:
        elsewhere = partial(jax.pure_callback, carry_out, results, vmap_method=batched)
    return list(jax.lax.platform_dependent(*arguments, *after, cpu=here, default=elsewhere))


def _carry_out(
    text: str, dimensions: Sequence[int], shapes: Sequence[tuple[int, ...]], in_place: bool, *given: Any
) -> list[npt.NDArray[Any]]:
    """Let the handler fill arrays, for a program that runs on a device and has copied its arrays to the host.

    Args:
        text, shapes, in_place: as for `call`.
        dimensions: of the arguments, without those by which `vmap` has batched them.
        *given: the arguments, and the arrays that are there before.
    """
    count = len(shapes)
    arguments = [np.array(each, order="C", copy=in_place or None) for each in given[:count]]
    results = arguments
    if not in_place:
        batches = [array.shape[: array.ndim - number] for array, number in zip(arguments, dimensions, strict=True)]
        results = [
            np.empty((*batch, *shape), argument.dtype)
            for batch, shape, argument in zip(batches, shapes, arguments, strict=True)
        ]
    others = [np.asarray(each, order="C") for each in given[count:]]
    try:
        _handlers[-1](
            text.encode(), XlaArrays.holding(arguments), XlaArrays.holding(results), lambda: XlaArrays.holding(others)
        )
    except BaseException as error:
        raise RuntimeError(described(error, awaited=False)) from None  # Like `register` for programs on the CPU.
    return results
