"""Optimizers that step by methods of their own: right where gradients are averages, else refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ringreduce as rr
from ringreduce.testing import caught

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("ringreduce.torch")

RADIUS, RATE = 0.5, 0.25


class Sam(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Climbs along the gradient, and steps from where it was with the gradient from there; by an optimizer within."""

    def __init__(self, parameters: Any, writes_data: bool = False) -> None:
        super().__init__(parameters, {"lr": RATE})
        self.within = torch.optim.SGD(self.param_groups, lr=RATE)
        self.param_groups = self.within.param_groups
        self.writes_data = writes_data
        self.asked = 0

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["before"] = parameter.detach().clone()
                climb = parameter.grad / parameter.grad.norm() * RADIUS
                (parameter.data if self.writes_data else parameter).add_(climb)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.state[parameter]["before"]
        self.within.step()

    @torch.no_grad()
    def own_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=RATE)

    def twice(self, closure: Callable[[], Any]) -> None:
        for _ in range(2):
            closure()
            self.within.step()

    @torch.no_grad()
    def swap(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(-1.0)

    train = eval = swap

    def step_and_swap(self) -> None:
        self.step()
        self.swap()

    def rate(self) -> float:
        self.asked += 1
        return float(self.param_groups[0]["lr"])

    def step(self, closure: Any = None) -> Any:
        return self.within.step(closure)


def weight_of() -> Any:
    return torch.nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))


def add_gradient(weight: Any, rank: int) -> None:
    """Add that of half the square of the weight's distance to (rank, 0)."""
    (0.5 * (weight - torch.tensor([float(rank), 0.0], dtype=torch.float64)).square().sum()).backward()


def flat_minimum(size: int, steps: int) -> Any:
    """Return the weight after steps with the average of the ranks' gradients, computed alone."""
    weight, mean = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([(size - 1) / 2, 0.0])
    for _ in range(steps):
        gradient = weight - mean
        weight = weight - RATE * (weight + gradient / gradient.norm() * RADIUS - mean)
    return weight


@pytest.mark.parametrize("node_size", [None, 1])
def test_two_steps_of_averages_that_the_backward_pass_makes(nodes_of: Any, node_size: int | None) -> None:
    """SAM: two backward passes a step, which give what one process gets from the average of the losses."""
    nodes_of(node_size)
    weight = weight_of()
    optimizer = hvd.DistributedOptimizer(Sam([weight]), [("w", weight)], reduce_in="backward")
    for _ in range(4):
        add_gradient(weight, hvd.rank())
        optimizer.first_step(zero_grad=True)
        add_gradient(weight, hvd.rank())
        optimizer.second_step()
        optimizer.zero_grad()
    torch.testing.assert_close(weight.detach(), flat_minimum(hvd.size(), 4), rtol=0, atol=1e-12)


def test_synchronized_gradients_may_be_stepped_with(world: rr.Communicator) -> None:
    """A program may reduce the gradients by itself before each of the methods."""
    weight = weight_of()
    optimizer = hvd.DistributedOptimizer(Sam([weight]), [("w", weight)])
    for _ in range(3):
        add_gradient(weight, world.rank)
        optimizer.synchronize()
        optimizer.first_step(zero_grad=True)
        add_gradient(weight, world.rank)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.second_step()
        optimizer.zero_grad()
    torch.testing.assert_close(weight.detach(), flat_minimum(world.size, 3), rtol=0, atol=1e-12)


