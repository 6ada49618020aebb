"""Epochs that the ranks divide, and divide again when the ranks change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np

from ringreduce.common.arguments import whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.runtime import rank_and_size


class EpochDivision:
    """Divides the rest of an epoch among the present ranks.

    Every rank gets the same number of indices: the last few may be given out twice. The program records which it has
    processed, with `record_batch`; a `ringreduce.elastic.handlers.HandlingState` and `ringreduce.torch.save_checkpoint`
    collect these from all ranks. Without a world there is one rank. Subclasses say how an epoch is shuffled.

    Args:
        dataset: has a length; the same on all ranks.
        shuffle: whether each epoch has an order of its own; the same on all ranks.
        seed: of these orders; the same on all ranks.

    Raises:
        ConfigError: the dataset has no length, or an argument, here or of a method, makes no sense.

    Attributes:
        epoch: which one.
        processed_indices: of this epoch, by any rank as far as is known here.
        remaining_indices: the rest when the epoch was divided last, in its order, the same on all ranks.
        rank, num_replicas: among how many ranks it was divided, and which of them this is.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        if not hasattr(dataset, "__len__"):
            raise ConfigError(f"ElasticSampler needs a dataset with a length, got a {type(dataset).__name__}")
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = whole_number("seed", seed)
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.remaining_indices: list[int] = []
        self.num_replicas = 1
        self.rank = 0
        self._mine: list[int] = []
        self._news: set[int] = set()  # what this rank has processed and the others do not know
        self._known = 0  # how many were processed when the epoch was divided last
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all indices: after the last one has ended, not when training goes on within one."""
        self.epoch = whole_number("epoch", epoch)
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that a batch of this rank's was processed.

        Args:
            batch_idx: how many batches of the current division came before it.
            batch_size: how many indices a batch has; the last may have fewer.
        """
        batch_idx = whole_number("batch_idx", batch_idx, 0)
        batch_size = whole_number("batch_size", batch_size, 1)
        self.record_indices(self._mine[batch_idx * batch_size : (batch_idx + 1) * batch_size])

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that indices were processed; a tensor or an array of them will do."""
        processed = self._checked(indices)
        self.processed_indices |= processed
        self._news |= processed

    def news(self) -> set[int]:
        """Return what this rank has processed since it was asked last."""
        news = self._news
        self._news = set()
        return news

    def learn(self, processed: set[int]) -> None:
        """Record what other ranks have processed; the rest stays divided as it is."""
        self.processed_indices |= processed
        self._known = len(self.processed_indices)

    def progress(self) -> tuple[int, bytes]:
        """Return the epoch, and a bit for each index: whether it was processed, as far as is known here.

        Millions of them go to thousands of ranks.
        """
        processed = np.zeros(len(self.dataset), bool)
        processed[list(self.processed_indices)] = True
        return self.epoch, np.packbits(processed).tobytes()

    def together(self, everyone: Sequence[tuple[int, bytes]]) -> dict[str, Any]:
        """Return the state to load of what ranks have processed, given the progress of all: of rank 0's epoch.

        Raises:
            ConfigError: their datasets have different lengths.
        """
        epoch = everyone[0][0]
        bits = [np.frombuffer(each, np.uint8) for number, each in everyone if number == epoch]
        lengths = {len(each) for each in bits}
        if len(lengths) > 1:
            raise ConfigError(f"the ranks have datasets of different lengths: about {sorted(8 * n for n in lengths)}")
        processed = np.unpackbits(np.bitwise_or.reduce(bits), count=len(self.dataset))
        indices = set(np.flatnonzero(processed).tolist())
        return {"epoch": epoch, "processed_indices": indices, "processed_num": len(indices)}

    def reset(self) -> None:
        """Divide the rest among the present ranks."""
        self._news = set()
        self.rank, self.num_replicas = rank_and_size()
        self._known = len(self.processed_indices)
        left = [place for place in self._order(self.epoch) if place not in self.processed_indices]
        self.remaining_indices = left
        share = -(-len(left) // self.num_replicas)
        # A few ranks get indices a second time, from the start, so that all make the same number of steps.
        padded = [left[place % len(left)] for place in range(share * self.num_replicas)]
        self._mine = padded[self.rank :: self.num_replicas]

    @property
    def num_samples(self) -> int:
        """How many indices this rank gets; the same on all ranks."""
        return len(self._mine)

    @property
    def total_size(self) -> int:
        """How many indices all ranks get together, those that are given out twice counted twice."""
        return self.num_samples * self.num_replicas

    @property
    def processed_num(self) -> int:
        """How many indices of this epoch all ranks have processed, if they are as far as this one."""
        since = len(self.processed_indices) - self._known
        return min(self._known + since * self.num_replicas, len(self.dataset))

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and what and how much of it was processed."""
        processed = set(self.processed_indices)
        return {"epoch": self.epoch, "processed_indices": processed, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, divided among the ranks there are now.

        Args:
            state_dict: what `state_dict` has returned, or Horovod's, which holds only a number: so many indices count
                as processed, the first in the order of the epoch here. (Horovod orders them differently.)
        """
        by_number = "processed_num" in state_dict and "processed_indices" not in state_dict
        form = "processed_num" if by_number else "processed_indices"
        missing = {"epoch", form} - set(state_dict)
        if missing:
            raise ConfigError(f"this is no state of an ElasticSampler; it lacks {', '.join(sorted(missing))}")
        epoch = whole_number("epoch", state_dict["epoch"])
        if by_number:
            processed = set(self._order(epoch)[: whole_number(form, state_dict[form], 0)])
        else:
            processed = self._checked(state_dict[form])
        self.epoch = epoch
        self.processed_indices = processed
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine)

    def __len__(self) -> int:
        return len(self._mine)

    def shuffled(self, seed: int) -> list[int]:
        """Return all indices in the random order of a seed, the same on all ranks."""
        raise NotImplementedError  # subclasses know how

    def _order(self, epoch: int) -> list[int]:
        return self.shuffled(self.seed + epoch) if self.shuffle else list(range(len(self.dataset)))

    def _checked(self, indices: Iterable[int]) -> set[int]:
        # As plain numbers: tensors are equal to nothing but themselves in a set.
        found = {whole_number("an index", each) for each in indices}
        outside = sorted(each for each in found if not 0 <= each < len(self.dataset))
        if outside:
            raise ConfigError(f"there is no index {outside[0]} in a dataset of length {len(self.dataset)}")
        return found
