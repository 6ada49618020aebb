"""Which optimizers, ranks and parameters go together with ``shard``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ringreduce.common.errors import ConfigError
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.torch.wrapping import parameters_of

#: Optimizers that treat each element by itself, so that parameters may be cut anywhere.
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)


#: All that make steps on parameters that a node has once.
STEPS: weakref.WeakSet[Any] = weakref.WeakSet()


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to treat each element by itself."""
    return type(optimizer) in _ELEMENTWISE


def require_shardable(optimizer: torch.optim.Optimizer, shard: str | None, process_set: ProcessSet) -> None:
    """Raise `ConfigError` for an optimizer or ranks that cannot share parameters, if they are to.

    Whatever ``shard`` is, no other optimizer may have its parameters in memory of the node.
    """
    require_not_shared(parameters_of(optimizer))
    if shard is None:
        return
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("shard gives each rank some of the parameters, and LBFGS needs all of them at once")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError("shard is for dense gradients, and SparseAdam takes sparse ones")
    if any(each.is_cuda for each in parameters_of(optimizer)):
        raise ConfigError("shard is for parameters in host memory, and some are on a GPU")
    ranks = set(process_set.ranks or ())
    nodes = [node for node in global_process_set.communicator.topology.nodes if ranks & set(node)]
    for node in nodes:
        if not ranks >= set(node):
            raise ConfigError(f"shard needs all ranks of a node, and the process set has some of {list(node)} only")
    if shard == "all" and len(set(map(len, nodes))) > 1:
        raise ConfigError(f'shard="all" needs as many ranks on each node, and they have {[*map(len, nodes)]}')


def require_not_shared(parameters: Sequence[torch.Tensor], by: object = None) -> None:
    """Raise `ConfigError` if the ranks of a node have some of these in common, for the steps of an optimizer.

    Args:
        parameters: of another one.
        by: the memory of the one that may share them, if any.
    """
    if _sharing(parameters, by):
        gc.collect()  # what has been deleted may still be part of a cycle
    if _sharing(parameters, by):
        raise ConfigError(
            "another optimizer with shard has these parameters, and the ranks of a node have them in common for its "
            "steps: delete it first (`del optimizer`, and what refers to it, such as a scheduler), after which "
            "parameters are each rank's own"
        )


def _sharing(parameters: Sequence[torch.Tensor], by: object = None) -> list[Any]:
    """Return what makes steps on some of these parameters, which the ranks of a node have in common."""
    found = [step for step in STEPS if step.is_open and step.pieces.has_any(parameters)]
    return [step for step in found if by is None or step.reducer.sharding.memory is not by]


def _refuse_steps_of_others(optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
    """Raise `ConfigError` for a step on parameters that the ranks have in common, by any optimizer but their own."""
    if not STEPS or any(step.copy is optimizer for step in STEPS):
        return
    parameters = parameters_of(optimizer)
    if any(step.optimizer is optimizer for step in _sharing(parameters)):
        raise ConfigError(
            "this optimizer is wrapped with shard, and the ranks of a node have its parameters in common: call step() "
            "of the DistributedOptimizer, or each rank would change what the others have changed"
        )
    if not all(step.is_writing for step in _sharing(parameters)):
        require_not_shared(parameters)


@cache
def watch_other_steps() -> None:
    """Refuse, from now on, steps of other optimizers on parameters that the ranks of a node have in common."""
    register_optimizer_step_pre_hook(_refuse_steps_of_others)
