"""Torch loaders that resume in the middle of an epoch, and random numbers that belong to a sample."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from threading import get_ident, main_thread
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from ringreduce.common.arguments import whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.runtime import rank_and_size
from ringreduce.torch.data import DistributedSampler
from ringreduce.torch.elastic.generators import Generators
from ringreduce.torch.shard_sampler import ShardSampler
from ringreduce.training.data import resumable, shares
from ringreduce.training.data.epochs import EpochDivision
from ringreduce.training.data.generators import mixed

_log = logging.getLogger(__name__)

T = TypeVar("T")


class ResumableLoader(resumable.ResumableLoader[T]):
    """Gives the batches of a loader, and after a stop resumes in the middle of an epoch, in the same order.

    See `ringreduce.training.data.resumable.ResumableLoader`. If the dataset of a ``DataLoader`` has a length, no sample
    is loaded twice: it skips the sampler's indices. Random numbers of worker processes then begin anew, as a warning
    says, except those of a `SeededDataset`. With `DistributedSampler` of this package it resumes on any number of
    ranks. It calls ``set_epoch`` of sampler, batch sampler and dataset, if they have it.

    Args:
        batches: a loader not iterated yet, or a function that takes the number of an epoch and returns one.

    Raises:
        ConfigError: as there; or the loader, as torchdata's ``StatefulDataLoader``, or its `ElasticSampler` keeps its
            place itself.
    """

    _generators = Generators()

    def __init__(self, batches: Iterable[T] | Callable[[int], Iterable[T]]) -> None:
        super().__init__(batches)
        loader: Any = batches if isinstance(batches, DataLoader) else None
        outer: Any = None  # gives what the loader loads
        if loader is not None:
            outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            if loader.num_workers and not getattr(loader, "in_order", True):
                raise ConfigError("a DataLoader with in_order=False gives batches in no order that could go on")
        self._loader = loader
        self._samplers = [*_nested(outer, "sampler")]
        for each in [each for each in self._samplers if isinstance(each, ShardSampler)]:
            self._samplers += each.samplers()
        own = [each for each in self._samplers if isinstance(each, EpochDivision)]
        if own or hasattr(batches, "state_dict"):
            what = own[0] if own else batches
            raise ConfigError(
                f"{type(what).__name__} keeps its place in the data itself: give it to the checkpoint or the state, "
                "not a ResumableLoader around it"
            )
        self._sampler: DistributedSampler | None = None
        self._each = 1  # so many samples, or batches, of our sampler's order make a batch of each rank
        if isinstance(outer, DistributedSampler):
            self._sampler = outer
            self._each = outer.samples_each
        elif type(outer) is BatchSampler and isinstance(outer.sampler, DistributedSampler):
            self._sampler = outer.sampler
            self._each = outer.batch_size * outer.sampler.samples_each
        self._samples = 0  # of this epoch, which all ranks had before the first of the batches that are counted
        self._indices: _Indices | None = None
        if loader is not None and not isinstance(loader.dataset, IterableDataset) and self._sampler is None:
            self._indices = _Indices(outer)

    def _own_states(self) -> Any:
        return [each.get_state() for each in self._own_generators()]

    def _set_own_states(self, states: Any) -> None:
        for each, state in zip(self._own_generators(), states, strict=True):
            each.set_state(state)

    def _own_generators(self) -> list[torch.Generator]:
        found = dict.fromkeys(getattr(each, "generator", None) for each in (self._loader, *self._samplers))
        return [each for each in found if isinstance(each, torch.Generator)]

    def _of_epoch(self) -> Iterable[T]:
        datasets = _nested(getattr(self._loader, "dataset", None), "dataset", "datasets")
        for each in {id(each): each for each in (*self._samplers, *datasets)}.values():
            if hasattr(each, "set_epoch"):
                each.set_epoch(self.epoch)
        return super()._of_epoch()

    def _rest(self, skipped: Callable[[], None]) -> Iterator[T]:
        if self._sampler is not None:
            self._warn_of_workers()
            batches = self._of_epoch()
            self._sampler.start_at(self._samples)
            iterator = iter(batches)  # draws a seed for workers
            skipped()
            yield from iterator
        elif self._indices is not None:
            self._warn_of_workers()
            yield from self._rest_by(self._indices, skipped)
        else:
            yield from super()._rest(skipped)

    def _rest_by(self, indices: _Indices, skipped: Callable[[], None]) -> Iterator[T]:
        seed = mixed(self._seed or 0, 1)

        def begin() -> None:  # workers that persist draw no number in later epochs, as they do in the first
            self._generators.seed(seed)
            self._set_own_states(self._own)

        def check(before: int) -> None:
            self._require_same(before)
            if not self._loader.num_workers:  # else only the sampler draws from these, and it has just done so
                skipped()

        indices.begin(begin, self._given, check)
        self._of_epoch()
        for batch in _iterated_by(self._loader, indices):
            self._checksum = indices.checksums.popleft()
            yield batch

    def _warn_of_workers(self) -> None:
        loader = self._loader
        seeded = any(isinstance(each, SeededDataset) for each in _nested(loader.dataset, "dataset", "datasets"))
        if (self._given or self._samples) and loader.num_workers and not seeded and rank_and_size()[0] == 0:
            _log.warning(
                "the loader goes on in the middle of epoch %d: random numbers that its workers draw begin anew; "
                "SeededDataset(dataset) makes them depend on epoch and sample alone",
                self.epoch,
            )

    # ---- what is kept ----

    def _end(self) -> None:
        super()._end()
        self._samples = 0

    def place(self) -> dict[str, Any]:
        """Return this rank's place in the data, without its generators."""
        return {**super().place(), "samples": self._seen(), "of": self._data()}

    def _data(self) -> list[int]:
        """Return what the order of our sampler depends on."""
        sampler = self._sampler
        if sampler is None:
            return []
        length = len(sampler.dataset) if hasattr(sampler.dataset, "__len__") else -1
        return [length, sampler.seed, int(sampler.shuffle)]

    def _seen(self) -> int:
        """Return how much of this epoch's order all ranks have had; 0 if no sampler of ours divides it."""
        if self._sampler is None:
            return 0
        return self._samples + self._given * self._each * self._world[1]

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank is, with its random numbers; those of GPUs are the program's."""
        state = super().state_dict()
        if state["at"] is not None:
            state["at"]["gpus"] = []
        return state

    def _divide_anew(self) -> None:
        super()._divide_anew()
        self._samples = self._seen()
        self._given = 0

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Load a state without `load_state_dict`'s checks, as the ranks may still change."""
        super().go_on(state)
        if self._sampler is not None:
            self._samples = state["samples"]
            self._given = self._checksum = 0

    def _require_fit(self, state: Mapping[str, Any], same_ranks: bool) -> None:
        if state["of"] != self._data():
            raise ConfigError(
                f"the loader cannot go on: length, seed and shuffle of what its sampler divides are {self._data()}, "
                f"and were {state['of']}"
            )
        own = [each for each in self._samplers if isinstance(getattr(each, "generator", None), torch.Generator)]
        if self._sampler is None or own:  # which a new rank has elsewhere
            super()._require_fit(state, same_ranks)


