"""Elastic training goes on when ranks die: some cells of the matrix that `scripts/faults` runs as a whole."""

from __future__ import annotations

import random

import pytest
import soak
from elastic_trainings import Drawn, run
from faults import cells

EVERY = cells()
CHOSEN = [
    *random.Random(14).sample([each for each in EVERY if len(each.deaths) == 1 and "SIGSTOP" not in each.name], 16),
    *random.Random(14).sample([each for each in EVERY if "SIGSTOP" in each.name], 2),
    *random.Random(14).sample([each for each in EVERY if len(each.deaths) > 1], 7),
]


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(each, id=each.name, marks=() if at % 3 == 0 else pytest.mark.thorough)
        for at, each in enumerate(CHOSEN)
    ],
)
def test_a_death_ends_as_promised(cell: Drawn) -> None:
    """The others go on: their weights are those of the steps that count, each once."""
    _, wrong = run(cell)
    assert not wrong


def test_many_die_one_after_the_other() -> None:
    """Random ranks at random times, down to two, and again from disk: nothing is lost, and no descriptor stays open."""
    done = soak.run(kills=8, ranks=5, seed=14)
    assert not done.wrong
    assert (done.kills, done.restarts >= 1) == (8, True)
    assert done.descriptors[1] <= done.descriptors[0]
