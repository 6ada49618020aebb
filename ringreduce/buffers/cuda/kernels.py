"""The kernels that a GPU runs: which instances there are, what a compiler needs for them, and how each is launched.

Sources are the CUDA files in ``sources``, one for each family; what a kernel does, and what it asks of addresses,
stands there. A kernel is named by its family and instance, such as ``"reduce"`` and ``"combine<float32,sum>"``.

Launchers take device addresses, enqueue on a stream and return; with nothing to do they launch nothing. Counts are in
elements. Memory has to stay as it is until the stream has come past the kernel; so has a table of addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ringreduce.buffers.cuda.driver import Driver, Stream
from ringreduce.buffers.dtypes import DTYPES, DType
from ringreduce.reduce_ops import ReduceOp

__all__ = [
    "FAMILIES",
    "FEWEST_MULTIPROCESSORS",
    "FLAGS_NBYTES",
    "MAX_BLOCKS",
    "MAX_RANKS",
    "ONE_SHOT_NBYTES",
    "OPTIONS",
    "SCRATCH_NBYTES",
    "WIRE_FORMATS",
    "Packer",
    "Peers",
    "Rows",
    "Slot",
    "Table",
    "combine",
    "decode",
    "encode",
    "expression",
    "one_shot",
    "source",
    "two_shot",
]

#: Threads of a block, in every kernel.
_BLOCK: Final = 512
#: Blocks that a multiprocessor is given at most; larger arrays are done in turns.
_BLOCKS_EACH: Final = 4
#: Bytes of a tensor that a block packs before it takes another part.
_CHUNK_NBYTES: Final = 1 << 16

# As in sources/shots.cu.
MAX_BLOCKS: Final = 64
MAX_RANKS: Final = 16
#: With fewer, a GPU could not run all blocks of kernels that meet at once, two on each.
FEWEST_MULTIPROCESSORS: Final = MAX_BLOCKS // 2
_SHOT_NBYTES: Final = 1 << 14
#: What a rank's area of flags takes. It begins as zeros.
FLAGS_NBYTES: Final = 4 * MAX_BLOCKS * (1 + MAX_RANKS)
#: What a rank's scratch area takes.
SCRATCH_NBYTES: Final = 2 * MAX_BLOCKS * _SHOT_NBYTES
#: The largest array that a one-shot can do.
ONE_SHOT_NBYTES: Final = MAX_BLOCKS * _SHOT_NBYTES
#: Of a two-shot: more blocks hardly move more bytes, and take multiprocessors from the backward pass beside it.
_TWO_SHOT_BLOCKS: Final = 36

#: For NVRTC, beside the architecture, which is 7.0 or later; nvcc understands them too. The last three keep every
#: operation as IEEE 754, and so NumPy, has it.
OPTIONS: Final = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true")

#: Formats as in `ringreduce.wire.codecs`, with the elements that share a scale; 1 if there is none.
WIRE_FORMATS: Final[Mapping[str, int]] = {"bf16": 1, "fp16": 1, "fp8": 256, "int8": 256, "int4": 64}

_CONVERTED: Final = ("float32", "bfloat16", "float16")
#: itemsize -> what stands for elements that are only moved
_MOVED: Final = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}


def _reductions() -> Iterator[str]:
    for dtype in DTYPES.values():
        for op in ReduceOp:
            if op is not ReduceOp.AVERAGE or dtype.kind in ("float", "complex"):
                yield f"<{dtype.name},{op.value}>"


#: family -> its instances
FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "reduce": tuple(f"combine{each}" for each in _reductions()),
    "pack": (
        *(f"convert<{here},{there}>" for here in _CONVERTED for there in _CONVERTED),
        "convert<float64,float64>",
        *(f"move<{each}>" for each in _MOVED.values()),
    ),
    "wire": tuple(f"{verb}<{each}>" for verb in ("encode", "decode", "decode_add") for each in WIRE_FORMATS),
    "shots": tuple(f"{shot}{each}" for shot in ("one_shot", "two_shot") for each in _reductions()),
}


@cache
def source(family: str) -> str:
    """Return the whole text of a family's source, which includes nothing."""
    files = resources.files("ringreduce.buffers.cuda") / "sources"
    include = '#include "common.cuh"\n'
    text = (files / f"{family}.cu").read_text(encoding="utf-8")
    assert include in text
    common = (files / "common.cuh").read_text(encoding="utf-8").replace("#pragma once\n", "")
    return text.replace(include, common)


