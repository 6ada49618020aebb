"""One bucket: some gradients in one piece of communication memory, each with a place of its own there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from ringreduce.communicator import Communicator
from ringreduce.errors import TransportError
from ringreduce.training.compression import Reducer

__all__ = ["ALIGNMENT_NBYTES", "LARGE_NBYTES", "Bucket", "Slot", "padded_nbytes"]

#: From this size on (bytes), gradients are collected as soon as they are there. It is where glibc's malloc begins to
#: hand freed memory back to the kernel: gradients that live until the next `zero_grad` cost a page fault per 4 KiB.
LARGE_NBYTES = 128 << 10

#: Gradients begin on cache lines.
ALIGNMENT_NBYTES = 64

#: How many tensors hold a storage. Private to torch; without it only the holders of the gradient itself are noticed.
_storage_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)


class Slot:
    """A parameter, and the place of its gradient.

    Args:
        parameter: of any strides.
        memory: room for the gradient, an array of bytes where the parameter lies: NumPy's or CuPy's.

    Attributes:
        place: a tensor with the parameter's shape and, if those are dense, its strides, so that optimizers see
            gradients laid out like their parameters.
    """

    __slots__ = ("_address", "_dtype", "_on_gpu", "_unshared", "parameter", "place")

    def __init__(self, parameter: torch.Tensor, memory: Any) -> None:
        self.parameter = parameter
        self._dtype = parameter.dtype  # the place's changes with ``p.grad``, as in ``model.double()``
        self._on_gpu = parameter.is_cuda
        # Not a view in autograd's sense: it could not be detached in place, and all would share a version counter. Its
        # storage is its own, so that uses of it can be told from uses of the bucket's other places.
        self.place = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        strides = torch.empty_like(parameter, device="meta").stride()
        self.place.set_(_as_tensor(memory, parameter).untyped_storage(), 0, parameter.shape, strides)
        self._address = self.place.data_ptr()
        self._unshared = self._references()

    def is_filled(self) -> bool:
        """Whether the gradient is in its place; after ``p.grad.data = ...`` the tensor is, but not its memory."""
        return self.parameter.grad is self.place and self.place.data_ptr() == self._address

    def is_outgrown(self) -> bool:
        """Whether the parameter has another dtype or shape than it had, or was moved between CPU and GPU."""
        parameter = self.parameter
        moved = parameter.is_cuda is not self._on_gpu
        return moved or parameter.dtype != self._dtype or parameter.shape != self.place.shape

    def is_kept(self) -> bool:
        """Whether the place, while it is not ``p.grad``, still is something to somebody; takes about 0.3 us."""
        return self._references() > self._unshared or self.place.data_ptr() != self._address

    def after_gradient(self, action: Callable[[], object]) -> list[RemovableHandle]:
        """Do something each time that autograd has added to the gradient; return the hook, none if it never does."""
        if not (self.parameter.is_leaf and self.parameter.requires_grad):
            return []
        register = self.parameter.register_post_accumulate_grad_hook
        return [register(lambda _: action())]  # type: ignore[no-untyped-call]

    def _references(self) -> int:
        # Whoever holds the tensor itself counts in the first, whoever holds a view of any kind (`detach`, `numpy`) in
        # the second.
        storage = self.place.untyped_storage()
        return sys.getrefcount(self.place) + _storage_uses(storage._cdata)


class Bucket:
    """Some gradients in one piece of communication memory.

    Args:
        parameters: whose gradients, all of one dtype and on one device.
        communicator: makes the memory.

    Attributes:
        flat: all of it, one-dimensional.
        slots: the parameters, in order, and their places.
        places: where these lie in ``flat``.
        reducer: what reduces it, where that keeps something from step to step; else None.
    """

    __slots__ = ("_hooks", "_spare", "flat", "places", "reducer", "slots")

    def __init__(self, parameters: Sequence[torch.Tensor], communicator: Communicator) -> None:
        ends = list(accumulate(map(padded_nbytes, parameters), initial=0))
        memory = _empty(communicator, ends[-1], parameters[0])
        self.flat = _as_tensor(memory, parameters[0]).zero_().view(parameters[0].dtype)
        self.slots = tuple(
            Slot(parameter, memory[start:end])
            for parameter, (start, end) in zip(parameters, pairwise(ends), strict=True)
        )
        itemsize = parameters[0].element_size()
        self.places = [slice(start // itemsize, end // itemsize) for start, end in pairwise(ends)]
        self.reducer: Reducer | None = None
        self._hooks: list[RemovableHandle] = []
        self._spare: Bucket | None = None

    def collect_at_once(self) -> None:
        """From now on, collect large gradients on the CPU as soon as they are there."""
        for slot in self.slots:
            if slot.place.nbytes >= LARGE_NBYTES and slot.place.is_cpu:
                # The whole bucket, not only this gradient: small gradients that stay where they are (a bias) would
                # lie between freed large ones, and malloc could reuse neither.
                self._hooks += slot.after_gradient(self.collect)

    def retire(self) -> None:
        """Let go of the parameters' hooks; the bucket is of no use any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def spare(self, communicator: Communicator) -> Bucket:
        """Return a bucket for the same gradients in memory of its own, which nobody is lent."""
        if self._spare is None:
            self._spare = Bucket([slot.parameter for slot in self.slots], communicator)
        return self._spare

    def free_spare(self) -> None:
        """Let go of what `spare` made, until it is asked for again."""
        self._spare = None

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
            if id(slot.parameter) not in used:  # no rank has a gradient, or some rank has a sparse one
                if grad is slot.place:
                    slot.parameter.grad = grad.clone()
                missing.append(slot.place)
            elif grad is slot.place:
                continue
            elif grad is not None:
                elsewhere.append((slot, grad))
            else:
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


def padded_nbytes(tensor: torch.Tensor) -> int:
    """Return how many bytes of a bucket the gradient of a parameter takes."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def _empty(communicator: Communicator, nbytes: int, parameter: torch.Tensor) -> Any:
    """Return communication memory where a parameter lies, an array of bytes."""
    if parameter.is_cuda:
        return communicator.empty(nbytes, np.uint8, device=str(parameter.device))
    return communicator.empty(nbytes, np.uint8)


def _as_tensor(memory: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return memory that `_empty` gave for a parameter as a tensor that keeps it."""
    if not parameter.is_cuda:
        return torch.from_numpy(memory)
    if not memory.size:
        return torch.empty(0, dtype=torch.uint8, device=parameter.device)
    made = torch.as_tensor(memory, device=parameter.device)
    if made.data_ptr() != memory.__cuda_array_interface__["data"][0]:
        raise TransportError("torch has copied communication memory in place of using it; gradients would stay behind")
    return made
