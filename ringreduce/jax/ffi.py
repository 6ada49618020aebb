"""XLA's foreign function interface, spoken from Python: compiled programs call a function on views of their memory.

XLA calls a C function with one frame: arguments, results, attributes. `ctypes` makes such a function of a Python one:
nothing is compiled and nothing is copied. The structures are those of ``xla/ffi/api/c_api.h`` in jaxlib, which are
stable within a major version of that API; a target states the version when it is registered.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

__all__ = ["Handler", "call", "register"]

_TARGET = "ringreduce"
_API_VERSION = 1  # of the interface to JAX, not of XLA's
_METADATA = 1  # the type of the extension that asks what a target was made for
_INTERNAL = 13  # the code of errors, as of absl

#: Takes the text of a `call`, its arguments, its results to fill, and whether the program waits for it.
Handler = Callable[[str, Sequence[npt.NDArray[Any]], Sequence[npt.NDArray[Any]], bool], None]

_Address, _Size, _Int64, _Int32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int32


def _structure(name: str, **fields: Any) -> Any:
    """Return a structure; all begin with their size."""
    return type(name, (ctypes.Structure,), {"_fields_": [("size", _Size), *fields.items()]})


_to = ctypes.POINTER
_Version = _structure("Version", extension=_Address, major=_Int32, minor=_Int32)
_Metadata = _structure("Metadata", version=_Version, traits=ctypes.c_uint32)
_Extension = _structure("Extension", type=_Int32, next=_Address, metadata=_to(_Metadata))
_Buffer = _structure("Buffer", extension=_Address, dtype=_Int32, data=_Address, rank=_Int64, dims=_to(_Int64))
_Buffers = _structure("Buffers", extension=_Address, count=_Int64, types=_Address, each=_to(_to(_Buffer)))
_Attributes = _structure(
    "Attributes", extension=_Address, count=_Int64, types=_Address, names=_Address, each=_to(_to(_Size * 2))
)
_Error = _structure("Error", extension=_Address, message=ctypes.c_char_p, code=_Int32)
_Api = _structure(
    "Api",
    extension=_Address,
    version=_Version,
    internal=_Address,
    create_error=ctypes.CFUNCTYPE(_Address, _to(_Error)),
)
_Frame = _structure(
    "Frame",
    extension=_to(_Extension),
    api=_to(_Api),
    context=_Address,
    stage=_Int32,
    arguments=_Buffers,
    results=_Buffers,
    attributes=_Attributes,
)

#: XLA's numbers of the dtypes that collectives take.
_DTYPES: dict[int, npt.DTypeLike] = {
    **{1: np.bool_, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.uint8, 7: np.uint16, 8: np.uint32},
    **{9: np.uint64, 10: np.float16, 11: np.float32, 12: np.float64, 15: np.complex64, 16: jnp.bfloat16},
    **{18: np.complex128},
}


@lru_cache(4096)  # XLA gives a program the same memory again and again
def _view(address: int, code: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    dtype = np.dtype(_DTYPES[code])
    if not prod(shape):
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_byte * (prod(shape) * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


def _views(buffers: Any) -> list[npt.NDArray[Any]]:
    found = []
    for number in range(buffers.count):
        each = buffers.each[number].contents
        found.append(_view(each.data or 0, each.dtype, tuple(each.dims[: each.rank])))
    return found


def register(handler: Handler, describe: Callable[[BaseException], str]) -> None:
    """Let compiled programs call a function, on the CPU; once in a process.

    Args:
        handler: what they call. XLA calls it on the thread of the program, which waits then, or on one of its own.
        describe: returns the text of an error that it raised; JAX raises an error of its own with that text.
    """

    def target(pointer: Any) -> Any:
        frame = pointer.contents
        if frame.extension and frame.extension.contents.type == _METADATA:
            asked, given = frame.extension.contents.metadata.contents.version, frame.api.contents.version
            asked.major, asked.minor = given.major, given.minor
            return None
        try:
            address, length = frame.attributes.each[0].contents
            text = ctypes.string_at(address, length).decode()
            waits = sys._getframe().f_back is not None  # else this thread has begun outside of Python
            handler(text, _views(frame.arguments), _views(frame.results), waits)
        except BaseException as error:
            said = _Error(ctypes.sizeof(_Error), None, describe(error).encode(errors="replace"), _INTERNAL)
            return frame.api.contents.create_error(ctypes.byref(said))
        return None

    made = ctypes.CFUNCTYPE(_Address, _to(_Frame))(target)
    _kept.append(made)
    address = jax.ffi.pycapsule(ctypes.cast(made, _Address).value)
    jax.ffi.register_ffi_target(_TARGET, address, platform="cpu", api_version=_API_VERSION)


_kept: list[Any] = []  # C does not know that it holds a function of Python


def call(text: str, arguments: Sequence[Any], results: Sequence[Any], *, batched: str) -> list[Any]:
    """Return arrays of the shapes and dtypes of ``results``, which the handler fills.

    JAX may leave out a call whose results nobody uses, make one of two equal ones, and make it again in a backward
    pass; it does so on all ranks alike, as they compile the same program.

    Args:
        text: passed to the handler. It is a part of the compiled program, which other processes may run.
        arguments: arrays.
        results: have a ``shape`` and a ``dtype``.
        batched: as `jax.ffi.ffi_call` has ``vmap_method``.
    """
    described = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in results]
    made = jax.ffi.ffi_call(_TARGET, described, vmap_method=batched)(*arguments, text=text)
    return list(made)
