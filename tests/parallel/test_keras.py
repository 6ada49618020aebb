"""Keras on the backend that KERAS_BACKEND names: training on several ranks equals training in one process.

The references are Keras by itself, on the batches of all ranks together, and closed forms.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

keras = pytest.importorskip("keras")

import ringreduce as rr  # noqa: E402
import ringreduce.keras as hvd  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
BACKEND = keras.backend.backend()
# Of Keras, when it saves variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
ROWS, STEPS = 3, 6  # of each batch, of each epoch
STEADY = {"shuffle": False, "verbose": 0}


def data(steps: int = STEPS) -> tuple[Any, Any]:
    """Return the rows of all ranks, in an order in which each batch of all ranks together is contiguous."""
    draw = np.random.default_rng(5)
    x = draw.normal(size=(steps * SIZE * ROWS, 6)).astype(np.float32)
    return x, (x @ draw.normal(size=(6, 3)) + draw.normal(size=3)).astype(np.float32)


def mine(array: Any) -> Any:
    """Return this rank's part of each batch."""
    return array.reshape(-1, SIZE, ROWS, *array.shape[1:])[:, RANK].reshape(-1, *array.shape[1:])


def model_of(seed: int, units: int = 4) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(units, "tanh", name="a"), keras.layers.Dense(3, name="b")]
    )


def trained(
    optimizer: Any,
    *,
    wrapped: bool = False,
    model: Any = None,
    callbacks: Any = (),
    epochs: int = 2,
    steps: int = STEPS,
    **compiled: Any,
) -> Any:
    """Return a model that all ranks have trained together, from the weights of rank 0."""
    model = model_of(100 + RANK) if model is None else model
    model.compile(optimizer if wrapped else hvd.DistributedOptimizer(optimizer), loss="mse", **compiled)
    x, y = data(steps)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(mine(x), mine(y), batch_size=ROWS, epochs=epochs, callbacks=[broadcast, *callbacks], **STEADY)
    return model


def alone(optimizer: Any, *, passes: int = 1, epochs: int = 2, steps: int = STEPS) -> Any:
    """Return a model that this process has trained by itself on the batches of all ranks."""
    model = model_of(100)
    model.compile(optimizer, loss="mse")
    model.fit(*data(steps), batch_size=ROWS * SIZE * passes, epochs=epochs, **STEADY)
    return model


def as_numpy(tensor: Any) -> Any:
    return np.array(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(tensor)))


def weights(model: Any) -> list[Any]:
    return list(map(as_numpy, model.weights))


def assert_same_everywhere(model: Any) -> None:
    """Assert that all ranks have the same weights and the same state of the optimizer, bit by bit."""
    mine = [as_numpy(each).tobytes() for each in [*model.weights, *model.optimizer.variables]]
    assert all(theirs == mine for theirs in rr.allgather_object(mine))


def assert_equal(model: Any, reference: Any) -> None:
    for ours, theirs in zip(weights(model), weights(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def assert_trained_as(model: Any, reference: Any) -> None:
    assert_same_everywhere(model)
    assert_equal(model, reference)


SGD, Adam, Scaled = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.LossScaleOptimizer
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: SGD(0.02, momentum=0.9),
    "adam": lambda: Adam(0.01, weight_decay=0.01),
    "clipped": lambda: SGD(0.1, clipnorm=0.1),
    "clipped by the norm of all": lambda: SGD(0.1, global_clipnorm=0.1),
    "moving average": lambda: SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=4),
    "accumulation": lambda: SGD(0.05, momentum=0.5, gradient_accumulation_steps=3),
    "loss scale": lambda: Scaled(SGD(0.05, momentum=0.5), initial_scale=64.0),
    "loss scale and accumulation": lambda: Scaled(SGD(0.05, gradient_accumulation_steps=3), initial_scale=64.0),
}


@pytest.mark.parametrize("kind", [pytest.param("momentum", marks=pytest.mark.smoke), *list(OPTIMIZERS)[1:]])
def test_ranks_train_as_one_process(kind: str) -> None:
    """With the whole batch; weights and states are equal on all ranks, bit by bit."""
    assert_trained_as(trained(OPTIMIZERS[kind]()), alone(OPTIMIZERS[kind]()))


def test_eager_steps_train_as_one_process() -> None:
    assert_trained_as(trained(SGD(0.05), run_eagerly=True), alone(SGD(0.05)))


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has steps_per_execution on the other backends only")
def test_several_steps_per_call_train_as_one_process() -> None:
    assert_trained_as(trained(SGD(0.05), steps_per_execution=4), alone(SGD(0.05)))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="graphs are TensorFlow's")
