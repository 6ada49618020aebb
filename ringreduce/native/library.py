"""Loads the object file of the compiled loops: functions that Python calls, and the addresses of kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringreduce.native.catalog import FUNCTIONS, KERNELS, PYTHON_SYMBOLS, SYSTEM_SYMBOLS

_METH_FASTCALL = 0x80
#: What Python calls with one address.
SIMPLE = ("is_same", "put", "take")
#: What encodes and decodes.
CODECS = ("encode_int8", "decode_int8", "encode_int4", "decode_int4")
_CALLED = ("run", "run_into", *SIMPLE)


class Library(NamedTuple):
    """The compiled functions.

    Attributes:
        run: runs a plan, see `ringreduce.native.loops.run`; takes its address, those of source and target, and where
            to go on.
        run_into: the same, with the address of an array of NumPy in place of the target's.
        is_same, put, take: see `ringreduce.native.loops`.
        codecs: by name: what encodes floats, given addresses of both and the number of floats; and what decodes them,
            given one number more, whether it adds to them.
        kernels: by dtype and operation: the bytes of a number, and the addresses of the functions of a `Kernel`.
    """

    kernels: dict[tuple[str, str], tuple[int, ...]]
    codecs: dict[str, tuple[Callable[[int, int, int], int], Callable[[int, int, int, int], int]]]
    run: Callable[[int, int, int, int], int]
    run_into: Callable[[int, int, int, int], int]
    is_same: Callable[[int], int]
    put: Callable[[int], int]
    take: Callable[[int], int]


class _MethodDef(ctypes.Structure):
    """What CPython knows of a function: PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_kept: list[Any] = []  # what compiled functions need for as long as this process lives


def processor() -> tuple[str, str]:
    """Return LLVM's name of this processor, and its features."""
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def load(content: bytes, codecs: Sequence[str] = ()) -> Library:
    """Load an object file that `ringreduce.native.object_code` has made for this processor and this Python.

    Raises:
        RuntimeError: it is none, or lacks a function.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    jit = llvm.create_lljit_compiler()
    builder = llvm.JITLibraryBuilder().add_object_img(content)
    for name in PYTHON_SYMBOLS:
        builder.import_symbol(name, _address(ctypes.pythonapi, name))
    system = ctypes.CDLL(None)
    for name in SYSTEM_SYMBOLS:
        builder.import_symbol(name, _address(system, name))
    # Numba counts the references of arrays that own memory. None do here, so this is never called.
    builder.import_symbol("NRT_MemInfo_call_dtor", _address(system, "abort"))
    for name in (*_CALLED, *codecs, *FUNCTIONS):
        builder.export_symbol(name)
    linked = builder.link(jit, "ringreduce")
    _kept.append((jit, linked))
    addresses = {name: int(linked[name]) for name in FUNCTIONS}
    kernels = {key: (each.itemsize, *(addresses.get(name, 0) for name in each[1:])) for key, each in KERNELS.items()}
    called = {name: _function(linked[name], name) for name in codecs}
    pairs = {name: (called[f"encode_{name}"], called[f"decode_{name}"]) for name in ("int8", "int4") if called}
    return Library(kernels, pairs, **{name: _function(linked[name], name) for name in _CALLED})


def _address(library: Any, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address


def _function(address: int, name: str) -> Any:
    """Return a compiled function as one of Python's."""
    definition = _MethodDef(name.encode(), address, _METH_FASTCALL, None)
    _kept.append(definition)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return make(ctypes.addressof(definition), None, None)
