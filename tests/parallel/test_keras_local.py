"""`DiLoCoCallback` and `LocalSGDCallback` on the backend that KERAS_BACKEND names."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

keras = pytest.importorskip("keras")

import ringreduce as rr  # noqa: E402
import ringreduce.keras as hvd  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ROWS, STEPS = 3, 6  # of each batch, of each epoch
SGD = keras.optimizers.SGD
DiLoCo, LocalSGD = hvd.callbacks.DiLoCoCallback, hvd.callbacks.LocalSGDCallback
# Of Keras, when it saves variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def data(rank: int) -> tuple[Any, Any]:
    """Return the rows of a rank."""
    draw = np.random.default_rng(5 + rank)
    return draw.normal(size=(STEPS * ROWS, 6)).astype(np.float32), draw.normal(size=(STEPS * ROWS, 3)).astype(
        np.float32
    )


def model_of(normalised: bool = False) -> Any:
    """Return a model with the same weights on all ranks."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, "tanh", name="a"), keras.layers.Dense(3, name="b")]
    if normalised:
        layers.insert(1, keras.layers.BatchNormalization(name="n"))
    return keras.Sequential([keras.Input((6,)), *layers])


def fitted(model: Any, optimizer: Any, local: Any, *, epochs: int = 2, **options: Any) -> Any:
    model.compile(optimizer, loss="mse")
    x, y = data(RANK)
    model.fit(x, y, batch_size=ROWS, epochs=epochs, callbacks=[local], shuffle=False, verbose=0, **options)
    return model


def as_numpy(value: Any) -> Any:
    return np.array(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))


def weights(model: Any) -> list[Any]:
    return [as_numpy(each) for each in model.trainable_variables]


def buffers(model: Any) -> list[Any]:
    return [as_numpy(each) for each in model.get_layer("n").non_trainable_weights]


def bits(model: Any) -> list[bytes]:
    return [as_numpy(each).tobytes() for each in model.weights]


def same_on_all_ranks(value: Any) -> bool:
    everyone = rr.allgather_object(value)
    return all(each == everyone[0] for each in everyone)


def looped(model: Any, local: Any, steps: range) -> None:
    """Train in a loop of the program's own; test_keras_suite.py has what that comes to."""
    x, y = data(RANK)
    for step in steps:
        rows = slice(step % STEPS * ROWS, (step % STEPS + 1) * ROWS)
        local.on_train_batch_begin(step)
        model.train_on_batch(x[rows], y[rows])
        local.on_train_batch_end(step)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(DiLoCo, {"period": 4, "replica": "rank"}, marks=pytest.mark.smoke),
        (DiLoCo, {"period": 5, "outer_lr": 0.7, "outer_momentum": 0.5, "delay": 2, "replica": "rank"}),
        (LocalSGD, {"period": 4}),
    ],
)
def test_a_fit_trains_as_a_loop(nodes_of_two: None, kind: Any, options: dict[str, Any]) -> None:
    """After the last step the weights are averaged; all ranks have the same bits then."""
    models = model_of(), model_of()
    for model, fits in zip(models, (True, False), strict=True):
        local = kind(**options)
        optimizer = hvd.DistributedOptimizer(SGD(0.05), process_set=local.process_set)
        if fits:
            fitted(model, optimizer, local)
            continue
        model.compile(optimizer, loss="mse")
        local.set_model(model)
        local.on_train_begin()
        looped(model, local, range(2 * STEPS))
        local.synchronize()
    for mine, other in zip(*map(weights, models), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-6)
    assert same_on_all_ranks(bits(models[0]))


class Watching(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps, in an evaluation, whether all ranks have the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.same: list[bool] = []

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not batch:
            self.same.append(same_on_all_ranks([as_numpy(each).tobytes() for each in self.model.trainable_variables]))


def test_evaluations_are_of_equal_weights() -> None:
    """In mid-period; the training goes on from the average, which all ranks have at the end as well."""
    model, local, watching = model_of(), LocalSGD(period=4, replica="rank"), Watching()
    model.compile(SGD(0.05), loss="mse")
    x, y = data(RANK)
    callbacks = [local, watching]
    options = {"validation_data": (x[:ROWS], y[:ROWS]), "shuffle": False, "verbose": 0}
    history = model.fit(x, y, batch_size=ROWS, epochs=3, callbacks=callbacks, **options)
    assert watching.same == [True] * 3
    model.evaluate(x, y, callbacks=[local], verbose=0)  # not within fit: no exchange
    assert same_on_all_ranks(bits(model))
    loss = history.history["val_loss"][-1]
    assert loss == pytest.approx(model.evaluate(x[:ROWS], y[:ROWS], verbose=0), rel=1e-5)


def test_statistics_of_batches_are_averaged_as_they_are() -> None:
    """Those of layers that train; weights of frozen layers stay. Without "buffers" each rank keeps its own."""
    for average in (("parameters", "buffers"), ("parameters",)):
        model = model_of(normalised=True)
        model.get_layer("a").trainable = False
        frozen = as_numpy(model.get_layer("a").kernel).tobytes()
        local = DiLoCo(period=STEPS, replica="rank", average=average)
        fitted(model, SGD(0.0), local, epochs=1)
        reference = model_of(normalised=True)
        reference.get_layer("a").trainable = False
        reference.compile(SGD(0.0), loss="mse")
        x, y = data(RANK)
        reference.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        own = buffers(reference)
        mean = [np.mean(each, axis=0) for each in zip(*rr.allgather_object(own), strict=True)]
        for made, expected in zip(buffers(model), mean if "buffers" in average else own, strict=True):
            np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)
        assert as_numpy(model.get_layer("a").kernel).tobytes() == frozen


