"""What is built on torch.distributed runs unchanged on our backend, with the losses and weights that Gloo gives."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: E402
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from ringreduce.common.errors import ConfigError, MismatchError  # noqa: E402
from ringreduce.torch import Compression  # noqa: E402  # registers the backend, where torch has not done so
from ringreduce.torch.compression import Compressor  # noqa: E402
from ringreduce.torch.distributed.ddp import AllreduceState, adopt, allreduce_hook  # noqa: E402
from ringreduce.torch.private import cpu_backend_of  # noqa: E402
from ringreduce.torch.sync_batch_norm import convert_sync_batchnorm  # noqa: E402

with warnings.catch_warnings():  # that torch deprecates what it uses itself
    warnings.simplefilter("ignore")
    from torch.distributed import pipelining
    from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

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


@pytest.mark.spread("form")
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


def test_ddp_with_sparse_gradients(gloo: Any):
    """An embedding whose gradients are sparse is trained as on Gloo; ranks look up other rows."""
    results = []
    for group in (None, gloo):
        torch.manual_seed(0)
        embedding = nn.Embedding(11, 4, sparse=True)
        model = DistributedDataParallel(nn.Sequential(embedding, nn.Linear(4, 1)), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(STEPS):
            loss = model(torch.arange(3 + dist.get_rank()) * (step + 1) % 11).square().mean()
            loss.backward()
            assert embedding.weight.grad.is_sparse
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, weights(model)))
    assert_like(*results)


@pytest.mark.spread
@pytest.mark.parametrize("hook", ["fp16", "powerSGD", "batched_powerSGD", "builtin allreduce", "builtin fp16"])
def test_ddp_with_hooks(hook: str, gloo: Any, monkeypatch: pytest.MonkeyPatch):
    """Communication hooks, which get the futures of works, run as on Gloo; batched PowerSGD resizes the buckets."""
    orthogonalize = powerSGD_hook._orthogonalize  # refuses, in torch 2.13, the matrices that the batched hook gives it
    monkeypatch.setattr(
        powerSGD_hook, "_orthogonalize", lambda each, *given: orthogonalize(each.view(-1, *each.shape[-2:]), *given)
    )
    results = []
    for group in (dist.group.WORLD, gloo):
        torch.manual_seed(0)
        model = DistributedDataParallel(Branches(), process_group=group)
        if "powerSGD" in hook:
            state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
            model.register_comm_hook(state, getattr(powerSGD_hook, f"{hook}_hook"))
        elif hook.startswith("builtin"):
            kinds = dist.BuiltinCommHookType
            model._register_builtin_comm_hook(kinds.FP16_COMPRESS if "fp16" in hook else kinds.ALLREDUCE)
        else:
            model.register_comm_hook(group, getattr(default_hooks, f"{hook}_compress_hook"))
        losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        results.append((losses, weights(model)))
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-2, atol=1e-3)


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("hierarchical", [False, True], ids=["periodic", "hierarchical"])
def test_local_sgd(hierarchical: bool, gloo: Any):
    """Halves of the ranks that train apart, and are averaged now and then, have the weights that Gloo gives."""
    size = dist.get_world_size()
    results = []
    for backend, group in ("ringreduce", dist.group.WORLD), ("gloo", gloo):
        half, _ = dist.new_subgroups(size // 2, backend=backend)
        torch.manual_seed(0)
        model = DistributedDataParallel(Branches(), process_group=group)
        state = post_localSGD_hook.PostLocalSGDState(group, half, start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager: Any = averagers.PeriodicModelAverager(4, warmup_steps=4, process_group=group)
        if hierarchical and backend == "gloo":
            averager = InTurn(averagers.PeriodicModelAverager(2, warmup_steps=4, process_group=half), averager)
        elif hierarchical:
            periods = OrderedDict([(2, size // 2), (4, size)])
            averager = hierarchical_model_averager.HierarchicalModelAverager(periods, warmup_steps=4)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
        results.append((torch.tensor(train(model, optimizer, 11)), weights(model)))
    torch.testing.assert_close(results[0], results[1])


class InTurn:
    """Averages within halves, then over all: the average over all, where both have their turn."""

    def __init__(self, *averagers: Any) -> None:
        self.averagers = averagers

    def average_parameters(self, params: Any) -> None:
        for each in self.averagers:
            each.average_parameters(params)


@pytest.mark.spread
@pytest.mark.parametrize("form", ["plain", "static_graph", "bucket_view", "find_unused"])
def test_ddp_with_our_hook(form: str, gloo: Any):
    """Our hook averages as DDP does without one; views of buckets come to lie in memory that the node shares."""
    options = OPTIONS[form] | {"gradient_as_bucket_view": form != "plain"}
    results = []
    for group in (None, gloo):
        torch.manual_seed(0)
        model = DistributedDataParallel(Branches(unused=form == "find_unused"), process_group=group, **options)
        if group is None and form == "plain":
            model.register_comm_hook(AllreduceState(), allreduce_hook)
        elif group is None:
            assert adopt(model) is model
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


@pytest.mark.spread
@pytest.mark.parametrize("name", list(COMPRESSIONS))
def test_ddp_with_our_compressions(name: str):
    """With what compression loses, the loss falls as without, and all ranks have the same weights."""
    results = []
    for compression in (COMPRESSIONS[name], Compression.none):
        torch.manual_seed(0)
        model = DistributedDataParallel(Branches(), gradient_as_bucket_view=True)
        adopt(model, compression)
        results.append(sum(train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=40)[-10:]))
        assert_like(([], weights(model)), ([], weights(model)))
    assert results[0] < 1.2 * results[1]


@pytest.mark.sizes(2, 3)
def test_a_compressor_that_fails_is_told_to_all():
    """The other ranks hear why, and the group goes on."""

    class Failing(Compressor):
        @staticmethod
        def compress(tensor: Any) -> Any:
            if dist.get_rank() == 1:
                raise ValueError("out of bits")
            return tensor, None

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return tensor

    model = DistributedDataParallel(nn.Linear(3, 2))
    model.register_comm_hook(AllreduceState(compression=Failing), allreduce_hook)
    with pytest.raises(RuntimeError, match="out of bits"):
        model(torch.ones(1, 3)).sum().backward()
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [dist.get_world_size()] * 2


def test_our_hook_takes_our_groups_alone(gloo: Any):
    """A state for a group of Gloo's, or for one that this rank is not in, is refused."""
    with pytest.raises(ConfigError, match=r"takes a process group of the backend ringreduce .* got one of gloo"):
        AllreduceState(gloo)
    with pytest.raises(ConfigError, match="that this rank is in"):
        AllreduceState(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ConfigError, match="got one of gloo"):
        adopt(DistributedDataParallel(nn.Linear(3, 2), process_group=gloo, gradient_as_bucket_view=True))
    with pytest.raises(ConfigError, match=r"adopt\(\) takes .*gradient_as_bucket_view=True"):
        adopt(DistributedDataParallel(nn.Linear(3, 2)))


