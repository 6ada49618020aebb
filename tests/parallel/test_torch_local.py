"""`DiLoCo` and `LocalSGD` of torch: averages, phases, checkpoints, errors; test_bindings.py has how they train."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
from torch_models import Model, Optimizer, mlp, same_on_all_ranks, take_steps  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402

make_model = partial(mlp, 5, 7, 3)

ETA = 0.05


def loss_of(model: Model, rank: int, step: int) -> Any:
    """Return the loss on the data of a rank and a step."""
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64)
    return model(inputs.to(next(model.parameters()).dtype)).square().mean()


def train(model: Model, optimizer: Optimizer, steps: range) -> None:
    take_steps(model, optimizer, steps, lambda model, step: loss_of(model, rr.rank(), step))


def momentum_sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=ETA, momentum=0.5)


def bits(tensors: Any) -> list[bytes]:
    return [each.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for each in tensors]


def agreed_bits(optimizer: Optimizer) -> list[bytes]:
    averages = optimizer.state_dict()["local"]["averages"].values()
    return [saved[name].numpy().tobytes() for saved in averages for name in ("agreed", "momentum") if name in saved]


# ---- replicas, and phases ----


@pytest.mark.parametrize("options", [{}, {"outer_lr": 1.0, "outer_momentum": 0.0}])
def test_a_delay_in_which_nothing_is_learnt_changes_no_bit(world: rr.Communicator, options: dict[str, Any]):
    runs = []
    for delay in (0, 2):
        model = make_model()
        optimizer = hvd.DiLoCo(
            torch.optim.SGD(model.parameters(), lr=ETA), model, period=3, delay=delay, replica="rank", **options
        )
        for step in range(11):
            optimizer.param_groups[0]["lr"] = 0.0 if step % 3 < 2 and step >= 3 else ETA
            train(model, optimizer, range(step, step + 1))
        runs.append(bits(model.parameters()))
    assert runs[0] == runs[1]


@pytest.mark.spread
@pytest.mark.parametrize("options", [{}, {"delay": 2}, {"fragments": 2}, {"outer_lr": 1.0, "outer_momentum": 0.0}])
def test_replicas_that_have_their_parameters_once(nodes_of_two: None, options: dict[str, Any]):
    """Bits as if each rank had its own; also when a run goes on from what it has saved."""
    models = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    for model, shard in zip(models, (None, "node"), strict=True):
        make = partial(hvd.DiLoCo, period=3, shard=shard, **options)
        optimizer = make(momentum_sgd(model.parameters()), model)
        train(model, optimizer, range(5))
        weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, range(5, 8))
        with optimizer.writing():
            model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(model, optimizer, range(5, 11))
        optimizer.synchronize()
        train(model, optimizer, range(11, 13))
    assert all(map(torch.equal, *(each.parameters() for each in models)))


@pytest.mark.sizes(2, 4)
def test_replicas_in_a_world_of_other_nodes(nodes_of_two: None, monkeypatch: pytest.MonkeyPatch):
    """Ranks that had parameters in common are nodes of their own then, each with what it has restored."""
    models = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    for model, shard in zip(models, (None, "node"), strict=True):
        monkeypatch.setenv("RINGREDUCE_NODE_SIZE", "2")
        hvd.shutdown()
        hvd.init()
        optimizer = hvd.DiLoCo(momentum_sgd(model.parameters()), model, period=2, shard=shard)
        train(model, optimizer, range(5))
        state = hvd.elastic.TorchState(model, optimizer)
        state.commit()
        state.restore()
        monkeypatch.setenv("RINGREDUCE_NODE_SIZE", "1")
        hvd.shutdown()
        hvd.init()
        train(model, optimizer, range(5, 9))
        optimizer.synchronize()
    assert all(map(torch.equal, *(each.parameters() for each in models)))


def clip_first(optimizer: Optimizer, model: Model, step: int) -> None:
    optimizer.clip_grad_norm_(0.05)


def clear_first(optimizer: Optimizer, model: Model, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rr.rank(), step).backward()


def pass_first(optimizer: Optimizer, model: Model, step: int) -> None:
    with optimizer.no_sync():
        loss_of(model, rr.rank(), step).backward()


def average_first(optimizer: Optimizer, model: Model, step: int) -> None:
    optimizer.synchronize()


def nothing_first(optimizer: Optimizer, model: Model, step: int) -> None:
    pass


@pytest.mark.spread
@pytest.mark.parametrize("first", [clip_first, clear_first, pass_first, average_first, nothing_first])
@pytest.mark.parametrize(("saved_after", "loaded_after"), [(5, 0), (5, 2), (2, 5), (3, 0)])
def test_steps_belong_to_the_phase_that_was_loaded(
    nodes_in_order: None, saved_after: int, loaded_after: int, first: Any
):
    """Whatever is called first; the other phase reduces nothing any more, in backward passes either.

    The bits are those of a run that goes on, from three nodes on if sums are in the order of ranks: which gradients are
    reduced together depends on the moment. States are loaded by optimizers that have made some steps themselves.
    """

    def make(steps: int) -> tuple[Model, Optimizer]:
        model = make_model()
        local = hvd.DiLoCo(momentum_sgd(model.parameters()), model, period=4, warmup_steps=3, replica="rank")
        train(model, local, range(steps))
        return model, local

    def go_on(model: Model, optimizer: Optimizer) -> list[bytes]:
        for step in range(saved_after, 9):
            loss_of(model, rr.rank(), step).backward()
            if step == saved_after:
                first(optimizer, model, step)
            optimizer.step()
            model.zero_grad()
        return bits(model.parameters())

    model, optimizer = make(saved_after)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.zero_grad()
    expected = go_on(model, optimizer)
    model, optimizer = make(loaded_after)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    model.zero_grad()
    assert go_on(model, optimizer) == expected


@pytest.mark.spread
@pytest.mark.parametrize("replica", ["rank", "node"])
@pytest.mark.parametrize("restored", [False, True])
def test_clipping_after_a_new_world_is_over_its_replicas(nodes_of_two: None, replica: str, restored: bool):
    """It comes before the step, and joins the new world by itself; a restored state may be of another phase."""
    rank, size = rr.rank(), rr.size()
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))])
    warmup_steps = 3 if restored else 1
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.LocalSGD(inner, model, period=50, warmup_steps=warmup_steps, replica=replica)
    state = hvd.elastic.TorchState(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model[0].grad = torch.tensor([1.0 + rank, 0.0], dtype=torch.float64)
        optimizer.step()

    for _ in range(4):
        step()
    if restored:
        state.commit()
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.0).state_dict())  # warms up again
        step()
        state.restore()
    rr.shutdown()
    rr.init()
    optimizer.zero_grad()
    model[0].grad = torch.tensor([1.0 + rank, 0.0], dtype=torch.float64)
    together = range(rank - rank % 2, min(rank - rank % 2 + 2, size)) if replica == "node" else [rank]
    assert float(optimizer.clip_grad_norm_(100.0)) == pytest.approx(np.mean([1.0 + each for each in together]))
    optimizer.step()


# ---- what travels ----


@pytest.mark.spread
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("wire", ["none", "bf16", "int4"])
def test_agreed_bits_are_equal_in_every_precision(nodes_of_one: None, wire: str, dtype: str):
    """So are the weights, right after an exchange."""
    model = make_model(dtype=getattr(torch, dtype))
    compression = getattr(hvd.Compression, wire)
    optimizer = hvd.DiLoCo(momentum_sgd(model.parameters()), model, period=3, fragments=2, compression=compression)
    for step in range(12):
        train(model, optimizer, range(step, step + 1))
        assert step < 3 or same_on_all_ranks(agreed_bits(optimizer))
    assert rr.size() == 1 or not same_on_all_ranks(bits(model.parameters()))
    assert same_on_all_ranks(bits(list(model.parameters())[:1]))  # the other fragment has moved since


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("wire", ["int4", "int8", "fp8"])
def test_rounding_errors_are_sent_in_the_next_exchange(nodes_of_one: None, wire: str):
    """With constant gradients, which differ between ranks, the error does not grow with the number of exchanges."""

    def error(exchanges: int) -> float:
        weights = torch.nn.Parameter(torch.zeros(257, dtype=torch.float64))
        slope = torch.linspace(-1, 1, 257, dtype=torch.float64) ** 3 * (1 + rr.rank()) + 0.013 * rr.rank()
        compression = getattr(hvd.Compression, wire)
        optimizer = hvd.LocalSGD(torch.optim.SGD([weights], lr=1.0), period=1, compression=compression)
        for _ in range(exchanges):
            optimizer.zero_grad()
            (weights * slope).sum().backward()
            optimizer.step()
        mean = np.mean(hvd.allgather_object(slope.numpy()), axis=0)
        return float(np.abs(weights.detach().numpy() + exchanges * mean).max())

    assert error(1) > 0
    assert error(40) < 3 * max(error(each) for each in range(1, 5))


def test_buffers_and_state_on_request(world: rr.Communicator):
    """Of floating point, and of each element: not the counts of batches and of steps."""
    models = [torch.nn.BatchNorm1d(3) for _ in range(world.size)]  # all replicas, in this process
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in models]

    def step(rank: int, model: Model, optimizer: Optimizer, number: int) -> None:
        optimizer.zero_grad()
        values = torch.Generator().manual_seed(10 * rank + number)
        model(torch.randn(4, 3, generator=values) + rank).pow(3).mean().backward()
        optimizer.step()

    model = torch.nn.BatchNorm1d(3)
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    average = "parameters", "buffers", "state"
    local = hvd.LocalSGD(inner, model, period=2, replica="rank", average=average)
    for number in range(2):
        step(world.rank, model, local, number)
        for rank in range(world.size):
            step(rank, models[rank], optimizers[rank], number)
    for name in ("weight", "bias", "running_mean", "running_var"):
        mean = torch.stack([getattr(each, name).detach() for each in models]).mean(0)
        torch.testing.assert_close(getattr(model, name).detach(), mean, rtol=1e-5, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        mean = torch.stack([each.state[m.weight][name] for each, m in zip(optimizers, models, strict=True)]).mean(0)
        torch.testing.assert_close(inner.state[model.weight][name], mean, rtol=1e-5, atol=1e-7)
    assert model.num_batches_tracked == 2
    assert inner.state[model.weight]["step"] == 2


class Scaled(torch.optim.Optimizer):
    """Steps of which each parameter keeps a sum, counts in a number and in whole numbers, and a shape of its own."""

    def __init__(self, parameters: Any, length: int = 2) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.length = length

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            if each.grad is None:
                continue
            state = self.state[each]
            if not state:
                kept = {"sum": torch.zeros_like(each), "count": 0, "seen": torch.zeros(each.shape, dtype=torch.int64)}
                state.update(kept, nothing=None, row=torch.zeros(self.length))
            state["sum"] += each.grad
            state["count"] += 1
            state["seen"] += 1
            each -= 0.1 * state["sum"]


EXPERTS: list[Any] = [
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    partial(torch.optim.Rprop, lr=0.1),
    partial(torch.optim.NAdam, lr=0.1),
    Scaled,
]


def expert_gradient(rank: int, number: int, step: int) -> Any:
    """Return the gradient of an expert, which one of the ranks uses at first; one is used by all, the last by none."""
    late = 3 * (rank + number)  # from then on the rank uses others, too
    shape = [(3,), (2, 2), (), (1,)][number]
    if number == 3 or (number and number != 1 + rank % 2 and step < late):
        return None
    return torch.full(shape, 1.0 + rank + 0.5 * number + 0.1 * step, dtype=torch.float64)


def experts() -> list[Any]:
    return [torch.nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in [(3,), (2, 2), (), (1,)]]


def expert_step(rank: int, parameters: Any, optimizer: Optimizer, step: int) -> None:
    for number, each in enumerate(parameters):
        each.grad = expert_gradient(rank, number, step)
    optimizer.step()


def whole_state(optimizer: Optimizer, parameter: Any) -> dict[str, Any]:
    """Return the state of each element, but for counts of steps of a parameter that is a number."""
    state = optimizer.state.get(parameter, {})
    numbers = {"step", "mu_product"} if parameter.dim() == 0 else set()
    names = [name for name, each in state.items() if torch.is_tensor(each) and each.is_floating_point()]
    return {name: state[name] for name in names if state[name].shape == parameter.shape and name not in numbers}


def average_experts(models: Any, optimizers: Any) -> None:
    """Average parameters and state as the page says: state over those that have it; the others get all of it."""
    with torch.no_grad():
        for number in range(4):
            parameters = [each[number] for each in models]
            mean = torch.stack([each.detach() for each in parameters]).mean(0)
            states = [whole_state(*each) for each in zip(optimizers, parameters, strict=True)]
            means = {
                name: torch.stack([each[name] for each in states if name in each]).mean(0)
                for name in {name for each in states for name in each}
            }
            first = next((o.state[p] for o, p in zip(optimizers, parameters, strict=True) if o.state.get(p)), {})
            for parameter, optimizer in zip(parameters, optimizers, strict=True):
                parameter.copy_(mean)
                if first:
                    optimizer.state[parameter] = {**copy.deepcopy(first), **optimizer.state.get(parameter, {})}
                    optimizer.state[parameter].update({name: each.clone() for name, each in means.items()})


@pytest.mark.spread
@pytest.mark.parametrize("make", EXPERTS)
def test_state_is_averaged_by_parameter_and_name(world: rr.Communicator, make: Any):
    """Over the ranks that have it; a rank that has none gets all of it, with the number of steps, and can go on."""
    models = [experts() for _ in range(world.size)]
    optimizers = [make(each) for each in models]
    mine = experts()
    inner = make(mine)
    local = hvd.LocalSGD(inner, period=3, replica="rank", average=("parameters", "state"))
    for step in range(10):
        expert_step(world.rank, mine, local, step)
        for rank in range(world.size):
            expert_step(rank, models[rank], optimizers[rank], step)
        if step % 3 == 2:
            average_experts(models, optimizers)
    local.synchronize()
    average_experts(models, optimizers)
    for parameter, expected in zip(mine, models[world.rank], strict=True):
        torch.testing.assert_close(parameter.detach(), expected.detach(), rtol=1e-12, atol=1e-12)
        kept, known = inner.state.get(parameter, {}), optimizers[world.rank].state.get(expected, {})
        assert {name for name, each in kept.items() if each is not None} == {
            name for name, each in known.items() if each is not None
        }
        for name, value in kept.items():
            if value is None or not torch.is_tensor(value):
                assert value == known[name]
            else:
                torch.testing.assert_close(value, known[name], rtol=1e-12, atol=1e-12)


@pytest.mark.spread
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("stop", [3, 5, 6, 8])
def test_exchanges_of_different_state_under_way_are_saved(world: rr.Communicator, stop: int):
    """The run goes on with the same bits, also if state was made since the exchange began; sums of steps are exact."""

    def make() -> tuple[Any, Optimizer, Optimizer]:
        mine = experts()
        inner = torch.optim.SGD(mine, lr=0.125, momentum=1.0)
        average = "parameters", "state"
        return mine, inner, hvd.LocalSGD(inner, period=5, delay=4, replica="rank", average=average)

    def run(mine: Any, local: Optimizer, steps: range) -> None:
        for step in steps:
            expert_step(world.rank, mine, local, step)

    mine, inner, local = make()
    run(mine, local, range(stop))
    saved = copy.deepcopy(([each.detach() for each in mine], local.state_dict()))
    run(mine, local, range(stop, 12))
    other, other_inner, other_local = make()
    run(other, other_local, range(stop, stop + 1))
    for each, value in zip(other, saved[0], strict=True):
        each.data.copy_(value)
    other_local.load_state_dict(saved[1])
    run(other, other_local, range(stop, 12))
    assert bits(other) == bits(mine)
    for one, two in zip(mine, other, strict=True):
        assert bits(whole_state(inner, one).values()) == bits(whole_state(other_inner, two).values())
    # What a momentum of 1 sums up: what each rank has had, averaged over the ranks that had some.
    local.synchronize()
    assert same_on_all_ranks([bits(whole_state(inner, each).values()) for each in mine])


@pytest.mark.sizes(2, 3, 4)
def test_state_of_other_lengths_is_an_error_that_shows_them(world: rr.Communicator):
    """On all ranks, with both lengths; what has no value for each element anywhere stays each rank's own."""
    mine = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    inner = Scaled(mine[:1], length=2 if world.rank else 3)
    local = hvd.LocalSGD(inner, [("w", mine[0])], period=1, replica="rank", average=("parameters", "state"))
    mine[0].grad = torch.ones(3)
    with pytest.raises(rr.MismatchError) as caught:
        local.step()
    assert "state 'row' of w is a tensor of shape (2,)" in str(caught.value)
    assert "state 'row' of w is a tensor of shape (3,)" in str(caught.value)
    inner = Scaled(mine[1:], length=4 + world.rank)
    local = hvd.LocalSGD(inner, period=1, replica="rank", average=("parameters", "state"))
    mine[1].grad = torch.ones(2)
    local.step()
    assert len(inner.state[mine[1]]["row"]) == 4 + world.rank


