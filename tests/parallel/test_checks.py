"""Weights that differ, gradients that are no numbers, and data that all ranks share are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from trainees.toy import Toy

import ringreduce as rr
from ringreduce.testing import caught
from ringreduce.training.calls.handles import join

ZEROS = {"matrix": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32), "extra": np.zeros(2, np.float32)}
X, Y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)


def trained(steps: int, **options: Any) -> Toy:
    toy = Toy(ZEROS, **options)
    for _ in range(steps):
        make_step(toy)
    return toy


def make_step(toy: Toy) -> None:
    toy.zero_grad()
    toy.backward(X, Y)
    toy.step()


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"reduce_in": "backward"}], ids=str)
def test_what_is_well_passes(checked: None, options: dict[str, Any]) -> None:
    """Weights are those of a job that is not checked."""
    everyone = rr.allgather(np.concatenate([each.reshape(-1) for each in trained(5, **options).weights()])[None])
    assert (everyone == everyone[0]).all()


def test_weights_that_differ_name_parameter_and_rank(checked: None) -> None:
    """All ranks hear of the first parameter that differs, and which rank is unlike the others; with two, both."""
    toy, last = trained(2), rr.size() - 1
    if rr.rank() == last:
        toy.named[1][1].value[1] += 1e-6
    toy.zero_grad()
    toy.backward(X, Y)
    if rr.size() == 1:
        toy.step()
        return
    error = caught(toy.step)
    assert isinstance(error, rr.MismatchError)
    assert "the values of bias have the checksum" in str(error)
    assert "before step 2" in str(error)
    assert set(error.values) == set(range(rr.size()))
    odd = [rank for rank, text in error.values.items() if "unlike most" in text]
    assert odd == ([last] if rr.size() > 2 else [])
    assert len({error.values[0], error.values[last]}) == 2


def test_steps_count_anew_for_all_ranks_when_some_have_joined(checked: None) -> None:
    """Ranks that have made different numbers of steps look at the same ones after a join."""
    toy = trained(2 + rr.rank() % 2)
    join()
    for weight in toy.weights():
        rr.broadcast(weight, rr.size() - 1, out=weight)
    for _ in range(4):
        make_step(toy)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_names_gradient_and_rank(checked: None, wrong: float) -> None:
    """All ranks hear of it, before it has spoilt the sums; a step with gradients that are numbers works then."""
    toy = trained(1)
    toy.zero_grad()
    toy.backward(X, Y)
    if rr.size() == 1:
        return
    before = [each.copy() for each in toy.weights()]
    if rr.rank() == 1:
        toy.named[0][1].grad[2, 1] = wrong
    error = caught(toy.step)
    assert isinstance(error, rr.NotFiniteError)
    assert "gradient of matrix holds NaN or infinity on rank 1," in str(error)
    assert all(np.array_equal(*pair) for pair in zip(before, toy.weights(), strict=True))
    make_step(toy)


@pytest.mark.spread("differ_in")
@pytest.mark.parametrize("differ_in", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"reduce_in": "backward"}, {"passes": 2}], ids=str)
def test_ranks_that_train_on_the_same_data_are_told(
    options: dict[str, Any], differ_in: int | None, warned: Any
) -> None:
    """Rank 0 warns once if the gradients of all ranks were equal in each of the first three steps."""
    toy = Toy(ZEROS, bucket_nbytes=8, **options)
    for step in range(6):
        toy.zero_grad()
        for _ in range(options.get("passes", 1)):
            toy.backward(X + (rr.rank() if step == differ_in else 0), Y)
        toy.step()
    warns = rr.size() > 1 and rr.rank() == 0 and differ_in in (None, 3)
    assert len(warned("train on the same data")) == warns


@pytest.mark.sizes(2, 3, 4)
def test_a_rank_without_gradients_has_other_data(warned: Any) -> None:
    """A rank that left out a parameter, or that has joined, did not compute the same as the others."""
    toy = Toy(ZEROS)
    for step in range(4):
        toy.zero_grad()
        toy.backward(X, Y, extra=rr.rank() > 0 or step > 0)
        toy.step()
    other = Toy(ZEROS)
    for _ in range(4 if rr.rank() else 1):
        make_step(other)
    join()
    assert not warned("train on the same data")


@pytest.mark.sizes(2, 3, 4)
def test_the_same_data_may_be_meant(begin_world: Any, warned: Any) -> None:
    """A setting turns the comparison off."""
    begin_world(CHECK_DATA="0")
    trained(4)
    assert not warned("train on the same data")
