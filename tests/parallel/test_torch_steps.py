"""What ranks are told of steps: those that differ between ranks, pass by the wrapper, or do not come."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
from torch_models import Model, Optimizer, assert_equal_on_ranks, mlp  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402

several = pytest.mark.sizes(2, 3, 4)


def build(make: Callable[[Any], Optimizer] | None = None, **options: Any) -> tuple[Model, Optimizer, Optimizer]:
    """A model that is equal on all ranks, its optimizer, and that optimizer wrapped."""
    model = mlp(3, 5, 2, seed=4)
    inner = (make or (lambda parameters: torch.optim.SGD(parameters, lr=0.25)))(model.parameters())
    return model, inner, hvd.DistributedOptimizer(inner, model.named_parameters(), **options)


def backward(model: Model) -> None:
    model.zero_grad()
    model(torch.full((2, 3), float(1 + rr.rank()))).square().sum().backward()


# ---- hyper-parameters ----


@several
def test_rates_may_differ_between_ranks_and_a_warning_tells(warned: Any) -> None:
    """A schedule that follows a rank's own loss does not end the job; rank 0 warns once: group, name, values, ranks."""
    model, _, optimizer = build()
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for step in range(9):
        backward(model)
        optimizer.step()
        assert len(warned("hyper-parameters")) == (1 if rr.rank() == 0 and step >= 3 else 0), (
            "compared in steps 1, 2, 4, 8"
        )
        if step == 1:
            schedule.step(1.0)
            schedule.step(2.0 if rr.rank() == 1 else 0.5)
    if rr.rank() == 0:
        (message,) = warned("hyper-parameters")
        others = "rank 0" if rr.size() == 2 else f"ranks 0, 2{'-3' * (rr.size() == 4)}"
        assert f"lr of group 0 is 0.25 on {others}, 0.125 on rank 1" in message


@pytest.mark.spread
@several
@pytest.mark.parametrize(
    ("make", "key", "different"),
    [
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.1), "betas", (0.8, 0.999)),
        (lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)), "lr", torch.tensor(0.2)),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), "weight_decay", 0.5),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), "maximize", True),
    ],
    ids=["betas", "rates that are tensors", "weight decay", "switches"],
)
def test_any_number_of_a_group_counts(make: Any, key: str, different: Any, warned: Any) -> None:
    """Numbers, tuples of them, switches and tensors are compared by their values."""
    for differ in (False, True):
        model, inner, optimizer = build(make)
        if differ and rr.rank() == 1:
            inner.param_groups[0][key] = different
        backward(model)
        optimizer.step()
        assert len(warned("hyper-parameters")) == (1 if differ and rr.rank() == 0 else 0)
    assert rr.rank() or f"{key} of group 0" in warned("hyper-parameters")[0]


@several
def test_the_class_of_the_optimizer_counts(warned: Any) -> None:
    """Ranks that step in different ways are told so."""
    make = torch.optim.Adam if rr.rank() else torch.optim.AdamW
    model, _, optimizer = build(lambda parameters: make(parameters, lr=0.1, weight_decay=0.0))
    backward(model)
    optimizer.step()
    assert rr.rank() or "the optimizer is AdamW on rank 0, Adam on rank" in warned("hyper-parameters")[0]


def test_other_things_in_groups_are_not_compared(warned: Any) -> None:
    """Objects, sets and what a program keeps in a group for itself differ from rank to rank, and nobody minds."""
    model, inner, optimizer = build()
    inner.param_groups[0].update(owner=object(), tags={str(rr.rank()), "b", "c"}, number=rr.rank())
    for _ in range(3):
        backward(model)
        optimizer.step()
    assert warned("hyper-parameters") == []
    assert_equal_on_ranks(model)


@several
def test_ranks_that_have_joined_have_no_say_in_it(warned: Any) -> None:
    """What a rank without data has in its groups is no difference."""
    model, inner, optimizer = build()
    if rr.rank() == rr.size() - 1:
        inner.param_groups[0]["lr"] = 17.0
    else:
        for _ in range(2):
            backward(model)
            optimizer.step()
    hvd.join()
    assert warned("hyper-parameters") == []