@pytest.mark.sizes(2, 3, 4)
def test_buffers_of_other_lengths_are_an_error_that_shows_them(world: rr.Communicator):
    """Both lengths, on all ranks."""
    model = torch.nn.BatchNorm1d(3)
    local = hvd.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, period=1, replica="rank")
    if world.rank:
        model.register_buffer("running_mean", torch.zeros(7))
    model.weight.grad = torch.ones(3)
    with pytest.raises(rr.MismatchError, match=r"6 float32(.|\n)*10 float32"):
        local.step()


def test_parameters_are_averaged_whether_or_not_they_have_gradients(world: rr.Communicator):
    """A layer that one rank alone uses moves on all; a frozen one stays."""
    model = make_model(dtype=torch.float64)
    model[0].bias.requires_grad_(False)
    before = [each.detach().clone() for each in model.parameters()]
    optimizer = hvd.LocalSGD(torch.optim.SGD(model.parameters(), lr=1.0), model, period=1, replica="rank")
    loss = (model[2].weight.sum() if world.rank == 0 else 0) + model[0].weight.sum()
    loss.backward()
    optimizer.step()
    moved = [float((old - new).detach().mean()) for old, new in zip(before, model.parameters(), strict=True)]
    assert moved == pytest.approx([1.0, 0.0, 1 / world.size, 0.0])
    assert same_on_all_ranks(bits(model.parameters()))


