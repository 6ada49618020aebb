"""Elastic training of models: what `TorchState` keeps on all ranks, and how `ElasticSampler` divides an epoch."""

from __future__ import annotations

import copy
import pathlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.elastic.handlers import StateHandler

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("ringreduce.torch")

ROWS = 23


class Indices:
    """A dataset of so many rows."""

    def __init__(self, count: int = ROWS) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


def trained(seed: int, steps: int = 2) -> tuple[Any, Any]:
    """Return a model and its optimizer with state, different for each seed."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    for _ in range(steps):
        one_step(model, optimizer)
    return model, optimizer


def content(model: Any, optimizer: Any) -> list[Any]:
    """Return all numbers of a model and its optimizer."""
    state = optimizer.state_dict()
    moments = [entry[name] for entry in state["state"].values() for name in ("step", "exp_avg", "exp_avg_sq")]
    values = [*model.state_dict().values(), *moments, torch.tensor(state["param_groups"][0]["lr"])]
    return [value.clone() for value in values]


def same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


KINDS: dict[str, Callable[..., Any]] = {
    "adam": torch.optim.Adam,
    "fused": partial(torch.optim.AdamW, fused=True),
    "momentum": partial(torch.optim.SGD, momentum=0.9),
}


def one_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.spread
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_commit_that_copies_no_weights_counts_until_the_next_step(
    world: rr.Communicator, kind: Callable[..., Any], wrapped: bool
) -> None:
    """Buffers, settings and values go back to it after a forward pass; after a step, all to the last whole copy."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = kind(model.parameters(), lr=0.1)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model)
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.keep_in_memory(every=3)
    at = []
    for step in range(1, 6):
        one_step(model, optimizer)
        state.step = step
        state.commit()
        at.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))

    def equals(step: int) -> bool:
        weights, moments = at[step - 1]
        found = optimizer.state_dict()
        return (
            all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
            and found["param_groups"] == moments["param_groups"]
            and all(
                torch.equal(torch.as_tensor(each), torch.as_tensor(moments["state"][number][name]))
                for number, kept in found["state"].items()
                for name, each in kept.items()
            )
        )

    model(torch.randn(4, 3)).sum().backward()
    optimizer.param_groups[0]["lr"] = 7.0
    state.step = 100
    for _ in range(2):
        state.restore()
        assert (state.commits, state.step) == (5, 5)
        assert equals(5)
    one_step(model, optimizer)
    state.restore()
    assert (state.commits, state.step) == (3, 3)
    assert equals(3)
    state.commit()
    with torch.no_grad():
        model[0].weight += 1
    state.restore()
    assert (state.commits, state.step) == (3, 3)
    assert equals(3)


