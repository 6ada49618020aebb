"""Ranks with different numbers of samples: training is that of one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("ringreduce.torch")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torch_models import assert_equal_on_ranks, mlp  # noqa: E402

import ringreduce as rr  # noqa: E402
from ringreduce.common.instruments import Pace  # noqa: E402

FEATURES, HIDDEN = 13, 37
STEPS = 9
make_model = partial(mlp, FEATURES, HIDDEN, 1, seed=3, dtype=torch.float64)


def samples_of(step: int) -> list[int]:
    """Return how many samples each rank has: mostly the same, now and then others, and once equal ones."""
    if step == 7:
        return [4] * hvd.size()
    return [1 + 2 * rank + (rank == 0) * (step % 4 == 3) for rank in range(hvd.size())]


def batch_of(step: int, dtype: Any = torch.float64) -> tuple[Any, Any]:
    """Return the whole batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(samples_of(step)), FEATURES, generator=generator, dtype=torch.float64)
    return x.to(dtype), x.sum(dim=1, keepdim=True).sin().to(dtype)


def mine_of(step: int, dtype: Any = torch.float64) -> tuple[Any, Any]:
    """Return this rank's part of it."""
    counts, rank = samples_of(step), hvd.rank()
    part = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    x, y = batch_of(step, dtype)
    return x[part], y[part]


def descend(model: Any, batch: tuple[Any, Any]) -> Any:
    x, y = batch
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


def expected() -> list[Any]:
    """Return the weights that one process has in the end, with whole batches."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        descend(model, batch_of(step))
        optimizer.step()
    return list(model.parameters())


OPTIONS = [
    {},
    {"overlap": True},
    {"bucket_nbytes": 64},
    {"gradient_predivide_factor": 3.0},
    {"shard": "node"},
    {"shard": "all"},
    {"groups": 2, "backward_passes_per_step": 2},
]


@pytest.mark.spread
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_is_that_of_one_process(any_nodes: None, options: dict[str, Any], set_to_none: bool) -> None:
    """With the mean over the whole batch, however it is divided; weights have equal bits on all ranks."""
    if options.get("shard") == "all" and len(set(map(len, rr.world().topology.nodes))) > 1:
        pytest.skip("it needs as many ranks on each node")
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), **options
    )
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        x, y = mine_of(step)
        passes = options.get("backward_passes_per_step", 1)
        for _ in range(passes):
            descend(model, (x, y))
        if passes > 1:
            for each in model.parameters():
                each.grad /= passes
        optimizer.step(samples=len(x))
    assert_equal_on_ranks(model)
    torch.testing.assert_close([*model.parameters()], expected(), rtol=1e-9, atol=1e-9)


@pytest.mark.spread
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_in_fewer_bits(any_nodes: None, dtype: Any) -> None:
    """One step is right up to rounding."""
    model, whole = make_model(dtype=dtype), make_model(dtype=dtype)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for _ in range(3):
        model.load_state_dict(whole.state_dict())
        optimizer.zero_grad()
        descend(model, mine_of(0, dtype))
        optimizer.step(samples=samples_of(0)[hvd.rank()])
    descend(whole, batch_of(0, dtype))
    digits = 1e-5 if dtype is torch.float32 else 0.05
    for mine, each in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, each.grad, rtol=digits, atol=digits)
    assert_equal_on_ranks(model)


@pytest.mark.spread
def test_a_closure_gets_the_loss_of_the_whole_batch(any_nodes: None) -> None:
    """However often a line search calls it."""
    model, whole = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe"))
    alone = torch.optim.LBFGS(whole.parameters(), line_search_fn="strong_wolfe")

    def closure(of: Any, model: Any, batch: tuple[Any, Any]) -> Any:
        of.zero_grad()
        return descend(model, batch)

    x, y = mine_of(0)
    for _ in range(2):
        loss = optimizer.step(lambda: closure(optimizer, model, (x, y)), samples=len(x))
        torch.testing.assert_close(loss, alone.step(lambda: closure(alone, whole, batch_of(0))))
    torch.testing.assert_close([*model.parameters()], [*whole.parameters()], rtol=1e-6, atol=1e-6)


def test_a_weighted_loss_is_exact_with_synchronised_batch_normalisation(world: rr.Communicator) -> None:
    """Which adds up gradients of all ranks in the backward pass: equal numbers of samples leave them as they are."""
    torch.manual_seed(1)
    whole = torch.nn.Sequential(torch.nn.Linear(FEATURES, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)).double()
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 5), hvd.SyncBatchNorm(5), torch.nn.Linear(5, 1)).double()
    model.load_state_dict(whole.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    counts = samples_of(3)
    x, y = mine_of(3)
    (torch.nn.functional.mse_loss(model(x), y) * len(x) * hvd.size() / sum(counts)).backward()
    optimizer.step(samples=1)
    descend(whole, batch_of(3))
    for mine, each in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, each.grad, rtol=1e-5, atol=1e-6)


def test_sparse_gradients(any_nodes: None) -> None:
    """Rows are weighted like everything else."""
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))
    counts = samples_of(0)
    for _ in range(4):
        optimizer.zero_grad()
        embedding(torch.tensor([0, 1 + hvd.rank() % 4])).sum().backward()
        optimizer.step(samples=counts[hvd.rank()])
        found = embedding.weight.grad.to_dense()
        rows = torch.zeros(5, 3)
        rows[0] = 1.0
        for rank, count in enumerate(counts):
            rows[1 + rank % 4] += count / sum(counts)
        torch.testing.assert_close(found, rows)


def test_samples_of_clipped_gradients_are_refused(world: rr.Communicator) -> None:
    """On all ranks: they were averaged without weights by then."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    descend(model, mine_of(0))
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(rr.ConfigError, match=r"clip_grad_norm_\(\) has averaged gradients before the step"):
        optimizer.step(samples=3)


