"""TensorFlow: gradients of some rows, as `tf.IndexedSlices`, make the steps of one process, with every optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

tf = pytest.importorskip("tensorflow")

import ringreduce as rr  # noqa: E402
import ringreduce.tensorflow as hvd  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
v1 = tf.compat.v1
optimizers = tf.keras.optimizers
ROWS = 11

KINDS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: optimizers.SGD(0.1, momentum=0.9),
    "RMSprop": lambda: optimizers.RMSprop(0.1),
    "Adam": lambda: optimizers.Adam(0.1, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.1),
    "Adadelta": lambda: optimizers.Adadelta(0.1),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adamax": lambda: optimizers.Adamax(0.1),
    "Nadam": lambda: optimizers.Nadam(0.1),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "Lion": lambda: optimizers.Lion(0.1),
    "Adafactor": lambda: optimizers.Adafactor(0.1),
    "Lamb": lambda: optimizers.Lamb(0.1),
    "clipped": lambda: optimizers.Adam(0.1, global_clipnorm=0.5),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.1), initial_scale=4.0),
    "passes": lambda: optimizers.Adam(0.1, gradient_accumulation_steps=2),
}
FIRST = {
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.1),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "rmsprop": lambda: v1.train.RMSPropOptimizer(0.1),
}


def start() -> Any:
    return np.random.default_rng(1).normal(size=(ROWS, 3)).astype(np.float32)


def batch(rank: int, number: int, *, repeated: bool) -> tuple[Any, Any]:
    """Return which rows a rank uses in a step, and the gradients of these."""
    draw = np.random.default_rng([rank, number])
    rows = draw.integers(0, ROWS, 7) if repeated else draw.permutation(ROWS)[:5]
    return rows, draw.normal(size=(len(rows), 3)).astype(np.float32)


def dense(rows: Any, values: Any) -> Any:
    total = np.zeros((ROWS, 3))
    np.add.at(total, rows, values.astype(np.float64))
    return total


def slices_of(rows: Any, values: Any) -> Any:
    return tf.IndexedSlices(values, rows, tf.constant([ROWS, 3]))


def trained(optimizer: Any, gradients: Any, step: Any = lambda function: function) -> Any:
    """Return a table after some steps, for gradients of each step."""
    table = tf.Variable(start())
    optimizer.build([table])

    @step
    def apply(*parts: Any) -> None:
        optimizer.apply([parts[0] if len(parts) == 1 else slices_of(*parts)], [table])

    for each in gradients:
        apply(*map(tf.constant, each))
    return table.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_on_all_ranks_make_the_step_of_one_process(kind: str) -> None:
    """The average is then what each rank has, though every row is there once for each rank."""
    step = tf.function if kind in ("Adam", "loss scale", "passes") else lambda function: function
    same = [batch(0, number, repeated=False) for number in range(4)]
    made = trained(hvd.DistributedOptimizer(KINDS[kind]()), same, step)
    np.testing.assert_allclose(made, trained(KINDS[kind](), same), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_other_rows_on_each_rank_make_the_step_of_their_average(kind: str) -> None:
    """Of the average as one whole table, in float64, whatever rows come how often on which ranks."""
    everyone = [[batch(rank, number, repeated=True) for rank in range(SIZE)] for number in range(4)]
    made = trained(hvd.DistributedOptimizer(KINDS[kind]()), [each[RANK] for each in everyone])
    averages = [(np.mean([dense(*each) for each in ranks], axis=0).astype(np.float32),) for ranks in everyone]
    np.testing.assert_allclose(made, trained(KINDS[kind](), averages), rtol=2e-5, atol=2e-6)
    assert all(theirs == made.tobytes() for theirs in rr.allgather_object(made.tobytes()))


@pytest.mark.smoke
@pytest.mark.parametrize("way", ["optimizer", "tape"])
def test_a_row_that_a_batch_has_twice_makes_the_step_of_its_sum(step: Any, way: str) -> None:
    """By the formula of Adagrad, on one rank as on several; rows that no rank has stay as they are."""
    rows, values = batch(RANK, 5, repeated=True)
    table = tf.Variable(start())
    optimizer = optimizers.Adagrad(0.1, initial_accumulator_value=0.25, epsilon=1e-7)
    if way == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer)
    optimizer.build([table])

    @step
    def train() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows) * values)
        if way == "tape":
            tape = hvd.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, [table]), [table])

    train()
    total = np.mean([dense(*batch(rank, 5, repeated=True)) for rank in range(SIZE)], axis=0)
    expected = start() - 0.1 * total / np.sqrt(0.25 + total**2 + 1e-7)
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert len(set(rows.tolist())) < len(rows)


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
@pytest.mark.parametrize("kind", [pytest.param("Adam", marks=pytest.mark.smoke), "Adagrad"])
def test_tapes_make_the_step_of_one_process(kind: str, step: Any, partial: bool) -> None:
    rows = tf.constant([1, 4, 9])

    def moved(wrap: Callable[[Any], Any], step: Any) -> Any:
        table, optimizer = tf.Variable(start()), KINDS[kind]()
        optimizer.build([table])

        @step
        def train() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(tf.gather(table, rows)))
            gradients = wrap(tape).gradient(loss, [table])
            assert isinstance(gradients[0], tf.IndexedSlices)
            optimizer.apply(gradients, [table])

        for _ in range(3):
            train()
        return table.numpy()

    wrap = hvd.PartialDistributedGradientTape if partial else hvd.DistributedGradientTape
    expected = moved(lambda tape: tape, lambda function: function)
    np.testing.assert_allclose(moved(wrap, step), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", FIRST)
def test_optimizers_of_tensorflow_1_make_the_step_of_one_process(kind: str) -> None:
    def moved(optimizer: Any) -> Any:
        with tf.Graph().as_default(), v1.Session() as session:
            table = v1.get_variable("table", initializer=start())
            loss = tf.reduce_sum(tf.square(tf.gather(table, [1, 4, 4, 9])))
            train = optimizer.apply_gradients(optimizer.compute_gradients(loss, [table]))
            session.run(v1.global_variables_initializer())
            for _ in range(3):
                session.run(train)
            return session.run(table)

    made = moved(hvd.DistributedOptimizer(FIRST[kind]()))
    np.testing.assert_allclose(made, moved(FIRST[kind]()), rtol=1e-5, atol=1e-6)


def test_local_tables_keep_their_rows() -> None:
    """Gradients of local variables stay sparse, and are divided by the number of ranks."""
    table = tf.Variable(start())
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0))
    optimizer.build([table])
    optimizer.register_local_var(table)
    rows, values = batch(RANK, 0, repeated=True)
    optimizer.apply([slices_of(rows, values)], [table])
    np.testing.assert_allclose(table, start() - dense(rows, values) / SIZE, rtol=1e-5, atol=1e-6)


def counted(samples: bool) -> list[float]:
    """Return the ranks' parts of the samples of a step."""
    counts = [1 + samples * (rank % 3) for rank in range(SIZE)]
    return [each / sum(counts) for each in counts]


