"""TensorFlow: collectives at once, in functions and in sessions, against closed forms; tapes and optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

tf = pytest.importorskip("tensorflow")

from suites.training import CHECKS, check_mismatches  # noqa: E402
from trainees.toy import RATE  # noqa: E402

import ringreduce as rr  # noqa: E402
import ringreduce.tensorflow as hvd  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
TRIANGLE = sum(range(SIZE))
SEVERAL = pytest.mark.sizes(2, 3, 4)  # one rank agrees with itself
v1 = tf.compat.v1


def in_session(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a function of tensors in a graph of TensorFlow 1, and returns arrays."""

    def called(*arguments: Any) -> Any:
        with tf.Graph().as_default(), v1.Session() as session:
            made = function(*[tf.constant(each.numpy()) for each in arguments])
            return session.run(made)

    return called


@pytest.fixture(params=["eager", "function", "session"])
def called(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """What calls a function as it is, as a `tf.function`, or in a session."""
    return {"eager": lambda function: function, "function": tf.function, "session": in_session}[request.param]


# ---- collectives ----


@pytest.mark.smoke
def test_tensors_are_reduced(called: Any) -> None:
    mine = tf.range(7.0) + RANK
    for op, expected in (
        (hvd.Sum, np.arange(7.0) * SIZE + TRIANGLE),
        (hvd.Average, np.arange(7.0) + TRIANGLE / SIZE),
        (hvd.Min, np.arange(7.0)),
        (hvd.Max, np.arange(7.0) + SIZE - 1),
    ):
        np.testing.assert_allclose(called(lambda each, op=op: hvd.allreduce(each, op=op))(mine), expected, rtol=1e-6)
    scaled = called(lambda each: hvd.allreduce(each, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5))(mine)
    np.testing.assert_allclose(scaled, np.arange(7.0) * SIZE + TRIANGLE)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "int64", "float16", "bfloat16", "float64", "complex64"])
def test_every_dtype_travels(called: Any, dtype: str) -> None:
    op = hvd.Sum if dtype == "complex64" else hvd.Max
    for shape in ((), (11,), (0,), (2, 3)):
        values = tf.cast(tf.ones(shape), dtype)
        made = tf.constant(called(lambda each: hvd.allreduce(each, op=op))(values))
        assert (made.dtype, made.shape) == (values.dtype, shape)
        np.testing.assert_array_equal(made.numpy(), values.numpy() * (SIZE if dtype == "complex64" else 1))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_factors_are_not_rounded_to_16_bits(called: Any, dtype: str) -> None:
    """What goes in, and what comes out, is multiplied in float32 and rounded once."""

    def function(values: Any) -> Any:
        most = hvd.allreduce(values, op=hvd.Max, prescale_factor=1 / 3)
        total, again = hvd.grouped_allreduce([values, values], op=hvd.Sum, postscale_factor=0.3)
        part = hvd.reducescatter(values, op=hvd.Max, prescale_factor=1 / 3)
        with tf.GradientTape() as tape:
            tape.watch(values)
            (scattered,) = hvd.grouped_reducescatter([values], op=hvd.Sum, postscale_factor=0.3)
        gradient = tape.gradient(scattered, values)
        return [tf.cast(each, tf.float64) for each in (most, total, again, part, scattered, gradient)]

    def rounded(values: Any) -> Any:
        return np.asarray(tf.cast(tf.cast(values, dtype), tf.float64))

    numbers = np.arange(1.0, 48.0, dtype=np.float32)
    most, total = rounded(numbers * np.float32(1 / 3)), rounded(SIZE * numbers * np.float32(0.3))
    mine = [np.array_split(each, SIZE)[RANK] for each in (most, total)]
    made = called(function)(tf.cast(numbers, dtype))
    for each, right in zip(made, [most, total, total, *mine, np.full(47, rounded(0.3))], strict=True):
        np.testing.assert_array_equal(each, right)


def test_a_group_is_one_operation(called: Any) -> None:
    def function(first: Any, second: Any) -> Any:
        return hvd.grouped_allreduce([first, second], op=hvd.Sum, name="group")

    first, second = called(function)(tf.ones([3, 2]) * RANK, tf.constant(RANK, tf.int32))
    np.testing.assert_array_equal(first, np.full((3, 2), TRIANGLE))
    assert second == TRIANGLE
    parts = called(lambda each: hvd.grouped_allgather([each, 2 * each]))(tf.ones([RANK + 1, 2]))
    assert [each.shape for each in parts] == [(TRIANGLE + SIZE, 2)] * 2
    parts = called(lambda each: hvd.grouped_reducescatter([each, each], op=hvd.Sum))(tf.range(5.0))
    for part in parts:
        np.testing.assert_allclose(part, np.array_split(np.arange(5.0) * SIZE, SIZE)[RANK])
    assert hvd.grouped_allreduce([]) == []


