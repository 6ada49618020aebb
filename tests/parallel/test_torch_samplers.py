"""What all ranks must draw alike: any sampler over ranks, streams that are divided already, and epochs that repeat."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("ringreduce.torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import ringreduce as rr  # noqa: E402
from ringreduce.common.errors import ConfigError  # noqa: E402

WEIGHTS = [float(each % 5) for each in range(23)]
LENGTHS = [each * 7 % 11 for each in range(23)]


class ByLength:
    """Batches of samples of like lengths, in an order that each epoch draws, as users write it; without a length."""

    def __init__(self) -> None:
        self.generator = None

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(len(LENGTHS)), key=LENGTHS.__getitem__)
        batches = [order[start : start + 4] for start in range(0, len(order), 4)]
        for place in torch.randperm(len(batches), generator=self.generator).tolist():
            yield batches[place]


class Own:
    """Draws from Python's generator, from a seed and the epoch that it is told."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(19), 19))

    def __len__(self) -> int:
        return 19


SAMPLERS: dict[str, Callable[[], Any]] = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 17),
    "shuffled": lambda: RandomSampler(range(13)),
    "replaced": lambda: RandomSampler(range(13), replacement=True, num_samples=14),
    "subset": lambda: SubsetRandomSampler([5, 3, 8, 1, 9]),
    "weighted batches": lambda: BatchSampler(WeightedRandomSampler(WEIGHTS, 22), 4, drop_last=False),
    "by length": ByLength,
    "own": Own,
    "a list": lambda: [[1, 2], [3], [4, 5, 6]],
}


def drawn_alone(sampler: Any, seed: int) -> list[Any]:
    """Return what a sampler draws in one process; its generator, or that inside of it, is seeded by hand."""
    inner = getattr(sampler, "sampler", sampler)
    if hasattr(inner, "generator"):
        inner.generator = torch.Generator().manual_seed(seed)
    order: list[Any] = list(sampler)
    return order