# ---- the sampler ----


def measure(own_s: list[float]) -> None:
    """Let all ranks know that steps took so long, as their engines would after some steps."""
    engine = hvd.global_process_set.engine
    engine.tally.paces = [Pace(100, 100 * each, 0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, ()) for each in own_s]


@pytest.mark.spread("ends")
@pytest.mark.parametrize("count", [1, 7, 40, 101])
@pytest.mark.parametrize("ends", ["repeat", "drop", "uneven"])
def test_global_batches_are_the_same_whatever_the_shares(no_world: None, ends: str, count: int) -> None:
    """The next so many samples of the epoch's order, each on one rank; a slow rank has fewer."""
    hvd.init()
    size = hvd.size()
    sampler = hvd.DistributedSampler(range(count), seed=5, ends=ends, shares="speed", batch_size=6)
    even = hvd.DistributedSampler(range(count), seed=5, ends=ends, batch_size=6)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        even.set_epoch(epoch)
        mine, alike = list(sampler), list(even)
        assert len(mine) == len(sampler)
        assert len(alike) == len(even)
        of_all = hvd.allgather_object(mine)
        steps = [sorted(chain(*(batches[k] for batches in of_all if k < len(batches)))) for k in range(len(mine))]
        of_even = hvd.allgather_object(alike)
        assert steps == [
            sorted(chain(*(batches[k] for batches in of_even if k < len(batches)))) for k in range(len(mine))
        ]
        if ends != "uneven":
            assert all(len(each) == 6 * size for each in steps)
            assert len({len(batches) for batches in of_all}) == 1
        measure([3.0] + [1.0] * (size - 1))
    if size > 1 and count >= 6 * size:
        lengths = [len(batches[0]) for batches in of_all]
        assert lengths[0] in (4, 5), "a quarter less"
        assert max(lengths) > 6 or size > 2
    hvd.shutdown()


