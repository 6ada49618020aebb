"""The binding of TensorFlow passes the suites for bindings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from suites.late_training import LATE_CHECKS
from suites.local_training import LOCAL_CHECKS, NODE_CHECKS
from suites.trainees import Make
from suites.weighted_training import WEIGHTED_CHECKS

pytest.importorskip("tensorflow")
from trainees.with_tensorflow import LocalTensorFlow, TensorFlow


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def make(request: pytest.FixtureRequest) -> Make:
    return partial(TensorFlow, compiled=request.param)


@pytest.mark.parametrize("check", LATE_CHECKS)
def test_late_averages(nodes_of_one: None, make: Make, check: Callable[[Make], None]) -> None:
    check(make)


@pytest.mark.parametrize("check", WEIGHTED_CHECKS)
def test_numbers_of_samples(nodes_of_one: None, make: Make, check: Callable[[Make], None]) -> None:
    check(make)


@pytest.mark.parametrize("check", LOCAL_CHECKS)
def test_local_training(nodes_of_one: None, check: Callable[..., None]) -> None:
    check(LocalTensorFlow)


@pytest.mark.parametrize("check", [pytest.param(NODE_CHECKS[0], marks=pytest.mark.smoke), *NODE_CHECKS[1:]])
def test_local_training_of_nodes(nodes_of_two: None, check: Callable[..., None]) -> None:
    check(LocalTensorFlow)
