"""Rows of `tf.IndexedSlices`: those of equal index become one, their sum or average.

A batch may have several rows of an index, and gathered slices have the rows of all ranks. Keras 3 does not add them up,
unlike earlier versions, and all its optimizers except SGD then make another step than with the sum. So rows are added
up on one rank, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.tensorflow.calls import Host

HALVES = tf.float16, tf.bfloat16


def times(tensor: Any, factor: float) -> Any:
    """Return a tensor times a number; one of 16 bits is multiplied in float32, and rounded once."""
    if tensor.dtype in HALVES:
        return tf.cast(tf.cast(tensor, tf.float32) * factor, tensor.dtype)
    return tensor * tf.cast(factor, tensor.dtype)


def places_of(indices: Host) -> Sequence[Host]:
    """Return the indices of rows, each once, and for each row its place among them."""
    return np.unique(indices, return_inverse=True)


def each_index_once(slices: Any) -> Any:
    """Return `tf.IndexedSlices` of one rank, outside of graphs, with the sum of the rows of each index."""
    indices, places = places_of(slices.indices.numpy())
    total = added_up(slices.values, places, count=len(indices), divisor=1)
    return tf.IndexedSlices(total, tf.convert_to_tensor(indices), slices.dense_shape)


def added_up(values: Any, places: Any, count: Any, divisor: Any, factors: Any = None) -> Any:
    """Return sums of rows, divided by a number; those of 16 bits are added up in float32, and rounded once.

    Rows are added in their order, so that ranks with the same rows get the same bits.

    Args:
        values: the rows.
        places: of each row, which sum it belongs to; int32 or int64.
        count: how many sums there are, a number or a tensor.
        divisor: the same. Integers are divided toward zero.
        factors: what rows are multiplied by, one for each row or one for all; None: by nothing.
    """
    dtype = values.dtype
    wide = tf.float32 if dtype in HALVES else tf.int64 if dtype.is_integer and dtype != tf.uint64 else dtype
    with tf.device("CPU"):  # A GPU adds in any order.
        rows = tf.cast(values, wide)
        if factors is not None:
            rows *= tf.reshape(tf.cast(factors, wide), [-1, *[1] * (rows.shape.rank - 1)])
        total = tf.math.unsorted_segment_sum(rows, places, count)
        if dtype in (tf.int64, tf.uint64):
            divisor = tf.cast(divisor, dtype)
            return _divided(total, tf.math.unsorted_segment_sum(rows // divisor, places, count), divisor)
        divide = tf.truncatediv if wide.is_integer else tf.divide
        return tf.cast(divide(total, tf.cast(divisor, wide)), dtype)


def _divided(sums: Any, quotients: Any, divisor: Any) -> Any:
    """Divide, toward zero, sums of 64-bit integers that may have wrapped around; see `ringreduce.buffers.integers`."""
    remainders = sums - quotients * divisor
    whole = remainders // divisor
    floor = quotients + whole
    return floor + tf.cast((floor < 0) & (remainders != whole * divisor), floor.dtype)
