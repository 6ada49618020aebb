"""What training scripts do around the optimizer: share data, average what they measure, clip, keep checkpoints."""

from __future__ import annotations

import copy
import math
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("ringreduce.torch")

from torch.utils.data import DataLoader  # noqa: E402

import ringreduce as rr  # noqa: E402
from ringreduce.common.errors import ConfigError, MismatchError  # noqa: E402
from ringreduce.observe.job.verdicts import judge  # noqa: E402

COUNTS = [0, 1, 3, 4, 7, 12, 13]


# ---- data ----


@pytest.mark.spread("ends")
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ends", ["repeat", "drop", "uneven"])
def test_samples_are_divided(world: rr.Communicator, ends: str, shuffle: bool) -> None:
    """Every sample goes to one rank, but for the last few, which are repeated or left out where all get as many."""
    for count in COUNTS:
        sampler = hvd.DistributedSampler(range(count), shuffle=shuffle, seed=3, ends=ends)
        orders = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            mine = list(sampler)
            assert len(mine) == len(sampler)
            shares = hvd.allgather_object(mine)
            given = list(chain.from_iterable(shares))
            orders.append(given)
            rest = count % world.size
            lengths = {len(each) for each in shares}
            if ends == "uneven":
                assert sorted(given) == list(range(count))
                assert max(lengths) - min(lengths) <= 1
            else:
                assert len(lengths) == 1
            if ends == "repeat":
                assert set(given) == set(range(count))
                assert len(given) == (count if not rest else count - rest + world.size)
            elif ends == "drop":
                assert len(set(given)) == len(given) == count - rest
        assert (orders[0] == orders[1]) == (not shuffle or count < 2) or count < 7


