"""Measure how much of an allreduce a computation hides, beside other libraries, or between two hosts bare TCP sockets.

    mpirun -np 2 python benchmarks/overlap.py --vs mpi,gloo 64K 1M
    scripts/cluster up 2 --rate 1gbit
    scripts/cluster run -np 2 --per-host 1 python benchmarks/overlap.py --vs sockets

The sockets are the limit: over them goes what a ring sends: each rank's half to the other, the sums back. A thread of
each rank sends, one receives and adds; the kernel wakes them. No library can take less of a core.

Contenders take turns, a barrier goes before each call, the slowest rank's time counts, figures are medians. "hidden" is
the part of the allreduce that a computation as long as it hides, as in the OSU micro-benchmarks. "taken" is by how much
an allreduce lengthens a computation three times as long as it: the time that messages and sums take from the core.
"limit" is 1 - taken / allreduce: no more can be hidden. The report has hidden of ringreduce / limit of the sockets, for
each size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import ringreduce
import ringreduce.torch as hvd
from ringreduce.bench.measure import Contender, time_in_turn
from ringreduce.bench.peers import gloo_process_group
from ringreduce.common.quantities import format_nbytes, parse_nbytes

#: Begins an allreduce in place; returns what waits for its end.
Start = Callable[[torch.Tensor], Callable[[], object]]
FACTORS = (1, 3)  # of the computation, by the time of the allreduce
SIDE = 128  # of the matrices that are multiplied


class Sockets:
    """Allreduces of two ranks over one TCP connection; rank 0 listens at an address of its host."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._rank = ringreduce.rank()
        listener = socket.create_server(address) if self._rank == 0 else None
        ringreduce.barrier()
        self._peer = listener.accept()[0] if listener else socket.create_connection(address, 10)
        self._peer.settimeout(None)
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._begun: list[SimpleQueue[np.ndarray]] = [SimpleQueue(), SimpleQueue()]
        self._summed: SimpleQueue[np.ndarray] = SimpleQueue()
        self._sent: SimpleQueue[None] = SimpleQueue()
        self._received: SimpleQueue[None] = SimpleQueue()
        for work in self._send, self._receive:
            threading.Thread(target=work, daemon=True).start()

    def start(self, tensor: torch.Tensor) -> Callable[[], object]:
        halves = tensor.numpy().reshape(2, -1)
        for queue in self._begun:
            queue.put(halves)
        return self._wait

    def _wait(self) -> None:
        self._sent.get()
        self._received.get()

    def _send(self) -> None:
        while True:
            self._peer.sendall(self._begun[0].get()[1 - self._rank])
            self._peer.sendall(self._summed.get())
            self._sent.put(None)

    def _receive(self) -> None:
        room = np.empty(0, np.float32)
        while True:
            halves = self._begun[1].get()
            mine = halves[self._rank]
            if room.size != mine.size:
                room = np.empty_like(mine)
            self._fill(room)
            mine += room
            self._summed.put(mine)
            self._fill(halves[1 - self._rank])
            self._received.put(None)

    def _fill(self, array: np.ndarray) -> None:
        if self._peer.recv_into(array, 0, socket.MSG_WAITALL) != array.nbytes:
            raise SystemExit("the other rank has closed the connection")


def start_ours(tensor: torch.Tensor) -> Callable[[], object]:
    """Begin a named asynchronous allreduce."""
    handle = hvd.allreduce_async_(tensor, name=f"overlap {tensor.numel()}", op=hvd.Sum)
    return partial(hvd.synchronize, handle)


def start_mpi(tensor: torch.Tensor) -> Callable[[], object]:
    """Begin an allreduce of the MPI library."""
    return MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, tensor.numpy(), MPI.SUM).Wait


def start_gloo(tensor: torch.Tensor) -> Callable[[], object]:
    """Begin an allreduce of torch.distributed."""
    return dist.all_reduce(tensor, async_op=True).wait


def hidden(allreduce: float, compute: float, both: float) -> float | None:
    """Return the part of the allreduce that the computation hides, at most 1; below 0 if they disturb each other.

    None where the computation, whose length was chosen before, took less than half as long or more than twice.
    """
    if not 0.5 <= compute / allreduce <= 2:
        return None
    return min(1 - (both - compute) / allreduce, 1.0)


