"""One copy of the parameters per node, of which each rank reduces, updates and keeps the state of a part.

Plain data parallelism keeps parameters and the state of the optimizer on every rank. Here the parameters of a bucket
lie in memory of the node, each where its gradient lies in the bucket, and the bucket is cut into a part for each rank
of the node, or of all nodes: anywhere if the optimizer treats each element by itself, else between parameters.
In a step

1. every rank has its gradients in its bucket; no rank reads parameters any more,
2. each rank reduces its part of the bucket, where it is, from the buckets of all ranks,
3. each rank updates its part of the parameters, with a copy of the optimizer that has only these,
4. where the parts are of all nodes, the ranks fetch those of other nodes, each from one rank of every node,
5. the ranks meet: all parts are written.

Where the parts are of one node, whole buckets are allreduced between nodes. What the ranks keep is that of
S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020), stage 1, but
for the parameters, of which a node has one copy and not as many as ranks.
"""

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from itertools import accumulate, pairwise
from time import perf_counter, sleep
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError, MismatchError
from ringreduce.common.partition import Partition
from ringreduce.common.reduce_ops import MAX, SUM, ReduceOp
from ringreduce.engine import CollectiveOp, InPlaceAllreduce, Needed, Refusal
from ringreduce.runtime import group
from ringreduce.training.binding.framework import InPlace, Memory
from ringreduce.training.calls.requests import dtype_name
from ringreduce.training.gradients.buckets import ALIGNMENT_NBYTES, Bucket, Buckets, padded
from ringreduce.training.gradients.record import OptimizerRanks, Record
from ringreduce.training.gradients.uncleared import Uncleared
from ringreduce.training.options.options import Options
from ringreduce.training.strategies.strategy import Partner

_Bytes = npt.NDArray[np.uint8]
_Key = tuple[int, str]

#: Of the pieces of parameters whose checksums are compared.
_LEAST_NBYTES = 4 << 10
_MOST_NBYTES = 64 << 10

#: For how long a rank waits for others that may not come, and how long between two looks.
_PATIENCE_S = 5.0
_NAP_S = 1e-4


class ParameterShard:
    """The parameters of a bucket in memory of the node, and this rank's part of them.

    Attributes:
        bucket: of their gradients.
        memory: of the node, laid out like the bucket.
        views: the parameters there.
        bounds: of the parts, in elements.
        own: this rank's part.
    """

    def __init__(self, bucket: Bucket, memory: _Bytes, views: Sequence[Any], bounds: Sequence[int], index: int) -> None:
        self.bucket = bucket
        self.memory = memory
        self.views = views
        self.bounds = bounds
        self._is_first = index == 0
        self.own = slice(bounds[index], bounds[index + 1])

    def part(self, index: int) -> _Bytes:
        """Return the memory of a part."""
        itemsize = self.bucket.itemsize
        return self.memory[self.bounds[index] * itemsize : self.bounds[index + 1] * itemsize]

    def owns(self, number: int) -> bool:
        """Return whether a parameter that is not cut is this rank's, given its number in the bucket.

        One without elements at the end of the bucket is in no part; it is that of the first rank.
        """
        start = self.bucket.places[number].start
        return self.own.start <= start < self.own.stop if start < self.bounds[-1] else self._is_first

    def within(self, number: int) -> slice:
        """Return this rank's part of a parameter, given its number in the bucket: elements in their order in memory."""
        start = self.bucket.places[number].start
        count = math.prod(self.views[number].shape)
        first = min(max(self.own.start - start, 0), count)
        return slice(first, max(first, min(self.own.stop - start, count)))


