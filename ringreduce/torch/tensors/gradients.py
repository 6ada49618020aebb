"""How the gradients of torch are found, placed, copied and watched; see `ringreduce.training.binding.framework`."""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from ringreduce.buffers import Operand
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.torch.private import (
    NO_PASS,
    at_end_of_pass,
    call_first,
    copy_all,
    current_pass,
    following_in_outer_pass,
    references,
    version_of,
    zero_all,
)
from ringreduce.torch.sharded.shardable import require_not_shared
from ringreduce.torch.tensors.arrays import of_entries, sparse_entries
from ringreduce.torch.tensors.streams import TorchStreams, as_tensor, tensor_like
from ringreduce.training.binding.framework import Advice, Found, Hooks, InPlace, Look, Memory, Sparse, Watcher

_log = logging.getLogger(__name__)

ADVICE = Advice(
    "call broadcast_parameters(model.state_dict(), root_rank=0) before the first step",
    "DataLoader(data, sampler=ringreduce.torch.DistributedSampler(data)), for example",
    fewer='DistributedSampler(..., shares="speed")',
)

_NESTED = 64  # so many passes may be nested


class TensorSlot:
    """A parameter, and the place of its gradient.

    Args:
        parameter: of any strides.
        memory: of the place, an array of bytes on the parameter's device: NumPy's or CuPy's.

    Attributes:
        place: a tensor with the parameter's shape and, if those are dense, its strides, so that optimizers see
            gradients laid out like their parameters.
    """

    __slots__ = ("_address", "_dtype", "_on_gpu", "_unshared", "parameter", "place")

    def __init__(self, parameter: torch.Tensor, memory: Any) -> None:
        self.parameter = parameter
        self._dtype = parameter.dtype  # the place's changes with ``p.grad``, as in ``model.double()``
        self._on_gpu = parameter.is_cuda
        self.place = tensor_like(parameter, memory, parameter.dtype)
        self._address = self.place.data_ptr()
        self._unshared = references(self.place)  # by the tensor itself, or by a view of any kind (`detach`, `numpy`)

    def look(self, gradient: torch.Tensor | None) -> int:
        """See `ringreduce.training.binding.framework.Slot`; takes about 1 us.

        After ``p.grad.data = ...`` the tensor is in its place, but not its memory.
        """
        parameter = self.parameter
        moved = parameter.is_cuda is not self._on_gpu
        if moved or parameter.dtype != self._dtype or parameter.shape != self.place.shape:
            return Look.STALE
        if self.place.data_ptr() != self._address:
            return Look.ALIASED
        if gradient is self.place:
            return Look.IN_PLACE
        if references(self.place) > self._unshared:
            return Look.ALIASED
        if gradient is None:
            return Look.EMPTY
        plain = gradient.layout is torch.strided and not gradient.requires_grad
        same = gradient.dtype == self.place.dtype and gradient.shape == self.place.shape
        return Look.MOVABLE if plain and same and gradient.is_cuda is self.place.is_cuda else Look.STUCK