def scaled_steps(scaler: Any, count: int, *, clips: bool = False) -> Model:
    model, _, optimizer = build()
    for _ in range(count):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 3), float(1 + rr.rank()))).square().sum()).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return model


@several
@pytest.mark.parametrize("clips", [False, True], ids=["", "clips"])
@pytest.mark.parametrize(("key", "value"), [("scale", 16.0), ("_growth_tracker", 5)])
def test_the_state_of_a_scaler_that_one_rank_has_loaded_is_refused(key: str, value: float, clips: bool) -> None:
    """Each rank's gradients would have another scale, now or later: all raise, and go on once all have loaded it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    if rr.rank() == 0:
        scaler.load_state_dict({**scaler.state_dict(), key: value})
    with pytest.raises(rr.MismatchError, match=r"scaler\.load_state_dict\(broadcast_object") as raised:
        scaled_steps(scaler, 1, clips=clips)
    words = f"{key.strip('_')} of the GradScaler {value}"
    assert [rank for rank, said in raised.value.values.items() if words in said] == [0]
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(hvd.broadcast_object({**scaler.state_dict(), key: value} if rr.rank() == 0 else None))
    assert_equal_on_ranks(scaled_steps(scaler, 9, clips=clips))


@several
def test_a_scaler_that_one_rank_lacks_is_refused() -> None:
    """Before the second step is made, as it shows after the first has begun."""
    with pytest.raises(rr.MismatchError, match="no GradScaler"):
        scaled_steps(torch.amp.GradScaler("cpu", enabled=rr.rank() > 0), 2)


@several
def test_weights_that_one_rank_changes_are_told_once(warned: Any) -> None:
    """On one node, too, where nothing is reduced before the step: before steps 4, 8, 16 and so on."""
    model, _, optimizer = build()
    for step in range(17):
        if step == 2 and rr.rank() == 1:
            with torch.no_grad():
                model[0].weight.add_(1.0)
        backward(model)
        optimizer.step()
        said = warned("different weights by now")
        assert len(said) == (1 if rr.rank() == 0 and step >= 3 else 0)


@several
@pytest.mark.parametrize("ends", ["wrapper", "world"])
@pytest.mark.parametrize("bad", [False, True])
def test_weights_that_end_as_nan_are_told_once(ends: str, bad: bool, warned: Any) -> None:
    """With the check that finds where it began: when the optimizer ends, or the world."""
    rr.shutdown()
    rr.init()
    model, inner, optimizer = build()
    for step in range(3):
        backward(model)
        if bad and step == 1 and rr.rank() == 1:
            model[0].weight.grad[0, 0] = math.nan
        optimizer.step()
    if ends == "wrapper":
        del optimizer
    rr.shutdown()
    rr.init()
    said = warned("ends with NaN or infinity")
    assert len(said) == (bad and rr.rank() == 0)
    assert all("RINGREDUCE_CHECK_FINITE=1" in each and "SGD over 4 parameters" in each for each in said)
    assert inner


# ---- steps around the wrapper ----


def test_a_step_of_the_wrapped_optimizer_warns_once() -> None:
    """It would let the ranks drift apart silently; alone nothing can drift."""
    model, inner, optimizer = build()
    backward(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inner.step()
        inner.step()
        optimizer.step()
    texts = [str(each.message) for each in caught]
    if rr.size() == 1:
        assert texts == []
        return
    (text,) = texts
    assert "SGD" in text
    assert "call step() of the DistributedOptimizer" in text
    assert caught[0].filename == __file__


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "in the step": hvd.DistributedOptimizer,
    "in the backward pass": partial(hvd.DistributedOptimizer, reduce_in="backward"),
    "by speed": partial(hvd.DistributedOptimizer, overlap=True),
    "DiLoCo": partial(hvd.DiLoCo, period=2, replica="rank"),
    "DiLoCo of a node": partial(hvd.DiLoCo, period=2, replica="node"),
    "LocalSGD": partial(hvd.LocalSGD, period=2, replica="rank"),
}


@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("wrap", list(WRAPPERS))
def test_a_wrapper_that_is_not_used_warns_once(wrap: str, kept: bool) -> None:
    """The program goes on with the optimizer that it has wrapped, and each rank trains alone."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = WRAPPERS[wrap](inner)
    if not kept:
        del wrapper
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            backward(model)
            inner.step()
    texts = [str(each.message) for each in caught]
    alone = rr.size() == 1
    if alone or (kept and wrap == "in the backward pass"):  # whose gradients are reduced then
        assert texts == []
        return
    (text,) = texts
    name = wrap if wrap.startswith("DiLoCo") else "DiLoCo" if wrap == "LocalSGD" else "DistributedOptimizer"
    assert name.split()[0] in text
    assert ("nobody has kept" in text) is not kept
    assert caught[0].filename == __file__


