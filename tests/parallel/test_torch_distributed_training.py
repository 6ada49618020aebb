"""What is built on torch.distributed runs unchanged on our backend, with the losses and weights that Gloo gives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from ringreduce.errors import ConfigError  # noqa: E402
from ringreduce.torch import Compression  # noqa: E402  # registers the backend, where torch has not done so
from ringreduce.torch.ddp import AllreduceState, allreduce_hook  # noqa: E402

with warnings.catch_warnings():  # that torch deprecates what it uses itself
    warnings.simplefilter("ignore")
    from torch.distributed import pipelining
    from torch.distributed.optim import ZeroRedundancyOptimizer

STEPS, ROWS = 4, 6


@pytest.fixture(autouse=True)
def gloo() -> Iterator[Any]:
    """A group of Gloo's between the same ranks; they find each other in the store of ours."""
    dist.init_process_group("ringreduce")
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


class Branches(nn.Module):
    """A model of which some parts are unused in some steps, on some ranks."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.branches = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.last = nn.Linear(8, 1)
        self.unused = unused

    def forward(self, rows: Any, step: int) -> Any:
        hidden = torch.tanh(self.first(rows))
        if self.unused:
            hidden = self.branches[(step + dist.get_rank()) % 2](hidden)
        else:
            hidden = self.branches[1](self.branches[0](hidden))
        return self.last(torch.tanh(hidden))


def batch(rank: int, step: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = torch.randn(ROWS, 5, generator=generator)
    return rows, rows.sum(1, keepdim=True).sin()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = STEPS,
    accumulate: Callable[[int], bool] = lambda step: False,
) -> list[float]:
    """Return the losses of this rank."""
    losses = []
    for step in range(steps):
        rows, wanted = batch(dist.get_rank(), step)

        def backward(rows: Any = rows, wanted: Any = wanted, step: int = step) -> float:
            loss = nn.functional.mse_loss(model(rows, step), wanted)
            loss.backward()
            return loss.item()

        if accumulate(step):
            with model.no_sync():
                losses.append(backward())
            continue
        losses.append(backward())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights(model: nn.Module) -> Any:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def assert_like(ours: tuple[list[float], Any], other: tuple[list[float], Any]) -> None:
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(other[0]))
    torch.testing.assert_close(ours[1], other[1])
    everyone = [torch.empty_like(ours[1]) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, ours[1])
    assert all(torch.equal(each, ours[1]) for each in everyone)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    "find_unused": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("accumulates", [False, True], ids=["", "no_sync"])
@pytest.mark.parametrize("form", list(OPTIONS))
def test_ddp(form: str, accumulates: bool, gloo: Any):
    """DDP in all its forms gives the losses and weights of the same on Gloo, and equal bits on all ranks."""
    if form == "static_graph" and accumulates:
        pytest.skip("torch does not support the two together")
    results = []
    for group in (None, gloo):
        torch.manual_seed(dist.get_rank())  # DDP broadcasts the weights of rank 0
        model = DistributedDataParallel(Branches(unused=form == "find_unused"), process_group=group, **OPTIONS[form])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = train(model, optimizer, accumulate=lambda step: accumulates and step % 2 == 0)
        results.append((losses, weights(model)))
    assert_like(*results)


@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
def test_ddp_with_hooks(hook: str, gloo: Any):
    """Communication hooks, which get the futures of works, run as on Gloo."""
    results = []
    for group in (dist.group.WORLD, gloo):
        torch.manual_seed(0)
        model = DistributedDataParallel(Branches(), process_group=group)
        if hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(group, getattr(default_hooks, f"{hook}_compress_hook"))
        losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        results.append((losses, weights(model)))
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("form", ["plain", "static_graph", "bucket_view", "find_unused"])
def test_ddp_with_our_hook(form: str, gloo: Any):
    """Our hook averages as DDP does without one; views of buckets come to lie in memory that the node shares."""
    options = OPTIONS[form] | {"gradient_as_bucket_view": form != "plain"}
    results = []
    for group in (None, gloo):
        torch.manual_seed(0)
        model = DistributedDataParallel(Branches(unused=form == "find_unused"), process_group=group, **options)
        if group is None:
            model.register_comm_hook(AllreduceState(), allreduce_hook)
        losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        results.append((losses, weights(model)))
        if group is None and form in ("static_graph", "bucket_view"):
            rows, wanted = batch(dist.get_rank(), 0)
            nn.functional.mse_loss(model(rows, 0), wanted).backward()
            assert all(is_shared(each.grad) for each in model.parameters())
    assert_like(*results)


def is_shared(tensor: Any) -> bool:
    """Return whether a tensor is in memory that other ranks of the node can map; one that is alone shares none."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        ranges = [line.split()[0].split("-") for line in lines if "memfd:ringreduce" in line]
    mapped = any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in ranges)
    return mapped or dist.get_world_size() == 1