def test_complex_and_strided_parameters(world: rr.Communicator):
    """And those of no elements."""
    values = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    parameters = [torch.nn.Parameter(each) for each in (torch.tensor([1 + 2j, -1j]), values.clone(), torch.empty(0))]
    optimizer = hvd.LocalSGD(torch.optim.SGD(parameters, lr=1.0), period=1, replica="rank")
    for each in parameters:
        each.grad = torch.full_like(each, world.rank)
    optimizer.step()
    mean = (world.size - 1) / 2
    torch.testing.assert_close(parameters[0].detach(), torch.tensor([1 + 2j, -1j]) - mean)
    torch.testing.assert_close(parameters[1].detach(), values - mean)


# ---- the end, and going on ----


@pytest.mark.parametrize("delay", [0, 1, 6])
def test_a_run_goes_on_with_another_delay(world: rr.Communicator, delay: int):
    """The exchange that was under way ends before the next one of its parameters begins."""
    model = make_model(dtype=torch.float64)
    options = {"period": 7, "replica": "rank", "outer_momentum": 0.0}
    optimizer = hvd.DiLoCo(momentum_sgd(model.parameters()), model, delay=3, **options)
    train(model, optimizer, range(9))
    state = optimizer.state_dict()
    assert "then" in state["local"]["averages"][0]
    other = hvd.DiLoCo(momentum_sgd(model.parameters()), model, delay=delay, **options)
    other.load_state_dict(state)
    train(model, other, range(9, 24))
    assert same_on_all_ranks(agreed_bits(other))
    other.synchronize()
    assert same_on_all_ranks(bits(model.parameters()))


