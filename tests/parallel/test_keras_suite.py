"""The binding of Keras passes the suites for bindings, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringreduce.testing.late_training import LATE_CHECKS, check_late_wires
from ringreduce.testing.trainees import Make

pytest.importorskip("keras")
from trainees.with_keras import Keras  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def named(check: Callable[..., None]) -> str:
    return check.__name__


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=pytest.mark.xfail(reason="a step refuses wire formats with staleness"))
        if check is check_late_wires
        else check
        for check in LATE_CHECKS
    ],
    ids=named,
)
def test_late_averages(nodes_of_one: None, check: Callable[[Make], None]) -> None:
    check(Keras)