COMPRESSIONS = {
    "bf16": Compression.bf16,
    "int8": Compression.int8,
    "topk": Compression.topk(0.5),
    "powersgd": Compression.powersgd(rank=2),
}


@pytest.mark.parametrize("name", list(COMPRESSIONS))
def test_ddp_with_our_compressions(name: str):
    """With what compression loses, the loss falls as without, and all ranks have the same weights."""
    results = []
    for compression in (COMPRESSIONS[name], Compression.none):
        torch.manual_seed(0)
        model = DistributedDataParallel(Branches(), gradient_as_bucket_view=True)
        model.register_comm_hook(AllreduceState(compression=compression), allreduce_hook)
        results.append(sum(train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=40)[-10:]))
        assert_like(([], weights(model)), ([], weights(model)))
    assert results[0] < 1.2 * results[1]


def test_our_hook_takes_our_groups_alone(gloo: Any):
    """A state for a group of Gloo's, or for one that this rank is not in, is refused."""
    with pytest.raises(ConfigError, match=r"takes a process group of the backend ringreduce .* got one of gloo"):
        AllreduceState(gloo)
    with pytest.raises(ConfigError, match="that this rank is in"):
        AllreduceState(dist.GroupMember.NON_GROUP_MEMBER)


def test_ddp_join(gloo: Any):
    """Ranks with more batches than others go on, and all end with the weights that Gloo gives."""
    results = []
    for group in (None, gloo):
        torch.manual_seed(0)
        model = DistributedDataParallel(Branches(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model]):
            losses = train(model, optimizer, STEPS + dist.get_rank())
        results.append((losses, weights(model)))
    assert_like(*results)