@pytest.mark.spread("ends")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ends", ["repeat", "drop", "uneven"])
def test_shards_of_what_can_only_be_iterated(world: rr.Communicator, ends: str, workers: int) -> None:
    """They follow the same rules, with worker processes or without, and an epoch can be read again."""
    for count in COUNTS if not workers else [13]:
        loader = DataLoader(hvd.Shard(range(count), ends), batch_size=None, num_workers=workers)
        for _ in range(2):
            shares = hvd.allgather_object(sorted(int(each) for each in loader))
            given = list(chain.from_iterable(shares))
            rest = count % world.size
            if ends == "uneven":
                assert sorted(given) == list(range(count))
            elif ends == "drop":
                assert sorted(given) == list(range(count - rest))
            else:
                assert set(given) == set(range(count))
                assert {len(each) for each in shares} == {-(-count // world.size)}


@pytest.mark.parametrize("sampler", [hvd.DistributedSampler, hvd.elastic.ElasticSampler])
def test_orders_do_not_depend_on_the_default_device(world: rr.Communicator, sampler: Any) -> None:
    """A program may have all new tensors on a GPU, for which a device without data is taken here."""
    wanted = list(sampler(range(17), shuffle=True))
    with torch.device("meta"):
        assert list(sampler(range(17), shuffle=True)) == wanted


def test_mistakes_with_data() -> None:
    """What cannot be divided is refused with the remedy."""
    with pytest.raises(ConfigError, match="use Shard"):
        hvd.DistributedSampler(iter([1]))
    with pytest.raises(ConfigError, match='"repeat", "drop" or "uneven"'):
        hvd.DistributedSampler([1], ends="pad")
    with pytest.raises(ConfigError, match="seed"):
        hvd.DistributedSampler([1], seed=-1)


class Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Each sample takes a while; in a loader within it, if ``inner``."""

    def __init__(self, *, inner: bool = False) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if self._inner:
            return int(list(DataLoader(Slow()))[index])
        time.sleep(0.02)  # what is measured
        return index


def loaded_s(batches: Iterable[Any], *, elsewhere: bool = False) -> float:
    """Return how long this rank is said to have waited for data, meanwhile; ``elsewhere``: on another thread."""
    pacemaker = hvd.global_process_set.engine.pacemaker
    before = pacemaker.loading_s
    thread = threading.Thread(target=lambda: list(batches))
    if elsewhere:
        thread.start()
        thread.join()
    else:
        assert [int(each) for each in batches] == [0, 1, 2]
    return float(pacemaker.loading_s - before)


def test_waiting_for_a_loader_of_torch_is_counted_by_itself(world: rr.Communicator) -> None:
    """Once, also through `loading`, and where one loader has another inside; on the main thread alone."""
    loader = DataLoader(Slow())
    nested = DataLoader(Slow(inner=True))
    for batches, least_s in ((loader, 0.06), (hvd.loading(loader), 0.06), (nested, 3 * 0.06)):
        began = time.perf_counter()
        found = loaded_s(batches)
        assert least_s <= found <= time.perf_counter() - began
    assert loaded_s(loader, elsewhere=True) == 0.0
    workers = DataLoader(Slow(), num_workers=1, multiprocessing_context="fork")
    assert loaded_s(workers) > 0.0


def test_the_verdict_counts_a_slow_loader_as_input(world: rr.Communicator) -> None:
    """The program says nothing of its loader."""
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    rr.shutdown()
    rr.init()  # the report is about these steps alone
    for _ in range(7):
        for batch in DataLoader(Slow()):
            optimizer.zero_grad()
            model(batch[:, None].float()).sum().backward()
            optimizer.step()
    report = rr.report()
    assert report is not None
    assert 0.02 <= report.figures.input_s <= report.figures.step_s
    share = report.figures.input_s / report.figures.step_s  # less where others have the cores
    # A job of an hour is judged as these steps are.
    said = [each.says for each in judge(replace(report.figures, steps_s=3600.0)) if each.name == "input"]
    assert said == [f"ranks wait for data in {share:.0%} of the time"] * (share >= 0.2)


def test_a_loader_of_torch_works_without_a_world(no_world: None) -> None:
    """As without ringreduce; also within a function that is compiled."""
    assert list(map(int, DataLoader(Slow()))) == [0, 1, 2]
    total = torch.compile(lambda loader: sum(each + 1 for each in loader), backend="eager")
    assert int(total(DataLoader(Slow()))) == 6


# ---- averages ----


def test_averages_count_samples(world: rr.Communicator) -> None:
    """They are those over all samples of all ranks, however many each has; without any they are NaN."""
    samples = [np.arange(rank * 3 + 1.0) for rank in range(world.size)]
    mine = samples[world.rank]
    found = hvd.weighted_average({"mean": mine.mean(), "square": torch.tensor((mine**2).mean())}, weight=len(mine))
    every = np.concatenate(samples)
    assert found == pytest.approx({"mean": every.mean(), "square": (every**2).mean()}, rel=1e-12)
    both = {"a": 1.0, "b": 2.0} if world.rank else {"b": 2.0, "a": 1.0}
    assert hvd.weighted_average(both, 1.0) == {"a": 1.0, "b": 2.0}
    last = world.rank == world.size - 1
    assert hvd.weighted_average(2.5 if last else math.nan, weight=float(last)) == 2.5
    assert math.isnan(rr.weighted_average(1.0, weight=0))
    assert rr.weighted_average({}, 1.0) == {}
    arrays = {"each": np.array([[world.rank, 1.0, math.nan if last else 5.0]]), "loss": float(world.rank)}
    found = hvd.weighted_average(arrays, weight=0.0 if last and world.size > 1 else 2.0)
    counted = range(max(world.size - 1, 1))
    expected = [[np.mean(counted), 1.0, 5.0 if world.size > 1 else math.nan]]
    np.testing.assert_allclose(found["each"], expected, rtol=1e-12)
    assert found["loss"] == pytest.approx(np.mean(counted))


def test_mistakes_in_averages_are_errors_on_all_ranks(world: rr.Communicator) -> None:
    """One rank's mistake, or other names, and the ranks go on in step."""
    first = world.rank == 0
    for wrong in ({"a": "text"}, {"a": None}, {"a": np.array(["text", "more"])}):
        with pytest.raises(ConfigError if first else MismatchError):
            hvd.weighted_average(wrong if first else {"a": 1.0}, 1.0)
    with pytest.raises(ConfigError if first else MismatchError, match="weight"):
        hvd.weighted_average(1.0, -1.0 if first else 1.0)
    if world.size > 1:
        with pytest.raises(MismatchError):
            hvd.weighted_average({"a" if first else "b": 1.0}, 1.0)
        with pytest.raises(MismatchError, match=r"\(3,\)"):
            hvd.weighted_average(np.ones(3 if first else 2), 1.0)
    assert hvd.weighted_average(3.0, 1.0) == 3.0


# ---- clipping ----


def model_and_data(rank: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    return model, torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)) * 9


@pytest.mark.spread
@pytest.mark.parametrize("reduce_in", ["step", "backward"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_clipping_is_that_of_one_process(world: rr.Communicator, reduce_in: str, scaled: bool) -> None:
    """The averages are clipped, not each rank's gradients: as one process does with all ranks' data."""
    model, rows = model_and_data(world.rank)
    alone = copy.deepcopy(model).double()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), reduce_in=reduce_in)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    every = torch.cat([model_and_data(rank)[1] for rank in range(world.size)]).double()
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(rows).square().mean()).backward()
        if scaled:
            scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        reference.zero_grad()
        alone(every).square().mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        reference.step()
        torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0, msg=f"step {step}")
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


