"""What the training of a PyTorch model keeps."""

from __future__ import annotations

from typing import Any, BinaryIO

import torch

from ringreduce.torch.elastic.sampler import ElasticSampler
from ringreduce.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringreduce.torch.optimizer import DistributedOptimizer
from ringreduce.training.elastic import HandlingState, SamplerStateHandler, StateHandler

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class TorchState(HandlingState):
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
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def _write(self, content: Any, file: BinaryIO) -> None:
        torch.save(content, file)

    def _read(self, file: BinaryIO) -> Any:
        return torch.load(file, map_location="cpu", weights_only=True)

    def _find_handler(self, value: Any) -> StateHandler | None:
        for kind, handler in _registry:
            if isinstance(value, kind):
                return handler(value)
        return super()._find_handler(value)


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