def test_a_wrapper_that_another_one_replaces_does_not_warn() -> None:
    """Which makes the steps of the optimizer: warnings are errors here."""
    model, inner, optimizer = build()
    del optimizer
    again = hvd.DistributedOptimizer(inner)
    for _ in range(2):
        backward(model)
        again.step()
    del again
    inner.step()


@pytest.mark.parametrize("options", [{}, {"op": hvd.Adasum}, {"overlap": True}], ids=str)
def test_steps_of_the_wrapper_do_not_warn(options: dict[str, Any]) -> None:
    """Plain, with a closure, under a schedule and a GradScaler, after `synchronize`: warnings are errors here."""
    model, inner, optimizer = build(**options)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (inner, optimizer)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def closure() -> Any:
        backward(model)
        return torch.tensor(1.0)

    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.step(closure)
        for schedule in schedules:
            schedule.step()
        model.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    if "op" not in options:
        backward(model)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert_equal_on_ranks(model)


@several
def test_gradients_that_are_reduced_may_be_used_by_the_wrapped_optimizer() -> None:
    """After `synchronize` the ranks have equal gradients, once; within `skip_synchronize` the program knows."""
    model, inner, optimizer = build()
    for _ in range(2):
        backward(model)
        optimizer.synchronize()
        inner.step()
    assert_equal_on_ranks(model)
    with optimizer.skip_synchronize():
        inner.step()
    with pytest.warns(UserWarning, match="DistributedOptimizer"):
        inner.step()


def test_an_optimizer_that_is_not_wrapped_any_more_may_step() -> None:
    """A wrapper that has made steps and is gone watches nothing, and nothing keeps it."""
    model, inner, optimizer = build()
    backward(model)
    optimizer.step()
    kept = weakref.ref(optimizer)
    del optimizer
    assert kept() is None
    assert not inner._optimizer_step_pre_hooks
    backward(model)
    inner.step()


