"""Parameters that the ranks of a node have in common: steps of other optimizers, and steps that fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402

# A rank alone has its parameters for itself.
pytestmark = [pytest.mark.sizes(2, 3, 4), pytest.mark.spread, pytest.mark.usefixtures("nodes")]

Optimizer = Any

REFUSED = "another optimizer with shard has these parameters"

#: Each makes another optimizer that the library sees made.
WRAPPERS: dict[str, Callable[[Any], Optimizer]] = {
    "plain": lambda parameters: hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0)),
    "shard": lambda parameters: hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), shard="node"),
    "stale": lambda parameters: hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), staleness=1),
    "backward": lambda parameters: hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), reduce_in="backward"),
    "diloco": lambda parameters: hvd.DiLoCo(torch.optim.SGD(parameters, lr=1.0), replica="rank", period=2),
    "local shard": lambda parameters: hvd.LocalSGD(torch.optim.SGD(parameters, lr=1.0), period=2, shard="node"),
}


@pytest.fixture(params=["node", "all"])
def shard(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made() -> list[Any]:
    return [torch.nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (65, 3)]


def descend(optimizer: Optimizer, parameters: list[Any], steps: int = 1) -> None:
    """Make steps with gradients of which the average is 1 everywhere."""
    for _ in range(steps):
        optimizer.zero_grad()
        weight = 2 * (rr.rank() + 1) / (rr.size() + 1)
        sum(weight * each.sum() for each in parameters).backward()
        optimizer.step()


def require_all(parameters: list[Any], value: float) -> None:
    for each in parameters:
        torch.testing.assert_close(each.detach(), torch.full_like(each, value), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_ones_are_refused_when_they_are_made(shard: str, wrapper: str):
    """All ranks get the same error, and the first optimizer goes on; when it is deleted, the other one can be made."""
    parameters = made()
    first = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), shard=shard)
    descend(first, parameters)
    with pytest.raises(rr.ConfigError, match=REFUSED):
        WRAPPERS[wrapper](parameters)
    descend(first, parameters)
    require_all(parameters, -1.0)
    first.zero_grad()
    del first
    second = WRAPPERS[wrapper](parameters)
    descend(second, parameters, steps=2)
    if hasattr(second, "synchronize"):
        second.synchronize()
    if wrapper != "diloco":  # whose outer step has another length
        require_all(parameters, -3.0)


@pytest.mark.parametrize("wrapper", ["plain", "shard", "diloco"])
def test_wrapped_ones_that_were_made_before(shard: str, wrapper: str):
    """Both are made before parameters are in common: the step that would mix them raises, on all ranks."""
    parameters = made()
    earlier = WRAPPERS[wrapper](parameters)
    sharded = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), shard=shard)
    descend(sharded, parameters)
    with pytest.raises(rr.ConfigError, match=REFUSED):
        descend(earlier, parameters)
    require_all(parameters, 0.0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS])
def test_plain_ones_of_torch_are_refused_in_their_first_step(shard: str, kind: Any):
    """Each rank's step would change what the others have changed. Nothing is changed, and the first one goes on."""
    parameters = made()
    first = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), shard=shard)
    descend(first, parameters)
    other = kind(parameters[:1], lr=1.0)
    with pytest.raises(rr.ConfigError, match=REFUSED):
        other.step(lambda: parameters[0].sum())
    descend(first, parameters)
    require_all(parameters, -1.0)
    del first
    other = torch.optim.SGD(parameters, lr=1.0)
    other.step()  # with the gradients there are, of this rank's own parameters
    rr.barrier()
    for each in parameters:
        torch.testing.assert_close(each.detach(), -1.0 - each.grad)


def test_steps_of_the_wrapped_one(shard: str):
    """The error names the optimizer that is to step."""
    parameters = made()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), shard=shard)
    descend(optimizer, parameters)
    with pytest.raises(rr.ConfigError, match=r"call step\(\) of the DistributedOptimizer"):
        optimizer.wrapped.step()
    descend(optimizer, parameters)
    require_all(parameters, -1.0)


def test_steps_of_others_within_writing(shard: str):
    """Ranks have parameters of their own meanwhile, and those of the first of a node stay: one step, not several."""
    parameters = made()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), shard=shard)
    descend(optimizer, parameters)
    for each in parameters:
        each.grad = torch.full_like(each, 2.0)
    with optimizer.writing():
        torch.optim.SGD(parameters, lr=0.5).step()
    require_all(parameters, -1.0)
    descend(optimizer, parameters)
    require_all(parameters, -2.0)


def test_the_wrapped_one_is_wrapped_again_without_shard(shard: str):
    """Once its wrapper is deleted, an optimizer can be wrapped anew."""
    parameters = made()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0, momentum=0.5), shard=shard)
    descend(optimizer, parameters)
    wrapped = optimizer.wrapped
    del optimizer
    descend(hvd.DistributedOptimizer(wrapped), parameters)
    if shard == "node" or rr.world().topology.single_node:
        require_all(parameters, 1.0 - 1.0 - 1.5)


def test_others_of_other_parameters(shard: str):
    """Optimizers of parameters that nobody shares step as ever."""
    parameters, others = made(), made()
    first = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), shard=shard)
    second = hvd.DistributedOptimizer(torch.optim.SGD(others, lr=1.0), shard=shard)
    third, own = made(), made()
    plain, torchs = hvd.DistributedOptimizer(torch.optim.SGD(third, lr=1.0)), torch.optim.SGD(own, lr=1.0)
    for _ in range(2):
        for optimizer, trained in [(first, parameters), (second, others), (plain, third)]:
            descend(optimizer, trained)
        sum(each.sum() for each in own).backward()
        torchs.step()
        torchs.zero_grad()
    for trained in (parameters, others, third, own):
        require_all(trained, -1.0)


@pytest.mark.parametrize("which", ["first", "last", "all"])
@pytest.mark.parametrize("hook", ["pre", "post"])
def test_steps_that_a_hook_fails(shard: str, hook: str, which: str):
    """All ranks get the cause, in that step and in the next one, until weights are loaded."""
    parameters, broken = made(), False
    failing = {"first": [0], "last": [rr.size() - 1], "all": range(rr.size())}[which]

    def check(*_: object) -> None:
        if broken and rr.rank() in failing:
            raise ValueError(f"no step at {rr.rank()}")

    inner = torch.optim.SGD(parameters, lr=1.0, momentum=0.5)
    (inner.register_step_pre_hook if hook == "pre" else inner.register_step_post_hook)(check)
    optimizer = hvd.DistributedOptimizer(inner, shard=shard)
    descend(optimizer, parameters)
    weights, state = [each.detach().clone() for each in parameters], copy.deepcopy(optimizer.state_dict())
    rr.barrier()
    broken = True
    with pytest.raises(ValueError if rr.rank() in failing else rr.MismatchError, match="no step at "):
        descend(optimizer, parameters)
    broken = False
    with pytest.raises(rr.ConfigError, match=r"(?s)the last step has failed.* no step at "):
        descend(optimizer, parameters)
    with optimizer.writing(), torch.no_grad():
        for each, weight in zip(parameters, weights, strict=True):
            each.copy_(weight)
    optimizer.load_state_dict(state)
    descend(optimizer, parameters)
    require_all(parameters, 1.0 - 1.0 - 1.5)
