"""Tensors on a GPU in all that `ringreduce.torch` offers, against references in float64 on the CPU.

Every test runs on the CPU too: as it is, and ("seeming") with tensors that are taken for tensors on a GPU and a double
of torch's streams, so that all but the GPU itself is run where there is none.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_doubles.torch_streams import TorchStreams

import ringreduce as rr

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402
from ringreduce.torch import gradients, streams  # noqa: E402
from ringreduce.torch.arrays import TENSORS  # noqa: E402
from ringreduce.torch.compression import Compression  # noqa: E402


def _can_use_a_gpu() -> bool:
    try:
        import cupy
    except ImportError:
        return False
    return bool(torch.cuda.is_available() and cupy.cuda.is_available())


needs_gpu = pytest.mark.skipif(not _can_use_a_gpu(), reason="needs a GPU, CuPy and a torch for it")


def own_gpu() -> Any:
    """Make this rank's GPU the current one; ranks of a node take turns with those there are."""
    torch.cuda.set_device(rr.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=["cpu", "seeming", pytest.param("cuda", marks=needs_gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CPU, the CPU taken for a GPU, and this rank's GPU."""
    if request.param == "cuda":
        return own_gpu()
    if request.param == "seeming":
        monkeypatch.setattr(streams, "cuda", TorchStreams())
        for module, name in ((streams, "gpu_of"), (gradients, "gpu_of"), (TENSORS, "device_of")):
            monkeypatch.setattr(module, name, lambda tensors: torch.device("cuda", 0))
    return torch.device("cpu")


def of_rank(rank: int, *shape: int, seed: int = 0) -> Any:
    """A float64 tensor on the CPU that every rank can compute for every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + rank))


def everyone(*shape: int, seed: int = 0) -> Any:
    return torch.stack([of_rank(rank, *shape, seed=seed) for rank in range(rr.size())])


def assert_near(actual: Any, expected: Any, place: Any, **tolerance: float) -> None:
    """What lies in the place is about the float64 reference."""
    assert actual.device == place
    torch.testing.assert_close(actual.cpu().double(), expected, **tolerance)


TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 3e-3, "atol": 1e-2},
    torch.bfloat16: {"rtol": 3e-2, "atol": 6e-2},
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("count", [0, 1, 1001, 300_007])
def test_allreduce(place: Any, dtype: Any, count: int) -> None:
    """Out of place and in place, of odd counts; the input stays as it was."""
    mine = of_rank(rr.rank(), count).to(place, dtype)
    kept = mine.clone()
    rounded = everyone(count).to(dtype).double()
    assert_near(hvd.allreduce(mine), rounded.mean(0), place, **TOLERANCES[dtype])
    assert torch.equal(mine, kept)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    assert_near(mine, rounded.sum(0), place, **TOLERANCES[dtype])


def test_other_ops_and_scales(place: Any) -> None:
    """Min, max, product and the scale factors; integers exactly."""
    mine, stacked = of_rank(rr.rank(), 37).to(place), everyone(37)
    assert_near(hvd.allreduce(mine, op=hvd.Min), stacked.amin(0), place)
    assert_near(hvd.allreduce(mine, op=hvd.Max), stacked.amax(0), place)
    assert_near(hvd.allreduce(mine, op=hvd.Product), stacked.prod(0), place)
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert_near(scaled, 1.5 * stacked.sum(0), place)
    whole = torch.arange(11, device=place) * (rr.rank() + 1)
    assert hvd.allreduce(whole, op=hvd.Sum).tolist() == [each * rr.size() * (rr.size() + 1) // 2 for each in range(11)]


@pytest.mark.parametrize("op", [hvd.Adasum, hvd.ReproducibleSum])
def test_ops_that_go_through_the_host(place: Any, op: Any) -> None:
    """They give what they give on the CPU, bit by bit."""
    if op == hvd.Adasum and rr.size() & (rr.size() - 1):
        pytest.skip("Adasum is compared at powers of two")
    mine = of_rank(rr.rank(), 129).float()
    expected = hvd.allreduce(mine, op=op)
    result = hvd.allreduce(mine.to(place), op=op)
    assert result.device == place
    assert torch.equal(result.cpu(), expected)


def test_tensors_of_any_strides(place: Any) -> None:
    """A result lies as its input does."""
    mine = of_rank(rr.rank(), 7, 5).to(place).t()
    assert_near(hvd.allreduce(mine), everyone(7, 5).mean(0).t(), place)
    hvd.allreduce_(mine)
    assert_near(mine, everyone(7, 5).mean(0).t(), place)


def test_handles_in_any_order(place: Any) -> None:
    """Named operations meet though the ranks submit them in different orders; each result is there when asked for."""
    numbers = list(range(6))
    order = numbers if rr.rank() % 2 else numbers[::-1]
    tensors = {each: of_rank(rr.rank(), 501 + each, seed=each).to(place) for each in numbers}
    handles = {each: hvd.allreduce_async_(tensors[each], name=f"tensor {each}", op=hvd.Sum) for each in order}
    for each in numbers:
        assert hvd.synchronize(handles[each]) is tensors[each]
        assert_near(tensors[each], everyone(501 + each, seed=each).sum(0), place)


def test_groups_of_mixed_dtypes(place: Any) -> None:
    """One operation; each result has its own dtype, shape and device."""
    dtypes = [torch.float32, torch.float64, torch.float32, torch.int64]
    tens = [10 * of_rank(rr.rank(), 3, each + 1, seed=each) for each in range(len(dtypes))]
    mine = [values.to(place, dtype) for values, dtype in zip(tens, dtypes, strict=True)]
    for reduced in (
        hvd.grouped_allreduce(mine, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum)),
    ):
        for each, (result, dtype) in enumerate(zip(reduced, dtypes, strict=True)):
            assert result.dtype == dtype
            expected = (10 * everyone(3, each + 1, seed=each)).to(dtype).double().sum(0)
            assert_near(result, expected, place, rtol=1e-5, atol=1e-5)


def test_groups_on_both_devices(place: Any) -> None:
    """Some tensors of a group may lie on the CPU."""
    mine = of_rank(rr.rank(), 33)
    here, there = hvd.grouped_allreduce([mine, mine.to(place)], name="both")
    torch.testing.assert_close(here, everyone(33).mean(0))
    assert_near(there, everyone(33).mean(0), place)


def test_other_collectives(place: Any) -> None:
    """Their results lie where their inputs do."""
    rank, size = rr.rank(), rr.size()
    mine = of_rank(rank, size * 2, 3).to(place)
    assert_near(hvd.allgather(mine), everyone(size * 2, 3).reshape(-1, 3), place)
    longer = torch.cat([of_rank(each, size * 2, 3)[: each + 1] for each in range(size)])
    assert_near(hvd.allgather(mine[: rank + 1]), longer, place)
    assert_near(hvd.broadcast(mine, size - 1), of_rank(size - 1, size * 2, 3), place)
    mixed = torch.cat([of_rank(each, size * 2, 3)[2 * rank : 2 * rank + 2] for each in range(size)])
    assert_near(hvd.alltoall(mine), mixed, place)
    total = everyone(size * 2, 3).sum(0)
    assert_near(hvd.reducescatter(mine, op=hvd.Sum), total[2 * rank : 2 * rank + 2], place)
    handles = [hvd.allgather_async(mine), hvd.broadcast_async(mine, 0), hvd.reducescatter_async(mine, op=hvd.Sum)]
    gathered, sent, part = map(hvd.synchronize, handles)
    assert_near(gathered, everyone(size * 2, 3).reshape(-1, 3), place)
    assert_near(sent, of_rank(0, size * 2, 3), place)
    assert_near(part, total[2 * rank : 2 * rank + 2], place)
    assert hvd.broadcast_(mine, 0) is mine
    assert_near(mine, of_rank(0, size * 2, 3), place)


def test_sparse_allreduce(place: Any) -> None:
    """What the ranks have is gathered on their device."""
    places = [[rr.rank(), 5 + rr.rank()]]
    mine = torch.sparse_coo_tensor(places, [1.0, 2.0], (20,), check_invariants=True).to(place)
    total = hvd.synchronize(hvd.sparse_allreduce_async(mine, op=hvd.Sum)).to_dense()
    expected = torch.zeros(20, dtype=torch.float64)
    for rank in range(rr.size()):
        expected[rank] += 1
        expected[5 + rank] += 2
    assert_near(total, expected, place)


def test_gradients_flow(place: Any) -> None:
    """Through allreduce, allgather, broadcast and reducescatter; the backward pass may run on another thread."""
    size, rank = rr.size(), rr.rank()
    x = of_rank(rank, size, 3).to(place).requires_grad_()
    weights = everyone(size, 3, seed=1)
    y = weights[rank].to(place)
    (gradient,) = torch.autograd.grad(hvd.allreduce(x, op=hvd.Sum), x, y)
    assert_near(gradient, weights.sum(0), place)
    (gradient,) = torch.autograd.grad(hvd.allgather(x), x, y.repeat(size, 1))
    assert_near(gradient, weights.sum(0), place)
    (gradient,) = torch.autograd.grad(hvd.broadcast(x, 0), x, y)
    assert_near(gradient, weights.sum(0) if rank == 0 else torch.zeros(size, 3, dtype=torch.float64), place)
    (gradient,) = torch.autograd.grad(hvd.reducescatter(x, op=hvd.Sum), x, y[:1])
    assert_near(gradient, weights[:, 0], place)


def test_models_and_objects_are_broadcast(place: Any) -> None:
    """Weights are overwritten where they lie; tensors in objects arrive on the CPU."""
    weights = {"a": of_rank(rr.rank(), 5, 3).to(place), "b": of_rank(rr.rank(), 7, seed=1).to(place)}
    hvd.broadcast_parameters(weights, root_rank=0)
    assert_near(weights["a"], of_rank(0, 5, 3), place)
    assert_near(weights["b"], of_rank(0, 7, seed=1), place)
    found = hvd.broadcast_object({"tensor": of_rank(rr.rank(), 4).to(place)}, root_rank=0)
    torch.testing.assert_close(found["tensor"].cpu(), of_rank(0, 4))
    model = torch.nn.Linear(3, 2).to(place)
    adam = torch.optim.Adam(model.parameters(), lr=0.1 * (rr.rank() + 1))
    if rr.rank() == 0:
        model(torch.ones(1, 3, device=place)).sum().backward()
        adam.step()
    hvd.broadcast_optimizer_state(adam, root_rank=0)
    assert adam.param_groups[0]["lr"] == 0.1
    state = adam.state[model.weight]["exp_avg"]
    torch.testing.assert_close(state.cpu(), torch.full((2, 3), 0.1))


def test_sync_batch_norm(place: Any) -> None:
    """Every rank normalises its part as a batch normalisation does that sees the batches of all."""
    size, rank = rr.size(), rr.rank()
    whole = everyone(6, 4).reshape(-1, 4).requires_grad_()
    plain = torch.nn.BatchNorm1d(4).double()
    expected = plain(whole)
    expected.square().sum().backward()
    mine = of_rank(rank, 6, 4).to(place).requires_grad_()
    norm = hvd.SyncBatchNorm(4).double().to(place)
    result = norm(mine)
    result.square().sum().backward()
    rows = slice(6 * rank, 6 * rank + 6)
    assert_near(result.detach(), expected[rows].detach(), place, rtol=1e-6, atol=1e-6)
    assert_near(mine.grad, whole.grad[rows], place, rtol=1e-5, atol=1e-5)
    if size > 1:
        assert_near(norm.running_var, plain.running_var, place)


# ---- the optimizer ----

STEPS, ROWS = 6, 4


def make_model(device: Any) -> Any:
    torch.manual_seed(5)
    layers = torch.nn.Linear(7, 61), torch.nn.Tanh(), torch.nn.Linear(61, 33), torch.nn.Linear(33, 3)
    return torch.nn.Sequential(*layers).to(device)


def batch_of(rank: int, step: int) -> Any:
    return of_rank(rank, ROWS, 7, seed=100 + step)


def reference(steps: int = STEPS) -> list[Any]:
    """The weights after training on the batches of all ranks, in float64 on the CPU, with nobody's help."""
    model = make_model("cpu").double()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        plain.zero_grad()
        for rank in range(rr.size()):
            (model(batch_of(rank, step)).square().mean() / rr.size()).backward()
        plain.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(place: Any, **options: Any) -> list[Any]:
    """Train on this rank's batches; return the weights."""
    model = make_model(place)
    wrapped = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    names = model.named_parameters()
    sgd = hvd.DistributedOptimizer(wrapped, named_parameters=names, bucket_nbytes=2048, **options)
    for step in range(STEPS):
        sgd.zero_grad()
        model(batch_of(rr.rank(), step).to(place, torch.float32)).square().mean().backward()
        sgd.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_same_everywhere(weights: list[Any]) -> None:
    """All ranks have the same bits."""
    for weight in weights:
        own = weight.cpu().contiguous()
        assert torch.equal(hvd.broadcast(own, 0), own)


@pytest.mark.parametrize("overlap", [False, True])
def test_optimizer_trains_on_the_batches_of_all(place: Any, overlap: bool) -> None:
    """In buckets reduced in the step, and during the backward pass."""
    weights = train(place, overlap=overlap)
    assert_same_everywhere(weights)
    for weight, expected in zip(weights, reference(), strict=True):
        assert_near(weight, expected, place, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("compression", "tolerance"),
    [
        (Compression.fp16, 1e-2),
        (Compression.bf16, 5e-2),
        (Compression.powersgd(rank=3), 5e-3),
        (Compression.topk, 2e-2),
    ],
)
def test_compressions(place: Any, compression: Any, tolerance: float, overlap: bool) -> None:
    """They come nearer to the truth than no training (which is 0.07 off), with the same bits on all ranks."""
    weights = train(place, compression=compression, overlap=overlap)
    assert_same_everywhere(weights)
    for weight, expected in zip(weights, reference(), strict=True):
        assert_near(weight, expected, place, rtol=tolerance, atol=tolerance)


def test_gradients_stay_in_their_places(place: Any) -> None:
    """Of one step and the next, with zeros in between: ``p.grad`` is a view of the same communication memory."""
    model = make_model(place)
    sgd = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    seen = set()
    for step in range(3):
        sgd.zero_grad(set_to_none=False)
        model(batch_of(rr.rank(), step).to(place, torch.float32)).sum().backward()
        sgd.step()
        seen.add(tuple(parameter.grad.data_ptr() for parameter in model.parameters()))
    assert len(seen) == 1


def test_sparse_gradients(place: Any) -> None:
    """They are gathered where they lie."""
    torch.manual_seed(1)
    table = torch.nn.Embedding(30, 4, sparse=True).to(place)
    before = table.weight.detach().cpu().double()
    sgd = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    table(torch.tensor([rr.rank(), 7], device=place)).sum().backward()
    sgd.step()
    expected = before.clone()
    for rank in range(rr.size()):
        for row in (rank, 7):
            expected[row] -= 1.0 / rr.size()
    assert_near(table.weight.detach(), expected, place, rtol=1e-5, atol=1e-5)


def test_overflows_of_one_rank_skip_the_step_of_all(place: Any) -> None:
    """A GradScaler finds them in the reduced gradients, on every rank, and goes on with a smaller scale."""
    model = make_model(place)
    sgd = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), overlap=True)
    scaler = torch.amp.GradScaler(place.type, init_scale=4.0)
    for step in range(4):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        sgd.zero_grad()
        loss = model(batch_of(rr.rank(), step).to(place, torch.float32)).square().mean()
        if step == 2 and rr.rank() == rr.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
        after = list(model.parameters())
        stayed = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        assert stayed == (step == 2), f"step {step}"
        assert_same_everywhere([each.detach() for each in after])
    assert scaler.get_scale() == 2.0


def test_closures(place: Any) -> None:
    """The loss that comes back lies where the closure's does, and is that of all ranks."""
    weight = torch.nn.Parameter(torch.ones(3, device=place))
    sgd = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))

    def closure() -> Any:
        sgd.zero_grad()
        loss = (rr.rank() + 1) * weight.sum()
        loss.backward()
        return loss

    loss = sgd.step(closure)
    mean = (rr.size() + 1) / 2
    assert loss.device == place
    assert float(loss.detach()) == pytest.approx(3 * mean)
    assert_near(weight.detach(), torch.full((3,), 1 - 0.1 * mean, dtype=torch.float64), place, rtol=1e-5, atol=1e-5)