def test_ranks_go_on_from_the_state_of_one(world: rr.Communicator):
    """Who has only one rank's checkpoint broadcasts it, also in the middle of a period, with an exchange under way."""
    model = make_model(dtype=torch.float64)
    optimizer = hvd.DiLoCo(momentum_sgd(model.parameters()), model, period=4, delay=3, replica="rank")
    train(model, optimizer, range(6))
    checkpoint = hvd.broadcast_object((model.state_dict(), optimizer.state_dict()))
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    train(model, optimizer, range(6, 15))
    assert same_on_all_ranks(agreed_bits(optimizer))
    optimizer.synchronize()
    assert same_on_all_ranks(bits(model.parameters()))


def test_elastic_states_keep_it(world: rr.Communicator):
    """A restored state goes back to the exchange that was then; the ranks go on from their average."""
    model = make_model(dtype=torch.float64)
    optimizer = hvd.DiLoCo(momentum_sgd(model.parameters()), model, period=3, replica="rank")
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.sync()
    train(model, optimizer, range(4))
    state.step = 4
    state.commit()
    committed = copy.deepcopy(optimizer.state_dict()["local"])
    mean = [np.mean(hvd.allgather_object(each.detach().numpy()), axis=0) for each in model.parameters()]
    train(model, optimizer, range(4, 8))
    state.restore()
    rr.shutdown()
    rr.init()
    state.on_reset()
    state.sync()
    local = optimizer.state_dict()["local"]
    assert (state.step, local["steps"]) == (4, 4)
    assert torch.equal(local["averages"][0]["momentum"], committed["averages"][0]["momentum"])
    for each, expected in zip(model.parameters(), mean, strict=True):
        np.testing.assert_allclose(each.detach().numpy(), expected, rtol=1e-12, atol=1e-13)
    train(model, optimizer, range(4, 9))
    assert same_on_all_ranks(agreed_bits(optimizer))


