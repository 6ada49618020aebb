"""Gradients that are averages when ``backward()`` returns: what programs do to them gives one process's numbers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint

from torch_models import assert_equal_on_ranks, mlp  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402

make_model = partial(mlp, 16, 33, 5, seed=1)

STEPS = 8
ROWS = 4  # for each rank


def batches() -> Iterator[tuple[Any, Any]]:
    """The whole batch of each step, the same on all ranks."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        yield (
            torch.randn(ROWS * hvd.size(), 16, generator=generator),
            torch.randn(ROWS * hvd.size(), 5, generator=generator),
        )


def mine(tensor: Any) -> Any:
    return tensor[hvd.rank() * ROWS : (hvd.rank() + 1) * ROWS]


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.mse_loss(model(x), y)


Loop = Callable[[Any, Any, Any], None]  # takes the model, the optimizer, and what cuts a batch to this process's part


def clipping(model: Any, optimizer: Any, part: Any) -> None:
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model, part(x), part(y)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def clipping_of_checkpoints(model: Any, optimizer: Any, part: Any) -> None:
    for x, y in batches():
        optimizer.zero_grad()
        inner = checkpoint(model, part(x).requires_grad_(), use_reentrant=True)
        torch.nn.functional.mse_loss(inner, part(y)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def scaling(model: Any, optimizer: Any, part: Any) -> None:
    """The order of Accelerate: scale, backward, unscale, clip, step, update."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in batches():
        scaler.scale(loss_of(model, part(x), part(y))).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def scaling_without_a_look(model: Any, optimizer: Any, part: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, part(x), part(y))).backward()
        scaler.step(optimizer)
        scaler.update()


def within_a_closure(model: Any, optimizer: Any, part: Any) -> None:
    """The order of Lightning: the optimizer is stepped with a closure that clears, computes and clips."""
    for x, y in batches():

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, part(x), part(y))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            return loss

        optimizer.step(closure)


def accumulation(model: Any, optimizer: Any, part: Any) -> None:
    """Two halves, of which the first is within no_sync() where there is one."""
    two_passes(model, optimizer, part, getattr(optimizer, "no_sync", nullcontext))


def two_passes(model: Any, optimizer: Any, part: Any, first: Any = nullcontext) -> None:
    """A second pass, which adds to averages unless the first one is within a context that reduces nothing."""
    for x, y in batches():
        optimizer.zero_grad()
        x, y = part(x), part(y)
        with first():
            (loss_of(model, x[::2], y[::2]) / 2).backward()
        (loss_of(model, x[1::2], y[1::2]) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def penalty(model: Any, optimizer: Any, part: Any) -> None:
    """The gradient of a gradient (the squares of each row's own, so that parts add up to the whole)."""
    for x, y in batches():
        optimizer.zero_grad()
        x = part(x).requires_grad_()
        loss = torch.nn.functional.mse_loss(model(x), part(y), reduction="sum")
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (slope.square().sum() / len(x) + loss / len(x)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def replaced(model: Any, optimizer: Any, part: Any) -> None:
    """Gradients that the program exchanges for others after the pass are its own affair."""
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model, part(x), part(y)).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.sign()
        optimizer.step()


def train(loop: Loop, *, wrap: bool, **options: Any) -> list[Any]:
    model = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    if wrap:
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), bucket_nbytes=1024, reduce_in="backward", **options
        )
    loop(model, optimizer, mine if wrap else (lambda tensor: tensor))
    return [parameter.detach() for parameter in model.parameters()]


LOOPS = [
    clipping,
    clipping_of_checkpoints,
    scaling,
    scaling_without_a_look,
    within_a_closure,
    accumulation,
    two_passes,
    penalty,
]


@pytest.mark.spread
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_weights_are_those_of_one_process_on_the_whole_batch(loop: Loop, overlap: bool) -> None:
    """Whatever the program does between the pass and the step; the same bits on all ranks."""
    weights = train(loop, wrap=True, overlap=overlap)
    assert_equal_on_ranks(weights)
    torch.testing.assert_close(weights, train(loop, wrap=False), rtol=1e-4, atol=1e-6)


