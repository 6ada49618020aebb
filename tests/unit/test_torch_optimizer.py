"""`DistributedOptimizer` as an optimizer: arguments, delegation, one rank. What several ranks do: tests/parallel."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import ringreduce as rr
from ringreduce.testing import run_process_sets

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def model() -> Any:
    return torch.nn.Linear(3, 2)


def train(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_it_is_an_optimizer_and_shares_everything(model: Any) -> None:
    """Groups, state, defaults and the wrapped class's own attributes are those of the wrapped optimizer."""
    inner = torch.optim.LBFGS(model.parameters())
    optimizer = hvd.DistributedOptimizer(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.wrapped is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert optimizer._numel_cache == inner._numel_cache
    assert repr(inner) in repr(optimizer)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing


def test_libraries_find_what_they_look_for_in_horovods(model: Any) -> None:
    """Its private class, by which they ask what kind an optimizer is, and the names of its parameters."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    named = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert isinstance(named, hvd.optimizer._DistributedOptimizer)
    assert not isinstance(inner, hvd.optimizer._DistributedOptimizer)
    assert named._parameter_names == {model.weight: "weight", model.bias: "bias"}
    assert len(set(hvd.DistributedOptimizer(inner)._parameter_names.values())) == 2


def test_what_is_set_on_it_is_set_on_the_wrapped_optimizer(model: Any) -> None:
    """Replacing groups, state or defaults reaches the optimizer that steps."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner)
    optimizer.param_groups, optimizer.state, optimizer.defaults = [], {1: 2}, {"lr": 3}
    assert (inner.param_groups, inner.state, inner.defaults) == ([], {1: 2}, {"lr": 3})


def test_hooks_reach_the_wrapped_optimizer(model: Any) -> None:
    """Hooks registered on either run once in each step, and around saving and loading."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    inner.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("save"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    train(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post", "save", "load"]


def test_one_rank_trains_as_if_not_wrapped(model: Any) -> None:
    """Alone there are no buckets and no copies: gradients stay where autograd put them."""
    plain = copy.deepcopy(model)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[Any] = []
    model.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad))
    train(model, optimizer)
    assert seen[0] is model.weight.grad
    assert optimizer.communication_s == 0.0
    torch.testing.assert_close(model.weight, plain.weight, rtol=0, atol=0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_means_what_it_means_in_torch(set_to_none: bool) -> None:
    """None is None, also after the gradient has been in a bucket; zeros are zeros."""

    def run(process_set: rr.ProcessSet) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=process_set)
        for _ in range(2):
            train(model, optimizer)
            optimizer.zero_grad(set_to_none=set_to_none)
            assert all((p.grad is None) if set_to_none else not p.grad.any() for p in model.parameters())

    run_process_sets(2, run)


def test_grad_scaler_with_synchronize() -> None:
    """Mixed precision works in Horovod's way: synchronize, unscale, and step within skip_synchronize."""

    def run(process_set: rr.ProcessSet) -> list[float]:
        weight = torch.nn.Parameter(torch.ones(2))
        inner = torch.optim.SGD([weight], lr=1.0, fused=True)
        optimizer = hvd.DistributedOptimizer(inner, process_set=process_set)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale((weight * (1.0 + 2.0 * process_set.rank())).sum()).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        assert weight.grad.tolist() == [2.0, 2.0]
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        return weight.tolist()

    assert run_process_sets(2, run) == [[-1.0, -1.0]] * 2


@pytest.mark.parametrize(("configured", "given", "expected"), [(1, None, 4), (1 << 20, None, 1), (1, 1 << 20, 1)])
def test_the_bucket_size_comes_from_the_settings(configured: int, given: int | None, expected: int) -> None:
    """``bucket_nbytes`` of the configuration says how many reductions a step makes, unless the argument does."""

    class Counter(rr.Instrument):
        calls = 0

        def collective_started(self, collective: str, algorithm: str, nbytes: int) -> None:
            self.calls += 1

    def run(process_set: rr.ProcessSet) -> int:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), bucket_nbytes=given, process_set=process_set
        )
        model(torch.ones(1, 3)).sum().backward()
        counter = Counter()
        process_set.engine.communicator.instruments.add(counter)
        optimizer.synchronize()
        return counter.calls - 1  # one says which parameters have a gradient, and whether the ranks' data differ

    assert run_process_sets(2, run, config=rr.Config(bucket_nbytes=configured, timeout_s=30.0)) == [expected] * 2


def test_a_model_can_be_copied_and_saved_while_it_trains() -> None:
    """Hooks and buckets do not get into copies and pickles of the model."""

    def run(process_set: rr.ProcessSet) -> None:
        model = torch.nn.Linear(300, 200)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=process_set)
        optimizer.zero_grad()
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(copied.weight, model.weight, rtol=0, atol=0)
            assert not copied.weight._post_accumulate_grad_hooks

    run_process_sets(2, run)


@pytest.mark.parametrize("duplicate", [copy.copy, pickle.dumps])
def test_it_cannot_leave_the_job(duplicate: Any, model: Any) -> None:
    """A pickle has no ranks to reduce with, and a shallow copy the same gradients; the error says what to do."""
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="save its state_dict"):
        duplicate(optimizer)


def test_it_needs_a_world(model: Any) -> None:
    """Without init there is nobody to train with, and the error says so."""
    hvd.shutdown()
    with pytest.raises(rr.ConfigError, match="init"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("compression", [hvd.Compression.int8, hvd.Compression.powersgd, hvd.Compression.topk])
def test_the_state_of_compression_is_all_that_was_loaded(compression: Any) -> None:
    """What belongs to buckets that are not there yet stays; where nothing was saved, all begins anew."""

    def train(process_set: rr.ProcessSet) -> None:
        generator = torch.Generator().manual_seed(process_set.rank())

        def build() -> tuple[Any, Any, Any]:
            first, second = (torch.nn.Parameter(torch.zeros(300, 2)) for _ in range(2))
            inner = torch.optim.SGD([first, second], lr=1.0)
            how = {"compression": compression, "process_set": process_set, "skip_unused": True, "overlap": False}
            return first, second, hvd.DistributedOptimizer(inner, **how)

        def step(parameter: Any, optimizer: Any) -> None:
            optimizer.zero_grad()
            parameter.grad = torch.randn(300, 2, generator=generator)
            optimizer.step()

        first, second, optimizer = build()
        fresh = copy.deepcopy(optimizer.state_dict())
        step(first, optimizer)
        begun = copy.deepcopy(optimizer.state_dict())["compression"]["buckets"]
        step(second, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        assert sorted(begun) == [0]
        assert sorted(saved["compression"]["buckets"]) == [0, 1]

        again, _, other = build()
        other.load_state_dict(saved)
        assert sorted(other.state_dict()["compression"]["buckets"]) == [0, 1]
        step(again, other)
        assert sorted(other.state_dict()["compression"]["buckets"]) == [0, 1]

        optimizer.load_state_dict(fresh)
        kept = optimizer.state_dict().get("compression", {"buckets": {}})["buckets"]
        for state in kept.values():
            assert not any(tensor.any() for name, tensor in state.items() if name != "factors")

    run_process_sets(2, train, node_size=1)