class Epochs:
    """Epochs by speed of a model, beside those of one process that has all samples; rank 0 becomes slower.

    Args:
        make: makes the optimizer.
        options: of the distributed one.
    """

    def __init__(self, make: Callable[[Any], Any], **options: Any) -> None:
        self.model, self.whole = make_model(), make_model()
        self.optimizer = hvd.DistributedOptimizer(make(self.model.parameters()), self.model, **options)
        self.alone = make(self.whole.parameters())

    def train(self, step: Callable[[Any, Any, Any, bool], object]) -> None:
        """Train, and compare the weights; ``step`` gets optimizer, model, batch, and whether it is distributed."""
        size = hvd.size()
        x = torch.randn(40 * size + 3, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        data = TensorDataset(x, x.prod(dim=1, keepdim=True))
        sampler = hvd.DistributedSampler(data, seed=5, ends="drop", shares="speed", batch_size=5)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=0)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(5 + epoch))
            for number, batch in enumerate(loader):
                step(self.optimizer, self.model, batch, True)
                indices = order[5 * size * number : 5 * size * (number + 1)]
                step(self.alone, self.whole, data[indices], False)
            assert number == 7
            measure([(epoch + 2) * 2.0] + [epoch + 1.0] * (size - 1))
        assert size == 1 or len(set(hvd.allgather_object(len(batch[0])))) > 1
        assert_equal_on_ranks(self.model)
        torch.testing.assert_close([*self.model.parameters()], [*self.whole.parameters()], rtol=1e-7, atol=1e-7)


def clips(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)


def step_by_itself(optimizer: Any, model: Any, batch: Any, distributed: bool) -> None:
    optimizer.zero_grad()
    descend(model, batch)
    optimizer.step()


def step_with_clip(optimizer: Any, model: Any, batch: Any, distributed: bool) -> None:
    optimizer.zero_grad()
    descend(model, batch)
    optimizer.clip_grad_norm_(0.7) if distributed else clips(model)
    optimizer.step()


def step_after_synchronize(optimizer: Any, model: Any, batch: Any, distributed: bool) -> None:
    optimizer.zero_grad()
    descend(model, batch)
    if distributed:
        optimizer.synchronize()
    clips(model)
    with optimizer.skip_synchronize() if distributed else nullcontext():
        optimizer.step()


def step_twice_reduced(optimizer: Any, model: Any, batch: Any, distributed: bool) -> None:
    optimizer.zero_grad()
    descend(model, batch)
    if distributed:
        optimizer.synchronize()
    descend(model, batch)
    optimizer.step()


def step_with_closure(optimizer: Any, model: Any, batch: Any, distributed: bool) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        return descend(model, batch)

    optimizer.step(closure)


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters)


def lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe")


@pytest.mark.spread
@pytest.mark.filterwarnings("ignore:optimizer.step.. called without")
@pytest.mark.parametrize(
    ("make", "options", "step"),
    [
        (adam, {}, step_by_itself),
        (adam, {}, step_with_clip),
        (adam, {}, step_after_synchronize),
        (adam, {}, step_twice_reduced),
        (adam, {"reduce_in": "backward"}, step_by_itself),
        (adam, {"reduce_in": "backward"}, step_with_clip),
        (adam, {"shard": "node"}, step_with_clip),
        (lbfgs, {}, step_with_closure),
    ],
    ids=["step", "clip", "synchronize", "reduced twice", "backward", "backward and clip", "shard and clip", "closure"],
)
def test_an_epoch_by_speed_is_that_of_one_process(
    any_nodes: None, make: Any, options: dict[str, Any], step: Callable[[Any, Any, Any, bool], object]
) -> None:
    """The sampler tells the optimizer how many samples there are, wherever and how often gradients are reduced."""
    Epochs(make, **options).train(step)