def test_gradients_may_be_exchanged_after_the_pass() -> None:
    """No step reduces them again; signs of averages are signs on all ranks."""
    assert_equal_on_ranks(train(replaced, wrap=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_declared_passes_are_reduced_after_the_last(overlap: bool) -> None:
    """Before it the gradients are those of this rank; a last step of fewer passes is reduced by the step."""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(sgd, reduce_in="backward", backward_passes_per_step=2, overlap=overlap)
    weight = model[0].weight
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model, mine(x), mine(y)).backward()
        own = weight.grad.clone()
        assert torch.equal(own, torch.autograd.grad(loss_of(model, mine(x), mine(y)), weight)[0])
        loss_of(model, mine(x), mine(y)).backward()
        torch.testing.assert_close(weight.grad, 2 * hvd.allreduce(own))
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, mine(x), mine(y)).backward()
    optimizer.step()
    torch.testing.assert_close(weight.grad, hvd.allreduce(own))


@pytest.mark.parametrize("overlap", [False, True])
def test_several_optimizers_and_losses(overlap: bool) -> None:
    """A generator and its critic: each pass adds to both, each optimizer steps with its own."""

    def trained(wrap: bool) -> list[Any]:
        torch.manual_seed(5)
        made, critic = torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)
        optimizers: list[Any] = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (made, critic)]
        if wrap:
            optimizers = [hvd.DistributedOptimizer(each, reduce_in="backward", overlap=overlap) for each in optimizers]
        for x, _ in batches():
            x = mine(x) if wrap else x
            for optimizer, sign in zip(optimizers, (-1.0, 1.0), strict=True):
                for each in optimizers:
                    each.zero_grad()
                (sign * critic(made(x)) - sign * critic(x)).mean().backward()
                optimizer.step()
        return [parameter.detach() for parameter in (*made.parameters(), *critic.parameters())]

    weights = trained(True)
    assert_equal_on_ranks(weights)
    torch.testing.assert_close(weights, trained(False), rtol=1e-4, atol=1e-6)


def test_sparse_and_unused_parameters() -> None:
    """An embedding's rows are gathered when the pass ends; what no rank used stays None, and so in torch."""
    torch.manual_seed(3)
    embedding, unused = torch.nn.Embedding(11, 3, sparse=True), torch.nn.Linear(2, 2)
    parameters = [*embedding.parameters(), *unused.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.5), reduce_in="backward", skip_unused=True)
    for step in range(4):
        optimizer.zero_grad()
        rows = torch.tensor([hvd.rank(), (hvd.rank() + step) % 11])
        embedding(rows).sum().backward()
        expected = torch.zeros(11, 3)
        for rank in range(hvd.size()):
            for row in (rank, (rank + step) % 11):
                expected[row] += 1.0 / hvd.size()
        torch.testing.assert_close(embedding.weight.grad.to_dense(), expected)
        assert unused.weight.grad is None
        optimizer.step()


def test_batch_normalisation_over_ranks_within() -> None:
    """Its backward pass is a collective in the middle of the pass whose end is one."""

    def trained(wrap: bool) -> list[Any]:
        torch.manual_seed(5)
        norm: Any = hvd.SyncBatchNorm(8) if wrap else torch.nn.BatchNorm1d(8)
        model = torch.nn.Sequential(torch.nn.Linear(16, 8), norm, torch.nn.Linear(8, 5))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if wrap:
            optimizer = hvd.DistributedOptimizer(optimizer, reduce_in="backward", overlap=True, bucket_nbytes=256)
        clipping(model, optimizer, mine if wrap else (lambda tensor: tensor))
        return [parameter.detach() for parameter in model.parameters()]

    weights = trained(True)
    assert_equal_on_ranks(weights)
    torch.testing.assert_close(weights, trained(False), rtol=1e-3, atol=1e-5)


@pytest.mark.sizes(2, 3, 4)
def test_sums_that_a_second_pass_adds_to_are_refused() -> None:
    """On all ranks, from ``backward()``, with the remedy; with it, they are right."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum, reduce_in="backward")
    x = torch.ones(2, 16)
    model(x).sum().backward()
    with pytest.raises(rr.ConfigError, match=r"no_sync\(\)"):
        model(x).sum().backward()
    optimizer.zero_grad()
    with optimizer.no_sync():
        model(x).sum().backward()
    own = model[0].weight.grad.clone()
    model(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, 2 * hvd.size() * own)


@pytest.mark.spread
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_sums_that_the_model_has_cleared_are_not_added_to(overlap: bool, set_to_none: bool) -> None:
    """By `Module.zero_grad`, which the optimizer does not hear of; a layer that is used twice is added to twice."""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(sgd, op=hvd.Sum, reduce_in="backward", overlap=overlap, bucket_nbytes=1024)
    for x, y in batches():
        model.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model, mine(x), mine(y)) + loss_of(model, mine(x), -mine(y))
        own = torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0]
        loss.backward()
        torch.testing.assert_close(model[0].weight.grad, hvd.allreduce(own, op=hvd.Sum))
        optimizer.step()


@pytest.mark.sizes(2, 3, 4)
def test_the_wrapped_optimizer_may_step_by_itself(recwarn: pytest.WarningsRecorder) -> None:
    """With averages, as under torch's DDP, without a warning; in a hook, before they are averages, there is one."""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), reduce_in="backward")
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model, mine(x), mine(y)).backward()
        sgd.step()
    assert_equal_on_ranks([parameter.detach() for parameter in model.parameters()])
    assert not [each for each in recwarn if "DistributedOptimizer" in str(each.message)]
    hook = model[0].weight.register_post_accumulate_grad_hook(lambda _: sgd.step())
    with pytest.warns(UserWarning, match="this rank's own"):
        loss_of(model, mine(x), mine(y)).backward()
    hook.remove()


