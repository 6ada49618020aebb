"""`DistributedOptimizer(staleness=s)`: step t applies the average of step t - s, and waits for no younger one."""

from __future__ import annotations

import copy
import io
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from suites.late_training import Delayed, make_late
from suites.trainees import (
    MOMENTUM,
    OneProcess,
    assert_equal_on_ranks,
    assert_near,
    assert_weights,
    bits,
    give_slopes,
    mean,
    named,
    slopes,
    start,
    train,
)

import ringreduce as rr
from ringreduce.transport import mpi

torch = pytest.importorskip("torch")
from trainees.with_torch import Torch  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402

PRIVATE = MPI.COMM_WORLD.Dup()


def late(staleness: int, **options: Any) -> Torch:
    return make_late(Torch, staleness, **options)


def test_a_saved_state_goes_on_and_saving_changes_nothing() -> None:
    """It has the averages that are still to be applied, the same on all ranks."""
    trainee = late(2)
    train(trainee, range(4))
    file = io.BytesIO()
    torch.save((trainee.model.state_dict(), trainee.optimizer.state_dict()), file)
    train(trainee, range(4, 8))
    file.seek(0)
    weights, state = PRIVATE.bcast(torch.load(file))
    again = late(2)
    again.model.load_state_dict(weights)
    again.load_state_dict(state)
    train(again, range(4, 8))
    for each in (trainee, again):
        assert_weights(each, Delayed(2).train(range(8)).weights)
    assert len(state["late"]) == 2
    with pytest.raises(rr.ConfigError, match=r"2 averages.*synchronize\(\)"):
        late(1).load_state_dict(state)


def test_commits_hold_averages() -> None:
    trainee = late(2)
    state = hvd.elastic.TorchState(trainee.model, trainee.optimizer)
    train(trainee, range(4))
    state.commit()
    train(trainee, range(10, 13))
    state.restore()
    train(trainee, range(4, 6))
    rr.barrier()  # a rank may be two steps ahead
    hvd.shutdown()  # what was under way is gone, and what was restored is not
    hvd.init()
    state.restore()
    trainee.optimizer.rejoin()
    train(trainee, range(4, 8))
    assert_weights(trainee, Delayed(2).train(range(8)).weights)