class TorchPlaces(InPlace):
    """Torch's parameters, which can be put into memory of the node."""

    def view(self, parameter: torch.Tensor, memory: Any) -> torch.Tensor:
        return tensor_like(parameter, memory[: parameter.nbytes], parameter.dtype)

    def move(self, parameters: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        require_not_shared(parameters, by=self)
        for parameter, view in zip(parameters, views, strict=True):
            parameter.data = view

    def is_zero(self, gradient: torch.Tensor) -> bool:
        return not (gradient.coalesce().values() if gradient.is_sparse else gradient).any()

    def before_adding(self, parameter: torch.Tensor, action: Callable[[], object]) -> list[RemovableHandle]:
        if not _is_added_to(parameter):
            return []
        return [parameter.register_hook(lambda _: action())]  # type: ignore[no-untyped-call]

    def keep_part(self, gradient: torch.Tensor, part: slice, factor: float) -> None:
        flat = gradient.detach().as_strided((gradient.numel(),), (1,))
        with torch.no_grad():
            flat[: part.start].zero_()
            flat[part].mul_(factor)
            flat[part.stop :].zero_()


class TorchParameters(Memory, TorchPlaces, Sparse, Hooks):
    """The gradients of torch's parameters, for one optimizer.

    Args:
        communicator: knows which GPU this process can use.
        sparse_as_dense: whether sparse gradients are made dense when they are found.
        advice: of the framework, which may have torch below it.
    """

    def __init__(self, communicator: Communicator, *, sparse_as_dense: bool = False, advice: Advice = ADVICE) -> None:
        self._communicator = communicator
        self._sparse_as_dense = sparse_as_dense
        self.advice = advice
        self.streams = TorchStreams(communicator)

    def found(self, gradients: list[Any]) -> bytes:
        if self._sparse_as_dense:
            gradients[:] = [each.to_dense() if each is not None and each.is_sparse else each for each in gradients]
        return bytes(
            [
                Found.NO_GRADIENT
                if each is None
                else Found.DENSE  # most are
                if each.is_cpu and each.layout is torch.strided
                else self._found(each)
                for each in gradients
            ]
        )

    def _found(self, gradient: torch.Tensor) -> int:
        if not (gradient.is_cpu or self._can_use(gradient)):
            return Found.UNSUPPORTED
        if gradient.is_sparse:
            return Found.SPARSE + gradient.sparse_dim()
        return Found.DENSE if gradient.layout is torch.strided else Found.UNSUPPORTED

    def is_trainable(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad

    def version(self, gradient: torch.Tensor) -> int:
        return 0 if gradient.is_inference() else version_of(gradient)

    def kind(self, parameter: torch.Tensor) -> tuple[Any, int]:
        return (parameter.dtype, parameter.is_cuda), parameter.numel() * parameter.element_size()

    def lay_out(
        self, communicator: Communicator, parameters: Sequence[torch.Tensor], starts: Sequence[int]
    ) -> tuple[torch.Tensor, tuple[TensorSlot, ...]]:
        first = parameters[0]
        device = {"device": str(first.device)} if first.is_cuda else {}
        memory = communicator.empty(starts[-1], np.uint8, **device)
        slots = [
            TensorSlot(each, memory[start:end]) for each, (start, end) in zip(parameters, pairwise(starts), strict=True)
        ]
        return as_tensor(memory, first).zero_().view(first.dtype), tuple(slots)

    def pack(self, places: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        given = [each for each in gradients if each is not None]
        with torch.no_grad():
            if len(given) == len(places):
                copy_all(places, given)
                return
            zero_all([place for place, each in zip(places, gradients, strict=True) if each is None])
            if given:
                copy_all([place for place, each in zip(places, gradients, strict=True) if each is not None], given)

    def clone(self, array: torch.Tensor) -> torch.Tensor:
        return array.clone()

    def scale(self, array: torch.Tensor, factor: float) -> None:
        array.mul_(factor)

    def shape_in_memory(self, place: torch.Tensor) -> torch.Size:
        return shape_in_memory(place)

    def rows(
        self, parameter: torch.Tensor, gradient: torch.Tensor | None, sparse_dims: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if gradient is None:
            places = torch.empty(0, sparse_dims, dtype=torch.int64, device=parameter.device)
            return places, parameter.new_empty(0, parameter.shape[sparse_dims:].numel())
        if not (gradient.is_sparse and gradient.sparse_dim() == sparse_dims):
            gradient = gradient.to_dense().to_sparse(sparse_dims)
        places, values = sparse_entries(gradient)
        return places, values.view(len(values), parameter.shape[sparse_dims:].numel())

    def of_rows(
        self, parameter: torch.Tensor, places: torch.Tensor, values: torch.Tensor, divisor: int
    ) -> torch.Tensor:
        values = values.view(len(values), *parameter.shape[places.shape[1] :])
        return of_entries(places, values, shape=parameter.shape, divisor=divisor)

    def after_adding(self, parameter: torch.Tensor, action: Callable[[], object]) -> list[RemovableHandle]:
        if not _is_added_to(parameter):
            return []
        return [parameter.register_post_accumulate_grad_hook(lambda _: action())]  # type: ignore[no-untyped-call]

    def watch(self, parameter: torch.Tensor, watcher: Watcher, record: Any) -> list[RemovableHandle]:
        if not _is_added_to(parameter):
            return []
        watching = weakref.ref(watcher)

        def before(_: object) -> None:
            if (mine := watching()) is not None:
                mine.before_adding(record)

        def after(_: object) -> None:
            if (mine := watching()) is not None:
                _passes.notify_end(mine)
                mine.added(record)

        handle = parameter.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
        call_first(handle)
        return [parameter.register_hook(before), handle]  # type: ignore[no-untyped-call]

    def checksum(self, parameters: Sequence[torch.Tensor]) -> int:
        checksum = 0
        for tensor in parameters:
            if tensor.layout is torch.strided:  # others count for nothing
                # Of one element, a tensor is contiguous with any stride.
                values = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
                checksum = zlib.crc32(Operand.of(values).view.data, checksum)
        return checksum

    def checksum_of_gradients(self, gradients: Sequence[torch.Tensor | None]) -> int:
        parts: list[torch.Tensor] = []
        for gradient in gradients:
            if gradient is not None and gradient.is_sparse:
                coalesced = gradient.coalesce()
                parts += [coalesced.indices(), coalesced.values()]
            elif gradient is not None:
                parts.append(gradient)
        return zlib.crc32(bytes([gradient is not None for gradient in gradients]), self.checksum(parts))

    def is_finite(self, gradient: torch.Tensor) -> bool:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        return bool(torch.isfinite(values).all())

    def _can_use(self, grad: torch.Tensor) -> bool:
        if not grad.is_cuda:
            return False
        try:
            self._communicator.gpu.require_usable(grad.device.index)
        except UnsupportedBufferError as error:
            _log.warning("a gradient on %s cannot be reduced: %s", grad.device, error)
            return False
        return True


class _Passes:
    """The backward passes under way, and the watchers to notify at their end.

    A pass may be made within another one, as reentrant checkpoints make them: while the outer one evaluates a node.
    Watchers of the inner one are notified at the end of the outer one then, in which the nodes that follow are
    evaluated. Where a hook makes the inner pass, the outer one is unknown, and they are notified at the end of theirs.
    """

    def __init__(self) -> None:
        self._watchers: dict[int, list[weakref.ref[Watcher]]] = {}  # by the number of the pass

    def notify_end(self, watcher: Watcher) -> None:
        """Tell a watcher when the pass ends in which this thread is now."""
        task = current_pass()
        watchers = self._watchers.get(task)
        if watchers is None:
            while len(self._watchers) > _NESTED:  # passes that an exception has ended
                del self._watchers[next(iter(self._watchers))]
            watchers = self._watchers[task] = []
            at_end_of_pass(lambda: self._end(task))
        elif task == NO_PASS:  # so these may be of a pass that an exception has ended
            at_end_of_pass(lambda: self._end(task))
        if all(each() is not watcher for each in watchers):
            watching = weakref.ref(watcher)
            watchers.append(watching)
            self._notify_in(following_in_outer_pass() or (), watching)

    def _notify_in(self, nodes: Sequence[Any], watching: weakref.ref[Watcher]) -> None:
        """Tell a watcher when the pass ends in which these nodes are evaluated."""
        handles: list[RemovableHandle] = []

        def evaluated(_: object) -> None:
            for handle in handles:
                handle.remove()
            if (watcher := watching()) is not None:
                self.notify_end(watcher)

        handles += [node.register_prehook(evaluated) for node in nodes]

    def _end(self, task: int) -> None:
        found = [watcher for each in self._watchers.pop(task, ()) if (watcher := each()) is not None]
        following = following_in_outer_pass()
        if following:  # these watchers are notified there
            return
        for watcher in sorted(found, key=lambda each: each.number):
            watcher.pass_ended(nested=following is not None)


_passes = _Passes()


def shape_in_memory(tensor: torch.Tensor) -> torch.Size:
    """Return a tensor's dimensions in the order that they have in memory."""
    strides = tensor.stride()
    return torch.Size(tensor.shape[dim] for dim in sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _is_added_to(parameter: torch.Tensor) -> bool:
    return parameter.is_leaf and parameter.requires_grad
