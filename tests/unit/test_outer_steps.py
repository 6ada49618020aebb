"""The outer steps of DiLoCo with a quorum, against their closed form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringreduce.training.optimizers.outer_steps import Differences, OuterRates, OuterSteps, Wanted

LR, MU = 0.7, 0.9


def steps(quorum: int, ranks: Sequence[int] = (1, 1, 1), count: int = 0) -> OuterSteps:
    rates = [OuterRates(LR, MU), OuterRates(1.0, 0.0)]
    return OuterSteps([np.zeros(3), np.zeros(1)], [None, None], rates=rates, ranks=ranks, quorum=quorum, count=count)


def learnt(replica: int, since: int, value: float, wanted: Wanted = Wanted.STEP, *agreed: float) -> Differences:
    """Return differences of one value; ``agreed`` are weights that were loaded."""
    loaded = [np.full(3, agreed[0]), np.full(1, agreed[0])] if agreed else []
    return Differences(replica, since, wanted, [np.full(3, value), np.full(1, value)], loaded)


def test_shares_by_ranks_and_age() -> None:
    """A replica of two ranks counts twice; one that began two steps before, by a third."""
    made = steps(2, ranks=(2, 1, 1))
    kept = list(made.weights)
    before = [each.copy() for each in kept]
    assert made.take(learnt(0, 0, 3.0))
    assert not made.complete
    assert made.take(learnt(1, 0, 9.0))
    assert made.complete
    assert not made.all_here, "all are expected at first"
    made.make()
    delta = (2 * 3.0 + 9.0) / 3
    momentum = delta
    weights = -LR * (delta + MU * momentum)
    np.testing.assert_allclose(made.weights[0], weights)
    np.testing.assert_allclose(made.weights[1], -delta)
    assert all((old == new).all() for old, new in zip(before, kept, strict=True)), "messages may be under way with them"
    made.take(learnt(0, 1, 1.0))
    made.take(learnt(1, 1, 1.0))
    assert made.all_here, "the third has not come for the last step"
    made.make()
    momentum = MU * momentum + 1.0
    weights -= LR * (1.0 + MU * momentum)
    assert not made.take(learnt(2, 0, 8.0))
    made.take(learnt(0, 2, 2.0))
    assert made.complete, "one that is late waits, too"
    assert not made.all_here
    made.take(learnt(1, 2, 5.0))
    assert made.all_here
    made.make()
    delta = (2 * 2.0 + 5.0 + 8.0 / 3) / (3 + 1 / 3)
    momentum = MU * momentum + delta
    weights -= LR * (delta + MU * momentum)
    np.testing.assert_allclose(made.weights[0], weights)
    assert made.count == 3
    assert not made.waiting


def test_all_that_came_late_are_expected_for_the_next_step() -> None:
    """Though they did not wait: so one hiccup does not leave a replica behind for good."""
    made = steps(2)
    for replica in (0, 1):
        made.take(learnt(replica, 0, 1.0))
    made.make()
    made.take(learnt(2, 0, 1.0))
    made.waiting.discard(2)  # It got weights at once.
    for replica in (0, 1):
        made.take(learnt(replica, 1, 1.0))
    made.make()
    for replica in (0, 1):
        made.take(learnt(replica, 2, 1.0))
    assert made.complete
    assert not made.all_here


def test_an_average_of_all() -> None:
    """Has no momentum, and takes what has come late before."""
    made = steps(3, count=4)
    made.take(learnt(2, 3, 6.0))
    made.make_of_all([learnt(replica, 4, 1.0 + replica, Wanted.AVERAGE) for replica in range(3)])
    for each in made.weights:
        np.testing.assert_allclose(each, -(1 + 2 + 3 + 6 / 2) / 3.5)
    assert made.count == 5
    assert made.momentum[0] is not None
    assert not made.momentum[0].any()


def test_the_newest_weights_that_were_loaded() -> None:
    """A rank that has not loaded any, and has fewer steps, counts as late; what came for other weights is forgotten."""
    made = steps(3, count=1)
    made.take(learnt(0, 0, 100.0))
    made.waiting.discard(0)
    made.take(learnt(1, 1, 50.0))
    (waiting,) = made.forget()
    assert waiting.replica == 1
    loaded = [learnt(2, 7, 2.0, Wanted.LOADED, 10.0), learnt(0, 6, 4.0, Wanted.LOADED, 20.0), learnt(1, 7, 0.0)]
    made.make_of_all(loaded)
    delta = (2.0 + 4.0 / 2 + 0.0) / 2.5
    np.testing.assert_allclose(made.weights[0], 10 - LR * (delta + MU * delta))
    assert made.count == 8


def test_whether_a_step_is_possible() -> None:
    made = steps(2)
    assert made.possible(absent=1)
    assert not made.possible(absent=2)