def test_rows_are_gathered_scattered_and_exchanged(called: Any) -> None:
    mine = tf.fill([RANK + 1, 3], float(RANK))
    ragged = called(hvd.allgather)(mine)
    np.testing.assert_array_equal(ragged[:, 0], np.repeat(np.arange(SIZE), np.arange(SIZE) + 1))
    np.testing.assert_allclose(called(hvd.reducescatter)(tf.range(5.0)), np.array_split(np.arange(5.0), SIZE)[RANK])
    equal = called(hvd.alltoall)(tf.range(SIZE) + 10 * RANK)
    np.testing.assert_array_equal(equal, 10 * np.arange(SIZE) + RANK)
    sent = tf.range(SIZE + 1) + 10 * RANK
    splits = np.array([2] + [1] * (SIZE - 1), np.int32)
    received, counts = called(lambda each: hvd.alltoall(each, splits))(sent)
    assert len(received) == SIZE * splits[RANK]
    np.testing.assert_array_equal(counts, np.full(SIZE, splits[RANK]))
    root = SIZE - 1
    np.testing.assert_array_equal(called(lambda each: hvd.broadcast(each, root))(tf.ones(2) * RANK), [root] * 2)


def test_few_rows_travel_as_slices(called: Any) -> None:
    def function(values: Any) -> Any:
        slices = tf.IndexedSlices(values, tf.range(RANK + 1), tf.constant([7, 2]))
        alone = hvd.allreduce(slices)
        dense, grouped = hvd.grouped_allreduce([values[0], slices], op=hvd.Sum)
        return alone.values, alone.indices, dense, tf.convert_to_tensor(grouped)

    values, indices, dense, whole = called(function)(tf.ones([RANK + 1, 2]))
    counts = SIZE - np.arange(SIZE)  # of the ranks that have a row
    np.testing.assert_array_equal(indices, np.arange(SIZE))
    np.testing.assert_allclose(values, np.repeat(counts[:, None] / SIZE, 2, axis=1))
    np.testing.assert_array_equal(dense, np.full(2, SIZE))
    np.testing.assert_array_equal(whole[:SIZE, 0], counts)
    assert not np.any(whole[SIZE:])


def test_slices_are_neither_scaled_nor_compared() -> None:
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.range(1), tf.constant([7, 2]))
    for options in ({"op": hvd.Min}, {"op": hvd.Adasum}, {"prescale_factor": 2.0}):
        with pytest.raises(NotImplementedError):
            hvd.allreduce(slices, **options)
        with pytest.raises(NotImplementedError):
            hvd.grouped_allreduce([slices, tf.ones(1)], **options)
        WORLD.barrier()


@pytest.mark.smoke
def test_gradients_are_those_of_the_sum_of_all_losses(called: Any) -> None:
    weight, total, count = RANK + 1.0, TRIANGLE + SIZE, 2 * SIZE

    def gradient(function: Callable[[Any], Any]) -> Any:
        def of(each: Any) -> Any:
            if tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
                with tf.GradientTape() as tape:
                    tape.watch(each)
                    loss = tf.reduce_sum(function(each)) * weight
                return tape.gradient(loss, each)
            return tf.gradients(tf.reduce_sum(function(each)) * weight, each)[0]

        return np.asarray(called(of)(tf.range(float(count))))

    np.testing.assert_allclose(gradient(lambda each: hvd.allreduce(each, op=hvd.Sum)), np.full(count, total))
    np.testing.assert_allclose(gradient(hvd.allreduce), np.full(count, total / SIZE))
    np.testing.assert_allclose(gradient(hvd.allgather), np.full(count, total))
    root = SIZE - 1
    expected = np.full(count, total if root == RANK else 0.0)
    np.testing.assert_allclose(gradient(lambda each: hvd.broadcast(each, root)), expected)
    owners = np.repeat(np.arange(SIZE) + 1.0, 2)
    np.testing.assert_allclose(gradient(lambda each: hvd.reducescatter(each, op=hvd.Sum)), owners)
    np.testing.assert_allclose(gradient(lambda each: hvd.alltoall(each, [2] * SIZE)[0]), owners)
    np.testing.assert_allclose(gradient(hvd.alltoall), owners)


