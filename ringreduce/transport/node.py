"""Joining the ranks of a node: who is here, and the memory that they share."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ringreduce.config import Config
from ringreduce.errors import TransportError
from ringreduce.topology import Topology
from ringreduce.transport.board import Board
from ringreduce.transport.messages import Messages
from ringreduce.transport.shared import Arena, Location, PrivateSegments, Segments
from ringreduce.transport.waiting import Waiter

__all__ = ["Node", "host_name", "join"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Node:
    """A rank's place in the world, and what it shares with its neighbours.

    Attributes:
        topology: of all ranks: a node is what shares memory.
        hosts: of all ranks: a node is a machine. The same, unless memory cannot be shared.
        arena: where communication buffers come from; peers of the node can map them.
        board: where the ranks of the node meet.
    """

    topology: Topology
    hosts: Topology
    arena: Arena
    board: Board


def host_name() -> str:
    """Return what is equal for two processes if and only if they run on one machine (or one of its containers)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def join(
    messages: Messages,
    waiter: Waiter,
    config: Config,
    host: str,
    make_segments: Callable[[Mapping[int, int]], Segments],
) -> Node:
    """Find out who shares memory and set it up. Collective over ``messages``.

    Where ranks of one machine cannot map each other's memory (separate pid namespaces, say), every rank becomes a node
    of its own and all bytes go as messages.

    Args:
        messages: the ranks.
        waiter: how they will wait at the board.
        config: equal on all ranks.
        host: this rank's machine, in any words.
        make_segments: makes this rank's segments, given the processes (rank -> pid) of its node.
    """
    cores = sorted(os.sched_getaffinity(0))
    introduction = json.dumps({"host": host, "pid": os.getpid(), "cores": cores})
    everyone = [json.loads(each) for each in messages.exchange(introduction.encode())]
    hosts = _group([each["host"] for each in everyone], config)
    members = hosts.node_of(messages.rank)
    waiter.crowded = len(members) > len({core for member in members for core in everyone[member]["cores"]})
    arena = Arena(make_segments({member: everyone[member]["pid"] for member in members}))
    locations = _exchange_boards(messages, arena)
    problem = _try_to_map(arena, messages.rank, members, locations) if config.shared_memory else "it is switched off"
    problems = [each.decode() for each in messages.exchange(problem.encode())]
    topology = hosts
    if any(problems):
        if messages.rank == 0 and messages.size > 1:
            reason = next(filter(None, problems))
            _log.warning("no shared memory between ranks, all bytes go over %s: %s", messages.name, reason)
        arena.close()
        topology = Topology.from_hosts(range(messages.size))
        members = (messages.rank,)
        arena = Arena(PrivateSegments())
        locations = _exchange_boards(messages, arena)
    board = Board(arena, members, [locations[member] for member in members], messages.rank, waiter)
    messages.exchange(b"")  # nobody may flag before everyone looks
    return Node(topology, hosts, arena, board)


def _group(hosts: list[str], config: Config) -> Topology:
    node_size = config.node_size or len(hosts)
    return Topology.from_hosts((host, rank // node_size) for rank, host in enumerate(hosts))


def _exchange_boards(messages: Messages, arena: Arena) -> list[Location]:
    mine = Board.allocate(arena)
    payloads = messages.exchange(f"{mine.segment} {mine.offset}".encode())
    return [Location(*map(int, payload.split())) for payload in payloads]


def _try_to_map(arena: Arena, rank: int, members: tuple[int, ...], locations: list[Location]) -> str:
    """Return why a member's memory cannot be mapped, "" if all of it can."""
    try:
        for member in members:
            if member != rank:
                arena.open(member, locations[member])
    except TransportError as error:
        return str(error)
    return ""