@pytest.mark.spread("initial")
@pytest.mark.parametrize("backend", ["ringreduce", "cpu:ringreduce"])
@pytest.mark.parametrize("initial", [True, False], ids=["by all ranks", "by those that are left"])
def test_ddp_join(initial: bool, backend: str, gloo: Any):
    """Ranks with more batches than others go on, and all end with the weights that Gloo gives.

    If averages are divided by the ranks that are left, torch's C++ waits for the work that counts them.
    """
    results = []
    for group in (dist.new_group(backend=backend), gloo):
        torch.manual_seed(0)
        model = DistributedDataParallel(Branches(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model], divide_by_initial_world_size=initial):
            losses = train(model, optimizer, STEPS + dist.get_rank())
        results.append((losses, weights(model)))
    assert_like(*results)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("backend", ["ringreduce", "cpu:ringreduce"])
def test_the_wait_for_ranks_that_are_left_has_a_limit(backend: str):
    """A work that torch's C++ has kept ends with the error of its collective."""
    group: Any = dist.new_group(backend=backend)
    model = DistributedDataParallel(Branches(), process_group=group)
    cpu_backend_of(group).set_timeout(0.3)
    if dist.get_rank() == 0:
        with pytest.raises(Exception, match=r"waited 0\.3 s"), Join([model], divide_by_initial_world_size=False):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dist.barrier()


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


