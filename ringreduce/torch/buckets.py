"""Gradients that travel together: buckets in communication memory, with every ``p.grad`` a part of one.

What a gradient *is* stays torch's affair: ``p.grad`` is None, or the tensor that autograd or the user put there, and
says all that there is to say about what was computed since `zero_grad`. A bucket only decides where it lies. Autograd
makes a fresh tensor wherever ``p.grad`` was None, so before a bucket is reduced its gradients are collected: copied
to their places in the bucket, which then become ``p.grad`` and stay it for as long as nobody sets it to None.

Places are lent: after `zero_grad` somebody may still hold the tensor that was ``p.grad``, or a view of it, as code does
that compares the gradients of several tasks. A place that is kept is not written to. Until it is free again, its bucket
is reduced in spare memory, and gradients come back from there as tensors of their own, as torch would make them.

Everything is reduced when the caller says so, never during the backward pass. Reducing a bucket as soon as it was
complete took as long, as far as could be measured (25 M parameters, 2 ranks on one node), and ranks that go through
different parts of the graph, or that look at gradients on one rank only, would find themselves in the middle of a
collective that the others do not call.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.hooks import RemovableHandle

from ringreduce.communicator import Communicator
from ringreduce.errors import UnsupportedBufferError
from ringreduce.reduce_ops import MAX, ReduceOp

__all__ = ["ALIGNMENT_NBYTES", "LARGE_NBYTES", "Bucket", "GradientBuckets", "Slot", "plan"]

#: From this size on (bytes), gradients are collected as soon as they are there. It is where glibc's malloc begins to
#: hand freed memory back to the kernel: gradients that live until the next `zero_grad` cost a page fault per 4 KiB.
LARGE_NBYTES = 128 << 10

#: Gradients begin on cache lines.
ALIGNMENT_NBYTES = 64

# What a rank found in ``p.grad``; the maximum over the ranks is what they do about it.
_NONE, _DENSE, _UNSUPPORTED = 0, 1, 2


#: How many tensors hold a storage. Private to torch; without it only the holders of the gradient itself are noticed.
_storage_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)


def plan(items: Sequence[tuple[Hashable, int]], limit_nbytes: int) -> list[list[int]]:
    """Sort items into buckets: one kind each, in order, closed by the item that fills it to the limit.

    Args:
        items: kind (dtype) and size (bytes) of each.
        limit_nbytes: a bucket that holds so many bytes is closed.

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


class Slot:
    """A parameter, and the place of its gradient.

    Args:
        parameter: of any strides.
        memory: room for the gradient, as bytes.

    Attributes:
        place: a tensor with the parameter's shape and, if those are dense, its strides, so that optimizers see
            gradients laid out like their parameters.
    """

    __slots__ = ("_address", "_unshared", "parameter", "place")

    def __init__(self, parameter: torch.Tensor, memory: npt.NDArray[np.uint8]) -> None:
        self.parameter = parameter
        # Not a view in autograd's sense: it could not be detached in place, and all would share a version counter. Its
        # storage is its own, so that uses of it can be told from uses of the bucket's other places.
        self.place = torch.empty(0, dtype=parameter.dtype)
        strides = torch.empty_like(parameter, device="meta").stride()
        self.place.set_(torch.from_numpy(memory).untyped_storage(), 0, parameter.shape, strides)
        self._address = self.place.data_ptr()
        self._unshared = self._references()

    def is_filled(self) -> bool:
        """Whether the gradient is in its place; after ``p.grad.data = ...`` the tensor is, but not its memory."""
        return self.parameter.grad is self.place and self.place.data_ptr() == self._address

    def is_kept(self) -> bool:
        """Whether the place, while it is not ``p.grad``, still is something to somebody; takes about 0.3 us."""
        return self._references() > self._unshared or self.place.data_ptr() != self._address

    def _references(self) -> int:
        # Whoever holds the tensor itself counts in the first, whoever holds a view of any kind (`detach`, `numpy`) in
        # the second.
        storage = self.place.untyped_storage()
        return sys.getrefcount(self.place) + _storage_uses(storage._cdata)


