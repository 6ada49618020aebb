"""`DiLoCo` and `LocalSGD` of TensorFlow: tapes, variables, and errors; test_tensorflow_suite.py has how they train."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr

tf = pytest.importorskip("tensorflow")

import ringreduce.tensorflow as hvd  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ETA = 0.05


def curvature_and_centre(rank: int) -> tuple[float, Any]:
    """Rank r has the loss a / 2 |x - c|^2."""
    return 1.0 + 0.7 * rank, np.array([rank, 1.0 - 2 * rank, 0.25 * rank * rank])


def test_tapes_of_a_replica(nodes_of_two: None, step: Any) -> None:
    """Between exchanges a node descends on the mean of its losses; a node counts by its ranks."""
    x = tf.Variable([3.0, -2.0, 0.5], dtype=tf.float64)
    local = hvd.LocalSGD([x], period=3)
    ends: list[Any] = []
    for first in range(0, SIZE, 2):
        node = range(first, min(first + 2, SIZE))
        end = x.numpy()
        for _ in range(3):
            end = end - ETA * np.mean([a * (end - c) for a, c in map(curvature_and_centre, node)], axis=0)
        ends += [end] * len(node)
    a, c = curvature_and_centre(RANK)
    optimizer = tf.keras.optimizers.SGD(ETA)

    @step
    def make_step() -> None:
        with tf.GradientTape() as tape:
            loss = a / 2 * tf.reduce_sum((x - c) ** 2)
        tape = hvd.DistributedGradientTape(tape, process_set=local.process_set)
        optimizer.apply_gradients([(tape.gradient(loss, x), x)])

    for _ in range(3):
        make_step()
        local.step()
    np.testing.assert_allclose(x.numpy(), np.mean(ends, axis=0), rtol=1e-6)  # the learning rate is a float32


def test_dtypes_of_variables() -> None:
    """Floats of all lengths and complex numbers are averaged; integers stay each rank's own."""
    floats = [tf.Variable(tf.ones(3, dtype)) for dtype in ("bfloat16", "float16", "float64", "complex64")]
    whole = tf.Variable(RANK)
    local = hvd.LocalSGD([*floats, whole], period=1, replica="rank")
    for each in floats:
        each.assign_add(tf.cast(tf.fill(3, RANK), each.dtype))
    local.step()
    assert [each.numpy().tolist() for each in floats] == [[1 + (SIZE - 1) / 2] * 3] * 4
    assert whole.numpy() == RANK


def test_graphs_and_what_is_no_variable_are_refused() -> None:
    """The error is TensorFlow's as well."""
    x = tf.Variable([1.0])
    local = hvd.DiLoCo([x], replica="rank")
    for call in (local.step, local.synchronize):
        with pytest.raises(rr.ConfigError, match=r"outside of tf\.function"):
            tf.function(call)()
    with pytest.raises(tf.errors.InvalidArgumentError, match="takes variables"):
        hvd.DiLoCo([tf.constant(1.0)])
    with pytest.raises(rr.ConfigError, match="unknown wire format"):
        hvd.DiLoCo([x], compression=hvd.Compression.topk)
    local.step()


@pytest.mark.sizes(2, 3, 4)
def test_ranks_must_agree() -> None:
    """The error is TensorFlow's as well, on ranks that are right, too."""
    with pytest.raises(tf.errors.FailedPreconditionError, match="period"):
        hvd.DiLoCo([tf.Variable([1.0])], period=3 + RANK)
    with pytest.raises((rr.ConfigError, rr.MismatchError), match="takes variables"):
        hvd.DiLoCo([tf.constant(1.0) if RANK else tf.Variable([1.0])])
