"""DiLoCo whose outer steps do not wait for all replicas, against closed forms in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.training.binding.host import ArraySpec
from ringreduce.training.optimizers import syncer
from ringreduce.training.optimizers.replicas import Replicas

COUNT, PERIOD = 7, 3
LR, MU = 0.5, 0.5  # Small whole numbers stay exact.


class Model:
    """One array of weights, which a rank's steps change by what the test says."""

    def __init__(self, **options: Any) -> None:
        self.weights = np.arange(float(COUNT))
        how = {"period": PERIOD, "outer_lr": LR, "outer_momentum": MU, "replica": "rank", "compression": None}
        self.local = Replicas(**{**how, **options})
        self.local.bind([("w", ArraySpec((COUNT,), np.dtype(np.float64)))], self._read, self._write)
        self.local.before_step()  # The first one compares the weights of all ranks.
        self._begun = False

    def _read(self, place: slice) -> Sequence[Any]:
        return [self.weights][place]

    def _write(self, place: slice, arrays: Sequence[Any]) -> None:
        (self.weights,) = arrays

    def learn(self, change: float) -> None:
        """Make the steps of a period, which together change the weights by so much."""
        for step in range(PERIOD):
            if self._begun:
                self.local.before_step()
            self._begun = True
            if step == 0:
                self.weights = self.weights + change
            self.local.after_step()


class Outer:
    """The closed form: weights and momentum after outer steps."""

    def __init__(self) -> None:
        self.weights, self.momentum = np.arange(float(COUNT)), np.zeros(COUNT)

    def step(self, changes: Sequence[float], shares: Sequence[float], lr: float = LR, mu: float = MU) -> None:
        delta = -np.average(changes, weights=shares)
        momentum = mu * self.momentum + delta
        if mu:
            self.momentum = momentum
        self.weights = self.weights - lr * (delta + mu * momentum)


@pytest.fixture
def talk(world: rr.Communicator) -> Callable[[int, int], None]:
    """What holds a rank back until another one says that it may go on."""

    def go(source: int, dest: int) -> None:
        if world.rank == source:
            world.send(np.zeros(1), dest, 5)
        elif world.rank == dest:
            world.recv(np.zeros(1), source, 5)

    return go


def test_all_replicas_are_plain_diloco(world: rr.Communicator) -> None:
    """With a quorum of all, outer steps are those without one; `synchronize` averages without momentum."""
    model, outer = Model(quorum=world.size), Outer()
    for number in range(3):
        changes = [8.0 * world.size * (rank + number) for rank in range(world.size)]
        model.learn(changes[world.rank])
        outer.step(changes, [1] * world.size)
        assert model.local.outer_steps == number + 1
        np.testing.assert_array_equal(model.weights, outer.weights)
    model.weights = model.weights + world.rank
    model.local.synchronize()
    outer.step(range(world.size), [1] * world.size, lr=1.0, mu=0.0)
    np.testing.assert_allclose(model.weights, outer.weights, rtol=1e-14)
    assert len({each.tobytes() for each in world_of(model.weights)}) == 1


def world_of(array: Any) -> Any:
    """Return the arrays of all ranks."""
    return rr.allgather(array[None])


