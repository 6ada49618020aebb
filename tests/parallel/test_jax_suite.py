"""The binding of Jax passes the suites for bindings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from suites.late_training import LATE_CHECKS
from suites.local_training import LOCAL_CHECKS, NODE_CHECKS
from suites.trainees import Make
from suites.training import CHECKS, check_mismatches
from suites.weighted_training import WEIGHTED_CHECKS, check_samples_of_wires

pytest.importorskip("jax")
from trainees.with_jax import Jax, LocalJax


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def make(request: pytest.FixtureRequest) -> Make:
    return partial(Jax, compiled=request.param)


@pytest.mark.parametrize("check", [each for each in CHECKS if each is not check_mismatches])
def test_a_binding(check: Callable[[Make], None]) -> None:
    check(Jax)


@pytest.mark.parametrize("check", LATE_CHECKS)
def test_late_averages(nodes_of_one: None, make: Make, check: Callable[[Make], None]) -> None:
    check(make)


@pytest.mark.parametrize("check", [each for each in WEIGHTED_CHECKS if each is not check_samples_of_wires])
def test_numbers_of_samples(nodes_of_one: None, make: Make, check: Callable[[Make], None]) -> None:
    """But those of wire formats, which JAX refuses to weight."""
    check(make)


@pytest.mark.parametrize("check", LOCAL_CHECKS)
def test_local_training(nodes_of_one: None, check: Callable[..., None]) -> None:
    check(partial(LocalJax, compiled=False))  # exchanges are outside of compiled steps, whose compilation takes seconds


@pytest.mark.parametrize("check", [pytest.param(NODE_CHECKS[0], marks=pytest.mark.smoke), *NODE_CHECKS[1:]])
def test_local_training_of_nodes(nodes_of_two: None, check: Callable[..., None]) -> None:
    check(LocalJax)