@pytest.mark.spread
@pytest.mark.parametrize(
    "way",
    [
        "first_step",
        "second_step",
        "own_step",
        "first_step by data",
        "first_step and zero",
        "twice",
        "staleness",
        "shard",
    ],
)
def test_steps_with_unreduced_gradients_are_refused(world: rr.Communicator, way: str) -> None:
    """On every rank that makes one, by an error that says what to do; a rank that is alone may step as it likes."""
    weight = weight_of()
    options = {"staleness": 1} if way == "staleness" else {"shard": "node"} if way == "shard" else {}
    optimizer = hvd.DistributedOptimizer(Sam([weight], way.endswith("data")), [("w", weight)], **options)
    optimizer.step()
    add_gradient(weight, world.rank)
    calls = {
        "first_step": optimizer.first_step,
        "second_step": optimizer.second_step,
        "first_step by data": optimizer.first_step,
        "first_step and zero": lambda: optimizer.first_step(zero_grad=True),
        "twice": lambda: (optimizer.zero_grad(), optimizer.twice(lambda: add_gradient(weight, world.rank))),
    }
    with torch.no_grad():
        optimizer.state[weight]["before"] = weight.detach().clone()
    error = caught(calls.get(way, optimizer.own_step))
    if world.size == 1:
        assert error is None
    else:
        assert isinstance(error, rr.ConfigError)
        assert 'reduce_in="backward"' in str(error)
        assert "has changed parameters" in str(error)


def test_what_writes_without_new_gradients_goes_on(world: rr.Communicator) -> None:
    """Averages of weights are swapped in and out between a step and the next backward pass; others only look."""
    weight, other = weight_of(), weight_of()
    optimizer = hvd.DistributedOptimizer(Sam([weight]), [("w", weight)])
    expected = weight.detach().clone()
    for turn in range(4):
        optimizer.swap()
        optimizer.swap()
        if turn % 2:
            weight.grad = None
            add_gradient(weight, world.rank)
            optimizer.zero_grad(set_to_none=turn == 1)
            optimizer.swap()
            optimizer.swap()
            optimizer.zero_grad()
        add_gradient(weight, world.rank)
        assert optimizer.rate() == RATE
        optimizer.step_and_swap()
        expected = -(expected - RATE * (expected - torch.tensor([(world.size - 1) / 2, 0.0])))
        optimizer.swap()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.swap()
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)
        weight.grad = None
    optimizer.add_param_group({"params": [other]})
    optimizer.swap()
    assert optimizer.asked == 4


def test_gradients_that_the_model_has_cleared_are_not_there(world: rr.Communicator) -> None:
    """A program may clear them by `model.zero_grad()`, of which the optimizer hears nothing; later ones count again."""
    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(Sam(model.parameters()), model.named_parameters())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad()
        optimizer.swap()
        optimizer.swap()
    model(torch.ones(1, 2)).sum().backward()
    assert isinstance(caught(optimizer.swap), rr.ConfigError) == (world.size > 1)


@pytest.mark.parametrize("wrap", ["DistributedOptimizer", "LocalSGD"])
def test_weights_are_swapped_in_the_midst_of_gradients_by_train_and_eval(world: rr.Communicator, wrap: str) -> None:
    """An epoch may end while gradients are accumulated; the step averages those from before and after it."""
    weight, options = weight_of(), {} if wrap == "DistributedOptimizer" else {"period": 1, "replica": "rank"}
    optimizer = getattr(hvd, wrap)(Sam([weight]), [("w", weight)], **options)
    add_gradient(weight, world.rank)
    optimizer.eval()
    torch.testing.assert_close(weight.detach(), -weight_of().detach(), rtol=0, atol=0)
    optimizer.train()
    add_gradient(weight, world.rank)
    optimizer.step()
    mean = torch.tensor([(world.size - 1) / 2, 0.0])
    expected = weight_of().detach() - RATE * 2 * (weight_of().detach() - mean)
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)


def test_replicas_that_step_by_own_methods_are_refused(world: rr.Communicator) -> None:
    """Local training counts steps, and exchanges weights, in `step`: by other methods replicas would only part."""
    weight = weight_of()
    optimizer = hvd.LocalSGD(Sam([weight]), [("w", weight)], period=2, replica="rank")
    for _ in range(2):
        optimizer.zero_grad()
        add_gradient(weight, world.rank)
        optimizer.step()
        optimizer.swap()
        optimizer.swap()
    add_gradient(weight, world.rank)
    error = caught(optimizer.own_step)
    if world.size == 1:
        assert error is None
    else:
        assert isinstance(error, rr.ConfigError)
        assert "step(closure)" in str(error)