#: Iterators of DataLoaders that have more batches -> how many they have given to the main thread.
_given: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_told: set[str] = set()


def get_batch(following: Callable[[Any], Any], iterator: Any) -> Any:
    """Return the next batch of a DataLoader; count it."""
    if get_ident() != main_thread().ident:
        return following(iterator)
    given = _given.pop(iterator, 0)
    batch = shares.get_batch(following, iterator)
    _given[iterator] = given + 1
    return batch


def warn_of_lost_place(kept: Iterable[Any]) -> None:
    """Let rank 0 warn, once, if a checkpoint within an epoch keeps no place in it."""
    numbers = [*_given.values()]
    if not numbers or _told or rank_and_size()[0]:
        return
    for each in kept:
        if resumable.is_loader(each) or (isinstance(each, Sampler) and hasattr(each, "state_dict")):
            return
        if type(each) is int and any(number - 1 <= each <= number for number in numbers):
            return
    _told.add("lost place")
    _log.warning(
        "the checkpoint is made within an epoch, of which a DataLoader has given %d batches, and keeps no place in it: "
        "after a stop, training begins the epoch again. Keep a ResumableLoader around the DataLoader: "
        "save_checkpoint(..., loader=loader), or TorchState(..., loader=loader)",
        max(numbers),
    )


