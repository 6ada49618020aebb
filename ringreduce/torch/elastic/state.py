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

__all__ = ["TorchState"]


class TorchState(ObjectState):
    """Models, optimizers, samplers, and whatever else is given, as attributes.

    Models, optimizers, `ElasticSampler`s and what else has a state dict (a learning-rate scheduler) are kept by that,
    and stay the objects that they are; anything else is kept by value. An attribute that is given another model later
    keeps that one. Gradients are not kept.

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

    def check_host_updates(self) -> None:
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            # Now, while those that go can still say what they have processed, and because a sync may be skipped.
            for keeper in self._keepers.values():
                if isinstance(keeper, _Sampler):
                    keeper.sync()
            raise

    def reset(self) -> None:
        """Divide what is left of the epoch among the ranks there are now, and let optimizers work with them."""
        for keeper in self._keepers.values():
            keeper.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        known = None if name.startswith("_") else self._keepers.get(name)
        if name.startswith("_") or (known is not None and known.kept is value):
            return
        keeper = _keeper_of(value)
        if keeper is not None:
            self._keepers[name] = keeper
            keeper.save()
            if name in self._names:
                self._names.remove(name)
        elif self._keepers.pop(name, None) is not None:
            self._names.append(name)


class _Keeper:
    """Keeps one object by its state dict: a learning-rate scheduler, a GradScaler, or a kind that has its own class."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def save(self) -> None:
        self._saved = copy.deepcopy(self.kept.state_dict())

    def restore(self) -> None:
        self.kept.load_state_dict(copy.deepcopy(self._saved))  # which may keep the tensors that it is given

    def sync(self) -> None:
        """Make it equal to rank 0's. Collective."""
        state = broadcast_object(self.kept.state_dict())
        if rank() != 0:
            self.kept.load_state_dict(state)

    def reset(self) -> None:
        """Prepare for other ranks. Collective."""


class _Model(_Keeper):
    def restore(self) -> None:
        self.kept.load_state_dict(self._saved)  # which copies

    def sync(self) -> None:
        broadcast_parameters(self.kept.state_dict(), root_rank=0)


class _Optimizer(_Keeper):
    def sync(self) -> None:
        broadcast_optimizer_state(self.kept, root_rank=0)

    def reset(self) -> None:
        if isinstance(self.kept, DistributedOptimizer):
            self.kept.rejoin()


class _Sampler(_Keeper):
    def sync(self) -> None:
        """Put together what the ranks have processed of rank 0's epoch."""
        everyone = allgather_object(self.kept.state_dict())
        epoch = everyone[0]["epoch"]
        processed = set().union(*(each["processed_indices"] for each in everyone if each["epoch"] == epoch))
        self.kept.load_state_dict({"epoch": epoch, "processed_indices": processed})

    def reset(self) -> None:
        self.kept.reset()


def _keeper_of(value: Any) -> _Keeper | None:
    """Return what keeps an object by its state dict; None: it is kept by value."""
    if isinstance(value, torch.nn.Module):
        return _Model(value)
    if isinstance(value, torch.optim.Optimizer):
        return _Optimizer(value)
    if isinstance(value, ElasticSampler):
        return _Sampler(value)
    return _Keeper(value) if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else None
