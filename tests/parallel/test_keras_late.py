"""Keras on the backend that KERAS_BACKEND names: late averages, and averages by numbers of samples.

The reference is a linear model in NumPy, in float64, which has the batches of all ranks.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

keras = pytest.importorskip("keras")

import ringreduce as rr  # noqa: E402
import ringreduce.keras as hvd  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
BACKEND = keras.backend.backend()
STEPS = 7
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def rows(step: int, *, equal: bool = False) -> list[int]:
    """Return how many samples each rank has in a step."""
    return [3] * SIZE if equal or step == 4 else [1 + 2 * rank + (rank == 0) * (step % 3) for rank in range(SIZE)]


def batch(rank: int, step: int, count: int) -> tuple[Any, Any]:
    draw = np.random.default_rng([rank, step])
    x = draw.normal(size=(count, 5)).astype(np.float32)
    return x, np.sin(x[:, :3]).astype(np.float32)


def gradients(weights: list[Any], x: Any, y: Any) -> list[Any]:
    """Return those of the mean squared error."""
    rest = 2 * (x @ weights[0] + weights[1] - y) / y.size
    return [x.T @ rest, rest.sum(axis=0)]


def initial() -> list[Any]:
    draw = np.random.default_rng(1)
    return [draw.normal(size=(5, 3)), draw.normal(size=3)]


def reference(staleness: int = 0, *, equal: bool = False, synchronized: bool = True) -> list[Any]:
    """Return the weights of one process that delays, with a momentum of 0.5."""
    weights, waiting, moving = initial(), deque[Any](), [0.0, 0.0]
    for step in range(STEPS + staleness * synchronized):
        if step < STEPS:
            counts = rows(step, equal=equal)
            whole = [np.concatenate(each) for each in zip(*map(batch, range(SIZE), [step] * SIZE, counts), strict=True)]
            waiting.append(gradients(weights, *whole))
        if step >= staleness:
            moving = [0.5 * v - 0.1 * g for v, g in zip(moving, waiting.popleft(), strict=True)]
            weights = [w + v for w, v in zip(weights, moving, strict=True)]
    return weights


def linear() -> Any:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    model.set_weights([each.astype(np.float32) for each in initial()])
    return model


def sgd(**options: Any) -> Any:
    return hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5), **options)


class Data(keras.utils.PyDataset):  # type: ignore[misc]
    """This rank's batches."""

    def __init__(self, *, equal: bool) -> None:
        super().__init__()
        self._equal = equal

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> tuple[Any, Any]:
        return batch(RANK, step, rows(step, equal=self._equal)[RANK])


