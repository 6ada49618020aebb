"""Some steps of the random trainings that `scripts/fuzz` makes many of."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_trainings import TORCH, run


@pytest.mark.parametrize(("ranks", "node_size"), [pytest.param(2, "1", marks=pytest.mark.thorough), (3, "2")])
def test_random_trainings_in_torch(ranks: int, node_size: str, tmp_path: Path) -> None:
    """All weights are those of one process, in each way to step; each way goes on from what the last one has saved.

    The ways share a job, as its libraries take longer to import than the steps.
    """
    assert run(TORCH, ranks, node_size, steps=10, seed=5, folder=tmp_path)