# ---- an optimizer like others ----


def test_it_is_an_optimizer(world: rr.Communicator):
    """For schedulers, closures, hooks, and programs that ask what kind it is."""
    model = make_model(dtype=torch.float64)
    inner = torch.optim.SGD(model.parameters(), lr=ETA)
    optimizer = hvd.DiLoCo(inner, model, period=3)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.wrapped is inner
    assert optimizer.param_groups is inner.param_groups
    assert "DiLoCo" in repr(optimizer)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, world.rank, len(steps))
        loss.backward()
        return loss

    for _ in range(4):
        assert optimizer.step(closure) > 0
        scheduler.step()
    assert len(steps) == 4
    assert inner.param_groups[0]["lr"] == pytest.approx(ETA / 4)


@pytest.mark.parametrize("replica", ["node", "rank"])
def test_clipping_and_passes_that_add_up(world: rr.Communicator, replica: str):
    """The norm is that of the replica's gradients."""
    model = make_model(dtype=torch.float64)
    optimizer = hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=ETA), model, period=3, replica=replica)
    with optimizer.no_sync():
        loss_of(model, world.rank, 0).backward()
    loss_of(model, world.rank, 1).backward()
    norm = optimizer.clip_grad_norm_(0.01)
    expected = make_model(dtype=torch.float64)
    ranks = range(world.size) if replica == "node" else [world.rank]
    (sum(loss_of(expected, rank, step) for rank in ranks for step in (0, 1)) / len(ranks)).backward()
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01))
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