@pytest.mark.sizes(2, 3, 4)
def test_a_replica_that_comes_late(
    world: rr.Communicator, talk: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps are made without the last one; it goes on from theirs at once, and counts by a third in the next."""
    monkeypatch.setattr(syncer, "_AT_ONCE", math.inf)
    last = world.size - 1
    model, outer = Model(quorum=last), Outer()
    changes = [12.0 * (rank + 1) for rank in range(world.size)]
    for number in range(2):
        outer.step(changes[:last], [1] * last)
        if world.rank != last:
            model.learn(changes[world.rank])
            assert model.local.outer_steps == number + 1
            np.testing.assert_array_equal(model.weights, outer.weights)
    talk(0, last)
    if world.rank == last:
        model.learn(changes[last])
        assert model.local.outer_steps == 2
        np.testing.assert_array_equal(model.weights, outer.weights)
    talk(last, 0)
    world.barrier()
    outer.step(changes, [1] * last + [1 / 3])
    if world.rank != last:
        model.learn(changes[world.rank])
        np.testing.assert_allclose(model.weights, outer.weights, rtol=1e-14)
    world.barrier()
    if world.rank == last:  # It is late again, by one step; then all come in time.
        model.learn(0.0)
        assert model.local.outer_steps == 3
        np.testing.assert_allclose(model.weights, outer.weights, rtol=1e-14)
    world.barrier()
    model.local.synchronize()
    outer.step([0.0] * (world.size + 1), [1] * world.size + [1 / 2], lr=1.0, mu=0.0)
    np.testing.assert_allclose(model.weights, outer.weights, rtol=1e-14)
    assert len({each.tobytes() for each in world_of(model.weights)}) == 1


@pytest.mark.sizes(3, 4)
def test_a_replica_counts_by_its_ranks(world: rr.Communicator, nodes_of: Callable[[int | None], None]) -> None:
    """A node of two ranks has one difference, of two shares; the others one each."""
    nodes_of(2)
    size = rr.size()
    model, outer = Model(quorum=2, replica="node"), Outer()
    changes = [10.0, 40.0]  # of the ranks of the first node, and of the second
    for _ in range(2):
        model.learn(changes[0 if rr.rank() < 2 else 1])
        outer.step(changes, [2, size - 2])
        np.testing.assert_allclose(model.weights, outer.weights, rtol=1e-14)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("behind", [0, 1])
def test_a_run_goes_on_from_its_states(world: rr.Communicator, behind: int) -> None:
    """In the middle of a period; a rank whose state has fewer outer steps counts as late, also the first."""
    model, outer = Model(quorum=world.size), Outer()
    changes = [6.0 * (rank + 1) for rank in range(world.size)]
    model.learn(changes[world.rank])
    old = model.local.state_dict(), model.weights
    outer.step(changes, [1] * world.size)
    model.learn(changes[world.rank])
    outer.step(changes, [1] * world.size)
    model.local.before_step()
    model.weights = model.weights + 2.0
    model.local.after_step()
    state, weights = old if world.rank == behind else (model.local.state_dict(), model.weights)
    again = Model(quorum=world.size)
    again.weights = weights
    again.local.load_state_dict(state)
    again.weights = again.weights + 1.0
    again.local.synchronize()
    if behind == 0:
        outer.momentum[:] = np.asarray(old[0]["averages"][0].get("momentum", 0.0))
        outer.momentum = rr.broadcast(outer.momentum)
    shares = [1 / 2 if rank == behind else 1 for rank in range(world.size)]
    outer.step([1.0 if rank == behind else 3.0 for rank in range(world.size)], shares, lr=1.0, mu=0.0)
    np.testing.assert_allclose(again.weights, outer.weights, rtol=1e-14)
    again.learn(changes[world.rank])
    outer.step(changes, [1] * world.size)
    np.testing.assert_allclose(again.weights, outer.weights, rtol=1e-14)
    with pytest.raises(rr.ConfigError, match="without a quorum"):
        again.local.load_state_dict({name: value for name, value in state.items() if name != "outer_steps"})


@pytest.mark.sizes(2, 3)
def test_a_new_world_averages_what_each_has_learnt(world: rr.Communicator) -> None:
    """In the first period and in a later one; the outer momentum stays."""
    changes = [6.0 * (rank + 1) for rank in range(world.size)]
    for periods in (0, 1):
        rr.init()
        model, outer = Model(quorum=world.size), Outer()
        for _ in range(periods):
            model.learn(changes[rr.rank()])
            outer.step(changes, [1] * rr.size())
        if periods:
            model.local.before_step()
        model.weights = model.weights + changes[rr.rank()]
        model.local.after_step()
        rr.shutdown()
        rr.init()
        model.local.rejoin()
        outer.step(changes, [1] * rr.size(), lr=1.0, mu=0.0)
        np.testing.assert_allclose(model.weights, outer.weights, rtol=1e-14)
        model.learn(changes[rr.rank()])
        outer.step(changes, [1] * rr.size())
        np.testing.assert_allclose(model.weights, outer.weights, rtol=1e-14)
        model.local.synchronize()
        rr.shutdown()


@pytest.mark.sizes(2, 3)
def test_equal_numbers_of_batches_end_where_one_is_late(
    world: rr.Communicator, talk: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have all their steps behind them and wait in `synchronize`; the last goes on to its end."""
    monkeypatch.setattr(syncer, "_AT_ONCE", math.inf)
    last = world.size - 1
    model = Model(quorum=last)
    if world.rank == last:
        talk(0, last)
    for _ in range(2):
        model.learn(1.0)
    if world.rank != last:
        talk(0, last)
    model.local.synchronize()
    assert len({each.tobytes() for each in world_of(model.weights)}) == 1


def test_wrong_quorums(world: rr.Communicator) -> None:
    for wrong, words in (
        ({"quorum": 0}, "quorum must be at least 1"),
        ({"quorum": 1.5}, "whole number"),
        ({"quorum": world.size + 1}, "quorum must be at most"),
        ({"quorum": 1, "delay": 1}, "quorum goes without"),
        ({"quorum": 1, "compression": "int8"}, "quorum goes without"),
    ):
        with pytest.raises(rr.ConfigError, match=words):
            Model(**wrong)
    if world.size > 1:
        with pytest.raises(rr.RingReduceError, match="quorum"):
            Model(quorum=1 if world.rank == 0 else 2)


@pytest.mark.sizes(2, 3)
def test_too_few_replicas_are_named(world: rr.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how many are needed, on those that wait."""
    monkeypatch.setenv("RINGREDUCE_TIMEOUT", "1.5")
    rr.shutdown()
    rr.init()
    model = Model(quorum=rr.size())
    if rr.rank() < rr.size() - 1:
        with pytest.raises(rr.CollectiveTimeoutError, match=f"needs {rr.size()} of {rr.size()} replicas"):
            model.learn(1.0)
    rr.shutdown()
