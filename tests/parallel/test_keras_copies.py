"""Keras: copies of models and optimizers, and what is saved and loaded, train on all ranks together, or say so."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
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
# Of Keras, when it reads variables, and when it copies an optimizer without its model.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn.t accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning"),
]
SGD, Scaled = keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer


keras.saving.register_keras_serializable("tests_of_copies")(product)


def moved(model: Any, gradient: float = RANK + 1.0, batches: int = 1) -> float:
    """Return by how much batches with such a gradient move the weight."""
    before = float(model.get_weights()[0].item())
    targets = np.full((batches, 1), gradient, np.float32)
    model.fit(np.ones_like(targets), targets, batch_size=1, shuffle=False, verbose=0)
    return before - float(model.get_weights()[0].item())


MEAN = (SIZE + 1) / 2

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
}
OF_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    **COPIES,
    "config": lambda made: made.__class__.from_config(made.get_config()),
    "own class": lambda made: type(made).from_config(made.get_config()),
    "dict": lambda made: keras.optimizers.deserialize(copy.deepcopy(keras.optimizers.serialize(made))),
}


@pytest.mark.parametrize("scaled", [pytest.param(False, marks=pytest.mark.smoke), True], ids=["plain", "loss scale"])
def test_copies_of_models_train_on_all_ranks(scaled: bool) -> None:
    """With their optimizer's state and options, and a step of their own."""

    def make() -> Any:
        made = hvd.DistributedOptimizer(SGD(1.0, momentum=0.5), op=hvd.Sum)
        return Scaled(made, initial_scale=2.0) if scaled else made

    model = line(make())
    total = SIZE * MEAN
    assert moved(model) == pytest.approx(total)
    copies = {name: make(model) for name, make in COPIES.items()}
    clone = keras.models.clone_model(model)
    clone.compile_from_config(model.get_compile_config())
    for name, each in copies.items():
        assert moved(each) == pytest.approx(1.5 * total), name
    assert moved(clone) == pytest.approx(total)
    again = keras.models.clone_model(model)
    again.compile(make(), loss=product)
    assert moved(again) == pytest.approx(total)
    assert moved(model) == pytest.approx(1.5 * total)


@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.smoke)])
def test_copies_of_optimizers_are_distributed_with_their_options(passes: int) -> None:
    original = hvd.DistributedOptimizer(SGD(1.0), op=hvd.Sum, backward_passes_per_step=passes)
    for name, make in OF_OPTIMIZERS.items():
        assert moved(line(make(original)), batches=passes) == pytest.approx(passes * SIZE * MEAN), name
    with pytest.raises(rr.ConfigError, match="already, as a copy of one is"):
        hvd.DistributedOptimizer(copy.copy(original))


SAVED: dict[str, tuple[dict[str, Any], Callable[[], Any], float]] = {
    "passes": ({"backward_passes_per_step": 3}, lambda: SGD(1.0), 3 * MEAN),
    "averaged passes": ({"backward_passes_per_step": 3, "average_aggregated_gradients": True}, lambda: SGD(1.0), MEAN),
    "passes of keras": ({}, lambda: SGD(1.0, gradient_accumulation_steps=3), MEAN),
    "predivided": ({"gradient_predivide_factor": 2.0, "sparse_as_dense": True}, lambda: SGD(1.0), 3 * MEAN),
    "sum": ({"op": "sum", "compression": hvd.Compression.bf16}, lambda: SGD(1.0), 3 * SIZE * MEAN),
    "late": ({"staleness": 1}, lambda: SGD(1.0), 2 * MEAN),
    "loss scale": ({"op": hvd.Sum}, lambda: Scaled(SGD(1.0), initial_scale=2.0), 3 * SIZE * MEAN),
}


@pytest.mark.parametrize("kind", [pytest.param("passes", marks=pytest.mark.smoke), *list(SAVED)[1:]])
@pytest.mark.parametrize("zipped", [True, False], ids=["file", "folder"])
def test_a_saved_model_is_loaded_with_the_options_of_its_optimizer(kind: str, zipped: bool, tmp_path: Path) -> None:
    options, make, expected = SAVED[kind]
    model = line(hvd.DistributedOptimizer(make(), **options))
    assert moved(model, batches=3) == pytest.approx(expected)
    path = tmp_path / ("model.keras" if zipped else "model")
    model.save(path, zipped=zipped)
    loaded = hvd.load_model(path)
    assert moved(loaded, batches=3) == pytest.approx(expected)
    given = hvd.load_model(path, op=hvd.Average, backward_passes_per_step=1, staleness=0, compression=None)
    assert moved(given, batches=3) == pytest.approx(MEAN if "passes" in kind else 3 * MEAN)