def test_gradients_of_ragged_rows_come_back(step: Any) -> None:
    """The counts are unknown when the function is made, and differ in each run."""

    @step
    def gradient(rows: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(rows)
            loss = tf.reduce_sum(hvd.allgather(rows) * (RANK + 1.0))
        return tape.gradient(loss, rows)

    for more in range(3):
        rows = tf.ones([RANK + more, 2])
        np.testing.assert_allclose(gradient(rows), np.full((RANK + more, 2), TRIANGLE + SIZE))


def test_second_gradients_flow(step: Any) -> None:
    @step
    def second(each: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(each)
            with tf.GradientTape() as inner:
                inner.watch(each)
                cubed = tf.reduce_sum(hvd.allreduce(each, op=hvd.Sum) ** 3)
            first = inner.gradient(cubed, each)
        return outer.gradient(first, each)

    # With S = P x, the first is 3 P S^2 on each rank; those of all ranks together are 3 P^2 S^2.
    np.testing.assert_allclose(second(tf.constant([1.0])), [6.0 * SIZE**3])


def test_results_stay_as_they_are(step: Any) -> None:
    """Though the next call reduces into the same memory of the toolkit."""
    variable = tf.Variable(tf.zeros(300_000))

    @step
    def reduced(number: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * number)
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, variable)

    kept = [reduced(tf.constant(float(number))) for number in range(5)]
    for number, each in enumerate(kept):
        np.testing.assert_array_equal(each, np.full(300_000, float(number * SIZE)))


def test_arguments_stay_as_they_are(called: Any) -> None:
    mine = tf.ones(5) * (RANK + 1)
    called(lambda each: hvd.allreduce(each, op=hvd.Sum))(mine)
    np.testing.assert_array_equal(mine, np.full(5, RANK + 1.0))


@pytest.mark.parametrize("count", [1, 3, 17])
def test_results_are_where_tensorflow_can_use_them(step: Any, count: int) -> None:
    """Ops abort the process if memory that is not TensorFlow's begins at some addresses."""
    made = step(lambda each: hvd.grouped_allreduce([each, each + 1, 2 * each], op=hvd.Sum))(tf.ones(count))
    first, second, third = (tf.reduce_sum(each + 1.0) for each in made)
    assert (first + second + third).numpy() == count * (SIZE + 1 + 2 * SIZE + 1 + 2 * SIZE + 1)
    whole = hvd.allgather(tf.ones([count, 3]))
    np.testing.assert_allclose(tf.matmul(whole[1:], tf.ones([3, 2])), np.full((count * SIZE - 1, 2), 3.0))


@pytest.mark.smoke
def test_control_flow(step: Any) -> None:
    @step
    def looped(each: Any, count: Any) -> Any:
        for _ in tf.range(count):
            each = hvd.allreduce(each) * 2.0
        return hvd.allreduce(each) if count > 2 else each

    np.testing.assert_allclose(looped(tf.fill([3], float(RANK)), tf.constant(3)), np.full(3, 8 * TRIANGLE / SIZE))


def test_many_operations_of_a_session_find_each_other() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        made = [hvd.allreduce(tf.fill([3], float(number + RANK)), op=hvd.Sum) for number in range(60)]
        for number, each in enumerate(session.run(made)):
            np.testing.assert_array_equal(each, np.full(3, number * SIZE + TRIANGLE))


def test_numbers_are_those_of_the_world(called: Any) -> None:
    numbers = called(lambda: [hvd.rank_op(), hvd.size_op(), hvd.process_set_included_op(), hvd.local_size_op()])()
    assert [int(each) for each in numbers] == [RANK, SIZE, 1, hvd.local_size()]
    assert int(called(lambda: hvd.process_set_included_op(99))()) == -2
    assert hvd.process_set_included_op().dtype == tf.int32
    assert (hvd.mpi_ops._basics.size(), hvd.util._executing_eagerly()) == (SIZE, True)


def test_some_ranks_reduce_among_themselves(called: Any) -> None:
    process_set = hvd.add_process_set([SIZE - 1]) if SIZE > 1 else hvd.global_process_set
    try:
        if process_set.included():
            made = called(lambda each: hvd.allreduce(each, op=hvd.Sum, process_set=process_set))(tf.ones(3))
            np.testing.assert_array_equal(made, np.ones(3))
    finally:
        if SIZE > 1:
            hvd.remove_process_set(process_set)


def test_compressed_tensors_travel(step: Any) -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.int8, hvd.Compression.none):
        made = step(lambda each, how=compression: hvd.allreduce(each, compression=how, op=hvd.Sum))(tf.ones(100))
        assert made.dtype == tf.float32
        np.testing.assert_allclose(made, np.full(100, float(SIZE)), rtol=0.02)
    sent, context = hvd.Compression.fp16.compress(tf.ones(3))
    assert sent.dtype == tf.float16
    assert hvd.Compression.fp16.decompress(sent, context).dtype == tf.float32
    with pytest.raises(rr.ConfigError, match="powersgd"):
        hvd.allreduce(tf.ones(3), compression=hvd.Compression.powersgd)


@pytest.mark.smoke
@pytest.mark.parametrize("names", [(None, None), ("actor", "critic")], ids=["unnamed", "named"])
def test_models_that_ranks_step_in_another_order_are_never_mixed(step: Any, names: Any) -> None:
    """Each is averaged with itself, for any number of steps; ranks that wait for different ones all get an error."""
    variables = [tf.Variable([0.0, 0.0], name=name) for name in names]

    def stepping(variable: Any) -> Any:
        @step
        def make_step(weight: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * weight)
            (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [variable])
            variable.assign_sub(gradient)

        return make_step

    steps, scales = [stepping(each) for each in variables], [1.0, 10.0]
    for number in (0, 1, 1, 0, 1):
        steps[number](tf.constant(scales[number] * (RANK + 1.0)))
    mean = (TRIANGLE + SIZE) / SIZE
    expected = [[-2.0 * mean] * 2, [-30.0 * mean] * 2]
    if SIZE > 1:
        with pytest.raises(rr.MismatchError) as caught:
            steps[RANK > 0](tf.constant(1.0))
        assert sorted(caught.value.values) == list(range(SIZE))
        for name in names if names[0] else ():
            assert name in str(caught.value)
    steps[0](tf.constant(RANK + 1.0))  # the ranks go on
    expected[0] = [-3.0 * mean] * 2
    for variable, each in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), each)