@pytest.mark.sizes(2, 3, 4)
def test_sync_batch_norm():
    """Ours normalises over the batches of all ranks inside DDP, as one process does; torch's takes no CPU tensors."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    with pytest.raises(ValueError, match="GPU"):
        nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))(torch.ones(3, 5))
    model = DistributedDataParallel(convert_sync_batchnorm(copy.deepcopy(alone)), bucket_cap_mb=0.0001)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for step in range(STEPS):
        batches = [batch(rank, step) for rank in range(dist.get_world_size())]
        whole = tuple(map(torch.cat, zip(*batches, strict=True)))
        for each, (rows, wanted), optimizer in zip(
            (model, alone), (batches[dist.get_rank()], whole), optimizers, strict=True
        ):
            optimizer.zero_grad()
            nn.functional.mse_loss(each(rows), wanted).backward()
            optimizer.step()
    torch.testing.assert_close(model.module.state_dict(), alone.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.fixture
def in_detail() -> Iterator[None]:
    """What TORCH_DISTRIBUTED_DEBUG=DETAIL sets, with a group that is made under it."""
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("ringreduce")
    yield
    dist.set_debug_level(dist.DebugLevel.OFF)


@pytest.mark.sizes(2, 3)
def test_ddp_in_detail(gloo: Any, in_detail: None):
    """Under TORCH_DISTRIBUTED_DEBUG=DETAIL, DDP trains, finds models that differ, names parameters that are unused."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches())
    before = weights(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not torch.equal(weights(model), before)
    with pytest.raises(MismatchError, match="shape 6"):
        dist.all_reduce(torch.ones(5 + (dist.get_rank() > 0)))
    model = DistributedDataParallel(Branches(unused=True))
    with pytest.raises(RuntimeError, match=r"branches\.[01]\.weight"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    group = dist.new_group()
    for call in (
        lambda: DistributedDataParallel(nn.Linear(3, 4 + dist.get_rank()), process_group=group),
        lambda: dist.barrier(group),
    ):
        with pytest.raises(RuntimeError):  # rank 0, whose shapes count, learns of it as the others do something else
            call()


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


def test_state_dicts_come_from_rank_0():
    """What only rank 0 has read becomes the weights and the optimizer state of shards, and comes whole out of them."""
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    alone = Branches()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    train(alone, optimizer, 2)
    read = state_dict.get_state_dict(alone, optimizer) if dist.get_rank() == 0 else ({}, {})
    sharded = fully_shard(Branches(), mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    other = torch.optim.Adam(sharded.parameters(), lr=0.01)
    options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = copy.deepcopy(read)  # which torch changes
    state_dict.set_model_state_dict(sharded, given[0], options=options)
    state_dict.set_optimizer_state_dict(sharded, other, given[1], options=options)
    whole = state_dict.get_state_dict(sharded, other, options=state_dict.StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.testing.assert_close((whole[0], whole[1]["state"]), (read[0], read[1]["state"]), rtol=0, atol=0)


@pytest.mark.sizes(4)
def test_checkpoints_are_loaded_by_other_numbers_of_ranks(tmp_path: Path):
    """fully_shard and Adam, saved by 4 ranks, go on with 2, and from there with 3 or 1, as if never interrupted."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    rows, wanted = map(torch.cat, zip(*(batch(rank, 0) for rank in range(2)), strict=True))  # 12 of them, in each step

    def start(seed: int, mesh: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        if mesh is not None:
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, mine: int = 0, parts: int = 1) -> Any:
        loss = nn.functional.mse_loss(model(rows.chunk(parts)[mine]), wanted.chunk(parts)[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    alone = start(0)
    expected = torch.stack([step(*alone) for _ in range(9)])
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    for count, first, last, loaded, saved in (
        (4, 0, 3, "", "by 4"),
        (2, 3, 9, "by 4", "by 2"),
        (3, 6, 9, "by 2", ""),
        (1, 6, 9, "by 2", ""),
    ):
        mesh = dist.device_mesh.DeviceMesh("cpu", list(range(count)))
        apart = dist.new_group(list(range(count)))  # for what a thread of torch's calls while training goes on
        if dist.get_rank() < count:
            training = start(1 if loaded else 0, mesh)
            if loaded:
                state = list(get_state_dict(*training))
                dcp.load({"state": state}, checkpoint_id=f"{folder[0]}/{loaded}", process_group=mesh.get_group())
                set_state_dict(*training, model_state_dict=state[0], optim_state_dict=state[1])
            losses, under_way = [], None
            for number in range(first, last):
                losses.append(step(*training, dist.get_rank(), count))
                dist.all_reduce(losses[-1], dist.ReduceOp.AVG, group=mesh.get_group())
                if saved == "by 2" and number == 5:
                    state = list(get_state_dict(*training))
                    under_way = dcp.async_save(
                        {"state": state}, checkpoint_id=f"{folder[0]}/{saved}", process_group=apart
                    )
            if saved == "by 4":
                state = list(get_state_dict(*training))
                dcp.save({"state": state}, checkpoint_id=f"{folder[0]}/{saved}", process_group=mesh.get_group())
            if under_way is not None:
                under_way.result()
            torch.testing.assert_close(torch.stack(losses), expected[first:last])
        dist.barrier()


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


def test_compiled_collectives():
    """Functional ones find the group by its name; torch.compile takes them, and torch.distributed's, into one graph."""
    import torch.distributed._functional_collectives as functional

    size, rank = dist.get_world_size(), dist.get_rank()
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

    def collectives(tensor: Any) -> Any:
        total = functional.all_reduce(2 * tensor, "sum", dist.group.WORLD) + 1
        gathered = gather(tensor, 0, dist.group.WORLD)
        mine = reduce_scatter(gathered, "max", 0, dist.group.WORLD)
        moved = functional.all_to_all_single(gathered, None, None, dist.group.WORLD)
        dist.all_reduce(tensor)
        return total, gathered, mine, moved, tensor

    tensor = torch.arange(3.0) + 10 * rank
    everyone = [torch.arange(3.0) + 10 * each for each in range(size)]
    total = torch.stack(everyone).sum(0)
    expected = (2 * total + 1, torch.cat(everyone), everyone[rank], everyone[rank].repeat(size), total)
    # Its code needs no C++ compiler.
    for each in (collectives, torch.compile(collectives, fullgraph=True, backend="aot_eager")):
        actual = tuple(map(functional.wait_tensor, each(tensor.clone())))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.sizes(2)
def test_compiled_ddp():
    """A model that is compiled inside of DDP, or with it and our hook, has the weights of one that is not."""
    results = []
    for inside, outside, hooked in (
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (False, True, True),
    ):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        model = DistributedDataParallel(
            torch.compile(model, backend="aot_eager") if inside else model, gradient_as_bucket_view=bool(hooked)
        )
        if hooked:
            model.register_comm_hook(AllreduceState(), allreduce_hook)
        program = torch.compile(model, backend="aot_eager") if outside else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            rows, wanted = batch(dist.get_rank(), step)
            optimizer.zero_grad()
            nn.functional.mse_loss(program(rows), wanted).backward()
            optimizer.step()
        results.append(weights(model))
    for each in results[1:]:
        torch.testing.assert_close(each, results[0])


def test_split_group_is_refused():
    """Torch splits groups of accelerators alone, and says so; the group goes on."""
    with pytest.raises(RuntimeError, match="split"):
        dist.split_group(split_ranks=[[rank] for rank in range(dist.get_world_size())])
    dist.barrier()
