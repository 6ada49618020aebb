"""What the training of a PyTorch model keeps."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch

from ringreduce.elastic import ObjectState
from ringreduce.runtime import rank
from ringreduce.torch.elastic.sampler import ElasticSampler
from ringreduce.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringreduce.torch.objects import allgather_object, broadcast_object

__all__ = ["TorchState"]


class TorchState(ObjectState):
    """Models, optimizers, samplers, and whatever else is given, as attributes.

    Models, optimizers and `ElasticSampler`s are kept by their state dicts, and stay the objects that they are; anything
    else is kept by value. An attribute that is given another model later keeps that one.

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
        self._keepers: dict[str, _Keeper] = {}
        super().__init__(broadcast_object, rank, **{name: value for name, value in named.items() if value is not None})

    def save(self) -> None:
        for keeper in self._keepers.values():
            keeper.save()
        super().save()

    def restore(self) -> None:
        for keeper in self._keepers.values():
            keeper.restore()
        super().restore()

    def sync(self) -> None:
        for keeper in self._keepers.values():
            keeper.sync()
            keeper.save()
        super().sync()

    def reset(self) -> None:
        """Divide what is left of the epoch among the ranks there are now."""
        for keeper in self._keepers.values():
            if isinstance(keeper, _Sampler):
                keeper.sampler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.startswith("_"):
            return
        keeper = _keeper_of(value)
        if keeper is not None:
            self._keepers[name] = keeper
            keeper.save()
            if name in self._names:
                self._names.remove(name)
        elif self._keepers.pop(name, None) is not None:
            self._names.append(name)


class _Keeper(Protocol):
    """Keeps one object by its state dict."""

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def sync(self) -> None: ...


class _Model:
    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def save(self) -> None:
        self._saved = copy.deepcopy(self._model.state_dict())

    def restore(self) -> None:
        self._model.load_state_dict(self._saved)

    def sync(self) -> None:
        broadcast_parameters(self._model.state_dict(), root_rank=0)


class _Optimizer:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def save(self) -> None:
        self._saved = copy.deepcopy(self._optimizer.state_dict())

    def restore(self) -> None:
        self._optimizer.load_state_dict(copy.deepcopy(self._saved))  # which may keep the tensors it is given

    def sync(self) -> None:
        broadcast_optimizer_state(self._optimizer, root_rank=0)


class _Sampler:
    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler

    def save(self) -> None:
        self._saved = self.sampler.state_dict()

    def restore(self) -> None:
        self.sampler.load_state_dict(self._saved)

    def sync(self) -> None:
        """Put together what the ranks have processed of rank 0's epoch."""
        everyone = allgather_object(self.sampler.state_dict())
        epoch = everyone[0]["epoch"]
        processed = set().union(*(each["processed_indices"] for each in everyone if each["epoch"] == epoch))
        self.sampler.load_state_dict({"epoch": epoch, "processed_indices": processed})


def _keeper_of(value: Any) -> _Keeper | None:
    if isinstance(value, torch.nn.Module):
        return _Model(value)
    if isinstance(value, torch.optim.Optimizer):
        return _Optimizer(value)
    return _Sampler(value) if isinstance(value, ElasticSampler) else None
