"""What every binding of a framework must do: checks that run on all ranks, against one process in float64.

All functions are collective and take what makes a `Trainee` of the binding.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ringreduce import runtime
from ringreduce.common.errors import MismatchError
from ringreduce.testing.toy import RATE
from ringreduce.training.calls.requests import join
from ringreduce.training.compression.powersgd import PowerSGD

_Floats = npt.NDArray[Any]
_Pass = tuple[_Floats, _Floats, bool]  # of a backward pass: the batch, and whether ``extra`` is used

_STEPS = 6
_ROWS = 4  # of each rank, in each step
_BUCKETS = {"bucket_nbytes": 32}  # each parameter has its own
_SHAPES = {"matrix": (5, 3), "bias": (3,), "extra": (3,)}


class Trainee(Protocol):
    """A linear model ``x @ matrix + bias + extra`` of a binding, in float32, and steepest descent by `RATE`."""

    def weights(self) -> Sequence[_Floats]:
        """Return the weights, as NumPy arrays, in the order of the names."""

    def backward(self, x: _Floats, y: _Floats, *, extra: bool = True) -> None:
        """Add the gradient of half the mean, over the rows, of the summed squared error; ``extra`` may be left out."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> None:
        """Reduce the gradients, and step."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which passes only add up gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the optimizer keeps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


#: Makes a `Trainee` of weights by name, with options as users of the binding give them.
Make = Callable[..., Trainee]


class _OneProcess:
    """The same in float64, on the batches of all ranks."""

    def __init__(self, values: Mapping[str, _Floats]) -> None:
        self.matrix, self.bias, self.extra = (value.astype(np.float64) for value in values.values())

    def step(self, batches: Sequence[_Pass], ranks: int = 0) -> None:
        """Step with what the batches give, over the number of ranks; each says whether ``extra`` is used."""
        totals = [np.zeros_like(each) for each in (self.matrix, self.bias, self.extra)]
        for x, y, used in batches:
            error = x @ self.matrix + self.bias + (self.extra if used else 0) - y
            for total, gradient in zip(
                totals, (x.T @ error / len(x), error.mean(0), used * error.mean(0)), strict=True
            ):
                total += gradient / (ranks or len(batches))
        for weight, total in zip((self.matrix, self.bias, self.extra), totals, strict=True):
            weight -= RATE * total


def _values() -> dict[str, _Floats]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in _SHAPES.items()}


def _batch(rank: int, step: int) -> tuple[_Floats, _Floats]:
    rng = np.random.default_rng([rank, step])
    return rng.standard_normal((_ROWS, 5)).astype(np.float32), rng.standard_normal((_ROWS, 3)).astype(np.float32)


def _assert_equal_on_ranks(trainee: Trainee) -> None:
    mine = np.concatenate([weight.ravel() for weight in trainee.weights()])
    everyone = runtime.allgather(mine[None])
    assert all(each.tobytes() == mine.tobytes() for each in everyone), "weights are equal on all ranks, bit by bit"


def _assert_near(trainee: Trainee, expected: _OneProcess) -> None:
    for weight, reference in zip(trainee.weights(), (expected.matrix, expected.bias, expected.extra), strict=True):
        np.testing.assert_allclose(weight, reference, rtol=1e-4, atol=1e-5)


def _train(trainee: Trainee, steps: range) -> None:
    """Make steps, each with this rank's batch."""
    for step in steps:
        trainee.zero_grad()
        trainee.backward(*_batch(runtime.rank(), step))
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
    expected = _OneProcess(_values())
    for step in range(_STEPS):
        *first, (x, y, used) = made(runtime.rank(), step)
        trainee.zero_grad()
        with trainee.no_sync() if suspended else nullcontext():
            for earlier_x, earlier_y, earlier_used in first:
                trainee.backward(earlier_x, earlier_y, extra=earlier_used)
        trainee.backward(x, y, extra=used)
        trainee.step()
        expected.step([each for rank in range(runtime.size()) for each in made(rank, step)], runtime.size())
        _assert_equal_on_ranks(trainee)
    _assert_near(trainee, expected)


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
    expected = _OneProcess(_values())
    most = _STEPS + runtime.size() - 1
    for step in range(most):
        having = [rank for rank in range(runtime.size()) if step < _STEPS + rank]
        if runtime.rank() in having:
            _train(trainee, range(step, step + 1))
        expected.step(_all_batches(having, step))
    last = join()
    assert last == runtime.size() - 1 or runtime.size() == 1
    if runtime.rank() == runtime.size() - 1:
        _assert_near(trainee, expected)
    for weight in trainee.weights():
        runtime.broadcast(weight, runtime.size() - 1, out=weight)
    for step in range(most, most + _STEPS):
        _train(trainee, range(step, step + 1))
        expected.step(_all_batches(range(runtime.size()), step))
    _assert_near(trainee, expected)
    _assert_equal_on_ranks(trainee)


def check_mismatches(make: Make, **options: Any) -> None:
    """Other parameters, or other options, are an error on all ranks; what comes next works."""
    last = runtime.size() - 1
    if not last:
        return
    other = _values() | {"bias": np.zeros(4, np.float32)} if runtime.rank() == last else _values()
    for values, more in ((other, {}), (_values(), {"bucket_nbytes": 32 + (runtime.rank() == last)})):
        try:
            make(values, **more, **options)
        except MismatchError:
            continue
        raise AssertionError("the ranks differ, and none said so")
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
        trainee.backward(*_batch(0, 3))
    del trainee
    gc.collect()
    runtime.barrier()
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
