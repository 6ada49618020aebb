"""A job that trains on what loaders give, and keeps a checkpoint in the middle; or one that goes on from these.

    stopped_loaders.py run FOLDER SEED...      # trains to the end, and keeps a checkpoint, for each seed
    stopped_loaders.py go-on FOLDER SEED...    # goes on from each, among any number of ranks
    stopped_loaders.py die FOLDER SEED         # the last rank dies in the middle, and the others go on

Each seed draws loader, workers, length, batch size and place of the stop. The second job must get what the first one
got after its checkpoint: the same samples, in the same order, with the same random numbers; among other ranks, each
sample that the first one had not had, once. What cannot go on has to be refused.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data import DistributedSampler as TorchsSampler

import ringreduce.torch as hvd
from ringreduce.common.errors import ConfigError

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    StatefulDataLoader = None  # type: ignore[assignment,misc]

EPOCHS = 3
#: A sample as the program got it: its number, and three random numbers that were drawn as it was loaded.
Sample = tuple[int, float, float, float]


class Samples(Dataset[Sample]):
    """Numbers of samples, with random numbers of the generators that a worker has."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if index >= self.count:
            raise IndexError(index)
        return int(index), random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))


class Stream(IterableDataset[Sample]):
    """The same, of this rank, divided by its workers; shuffled by an epoch that it is told."""

    def __init__(self, count: int) -> None:
        self.samples = Samples(count)
        self.rank, self.size = hvd.rank(), hvd.size()
        self.epoch = torch.zeros(1, dtype=torch.int64)
        self.epoch.share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.epoch[0] = epoch

    def __iter__(self) -> Iterator[Sample]:
        info = torch.utils.data.get_worker_info()
        order = np.random.default_rng([7, int(self.epoch)]).permutation(len(self.samples))
        order = order[: len(order) - len(order) % self.size][self.rank :: self.size]
        for index in order if info is None else order[info.id :: info.num_workers]:
            yield self.samples[index]


def _mine(count: int) -> list[int]:
    """Return this rank's samples; all ranks have equally many."""
    return list(range(hvd.rank(), count - count % hvd.size(), hvd.size()))