class NodeRanks:
    """The ranks of one optimizer that have parameters in memory of their node, and what they do together.

    Args:
        ranks: carry operations out.
        options: say how the parameters are divided.

    Attributes:
        ranks: the argument.
        is_disjoint: whether all ranks have different parts; if not, those of different nodes have the same.
        has_all_state: whether a node has all state.
        divides_state: whether that is so by chance alone, as all ranks are on one node.
        is_first: whether this rank is the first of its node.
        node_index, node_size: this rank among those of its node, and how many they are.
        lane: this rank's with those that fetch parts of other nodes from it; None: all have all of them.
        peers: the ranks of the lane: one of each node.
    """

    def __init__(self, ranks: OptimizerRanks, options: Options) -> None:
        self.ranks = ranks
        communicator = ranks.engine.communicator
        topology = communicator.topology
        self._members = topology.node_of(communicator.rank)
        self._nodes = topology.nodes
        self.has_all_state = options.shard == "node" or topology.single_node
        self.divides_state = options.shard == "all"
        self.is_disjoint = options.shard == "all" or topology.single_node
        self.node_index = self._members.index(ranks.rank)
        self.node_size = len(self._members)
        self.is_first = self.node_index == 0
        self.lane: Communicator | None = None
        self.peers: list[int] = []
        self._flag = communicator.empty(1, np.uint8)

    def connect(self, ranks: Sequence[int]) -> None:
        """Connect each rank with those that fetch parts of other nodes from it. Collective.

        Args:
            ranks: of the world, in the order of their numbers here.
        """
        if not self.has_all_state:
            self.peers = [node[self.node_index] for node in self._nodes]
            self.lane = group([ranks[peer] for peer in self.peers]).communicator

    def node_memory(self, nbytes: int) -> _Bytes:
        """Return memory that the ranks of the node have in common; maybe none. Collective."""
        if not nbytes:
            return np.empty(0, np.uint8)
        text = f"{nbytes} bytes of each node"
        return self._run("memory", lambda ranks: ranks.node_memory(nbytes), text)  # type: ignore[no-any-return]

    def refuse(self, error: Exception, what: str = "step") -> None:
        """Let the step fail on the other ranks, with this error as the reason.

        Args:
            error: why this rank cannot go on.
            what: the call of the step that the other ranks make, or are about to.
        """
        self.ranks.engine.refuse(Refusal(f"{self.ranks.name}, {what}", "step", error))

    def allocate(self, needed: Mapping[_Key, tuple[int, Any]]) -> tuple[_Bytes, dict[_Key, tuple[_Bytes, Any]]]:
        """Return memory of the node for state that some rank has made. Collective.

        Args:
            needed: bytes and a description of what this rank has made, by the number of the parameter and a name.

        Returns:
            Memory for all that any rank has made; and for each its part of that, with the description.
        """
        mine = np.frombuffer(pickle.dumps(needed), np.uint8)
        everyone = BytesIO(self.ranks.allgather(mine.reshape(-1, 1)))
        wanted = dict[_Key, tuple[int, Any]]()
        for _ in range(self.ranks.size):
            wanted |= pickle.load(everyone)
        lengths = [padded(nbytes) for nbytes, _ in wanted.values()]
        memory = self.node_memory(sum(lengths))
        places = Partition.of_sizes(lengths).segment
        return memory, {
            key: (memory[place][:nbytes], description)
            for place, (key, (nbytes, description)) in zip(places, wanted.items(), strict=True)
        }

    def norms(self, local: Sequence[float], order: float) -> list[float]:
        """Return the norms of vectors of which each rank has parts, given those of its parts. Collective."""
        totals = np.array(local, np.float64)
        op = MAX if order == np.inf else SUM
        if op is SUM:
            totals **= order
        self._run("norm", lambda ranks: ranks.allreduce(totals, op, out=totals), f"of order {order}")
        return (totals if op is MAX else totals ** (1 / order)).tolist()  # type: ignore[no-any-return]

    def exchange(self, mine: Mapping[_Key, tuple[int, _Bytes]]) -> list[tuple[_Key, int, _Bytes]]:
        """Return what the ranks of the lane pass: by a key, where something begins, and bytes. Collective."""
        lane = self.lane
        if lane is None:
            return []  # the ranks of the node have stored all
        headers = pickle.dumps([(key, start, part.nbytes) for key, (start, part) in mine.items()])
        data = np.concatenate([np.empty(0, np.uint8), *(part for _, part in mine.values())])

        def run(_: Communicator) -> tuple[list[tuple[_Key, int, int]], _Bytes]:
            everyone: Any = lane.allgather(np.frombuffer(headers, np.uint8))
            file = BytesIO(everyone)
            parts = [part for _ in self.peers for part in pickle.load(file)]
            # Not communication memory, which stays for the next results of this size.
            received = np.empty(sum(nbytes for *_, nbytes in parts), np.uint8)
            return parts, lane.allgather(data, out=received)

        parts, received = self._run("exchanged", run)
        places = Partition.of_sizes([nbytes for *_, nbytes in parts]).segment
        return [(key, start, received[place]) for (key, start, _), place in zip(parts, places, strict=True)]

    def begin(self, call: str) -> None:
        """Begin a call that all ranks make between two steps. Collective.

        Raises:
            ConfigError: other ranks do not make it within 5 s, or make a step; these get a `MismatchError`.
        """
        engine = self.ranks.engine
        name = f"{self.ranks.name}, step"
        until_s = perf_counter() + _PATIENCE_S
        operation = InPlaceAllreduce(name, f"{call} of {self.ranks.name}", MAX, [self._flag], needed=Needed.SOME)
        engine.submit(operation)
        while not engine.poll(operation) and perf_counter() < until_s:
            sleep(_NAP_S)
        refused = f'with shard="all" {call} is to be called on all ranks, and others'
        if not engine.settle(operation):
            raise ConfigError(f"{refused} have not called it within {_PATIENCE_S:.0f} s")
        try:
            engine.wait(operation)
        except MismatchError as error:
            made_a_step = ConfigError(f"{refused} make a step")
            self.refuse(made_a_step)
            raise made_a_step from error

    def meet(self, what: str) -> None:
        """Wait until all ranks have come here. Collective."""
        self._run(what, lambda ranks: ranks.barrier())

    def _run(self, what: str, run: Callable[[Communicator], Any], argument: str = "") -> Any:
        """Make calls of all ranks, in the order of the program; ``argument`` must agree. Collective."""
        name = f"{self.ranks.name}, {what}"
        return self.ranks.run(CollectiveOp(name, f"{name} {argument}".rstrip(), run, about=self.ranks.about))