class WithState(torch.optim.SGD):
    """An optimizer that puts all it has into copies and pickles."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


@pytest.mark.parametrize("kind", [torch.optim.SGD, WithState])
def test_wrapped_optimizers_can_be_copied_and_saved(kind: Any) -> None:
    """A copy belongs to nobody: it steps as it likes."""
    model, inner, optimizer = build(lambda parameters: kind(parameters, lr=0.1))
    for copied in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        for group in copied.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        copied.step()
    backward(model)
    optimizer.step()


# ---- steps that do not come ----


@pytest.fixture
def short_limits(begin_world: Callable[..., None]) -> None:
    """A world that warns and gives up soon."""
    begin_world(TIMEOUT="1.5", STALL_WARNING="0.5")


@pytest.mark.sizes(2)
def test_a_step_that_does_not_come_is_named_in_the_users_words(short_limits: None, warned: Any) -> None:
    """Warning and error say which optimizer it is, by its class and its parameters."""
    model, _, optimizer = build()
    words = "the step of SGD over 4 parameters, 0.weight to 2.bias"
    if rr.rank() == 0:
        backward(model)
        with pytest.raises(rr.CollectiveTimeoutError, match=f"for rank 1 to submit {words}"):
            optimizer.step()
        assert warned(f"stalled: {words} has waited")
    else:
        pass  # it evaluates, or has left its loop: it does not step


@pytest.mark.sizes(2)
@pytest.mark.parametrize(("kind", "words"), [("closure", "the loss of a closure"), ("adasum", "the step")])
def test_the_other_waits_of_a_step_are_named_too(short_limits: None, kind: str, words: str) -> None:
    """The loss of a closure that only one rank has, and a step with Adasum."""
    model, _, optimizer = build(op=hvd.Adasum if kind == "adasum" else hvd.Average)
    backward(model)
    if kind == "closure":
        with pytest.raises(rr.CollectiveError) if rr.rank() == 0 else warnings.catch_warnings() as caught:
            optimizer.step(lambda: torch.tensor(1.0) if rr.rank() == 0 else None)
    elif rr.rank() == 0:
        with pytest.raises(rr.CollectiveError) as caught:
            optimizer.step()
    if rr.rank() == 0:
        assert f"{words} of SGD over 4 parameters, 0.weight to 2.bias" in str(caught.value)


# ---- data ----


@several
@pytest.mark.parametrize("same", [True, False])
def test_sparse_gradients_show_whether_the_ranks_have_the_same_data(same: bool, warned: Any) -> None:
    """A gradient of an embedding that holds other rows, or the same rows with other values, is another one."""
    for other_rows in (True, False):
        model = torch.nn.Embedding(3 * rr.size(), 2, sparse=True)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25), model.named_parameters())
        mine = 0 if same else rr.rank()
        for _ in range(4):
            model.zero_grad()
            rows = torch.tensor([1, 2]) + 3 * mine * other_rows
            (model(rows).sum() * (1 + mine * (not other_rows))).backward()
            optimizer.step()
    assert len(warned("DistributedSampler")) == (2 if same and rr.rank() == 0 else 0)


@pytest.mark.spread
@several
@pytest.mark.parametrize(
    "options",
    [{}, {"shard": "node"}, {"shard": "all"}, {"reduce_in": "backward"}, {"overlap": False}],
    ids=["plain", "shard node", "shard all", "in backward", "no overlap"],
)
@pytest.mark.parametrize("node_size", ["", "1"], ids=["one node", "nodes of 1"])
def test_optimizers_that_ranks_step_in_another_order_get_an_error_at_once(
    options: dict[str, Any], node_size: str, no_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks hear what each of them waits for, and go on in one order; where buckets may overlap, in a new world."""
    monkeypatch.setenv("RINGREDUCE_NODE_SIZE", node_size)
    rr.init()
    may_overlap = bool(node_size) and options.get("overlap") is not False
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    for each in models:
        torch.nn.init.zeros_(each.weight)
        torch.nn.init.zeros_(each.bias)
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(each.parameters(), lr=1.0),
            [(f"{name}.{key}", value) for key, value in each.named_parameters()],
            **options,
        )
        for name, each in zip(("actor", "critic"), models, strict=True)
    ]

    def step(number: int) -> None:
        optimizers[number].zero_grad()
        (models[number](torch.full((1, 3), 1.0 + rr.rank())) * 10.0**number).sum().backward()
        optimizers[number].step()

    for number in (0, 1, 1, 0):
        step(number)
    with pytest.raises(rr.MismatchError) as caught:
        step(int(rr.rank() > 0))
    assert sorted(caught.value.values) == list(range(rr.size()))
    assert "actor" in str(caught.value)
    assert "critic" in str(caught.value)
    assert "in one order on all ranks" in str(caught.value)
    if may_overlap:
        with pytest.raises(rr.RingReduceError):  # the ranks have begun different steps: nothing may go on from there
            step(1)
        rr.shutdown()
        rr.init()
    mean = 1.0 + (rr.size() - 1) / 2
    assert torch.allclose(models[1].weight, torch.full((2, 3), -20.0 * mean))
    step(1)
    assert torch.allclose(models[1].weight, torch.full((2, 3), -30.0 * mean))


@several
def test_local_training_of_two_models_in_another_order_gets_an_error_at_once() -> None:
    """Their exchanges are those of different models."""
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    for each in models:
        hvd.broadcast_parameters(each.state_dict(), 0)
    inner = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    named = [each.named_parameters() for each in models]
    optimizers = [hvd.LocalSGD(*each, period=1, replica="rank") for each in zip(inner, named, strict=True)]

    def step(number: int) -> None:
        optimizers[number].zero_grad()
        models[number](torch.full((1, 3), 1.0 + rr.rank())).sum().backward()
        optimizers[number].step()

    for number in (0, 1, 1, 0):
        step(number)
    with pytest.raises(rr.MismatchError, match="in one order on all ranks"):
        step(int(rr.rank() > 0))
