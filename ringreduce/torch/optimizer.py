"""`DistributedOptimizer`: any torch optimizer, with gradients that are reduced over the ranks before each step."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch

from ringreduce.communicator import Communicator
from ringreduce.errors import ConfigError
from ringreduce.reduce_ops import AVERAGE, SUM, ReduceOp
from ringreduce.runtime import world
from ringreduce.torch.agreement import require_same_tensors
from ringreduce.torch.buckets import GradientBuckets

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer: `step` reduces the gradients over all ranks, then lets the wrapped one step.

    It is a `torch.optim.Optimizer` for learning-rate schedulers and everything else that asks, and shares parameter
    groups, state, defaults and hooks with the wrapped optimizer, so that either can be used in the other's place for
    all but `step`. Every rank ends a step with the same weights, bit by bit, if it began with the same ones: call
    `broadcast_parameters` first.

    Gradients mean what they mean in torch. ``p.grad`` is None after ``zero_grad()``, and stays None through a step if
    no rank used the parameter; if only some ranks did, the others count as zeros. Gradients of any number of backward
    passes add up locally until `step` reduces them, once. With op `Average`, gradients that were reduced already and
    got more added reduce to the right thing again; with `Sum` they must be zeroed after every reduction.

    A reduction writes into ``p.grad``, whoever else holds it. After ``zero_grad()`` a gradient that was kept, or a view
    of it, keeps its values, as in torch; steps are a little slower while it is. Memory that is held as a bare
    ``p.grad.data_ptr()`` or ``untyped_storage()`` is not kept.

    Construction and `add_param_group` are collective, and so are `step` and `synchronize`: they must be called on all
    ranks in the same order. With `torch.amp.GradScaler`, call `synchronize` before ``scaler.unscale_(optimizer)`` and
    ``scaler.step(optimizer)`` within `skip_synchronize`.

    Args:
        optimizer: the optimizer to wrap, new or used; its parameters must have equal names, shapes and dtypes on all
            ranks, in equal order.
        named_parameters: ``model.named_parameters()``: what errors call the parameters. If given, it must name them
            all.
        backward_passes_per_step: how many backward passes come before each step. Right whatever it says, because
            gradients are reduced in `step`; taken for Horovod's sake.
        op: `Average` or `Sum`; must agree on all ranks.
        bucket_nbytes: gradients travel together in buckets; a bucket that holds so many bytes is closed. Must agree on
            all ranks. None: the communicator's `Config.bucket_nbytes`.
        communicator: the ranks that train together; None: the world.

    Raises:
        ConfigError: an argument is wrong; names are missing or used twice.
        MismatchError: the ranks have different parameters.
    """

    # GradScaler: an optimizer that says so gets its scale as attributes, and those would end here, not in the wrapped
    # one. Without, GradScaler unscales the gradients itself.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        backward_passes_per_step: int = 1,
        op: ReduceOp = AVERAGE,
        bucket_nbytes: int | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: it would make parameter groups, state and hooks of its own. Whatever it
        # would have set is the wrapped optimizer's, by the properties and __getattr__ below.
        if ReduceOp.parse(op) not in (AVERAGE, SUM):
            raise ConfigError(f"DistributedOptimizer can average or sum gradients; got op {op}")
        self._optimizer = optimizer
        self._communicator = world() if communicator is None else communicator
        self._op = ReduceOp.parse(op)
        self._names = _checked_names(optimizer, named_parameters)
        if bucket_nbytes is None:
            bucket_nbytes = self._communicator.config.bucket_nbytes
        self._buckets = GradientBuckets(self._communicator, self._op, bucket_nbytes, self._name_of)
        self._synchronized = False
        self._skipping = False
        self.set_backward_passes_per_step(backward_passes_per_step)
        self._require_same_parameters()

    # ---- training ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, then step. Collective.

        Args:
            closure: clears the gradients, computes loss and gradients, and returns the loss. The wrapped optimizer may
                call it several times; the gradients are reduced after each, and the loss too, so that line searches
                decide the same on all ranks. It must return a loss on all ranks or on none.

        Returns:
            What the wrapped optimizer returns: with a closure, the loss, reduced over the ranks like the gradients.
        """
        if closure is not None:
            result = self._optimizer.step(partial(self._evaluate, closure))
            self._synchronized = False
            return result
        if not self._skipping:
            if self._synchronized and self._communicator.size > 1:
                again = "adds them up" if self._op is SUM else "averages them"
                warnings.warn(
                    f"step() after synchronize() {again} a second time; call it within skip_synchronize()", stacklevel=2
                )
            self.synchronize()
        self._synchronized = False
        return self._optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. None costs less memory traffic than zeros, here as well."""
        self._synchronized = False
        self._optimizer.zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Reduce the gradients now, to look at them or change them before `step`. Collective.

        The step must then be made within `skip_synchronize`:

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        if self._communicator.size > 1:
            self._buckets.reduce(self._parameters())
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` use the gradients as they are; to be entered on all ranks."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Say how many backward passes come before each step; see the class.

        Raises:
            ConfigError: it is not a positive number.
        """
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step must be at least 1, got {passes}")
        self.backward_passes_per_step = passes

    @property
    def communication_s(self) -> float:
        """Seconds that this rank has spent in collectives of this optimizer, waiting for others included."""
        return self._buckets.communication_s

    # ---- the wrapped optimizer ----

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The optimizer that makes the steps."""
        return self._optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = value

    @property
    def state(self) -> Any:
        return self._optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self._optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self._optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self._optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to train; the same on all ranks. Collective.

        Raises:
            MismatchError: the ranks have different parameters now.
        """
        self._optimizer.add_param_group(param_group)
        self._require_same_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, as it would save it itself."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict`, here or of an optimizer like the wrapped one, has returned."""
        self._optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        # Reached for what is not found here: the wrapped optimizer's hooks and whatever its class adds.
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._op.value} over {self._communicator.size} ranks of {self._optimizer!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer belongs to the running job and can be neither copied nor pickled; "
            "save its state_dict(), or copy the optimizer that it wraps"
        )

    # ---- inside ----

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call a closure, and make gradients and loss those of all ranks."""
        loss = closure()
        if not self._skipping:
            self.synchronize()
        if loss is None or self._communicator.size == 1:
            return loss
        common = torch.as_tensor(loss).detach().to(torch.float64, copy=True)
        self._buckets.allreduce(common, self._op)
        return common.to(loss.dtype) if isinstance(loss, torch.Tensor) else common.item()

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _require_same_parameters(self) -> None:
        require_same_tensors(self._communicator, "DistributedOptimizer", self._named_parameters())

    def _named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (self._names.get(parameter, f"parameter {index}"), parameter)
            for index, parameter in enumerate(self._parameters())
        ]

    def _name_of(self, parameter: torch.Tensor) -> str:
        return next(name for name, each in self._named_parameters() if each is parameter)


def _checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Return the name of each parameter, nothing if none were given."""
    if named_parameters is None:
        return {}
    pairs: list[Any] = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ConfigError("named_parameters must be (name, parameter) pairs, as from model.named_parameters()")
    twice = sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
    if twice:
        raise ConfigError(f"named_parameters uses names more than once: {', '.join(twice)}")
    names = {parameter: name for name, parameter in pairs}
    unnamed = sum(parameter not in names for group in optimizer.param_groups for parameter in group["params"])
    if unnamed:
        raise ConfigError(
            f"named_parameters leaves {unnamed} of the optimizer's parameters without a name; name all or none"
        )
    return names