@SEVERAL
def test_slices_of_models_that_ranks_step_in_another_order_are_never_mixed() -> None:
    """Rows of embeddings of one size, in eager steps."""
    tables = [tf.Variable(tf.zeros([3, 2])) for _ in range(2)]

    def make_step(number: int) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(tables[number], [RANK % 3])) * (number + 1.0)
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [tables[number]])
        return tf.convert_to_tensor(gradient).numpy().sum()

    for number in (1, 0, 1):
        np.testing.assert_allclose(make_step(number), 2.0 * (number + 1))
    with pytest.raises(rr.MismatchError):
        make_step(int(RANK > 0))
    np.testing.assert_allclose(make_step(1), 4.0)


@pytest.mark.smoke
@SEVERAL
def test_ranks_that_have_built_more_layers_train_with_the_others(step: Any) -> None:
    """Keras numbers layers by a counter of the process; names that differ otherwise are errors that show both."""
    for _ in range(RANK + 1):
        tf.keras.layers.Dense(3)
    model = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(2, use_bias=False)])
    hvd.broadcast_variables(model.variables, 0)
    local = hvd.LocalSGD(model.trainable_variables, period=2)
    before = model.get_weights()[0]

    @step
    def make_step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(gradient)

    make_step(tf.ones((4, 5)) * (RANK + 1.0))
    local.step()
    np.testing.assert_allclose(
        before - model.get_weights()[0], np.full((5, 2), 4 * (TRIANGLE + SIZE) / SIZE), rtol=1e-5
    )
    other = tf.Variable([0.0], name="probe" if RANK == 0 else "head")
    with pytest.raises(rr.MismatchError) as caught:
        hvd.broadcast_variables([other], 0)
    assert "probe" in str(caught.value)
    assert "head" in str(caught.value)


# ---- errors ----


@pytest.mark.smoke
@SEVERAL
def test_ranks_that_disagree_hear_the_same_error_and_go_on(called: Any) -> None:
    reduce = called(lambda each: hvd.allreduce(each, op=hvd.Sum))
    with pytest.raises(rr.MismatchError) as caught:
        reduce(tf.ones(3 + (RANK == 0)))
    assert isinstance(caught.value, tf.errors.FailedPreconditionError)
    assert sorted(caught.value.values) == list(range(SIZE))
    assert caught.value.in_step
    assert "rank 0" in str(caught.value)
    np.testing.assert_array_equal(reduce(tf.ones(3)), np.full(3, float(SIZE)))


@SEVERAL
def test_wrong_arguments_of_one_rank_reach_all(called: Any) -> None:
    factor: Any = "x" if RANK == 0 else 1.0
    with pytest.raises((rr.ConfigError, rr.MismatchError)) as caught:
        called(lambda each: hvd.allreduce(each, op=hvd.Sum, prescale_factor=factor, name="scaled"))(tf.ones(3))
    assert isinstance(caught.value, rr.ConfigError if RANK == 0 else rr.MismatchError)
    assert isinstance(caught.value, tf.errors.InvalidArgumentError if RANK == 0 else tf.errors.OpError)
    assert str(caught.value)


def test_an_operation_in_the_place_of_average_is_refused(called: Any) -> None:
    """As the second argument any text is true, and would average."""
    for given in ("sum", hvd.Sum):
        with pytest.raises(rr.ConfigError, match=r"average= is True or False, got .*say op= for an operation"):
            called(lambda each, given=given: hvd.allreduce(each, given))(tf.ones(2))


def test_what_cannot_be_sent_is_refused(called: Any) -> None:
    with pytest.raises(rr.UnsupportedBufferError, match="at least one dimension") as caught:
        called(hvd.allgather)(tf.constant(1.0))
    assert isinstance(caught.value, tf.errors.InvalidArgumentError)
    with tf.GradientTape() as tape:
        each = tf.ones(2)
        tape.watch(each)
        largest = hvd.allreduce(each, op=hvd.Max)
    with pytest.raises(rr.ConfigError, match="no gradient flows through allreduce with op max"):
        tape.gradient(largest, each)
    with pytest.raises(tf.errors.InvalidArgumentError):  # one of TensorFlow's own
        tf.reshape(tf.ones(3), [2])


@pytest.mark.smoke
def test_what_is_no_dense_tensor_of_numbers_is_refused(step: Any) -> None:
    """The error says which of a list it is, and what to do; ranks that gave tensors hear of it, and all go on."""
    ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
    words = tf.Variable(["a", "b"], name="words")
    for value, said in (
        (ragged, r"tensor 0 is a tf\.RaggedTensor.*\.to_tensor\(\)"),
        (tf.sparse.from_dense([[1.0, 0.0]]), r"tensor 0 is a tf\.SparseTensor.*tf\.sparse\.to_dense"),
        (tf.constant(["a", "b"]), "tensor 0 is of type string.* encode strings .*broadcast_object"),
        (words, "words:0 is of type string"),
        ([[1.0], [2.0, 3.0]], "tensor 0 is no tensor"),
    ):
        for call in (hvd.allreduce, hvd.allgather, lambda each: hvd.broadcast(each, 0)):
            with pytest.raises(rr.UnsupportedBufferError, match=said) as caught:
                step(lambda value=value, call=call: call(value))()
            assert isinstance(caught.value, tf.errors.InvalidArgumentError)
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2]))
    with pytest.raises(rr.UnsupportedBufferError, match=r"tensor 2 is a tf\.RaggedTensor"):
        hvd.grouped_allreduce([tf.ones(2), slices, ragged])
    with tf.GradientTape() as tape:
        tape.watch(ragged.flat_values)
        loss = tf.reduce_sum(ragged * 2.0)
    with pytest.raises(rr.UnsupportedBufferError, match=r"the gradient of tensor 0 is a tf\.RaggedTensor"):
        hvd.DistributedGradientTape(tape).gradient(loss, [ragged])
    for reduce in (
        lambda each: hvd.allreduce(tf.ones(2) if each is None else each, op=hvd.Sum),
        lambda each: hvd.broadcast_variables([tf.Variable([1.0, 2.0]) if each is None else words], 0),
    ):
        with pytest.raises((rr.UnsupportedBufferError, rr.MismatchError)) as refused:
            reduce(ragged if RANK == 0 else None)
        assert isinstance(refused.value, rr.MismatchError) == (RANK != 0)
        assert "which no collective takes" in str(refused.value)
        reduce(None)


