"""What a `DistributedOptimizer` asks of the optimizer that it wraps: its parameters, and to say when it steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.training.optimizer import Named

__all__ = [
    "STEPPING",
    "is_optimizer",
    "named_parameters",
    "parameters_of",
    "require_optimizer",
    "require_parameters",
    "watch_steps",
]

#: The ids of wrapped optimizers that make a step for their wrapper.
STEPPING: set[int] = set()


def named_parameters(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Named:
    """Return names and parameters, given the names of some by id."""
    parameters = enumerate(parameters_of(optimizer))
    return [(names.get(id(parameter), f"parameter {index}"), parameter) for index, parameter in parameters]


class _StepWatch:
    """A hook of a wrapped optimizer, called before its steps. It keeps nothing, and is of no use to copies."""

    __slots__ = ("_all", "_tell")

    def __init__(self, tell: Callable[[], Callable[[], object] | None] = lambda: None, all_steps: bool = False) -> None:
        self._tell, self._all = tell, all_steps

    def __call__(self, optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        if (self._all or id(optimizer) not in STEPPING) and (tell := self._tell()) is not None:
            tell()

    def __reduce__(self) -> tuple[type[_StepWatch], tuple[()]]:
        return _StepWatch, ()


def watch_steps(
    optimizer: torch.optim.Optimizer, tell: Callable[[], object], *, all_steps: bool = False
) -> Callable[[], object]:
    """Call a method before each step of an optimizer; unless it is for all steps, not while that is in `STEPPING`.

    Returns:
        A function that ends this. So does the end of the method's object.
    """
    try:
        hook = optimizer.register_step_pre_hook(_StepWatch(weakref.WeakMethod(tell), all_steps))
    except AttributeError:  # an optimizer that has no hooks
        return lambda: None
    unwatch = weakref.finalize(cast("MethodType", tell).__self__, hook.remove)
    unwatch.atexit = False
    return unwatch


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_optimizer(candidate: object) -> bool:
    """Return whether this can be asked for its parameters, and to step."""
    return hasattr(candidate, "param_groups") and hasattr(candidate, "step")


def require_optimizer(optimizer: Any) -> None:
    """Raise `ConfigError` unless this can be wrapped, with a message that shows how it is done.

    Raises:
        UnsupportedBufferError: as for `require_parameters`.
    """
    if not is_optimizer(optimizer):
        what = "a model" if isinstance(optimizer, torch.nn.Module) else "something else"
        raise ConfigError(
            f"DistributedOptimizer wraps an optimizer, and got {what}, of type {type(optimizer).__name__}; call it as "
            "DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())"
        )
    require_parameters(parameters_of(optimizer))


def require_parameters(parameters: Iterable[torch.Tensor]) -> None:
    """Raise `UnsupportedBufferError` for parameters whose gradients cannot be reduced here."""
    for index, parameter in enumerate(parameters):
        # DTensors, as fully_shard makes them, and the flat parameters of FSDP, found without importing either.
        if hasattr(parameter, "to_local") or getattr(parameter, "_is_flat_param", False):
            raise UnsupportedBufferError(
                f"parameter {index} is sharded ({type(parameter).__name__}): FSDP, or whatever has sharded it, reduces "
                "its gradients, so use the optimizer as it is. To reduce shards over other ranks as well, pass those "
                "of the gradients, gradient.to_local(), to allreduce_"
            )
        if is_lazy(parameter):
            raise UnsupportedBufferError(
                f"parameter {index} has no shape yet: wrap the optimizer after the first forward pass of a lazy module"
            )