def _nested(outer: Any, *names: str) -> Iterator[Any]:
    """Yield a sampler or dataset, and those that are inside of it, by attributes."""
    if outer is None or isinstance(outer, (str, bytes)):
        return
    yield outer
    for name in names:
        inner = getattr(outer, name, None)
        for each in inner if name == "datasets" and inner is not None else [inner]:
            yield from _nested(each, *names)


class _Indices:
    """A sampler's indices, or lists of them, from a place on.

    Attributes:
        checksums: one for each that a loader has taken, of all up to it, in order.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._begun: Callable[[], None] = _nothing
        self._skip = 0
        self._skipped: Callable[[int], None] = _nothing
        self.checksums: deque[int] = deque()

    def begin(self, begun: Callable[[], None], skip: int, skipped: Callable[[int], None]) -> None:
        """Skip some in the next iteration; call ``begun`` before them, ``skipped`` with their checksum after them."""
        self._begun = begun
        self._skip = skip
        self._skipped = skipped
        self.checksums.clear()

    def __iter__(self) -> Iterator[Any]:
        self._begun()
        indices = iter(self._sampler)
        before = 0
        for each in islice(indices, self._skip):
            before = resumable.checksum(each, before)
        self._skipped(before)
        self._begun = self._skipped = _nothing  # they keep the loader, which has workers to end
        for each in indices:
            before = resumable.checksum(each, before)
            self.checksums.append(before)
            yield each

    def __len__(self) -> int:
        return len(self._sampler)


def _nothing(*_: object) -> None:
    pass


def _iterated_by(loader: DataLoader[Any], indices: Any) -> Iterator[Any]:
    """Return an iterator of a ``DataLoader`` that takes the indices of another sampler, or of a batch sampler.

    A loader lets nobody replace its sampler, so this writes to its ``__dict__`` while it makes the iterator.

    Args:
        loader: one whose dataset has a length.
        indices: an iterable in place of the loader's ``batch_sampler``, or of its ``sampler`` if that is None.
    """
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    replaced = loader.__dict__[name]
    loader.__dict__[name] = indices
    try:
        return iter(loader)
    finally:
        loader.__dict__[name] = replaced


class SeededDataset(Dataset[T]):
    """A dataset whose samples draw random numbers that depend on seed, epoch and index only.

    With these it seeds the global generators of Python, NumPy and torch before it loads a sample, and restores them
    afterwards. So augmented samples do not depend on workers, ranks, or stops.

    Args:
        dataset: has a length, and samples by index; the same on all ranks.
        seed: of the job; at least 0; must agree.
    """

    def __init__(self, dataset: Dataset[T], seed: int = 0) -> None:
        if not hasattr(dataset, "__len__"):
            raise ConfigError(f"SeededDataset needs a dataset with a length, got a {type(dataset).__name__}")
        self.dataset = dataset
        self.seed = whole_number("seed", seed, 0)
        self._epoch = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # workers that persist see it

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, for other random numbers; `ResumableLoader` calls it."""
        self._epoch[0] = whole_number("epoch", epoch, 0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> T:
        generators = Generators()
        with generators.restored():
            generators.seed(mixed(self.seed, int(self._epoch), *map(int, np.ravel(index))))
            return self.dataset[index]
