"""The binding of Keras, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
from trainees.toy import RATE

import ringreduce.keras as hvd


class Keras:
    """See `suites.trainees.Trainee`.

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


class Parameters(keras.layers.Layer):  # type: ignore[misc]
    """A layer that has weights of these values, by name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.named = {}
        for name, value in values.items():
            initial = keras.initializers.Zeros()
            self.named[name] = self.add_weight(shape=value.shape, dtype="float32", initializer=initial, name=name)
            self.named[name].assign(value)

    def call(self, inputs: Any) -> Any:
        return inputs


class LocalKeras(Keras):
    """See `suites.local_training.LocalTrainee`: a loop of its own calls the methods that `fit` calls."""

    def __init__(self, values: Mapping[str, Any], *, momentum: float = 0.0, **options: Any) -> None:
        self.local = hvd.callbacks.DiLoCoCallback(**options)
        super().__init__(values, momentum=momentum, process_set=self.local.process_set)
        layer = Parameters(values)
        self.named = layer.named
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(self.optimizer, loss="mse")
        self.local.set_model(model)
        self.local.on_train_begin()
        self.synchronize = self.local.synchronize
        self.rejoin = self.local.on_train_begin
        self.state_dict = self.local.state_dict
        self.load_state_dict = self.local.load_state_dict

    def step(self) -> None:
        self.local.on_train_batch_begin(0)
        super().step()
        self.local.on_train_batch_end(0)


def product(true: Any, predicted: Any) -> Any:
    """A loss whose gradient is the target, for an input of ones."""
    return keras.ops.mean(true * predicted)


def line(optimizer: Any) -> Any:
    """Return a model whose weight moves by the rate and the gradient."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizer, loss=product)
    return model