@pytest.mark.spread
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("reduce_in", ["step", "backward"])
def test_what_comes_after_clipping_is_reduced(world: rr.Communicator, reduce_in: str, in_place: bool) -> None:
    """Gradients that were clipped and given up, in whatever way, do not let later ones stay each rank's own."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), reduce_in=reduce_in)
    mean = (world.size + 1) / 2
    for clips_again in (True, False):
        (parameter.sum() * (world.rank + 1)).backward()
        optimizer.clip_grad_norm_(1e9)
        if in_place:
            parameter.grad.zero_()
        else:
            parameter.grad = None
        with torch.no_grad():
            parameter.zero_()
        (parameter.sum() * (world.rank + 1)).backward()
        if clips_again:
            assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(mean * math.sqrt(3))
        optimizer.step()
        assert parameter.tolist() == [-mean] * 3
        optimizer.zero_grad()


def test_clipping_with_adasum_is_refused(world: rr.Communicator) -> None:
    """There is nothing common to clip."""
    model, _ = model_and_data(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    with pytest.raises(ConfigError, match="Adasum"):
        optimizer.clip_grad_norm_(1.0)


# ---- checkpoints ----


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that all ranks share, in a folder that is not there yet."""
    return Path(hvd.broadcast_object(str(tmp_path / "new" / "last.pt")))


def test_training_goes_on_from_a_checkpoint(world: rr.Communicator, path: Path) -> None:
    """Weights, momentum, schedule and each rank's random numbers are those of a training that was not interrupted."""

    def begin() -> tuple[Any, Any, Any]:
        torch.manual_seed(world.rank)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Dropout(0.5), torch.nn.Linear(7, 1))
        hvd.broadcast_parameters(model)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1 / world.size, total_iters=9)

    def train(model: Any, optimizer: Any, schedule: Any) -> list[float]:
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(torch.randn(4, 5)) - np.random.rand() - random.random()).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses

    np.random.seed(world.rank)
    random.seed(world.rank)
    model, optimizer, schedule = begin()
    train(model, optimizer, schedule)
    hvd.save_checkpoint(path, model=model, optimizer=optimizer, schedule=schedule, epoch=3, best={"loss": 0.5})
    wanted = train(model, optimizer, schedule)
    again = begin()
    random.random()
    values = hvd.load_checkpoint(path, model=again[0], optimizer=again[1], schedule=again[2])
    assert values == {"epoch": 3, "best": {"loss": 0.5}}
    assert train(*again) == wanted
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again[0].parameters(), strict=True))


def test_a_checkpoint_has_what_every_rank_has_processed(world: rr.Communicator, path: Path) -> None:
    """No sample of an epoch comes again, and none is left out, with as many ranks or one; nor in the saving run."""
    count, processed = 23, set[int]()
    sampler = hvd.elastic.ElasticSampler(range(count), seed=5)
    sampler.set_epoch(2)
    for _ in range(2):  # also what was processed since the last checkpoint
        mine = list(sampler)[: 1 + world.rank]
        sampler.record_indices(mine)
        processed |= set(chain.from_iterable(hvd.allgather_object(mine)))
        hvd.save_checkpoint(path, sampler=sampler)
        assert sampler.processed_indices == processed
        assert sampler.processed_num == len(processed)
        sampler.reset()
    same = hvd.elastic.ElasticSampler(range(count), seed=5)
    hvd.load_checkpoint(path, sampler=same)
    assert list(same) == list(sampler)
    assert set(chain.from_iterable(hvd.allgather_object(list(same)))) == set(range(count)) - processed
    rr.shutdown()
    alone = hvd.elastic.ElasticSampler(range(count), seed=5)
    hvd.load_checkpoint(path, sampler=alone)  # one rank, as there is no world
    rr.init()
    assert sorted(alone) == sorted(set(range(count)) - processed)
    assert alone.epoch == 2


def test_ranks_as_far_as_each_other_go_on_with_the_same_samples(world: rr.Communicator, path: Path) -> None:
    """As if nothing had happened: each with its own."""
    sampler = hvd.elastic.ElasticSampler(range(8 * world.size + 3), seed=1)
    given = list(sampler)
    sampler.record_batch(0, 3)
    hvd.save_checkpoint(path, sampler=sampler)
    again = hvd.elastic.ElasticSampler(range(8 * world.size + 3), seed=1)
    hvd.load_checkpoint(path, sampler=again)
    assert list(again)[:5] == given[3:8]