@pytest.mark.spread("ends")
@pytest.mark.parametrize("ends", ["repeat", "drop", "uneven"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_each_rank_gets_its_share_of_what_a_sampler_draws(world: rr.Communicator, kind: str, ends: str) -> None:
    """Each place of the order in one process is one rank's, in turn; global generators that differ change nothing."""
    torch.manual_seed(world.rank)
    sampler = hvd.ShardSampler(SAMPLERS[kind](), seed=3, ends=ends)
    reference = SAMPLERS[kind]()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        if kind == "own":
            reference.set_epoch(epoch)
        order = drawn_alone(reference, 3 + epoch)
        rest = -len(order) % world.size
        if ends == "repeat":
            order += [order[place % len(order)] for place in range(rest)]
        elif ends == "drop":
            order = order[: len(order) // world.size * world.size]
        mine = list(sampler)
        assert mine == order[world.rank :: world.size] == list(sampler)
        if kind != "by length":
            assert len(mine) == len(sampler)
        assert ends == "uneven" or len(set(hvd.allgather_object(len(mine)))) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_takes_a_share_where_it_takes_the_sampler(world: rr.Communicator, workers: int) -> None:
    """As sampler and as batch_sampler; what all ranks get together is what one process gets."""
    data = torch.arange(23)
    single = DataLoader(data, 2, sampler=hvd.ShardSampler(WeightedRandomSampler(WEIGHTS, 24)), num_workers=workers)
    given = list(chain.from_iterable(hvd.allgather_object(torch.cat(list(single)).tolist())))
    assert sorted(given) == sorted(drawn_alone(WeightedRandomSampler(WEIGHTS, 24), 0))
    batched = DataLoader(data, batch_sampler=hvd.ShardSampler(ByLength(), ends="uneven"), num_workers=workers)
    shares = hvd.allgather_object([each.tolist() for each in batched])
    assert sorted(chain.from_iterable(shares)) == sorted(drawn_alone(ByLength(), 0))


def test_a_sampler_with_a_generator_keeps_it(world: rr.Communicator) -> None:
    """It goes on from epoch to epoch, as in one process; a generator that is lent is taken back."""
    sampler = hvd.ShardSampler(RandomSampler(range(11), generator=torch.Generator().manual_seed(5)), ends="uneven")
    alone = RandomSampler(range(11), generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        assert list(sampler) == list(alone)[world.rank :: world.size]
    lent = RandomSampler(range(11))
    list(hvd.ShardSampler(lent))
    assert lent.generator is None


def test_mistakes_with_samplers() -> None:
    """What cannot be iterated in each epoch is refused, with what is meant instead."""
    for wrong in (iter([1, 2]), torch.utils.data.Dataset(), 3):
        with pytest.raises(ConfigError, match="for a dataset use DistributedSampler"):
            hvd.ShardSampler(wrong)
    with pytest.raises(ConfigError, match='"repeat", "drop" or "uneven"'):
        hvd.ShardSampler([1], ends="pad")


# ---- what ranks must draw alike ----


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What rank 0 has said of data since; the world is a new one."""
    rr.shutdown()
    rr.init()
    caplog.set_level("WARNING", logger="ringreduce.training.data")
    return lambda: [each.getMessage() for each in caplog.records if each.name.startswith("ringreduce.training.data")]


class Training:
    """Steps of a model of one weight."""

    def __init__(self) -> None:
        model = torch.nn.Linear(1, 1)
        hvd.broadcast_parameters(model)
        self._model = model
        self._optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))

    def on(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            self._optimizer.zero_grad()
            self._model(torch.as_tensor(batch).view(-1, 1).float()).square().mean().backward()
            self._optimizer.step()


def loader(sampler: Any, **options: Any) -> Any:
    return DataLoader(torch.arange(40.0), batch_size=5, sampler=sampler, **options)


class OfTheGlobalGenerator:
    """Draws from torch's global generator and has no attribute for another one."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(40).tolist())


@pytest.mark.parametrize("seeded", [False, True], ids=["each rank its own", "the same"])
def test_orders_that_differ_are_told_once(told: Any, seeded: bool) -> None:
    """With the line of the sampler; what one rank alone draws besides is compared with nothing."""
    torch.manual_seed(0 if seeded else rr.rank())
    training = Training()
    sampler = hvd.ShardSampler(OfTheGlobalGenerator(), ends="drop")
    for _ in range(2):
        training.on(loader(sampler))
        if rr.rank() == 0:
            state = torch.get_rng_state()
            list(hvd.ShardSampler(OfTheGlobalGenerator()))
            torch.set_rng_state(state)
    found = told()
    assert len(found) == (rr.rank() == 0 and not seeded and rr.size() > 1)
    assert all("draw different indices from the sampler at" in each and f"{__file__}:" in each for each in found)


@pytest.mark.sizes(2, 3)
def test_orders_that_differ_from_a_later_epoch_on_are_told(told: Any) -> None:
    """Seeded alike, and one rank draws other random numbers between the epochs."""
    torch.manual_seed(0)
    training = Training()
    sampler = hvd.ShardSampler(OfTheGlobalGenerator(), ends="drop")
    for _ in range(4):
        training.on(loader(sampler))
        assert told() == [] or rr.rank() == 0
        torch.randn(rr.rank())
    assert len(told()) == (rr.rank() == 0)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("batched", [False, True])
def test_a_split_that_each_rank_has_drawn_is_told_for_any_sampler(told: Any, batched: bool) -> None:
    """Where the sampler knows its data, as those of torch do."""
    train, _ = torch.utils.data.random_split(
        torch.arange(40.0), [30, 10], generator=torch.Generator().manual_seed(rr.rank())
    )
    inner = BatchSampler(SequentialSampler(train), 5, drop_last=True) if batched else RandomSampler(train)
    how = {"batch_sampler" if batched else "sampler": hvd.ShardSampler(inner, ends="drop")}
    Training().on(DataLoader(train, **how))
    assert len(told()) == (rr.rank() == 0)
    assert all("random_split(" in each for each in told())


class Files(IterableDataset):  # type: ignore[type-arg]
    """Records of files; ``divided``: those of this rank alone, as a library that divides by itself gives them."""

    def __init__(self, *, divided: bool) -> None:
        self._divided = divided

    def __iter__(self) -> Iterator[Any]:
        first, step = (rr.rank(), rr.size()) if self._divided else (0, 1)
        for number in range(first, 40, step):
            yield {"number": number, "image": torch.full((3,), float(number)), "object": object()}


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("divided", [False, True])
def test_a_stream_that_is_divided_already_is_told_once(told: Any, divided: bool, workers: int) -> None:
    """Also where only worker processes read it; samples that show no address of theirs are the same on all ranks."""
    batches = DataLoader(
        hvd.Shard(Files(divided=divided), ends="drop"),
        batch_size=2,
        num_workers=workers,
        collate_fn=lambda batch: [each["number"] for each in batch],
        multiprocessing_context="fork" if workers else None,
    )
    training = Training()
    for _ in range(2):
        training.on(batch for batch, _ in zip(batches, range(3), strict=False))
    assert len(told()) == (rr.rank() == 0 and divided)
    assert all(f"the Shard at {__file__}:" in each for each in told())


@pytest.mark.sizes(2)
def test_files_of_a_rank_are_no_source_of_a_shard(told: Any) -> None:
    """A list is seen like a stream; and where the Shard was made before the world."""
    rr.shutdown()
    shard = hvd.Shard([0, 2, 4, 6]), hvd.Shard([1, 3, 5, 7])
    rr.init()
    Training().on(shard[rr.rank()])
    assert len(told()) == (rr.rank() == 0)


# ---- epochs ----


def samplers(shuffle: bool) -> list[Any]:
    inner = RandomSampler(range(40)) if shuffle else SequentialSampler(range(40))
    return [hvd.DistributedSampler(range(40), shuffle=shuffle), hvd.ShardSampler(inner)]


def test_a_forgotten_epoch_is_told_once(told: Any) -> None:
    """When a second epoch of training ends with the same order; by rank 0."""
    training = Training()
    for count, sampler in enumerate(samplers(shuffle=True)):
        for expected in (0, 1, 1):
            training.on(loader(sampler))
            assert len(told()) == (rr.rank() == 0) * (count + expected)
    assert all("sampler.set_epoch(epoch)" in each for each in told())


def test_what_is_no_forgotten_epoch_is_not_told(told: Any) -> None:
    """Orders without a shuffle, validation, parts of an epoch, two loaders side by side; all, once epochs are said."""
    training = Training()
    for sampler in samplers(shuffle=False):
        for _ in range(3):
            training.on(loader(sampler))
    for sampler in samplers(shuffle=True):
        training.on(loader(sampler))
        list(loader(sampler))  # measures
        for epoch in (1, 2):
            sampler.set_epoch(epoch)
            training.on(loader(sampler))
            training.on(loader(sampler))
    for sampler in samplers(shuffle=True):
        training.on(torch.cat(pair) for pair in zip(loader(sampler), loader(sampler), strict=True))
    for sampler in samplers(shuffle=True):
        for _ in range(3):
            training.on(batch for batch, _ in zip(loader(sampler), range(1), strict=False))
    assert told() == []
