"""The binding of Keras, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np

import ringreduce.keras as hvd
from ringreduce.testing.toy import RATE


class Keras:
    """See `ringreduce.testing.trainees.Trainee`.

    Args:
        values: weights by name.
        momentum: of the steps.
        bucket_nbytes: without meaning here.
        **options: of what wraps the optimizer.
    """

    def __init__(
        self, values: Mapping[str, Any], *, momentum: float = 0.0, bucket_nbytes: int | None = None, **options: Any
    ) -> None:
        self.named = {name: keras.Variable(value, name=name) for name, value in values.items()}
        self.optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=momentum), **options)
        self.no_sync = nullcontext
        self.zero_grad()

    def weights(self) -> list[Any]:
        return [np.array(keras.ops.convert_to_numpy(each)) for each in self.named.values()]

    def zero_grad(self) -> None:
        self.gradients = {name: np.zeros(each.shape, np.float32) for name, each in self.named.items()}

    def give(self, gradients: Mapping[str, Any]) -> None:
        for name, each in gradients.items():
            self.gradients[name] = self.gradients[name] + each

    def step(self, samples: Any = None) -> None:
        if samples is not None:
            self.optimizer.samples = samples
        given = [keras.ops.convert_to_tensor(each, "float32") for each in self.gradients.values()]
        self.optimizer.apply(given, list(self.named.values()))

    def synchronize(self) -> None:
        self.optimizer.synchronize()