@pytest.mark.smoke
def test_a_model_that_keras_loads_says_that_it_trains_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, when it makes a step, on rank 0; what is never trained, or is distributed later, says nothing."""
    model = line(hvd.DistributedOptimizer(SGD(1.0)))
    model.save(tmp_path / "model.keras")
    keras.saving.load_model(tmp_path / "model.keras").predict(np.ones((1, 1)), verbose=0)
    plain = keras.saving.load_model(tmp_path / "model.keras")
    wrapped = keras.saving.load_model(tmp_path / "model.keras")
    wrapped.compile(hvd.DistributedOptimizer(wrapped.optimizer), loss=product)
    with caplog.at_level(logging.WARNING, logger="ringreduce"):
        assert moved(wrapped) == pytest.approx(MEAN)
        assert not [each for each in caplog.messages if "trains alone" in each]
        assert moved(plain) == moved(plain) == RANK + 1.0
    said = [each for each in caplog.messages if "each rank trains alone. Load the model by hvd.load_model" in each]
    assert len(said) == (SIZE > 1 and RANK == 0)


@pytest.mark.parametrize("way", ["deepcopy", "file"])
def test_variables_of_a_rank_stay_its_own(way: str, tmp_path: Path) -> None:
    """Where it is known which they are; else a copy is refused."""
    layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name=name) for name in ("own", "all")]
    model = keras.Sequential([keras.Input((1,)), *layers])
    optimizer = hvd.PartialDistributedOptimizer(SGD(0.1), local_layers=layers[0], scale_local_gradients=False)
    model.compile(optimizer, loss=product)
    model.save(tmp_path / "early.keras")
    with pytest.raises(rr.ConfigError, match="PartialDistributedOptimizer with its local_layers"):
        hvd.load_model(tmp_path / "early.keras")
    with pytest.raises(rr.ConfigError, match="PartialDistributedOptimizer with its local_layers"):
        type(optimizer).from_config(optimizer.get_config())
    x, targets = np.ones((1, 1), np.float32), np.full((1, 1), RANK + 1.0, np.float32)
    model.fit(x, targets, verbose=0)
    if way == "file":
        model.save(tmp_path / "model.keras")
        copied = hvd.load_model(tmp_path / "model.keras")
    else:
        copied = copy.deepcopy(model)
    own, shared = (float(each.item()) for each in model.get_weights())
    assert own == pytest.approx(1 - 0.1 * (RANK + 1))
    for each in (model, copied):
        each.fit(x, targets, verbose=0)
        mine, together = (float(found.item()) for found in each.get_weights())
        assert mine == pytest.approx(own - 0.1 * shared * (RANK + 1))
        others = sum((rank + 1) * (1 - 0.1 * (rank + 1)) for rank in range(SIZE)) / SIZE
        assert together == pytest.approx(shared - 0.1 * others)


@pytest.mark.sizes(2, 3, 4)
def test_a_model_of_a_process_set_asks_for_one(tmp_path: Path) -> None:
    process_set = hvd.add_process_set([0])
    try:
        model = line(hvd.DistributedOptimizer(SGD(1.0), process_set=process_set))
        assert moved(copy.deepcopy(model)) == RANK + 1.0
        model.save(tmp_path / "model.keras")
        with pytest.raises(rr.ConfigError, match=r"process set of the ranks \[0\]: give process_set="):
            hvd.load_model(tmp_path / "model.keras")
        assert moved(hvd.load_model(tmp_path / "model.keras", process_set=process_set)) == RANK + 1.0
        assert moved(hvd.load_model(tmp_path / "model.keras", process_set=hvd.global_process_set)) == MEAN
    finally:
        hvd.remove_process_set(process_set)


def test_a_pickle_is_read_by_a_process_that_is_no_rank(no_world: None) -> None:
    rr.init()
    said = pickle.dumps(line(hvd.DistributedOptimizer(SGD(1.0))))
    rr.shutdown()
    assert moved(pickle.loads(said), gradient=2.0) == 2.0