def begun(options: dict[str, Any]) -> tuple[Any, Any]:
    model, local = model_of(normalised=True), DiLoCo(period=4, **options)
    model.compile(SGD(0.05), loss="mse")
    local.set_model(model)
    return model, local


def test_statistics_of_batches_are_saved(nodes_of_one: None) -> None:
    """A run that is stopped goes on with the same bits; its state may be loaded before the weights are known."""
    options = {"fragments": 2, "delay": 2}
    stop = 5
    model, local = begun(options)
    local.on_train_begin()
    looped(model, local, range(stop))
    saved = pickle.dumps(([as_numpy(each) for each in model.weights], local.state_dict()))
    looped(model, local, range(stop, 11))
    expected = bits(model)
    model, local = begun(options)
    values, state = pickle.loads(saved)
    for variable, value in zip(model.weights, values, strict=True):
        variable.assign(value)
    local.load_state_dict(state)  # before the weights are known
    local.on_train_begin()
    looped(model, local, range(stop, 11))
    assert bits(model) == expected
    local.synchronize()
    assert same_on_all_ranks([each.tobytes() for each in weights(model)])


def test_several_calls_of_fit_go_on() -> None:
    """Steps are counted on, and the momentum stays."""
    model, local = model_of(), DiLoCo(period=4, replica="rank")
    fitted(model, SGD(0.05), local, epochs=1)
    fitted(model, SGD(0.05), local, epochs=1)
    assert local.state_dict()["steps"] == 2 * STEPS
    assert same_on_all_ranks(bits(model))


@pytest.mark.parametrize("trained", [True, False])
def test_replicas_go_on_in_a_new_world(nodes_of_two: None, trained: bool) -> None:
    """With the same optimizer, as the object of the process set stays; also if that is before the first step."""
    model, local = model_of(), LocalSGD(period=4)
    model.compile(hvd.DistributedOptimizer(SGD(0.05), process_set=local.process_set), loss="mse")
    if trained:
        fitted(model, model.optimizer, local, epochs=1)
    rr.shutdown()
    rr.init()
    x, y = data(RANK)
    model.fit(x, y, batch_size=ROWS, callbacks=[local], shuffle=False, verbose=0)
    assert same_on_all_ranks(bits(model))


# ---- errors ----


@pytest.mark.parametrize(
    ("optimizer", "compiled", "complaint"),
    [
        (lambda local: SGD(0.05), {"steps_per_execution": 2}, "steps_per_execution=1"),
        (lambda local: keras.optimizers.LossScaleOptimizer(SGD(0.05)), {}, "loss_scale_factor"),
        (lambda local: SGD(0.05, gradient_accumulation_steps=2), {}, "gradient_accumulation_steps"),
        (
            lambda local: hvd.DistributedOptimizer(SGD(0.05), staleness=1, process_set=local.process_set),
            {},
            "staleness do not go together",
        ),
    ],
)
def test_steps_that_cannot_be_counted(optimizer: Any, compiled: dict[str, Any], complaint: str) -> None:
    if compiled and keras.backend.backend() == "torch":
        pytest.skip("Keras has steps_per_execution on the other backends only")
    model, local = model_of(), LocalSGD(replica="rank")
    model.compile(optimizer(local), loss="mse", **compiled)
    with pytest.raises(rr.ConfigError, match=complaint):
        model.fit(*data(RANK), callbacks=[local], verbose=0)


@pytest.mark.sizes(2, 3, 4)
def test_optimizers_of_other_ranks() -> None:
    """The ranks of a replica reduce their gradients, and no others do."""
    everyone = [hvd.ProcessSet(range(SIZE))]
    for replica, optimizer in (("rank", hvd.DistributedOptimizer(SGD(0.05))), (everyone, SGD(0.05))):
        model, local = model_of(), LocalSGD(replica=replica)
        model.compile(optimizer, loss="mse")
        with pytest.raises(rr.ConfigError, match=r"process_set=local\.process_set"):
            model.fit(*data(RANK), callbacks=[local], verbose=0)


@pytest.mark.sizes(2, 3, 4)
def test_ranks_must_agree() -> None:
    """A rank whose optimizer is wrong is heard by the others."""
    model, local = model_of(), LocalSGD(replica="rank")
    model.compile(SGD(0.05, gradient_accumulation_steps=2 if RANK else None), loss="mse")
    with pytest.raises((rr.ConfigError, rr.MismatchError), match="gradient_accumulation_steps"):
        model.fit(*data(RANK), callbacks=[local], verbose=0)


def test_wrong_arguments() -> None:
    for options, complaint in (
        ({"compression": "zip"}, "unknown wire format"),
        ({"average": ("parameters", "state")}, "not"),
    ):
        with pytest.raises(rr.ConfigError, match=complaint):
            DiLoCo(**options)
    with pytest.raises(rr.ConfigError, match="4 parameters"):
        fitted(model_of(), SGD(0.05), DiLoCo(fragments=5, replica="rank"))
    local = DiLoCo(replica="rank")
    with pytest.raises(rr.ConfigError, match="has begun"):
        local.state_dict()


def test_fit_begins_again_with_the_weights_there_are() -> None:
    """Weights that the program has set since the last time are nothing that was learned."""
    model, local = model_of(), DiLoCo(period=1, replica="rank")
    model.compile(SGD(0.0), loss="mse")
    model.fit(*data(RANK), callbacks=[local], verbose=0)
    model.set_weights([each + 10 for each in model.get_weights()])
    expected = model.get_weights()
    model.fit(*data(RANK), callbacks=[local], verbose=0)
    for weights, each in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(weights, each, rtol=1e-5)