class ByLength(Sampler[list[int]]):
    """Batches of samples of about one length, in an order that it draws from the generator of torch."""

    def __init__(self, count: int, batch_size: int) -> None:
        numbers = _mine(count)
        self.batches = [numbers[place : place + batch_size] for place in range(0, len(numbers), batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        for place in torch.randperm(len(self.batches)).tolist():
            yield self.batches[place]

    def __len__(self) -> int:
        return len(self.batches)


@dataclass(frozen=True)
class Case:
    """What a seed draws.

    Attributes:
        draws: whether the random numbers of samples come again, too.
        elsewhere: whether other numbers of ranks may go on.
    """

    kind: str
    way: str
    count: int
    batch_size: int
    workers: int
    persistent: bool
    seeded: bool
    stop: int
    ends: str

    @classmethod
    def of(cls, seed: int) -> Case:
        draw = random.Random(seed)
        kind = draw.choice(KINDS)
        if kind == "stateful" and StatefulDataLoader is None:
            kind = "shuffled"
        return cls(
            kind=kind,
            way=draw.choice(["checkpoint", "disk"]),
            count=draw.randrange(20, 50),
            batch_size=draw.choice([1, 2, 3]),
            workers=draw.choice([0, 0, 2]),
            persistent=draw.random() < 0.5 and kind not in ("shard", "stream"),  # whose workers' numbers go on
            seeded=draw.random() < 0.5,
            stop=draw.randrange(1, 14),
            ends=draw.choice(["repeat", "drop"]),
        )

    @property
    def draws(self) -> bool:
        if self.kind in ("elastic", "stateful"):
            return False  # a new iteration of the loader takes a number of torch's generator
        # Workers begin with new generators; of a stream they draw what they drew before the stop again.
        again = self.kind in ("shard", "stream", "function") and not self.persistent
        return self.workers == 0 or again or (self.seeded and self.kind not in ("shard", "stream", "stateful"))

    @property
    def elsewhere(self) -> bool:
        return self.kind.startswith("divided") or self.kind == "elastic"


def _options(case: Case) -> dict[str, Any]:
    if not case.workers:
        return {"collate_fn": list}
    return {"collate_fn": list, "num_workers": case.workers, "persistent_workers": case.persistent}


def _data(case: Case) -> Dataset[Sample]:
    samples = Samples(case.count)
    return hvd.SeededDataset(samples, seed=3) if case.seeded else samples


def _loader(case: Case) -> tuple[Any, Any]:
    """Return a loader of a drawn kind, and what a checkpoint keeps of it."""
    data, options, each = _data(case), _options(case), {"batch_size": case.batch_size}
    mine = torch.utils.data.Subset(data, _mine(case.count))
    if case.seeded:  # outermost, as it sees the indices
        mine = hvd.SeededDataset(torch.utils.data.Subset(Samples(case.count), mine.indices), seed=3)
    if case.kind == "elastic":
        sampler = hvd.elastic.ElasticSampler(data, seed=5)
        return DataLoader(data, sampler=sampler, **each, **options), sampler
    if case.kind == "stateful":
        made = StatefulDataLoader(mine, shuffle=True, **each, **options)
        return made, made
    weights = WeightedRandomSampler([1.0 + n for n in range(case.count)], case.count, replacement=False)
    lengths = torch.utils.data.BatchSampler(RandomSampler(range(case.count)), case.batch_size, drop_last=False)
    makers: dict[str, Callable[[], Any]] = {
        "divided": lambda: DataLoader(
            data, sampler=hvd.DistributedSampler(data, seed=5, ends=case.ends), **each, **options
        ),
        "divided in batches": lambda: DataLoader(
            data, batch_sampler=hvd.DistributedSampler(data, seed=5, ends=case.ends, **each), **options
        ),
        "divided weights": lambda: DataLoader(data, sampler=hvd.ShardSampler(weights, seed=5), **each, **options),
        "divided lengths": lambda: DataLoader(data, batch_sampler=hvd.ShardSampler(lengths, seed=5), **options),
        "torch's": lambda: DataLoader(
            data, sampler=TorchsSampler(data, hvd.size(), hvd.rank(), seed=5), **each, **options
        ),
        "shuffled": lambda: DataLoader(mine, shuffle=True, **each, **options),
        "generator": lambda: DataLoader(
            mine, sampler=RandomSampler(mine, generator=torch.Generator().manual_seed(hvd.rank())), **each, **options
        ),
        "weighted": lambda: DataLoader(
            mine, sampler=WeightedRandomSampler([1.0 + n for n in range(len(mine))], len(mine)), **each, **options
        ),
        "by length": lambda: DataLoader(data, batch_sampler=ByLength(case.count, case.batch_size), **options),
        "shard": lambda: DataLoader(hvd.Shard(Samples(case.count)), **each, **options),
        "stream": lambda: DataLoader(Stream(case.count), **each, **options),
        "function": lambda: lambda epoch: _batches(case, epoch),
    }
    made = hvd.ResumableLoader(makers[case.kind]())
    return made, made


def _batches(case: Case, epoch: int) -> Iterator[list[Sample]]:
    """Yield batches of this rank in plain NumPy."""
    order = np.random.default_rng(epoch).permutation(_mine(case.count))
    for place in range(0, len(order), case.batch_size):
        yield [Samples(case.count)[index] for index in order[place : place + case.batch_size]]


KINDS = (
    "divided",
    "divided weights",
    "divided lengths",
    "divided in batches",
    "elastic",
    "torch's",
    "shuffled",
    "generator",
    "weighted",
    "by length",
    "shard",
    "stream",
    "function",
    "stateful",
)


class Training:
    """Makes steps; each draws a number, as dropout does."""

    def __init__(self, case: Case, folder: Path, *, begins: bool) -> None:
        hvd.elastic.seed(11 if begins else random.SystemRandom().randrange(1 << 30))
        self.case = case
        self.loader, self.kept = _loader(case)
        self.file = folder / "checkpoint.pt"
        self.epoch = self.step = 0
        self.state: Any = None
        if case.way == "disk":
            generators = hvd.elastic.Generators()
            self.state = hvd.elastic.TorchState(loader=self.kept, generators=generators, epoch=0, step=0)
            found = self.state.keep_on_disk(folder)
            assert (found is None) == begins
            self.epoch, self.step = self.state.epoch, self.state.step
        elif not begins:
            values = hvd.load_checkpoint(self.file, loader=self.kept)
            self.epoch, self.step = values["epoch"], values["step"]

    def keep(self) -> None:
        if self.case.way == "disk":
            self.state.epoch, self.state.step = self.epoch, self.step
            self.state.commit()
            self.state._disk.put_last(self.state._commits)  # whole before the job goes on
        else:
            hvd.save_checkpoint(self.file, loader=self.kept, epoch=self.epoch, step=self.step)

    def train(self, begins: bool) -> list[list[Any]]:
        """Return epoch, samples and the step's own number of each step."""
        made = []
        for epoch in range(self.epoch, EPOCHS):
            self.epoch = epoch
            if self.case.kind == "elastic" and self.kept.epoch != epoch:
                self.kept.set_epoch(epoch)
            for number, batch in enumerate(self.loader):
                if self.case.kind == "elastic":
                    self.kept.record_batch(number, self.case.batch_size)
                self.step += 1
                made.append([epoch, batch, random.random() + float(torch.rand(()))])
                if begins and self.step == self.case.stop:
                    self.keep()
        self.epoch = EPOCHS
        if begins and self.step < self.case.stop:
            self.keep()
        return made


def tell(seed: int, case: Case, text: str) -> None:
    if hvd.rank() == 0:
        print(f"seed {seed}: {case.kind}, {case.way}, {case.workers} workers: {text}", flush=True)


def run(folder: Path, seeds: list[int]) -> None:
    for seed in seeds:
        case, place = Case.of(seed), folder / str(seed)
        if hvd.rank() == 0:
            place.mkdir(mode=0o700)
            print(f"seed {seed}: {case}", file=sys.stderr, flush=True)
        hvd.barrier()
        made = hvd.allgather_object(Training(case, place, begins=True).train(begins=True))
        if hvd.rank() == 0:
            (place / "made.json").write_text(json.dumps(made))


def go_on(folder: Path, seeds: list[int]) -> None:
    for seed in seeds:
        case, place = Case.of(seed), folder / str(seed)
        before = json.loads((place / "made.json").read_text())
        same = len(before) == hvd.size()
        refusal = None
        try:
            made = Training(case, place, begins=False).train(begins=False)
        except ConfigError as error:
            refusal = error
        if refusal is not None:
            assert not same, f"seed {seed}, {case}: {refusal}"
            assert not case.elsewhere, f"seed {seed}, {case}: {refusal}"
            tell(seed, case, f"refused: {refusal}")
            continue
        everyone = hvd.allgather_object(json.loads(json.dumps(made)))
        if same and case.kind != "elastic":  # which fills up the last step with what is left
            mine, expected = everyone[hvd.rank()], before[hvd.rank()][case.stop :]
            if not case.draws:
                mine, expected = (_without_draws(each) for each in (mine, expected))
            assert mine == expected, f"seed {seed}, {case}: {mine} and not {expected}"
        else:
            assert case.elsewhere or case.stop > len(before[0]), f"seed {seed}, {case}: was not refused"
            if case.elsewhere:
                _require_rest(seed, case, before, everyone)
        tell(seed, case, "right" if same else "right elsewhere")


def _without_draws(steps: list[Any]) -> list[Any]:
    return [(epoch, [sample[0] for sample in batch]) for epoch, batch, _ in steps]


def _order(case: Case, ranks: list[Any], epoch: int) -> list[int]:
    """Return the samples of an epoch in the order in which they are divided, each where it comes first."""
    if case.kind in ("divided in batches", "divided lengths"):
        parts = zip_longest(*([batch for at, batch, _ in steps if at == epoch] for steps in ranks), fillvalue=())
        found = [sample[0] for step in parts for batch in step for sample in batch]
    else:
        each = ([sample[0] for at, batch, _ in steps if at == epoch for sample in batch] for steps in ranks)
        found = [number for step in zip_longest(*each) for number in step if number is not None]
    return [*dict.fromkeys(found)]


def _ids(steps: list[Any], epoch: int) -> list[int]:
    return [sample[0] for at, batch, _ in steps if at == epoch for sample in batch]


def _require_all(seed: int, case: Case, given: list[int]) -> None:
    """Require that the ranks together got each sample, and none twice but for even shares."""
    most = 4 * case.batch_size
    drops = case.ends == "drop" and case.kind in ("divided", "divided in batches")
    assert case.count - len({*given}) < (most if drops else 1), (seed, case, given)
    assert len(given) - len({*given}) < (1 if drops else most), (seed, case, given)


def _require_rest(seed: int, case: Case, before: list[Any], after: list[Any]) -> None:
    """Require each sample of each epoch once, but those that make shares even; in the order of before."""
    last = before[0][min(case.stop, len(before[0])) - 1][0]
    for epoch in range(last, EPOCHS):
        had = [steps[: case.stop] for steps in before] if epoch == last else []
        _require_all(seed, case, [number for steps in (*had, *after) for number in _ids(steps, epoch)])
        order, again = _order(case, before, epoch), [*_order(case, had, epoch), *_order(case, after, epoch)]
        again = [*dict.fromkeys(again)]
        common = min(len(order), len(again))
        assert order[:common] == again[:common], (seed, case, order, again)


def die(folder: Path, seeds: list[int]) -> None:
    """Train in an elastic loop; the last rank dies after a commit. Each rank writes down what it had at each commit."""
    case = Case.of(seeds[0])
    hvd.elastic.seed(11)
    loader, kept = _loader(case)
    state = hvd.elastic.TorchState(loader=kept, epoch=0, step=0)
    begun = hvd.size()
    with (folder / f"had-{hvd.rank()}").open("w") as had:

        @hvd.elastic.run
        def train(state: Any) -> None:
            for epoch in range(state.epoch, EPOCHS):
                state.epoch = epoch
                if case.kind == "elastic" and kept.epoch != epoch:
                    kept.set_epoch(epoch)
                for number, batch in enumerate(loader):
                    hvd.barrier()
                    if case.kind == "elastic":
                        kept.record_batch(number, case.batch_size)
                    state.step += 1
                    state.commit()
                    print(json.dumps([epoch, batch, 0.0]), file=had, flush=True)
                    if state.step == case.stop and hvd.rank() == begun - 1:
                        os.kill(os.getpid(), signal.SIGKILL)

        train(state)
    steps = [list(map(json.loads, path.read_text().splitlines())) for path in sorted(folder.glob("had-*"))]
    before = [each[: case.stop] for each in steps]
    after = [each[case.stop :] for each in steps[: hvd.size()]]
    if hvd.size() == begun:  # The training has fewer steps, so no rank has died.
        assert state.step < case.stop
        tell(seeds[0], case, "right")
        return
    assert len(before[-1]) == case.stop == len(steps[-1])
    for epoch in range(EPOCHS):
        _require_all(seeds[0], case, [n for each in (*before, *after) for n in _ids(each, epoch)])
    tell(seeds[0], case, "right elsewhere")


def main() -> None:
    what, folder, *seeds = sys.argv[1:]
    hvd.init()
    {"run": run, "go-on": go_on, "die": die}[what](Path(folder), list(map(int, seeds)))


if __name__ == "__main__":
    main()
