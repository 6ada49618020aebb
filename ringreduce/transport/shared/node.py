"""Joining the ranks of a node: who is here, and the memory that they share."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringreduce.buffers import Bytes, address_of
from ringreduce.common.config import Config
from ringreduce.common.errors import TransportError, name_ranks
from ringreduce.common.processes import pid_namespace
from ringreduce.common.topology import Topology
from ringreduce.native.cache import Loops, loops
from ringreduce.native.library import CODECS
from ringreduce.transport.messages import Messages, StepFailedError, exchange_json, together
from ringreduce.transport.shared.arena import Arena, Block, memory_nbytes
from ringreduce.transport.shared.board import Board, allocate_part
from ringreduce.transport.shared.private import PrivateMemory
from ringreduce.transport.shared.segments import PrivateSegments, Segments
from ringreduce.transport.shared.threads import Threads
from ringreduce.transport.waiting import Waiter

_log = logging.getLogger(__name__)

_SECRET_NBYTES = 32
#: Adding takes the memory's rate, which a few cores reach.
_MOST_THREADS = 8
#: Results of all ranks of a node may take this part of the memory, if the settings do not say otherwise: a quarter.
_RESULTS_SHARE = 4


@dataclass(frozen=True, slots=True)
class Node:
    """A rank's place in the world, and what it shares with its neighbours.

    Attributes:
        topology: of all ranks: a node is what shares memory.
        hosts: of all ranks: a node is a machine. The same, unless memory cannot be shared.
        arena: where communication buffers come from; peers of the node can map them.
        board: of the ranks of the node.
        loops: what is compiled, or why NumPy's path is to be used.
        threads: carry out parts of large compiled calls.
    """

    topology: Topology
    hosts: Topology
    arena: Arena
    board: Board
    loops: Loops
    threads: Threads


def join(
    messages: Messages,
    waiter: Waiter,
    config: Config,
    host: str,
    make_segments: Callable[[Mapping[int, int]], Segments],
    *,
    warn: bool = True,
) -> Node:
    """Find out who shares memory and set it up. Collective over ``messages``.

    Where any rank cannot make shared memory or map that of another rank of its machine (separate pid namespaces, say),
    every rank becomes a node of its own and all bytes go as messages.

    Args:
        messages: the ranks.
        waiter: how they will wait at the board.
        config: equal on all ranks.
        host: this rank's machine, in any words.
        make_segments: makes this rank's segments, given the processes (rank -> pid) of its node.
        warn: whether to say why ranks of one machine cannot share memory.
    """
    cores = sorted(os.sched_getaffinity(0))
    introduction = {"host": host, "pid": os.getpid(), "namespace": pid_namespace(), "cores": cores}
    everyone = exchange_json(messages, introduction)
    node_size = config.node_size or messages.size
    hosts = topology = Topology.from_hosts((facts["host"], rank // node_size) for rank, facts in enumerate(everyone))
    members = hosts.node_of(messages.rank)
    waiter.crowded = len(members) > len({core for member in members for core in everyone[member]["cores"]})
    sharing = sum(not set(cores).isdisjoint(everyone[member]["cores"]) for member in members)
    threads = config.threads or max(1, min(_MOST_THREADS, len(cores) // sharing))
    results_nbytes = config.results_nbytes
    if results_nbytes is None:
        results_nbytes = memory_nbytes() // (_RESULTS_SHARE * len(members))
    arena = Arena(make_segments({member: everyone[member]["pid"] for member in members}), results_nbytes)
    why_not = "" if config.shared_memory else "it is switched off"
    if len({everyone[member]["namespace"] for member in members}) > 1:
        why_not = why_not or "ranks of its machine run in separate pid namespaces"
    try:
        places, copies_private = _share(messages, arena, members, why_not=why_not)
    except StepFailedError as reason:
        if warn and messages.rank == 0 and messages.size > 1:
            _log.warning("no shared memory between ranks, all bytes go over %s: %s", messages.name, reason)
        arena.segments.close()
        topology = Topology.from_hosts(range(messages.size))
        members = (messages.rank,)
        arena = Arena(PrivateSegments(), results_nbytes)
        places = [allocate_part(arena)]
    else:
        arena.copies_private = config.private_memory and copies_private()
    board = Board(arena, members, places, rank=messages.rank, waiter=waiter)
    compiled = Loops(why_not="this rank is alone")
    if messages.size > 1:  # A rank that is alone on its node encodes what it sends to others.
        encoding = CODECS if len(topology.nodes) > 1 else ()
        compiled = loops(config.caches, encoding) if config.native else Loops(why_not="RINGREDUCE_NATIVE is 0")
    reasons = exchange_json(messages, compiled.why_not, _is_text)  # Besides, nobody may flag before everyone looks.
    lacking = [member for member in members if reasons[member]]
    if lacking and not compiled.why_not:
        compiled = Loops(why_not=f"of {name_ranks(lacking)}: {reasons[lacking[0]]}", failed=True)
    if compiled.failed and messages.rank == members[0]:
        _log.warning("NumPy copies and adds between ranks of a node, which takes longer: %s", compiled.why_not)
    return Node(topology, hosts, arena, board=board, loops=compiled, threads=Threads(threads))


def _is_text(answer: Any) -> bool:
    return isinstance(answer, str)


def _share(
    messages: Messages, arena: Arena, members: Sequence[int], why_not: str
) -> tuple[list[int], Callable[[], bool]]:
    """Make every rank's part of its board and make sure that each member of a node reaches those of the others.

    Pids and descriptors are small numbers. Where they mean something else than their sender thinks, a rank maps other
    memory, or its own, without an error. So every rank writes a secret into its memory and sends the others what they
    have to find there.

    Args:
        messages: all ranks.
        arena: of this one.
        members: of its node.
        why_not: why memory cannot be shared, as far as this rank knows already.

    Returns:
        Where the boards of the members are; and what finds out whether the ranks of every node can copy each other's
        private memory, collectively.

    Raises:
        StepFailedError: on all ranks, if any rank of any node has a problem.
    """
    secret = np.frombuffer(bytearray(secrets.token_bytes(_SECRET_NBYTES)), np.uint8)

    def make() -> tuple[int, Block]:
        if why_not:
            raise TransportError(why_not)
        board = allocate_part(arena)
        block = arena.allocate(_SECRET_NBYTES)
        block.memory[:_SECRET_NBYTES] = secret
        return board, block

    def require_secret(member: int, found: Bytes) -> None:
        if found.tolist() != everyone[member]["secret"]:
            raise TransportError(f"it finds other memory in place of rank {member}'s")

    def look() -> None:
        for member in members:
            if member != messages.rank:
                place = everyone[member]["place"]
                require_secret(member, arena.peer_view(member, place, secret.dtype, count=_SECRET_NBYTES))

    def look_at_private() -> None:
        copied = np.empty_like(secret)
        for member in members:
            pid = arena.segments.pid(member)
            address = everyone[member]["address"]
            memory = PrivateMemory(member, pid, address, dtype=secret.dtype, size=_SECRET_NBYTES)
            memory.copy_to(copied)()
            require_secret(member, copied)
            memory.copy_from(copied)()  # It copies what is there already, only to try it.

    def copies_private() -> bool:
        try:
            together(messages, look_at_private)
        except StepFailedError as reason:
            _log.info("private arrays are copied twice between ranks of a node: %s", reason)
            return False
        return True

    board, block = together(messages, make)
    places = {"board": board, "place": block.place, "address": address_of(secret)}
    everyone = exchange_json(messages, {**places, "secret": secret.tolist()})
    together(messages, look)
    arena.release(block)
    return [everyone[member]["board"] for member in members], copies_private
