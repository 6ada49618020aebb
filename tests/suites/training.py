"""What every binding of a framework must do: checks that run on all ranks, against one process in float64.

All functions are collective and take what makes a `Trainee` of the binding. Those of `late_training` and
`weighted_training` are for bindings that have these options.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
from suites.trainees import Floats, Make, Named, OneProcess, Trainee, assert_equal_on_ranks, assert_near, assert_raises

from ringreduce import runtime
from ringreduce.common.errors import MismatchError
from ringreduce.runtime.blocking import barrier, broadcast
from ringreduce.training.calls.handles import join
from ringreduce.training.compression.powersgd import PowerSGD

_Pass = tuple[Floats, Floats, bool]  # of a backward pass: the batch, and whether ``extra`` is used

_STEPS = 6
_ROWS = 4  # of each rank, in each step
_BUCKETS = {"bucket_nbytes": 32}  # each parameter has its own
_SHAPES = {"matrix": (5, 3), "bias": (3,), "extra": (3,)}


def _gradients(weights: Named, x: Floats, y: Floats, used: bool) -> dict[str, Floats]:
    """Return those of half the mean, over the rows, of the summed squared error of ``x @ matrix + bias + extra``."""
    error = x @ weights["matrix"] + weights["bias"] + (weights["extra"] if used else 0) - y
    found = {"matrix": x.T @ error / len(x), "bias": error.mean(0)}
    return found | {"extra": error.mean(0)} if used else found


def _sum_of(weights: Named, batches: Sequence[_Pass], ranks: int) -> dict[str, Floats]:
    """Return what the batches give, over the number of ranks."""
    every = [_gradients(weights, *each) for each in batches]
    unused = {name: np.zeros(shape) for name, shape in _SHAPES.items()}
    return {name: np.sum([each.get(name, zeros) for each in every], axis=0) / ranks for name, zeros in unused.items()}


def _values() -> dict[str, Floats]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in _SHAPES.items()}


def _batch(rank: int, step: int) -> tuple[Floats, Floats]:
    rng = np.random.default_rng([rank, step])
    return rng.standard_normal((_ROWS, 5)).astype(np.float32), rng.standard_normal((_ROWS, 3)).astype(np.float32)


def _give(trainee: Trainee, x: Floats, y: Floats, used: bool = True) -> None:
    """Make a backward pass with the gradients of a batch."""
    trainee.give(_gradients(dict(zip(_SHAPES, trainee.weights(), strict=True)), x, y, used))


def _train(trainee: Trainee, steps: range) -> None:
    """Make steps, each with this rank's batch."""
    for step in steps:
        trainee.zero_grad()
        _give(trainee, *_batch(runtime.rank(), step))
        trainee.step()


def _all_batches(ranks: Iterable[int], step: int) -> list[_Pass]:
    return [(*_batch(rank, step), True) for rank in ranks]


def _compare(
    make: Make, made: Callable[[int, int], Sequence[_Pass]], *, suspended: bool = False, **options: Any
) -> None:
    """Train beside one process that makes the backward passes of all ranks.

    Args:
        make: as for all checks.
        made: returns those that a rank makes in a step.
        suspended: whether all but the last of a step are made within no_sync().
        **options: as for all checks.
    """
    trainee = make(_values(), **_BUCKETS, **options)
    expected = OneProcess(_values())
    for step in range(_STEPS):
        *first, (x, y, used) = made(runtime.rank(), step)
        trainee.zero_grad()
        with trainee.no_sync() if suspended else nullcontext():
            for earlier_x, earlier_y, earlier_used in first:
                _give(trainee, earlier_x, earlier_y, earlier_used)
        _give(trainee, x, y, used)
        trainee.step()
        passes = [each for rank in range(runtime.size()) for each in made(rank, step)]
        expected.step(_sum_of(expected.weights, passes, runtime.size()))
        assert_equal_on_ranks(trainee)
    assert_near(trainee, expected.weights)