def test_errors_of_converted_functions_are_ours() -> None:
    """AutoGraph raises one of its own for what it does not know."""

    @tf.function
    def function(each: Any) -> Any:
        return hvd.allreduce(each, compression=None) if each.shape.rank else each

    with pytest.raises(rr.ConfigError, match=r"hvd\.Compression"):
        function(tf.ones(3))


def test_what_xla_is_to_compile_is_refused() -> None:
    """Also where the function that reduces is called by another."""
    inner = tf.function(hvd.allreduce)
    variable = tf.Variable([1.0])

    def step(each: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * each)
        return hvd.DistributedGradientTape(tape).gradient(loss, variable)

    for function in (hvd.allreduce, lambda each: inner(each) + 1.0, step):
        with pytest.raises(rr.ConfigError, match="XLA cannot compile") as caught:
            tf.function(function, jit_compile=True)(tf.ones(1))
        assert isinstance(caught.value, tf.errors.InvalidArgumentError)
    double = tf.function(lambda each: 2.0 * each, jit_compile=True)
    np.testing.assert_array_equal(tf.function(lambda each: hvd.allreduce(double(each)))(tf.ones(2)), [2.0, 2.0])


# ---- variables and objects ----


@pytest.mark.smoke
def test_variables_become_the_root_s(step: Any) -> None:
    variables = [tf.Variable(tf.fill([3, 2], float(RANK)), name="a"), tf.Variable(RANK, name="b")]

    @step
    def broadcast() -> None:
        hvd.broadcast_variables(variables, SIZE - 1)

    broadcast()
    assert [float(tf.reduce_max(each)) for each in variables] == [SIZE - 1] * 2
    variables[0].assign(tf.fill([3, 2], float(RANK)))
    (value,) = hvd.broadcast_(variables[:1], 0)
    np.testing.assert_array_equal(value, np.zeros((3, 2)))
    np.testing.assert_array_equal(variables[0], np.zeros((3, 2)))
    hvd.broadcast_variables([], 0)


def test_variables_of_a_session_become_the_root_s() -> None:
    with tf.Graph().as_default():
        fed = v1.placeholder(tf.float32, [2])
        variable = v1.get_variable("v", initializer=tf.fill([2], float(RANK)))
        reduced = hvd.allreduce(fed)
        hook = hvd.BroadcastGlobalVariablesHook(0)
        with v1.train.MonitoredSession(hooks=[hook]) as session:
            np.testing.assert_array_equal(session.run(variable), np.zeros(2))
            np.testing.assert_array_equal(session.run(reduced, {fed: np.ones(2)}), np.ones(2))
    with pytest.raises(RuntimeError, match="does not support eager execution"):
        hvd.broadcast_global_variables(0)


@SEVERAL
def test_other_variables_are_a_mismatch(step: Any) -> None:
    variable = tf.Variable(tf.zeros(3 + (RANK == 0)), name="v")

    @step
    def broadcast() -> None:
        hvd.broadcast_variables([variable], 0)

    with pytest.raises(rr.MismatchError, match="shape"):
        broadcast()


def test_objects_travel() -> None:
    assert hvd.broadcast_object({"rank": RANK, "array": tf.ones(3)}, 0)["rank"] == 0
    assert hvd.broadcast_object_fn(SIZE - 1)(RANK) == SIZE - 1
    assert hvd.allgather_object(RANK) == list(range(SIZE))


# ---- tapes ----


@pytest.mark.smoke
def test_a_tape_averages_gradients(step: Any) -> None:
    w, e, u = (
        tf.Variable(tf.ones([3, 2]), name="w"),
        tf.Variable(tf.ones([5, 2]), name="e"),
        tf.Variable([1.0], name="u"),
    )

    @step
    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w) * (RANK + 1.0) + tf.reduce_sum(tf.gather(e, tf.range(RANK + 1)))
        return hvd.DistributedGradientTape(tape).gradient(loss, {"w": w, "more": [e, u]})

    for _ in range(4):
        made = gradients()
        np.testing.assert_allclose(made["w"], np.full((3, 2), (TRIANGLE + SIZE) / SIZE))
        slices, unused = made["more"]
        assert isinstance(slices, tf.IndexedSlices)
        rows = np.bincount([row for rank in range(SIZE) for row in range(rank + 1)], minlength=5)[:5]
        np.testing.assert_allclose(tf.convert_to_tensor(slices)[:, 0], rows / SIZE)
        assert unused is None