@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_of_the_programs_own_in_a_graph_trains_as_one_process(passes: int) -> None:
    tf = pytest.importorskip("tensorflow")
    model = model_of(100)
    optimizer = hvd.DistributedOptimizer(SGD(0.05), backward_passes_per_step=passes, average_aggregated_gradients=True)

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    x, y = map(mine, data())
    for first in range(0, len(x), ROWS):
        step(x[first : first + ROWS], y[first : first + ROWS])
    assert_equal(model, alone(SGD(0.05), passes=passes, epochs=1))


def test_a_loss_scale_that_is_put_around_later_sees_reduced_gradients() -> None:
    """As `Model.compile` does under mixed precision."""
    model = trained(Scaled(hvd.DistributedOptimizer(SGD(0.05)), initial_scale=64.0), wrapped=True)
    assert_trained_as(model, alone(SGD(0.05)))


@pytest.mark.parametrize("outside", [True, False])
def test_an_overflow_on_one_rank_skips_the_step_on_all(outside: bool) -> None:
    """In both nestings. The scale is halved on all ranks; the weights are those of the other steps."""
    if outside:
        optimizer = hvd.DistributedOptimizer(Scaled(SGD(0.05), initial_scale=64.0))
    else:
        optimizer = Scaled(hvd.DistributedOptimizer(SGD(0.05)), initial_scale=64.0)
    model = model_of(100)
    model.compile(optimizer, loss="mse")
    x, y = data()
    spoilt = x.copy()
    spoilt[2 * SIZE * ROWS] = np.inf  # a row of rank 0, in the third step
    model.fit(mine(spoilt), mine(y), batch_size=ROWS, **STEADY)
    assert_same_everywhere(model)
    assert float(as_numpy(optimizer.dynamic_scale)) == 32.0
    kept = np.arange(len(x)) // (SIZE * ROWS) != 2
    reference = model_of(100)
    reference.compile(SGD(0.05), loss="mse")
    reference.fit(x[kept], y[kept], batch_size=ROWS * SIZE, **STEADY)
    assert_equal(model, reference)


@pytest.mark.parametrize("average", [True, False])
def test_several_passes_make_a_step(average: bool) -> None:
    """Of the average of their gradients, or of the sum, which is a step of twice the length."""
    optimizer = hvd.DistributedOptimizer(SGD(0.02), backward_passes_per_step=2, average_aggregated_gradients=average)
    model = trained(optimizer, wrapped=True)
    assert_trained_as(model, alone(SGD(0.02 if average else 0.04), passes=2))


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({"op": hvd.Sum}, 0.02 * SIZE),
        ({"gradient_predivide_factor": 2.0}, 0.02),
        ({"compression": hvd.Compression.fp16}, 0.02),
        ({"num_groups": 2, "sparse_as_dense": True}, 0.02),
    ],
    ids=["sum", "predivide", "compression", "groups"],
)
def test_options_of_the_reduction(options: dict[str, Any], rate: float) -> None:
    model = trained(hvd.DistributedOptimizer(SGD(0.02), **options), wrapped=True)
    assert_trained_as(model, alone(SGD(rate)))


def test_embeddings_train_as_one_process() -> None:
    """Whose gradients are sparse on the backend tensorflow, of other rows on each rank."""

    def words() -> Any:
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(11, 3), keras.layers.Flatten()]
        )

    x = np.random.default_rng(7).integers(0, 11, (STEPS * SIZE * ROWS, 2)).astype(np.int32)
    y = np.random.default_rng(8).normal(size=(len(x), 6)).astype(np.float32)
    model, reference = words(), words()
    model.compile(hvd.DistributedOptimizer(SGD(0.5)), loss="mse")
    model.fit(mine(x), mine(y), batch_size=ROWS, **STEADY)
    reference.compile(SGD(0.5), loss="mse")
    reference.fit(x, y, batch_size=ROWS * SIZE, **STEADY)
    assert_trained_as(model, reference)


