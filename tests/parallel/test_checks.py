"""Weights that differ and gradients that are no numbers are found where the settings ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.testing import caught
from ringreduce.testing.toy import Toy

ZEROS = {"matrix": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32), "extra": np.zeros(2, np.float32)}
X, Y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world in which weights are compared every second step, and gradients looked at in each."""
    rr.shutdown()
    with monkeypatch.context() as patch:
        patch.setenv("RINGREDUCE_CHECK", "2")
        patch.setenv("RINGREDUCE_CHECK_FINITE", "1")
        rr.init()
        yield
        rr.shutdown()
    rr.init()


def trained(steps: int, **options: Any) -> Toy:
    toy = Toy(ZEROS, **options)
    for _ in range(steps):
        toy.zero_grad()
        toy.backward(X, Y)
        toy.step()
    return toy


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
    toy.zero_grad()
    toy.backward(X, Y)
    toy.step()
