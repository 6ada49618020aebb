"""The route of tensors on a GPU through all that `ringreduce.torch` offers: it gives what the route on the CPU gives.

No GPU is needed: tensors are taken for tensors on a GPU, and a double takes the place of torch's streams, so that all
but the GPU itself runs. `scripts/gpu_check` looks at tensors that are on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpu_doubles.torch_streams import TorchStreams

import ringreduce as rr

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402
from ringreduce.torch import gradients, streams  # noqa: E402
from ringreduce.torch.arrays import TENSORS  # noqa: E402
from ringreduce.torch.compression import Compression  # noqa: E402

Tensors = list[Any]


def of_rank(*shape: int, rank: int | None = None, seed: int = 0) -> Any:
    """A float64 tensor that differs between ranks."""
    rank = rr.rank() if rank is None else rank
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + rank))


def both_ways(run: Callable[[], Tensors], monkeypatch: pytest.MonkeyPatch) -> TorchStreams:
    """Check that something gives the same on the CPU and where that is taken for a GPU; return the streams' double."""
    wanted, double = [each.clone() for each in run()], TorchStreams()
    with monkeypatch.context() as patch:
        patch.setattr(streams, "cuda", double)
        for module, name in ((streams, "gpu_of"), (gradients, "gpu_of"), (TENSORS, "device_of")):
            patch.setattr(module, name, lambda tensors: torch.device("cuda", 0))
        found = run()
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        torch.testing.assert_close(one, other)
    return double


# ---- operations ----


def allreduces() -> Tensors:
    """Of all dtypes and odd counts, out of place and in place; of other operations, scales and strides."""
    made = []
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64):
        for count in (0, 1, 1001):
            mine = (10 * of_rank(count)).to(dtype)
            kept = mine.clone()
            made += [hvd.allreduce(mine, op=hvd.Sum), hvd.allreduce(mine, op=hvd.Max)]
            assert torch.equal(mine, kept)
            assert hvd.allreduce_(mine, op=hvd.Sum) is mine
            made.append(mine)
    mine = of_rank(129).float()
    made += [hvd.allreduce(mine, op=op) for op in (hvd.Average, hvd.Min, hvd.Product, hvd.ReproducibleSum)]
    made += [hvd.allreduce(mine, op=hvd.Adasum)] if rr.size() in (1, 2, 4) else []
    made += [hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)]
    return [*made, hvd.allreduce(of_rank(7, 5).t()), hvd.allreduce_(of_rank(7, 5).t())]


def handles() -> Tensors:
    """Named operations meet though the ranks submit them in different orders."""
    tensors = [of_rank(501 + each, seed=each) for each in range(6)]
    order = range(6) if rr.rank() % 2 else range(5, -1, -1)
    begun = {each: hvd.allreduce_async_(tensors[each], name=f"tensor {each}", op=hvd.Sum) for each in order}
    return [hvd.synchronize(begun[each]) for each in range(6)]


def groups() -> Tensors:
    """One operation; each result has its own dtype and shape."""
    dtypes = enumerate((torch.float32, torch.float64, torch.float32, torch.int64))
    mine = [(10 * of_rank(3, each + 1, seed=each)).to(dtype) for each, dtype in dtypes]
    later = hvd.grouped_allreduce_async(mine, op=hvd.Sum)
    return [*hvd.synchronize(later), *hvd.grouped_allreduce(mine, op=hvd.Sum)]


def others() -> Tensors:
    """The other collectives, at once and later, with other numbers of rows too; sparse tensors."""
    rank, mine = rr.rank(), of_rank(rr.size() * 2, 3)
    made = [
        hvd.allgather(mine),
        hvd.allgather(mine[: rank + 1]),
        hvd.broadcast(mine, rr.size() - 1),
        hvd.alltoall(mine),
    ]
    later = [hvd.allgather_async(mine), hvd.broadcast_async(mine, 0), hvd.reducescatter_async(mine, op=hvd.Sum)]
    made += [hvd.reducescatter(mine, op=hvd.Sum), *map(hvd.synchronize, later), hvd.broadcast_(mine, 0)]
    sparse = torch.sparse_coo_tensor([[rank, 5 + rank]], [1.0, 2.0], (20,), check_invariants=True)
    return [*made, hvd.synchronize(hvd.sparse_allreduce_async(sparse, op=hvd.Sum)).to_dense()]


