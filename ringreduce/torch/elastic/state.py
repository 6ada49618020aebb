"""What the training of a PyTorch model keeps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from ringreduce.elastic.handlers import HandlingState
from ringreduce.elastic.handlers import SamplerStateHandler as SamplerStateHandler
from ringreduce.elastic.handlers import StateHandler as StateHandler
from ringreduce.torch import own_state
from ringreduce.torch.elastic.sampler import ElasticSampler
from ringreduce.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringreduce.torch.private import version_of
from ringreduce.torch.resumable import warn_of_lost_place
from ringreduce.torch.sharded.commits import committed, copied, own, sharded_steps
from ringreduce.torch.wrapper import Wrapper
from ringreduce.torch.wrapping import parameters_of, settings_of, watch_steps


class TorchState(HandlingState):
    """Models, optimizers, samplers, and whatever else is given, as attributes.

    Models, optimizers, `ElasticSampler`s and what else has a state dict (a learning-rate scheduler) are kept by that,
    and stay the objects that they are; anything else is kept by value. `set_handler_registry` says how other kinds are
    kept. An attribute that is given another model later keeps that one. Gradients are not kept.

    Where the default process group of torch.distributed is ringreduce's, the ranks that go on have a new one. What was
    made of the old one (DistributedDataParallel, other groups, meshes) is to be made in the function that is called
    again.

    Args:
        model: a model, kept as ``state.model``.
        optimizer: an optimizer, kept as ``state.optimizer``.
        **kwargs: more of these, and other things (``epoch=0, batch=0``); the same names on all ranks.
    """

    model: Any = None
    optimizer: Any = None

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def reset(self) -> None:
        """Recreate the default process group of torch.distributed if ringreduce is its backend; and see the base."""
        if dist.is_available() and dist.is_initialized():
            # It cannot be imported where torch has no such thing.
            from ringreduce.torch.distributed import collectives

            collectives.recreate_default_group()
        super().reset()

    def save(self) -> None:
        warn_of_lost_place(value for name, value in vars(self).items() if not name.startswith("_"))
        super().save()

    def _write(self, content: Any, file: BinaryIO) -> None:
        torch.save(content, file)

    def _read(self, file: BinaryIO) -> Any:
        return torch.load(file, map_location="cpu", weights_only=True)

    def _find_handler(self, value: Any) -> StateHandler | None:
        for kind, handler in _registry:
            if isinstance(value, kind):
                return handler(value)
        return super()._find_handler(value)


class _TensorsHandler(StateHandler):
    """Keeps what has tensors, and notices by torch's counts of changes in place whether they are what they were.

    Of tensors that the ranks of a node have in common, they make one copy together.
    """

    _prepared: Any = None
    _noted: Sequence[tuple[torch.Tensor, torch.Tensor, int]] = ()  # the second keeps the memory of the first

    def prepare_save(self) -> None:
        for step in sharded_steps(self._tensors()):
            step.prepare_commit()
        self._prepared = self._read()

    def save(self) -> None:
        state = self._prepared or self._read()
        self._prepared = None
        self._saved = copied(state, sharded_steps(self._tensors()))

    def finish_save(self) -> None:
        for step in sharded_steps(self._tensors()):
            step.commit.take()

    def for_disk(self) -> Any:
        return own(self._saved, sharded_steps(self._tensors()))

    def restore(self) -> None:
        steps = sharded_steps(self._tensors(), open_only=False)
        for step in steps:
            step.detach()
        self._saved = committed(self._saved, steps)
        self._prepared = None
        super().restore()

    def copy_small(self) -> Any:
        self._noted = [(each, each.detach(), version_of(each)) for each in self._tensors()]
        return copy.deepcopy(self._small())

    def is_unchanged(self) -> bool:
        now = self._tensors()
        return len(now) == len(self._noted) and all(
            each is tensor and version_of(each) == version and each.data_ptr() == memory.data_ptr()
            for each, (tensor, memory, version) in zip(now, self._noted, strict=True)
        )

    def _tensors(self) -> list[torch.Tensor]:
        """Return the tensors that only steps change."""
        raise NotImplementedError  # subclasses know which

    def _small(self) -> Any:
        """Return everything else."""
        raise NotImplementedError  # subclasses know what


class ModelStateHandler(_TensorsHandler):
    """Keeps a model. Its buffers are small; its parameters change in steps, or in place, which torch counts."""

    def _copied(self, state: Any) -> Any:
        return state  # for `_load`, which copies

    def restore_small(self, copied: Any) -> None:
        self.value.load_state_dict(copied, strict=False)

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)

    def _tensors(self) -> list[torch.Tensor]:
        return list(self.value.parameters())

    def _small(self) -> Any:
        weights = {name for name, _ in self.value.named_parameters(remove_duplicate=False)}
        return {name: each for name, each in self.value.state_dict().items() if name not in weights}


class OptimizerStateHandler(_TensorsHandler):
    """Keeps an optimizer. Its settings are small; its state changes in steps, which it reports beforehand."""

    def __init__(self, value: torch.optim.Optimizer) -> None:
        super().__init__(value)
        self._steps = self._noted_steps = 0
        # Fused steps change weights behind the back of torch's count.
        stepping = value.wrapped if isinstance(value, Wrapper) else value
        whole = getattr(value, "needs_whole_commits", False)
        self.notes_steps = hasattr(stepping, "register_step_pre_hook") and not whole
        self.differs = getattr(value, "needs_own_commits", False)
        watch_steps(stepping, self._count, all_steps=True)

    def _count(self) -> None:
        self._steps += 1

    def copy_small(self) -> Any:
        self._noted_steps = self._steps
        return super().copy_small()

    def is_unchanged(self) -> bool:
        return self._noted_steps == self._steps and super().is_unchanged()

    def _load(self, state: Any) -> None:
        own_state.load(self.value, state)

    def restore_small(self, copied: Any) -> None:
        for group, settings in zip(self.value.param_groups, copied, strict=True):
            group.update(copy.deepcopy(settings))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)

    def reset(self) -> None:
        if isinstance(self.value, Wrapper):
            self.value.rejoin()

    def _tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the state, and the parameters, whose number shows whether a group was added."""
        kept = [each for state in self.value.state.values() for each in state.values() if torch.is_tensor(each)]
        return [*kept, *parameters_of(self.value)]

    def _small(self) -> Any:
        return list(map(settings_of, self.value.param_groups))


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