def measure(starts: dict[str, Start], nbytes: int, iterations: int) -> dict[str, list[float]]:
    """Return by name, in milliseconds: the allreduce; for each of `FACTORS`, the computation, and both. Collective."""
    world = ringreduce.world()
    tensor = torch.empty(nbytes // 4)
    matrix = torch.ones(SIDE, SIDE)
    product = torch.empty_like(matrix)

    def contender(call: Callable[[], object]) -> Contender:
        return Contender("", tensor.numpy(), call)

    def both(start: Start, compute: Callable[[], object]) -> None:
        wait = start(tensor)
        compute()
        wait()

    multiply = contender(lambda: torch.mm(matrix, matrix, out=product))
    contenders = []
    for start in starts.values():
        tensor.fill_(1.0 + ringreduce.rank())
        both(start, multiply.call)
        assert (tensor == world.size * (world.size + 1) / 2).all(), "wrong sums"
        tensor.zero_()
        alone = contender(partial(both, start, lambda: None))
        allreduce_s, multiply_s = np.median(time_in_turn(world, [alone, multiply], iterations, warmup=3), axis=1)
        contenders.append(alone)
        for factor in FACTORS:
            compute = multiply.repeated(math.ceil(factor * allreduce_s / multiply_s))
            contenders += [compute, contender(partial(both, start, compute.call))]
    times = np.median(time_in_turn(world, contenders, iterations, warmup=3), axis=1).reshape(len(starts), -1) * 1e3
    return dict(zip(starts, times.tolist(), strict=True))


def compare(starts: dict[str, Start], sizes: list[int], iterations: int) -> dict[str, float]:
    """Print what hides how much, and return for each size what ringreduce hides / the limit of the sockets."""
    if ringreduce.rank() == 0:
        heads = ("allreduce ms", "compute ms", "both ms", "hidden", "taken ms", "limit")
        print(f"{'size':>8}  {'':10}  " + "  ".join(heads))
    ratios = {}
    for nbytes in sizes:
        shares = {}
        for name, times in measure(starts, nbytes, iterations).items():
            alone, compute, together, longer, longer_together = times
            taken = longer_together - longer
            share, limit = hidden(alone, compute, together), 1 - taken / alone
            shares[name] = share, limit
            cells = f"{alone:12.3f}  {compute:10.3f}  {together:7.3f}  {'N/A' if share is None else f'{share:.0%}':>6}"
            if ringreduce.rank() == 0:
                print(f"{format_nbytes(nbytes):>8}  {name:10}  {cells}  {taken:8.3f}  {limit:5.0%}", flush=True)
        share = shares["ringreduce"][0]
        limit = shares["sockets"][1] if "sockets" in shares else 0.0
        ratios[f"hidden/limit {format_nbytes(nbytes)}"] = math.nan if share is None or limit <= 0 else share / limit
    return ratios


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "sizes", nargs="*", type=parse_nbytes, default=[1 << 20, 4 << 20], help="of the tensors (1M 4M)"
    )
    parser.add_argument("-n", "--iters", type=int, default=30, help="timed calls of each (30)")
    parser.add_argument("--address", default="10.113.0.1", help="of rank 0's host (the first of scripts/cluster)")
    parser.add_argument("--port", type=int, default=5202, help="there (5202)")
    parser.add_argument("-J", "--output_file", type=Path, help="write the JSON report there")
    parser.add_argument("--vs", default="sockets", help="beside whom: sockets, mpi, gloo, with commas (sockets)")
    arguments = parser.parse_args()
    ringreduce.init()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        starts: dict[str, Start] = {"ringreduce": start_ours}
        for name in arguments.vs.split(","):
            if name == "gloo":
                stack.enter_context(gloo_process_group(ringreduce.world()))
            if name == "sockets":
                starts[name] = Sockets((arguments.address, arguments.port)).start
            else:
                starts[name] = {"mpi": start_mpi, "gloo": start_gloo}[name]
        ratios = compare(starts, arguments.sizes, arguments.iters)
    if ringreduce.rank() == 0 and arguments.output_file:
        arguments.output_file.write_text(json.dumps({"ratios": ratios}, indent=1) + "\n", encoding="utf-8")
    ringreduce.shutdown()


if __name__ == "__main__":
    main()
