"""What a `DistributedOptimizer` needs of the optimizer that it wraps: its parameters, and notice of its steps."""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, cast

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.finalizers import when_ended
from ringreduce.common.reduce_ops import MAX
from ringreduce.runtime import rank_and_size
from ringreduce.training.binding.framework import Named
from ringreduce.training.calls.parameters import hyperparameters, in_words
from ringreduce.training.data.shares import is_by_speed
from ringreduce.training.gradients.checks import OF_SCALER
from ringreduce.training.optimizers.optimizer import Training
from ringreduce.training.optimizers.refusals import refusal
from ringreduce.training.options.features import ADASUM, SHARES
from ringreduce.training.options.options import checked_names
from ringreduce.training.strategies.strategy import PendingAverages

#: Where users say what errors call parameters.
NamedParameters = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor] | torch.nn.Module | None

#: The ids of wrapped optimizers that make a step for their wrapper.
STEPPING: set[int] = set()


def names_of(parameters: Sequence[torch.Tensor], named: NamedParameters) -> dict[int, str]:
    """Return the name of each parameter, by id; see `checked_names`."""
    return checked_names(parameters, named.named_parameters() if isinstance(named, torch.nn.Module) else named)


def named_parameters(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Named:
    """Return names and parameters, given the names of some by id."""
    parameters = enumerate(parameters_of(optimizer))
    return [(names.get(id(parameter)) or f"parameter {index}", parameter) for index, parameter in parameters]


class Hyperparameters:
    """Returns the hyper-parameters of an optimizer, as `hyperparameters`, and the state of its GradScaler.

    Attributes:
        scaler: the GradScaler that reads the gradients; None: there is none so far.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.scaler: torch.amp.GradScaler | None = None

    def __call__(self) -> dict[str, str]:
        state = {} if self.scaler is None else self.scaler.state_dict()
        of_scaler = {f"{name.strip('_')}{OF_SCALER}": value for name, value in state.items()}
        return hyperparameters(self._optimizer) | in_words(of_scaler)


class _StepWatch:
    """A hook of a wrapped optimizer, called before its steps. It keeps nothing, and is of no use to copies.

    Attributes:
        dropped: the wrapper that nobody has kept, of which the next step is to warn; None: it is not.
    """

    def __init__(
        self, notify: Callable[[], Callable[[], object] | None] = lambda: None, all_steps: bool = False
    ) -> None:
        self._notify = notify
        self._all = all_steps
        self.dropped: str | None = None

    def __call__(self, optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        own = id(optimizer) not in STEPPING
        if (self._all or own) and (notify := self._notify()) is not None:
            notify()
        elif self.dropped is not None:
            if own and rank_and_size()[1] > 1:
                _warn_of_dropped(self.dropped)
            self.dropped = None  # once; or another wrapper makes the steps

    def __reduce__(self) -> tuple[type[_StepWatch], tuple[()]]:
        return _StepWatch, ()


def watch_steps(
    optimizer: torch.optim.Optimizer,
    notify: Callable[[], object],
    *,
    all_steps: bool = False,
    unused: Callable[[], str | None] = lambda: None,
) -> Callable[[], object]:
    """Call a method before each step of an optimizer; unless it is for all steps, not while that is in `STEPPING`.

    Args:
        optimizer: has hooks; else nothing is done.
        notify: the method.
        all_steps: whether to call it before all steps.
        unused: called when the method's object ends: returns what that was, if the next step of the optimizer is to
            warn that nobody has kept it, unless something else wraps it then.

    Returns:
        A function that ends this. So does the end of the method's object.
    """
    watch = _StepWatch(weakref.WeakMethod(notify), all_steps)
    try:
        hook = optimizer.register_step_pre_hook(watch)
    except AttributeError:  # an optimizer that has no hooks
        return lambda: None

    def ended() -> None:
        watch.dropped = unused()
        if watch.dropped is None:
            hook.remove()

    ending = when_ended(cast("MethodType", notify).__self__, ended)

    def unwatch() -> None:
        ending.detach()
        hook.remove()

    return unwatch


def unused(training: Training) -> str | None:
    """Return what a wrapper was that has ended before it has reduced anything; None: it has, or this rank is alone."""
    return None if training.alone or training.seconds else f"the {training.kind} of {training.described}"


def _warn_of_dropped(wrapper: str) -> None:
    warnings.warn(
        f"nobody has kept {wrapper}, and step() of the optimizer that it wrapped was called: this rank trains alone. "
        "Keep what was returned, and call its step(): optimizer = DistributedOptimizer(optimizer, ...), for example",
        stacklevel=4,
    )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return all of a parameter group but the parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def is_optimizer(candidate: object) -> bool:
    """Return whether this can be asked for its parameters, and to step."""
    return hasattr(candidate, "param_groups") and hasattr(candidate, "step")


def require_optimizer(optimizer: Any, wrapper: str = "DistributedOptimizer") -> None:
    """Raise `ConfigError` unless this can be wrapped, with a message that shows how it is done.

    Args:
        optimizer: whatever was given.
        wrapper: the class that was to wrap it.

    Raises:
        UnsupportedBufferError: as for `require_parameters`.
    """
    if not is_optimizer(optimizer):
        what = "a model" if isinstance(optimizer, torch.nn.Module) else "something else"
        raise ConfigError(
            f"{wrapper} wraps an optimizer, and got {what}, of type {type(optimizer).__name__}; call it as "
            f"{wrapper}(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())"
        )
    require_parameters(parameters_of(optimizer))


def require_parameters(parameters: Iterable[torch.Tensor]) -> None:
    """Raise `UnsupportedBufferError` for parameters whose gradients cannot be reduced here."""
    flat = getattr(sys.modules.get("torch.distributed.fsdp"), "FlatParameter", ())
    for index, parameter in enumerate(parameters):
        # DTensors, as fully_shard makes them, and the flat parameters of FSDP, found without importing either.
        if hasattr(parameter, "to_local") or isinstance(parameter, flat):
            raise UnsupportedBufferError(
                f"parameter {index} is sharded ({type(parameter).__name__}): FSDP, or whatever has sharded it, reduces "
                "its gradients, so use the optimizer as it is. To reduce shards over other ranks as well, pass those "
                "of the gradients, gradient.to_local(), to allreduce_"
            )
        if is_lazy(parameter):
            raise UnsupportedBufferError(
                f"parameter {index} has no shape yet: wrap the optimizer after the first forward pass of a lazy module"
            )


def step_and_combine(parameters: Iterable[torch.Tensor], training: Training, step: Callable[[], Any]) -> Any:
    """Step with this rank's own gradients; then combine the changes of all ranks by Adasum. Collective.

    Raises:
        ConfigError: a sampler divides samples by speed. On all ranks, before the step.
    """
    if is_by_speed(training.reducer.ranks.engine):
        raise refusal(ADASUM, SHARES)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    result = step()
    with torch.no_grad():
        changes = [parameter - start for parameter, start in zip(trained, before, strict=True)]
        training.combine(changes)
        for parameter, start, change in zip(trained, before, changes, strict=True):
            parameter.copy_(start + change)
    return result


def apply_late(parameters: Sequence[torch.Tensor], late: PendingAverages, step: Callable[[], Any]) -> None:
    """Make the steps whose averages are still to be applied. Collective."""
    while late.pending:
        for parameter, average in zip(parameters, late.next(), strict=True):
            parameter.grad = average
        step()


def reduced_loss(training: Training, loss: Any) -> Any:
    """Return the loss of a closure, reduced like the gradients, as what it was; anything else as it is. Collective."""
    if training.alone or not isinstance(loss, (torch.Tensor, int, float)):
        return loss
    common = torch.as_tensor(loss).detach().to("cpu", torch.float64, copy=True)
    if (weights := training.reducer.buckets.weights) is not None:
        common *= weights.factor
    training.reduce("loss of a closure", training.options.op, common.numpy())
    return common.to(loss.device, loss.dtype) if isinstance(loss, torch.Tensor) else common.item()


def share_overflows(parameters: Iterable[torch.Tensor], training: Training) -> None:
    """Make this rank's gradients overflow if those of any rank do: Adasum reduces nothing before the step."""
    if training.alone:
        return
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    overflows = np.array([not all(bool(value.isfinite().all()) for value in values)])
    training.reduce("overflow of gradients", MAX, overflows)
    if overflows[0] and grads:
        grads[0].mul_(math.inf)
