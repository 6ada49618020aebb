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
from torch_models import mlp  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402
from ringreduce.torch.compression import Compression  # noqa: E402
from ringreduce.torch.tensors import streams  # noqa: E402
from ringreduce.torch.tensors.arrays import TENSORS  # noqa: E402

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
        for module, name in ((streams, "gpu_of"), (TENSORS, "device_of")):
            patch.setattr(module, name, lambda tensors: torch.device("cuda", 0))
        found = run()
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        torch.testing.assert_close(one, other)
    return double


# ---- operations ----


def allreduces() -> Tensors:
    """Of several dtypes and odd counts, out of place and in place; of other operations, scales and strides."""
    made = []
    for dtype, count in ((torch.float32, 0), (torch.float16, 1001), (torch.bfloat16, 1), (torch.int64, 7)):
        mine = (10 * of_rank(count)).to(dtype)
        made += [hvd.allreduce(mine, op=hvd.Sum), hvd.allreduce_(mine, op=hvd.Max)]
    mine = of_rank(7, 5).t()
    made += [hvd.allreduce(mine, op=op) for op in (hvd.Average, hvd.ReproducibleSum)]
    made += [hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), hvd.allreduce_(mine)]
    made += hvd.grouped_allreduce([of_rank(3), of_rank(2).float()], op=hvd.Sum)
    later = [hvd.allgather_async(mine), hvd.broadcast_async(mine, 0)]
    sparse = torch.sparse_coo_tensor([[rr.rank(), 5 + rr.rank()]], [1.0, 2.0], (20,), check_invariants=True)
    made += [hvd.synchronize(hvd.sparse_allreduce_async(sparse, op=hvd.Sum)).to_dense()]
    return [*made, *map(hvd.synchronize, later), hvd.alltoall(of_rank(rr.size() * 2)), hvd.broadcast_(of_rank(3), 0)]


def backward() -> Tensors:
    """Gradients flow through allreduce, allgather, broadcast and reducescatter."""
    size, x = rr.size(), of_rank(rr.size(), 3).requires_grad_()
    y = of_rank(size, 3, seed=1)
    results = hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x), hvd.broadcast(x, 0), hvd.reducescatter(x, op=hvd.Sum)
    return [torch.autograd.grad(r, x, g)[0] for r, g in zip(results, (y, y.repeat(size, 1), y, y[:1]), strict=True)]


@pytest.mark.parametrize("run", [allreduces, backward])
def test_operations(run: Callable[[], Tensors], monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operation gives does not depend on where the tensors are."""
    both_ways(run, monkeypatch)


# ---- the optimizer ----


def train(scaled: bool = False, **options: Any) -> Tensors:
    """Train on this rank's batches; return the weights. With ``scaled``, the last rank overflows in the third step."""
    model, places = mlp(7, 61, 3, seed=5), set()
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


@pytest.mark.spread
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("options", [{}, {"scaled": True}, {"compression": Compression.powersgd(rank=3)}])
def test_training(options: dict[str, Any], overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In buckets reduced in the step or during the backward pass: the same weights, and streams are told to wait."""
    double = both_ways(lambda: train(overlap=overlap, **options), monkeypatch)
    waits = any("waits for" in line for line in double.record)
    assert waits or not overlap or "compression" in options or hvd.size() == 1  # alone, nothing is reduced
