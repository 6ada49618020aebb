"""Collectives that gradients flow through: each is the operation forwards, and the one that turns it back backwards.

Where Horovod's gradients differ from those of the chain rule, `ringreduce.conventions` says by what.
"""

from __future__ import annotations

import itertools
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from ringreduce.arguments import real_number
from ringreduce.conventions import Conventions
from ringreduce.engine import Engine
from ringreduce.process_sets import ProcessSet
from ringreduce.reduce_ops import AVERAGE, ReduceOp
from ringreduce.torch.prepared import (
    Op,
    Tensors,
    checking_submission,
    prepare_allgather,
    prepare_allreduce,
    prepare_alltoall,
    prepare_broadcast,
    prepare_reducescatter,
    require_linear,
    require_tensors,
    scaled,
)

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "reducescatter"]

#: For operations without a name, counted alike on all ranks of a set.
_backward_numbers: WeakKeyDictionary[Engine, itertools.count[int]] = WeakKeyDictionary()


def allreduce(
    tensors: Tensors,
    name: str | None,
    op: Op,
    prescale: float,
    postscale: float,
    wire: str | None,
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    """Reduce tensors into new ones; see `ringreduce.torch.ops.grouped_allreduce`."""
    how = op, prescale, postscale, wire
    backward = _backward_name("allreduce", name, tensors, process_set)
    return list(_apply(_Allreduce, process_set, backward, name, *how, *tensors))


def allgather(tensors: Tensors, name: str | None, process_set: ProcessSet) -> list[torch.Tensor]:
    """Concatenate tensors; see `ringreduce.torch.ops.grouped_allgather`."""
    backward = _backward_name("allgather", name, tensors, process_set)
    return list(_apply(_Allgather, process_set, backward, name, *tensors))


def broadcast(tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """Return the tensor of a rank of the set; see `ringreduce.torch.ops.broadcast`."""
    backward = _backward_name("broadcast", name, [tensor], process_set)
    return cast(torch.Tensor, _apply(_Broadcast, tensor, root, process_set, backward, name))


def alltoall(
    tensor: torch.Tensor, rows: list[int], name: str | None, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange so many rows with each rank; see `ringreduce.torch.ops.alltoall`."""
    backward = _backward_name("alltoall", name, [tensor], process_set)
    result, received = _apply(_Alltoall, tensor, rows, process_set, backward, name)
    return result, received


def reducescatter(
    tensors: Tensors, name: str | None, op: Op, prescale: float, postscale: float, process_set: ProcessSet
) -> list[torch.Tensor]:
    """Reduce tensors into this rank's parts; see `ringreduce.torch.ops.grouped_reducescatter`."""
    how = op, prescale, postscale
    backward = _backward_name("reducescatter", name, tensors, process_set)
    return list(_apply(_ReduceScatter, process_set, backward, name, *how, *tensors))


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, process_set: ProcessSet, backward: str, name: str | None, op: Op, *rest: Any) -> Any:
        prescale, postscale, wire, *tensors = rest
        ctx.process_set, ctx.backward_name, ctx.how = process_set, backward, (op, prescale, postscale, wire)
        outputs = [torch.empty_like(each) for each in tensors]
        sources = [each.detach() for each in tensors]
        how = op, prescale, postscale
        with checking_submission("allreduce", name, process_set):
            prepared = prepare_allreduce(sources, outputs, name, *how, process_set, lambda: outputs, wire)
        return tuple(prepared.carry_out())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        require_linear(ctx.how[0], "allreduce")
        name = ctx.backward_name
        return (
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            *_apply(_Allreduce, ctx.process_set, f"{name}'", name, *ctx.how, *grads),
        )


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, process_set: ProcessSet, backward: str, name: str | None, *tensors: torch.Tensor) -> Any:
        ctx.process_set, ctx.backward_name = process_set, backward
        ctx.rows = [each.shape[0] if each.dim() else 0 for each in tensors]
        sources = [each.detach() for each in tensors]
        with checking_submission("allgather", name, process_set):
            prepared = prepare_allgather(sources, name, process_set, lambda gathered: gathered)
        return tuple(prepared.carry_out())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows = torch.tensor([ctx.rows], device="cpu")
        everyone = prepare_allgather(
            [rows], f"{ctx.backward_name} rows", ctx.process_set, lambda gathered: gathered[0]
        ).carry_out()
        starts = everyone[: ctx.process_set.rank()].sum(0).tolist()
        name = ctx.backward_name
        op = _conventions(ctx).gradient_op
        totals = _apply(_Allreduce, ctx.process_set, f"{name}'", name, op, 1.0, 1.0, None, *grads)
        mine = [total.narrow(0, start, own) for total, start, own in zip(totals, starts, ctx.rows, strict=True)]
        return None, None, None, *mine


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root: int, process_set: ProcessSet, backward: str, name: str | None
    ) -> Any:
        ctx.process_set, ctx.backward_name, ctx.root = process_set, backward, root
        with checking_submission("broadcast", name, process_set):
            prepared = prepare_broadcast(tensor.detach(), None, root, name, process_set)
        return prepared.carry_out()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        name = ctx.backward_name
        op = _conventions(ctx).gradient_op
        (total,) = _apply(_Allreduce, ctx.process_set, f"{name}'", name, op, 1.0, 1.0, None, grads[0])
        mine = total if ctx.process_set.rank() == ctx.root else torch.zeros_like(total)
        return mine, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, process_set: ProcessSet, backward: str, name: str | None, op: Op, *rest: Any) -> Any:
        prescale, postscale, *tensors = rest
        ctx.process_set, ctx.backward_name = process_set, backward
        sources = [each.detach() for each in tensors]
        with checking_submission("reducescatter", name, process_set):
            factor = real_number("prescale_factor", prescale) * real_number("postscale_factor", postscale)
            ctx.op, ctx.factor = op, factor
            prepared = prepare_reducescatter(sources, name, op, prescale, postscale, process_set, lambda parts: parts)
        return tuple(prepared.carry_out())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        require_linear(ctx.op, "reducescatter")
        name = ctx.backward_name
        wholes = _apply(_Allgather, ctx.process_set, f"{name}'", name, *grads)
        size = ctx.process_set.size()
        factor = ctx.factor * _conventions(ctx).scattered_gradient_factor(size)
        if ReduceOp.parse(ctx.op) is AVERAGE:
            factor /= size
        return None, None, None, None, None, None, *[scaled(whole, factor) for whole in wholes]


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, rows: list[int], process_set: ProcessSet, backward: str, name: str | None
    ) -> Any:
        with checking_submission("alltoall", name, process_set):
            prepared = prepare_alltoall(tensor.detach(), rows, name, process_set, alone=False)
        result, received = prepared.carry_out()
        ctx.process_set, ctx.backward_name, ctx.received = process_set, backward, received.tolist()
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        name = ctx.backward_name
        back = _apply(_Alltoall, grads[0], ctx.received, ctx.process_set, f"{name}'", name)[0]
        return back, None, None, None, None


def _conventions(ctx: Any) -> Conventions:
    return cast(Conventions, ctx.process_set.communicator.config.conventions)


class _NoGraph:
    """What a forward pass notes for a backward pass that will not come."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        pass


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in arguments):
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    return function.forward(_NoGraph(), *arguments)  # half as long


def _backward_name(kind: str, name: str | None, tensors: Tensors, process_set: ProcessSet) -> str:
    """Return what the backward pass calls its operation: the passes of several operations may come in any order."""
    with checking_submission(kind, name, process_set):
        require_tensors(*tensors)
    if name is not None:
        return f"gradient of {name}"
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        numbers = _backward_numbers.setdefault(process_set.engine, itertools.count(1))
        return f"gradient {next(numbers)}"
    return "gradient"
