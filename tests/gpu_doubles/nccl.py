"""NCCL that is not there: what connects drivers of `gpu_doubles.driver`, and waits for peers as NCCL does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpu_doubles.driver import HostDriver
from ringreduce.buffers import DTYPES, DType
from ringreduce.common.errors import TransportError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.cupy_driver import Arithmetic, Stream, reduced
from ringreduce.gpu.nccl import Nccl, NcclRanks, code_of_dtype, code_of_op

_NEWEST = 23000
_BY_CODE: dict[int | None, DType] = {code_of_dtype(dtype, _NEWEST): dtype for dtype in DTYPES.values()}
_OPS: dict[int | None, ReduceOp] = {code_of_op(op, DTYPES["float32"], _NEWEST): op for op in ReduceOp}
_OPS |= {code_of_op(op, DTYPES["int32"], _NEWEST): op for op in (ReduceOp.MIN, ReduceOp.MAX)}


@dataclass(eq=False, slots=True)
class _Call:
    """What the ranks bring to one collective: they must say the same."""

    said: list[object] = field(default_factory=list)
    sources: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Group:
    """The ranks that found each other."""

    meeting: threading.Barrier
    calls: dict[int, _Call] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class HostNccl(Nccl):
    """A `ringreduce.gpu.nccl.Nccl` of one rank.

    Its collectives are kernels of the driver that wait for their peers', so they are late, take part in the order of
    streams, and may not run where ranks share a GPU. The n-th call of each rank must say the same.

    Args:
        driver: of the rank's GPU; what is asked for goes to its log, too.
        groups: what the ranks of a test share; empty at first.

    Attributes:
        fails: the steps that fail: ``"unique_id"``, ``"connect"``.
        problem: what `NcclRanks.error` reports.
    """

    def __init__(self, driver: HostDriver, groups: dict[bytes, _Group]) -> None:
        self.driver = driver
        self.version = 22705
        self.fails: set[str] = set()
        self.problem: str | None = None
        self._groups = groups

    def unique_id(self) -> bytes:
        self.driver.log.append("nccl unique_id")
        self.may_fail("unique_id")
        return bytes(range(256))[-128:]

    def connect(self, size: int, unique_id: bytes, rank: int) -> _HostRanks:
        self.driver.log.append(f"nccl connect {rank} of {size}")
        self.may_fail("connect")
        assert len(unique_id) == 128
        group = self._groups.setdefault(unique_id, _Group(threading.Barrier(size)))
        try:
            group.meeting.wait(20.0)
        except threading.BrokenBarrierError:
            raise TransportError("the others did not come") from None
        return _HostRanks(self, group, size, rank)

    def may_fail(self, step: str) -> None:
        """Fail if this step was told to."""
        if step in self.fails:
            raise TransportError(f"NCCL was told to fail to {step}")


class _HostRanks(NcclRanks):
    def __init__(self, nccl: HostNccl, group: _Group, size: int, rank: int) -> None:
        self._nccl, self._group, self._size, self._rank = nccl, group, size, rank
        self._ncalls = 0
        self._aborted = False
        self._ended = False

    def allreduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: Stream) -> None:
        assert not self._aborted
        number = self._ncalls
        self._ncalls += 1
        row, kind = _BY_CODE[dtype], _OPS[op]

        def run() -> Iterator[None]:
            with self._group.lock:
                call = self._group.calls.setdefault(number, _Call())
                call.said.append((count, dtype, op))
                assert len(set(call.said)) == 1, f"call {number} differs between ranks: {call.said}"
                call.sources[self._rank] = self._nccl.driver.view(source, count * row.itemsize).copy()
            while len(call.sources) < self._size:
                if self._aborted:
                    return
                yield
            arrays = [call.sources[rank].view(row.storage) for rank in range(self._size)]
            with np.errstate(all="ignore"):
                result = reduced(np, arrays, Arithmetic(row, kind, count), self._size).view(np.uint8)
            self._nccl.driver.view(target, count * row.itemsize)[:] = result

        self._nccl.driver.launch(f"nccl {row.name} {kind.value} {count}", run, stream)

    def error(self) -> str | None:
        return self._nccl.problem

    def abort(self) -> None:
        self._nccl.driver.log.append("nccl abort")
        self._aborted = self._ended = True

    def close(self) -> None:
        self._nccl.driver.log.append("nccl close")
        self._ended = True

    def __del__(self) -> None:
        assert self._ended, "CuPy destroys what nobody closed or aborted, and NCCL waits for all ranks to do so"