def test_adasum_keeps_local_gradients() -> None:
    """What it combines is what the steps change."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum, reduce_in="backward"
    )
    (model(torch.ones(2, 16)).sum() * (1 + hvd.rank())).backward()
    gathered = hvd.allgather(model[2].bias.grad[None])
    assert gathered[:, 0].tolist() == [2.0 * (1 + rank) for rank in range(hvd.size())]
    optimizer.step()
    assert_equal_on_ranks([parameter.detach() for parameter in model.parameters()])


def test_another_value_of_reduce_in_is_refused() -> None:
    """With the two that there are."""
    with pytest.raises(rr.ConfigError, match='"step" or "backward"'):
        hvd.DistributedOptimizer(torch.optim.SGD(make_model().parameters(), lr=0.1), reduce_in="forward")


def two_layers(**options: Any) -> tuple[Any, Any, Any]:
    """Two layers, the optimizer of the second, and batches of this rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    sgd = torch.optim.SGD(model[1].parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(hvd.rank())
    optimizer = hvd.DistributedOptimizer(sgd, reduce_in="backward", **options)
    return model, optimizer, lambda: torch.randn(8, 4, generator=generator)


def assert_gradients_are_equal(model: Any) -> None:
    assert_equal_on_ranks([each.grad for each in model.parameters()])


@pytest.mark.parametrize("thawed", [False, True])
def test_parameters_that_come_later_are_reduced_as_well(thawed: bool) -> None:
    """Those of a new group, and those that took no gradients before."""
    model, optimizer, batch = two_layers()
    model[0].requires_grad_(not thawed)
    if thawed:
        optimizer.add_param_group({"params": list(model[0].parameters())})
    for step in range(5):
        if step == 2 and thawed:
            model[0].requires_grad_(True)
        elif step == 2:
            optimizer.add_param_group({"params": list(model[0].parameters())})
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        if step >= 2:
            assert_gradients_are_equal(model)
        optimizer.step()


def test_what_was_added_within_no_sync_alone_is_reduced_too() -> None:
    """A layer that the last pass does not use."""
    model, optimizer, batch = two_layers()
    optimizer.add_param_group({"params": list(model[0].parameters())})
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            model(batch()).square().mean().backward()
        model[1](batch()).square().mean().backward()
        assert_gradients_are_equal(model)
        optimizer.step()


def test_a_pass_that_is_cleared_does_not_count() -> None:
    """Of a last batch that makes no whole step."""
    model, optimizer, batch = two_layers(backward_passes_per_step=2)
    model[1](batch()).sum().backward()
    optimizer.zero_grad()
    for _ in range(2):
        model[1](batch()).square().mean().backward()
    assert_gradients_are_equal(model[1])


def test_passes_that_are_declared_later_stay_declared(no_world: None) -> None:
    """In the world that comes after this one, too."""
    rr.init()
    model, optimizer, batch = two_layers()
    optimizer.set_backward_passes_per_step(2)
    rr.shutdown()
    rr.init()
    optimizer.rejoin()
    assert optimizer.backward_passes_per_step == 2
    for _ in range(2):
        model[1](batch()).square().mean().backward()
    assert_gradients_are_equal(model[1])


def test_passes_within_passes_do_not_count() -> None:
    """Those that reentrant checkpoints make, below a layer without."""
    model, optimizer, batch = two_layers(backward_passes_per_step=2)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            inner = checkpoint(model[0], batch().requires_grad_(), use_reentrant=True)
            model[1](checkpoint(torch.tanh, inner, use_reentrant=True)).square().mean().backward()
        assert_gradients_are_equal(model)
        optimizer.step()


@pytest.mark.sizes(2, 3, 4)
def test_sparse_gradients_can_be_made_dense() -> None:
    """Before they are reduced, wherever that is."""
    embedding = torch.nn.Embedding(8, 4, sparse=True)
    sgd = torch.optim.SGD(embedding.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, sparse_as_dense=True, reduce_in="backward")
    embedding(torch.tensor([hvd.rank(), 2])).sum().backward()
    assert embedding.weight.grad.layout is torch.strided
    torch.testing.assert_close(embedding.weight.grad[2], torch.full((4,), 1.0 + (hvd.size() > 2) / hvd.size()))
    assert optimizer


@pytest.mark.sizes(2, 3, 4)
def test_a_pass_that_fails_leaves_nothing() -> None:
    """Neither the optimizer that it was for, nor a reduction: another one works."""
    model, optimizer, batch = two_layers()
    optimizer.add_param_group({"params": list(model[0].parameters())})

    def fail(_: Any) -> None:
        raise MemoryError("on purpose")

    middle = model[0](batch())
    result = model[1](middle)
    (middle if hvd.rank() == 0 else result).register_hook(fail)
    with pytest.raises(MemoryError, match="on purpose"):
        result.sum().backward()
    kept = weakref.ref(optimizer._training.gradients)
    del optimizer, middle, result
    gc.collect()
    assert kept() is None
    again = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), reduce_in="backward")
    again.zero_grad()
    model(batch()).sum().backward()
    assert_gradients_are_equal(model)


