"""Samples by speed: how many of each global batch every rank gets, from how long it took for those before.

A rank that is always slow sets the pace of all, whatever they do while they wait for it. With fewer samples it does
not. The mean over a global batch is then a weighted mean of the ranks' means; see `GradientReducer.reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident, main_thread
from typing import Literal, TypeVar
from weakref import WeakSet

from ringreduce.common.errors import ConfigError
from ringreduce.common.instruments import Pace
from ringreduce.engine import Engine
from ringreduce.runtime import global_process_set, is_initialized, rank_and_size

T = TypeVar("T")

#: What becomes of samples that do not divide evenly among the ranks.
Ends = Literal["repeat", "drop", "uneven"]

_AT_MOST = 0.25  # of its share, a rank gets more or less from one epoch to the next
_AT_LEAST = 0.05  # smaller changes are within the noise of measurements


class Division:
    """The shares of all ranks, equal at first, and renewed from epoch to epoch.

    It depends on nothing but its arguments, which are the same on all ranks.

    Attributes:
        shares: the part of each rank in all samples; their sum is 1.
    """

    def __init__(self) -> None:
        self.shares: list[float] = []
        self._speeds: list[float] = []
        self._seen: Sequence[Pace] = ()

    def renew(self, paces: Sequence[Pace], size: int, given: Sequence[int] = ()) -> list[float]:
        """Return the shares of the next epoch.

        Speeds are averages of what was measured since the last time and of the speeds before. Shares move to those in
        proportion to speeds, so far that none changes by more than a quarter; not at all for less than 5 %.

        Args:
            paces: of all ranks, up to now; empty: nothing was measured.
            size: the number of ranks.
            given: how many samples of each step each rank had since the last time; empty: in proportion to shares.
        """
        seen = self._seen
        self._seen = list(paces)
        if len(self.shares) != size or (seen and (not paces or paces[0].steps < seen[0].steps)):  # another world
            self.shares = [1.0 / size] * size
            self._speeds = []
            seen = ()
        new = [each - old for each, old in zip(paces, seen, strict=True)] if seen else paces
        if not new or not all(each.steps and each.own_s > 0.0 for each in new):
            return self.shares
        had = _normalised(given) if len(given) == size else self.shares
        speeds = _normalised([part * each.steps / each.own_s for part, each in zip(had, new, strict=True)])
        if self._speeds:
            speeds = _normalised([(old + each) / 2 for old, each in zip(self._speeds, speeds, strict=True)])
        self._speeds = speeds
        largest = max(abs(speed / share - 1.0) for speed, share in zip(speeds, self.shares, strict=True))
        if largest >= _AT_LEAST:
            part = min(1.0, _AT_MOST / largest)
            moved = [old + part * (new - old) for old, new in zip(self.shares, speeds, strict=True)]
            least = 1 / sum(given) if given else 0.0  # a sample: who gets no less is to get more again soon
            self.shares = _normalised([max(each, least) for each in moved])
        return self.shares


def _normalised(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [each / total for each in values]


def divided(count: int, shares: Sequence[float]) -> list[int]:
    """Divide a number of samples by shares: whole numbers, each at least 1 if there are so many."""
    exact = [count * share for share in shares]
    counts = [int(each) for each in exact]
    by_rest = sorted(range(len(shares)), key=lambda rank: counts[rank] - exact[rank])
    for rank in by_rest[: count - sum(counts)]:
        counts[rank] += 1
    while count >= len(shares) and 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts


class Shares:
    """Shares of the ranks of one engine, which keeps it; it is there once a program has asked for shares.

    Attributes:
        division: for programs that ask for `share`.
        batches: samplers by speed.
    """

    def __init__(self) -> None:
        self.division = Division()
        self.batches: WeakSet[Batches] = WeakSet()


class Compiled:
    """What the programs that were compiled for the ranks of one engine do; the engine keeps it.

    Attributes:
        unweighted: whether the averages of some have no weights.
    """

    unweighted = False


def is_by_speed(engine: Engine) -> bool:
    """Return whether a sampler by speed has begun to give out batches."""
    return bool(_begun(engine))


def _begun(engine: Engine) -> list[Batches]:
    return [each for each in engine.attached[Shares].batches if each.counts] if Shares in engine.attached else []


def counts_of(engine: Engine, *, again: bool = False) -> list[int] | None:
    """Return how many samples each rank has in this step, as a sampler by speed knows; None: there is none.

    Args:
        engine: of the ranks.
        again: whether it was called in this step before.

    Raises:
        ConfigError: it does not know, or there are several. On all ranks.
    """
    begun = _begun(engine)
    if not begun:
        return None
    if len(begun) == 1 and (begun[0].left or again) and begun[0].ends != "uneven":
        begun[0].left -= not again
        return begun[0].counts
    raise ConfigError(
        'with shares="speed" the ranks have different numbers of samples, and their averages need these numbers: say '
        "step(samples=len(batch)). A sampler knows them by itself as long as it is the only one of this kind, its ends "
        'are not "uneven", and each of its batches is for one step; delete it if it is not used any more'
    )


class Batches:
    """Divides each global batch among the ranks: evenly, or by speed.

    Args:
        size: of a batch, on average over the ranks. A global batch has so many samples for each rank.
        by_speed: whether ranks get samples in proportion to their speeds.
        ends: of the last global batch. ``"repeat"``: it is filled up with the first samples; ``"drop"``: it is skipped
            unless it is whole; ``"uneven"``: it is smaller, and may have no sample for some ranks.

    Attributes:
        counts: how many samples of a whole global batch each rank has; empty: nothing was given out yet.
        left: how many steps of the epoch still have batches, as far as `counts_of` was asked.
        size, ends: the arguments.
    """

    def __init__(self, size: int, ends: Ends, *, by_speed: bool) -> None:
        self.counts: list[int] = []
        self.left = 0
        self.ends = ends
        self.size = size
        self._by_speed = by_speed
        self._division = Division()

    def renew(self) -> None:
        """Divide the next epoch anew; to be called on all ranks after the same steps."""
        _, ranks = rank_and_size()
        engine = global_process_set.engine if is_initialized() else None
        if engine is None or not self._by_speed:
            self._division.renew((), ranks)
            return
        engine.attached[Shares].batches.add(self)
        self._division.renew(_paces_of(engine), ranks, self.counts)

    def _settle(self) -> None:
        """Divide anew if there is another world than before."""
        engine = global_process_set.engine if is_initialized() else None
        known = engine is None or not self._by_speed or self in engine.attached[Shares].batches
        if not known or len(self._division.shares) != rank_and_size()[1]:
            self.renew()

    def of(self, order: Sequence[int], start: int = 0) -> Iterator[list[int]]:
        """Yield this rank's batches of samples in an order, but the first ``start``; both are the same on all ranks."""
        me, ranks = rank_and_size()
        self._settle()
        if self._by_speed and is_initialized() and global_process_set.engine.attached[Compiled].unweighted:
            raise ConfigError(
                'a step of JAX was compiled without weights, before the sampler with shares="speed" gave out a batch: '
                "compile it after the first batch, or give it samples"
            )
        whole = self.size * ranks
        self.counts, self.left = divided(whole, self._division.shares), self.number(len(order) - start)
        for place in range(start, len(order), whole):
            batch = list(order[place : place + whole])
            counts = self.counts
            if len(batch) < whole:
                if self.ends == "drop":
                    return
                if self.ends == "repeat":
                    batch += [order[number % len(order)] for number in range(whole - len(batch))]
                counts = divided(len(batch), self._division.shares)
            begin = sum(counts[:me])
            if counts[me]:
                yield batch[begin : begin + counts[me]]

    def number(self, count: int) -> int:
        """Return how many batches of so many samples this rank gets."""
        me, ranks = rank_and_size()
        rest = count % (self.size * ranks)
        whole = count // (self.size * ranks)
        if self.ends == "uneven" and rest:
            self._settle()
            return whole + bool(divided(rest, self._division.shares)[me])
        return whole + bool(rest and self.ends == "repeat")


