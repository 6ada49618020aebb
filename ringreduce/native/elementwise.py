"""What is done to the numbers of two terms, or of one: LLVM of a function for each row of the catalog.

All are called alike: the addresses of the result, of the first and of the second term, how many numbers there are, and
how many ranks. The result may lie in one of the terms, and overlaps none of them otherwise. Floats of 16 bits are added
as floats of 32 bits, and rounded once; integers of up to 32 bits are averaged as floats, which are exact: those of 8
bits as floats of 32 bits, up to 65536 ranks, others as floats of 64 bits.

Numba could make these loops of Python. It takes a tenth of a second for each, and there are dozens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from llvmlite import ir

_WORD = ir.IntType(64)
_HALF, _FLOAT, _DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_BITS = {16: ir.IntType(16), 32: ir.IntType(32)}

#: Returns the value of an operation on others, with what was emitted before.
_Emit = Callable[..., Any]


class _Dtype(NamedTuple):
    """How numbers of a dtype are stored, and how they are summed: as they are, or in a wider type.

    Attributes:
        stored, wide: types; equal, if sums do not grow in another one.
        widen, narrow: cast between them.
    """

    stored: Any
    wide: Any
    widen: _Emit
    narrow: _Emit


def _dtype(name: str) -> _Dtype:
    if name == "bfloat16":
        return _Dtype(_BITS[16], _FLOAT, _widen_bfloat16, _round_to_bfloat16)
    if name == "float16":
        return _Dtype(_HALF, _FLOAT, lambda b, x: b.fpext(x, _FLOAT), lambda b, x: b.fptrunc(x, _HALF))
    if name.startswith("float"):
        kind = _FLOAT if name == "float32" else _DOUBLE
        return _Dtype(kind, kind, _as_it_is, _as_it_is)
    kind = ir.IntType(int(name.strip("uint")))
    return _Dtype(kind, kind, _as_it_is, _as_it_is)


def _averaged(name: str) -> _Dtype:
    """Return how integers are averaged: what is left of a quotient toward zero."""
    kind = ir.IntType(int(name.strip("uint")))
    wide = _FLOAT if kind.width == 8 else _DOUBLE
    if name.startswith("u"):
        return _Dtype(kind, wide, lambda b, x: b.uitofp(x, wide), lambda b, x: b.fptoui(x, kind))
    return _Dtype(kind, wide, lambda b, x: b.sitofp(x, wide), lambda b, x: b.fptosi(x, kind))


def _as_it_is(builder: Any, number: Any) -> Any:
    return number


def _widen_bfloat16(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, _BITS[32]), _BITS[32](16)), _FLOAT)


def _round_to_bfloat16(builder: Any, number: Any) -> Any:
    """Round to the nearest, of two to the even one; a NaN stays one, as a quiet one of its sign."""
    bits = builder.bitcast(number, _BITS[32])
    upper = builder.lshr(bits, _BITS[32](16))
    odd = builder.and_(upper, _BITS[32](1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _BITS[32](0x7FFF))), _BITS[32](16))
    quiet = builder.or_(upper, _BITS[32](0x40))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", number, number), quiet, rounded), _BITS[16])


def _pair(builder: Any, op: str, a: Any, b: Any) -> Any:
    """Return the sum, or the smaller or larger of two: as NumPy, of equal ones the second, and NaN if one is."""
    is_float = isinstance(a.type, (ir.FloatType, ir.DoubleType))
    if op in ("sum", "average"):
        return builder.fadd(a, b) if is_float else builder.add(a, b)
    sign = "<" if op == "min" else ">"
    if not is_float:
        return builder.select(builder.icmp_signed(sign, a, b), a, b)
    first = builder.or_(builder.fcmp_ordered(sign, a, b), builder.fcmp_unordered("uno", a, a))
    return builder.select(first, a, b)


class _Function:
    """A function that is emitted.

    Attributes:
        builder: emits.
        target, first, second, count, size: its arguments.
    """

    def __init__(self, module: Any, name: str) -> None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_WORD] * 5), name)
        self.builder = ir.IRBuilder(function.append_basic_block())
        self.target, self.first, self.second, self.count, self.size = function.args

    @contextmanager
    def each(self) -> Iterator[Any]:
        """Emit a loop over all numbers; yields the position."""
        builder = self.builder
        before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.cbranch(builder.icmp_signed(">", self.count, _WORD(0)), body, after)
        builder.position_at_end(body)
        position = builder.phi(_WORD)
        position.add_incoming(_WORD(0), before)
        yield position
        following = builder.add(position, _WORD(1), flags=("nuw", "nsw"))
        position.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, self.count), body, after)
        builder.position_at_end(after)

    def place(self, address: Any, kind: Any, position: Any) -> Any:
        """Return a pointer to a number."""
        start = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.gep(start, [position], inbounds=True)

    def load(self, address: Any, kind: Any, position: Any) -> Any:
        return self.builder.load(self.place(address, kind, position))

    def store(self, value: Any, address: Any, position: Any) -> None:
        self.builder.store(value, self.place(address, value.type, position))

    @contextmanager
    def alternative(self, condition: Any) -> Iterator[None]:
        """Emit what is done instead of all that follows, if a condition holds."""
        with self.builder.if_then(condition):
            yield
            self.builder.ret_void()

    def ways_to_divide(self, kind: Any) -> Iterator[_Emit]:
        """Emit code for each: by the inverse of a power of two, which is as exact and quicker, and by the number."""
        builder = self.builder
        less = builder.sub(self.size, _WORD(1))
        size = builder.sitofp(self.size, kind)
        with self.alternative(builder.icmp_signed("==", builder.and_(self.size, less), _WORD(0))):
            inverse = builder.fdiv(kind(1.0), size)
            yield lambda total: builder.fmul(total, inverse)
        yield lambda total: builder.fdiv(total, size)


def _emit_pairs(function: _Function, dtype: _Dtype, op: str, finish: _Emit) -> None:
    """Emit the loop over pairs. LLVM vectorises one that stores to one of its terms only if it sees which."""
    builder = function.builder
    target, first, second = function.target, function.first, function.second

    def loop(first: Any, second: Any) -> None:
        with function.each() as i:
            a, b = (dtype.widen(builder, function.load(term, dtype.stored, i)) for term in (first, second))
            function.store(dtype.narrow(builder, finish(_pair(builder, op, a, b))), target, i)

    with function.alternative(builder.icmp_signed("==", target, first)):
        loop(target, second)
    with function.alternative(builder.icmp_signed("==", target, second)):
        loop(first, target)
    loop(first, second)


def _emit_growth(function: _Function, dtype: _Dtype) -> None:
    """Emit what adds numbers of ``second`` to the floats of the result; ``first`` is 0 where that is not begun."""
    builder = function.builder

    def widened(i: Any) -> Any:
        return dtype.widen(builder, function.load(function.second, dtype.stored, i))

    with function.alternative(builder.icmp_signed("==", function.first, _WORD(0))), function.each() as i:
        function.store(widened(i), function.target, i)
    with function.each() as i:
        total = function.load(function.target, dtype.wide, i)
        function.store(builder.fadd(total, widened(i)), function.target, i)


def _emit_finish(function: _Function, dtype: _Dtype, source: Any, finish: _Emit) -> None:
    """Emit what divides, or rounds, sums."""
    with function.each() as i:
        total = function.load(source, dtype.wide, i)
        function.store(dtype.narrow(function.builder, finish(total)), function.target, i)


def emit(module: Any, name: str) -> None:
    """Emit a function of `ringreduce.native.catalog.FUNCTIONS`."""
    what, *ops, dtype_name = name.split()
    op = ops[0] if ops else what
    is_integer = "int" in dtype_name
    dtype = _averaged(dtype_name) if is_integer and (op == "average" or what == "grow") else _dtype(dtype_name)
    function = _Function(module, name)
    if what == "grow":
        _emit_growth(function, dtype)
    else:
        source = function.first if what == "round" else function.target
        finishes = [lambda total: total] if op not in ("average", "divide") else function.ways_to_divide(dtype.wide)
        for finish in finishes:
            if what in ("round", "divide"):
                _emit_finish(function, dtype, source, finish)
            else:
                _emit_pairs(function, dtype, op, finish)
    function.builder.ret_void()
