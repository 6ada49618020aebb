"""Gradients that are computed as values, and come as lists of read-only arrays."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
from trainees.toy import RATE

from ringreduce.training.binding.host import ArraySpec
from ringreduce.training.compression.tensors import wire_format_of
from ringreduce.training.optimizers.optimizer import ListTraining


class Lists:
    """See `suites.trainees.Trainee`; ``momentum`` is that of the steps."""

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        momentum: float = 0.0,
        compression: Any = None,
        gradient_predivide_factor: float = 1.0,
        **options: Any,
    ) -> None:
        self.values = {name: value.copy() for name, value in values.items()}
        self.moving = {name: np.zeros_like(value) for name, value in values.items()}
        self.momentum = momentum
        named = [(name, ArraySpec(value.shape, value.dtype)) for name, value in values.items()]
        if isinstance(compression, str):
            compression = wire_format_of(compression)
        options |= {"compression": compression, "predivide_factor": gradient_predivide_factor}
        self.training = ListTraining("Lists", named, **options)
        self.no_sync = nullcontext
        self.state_dict = self.training.training.state_dict
        self.gradients: dict[str, Any] = {}

    def weights(self) -> list[Any]:
        return list(self.values.values())

    def give(self, gradients: Mapping[str, Any]) -> None:
        for name, gradient in gradients.items():
            self.gradients[name] = np.asarray(self.gradients.get(name, 0) + gradient, np.float32)
            self.gradients[name].flags.writeable = False

    def zero_grad(self) -> None:
        self.gradients = {}

    def step(self, samples: Any = None) -> None:
        self.apply(self.training.reduce([self.gradients.get(name) for name in self.values], samples))

    def apply(self, averages: list[Any]) -> None:
        for value, moving, average in zip(self.values.values(), self.moving.values(), averages, strict=True):
            if average is not None:
                moving *= self.momentum
                moving += average
                value -= RATE * moving

    def synchronize(self) -> None:
        for averages in self.training.pending():
            self.apply(averages)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.training.training.load_state_dict(**state)