def share() -> float:
    """Return which part of all samples this rank is to take in the epoch that begins now. Local.

    For programs with loaders of their own: all ranks call it once before each epoch, and say ``samples`` in each step.
    `DistributedSampler` does both by itself. Parts are equal at first, and 1 together; see `Division.renew`.

    Returns:
        1 / size if nothing was measured yet, or there is no world.
    """
    rank, size = rank_and_size()
    if not is_initialized():
        return 1.0
    engine = global_process_set.engine
    shares: Shares = engine.attached[Shares]
    return shares.division.renew(_paces_of(engine), size)[rank]


def _paces_of(engine: Engine) -> Sequence[Pace]:
    """Return what was measured of all ranks, the same on ranks that have made the same steps.

    With staleness a rank may not have heard of the last report that it has sent, while others have.
    """
    tally = engine.tally
    pacemaker = engine.pacemaker
    lags = pacemaker.lags and pacemaker.number > 0
    return tally.earlier if lags and tally.reports >= pacemaker.number else tally.paces


def get_batch(following: Callable[[Iterator[T]], T], iterator: Iterator[T]) -> T:
    """Return the next batch of a loader; on the main thread, count how long the program waits for it."""
    if get_ident() != main_thread().ident or not global_process_set.connected:  # other threads read ahead
        return following(iterator)
    return global_process_set.engine.pacemaker.load(following, iterator)


def loading(batches: Iterable[T]) -> Iterator[T]:
    """Iterate over batches, and count how long the program waits for them: a reason why a rank is slow.

    Torch's ``DataLoader`` needs no wrapper: once `ringreduce.torch` is imported, waiting for it is counted by itself.

    Args:
        batches: a loader of any framework; the main thread iterates over it.
    """
    iterator = iter(batches)
    while True:
        try:
            batch = get_batch(next, iterator)
        except StopIteration:
            return
        yield batch
