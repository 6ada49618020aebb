"""What worlds were used for: whether a program that trains has reduced anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from trainees.toy import Toy

import ringreduce as rr
from ringreduce import runtime
from ringreduce.runtime.process import PROCESS
from ringreduce.runtime.reductions_made import Usage
from ringreduce.training.calls.objects import allgather_object, broadcast_object

TORCH = {"ringreduce.torch"}
ONES = np.ones(3, np.float32)


@pytest.fixture
def world() -> Iterator[None]:
    """A world in which nothing was done yet."""
    rr.shutdown()
    rr.init()
    yield
    rr.shutdown()
    rr.init()


def asked(modules: set[str], trained_nbytes: int = 0) -> str | None:
    usage = Usage()
    usage.trained_nbytes = trained_nbytes
    usage.add(PROCESS.rank_here())
    return usage.warning(modules)


def step_of_toy() -> None:
    toy = Toy({"matrix": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32), "extra": ONES[:2]})
    toy.backward(np.ones((4, 3), np.float32), np.ones((4, 2), np.float32))
    toy.step()


def nothing() -> None:
    """Do nothing."""


REDUCE: dict[str, Callable[[], object]] = {
    "an optimizer": step_of_toy,
    "allreduce": lambda: rr.allreduce(ONES),
    "reducescatter": lambda: rr.reduce_scatter(ONES),
    "alltoall": lambda: rr.alltoall(np.ones(rr.size())),
    "a group": runtime.group,
}
SHARE: dict[str, Callable[[], object]] = {
    "nothing": nothing,
    "broadcast": lambda: rr.broadcast(ONES, 0),
    "objects": lambda: (broadcast_object(1, 0), allgather_object(1)),
    "barrier": rr.barrier,
}


@pytest.mark.spread
@pytest.mark.parametrize("how", SHARE)
def test_steps_without_any_reduction_are_asked_for(world: None, how: str) -> None:
    """On rank 0, if there are others; broadcasts and results that are collected are no reductions."""
    SHARE[how]()
    assert asked(TORCH) is None, "no optimizer has made a step"
    assert asked(set()) is None, "no framework was imported"
    rr.count(steps=3)
    text = asked(TORCH)
    assert (text is not None) == (rr.rank() == 0 and rr.size() > 1)
    if text is not None:
        assert text.startswith("3 optimizer steps were made on this rank")
        assert "Is the optimizer wrapped in DistributedOptimizer" in text
    assert asked(set()) is None


@pytest.mark.spread
@pytest.mark.parametrize("how", REDUCE)
def test_what_reduces_is_not_asked_for(world: None, how: str) -> None:
    """Nor do those that divide the ranks, which may reduce what is not seen any more."""
    rr.count(steps=3)
    REDUCE[how]()
    assert asked(TORCH) is None


def test_a_metric_is_no_gradient(world: None) -> None:
    """What optimizers of torch train is known: gradients that a program averages by hand are as much, once at least."""
    rr.count(steps=3)
    rr.allreduce(ONES)
    text = asked(TORCH, trained_nbytes=ONES.nbytes + 1)
    assert (text is not None) == (rr.rank() == 0 and rr.size() > 1)
    if text is not None:
        assert "no gradients were reduced: 12 B in all, of 13 B of parameters," in text
    rr.allreduce(ONES)
    assert asked(TORCH, trained_nbytes=ONES.nbytes + 1) is None
    step_of_toy()
    assert asked(TORCH, trained_nbytes=1 << 30) is None, "ours are known, however little of them travels"


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("module", "used"),
    [
        ("tensorflow", "DistributedGradientTape"),
        ("keras", "compiled with DistributedOptimizer"),
        ("jax", "DistributedGradientTransformation"),
    ],
)
def test_the_question_is_in_the_words_of_the_binding(world: None, module: str, used: str) -> None:
    """Where steps are not counted that nobody has wrapped, it says that it only may concern the program."""
    text = asked({*TORCH, f"ringreduce.{module}"})  # Keras may have torch below it
    assert (text is not None) == (rr.rank() == 0)
    if text is not None:
        assert text.startswith("if this program has trained: nothing was ever reduced")
        assert used in text