def expression(family: str, name: str) -> str:
    """Return the C++ name of an instance: what NVRTC calls a name expression."""
    assert name in FAMILIES[family], (family, name)
    verb, arguments = name.removesuffix(">").split("<")
    if family == "wire":
        kind = "half" if WIRE_FORMATS[arguments] == 1 else "scaled"
        add = {"encode": "", "decode": ",false", "decode_add": ",true"}[verb]
        return f"ringreduce::{verb.removesuffix('_add')}_{kind}<ringreduce::wire::{arguments}{add}>"
    types = ("boolean" if each == "bool" else each for each in arguments.split(","))
    return f"ringreduce::{verb}<{','.join('ringreduce::' + each for each in types)}>"


class Table:
    """An array in device memory that kernels read, such as the addresses of what they work on.

    Args:
        driver: where the memory is.
        values: addresses, or rows of a C-contiguous array.
        stream: may use it at once; others once ``stream`` has come this far.
    """

    def __init__(self, driver: Driver, values: Sequence[int] | npt.NDArray[Any], stream: Stream) -> None:
        rows = values if isinstance(values, np.ndarray) else np.array(values, np.uint64)
        assert len(rows) > 0 and rows.flags.c_contiguous
        self._driver = driver
        self._rows = rows  # which the copy may still read when the driver has returned
        self.count = len(rows)
        self.address = driver.allocate(rows.nbytes)
        driver.copy(self.address, rows.ctypes.data, rows.nbytes, stream)

    def close(self) -> None:
        """Free the memory."""
        self._driver.free(self.address)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some addresses of a table, one after the other.

    Attributes:
        address: where they lie, in device memory.
        count: how many there are.
    """

    address: int
    count: int

    @classmethod
    def of(cls, table: Table, first: int, count: int) -> Rows:
        """Return ``count`` addresses of a table from number ``first`` on."""
        assert first + count <= table.count
        return cls(table.address + 8 * first, count)


def combine(
    driver: Driver,
    dtype: DType,
    op: ReduceOp,
    sources: Table | Rows,
    targets: Table | Rows,
    count: int,
    size: int,
    stream: Stream,
) -> None:
    """Reduce arrays of ``dtype``, in the order of the table, into all targets; a target may be one of the sources.

    Args:
        driver: of the GPU that does it.
        dtype: of all arrays; 16-bit floats are accumulated in float32.
        op: no average of integers or bools.
        sources: addresses of arrays of ``count`` elements.
        targets: as ``sources``.
        count: elements of each array.
        size: what an average is divided by.
        stream: on which the sources are ready.
    """
    if count == 0:
        return
    _launch(
        driver,
        ("reduce", f"combine<{dtype.name},{op.value}>"),
        _grid(driver, _ceil(count * dtype.itemsize, 16)),
        (sources.address, np.uint32(sources.count), targets.address, np.uint32(targets.count)),
        (np.uint64(count), np.uint32(size)),
        stream,
    )


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor and its place in a buffer.

    Attributes:
        tensor: its address.
        place: the address in the buffer.
        count: elements.
    """

    tensor: int
    place: int
    count: int