@pytest.mark.parametrize("ahead", [0, 1])
def test_ranks_go_on_with_their_own_random_numbers(world: rr.Communicator, ahead: int) -> None:
    """Also ranks that have stepped, and take another rank's weights: those of the commit from which all go on."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(world.rank)
    state = hvd.elastic.TorchState(model, optimizer, generators=hvd.elastic.Generators())
    state.keep_in_memory(every=50)
    for _ in range(3):
        one_step(model, optimizer)
        state.commit()
    if world.rank == 0:
        for _ in range(ahead):  # a commit that only this rank has made: the others hear of a death within it
            torch.rand(1)
            state._commit_here()
    else:
        one_step(model, optimizer)
        torch.rand(5)
    at = torch.get_rng_state()
    if world.rank and not ahead:
        at = state._small[0]["generators"]["torch"]
    state.restore()
    state.sync()
    assert state.commits == 3 + ahead
    assert torch.equal(torch.get_rng_state(), at)
    assert not state._own


DAMAGES: dict[str, Callable[[Any, Any], Any]] = {
    "in place": lambda model, optimizer: torch.nn.init.zeros_(model[0].weight),
    "half and back": lambda model, optimizer: model.half().float(),
    "from a vector": lambda model, optimizer: torch.nn.utils.vector_to_parameters(
        torch.zeros(sum(each.numel() for each in model.parameters())), model.parameters()
    ),
    "moments": lambda model, optimizer: next(iter(optimizer.state.values()))["exp_avg"].zero_(),
    "moments loaded": lambda model, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "another group": lambda model, optimizer: optimizer.add_param_group(
        {"params": [torch.nn.Parameter(torch.ones(1))]}
    ),
}


@pytest.mark.spread
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_changed_otherwise_than_by_a_step_is_noticed(
    world: rr.Communicator, damage: Callable[[Any, Any], Any]
) -> None:
    """A commit that has copied no weights does not count once they, or what the optimizer keeps, have changed."""
    model, optimizer = trained(seed=1)
    state = hvd.elastic.TorchState(model, optimizer)
    state.keep_in_memory(every=50)
    state.commit()  # the first copies everything
    state.commit()
    assert all(each.is_unchanged() for each in state._handlers.values())
    damage(model, optimizer)
    assert not all(each.is_unchanged() for each in state._handlers.values())


def test_another_model_is_copied_whole(world: rr.Communicator) -> None:
    """A commit that was taken of another model does not count, and the next one copies the new one."""
    model, optimizer = trained(seed=1)
    state = hvd.elastic.TorchState(model, optimizer)
    state.keep_in_memory(every=100)
    state.commit()
    state.model = other = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(other.weight)
    state.commit()
    torch.nn.init.zeros_(other.weight)
    state.restore()
    assert state.commits == 2
    assert other.weight.tolist() == [[1, 1], [1, 1]]


def test_weights_are_copied_each_time_where_nobody_tells_of_steps(world: rr.Communicator) -> None:
    """Without an optimizer, and with a handler that only knows how to copy everything, on all ranks."""
    model, optimizer = trained(seed=1)
    with pytest.raises(rr.ConfigError, match="no optimizer in the state"):
        hvd.elastic.TorchState(model).keep_in_memory(2)
    with pytest.raises(rr.ConfigError, match="every"):
        hvd.elastic.TorchState(model, optimizer).keep_in_memory(0)

    class Whole(StateHandler):
        def save(self) -> None:
            pass

    state = hvd.elastic.TorchState(model, optimizer)
    state._handlers["more"] = Whole(None)
    with pytest.raises(rr.ConfigError, match="more have a save"):
        state.keep_in_memory(2)
    state.keep_in_memory(1)
    del state._handlers["more"]
    state.keep_in_memory(2)
    silent = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = state._handlers["optimizer"]
    handler.notes_steps = False
    with pytest.raises(rr.ConfigError, match="optimizer does not tell when weights change"):
        state.critic = silent


def test_ranks_are_equal_after_sync(world: rr.Communicator) -> None:
    """Model, optimizer and other values become those of rank 0, bit for bit, and are what is gone back to."""
    model, optimizer = trained(seed=world.rank)
    state = hvd.elastic.TorchState(model, optimizer, epoch=world.rank + 7, names=[str(world.rank)])
    state.sync()
    assert same(content(model, optimizer), content(*trained(seed=0)))
    assert (state.epoch, state.names) == (7, ["0"])
    assert state.model is model
    assert state.optimizer is optimizer
    with torch.no_grad():
        model[0].weight.zero_()
    state.epoch = 8
    state.restore()
    assert same(content(model, optimizer), content(*trained(seed=0)))
    assert state.epoch == 7


def test_several_models_and_a_distributed_optimizer_are_kept(world: rr.Communicator) -> None:
    """Any keyword may be a model or an optimizer, ours too; another model given later is kept in place of the first."""
    first, _ = trained(seed=2)
    second, plain = trained(seed=3 + world.rank)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=second.named_parameters())
    state = hvd.elastic.TorchState(generator=first, critic=second, tuner=optimizer)
    state.sync()
    assert same(content(second, optimizer), content(*trained(seed=3)))
    assert state.model is None
    state.generator = replaced = trained(seed=9)[0]
    state.commit()
    before = content(replaced, optimizer)
    with torch.no_grad():
        replaced[0].bias.add_(1.0)
    state.restore()
    assert same(content(replaced, optimizer), before)
    state.generator = "gone"
    state.commit()
    state.generator = "changed"
    state.restore()
    assert state.generator == "gone"


@pytest.mark.spread
@pytest.mark.parametrize("count", [0, 1, 4, ROWS])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_is_divided_among_the_ranks(world: rr.Communicator, count: int, shuffle: bool) -> None:
    """Every index goes to some rank, all ranks get as many, and no more are given twice than that takes."""
    sampler = hvd.elastic.ElasticSampler(Indices(count), shuffle=shuffle, seed=5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        everyone = hvd.allgather_object(list(sampler))
        share = -(-count // world.size)
        assert [len(each) for each in everyone] == [share] * world.size
        assert {index for each in everyone for index in each} == set(range(count))
        assert len(sampler) == sampler.num_samples == share
        assert sampler.total_size == share * world.size
        if not shuffle:
            assert list(sampler) == [place % count for place in range(world.rank, share * world.size, world.size)]


def test_epochs_have_orders_of_their_own(world: rr.Communicator) -> None:
    """The order depends on the sum of seed and epoch alone."""
    orders = []
    for seed in (0, 1):
        sampler = hvd.elastic.ElasticSampler(Indices(), seed=seed)
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)
            orders.append(list(sampler.remaining_indices))
    assert orders[0] == orders[2]
    assert orders[3] == orders[5]
    assert len({tuple(order) for order in orders}) == 3
    assert hvd.allgather_object(orders) == [orders] * world.size


def test_processed_indices_are_not_given_out_again(world: rr.Communicator) -> None:
    """After a sync, what any rank has processed is left out, and the rest is divided among all."""
    sampler = hvd.elastic.ElasticSampler(Indices(), seed=3)
    state = hvd.elastic.TorchState(sampler=sampler)
    mine = list(sampler)
    for batch in range(world.rank + 1):
        sampler.record_batch(batch, 2)
    assert sampler.processed_indices == set(mine[: 2 * (world.rank + 1)])
    done = set().union(*hvd.allgather_object(sampler.processed_indices))
    state.sync()
    assert sampler.processed_indices == done
    everyone = hvd.allgather_object(list(sampler))
    assert {index for each in everyone for index in each} == set(range(ROWS)) - done
    assert len({len(each) for each in everyone}) == 1
    sampler.record_batch(0, 5)
    state.restore()
    assert sampler.processed_indices == done
    sampler.set_epoch(1)
    assert sampler.processed_indices == set()
    assert sorted(sampler.remaining_indices) == list(range(ROWS))


def test_a_data_loader_takes_the_sampler(world: rr.Communicator) -> None:
    """The batches of a loader are the sampler's indices in their order."""
    sampler = hvd.elastic.ElasticSampler(Indices(), seed=1)
    data = torch.utils.data.TensorDataset(torch.arange(ROWS))
    loader = torch.utils.data.DataLoader(data, sampler=sampler, batch_size=4)
    assert torch.cat([rows for (rows,) in loader]).tolist() == list(sampler)


