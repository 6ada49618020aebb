"""Keras: weights that differ, gradients that are no numbers and data that all ranks share are found; steps count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

keras = pytest.importorskip("keras")

import ringreduce as rr  # noqa: E402
import ringreduce.keras as hvd  # noqa: E402
from ringreduce.runtime.process import PROCESS  # noqa: E402
from ringreduce.testing import caught  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several = pytest.mark.sizes(2, 3, 4)
# Of Keras, when it reads variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn.t accept a copy:DeprecationWarning")
ROWS, STEPS = 3, 6

#: Ways of making an optimizer, and what `compile` gets besides.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "late": {"staleness": 1},
    "in passes": {"backward_passes_per_step": 2},
    "scaled": {},
}


class Own(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """Has other values on each rank, as a schedule has that is read in another step; wraps a schedule, if given."""

    def __init__(self, wrapped: Any = None) -> None:
        self.wrapped = wrapped

    def __call__(self, step: Any) -> Any:
        return 0.25 + RANK

    def get_config(self) -> dict[str, Any]:
        return super().get_config() if self.wrapped is None else {"wrapped": self.wrapped, "name": f"rank_{RANK}"}


def decay(begin: float) -> Any:
    return keras.optimizers.schedules.ExponentialDecay(begin, 10, 0.5)


def train(
    way: str,
    *,
    begin: int = 5,
    data: int = RANK,
    spoil: Any = None,
    callbacks: Any = (),
    local: Any = (),
    epochs: int = 1,
    make: Any = lambda: keras.optimizers.SGD(0.01),
) -> Any:
    """Return a model after some steps, from the weights of a seed, on data of a seed.

    Args:
        way: of making the optimizer.
        begin, data: the seeds.
        spoil: rows of the data that are no numbers.
        callbacks: of `fit`.
        local: names of layers whose variables are this rank's own.
        epochs: how many.
        make: makes an optimizer.
    """
    keras.utils.set_random_seed(begin)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(2, name="b")])
    optimizer = hvd.PartialDistributedOptimizer(
        make(), local_layers=[model.get_layer(name) for name in local], **WAYS[way]
    )
    if way == "scaled":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
    model.compile(optimizer, loss="mse")
    draw = np.random.default_rng(data)
    x, y = draw.normal(size=(STEPS * ROWS, 4)).astype("f"), draw.normal(size=(STEPS * ROWS, 2)).astype("f")
    if spoil is not None:
        x[spoil] = np.nan
    own = [hvd.callbacks.MetricAverageCallback(), *callbacks]
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, epochs=epochs, callbacks=own)
    return model


@several
@pytest.mark.parametrize("way", [pytest.param("plain", marks=pytest.mark.smoke), *list(WAYS)[1:]])
def test_rank_0_warns_if_the_ranks_begin_with_different_weights(way: str, warned: Any) -> None:
    """Once, in the words of Keras; not if they were broadcast, nor of the weights of local layers."""
    train(way, begin=RANK, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    if way != "scaled":  # losses are not scaled where some variables are local
        train(way, begin=RANK, local=("a", "b"))
    assert not warned("different weights")
    train(way, begin=RANK)
    found = warned("begin with different weights")
    assert len(found) == (RANK == 0)
    assert all("BroadcastGlobalVariablesCallback(0)" in each for each in found)


@several
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_train_on_the_same_data_are_told(way: str, warned: Any) -> None:
    """Rank 0 warns once, and names what divides data in Keras; not if data are different."""
    train(way, data=RANK)
    assert not warned("train on the same data")
    train(way, data=1)
    found = warned("train on the same data")
    assert len(found) == (RANK == 0)
    assert all("keras.utils.PyDataset" in each and "DataLoader" not in each for each in found)


@several
@pytest.mark.parametrize("way", [pytest.param("plain", marks=pytest.mark.smoke), "in passes", "scaled"])
def test_rates_that_differ_between_ranks_are_told(way: str, warned: Any) -> None:
    """Rank 0 warns once: names, values, ranks and what helps. Ranks compare theirs in steps 2, 4, 8 and so on."""
    for own in (False, True):
        assert not warned("hyper-parameters")
        rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 ** (epoch + own * epoch * (RANK == 1)))  # noqa: B023
        train(way, callbacks=[rates], epochs=3)
    found = warned("hyper-parameters")
    assert len(found) == (RANK == 0)
    others = "rank 0" if SIZE == 2 else f"ranks 0, 2{'-3' * (SIZE == 4)}"
    assert all(f"learning_rate is 0.5 on {others}, 0.25 on rank 1." in each for each in found)
    assert all("comes behind MetricAverageCallback()" in each for each in found)


@several
def test_a_schedule_behind_averaged_metrics_is_the_same_on_all_ranks(warned: Any) -> None:
    """ReduceLROnPlateau on losses of different data: the rates are equal, and nobody warns."""
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0)
    model = train("plain", callbacks=[plateau], epochs=4)
    rates = rr.allgather_object(float(model.optimizer.learning_rate))
    assert rates == [rates[0]] * SIZE
    assert rates[0] < 0.01
    assert not warned("hyper-parameters")


@several
@pytest.mark.parametrize("way", ["plain", "late"])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: keras.optimizers.SGD(0.01, momentum=0.5 + RANK * 0.1), "momentum is 0.5 on rank 0"),
        (lambda: keras.optimizers.Adam(0.01, clipnorm=RANK + 1.0), "clipnorm is 1.0 on rank 0"),
        (lambda: (keras.optimizers.Adam if RANK else keras.optimizers.AdamW)(0.01), "the optimizer is AdamW on rank 0"),
        (lambda: keras.optimizers.SGD(decay(0.25 + RANK)), "initial_learning_rate of learning_rate is 0.25 on rank 0"),
        (lambda: keras.optimizers.SGD(decay(0.25)), ""),
        (
            lambda: keras.optimizers.SGD(Own(decay(0.25 + RANK))),
            "initial_learning_rate of wrapped of learning_rate is 0.25 on rank 0",
        ),
        (lambda: keras.optimizers.SGD(Own(decay(0.25))), ""),
        (lambda: keras.optimizers.SGD(Own() if RANK else decay(0.25)), "learning_rate is ExponentialDecay on rank 0"),
        (lambda: keras.optimizers.SGD(Own()), ""),
        (lambda: keras.optimizers.SGD(lambda: 0.25 + RANK), ""),
        (lambda: keras.optimizers.Lion(0.01, name=f"rank_{RANK}"), ""),
    ],
    ids=[
        "momentum",
        "clipping",
        "class",
        "schedule",
        "equal schedules",
        "schedule in a schedule",
        "values of a schedule",
        "class of a schedule",
        "no config",
        "function",
        "names",
    ],
)
def test_any_argument_of_an_optimizer_counts(way: str, make: Any, text: str, warned: Any) -> None:
    """Those of its constructor and of a schedule's, but names; with staleness they are compared in the first step.

    Values of schedules and functions do not count.
    """
    train(way, make=make)
    found = warned("hyper-parameters")
    assert len(found) == (RANK == 0 and text != "")
    assert all(text in each for each in found)


@several
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_differ_are_an_error(checked: None, way: str) -> None:
    """RINGREDUCE_CHECK=2: on all ranks, before the second step of a program that has not broadcast."""
    error = caught(lambda: train(way, begin=RANK))
    assert isinstance(error, rr.MismatchError)
    assert "have the checksum" in str(error)
    assert "before step 1" in str(error)


@several
@pytest.mark.parametrize("way", [pytest.param("plain", marks=pytest.mark.smoke), "late", "in passes"])
def test_what_is_no_number_names_gradient_and_rank(checked: None, way: str) -> None:
    """RINGREDUCE_CHECK_FINITE=1: an error on all ranks before it is reduced."""
    error = caught(lambda: train(way, spoil=slice(2 * ROWS, None) if RANK == 1 else None))
    assert isinstance(error, rr.NotFiniteError)
    assert "holds NaN or infinity on rank 1" in str(error)


@pytest.mark.smoke
@pytest.mark.parametrize("around", [True, False], ids=["around", "given"])
def test_a_loss_scale_finds_overflows_itself_in_a_checked_job(checked: None, around: bool) -> None:
    """The first steps of a scale that is still too large ended the job. All ranks leave out the same step."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    scaled = keras.optimizers.LossScaleOptimizer
    optimizer = keras.optimizers.SGD(0.5)
    optimizer = (
        scaled(hvd.DistributedOptimizer(optimizer), initial_scale=2.0**120)
        if around
        else hvd.DistributedOptimizer(scaled(optimizer, initial_scale=2.0**120))
    )
    model.compile(optimizer, loss="mse")
    x = np.full((3, 1), 1.0, np.float32)
    x[0] = 2.0**20 if RANK == SIZE - 1 else 1.0
    model.fit(x, np.zeros((3, 1)), batch_size=1, shuffle=False, verbose=0)
    assert float(optimizer.dynamic_scale) == 2.0**119
    assert model.get_weights()[0].tolist() == [[0.0]]


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_counted_for_top(way: str) -> None:
    """Each step of the optimizer, whatever the number of ranks; passes that only add up are none."""
    recorder = PROCESS.rank_here().observer.recorder
    before = recorder.steps
    train(way)
    assert recorder.steps - before == STEPS // (2 if way == "in passes" else 1)