def backward() -> Tensors:
    """Gradients flow through allreduce, allgather, broadcast and reducescatter."""
    size, x = rr.size(), of_rank(rr.size(), 3).requires_grad_()
    y = of_rank(size, 3, seed=1)
    results = hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x), hvd.broadcast(x, 0), hvd.reducescatter(x, op=hvd.Sum)
    return [torch.autograd.grad(r, x, g)[0] for r, g in zip(results, (y, y.repeat(size, 1), y, y[:1]), strict=True)]


def states() -> Tensors:
    """Weights, objects and the state of an optimizer are broadcast; batches of all ranks are normalised together."""
    weights = {"a": of_rank(5, 3), "b": of_rank(7, seed=1)}
    hvd.broadcast_parameters(weights, root_rank=0)
    sent = hvd.broadcast_object({"tensor": of_rank(4)}, root_rank=0)["tensor"]
    model = make_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.1 * (rr.rank() + 1))
    if rr.rank() == 0:
        model(torch.ones(1, 7)).sum().backward()
        adam.step()
    hvd.broadcast_optimizer_state(adam, root_rank=0)
    assert adam.param_groups[0]["lr"] == 0.1
    x, norm = of_rank(6, 4).requires_grad_(), hvd.SyncBatchNorm(4).double()
    result = norm(x)
    result.square().sum().backward()
    moments = [each["exp_avg"] for each in adam.state.values()]
    return [*weights.values(), sent, *moments, result.detach(), x.grad, norm.running_var]


@pytest.mark.parametrize("run", [allreduces, handles, groups, others, backward, states])
def test_operations(run: Callable[[], Tensors], monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operation gives does not depend on where the tensors are."""
    both_ways(run, monkeypatch)


# ---- the optimizer ----


def make_model() -> Any:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(7, 61), torch.nn.Tanh(), torch.nn.Linear(61, 3))


def train(scaled: bool = False, **options: Any) -> Tensors:
    """Train on this rank's batches; return the weights. With ``scaled``, the last rank overflows in the third step."""
    model, places = make_model(), set()
    wrapped = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sgd = hvd.DistributedOptimizer(wrapped, named_parameters=model.named_parameters(), bucket_nbytes=1024, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    for step in range(5):
        before = [each.detach().clone() for each in model.parameters()]
        sgd.zero_grad(set_to_none=False)
        loss = model(of_rank(4, 7, seed=100 + step).float()).square().mean()
        scaler.scale(loss * float("inf") if scaled and step == 2 and rr.rank() == rr.size() - 1 else loss).backward()
        scaler.step(sgd)
        scaler.update()
        pairs = zip(before, model.parameters(), strict=True)
        assert all(torch.equal(old, new) for old, new in pairs) == (scaled and step == 2)
        places.add(tuple(parameter.grad.data_ptr() for parameter in model.parameters()))
    assert len(places) == 1 or "compression" in options, "gradients stay in communication memory"
    weights = [parameter.detach() for parameter in model.parameters()]
    assert all(torch.equal(hvd.broadcast(each, 0), each) for each in weights), "all ranks have the same bits"
    return weights


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scaled": True},
        {"compression": Compression.fp16},
        {"compression": Compression.bf16},
        {"compression": Compression.powersgd(rank=3)},
        {"compression": Compression.topk},
    ],
)
def test_training(options: dict[str, Any], overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In buckets reduced in the step or during the backward pass: the same weights, and streams are told to wait."""
    double = both_ways(lambda: train(overlap=overlap, **options), monkeypatch)
    waits = any("waits for" in line for line in double.record)
    assert waits or not overlap or "compression" in options or hvd.size() == 1  # alone, nothing is reduced


def test_sparse_gradients_and_closures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are gathered; the loss that comes back from a closure is that of all ranks."""

    def run() -> Tensors:
        torch.manual_seed(1)
        table, weight = torch.nn.Embedding(30, 4, sparse=True), torch.nn.Parameter(torch.ones(3))
        rows = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        table(torch.tensor([rr.rank(), 7])).sum().backward()
        rows.step()
        sgd = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))

        def closure() -> Any:
            sgd.zero_grad()
            loss = (rr.rank() + 1) * weight.sum()
            loss.backward()
            return loss

        loss = sgd.step(closure)
        assert float(loss.detach()) == pytest.approx(3 * (rr.size() + 1) / 2)
        return [table.weight.detach(), weight.detach(), loss.detach()]

    both_ways(run, monkeypatch)
