"""Samples by speed: how an epoch is divided, and averages that are weighted by numbers of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host_reducers import make_reducer

import ringreduce as rr
from ringreduce.common.instruments import EngineTally, Pace
from ringreduce.engine import Engine
from ringreduce.testing import run_engines, run_ranks
from ringreduce.training.binding.host import ArraySpec
from ringreduce.training.compression.topk import TopK
from ringreduce.training.data.shares import Batches, Division, Shares, _paces_of, divided
from ringreduce.training.optimizers.reducer import GradientReducer

COUNTS = [0, 1, 5, 1009, 100_003]


# ---- how an epoch is divided ----


def paces(*own_s: float, steps: int = 100) -> list[Pace]:
    """Return the paces of ranks whose steps take so long."""
    return [Pace(steps, steps * each, 0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, ()) for each in own_s]


def epochs(seconds_per_share: Sequence[float], count: int) -> list[list[float]]:
    """Return the shares of epochs in which ranks take so long for all samples of a step."""
    division, size = Division(), len(seconds_per_share)
    found, total = [division.renew((), size)], paces(*[0.0] * size, steps=0)
    for _ in range(count):
        more = paces(*(share * each for share, each in zip(found[-1], seconds_per_share, strict=True)))
        total = [old + new for old, new in zip(total, more, strict=True)]
        found.append(division.renew(total, size))
    return found


def test_shares_come_to_be_in_proportion_to_speed():
    """One rank of four at half speed: 1/7 of all, and 2/7 each; then every rank takes as long."""
    found = epochs([2.0, 1.0, 1.0, 1.0], 6)
    assert found[0] == [0.25] * 4
    assert found[-1] == pytest.approx([1 / 7, 2 / 7, 2 / 7, 2 / 7], rel=0.02)


@pytest.mark.parametrize("speeds", [[2.0, 1.0], [1.0, 1.1, 5.0], [1.0] * 6 + [10.0]])
def test_no_share_changes_by_more_than_a_quarter_at_once(speeds: list[float]) -> None:
    """And all of them are 1 together, after any number of epochs."""
    found = epochs(speeds, 8)
    for before, after in pairwise(found):
        assert sum(after) == pytest.approx(1.0, abs=1e-12)
        assert all(abs(new / old - 1.0) <= 0.25 + 1e-12 for old, new in zip(before, after, strict=True))


def test_differences_of_less_than_five_percent_change_nothing():
    """So that ranks alike have equal shares, and averages no weights."""
    assert epochs([1.0, 1.03, 0.99], 5)[-1] == [1 / 3] * 3


def test_speeds_are_smoothed():
    """One slow epoch counts half."""
    division = Division()
    division.renew((), 2)
    division.renew(paces(1.0, 1.0), 2)
    found = division.renew([a + b for a, b in zip(paces(1.0, 1.0), paces(1.5, 1.0), strict=True)], 2)
    speed = (0.5 + 1.0 / 2.5) / 2
    assert found == pytest.approx([speed, 1.0 - speed])


def test_a_rank_that_was_slow_for_long_gets_more_again_soon():
    """Its share falls no lower than a sample; then a quarter more in each epoch."""
    division, total = Division(), paces(0.0, 0.0, 0.0, 0.0, steps=0)
    counts = divided(8, division.renew((), 4))
    for epoch in range(52):
        slower = 12 if epoch < 40 else 1
        more = paces(*(count * (slower if rank == 0 else 1) for rank, count in enumerate(counts)))
        total = [old + new for old, new in zip(total, more, strict=True)]
        counts = divided(8, division.renew(total, 4, counts))
        if epoch == 39:
            assert counts[0] == 1
    assert counts == [2, 2, 2, 2]


def test_with_staleness_ranks_divide_alike_whatever_they_have_heard():
    """One has got the last report, the other has not yet."""
    shares = []
    for heard in (True, False):
        engine = SimpleNamespace(tally=EngineTally(), pacemaker=SimpleNamespace(lags=True, number=3))
        for own_s in ((1.0, 2.0), (1.0, 1.0), (3.0, 1.0))[: 3 if heard else 2]:
            engine.tally.add_paces([[16, each, 0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, ()] for each in own_s])
        shares.append(Division().renew(_paces_of(engine), 2))
    assert shares[0] == shares[1] != [0.5, 0.5]


def test_shares_are_even_again_in_another_world():
    """With other ranks, or with counts that begin anew."""
    division = Division()
    division.renew((), 2)
    assert division.renew(paces(2.0, 1.0), 2) != [0.5, 0.5]
    assert division.renew((), 3) == [1 / 3] * 3
    assert division.renew(paces(2.0, 1.0, 1.0), 3) != [1 / 3] * 3
    assert division.renew(paces(1.0, 1.0, 1.0, steps=50), 3) == [1 / 3] * 3


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 100, 101])
@pytest.mark.parametrize("shares", [[1.0], [0.9, 0.1], [1 / 3] * 3, [0.98, 0.01, 0.01]])
def test_samples_are_divided_without_rest(count: int, shares: list[float]) -> None:
    """Nearly in proportion; nobody gets nothing if there are enough."""
    found = divided(count, shares)
    assert sum(found) == count
    assert min(found) >= (count >= len(shares))
    assert all(abs(each - count * share) < len(shares) for each, share in zip(found, shares, strict=True))


@pytest.mark.parametrize("ends", ["repeat", "drop", "uneven"])
@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 24, 29])
def test_a_program_without_a_world_gets_all_batches(count: int, ends: Any) -> None:
    """As many as announced; each whole, but the last if it is uneven."""
    batches, order = Batches(6, ends, by_speed=True), list(range(100, 100 + count))
    found = list(batches.of(order))
    assert batches.number(count) == len(found)
    together = [each for batch in found for each in batch]
    if ends == "repeat" and count % 6:
        assert together == (order * 6)[: count + 6 - count % 6]
    else:
        assert together == order[: count - count % 6 if ends == "drop" else count]


# ---- weighted averages ----


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.complex64])
def test_a_weighted_average_on_one_node(size: int, dtype: Any) -> None:
    """Is the weighted sum in float64, up to rounding, with equal bits on all ranks, in memory of any kind."""
    weights = [(rank + 1) / (size * (size + 1) / 2) for rank in range(size)]
    values = [
        [np.random.default_rng((rank, n)).standard_normal(n).astype(dtype) for n in COUNTS] for rank in range(size)
    ]
    digits = 2e-3 if dtype is np.float16 else 1e-6

    def program(communicator: rr.Communicator) -> list[bytes]:
        found = []
        for number, count in enumerate(COUNTS):
            mine = values[communicator.rank][number]
            place = communicator.empty(count, dtype)
            place[:] = mine
            communicator.allreduce(place, rr.AVERAGE, out=place, weights=weights)
            private = communicator.allreduce(mine, rr.AVERAGE, weights=weights)
            expected = sum(
                np.multiply(values[rank][number], weights[rank], dtype=np.complex128) for rank in range(size)
            )
            np.testing.assert_allclose(place, expected, atol=digits)
            np.testing.assert_array_equal(place, private)
            assert communicator.allreduce(np.ones(3), rr.AVERAGE).tolist() == [1.0] * 3
            found.append(place.tobytes())
        return found

    first, *others = run_ranks(size, program)
    assert all(each == first for each in others)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"op": rr.SUM}, "averages"),
        ({"algorithm": "ring"}, "named algorithm"),
        ({"compression": "int8"}, "wire format"),
        ({"weights": [1.0]}, "as many weights"),
        ({"weights": np.array([0.5, 0.25])}, "sum of weights must be 1"),
        ({"weights": [0.5, math.nan]}, "sum of weights must be 1"),
        ({"weights": ["a", 0.5]}, "weights"),
    ],
)
def test_weights_that_make_no_sense_are_refused(arguments: dict[str, Any], match: str) -> None:
    """On all ranks; the next call works."""

    def program(communicator: rr.Communicator) -> None:
        options = {"op": rr.AVERAGE, "weights": [0.5, 0.5], **arguments}
        with pytest.raises(rr.ConfigError, match=match):
            communicator.allreduce(np.ones(3, np.float32), **options)
        assert communicator.allreduce(np.ones(1)).tolist() == [2.0]

    run_ranks(2, program)


def test_weights_are_for_floats_and_one_node():
    """Integers are refused, and ranks of several nodes."""

    def program(communicator: rr.Communicator) -> None:
        kind = rr.ConfigError if not communicator.topology.single_node else rr.UnsupportedBufferError
        with pytest.raises(kind):
            communicator.allreduce(np.ones(3, np.int32), rr.AVERAGE, weights=[0.5, 0.5])

    run_ranks(2, program)
    run_ranks(2, program, node_size=1)


# ---- steps with samples ----

VALUES = np.arange(1.0, 8.0, dtype=np.float32)


NAMED = [("a", ArraySpec((7,), np.float32)), ("b", ArraySpec((), np.float32))]


def mean(samples: Sequence[int | None], step: int) -> float:
    """Return the factor of `VALUES` in the mean of gradients that are (rank + 1 + step) times these."""
    numbers = [1 if each is None else each for each in samples]
    return sum((rank + 1 + step) * each for rank, each in enumerate(numbers)) / sum(numbers)


def take_step(reducer: GradientReducer, step: int, samples: Sequence[int | None]) -> None:
    rank = reducer.ranks.rank
    factor = rank + 1 + step
    a, b = reducer.reduce([VALUES * np.float32(factor), np.float32(factor).reshape(())], samples=samples[rank])
    expected = mean(samples, step)
    np.testing.assert_allclose(a, VALUES * expected, rtol=1e-5)
    np.testing.assert_allclose(b, expected, rtol=1e-5)


#: The samples of steps: the same again and again, changed on one rank, on all, equal, and not said.
PLAN = {
    1: [[3]] * 4,
    2: [[3, 1]] * 6 + [[3, 2]] * 5 + [[5, 4]] + [[4, 4]] * 4 + [[None, None]] * 3 + [[0, 7]] * 3,
    3: [[3, 1, 2]] * 6 + [[3, 1, 1]] * 5 + [[9, 0, 3]] * 2 + [[2, 2, 2]] * 4 + [[None] * 3] * 3,
    4: [[1, 2, 3, 4]] * 6 + [[1, 2, 3, 5]] * 5 + [[7, 7, 7, 8]] * 4,
}


@pytest.mark.parametrize("node_size", [None, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"predivide_factor": 2.0}, {"compression": TopK(1.0)}],
    ids=["plain", "predivided", "encoded"],
)
def test_steps_are_means_over_all_samples(size: int, node_size: int | None, options: dict[str, Any]) -> None:
    """Whether numbers change on some ranks, on all or on none, and whether one node sums up or several do."""
    if node_size is not None and node_size >= size:
        pytest.skip("one node")

    def train(engine: Engine) -> None:
        reducer = make_reducer(engine, NAMED, **options)
        for step, samples in enumerate(PLAN[size]):
            take_step(reducer, step, samples)

    run_engines(size, train, node_size=node_size)


def test_steps_with_equal_numbers_repeat_in_one_operation():
    """Numbers travel when they change: in two operations more, and never again until then."""

    def train(engine: Engine) -> list[int]:
        reducer, taken = make_reducer(engine, NAMED), []
        for step in range(40):
            before = engine.tally.operations
            take_step(reducer, step, [3, 1] if step < 20 else [2, 1])
            taken.append(engine.tally.operations - before)
        return taken

    for taken in run_engines(2, train):
        assert [step for step, count in enumerate(taken) if count != 1] == [0, 1, 3, 7, 15, 20, 31]
        assert taken[20] == 4, "refused, agreed, numbers, buckets"


@pytest.mark.parametrize("wrong", [{"samples": "many"}, {"samples": -1}, {"samples": None}, {"samples": 1.5}], ids=str)
def test_a_number_that_is_wrong_or_missing_on_one_rank_ends_the_step_on_all(wrong: dict[str, Any]) -> None:
    """And nothing else: the next step is as if it had not been."""

    def train(engine: Engine) -> None:
        reducer = make_reducer(engine, NAMED)
        for step in range(6):
            take_step(reducer, step, [2, 3])
        samples = wrong["samples"] if engine.communicator.rank == 1 else 2
        with pytest.raises(rr.ConfigError, match="samples"):
            reducer.reduce([VALUES, np.float32(1.0).reshape(())], samples=samples)
        for step in range(6):
            take_step(reducer, step, [2, 3])

    run_engines(2, train)


def test_sums_take_no_samples():
    """They are weights of an average."""

    def train(engine: Engine) -> None:
        reducer = make_reducer(engine, NAMED, op=rr.SUM)
        with pytest.raises(rr.ConfigError, match="Average"):
            reducer.reduce([VALUES, np.float32(1.0).reshape(())], samples=3)

    run_engines(2, train)


def test_ranks_that_have_joined_have_no_weight():
    """The others go on with the mean over their samples."""

    def train(engine: Engine) -> None:
        reducer, rank = make_reducer(engine, NAMED), engine.communicator.rank
        for step in range(5):
            take_step(reducer, step, [3, 1, 2])
        if rank == 1:
            engine.wait(engine.join())
            return
        for step in range(4):
            mine = [VALUES * np.float32(rank + 1 + step), np.float32(1.0).reshape(())]
            (a, _) = reducer.reduce(mine, samples=[3, 1, 2][rank])
            np.testing.assert_allclose(a, VALUES * ((1 + step) * 3 + (3 + step) * 2) / 5, rtol=1e-5)
        engine.wait(engine.join())

    run_engines(3, train)


def test_a_sampler_that_does_not_know_the_numbers_is_an_error_without_them():
    """As with ends that are uneven, or where several samplers divide by speed."""

    def train(engine: Engine) -> None:
        reducer = make_reducer(engine, NAMED)
        batches = Batches(3, "uneven", by_speed=True)
        batches.counts = [4, 2]
        engine.attached[Shares].batches.add(batches)
        with pytest.raises(rr.ConfigError, match="samples"):
            reducer.reduce([VALUES, np.float32(1.0).reshape(())])
        take_step(reducer, 0, [4, 2])
        batches.ends, batches.left = "repeat", 1
        a, _ = reducer.reduce([VALUES * np.float32(engine.communicator.rank), np.float32(1.0).reshape(())])
        np.testing.assert_allclose(a, VALUES / 3, rtol=1e-5)

    run_engines(2, train)
