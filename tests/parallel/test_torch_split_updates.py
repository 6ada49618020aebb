"""`DistributedOptimizer(split_updates=True)`: each rank updates some parameters; all get the bits of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
from torch_models import Model, Optimizer, Own, take_steps  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402
from ringreduce.torch import split_updates  # noqa: E402

STEPS = 5


class Odd(Own):
    """State of many kinds: tensors of any shape, strides and dtype, nested ones, numbers, and some that come and go."""

    def update(self, parameter: Any, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        number = state["step"] = state.get("step", 0) + 1
        state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
        state["wide"] = state["sum"].to(torch.float64)
        state["cut"] = parameter.reshape(-1)[: number % 3].clone()
        state["turned"] = torch.ones(3, 2, dtype=torch.int16).T * number
        state["pair"] = [torch.full((2,), float(number)), f"step {number}"]
        if number % 2:
            state["odd"] = torch.tensor(number).expand(3)
        else:
            state.pop("odd", None)
        parameter -= group["lr"] / group["steps"] * parameter.norm() * state["sum"]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "muon": lambda given: torch.optim.Muon(matrices(given), lr=0.05),
    "adafactor": lambda given: torch.optim.Adafactor(filled(given), lr=0.1),
    "adam": lambda given: torch.optim.Adam(given, lr=0.01),
    "sgd": lambda given: torch.optim.SGD(given, lr=0.01),
    "odd": Odd,
}


def matrices(parameters: Any) -> list[Any]:
    return [each for each in filled(parameters) if each.dim() == 2]


def filled(parameters: Any) -> list[Any]:
    """Return the parameters with elements, by whose number Adafactor divides."""
    return [each for each in parameters if each.numel()]


def mlp() -> Model:
    """Return a model of odd sizes, equal on all ranks: the third layer is not used, and the last has no columns."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(13, 17), torch.nn.Linear(17, 5), torch.nn.Linear(2, 3), torch.nn.Linear(5, 1, bias=False))
    model = torch.nn.ModuleList(layers)
    model.register_parameter("empty", torch.nn.Parameter(torch.zeros(3, 0)))
    model.register_parameter("turned", torch.nn.Parameter(torch.randn(13, 13).T))
    return model


def loss_of(model: Model, step: int) -> Any:
    torch.manual_seed(1000 * rr.rank() + step)
    hidden = torch.tanh(model[0](torch.randn(4, 13) @ model.turned))
    return model[3](model[1](hidden)).square().mean() + model.empty.sum()


def wrap(optimizer: Optimizer, model: Model, **options: Any) -> Optimizer:
    named = [(name, each) for name, each in model.named_parameters() if any(each is one for one in of(optimizer))]
    return hvd.DistributedOptimizer(optimizer, named, **{"split_updates": True, **options})


def of(optimizer: Optimizer) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def alone(model: Model, name: str) -> tuple[Model, Optimizer]:
    """Return a copy of the model, and a plain optimizer of it, which is given the reduced gradients."""
    same = copy.deepcopy(model)
    return same, OPTIMIZERS[name](list(same.parameters()))


def give_gradients(source: Model, target: Model) -> None:
    for one, other in zip(source.parameters(), target.parameters(), strict=True):
        other.grad = None if one.grad is None else one.grad.clone()


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    else:
        yield value


def require_same(one: Any, other: Any) -> None:
    """Check that two states have the same values, bit by bit, of the same kinds."""
    ones, others = list(leaves(one)), list(leaves(other))
    assert len(ones) == len(others)
    for mine, yours in zip(ones, others, strict=True):
        assert type(mine) is type(yours)
        if torch.is_tensor(mine):
            assert (mine.dtype, mine.shape, mine.stride()) == (yours.dtype, yours.shape, yours.stride())
            assert torch.equal(mine, yours)
        else:
            assert mine == yours


def sorted_state(optimizer: Optimizer) -> Any:
    """Return the state and the settings, whatever the order in which state was made."""
    saved = optimizer.state_dict()
    state = {number: dict(sorted(each.items())) for number, each in sorted(saved["state"].items())}
    return state, saved["param_groups"]


