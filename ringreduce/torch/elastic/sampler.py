"""A sampler whose epoch goes on where it was when the ranks change."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from ringreduce.training.data.epochs import EpochDivision
from ringreduce.training.data.subsets import Subsets


class ElasticSampler(EpochDivision, Sampler[int]):
    """Divides the rest of an epoch among the present ranks; see `ringreduce.training.data.epochs.EpochDivision`."""

    def __iter__(self) -> Iterator[int]:
        Subsets.divides(self.dataset)
        return super().__iter__()

    def shuffled(self, seed: int) -> list[int]:
        """Return all indices in the random order of a seed, the same on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        return list(torch.randperm(len(self.dataset), generator=generator, device="cpu").tolist())
