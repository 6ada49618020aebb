"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringreduce.common.reduce_ops import SUM
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.tensorflow.ops import allreduce, grouped_allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """Normalise each channel by its mean and variance over the batches of all ranks, on Keras's backend tensorflow.

    While training, every forward and every backward pass is collective. Batches may have different numbers of rows.
    Variances are merged as in T. F. Chan, G. H. Golub, R. J. LeVeque, "Algorithms for computing the sample variance",
    The American Statistician 37 (1983), which keeps the digits that ``E[x^2] - E[x]^2`` loses.

    Args:
        process_set: the ranks that normalise together.
        **kwargs: of `keras.layers.BatchNormalization`.
    """

    def __init__(self, *args: Any, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        values = tf.size(inputs) / tf.size(mean) if mask is None else tf.math.count_nonzero(mask)
        count = tf.cast(values, inputs.dtype)
        sums = [count, tf.math.multiply_no_nan(mean, count)]
        total, weighted = grouped_allreduce(sums, op=SUM, process_set=self.process_set)
        total = tf.maximum(total, 1.0)
        together = weighted / total
        spread = tf.math.multiply_no_nan(variance + tf.square(mean - together), count)
        return together, allreduce(spread, op=SUM, process_set=self.process_set) / total
