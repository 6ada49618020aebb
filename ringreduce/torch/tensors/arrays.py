"""Torch's tensors as `ringreduce.training` sees the arrays of a framework."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from ringreduce.buffers import DTYPES, Operand, averages
from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.pickles import REDUCERS
from ringreduce.common.reduce_ops import SUM, ReduceOp
from ringreduce.torch.private import forbid_resizing, holders_at, raw_entries, storage_address
from ringreduce.torch.tensors.streams import beside_this_stream, gpu_of, on_host, on_this_stream, require_usable
from ringreduce.training.binding.framework import ArrayFunction
from ringreduce.training.calls.differentiable import Differentiable
from ringreduce.training.calls.requests import RequestBuilder, dtype_name


class Tensors:
    """Torch's tensors, in the terms of `ringreduce.training.binding.framework.Arrays`."""

    expected = "a torch tensor"
    conversion = "torch.as_tensor(...)"
    require_usable = staticmethod(require_usable)
    empty_like = staticmethod(torch.empty_like)
    zeros_like = staticmethod(torch.zeros_like)
    device_of = staticmethod(gpu_of)
    on_host = staticmethod(on_host)
    on_callers_stream = staticmethod(on_this_stream)
    beside_callers_stream = staticmethod(beside_this_stream)

    def is_array(self, value: object) -> bool:
        return isinstance(value, torch.Tensor)

    def without_graph(self, array: torch.Tensor) -> torch.Tensor:
        return array.detach() if array.requires_grad else array  # calls that are repeated with one object are fastest

    def scale(self, source: torch.Tensor, factor: float, target: torch.Tensor) -> None:
        if factor == 1.0:
            if target is not source:
                target.copy_(source)
            return
        # Tensors that were made in inference mode may be changed only in it, on any thread.
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            if source.is_floating_point() or source.is_complex():
                torch.mul(source, factor, out=target)
            else:
                target.copy_(source.to(torch.float64) * factor)  # which truncates

    def keep_in_place(self, arrays: Sequence[torch.Tensor]) -> Callable[[], None]:
        kept: list[_Use] = []
        for array in arrays:
            if array.is_cpu and (use := _keep(array)) is not None:
                kept.append(use)
        return partial(_release, kept)

    def changed(self, array: torch.Tensor) -> torch.Tensor:
        """Notify autograd that a collective wrote into a tensor, so that it refuses to use the overwritten value."""
        try:
            torch.autograd.graph.increment_version(array)
        except RuntimeError:
            if not array.is_inference():  # those have no version, and asking for it first takes a microsecond
                raise
        return array

    def differentiable(
        self, run: ArrayFunction, rule: Callable[[], ArrayFunction], arrays: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        if torch.is_grad_enabled() and any(each.requires_grad for each in arrays):
            result: Sequence[torch.Tensor] = _Differentiable.apply(run, rule(), *arrays)  # type: ignore[no-untyped-call]
            return result
        return run([self.without_graph(each) for each in arrays])  # takes half the time

    def place(self, array: torch.Tensor) -> str:
        return array.device.type

    def reduce_on_device(
        self, communicator: Communicator, op: ReduceOp, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> None:
        """Reduce tensors of which some are on a GPU; those of one dtype that are there travel together."""
        groups: dict[object, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for number, pair in enumerate(zip(sources, targets, strict=True)):
            groups.setdefault(pair[0].dtype if pair[0].is_cuda else number, []).append(pair)
        for pairs in groups.values():
            if len(pairs) == 1:
                ((source, target),) = pairs
                communicator.allreduce(source, op, out=target)
                continue
            flat = torch.cat([source.reshape(-1) for source, _ in pairs])
            communicator.allreduce(flat, op, out=flat)
            parts = flat.split_with_sizes([target.numel() for _, target in pairs])
            for (_, target), part in zip(pairs, parts, strict=True):
                with torch.inference_mode(target.is_inference()), torch.no_grad():
                    target.copy_(part.view(target.shape))


class _Use:
    """Operations' use of a storage, which torch refuses to resize until all of them have ended.

    Attributes:
        storage: stays alive meanwhile, so that its address is that of no other.
        holders: how many things held it when the first operation began.
        count: of operations.
        flag: of `forbid_resizing`.
    """

    __slots__ = ("count", "flag", "holders", "storage")

    def __init__(self, storage: Any, address: int) -> None:
        self.storage = storage
        self.count = 1
        self.holders = holders_at(address)
        self.flag = forbid_resizing(storage)


#: By their `storage_address`.
_uses: dict[int, _Use] = {}
_uses_lock = threading.Lock()


def _keep(tensor: torch.Tensor) -> _Use | None:
    """Take note that an operation uses a tensor's memory; None: nobody can resize that anyway."""
    try:
        storage: Any = tensor.untyped_storage()
    except RuntimeError:  # sparse, or without memory
        return None
    address = storage_address(storage)
    with _uses_lock:
        use = _uses.get(address)
        if use is not None:
            use.count += 1
        elif storage.resizable():
            use = _uses[address] = _Use(storage, address)
        return use


def _release(kept: list[_Use]) -> None:
    """Take note that an operation has ended. Two threads may see that."""
    with _uses_lock:
        while kept:
            use = kept.pop()
            use.count -= 1
            if not use.count:
                address = storage_address(use.storage)
                del _uses[address]
                # What holds it since then may be an array of NumPy, for whose sake torch never resizes it again.
                if use.flag is not None and holders_at(address) <= use.holders:
                    use.flag.value = True


_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # that torch adds up by index
_HALVES = torch.float16, torch.bfloat16

#: The only instance.
TENSORS = Tensors()

#: A context in which tensors become a request: ``preparing("allreduce", name, process_set)``.
preparing = partial(RequestBuilder, arrays=TENSORS)

#: Blocking collectives on tensors that gradients flow through: ``differentiable(name, process_set)``.
differentiable = partial(Differentiable, TENSORS)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, adjoint: Any, *tensors: torch.Tensor) -> Any:
        ctx.adjoint = adjoint
        return tuple(run([each.detach() for each in tensors]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.adjoint(grads)


def _reduced(tensor: torch.Tensor) -> Any:
    """Return what pickles a tensor: dense ones that need no gradient as bytes, the others as torch does it."""
    dense = tensor.layout is torch.strided and dtype_name(tensor.dtype) in DTYPES
    if tensor.requires_grad or not dense:
        return cast(Any, tensor).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    # The strides of a dense tensor are kept (channels_last), those of a view of something larger are not.
    plain = tensor.cpu().resolve_conj().resolve_neg()
    stride = torch.empty_like(plain, device="meta").stride()
    if plain.stride() != stride:
        plain = plain.clone()
    memory = Operand.of(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)).view
    return _rebuilt, (memory, tuple(plain.shape), stride, plain.dtype)


def _rebuilt(
    memory: npt.NDArray[np.uint8], shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    storage = torch.from_numpy(memory).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, stride)


REDUCERS[torch.Tensor] = _reduced


def sparse_entries(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices, one row for each entry, and the values of a sparse COO tensor.

    Each index comes once, but of floats of 16 bits, which are added up in float32 when all are there.
    """
    mine = tensor.detach()
    if tensor.dtype not in _HALVES:
        mine = mine.coalesce()
    indices, values = raw_entries(mine)
    return [indices.t().contiguous(), values.contiguous()]


def of_entries(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, divisor: int = 1) -> torch.Tensor:
    """Return a sparse COO tensor, coalesced: sums of entries of equal index, divided by a number.

    Args:
        indices: one row for each entry.
        values: of them. Those of 16 bits are added up in float32, and rounded once.
        shape: of the tensor.
        divisor: integers are divided toward zero.
    """
    if divisor != 1 and values.dtype in _INTEGERS:
        return _averages_of_entries(indices, values, shape=shape, divisor=divisor)
    wide = values.float() if values.dtype in _HALVES else values
    total = torch.sparse_coo_tensor(indices.t(), wide, shape, check_invariants=False).coalesce()
    if divisor != 1:
        total = torch.div(total, divisor)
    if wide is not values:
        found = total.indices()
        sums = total.values().to(values.dtype)
        total = torch.sparse_coo_tensor(found, sums, shape, check_invariants=False, is_coalesced=True)
    return total


def _averages_of_entries(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, divisor: int) -> torch.Tensor:
    """Do what `of_entries` does for integers: exact even where the sums of 64 bits wrap around."""
    terms = values.long()
    both = torch.stack([terms, terms.div(divisor, rounding_mode="floor")], -1)
    total = torch.sparse_coo_tensor(indices.t(), both, (*shape, 2), check_invariants=False).coalesce()
    sums, quotients = total.values().unbind(-1)
    down, is_below = averages(sums, quotients, divisor)
    found = (down + is_below).to(values.dtype)
    return torch.sparse_coo_tensor(total.indices(), found, shape, check_invariants=False, is_coalesced=True)


def sum_entries(
    communicator: Communicator, entries: Sequence[torch.Tensor], shape: torch.Size, op: ReduceOp | str
) -> torch.Tensor:
    """Sum or average sparse COO tensors: the entries of all ranks are gathered, and nothing is made dense. Collective.

    Args:
        communicator: the ranks.
        entries: `sparse_entries` of this rank's tensor; there may be another number of them on each rank.
        shape: of the tensors.
        op: SUM or AVERAGE; integers are averaged toward zero.
    """
    indices, values = (communicator.allgather(each) for each in entries)
    return of_entries(indices, values, shape=shape, divisor=1 if op is SUM else communicator.size)