def test_tapes_are_wrapped_before_in_and_after_their_with() -> None:
    variable = tf.Variable([1.0, 2.0])
    expected = np.full(2, (TRIANGLE + SIZE) / SIZE)

    def loss() -> Any:
        return tf.reduce_sum(variable) * (RANK + 1.0)

    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        made = loss()
    np.testing.assert_allclose(tape.gradient(made, variable), expected)
    with tf.GradientTape() as own:
        made = loss()
        within = hvd.DistributedGradientTape(own)
        np.testing.assert_allclose(within.gradient(made, [variable])[0], expected)
    with tf.GradientTape(persistent=True) as own:
        made = loss()
    tape = hvd.DistributedGradientTape(own, sparse_as_dense=True)
    for _ in range(2):
        np.testing.assert_allclose(tape.gradient(made, variable), expected)
    np.testing.assert_allclose(own.gradient(made, variable), np.full(2, RANK + 1.0))
    for _ in range(3):
        for each in tape.gradient(made, [variable, variable]):
            np.testing.assert_allclose(each, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_predivide_factor": 2.0},
        {"num_groups": 2},
        {"compression": hvd.Compression.fp16},
        {"groups": 1},
        {"op": hvd.Adasum},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_a_tape(step: Any, options: dict[str, Any]) -> None:
    first, second = tf.Variable(tf.ones(4), name="first"), tf.Variable(tf.ones([3, 2]), name="second")

    @step
    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(first) * 2.0 + tf.reduce_sum(tf.gather(second, [0, 2]))
        how = {"groups": [[first, second]]} if "groups" in options else options
        return hvd.DistributedGradientTape(tape, sparse_as_dense=True, **how).gradient(loss, [first, second])

    for _ in range(3):
        one, two = gradients()
        np.testing.assert_allclose(one, np.full(4, 2.0))
        np.testing.assert_allclose(tf.convert_to_tensor(two), [[1, 1], [0, 0], [1, 1]])


def test_local_sources_stay_this_rank_s(step: Any) -> None:
    common, own, layer = tf.Variable([1.0]), tf.Variable([1.0]), tf.keras.layers.Dense(1, use_bias=False)
    layer.build((None, 1))
    (kernel,) = layer.trainable_weights

    @step
    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(common + own + layer(tf.ones([1, 1]))) * (RANK + 1.0)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=False)
        tape.register_local_source(own)
        return tape.get_local_and_global_gradients(loss, [common, own, kernel])

    (first, second), (shared,) = gradients()
    np.testing.assert_allclose(shared, [(TRIANGLE + SIZE) / SIZE])
    np.testing.assert_allclose(first, [RANK + 1.0])
    np.testing.assert_allclose(second, [[RANK + 1.0]])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(own) * (RANK + 1.0)
    scaled = hvd.DistributedGradientTape(tape)
    scaled.register_local_source(own)
    np.testing.assert_allclose(scaled.gradient(loss, own), [(RANK + 1.0) / SIZE])


def test_gradients_that_some_ranks_lack_count_as_zeros() -> None:
    variable, other = tf.Variable([1.0], name="one"), tf.Variable([1.0], name="other")
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) + (tf.reduce_sum(other) if RANK == 0 else 0.0)
        first, second = hvd.DistributedGradientTape(tape).gradient(loss, [variable, other])
        np.testing.assert_allclose([first, second], [[1.0], [1.0 / SIZE]])


@SEVERAL
def test_other_gradients_are_a_mismatch(step: Any) -> None:
    variables = [tf.Variable([1.0], name="lonely"), tf.Variable([[2.0]] * (3 + RANK), name="ragged")]

    @step
    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0]) + tf.reduce_sum(variables[1])
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    with pytest.raises(rr.MismatchError, match="ragged"):
        gradients()


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="part of averaging"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(rr.ConfigError, match="layers of Keras"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[1])
    with pytest.raises(ValueError, match="no optimizer"):
        hvd.DistributedOptimizer(object())
    with pytest.raises(rr.ConfigError, match="Adasum"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Adasum)


# ---- optimizers ----


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("average", [False, True])
def test_optimizers_of_a_session_step_together(passes: int, average: bool) -> None:
    with tf.Graph().as_default():
        fed = v1.placeholder(tf.float32, [])
        variable = v1.get_variable("v", initializer=tf.constant([1.0, 2.0]))
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(0.5),
            backward_passes_per_step=passes,
            average_aggregated_gradients=average,
        )
        train = optimizer.minimize(tf.reduce_sum(variable) * fed)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for number in range(4):
                session.run(train, {fed: RANK + number})
            total = sum(RANK_ + number for number in range(4) for RANK_ in range(SIZE)) / SIZE
            expected = np.array([1.0, 2.0]) - 0.5 * total / (passes if average else 1)
            np.testing.assert_allclose(session.run(variable), expected, rtol=1e-5)