@pytest.mark.sizes(2, 3, 4)
def test_ranks_that_are_a_step_apart_are_told() -> None:
    """A pass of one rank that adds to no gradient of the optimizer; all raise, and nobody averages different steps."""
    model, optimizer, batch = two_layers()
    other = torch.nn.Linear(4, 4)
    for step in range(2):
        optimizer.zero_grad()
        skips = step == 1 and hvd.rank() == 1
        if step == 0 or skips:
            (other if skips else model[1])(batch()).sum().backward()
            optimizer.step()
    with pytest.raises(rr.ConfigError, match="different steps"):
        model[1](batch()).sum().backward()


# ---- ranks that do not run the same passes ----


@pytest.fixture
def short_limits(no_world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A world that gives up soon."""
    monkeypatch.setenv("RINGREDUCE_TIMEOUT", "1.5")
    rr.init()


def backward(model: Any) -> None:
    model(torch.ones(2, 16)).sum().backward()


@pytest.mark.sizes(2)
def test_a_pass_on_one_rank_alone(short_limits: None) -> None:
    """An error from ``backward()`` names the optimizer and the ranks; the world is closed, not hung."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), reduce_in="backward")
    if hvd.rank() == 0:
        with pytest.raises(rr.CollectiveTimeoutError, match="backward pass of SGD over 4 parameters") as caught:
            backward(model)
        assert "rank 1" in str(caught.value)
        with pytest.raises(rr.TransportError):
            hvd.allreduce(torch.ones(1))
        assert optimizer


@pytest.mark.sizes(2)
def test_optimizers_in_different_order(short_limits: None) -> None:
    """Each rank waits for the other in the pass of another optimizer; both are named."""
    first, second = make_model(), make_model()[0]
    optimizers = [
        hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), reduce_in="backward")
        for kind, model in ((torch.optim.SGD, first), (torch.optim.Adam, second))
    ]
    with pytest.raises(rr.CollectiveError) as caught:
        backward(first if hvd.rank() == 0 else second)
    mine = "SGD" if hvd.rank() == 0 else "Adam"
    assert f"backward pass of {mine} over" in str(caught.value)
    assert all(f"over {number} parameters" in str(caught.value) for number in (2, 4))
    assert optimizers


@pytest.mark.parametrize("clears", [True, False])
def test_passes_go_on_in_a_new_world(clears: bool) -> None:
    """After shutdown() and init() a pass, or the last of several, leaves averages over the ranks of the new world."""
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], reduce_in="backward")
    hvd.broadcast_parameters({"w": weight}, root_rank=0)
    (weight * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    if clears:
        optimizer.zero_grad()
    with optimizer.no_sync():
        (weight * (hvd.rank() + 1)).sum().backward()
    hvd.shutdown()
    hvd.init()
    (weight * (hvd.rank() + 1)).sum().backward()
    average = (hvd.size() + 1) / 2
    total = (2 if clears else 3) * average
    assert torch.allclose(weight.grad, torch.full_like(weight, total))
    optimizer.step()
    assert torch.allclose(weight, torch.full_like(weight, -average - total))
