"""What loaders that go on in the middle of an epoch refuse and say; tests/jobs/test_stopped_loaders.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("ringreduce.torch")

from torch.utils.data import DataLoader, Dataset, TensorDataset  # noqa: E402

import ringreduce as rr  # noqa: E402
from ringreduce.elastic import ResumableLoader  # noqa: E402
from ringreduce.torch import resumable  # noqa: E402

pytestmark = pytest.mark.usefixtures("world")


def numbers(count: int = 24) -> TensorDataset:
    return TensorDataset(torch.arange(count))


class Drawn(Dataset[float]):
    """Samples that are random numbers."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(())) + float(np.random.rand())


@pytest.mark.parametrize("wrong", [iter([1, 2]), 3, (each for each in [1])], ids=lambda each: type(each).__name__)
def test_what_cannot_be_iterated_again_is_refused(wrong: Any) -> None:
    """A loader is wrapped, not its iterator."""
    with pytest.raises(rr.ConfigError, match="takes a loader, or a function of the epoch"):
        hvd.ResumableLoader(wrong)


def test_what_keeps_its_place_itself_is_refused() -> None:
    """It belongs into the checkpoint."""
    with pytest.raises(rr.ConfigError, match="ElasticSampler keeps its place in the data itself"):
        hvd.ResumableLoader(DataLoader(numbers(), sampler=hvd.elastic.ElasticSampler(numbers())))


def test_an_order_that_changes_is_an_error() -> None:
    """Batches before the stop that are others than before are no place to go on from."""

    def batches(epoch: int) -> Iterator[int]:
        yield from np.random.default_rng().permutation(1000).tolist()

    loader = ResumableLoader(batches)
    given = iter(loader)
    next(given)
    other = ResumableLoader(batches)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(rr.ConfigError, match="after batch 1 of epoch 0: the batches before it are others"):
        next(iter(other))


def test_another_dataset_is_an_error() -> None:
    """The place is one in the order of a length, a seed."""
    loaders = [
        hvd.ResumableLoader(DataLoader(numbers(n), sampler=hvd.DistributedSampler(numbers(n)))) for n in (24, 28)
    ]
    next(iter(loaders[0]))
    with pytest.raises(rr.ConfigError, match="length, seed and shuffle"):
        loaders[1].load_state_dict(loaders[0].state_dict())
    with pytest.raises(rr.ConfigError, match="it lacks checksum, given"):
        loaders[1].load_state_dict(dict.fromkeys(("epoch", "rank", "ranks", "samples", "of", "seed", "own", "at"), 0))


def test_an_epoch_that_the_program_leaves_is_over() -> None:
    """The next iteration is the next epoch."""
    loader = ResumableLoader(lambda epoch: [epoch] * 3)
    next(iter(loader))
    assert (list(loader), loader.epoch, list(loader)) == ([1] * 3, 2, [2] * 3)


def test_samples_draw_the_same_numbers_in_any_worker() -> None:
    """And the generators of the program go on as if nothing was drawn."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = []
    for workers in (0, 2):
        data = hvd.SeededDataset(Drawn(), seed=3)
        for epoch in range(2):
            data.set_epoch(epoch)
            found.append([data[n] for n in range(7)] if workers == 0 else list(DataLoader(data, None, num_workers=2)))
        assert workers or torch.equal(torch.rand(3), expected)
    assert found[:2] == found[2:]
    assert found[0] != found[1]
    assert hvd.allgather_object(found) == [found] * hvd.size()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_checkpoint_within_an_epoch_that_keeps_no_place_is_told(
    keeps: bool, tmp_path: Path, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, by rank 0; not if a number in it says how far the epoch is."""
    monkeypatch.setattr(resumable, "_told", set())
    path = hvd.broadcast_object(str(tmp_path))
    for number, _ in enumerate(DataLoader(numbers(9))):
        if number in (3, 5):
            hvd.save_checkpoint(f"{path}/c.pt", epoch=7, **({"batch": number} if keeps else {}))
    hvd.save_checkpoint(f"{path}/c.pt", epoch=7)
    found = warned("keeps no place in it")
    assert len(found) == (hvd.rank() == 0 and not keeps)
    assert all("has given 4 batches" in each for each in found)