@pytest.mark.sizes(2, 3, 4)
def test_samplers_of_a_checkpoint_must_be_on_all_ranks(world: rr.Communicator, path: Path) -> None:
    """The error names what is missing, on all ranks, and the last checkpoint stays."""
    hvd.save_checkpoint(path, epoch=1)
    sampler = hvd.elastic.ElasticSampler(range(9))
    with pytest.raises(ConfigError, match="rank 1 passes no sampler rest"):
        hvd.save_checkpoint(path, **({} if world.rank == 1 else {"rest": sampler}))
    other = hvd.elastic.ElasticSampler(range(9 + 30 * (world.rank == 1)))
    with pytest.raises(ConfigError, match="rest: the ranks have datasets of different lengths"):
        hvd.save_checkpoint(path, rest=other)
    assert hvd.load_checkpoint(path) == {"epoch": 1}


def test_a_checkpoint_of_state_that_nodes_share(nodes_in_order: None, path: Path) -> None:
    """With ``shard="all"`` all of it is in the file, and training goes on with the same bits.

    From three nodes on, this takes sums in the order of ranks: a first step may add up in another order than others.
    Overlapping buckets are reduced by another algorithm, which rounds in another order; a new optimizer has none.
    """

    def begin() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        return model, hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.1), model, shard="all", overlap=False
        )

    def train(model: Any, optimizer: Any) -> list[float]:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 5), 1.0 + step + rr.rank())).square().mean().backward()
            optimizer.step()
        return [value for each in model.parameters() for value in each.detach().flatten().tolist()]

    model, optimizer = begin()
    train(model, optimizer)
    hvd.save_checkpoint(path, model=model, optimizer=optimizer)
    wanted = train(model, optimizer)
    again = begin()
    hvd.load_checkpoint(path, model=again[0], optimizer=again[1])
    assert train(*again) == wanted


def test_a_failed_save_leaves_the_last_checkpoint(world: rr.Communicator, path: Path) -> None:
    """All ranks get the error, and what was there is there."""
    hvd.save_checkpoint(path, epoch=1)
    with pytest.raises(ConfigError, match="cannot be written"):
        hvd.save_checkpoint(path, epoch=2, strange=lambda: None)
    assert hvd.load_checkpoint(path) == {"epoch": 1}
    if world.rank == 0:
        assert [each.name for each in path.parent.iterdir()] == ["last.pt"]
    rr.barrier()


def test_what_is_no_checkpoint_is_refused_on_all_ranks(world: rr.Communicator, path: Path) -> None:
    """A missing file, another one, and one without a part, with the reason."""
    with pytest.raises(ConfigError, match="No such file"):
        hvd.load_checkpoint(path)
    hvd.save_checkpoint(path, epoch=1)
    with pytest.raises(ConfigError, match="it holds epoch, and not model"):
        hvd.load_checkpoint(path, model=torch.nn.Linear(2, 2))
    if world.size > 1:
        with pytest.raises(ConfigError, match="different parts"):
            hvd.load_checkpoint(path, **({"model": torch.nn.Linear(2, 2)} if world.rank else {}))
    hvd.save_checkpoint(path, model=torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="cannot be read"):  # rank 0 can, the last one cannot
        hvd.load_checkpoint(path, model=torch.nn.Linear(2, 2 + (world.rank == world.size - 1)))
    rr.barrier()
    if world.rank == 0:
        torch.save({"state": 1}, path)
    rr.barrier()
    with pytest.raises(ConfigError, match="save_checkpoint has not written it"):
        hvd.load_checkpoint(path)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("make", [hvd.DistributedSampler, hvd.elastic.ElasticSampler])
@pytest.mark.parametrize("seeded", [False, True], ids=["each rank its own", "the same"])
def test_a_split_that_each_rank_has_drawn_by_itself_is_told_once(make: Any, seeded: bool, warned: Any) -> None:
    """Rank 0 says so before a step; what one rank alone divides is compared with nothing."""
    rr.shutdown()
    rr.init()
    generator = torch.Generator().manual_seed(0 if seeded else rr.rank())
    train, valid = torch.utils.data.random_split(torch.arange(40.0), [30, 10], generator=generator)
    model = torch.nn.Linear(1, 1)
    hvd.broadcast_parameters(model)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(2):
        for (each,) in zip(DataLoader(train, batch_size=5, sampler=make(train)), strict=False):
            optimizer.zero_grad()
            model(each.view(-1, 1)).square().mean().backward()
            optimizer.step()
        if rr.rank() == 0:
            list(make(valid))
    told = warned("divide different samples")
    assert len(told) == (rr.rank() == 0 and not seeded)
    assert all("manual_seed(0)" in each for each in told)
