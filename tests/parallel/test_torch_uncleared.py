"""Gradients that a program does not clear between steps, with ``shard``: right numbers, or an error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
from torch_models import Model, Optimizer, Own, mlp  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402

make_model = partial(mlp, 13, 17, 17, 3, dtype=torch.float64)

pytestmark = pytest.mark.spread


STEPS = 8


class Norms(Own):
    """Steps whose length depends on the norm of a whole parameter, so that none may be cut."""

    def update(self, parameter: Any, group: dict[str, Any]) -> None:
        parameter -= group["lr"] * parameter.norm() * parameter.grad


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "whole": Norms,
}


def backward(model: Model, step: int) -> None:
    torch.manual_seed(1000 * rr.rank() + step)
    model(torch.randn(4, 13, dtype=torch.float64)).square().mean().backward()


def clear(model: Model, optimizer: Optimizer, step: int) -> None:
    """Clear in one of three ways."""
    if step % 3 == 0:
        optimizer.zero_grad()
    elif step % 3 == 1:
        model.zero_grad()
    else:
        for parameter in model.parameters():
            parameter.grad.zero_()


def never(model: Model, optimizer: Optimizer, step: int) -> None:
    backward(model, step)
    optimizer.step()


def sometimes(model: Model, optimizer: Optimizer, step: int) -> None:
    if step not in (3, 4, 7):
        clear(model, optimizer, step)
    backward(model, step)
    optimizer.step()


def after_clipping(model: Model, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    backward(model, step)
    if step > 1:
        optimizer.clip_grad_norm_(0.1)
        backward(model, 100 + step)
    optimizer.step()


def clip_and_keep(model: Model, optimizer: Optimizer, step: int) -> None:
    if step < 3:
        optimizer.zero_grad()
    backward(model, step)
    optimizer.clip_grad_norm_(0.1)
    optimizer.step()


def step_again(model: Model, optimizer: Optimizer, step: int) -> None:
    """Make another step with the same gradients, and one with those of some layers and of the last step."""
    optimizer.zero_grad()
    backward(model, step)
    optimizer.step()
    if step > 2:
        optimizer.step()
        backward(model[:2], 100 + step)
        optimizer.step()


def look_and_keep(model: Model, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    backward(model, step)
    if step > 3:
        optimizer.synchronize()
        backward(model, 100 + step)
    optimizer.step()


def use_others(model: Model, optimizer: Optimizer, step: int) -> None:
    """Use other layers on each rank when gradients are kept."""
    if step != 4:
        optimizer.zero_grad()
    backward(model[:2] if step == 4 and rr.rank() % 2 else model, step)
    optimizer.step()


def hold(model: Model, optimizer: Optimizer, step: int) -> None:
    """Hold gradients of all steps, on one rank."""
    sometimes(model, optimizer, step)
    if rr.rank() == 0:
        model.held = [*getattr(model, "held", ()), *(parameter.grad for parameter in model.parameters())]


def write(model: Model, optimizer: Optimizer, step: int) -> None:
    """Write gradients that no backward pass has made to where others were."""
    torch.manual_seed(1000 * rr.rank() + step)
    for parameter in model.parameters():
        gradient = torch.randn_like(parameter)
        if step % 2 and parameter.grad is not None:
            parameter.grad.mul_(0.5).add_(gradient)
        elif step % 4 and parameter.grad is not None:
            parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient if parameter.grad is None else parameter.grad * 0.5 + gradient
    optimizer.step()


def use_a_graph(model: Model, optimizer: Optimizer, step: int) -> None:
    """Passes that keep graphs of gradients add up elsewhere."""
    if step < 4:
        optimizer.zero_grad()
    torch.manual_seed(1000 * rr.rank() + step)
    model(torch.randn(4, 13, dtype=torch.float64)).square().mean().backward(create_graph=step == 5)
    optimizer.step()
    if step == 5:
        for parameter in model.parameters():
            parameter.grad = parameter.grad.detach()


def scale(model: Model, optimizer: Optimizer, step: int) -> None:
    scaler = model.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", 16.0))
    if step not in (4, 5):
        optimizer.zero_grad()
    torch.manual_seed(1000 * rr.rank() + step)
    scaler.scale(model(torch.randn(4, 13, dtype=torch.float64)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


WAYS = [
    never,
    sometimes,
    after_clipping,
    clip_and_keep,
    step_again,
    look_and_keep,
    use_others,
    hold,
    write,
    use_a_graph,
    scale,
]


def train(make_step: Callable[[Model, Optimizer, int], None], name: str, shard: str | None, **options: Any) -> Model:
    model = make_model()
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), named, shard=shard, **options)
    for step in range(STEPS):
        make_step(model, optimizer, step)
    return model


def require_same(make_step: Callable[[Model, Optimizer, int], None], name: str, **options: Any) -> None:
    even = len(set(map(len, rr.world().topology.nodes))) == 1
    plain = train(make_step, name, None, **options)
    for shard in ("node", *(["all"] if even else [])):
        other = train(make_step, name, shard, **options)
        torch.testing.assert_close([*plain.parameters()], [*other.parameters()])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.filterwarnings("ignore:optimizer.step.. called without optimizer.skip_synchronize")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make_step", WAYS)
def test_weights_of_gradients_that_are_not_cleared(make_step: Callable[[Model, Optimizer, int], None], name: str):
    """They are those of ranks that have the averages of all gradients, to rounding."""
    require_same(make_step, name)


@pytest.mark.parametrize("make_step", [sometimes, clip_and_keep])
@pytest.mark.parametrize(
    "options", [{"bucket_nbytes": 1}, {"num_groups": 2}, {"gradient_predivide_factor": 2.0}, {"reduce_in": "backward"}]
)
def test_weights_with_options(make_step: Callable[[Model, Optimizer, int], None], options: dict[str, Any]):
    require_same(make_step, "momentum", **options)


@pytest.mark.parametrize("node_size", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("make_step", [sometimes, after_clipping, clip_and_keep, hold])
def test_weights_between_nodes(
    make_step: Callable[[Model, Optimizer, int], None], overlap: bool, node_size: int, nodes_of: Callable[[int], None]
):
    nodes_of(node_size)
    require_same(make_step, "momentum", overlap=overlap)


def test_gradients_that_are_added_to_after_some_steps():
    """A closed form: three steps of the average, and then one of twice the average."""
    parameter = torch.nn.Parameter(torch.zeros(64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), shard="node")
    for step in range(4):
        if step < 3:
            optimizer.zero_grad()
        (parameter * (rr.rank() + 1.0)).sum().backward()
        optimizer.step()
    mean = (rr.size() + 1) / 2
    torch.testing.assert_close(parameter.detach(), torch.full((64,), -5 * mean))


def begun() -> tuple[Model, Optimizer]:
    """Return a model and an optimizer that have made steps, so that a rank has the averages of its part alone."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, shard="node")
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return model, optimizer