# ---- errors ----


@pytest.mark.spread
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"compression": hvd.Compression.topk}, "compression is none"),
        ({"compression": "int8"}, "compression is none"),
        ({"average": "buffers"}, "average must"),
        ({"average": ["buffers"]}, "average must"),
        ({"average": ["parameters", "gradients"]}, "average must"),
    ],
)
def test_wrong_arguments(world: rr.Communicator, options: dict[str, Any], complaint: str):
    """On all ranks, and training goes on with others."""
    model = make_model(dtype=torch.float64)
    with pytest.raises(rr.ConfigError, match=complaint):
        hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=ETA), model, **options)
    train(model, hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=ETA), model, period=1), range(1))


def test_what_cannot_be_wrapped(world: rr.Communicator):
    model = make_model(dtype=torch.float64)
    with pytest.raises(rr.ConfigError, match="DiLoCo wraps an optimizer, and got a model"):
        hvd.DiLoCo(model)
    inner = torch.optim.SGD(model.parameters(), lr=ETA)
    with pytest.raises(rr.ConfigError, match="wrapped"):
        hvd.DiLoCo(hvd.DistributedOptimizer(inner, model))
    with pytest.raises(rr.ConfigError, match="without a name"):
        hvd.DiLoCo(inner, [("one", model[0].weight)])
    with pytest.raises(rr.ConfigError, match="made with"):
        hvd.DiLoCo(inner, model).add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(TypeError, match="a DiLoCo belongs"):
        copy.deepcopy(hvd.DiLoCo(inner, model))


