"""Parameters in place of those that other ranks update, in groups of which a rank would update none.

Where updates are divided among ranks, a group may be empty on some rank. torch's ``_foreach`` functions, by which
optimizers update a group, take no empty list. So such a group gets a copy of a parameter, whose update is thrown away.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch


def needs_spares(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step may fail in a group where nothing has a gradient; those of torch do not."""
    return type(optimizer).__module__.partition(".")[0] != "torch"


def lacks_gradients(own: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether none of a rank's own has a gradient, and some other parameter of the group has one."""
    return all(each.grad is None for each in own) and any(each.grad is not None for each in parameters)


def spare(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter with the same value and gradient."""
    made = parameter.detach().clone().requires_grad_(parameter.requires_grad)
    made.grad = None if parameter.grad is None else parameter.grad.detach().clone()
    return made


class Spares:
    """One for each group of an optimizer of which this rank does not update all parameters.

    Args:
        optimizer: has all parameters.
        values: what this rank updates, by parameter; None: another rank does. Others are not divided.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, values: Mapping[torch.Tensor, torch.Tensor | None]) -> None:
        self._optimizer = optimizer
        self._made: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # by group: like what, and the spare
        self._states: list[Any] = []
        for number, group in enumerate(optimizer.param_groups if needs_spares(optimizer) else ()):
            others = [each for each in group["params"] if values.get(each, each) is None]
            if others:
                like = min(others, key=torch.Tensor.numel)
                self._made.append((number, like, spare(like)))

    def look(self) -> None:
        """Remember the state that the optimizer has, for `load`."""
        self._states = [copy.deepcopy(self._optimizer.state.get(like)) for _, like, _ in self._made]

    def load(self, states: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Add the state of the spares to that of this rank's parameters."""
        for (_, _, made), state in zip(self._made, self._states, strict=True):
            if state is not None:
                states[made] = state

    def add(self, groups: Sequence[dict[str, Any]]) -> None:
        """Add those to this rank's groups that are needed, with the present gradients, and take the others away."""
        for number, like, made in self._made:
            own = [each for each in groups[number]["params"] if each is not made]
            if lacks_gradients(own, self._optimizer.param_groups[number]["params"]):
                fresh = spare(like)
                made.data.copy_(fresh.detach())
                made.grad = torch.zeros_like(made) if fresh.grad is None else fresh.grad
                own.append(made)
            groups[number]["params"] = own
