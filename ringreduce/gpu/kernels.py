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
from typing import Final

import numpy as np

from ringreduce.buffers.device_driver import Driver, Kernel, Stream
from ringreduce.buffers.dtypes import DTYPES, DType
from ringreduce.common.reduce_ops import ReduceOp

__all__ = [
    "FAMILIES",
    "FEWEST_MULTIPROCESSORS",
    "FLAGS_NBYTES",
    "MAX_BLOCKS",
    "MAX_RANKS",
    "ONE_SHOT_NBYTES",
    "OPTIONS",
    "SCRATCH_NBYTES",
    "Arithmetic",
    "Peers",
    "Rows",
    "Table",
    "combine",
    "expression",
    "one_shot",
    "source",
    "two_shot",
]

#: Threads of a block, in every kernel.
_BLOCK: Final = 512
#: Blocks that a multiprocessor is given at most; larger arrays are done in turns.
_BLOCKS_EACH: Final = 4

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


def _reductions() -> Iterator[str]:
    for dtype in DTYPES.values():
        for op in ReduceOp:
            if op is not ReduceOp.AVERAGE or dtype.kind in ("float", "complex"):
                yield f"<{dtype.name},{op.value}>"


#: family -> its instances
FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "reduce": tuple(f"combine{each}" for each in _reductions()),
    "shots": tuple(f"{shot}{each}" for shot in ("one_shot", "two_shot") for each in _reductions()),
}


@cache
def source(family: str) -> str:
    """Return the whole text of a family's source, which includes nothing."""
    files = resources.files("ringreduce.gpu") / "sources"
    include = '#include "common.cuh"\n'
    text = (files / f"{family}.cu").read_text(encoding="utf-8")
    assert include in text
    common = (files / "common.cuh").read_text(encoding="utf-8").replace("#pragma once\n", "")
    return text.replace(include, common)


def expression(family: str, name: str) -> str:
    """Return the C++ name of an instance: what NVRTC calls a name expression."""
    assert name in FAMILIES[family], (family, name)
    verb, arguments = name.removesuffix(">").split("<")
    types = ("boolean" if each == "bool" else each for each in arguments.split(","))
    return f"ringreduce::{verb}<{','.join('ringreduce::' + each for each in types)}>"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What is done to how many elements.

    Attributes:
        dtype: of the arrays; 16-bit floats are accumulated in float32.
        op: no average of integers or bools.
        count: elements of each array.
    """

    dtype: DType
    op: ReduceOp
    count: int

    @property
    def nbytes(self) -> int:
        """Of each array."""
        return self.count * self.dtype.itemsize

    def compile(self, driver: Driver, family: str, kernel: str) -> Kernel:
        """Return a kernel's instance for this; compiled when it is first asked for."""
        return driver.kernel(family, f"{kernel}<{self.dtype.name},{self.op.value}>")


@dataclass(eq=False)
class Rows:
    """Addresses of arrays, one after the other, in device memory, for kernels to read.

    Attributes:
        address: where they are.
        count: how many there are.
    """

    address: int
    count: int

    def part(self, first: int, count: int) -> Rows:
        """Return ``count`` of them from number ``first`` on."""
        assert first + count <= self.count
        return Rows(self.address + 8 * first, count)


class Table(Rows):
    """Rows in device memory of their own.

    Args:
        driver: where the memory is.
        addresses: one at least.
        stream: may use them at once; others once ``stream`` has come this far.
    """

    def __init__(self, driver: Driver, addresses: Sequence[int], stream: Stream) -> None:
        content = np.array(addresses, np.uint64)
        assert len(content) > 0
        self._driver = driver
        self._content = content  # which the copy may still read when the driver has returned
        super().__init__(driver.allocate(content.nbytes), len(content))
        driver.copy(self.address, content.ctypes.data, content.nbytes, stream)

    def close(self) -> None:
        """Free the memory."""
        self._driver.free(self.address)


def combine(driver: Driver, reduction: Arithmetic, sources: Rows, targets: Rows, size: int, stream: Stream) -> None:
    """Reduce arrays, in the order of the rows, into all targets; a target may be one of the sources.

    Args:
        driver: of the GPU that does it.
        reduction: what is done.
        sources: the arrays.
        targets: as ``sources``.
        size: what an average is divided by.
        stream: on which the sources are ready.
    """
    arrays = sources.address, np.uint32(sources.count), targets.address, np.uint32(targets.count)
    # As many threads as there are 16 bytes, or as many blocks as the device is given.
    grid = min(_ceil(reduction.nbytes, 16 * _BLOCK), driver.device.multiprocessors * _BLOCKS_EACH)
    counts = np.uint64(reduction.count), np.uint32(size)
    if reduction.count:
        reduction.compile(driver, "reduce", "combine").launch(grid, _BLOCK, (*arrays, *counts), stream)


@dataclass(frozen=True, slots=True)
class Peers:
    """What kernels that wait for their peers' know: ranks of one node, each with a GPU of its own.

    Attributes:
        rank: this one's number.
        flags: the ranks' areas of ``FLAGS_NBYTES``, in rank order, as this rank reaches them.
        scratch: the ranks' areas of ``SCRATCH_NBYTES``, likewise.
        error: the address of this rank's error word, a uint32 that begins as 0. After a launch it may be 1 + the number
            of a peer that did not come in time; results are undefined then, and the areas are of no use any more.
        timeout_s: how long a kernel waits for its peers, in seconds.
    """

    rank: int
    flags: Rows
    scratch: Rows
    error: int
    timeout_s: float

    @property
    def count(self) -> int:
        """The number of ranks."""
        assert self.flags.count == self.scratch.count <= MAX_RANKS
        return self.flags.count

    def arguments(self, count: int) -> tuple[object, ...]:
        """Return what kernels take after their arrays of ``count`` elements; averages are over the ranks."""
        place = self.flags.address, np.uint32(self.rank), np.uint32(self.count)
        return (*place, np.uint64(count), np.uint32(self.count), np.uint64(round(self.timeout_s * 1e9)), self.error)


def two_shot(driver: Driver, reduction: Arithmetic, peers: Peers, sources: Rows, targets: Rows, stream: Stream) -> None:
    """Allreduce arrays that all ranks can reach; collective, with the same arguments but for the addresses.

    Args:
        driver: of this rank's GPU.
        reduction: what is done.
        peers: the ranks, and how to wait for them.
        sources: the ranks' arrays, in rank order, as this rank reaches them.
        targets: likewise; they may be the sources.
        stream: on which this rank's source is ready.
    """
    assert sources.count == targets.count == peers.count
    grid = min(_ceil(reduction.nbytes, 16 * _BLOCK * peers.count), _TWO_SHOT_BLOCKS)
    arguments = sources.address, targets.address, *peers.arguments(reduction.count)
    if reduction.count:
        reduction.compile(driver, "shots", "two_shot").launch(grid, _BLOCK, arguments, stream)


def one_shot(driver: Driver, reduction: Arithmetic, peers: Peers, source: int, target: int, stream: Stream) -> None:
    """Allreduce small arrays of any device memory, which may be the same; otherwise as `two_shot`.

    The arrays have ``ONE_SHOT_NBYTES`` at most.
    """
    assert reduction.nbytes <= ONE_SHOT_NBYTES
    arguments = source, target, peers.scratch.address, *peers.arguments(reduction.count)
    grid = _ceil(reduction.nbytes, _SHOT_NBYTES)
    if reduction.count:
        reduction.compile(driver, "shots", "one_shot").launch(grid, _BLOCK, arguments, stream)


def _ceil(count: int, unit: int) -> int:
    return -(-count // unit)