def test_a_loader_that_another_number_of_ranks_has_saved_is_refused(tmp_path: Path) -> None:
    """On all ranks, with the name of what to use."""
    path = f"{hvd.broadcast_object(str(tmp_path))}/c.pt"
    loader = hvd.ResumableLoader(DataLoader(numbers(), shuffle=True))
    next(iter(loader))
    hvd.save_checkpoint(path, loader=loader)
    if hvd.rank() == 0:
        content = torch.load(path, weights_only=True)
        content["loaders"] = [content["loaders"][0]] * (hvd.size() + 1)
        content["loaders"] = [{"loader": {**each["loader"], "ranks": hvd.size() + 1}} for each in content["loaders"]]
        torch.save(content, path)
    hvd.barrier()
    with pytest.raises(rr.ConfigError, match=r"in the middle of epoch 0, which \d ranks had begun"):
        hvd.load_checkpoint(path, loader=loader)


def test_generators_go_on_between_epochs() -> None:
    """That of a loader has another order in the next epoch, in a new process, too."""

    def make() -> Any:
        return hvd.ResumableLoader(DataLoader(range(9), shuffle=True, generator=torch.Generator().manual_seed(3)))

    whole = make()
    expected = [[int(each) for each in whole] for _ in range(2)]
    before = make()
    assert [int(each) for each in before] == expected[0]
    after = make()
    after.load_state_dict(before.state_dict())
    assert [int(each) for each in after] == expected[1]


@pytest.mark.parametrize("size", [1, 3])
def test_the_next_place_counts_from_where_another_world_went_on(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that few or many ranks had count once."""
    data = range(24 * hvd.size())
    loader = hvd.ResumableLoader(DataLoader(data, 2, sampler=hvd.DistributedSampler(data)))
    next(iter(loader))
    state = {**loader.state_dict(), "ranks": size, "rank": 0, "samples": 2 * size}
    new = hvd.ResumableLoader(DataLoader(data, 2, sampler=hvd.DistributedSampler(data)))
    new.load_state_dict(state)
    next(iter(new))
    assert (new.place()["samples"], new.place()["ranks"]) == (2 * size + 2 * hvd.size(), hvd.size())


def test_a_loader_is_iterated_once_at_a_time() -> None:
    """Batches of two epochs would be mixed."""
    loader = ResumableLoader(lambda epoch: range(3))
    with pytest.raises(rr.ConfigError, match="iterated again"):
        list(zip(loader, loader, strict=False))


class Places:
    """A loader of somebody, with a place of its own."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.place, 9))

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("older", [False, True])
def test_every_rank_has_its_own_place_in_a_commit(
    older: bool, tmp_path: Path, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has rank 0's alone, as commits had, is none: all ranks begin an epoch, and rank 0 says so."""
    from ringreduce.torch.elastic import state as states

    folder = hvd.broadcast_object(str(tmp_path))
    with monkeypatch.context() as patch:
        if older:
            patch.setattr(states, "_registry", [(Places, states.StateHandler), *states._registry])
        first = hvd.elastic.TorchState(loader=Places(), epoch=3)
        first.keep_on_disk(folder)
        first.loader.place = 4 + hvd.rank()
        first.commit()
        assert first._disk is not None
        first._disk.settle()
        hvd.barrier()
    again = hvd.elastic.TorchState(loader=Places(), epoch=0)
    assert again.keep_on_disk(folder) is not None
    assert (again.epoch, again.loader.place) == (3, 0 if older else 4 + hvd.rank())
    assert len(warned("keeps no place of loader")) == (older and hvd.rank() == 0)
