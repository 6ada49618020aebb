"""The binding of TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf
from trainees.toy import RATE

import ringreduce.tensorflow as hvd


class TensorFlow:
    """See `suites.trainees.Trainee`.

    Args:
        values: weights by name.
        compiled: whether steps are in a `tf.function`.
        momentum: of the steps.
        bucket_nbytes: without meaning here.
        compression: one of TensorFlow's, or its name.
        **options: of what wraps the optimizer.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        compiled: bool = True,
        momentum: float = 0.0,
        bucket_nbytes: int | None = None,
        compression: Any = hvd.Compression.none,
        **options: Any,
    ) -> None:
        self.named = {name: tf.Variable(value, name=name) for name, value in values.items()}
        if isinstance(compression, str):
            compression = getattr(hvd.Compression, compression)
        sgd = tf.keras.optimizers.SGD(RATE, momentum=momentum)
        self.optimizer = self.wrap(sgd, compression=compression, **options)
        self.optimizer.build(list(self.named.values()))
        self.apply = tf.function(self.apply_gradients) if compiled else self.apply_gradients
        self.no_sync = nullcontext
        self.zero_grad()

    def wrap(self, sgd: Any, **options: Any) -> Any:
        return hvd.DistributedOptimizer(sgd, **options)

    def apply_gradients(self, *given: Any) -> None:
        self.optimizer.apply_gradients(zip(given, self.named.values(), strict=True))

    def weights(self) -> list[Any]:
        return [np.array(each.numpy()) for each in self.named.values()]

    def zero_grad(self) -> None:
        self.gradients = {name: tf.zeros_like(each) for name, each in self.named.items()}

    def give(self, gradients: Mapping[str, Any]) -> None:
        for name, each in gradients.items():
            self.gradients[name] = self.gradients[name] + each

    def step(self, samples: Any = None) -> None:
        if samples is not None:
            self.optimizer.samples = samples
        self.apply(*self.gradients.values())

    def synchronize(self) -> None:
        self.optimizer.synchronize()


class LocalTensorFlow(TensorFlow):
    """See `suites.local_training.LocalTrainee`."""

    def wrap(self, sgd: Any, **options: Any) -> Any:
        self.local = hvd.DiLoCo(list(self.named.values()), **options)
        self.synchronize = self.local.synchronize
        self.rejoin = self.local.rejoin
        self.state_dict = self.local.state_dict
        self.load_state_dict = self.local.load_state_dict
        return hvd.DistributedOptimizer(sgd, process_set=self.local.process_set)

    def step(self) -> None:
        super().step()
        self.local.step()