def test_a_distributed_optimizer_works_on_in_the_next_world(world: rr.Communicator) -> None:
    """It averages over the ranks after a change as before, gradients from before included, and errors are typed."""
    weight = torch.nn.Parameter(torch.zeros(ROWS))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    state = hvd.elastic.TorchState(optimizer=optimizer, step=0)
    mean = (world.size - 1) / 2
    calls = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        calls.append(state.step)
        while state.step < 4:
            (weight * hvd.rank()).sum().backward()
            if len(calls) == 1 and state.step == 2:
                state.on_hosts_updated(0.0, 1)
                state.check_host_updates()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.step += 1

    train(state)
    assert calls == [0, 2]
    # Step 2 was begun twice, so its gradient counts twice.
    assert torch.equal(weight.detach(), torch.full((ROWS,), -5 * mean))
    assert 0 <= optimizer.communication_s < 60


def test_an_optimizer_outside_of_the_state_works_on_too(world: rr.Communicator) -> None:
    """A step in a new world makes itself known there first; Adasum's as well."""
    weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    plain = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    optimizers = [hvd.DistributedOptimizer(plain[0]), hvd.DistributedOptimizer(plain[1], op=hvd.Adasum)]
    for _ in range(2):
        hvd.shutdown()
        hvd.init()
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.full((3,), 2.0)
            optimizer.step()
    # Both kinds leave what is equal on all ranks as it is.
    for weight in weights:
        assert torch.equal(weight.detach(), torch.full((3,), -4.0))


