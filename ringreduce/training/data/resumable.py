"""Batches of any loader, with a place to resume from after a stop in the middle of an epoch.

A loader's next batch depends on its order and on random numbers of its samples, not only on a count. So a loader has
its own random numbers. Its place is their seed, the epoch, the number of batches that the program has, and a checksum
of these. To resume, the epoch begins from this seed, and these batches are skipped: the checksum shows whether the
order is the same.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from ringreduce.common.errors import ConfigError
from ringreduce.runtime import rank_and_size
from ringreduce.training.data.generators import Generators

T = TypeVar("T")

#: Of torch, which this does not import: what has a state, can be iterated, and is the same on all ranks.
_NO_LOADERS = {"torch.nn.modules.module.Module", "torch.utils.data.sampler.Sampler"}

_FEW = 64  # elements of an array that its checksum takes from either end


class ResumableLoader(Generic[T]):
    """Gives the batches of a loader, and after a stop resumes in the middle of an epoch, in the same order.

        loader = ResumableLoader(batches)
        for epoch in range(loader.epoch, 10):
            for batch in loader:
                ...

    `ringreduce.torch.save_checkpoint` and elastic states keep its place, each rank's own: ``loader=loader``. A batch
    counts once the program has it, not when workers prefetch it. Each iteration is one epoch, also if the program
    leaves it early. It calls the loader's ``set_epoch``, if there is one, with the number of the epoch.

    While it gets a batch, the global generators (Python's, NumPy's) have a state of its own. It seeds them in each
    epoch by a number from the program's generators. To resume, it begins the epoch with that seed, and drops the
    batches that the program has. This needs as many ranks as before, and batches that depend on these generators and
    the epoch only.

    Args:
        batches: a loader, which is iterated once per epoch; or a function that returns the batches of an epoch, given
            its number: for loaders that keep an order from epoch to epoch, as `tf.data.Dataset.shuffle` does. May
            differ between ranks.

    Raises:
        ConfigError: ``batches`` is an iterator, which can be iterated once; or, from `load_state_dict` or the next
            iteration, it cannot resume: the number of ranks, or the batches, have changed.

    Attributes:
        epoch: the number of the present or next one, counted from 0.
    """

    _generators = Generators()

    def __init__(self, batches: Iterable[T] | Callable[[int], Iterable[T]]) -> None:
        if isinstance(batches, Iterator) or not (callable(batches) or isinstance(batches, Iterable)):
            raise ConfigError(
                "ResumableLoader takes a loader, or a function of the epoch that returns one; it got "
                f"{type(batches).__name__}, which cannot be iterated again"
            )
        if type(self) is ResumableLoader and type(batches).__module__.startswith("torch.utils.data"):
            raise ConfigError("of a DataLoader of torch, ringreduce.torch.ResumableLoader keeps the place")
        self._batches = batches
        self.epoch = 0
        self._given = 0  # batches of this epoch that the program has
        self._checksum = 0  # of these
        self._seed: int | None = None  # of the loader's random numbers; None: the epoch has not begun
        self._own: Any = None  # states of the loader's own generators then
        self._at: Any = None  # their state between batches
        self._world = (0, 1)  # rank and size at that time
        self._goes_on = False  # in the next iteration
        self._iteration = 0  # the last one's number; only that one gives batches

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        self._iteration += 1
        mine = self._iteration
        if self._seed is not None and not self._goes_on:
            self._end()  # the program has left it
        at = self._at if self._goes_on else None
        self._goes_on = False
        if self._seed is not None and self._world != rank_and_size():
            self._divide_anew()
            at = None
        if self._own is not None:
            self._set_own_states(self._own)
        if self._seed is None:
            self._seed = self._generators.draw()
            self._own = self._own_states()
            self._world = rank_and_size()
        with self._generators.restored():
            self._generators.seed(self._seed)
            self._at = self._generators.read()
        batches = self._rest((lambda: None) if at is None else partial(self._generators.write, at))
        while True:
            with self._generators.restored():
                self._generators.write(self._at)
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                finally:
                    self._at = self._generators.read()
            self._given += 1
            yield batch
            if self._iteration != mine:
                raise ConfigError("a ResumableLoader was iterated again, or loaded a state, within an iteration of it")
        self._end()

    def _divide_anew(self) -> None:
        """Go on among other ranks than those that have begun the epoch, with random numbers of their own.

        Raises:
            ConfigError: that is not possible.
        """
        self._require_fit(self.place(), same_ranks=False)
        self._seed = self._own = None

    def _end(self) -> None:
        self.epoch += 1
        self._given = self._checksum = 0
        self._seed = self._own = self._at = None

    def _own_states(self) -> Any:
        """Return the states of the loader's own generators."""

    def _set_own_states(self, states: Any) -> None:
        pass

    def _of_epoch(self) -> Iterable[T]:
        if callable(self._batches):
            return self._batches(self.epoch)
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(self.epoch)
        return self._batches

    def _rest(self, skipped: Callable[[], None]) -> Iterator[T]:
        """Yield the batches that the program does not have; call ``skipped`` before them."""
        batches = iter(self._of_epoch())
        before = 0
        for batch in islice(batches, self._given):
            before = checksum(batch, before)
        self._require_same(before)
        skipped()
        for batch in batches:
            self._checksum = checksum(batch, self._checksum)
            yield batch

    def _require_same(self, before: int) -> None:
        if before != self._checksum:
            raise ConfigError(
                f"the loader cannot go on after batch {self._given} of epoch {self.epoch}: the batches before it are "
                "others than before the stop. Their order has to depend on nothing but the epoch and the generators of "
                "the process: give it a seed of the epoch, or give ResumableLoader a function of the epoch"
            )

    # ---- what is kept ----

    def place(self) -> dict[str, Any]:
        """Return this rank's place in the data, without its generators."""
        rank, ranks = self._world
        return {"epoch": self.epoch, "given": self._given, "checksum": self._checksum, "rank": rank, "ranks": ranks}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's place in the data, with its generators."""
        at = None
        if self._at is not None:
            with self._generators.restored():
                self._generators.write(self._at)
                at = self._generators.state_dict()
        own = self._own_states() if self._seed is None and self._own is None else self._own
        return {**self.place(), "seed": self._seed, "own": own, "at": at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state in the next iteration.

        Args:
            state: from `state_dict` of this rank; between epochs, of any.

        Raises:
            ConfigError: in the middle of an epoch, it is of another rank or number of ranks; or it is no such state.
        """
        missing = sorted({*self.state_dict()} - set(state))
        if missing:
            raise ConfigError(f"this is no state of such a ResumableLoader: it lacks {', '.join(missing)}")
        self._require_fit(state, (state["rank"], state["ranks"]) == rank_and_size())
        self.go_on(state)

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Load a state without `load_state_dict`'s checks, as the ranks may still change."""
        self._iteration += 1
        self.epoch = state["epoch"]
        self._given = state["given"]
        self._checksum = state["checksum"]
        self._seed = state["seed"]
        self._own = state["own"]
        self._world = state["rank"], state["ranks"]
        self._at = None
        if state["at"] is not None:
            with self._generators.restored():
                self._generators.load_state_dict(state["at"])
                self._at = self._generators.read()
        self._goes_on = True

    def taken_over(self, everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state from which this rank resumes after ranks have changed: rank 0's place, given all places.

        Raises:
            ConfigError: on all ranks, if one of them cannot.
        """
        there = everyone[0]
        known = [{**each, "checksum": 0} for each in everyone]
        expected = [{**known[0], "rank": rank, "ranks": len(everyone)} for rank in range(len(everyone))]
        furthest = max(each["given"] for each in everyone)
        self._require_fit({**there, "given": furthest}, known == expected)
        rank, size = rank_and_size()
        mine = self.state_dict()
        new = {**there, "seed": None, "own": None, "at": None, "rank": rank, "ranks": size}
        return mine if known[rank] == expected[rank] else new

    def _require_fit(self, state: Mapping[str, Any], same_ranks: bool) -> None:
        """Raise a ConfigError if a state cannot be resumed, as the ranks are not the ``same_ranks``."""
        if state["given"] and not same_ranks:
            raise ConfigError(
                f"the loader cannot go on in the middle of epoch {state['epoch']}, which {state['ranks']} ranks had "
                f"begun: there are {rank_and_size()[1]}, or some are new, or have lost their parts of the commit, and "
                "each rank's part of the data is its own. Start as many ranks again, or divide the data by the "
                "DistributedSampler of ringreduce.torch"
            )


def is_loader(value: Any) -> bool:
    """Return whether an object gives batches and keeps its place: it can be iterated, and has a state."""
    has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    is_batches = isinstance(value, Iterable) and not isinstance(value, Mapping)
    kinds = {f"{each.__module__}.{each.__qualname__}" for each in type(value).__mro__}
    return has_state and is_batches and not kinds & _NO_LOADERS


def checksum(batch: Any, before: int = 0) -> int:
    """Return a checksum, of 32 bits, of a batch.

    Of all numbers and text; of arrays' dtypes, shapes and elements at both ends; of what other objects show by
    ``repr``, without addresses.

    Args:
        batch: arrays of any framework in host memory, numbers, text, and containers of these.
        before: the checksum of earlier batches.
    """
    if isinstance(batch, Mapping):
        batch = [part for item in sorted(batch.items(), key=lambda item: str(item[0])) for part in item]
    if isinstance(batch, (list, tuple)) and {*map(type, batch)} - {int}:
        for each in batch:
            before = checksum(each, before)
        return before
    if batch is None or isinstance(batch, (str, bytes, int, float, list, tuple)):
        return zlib.crc32(repr(batch).encode(), before)
    try:
        array = np.asarray(batch)
    except (TypeError, ValueError, RuntimeError):  # in a device's memory, of a dtype that NumPy lacks, or no array
        kind = type(batch).__name__
        if not hasattr(batch, "tolist"):
            return zlib.crc32(kind.encode(), before)
        flat = batch.reshape(-1)
        return zlib.crc32(f"{kind} {flat[:_FEW].tolist()} {flat[-_FEW:].tolist()}".encode(), before)
    before = zlib.crc32(f"{array.dtype} {array.shape}".encode(), before)
    if array.dtype.hasobject:
        return zlib.crc32(re.sub(" at 0x[0-9a-f]+", "", repr(batch)).encode(), before)
    flat = array.reshape(-1)
    return zlib.crc32(np.concatenate([flat[:_FEW], flat[-_FEW:]]).tobytes(), before)
