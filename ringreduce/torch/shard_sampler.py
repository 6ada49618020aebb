"""Each rank its share of any sampler's draws."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import get_ident, main_thread
from typing import Any

import torch

from ringreduce.common.call_sites import place_of, program_stack
from ringreduce.common.errors import ConfigError
from ringreduce.torch.data import DistributedSampler
from ringreduce.training.data.resumable import checksum
from ringreduce.training.data.shares import Ends
from ringreduce.training.data.subsets import Subsets


class ShardSampler(DistributedSampler):
    """This rank's share of another sampler's draws: weighted samples, or batches of samples of like lengths.

    Every rank draws all of an epoch, and takes every P-th index or batch. Give it to a `DataLoader` in place of the
    other sampler, as ``sampler=`` or ``batch_sampler=``. Batches stay whole: a step has P of them.

    All ranks must draw alike. Samplers whose ``generator`` is None (all random ones of torch), also that inside a batch
    sampler (its ``sampler``), get one seeded by seed plus epoch; the global generators do not matter. Others must use a
    seed that all ranks share. Before some steps of a `DistributedOptimizer` the ranks compare the draws of the first
    ShardSampler in an epoch; rank 0 warns if they differ.

    Args:
        sampler: an iterable of indices, or of lists of indices, that ends and can be iterated again; for one that does
            not end use `Shard`. Its length, if any, is that of an epoch.
        seed: of its draws; must agree.
        ends: as for `DistributedSampler`, of indices or batches; must agree.

    Raises:
        ConfigError: the sampler cannot be iterated again, or an argument makes no sense.

    Attributes:
        epoch: which one; see `set_epoch`.
    """

    def __init__(self, sampler: Iterable[Any], seed: int = 0, ends: Ends = "repeat") -> None:
        if not hasattr(sampler, "__iter__") or isinstance(sampler, Iterator):
            raise ConfigError(
                "ShardSampler needs a sampler, or another iterable of indices or batches that can be iterated in each "
                f"epoch, got a {type(sampler).__name__}; for a dataset use DistributedSampler"
            )
        super().__init__((), seed=seed, ends=ends)
        self.dataset = sampler  # type: ignore[assignment]  # it may have no length
        self.shuffle = any(
            getattr(each, "generator", self) is None or hasattr(each, "set_epoch") for each in self.samplers()
        )
        self._place = place_of(program_stack())
        self._checksum = [-1]  # of the last draws; the engine keeps this, not the sampler with its data

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, for other draws; the same on all ranks. Calls the sampler's ``set_epoch``."""
        super().set_epoch(epoch)
        for each in self.samplers():
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def samplers(self) -> Iterator[Any]:
        """Yield the sampler, and those inside it."""
        sampler: Any = self.dataset
        while sampler is not None:
            yield sampler
            sampler = getattr(sampler, "sampler", None)

    def _order(self) -> list[Any]:
        seeded = [each for each in self.samplers() if getattr(each, "generator", self) is None]
        for each in self.samplers():
            Subsets.divides(getattr(each, "data_source", None))
        for each in seeded:
            each.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        try:
            order: list[Any] = list(self.dataset)  # type: ignore[call-overload]  # see __init__
        finally:
            for each in seeded:
                each.generator = None
        # Threads that read ahead, and ranks with fewer samples, may be an epoch ahead of other ranks' steps.
        known = self._checksum
        if known[0] < 0 or (self._batches.ends != "uneven" and get_ident() == main_thread().ident):
            known[0] = checksum(order)
        Subsets.compare("order", lambda: known[0], self._place)
        return order