def check_whole_batch(make: Make, **options: Any) -> None:
    """Weights are those of one process on the batches of all ranks."""
    _compare(make, lambda rank, step: _all_batches([rank], step), **options)


def check_unused(make: Make, **options: Any) -> None:
    """A rank that leaves a parameter out counts as zeros for it."""
    _compare(make, lambda rank, step: [(*_batch(rank, step), (rank + step) % 2 == 0)], **options)


def check_accumulation(make: Make, **options: Any) -> None:
    """Passes add up before a step: declared, within no_sync(), or neither."""

    def halves(rank: int, step: int) -> list[_Pass]:
        x, y = _batch(rank, step)
        return [(x[half::2], y[half::2], True) for half in (0, 1)]

    for declared, suspended in ((1, False), (2, False), (1, True)):
        _compare(make, halves, suspended=suspended, passes=declared, **options)


def check_join(make: Make, **options: Any) -> None:
    """Steps of ranks with more data are averaged over those that have some; afterwards all go on together."""
    trainee = make(_values(), **_BUCKETS, **options)
    expected = OneProcess(_values())
    most = _STEPS + runtime.size() - 1
    for step in range(most):
        having = [rank for rank in range(runtime.size()) if step < _STEPS + rank]
        if runtime.rank() in having:
            _train(trainee, range(step, step + 1))
        expected.step(_sum_of(expected.weights, _all_batches(having, step), len(having)))
    last = join()
    assert last == runtime.size() - 1 or runtime.size() == 1
    if runtime.rank() == runtime.size() - 1:
        assert_near(trainee, expected.weights)
    for weight in trainee.weights():
        broadcast(weight, runtime.size() - 1, out=weight)
    for step in range(most, most + _STEPS):
        _train(trainee, range(step, step + 1))
        passes = _all_batches(range(runtime.size()), step)
        expected.step(_sum_of(expected.weights, passes, runtime.size()))
    assert_near(trainee, expected.weights)
    assert_equal_on_ranks(trainee)


def check_mismatches(make: Make, **options: Any) -> None:
    """Other parameters, or other options, are an error on all ranks; what comes next works."""
    last = runtime.size() - 1
    if not last:
        return
    other = _values() | {"bias": np.zeros(4, np.float32)} if runtime.rank() == last else _values()
    for values, more in ((other, {}), (_values(), {"bucket_nbytes": 32 + (runtime.rank() == last)})):
        assert_raises(partial(make, values, **more, **options), MismatchError, "the ranks differ")
    check_whole_batch(make, **options)


def check_saved_compression(make: Make, **options: Any) -> None:
    """With what compression kept, training that goes on is the same as if it had not stopped, bit by bit."""
    compression = PowerSGD(rank=1)
    whole = make(_values(), compression=compression, **options)
    _train(whole, range(_STEPS))
    first = make(_values(), compression=compression, **options)
    _train(first, range(_STEPS - 2))
    values = dict(zip(_SHAPES, (np.copy(weight) for weight in first.weights()), strict=True))
    second = make(values, compression=compression, **options)
    second.load_state_dict(first.state_dict())
    _train(second, range(_STEPS - 2, _STEPS))
    for mine, expected in zip(second.weights(), whole.weights(), strict=True):
        assert mine.tobytes() == expected.tobytes()


def check_dropped(make: Make, **options: Any) -> None:
    """An optimizer that is deleted, on one rank in the middle of a step, leaves no rank waiting."""
    trainee = make(_values(), **_BUCKETS, **options)
    _train(trainee, range(3))
    if runtime.rank() == 0 and options.get("reduce_in") != "backward":  # whose passes all ranks make
        _give(trainee, *_batch(0, 3))
    del trainee
    gc.collect()
    barrier()
    check_whole_batch(make, **options)


CHECKS: tuple[Callable[..., None], ...] = (
    check_whole_batch,
    check_unused,
    check_accumulation,
    check_join,
    check_mismatches,
    check_saved_compression,
    check_dropped,
)
