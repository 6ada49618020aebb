"""What tests of training in torch share: models that are equal on all ranks, steps, and what must be equal on all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")

Model = Any
Optimizer = Any

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


def mlp(*widths: int, seed: int = 0, dtype: Any = None) -> Model:
    """Return linear layers of these widths with tanh between them, the same on all ranks."""
    torch.manual_seed(seed)
    layers: list[Any] = []
    for inputs, outputs in pairwise(widths):
        layers += [torch.nn.Linear(inputs, outputs, dtype=dtype), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


class Own(torch.optim.Optimizer):
    """An optimizer of a program's own: `update` changes each parameter that has a gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter: Any, group: dict[str, Any]) -> None:
        """Change a parameter of a group, which has made so many ``steps`` with this one."""
        raise NotImplementedError


def take_steps(model: Model, optimizer: Optimizer, steps: Iterable[int], loss_of: Callable[[Model, int], Any]) -> None:
    """Clear, go back and step, as most programs do."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def weights(model: Model) -> Any:
    """Return all parameters of a model in one row."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def assert_equal_on_ranks(what: Any) -> None:
    """Check that the ranks have the same bits: of a model's parameters, of a tensor, or of several."""
    tensors = what.parameters() if isinstance(what, torch.nn.Module) else [what] if torch.is_tensor(what) else what
    bits = b"".join(each.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for each in tensors)
    assert same_on_all_ranks(bits), "the ranks have different bits"


def same_on_all_ranks(value: Any) -> bool:
    """Return whether all ranks have an equal object."""
    return all(theirs == value for theirs in rr.allgather_object(value))