def test_optimizers_of_tensorflow_1_step_at_once() -> None:
    variable = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(0.5, 0.9))
    optimizer.minimize(lambda: tf.reduce_sum(variable) * RANK, var_list=[variable])
    np.testing.assert_allclose(variable, np.array([1.0, 2.0]) - 0.5 * TRIANGLE / SIZE)
    assert optimizer.get_slot(variable, "momentum") is not None


@pytest.mark.smoke
def test_a_copy_of_an_optimizer_sums_up_its_own_passes() -> None:
    """It begins with those of the original, and neither changes the other's."""
    variables = [tf.Variable([1.0]), tf.Variable([1.0])]
    original = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=3)

    def step(optimizer: Any, number: int, gradient: float) -> None:
        variable = variables[number]
        optimizer.minimize(lambda: tf.reduce_sum(variable) * gradient, var_list=[variable])

    step(original, 0, gradient=1.0)
    copied = copy.deepcopy(original)
    for gradient in (2.0, 4.0):
        step(copied, 1, gradient=10.0 * gradient)
        step(original, 0, gradient=gradient)
    np.testing.assert_allclose(variables[0], [-6.0])
    np.testing.assert_allclose(variables[1], [-60.0])


def test_steps_are_combined_by_adasum() -> None:
    variable = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum)
    optimizer.minimize(lambda: tf.reduce_sum(variable), var_list=[variable])
    np.testing.assert_allclose(variable, [0.5, 1.5])  # equal steps are averaged


class Trainee:
    """A linear model and steepest descent; weights lie in NumPy arrays, as the suite overwrites them."""

    def __init__(
        self, values: Mapping[str, Any], *, passes: int = 1, bucket_nbytes: int | None = None, compression: Any = None
    ) -> None:
        self.values = {name: value.copy() for name, value in values.items()}
        self.variables = [tf.Variable(each, name=name) for name, each in self.values.items()]
        hvd.broadcast_variables(self.variables, 0)
        compression = hvd.Compression.none if compression is None else compression
        self.reduction = hvd.gradients.GradientReduction("Trainee", compression=compression)
        self.reduce = tf.function(lambda *given: self.reduction.reduce(given, self.variables))
        self.no_sync = nullcontext
        self.zero_grad()

    def weights(self) -> list[Any]:
        return list(self.values.values())

    def zero_grad(self) -> None:
        self.gradients = [tf.zeros_like(each) for each in self.variables]

    def give(self, gradients: Mapping[str, Any]) -> None:
        zeros = [np.zeros(each.shape, np.float32) for each in self.variables]
        found = [gradients.get(name, zero) for name, zero in zip(self.values, zeros, strict=True)]
        self.gradients = [old + new for old, new in zip(self.gradients, found, strict=True)]

    def step(self) -> None:
        for value, gradient in zip(self.values.values(), self.reduce(*self.gradients), strict=True):
            value -= RATE * gradient.numpy()

    def state_dict(self) -> dict[str, Any]:
        return self.reduction.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reduction.load_state_dict(state)


@pytest.mark.parametrize("check", [each for each in CHECKS if each is not check_mismatches])
def test_the_suite_of_bindings(check: Callable[..., None]) -> None:
    check(Trainee)


# ---- batch normalisation and elastic states ----


def test_batches_are_normalised_together(step: Any) -> None:
    """With the digits that the mean of squares loses, and gradients of what the ranks have in common."""
    rng = np.random.default_rng(0)
    batches = [1000.0 + rng.standard_normal((3 + rank, 4)).astype(np.float32) for rank in range(SIZE)]
    whole = np.concatenate(batches).astype(np.float64)
    layer = hvd.SyncBatchNormalization(momentum=0.5, epsilon=1e-5)
    layer.build((None, 4))

    @step
    def normalised(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(batch)
            made = layer(batch, training=True)
            loss = tf.reduce_sum(made**3)
        return made, tape.gradient(loss, batch)

    made, gradient = normalised(tf.constant(batches[RANK]))
    mean, variance = whole.mean(0), whole.var(0)
    np.testing.assert_allclose(made, (batches[RANK] - mean) / np.sqrt(variance + 1e-5), atol=2e-3)
    np.testing.assert_allclose(layer.moving_variance, 0.5 + 0.5 * variance, rtol=1e-4)
    exact = tf.constant(whole)
    with tf.GradientTape() as tape:
        tape.watch(exact)
        centred = exact - tf.reduce_mean(exact, 0)
        loss = tf.reduce_sum((centred / tf.sqrt(tf.reduce_mean(centred**2, 0) + 1e-5)) ** 3)
    start = sum(map(len, batches[:RANK]))
    expected = tape.gradient(loss, exact)[start : start + len(batches[RANK])]
    np.testing.assert_allclose(gradient, expected, atol=2e-2)


def test_states_keep_variables() -> None:
    variable = tf.Variable(tf.fill([2], float(RANK)))
    state = hvd.elastic.TensorFlowState([variable], epoch=RANK)
    state.sync()
    assert (state.epoch, variable.numpy().tolist()) == (0, [0.0, 0.0])
    variable.assign([5.0, 5.0])
    state.epoch = 3
    state.restore()
    assert (state.epoch, variable.numpy().tolist()) == (0, [0.0, 0.0])
    with tf.Graph().as_default(), v1.Session() as session:
        kept = v1.get_variable("v", initializer=tf.fill([2], float(RANK)))
        session.run(v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session, batch=1)
        state.sync()
        np.testing.assert_array_equal(session.run(kept), np.zeros(2))


def test_states_keep_models_and_optimizers() -> None:
    """A sync takes those of rank 0, and a restore those of the last commit."""
    keras = tf.keras
    model, optimizer = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), keras.optimizers.Adam(0.5)
    for each in model.weights:
        each.assign(tf.fill(each.shape, float(RANK)))
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=RANK)
    state.sync()
    kept = [each.numpy() for each in [*model.weights, *optimizer.variables]]
    assert (state.batch, kept[0].item()) == (0, 0.0)
    optimizer.apply([tf.ones(each.shape) for each in model.weights], model.trainable_weights)
    assert model.weights[0].numpy().item() == pytest.approx(-0.5, rel=1e-4)
    state.restore()
    for variable, array in zip([*model.weights, *optimizer.variables], kept, strict=True):
        np.testing.assert_array_equal(variable.numpy(), array)
    with pytest.raises(rr.ConfigError, match="no optimizer"):
        hvd.elastic.TensorFlowKerasState(model)


