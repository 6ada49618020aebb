"""The state of optimizers of programs' own, which may be whatever pickle copies: it is what one process would have."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402

pytestmark = pytest.mark.spread

Optimizer = Any
Parameters = list[Any]

SIZES = (3, 1025, 420, 7)
STEPS = 6


class Own(torch.optim.Optimizer):
    """Keeps state of many kinds, which it changes in place, and makes its steps by torch's ``_foreach`` functions."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.125, "count": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            used = [each for each in group["params"] if each.grad is not None]
            updates = [self.update(self.state[each], each, each.grad) for each in used]
            torch._foreach_add_(used, updates, alpha=-group["lr"])

    def update(self, state: dict[str, Any], parameter: Any, gradient: Any) -> Any:
        if not state:
            state["history"] = []
            state["counts"] = OrderedDict(n=0, moment=torch.zeros_like(parameter), names=("a", {"b"}))
            state["pair"] = [torch.zeros_like(parameter), []]
            state["late"] = None
            state["text"] = "new"
            state["first"] = True
        state["history"].append(gradient.sum().item())
        state["counts"]["n"] += 1
        state["counts"]["moment"].mul_(0.5).add_(gradient)
        state["pair"][0].add_(gradient)
        state["pair"][1].append(parameter.new_full((2,), state["counts"]["n"]))
        state.pop("first", None)
        if state["counts"]["n"] == 3:
            state["late"] = torch.ones_like(parameter)
            state["text"] = "old"
        late = 1.0 if state["late"] is None else state["late"] * 0.5
        assert state["text"] == ("new" if state["counts"]["n"] < 3 else "old")
        return state["counts"]["moment"] * late + state["pair"][0] / len(state["history"])


def parameters() -> Parameters:
    return [torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in SIZES]


def of(made: Parameters, kind: type[Optimizer] = Own) -> Optimizer:
    """Return an optimizer of two groups, of which one has one parameter: no other rank than one updates it."""
    return kind([{"params": made[:-1]}, {"params": made[-1:]}])


WAYS: dict[str, Callable[[Optimizer], Optimizer]] = {
    "plain": hvd.DistributedOptimizer,
    "node": lambda given: hvd.DistributedOptimizer(given, shard="node"),
    "all": lambda given: hvd.DistributedOptimizer(given, shard="all"),
    "split": lambda given: hvd.DistributedOptimizer(given, split_updates=True),
    "local": lambda given: hvd.LocalSGD(given, period=2, average=("parameters", "state")),
}


def gradient(number: int, step: int) -> float:
    return 1.0 + (number + 2 * step) % 5


def train(made: Parameters, optimizer: Optimizer, steps: range) -> None:
    """Make steps; in step 1 the first parameter has no gradient. Ranks have others, with the average `gradient`."""
    share = (rr.rank() + 1) * 2 / (rr.size() + 1) if isinstance(optimizer, hvd.DistributedOptimizer) else 1.0
    for step in steps:
        optimizer.zero_grad()
        sum(
            each.sum() * gradient(number, step) * share for number, each in enumerate(made) if number or step != 1
        ).backward()
        optimizer.step()


def alone() -> tuple[Parameters, Optimizer]:
    """Train in one process."""
    made = parameters()
    optimizer = of(made)
    for step in range(STEPS):
        for number, each in enumerate(made):
            each.grad = torch.full_like(each, gradient(number, step)) if number or step != 1 else None
        optimizer.step()
    return made, optimizer


def leaves(value: Any) -> Iterator[Any]:
    yield type(value)
    if isinstance(value, dict):
        for name in sorted(value):
            yield name
            yield from leaves(value[name])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def require_same(one: Any, other: Any) -> None:
    ones, others = list(leaves(one)), list(leaves(other))
    assert len(ones) == len(others)
    for mine, yours in zip(ones, others, strict=True):
        if torch.is_tensor(mine):
            torch.testing.assert_close(mine, yours)
        else:
            assert mine == (pytest.approx(yours) if isinstance(yours, float) else yours)


def live(
    made: Parameters, optimizer: Optimizer, wrap: Callable[[Optimizer], Optimizer]
) -> tuple[Parameters, Optimizer]:
    return made, optimizer


def load(
    made: Parameters, optimizer: Optimizer, wrap: Callable[[Optimizer], Optimizer]
) -> tuple[Parameters, Optimizer]:
    """Go on with another optimizer that has loaded the state from a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = parameters()
    for one, other in zip(again, made, strict=True):
        one.data.copy_(other.detach())
    other = wrap(of(again))
    other.load_state_dict(torch.load(file, weights_only=False))
    return again, other


def restart(
    made: Parameters, optimizer: Optimizer, wrap: Callable[[Optimizer], Optimizer]
) -> tuple[Parameters, Optimizer]:
    rr.shutdown()
    rr.init()
    if isinstance(optimizer, hvd.DiLoCo):
        optimizer.rejoin()
    return made, optimizer


def restore(
    made: Parameters, optimizer: Optimizer, wrap: Callable[[Optimizer], Optimizer]
) -> tuple[Parameters, Optimizer]:
    """Go on from a commit, after steps of which nothing is to remain."""
    state = hvd.elastic.TorchState(torch.nn.ParameterList(made), optimizer)
    state.commit()
    train(made, optimizer, range(7, 9))
    with optimizer.writing():
        state.restore()
    return made, optimizer


@pytest.mark.parametrize("use", [live, load, restart, restore])
@pytest.mark.parametrize("way", WAYS)
def test_state_is_that_of_one_process(nodes: None, way: str, use: Callable[..., tuple[Parameters, Optimizer]]) -> None:
    """Before and after the third step, in which some of it changes its kind."""
    expected, reference = alone()
    for before in (2, 4):
        made = parameters()
        optimizer = WAYS[way](of(made))
        train(made, optimizer, range(before))
        made, optimizer = use(made, optimizer, WAYS[way])
        train(made, optimizer, range(before, STEPS))
        require_same([each.detach() for each in made], [each.detach() for each in expected])
        found, wanted = optimizer.state_dict(), reference.state_dict()
        require_same(found["state"], wanted["state"])
        assert [group["count"] for group in found["param_groups"]] == [STEPS, STEPS]


class Handle(NamedTuple):
    """Not more than pickle copies, but for what is in it."""

    function: Any


class Unsendable(Own):
    """Keeps what no other process can have."""

    def update(self, state: dict[str, Any], parameter: Any, gradient: Any) -> Any:
        state["handle"] = [Handle(lambda: None)]
        return gradient


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("way", ["node", "all", "split"])
def test_state_that_other_ranks_cannot_have_is_refused_by_name(nodes: None, way: str) -> None:
    """On all ranks, in the step or when the whole state is wanted."""
    made = parameters()
    optimizer = WAYS[way](of(made, Unsendable))

    def use() -> None:
        train(made, optimizer, range(1))
        optimizer.state_dict()

    refused = r"state 'handle' is of type list, and pickle cannot copy it"
    with pytest.raises((rr.ConfigError, rr.MismatchError), match=refused):
        use()
