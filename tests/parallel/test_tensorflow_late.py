"""TensorFlow: late averages and averages by numbers of samples, at once and in functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

tf = pytest.importorskip("tensorflow")

import ringreduce as rr  # noqa: E402
import ringreduce.tensorflow as hvd  # noqa: E402
from ringreduce.training.data.shares import Batches  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SEVERAL = pytest.mark.sizes(2, 3, 4)
COUNTS = [1 + 2 * rank for rank in range(SIZE)]
SGD = tf.keras.optimizers.SGD


def test_variables_of_equal_shapes_are_not_mixed_up() -> None:
    one, other = tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros(3))
    optimizer = hvd.DistributedOptimizer(SGD(1.0), staleness=1)
    optimizer.build([one, other])
    for _ in range(3):
        optimizer.apply_gradients([(tf.ones(3), one)])
        optimizer.apply_gradients([(2 * tf.ones(3), other)])
    np.testing.assert_array_equal(one, [-2.0] * 3)
    np.testing.assert_array_equal(other, [-4.0] * 3)
    optimizer.synchronize()
    np.testing.assert_array_equal(other, [-6.0] * 3)


def test_slices_are_refused_or_made_dense(step: Any) -> None:
    weight = tf.Variable(tf.zeros([5, 2]))
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([RANK % 5]), tf.constant([5, 2]))
    late = hvd.DistributedOptimizer(SGD(1.0), staleness=1)
    with pytest.raises(rr.ConfigError, match="sparse_as_dense"):
        step(lambda: late.apply_gradients([(slices, weight)]))()
    dense = hvd.DistributedOptimizer(SGD(1.0), staleness=1, sparse_as_dense=True)
    dense.build([weight])
    apply = step(lambda: dense.apply_gradients([(slices, weight)]))
    apply()
    np.testing.assert_array_equal(weight, np.zeros([5, 2]))
    apply()
    np.testing.assert_allclose(
        weight, -np.repeat(np.bincount(np.arange(SIZE) % 5, minlength=5), 2).reshape(5, 2) / SIZE
    )


def test_what_does_not_go_together() -> None:
    with pytest.raises(rr.ConfigError, match=r"tf\.compat\.v1"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), staleness=1)
    optimizer = hvd.DistributedOptimizer(SGD(0.1), staleness=1)
    with pytest.raises(rr.ConfigError, match="outside of graphs"):
        tf.function(optimizer.synchronize)()


# ---- numbers of samples ----


@pytest.mark.parametrize("tensor", [True, False])
def test_tapes_average_over_samples(step: Any, tensor: bool) -> None:
    """Dense gradients, and rows: those of each rank by its number of samples."""
    dense, table = tf.Variable(tf.ones(3)), tf.Variable(tf.ones([6, 2]))

    def compute(factor: Any, row: Any, samples: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(dense) + factor * tf.reduce_sum(tf.gather(table, [0, row]))
        made = hvd.DistributedGradientTape(tape).gradient(loss, [dense, table], samples=samples)
        return made[0], tf.convert_to_tensor(made[1])

    call = step(compute)
    for shift in (0, 1):
        counts = [each + shift * (rank == 0) for rank, each in enumerate(COUNTS)]
        mine = counts[RANK]
        one, rows = call(tf.constant(1.0 + RANK), tf.constant(1 + RANK), tf.constant(mine) if tensor else mine)
        parts = [(1.0 + rank) * each / sum(counts) for rank, each in enumerate(counts)]
        expected = np.zeros([6, 2])
        expected[0] = sum(parts)
        expected[1 : SIZE + 1] = np.array(parts)[:, None]
        np.testing.assert_allclose(one, [sum(parts)] * 3, rtol=1e-6)
        np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_slices_alone_average_over_samples(step: Any) -> None:
    table = tf.Variable(tf.zeros([6, 2]))
    optimizer = hvd.DistributedOptimizer(SGD(1.0))
    optimizer.build([table])

    @step
    def apply(row: Any) -> None:
        optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([1, 2]), row[None], tf.constant([6, 2])), table)])

    apply(tf.constant(RANK))  # a plain average
    np.testing.assert_allclose(table[:SIZE], np.full([SIZE, 2], -1 / SIZE), rtol=1e-6)
    optimizer.samples = COUNTS[RANK]
    apply(tf.constant(RANK))
    np.testing.assert_allclose(table[:SIZE, 0], -1 / SIZE - np.array(COUNTS) / sum(COUNTS), rtol=1e-6)


def test_a_sampler_by_speed_weights_slices(no_world: None) -> None:
    hvd.init()
    batches, table = Batches(4, "repeat", by_speed=True), tf.Variable(tf.zeros([SIZE, 2]))
    optimizer = hvd.DistributedOptimizer(SGD(1.0))
    for _ in batches.of(range(4 * SIZE)):
        batches.counts = COUNTS
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([RANK]), tf.constant([SIZE, 2]))
        optimizer.apply_gradients([(slices, table)])
    np.testing.assert_allclose(table[:, 1], -np.array(COUNTS) / sum(COUNTS), rtol=1e-6)
    hvd.shutdown()


@SEVERAL
@pytest.mark.parametrize(
    ("samples", "op", "words"),
    [
        (lambda: 3 if RANK == 0 else None, hvd.Average, "a wrong number of samples, or none"),
        (lambda: 2.5, hvd.Average, "samples"),
        (lambda: -1 if RANK else 1, hvd.Average, "samples"),
        (lambda: 2, hvd.Sum, "op=Average"),
        (lambda: 2, hvd.Adasum, "weights of an average"),
    ],
)
def test_wrong_numbers_are_refused_on_all_ranks(step: Any, samples: Callable[[], Any], op: Any, words: str) -> None:
    weight = tf.Variable(tf.ones(3))

    def compute() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight)
        return hvd.DistributedGradientTape(tape, op=op).gradient(loss, [weight], samples=samples())

    with pytest.raises(rr.RingReduceError, match=words):
        step(compute)()
