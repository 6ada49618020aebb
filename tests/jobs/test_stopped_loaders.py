"""Training that goes on in the middle of an epoch, with every kind of loader."""

from __future__ import annotations

import pytest
from launching import needs
from random_stops import die, stop

needs("torch")

SEEDS = range(273, 289)  # draw each kind of loader


@pytest.mark.parametrize(
    "ranks",
    [(2, 2), (4, 2), pytest.param((2, 4), marks=pytest.mark.thorough)],
    ids=["2 to 2", "4 to 2", "2 to 4"],
)
def test_each_sample_comes_once_in_the_order_of_before(ranks: tuple[int, int]) -> None:
    """After a checkpoint, and a commit on disk; loaders that cannot go on among other ranks are refused."""
    came = stop(ranks, SEEDS)
    assert came["right"] + came["right elsewhere"] + came["refused"] == len(SEEDS)
    assert (came["refused"] > 0) == (ranks[0] != ranks[1])


@pytest.mark.parametrize(("seed", "how"), [(8, "right elsewhere"), (13, "right elsewhere"), (6, "refused")])
def test_ranks_that_survive_divide_what_is_left(seed: int, how: str) -> None:
    """Of a sampler that knows how; other loaders cannot go on with fewer ranks."""
    assert die(3, seed)[f"after a death, {how}"] == 1
