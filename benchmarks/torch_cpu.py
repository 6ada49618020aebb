"""What torch.distributed does on CPUs over Gloo and on ringreduce, where one of them is wrong or lacks it.

    python benchmarks/torch_cpu.py

Starts jobs of 2 and 4 ranks, and prints a table in Markdown. Each case compares what the ranks get with what one
process computes. Where a job ends early or does not answer, its row says so, and the cases after it have another job.
Exits with 1 if a result of ringreduce is wrong.
"""

from __future__ import annotations

import argparse
import copy
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

LIMIT_S = 60
BACKENDS = "gloo", "ringreduce"
ISSUE = "https://github.com/pytorch/pytorch/issues"


def data(rank: int) -> torch.Tensor:
    """Return the batch of a rank; of all ranks, of equal size."""
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(rank))


def whole() -> torch.Tensor:
    """Return the batches of all ranks."""
    return torch.cat([data(rank) for rank in range(dist.get_world_size())])


def new_model() -> nn.Module:
    """Return a model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return a mean over samples."""
    loss: torch.Tensor = model(rows).square().mean()
    return loss


def descend(model: nn.Module, rows: torch.Tensor) -> None:
    """Make a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss_of(model, rows).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def compared(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """Return how a result is to be called."""
    if torch.allclose(found, wanted, rtol=1e-4, atol=1e-6):
        return "right"
    return f"wrong: {float((found * wanted).sum() / (wanted * wanted).sum()):.3g} times the right one"


def reduce_scatter(op: Any, expected: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Reduce the numbers 1 to P by an operation."""
    size = dist.get_world_size()
    result = torch.empty(3)
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the name before torch 2.13
    call(result, torch.full((3 * size,), dist.get_rank() + 1.0), op=op)
    return compared(result, expected(torch.arange(1.0, size + 1)).expand(3))


def strided() -> str:
    """Sum every second element of a tensor; those between stay as they are."""
    memory = torch.full((8,), dist.get_rank() + 1.0)
    wanted = memory.clone()
    wanted[::2] = sum(range(1, dist.get_world_size() + 1))
    dist.all_reduce(memory[::2])
    return compared(memory, wanted)


def sparse() -> str:
    """Average sparse gradients, as of `nn.Embedding(sparse=True)`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([2.0]), (size,), check_invariants=True)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    return compared(tensor.to_dense(), torch.full((size,), 2.0 / size))


def float8() -> str:
    """Gather 8-bit floats."""
    mine = torch.full((3,), dist.get_rank() + 1.0).to(torch.float8_e4m3fn)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return compared(torch.cat(every).float(), torch.arange(1.0, len(every) + 1).repeat_interleave(3))


def mismatch() -> str:
    """Let each rank sum another number of elements, which has to be an error."""
    try:
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
    except Exception:  # of whatever type a backend has
        return "right"
    return "wrong: no error"


def sharded(*mesh: int, factor: float | None = None) -> str:
    """Compare the gradients of FSDP2 with those of one process that has all data."""
    alone = new_model()
    loss_of(alone, whole()).backward()  # type: ignore[no-untyped-call]
    shape = mesh or (dist.get_world_size(),)
    names = ("replicas", "shards")[-len(shape) :]
    model: Any = fully_shard(copy.deepcopy(alone), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    scale = 1.0
    if factor is not None:
        model.set_gradient_divide_factor(factor)
        scale = dist.get_world_size() / factor
    model.zero_grad()
    loss_of(model, data(dist.get_rank())).backward()  # type: ignore[no-untyped-call]
    found = torch.cat([each.grad.full_tensor().flatten() for each in model.parameters()])
    return compared(found, scale * torch.cat([each.grad.flatten() for each in alone.parameters()]))  # type: ignore[union-attr]


def all_to_all(*, ragged: bool) -> str:
    """Give each rank a tensor; ``ragged``: of a length of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = [each + 1 if ragged else 3 for each in range(size)]
    given = [torch.full((length,), float(rank * size + each)) for each, length in enumerate(lengths)]
    got = [torch.empty(lengths[rank]) for _ in range(size)]
    dist.all_to_all(got, given)
    return compared(torch.cat(got), torch.arange(float(rank), size * size, size).repeat_interleave(lengths[rank]))


def all_to_all_single() -> str:
    """Give each rank as many elements as its number and one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    splits = [each + 1 for each in range(size)]
    given = torch.cat([torch.full((each + 1,), float(rank * size + each)) for each in range(size)])
    got = torch.empty((rank + 1) * size)
    dist.all_to_all_single(got, given, [rank + 1] * size, splits)
    return compared(got, torch.arange(float(rank), size * size, size).repeat_interleave(rank + 1))


def batch_norm() -> str:
    """Normalise over the batches of all ranks: by torch's class, or by ours."""
    alone = nn.Sequential(nn.BatchNorm1d(5))
    if dist.get_backend() == "ringreduce":
        from ringreduce.torch import SyncBatchNorm

        model = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    else:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))  # type: ignore[no-untyped-call]
    rank = dist.get_rank()
    return compared(model(data(rank)), alone(whole())[6 * rank : 6 * (rank + 1)])


