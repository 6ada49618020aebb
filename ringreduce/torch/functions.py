"""Make models and optimizers equal on all ranks: what a script does once, before it trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ringreduce.errors import ConfigError
from ringreduce.runtime import world
from ringreduce.torch.agreement import require_same_tensors
from ringreduce.torch.objects import broadcast_object
from ringreduce.torch.ops import broadcast_

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]], root_rank: int = 0
) -> None:
    """Overwrite tensors with the root's. Collective.

    Args:
        params: a ``state_dict``, or tensors, or (name, tensor) pairs such as ``model.named_parameters()``; the same
            names, shapes and dtypes on all ranks, in the same order. Entries that are None are skipped.
        root_rank: whose values count; must agree.

    Raises:
        ConfigError: something in ``params`` is not a tensor.
        MismatchError: the tensors differ between ranks in more than their values; nothing was overwritten then.
    """
    tensors = _named(params)
    require_same_tensors(world(), "broadcast_parameters", tensors)
    for _, tensor in tensors:
        broadcast_(tensor, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Make an optimizer equal to the root's: hyper-parameters and state, whatever each rank had before. Collective.

    The root's optimizer is only read. A fresh optimizer stays fresh: no step is made to create state. The state goes by
    pickle, so this is for trusted jobs only.

    Args:
        optimizer: one of torch's or a `DistributedOptimizer`, over the same parameter groups on all ranks.
        root_rank: whose state counts; must agree.

    Raises:
        ValueError: the parameter groups of this rank differ from the root's in number or length.
    """
    is_root = world().rank == root_rank
    state = broadcast_object(optimizer.state_dict() if is_root else None, root_rank)
    if not is_root:
        optimizer.load_state_dict(state)


def _named(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
) -> list[tuple[str, torch.Tensor]]:
    entries = params.items() if isinstance(params, Mapping) else params
    named = []
    for index, entry in enumerate(entries):
        name, tensor = entry if isinstance(entry, tuple) else (str(index), entry)
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"broadcast_parameters takes tensors, but {name!r} is of type {type(tensor).__name__}; "
                "use broadcast_object for other things and broadcast_optimizer_state for optimizers"
            )
        named.append((name, tensor))
    return named