def test_states_begin_with_what_is_on_disk(tmp_path: Path) -> None:
    folder = hvd.broadcast_object(str(tmp_path))

    def state_of() -> tuple[Any, Any]:
        variable = tf.Variable([float(RANK)])
        return variable, hvd.elastic.TensorFlowState([variable], step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        variable.assign([5.0])
        state.step = 3
        state.commit()

    variable, state = state_of()
    assert state.keep_on_disk(folder) is None
    train(state)
    hvd.barrier()
    variable, state = state_of()
    assert state.keep_on_disk(folder) == 1
    assert (state.step, variable.numpy().tolist()) == (3, [5.0])


def test_the_last_rank_to_join_is_known() -> None:
    for _ in range(RANK):
        hvd.allreduce(tf.ones(3), op=hvd.Sum, name="while others have data")
    assert int(hvd.join()) in range(SIZE)


def test_ranks_that_have_joined_add_nothing_to_many_tensors() -> None:
    for step in range(RANK):
        given = [tf.ones(600_001), tf.ones(3, tf.int64), tf.ones([])]
        for each in hvd.grouped_allreduce(given, op=hvd.Sum, name=f"many, step {step}"):
            np.testing.assert_array_equal(each, np.full(each.shape, SIZE - 1 - step))
    hvd.join()


def test_a_helper_sums_up_passes_and_leaves_local_variables() -> None:
    """It reduces the sum of two passes; that of a local variable is divided by the number of ranks."""
    from ringreduce.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager

    shared, local = tf.Variable([1.0]), tf.Variable([1.0])
    helper = LocalGradientAggregationHelperEager(2, lambda gradients, _: list(map(hvd.allreduce, gradients)))
    helper.register_local_var(local)
    mine = [tf.constant([RANK + 1.0])] * 2
    assert helper.compute_gradients(mine, [shared, local])[0] == RANK + 1.0
    first, second = helper.compute_gradients(mine, [shared, local])
    np.testing.assert_allclose(first, [2 * (TRIANGLE + SIZE) / SIZE])
    np.testing.assert_allclose(second, [2 * (RANK + 1.0) / SIZE])


def test_what_programs_find_beside_collectives() -> None:
    assert (
        hvd.gpu_available() == hvd.mpi_ops.gpu_available("tensorflow") == bool(tf.config.list_physical_devices("GPU"))
    )
    variables = [tf.Variable(1.0), tf.Variable(2.0)]
    assert all(a is b for a, b in zip(hvd.util.refs_to_vars(hvd.util.vars_to_refs(variables)), variables, strict=True))
    assert hvd.mpi_ops.broadcast_ is hvd.broadcast_


@pytest.mark.smoke
def test_a_pipeline_goes_on_in_the_middle_of_an_epoch() -> None:
    """With the batches of an uninterrupted one, where a function seeds what shuffles; another order is an error."""
    data = tf.data.Dataset.range(23)

    def seeded(epoch: int) -> Any:
        return data.shuffle(23, seed=epoch, reshuffle_each_iteration=False).batch(4)

    def batches(loader: Any) -> list[list[int]]:
        return [each.numpy().tolist() for each in loader]

    whole = hvd.ResumableLoader(seeded)
    expected = [batches(whole) for _ in range(2)]
    before, after = hvd.ResumableLoader(seeded), hvd.ResumableLoader(seeded)
    given = iter(before)
    found = [next(given).numpy().tolist() for _ in range(2)]
    after.load_state_dict(before.state_dict())
    assert [*found, *batches(after)] == expected[0]
    assert (after.epoch, batches(after)) == (1, expected[1])
    unseeded = [hvd.ResumableLoader(data.shuffle(23).batch(4)) for _ in range(2)]
    next(iter(unseeded[0]))
    unseeded[1].load_state_dict(unseeded[0].state_dict())
    with pytest.raises(rr.ConfigError, match="the batches before it are others"):
        batches(unseeded[1])
