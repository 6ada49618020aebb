"""Gradients that travel together: buckets in communication memory, with every ``p.grad`` a part of one.

What a gradient *is* stays torch's affair: ``p.grad`` is None, or the tensor that autograd or the user put there, and
says all that there is to say about what was computed since `zero_grad`. A bucket only decides where it lies. Autograd
makes a fresh tensor wherever ``p.grad`` was None, so before a bucket is reduced its gradients are collected: copied
to their places in the bucket, which then become ``p.grad`` and stay it for as long as nobody sets it to None.

Everything is reduced when the caller says so, never during the backward pass. Reducing a bucket as soon as it was
complete took as long, as far as could be measured (25 M parameters, 2 ranks on one node), and ranks that go through
different parts of the graph, or that look at gradients on one rank only, would find themselves in the middle of a
collective that the others do not call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.hooks import RemovableHandle

from ringreduce.communicator import Communicator
from ringreduce.errors import UnsupportedBufferError
from ringreduce.reduce_ops import MAX, ReduceOp

__all__ = ["ALIGNMENT_NBYTES", "BUCKET_NBYTES", "LARGE_NBYTES", "Bucket", "GradientBuckets", "plan"]

#: When a bucket is full, in bytes. On one node, 1 to 100 MiB differ by no more than the measurement does; this is small
#: enough for gradients that are copied into a bucket to be still in the last-level cache when it is reduced.
BUCKET_NBYTES = 4 << 20

#: From this size on (bytes), gradients are collected as soon as they are there. It is where glibc's malloc begins to
#: hand freed memory back to the kernel: gradients that live until the next `zero_grad` cost a page fault per 4 KiB.
LARGE_NBYTES = 128 << 10

#: Gradients begin on cache lines.
ALIGNMENT_NBYTES = 64

# What a rank found in ``p.grad``; the maximum over the ranks is what they do about it.
_NONE, _DENSE, _UNSUPPORTED = 0, 1, 2


def plan(items: Sequence[tuple[Hashable, int]], limit_nbytes: int) -> list[list[int]]:
    """Sort items into buckets: one kind each, in order, closed by the item that fills it to the limit.

    Args:
        items: kind (dtype) and size (bytes) of each.
        limit_nbytes: a bucket that holds as much takes no further item.

    Returns:
        The indices of the items in each bucket; buckets in order of their first item.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index, (kind, nbytes) in enumerate(items):
        members, filled = open_buckets.pop(kind, ([], 0))
        if not members:
            buckets.append(members)
        members.append(index)
        if filled + nbytes < limit_nbytes:
            open_buckets[kind] = members, filled + nbytes
    return buckets


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some gradients in one piece of communication memory.

    Attributes:
        flat: all of it, one-dimensional.
        slots: each parameter, and the place of its gradient: a tensor with the parameter's shape and, if those are
            dense, its strides, so that optimizers see gradients laid out like their parameters.
    """

    flat: torch.Tensor
    slots: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def of(cls, parameters: Sequence[torch.Tensor], communicator: Communicator) -> Bucket:
        """Make room for the gradients of parameters of one dtype."""
        dtype = parameters[0].dtype
        starts, end = [], 0
        for parameter in parameters:
            starts.append(end)
            end += _padded_nbytes(parameter)
        flat = torch.from_numpy(communicator.empty(end, np.uint8)).zero_().view(dtype)
        slots = []
        for parameter, start in zip(parameters, starts, strict=True):
            strides = torch.empty_like(parameter, device="meta").stride()
            # Not a view in autograd's sense: it could not be detached in place, and all would share a version counter.
            place = torch.empty(0, dtype=dtype)
            place.set_(flat.untyped_storage(), start // flat.element_size(), parameter.shape, strides)
            slots.append((parameter, place))
        return cls(flat, tuple(slots))

    def collect(self) -> None:
        """Move the gradients that are there to their places, but for those that autograd still needs as they are."""
        self._move(
            [
                (parameter, place, grad)
                for parameter, place in self.slots
                if (grad := parameter.grad) is not None
                and grad is not place
                and not grad.requires_grad
                and grad.layout is torch.strided
            ]
        )

    def fill(self, used: frozenset[int]) -> None:
        """Put the gradient of every used parameter in its place, zeros where this rank has none.

        Args:
            used: ids of the parameters that have a gradient on some rank.
        """
        elsewhere, missing = [], []
        for parameter, place in self.slots:
            grad = parameter.grad
            if grad is place:
                continue
            if grad is not None:
                elsewhere.append((parameter, place, grad))
            elif id(parameter) in used:
                missing.append(place)
                parameter.grad = place
        self._move(elsewhere)
        if missing:
            torch._foreach_zero_(missing)

    def _move(self, moves: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        if not moves:
            return
        with torch.no_grad():
            torch._foreach_copy_([place for _, place, _ in moves], [grad for _, _, grad in moves])
        for parameter, place, _ in moves:
            parameter.grad = place


class GradientBuckets:
    """The gradients of one optimizer on all ranks: finds, places and reduces them.

    Parameters get their place when a reduction first meets their gradient on any rank. All ranks learn of that in the
    same reduction, so that they make the same buckets, whether a parameter was there from the start, was added or
    thawed later, or is never used and takes no memory.

    Args:
        communicator: the ranks that reduce together.
        op: `AVERAGE` or `SUM`.
        bucket_nbytes: when a bucket is full; must agree on all ranks.
        name_of: says what errors call a parameter.

    Attributes:
        communication_s: seconds spent in collectives so far.
    """

    def __init__(
        self, communicator: Communicator, op: ReduceOp, bucket_nbytes: int, name_of: Callable[[torch.Tensor], str]
    ) -> None:
        self.communication_s = 0.0
        self._communicator = communicator
        self._op = op
        self._bucket_nbytes = bucket_nbytes
        self._name_of = name_of
        self._buckets: list[Bucket] = []
        self._placed: set[int] = set()
        self._found = np.empty(0, np.uint8)
        hooks: list[RemovableHandle] = []
        self._hooks = hooks
        weakref.finalize(self, _remove, hooks).atexit = False

    def reduce(self, parameters: Sequence[torch.Tensor]) -> None:
        """Replace the gradients by their average or sum over the ranks. Collective.

        Gradients that some ranks lack count as zeros there; parameters without a gradient on any rank keep None.

        Args:
            parameters: all of the optimizer's, in registration order, equal on all ranks.

        Raises:
            UnsupportedBufferError: on all ranks, if some rank has a sparse gradient or one that is not on the CPU.
        """
        used = self._used_anywhere(parameters)
        self._place([parameter for parameter in used if id(parameter) not in self._placed])
        ids = frozenset(map(id, used))
        for bucket in self._buckets:
            if any(id(parameter) in ids for parameter, _ in bucket.slots):
                bucket.fill(ids)
                self.allreduce(bucket.flat, self._op)

    def allreduce(self, array: Any, op: ReduceOp) -> None:
        """Reduce any array in place, on the clock of ``communication_s``. Collective."""
        started = perf_counter()
        self._communicator.allreduce(array, op, out=array)
        self.communication_s += perf_counter() - started

    def _used_anywhere(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        found = self._exchange(bytes(map(_state, parameters)))
        if (found == _DENSE).all():
            return parameters
        if (found == _UNSUPPORTED).any():
            name = self._name_of(parameters[int((found == _UNSUPPORTED).argmax())])
            raise UnsupportedBufferError(
                f"the gradient of {name} is sparse, or not on the CPU, on some rank; only dense gradients on the CPU "
                "are supported (for embeddings: sparse=False)"
            )
        return [parameter for parameter, state in zip(parameters, found.tolist(), strict=True) if state]

    def _exchange(self, mine: bytes) -> npt.NDArray[np.uint8]:
        """Return the maximum over the ranks, element by element."""
        if self._found.size != len(mine):
            self._found = self._communicator.empty(len(mine), np.uint8)
        self._found[:] = np.frombuffer(mine, np.uint8)
        self.allreduce(self._found, MAX)
        return self._found

    def _place(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make buckets for parameters that have none, last registered first: in the order of the backward pass."""
        unique = list({id(parameter): parameter for parameter in reversed(parameters)}.values())
        items = [(parameter.dtype, _padded_nbytes(parameter)) for parameter in unique]
        for members in plan(items, self._bucket_nbytes):
            bucket = Bucket.of([unique[index] for index in members], self._communicator)
            self._buckets.append(bucket)
            for parameter, place in bucket.slots:
                self._placed.add(id(parameter))
                if place.nbytes >= LARGE_NBYTES and parameter.is_leaf and parameter.requires_grad:
                    self._hooks.append(_collect_early(parameter, bucket))


def _state(parameter: torch.Tensor) -> int:
    grad = parameter.grad
    if grad is None:
        return _NONE
    return _DENSE if grad.layout is torch.strided and grad.is_cpu else _UNSUPPORTED


def _collect_early(parameter: torch.Tensor, bucket: Bucket) -> RemovableHandle:
    # The whole bucket, not only this gradient: small gradients that stay where they are (a bias) would lie between
    # freed large ones, and malloc could reuse neither.
    register = parameter.register_post_accumulate_grad_hook
    hook: RemovableHandle = register(lambda _: bucket.collect())  # type: ignore[no-untyped-call]
    return hook


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _padded_nbytes(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
