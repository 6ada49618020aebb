"""What `bench overlap` calls hidden."""

from __future__ import annotations

import pytest

from ringreduce.bench.modes import hidden


@pytest.mark.parametrize(
    ("times", "part"),
    [
        ((100.0, 100.0, 100.0), 1.0),
        ((100.0, 100.0, 150.0), 0.5),
        ((100.0, 100.0, 200.0), 0.0),
        ((100.0, 100.0, 250.0), -0.5),  # they disturb each other
        ((100.0, 100.0, 90.0), 1.0),  # noise: no more than all of it can be hidden
        ((100.0, 40.0, 100.0), None),  # a computation that is too short, or too long, hides something else
        ((100.0, 210.0, 210.0), None),
    ],
)
def test_the_part_that_is_hidden(times: tuple[float, float, float], part: float | None) -> None:
    """As the OSU micro-benchmarks define it: what both together take longer than the computation, of the allreduce."""
    assert hidden(*times) == part
