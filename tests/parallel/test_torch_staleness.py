"""`DistributedOptimizer(staleness=s)`: step t applies the average of step t - s, and waits for no younger one."""

from __future__ import annotations

import copy
import io
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

import ringreduce as rr
from ringreduce.transport import mpi

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402

PRIVATE = MPI.COMM_WORLD.Dup()

Model = Any
Optimizer = Any


def mlp() -> Model:
    """Return a model of odd sizes, equal on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3))


def gradients(model: Model, rank: int, step: int) -> list[Any]:
    """Return those of one rank's batch."""
    torch.manual_seed(1000 * rank + step)
    return list(torch.autograd.grad(model(torch.randn(4, 7)).square().mean(), list(model.parameters())))


def train(model: Model, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        torch.manual_seed(1000 * rr.rank() + step)
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()


def wrap(model: Model, staleness: int, **options: Any) -> Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model, staleness=staleness, bucket_nbytes=200, **options)


def delayed(staleness: int, steps: int, left: int = 0) -> Model:
    """Return a model that one process has trained with the averages of all ranks, each so many steps late.

    Then, with the averages that are left, so many steps more.
    """
    model, waiting = mlp(), deque[list[Any]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps + left):
        if step < steps:
            everyone = [gradients(model, rank, step) for rank in range(rr.size())]
            waiting.append([sum(each) / rr.size() for each in zip(*everyone, strict=True)])
        if step >= staleness:
            for parameter, average in zip(model.parameters(), waiting.popleft(), strict=True):
                parameter.grad = average
            optimizer.step()
    return model


def assert_same(model: Model, expected: Model) -> None:
    """Check weights: to the bit, unless sums of several ranks may be rounded in another order."""
    tolerance = {"rtol": 0, "atol": 0} if rr.size() <= 2 else {"rtol": 1e-5, "atol": 1e-6}
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def assert_same_bits_everywhere(model: Model) -> None:
    for each in hvd.allgather_object([each.detach() for each in model.parameters()]):
        assert all(map(torch.equal, each, model.parameters()))


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_weights_are_those_of_one_process_that_delays(staleness: int) -> None:
    """All steps, and then those of `synchronize`: the averages that are left."""
    model = mlp()
    optimizer = wrap(model, staleness)
    train(model, optimizer, range(9))
    assert_same(model, delayed(staleness, 9))
    assert_same_bits_everywhere(model)
    if staleness:
        optimizer.synchronize()
        assert_same(model, delayed(staleness, 9, left=staleness))


@pytest.mark.spread
@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("stable", [True, False])
def test_the_stability_limit(staleness: int, stable: bool) -> None:
    """Gradient descent on a quadratic converges below 2 sin(pi / (2 (2 s + 1))), and not above."""
    limit = 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    rate = limit * (0.95 if stable else 1.05)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=rate), staleness=staleness)
    for _ in range(600):
        optimizer.zero_grad()
        (weight.square() / 2).sum().backward()
        optimizer.step()
    assert abs(weight.item()) < 0.1 if stable else abs(weight.item()) > 10


@pytest.mark.sizes(2, 3, 4)
def test_a_rank_that_does_not_come_blocks_nobody_for_so_many_steps() -> None:
    model = mlp()
    optimizer = wrap(model, 3)
    train(model, optimizer, range(2))
    if rr.rank() == 0:
        PRIVATE.Barrier()  # until the others have made three steps more
        train(model, optimizer, range(2, 5))
    else:
        train(model, optimizer, range(2, 5))
        PRIVATE.Barrier()
    assert_same(model, delayed(3, 5))


def test_a_saved_state_goes_on_and_saving_changes_nothing() -> None:
    """It has the averages that are still to be applied, the same on all ranks."""
    model = mlp()
    optimizer = wrap(model, 2)
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    train(model, optimizer, range(4, 8))
    file.seek(0)
    weights, state = PRIVATE.bcast(torch.load(file))
    again = mlp()
    again.load_state_dict(weights)
    other = wrap(again, 2)
    other.load_state_dict(state)
    train(again, other, range(4, 8))
    assert_same(again, model)
    assert_same(model, delayed(2, 8))
    assert len(state["late"]) == 2
    with pytest.raises(rr.ConfigError, match=r"2 averages.*synchronize\(\)"):
        wrap(mlp(), 1).load_state_dict(state)


def test_commits_hold_averages() -> None:
    model = mlp()
    optimizer = wrap(model, 2)
    state = hvd.elastic.TorchState(model, optimizer)
    train(model, optimizer, range(4))
    state.commit()
    train(model, optimizer, range(10, 13))
    state.restore()
    train(model, optimizer, range(4, 6))
    rr.barrier()  # a rank may be two steps ahead
    hvd.shutdown()  # what was under way is gone, and what was restored is not
    hvd.init()
    state.restore()
    optimizer.rejoin()
    train(model, optimizer, range(4, 8))
    assert_same(model, delayed(2, 8))


