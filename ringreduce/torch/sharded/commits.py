"""Copies of states of which the ranks of a node have tensors in common: of these, one copy that they make together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ringreduce.torch.private import leaves
from ringreduce.torch.sharded.shardable import STEPS
from ringreduce.torch.sharded.stepper import ShardedStep
from ringreduce.torch.tensors.streams import tensor_like
from ringreduce.training.strategies.node_commit import NodeCommit

#: Returns the counterpart of some bytes, given their address and number.
_Find = Callable[[NodeCommit, int, int], Any]


def sharded_steps(tensors: Iterable[torch.Tensor], *, open_only: bool = True) -> list[ShardedStep]:
    """Return what makes steps on some of these tensors, as parameters that a node has once; alike on all ranks.

    Args:
        tensors: parameters, and others.
        open_only: leave out those of worlds that have ended.
    """
    tensors = list(tensors)
    found = [step for step in STEPS if (step.is_open or not open_only) and step.pieces.has_any(tensors)]
    return sorted(found, key=lambda step: step.number)


def copied(state: Any, steps: Sequence[ShardedStep]) -> Any:
    """Return a copy of a state, where tensors in common are those of the copy that `NodeCommit.take` fills."""
    return _copy(state, steps, NodeCommit.copy_of)


def committed(saved: Any, steps: Sequence[ShardedStep]) -> Any:
    """Return the commit: what `copied` returned; or, if some rank had not copied its part, a copy of the memory."""
    torn = [step for step in steps if not step.commit.is_whole]
    if not _in_common(saved, torn):
        return saved
    return copy.deepcopy(_copy(saved, torn, NodeCommit.original_of))


def own(saved: Any, steps: Sequence[ShardedStep]) -> Any:
    """Return what `copied` has returned, as a copy that the next commit leaves as it is."""
    return copy.deepcopy(saved) if _in_common(saved, steps) else saved


def _in_common(saved: Any, steps: Sequence[ShardedStep]) -> bool:
    return any(_found(each, steps, NodeCommit.original_of) is not None for each in _tensors(saved))


def _copy(state: Any, steps: Sequence[ShardedStep], find: _Find) -> Any:
    """Return a deep copy, but with counterparts in place of tensors that have some."""
    tensors = _tensors(state) if steps else []
    counterparts = {id(each): found for each in tensors if (found := _found(each, steps, find)) is not None}
    return copy.deepcopy(state, counterparts)  # which takes them for copies that it has made already


def _found(tensor: torch.Tensor, steps: Sequence[ShardedStep], find: _Find) -> torch.Tensor | None:
    nbytes = tensor.numel() * tensor.element_size()
    for step in steps if nbytes else ():
        memory = find(step.commit, tensor.data_ptr(), nbytes)
        if memory is not None:
            return tensor_like(tensor, memory, tensor.dtype)
    return None


def _tensors(state: Any) -> list[torch.Tensor]:
    return [
        each for each in leaves(state) if torch.is_tensor(each) and each.layout is torch.strided and not each.is_cuda
    ]