@pytest.mark.spread
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("node_size", [None, 1])
def test_bits_are_those_of_one_process(
    name: str, node_size: int | None, nodes_of: Callable[[int | None], None]
) -> None:
    """Of weights, gradients and state, where each rank is a node of its own, too."""
    nodes_of(node_size)
    model = mlp()
    same, plain = alone(model, name)
    optimizer = wrap(OPTIMIZERS[name](list(model.parameters())), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        give_gradients(model, same)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.step()
        require_same([*model.parameters()], [*same.parameters()])
        require_same([each.grad for each in model.parameters()], [each.grad for each in same.parameters()])
        require_same(sorted_state(optimizer), sorted_state(plain))
    assert optimizer.splits_updates == (rr.size() > 1)
    assert len({tuple(each.flatten().tolist()) for each in hvd.allgather_object(model[0].weight)}) == 1


train = partial(take_steps, loss_of=loss_of)


def require_same_as_whole(run: Callable[[bool], tuple[Model, Optimizer]]) -> None:
    """Check that a run ends with the same bits with split updates and without."""
    (model, optimizer), (other, whole) = run(True), run(False)
    require_same([*model.parameters()], [*other.parameters()])
    require_same(sorted_state(optimizer), sorted_state(whole))
    assert not torch.equal(model[0].weight, mlp()[0].weight)


@pytest.mark.spread
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_goes_on_in_another_optimizer(name: str) -> None:
    """Each rank has the whole state with split updates, loads it without, and the other way round."""

    def run(split: bool) -> tuple[Model, Optimizer]:
        model = mlp()
        optimizer = wrap(OPTIMIZERS[name](list(model.parameters())), model, split_updates=not split)
        train(model, optimizer, range(3))
        saved, again = copy.deepcopy(optimizer.state_dict()), mlp()
        again.load_state_dict(model.state_dict())
        other = wrap(OPTIMIZERS[name](list(again.parameters())), again, split_updates=split)
        other.load_state_dict(saved)
        train(again, other, range(3, 6))
        return again, other

    require_same_as_whole(run)


@pytest.mark.spread
@pytest.mark.parametrize(
    "options", [{"reduce_in": "backward"}, {"op": hvd.Sum}, {"overlap": True}, {"staleness": 1}, {"skip_unused": False}]
)
def test_bits_with_options(options: dict[str, Any]) -> None:
    def run(split: bool) -> tuple[Model, Optimizer]:
        model = mlp()
        optimizer = wrap(OPTIMIZERS["adafactor"](list(model.parameters())), model, split_updates=split, **options)
        train(model, optimizer, range(STEPS))
        optimizer.synchronize()
        return model, optimizer

    require_same_as_whole(run)


@pytest.mark.spread
@pytest.mark.parametrize("way", ["accumulated", "clipped", "closure", "scaled", "added", "frozen"])
def test_bits_of_uses(way: str) -> None:
    """Gradients that are not cleared, clipping, closures, a GradScaler, parameters added and frozen between steps."""

    def run(split: bool) -> tuple[Model, Optimizer]:
        model = mlp()
        first = [*model[0].parameters()] if way == "added" else [*model.parameters()]
        optimizer = wrap(torch.optim.Adam(first, lr=0.01), model, split_updates=split)
        scaler = torch.amp.GradScaler("cpu", 16.0, enabled=way == "scaled")
        for step in range(STEPS):
            if way == "added" and step == 2:
                optimizer.add_param_group({"params": [*model[1].parameters()], "lr": 0.1})
            model[0].requires_grad_(way != "frozen" or step != 2)

            def closure(step: int = step) -> Any:
                if way != "accumulated":
                    optimizer.zero_grad()
                loss = scaler.scale(loss_of(model, step))
                loss.backward()
                return loss

            if way == "closure":
                assert optimizer.step(closure) > 0
                continue
            closure()
            if way == "clipped":
                optimizer.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
        return model, optimizer

    require_same_as_whole(run)


@pytest.mark.spread
def test_hooks_see_all_gradients_and_all_results() -> None:
    """Hooks clip before a step and add up weights after it, registered before the optimizer is wrapped and later."""

    def run(split: bool) -> tuple[Model, Optimizer]:
        model = mlp()
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
        sums = [torch.zeros_like(each) for each in model.parameters()]

        def clip(*_: object) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

        def add(*_: object) -> None:
            for total, each in zip(sums, model.parameters(), strict=True):
                total += each.detach()

        plain.register_step_post_hook(add)
        optimizer = wrap(plain, model, split_updates=split)
        train(model, optimizer, range(2))
        plain.register_step_pre_hook(clip)
        plain.register_step_post_hook(add)
        train(model, optimizer, range(2, STEPS))
        for total, each in zip(sums, model.parameters(), strict=True):
            each.data += total
        return model, optimizer

    require_same_as_whole(run)


@pytest.mark.spread
def test_steps_with_own_gradients_are_not_split() -> None:
    """Each rank then has weights of its own."""
    model = mlp()
    same, plain = alone(model, "adam")
    optimizer = wrap(OPTIMIZERS["adam"](list(model.parameters())), model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        give_gradients(model, same)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.step()
    require_same([*model.parameters()], [*same.parameters()])


class Nested(torch.optim.Adam):
    """Calls the step of its class within its own, and then scales all parameters that have a gradient."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for parameter in of(self):
                if parameter.grad is not None:
                    parameter *= 1.01
        return result


@pytest.mark.spread
def test_a_step_within_a_step() -> None:
    """The results of the outer one are exchanged."""

    def run(split: bool) -> tuple[Model, Optimizer]:
        model = mlp()
        optimizer = wrap(Nested(model.parameters(), lr=0.01), model, split_updates=split)
        train(model, optimizer, range(3))
        return model, optimizer

    require_same_as_whole(run)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("wanted", [True, None])
def test_the_others_update_what_a_rank_would_that_has_joined(wanted: bool | None) -> None:
    """Until all have joined; then updates are split again. The settings count each step once."""

    def run(split: bool) -> tuple[Model, Optimizer]:
        model = mlp()
        optimizer = wrap(Odd(list(model.parameters())), model, split_updates=split and wanted)
        train(model, optimizer, range(2 if rr.rank() == 0 else 5))
        last = hvd.join()
        assert last != 0
        hvd.broadcast_parameters(model, root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        train(model, optimizer, range(5, 7))
        return model, optimizer

    require_same_as_whole(run)


@pytest.mark.sizes(2, 3, 4)
def test_an_error_in_a_step_of_one_rank_is_heard_on_all() -> None:
    """The others get it as the reason; all have their gradients, and can go on with equal weights."""
    model = mlp()
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = wrap(plain, model)
    train(model, optimizer, range(1))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    hook = plain.register_step_pre_hook(fail) if rr.rank() == 1 else None
    with pytest.raises(RuntimeError if hook is not None else rr.MismatchError, match="no memory"):
        train(model, optimizer, range(1, 2))
    if hook is not None:
        hook.remove()
    assert [name for name, each in model.named_parameters() if each.grad is None] == ["2.weight", "2.bias"]
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(1, 3))
    assert len({each.sum().item() for each in hvd.allgather_object(model[0].weight)}) == 1


class SharpnessAware(torch.optim.SGD):
    """Evaluates its closure a second time, at weights that it has changed."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for parameter in of(self):
                if parameter.grad is not None:
                    parameter += 0.1 * parameter.grad
        with torch.enable_grad():
            closure()
        super().step()
        return loss


@pytest.mark.sizes(2, 3, 4)
def test_weights_changed_before_a_closure_is_called_again_are_an_error() -> None:
    """The ranks would compute gradients at different weights; without split updates they do not."""
    for split in (True, False):
        model = mlp()
        optimizer = wrap(SharpnessAware(model.parameters(), lr=0.01), model, split_updates=split)

        def closure(model: Model = model, optimizer: Optimizer = optimizer) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        if split:
            with pytest.raises(rr.ConfigError, match="before it called the closure again"):
                optimizer.step(closure)
        else:
            assert optimizer.step(closure) > 0


def test_a_copy_that_has_not_begun_answers_alone() -> None:
    """The other ranks need not ask their copies."""
    model = mlp()
    optimizer = wrap(torch.optim.Adam(model.parameters()), model)
    train(model, optimizer, range(1))
    copied = copy.deepcopy(optimizer)
    if rr.rank() == 0:
        assert not copied.splits_updates


@pytest.mark.sizes(2, 3, 4)
def test_gradients_of_different_parameters_are_an_error() -> None:
    """The program has cleared one after the reduction, on one rank."""
    model = mlp()
    optimizer = wrap(torch.optim.Adam(model.parameters()), model)
    loss_of(model, 0).backward()
    optimizer.synchronize()
    if rr.rank() == 1:
        model[0].bias.grad = None
    with optimizer.skip_synchronize(), pytest.raises(rr.MismatchError, match="on all ranks alike") as raised:
        optimizer.step()
    assert set(raised.value.values) == set(range(rr.size()))
    train(model, optimizer, range(1))


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("slow", [-1, 1])
def test_the_quicker_kind_of_steps_stays(slow: int, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the slowest rank sees it: if split updates are slow on one rank, all ranks go on without.

    Steps without gradients, as the first one with late averages, do not count. What was decided outlives a join.
    """
    seconds = 0.0
    model = mlp()
    muon = torch.optim.Muon(matrices(model.parameters()), lr=0.01)
    optimizer = wrap(muon, model, split_updates=None, staleness=late)

    def clock() -> float:
        return seconds

    def let_take(owner: Any, name: str, duration_s: float) -> None:
        function = getattr(owner, name)

        def measured(*given: Any) -> Any:
            nonlocal seconds
            seconds += duration_s * any(each.grad is not None for each in model.parameters())
            return function(*given)

        monkeypatch.setattr(owner, name, measured)

    monkeypatch.setattr(split_updates, "perf_counter", clock)
    let_take(torch.optim.Muon, "step", 1.0)
    let_take(split_updates.SplitUpdates, "_split_step", 8.0 if slow == rr.rank() else -0.5)  # besides the step in it
    found = []
    for step in range(10):
        train(model, optimizer, range(step, step + 1))
        found.append(optimizer.splits_updates)
    assert found == [False] * 7 + [slow < 0] * 3
    optimizer.synchronize()
    if not late:
        hvd.join()
        train(model, optimizer, range(1))
        assert optimizer.splits_updates == (slow < 0)


@pytest.mark.sizes(2, 3, 4)
def test_updates_are_whole_if_no_steps_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of both kinds have gradients of different parameters."""
    monkeypatch.setattr(split_updates, "_MOST_TIMES", 12)
    model = mlp()
    given = matrices(model.parameters())
    optimizer = wrap(torch.optim.Muon(given, lr=0.01), model, split_updates=None)
    split = []
    pack = split_updates.SplitUpdates._packed

    def packed(updates: Any) -> Any:
        split.append(step)
        return pack(updates)

    monkeypatch.setattr(split_updates.SplitUpdates, "_packed", packed)
    for step in range(20):
        given[0].requires_grad_(step % 4 < 2)
        train(model, optimizer, range(step, step + 1))
    assert split == [2, 3, 6, 7, 10, 11, 14]


def test_other_optimizers_are_split_only_if_the_program_says_so() -> None:
    model = mlp()
    for plain in torch.optim.Adam(model.parameters()), torch.optim.Adafactor(filled(model.parameters())):
        optimizer = wrap(plain, model, split_updates=None)
        train(model, optimizer, range(10))
        assert not optimizer.splits_updates


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (torch.optim.LBFGS, {}, "LBFGS needs all of them at once"),
        (torch.optim.Adam, {"split_updates": "auto"}, "split_updates is True, False or None, got 'auto'"),
        (torch.optim.Adam, {"split_updates": 1}, "split_updates is True, False or None, got 1"),
        (torch.optim.Adam, {"shard": "node"}, "it already lets each rank update some"),
        (torch.optim.Adam, {"op": hvd.Adasum}, "each rank steps with its own gradients"),
    ],
)
def test_what_cannot_be_split(make: Any, options: dict[str, Any], words: str) -> None:
    model = mlp()
    with pytest.raises(rr.ConfigError, match=words):
        wrap(make(model.parameters()), model, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_owners_multiply_for_about_as_long(size: int) -> None:
    """No rank has more than the mean and one parameter, by the cost of a square of n: n cubed times 3."""
    sides = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 89, 89, 64, 32, 16]
    chosen = split_updates.owners([(side, side) for side in sides], size)
    loads = np.zeros(size)
    np.add.at(loads, chosen, np.array(sides, float) ** 3)
    assert loads.max() <= sum(side**3 for side in sides) / size + max(sides) ** 3
    assert split_updates.owners([(), (0,), (3, 0), (2, 3, 4)], 2) == split_updates.owners(
        [(), (0,), (3, 0), (2, 12)], 2
    )
