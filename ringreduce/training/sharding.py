"""One copy of the parameters per node, of which each rank reduces, updates and keeps the state of a part.

Plain data parallelism keeps parameters and the state of the optimizer on every rank. Here the parameters of a bucket
lie in memory of the node, each where its gradient lies in the bucket, and the bucket is cut into a part for each rank
of the node. In a step

1. every rank has its gradients in its bucket; no rank reads parameters any more,
2. each rank reduces its part of the bucket, where it is, from the buckets of all ranks,
3. each rank updates its part of the parameters, with a copy of the optimizer that has only these,
4. the ranks meet: all parts are written.

Between nodes whole buckets are allreduced; every node holds all parameters. What the ranks keep is that of
S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020), stage 1, but
for the parameters, of which a node has one copy and not as many as ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.partition import Partition
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.engine import CollectiveOp, Operation, Refusal
from ringreduce.training.agreement import Ranks
from ringreduce.training.buckets import ALIGNMENT_NBYTES, Bucket, Buckets
from ringreduce.training.framework import InPlace, Memory
from ringreduce.training.requests import dtype_name

_Bytes = npt.NDArray[np.uint8]

#: Of the pieces of parameters whose checksums are compared.
_LEAST_NBYTES, _MOST_NBYTES = 4 << 10, 64 << 10


class Shard:
    """The parameters of a bucket in memory of the node, and this rank's part of them.

    Args:
        bucket: of their gradients.
        memory: of the node, laid out like the bucket.
        views: the parameters there.
        own: this rank's part, in elements.

    Attributes:
        bucket, memory, views, own: the arguments.
    """

    __slots__ = ("bucket", "memory", "own", "views")

    def __init__(self, bucket: Bucket, memory: _Bytes, views: Sequence[Any], own: slice) -> None:
        self.bucket, self.memory, self.views, self.own = bucket, memory, views, own


class Sharding:
    """Divides the parameters of one optimizer, and what it does with them, among the ranks of each node.

    Args:
        memory: the gradients'.
        ranks: carry operations out.
        buckets: of the gradients.

    Attributes:
        is_first: whether this rank is the first of its node.
        shards: of the buckets that there are.
        changes: how often these have changed.
        parts_only: whether the next reduction is for this rank's part alone, and leaves the rest as it comes.
    """

    def __init__(self, memory: Memory, ranks: Ranks, buckets: Buckets) -> None:
        assert isinstance(memory, InPlace)
        self._memory, self._ranks, self._buckets = memory, ranks, buckets
        communicator = ranks.engine.communicator
        self._members = communicator.topology.node_of(communicator.rank)
        self._single_node = communicator.topology.single_node
        self._rows: dict[int, tuple[Any, Any, Any]] = {}
        self._watched: tuple[_Bytes, int] | None = None  # a piece of the parameters, and its checksum
        self._at = 0  # where it was, in bytes of this rank's parts
        self.is_first = self._members[0] == ranks.rank
        self.shards: list[Shard] = []
        self.changes = 0
        self.parts_only = False

    def update(self) -> None:
        """Move the parameters of new buckets to memory of the node. Collective."""
        known = {id(each.bucket): each for each in self.shards}
        self.shards = [known[id(bucket)] if id(bucket) in known else self._moved(bucket) for bucket in self._buckets]
        self._rows.clear()
        self._watched = None
        self.changes += 1

    def _moved(self, bucket: Bucket) -> Shard:
        parameters, itemsize, count = [slot.parameter for slot in bucket.slots], bucket.itemsize, len(bucket.flat)
        memory = self.node_memory(count * itemsize)
        views = self.views(bucket, memory)
        if self.is_first:
            self._memory.pack(views, parameters)
        self.meet("moved")
        self._memory.move(parameters, views)
        return Shard(bucket, memory, views, self._part(count, _line(bucket)))

    def views(self, bucket: Bucket, memory: _Bytes, like: Any = None) -> list[Any]:
        """Return arrays like the parameters of a bucket in memory that is laid out like it.

        Args:
            bucket: gives the layout, in elements.
            memory: of any itemsize.
            like: an array of the dtype that they shall have; None: that of the parameters.
        """
        itemsize = memory.nbytes // len(bucket.flat)
        return [
            self._memory.view(slot.parameter, memory[place.start * itemsize : place.stop * itemsize], like)
            for slot, place in zip(bucket.slots, bucket.places, strict=True)
        ]

    def _part(self, count: int, line: int) -> slice:
        """Return this rank's part of so many elements, in whole cache lines."""
        lines = Partition.first_larger(count // line, len(self._members)).segment[self._members.index(self._ranks.rank)]
        return slice(lines.start * line, lines.stop * line)

    def node_memory(self, nbytes: int) -> _Bytes:
        """Return memory that the ranks of the node have in common. Collective."""
        text = f"{nbytes} bytes of each node for {self._ranks.name}"
        run = CollectiveOp(f"{self._ranks.name}, memory", text, lambda ranks: ranks.node_memory(nbytes))
        return self._ranks.run(run)  # type: ignore[no-any-return]

    def watch(self) -> None:
        """Remember a checksum of a piece of this rank's parts, another piece each time. Local.

        The next time that all have been remembered, any write was seen. A piece is at most a hundredth of them.
        """
        parts = [shard.memory[_bytes(shard)] for shard in self.shards]
        total = sum(part.nbytes for part in parts)
        length = max(_LEAST_NBYTES, min(total // 100, _MOST_NBYTES))
        self._at = self._at + length if self._at + length < total else 0
        start = self._at
        for part in parts:
            if start < part.nbytes:
                piece = part[start : start + length]
                self._watched = piece, zlib.crc32(piece.data)
                return
            start -= part.nbytes

    @property
    def overwritten(self) -> bool:
        """Whether somebody has written to the piece that `watch` has remembered."""
        return self._watched is not None and zlib.crc32(self._watched[0].data) != self._watched[1]

    def refuse(self, error: Exception) -> None:
        """Let the step fail on the other ranks, with this error as the reason."""
        self._ranks.engine.refuse(Refusal(f"{self._ranks.name}, step", "step", error))

    def meet(self, what: str) -> None:
        """Wait until all ranks have come here. Collective."""
        text = f"{self._ranks.name}, {what}"
        self._ranks.run(CollectiveOp(text, text, lambda ranks: ranks.barrier()))

    def operation(
        self, name: str, text: str, op: ReduceOp, buckets: Sequence[Bucket], sent: Sequence[Any]
    ) -> Operation | None:
        """Return the reduction of this rank's parts of buckets; None: all of them are to be reduced.

        Arguments as for `Buckets.operation`. Between nodes all of a bucket is reduced.
        """
        if not (self.parts_only and self._single_node):
            return None
        parts = [self._rows_of(flat, _line(bucket)) for flat, bucket in zip(sent, buckets, strict=True)]

        def run(ranks: Communicator) -> None:
            for rows, own in parts:
                ranks.reduce_scatter(rows, op, out=own)

        lengths = ", ".join(f"{len(rows)} x {rows.shape[1]} {dtype_name(rows.dtype)}" for rows, _ in parts)
        return CollectiveOp(name, f"{text}, {op.value} in parts of {lengths}", run)

    def _rows_of(self, flat: Any, line: int) -> tuple[Any, Any]:
        """Return a bucket as rows of one cache line, and this rank's rows; the same objects each time."""
        known = self._rows.get(id(flat))
        if known is None or known[0] is not flat:
            own, rows = self._part(len(flat), line), flat.reshape(-1, line)
            known = self._rows[id(flat)] = flat, rows, rows[own.start // line : own.stop // line]
        return known[1:]


def _line(bucket: Bucket) -> int:
    """Return how many elements are in a cache line."""
    return ALIGNMENT_NBYTES // bucket.itemsize


def _bytes(shard: Shard) -> slice:
    """Return where this rank's part is in the memory of a shard."""
    return slice(shard.own.start * shard.bucket.itemsize, shard.own.stop * shard.bucket.itemsize)
