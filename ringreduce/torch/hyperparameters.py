"""What an optimizer steps with, compared between ranks: equal gradients and different rates make different weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch

from ringreduce.communicator import Communicator
from ringreduce.errors import name_ranks
from ringreduce.torch.objects import gather

__all__ = ["hyperparameters", "warn_of_differences"]

_log = logging.getLogger(__name__)

_SHOWN = 3


def hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the optimizer's class and the hyper-parameters of its groups, as text, by name.

    Numbers, switches, words, tuples of these and tensors of one element count; objects differ from rank to rank anyway.
    """
    said = {"the optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for name in getattr(optimizer, "defaults", ()):
            words = _in_words(group.get(name))
            if words is not None:
                said[f"{name} of group {number}"] = words
    return said


def warn_of_differences(communicator: Communicator, mine: Mapping[str, str] | None) -> None:
    """Let rank 0 say which hyper-parameters differ between ranks. Collective.

    Args:
        communicator: the ranks.
        mine: what `hyperparameters` returned; None: this rank does not count.
    """
    everyone = gather(communicator, mine)
    if communicator.rank != 0:
        return
    said = {rank: each for rank, each in enumerate(everyone) if each is not None}
    different = []
    for name in dict.fromkeys(name for each in said.values() for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in said.items():
            ranks.setdefault(each.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} on {name_ranks(where)}" for value, where in ranks.items())
            different.append(f"{name} is {values}")
    more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
    _log.warning(
        "the ranks step with different hyper-parameters, and end with different weights: %s%s. All ranks must change "
        "them alike: a schedule that follows the loss, for example, takes the loss averaged with allreduce",
        "; ".join(different[:_SHOWN]),
        more,
    )


def _in_words(value: object) -> str | None:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else value
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (tuple, list)):
        parts = [_in_words(each) for each in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return str(value) if value is None or isinstance(value, (bool, int, float, complex, str)) else None
