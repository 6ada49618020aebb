"""What can be asked of a `DistributedOptimizer`: each option against one process that sees all ranks' data."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
from torch_models import Model, assert_equal_on_ranks, mlp  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402

make_model = partial(mlp, 4, 7, 3, seed=5, dtype=torch.float64)


def data(step: int) -> Any:
    """The inputs of all ranks: (size, rows, features)."""
    return torch.randn(rr.size(), 5, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def sgd(model: Model, lr: float = 0.5) -> Any:
    return torch.optim.SGD(model.parameters(), lr=lr)


def mean_loss(model: Model, inputs: Any) -> Any:
    return model(inputs).square().mean()


def train_alone(model: Model, optimizer: Any, steps: int, scale: float = 1.0) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        sum(mean_loss(model, each) * (scale / rr.size()) for each in data(step)).backward()
        optimizer.step()


def train_together(model: Model, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        mean_loss(model, data(step)[rr.rank()]).backward()
        optimizer.step()


@pytest.mark.spread
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"compression": hvd.Compression.fp16}, 1e-2),
        ({"compression": hvd.Compression.bf16}, 5e-2),
        ({"gradient_predivide_factor": 2.0}, 1e-11),
        ({"gradient_predivide_factor": 3.0, "num_groups": 2}, 1e-11),
        ({"num_groups": 3}, 1e-11),
        ({"groups": 1}, 1e-11),
        ({"bucket_nbytes": 1, "groups": 2}, 1e-11),
    ],
    ids=str,
)
def test_options_that_change_how_gradients_travel(options: dict[str, Any], tolerance: float) -> None:
    """The ranks agree bit by bit, and with one process within what the format on the way can hold."""
    alone = make_model()
    together = copy.deepcopy(alone)
    train_alone(alone, sgd(alone), 3)
    train_together(together, hvd.DistributedOptimizer(sgd(together), together.named_parameters(), **options), 3)
    assert_equal_on_ranks(together)
    torch.testing.assert_close([*together.parameters()], [*alone.parameters()], rtol=tolerance, atol=tolerance)


def test_groups_of_parameters_travel_in_one_piece() -> None:
    """A list of parameters is one reduction, whatever the size limit; the others keep their buckets."""

    class Counter(rr.Instrument):
        calls = 0

        def collective_started(self, collective: str, algorithm: str, nbytes: int) -> None:
            self.calls += collective == "allreduce"

    model = make_model()
    groups = [[model[0].weight, model[2].bias]]
    optimizer = hvd.DistributedOptimizer(sgd(model), groups=groups, bucket_nbytes=1)
    mean_loss(model, data(0)[rr.rank()]).backward()
    counter = Counter()
    instruments = hvd.global_process_set.engine.communicator.instruments
    instruments.add(counter)
    optimizer.step()
    instruments.remove(counter)
    assert counter.calls == (4 if rr.size() > 1 else 0)  # who has gradients, the group, two that are alone


class Doubling(hvd.compression.Compressor):
    """A compression of the user's own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor * 2.0, "context"

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        assert ctx == "context"
        return tensor / 2.0


def test_compressions_that_single_tensors_cannot_have_are_refused() -> None:
    """At the call, and nothing is sent."""
    tensor = torch.ones(3)
    for compression in (hvd.Compression.powersgd, hvd.Compression.topk(fraction=0.5), "fp16"):
        with pytest.raises(rr.ConfigError, match="not for single tensors"):
            hvd.allreduce(tensor, compression=compression)
        with pytest.raises(rr.ConfigError, match="not for single tensors"):
            hvd.reducescatter(tensor, compression=compression)
    with pytest.raises(rr.ConfigError, match="does not travel in int8"):
        hvd.reducescatter(tensor, compression=hvd.Compression.int8)
    assert hvd.allreduce(tensor).equal(tensor)


def test_a_compression_of_ones_own() -> None:
    """Any class with the two methods will do."""
    alone = make_model()
    together = copy.deepcopy(alone)
    train_alone(alone, sgd(alone), 2)
    train_together(together, hvd.DistributedOptimizer(sgd(together), compression=Doubling), 2)
    torch.testing.assert_close([*together.parameters()], [*alone.parameters()], rtol=1e-11, atol=1e-11)


