"""Each rank its share of the data: samplers for datasets with a length, shards of whatever else can be iterated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from ringreduce.common.arguments import whole_number
from ringreduce.common.call_sites import place_of, program_stack
from ringreduce.common.errors import ConfigError
from ringreduce.runtime import count as count_progress
from ringreduce.runtime import rank_and_size
from ringreduce.training.data.repeated_epochs import RepeatedEpochs
from ringreduce.training.data.resumable import checksum
from ringreduce.training.data.shares import Batches, Ends
from ringreduce.training.data.subsets import Subsets


class DistributedSampler(Sampler[Any]):
    """Divides a dataset among the ranks, differently in each epoch, for a ``DataLoader(dataset, sampler=...)``.

    As torch's sampler of this name, but that the ranks need not be given, and that ranks may have different numbers of
    samples. Ranks are counted when an iteration begins. Without a world there is one.

    Args:
        dataset: has a length; the same on all ranks. If it is a `torch.utils.data.Subset` of other indices on each
            rank, rank 0 warns of it before one of the next steps.
        shuffle: whether each epoch has an order of its own; must agree.
        seed: of these orders; must agree.
        ends: what becomes of samples that do not divide evenly; must agree. ``"repeat"``: some ranks get one of the
            first samples once more, so that all have equally many. ``"drop"``: they are skipped. ``"uneven"``: some
            ranks get one more, for programs that `join` at their ends, or that weight what they average
            (`weighted_average`).
        shares: ``"even"``, or ``"speed"``: ranks get samples in proportion to their measured speed, divided anew by
            `set_epoch`; see docs/slow.md. Must agree.
        batch_size: of a batch, on average over the ranks; then the sampler yields lists of samples, for
            ``DataLoader(dataset, batch_sampler=...)``. All ranks together have ``batch_size`` times their number in
            each step, whatever their shares, and ``ends`` is about the last step. Needed by ``"speed"``. Must agree.

    Raises:
        ConfigError: the dataset has no length, or an argument makes no sense.

    Attributes:
        epoch: which one; see `set_epoch`.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        ends: Ends = "repeat",
        *,
        shares: Literal["even", "speed"] = "even",
        batch_size: int | None = None,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"DistributedSampler needs a dataset with a length, got a {type(dataset).__name__}; for data that can "
                "only be iterated use Shard"
            )
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = whole_number("seed", seed, 0)
        self.epoch = 0
        self._repeated: RepeatedEpochs | None = RepeatedEpochs()
        ends = _checked(ends)
        if shares not in ("even", "speed"):
            raise ConfigError(f'shares is "even" or "speed", got {shares!r}')
        if shares == "speed" and batch_size is None:
            raise ConfigError(
                'shares="speed" makes batches of different sizes: say DistributedSampler(..., batch_size=...), and '
                "give it to DataLoader(batch_sampler=...)"
            )
        self._start = 0  # so many samples of the next iteration's order are left out, which the ranks have had
        self._gives_batches = batch_size is not None
        size = 1 if batch_size is None else whole_number("batch_size", batch_size, 1)
        self._batches = Batches(size, ends, by_speed=shares == "speed")

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins, so that it has another order, and new shares; the same on all ranks."""
        self.epoch = whole_number("epoch", epoch, 0)
        self._repeated = None  # the program knows of epochs
        self._batches.renew()

    def start_at(self, count: int) -> None:
        """Leave out the first samples in the next iteration; the ranks that there are then divide the rest.

        Args:
            count: how many samples all ranks together have had of this epoch.
        """
        self._start = count

    @property
    def samples_each(self) -> int:
        """Of how many samples of the order each rank's item is, on average over the ranks: a sample, or a batch."""
        return self._batches.size

    def __iter__(self) -> Iterator[Any]:
        Subsets.divides(self.dataset)
        given = self._given()
        return self._repeated.watched(given) if self.shuffle and self._repeated is not None else given

    def _given(self) -> Iterator[Any]:
        order = self._order()
        start = self._start
        self._start = 0
        for batch in self._batches.of(order, start):
            item = batch if self._gives_batches else batch[0]
            yield item
            count_progress(samples=len(item) if isinstance(item, list) else 1)

    def _order(self) -> list[Any]:
        """Return all samples in the order of this epoch, the same on all ranks."""
        count = len(self.dataset)
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(count, generator=generator, device="cpu").tolist()

    def __len__(self) -> int:
        return self._batches.number(len(self.dataset))


class Shard(IterableDataset[Any]):
    """This rank's share of what can only be iterated: lines of a file, records of a stream.

    Every rank reads all of it and keeps one sample of as many as there are ranks. The worker processes of a DataLoader
    divide this rank's share among them.

    Args:
        source: yields the same samples in the same order on all ranks, each time it is iterated. If it is divided among
            the ranks already, rank 0 warns of it before one of the next steps of a `DistributedOptimizer`: the ranks
            compare a checksum of the first samples, as many as there are ranks, also those that a worker process has
            read. They do so for the first Shard that is made, or in this process iterated, after `init`. Of arrays it
            takes the elements at both ends.
        ends: as for `DistributedSampler`; with ``"repeat"`` the last samples of the source are the ones repeated, and a
            source shorter than the number of ranks is repeated as often as need be.
    """

    def __init__(self, source: Iterable[Any], ends: Ends = "repeat") -> None:
        self._source = source
        self._ends = _checked(ends)
        self._place = place_of(program_stack())
        self._checksum = torch.full((1,), -1, dtype=torch.int64, device="cpu")
        self._checksum.share_memory_()  # type: ignore[no-untyped-call]  # with worker processes, which write it
        self._compare()

    def _compare(self) -> None:
        Subsets.compare("stream", self._checksum.item, self._place)  # type: ignore[arg-type]  # a whole number

    def __iter__(self) -> Iterator[Any]:
        (me, ranks), worker = rank_and_size(), get_worker_info()
        mine, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is None:
            self._compare()
        samples = iter(self._source)
        last: list[Any] = []
        number = 0
        while group := list(islice(samples, ranks)):
            if number == mine == 0 and self._checksum.item() < 0:
                self._checksum.fill_(checksum(group))
            if len(group) < ranks:
                if self._ends == "drop":
                    return
                if self._ends == "repeat":
                    before = (last + group)[-ranks:]
                    group += [before[place % len(before)] for place in range(ranks - len(group))]
            if number % workers == mine and me < len(group):
                yield group[me]
            last = group
            number = number + 1


def _checked(ends: Ends) -> Ends:
    if ends not in ("repeat", "drop", "uneven"):
        raise ConfigError(f'ends is "repeat", "drop" or "uneven", got {ends!r}')
    return ends