@pytest.mark.parametrize("samples", [False, True], ids=["plain", "samples"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64"])
def test_rows_are_added_up_once(step: Any, dtype: str, samples: bool) -> None:
    """Each index comes once. Floats of 16 bits are added up in float32 and rounded once, to the nearest."""

    def mine(rank: int) -> tuple[Any, Any]:
        rows, values = batch(rank, 8, repeated=True)
        return rows, np.asarray(tf.cast(values, dtype))

    table = tf.Variable(tf.zeros([ROWS, 3], dtype))
    rows, values = mine(RANK)

    @step
    def gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows) * values)
        how = {"samples": 1 + RANK % 3} if samples else {}
        return hvd.DistributedGradientTape(tape).gradient(loss, [table], **how)[0]

    made = gradient()
    assert made.values.dtype == dtype
    wide = np.complex128 if dtype == "complex64" else np.float64
    expected = np.zeros((ROWS, 3), wide)
    for rank, part in enumerate(counted(samples)):
        theirs = mine(rank)
        np.add.at(expected, theirs[0], theirs[1].astype(wide) * part)
    if dtype == "complex64":
        expected = expected.conj()  # as TensorFlow has it
    np.testing.assert_array_equal(made.indices, sorted({row for rank in range(SIZE) for row in mine(rank)[0]}))
    tolerance = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 1e-13, "complex64": 1e-6}[dtype]
    whole = np.asarray(tf.convert_to_tensor(made)).astype(wide)
    np.testing.assert_allclose(whole, expected, rtol=1.01 * tolerance, atol=1e-6)
    same = np.asarray(made.values).tobytes()
    assert all(theirs == same for theirs in rr.allgather_object(same))


