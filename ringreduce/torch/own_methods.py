"""Methods that the class of a wrapped optimizer has besides torch's: refused where they step with unreduced gradients.

Such are the ``first_step`` and ``second_step`` of optimizers for flat minima. Their ``self`` is the wrapper, so that
they reduce by ``self.step()``. Others write to parameters by themselves, or by an optimizer within. They may do so if
no gradient came since the last step or reduction: to swap averages of weights, for example.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any

import torch

from ringreduce.common.errors import ConfigError
from ringreduce.common.finalizers import when_ended
from ringreduce.torch.private import version_of
from ringreduce.training.binding.framework import remove_all

#: What to do instead, with a `DistributedOptimizer` and with `DiLoCo`.
ADVICE = (
    'Wrap the optimizer with reduce_in="backward": then gradients are already reduced when backward() returns (or, if '
    "each rank is meant to step with its own gradients, call the method within skip_synchronize())"
)
LOCAL_ADVICE = (
    "DiLoCo and LocalSGD count steps, and exchange weights, in step() alone: let the optimizer do all of this in its "
    "step(closure)"
)

#: Methods of optimizers that need no schedule: they swap averages of weights in and out, and make no step. An epoch may
#: end, and call them, between backward passes that make one step.
_SWAPS = ("train", "eval")

_FEW = 8  # elements of a parameter that are compared, for writes by ``p.data`` that torch does not count


class AdditionHooks:
    """Calls a method each time that a backward pass has added to a gradient, as long as its object lives.

    Args:
        method: the method.

    Attributes:
        hooks: of the parameters.
    """

    def __init__(self, method: Callable[[], object]) -> None:
        self._method = weakref.WeakMethod(method)
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}
        self.hooks: list[Any] = []

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch parameters that are not watched yet."""
        method = self._method

        def added_to(_: torch.Tensor) -> None:
            if (notify := method()) is not None:
                notify()

        for parameter in parameters:
            known = self._watched.get(id(parameter))
            if parameter.requires_grad and parameter.is_leaf and (known is None or known() is not parameter):
                self._watched[id(parameter)] = weakref.ref(parameter)
                self.hooks.append(parameter.register_post_accumulate_grad_hook(added_to))  # type: ignore[no-untyped-call]


class Arrivals:
    """Whether backward passes have added to gradients since the last step or reduction.

    Args:
        find: returns the parameters. It must not keep the wrapper alive.

    Attributes:
        reductions: how often gradients were reduced, or taken by a step.
        count: how often a pass has added to a gradient.
        fresh: whether one has since then.
    """

    def __init__(self, find: Callable[[], list[torch.Tensor]]) -> None:
        self._find = find
        self._additions = AdditionHooks(self._came)
        self.reductions = self.count = 0
        self.fresh = False
        self.watch()
        when_ended(self, remove_all, self._additions.hooks)

    def watch(self) -> None:
        """Watch parameters that are not watched yet."""
        self._additions.watch(self._find())

    def _came(self) -> None:
        self.fresh = True
        self.count += 1

    def are_there(self) -> bool:
        """Return whether such gradients are there: a program may have cleared them by ``model.zero_grad()``."""
        return self.fresh and any(each.grad is not None for each in self._find())

    def cleared(self) -> None:
        """Take note that the gradients are None or zero."""
        self.fresh = False
        self.watch()

    def reduced(self) -> None:
        """Take note that they were reduced, or that a step took them."""
        self.reductions += 1
        self.cleared()

    def snapshot(self, *, values: bool) -> list[tuple[Any, ...]]:
        """Return what tells whether parameters are written to or replaced.

        Args:
            values: whether it tells of writes by ``p.data``, too, to parameters in host memory. To read one on a GPU
                would wait for the GPU.
        """
        return [
            (
                0 if each.is_inference() else version_of(each),
                each.data_ptr(),
                _first_bytes(each) if values and each.device.type == "cpu" else b"",
            )
            for each in self._find()
            if each.layout is torch.strided
        ]


def _first_bytes(parameter: torch.Tensor) -> bytes:
    few = parameter.detach().as_strided((min(_FEW, parameter.numel()),), (1,))
    return bytes(few.clone().view(torch.uint8).tolist())


def guarded(wrapper: type, kind: type) -> Mapping[str, Callable[..., Any]]:
    """Return the public methods that a wrapper takes over from the class of an optimizer, each `_guarded`.

    Args:
        wrapper: its own attributes go first.
        kind: of the optimizer. What torch's classes have is left as it is, and so are ``train`` and ``eval``.
    """
    found: dict[str, Callable[..., Any]] = {}
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, value in vars(each).items():
            if name[0] == "_" or name in _SWAPS or name in found or hasattr(wrapper, name):
                continue
            if isinstance(value, FunctionType):
                found[name] = _guarded(value)
    return found


def _guarded(function: FunctionType) -> Callable[..., Any]:
    """Return a method that calls that of an optimizer with the wrapper in its place.

    It raises a `ConfigError` if that has written to parameters, while gradients came that were not reduced since.
    """

    @wraps(function)
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        arrivals: Arrivals | None = self._arrivals
        if arrivals is None or self._may_own_methods_step():
            return function(self, *arguments, **options)
        fresh = arrivals.are_there()
        count = arrivals.count
        reductions = arrivals.reductions
        before = arrivals.snapshot(values=fresh)
        result = function(self, *arguments, **options)
        came = (fresh or arrivals.count != count) and arrivals.reductions == reductions
        if came and arrivals.snapshot(values=fresh) != before:
            raise ConfigError(
                f"{function.__name__}() of {type(self.wrapped).__name__} has changed parameters with this rank's own "
                "gradients, which were not reduced. The ranks' weights differ now: load a checkpoint, or start again. "
                f"{self._advice}"
            )
        return result

    return method
