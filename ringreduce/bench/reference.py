"""Inputs with known answers, and the count of elements that a collective got wrong.

Every rank's input repeats a random table of prime length, so that the expected result costs one reduction of short
tables on each rank whatever the size, while blocks that end up in the wrong place still differ. The values are
chosen so that the answer is exact in the type itself, in any order of operations: small whole numbers for sums, powers
of two and of i for products, anything for integers (which wrap around). Only the average of floats needs a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ringreduce.bench.cases import TYPES, Case
from ringreduce.buffers import DType
from ringreduce.common.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM, ReduceOp

__all__ = ["Reference", "rest_value"]

Array = npt.NDArray[Any]

_PERIOD = 65521  # prime, so that no block of a power of two elements begins twice at the same place of the table
_WIDE = {"float": np.dtype(np.float64), "complex": np.dtype(np.complex128)}


@dataclass(frozen=True, slots=True)
class Reference:
    """What the ranks put in and what each must get out of one case, from a seed that all ranks share."""

    case: Case
    seed: int

    def fill(self, array: Array, rank: int) -> None:
        """Store the input of ``rank`` in ``array`` (``case.input_count`` elements)."""
        table = self._table(rank).astype(array.dtype)
        for start in range(0, array.size, table.size):
            piece = array[start : start + table.size]
            piece[:] = table[: piece.size]

    def count_wrong(self, result: Array | None, rank: int) -> int:
        """Return how many elements of ``result``, what ``rank`` got, are not as they must be; None: it got nothing.

        A result of the wrong length counts as wrong throughout.
        """
        case = self.case
        if result is None and not case.collective.has_result(rank, case.root):
            return 0
        if result is None or result.shape != (case.output_count,):
            return case.output_count
        name, everyone = case.collective.name, list(range(case.nranks))
        givers = {"broadcast": [case.root], "scatter": [case.root], "sendrecv": [(rank - 1) % case.nranks]}
        givers |= {"latency": [1 - rank], "bandwidth": [1 - rank]}
        givers |= dict.fromkeys(("allgather", "gather", "alltoall"), everyone)
        offset = rank * case.count if name in ("reduce_scatter", "scatter", "alltoall") else 0
        tables = [self._reduced()] if case.collective.reduces else [self._table(each) for each in givers[name]]
        parts = result.reshape(len(tables), -1)
        return sum(self._differing(part, table, offset) for part, table in zip(parts, tables, strict=True))

    def _table(self, rank: int) -> Array:
        random = np.random.default_rng((self.seed, rank))
        length = min(_PERIOD, self.case.input_count)
        return _values(random, length, TYPES[self.case.type_name], self.case.op, self.case.nranks)

    def _reduced(self) -> Array:
        tables = np.stack([self._table(rank) for rank in range(self.case.nranks)])
        return _reduce(tables, TYPES[self.case.type_name], self.case.op)

    def _differing(self, result: Array, table: Array, offset: int) -> int:
        """Count where ``result`` is not ``table``, repeated, from element ``offset`` on."""
        table = np.roll(table, -(offset % table.size))
        tolerance = _tolerance(self.case)
        wrong = 0
        for start in range(0, result.size, table.size):
            got = result[start : start + table.size].astype(table.dtype, copy=False)
            expected = table[: got.size]
            # Written so that a NaN in the result is wrong.
            right = got == expected if tolerance == 0 else abs(got - expected) <= tolerance
            wrong += int(got.size - np.count_nonzero(right))
        return wrong


def rest_value(op: ReduceOp) -> int:
    """Return the value that stays what it is however often the ranks' equal values are combined.

    Buffers hold it while calls are timed: repeated in-place sums of anything else would overflow.
    """
    return 0 if op is SUM else 1


def _largest(nranks: int) -> int:
    """The largest whole number to add over ``nranks`` ranks: bfloat16 holds every whole number up to 256."""
    return max(1, min(8, 256 // nranks))


def _values(random: np.random.Generator, length: int, dtype: DType, op: ReduceOp, nranks: int) -> Array:
    """Return ``length`` values of a rank in the type that the answer is computed in."""
    if dtype.kind == "bool":
        return random.integers(0, 2, length).astype(bool)
    if dtype.kind in ("int", "uint"):
        info = np.iinfo(dtype.storage)
        # Averages are summed in 64 bits, and must not wrap around there.
        low, high = (max(info.min, -(1 << 40)), min(info.max, 1 << 40)) if op is AVERAGE else (info.min, info.max)
        return random.integers(low, high, length, dtype=dtype.storage, endpoint=True)
    if op is PRODUCT:
        return _factors(random, length, dtype, nranks)
    limit = _largest(nranks)
    real = random.integers(-limit, limit, length, endpoint=True)
    imaginary = random.integers(-limit, limit, length, endpoint=True) if dtype.kind == "complex" else 0
    return (real + 1j * imaginary if dtype.kind == "complex" else real).astype(_WIDE[dtype.kind])


def _factors(random: np.random.Generator, length: int, dtype: DType, nranks: int) -> Array:
    """Return values whose products over all ranks are exact: units, and powers of two while float16 can hold them."""
    if dtype.kind == "complex":
        return random.choice(np.array([1, -1, 1j, -1j]), length)
    return random.choice(np.array([1, -1, 2, -0.5] if nranks <= 14 else [1.0, -1.0]), length)


def _reduce(tables: Array, dtype: DType, op: ReduceOp) -> Array:
    """Combine the rows of ``tables``, in a type that holds the exact answer."""
    if dtype.kind == "bool":
        logical = np.logical_or if op in (SUM, MAX) else np.logical_and
        return cast(Array, logical.reduce(tables, axis=0))
    if op in (MIN, MAX):
        return cast(Array, (np.minimum if op is MIN else np.maximum).reduce(tables, axis=0))
    if op is AVERAGE and dtype.kind in ("int", "uint"):
        total = tables.astype(np.int64).sum(axis=0)
        return cast(Array, np.sign(total) * (abs(total) // len(tables))).astype(tables.dtype)
    combine = np.multiply if op is PRODUCT else np.add
    result: Array = combine.reduce(tables, axis=0, dtype=tables.dtype)
    return result / len(tables) if op is AVERAGE else result


def _tolerance(case: Case) -> float:
    """Return by how much a right element may differ: averages are rounded, twice if the sum is rounded too."""
    row = TYPES[case.type_name]
    if case.op is not AVERAGE or row.kind not in _WIDE:
        return 0.0
    bits = {"bfloat16": 7, "float16": 10, "float32": 23, "complex64": 23, "float64": 52, "complex128": 52}[row.name]
    return 2.0 ** (1 - bits) * _largest(case.nranks)