EMBEDDED = ["SGD", "RMSprop", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion", "Adafactor"]


@pytest.mark.parametrize("kind", [pytest.param("Adam", marks=pytest.mark.smoke), *EMBEDDED])
def test_the_same_words_on_all_ranks_make_the_steps_of_one_process(kind: str) -> None:
    """Whatever the optimizer does with rows of equal index, of which the backend tensorflow has one for each rank."""
    x = np.array([[1, 5, 9], [0, 3, 10]] * 3, np.int32)
    y = np.random.default_rng(8).normal(size=(6, 6)).astype(np.float32)

    def words(wrap: Any) -> Any:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((3,), dtype="int32"), keras.layers.Embedding(11, 2), keras.layers.Flatten()]
        )
        model.compile(wrap(getattr(keras.optimizers, kind)(0.05)), loss="mse")
        model.fit(x, y, batch_size=2, **STEADY)
        return model

    model = words(hvd.DistributedOptimizer)
    assert_trained_as(model, words(lambda optimizer: optimizer))


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "eager"])
def test_words_that_a_batch_has_twice_make_the_step_of_their_sum(eagerly: bool) -> None:
    """By the formula of Adagrad: a row moves as far on one rank as on several that have the same batch."""
    keras.utils.set_random_seed(3)
    words = keras.layers.Embedding(7, 2)
    model = keras.Sequential([keras.Input((4,), dtype="int32"), words, keras.layers.Flatten()])
    optimizer = keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.25, epsilon=1e-7)
    model.compile(hvd.DistributedOptimizer(optimizer), loss="mse", run_eagerly=eagerly)
    x = np.array([[1, 5, 1, 0], [5, 5, 3, 1]], np.int32)
    y = np.random.default_rng(8).normal(size=(2, 8)).astype(np.float32)
    begin = as_numpy(words.embeddings).astype(np.float64)
    model.fit(x, y, batch_size=2, **STEADY)
    total = np.zeros((7, 2))
    np.add.at(total, x.reshape(-1), (begin[x.reshape(-1)] - y.reshape(-1, 2)) * 2 / y.size)
    expected = begin - 0.1 * total / np.sqrt(0.25 + total**2 + 1e-7)
    np.testing.assert_allclose(as_numpy(words.embeddings), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_factors_are_not_rounded_to_16_bits(dtype: str) -> None:
    """What goes in, and what comes out, is multiplied in float32 and rounded once; gradients of an optimizer, too."""

    def rounded(values: Any) -> Any:
        return as_numpy(keras.ops.cast(keras.ops.cast(values, dtype), "float32"))

    numbers = np.arange(1.0, 48.0, dtype=np.float32)
    values = keras.ops.cast(numbers, dtype)
    most = hvd.allreduce(values, op=hvd.Max, prescale_factor=1 / 3)
    np.testing.assert_array_equal(rounded(most), rounded(numbers * np.float32(1 / 3)))
    total = hvd.allreduce(values, op=hvd.Sum, postscale_factor=0.3)
    np.testing.assert_array_equal(rounded(total), rounded(SIZE * numbers * np.float32(0.3)))
    weight = keras.Variable(np.zeros(47), dtype=dtype)
    local = hvd.DistributedOptimizer(SGD(1.0))
    local.register_local_var(weight)
    local.apply([values], [weight])
    np.testing.assert_array_equal(rounded(weight), -rounded(numbers * np.float32(1 / SIZE)))
    divided = keras.Variable(np.zeros(47), dtype=dtype)
    hvd.DistributedOptimizer(SGD(1.0), gradient_predivide_factor=3.0).apply([values], [divided])
    third = rounded(numbers * np.float32(1 / 3))
    np.testing.assert_array_equal(rounded(divided), -rounded(third * np.float32(3.0)))


@keras.saving.register_keras_serializable("tests")
class Branched(keras.Model):
    """One of its layers is used by some ranks only."""

    def __init__(self, uses_branch: bool) -> None:
        super().__init__()
        self.first, self.branch = keras.layers.Dense(3, name="first"), keras.layers.Dense(3, name="branch")
        self.uses_branch = uses_branch
        self.first.build((None, 6))
        self.branch.build((None, 6))

    def call(self, x: Any) -> Any:
        return self.first(x) + self.branch(x) if self.uses_branch else self.first(x)


def test_a_layer_that_one_rank_uses_gets_its_gradient_divided() -> None:
    """Ranks that do not use it count as zeros."""
    keras.utils.set_random_seed(1)
    model = Branched(RANK == 0)
    start = weights(model)
    # In a graph of TensorFlow the ranks have to agree.
    model.compile(hvd.DistributedOptimizer(SGD(0.1)), loss="mse", run_eagerly=BACKEND == "tensorflow")
    x, y = data(1)
    model.fit(mine(x), mine(y), batch_size=ROWS, **STEADY)
    assert_same_everywhere(model)
    first, bias, branch, branch_bias = (each.astype(np.float64) for each in start)
    part = x.reshape(SIZE, ROWS, 6)[0].astype(np.float64), y.reshape(SIZE, ROWS, 3)[0].astype(np.float64)
    wrong = part[0] @ (first + branch) + bias + branch_bias - part[1]
    expected = branch - 0.1 * (part[0].T @ wrong) * 2 / wrong.size / SIZE
    np.testing.assert_allclose(as_numpy(model.branch.kernel), expected, rtol=1e-5, atol=1e-6)


def test_local_layers_keep_their_own_gradients() -> None:
    """Divided by the number of ranks; all other weights are equal on all ranks."""
    model = model_of(100)
    rate = 0.1
    optimizer = hvd.PartialDistributedOptimizer(SGD(rate), local_layers=model.get_layer("a"))
    model.compile(optimizer, loss="mse")
    own = model_of(100)
    own.compile(SGD(rate / SIZE), loss="mse")
    x, y = data(1)
    model.fit(mine(x), mine(y), batch_size=ROWS, **STEADY)
    own.fit(mine(x), mine(y), batch_size=ROWS, **STEADY)
    for ours, theirs in zip(weights(model)[:2], weights(own)[:2], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    shared = [each.tobytes() for each in weights(model)[2:]]
    assert all(theirs == shared for theirs in rr.allgather_object(shared))


def test_what_would_make_ranks_step_differently_is_refused() -> None:
    layer = model_of(1).get_layer("a")
    with pytest.raises(rr.ConfigError, match="the norm of all gradients differs"):
        hvd.PartialDistributedOptimizer(SGD(global_clipnorm=1.0), local_layers=layer)
    with pytest.raises(rr.ConfigError, match="losses cannot be scaled dynamically"):
        Scaled(hvd.PartialDistributedOptimizer(SGD(), local_layers=[layer]))


def test_an_older_keras_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras, "__version__", "3.1.7")
    with pytest.raises(ImportError, match=r"needs Keras 3\.12 or newer, and this is 3\.1\.7"):
        importlib.reload(hvd)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"op": "max"}, "average or sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "part of averaging"),
        ({"compression": "fp12"}, "fp16"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"process_set": None}, "ProcessSet"),
        ({"op": "adasum"}, "not op Adasum"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(rr.ConfigError, match=said):
        hvd.DistributedOptimizer(SGD(), **options)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hvd.allreduce(np.ones(2), "sum"), "its name is 'sum': .* say op='sum'"),
        (lambda: hvd.reducescatter(np.ones(SIZE), "max"), "its name is 'max': .* say op='max'"),
        (lambda: hvd.allreduce(np.ones(2), average="sum"), "average= is True or False, got 'sum'"),
    ],
)
def test_an_operation_in_another_place_is_refused(call: Any, said: str) -> None:
    """The second argument is a name: an average of the name ``sum`` is none that is meant."""
    with pytest.raises(rr.ConfigError, match=said):
        call()


