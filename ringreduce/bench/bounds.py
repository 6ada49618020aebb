"""The least time that a case can take, from what the same run measures of the machine.

On a node a collective takes at least one hand-over of a cache line between ranks, and the traffic of each rank's own
memory: for small sizes the first decides, later the rates of the caches, then that of memory. Between nodes it takes
the latency of a message and the bytes that have to cross a node's link, at the rate of large messages: ``nbytes`` times
the bus factor of nccl-tests, with M nodes in place of P ranks.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.bench.cases import Case
from ringreduce.bench.measure import Contender, time_in_turn
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import CollectiveTimeoutError

Array = npt.NDArray[Any]

_BLOCK = 1 << 15  # elements of float32: two blocks of 128 KiB stay in a core's second-level cache
_LINE_NBYTES = 64
_LOOKS = 1 << 14  # at a flag, between two looks at the clock
_LOOKS_ALONE = 200  # before the core is given away: hosts that are one machine may share it
_PROBE_NBYTES = 8 << 20
_PROBES = {1: 50, _PROBE_NBYTES: 8}  # messages between nodes by their bytes: how many


class HostBounds:
    """What bounds the cases of one run, for arrays in host memory. Collective.

    Args:
        world: the ranks.
    """

    def __init__(self, world: Communicator) -> None:
        self._world = world
        node = world.topology.node_of(world.rank)
        self._others = [world.topology.local_rank(rank) for rank in node if rank != world.rank]
        self._own = world.topology.local_rank(world.rank)
        self._flags = _flags(world)
        self._count = 0
        self._looks_alone = 0 if len(node) > len(os.sched_getaffinity(0)) else _LOOKS_ALONE
        self._latency_s, self._gb_per_s = _between_nodes(world)

    def contenders(self, case: Case) -> list[Contender]:
        """Return the candidates on this node; the fastest is the bound there."""
        return [self._after_meeting(each) for each in traffic(case)]

    def between_nodes_us(self, case: Case) -> float:
        """Return the microseconds that the links between nodes take at least; 0.0 on one node."""
        nodes = self._world.topology.nodes
        if len(nodes) == 1:
            return 0.0
        crossing = case.nbytes * case.collective.bus_factor(len(nodes))
        if case.collective.name == "alltoall":
            crossing *= max(map(len, nodes))
        return self._latency_s * 1e6 + crossing / self._gb_per_s / 1e3

    def _after_meeting(self, contender: Contender) -> Contender:
        call = contender.call

        def run() -> Any:
            self._meet()
            return call()

        return Contender(contender.name, contender.source, run)

    def _meet(self) -> None:
        """Store to the own flag, and wait for those of the other ranks of the node."""
        self._count = count = self._count + 1
        flags = self._flags
        flags[self._own * _LINE_NBYTES // 8] = count
        for other in self._others:
            at = other * _LINE_NBYTES // 8
            if flags[at] < count:
                self._wait(at)

    def _wait(self, at: int) -> None:
        flags = self._flags
        count = self._count
        deadline = time.monotonic() + self._world.config.timeout_s
        while time.monotonic() < deadline:
            for look in range(_LOOKS):
                if flags[at] >= count:
                    return
                if look >= self._looks_alone:
                    os.sched_yield()
        raise CollectiveTimeoutError("a rank of this node has not come to what bounds the collective")


def _flags(world: Communicator) -> memoryview:
    """Return a flag for each rank of the node, zeros, in memory of the node, each in a cache line of its own."""
    largest = max(map(len, world.topology.nodes))
    memory = world.node_memory(largest * _LINE_NBYTES) if largest > 1 else np.zeros(_LINE_NBYTES, np.uint8)
    return memory.data.cast("q")


def _between_nodes(world: Communicator) -> tuple[float, float]:
    """Measure messages between pairs of nodes; return latency in seconds and rate in GB/s.

    The quickest of several counts. They go there and back: of two that cross, MPI may send one after the other.
    """
    leaders = [node[0] for node in world.topology.nodes]
    if len(leaders) == 1:
        return 0.0, 0.0
    at = leaders.index(world.rank) if world.rank in leaders else None
    least = []
    for nbytes, count in _PROBES.items():
        message = np.zeros(nbytes, np.uint8)

        def there_and_back(message: Array = message) -> None:
            if at is not None and at % 2:
                world.recv(message, leaders[at - 1])
                world.send(message, leaders[at - 1])
            elif at is not None and at + 1 < len(leaders):
                world.send(message, leaders[at + 1])
                world.recv(message, leaders[at + 1])

        (times,) = time_in_turn(world, [Contender("messages", message, there_and_back)], iterations=count, warmup=2)
        least.append(float(times.min()) / 2)
    latency_s, long_s = least
    return latency_s, _PROBE_NBYTES / max(long_s - latency_s, 1e-9) / 1e9


def traffic(case: Case) -> list[Contender]:
    """Return calls that each move the bytes that a rank has to move at least in its own memory, within a node.

    An allreduce in place reads n bytes, and writes n bytes to the same cache lines: there are three calls, and which is
    the fastest depends on the machine. For any other collective there is one, which copies what the busiest rank gets
    from other ranks: n bytes times the bus factor; for a reduce_scatter n bytes over the number of ranks, its result.
    """
    if case.collective.name != "allreduce":
        share = case.collective.bus_factor(case.nranks)
        nbytes = case.nbytes // case.nranks if case.collective.name == "reduce_scatter" else int(case.nbytes * share)
        given, got = (np.zeros(nbytes, np.uint8) for _ in range(2))

        def copy() -> Array:
            np.copyto(got, given)
            return got

        return [Contender("copy", given, copy)]
    words = np.zeros(max(1, case.nbytes // 4), np.float32)
    blocks = [words[start : start + _BLOCK] for start in range(0, words.size, _BLOCK)]

    def negate_blocks() -> Array:
        for block in blocks:
            np.negative(block, out=block)
        return words

    return [
        Contender("negate", words, lambda: np.negative(words, out=words)),
        Contender("negate by blocks", words, negate_blocks),
        Contender("add", words, lambda: np.add(words, 1, out=words)),
    ]