@pytest.mark.spread
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("options", [{}, {"reduce_in": "backward"}], ids=str)
def test_a_scaler_leaves_out_the_same_steps(any_nodes: None, options: dict[str, Any], unscales: bool) -> None:
    """As one process: every third overflows, with what was clipped of the others."""
    epochs, steps = Epochs(partial(torch.optim.SGD, lr=0.1), **options), {True: 0, False: 0}
    scalers = {each: torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2) for each in steps}

    def step(optimizer: Any, model: Any, batch: Any, distributed: bool) -> None:
        optimizer.zero_grad()
        steps[distributed] += 1
        overflows = steps[distributed] % 3 == 0 and (not distributed or hvd.rank() == 0)
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1]) * (torch.inf if overflows else 1.0)
        scaler = scalers[distributed]
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(0.7) if distributed else clips(model)
        scaler.step(optimizer)
        scaler.update()

    epochs.train(step)
    assert scalers[True].get_scale() == scalers[False].get_scale()


def test_another_world_divides_anew(no_world: None) -> None:
    """Also where the program goes on without `set_epoch`."""
    hvd.init()
    size = hvd.size()
    x = torch.arange(12 * size)
    sampler = hvd.DistributedSampler(x, shuffle=False, shares="speed", batch_size=4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert sum(map(len, sampler)) > 0
        measure([3.0] + [1.0] * (size - 1))
    hvd.shutdown()
    hvd.init()
    assert [len(each) for each in sampler] == [4, 4, 4]
    del sampler
    hvd.shutdown()


@pytest.mark.sizes(2, 3, 4)
def test_samples_must_be_known(world: rr.Communicator) -> None:
    """By the step or by a sampler: one that divides by speed, with uneven ends, knows only who says it."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    sampler = hvd.DistributedSampler(range(100), shares="speed", batch_size=3, ends="uneven")
    batches = iter(sampler)
    next(batches)
    for _ in range(3):
        descend(model, mine_of(0))
        with pytest.raises(rr.ConfigError, match="samples=len"):
            optimizer.step()
        optimizer.step(samples=samples_of(0)[hvd.rank()])


@pytest.mark.sizes(2, 3, 4)
def test_a_sampler_knows_no_more_than_its_own_batches(no_world: None) -> None:
    """Steps beyond them are of other data; a sampler that has begun none says nothing."""
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    sampler = hvd.DistributedSampler(range(3 * hvd.size()), shares="speed", batch_size=1)
    sampler.set_epoch(0)
    descend(model, mine_of(0))
    optimizer.step()
    for _ in sampler:
        descend(model, mine_of(0))
        optimizer.step()
    with pytest.raises(rr.ConfigError, match="delete it"):
        optimizer.step()
    hvd.shutdown()


@pytest.mark.spread
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"shares": "speed"}, "batch_size"),
        ({"shares": "fast", "batch_size": 3}, '"even" or "speed"'),
        ({"shares": "even", "batch_size": 0}, "batch_size"),
    ],
)
def test_arguments_of_the_sampler(world: rr.Communicator, arguments: dict[str, Any], match: str) -> None:
    """Shares need batches, and a word that is known."""
    with pytest.raises(rr.ConfigError, match=match):
        hvd.DistributedSampler(range(10), **arguments)


def test_shares_of_a_program_with_its_own_loader(no_world: None) -> None:
    """Equal at first, then by speed, and 1 together."""
    assert hvd.share() == 1.0
    hvd.init()
    size = hvd.size()
    assert hvd.share() == 1.0 / size
    measure([1.2] + [1.0] * (size - 1))
    mine = hvd.share()
    speeds = np.array([1 / 1.2] + [1.0] * (size - 1))
    assert mine == pytest.approx(speeds[hvd.rank()] / speeds.sum())
    hvd.shutdown()


def test_time_in_data_loading_is_counted(world: rr.Communicator) -> None:
    """Every batch comes through, as it is."""
    before = hvd.global_process_set.engine.pacemaker.loading_s
    batches = [object() for _ in range(5)]
    assert list(hvd.loading(batches)) == batches
    assert hvd.global_process_set.engine.pacemaker.loading_s > before
