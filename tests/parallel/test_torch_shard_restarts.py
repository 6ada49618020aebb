"""``shard`` in worlds that end and begin again: state and parameters go on, and belong to nobody else meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
from torch_models import Optimizer, Own  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402

pytestmark = pytest.mark.spread


class Counting(Own):
    """Counts in Python numbers, and gets whole parameters."""

    def update(self, parameter: Any, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["count"] = state.get("count", 0) + 1
        state["sum"] = state.get("sum", 0.0) + parameter.grad
        parameter.add_(state["sum"], alpha=-group["lr"] / state["count"])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.5),
    "adam": lambda given: torch.optim.Adam(given, lr=0.1),
    "counting": Counting,
}


def shards() -> list[str | None]:
    even = len(set(map(len, rr.world().topology.nodes))) == 1
    return [None, "node", *(["all"] if even else [])]


def made(name: str, shard: str | None) -> tuple[list[Any], Optimizer]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (100, 33, 1, 70)]
    return parameters, hvd.DistributedOptimizer(OPTIMIZERS[name](parameters), shard=shard, bucket_nbytes=600)


def make_step(parameters: list[Any], optimizer: Optimizer, step: int) -> None:
    """The third one has no gradient for the first parameter."""
    optimizer.zero_grad()
    used = parameters[1:] if step == 2 else parameters
    torch.manual_seed(1000 * rr.rank() + step)
    sum((parameter * torch.randn_like(parameter)).sum() for parameter in used).backward()
    optimizer.step()


def restart(parameters: list[Any], optimizer: Optimizer) -> None:
    hvd.shutdown()
    hvd.init()


def restart_twice(parameters: list[Any], optimizer: Optimizer) -> None:
    restart(parameters, optimizer)
    restart(parameters, optimizer)


def restart_and_save(parameters: list[Any], optimizer: Optimizer) -> None:
    """The state that is saved between the worlds is complete; to load it changes nothing."""
    before = copy.deepcopy(optimizer.state_dict())
    restart(parameters, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    assert state["state"].keys() == before["state"].keys()
    for number, values in before["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(state["state"][number][name], value)


def restart_and_load(parameters: list[Any], optimizer: Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    make_step(parameters, optimizer, 7)  # of which nothing is to remain
    restart(parameters, optimizer)
    with torch.no_grad():
        for parameter, value in zip(parameters, optimizer.kept, strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(state)


def restart_and_broadcast(parameters: list[Any], optimizer: Optimizer) -> None:
    restart(parameters, optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def divide_otherwise(parameters: list[Any], optimizer: Optimizer) -> None:
    """Go on where all ranks are on one node."""
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RINGREDUCE_NODE_SIZE", raising=False)
        hvd.init()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_added_in_a_new_world_before_its_first_step(any_nodes: None, name: str) -> None:
    for shard in shards():
        weights = []
        for each, ends in ((None, False), (shard, True)):
            parameters, optimizer = made(name, each)
            make_step(parameters, optimizer, 0)
            if ends:
                restart(parameters, optimizer)
            parameters.append(torch.nn.Parameter(torch.ones(9, dtype=torch.float64)))
            optimizer.add_param_group({"params": parameters[-1:]})
            for step in range(1, 4):
                make_step(parameters, optimizer, step)
            weights.append([parameter.detach().clone() for parameter in parameters])
        torch.testing.assert_close(*weights)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "between", [restart, restart_twice, restart_and_save, restart_and_load, restart_and_broadcast, divide_otherwise]
)
def test_training_goes_on_as_without_an_end(
    any_nodes: None, between: Callable[[list[Any], Optimizer], None], name: str
) -> None:
    """Weights and state are those of training in one world, without shards, to rounding."""
    plain, alone = made(name, None)
    for step in range(5):
        make_step(plain, alone, step)
    for shard in shards():
        parameters, optimizer = made(name, shard)
        for step in range(5):
            if step == 2:
                optimizer.kept = [parameter.detach().clone() for parameter in parameters]
                between(parameters, optimizer)
            make_step(parameters, optimizer, step)
        torch.testing.assert_close(parameters, plain)
        state, expected = optimizer.state_dict()["state"], alone.state_dict()["state"]
        assert state.keys() == expected.keys()
        for number, values in expected.items():
            for key, value in values.items():
                torch.testing.assert_close(state[number][key], value)


@pytest.mark.parametrize("shard", ["node", "all"])
def test_what_is_written_between_worlds_counts_once(any_nodes: None, shard: str) -> None:
    """Each rank has parameters of its own from the end of a world to the next step."""
    if shard not in shards():
        pytest.skip("needs nodes of equal size")
    parameters, optimizer = made("momentum", shard)
    make_step(parameters, optimizer, 0)
    before = [parameter.detach().clone() for parameter in parameters]
    hvd.shutdown()
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)
    hvd.init()
    with torch.no_grad():
        parameters[0].mul_(2.0)
        with optimizer.writing():
            parameters[1].mul_(4.0)
    rr.barrier()
    for parameter, old, factor in zip(parameters, before, (1.0, 2.0, 0.5, 0.5), strict=True):
        assert torch.equal(parameter.detach(), factor * old)
    optimizer.zero_grad()
    sum(0.0 * parameter.sum() for parameter in parameters).backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for parameter, old, factor in zip(parameters, before, (1.0, 2.0, 0.5, 0.5), strict=True):
        assert torch.equal(parameter.detach(), factor * old)
    rr.barrier()
    with torch.no_grad():
        parameters[0].add_(1.0)
    if rr.size() > 1:
        optimizer.zero_grad()
        parameters[0].sum().backward()
        with pytest.raises((rr.ConfigError, rr.MismatchError), match=r"optimizer\.writing"):
            optimizer.step()


def test_a_world_that_has_ended_says_so() -> None:
    """No error about parameters that the program has not touched."""
    parameters, optimizer = made("momentum", "node")
    make_step(parameters, optimizer, 0)
    hvd.shutdown()
    try:
        optimizer.zero_grad()
        parameters[0].sum().backward()
        with pytest.raises(rr.ShutdownError):
            optimizer.step()
    finally:
        hvd.init()
