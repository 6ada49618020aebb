"""What a benchmark can be asked for: collectives, messages, sizes, types, operations; how a size becomes a count.

The names and the meaning of a size are those of nccl-tests, so that figures can be compared line by line.

Results are verified by inputs with known answers (`Reference`). Every rank's input repeats a random table of prime
length, so that the expected result costs one reduction of short tables on each rank whatever the size, while blocks
that end up in the wrong place still differ. The values are chosen so that the answer is exact in the type itself, in
any order of operations: small whole numbers for sums, powers of two and of i for products, anything for integers (which
wrap around). Only the average of floats needs a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import DTYPES, DType, new
from ringreduce.common.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM, ReduceOp

Array = npt.NDArray[Any]

#: The types of nccl-tests, which ``-d all`` means.
NCCL_TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16")
_OUR_NAMES = {"half": "float16", "float": "float32", "double": "float64"}

#: Name on the command line and in the table -> element type: those of nccl-tests, then our others.
TYPES: dict[str, DType] = {name: DTYPES[_OUR_NAMES.get(name, name)] for name in NCCL_TYPES} | {
    name: row for name, row in DTYPES.items() if name not in {*NCCL_TYPES, *_OUR_NAMES.values()}
}

#: Name on the command line and in the table -> operation, in the order of ``-o all``.
OPS: dict[str, ReduceOp] = {"sum": SUM, "prod": PRODUCT, "max": MAX, "min": MIN, "avg": AVERAGE}


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """One collective as a benchmark sees it, or messages between two ranks.

    Attributes:
        name: ours, e.g. ``"allreduce"``.
        nccl_name: the name of the program of nccl-tests that measures it.
        reduces: whether ``-o`` means anything.
        in_place: whether there is a form in which input and result share memory: one overwrites the other or, where a
            rank's own part is one of P, that part is in its place among them.
        divided: whether a rank's own part is one of P equal ones: counts are per part, as in nccl-tests.
        rooted: whether one rank, the root, has another part in it than the others.
        point_to_point: whether it is made of messages between two ranks: of all in a ring, or of ranks 0 and 1.
        messages: that follow each other in one timed call; times are of one of them.
    """

    name: str
    nccl_name: str
    reduces: bool = False
    in_place: bool = False
    divided: bool = False
    rooted: bool = False
    point_to_point: bool = False
    messages: int = 1

    @property
    def overwrites(self) -> bool:
        """Whether the result of the form in place overwrites all of the input."""
        return self.in_place and not self.divided

    @property
    def of_two(self) -> bool:
        """Whether ranks 0 and 1 alone take part."""
        return self.name in ("latency", "bandwidth")

    def has_result(self, rank: int, root: int) -> bool:
        """Return whether this rank gets anything."""
        if self.of_two:
            return rank <= 1 if self.name == "latency" else rank == 1
        return rank == root or self.name not in ("reduce", "gather")

    def bus_factor(self, nranks: int) -> float:
        """Return bus bandwidth / algorithm bandwidth: what a link carries per byte of the stated size."""
        if self.name in ("broadcast", "reduce") or self.point_to_point:
            return 1.0
        return (2 if self.name == "allreduce" else 1) * (nranks - 1) / nranks


COLLECTIVES: dict[str, MeasuredCollective] = {
    each.name: each
    for each in (
        MeasuredCollective("allreduce", "all_reduce_perf", reduces=True, in_place=True),
        MeasuredCollective("reduce_scatter", "reduce_scatter_perf", reduces=True, in_place=True, divided=True),
        MeasuredCollective("allgather", "all_gather_perf", in_place=True, divided=True),
        MeasuredCollective("broadcast", "broadcast_perf", in_place=True, rooted=True),
        MeasuredCollective("alltoall", "alltoall_perf", divided=True),
        MeasuredCollective("reduce", "reduce_perf", reduces=True, in_place=True, rooted=True),
        MeasuredCollective("gather", "gather_perf", in_place=True, divided=True, rooted=True),
        MeasuredCollective("scatter", "scatter_perf", in_place=True, divided=True, rooted=True),
        MeasuredCollective("sendrecv", "sendrecv_perf", point_to_point=True),
        MeasuredCollective("latency", "latency", point_to_point=True, messages=2),
        MeasuredCollective("bandwidth", "bandwidth", point_to_point=True, messages=16),
    )
}


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table, before it is measured; equal on all ranks.

    Attributes:
        collective: what is measured.
        type_name: name of the element type in the table.
        op_name: name of the operation in the table, None for collectives that do not reduce.
        root: of rooted collectives.
        nranks: P.
        count: elements of a rank's whole buffer; divided collectives: of one of its P parts.
    """

    collective: MeasuredCollective
    type_name: str
    op_name: str | None
    root: int
    nranks: int
    count: int

    @classmethod
    def of_nbytes(
        cls, collective: MeasuredCollective, type_name: str, op_name: str | None, root: int, nranks: int, nbytes: int
    ) -> Case:
        """Make the largest case of at most ``nbytes`` bytes, but never an empty one."""
        parts = nranks if collective.divided else 1
        count = max(1, nbytes // (TYPES[type_name].itemsize * parts))
        return cls(collective, type_name, op_name if collective.reduces else None, root, nranks, count)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the arrays; bfloat16 takes the ml_dtypes package."""
        return native_dtype(TYPES[self.type_name])

    @property
    def op(self) -> ReduceOp:
        """The reduce operation; SUM, without meaning, where nothing is reduced."""
        return OPS[self.op_name] if self.op_name else SUM

    @property
    def shown_root(self) -> int:
        """The root; -1 where there is none."""
        return self.root if self.collective.rooted else -1

    @property
    def buffer_count(self) -> int:
        """Elements of the larger of a rank's input and output."""
        return self.count * (self.nranks if self.collective.divided else 1)

    @property
    def input_count(self) -> int:
        return self.count if self.collective.name in ("allgather", "gather") else self.buffer_count

    @property
    def output_count(self) -> int:
        return self.count if self.collective.name in ("reduce_scatter", "scatter") else self.buffer_count

    @property
    def input_nbytes(self) -> int:
        """Bytes of the array that a rank passes in."""
        return self.input_count * TYPES[self.type_name].itemsize

    @property
    def nbytes(self) -> int:
        """The size in the first column: bytes of the larger of input and output."""
        return self.buffer_count * TYPES[self.type_name].itemsize


def native_dtype(row: DType) -> np.dtype[Any]:
    """Return what NumPy users know a type as."""
    dtype: np.dtype[Any] = new((0,), row, "numpy").dtype
    return dtype


def sizes(min_nbytes: int, max_nbytes: int, step_nbytes: int | None, step_factor: int) -> Iterator[int]:
    """Yield sizes from ``min_nbytes`` on: by addition if ``step_nbytes`` is given, else by factor.

    The last is ``max_nbytes``, also where the steps jump over it and nccl-tests skips it: a user who names it wants it.
    """
    nbytes = min_nbytes
    while nbytes < max_nbytes:
        yield nbytes
        nbytes = nbytes + step_nbytes if step_nbytes is not None else nbytes * step_factor
    yield max_nbytes


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
        name = case.collective.name
        everyone = list(range(case.nranks))
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
        return _values(random, length, dtype=TYPES[self.case.type_name], op=self.case.op, nranks=self.case.nranks)

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
    if op is PRODUCT:  # Products over all ranks are exact: units, and powers of two while float16 can hold them.
        real_factors = [1, -1, 2, -0.5] if nranks <= 14 else [1.0, -1.0]
        return random.choice(np.array([1, -1, 1j, -1j] if dtype.kind == "complex" else real_factors), length)
    limit = _largest(nranks)
    real = random.integers(-limit, limit, length, endpoint=True)
    imaginary = random.integers(-limit, limit, length, endpoint=True) if dtype.kind == "complex" else 0
    return (real + 1j * imaginary if dtype.kind == "complex" else real).astype(_WIDE[dtype.kind])


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