def test_what_was_processed_is_known_to_all_though_sync_is_skipped(world: rr.Communicator) -> None:
    """When hosts go, the ranks tell each other first: all divide the same rest, and nothing is given out again."""
    sampler = hvd.elastic.ElasticSampler(Indices(), shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler)
    done = []

    @hvd.elastic.run
    def train(state: Any) -> set[int]:
        mine = list(sampler)
        if not done:
            done.extend(mine[:2])
            sampler.record_batch(0, 2)
            state.on_hosts_updated(0.0, 1)
            state.commit()
        return set(mine)

    left = hvd.allgather_object(train(state))
    assert set().union(*left) == set(range(ROWS)) - set(range(2 * world.size))
    assert sampler.processed_indices == set(range(2 * world.size))


@pytest.mark.parametrize("shared", [True, False])
def test_commits_that_the_launcher_wants_go_where_all_ranks_see_them(
    world: rr.Communicator, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """In a folder that some rank does not see they are refused on all, with the remedy."""
    place = hvd.broadcast_object(str(tmp_path)) if shared else str(tmp_path)
    monkeypatch.chdir(place)
    monkeypatch.setenv("RINGREDUCE_COMMITS", "/proc/self/cwd/commits")
    state = hvd.elastic.TorchState(torch.nn.Linear(2, 1), None, step=0)
    train = hvd.elastic.run(lambda state: state.commit())
    if not shared and world.size > 1:
        with pytest.raises(rr.ConfigError, match="horovodrun --commits FOLDER"):
            train(state)
        return
    train(state)
    if world.rank == 0:
        assert pathlib.Path(place, "commits", "commit-000000000001.json").exists()


@pytest.mark.parametrize("place", ["a file", "others may write to it"])
def test_a_folder_that_the_launcher_names_and_rank_0_cannot_use_is_refused_on_all_ranks(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """By one error; and where others may write, nothing is written."""
    folder = pathlib.Path(hvd.broadcast_object(str(tmp_path))) / "commits"
    if hvd.rank() == 0 and place == "a file":
        folder.touch()
    elif hvd.rank() == 0:
        folder.mkdir()
        folder.chmod(0o777)
    hvd.barrier()
    monkeypatch.setenv("RINGREDUCE_COMMITS", str(folder))
    state = hvd.elastic.TorchState(torch.nn.Linear(2, 1), None, step=0)
    before = folder.stat().st_mtime_ns
    with pytest.raises(rr.ConfigError, match=r"commits cannot be kept in .*: rank 0: ") as error:
        hvd.elastic.run(lambda state: state.commit())(state)
    assert len(set(hvd.allgather_object(str(error.value)))) == 1
    assert folder.stat().st_mtime_ns == before


def test_programs_name_their_attributes_as_they_like(world: rr.Communicator, tmp_path_factory: Any) -> None:
    """Horovod's methods alone are taken; what else a state does goes on beside such attributes."""
    folder = hvd.broadcast_object(str(tmp_path_factory.mktemp("commits")))
    horovods = {"check_host_updates", "commit", "on_hosts_updated", "on_reset", "register_reset_callbacks", "reset"}
    horovods |= {"restore", "save", "sync", "model", "optimizer"}
    ours = {name for name in dir(hvd.elastic.TorchState) if not name.startswith("_")} - horovods
    names = sorted({"commits", "committed", "settle", "handlers", "names"} | ours)

    def state_of(value: int) -> Any:
        return hvd.elastic.TorchState(torch.nn.Linear(2, 1), None, **dict.fromkeys(names, value))

    @hvd.elastic.run
    def train(state: Any) -> None:
        assert [getattr(state, name) for name in names] == [0] * len(names)  # rank 0's
        for value in (6, 7):
            for name in names:
                setattr(state, name, value)
            state.commit()
        for name in names:
            setattr(state, name, 8)
        state.restore()

    state, again = state_of(world.rank), state_of(9)
    assert hvd.elastic.TorchState.keep_on_disk(state, folder) is None
    train(state)
    world.barrier()
    assert hvd.elastic.TorchState.keep_on_disk(again, folder) == 2
    for each in (state, again):
        assert [getattr(each, name) for name in names] == [7] * len(names)


def test_a_scheduler_is_kept_by_its_state_dict(world: rr.Communicator) -> None:
    """It stays the scheduler of its optimizer: a copy of one would move the rates of a copy of the other."""
    model, plain = trained(seed=0)
    optimizer = hvd.DistributedOptimizer(plain)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()  # or torch warns
    for _ in range(world.rank):
        scheduler.step()
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler)
    state.sync()
    assert state.scheduler is scheduler
    assert scheduler.optimizer is optimizer
    assert scheduler.last_epoch == 0
    scheduler.step()
    state.restore()
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_same_object_given_again_changes_no_commit(world: rr.Communicator) -> None:
    """An assignment keeps a new object as it is then; of the one that is there, what was committed counts."""
    model, _ = trained(seed=4)
    state = hvd.elastic.TorchState(model)
    before = [value.clone() for value in model.state_dict().values()]
    with torch.no_grad():
        model[0].weight.zero_()
    state.model = model
    state.restore()
    assert same(list(model.state_dict().values()), before)


def test_indices_may_come_as_tensors(world: rr.Communicator) -> None:
    """They are the numbers that they hold."""
    sampler = hvd.elastic.ElasticSampler(Indices(), shuffle=False)
    sampler.record_indices(torch.tensor([1, 3]))
    sampler.reset()
    assert sampler.remaining_indices == [index for index in range(ROWS) if index not in (1, 3)]


class Counter:
    """Counts; has no state dict."""

    def __init__(self) -> None:
        self.count = 0


class CounterHandler(hvd.elastic.state.StateHandler):
    """Keeps a `Counter`."""

    def save(self) -> None:
        self.saved = self.value.count

    def restore(self) -> None:
        self.value.count = self.saved

    def sync(self) -> None:
        self.value.count = hvd.broadcast_object(self.value.count)


def test_objects_of_other_kinds_have_handlers_of_their_own(world: rr.Communicator) -> None:
    """What is registered keeps its kind, as the object that it is; what is not, by value or by its state dict."""
    state = hvd.elastic.state
    before = list(state.get_handler_registry())
    assert [handler for _, handler in before] == [
        state.ModelStateHandler,
        state.OptimizerStateHandler,
        state.SamplerStateHandler,
    ]
    state.set_handler_registry([*before, (Counter, CounterHandler)])
    try:
        counter = Counter()
        counter.count = 5 + world.rank
        kept = hvd.elastic.TorchState(counter=counter)
        kept.sync()
        assert kept.counter is counter
        assert counter.count == 5
        counter.count = 9
        kept.restore()
        assert counter.count == 5
    finally:
        state.set_handler_registry(before)


def test_a_handler_can_be_used_alone(world: rr.Communicator) -> None:
    """It keeps what it is given: it saves, goes back, and makes it that of rank 0."""
    model, optimizer = trained(seed=world.rank)
    handlers = [hvd.elastic.state.ModelStateHandler(model), hvd.elastic.state.OptimizerStateHandler(optimizer)]
    assert [handler.value for handler in handlers] == [model, optimizer]
    for handler in handlers:
        handler.save()
    before = content(model, optimizer)
    for handler in handlers:
        handler.sync()
    assert same(content(model, optimizer), content(*trained(seed=0)))
    for handler in handlers:
        handler.restore()
    assert same(content(model, optimizer), before)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sampler_goes_on_from_a_checkpoint_of_horovod(world: rr.Communicator, shuffle: bool) -> None:
    """So many of the epoch's indices, the first in its order, are left out."""
    sampler = hvd.elastic.ElasticSampler(Indices(), shuffle=shuffle, seed=3)
    sampler.set_epoch(2)
    order = list(sampler.remaining_indices)
    sampler.set_epoch(0)
    for done in (0, 7, ROWS, ROWS + 1):
        sampler.load_state_dict({"epoch": 2, "processed_num": done})
        assert sampler.remaining_indices == order[done:]
        assert sampler.processed_num == min(done, ROWS)
        assert sampler.epoch == 2


def test_how_much_of_an_epoch_is_processed(world: rr.Communicator) -> None:
    """As many as all ranks together have, if they are as far as this one; a state dict says it as Horovod's does."""
    sampler = hvd.elastic.ElasticSampler(Indices(), shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler)
    assert sampler.processed_num == 0
    sampler.record_batch(0, 2)
    assert sampler.processed_num == sampler.state_dict()["processed_num"] == 2 * world.size
    state.sync()
    assert sampler.processed_num == 2 * world.size
    sampler.record_batch(0, 1)
    assert sampler.processed_num == 3 * world.size
    sampler.record_batch(0, 1000)
    assert sampler.processed_num == ROWS
    other = hvd.elastic.ElasticSampler(Indices(), shuffle=False)
    other.load_state_dict(sampler.state_dict())
    assert other.processed_indices == sampler.processed_indices
    sampler.set_epoch(1)
    assert sampler.processed_num == 0


@pytest.mark.spread
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda sampler: sampler.record_indices([ROWS]), "no index 23 in a dataset of length 23"),
        (lambda sampler: sampler.record_indices(["a"]), "an index must be a whole number, got 'a'"),
        (lambda sampler: sampler.record_batch(0, 2.5), "batch_size must be a whole number, got 2.5"),
        (lambda sampler: sampler.record_batch(-1, 4), "batch_idx must be at least 0"),
        (lambda sampler: sampler.record_batch(0, 0), "batch_size must be at least 1"),
        (lambda sampler: sampler.set_epoch("1"), "epoch must be a whole number, got '1'"),
        (lambda sampler: sampler.load_state_dict({"epoch": 1}), "lacks processed_indices"),
        (lambda sampler: sampler.load_state_dict({"processed_num": 1}), "lacks epoch"),
        (
            lambda sampler: sampler.load_state_dict({"epoch": 1, "processed_num": -1}),
            "processed_num must be at least 0",
        ),
        (lambda sampler: type(sampler)(7), "needs a dataset with a length, got a int"),
        (lambda sampler: type(sampler)(Indices(), seed=0.5), "seed must be a whole number"),
    ],
    ids=["range", "index", "batch", "no batch", "no size", "epoch", "state", "no epoch", "negative", "dataset", "seed"],
)
def test_a_sampler_refuses_what_makes_no_sense(world: rr.Communicator, wrong: Any, why: str) -> None:
    """What is wrong is named, and the sampler stays as it was."""
    sampler = hvd.elastic.ElasticSampler(Indices(), shuffle=False)
    before = list(sampler), sampler.state_dict()
    with pytest.raises(rr.ConfigError, match=why):
        wrong(sampler)
    assert (list(sampler), sampler.state_dict()) == before


