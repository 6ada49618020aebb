"""Collectives on tensors, by Horovod's names, that gradients flow through.

The gradients are those of the sum of all ranks' losses, as the chain rule gives them; `DistributedOptimizer`, which
averages over the ranks, makes of them the gradient of the mean loss. (Horovod divides those of `allgather` and
`broadcast` by the number of ranks, which is off by that factor.) Backward passes are collective too: a tensor must
require gradients on all ranks or on none.

All of these block until this rank's result is there, and must be called in the same order on all ranks. ``name`` is
a label without meaning here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ringreduce.communicator import Communicator
from ringreduce.errors import ConfigError
from ringreduce.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM, ReduceOp
from ringreduce.runtime import world

__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "reducescatter",
]

Average, Sum, Min, Max, Product = AVERAGE, SUM, MIN, MAX, PRODUCT


def allreduce(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce tensors over all ranks, element by element, into a new tensor. Collective.

    Args:
        tensor: any shape and strides; shape and dtype must agree on all ranks.
        name: ignored.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`; must agree. Gradients flow through the first two.
        prescale_factor: multiplies what goes in.
        postscale_factor: multiplies what comes out. Integers are multiplied in float64, so those up to 2^53 are taken
            exactly, and truncated toward zero after each factor.
    """
    reduced = _apply(_Allreduce, _scaled(tensor, prescale_factor), world(), ReduceOp.parse(op))
    return _scaled(reduced, postscale_factor)


def allreduce_(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce like `allreduce`, but in place and out of autograd's sight; returns ``tensor``. Collective."""
    values = _without_graph(tensor)
    _scale(values, prescale_factor)
    world().allreduce(values, op, out=values)
    _scale(values, postscale_factor)
    _changed(tensor)
    return tensor


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Concatenate the ranks' tensors along the first dimension, in rank order. Collective.

    Args:
        tensor: at least one dimension. The first may differ between ranks, and be 0; the others and the dtype must
            agree.
        name: ignored.
    """
    return cast(torch.Tensor, _apply(_Allgather, tensor, world()))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the root's tensor, as a new one. Collective.

    Args:
        tensor: any shape; shape and dtype must agree on all ranks, values count at the root only.
        root_rank: the sender; must agree.
        name: ignored.
    """
    return cast(torch.Tensor, _apply(_Broadcast, tensor, world(), root_rank))


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite a tensor with the root's, out of autograd's sight; returns ``tensor``. Collective."""
    values = _without_graph(tensor)
    world().broadcast(values, root_rank, out=values)
    _changed(tensor)
    return tensor


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce tensors over all ranks and return this rank's part. Collective.

    Args:
        tensor: at least one dimension, cut along the first as `torch.tensor_split` does; shape and dtype must agree.
        name: ignored.
        op: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.
    """
    part = _apply(_ReduceScatter, _scaled(tensor, prescale_factor), world(), ReduceOp.parse(op))
    return _scaled(part, postscale_factor)


def alltoall(
    tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None = None, name: str | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send a part of one's tensor to every rank, and get one's part of theirs. Collective.

    Args:
        tensor: at least one dimension; all but the first must agree on all ranks, and the dtype.
        splits: rows for rank 0, 1, ...; may differ between ranks. None: equal parts.
        name: ignored.

    Returns:
        What the ranks sent here, in rank order; with ``splits`` also how many rows came from each (int32).
    """
    communicator = world()
    if splits is None:
        rows, extra = divmod(tensor.shape[0] if tensor.dim() else 0, communicator.size)
        if extra:
            raise ConfigError(f"{tensor.shape[0]} rows do not divide among {communicator.size} ranks; give splits")
        return cast(torch.Tensor, _apply(_Alltoall, tensor, communicator, [rows] * communicator.size)[0])
    result, received = _apply(_Alltoall, tensor, communicator, [int(rows) for rows in splits])
    return result, torch.tensor(received, dtype=torch.int32)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, communicator: Communicator, op: ReduceOp) -> Any:
        ctx.communicator, ctx.op = communicator, op
        return communicator.allreduce(tensor, op)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _require_linear(ctx.op, "allreduce")
        return _apply(_Allreduce, grads[0], ctx.communicator, ctx.op), None, None


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, communicator: Communicator) -> Any:
        ctx.communicator, ctx.rows = communicator, tensor.shape[0] if tensor.dim() else 0
        return communicator.allgather(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows = ctx.communicator.allgather(torch.tensor([ctx.rows]))
        start = int(rows[: ctx.communicator.rank].sum())
        total = _apply(_Allreduce, grads[0], ctx.communicator, SUM)
        return total.narrow(0, start, ctx.rows), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, communicator: Communicator, root: int) -> Any:
        ctx.communicator, ctx.root = communicator, root
        return communicator.broadcast(tensor, root)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = _apply(_Allreduce, grads[0], ctx.communicator, SUM)
        return total if ctx.communicator.rank == ctx.root else torch.zeros_like(total), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, communicator: Communicator, op: ReduceOp) -> Any:
        ctx.communicator, ctx.op = communicator, op
        return communicator.reduce_scatter(tensor, op)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _require_linear(ctx.op, "reducescatter")
        whole = _apply(_Allgather, grads[0], ctx.communicator)
        return whole / ctx.communicator.size if ctx.op is AVERAGE else whole, None, None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, communicator: Communicator, splits: list[int]) -> Any:
        result, received = communicator.alltoall(tensor, splits)
        ctx.communicator, ctx.received = communicator, received
        return result, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _apply(_Alltoall, grads[0], ctx.communicator, ctx.received)[0], None, None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def _require_linear(op: ReduceOp, collective: str) -> None:
    if op not in (AVERAGE, SUM):
        raise ConfigError(f"no gradient flows through {collective} with op {op.value}; use average or sum, or detach")


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.to(torch.float64) * factor).to(tensor.dtype)


def _scale(tensor: torch.Tensor, factor: float) -> None:
    """Scale in place a tensor that requires no gradient."""
    if factor != 1.0:
        tensor.copy_(_scaled(tensor, factor))


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it can be, because calls that are repeated with the same object are fastest."""
    return tensor.detach() if tensor.requires_grad else tensor


def _changed(tensor: torch.Tensor) -> None:
    """Tell autograd that a collective wrote into a tensor, so that it refuses to use a saved value that is gone."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