def test_ddp_equals_one_process():
    """Two ranks with a batch each train as one process does with both."""
    torch.manual_seed(0)
    alone = Branches()
    model = DistributedDataParallel(copy.deepcopy(alone))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(STEPS):
        rows, wanted = map(torch.cat, zip(*(batch(rank, step) for rank in range(dist.get_world_size())), strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(alone(rows, step), wanted).backward()
        optimizer.step()
    torch.testing.assert_close(weights(model), weights(alone))


def test_zero_redundancy_optimizer(gloo: Any):
    """An optimizer whose state is cut between the ranks steps as the whole one does."""
    results = []
    for group in (dist.group.WORLD, gloo):
        torch.manual_seed(0)
        model = DistributedDataParallel(Branches(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
        losses = train(model, optimizer)
        optimizer.consolidate_state_dict(0)
        assert dist.get_rank() or len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
        results.append((losses, weights(model)))
    assert_like(*results)


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
def test_fully_shard(mixed: bool):
    """FSDP2 trains as one process does with all ranks' batches."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    torch.manual_seed(0)
    alone = Branches()
    sharded = copy.deepcopy(alone)
    single = torch.float32
    types = {"param_dtype": torch.bfloat16, "reduce_dtype": single} if mixed else {}
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in sharded.branches:
        fsdp.fully_shard(part, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**types))
    fsdp.fully_shard(sharded, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**types, output_dtype=single))
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (sharded, alone)]
    train(sharded, optimizers[0])
    for step in range(STEPS):
        rows, wanted = map(torch.cat, zip(*(batch(rank, step) for rank in range(dist.get_world_size())), strict=True))
        optimizers[1].zero_grad()
        nn.functional.mse_loss(alone(rows, step), wanted).backward()
        optimizers[1].step()
    whole = torch.cat([each.full_tensor().detach().reshape(-1) for each in sharded.parameters()])
    torch.testing.assert_close(whole, weights(alone), rtol=0, atol=0.05 if mixed else 1e-5)


def test_tensor_parallel():
    """Column- and row-wise linear layers give the outputs and gradients of the whole ones."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    size = dist.get_world_size()
    whole = nn.Sequential(nn.Linear(6, 4 * size), nn.ReLU(), nn.Linear(4 * size, 3))
    parallel = copy.deepcopy(whole)
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    rows = torch.randn(5, 6)
    outputs = whole(rows), parallel(rows)
    torch.testing.assert_close(outputs[1], outputs[0])
    for each in outputs:
        each.square().sum().backward()
    for one, other in zip(parallel.parameters(), whole.parameters(), strict=True):
        assert isinstance(one.grad, DTensor)
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.sizes(4)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # returns a view: that of tensor parallelism
def test_a_mesh_of_two_dimensions():
    """Data-parallel sharding over tensor-parallel layers, in groups of two each way."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    model = copy.deepcopy(alone)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for step in range(STEPS):
        batches = [batch(each, step) for each in range(2)]
        rows, wanted = batches[mesh.get_local_rank("data")]
        nn.functional.mse_loss(model(rows), wanted).backward()
        rows, wanted = map(torch.cat, zip(*batches, strict=True))
        nn.functional.mse_loss(alone(rows), wanted).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    whole = torch.cat([each.full_tensor().detach().reshape(-1) for each in model.parameters()])
    torch.testing.assert_close(whole, weights(alone))


@pytest.mark.sizes(2)
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipeline(schedule: str):
    """Two stages that send each other activations and gradients train as the whole model does."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    stages = [nn.Sequential(nn.Linear(5, 8), nn.Tanh()), nn.Linear(8, 1)]
    whole = nn.Sequential(*copy.deepcopy(stages))
    stage = pipelining.PipelineStage(stages[rank], rank, 2, torch.device("cpu"))
    rows, wanted = batch(0, 0)
    runner = getattr(pipelining, schedule)(stage, n_microbatches=3, loss_fn=nn.functional.mse_loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner.step(rows) if rank == 0 else runner.step(target=wanted)
    nn.functional.mse_loss(whole(rows), wanted).backward()
    for one, other in zip(stages[rank].parameters(), whole[rank].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_functional_collectives():
    """Those that torch.compile traces find the group by its name and come to it through C++."""
    import torch.distributed._functional_collectives as functional

    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    size, rank = dist.get_world_size(), dist.get_rank()
    tensor = torch.full((2 * size,), float(rank))
    total = functional.all_reduce(tensor, "sum", dist.group.WORLD)
    assert functional.wait_tensor(total).tolist() == [size * (size - 1) / 2] * (2 * size)
    gathered = functional.wait_tensor(gather(tensor[:1], 0, dist.group.WORLD))
    assert gathered.tolist() == [float(each) for each in range(size)]
    mine = functional.wait_tensor(reduce_scatter(tensor, "avg", 0, dist.group.WORLD))
    assert mine.tolist() == [(size - 1) / 2] * 2
    moved = functional.wait_tensor(functional.all_to_all_single(tensor, None, None, dist.group.WORLD))
    assert moved.tolist() == [float(each // 2) for each in range(2 * size)]