def assert_weights(model: Any, expected: list[Any]) -> None:
    """Check weights against a reference, and that they have the same bits on all ranks."""
    mine = model.get_weights()
    for one, other in zip(mine, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    assert len(set(hvd.allgather_object(b"".join(each.tobytes() for each in mine)))) == 1


def applied(optimizer: Any, variables: list[Any], values: list[Any]) -> None:
    optimizer.apply([keras.ops.convert_to_tensor(each.astype(np.float32)) for each in values], variables)


def descend(optimizer: Any, model: Any, steps: range) -> None:
    """Make steps with gradients of this rank, at once."""
    for step in steps:
        x, y = batch(RANK, step, rows(step, equal=True)[RANK])
        applied(optimizer, model.trainable_variables, gradients(model.get_weights(), x, y))


# ---- late averages ----


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_fit_trains_as_one_process_that_delays(staleness: int, eagerly: bool) -> None:
    """The callback applies the last averages; without it, `synchronize` still has them to apply."""
    for callbacks in ([hvd.callbacks.BroadcastGlobalVariablesCallback(0)], [hvd.callbacks.MetricAverageCallback()]):
        model = linear()
        model.compile(sgd(staleness=staleness), loss="mse", run_eagerly=eagerly)
        model.fit(Data(equal=True), shuffle=False, verbose=0, callbacks=callbacks)
        ended = isinstance(callbacks[0], hvd.callbacks.BroadcastGlobalVariablesCallback)
        assert_weights(model, reference(staleness, equal=True, synchronized=ended))
        model.optimizer.synchronize()
        assert_weights(model, reference(staleness, equal=True))
        model.optimizer.synchronize()  # nothing is pending
        assert_weights(model, reference(staleness, equal=True))


def test_steps_at_once_delay_and_a_saved_model_has_all_of_them(tmp_path: Any) -> None:
    model, optimizer = linear(), sgd(staleness=2)
    model.compile(optimizer, loss="mse")
    descend(optimizer, model, range(STEPS))
    assert_weights(model, reference(2, equal=True, synchronized=False))
    optimizer.synchronize()
    assert_weights(model, reference(2, equal=True))
    model.save(tmp_path / "model.keras")
    assert_weights(keras.saving.load_model(tmp_path / "model.keras"), reference(2, equal=True))


def test_local_variables_are_not_late() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), staleness=1, scale_local_gradients=False)
    common, own = keras.Variable(np.zeros(3, np.float32)), keras.Variable(np.zeros(3, np.float32))
    optimizer.register_local_var(own)
    for step in range(3):
        applied(optimizer, [common, own], [np.full(3, 1.0 + RANK + step), np.full(3, 1.0 + RANK)])
    mean = 1 + (SIZE - 1) / 2
    np.testing.assert_allclose(keras.ops.convert_to_numpy(own), -3 * (1 + RANK))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(common), -(2 * mean + 1))
    optimizer.synchronize()
    np.testing.assert_allclose(keras.ops.convert_to_numpy(own), -3 * (1 + RANK))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(common), -(3 * mean + 3))


def test_loss_scales_and_accumulation_are_refused() -> None:
    """Also where Keras puts the scale around the optimizer, which stays what it is."""
    SGD, Scaled = keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer  # noqa: N806
    with pytest.raises(rr.ConfigError, match="staleness"):
        hvd.DistributedOptimizer(Scaled(SGD(0.1)), staleness=1)
    with pytest.raises(rr.ConfigError, match="staleness"):
        hvd.DistributedOptimizer(SGD(0.1, gradient_accumulation_steps=2), staleness=1)
    with pytest.raises(rr.ConfigError, match="gradient_accumulation_steps"):
        sgd(staleness=1, backward_passes_per_step=2)
    optimizer, model = sgd(staleness=1), linear()
    with pytest.raises(rr.ConfigError, match="staleness"):
        Scaled(optimizer)
    descend(optimizer, model, range(STEPS))
    assert_weights(model, reference(1, equal=True, synchronized=False))


# ---- numbers of samples ----


class Counting(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets an optimizer's number of samples before each step."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.optimizer.samples = rows(batch)[RANK]


def count_in_fit(optimizer: Any, counting: Any, **compiled: Any) -> None:
    """Check that an optimizer's steps average by numbers of samples that are set on another object."""
    model = linear()
    model.compile(optimizer, loss="mse", **compiled)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Counting(counting)]
    model.fit(Data(equal=False), shuffle=False, verbose=0, callbacks=callbacks)
    assert_weights(model, reference())


@pytest.mark.parametrize("eagerly", [False, True])
def test_fit_averages_over_samples(eagerly: bool) -> None:
    """Compiled steps see new numbers; the weights are those of one process with the whole batch."""
    optimizer = sgd()
    count_in_fit(optimizer, optimizer, run_eagerly=eagerly)


def test_a_loss_scale_around_the_optimizer_leaves_the_samples() -> None:
    """The program may set them on either object."""
    for inner in (True, False):
        optimizer = sgd()
        scaled = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
        count_in_fit(scaled, optimizer if inner else scaled)


@pytest.mark.skipif(BACKEND != "jax", reason="other backends see numbers that come later")
def test_numbers_that_come_after_a_compiled_step_are_refused() -> None:
    optimizer, model = sgd(), linear()
    descend(optimizer, model, range(1))
    with pytest.raises(rr.ConfigError, match="before the first step"):
        optimizer.samples = 3


def test_shares_and_loading_are_there() -> None:
    assert 0 < hvd.share() <= 1
    assert list(hvd.loading([1, 2])) == [1, 2]
