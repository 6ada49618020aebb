"""Every binding of a framework passes the suites for bindings: here NumPy's, lists and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from trainees.lists import Lists

from ringreduce.testing.late_training import LATE_CHECKS
from ringreduce.testing.local_training import LOCAL_CHECKS, NODE_CHECKS, check_warm_up
from ringreduce.testing.toy import Toy
from ringreduce.testing.trainees import Make
from ringreduce.testing.training import CHECKS
from ringreduce.testing.weighted_training import WEIGHTED_CHECKS, check_samples

pytest.importorskip("torch")
from trainees.with_torch import LocalTorch, Torch


def named(check: Callable[..., None]) -> str:
    return check.__name__


@pytest.mark.spread("check")
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"reduce_in": "backward"}], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=named)
@pytest.mark.parametrize("make", [Toy, Torch, Lists])
def test_a_binding(make: Make, check: Callable[..., None], options: dict[str, Any]) -> None:
    """Reducing in the step, during the backward pass, or at its end."""
    check(make, **options)


@pytest.mark.spread("check")
@pytest.mark.parametrize("check", LATE_CHECKS, ids=named)
@pytest.mark.parametrize("make", [Torch, Lists])
def test_late_averages(nodes_of_one: None, make: Make, check: Callable[[Make], None]) -> None:
    check(make)


@pytest.mark.spread("check")
@pytest.mark.parametrize("check", WEIGHTED_CHECKS, ids=named)
@pytest.mark.parametrize("make", [Torch, Lists])
def test_numbers_of_samples(nodes_of_one: None, make: Make, check: Callable[..., None]) -> None:
    check(make)


@pytest.mark.parametrize("options", [{"overlap": True}, {"gradient_predivide_factor": 3.0}], ids=str)
@pytest.mark.parametrize("make", [Torch, Lists])
def test_numbers_of_samples_with_other_options(nodes_of_two: None, make: Make, options: dict[str, Any]) -> None:
    check_samples(make, **options)


@pytest.mark.parametrize("check", [*LOCAL_CHECKS, check_warm_up], ids=named)
def test_local_training(nodes_of_one: None, check: Callable[..., None]) -> None:
    check(LocalTorch)


@pytest.mark.parametrize("check", [*NODE_CHECKS, check_warm_up], ids=named)
def test_local_training_of_nodes(nodes_of_two: None, check: Callable[..., None]) -> None:
    check(LocalTorch)
