"""Keras: several fits, backups and early ends of `fit`, and metrics of several numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

keras = pytest.importorskip("keras")
from trainees.with_keras import line, product  # noqa: E402

import ringreduce as rr  # noqa: E402
import ringreduce.keras as hvd  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several = pytest.mark.sizes(2, 3, 4)
# Of Keras, when it reads variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn.t accept a copy:DeprecationWarning")


def fit(model: Any, targets: Any, **options: Any) -> Any:
    targets = np.asarray(targets, np.float32).reshape(-1, 1)
    return model.fit(np.ones_like(targets), targets, batch_size=1, shuffle=False, verbose=0, **options)


def weight(model: Any) -> float:
    return float(keras.ops.convert_to_numpy(model.weights[0].value).item())


@pytest.mark.parametrize("state", [pytest.param("callback", marks=pytest.mark.smoke), "elastic"])
def test_sums_of_passes_that_a_fit_leaves_stay_those_of_their_ranks(state: str) -> None:
    """Fits of 4 batches with 3 passes to a step: the second step has a pass of the first fit."""
    model = line(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)))
    own = RANK + np.arange(12.0)
    mean = (SIZE - 1) / 2 + np.arange(12.0)
    elastic = hvd.elastic.KerasState(model)
    for number in range(3):
        if state == "elastic":
            elastic.sync()
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if state == "callback" else []
        fit(model, own[4 * number : 4 * number + 4], callbacks=callbacks)
        steps = 4 * (number + 1) // 3
        assert weight(model) == pytest.approx(-mean[: 3 * steps].sum() / 3, rel=1e-6)


def test_a_rank_that_resumes_within_a_step_gives_all_of_it_to_the_others() -> None:
    model = line(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)))
    model.optimizer.build(model.trainable_variables)
    if RANK == 0:  # as from a file: one pass is made
        for each in model.optimizer.variables:
            if each.name != "learning_rate":
                each.assign(np.ones(each.shape))
    fit(model, [3.0], callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert weight(model) == pytest.approx(-2.0)


def stopped(model: Any, targets: Any, callbacks: Any) -> None:
    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise InterruptedError

    with pytest.raises(InterruptedError):
        fit(model, targets, epochs=4, callbacks=[*callbacks, Stop()])


@pytest.mark.smoke
def test_a_backup_of_rank_0_alone_is_where_all_ranks_go_on(tmp_path: Path) -> None:
    """Where it stands before the callback that broadcasts; with its epoch, and as without an interruption."""
    own = RANK + np.arange(3.0)

    def callbacks(first: bool = True) -> list[Any]:
        backup = [keras.callbacks.BackupAndRestore(tmp_path)] if RANK == 0 else []
        broadcast = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        return [*backup, *broadcast] if first else [*broadcast, *backup]

    stopped(line(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))), own, callbacks())
    if SIZE > 1:
        model = line(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)))
        with pytest.raises(rr.MismatchError, match=r"BackupAndRestore .* before BroadcastGlobalVariablesCallback"):
            fit(model, own, epochs=4, callbacks=callbacks(first=False))
    model = line(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)))
    assert fit(model, own, epochs=4, callbacks=callbacks()).epoch == [2, 3]
    whole, velocity = 0.0, 0.0
    for gradient in np.tile((SIZE - 1) / 2 + np.arange(3.0), 4):
        velocity = 0.5 * velocity - gradient
        whole += velocity
    assert weight(model) == pytest.approx(whole, rel=1e-5)


def test_weights_that_a_later_callback_loads_on_rank_0_reach_all_ranks() -> None:
    class Loads(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            if RANK == 0:
                self.model.set_weights([np.full((1, 1), 5.0)])
                self.model.optimizer.variables[0].assign(7)

    model = line(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    fit(model, [1.0], callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Loads()])
    assert weight(model) == pytest.approx(4.0)
    assert int(keras.ops.convert_to_numpy(model.optimizer.variables[0].value)) == 8


@pytest.mark.smoke
@several
@pytest.mark.parametrize("way", ["nan", "early"])
def test_a_fit_that_ends_on_one_rank_alone_is_an_error_on_all_at_once(way: str) -> None:
    """And one that ends on all is none, within an epoch or at its end."""
    targets = 1.0 + np.arange(6.0)
    model = line(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    if way == "nan":
        stop: Any = [begin, keras.callbacks.TerminateOnNaN()]
        everywhere = np.where(targets == 3.0, np.nan, targets)
    else:
        stop = [begin, keras.callbacks.EarlyStopping("loss", baseline=0.0, patience=1, min_delta=1.0)]
        everywhere = targets
    # The weight is NaN after the first epoch of a NaN, or stays.
    assert len(fit(model, everywhere, epochs=4, callbacks=stop).epoch) < 4
    model.set_weights([np.zeros((1, 1))])
    only = [*stop] if RANK == 0 else [begin]
    mine = everywhere if RANK == 0 else targets
    with pytest.raises(rr.MismatchError, match=r"the end of fit.*model\.stop_training") as caught:
        fit(model, mine, epochs=4, callbacks=only)
    assert sorted(caught.value.values) == list(range(SIZE))
    assert ("the loss is nan" in str(caught.value)) == (way == "nan")
    assert rr.allgather_object(RANK) == list(range(SIZE))  # the ranks are in step


class StopsAt(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets `stop_training` after so many batches of all epochs."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        self.model.stop_training |= self.left == 0


@several
def test_fits_that_end_after_as_many_steps_are_right_wherever_their_epochs_end() -> None:
    """Ranks may name other batches and epochs, and other losses; nothing is wrong where no gradients are reduced."""
    begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model = line(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    targets = np.full(6, np.nan) if RANK == 0 else np.ones(4)
    fit(model, targets, callbacks=[begin, StopsAt(4)], epochs=1 if RANK == 0 else 3)
    alone = line(keras.optimizers.SGD(0.0))
    fit(alone, np.ones(3), epochs=4, callbacks=[begin, *([StopsAt(2)] if RANK == 0 else [])])
    assert rr.allgather_object(RANK) == list(range(SIZE))


@pytest.mark.smoke
@several
def test_fits_end_early_while_other_ranks_have_joined() -> None:
    """Rank 0 has fewer batches; the others end before their last one."""
    model = line(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model, np.ones(2 if RANK == 0 else 6), callbacks=[begin, StopsAt(4)])
    assert hvd.join() in range(1, SIZE)
    assert rr.allgather_object(RANK) == list(range(SIZE))


class Several(keras.metrics.Metric):  # type: ignore[misc]
    """Of two numbers and one by itself: the sum of the targets, and how many there were."""

    def __init__(self, name: str = "several") -> None:
        super().__init__(name=name)
        self.total = self.add_weight(shape=(1, 2), initializer="zeros", name="total")

    def update_state(self, true: Any, predicted: Any, sample_weight: Any = None) -> None:
        found = keras.ops.stack([keras.ops.sum(true), keras.ops.cast(keras.ops.size(true), "float32")])
        self.total.assign(self.total + keras.ops.reshape(found, (1, 2)))

    def result(self) -> Any:
        return self.total / 1.0


@pytest.mark.smoke
def test_a_metric_of_several_numbers_is_averaged_one_by_one() -> None:
    """Weighted by the numbers of samples, as any other."""
    model = line(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    model.compile(model.optimizer, loss=product, metrics=[Several()])
    targets = np.full((2 * (RANK + 1), 1), RANK + 1.0, np.float32)
    step = {"batch_size": RANK + 1, "shuffle": False, "verbose": 0}  # all ranks make two steps
    history = model.fit(
        np.ones_like(targets), targets, callbacks=[hvd.callbacks.MetricAverageCallback()], **step
    ).history
    counts = 2.0 * (1 + np.arange(SIZE))
    expected = [np.average(counts * counts / 2, weights=counts), np.average(counts, weights=counts)]
    np.testing.assert_allclose(history["several"][0], [expected], rtol=1e-6)
    assert isinstance(history["loss"][0], float)
    json.dumps(history["loss"])