def test_a_rank_may_join_before_it_steps_in_the_next_world(world: rr.Communicator) -> None:
    """After a reset of the state it can stand in for the steps of the others, which average without it."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    state = hvd.elastic.TorchState(optimizer=optimizer)
    hvd.shutdown()
    hvd.init()
    state.on_reset()
    if hvd.rank() > 0:
        weight.grad = torch.full((3,), float(hvd.rank()))
        optimizer.step()
    hvd.join()
    hvd.broadcast_parameters([weight], root_rank=hvd.size() - 1)
    assert torch.equal(weight.detach(), torch.full((3,), -hvd.size() / 2 if hvd.size() > 1 else 0.0))


def test_a_job_that_begins_again_goes_on_from_the_disk(world: rr.Communicator, tmp_path_factory: Any) -> None:
    """Model, optimizer, sampler, values and each rank's random numbers are those of the last commit that is whole."""
    folder = hvd.broadcast_object(str(tmp_path_factory.mktemp("commits")))

    def state_of(seed: int) -> tuple[Any, Any, Any]:
        model, optimizer = trained(seed)
        sampler = hvd.elastic.ElasticSampler(Indices(), seed=3)
        generators = hvd.elastic.Generators()
        return (
            hvd.elastic.TorchState(model, optimizer, sampler=sampler, generators=generators, step=0),
            model,
            optimizer,
        )

    hvd.elastic.seed(9)
    state, model, optimizer = state_of(seed=1)
    assert state.keep_on_disk(folder) is None
    state.sampler.record_batch(0, 2)
    state.step = 5
    state.commit()
    state._disk.settle()
    hvd.barrier()
    before, drawn = content(model, optimizer), torch.rand(3)
    with torch.no_grad():
        model[0].weight.zero_()
    state.step = 6

    again, model, optimizer = state_of(seed=2)
    assert again.keep_on_disk(folder) == 1
    again.sync()
    assert same(content(model, optimizer), before)
    assert again.step == 5
    assert again.sampler.processed_indices == state.sampler.processed_indices
    assert len(again.sampler.processed_indices) == min(ROWS, 2 * world.size)
    assert torch.equal(torch.rand(3), drawn)
    if hvd.rank() == 0:
        (file,) = (each for each in pathlib.Path(folder).glob("commit-*.pt") if ".rank" not in each.name)
        assert torch.load(file, weights_only=True)["values"] == {"step": 5}