def write_in_place(model: Model, optimizer: Optimizer) -> None:
    """Write on one rank into what a step has left."""
    if rr.rank() == 0:
        model[2].weight.grad.add_(1.0)
    optimizer.step()


def write_and_add(model: Model, optimizer: Optimizer) -> None:
    if rr.rank() == 0:
        model[2].weight.grad.add_(1.0)
    backward(model, 5)
    optimizer.step()


def clear_on_some(model: Model, optimizer: Optimizer) -> None:
    if rr.rank():
        model.zero_grad()
    backward(model, 5)
    optimizer.step()


def weight_averages(model: Model, optimizer: Optimizer) -> None:
    backward(model, 5)
    optimizer.step(samples=1 + rr.rank())


def skip_the_reduction(model: Model, optimizer: Optimizer) -> None:
    backward(model, 5)
    with optimizer.skip_synchronize():
        optimizer.step()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("wrong", [write_in_place, write_and_add, clear_on_some, weight_averages, skip_the_reduction])
def test_what_cannot_be_right_raises_on_all_ranks(wrong: Callable[[Model, Optimizer], None]):
    """The error names the remedy, changes nothing, and training goes on once gradients are cleared."""
    model, optimizer = begun()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2 if wrong is write_in_place else 1):
        with pytest.raises(rr.ConfigError, match=r"optimizer\.zero_grad\(\)"):
            wrong(model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    model.zero_grad()
    backward(model, 6)
    optimizer.step()
    alone, plain = begun()
    plain.zero_grad()
    backward(alone, 6)
    plain.step()
    torch.testing.assert_close([*model.parameters()], [*alone.parameters()])
