"""What Python lacks for these loops: memory by address, flags in order, the processor's pause, calls by address."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTE = ir.IntType(8)
_WORD = ir.IntType(64)
_MONOTONIC = 1  # of Linux


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """Load a flag; what was stored before it was set is seen by what is loaded after."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _WORD.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typing: Any, address: Any, value: Any) -> Any:
    """Set a flag; who sees it sees all that was stored before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], _WORD.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@intrinsic
def fence(typing: Any) -> Any:
    """Let what is loaded after this be no older than what was loaded before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("acquire")
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Let the processor wait some cycles in a loop that polls, and leave its units to the core's other thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        triple = builder.module.triple or ""
        kind = ir.FunctionType(ir.VoidType(), [])
        if "x86" in triple:
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
        elif "aarch64" in triple:
            # ISB waits for the pipeline, some tens of cycles; YIELD does nothing on most cores.
            barrier = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            all_domains = ir.Constant(ir.IntType(32), 15)
            builder.call(builder.module.declare_intrinsic("llvm.aarch64.isb", (), barrier), [all_domains])
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def give_core_away(typing: Any) -> Any:
    """Call ``sched_yield``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def copy(typing: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes between memory that does not overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, of = (builder.inttoptr(each, _BYTE.as_pointer()) for each in arguments[:2])
        cgutils.raw_memcpy(builder, to, of, arguments[2], 1, align=1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), generate


@intrinsic
def nanoseconds(typing: Any) -> Any:
    """Call ``clock_gettime`` for a clock that does not go back."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        time = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 2))
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), time.type])
        read = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(read, [ir.IntType(32)(_MONOTONIC), time])
        seconds, rest = (builder.extract_value(builder.load(time), index) for index in (0, 1))
        return builder.add(builder.mul(seconds, _WORD(10**9)), rest)

    return types.int64(), generate


@intrinsic
def stream_line(typing: Any, target: Any, source: Any) -> Any:
    """Copy 64 bytes to where a line begins, past the caches: stores whose lines other cores need not give up first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, of = (builder.inttoptr(each, ir.VectorType(_WORD, 8).as_pointer()) for each in arguments)
        store = builder.store(builder.load(of, align=1), to, align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@intrinsic
def end_streams(typing: Any) -> Any:
    """Let what was stored past the caches be seen before what is stored after this."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if "x86" in (builder.module.triple or ""):  # Elsewhere these stores are in order with a release.
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse.sfence", (), kind), [])
        return context.get_dummy_value()

    return types.none(), generate


def pointer_to(element: Any) -> Any:
    """Return what makes a pointer to elements of a Numba type of an address."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(element)))

        return types.CPointer(element)(types.int64), generate

    return pointer


@intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """Return the float of 32 bits that has these."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_of(typing: Any, number: Any) -> Any:
    """Return the bits of a float of 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def rounded(typing: Any, number: Any) -> Any:
    """Return the nearest whole number, of two the even one; unlike `round`, it can be vectorised."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.rint", (ir.FloatType(),)), arguments)

    return types.float32(types.float32), generate


@intrinsic
def call(typing: Any, function: Any, target: Any, first: Any, second: Any, count: Any, size: Any) -> Any:
    """Call a function of `ringreduce.native.elementwise` by its address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 5)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 6), generate
