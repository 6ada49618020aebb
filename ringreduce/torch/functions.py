"""Make models and optimizers equal on all ranks: what a script does once, before it trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ringreduce.common.errors import ConfigError
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.torch import own_state
from ringreduce.torch.sharded.stepper import Stepper
from ringreduce.torch.tensors.arrays import TENSORS
from ringreduce.torch.wrapping import parameters_of
from ringreduce.training.calls import parameters
from ringreduce.training.calls.objects import allgather_object as allgather_object
from ringreduce.training.calls.objects import broadcast_object as broadcast_object
from ringreduce.training.calls.requests import RequestBuilder

_Parameters = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]]


def broadcast_parameters(params: _Parameters, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite tensors with the root's. Collective.

    Args:
        params: a model, for its ``state_dict()``; or such a dict, a tensor, tensors, or (name, tensor) pairs such as
            ``model.named_parameters()``; the same names, shapes and dtypes on all ranks, in the same order. Entries
            that are None are skipped.
        root_rank: whose values count, as a rank of the world; must agree.
        process_set: the ranks that take part. Nothing is done on the others, so that a script may call this on all.

    Raises:
        ConfigError: something in ``params`` is neither a tensor nor a pair, or the names cannot be ordered.
        MismatchError: the tensors differ between ranks in more than their values; nothing was overwritten then.
    """
    with RequestBuilder("broadcast_parameters", None, process_set):
        given = params.state_dict() if isinstance(params, torch.nn.Module) else params
    parameters.broadcast_parameters(TENSORS, given, root_rank=root_rank, process_set=process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Make an optimizer equal to the root's: hyper-parameters and state, whatever each rank had before. Collective.

    The root's optimizer is only read. A fresh optimizer stays fresh: no step is made to create state. (By Horovod's
    conventions, see `ringreduce.common.conventions`, the parameters of an optimizer that had no state have zeros as
    gradients afterwards.) The state goes by pickle, so this is for trusted jobs only.

    Args:
        optimizer: one of torch's or a `DistributedOptimizer`, over the same parameter groups on all ranks.
        root_rank: whose state counts, as a rank of the world; must agree.
        model: without meaning here, taken for Horovod's sake.
        process_set: the ranks that take part. Nothing is done on the others, so that a script may call this on all.

    Raises:
        ConfigError: this is no optimizer.
        ValueError: the parameter groups of this rank differ from the root's in number or length.
    """
    with RequestBuilder("broadcast_object", None, process_set):
        if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "load_state_dict")):
            raise ConfigError(
                f"broadcast_optimizer_state takes an optimizer, got one of type {type(optimizer).__name__}; "
                "use broadcast_parameters for models and their state dicts"
            )
        root = process_set.rank_of(root_rank)
        had_no_state = not optimizer.state
        included = process_set.included()
        is_root = included and process_set.rank() == root
        # Where ranks have parts of the state, each of them takes part in this; it may fail, in somebody's optimizer.
        stepper = vars(optimizer).get("_stepper")
        together = included and isinstance(stepper, Stepper) and stepper.begin()
        state = optimizer.state_dict() if is_root or together else None
    if not included:
        return
    state = broadcast_object(state, root_rank, process_set=process_set)
    if not is_root:
        own_state.load(optimizer, state)
    if had_no_state and process_set.communicator.config.conventions.broadcast_state_zeroes_gradients:
        for parameter in parameters_of(optimizer):
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