def test_an_optimizer_is_distributed_once() -> None:
    optimizer = hvd.DistributedOptimizer(SGD())
    with pytest.raises(rr.ConfigError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(rr.ConfigError, match="takes an optimizer of Keras"):
        hvd.DistributedOptimizer("sgd")


@pytest.mark.sizes(2, 3, 4)  # one rank agrees with itself
def test_models_that_differ_raise_on_all_ranks() -> None:
    with pytest.raises(rr.MismatchError) as caught:
        trained(SGD(0.1), model=model_of(1, units=4 + (RANK == 0)))
    assert sorted(caught.value.values) == list(range(SIZE))


@pytest.mark.smoke
@pytest.mark.parametrize("names", [("agent0", "agent1"), ("same", "same")], ids=["other names", "equal names"])
def test_models_that_ranks_step_in_another_order_are_never_mixed(names: tuple[str, str]) -> None:
    """Each is averaged with itself, for any number of steps; ranks that wait for different ones all get an error."""
    variables = [keras.Variable([0.0, 0.0], name=name) for name in names]
    optimizers, scales = [hvd.DistributedOptimizer(SGD(1.0)) for _ in names], [1.0, 10.0]

    def make_step(number: int) -> None:
        gradient = keras.ops.convert_to_tensor(np.full(2, scales[number] * (RANK + 1), np.float32))
        optimizers[number].apply([gradient], [variables[number]])

    for number in (0, 1, 1, 0, 1):
        make_step(number)
    if SIZE > 1:
        with pytest.raises(rr.MismatchError) as caught:
            make_step(int(RANK > 0))
        assert sorted(caught.value.values) == list(range(SIZE))
        for name in names:
            assert name in str(caught.value)
    mean = (sum(range(SIZE)) + SIZE) / SIZE
    make_step(0)  # the ranks go on
    for variable, scale in zip(variables, scales, strict=True):
        np.testing.assert_allclose(as_numpy(variable), np.full(2, -3 * scale * mean), rtol=1e-6)


@pytest.mark.smoke
@pytest.mark.sizes(2, 3, 4)  # one rank agrees with itself
def test_optimizers_that_ranks_use_first_in_another_order_are_an_error() -> None:
    """Where names tell nothing, the order in which they were made does: at the latest with the second of them."""
    variables = [keras.Variable([0.0, 0.0], name="same") for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(SGD(1.0)) for _ in range(2)]
    gradient = keras.ops.convert_to_tensor(np.ones(2, np.float32))
    first = int(RANK > 0)
    optimizers[first].apply([gradient], [variables[first]])
    with pytest.raises(rr.MismatchError, match="made before 1 of these"):
        optimizers[1 - first].apply([gradient], [variables[1 - first]])


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["built more", "loaded"])
def test_ranks_whose_layers_have_other_numbers_train_as_one_process(how: str, tmp_path: Path) -> None:
    """Keras numbers layers by a counter of the process: a rank may have built others, or have loaded the model."""
    for _ in range(RANK if how == "built more" else 0):
        keras.layers.Dense(3)
        keras.metrics.AUC()

    def model_and_optimizer() -> Any:
        keras.utils.set_random_seed(100)
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(3, "sigmoid")]
        made = keras.Sequential([keras.Input((6,)), *layers])
        made.compile(hvd.DistributedOptimizer(Adam(0.01)), loss="mse", metrics=[keras.metrics.AUC()])
        made.optimizer.build(made.trainable_variables)
        return made

    model = model_and_optimizer()
    if how == "loaded" and RANK == 0:
        model.save(tmp_path / "model.keras")
        model = hvd.load_model(tmp_path / "model.keras")
    x, y = data()
    y = (y > 0).astype(np.float32)
    hvd.broadcast_variables(model.weights, 0)
    local = hvd.callbacks.LocalSGDCallback(period=3, replica=[hvd.global_process_set])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), local]
    state = hvd.elastic.KerasState(model, epoch=0)
    state.sync()
    model.fit(mine(x), mine(y), batch_size=ROWS, epochs=2, callbacks=callbacks, **STEADY)
    assert_same_everywhere(model)
    reference = model_and_optimizer()
    reference.compile(Adam(0.01), loss="mse")
    reference.fit(x, y, batch_size=ROWS * SIZE, epochs=2, **STEADY)
    assert_equal(model, reference)


