"""What numbers of samples must do in every binding: a step applies the mean over the samples of all ranks.

All functions are collective and take what makes a `Trainee` of the binding, and some options of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from suites.late_training import Delayed
from suites.trainees import (
    MOMENTUM,
    Make,
    OneProcess,
    assert_equal_on_ranks,
    assert_near,
    assert_raises,
    give_slopes,
    mean,
    slopes,
    start,
    train,
)

from ringreduce import runtime
from ringreduce.common.errors import ConfigError, MismatchError, UnsupportedBufferError
from ringreduce.training.calls.ops import Adasum, Sum
from ringreduce.training.data.shares import Batches

_STEPS = 7

#: What a rank raises that hears of a wrong number, its own or another rank's; no rank waits for one that has raised.
_REFUSALS = ConfigError, MismatchError, UnsupportedBufferError


def _counts(step: int) -> list[int]:
    """Return how many samples each rank has: mostly different ones, once equal ones, and once one rank has none."""
    size = runtime.size()
    if step == 4:
        return [3] * size
    counts = [1 + 2 * rank + (rank == 0) * (step % 3) for rank in range(size)]
    if step == 2 and size > 1:
        counts[-1] = 0
    return counts


def _compare(make: Make, tolerance: float, **options: Any) -> None:
    """Train beside one process that averages over all samples."""
    trainee = make(start(), momentum=MOMENTUM, **options)
    expected = OneProcess(start(), MOMENTUM)
    for step in range(_STEPS):
        counts = _counts(step)
        give_slopes(trainee, step, exact=False)
        trainee.step(counts[runtime.rank()])
        everyone = [slopes(expected.weights, rank, step, exact=False) for rank in range(runtime.size())]
        expected.step(mean(everyone, counts))
        assert_near(trainee, expected.weights, tolerance)
        assert_equal_on_ranks(trainee)


def check_samples(make: Make, **options: Any) -> None:
    """After each step, weights are those of one process with all samples; a rank may have none of a step."""
    _compare(make, 1e-6, bucket_nbytes=32, **options)


def check_samples_of_wires(make: Make, **options: Any) -> None:
    """Weighted averages travel in fewer bits."""
    _compare(make, 0.2, compression="int8", **options)


def _count_alone(make: Make, alone: int, before: int, **options: Any) -> None:
    """Check that all ranks raise an error if one alone says a number, after some steps without."""
    if runtime.size() == 1:
        return
    trainee = make(start(), **options)
    train(trainee, range(before))
    samples = 3 if runtime.rank() == alone else None

    def go_on() -> None:
        for step in range(before, before + 3):  # late averages fail when they are waited for
            give_slopes(trainee, step)
            trainee.step(samples)

    text = assert_raises(go_on, _REFUSALS, f"rank {alone} alone counts its samples")
    assert "waited" not in text, text


def check_missing_numbers(make: Make, **options: Any) -> None:
    """What one rank alone says in its first step is an error on all, whichever rank that is."""
    for alone in (0, runtime.size() - 1):
        _count_alone(make, alone, 0, **options)


def check_late_missing_numbers(make: Make, **options: Any) -> None:
    """So is what it says after steps that all made without."""
    _count_alone(make, runtime.size() - 1, 3, **options)


def check_wrong_numbers(make: Make, **options: Any) -> None:
    """They are an error on all ranks, also where only one rank has one; a world of one checks them, too."""
    last = runtime.size() - 1
    for wrong, right in ((-1, -1), (2.5, 2.5), ("many", "many"), *([(-1, 3)] if last else [])):
        trainee = make(start(), **options)
        give_slopes(trainee, 0)
        samples = wrong if runtime.rank() == last else right
        text = assert_raises(partial(trainee.step, samples), _REFUSALS, f"{wrong!r} is no number of samples")
        assert "samples" in text, text


def check_samples_of_sums(make: Make, **options: Any) -> None:
    """Sums, and what Adasum combines, have no weights."""
    for op in (Sum, Adasum):

        def begin(kind: Any = op) -> None:
            trainee = make(start(), op=kind, **options)
            give_slopes(trainee, 0)
            trainee.step(2)

        text = assert_raises(begin, _REFUSALS, f"{op} with numbers of samples")
        assert "op=Average" in text or "Adasum" in text, text


def check_samples_of_late_averages(make: Make, **options: Any) -> None:
    """They are refused, in the first step and in a later one."""
    for before in (0, 3):
        trainee = make(start(), staleness=1, **options)
        train(trainee, range(before))
        give_slopes(trainee, before)
        text = assert_raises(partial(trainee.step, 3), ConfigError, "late averages have no numbers of samples")
        assert "samples and staleness" in text, text


def check_samples_of_one_late_rank(make: Make, **options: Any) -> None:
    """They are refused on all ranks if one rank alone has some."""
    for before in (0, 3):
        _count_alone(make, runtime.size() - 1, before, staleness=1, **options)


def check_sampler(make: Make, **options: Any) -> None:
    """A sampler that divides by speed says how many samples there are, of late averages, too. Begins new worlds."""
    counts = _counts(0)
    for staleness in (0, 1):
        runtime.shutdown()
        runtime.init()
        trainee: Any = None
        batches = Batches(4, "repeat", by_speed=True)
        for step, _ in enumerate(batches.of(range(4 * runtime.size() * _STEPS))):
            batches.counts = counts
            trainee = trainee or make(start(), staleness=staleness, **options)
            train(trainee, range(step, step + 1), exact=False)
        expected = Delayed(staleness, momentum=0.0, exact=False, counts=counts).train(range(_STEPS))
        assert_near(trainee, expected.weights, 1e-6)
        assert_equal_on_ranks(trainee)
    runtime.shutdown()
    runtime.init()


WEIGHTED_CHECKS: tuple[Callable[..., None], ...] = (
    check_samples,
    check_samples_of_wires,
    check_missing_numbers,
    check_late_missing_numbers,
    check_wrong_numbers,
    check_samples_of_sums,
    check_samples_of_late_averages,
    check_samples_of_one_late_rank,
    check_sampler,
)
