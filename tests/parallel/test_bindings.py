"""Every binding of a framework passes the suite for bindings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from ringreduce.testing.toy import RATE, Toy
from ringreduce.testing.training import CHECKS, Trainee
from ringreduce.training.binding.host import ArraySpec
from ringreduce.training.optimizers.optimizer import ListTraining


class Torch:
    """The torch binding's."""

    def __init__(self, values: Mapping[str, Any], *, passes: int = 1, **options: Any) -> None:
        torch = pytest.importorskip("torch")
        import ringreduce.torch as hvd

        self.named = {name: torch.nn.Parameter(torch.from_numpy(np.copy(value))) for name, value in values.items()}
        sgd = torch.optim.SGD(self.named.values(), lr=RATE)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.named, backward_passes_per_step=passes, **options)
        self.step, self.no_sync = self.optimizer.step, self.optimizer.no_sync
        self.zero_grad = self.optimizer.zero_grad
        self.state_dict, self.load_state_dict = self.optimizer.state_dict, self.optimizer.load_state_dict

    def weights(self) -> list[Any]:
        return [weight.detach().numpy() for weight in self.named.values()]

    def backward(self, x: Any, y: Any, *, extra: bool = True) -> None:
        torch = pytest.importorskip("torch")
        found = torch.from_numpy(x) @ self.named["matrix"] + self.named["bias"] + (self.named["extra"] if extra else 0)
        ((found - torch.from_numpy(y)).square().sum() / 2 / len(x)).backward()


class Lists:
    """One of gradients that are computed as values, and come as lists of read-only arrays."""

    def __init__(self, values: Mapping[str, Any], **options: Any) -> None:
        self.values = {name: value.copy() for name, value in values.items()}
        named = [(name, ArraySpec(value.shape, value.dtype)) for name, value in values.items()]
        self.training = ListTraining("Lists", named, **options)
        self.no_sync, self.state_dict = nullcontext, self.training.training.state_dict
        self.gradients: dict[str, Any] = {}

    def weights(self) -> list[Any]:
        return list(self.values.values())

    def backward(self, x: Any, y: Any, *, extra: bool = True) -> None:
        error = x @ self.values["matrix"] + self.values["bias"] + (self.values["extra"] if extra else 0) - y
        mean = error.mean(0)
        found = {"matrix": x.T @ error / len(x), "bias": mean} | ({"extra": mean} if extra else {})
        for name, gradient in found.items():
            self.gradients[name] = self.gradients.get(name, 0) + gradient
            self.gradients[name].flags.writeable = False

    def zero_grad(self) -> None:
        self.gradients = {}

    def step(self) -> None:
        reduced = self.training.reduce([self.gradients.get(name) for name in self.values])
        for value, gradient in zip(self.values.values(), reduced, strict=True):
            if gradient is not None:
                value -= RATE * gradient

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.training.training.load_state_dict(**state)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"reduce_in": "backward"}], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", [Toy, Torch, Lists])
def test_a_binding(make: Callable[..., Trainee], check: Callable[..., None], options: dict[str, Any]) -> None:
    """Reducing in the step, during the backward pass, or at its end."""
    check(make, **options)