@pytest.mark.parametrize("node_size", [1, None])
def test_a_world_ends_at_once(
    nodes_of: Callable[[int | None], None], node_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although averages are under way: a rank that has begun them does not wait for messages that do not come."""
    monkeypatch.setattr(mpi, "_PARTING_S", 3600.0)
    nodes_of(node_size)
    trainee = late(2)
    for _ in range(5):
        train(trainee, range(4))
        rr.barrier()
        hvd.shutdown()
        hvd.init()


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_a_saved_state_has_the_rounding_errors_of_wire_formats(nodes_of_one: None, name: str) -> None:
    """One optimizer goes back to what it has saved."""
    trainee = late(2, compression=name)
    train(trainee, range(6), exact=False)
    weights, state = copy.deepcopy((trainee.model.state_dict(), trainee.optimizer.state_dict()))
    train(trainee, range(6, 20), exact=False)
    ended = bits(trainee)
    trainee.model.load_state_dict(weights)
    trainee.load_state_dict(state)
    train(trainee, range(6, 20), exact=False)
    assert bits(trainee) == ended


def test_a_new_world_keeps_averages_that_were_saved() -> None:
    """On the root of a broadcast, which has waited for them, and on the others, which have loaded them."""
    trainee = late(2)
    train(trainee, range(4))
    hvd.broadcast_optimizer_state(trainee.optimizer, root_rank=0)
    hvd.shutdown()
    hvd.init()
    train(trainee, range(4, 8))
    assert_weights(trainee, Delayed(2).train(range(8)).weights)


def test_small_commits_are_refused() -> None:
    trainee = late(1)
    state = hvd.elastic.TorchState(trainee.model, trainee.optimizer)
    with pytest.raises(rr.ConfigError, match="every=1"):
        state.keep_in_memory(2)


def test_clipping_is_of_what_is_applied() -> None:
    """In the first step nothing is; then the average of the step before."""
    trainee = late(1)
    expected = OneProcess(start(), MOMENTUM)
    average: dict[str, Any] = {}
    for step in range(5):
        give_slopes(trainee, step, exact=False)
        trainee.optimizer.clip_grad_norm_(1.0)
        trainee.step()
        current = mean([slopes(expected.weights, rank, step, exact=False) for rank in range(rr.size())])
        norm = math.sqrt(sum(np.square(each).sum() for each in average.values()))
        expected.step({name: each / norm for name, each in average.items()})
        average = current
    assert_near(trainee, expected.weights)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_the_program_keeps_and_unused_parameters(to_none: bool) -> None:
    """A gradient that is held keeps its values; a parameter without a gradient has zeros."""
    trainee = Torch(start())
    model = trainee.model
    decaying = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(decaying, model, staleness=1)
    held = []
    for step in range(5):
        optimizer.zero_grad(set_to_none=to_none)
        trainee.give({"matrix": slopes(named(trainee), rr.rank(), step)["matrix"].astype(np.float32)})
        optimizer.step()
        grad = model["matrix"].grad
        held.append((grad, None if grad is None else grad.clone()))
        if not to_none:
            held = held[-1:]
    for grad, before in held:
        assert grad is None or torch.equal(grad, before)
    assert_equal_on_ranks(trainee)
    np.testing.assert_allclose(named(trainee)["bias"], start()["bias"] * 0.95**4, rtol=1e-6)


class Quadratics(torch.nn.ParameterList):
    """Parameters of odd lengths, each with a gradient of its own for each rank and step."""

    def __init__(self, count: int) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(3 + n, dtype=torch.float64)) for n in range(count)])

    @staticmethod
    def gradient(number: int, value: Any, rank: int, step: int) -> Any:
        return (0.1 + 0.05 * number) * value + 0.01 * (rank + 1) * (number + 1) + 0.003 * step


@pytest.mark.spread
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
        torch.testing.assert_close([*model], values, rtol=1e-13, atol=1e-14)
        state = copy.deepcopy(optimizer.state_dict())
        assert all(average is not None for late in state["late"] for average in late.values())
        if reload:
            optimizer.load_state_dict(state)
    optimizer.synchronize()
    for left in waiting:
        for number, average in left.items():
            values[number] = values[number] - 0.1 * average
    torch.testing.assert_close([*model], values, rtol=1e-13, atol=1e-14)


@pytest.mark.sizes(2, 3, 4)
def test_a_parameter_that_one_rank_freezes_is_an_error_on_all() -> None:
    """It would move on the others alone."""
    trainee = late(1)
    train(trainee, range(3))
    optimizer = trainee.optimizer
    if rr.rank() == 1:
        trainee.model["matrix"].requires_grad_(False)

    def go_on() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            sum(each.sum() for each in trainee.model.values()).backward()
            optimizer.step()

    with pytest.raises(rr.MismatchError, match="of 3 of 4 parameters"):
        go_on()


def test_closures_and_scalers_are_refused() -> None:
    trainee = late(1)
    optimizer = trainee.optimizer
    train(trainee, range(1))
    with pytest.raises(rr.ConfigError, match=r"staleness and step\(closure\)|step\(closure\) and staleness"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(rr.ConfigError, match="skip_synchronize and staleness"), optimizer.skip_synchronize():
        pass
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(trainee.model["bias"].sum()).backward()
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
    trainee = late(1)
    train(trainee, range(3))
    if rr.rank() == rr.size() - 1:
        hvd.join()
    else:
        with pytest.raises(rr.ConfigError, match="no rank may join"):
            train(trainee, range(3, 8))
        hvd.join()


def test_a_copy_begins_by_itself() -> None:
    """Without the averages that the other one is still to apply."""
    trainee = late(2)
    train(trainee, range(7))
    trainee.model, trainee.optimizer = copy.deepcopy((trainee.model, trainee.optimizer))
    train(trainee, range(7, 9))
    trainee.synchronize()
    assert_equal_on_ranks(trainee)
