"""The binding of Keras passes the suites for bindings, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from suites.late_training import LATE_CHECKS
from suites.local_training import LOCAL_CHECKS, NODE_CHECKS
from suites.trainees import Make
from suites.weighted_training import WEIGHTED_CHECKS, check_late_missing_numbers

keras = pytest.importorskip("keras")
from trainees.with_keras import Keras, LocalKeras  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@pytest.mark.parametrize("check", LATE_CHECKS)
def test_late_averages(nodes_of_one: None, check: Callable[[Make], None]) -> None:
    check(Keras)


@pytest.mark.parametrize("check", WEIGHTED_CHECKS)
def test_numbers_of_samples(nodes_of_one: None, check: Callable[[Make], None]) -> None:
    if check is check_late_missing_numbers and keras.backend.backend() == "jax":
        pytest.skip("numbers come before the first step, which another test proves")
    check(Keras)


@pytest.mark.parametrize("check", LOCAL_CHECKS)
def test_local_training(nodes_of_one: None, check: Callable[..., None]) -> None:
    check(LocalKeras)


@pytest.mark.parametrize("check", NODE_CHECKS)
def test_local_training_of_nodes(nodes_of_two: None, check: Callable[..., None]) -> None:
    check(LocalKeras)