@pytest.mark.parametrize("node_size", [1, None])
def test_a_world_ends_at_once(
    nodes_of: Callable[[int | None], None], node_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although averages are under way: a rank that has begun them does not wait for messages that do not come."""
    monkeypatch.setattr(mpi, "_PARTING_S", 3600.0)
    nodes_of(node_size)
    model = mlp()
    optimizer = wrap(model, 2)
    for _ in range(5):
        train(model, optimizer, range(4))
        rr.barrier()
        hvd.shutdown()
        hvd.init()


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_wire_formats(nodes_of_one: None, name: str) -> None:
    """Ranks agree on the bits, also as one optimizer goes back to what it has saved with the rounding errors."""
    model = mlp()
    optimizer = wrap(model, 2, compression=getattr(hvd.Compression, name))
    train(model, optimizer, range(6))
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(6, 20))
    assert_same_bits_everywhere(model)
    for one, other in zip(model.parameters(), delayed(2, 20).parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)
    ended = copy.deepcopy(list(model.parameters()))
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(6, 20))
    assert all(map(torch.equal, ended, model.parameters()))


def test_a_new_world_keeps_averages_that_were_saved() -> None:
    """On the root of a broadcast, which has waited for them, and on the others, which have loaded them."""
    model = mlp()
    optimizer = wrap(model, 2)
    train(model, optimizer, range(4))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.shutdown()
    hvd.init()
    train(model, optimizer, range(4, 8))
    assert_same(model, delayed(2, 8))


def test_small_commits_are_refused() -> None:
    model = mlp()
    state = hvd.elastic.TorchState(model, wrap(model, 1))
    with pytest.raises(rr.ConfigError, match="every=1"):
        state.keep_in_memory(2)


def test_clipping_is_of_what_is_applied() -> None:
    model, expected, waiting = mlp(), mlp(), deque[list[Any]]()
    optimizer = wrap(model, 1)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        torch.manual_seed(1000 * rr.rank() + step)
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.clip_grad_norm_(0.01)
        optimizer.step()
        everyone = [gradients(expected, rank, step) for rank in range(rr.size())]
        waiting.append([sum(each) / rr.size() for each in zip(*everyone, strict=True)])
        if step >= 1:
            for parameter, average in zip(expected.parameters(), waiting.popleft(), strict=True):
                parameter.grad = average
            torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
            plain.step()
    assert_same(model, expected)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_the_program_keeps_and_unused_parameters(to_none: bool) -> None:
    """A gradient that is held keeps its values; a parameter without a gradient has zeros."""
    model, held = mlp(), []
    decaying = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(decaying, model, staleness=1)
    for step in range(5):
        optimizer.zero_grad(set_to_none=to_none)
        torch.manual_seed(1000 * rr.rank() + step)
        model[0](torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        grad = model[0].weight.grad
        held.append((grad, None if grad is None else grad.clone()))
        if not to_none:
            held = held[-1:]
    for grad, before in held:
        assert grad is None or torch.equal(grad, before)
    assert_same_bits_everywhere(model)
    torch.testing.assert_close(model[2].weight, mlp()[2].weight * 0.95**4)


def test_parameters_that_are_added() -> None:
    """They are stepped with their first average, one step after it was submitted."""
    model, alone = mlp(), mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), staleness=1)
    train(model, optimizer, range(3))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    train(model, optimizer, range(3, 6))
    average: list[Any] = []
    for step in range(6):
        everyone = [gradients(alone, rank, step) for rank in range(rr.size())]
        with torch.no_grad():
            for number, (parameter, each) in enumerate(zip(alone.parameters(), average, strict=False)):
                if number < 2 or step > 3:
                    parameter -= 0.1 * each
        average = [sum(each) / rr.size() for each in zip(*everyone, strict=True)]
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other)


class Quadratics(torch.nn.ParameterList):
    """Parameters of odd lengths, each with a gradient of its own for each rank and step."""

    def __init__(self, count: int) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(3 + n, dtype=torch.float64)) for n in range(count)])

    @staticmethod
    def gradient(number: int, value: Any, rank: int, step: int) -> Any:
        return (0.1 + 0.05 * number) * value + 0.01 * (rank + 1) * (number + 1) + 0.003 * step


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("reload", [False, True])
def test_parameters_that_are_frozen_thawed_added_and_removed(staleness: int, reload: bool) -> None:
    """Averages are those of their parameters, in saved states, too; the last of a frozen one come late.

    Others of the list have gone or come since; a removed parameter stays as it is.
    """
    model = Quadratics(5)
    groups = [{"params": [model[0], model[1]]}, {"params": [model[2], model[3]]}]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), staleness=staleness, bucket_nbytes=64)
    values, waiting = [each.detach().clone() for each in model], deque[dict[int, Any]]()
    there, frozen = {0, 1, 2, 3}, set[int]()
    for step in range(14):
        if step == 3:
            frozen = {0, 3}
        elif step == 6:
            frozen = {3}
        elif step == 8:
            optimizer.add_param_group({"params": [model[4]]})
            there.add(4)
        elif step == 10:
            optimizer.param_groups[0]["params"].pop(0)
            there.remove(0)
        elif step == 11:
            frozen = set()
        for number, each in enumerate(model):
            each.requires_grad_(number not in frozen)
        optimizer.zero_grad()
        for number in there - frozen:
            model[number].grad = model.gradient(number, model[number].detach(), rr.rank(), step)
        optimizer.step()
        ranks = range(rr.size())
        waiting.append(
            {n: sum(model.gradient(n, values[n], rank, step) for rank in ranks) / rr.size() for n in there - frozen}
        )
        if len(waiting) > staleness:
            for number, average in waiting.popleft().items():
                if number in there:
                    values[number] = values[number] - 0.1 * average
        for each, value in zip(model, values, strict=True):
            torch.testing.assert_close(each.detach(), value, rtol=1e-13, atol=1e-14)
        state = copy.deepcopy(optimizer.state_dict())
        assert all(average is not None for late in state["late"] for average in late.values())
        if reload:
            optimizer.load_state_dict(state)
    assert_same_bits_everywhere(model)
    optimizer.synchronize()
    for late in waiting:
        for number, average in late.items():
            values[number] = values[number] - 0.1 * average
    for each, value in zip(model, values, strict=True):
        torch.testing.assert_close(each.detach(), value, rtol=1e-13, atol=1e-14)


@pytest.mark.sizes(2, 3, 4)
def test_a_parameter_that_one_rank_freezes_is_an_error_on_all() -> None:
    """It would move on the others alone."""
    model = mlp()
    optimizer = wrap(model, 1)
    train(model, optimizer, range(3))
    if rr.rank() == 1:
        model[0].weight.requires_grad_(False)
    with pytest.raises(rr.MismatchError, match="of 3 of 4 parameters"):
        train(model, optimizer, range(3, 5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": hvd.Adasum}, "Adasum and staleness"),
        ({"reduce_in": "backward"}, 'reduce_in="backward" and staleness'),
        ({"shard": "node"}, "shard and staleness"),
        ({"overlap": True}, "overlap=True and staleness"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor and staleness"),
        ({"compression": hvd.Compression.powersgd(2)}, "powersgd, topk or a custom compressor and staleness"),
        ({"skip_unused": True}, "skip_unused=True and staleness"),
        ({"staleness": -1}, "staleness"),
        ({"staleness": 1.5}, "staleness"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(rr.ConfigError, match=words):
        hvd.DistributedOptimizer(torch.optim.SGD(mlp().parameters(), lr=0.1), **{"staleness": 1, **options})


def test_closures_and_scalers_are_refused() -> None:
    model = mlp()
    optimizer = wrap(model, 1)
    train(model, optimizer, range(1))
    with pytest.raises(rr.ConfigError, match=r"staleness and step\(closure\)|step\(closure\) and staleness"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(rr.ConfigError, match="skip_synchronize and staleness"), optimizer.skip_synchronize():
        pass
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 7)).sum()).backward()
    with pytest.raises(rr.ConfigError, match="GradScaler and staleness"):
        scaler.step(optimizer)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_are_refused_on_all_ranks() -> None:
    """One rank has some; dense ones of the others do not help."""
    weight = torch.nn.Parameter(torch.ones(5, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), staleness=1)
    rows = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (5, 2))
    weight.grad = rows if rr.rank() == 0 else rows.to_dense()
    if rr.rank() != 0:
        optimizer.step()  # these hear of it when they wait for this step
    with pytest.raises((rr.ConfigError, rr.MismatchError), match="sparse"):
        optimizer.step()


@pytest.mark.sizes(2, 3, 4)
def test_joined_ranks_are_refused() -> None:
    """The others raise; nothing hangs."""
    model = mlp()
    optimizer = wrap(model, 1)
    train(model, optimizer, range(3))
    if rr.rank() == rr.size() - 1:
        hvd.join()
    else:
        with pytest.raises(rr.ConfigError, match="no rank may join"):
            train(model, optimizer, range(3, 8))
        hvd.join()


def test_copies_and_repeats() -> None:
    """A run that is made again ends in the same bits; a copy of the optimizer begins by itself."""
    ends = []
    make: Callable[[], Model] = mlp
    for _ in range(2):
        model = make()
        optimizer = wrap(model, 2)
        train(model, optimizer, range(7))
        ends.append([each.detach().clone() for each in model.parameters()])
    assert all(map(torch.equal, *ends))
    both = copy.deepcopy((model, optimizer))
    train(*both, range(7, 9))
    both[1].synchronize()
    assert_same_bits_everywhere(both[0])
