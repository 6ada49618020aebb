"""What the suites for bindings train: a `Trainee` of the binding, beside one process with the gradients of all ranks.

Gradients are computed here, so that a binding only passes them on. They are such that all numbers of a short training
are exact in float32, however sums are ordered: whole numbers times a power of two that all numbers of ranks divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from trainees.toy import RATE

from ringreduce import runtime
from ringreduce.runtime.blocking import allgather

Floats = npt.NDArray[Any]
Named = Mapping[str, Floats]

MOMENTUM = 0.5

_SHAPES: dict[str, tuple[int, ...]] = {"matrix": (5, 3), "bias": (7,), "cube": (3, 1, 2), "number": ()}


class Trainee(Protocol):
    """Parameters of a binding, and steepest descent by `RATE`."""

    def weights(self) -> Sequence[Floats]:
        """Return the weights, as NumPy arrays, in the order of the names."""

    def give(self, gradients: Named) -> None:
        """Make a backward pass that adds these gradients; parameters that are not named are not used in it."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self, samples: Any = None) -> None:
        """Reduce the gradients, and step; they are means over so many samples of this rank, or all ranks have None."""

    def synchronize(self) -> None:
        """Apply late averages that are still to be applied."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which passes only add up gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the optimizer keeps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


#: Makes a `Trainee` of weights by name, with options as users of the binding give them, wire formats by name, and
#: ``momentum``, that of the steps.
Make = Callable[..., Trainee]


class OneProcess:
    """The same in float64.

    Args:
        values: the weights to begin with, by name.
        momentum: of the steps.
    """

    def __init__(self, values: Named, momentum: float = 0.0) -> None:
        self.weights = {name: value.astype(np.float64) for name, value in values.items()}
        self._momentum = momentum
        self._moving = {name: np.zeros(value.shape) for name, value in values.items()}

    def step(self, gradients: Named) -> None:
        for name, gradient in gradients.items():
            self._moving[name] = self._momentum * self._moving[name] + gradient
            self.weights[name] = self.weights[name] - RATE * self._moving[name]


def start() -> dict[str, Floats]:
    """Return weights to begin with, of awkward shapes: whole numbers, equal on all ranks."""
    rng = np.random.default_rng(0)
    return {name: rng.integers(-4, 5, shape).astype(np.float32) for name, shape in _SHAPES.items()}


def slopes(weights: Named, rank: int, step: int, *, exact: bool = True) -> dict[str, Floats]:
    """Return the gradients of |weights - centre|^2 / 4, with other centres on each rank and in each step.

    Args:
        weights: in any precision.
        rank, step: whose centres.
        exact: whether gradients are rounded as the head of this module says.
    """
    rng = np.random.default_rng([rank, step])
    unit = math.lcm(*range(1, runtime.size() + 1)) / 8
    found = {}
    for name, value in weights.items():
        gradient = (value.astype(np.float64) - rng.integers(-8, 9, value.shape)) / 2
        found[name] = np.asarray(np.round(gradient / unit) * unit if exact else gradient)
    return found


def mean(gradients: Sequence[Named], counts: Sequence[int] | None = None) -> dict[str, Floats]:
    """Return the averages of gradients of several ranks, weighted by their numbers of samples."""
    return {name: np.average([each[name] for each in gradients], axis=0, weights=counts) for name in gradients[0]}


def named(trainee: Trainee) -> dict[str, Floats]:
    """Return the weights by name, of a trainee that was made of `start`."""
    return dict(zip(_SHAPES, trainee.weights(), strict=True))


def give_slopes(trainee: Trainee, step: int, *, exact: bool = True) -> None:
    """Make this rank's backward pass of a step."""
    trainee.zero_grad()
    found = slopes(named(trainee), runtime.rank(), step, exact=exact)
    trainee.give({name: gradient.astype(np.float32) for name, gradient in found.items()})


def train(trainee: Trainee, steps: range, *, exact: bool = True) -> None:
    """Make steps with this rank's gradients."""
    for step in steps:
        give_slopes(trainee, step, exact=exact)
        trainee.step()


def bits(trainee: Trainee) -> bytes:
    """Return a copy of all weights."""
    return b"".join(np.asarray(weight).tobytes() for weight in trainee.weights())


def assert_equal_on_ranks(trainee: Trainee) -> None:
    """Check that all ranks have the same bits."""
    mine = np.frombuffer(bits(trainee), np.uint8)
    everyone = allgather(mine[None])
    assert all(each.tobytes() == mine.tobytes() for each in everyone), "weights are equal on all ranks, bit by bit"


def assert_weights(trainee: Trainee, expected: Named) -> None:
    """Check weights, which are exact. Local."""
    for weight, (name, reference) in zip(trainee.weights(), expected.items(), strict=True):
        np.testing.assert_array_equal(weight, reference, err_msg=name)


def assert_near(trainee: Trainee, expected: Named, tolerance: float = 1e-5) -> None:
    """Check weights up to rounding. Local."""
    for weight, (name, reference) in zip(trainee.weights(), expected.items(), strict=True):
        np.testing.assert_allclose(weight, reference, rtol=10 * tolerance, atol=tolerance, err_msg=name)


def assert_raises(action: Callable[[], object], kinds: type[Exception] | tuple[type[Exception], ...], what: str) -> str:
    """Check that an action raises an error of one of these kinds, and return its text."""
    try:
        action()
    except kinds as error:
        return str(error)
    raise AssertionError(f"{what}, and no error says so")
