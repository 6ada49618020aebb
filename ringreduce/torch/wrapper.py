"""What `DistributedOptimizer` and `DiLoCo` have in common: all that they take over from the wrapped optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FrameType, MethodType
from typing import Any, NoReturn

import torch

from ringreduce.torch.own_methods import ADVICE, Arrivals, guarded
from ringreduce.torch.private import frame_above
from ringreduce.torch.wrapping import is_optimizer, parameters_of
from ringreduce.training.binding.framework import Named


def _of_wrapped(name: str) -> Any:
    """Return a property of a `DistributedOptimizer` that is its wrapped optimizer's."""
    return property(
        lambda wrapper: getattr(wrapper._optimizer, name),
        lambda wrapper, value: setattr(wrapper._optimizer, name, value),
    )


class Wrapper(torch.optim.Optimizer):
    """An optimizer that shares all but its steps with the one that it wraps, which is ``_optimizer``."""

    _optimizer: torch.optim.Optimizer
    _named: Callable[[], Named]

    _has_own_methods = False
    _arrivals: Arrivals | None = None
    _advice = ADVICE

    # If this were true, a GradScaler would set its scale as attributes here, where the wrapped optimizer does not see
    # them. As it is false, GradScaler unscales the gradients itself.
    _step_supports_amp_scaling = False

    def __new__(cls, optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
        # Also an instance of the wrapped optimizer's class, for programs that ask what kind it is.
        kind = type(optimizer)
        plain = kind is torch.optim.Optimizer or isinstance(optimizer, Wrapper) or not is_optimizer(optimizer)
        if cls.__base__ is Wrapper and not plain:
            own = guarded(cls, kind)
            cls = type(f"Distributed{kind.__name__}", (cls, kind), {**own, "_has_own_methods": bool(own)})
        return object.__new__(cls)

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """What errors call the parameters, by parameter; by Horovod's name, under which libraries look for it."""
        return {parameter: name for name, parameter in self._named()}

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The optimizer that makes the steps."""
        return self._optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        # A GradScaler looks for overflows in the gradients, and divides them by its scale, just before the step or when
        # the program tells it to. If it did so before they are reduced, some ranks would skip the step.
        self._prepare_for_scaler(frame_above(1))
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = value

    state = _of_wrapped("state")
    defaults = _of_wrapped("defaults")

    def __getattr__(self, name: str) -> Any:
        # Reached for what is not found here: the wrapped optimizer's hooks and whatever its class adds.
        if name == "_optimizer":
            raise AttributeError(name)
        found = getattr(self._optimizer, name)
        if isinstance(found, MethodType) and found.__self__ is self._optimizer:
            return MethodType(found.__func__, self)  # so that its `self.step()` is the one that reduces
        return found

    def __reduce__(self) -> NoReturn:
        kind = next(each.__name__ for each in type(self).__mro__ if each.__base__ is Wrapper)
        raise TypeError(
            f"a {kind} belongs to the running job and cannot be pickled; save its state_dict(), or the optimizer that "
            "it wraps, which is its attribute `wrapped`. An object that holds one can be pickled while `wrapped` is in "
            "its place, or if its __getstate__ leaves it out. A DistributedOptimizer can be copied by copy.deepcopy"
        )

    def _watch_arrivals(self) -> Arrivals | None:
        """Watch gradients, if the optimizer's class has methods of its own that may step with them."""
        if self._has_own_methods:
            self._arrivals = Arrivals(partial(parameters_of, self._optimizer))
        return self._arrivals

    def _may_own_methods_step(self) -> bool:
        """Return whether methods of the optimizer's own may step with the gradients as they are."""
        raise NotImplementedError  # subclasses know how

    def _prepare_for_scaler(self, caller: FrameType) -> None:
        """Hear that a frame reads the parameter groups: it may be a GradScaler's."""
        raise NotImplementedError  # subclasses know how