class Packer:
    """Copies many tensors into a buffer, and back, with one launch each.

    Args:
        driver: of the GPU that has them.
        slots: where the tensors are and where they go. Nothing overlaps, except that a tensor may be its own place if
            both types are equally wide.
        tensor_dtype: of all tensors.
        buffer_dtype: of the buffer; the same, or both are among float32, bfloat16 and float16.
        stream: may use the packer at once; others once ``stream`` has come this far.
    """

    def __init__(
        self, driver: Driver, slots: Sequence[Slot], tensor_dtype: DType, buffer_dtype: DType, stream: Stream
    ) -> None:
        self._driver = driver
        self._dtypes = tensor_dtype, buffer_dtype
        slots = [slot for slot in slots if slot.count > 0]
        self._tables = []
        self._nchunks = 0
        if slots:
            chunks = _chunks(slots, _CHUNK_NBYTES // max(tensor_dtype.itemsize, buffer_dtype.itemsize))
            self._nchunks = len(chunks)
            there = np.array([(slot.tensor, slot.place, slot.count) for slot in slots], np.uint64)
            back = np.ascontiguousarray(there[:, [1, 0, 2]])
            self._tables = [Table(driver, rows, stream) for rows in (there, back, chunks)]

    def pack(self, stream: Stream, scale: float = 1.0) -> None:
        """Write the tensors' elements, multiplied by ``scale``, into the buffer; only floats are scaled."""
        self._copy(*self._dtypes, direction=0, scale=scale, stream=stream)

    def unpack(self, stream: Stream, scale: float = 1.0) -> None:
        """Write the buffer's elements, multiplied by ``scale``, into the tensors."""
        here, there = self._dtypes
        self._copy(there, here, direction=1, scale=scale, stream=stream)

    def close(self) -> None:
        """Free the tables, once no stream uses them any more."""
        for table in self._tables:
            table.close()
        self._tables, self._nchunks = [], 0

    def _copy(self, here: DType, there: DType, *, direction: int, scale: float, stream: Stream) -> None:
        if self._nchunks == 0:
            return
        moved = here == there and scale == 1.0
        name = f"move<{_MOVED[here.itemsize]}>" if moved else f"convert<{here.name},{there.name}>"
        grid = min(self._nchunks, self._driver.device.multiprocessors * _BLOCKS_EACH)
        tables = self._tables[direction].address, self._tables[2].address, np.uint32(self._nchunks)
        _launch(self._driver, ("pack", name), grid, tables, () if moved else (np.float64(scale),), stream)


def _chunks(slots: Sequence[Slot], length: int) -> npt.NDArray[Any]:
    """Return the parts that blocks take: (piece, length, first), as ``struct Chunk`` in sources/pack.cu."""
    counts = np.array([slot.count for slot in slots], np.int64)
    parts = -(-counts // length)
    pieces = np.repeat(np.arange(len(slots)), parts)
    firsts = (np.arange(len(pieces)) - np.repeat(np.cumsum(parts) - parts, parts)) * length
    chunks = np.empty(len(pieces), [("piece", np.uint32), ("length", np.uint32), ("first", np.uint64)])
    chunks["piece"] = pieces
    chunks["length"] = np.minimum(counts[pieces] - firsts, length)
    chunks["first"] = firsts
    return chunks


def encode(driver: Driver, wire_format: str, source: int, target: int, count: int, stream: Stream) -> None:
    """Write the encoding of ``count`` float32 values, byte for byte as the codec of that name does.

    Args:
        driver: of the GPU that does it.
        wire_format: a key of ``WIRE_FORMATS``.
        source: address of the values, a multiple of 4.
        target: address of the codec's ``nbytes(count)`` bytes, a multiple of 2; they do not overlap the values.
        count: of the values.
        stream: on which the values are ready.
    """
    _wire(driver, f"encode<{wire_format}>", source, target, count, stream)


def decode(
    driver: Driver, wire_format: str, source: int, target: int, count: int, stream: Stream, *, add: bool = False
) -> None:
    """Overwrite ``count`` float32 values with what the bytes at ``source`` stand for, or add that to them.

    Arguments are as for `encode`, with the values at ``target``. A NaN arrives as some NaN.
    """
    verb = "decode_add" if add else "decode"
    _wire(driver, f"{verb}<{wire_format}>", source, target, count, stream)


def _wire(driver: Driver, name: str, source: int, target: int, count: int, stream: Stream) -> None:
    values, encoded = (source, target) if name.startswith("encode") else (target, source)
    assert values % 4 == 0 and encoded % 2 == 0, (values, encoded)
    if count == 0:
        return
    block = WIRE_FORMATS[name.removesuffix(">").split("<")[1]]
    threads = _ceil(count, 8) if block == 1 else _ceil(count, block) * 32
    _launch(driver, ("wire", name), _grid(driver, threads), (source, target), (np.uint64(count),), stream)


@dataclass(frozen=True, slots=True)
class Peers:
    """What kernels that meet their peers know: ranks of one node, each with a GPU of its own.

    Attributes:
        rank: this one's number.
        flags: the ranks' areas of ``FLAGS_NBYTES``, in rank order, as this rank reaches them.
        scratch: the ranks' areas of ``SCRATCH_NBYTES``, likewise.
        error: the address of this rank's error word, a uint32 that begins as 0. After a launch it may be 1 + the number
            of a peer that did not come in time; results are undefined then, and the areas are of no use any more.
        timeout_s: how long a kernel waits for its peers, in seconds.
    """

    rank: int
    flags: Table
    scratch: Table
    error: int
    timeout_s: float

    @property
    def count(self) -> int:
        """The number of ranks."""
        assert self.flags.count == self.scratch.count <= MAX_RANKS
        return self.flags.count

    def arguments(self, count: int, size: int) -> tuple[object, ...]:
        """Return what kernels take after their arrays, for ``count`` elements and ``size`` ranks in an average."""
        place = self.flags.address, np.uint32(self.rank), np.uint32(self.count)
        return (*place, np.uint64(count), np.uint32(size), np.uint64(round(self.timeout_s * 1e9)), self.error)


def two_shot(
    driver: Driver,
    dtype: DType,
    op: ReduceOp,
    peers: Peers,
    sources: Table,
    targets: Table,
    count: int,
    size: int,
    stream: Stream,
) -> None:
    """Allreduce arrays that all ranks can reach; collective, with the same arguments but for the addresses.

    Args:
        driver: of this rank's GPU.
        dtype: of all arrays.
        op: no average of integers or bools.
        peers: the ranks, and how to meet them.
        sources: the ranks' arrays of ``count`` elements, in rank order, as this rank reaches them.
        targets: likewise; they may be the sources.
        count: elements of each array.
        size: what an average is divided by.
        stream: on which this rank's source is ready.
    """
    assert sources.count == targets.count == peers.count
    if count == 0:
        return
    grid = min(_ceil(count * dtype.itemsize, 16 * _BLOCK * peers.count), _TWO_SHOT_BLOCKS)
    arguments = peers.arguments(count, size)
    name = f"two_shot<{dtype.name},{op.value}>"
    _launch(driver, ("shots", name), grid, (sources.address, targets.address), arguments, stream)


def one_shot(
    driver: Driver,
    dtype: DType,
    op: ReduceOp,
    peers: Peers,
    source: int,
    target: int,
    count: int,
    size: int,
    stream: Stream,
) -> None:
    """Allreduce small arrays of any device memory, which may be the same; otherwise as `two_shot`.

    The arrays have ``ONE_SHOT_NBYTES`` at most.
    """
    assert count * dtype.itemsize <= ONE_SHOT_NBYTES
    if count == 0:
        return
    arguments = (peers.scratch.address, *peers.arguments(count, size))
    name = f"one_shot<{dtype.name},{op.value}>"
    _launch(driver, ("shots", name), _ceil(count * dtype.itemsize, _SHOT_NBYTES), (source, target), arguments, stream)


def _launch(
    driver: Driver,
    kernel: tuple[str, str],
    grid: int,
    arrays: tuple[object, ...],
    others: tuple[object, ...],
    stream: Stream,
) -> None:
    driver.kernel(*kernel).launch(grid, _BLOCK, (*arrays, *others), stream)


def _grid(driver: Driver, threads: int) -> int:
    """Return the blocks for so many threads, or as many as the device is given."""
    return min(_ceil(threads, _BLOCK), driver.device.multiprocessors * _BLOCKS_EACH)


def _ceil(count: int, unit: int) -> int:
    return -(-count // unit)