@pytest.mark.smoke
@pytest.mark.sizes(2, 3, 4)  # one rank agrees with itself
def test_names_that_differ_in_more_than_numbers_are_an_error_that_shows_both() -> None:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="probe" if RANK == 0 else "head")])
    with pytest.raises(rr.MismatchError) as caught:
        hvd.broadcast_variables(model.weights, 0)
    assert "probe/kernel" in str(caught.value)
    assert "head/kernel" in str(caught.value)


@pytest.mark.smoke
@pytest.mark.sizes(2, 3, 4)  # one rank agrees with itself
def test_a_step_that_fails_raises_our_error_from_fit_and_a_state_goes_on() -> None:
    """Though `fit` shows nothing, and on the backend jax has used up the weights."""
    model = model_of(100)
    optimizer = hvd.DistributedOptimizer(SGD(0.05), op=hvd.Sum if RANK == 0 else hvd.Average)
    model.compile(optimizer, loss="mse")
    state = hvd.elastic.KerasState(model, epoch=0)
    x, y = data()
    with pytest.raises(rr.MismatchError) as caught:
        model.fit(mine(x), mine(y), batch_size=ROWS, callbacks=[hvd.callbacks.MetricAverageCallback()], **STEADY)
    assert sorted(caught.value.values) == list(range(SIZE))
    state.restore()
    for ours, theirs in zip(weights(model), weights(model_of(100)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert_equal(trained(SGD(0.05)), alone(SGD(0.05)))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA cannot call Python from TensorFlow alone")
def test_a_step_that_xla_is_to_compile_is_refused() -> None:
    """Unless a callback keeps XLA out of it."""
    model, (x, y) = model_of(100), map(mine, data(1))
    model.compile(hvd.DistributedOptimizer(SGD(0.1)), loss="mse", jit_compile=True)
    with pytest.raises(rr.ConfigError, match="XLA cannot compile"):
        model.fit(x, y, batch_size=ROWS, **STEADY)
    model.fit(x, y, batch_size=ROWS, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], **STEADY)
    assert_same_everywhere(model)


@pytest.mark.parametrize("make", [lambda: Adam(0.01), lambda: Scaled(SGD(0.01, momentum=0.5))], ids=["adam", "scaled"])
def test_a_saved_model_has_nothing_of_ringreduce(make: Callable[[], Any], tmp_path: Path) -> None:
    """It is what Keras saves by itself; loaded by Keras, it has a plain optimizer with the same state."""
    model = trained(make(), epochs=1)
    assert keras.saving.serialize_keras_object(hvd.DistributedOptimizer(make(), name="x")) is not None
    described = keras.saving.serialize_keras_object(model.optimizer)
    plain = make()
    plain.name = model.optimizer.name
    expected = keras.saving.serialize_keras_object(plain)
    assert (described["module"], described["class_name"]) == (expected["module"], expected["class_name"])
    assert set(described["config"]) == set(expected["config"])
    assert "ringreduce" not in json.dumps(described)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(make())
    for ours, theirs in zip(
        [*model.weights, *model.optimizer.variables], [*loaded.weights, *loaded.optimizer.variables], strict=True
    ):
        np.testing.assert_array_equal(as_numpy(ours), as_numpy(theirs))


@pytest.mark.smoke
def test_a_loaded_model_trains_on(tmp_path: Path) -> None:
    """With its optimizer's state, and on all ranks together."""
    model = trained(Adam(0.01), epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", compression=hvd.Compression.none)
    x, y = data()
    loaded.fit(mine(x), mine(y), batch_size=ROWS, **STEADY)
    assert_trained_as(loaded, alone(Adam(0.01)))


class Recorded(keras.callbacks.Callback):
    """Keeps what the callbacks after another one see."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs or {}))


def test_metrics_are_averaged() -> None:
    own, averaged = Recorded(), Recorded()
    trained(SGD(0.01), callbacks=[own, hvd.callbacks.MetricAverageCallback(), averaged], metrics=["mae"])
    for mine, ours in zip(own.logs, averaged.logs, strict=True):
        assert set(mine) == set(ours) == {"loss", "mae"}
        for name, value in ours.items():
            assert value == pytest.approx(np.mean(rr.allgather_object(mine[name])))


class Unequal(keras.utils.PyDataset):  # type: ignore[misc,name-defined]
    """Batches of other numbers of samples on each rank, of which the last is smaller."""

    def __init__(self, rank: int, steps: int, seed: int) -> None:
        super().__init__()
        draw = np.random.default_rng([rank, seed])
        self.sizes = [2 + rank] * (steps - 1) + [1]
        self.x, self.y = draw.normal(size=(sum(self.sizes), 6)) + rank, draw.normal(size=(sum(self.sizes), 3))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> Any:
        rows = slice(sum(self.sizes[:number]), sum(self.sizes[: number + 1]))
        return self.x[rows], self.y[rows]


def unequal_metrics(model: Any, *, validated: bool = True, **options: Any) -> list[dict[str, float]]:
    """Return what callbacks see behind the averages, of epochs in which the weights stay; every second is validated."""
    broadcast, averaged = hvd.callbacks.BroadcastGlobalVariablesCallback(0), Recorded()
    model.compile(hvd.DistributedOptimizer(SGD(0.0)), loss="mse", metrics=["mae"])
    callbacks = [broadcast, hvd.callbacks.MetricAverageCallback(**options), averaged]
    how = {"validation_data": Unequal(RANK, 2 + RANK, 9), "validation_freq": 2} if validated else {}
    model.fit(Unequal(RANK, STEPS, 8), epochs=3, callbacks=callbacks, **how, **STEADY)
    return averaged.logs


def metrics_of(model: Any, ranks: list[Any], seed: int, prefix: str = "") -> dict[str, float]:
    """Return what this process measures by itself on the samples of ranks together."""
    sets = [Unequal(rank, 2 + rank if prefix else STEPS, seed) for rank in ranks]
    x, y = (np.concatenate([getattr(each, name) for each in sets]) for name in "xy")
    return {f"{prefix}{name}": value for name, value in model.evaluate(x, y, return_dict=True, verbose=0).items()}


@pytest.mark.smoke
@pytest.mark.parametrize("validated", [False, True])
def test_metrics_are_averaged_over_all_samples(validated: bool) -> None:
    """As one process measures them on the samples of all ranks, of which each has another number."""
    model = model_of(100)
    logs = unequal_metrics(model, validated=validated)
    everyone = list(range(SIZE))
    training, evaluation = metrics_of(model, everyone, 8), metrics_of(model, everyone, 9, "val_")
    for number, each in enumerate(logs):
        expected = training | evaluation if validated and number == 1 else training
        assert each == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("way", ["asked for", "own step"])
def test_metrics_of_ranks_that_count_alike(way: str) -> None:
    """On request, and where the model has no metric that counts samples."""
    model = model_of(100)
    if way == "own step":
        model = Uncounted(model.inputs, model.outputs)
    logs = unequal_metrics(model, validated=way == "asked for", weighted=None if way == "own step" else False)
    plain = model_of(100)
    plain.compile(loss="mse", metrics=["mae"])
    means = [metrics_of(plain, [rank], 8) for rank in range(SIZE)]
    for name in logs[0]:
        assert logs[0][name] == pytest.approx(np.mean([each[name] for each in means]), rel=1e-5)


class Uncounted(keras.Model):  # type: ignore[misc,name-defined]
    """Without the metric that counts samples."""

    @property
    def metrics(self) -> list[Any]:
        return [each for each in super().metrics if each.name != "loss"]


def test_horovods_averages_are_those_of_the_ranks(begin_world: Any) -> None:
    """Where the conventions are Horovod's, unless the program asks for others."""
    begin_world(CONVENTIONS="horovod")
    model = model_of(100)
    logs = unequal_metrics(model, validated=False)
    means = [metrics_of(model, [rank], 8) for rank in range(SIZE)]
    assert logs[0] == pytest.approx({name: np.mean([each[name] for each in means]) for name in means[0]}, rel=1e-5)
    logs = unequal_metrics(model, validated=False, weighted=True)
    assert logs[0] == pytest.approx(metrics_of(model, list(range(SIZE)), 8), rel=1e-5)


def test_the_learning_rate_warms_up() -> None:
    recorded = Recorded()
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, verbose=1)
    trained(SGD(0.1), callbacks=[warmup, recorded], epochs=3)
    ends = [min((number + 1) / STEPS, 2.0) for number in range(3 * STEPS)]
    expected = [0.1 / SIZE * (end * (SIZE - 1) / 2 + 1) for end in ends]
    np.testing.assert_allclose(recorded.rates, expected, rtol=1e-6)
    assert recorded.logs[1]["lr"] == pytest.approx(0.1)


def test_momentum_follows_the_learning_rate() -> None:
    """A velocity of the old rate counts in the first batch of a new rate as one of the new rate; see the paper."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    start = float(weights(model)[0].item())
    model.compile(hvd.DistributedOptimizer(SGD(1.0, momentum=0.9)), loss="mse")
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: [1.0, 0.5, 0.2][int(epoch)])
    ones = np.ones((2 * ROWS, 1), np.float32)
    model.fit(ones, 0 * ones, batch_size=ROWS, epochs=3, callbacks=[schedule], **STEADY)
    weight, velocity, old = start, 0.0, 1.0
    for rate in (0.1, 0.05, 0.02):
        for momentum in (0.9 * rate / old, 0.9):
            velocity = momentum * velocity - rate * 2 * weight
            weight += velocity
        old = rate
    assert weights(model)[0].item() == pytest.approx(weight, rel=1e-5)


def test_a_constant_multiplier_decays_within_its_epochs() -> None:
    recorded = Recorded()
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1, end_epoch=3)
    trained(SGD(0.3), callbacks=[schedule, recorded], epochs=4, steps=2)
    np.testing.assert_allclose(recorded.rates, [0.3, 0.3, 0.05, 0.05, 0.025, 0.025, 0.025, 0.025], rtol=1e-6)
    with pytest.raises(rr.ConfigError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 1.0)


def test_the_best_model_is_saved_by_rank_0(tmp_path: Path) -> None:
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(tmp_path / "best.keras"))
    trained(SGD(0.01), callbacks=[best])
    assert (tmp_path / "best.keras").exists() == (RANK == 0)


def test_local_variables_are_not_broadcast() -> None:
    model = model_of(100 + RANK)
    start = weights(model)
    model.compile(hvd.DistributedOptimizer(SGD(0.0)), loss="mse")
    kept = model.get_layer("a").trainable_weights
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(SIZE - 1, local_variables=kept[:1])
    broadcast.register_local_var(kept[1])
    x, y = data(1)
    model.fit(mine(x), mine(y), batch_size=ROWS, callbacks=[broadcast], **STEADY)
    expected = [*start[:2], *weights(model_of(100 + SIZE - 1))[2:]]
    for ours, theirs in zip(weights(model), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_values_are_reduced_gathered_and_broadcast() -> None:
    triangle = sum(range(SIZE))
    np.testing.assert_allclose(as_numpy(hvd.allreduce([1.0, float(RANK)])), [1.0, triangle / SIZE])
    assert float(hvd.allreduce(float(RANK), op=hvd.Sum, prescale_factor=2.0)) == 2.0 * triangle
    assert float(hvd.allreduce(2.0, compression=hvd.Compression.fp16)) == 2.0
    assert float(hvd.allreduce(float(RANK), op=hvd.Max)) == SIZE - 1.0
    np.testing.assert_array_equal(
        as_numpy(hvd.allgather(np.full((RANK, 2), RANK, np.int32)))[:, 0], np.repeat(np.arange(SIZE), np.arange(SIZE))
    )
    np.testing.assert_array_equal(as_numpy(hvd.broadcast([RANK, 7], SIZE - 1)), [SIZE - 1, 7])
    parts = np.array_split(np.arange(5.0), SIZE)
    np.testing.assert_allclose(as_numpy(hvd.reducescatter(np.arange(5.0, dtype=np.float32))), parts[RANK])
    with pytest.raises(rr.ConfigError, match="no global variables"):
        hvd.broadcast_global_variables(0)


@pytest.mark.smoke
def test_what_is_no_dense_value_of_numbers_is_refused() -> None:
    """The error names the variable or metric, and says what to do; ranks that gave numbers hear of it, and go on."""

    class Ragged:
        """As TensorFlow's `RaggedTensor`."""

        row_splits = (0, 2, 3)

    words = np.array(["a", "b"])
    for value, said in ((words, "encode strings .* broadcast_object"), (Ragged(), r"ragged .*\.to_tensor\(\)")):
        for call in (hvd.allreduce, hvd.allgather, lambda each: hvd.broadcast(each, 0)):
            with pytest.raises(rr.UnsupportedBufferError, match=f"the value is .*{said}"):
                call(value)

    class Words(Ragged):
        path = "layer/words"

    variable = keras.Variable(np.ones(2, np.float32), name="one")
    for call, said in (
        (lambda wrong: hvd.allreduce(words if wrong else np.ones(2, np.float32)), "the value is no tensor"),
        (lambda wrong: hvd.broadcast_variables([variable, Words() if wrong else variable], 0), "layer/words is a"),
    ):
        with pytest.raises((rr.UnsupportedBufferError, rr.MismatchError), match=said) as caught:
            call(RANK == 0)
        assert isinstance(caught.value, rr.MismatchError) == (RANK != 0)
        call(False)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        callback = hvd.callbacks.MetricAverageCallback()
        model = model_of(100)
        model.compile(SGD())
        callback.set_model(model)
        logs = {"loss": 1.0, "several": tf.ragged.constant([[1.0], [2.0, 3.0]]) if RANK == 0 else tf.ones(2)}
        with pytest.raises((rr.UnsupportedBufferError, rr.MismatchError), match="the metric several is a ragged"):
            callback.on_epoch_end(0, logs)


@pytest.mark.sizes(2, 3, 4)  # one rank agrees with itself
def test_values_of_other_shapes_raise_on_all_ranks() -> None:
    with pytest.raises(rr.MismatchError):
        hvd.allreduce(np.zeros(2 + (RANK == 0), np.float32))


@pytest.mark.skipif(SIZE < 3, reason="a set of fewer ranks than all, and more than one")
def test_ranks_of_a_process_set_train_together() -> None:
    process_set = hvd.add_process_set([0, 1])
    try:
        model = model_of(100)
        model.compile(hvd.DistributedOptimizer(SGD(0.1), process_set=process_set), loss="mse")
        x, y = data(1)
        model.fit(mine(x), mine(y), batch_size=ROWS, **STEADY)
        everyone = rr.allgather_object([each.tobytes() for each in weights(model)])
        assert everyone[0] == everyone[1] != everyone[2]
    finally:
        hvd.remove_process_set(process_set)


def test_a_state_is_committed_and_restored() -> None:
    """Callbacks keep epoch and batch; a sync takes the values of rank 0."""
    model = model_of(100 + RANK)
    model.compile(hvd.DistributedOptimizer(Adam(0.01)), loss="mse")
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    state.sync()
    for ours, theirs in zip(weights(model), weights(model_of(100)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    committed: list[tuple[int, int]] = []

    class Commits(hvd.elastic.CommitStateCallback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_end(batch, logs)
            committed.append((state.commits, state.batch))

    x, y = data()
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        Commits(state, batches_per_commit=2),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]
    model.fit(mine(x), mine(y), batch_size=ROWS, epochs=2, callbacks=callbacks, **STEADY)
    assert (state.epoch, state.batch) == (2, 0)
    assert committed[:STEPS] == [((batch + 1) // 2, batch) for batch in range(STEPS)]
    kept, optimizer = weights(model), list(map(as_numpy, model.optimizer.variables))
    state.save()
    model.fit(mine(x), mine(y), batch_size=ROWS, **STEADY)
    state.restore()
    for ours, theirs in zip([*model.weights, *model.optimizer.variables], [*kept, *optimizer], strict=True):
        np.testing.assert_array_equal(as_numpy(ours), theirs)
    with pytest.raises(rr.ConfigError, match="no weights yet"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