# ---- what only a GPU can show ----


@needs_gpu
def test_streams_that_race() -> None:
    """Input that is still being computed on a side stream is waited for, and so is the result."""
    device = own_gpu()
    side = torch.cuda.Stream()
    for round in range(20):
        blocking = round % 2 == 0
        with torch.cuda.stream(side):
            mine = torch.full((100_003,), float("nan"), device=device)
            torch.cuda._sleep(20_000_000)
            mine.fill_(rr.rank() + 1.0 + round)
            result = (
                hvd.allreduce(mine, op=hvd.Sum)
                if blocking
                else hvd.synchronize(hvd.allreduce_async(mine, name=f"round {round}", op=hvd.Sum))
            )
            doubled = 2 * result
            mine.fill_(-1.0)
        expected = 2.0 * sum(rank + 1.0 + round for rank in range(rr.size()))
        side.synchronize()
        assert bool((doubled == expected).all())


@pytest.mark.sizes(2, 3, 4)
@needs_gpu
def test_devices_must_agree() -> None:
    """An allreduce, and an optimizer, of tensors that lie on the GPU on one rank only is a mismatch on all."""
    own = own_gpu()
    device = own if rr.rank() == 0 else torch.device("cpu")
    with pytest.raises(rr.MismatchError, match="cuda"):
        hvd.allreduce(torch.ones(3, device=device), name="divergent")
    with pytest.raises(rr.MismatchError, match="cuda"):
        hvd.DistributedOptimizer(torch.optim.SGD(make_model(device).parameters(), lr=0.1))
    assert hvd.allreduce(torch.ones(3, device=own)).tolist() == [1.0, 1.0, 1.0]