def test_the_next_job_begins_with_just_this(world: rr.Communicator, tmp_path_factory: Any) -> None:
    """What is not committed yet, with the ranks' own parts, whatever `every` says; not if a rank cannot write it."""
    folder = pathlib.Path(hvd.broadcast_object(str(tmp_path_factory.mktemp("commits")))) / "commits"
    generators = hvd.elastic.Generators()
    state = hvd.elastic.TorchState(generators=generators, step=0)
    assert not state._keep_for_next_job()
    state.keep_on_disk(folder, every=1000)
    assert state._disk is not None
    state.step = 7
    assert state._keep_for_next_job()
    drawn = torch.rand(3)
    again = hvd.elastic.TorchState(generators=generators, step=0)
    assert again.keep_on_disk(folder) == state.commits
    assert again.step == 7
    assert torch.equal(torch.rand(3), drawn)
    if world.rank == world.size - 1:
        (folder / f"commit-{again.commits + 1:012}.rank-{world.rank}.pt").mkdir()
    hvd.barrier()
    assert not again._keep_for_next_job()


def test_random_numbers_differ_between_ranks_and_come_again(world: rr.Communicator) -> None:
    """The same seed gives each rank the same numbers of Python, NumPy and torch again, and no two ranks the same."""

    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1)[0])]

    hvd.elastic.seed(4)
    first = drawn()
    hvd.elastic.seed(4)
    assert drawn() == first
    everyone = hvd.allgather_object(first)
    assert len({tuple(each) for each in everyone}) == world.size
    with pytest.raises(rr.ConfigError):
        hvd.elastic.seed(-1)


