"""What a benchmark can be asked for: collectives, messages, sizes, types, operations; how a size becomes a count.

The names and the meaning of a size are those of nccl-tests, so that figures can be compared line by line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringreduce.buffers import DTYPES, DType, new
from ringreduce.common.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM, ReduceOp

__all__ = ["COLLECTIVES", "NCCL_TYPES", "OPS", "TYPES", "Case", "Collective", "format_nbytes", "native_dtype"]
__all__ += ["plural", "sizes"]

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
class Collective:
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
    def osu_name(self) -> str:
        """How the OSU micro-benchmarks call it."""
        return {"broadcast": "Bcast", "latency": "", "bandwidth": ""}.get(self.name, self.name.capitalize())

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


COLLECTIVES: dict[str, Collective] = {
    each.name: each
    for each in (
        Collective("allreduce", "all_reduce_perf", reduces=True, in_place=True),
        Collective("reduce_scatter", "reduce_scatter_perf", reduces=True, in_place=True, divided=True),
        Collective("allgather", "all_gather_perf", in_place=True, divided=True),
        Collective("broadcast", "broadcast_perf", in_place=True, rooted=True),
        Collective("alltoall", "alltoall_perf", divided=True),
        Collective("reduce", "reduce_perf", reduces=True, in_place=True, rooted=True),
        Collective("gather", "gather_perf", in_place=True, divided=True, rooted=True),
        Collective("scatter", "scatter_perf", in_place=True, divided=True, rooted=True),
        Collective("sendrecv", "sendrecv_perf", point_to_point=True),
        Collective("latency", "latency", point_to_point=True, messages=2),
        Collective("bandwidth", "bandwidth", point_to_point=True, messages=16),
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

    collective: Collective
    type_name: str
    op_name: str | None
    root: int
    nranks: int
    count: int

    @classmethod
    def of_nbytes(
        cls, collective: Collective, type_name: str, op_name: str | None, root: int, nranks: int, nbytes: int
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


def plural(number: float, word: str) -> str:
    """Write a number before a word: ``1 core``, ``2.5 cores``."""
    return f"{number:g} {word}{'s' * (number != 1)}"


def format_nbytes(nbytes: int) -> str:
    """Write a size shortly: ``8 B``, ``64 KiB``, ``1.5 MiB``."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"