class Bucket:
    """Some gradients in one piece of communication memory.

    Args:
        parameters: whose gradients, all of one dtype.
        communicator: makes the memory.

    Attributes:
        flat: all of it, one-dimensional.
        slots: the parameters, in order, and their places.
    """

    __slots__ = ("_spare", "flat", "slots")

    def __init__(self, parameters: Sequence[torch.Tensor], communicator: Communicator) -> None:
        ends = list(accumulate(map(_padded_nbytes, parameters), initial=0))
        memory = communicator.empty(ends[-1], np.uint8)
        self.flat = torch.from_numpy(memory).zero_().view(parameters[0].dtype)
        self.slots = tuple(
            Slot(parameter, memory[start:end])
            for parameter, (start, end) in zip(parameters, pairwise(ends), strict=True)
        )
        self._spare: Bucket | None = None

    def spare(self, communicator: Communicator) -> Bucket:
        """Return a bucket for the same gradients in memory of its own, which nobody is lent."""
        if self._spare is None:
            self._spare = Bucket([slot.parameter for slot in self.slots], communicator)
        return self._spare

    def is_kept(self) -> bool:
        """Whether somebody holds, from earlier, what reducing this bucket would overwrite."""
        return any(not slot.is_filled() and slot.is_kept() for slot in self.slots)

    def collect(self) -> None:
        """Move the gradients that are there to places that are free, but for those that autograd needs as they are."""
        self._move(
            [
                (slot, grad)
                for slot in self.slots
                if (grad := slot.parameter.grad) is not None
                and grad is not slot.place
                and not grad.requires_grad
                and grad.layout is torch.strided
                and not slot.is_kept()
            ]
        )

    def fill(self, used: frozenset[int]) -> None:
        """Put the gradient of every used parameter in its place, zeros where this rank has none.

        Args:
            used: ids of the parameters that have a gradient on some rank.
        """
        elsewhere, missing = [], []
        for slot in self.slots:
            grad = slot.parameter.grad
            if grad is slot.place:
                continue
            if grad is not None:
                elsewhere.append((slot, grad))
            elif id(slot.parameter) in used:
                missing.append(slot.place)
                slot.parameter.grad = slot.place
        self._move(elsewhere)
        if missing:
            torch._foreach_zero_(missing)

    def _move(self, moves: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        if not moves:
            return
        with torch.no_grad():
            torch._foreach_copy_([slot.place for slot, _ in moves], [grad for _, grad in moves])
        for slot, _ in moves:
            slot.parameter.grad = slot.place


class GradientBuckets:
    """The gradients of one optimizer on all ranks: finds, places and reduces them.

    Parameters get their place when a reduction first meets their gradient on any rank. All ranks learn of that in the
    same reduction, so that they make the same buckets, whether a parameter was there from the start, was added or
    thawed later, or is never used and takes no memory.

    Args:
        communicator: the ranks that reduce together.
        op: `AVERAGE` or `SUM`.
        bucket_nbytes: a bucket that holds so many bytes is closed; must agree on all ranks.
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
            if not any(id(slot.parameter) in ids for slot in bucket.slots):
                continue
            if bucket.is_kept():
                self._reduce_apart(bucket, ids)
            else:
                bucket.fill(ids)
                self.allreduce(bucket.flat, self._op)

    def allreduce(self, array: Any, op: ReduceOp) -> None:
        """Reduce any array in place, on the clock of ``communication_s``. Collective."""
        started = perf_counter()
        self._communicator.allreduce(array, op, out=array)
        self.communication_s += perf_counter() - started

    def _reduce_apart(self, bucket: Bucket, used: frozenset[int]) -> None:
        """Reduce a bucket that is kept without writing to it, but for the gradients that still are ``p.grad``."""
        placed = [slot for slot in bucket.slots if slot.parameter.grad is slot.place]
        spare = bucket.spare(self._communicator)
        spare.fill(used)
        self.allreduce(spare.flat, self._op)
        for slot in spare.slots:
            if slot.parameter.grad is slot.place:
                slot.parameter.grad = slot.place.clone()
        for slot in placed:
            slot.place.copy_(cast(torch.Tensor, slot.parameter.grad))
            slot.parameter.grad = slot.place

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
            bucket = Bucket([unique[index] for index in members], self._communicator)
            self._buckets.append(bucket)
            for slot in bucket.slots:
                parameter = slot.parameter
                self._placed.add(id(parameter))
                if slot.place.nbytes >= LARGE_NBYTES and parameter.is_leaf and parameter.requires_grad:
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