def test_adasum() -> None:
    """On equal data the step is that of one rank; on any data all ranks end with the same weights."""
    alone = make_model()
    together = copy.deepcopy(alone)
    optimizer = hvd.DistributedOptimizer(sgd(together), op=hvd.Adasum)
    single = sgd(alone)
    for _ in range(2):
        for model, each in ((alone, single), (together, optimizer)):
            each.zero_grad()
            mean_loss(model, data(0)[0]).backward()
            each.step()
    torch.testing.assert_close([*together.parameters()], [*alone.parameters()], rtol=1e-9, atol=1e-9)
    train_together(together, optimizer, 2)
    assert_equal_on_ranks(together)
    with pytest.raises(rr.ConfigError, match="no synchronize"), optimizer.skip_synchronize():
        pass


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_needs_no_dance(unscale: bool) -> None:
    """An overflow on one rank makes all ranks skip the step and lower the scale; other steps are as in one process."""
    alone = make_model()
    together = copy.deepcopy(alone)
    optimizer = hvd.DistributedOptimizer(sgd(together))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in (0, 1, 2):
        together.zero_grad()
        loss = mean_loss(together, data(step)[rr.rank()])
        scaler.scale(loss).backward()
        if step == 1 and rr.rank() == rr.size() - 1:
            together[0].weight.grad[0, 0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (8.0 if step == 0 else 4.0)
    single = sgd(alone)
    for step in (0, 2):
        single.zero_grad()
        sum(mean_loss(alone, each) / rr.size() for each in data(step)).backward()
        single.step()
    assert_equal_on_ranks(together)
    torch.testing.assert_close([*together.parameters()], [*alone.parameters()], rtol=1e-11, atol=1e-11)


class OwnScaler(torch.amp.GradScaler):
    """Looks at the gradients in a method of its own."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        overflow = torch.zeros(1)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], overflow, inv_scale)
        return {torch.device("cpu"): overflow}


class LookingScaler(torch.amp.GradScaler):
    """Looks at the gradients, and then lets the class that it is made of look again."""

    def _unscale_grads_(self, optimizer: Any, *arguments: Any) -> Any:
        assert all(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
        return super()._unscale_grads_(optimizer, *arguments)


@pytest.mark.spread
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=str)
@pytest.mark.parametrize("scaler_class", [OwnScaler, LookingScaler])
def test_scalers_made_of_grad_scaler_need_no_dance(scaler_class: Any, op: Any) -> None:
    """They see the same overflows on all ranks, and what was reduced is not reduced again."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=op)
    scaler = scaler_class("cpu", init_scale=8.0, growth_interval=100)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (rr.rank() + 1.0)).backward()
        if step == 1 and rr.rank() == rr.size() - 1:
            weight.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (8.0 if step == 0 else 4.0)
    gradient = rr.size() * (rr.size() + 1) / 2 / (rr.size() if op == hvd.Average else 1)
    assert weight.tolist() == [-2 * gradient] * 2


def test_what_is_called_like_a_scaler_but_is_none_reduces_nothing() -> None:
    """A function that has the name of the method by chance may look at the groups on one rank alone."""

    def _unscale_grads_(optimizer: Any) -> Any:
        return optimizer.param_groups

    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.full((2,), float(rr.rank()))
    if rr.rank() == 0:
        _unscale_grads_(optimizer)
    optimizer.step()
    assert weight.tolist() == [-(rr.size() - 1) / 2] * 2


@pytest.mark.sizes(2, 3, 4)
def test_a_process_set_trains_by_itself() -> None:
    """Optimizers of two sets, each with its own model, do not wait for each other."""
    sets = [hvd.add_process_set([0]), hvd.add_process_set(range(1, rr.size()))]
    mine = sets[rr.rank() > 0]
    model = make_model()
    with torch.no_grad():
        model[0].weight.add_(float(rr.rank()))
    hvd.broadcast_parameters(model.state_dict(), root_rank=mine.ranks[0], process_set=mine)
    optimizer = hvd.DistributedOptimizer(sgd(model), process_set=mine)
    hvd.broadcast_optimizer_state(optimizer, root_rank=mine.ranks[0], process_set=mine)
    for step in range(2 + (rr.rank() > 0)):
        optimizer.zero_grad()
        mean_loss(model, data(step)[rr.rank()]).backward()
        optimizer.step()
    everyone = hvd.allgather(model[0].weight.detach()[None], process_set=mine)
    assert all(each.equal(everyone[0]) for each in everyone)
    for each in sets:
        hvd.remove_process_set(each)
