"""The smallest framework that trains: NumPy arrays, and a linear model whose gradients are written by hand."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.framework import Hooks, Watcher
from ringreduce.training.binding.host import HOST, ArraySpec, HostMemory
from ringreduce.training.optimizers.optimizer import Training
from ringreduce.training.optimizers.user_options import checked, named_options

_Floats = npt.NDArray[Any]
RATE = 0.25


class _Weight(ArraySpec):
    """A parameter, and who watches its gradient."""

    def __init__(self, value: _Floats) -> None:
        super().__init__(value.shape, value.dtype)
        self.value = value
        self.grad: _Floats | None = None
        self.hooks: list[_Hook] = []


class _Hook(NamedTuple):
    """A watcher of a weight, as long as it is there."""

    weight: _Weight
    watcher: Callable[[], Watcher | None]
    record: Any

    def remove(self) -> None:
        self.weight.hooks.remove(self)


class _ToyGradients(HostMemory, Hooks):
    """The gradients of the toy, which weights keep."""

    def watch(self, parameter: _Weight, watcher: Watcher, record: Any) -> list[_Hook]:
        parameter.hooks.append(_Hook(parameter, weakref.ref(watcher), record))
        return parameter.hooks[-1:]

    def checksum(self, parameters: Sequence[_Weight]) -> int:
        return zlib.crc32(b"".join(parameter.value.tobytes() for parameter in parameters))

    def is_finite(self, gradient: Any) -> bool:
        return super().is_finite(gradient.value if isinstance(gradient, _Weight) else gradient)


class Toy:
    """A linear model, ``x @ matrix + bias``, and ``extra`` if it is used; trained by steepest descent.

    See `suites.trainees.Trainee`.
    """

    def __init__(
        self, values: Mapping[str, _Floats], process_set: ProcessSet = global_process_set, **options: Any
    ) -> None:
        self.named = [(name, _Weight(value.copy())) for name, value in values.items()]
        self.steps = 0  # that have begun to change the weights
        self.training = Training("Toy", process_set, arrays=HOST, bind=lambda _: _ToyGradients())
        with self.training.checking("Toy"):
            parameters = [weight for _, weight in self.named]
            chosen = checked(named_options(**options), self.training.communicator.config, parameters)
        self.training.prepare("steepest descent", partial(list, self.named), chosen, None)
        self.training.begin()

    def weights(self) -> list[_Floats]:
        return [weight.value for _, weight in self.named]

    def backward(self, x: _Floats, y: _Floats, *, extra: bool = True) -> None:
        """Add the gradient of half the mean, over the rows, of the summed squared error; ``extra`` may be left out."""
        (matrix_name, matrix), (bias_name, bias), (more_name, more) = self.named
        error = x @ matrix.value + bias.value + (more.value if extra else 0) - y
        mean = error.mean(0)
        gradients = {more_name: mean} if extra else {}
        self.give({**gradients, bias_name: mean, matrix_name: x.T @ error / len(x)})

    def give(self, gradients: Mapping[str, _Floats]) -> None:
        weights = dict(self.named)
        watchers: dict[int, Watcher] = {}
        for name, gradient in gradients.items():
            weight = weights[name]
            watching = [(watcher, hook.record) for hook in weight.hooks if (watcher := hook.watcher()) is not None]
            for watcher, record in watching:
                watcher.before_adding(record)
            if weight.grad is None:
                weight.grad = np.zeros_like(weight.value)
            weight.grad += gradient
            for watcher, record in watching:
                watcher.added(record)
                watchers[watcher.number] = watcher
        for _, watcher in sorted(watchers.items()):
            watcher.pass_ended()

    def zero_grad(self) -> None:
        with self.training.gradients.clearing():
            for _, weight in self.named:
                weight.grad = None

    def step(self) -> None:
        self.training.rejoin()
        gradients = self.training.gradients
        if gradients.pending:
            gradients.reduce()
        self.steps += 1
        for _, weight in self.named:
            if weight.grad is not None:
                weight.value -= RATE * weight.grad
        gradients.stepped()

    def no_sync(self) -> AbstractContextManager[None]:
        return self.training.gradients.overlap.suspended()

    def state_dict(self) -> dict[str, Any]:
        return self.training.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:  # there is none on one rank, where nothing is compressed
            self.training.load_state_dict(**state)
