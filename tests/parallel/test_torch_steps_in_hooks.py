"""Steps that a program makes in hooks of its parameters, while the backward pass goes on: one process's numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_models import assert_equal_on_ranks, mlp  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402

make_model = partial(mlp, 3, 7, 5, seed=5, dtype=torch.float64)

STEPS = 12
ROWS = 3  # for each rank


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


def batch(step: int, ranks: slice) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(hvd.size(), ROWS, 3, generator=generator, dtype=torch.float64)[ranks].flatten(0, 1)


def expected() -> list[Any]:
    model = make_model()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, slice(None))).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def each_steps_by_itself(model: Any, wrap: Callable[..., Any]) -> Callable[[bool], None]:
    """One optimizer for each parameter, which steps as soon as its gradient is there, and frees it."""
    optimizers = {}

    def hook(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def register() -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)

    def make() -> None:
        for name, parameter in model.named_parameters():
            optimizers[parameter] = wrap(sgd([parameter]), [(name, parameter)])

    return in_order(register, make)


def in_order(*actions: Callable[[], None]) -> Callable[[bool], None]:
    """Return a function that calls both, the first one first or last."""

    def call(first: bool) -> None:
        for action in actions if first else reversed(actions):
            action()

    return call


def the_last_one_steps(model: Any, wrap: Callable[..., Any]) -> Callable[[bool], None]:
    """One optimizer, which steps when the last of the gradients is there."""
    made = []

    def hook(_: Any) -> None:
        made[0].step()
        made[0].zero_grad()

    def register() -> None:
        model[0].weight.register_post_accumulate_grad_hook(hook)

    return in_order(register, lambda: made.append(wrap(sgd(model.parameters()), model.named_parameters())))


@pytest.mark.spread
@pytest.mark.parametrize("program", [each_steps_by_itself, the_last_one_steps])
@pytest.mark.parametrize(
    ("reduce_in", "overlap"), list(itertools.product(["step", "backward"], [True, False])), ids=str
)
@pytest.mark.parametrize("before", [True, False], ids=["hooks first", "wrapped first"])
def test_a_step_in_a_hook_has_the_averages(
    program: Any, reduce_in: str, overlap: bool, before: bool, caplog: pytest.LogCaptureFixture, recwarn: Any
) -> None:
    """Whether hooks were set before the optimizer was wrapped or after, and nobody is accused of changing gradients."""
    caplog.set_level("WARNING", logger="ringreduce")
    model = make_model()

    def wrap(optimizer: Any, named: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, named, reduce_in=reduce_in, overlap=overlap, bucket_nbytes=128)

    program(model, wrap)(before)
    for step in range(STEPS):
        model(batch(step, slice(hvd.rank(), hvd.rank() + 1))).square().mean().backward()
    weights = [parameter.detach() for parameter in model.parameters()]
    torch.testing.assert_close(weights, expected(), rtol=1e-11, atol=1e-13)
    assert_equal_on_ranks(weights)
    said = [each.getMessage() for each in caplog.records] + [str(each.message) for each in recwarn]
    assert not [each for each in said if "gradient" in each or "weights" in each]


@pytest.mark.spread
@pytest.mark.parametrize("before", [True, False], ids=["hooks first", "wrapped first"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=str)
def test_a_step_in_a_hook_between_nodes(nodes_of_one: None, before: bool, op: Any) -> None:
    """The same under default settings, where overlap is tried out; sums are averages times the number of ranks."""
    model = make_model()
    scale = 1.0 if op == hvd.Average else 1 / hvd.size()

    def wrap(optimizer: Any, named: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, named, op=op)

    each_steps_by_itself(model, wrap)(before)
    for step in range(STEPS):
        (scale * model(batch(step, slice(hvd.rank(), hvd.rank() + 1))).square().mean()).backward()
    torch.testing.assert_close([*model.parameters()], expected(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("before", [True, False], ids=["hooks first", "wrapped first"])
def test_hooks_of_the_program_see_and_change_what_they_did(before: bool, overlap: bool) -> None:
    """A gradient comes to a hook as this rank's own, whichever was set first, and what the hook makes of it counts."""
    model, seen = make_model(), []

    def hook(parameter: Any) -> None:
        seen.append(parameter.grad.clone())
        parameter.grad.mul_(3.0)

    def register() -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)

    made: list[Any] = []
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    in_order(register, lambda: made.append(hvd.DistributedOptimizer(plain, overlap=overlap, bucket_nbytes=128)))(before)
    for step in range(STEPS):
        seen.clear()
        made[0].zero_grad()
        model(batch(step, slice(hvd.rank(), hvd.rank() + 1))).square().mean().backward()
        made[0].step()
        for parameter, own in zip(reversed(list(model.parameters())), seen, strict=True):
            gathered = hvd.allgather(own[None])
            torch.testing.assert_close(parameter.grad, 3 * gathered.mean(0), rtol=1e-11, atol=1e-13)