@pytest.mark.sizes(2, 3, 4)
def test_other_weights_on_ranks_stay_as_they_are(world: rr.Communicator):
    """The error comes before the step, and training goes on once the weights are equal."""
    model = make_model(dtype=torch.float64)
    with torch.no_grad():
        model[0].bias += world.rank
    optimizer = hvd.LocalSGD(torch.optim.SGD(model.parameters(), lr=ETA), model, replica="rank")
    before = bits(model.parameters())
    with pytest.raises(rr.MismatchError, match="broadcast_parameters"):
        optimizer.step()
    assert bits(model.parameters()) == before
    hvd.broadcast_parameters(model)
    optimizer.step()


def test_states_of_other_parameters_and_options(world: rr.Communicator):
    model = make_model(dtype=torch.float64)
    other = torch.nn.Linear(5, 7)
    optimizer = hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=ETA), model, period=3)
    train(model, optimizer, range(4))
    state, before = optimizer.state_dict(), agreed_bits(optimizer)
    fragments = hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=ETA), model, period=3, fragments=2)
    averaging = hvd.LocalSGD(torch.optim.SGD(model.parameters(), lr=ETA), model, period=3)
    train(model, averaging, range(4))
    small = hvd.DiLoCo(torch.optim.SGD(other.parameters(), lr=ETA), other, period=3)
    for into, given in ((fragments, state), (small, state), (optimizer, averaging.state_dict())):
        with pytest.raises(rr.ConfigError, match="the state"):
            into.load_state_dict(given)
    assert agreed_bits(optimizer) == before
    optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.3).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer.state_dict()["local"]["steps"] == 0


@pytest.mark.sizes(2, 3, 4)
def test_a_scaler_of_gradients_is_refused(world: rr.Communicator):
    model = make_model(dtype=torch.float64)
    optimizer = hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=ETA), model, replica="rank")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(model, world.rank, 0)).backward()
    with pytest.raises(rr.ConfigError, match="bfloat16"):
        scaler.step(optimizer)