class Sharding(NodeRanks):
    """Divides the parameters of one optimizer, and what it does with them, among the ranks of each node.

    Args:
        memory: the gradients'.
        ranks, options: as for `NodeRanks`.
        buckets: of the gradients.

    Attributes:
        memory: the argument.
        elementwise: whether parts may end inside of parameters.
        shards: of the buckets that there are.
        changes: how often these have changed.
        uncleared: gradients that were reduced and are still there.
    """

    def __init__(self, memory: Memory, ranks: OptimizerRanks, buckets: Buckets, options: Options) -> None:
        assert isinstance(memory, InPlace)
        super().__init__(ranks, options)
        self.memory = memory
        self._buckets = buckets
        self.elementwise = options.elementwise
        owners = range(ranks.size) if self.is_disjoint else self._members
        self._index = owners.index(ranks.rank)
        self._loads = [0] * len(owners)
        self._fetched: _Bytes | None = None
        self._rows: dict[int, tuple[Any, Any, Any, list[int] | None]] = {}
        self._watched: tuple[_Bytes, int] | None = None  # a piece of the parameters, and its checksum
        self._at = 0  # where it was, in bytes of this rank's parts
        self.shards: list[ParameterShard] = []
        self.changes = 0
        divides = self.is_disjoint and not options.in_backward
        self.uncleared = Uncleared(memory, buckets, ranks.size, divides=divides)

    def update(self) -> None:
        """Move the parameters of new buckets to memory of the node. Collective."""
        known = {id(each.bucket): each for each in self.shards}
        self._loads = [0] * len(self._loads)
        for shard in self.shards:
            self._count(shard)
        self.shards = [known[id(bucket)] if id(bucket) in known else self._moved(bucket) for bucket in self._buckets]
        self.uncleared.forget([shard.bucket for shard in self.shards])
        self._rows.clear()
        self._watched = None
        self.changes += 1

    def _moved(self, bucket: Bucket) -> ParameterShard:
        parameters = [slot.parameter for slot in bucket.slots]
        nbytes = len(bucket.flat) * bucket.itemsize
        memory = self.node_memory(nbytes)
        views = [
            self.memory.view(parameter, memory[place.start * bucket.itemsize : place.stop * bucket.itemsize])
            for parameter, place in zip(parameters, bucket.places, strict=True)
        ]
        if self.is_first:
            self.memory.pack(views, parameters)
        self.meet("moved")
        self.memory.move(parameters, views)
        shard = ParameterShard(bucket, memory, views=views, bounds=self._bounds(bucket), index=self._index)
        self._count(shard)
        self.uncleared.watch(bucket, map(shard.within, range(len(bucket.slots))))
        return shard

    def _count(self, shard: ParameterShard) -> None:
        for index, (start, stop) in enumerate(pairwise(shard.bounds)):
            self._loads[index] += (stop - start) * shard.bucket.itemsize

    def _bounds(self, bucket: Bucket) -> list[int]:
        """Return the bounds of the ranks' parts of a bucket, in elements: whole cache lines."""
        line = _line(bucket)
        size = len(self._loads)
        if self.elementwise:
            return [bound * line for bound in Partition.first_larger(len(bucket.flat) // line, size).bounds]
        # Each rank gets what it lacks, so far as the ends of parameters allow.
        mean = (sum(self._loads) / bucket.itemsize + len(bucket.flat)) / size
        lacking = [max(mean - load / bucket.itemsize, 0.0) for load in self._loads]
        if not sum(lacking):  # parameters without elements
            return [0] * (size + 1)
        ends = [0, *(place.stop for place in bucket.places)]
        wanted = accumulate((each / sum(lacking) * len(bucket.flat) for each in lacking[:-1]), initial=0.0)
        return [*(min(ends, key=lambda end: abs(end - bound)) for bound in wanted), ends[-1]]

    def watch(self) -> None:
        """Remember a checksum of a piece of this rank's parts, another piece each time. Local.

        The next time that all have been remembered, any write was seen. A piece is at most a hundredth of them.
        """
        parts = [shard.part(self._index) for shard in self.shards]
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

    def share(self, *, needs: bool = False) -> bool:
        """Wait until every node has all parameters as the ranks have updated them. Collective.

        Args:
            needs: whether this rank needs something.

        Returns:
            Whether any rank does.
        """
        flag = self._flag
        flag[0] = needs

        def run(ranks: Communicator) -> None:
            if self.lane is not None:
                for shard in self.shards:
                    self._fetch(self.lane, shard)
            ranks.allreduce(flag, MAX, out=flag)

        self._run("updated", run)
        return bool(flag[0])

    def _fetch(self, lane: Communicator, shard: ParameterShard) -> None:
        """Exchange parts with the ranks of the lane, and store theirs."""
        parts = [shard.part(peer) for peer in self.peers]
        places = Partition.of_sizes([part.nbytes for part in parts]).segment
        total = places[-1].stop
        if self._fetched is None or self._fetched.nbytes < total:
            self._fetched = lane.empty(total, np.uint8)
        lane.allgather(shard.part(self._index), out=self._fetched[:total])
        for peer, part, place in zip(self.peers, parts, places, strict=True):
            if peer != self._index:
                part[:] = self._fetched[place]

    def reduction(
        self, op: ReduceOp, buckets: Sequence[Bucket], sent: Sequence[Any]
    ) -> tuple[Callable[[Communicator], None], str] | None:
        """Return what reduces this rank's parts of buckets, as of `MakesParts`; None: all of them are to be reduced.

        What is encoded between nodes is reduced as a whole.
        """
        encoded = buckets[0].wire is not None and len(self._nodes) > 1
        if encoded or not self.uncleared.in_parts:
            return None
        self.uncleared.parts_of(buckets)
        parts = [self._rows_of(bucket, flat) for flat, bucket in zip(sent, buckets, strict=True)]

        def run(ranks: Communicator) -> None:
            for _, rows, own, splits in parts:
                ranks.reduce_scatter(rows, op, splits, out=own)

        lengths = ", ".join(f"{len(rows)} x {rows.shape[1]} {dtype_name(rows.dtype)}" for _, rows, *_ in parts)
        return run, f"{op.value} in parts of {lengths}"

    def _rows_of(self, bucket: Bucket, flat: Any) -> tuple[Any, Any, Any, list[int] | None]:
        """Return a bucket, the same as rows of one cache line, this rank's rows, and the numbers of all ranks' rows.

        They are the same objects each time; the numbers are None where the rows are divided evenly.
        """
        known = self._rows.get(id(flat))
        if known is None or known[0] is not flat:
            first = bucket.slots[0].parameter  # of a bucket apart, too
            shard = next(each for each in self.shards if each.bucket.slots[0].parameter is first)
            line = _line(bucket)
            bounds = [bound // line for bound in shard.bounds]
            rows = flat.reshape(-1, line)
            own = rows[bounds[self._index] : bounds[self._index + 1]]
            splits = None if self.elementwise else [stop - start for start, stop in pairwise(bounds)]
            known = self._rows[id(flat)] = flat, rows, own, splits
        return known


class ShardPartner(Partner):
    """What shards add to the steps of an optimizer: gradients that the program has not cleared, and new buckets.

    Args:
        sharding: divides the parameters.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding

    def settle(self) -> bool:
        return self._sharding.uncleared.settle()

    def moved(self) -> None:
        self._sharding.update()

    def report(self, record: Record, parameters: Sequence[Any]) -> None:
        self._sharding.uncleared.report(record, parameters)

    def heed(self, record: Record) -> None:
        self._sharding.uncleared.heed(record, self._sharding.ranks.described)

    def reduced(self, gradients: Sequence[Any], *, repeated: bool) -> None:
        self._sharding.uncleared.reduced(gradients)


def _line(bucket: Bucket) -> int:
    """Return how many elements are in a cache line."""
    return ALIGNMENT_NBYTES // bucket.itemsize