def test_folders_that_cannot_be_used_are_refused_on_all_ranks(world: rr.Communicator, tmp_path_factory: Any) -> None:
    """A value of a class of the program's own, a file in place of the folder, another program's commits."""
    folder = pathlib.Path(hvd.broadcast_object(str(tmp_path_factory.mktemp("commits"))))
    with pytest.raises(rr.ConfigError, match="rows of the state"):
        hvd.elastic.TorchState(rows=Indices()).keep_on_disk(folder)
    if world.rank == 0:
        (folder / "file").touch()
    hvd.barrier()
    with pytest.raises(rr.ConfigError, match="file"):
        hvd.elastic.TorchState(step=0).keep_on_disk(folder / "file")
    other = hvd.elastic.TorchState(epoch=0)
    other.keep_on_disk(folder / "commits")
    other.commit()
    other._disk.settle()
    hvd.barrier()
    with pytest.raises(rr.ConfigError, match="another program"):
        hvd.elastic.TorchState(step=0).keep_on_disk(folder / "commits")
    wider = hvd.elastic.TorchState(model=torch.nn.Linear(3, 2), epoch=0)
    wider.keep_on_disk(folder / "models")
    wider.commit()
    wider._disk.settle()
    hvd.barrier()
    with pytest.raises(rr.ConfigError, match="does not fit"):
        hvd.elastic.TorchState(model=torch.nn.Linear(4, 2), epoch=0).keep_on_disk(folder / "models")


def test_weights_of_a_node_are_copied_in_each_commit(world: rr.Communicator) -> None:
    """Other ranks may have updated their parts when this one has not stepped."""
    model = torch.nn.Linear(5, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), shard="node")
    state = hvd.elastic.TorchState(model, optimizer)
    with pytest.raises(rr.ConfigError, match="optimizer does not tell when weights change"):
        state.keep_in_memory(2)
    state.keep_in_memory(1)
