"""What the training of a PyTorch model keeps."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ringreduce.elastic import HostsUpdatedInterrupt, ObjectState
from ringreduce.runtime import rank
from ringreduce.torch.elastic.sampler import ElasticSampler
from ringreduce.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringreduce.torch.objects import allgather_object, broadcast_object
from ringreduce.torch.optimizer import DistributedOptimizer

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class TorchState(ObjectState):
    """Models, optimizers, samplers, and whatever else is given, as attributes.

    Models, optimizers, `ElasticSampler`s and what else has a state dict (a learning-rate scheduler) are kept by that,
    and stay the objects that they are; anything else is kept by value. `set_handler_registry` says how other kinds are
    kept. An attribute that is given another model later keeps that one. Gradients are not kept.

    Args:
        model: a model, kept as ``state.model``.
        optimizer: an optimizer, kept as ``state.optimizer``.
        **kwargs: more of these, and other things (``epoch=0, batch=0``); the same names on all ranks.
    """

    model: Any = None
    optimizer: Any = None

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        named = {"model": model, "optimizer": optimizer, **kwargs}
        self._handlers: dict[str, StateHandler] = {}
        super().__init__(broadcast_object, rank, **{name: value for name, value in named.items() if value is not None})

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
            handler.save()
        super().sync()

    def check_host_updates(self) -> None:
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            # Now, while those that go can still say what they have processed, and because a sync may be skipped.
            for handler in self._handlers.values():
                if isinstance(handler, SamplerStateHandler):
                    handler.sync()
            raise

    def reset(self) -> None:
        """Divide what is left of the epoch among the ranks there are now, and let optimizers work with them."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        known = None if name.startswith("_") else self._handlers.get(name)
        if name.startswith("_") or (known is not None and known.value is value):
            return
        handler = _handler_of(value)
        if handler is not None:
            self._handlers[name] = handler
            handler.save()
            if name in self._names:
                self._names.remove(name)
        elif self._handlers.pop(name, None) is not None:
            self._names.append(name)


class StateHandler:
    """Keeps one object by its state dict: a learning-rate scheduler, a GradScaler.

    Subclasses keep objects of other kinds, in whatever way; `set_handler_registry` makes `TorchState` use them. It
    saves as soon as it is given an object.

    Args:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Take a copy."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Go back to the copy that was taken last."""
        self.value.load_state_dict(copy.deepcopy(self._saved))  # which may keep the tensors that it is given

    def sync(self) -> None:
        """Make it equal to rank 0's. Collective."""
        state = broadcast_object(self.value.state_dict())
        if rank() != 0:
            self.value.load_state_dict(state)

    def reset(self) -> None:
        """Prepare for other ranks. Collective."""


class ModelStateHandler(StateHandler):
    """Keeps a model."""

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)  # which copies

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """Keeps an optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)

    def reset(self) -> None:
        if isinstance(self.value, DistributedOptimizer):
            self.value.rejoin()


class SamplerStateHandler(StateHandler):
    """Keeps an `ElasticSampler`."""

    def sync(self) -> None:
        """Put together what the ranks have processed of rank 0's epoch. Collective."""
        everyone = allgather_object(self.value.state_dict())
        epoch = everyone[0]["epoch"]
        processed = set().union(*(each["processed_indices"] for each in everyone if each["epoch"] == epoch))
        self.value.load_state_dict({"epoch": epoch, "processed_indices": processed})

    def reset(self) -> None:
        self.value.reset()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return what keeps objects of which kind; the first that fits counts."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Choose what keeps objects of which kind, in the `TorchState`s that are given some from now on.

    Args:
        registry: kinds and handlers; the same on all ranks. Begin it with those of `get_handler_registry`.
    """
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    """Return what keeps an object as the object that it is; None: it is kept by value."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return StateHandler(value) if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else None