def uneven() -> str:
    """Train with one batch more on each next rank: averages are those of the ranks that are left."""
    alone, rank, size = new_model(), dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(copy.deepcopy(alone))
    with Join([model], divide_by_initial_world_size=False):
        for _ in range(rank + 1):
            descend(model, data(rank))
    for step in range(size):
        descend(alone, torch.cat([data(each) for each in range(step, size)]))
    found, wanted = (torch.cat([each.detach().flatten() for each in one.parameters()]) for one in (model, alone))
    return compared(found, wanted)


def int8() -> str:
    """Ask a sharded model whether its gradients can travel as 8-bit integers."""
    model = fully_shard(new_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return "yes" if hasattr(model, "register_comm_hook") else "no"


#: What -> the issue of torch, the ranks, and what a rank does.
CASES: dict[str, tuple[int | None, int, Callable[[], str]]] = {
    "`reduce_scatter_single` with AVG": (162338, 2, lambda: reduce_scatter(dist.ReduceOp.AVG, torch.mean)),
    "gradients of `fully_shard`": (162338, 2, sharded),
    "`set_gradient_divide_factor` of `fully_shard`": (None, 2, lambda: sharded(factor=5.0)),
    "gradients of `fully_shard`, 2 replicas of 2 shards (HSDP)": (162338, 4, lambda: sharded(2, 2)),
    "`all_to_all`": (88245, 2, lambda: all_to_all(ragged=False)),
    "`all_to_all`, another length for each rank": (None, 2, lambda: all_to_all(ragged=True)),
    "`all_to_all_single` with splits": (None, 2, all_to_all_single),
    "`all_reduce` of every second element": (192920, 2, strided),
    "`all_reduce` of sparse tensors with AVG": (None, 2, sparse),
    "`all_gather` of 8-bit floats": (None, 2, float8),
    "`SyncBatchNorm`": (78081, 2, batch_norm),
    "DDP with `Join`, ranks with 1 and 2 batches": (38174, 2, uneven),
    "`fully_shard` with gradients in int8": (None, 2, int8),
    "ranks that pass different numbers of elements": (None, 2, mismatch),
}


def work(backend: str, names: list[str]) -> None:
    """Run cases on this rank; rank 0 writes a line for each."""
    dist.init_process_group(backend)
    for name in names:
        try:
            result = CASES[name][2]()
        except Exception as error:  # what torch refuses
            result = f"error: {str(error).splitlines()[0]}"
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, result)
        if dist.get_rank() == 0:
            worst = next((each for each in results if each not in ("right", "yes")), results[0])
            print(f"\n=> {name}\t{worst}", flush=True)
    dist.destroy_process_group()


def results(backend: str, ranks: int, names: list[str]) -> dict[str, str]:
    """Return what cases give, each in the job of the one before it if that lives."""
    found: dict[str, str] = {}
    while left := [name for name in names if name not in found]:
        command = ["timeout", "--kill-after=5", str(LIMIT_S), sys.executable, "-m", "ringreduce", "run"]
        command += ["-np", str(ranks), sys.executable, __file__]
        options = ["--backend", backend, *(f"--case={name}" for name in left)]
        job = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=False)
        end = f"no answer in {LIMIT_S} s" if job.returncode == 124 else f"the job ended with {job.returncode}"
        found |= dict(re.findall(r"^=> (.*)\t(.*)$", job.stdout, re.MULTILINE))
        if missing := [name for name in left if name not in found]:
            found[missing[0]] = end
    return found


def main() -> int:
    """Run all cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this one")
    parser.add_argument("--case", choices=CASES, action="append", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        work(arguments.backend[0], arguments.case)
        return 0
    backends = arguments.backend or BACKENDS
    found: dict[str, dict[str, str]] = {}
    for backend in backends:
        found[backend] = {}
        for ranks in sorted({ranks for _, ranks, _ in CASES.values()}):
            mine = [name for name, (_, needed, _) in CASES.items() if needed == ranks]
            found[backend] |= results(backend, ranks, mine)
    print(f"| torch {torch.__version__}, on CPUs | upstream | {' | '.join(backends)} |")
    print("|---|---" + "|---" * len(backends) + "|")
    for name, (issue, _, _) in CASES.items():
        link = f"[{issue}]({ISSUE}/{issue})" if issue else ""
        print(f"| {name} | {link} | {' | '.join(found[backend][name] for backend in backends)} |")
    ours = found.get("ringreduce", {})
    return int(any(each not in ("right", "no") for each in ours.values()))


if __name__ == "__main__":
    sys.exit(main())