# ---- allreduce ----


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int32", "uint8", "int64"])
def test_an_allreduce_of_slices(step: Any, by_horovod: bool, dtype: str, op: Any) -> None:
    """Rows of equal index become one; by Horovod's conventions all stay, and averages of integers are floats."""
    own = [3, 1, 1 + RANK]
    values = np.array([[-7.0 if dtype != "uint8" else 7.0], [2.0], [1.0 + RANK]]).astype(np.int64)
    made = step(lambda each: hvd.allreduce(tf.IndexedSlices(each, own, tf.constant([9, 1])), op=op))(
        tf.cast(values, dtype)
    )
    everyone = [([3, 1, 1 + rank], [values[0, 0], 2, 1 + rank]) for rank in range(SIZE)]
    rows, terms = (np.concatenate(each) for each in zip(*everyone, strict=True))
    whole = np.zeros(9)
    np.add.at(whole, rows, terms)
    if op is hvd.Average:
        whole /= SIZE
    np.testing.assert_array_equal(made.dense_shape, [9, 1])
    if by_horovod:
        np.testing.assert_array_equal(made.indices, rows)
        integers = {"int8": "float32", "uint8": "float32", "int32": "float64", "int64": "float64"}
        assert made.values.dtype == (integers.get(dtype, dtype) if op is hvd.Average else dtype)
        expected = terms / SIZE if op is hvd.Average else terms
        np.testing.assert_allclose(tf.cast(made.values, "float64")[:, 0], expected, rtol=2**-8)
    else:
        assert made.values.dtype == dtype
        np.testing.assert_array_equal(made.indices, np.unique(rows))
        total = np.asarray(tf.cast(tf.math.unsorted_segment_sum(made.values, made.indices, 9), "float64"))[:, 0]
        expected = np.trunc(whole) if "int" in dtype else whole
        np.testing.assert_allclose(total, expected, rtol=2**-8)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint64"])
def test_averages_of_large_integers_in_slices(step: Any, dtype: str) -> None:
    """They are exact where the sum overflows; dense ones are, too."""
    limits = np.iinfo(dtype)
    least = -3 - RANK if limits.min else 3 + RANK
    values = tf.constant([[limits.max - RANK], [limits.min], [least]], dtype)
    made = step(lambda each: hvd.allreduce(tf.IndexedSlices(each, [0, 1, 2], tf.constant([3, 1]))))(values)
    mean = (6 + SIZE - 1) // 2
    wanted = np.array([[limits.max - SIZE // 2], [limits.min], [-mean if limits.min else mean]], dtype)
    np.testing.assert_array_equal(made.values, wanted)
    np.testing.assert_array_equal(step(hvd.allreduce)(values), wanted)


def test_gradients_flow_through_an_allreduce_of_slices(step: Any) -> None:
    """Those of the sum of all ranks' losses."""
    weights = [1.0 + rank for rank in range(SIZE)]

    @step
    def gradient(values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            made = hvd.allreduce(tf.IndexedSlices(values, tf.constant([2, RANK]), tf.constant([9, 1])))
            loss = weights[RANK] * tf.reduce_sum(tf.convert_to_tensor(made) * tf.range(1.0, 10.0)[:, None])
        return tape.gradient(loss, values)

    made = gradient(tf.ones([2, 1]))
    np.testing.assert_allclose(made[:, 0], np.array([3.0, 1.0 + RANK]) * sum(weights) / SIZE, rtol=1e-6)
