"""Collectives on tensors, by Horovod's names: asynchronous or blocking, named, and open to autograd.

Every operation has a name; operations with one name belong together, whatever order the ranks submit them in and from
which thread. Those without a name do so in the order in which they are submitted, each kind by itself. A name is a str,
and may come again once its operation is done. What must agree between the ranks is said for each function; if it does
not, all ranks that submitted the operation get the same `MismatchError`, with the name and what each rank submitted.
Later operations work, unless the operation had no name and the ranks submitted it from different lines of the program:
then nobody can tell which of them belong together, and every later one raises a `TransportError`, until `shutdown()`
and `init()`.

Tensors may be on the CPU or on this rank's GPU, and results are where the input is. In an allreduce each tensor is on
the CPU or on the GPU on all ranks alike; elsewhere the ranks may differ. On a GPU, an operation comes after what the
caller has enqueued on its current stream, and what the caller enqueues there after the call (or after `synchronize`)
comes after the operation. The data goes through the host, unless ``RINGREDUCE_GPU`` asks for something else, and so it
always does in `Adasum`, `ReproducibleSum` and all but allreduces. Operations on a GPU do not travel with others, unless
they are a group, and after a `join` they raise a `MismatchError`.

``*_async`` functions return a `Handle`; `synchronize` returns the result. Until then the tensors belong to the
operation, and torch refuses to resize the storage of a CPU tensor that was passed to one of them.

Functions whose name ends in ``_`` work in place and out of autograd's sight, and so do the asynchronous ones; gradients
flow through the others. They are those of the sum of all ranks' losses, as the chain rule gives them;
`DistributedOptimizer`, which averages over the ranks, makes of them the gradient of the mean loss. By Horovod's
conventions those of `allgather`, `broadcast` and `reducescatter` differ by a factor; `ringreduce.common.conventions`
says by which. Backward passes are collective too: a tensor must require gradients on all ranks or on none.

All functions raise, besides what they list:

* `UnsupportedBufferError`: a tensor cannot be used. At the call; it counts as one that does not agree, so the other
  ranks get a `MismatchError` with the reason when they submit theirs, and what was said above holds for later ones.
* `ConfigError`: the name is under way, or an argument makes no sense. Likewise. (Ranks that gave no name hear of a name
  that is no str.)
* `CollectiveTimeoutError`, `PeerLostError`, `ShutdownError`: a rank does not submit the operation in time, or never.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM, ReduceOp
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.torch.arrays import TENSORS, preparing
from ringreduce.torch.compression import Compression, Compressor, wire_of
from ringreduce.training.differentiable import Differentiable
from ringreduce.training.requests import (
    Adasum,
    Handle,
    Op,
    ReproducibleSum,
    Request,
    barrier,
    chosen_op,
    in_words,
    join,
    poll,
    synchronize,
)

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "Product",
    "ReproducibleSum",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

Average, Sum, Min, Max, Product = AVERAGE, SUM, MIN, MAX, PRODUCT

_Tensors = Sequence[Tensor]

_differentiable = partial(Differentiable, TENSORS)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce tensors over all ranks, element by element, into a new tensor. Collective.

    Args:
        tensor: any shape and strides; shape and dtype must agree on all ranks.
        average: deprecated; use ``op``.
        name: see the module; must agree.
        compression: what travels; see `Compression`. Must agree. In fp8, int8 and int4 all ranks have to take part:
            not after a `join`.
        op: `Average` (also if None), `Sum`, `Min`, `Max`, `Product`, `Adasum` or `ReproducibleSum`; must agree.
            Integers are averaged toward zero. Gradients flow through `Average`, `Sum` and `ReproducibleSum`.
        prescale_factor: multiplies what goes in; must agree.
        postscale_factor: multiplies what comes out; must agree. Integers are multiplied in float64, so those up to 2^53
            are taken exactly, and truncated toward zero after each factor.
        process_set: the ranks that take part.
    """
    how = average, name, compression, op, prescale_factor, postscale_factor, process_set
    return grouped_allreduce([tensor], *how)[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `allreduce` does; its result is a new tensor."""
    how = average, name, op, prescale_factor, postscale_factor, process_set
    return _allreduce([tensor], *how, first=True).submit()


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce like `allreduce`, but in place; returns ``tensor``. Collective."""
    how = average, name, op, prescale_factor, postscale_factor, process_set
    return cast(Tensor, _allreduce([tensor], *how, first=True, in_place=True).carry_out())


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `allreduce_` does."""
    how = average, name, op, prescale_factor, postscale_factor, process_set
    return _allreduce([tensor], *how, first=True, in_place=True).submit()


def grouped_allreduce(
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors as one operation: all of them or, after an error, none; see `allreduce`. Collective.

    Dtypes may be mixed.
    """
    with preparing("allreduce", name, process_set) as prepare:
        how = chosen_op(op, average), prescale_factor, postscale_factor, wire_of(compression)
        tensors = prepare.listed(tensors)
        sent, contexts = zip(*map(compression.compress, tensors), strict=True) if tensors else ((), ())
    reduced = _differentiable(name, process_set).allreduce(sent, *how)
    return [compression.decompress(each, context) for each, context in zip(reduced, contexts, strict=True)]


def grouped_allreduce_async(
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `grouped_allreduce` does; its result is a list of new tensors."""
    how = average, name, op, prescale_factor, postscale_factor, process_set
    return _allreduce(tensors, *how).submit()


def grouped_allreduce_(
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce like `grouped_allreduce`, but in place; returns ``tensors``. Collective."""
    how = average, name, op, prescale_factor, postscale_factor, process_set
    return cast("list[Tensor]", _allreduce(tensors, *how, in_place=True).carry_out())


def grouped_allreduce_async_(
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `grouped_allreduce_` does."""
    how = average, name, op, prescale_factor, postscale_factor, process_set
    return _allreduce(tensors, *how, in_place=True).submit()


def _allreduce(
    tensors: _Tensors,
    average: bool | None,
    name: str | None,
    op: Op | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    first: bool = False,
    in_place: bool = False,
) -> Request:
    """Return a request to reduce tensors out of autograd's sight; with ``first`` its result is not a list."""
    with preparing("allreduce", name, process_set) as prepare:
        tensors = prepare.listed(tensors)
        sources = [each.detach() if each.requires_grad else each for each in tensors]
        targets = sources if in_place else prepare.new_like(sources)
        given = tensors if in_place else targets
        result = partial(_result, given, first, in_place)
        return prepare.allreduce(sources, targets, chosen_op(op, average), prescale, postscale, result)


def _result(tensors: _Tensors, first: bool, in_place: bool) -> Any:
    if in_place:
        for each in tensors:
            TENSORS.changed(each)
    return tensors[0] if first else list(tensors)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: Op = Average, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to sum or average sparse COO tensors; what each rank has is gathered, nothing made dense.

    Args:
        tensor: sparse; its shape and dtype must agree, how much it holds may differ.
        op: `Average` or `Sum`; must agree.
        name, process_set: as for `allreduce`.

    Returns:
        A handle; its result, which calling it returns as well, as in Horovod, is the coalesced tensor.
    """
    with preparing("sparse_allreduce", name, process_set) as prepare:
        prepare.require(tensor)
        if not tensor.is_sparse:
            raise UnsupportedBufferError(
                "sparse_allreduce_async takes sparse COO tensors; use allreduce for dense ones"
            )
        op = ReduceOp.parse(op)
        if op not in (AVERAGE, SUM):
            raise ConfigError(f"sparse_allreduce_async averages or sums (op Average or Sum), got op {op.value}")
        mine = tensor.detach().coalesce()
        indices, values, shape = mine.indices().t().contiguous(), mine.values().contiguous(), tensor.shape

        def run(communicator: Communicator) -> Tensor:
            places, numbers = communicator.allgather(indices), communicator.allgather(values)
            total = torch.sparse_coo_tensor(places.t(), numbers, shape, check_invariants=False).coalesce()
            if op is SUM:
                return total
            rounding = None if total.is_floating_point() or total.is_complex() else "trunc"
            return torch.div(total, communicator.size, rounding_mode=rounding)

        request = prepare.call(f"sparse_allreduce({op.value}, {in_words(tensor)})", run, [indices, values])
    return request.submit()


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension, in rank order. Collective.

    Args:
        tensor: at least one dimension. The first may differ between ranks, and be 0; the others and the dtype must
            agree.
        name, process_set: as for `allreduce`.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start what `allgather` does."""
    with preparing("allgather", name, process_set) as prepare:
        request = prepare.allgather(prepare.group([tensor]), itemgetter(0))
    return request.submit()


def grouped_allgather(
    tensors: _Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gather several tensors as one operation; see `allgather`. Collective."""
    with preparing("allgather", name, process_set) as prepare:
        tensors = prepare.listed(tensors)
    return list(_differentiable(name, process_set).allgather(tensors))


def grouped_allgather_async(
    tensors: _Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start what `grouped_allgather` does."""
    with preparing("allgather", name, process_set) as prepare:
        request = prepare.allgather(prepare.group(tensors), list)
    return request.submit()


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the root's tensor, as a new one. Collective.

    Args:
        tensor: any shape; shape and dtype must agree on all ranks, values count at the root only.
        root_rank: the sender, as a rank of the world; must agree.
        name, process_set: as for `allreduce`.
    """
    with preparing("broadcast", name, process_set) as prepare:
        root = process_set.rank_of(root_rank)
        prepare.require(tensor)
    return cast(Tensor, _differentiable(name, process_set).broadcast(tensor, root))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start what `broadcast` does."""
    return _broadcast(tensor, root_rank, name, process_set).submit()


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite a tensor with the root's; returns ``tensor``. Collective."""
    return cast(Tensor, _broadcast(tensor, root_rank, name, process_set, in_place=True).carry_out())


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start what `broadcast_` does."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=True).submit()


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool = False
) -> Request:
    with preparing("broadcast", name, process_set) as prepare:
        root = process_set.rank_of(root_rank)
        return prepare.broadcast(prepare.group([tensor])[0], root, tensor if in_place else None)


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send a part of one's tensor to every rank, and get one's part of theirs. Collective.

    Args:
        tensor: at least one dimension; all but the first must agree on all ranks, and the dtype.
        splits: rows for rank 0, 1, ... of the set; may differ between ranks. None: equal parts.
        name, process_set: as for `allreduce`.

    Returns:
        What the ranks sent here, in rank order; with ``splits`` also how many rows came from each (int32).
    """
    with preparing("alltoall", name, process_set) as prepare:
        rows = prepare.row_counts(tensor, splits)
    return _alltoall_result(splits, *_differentiable(name, process_set).alltoall(tensor, rows))


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `alltoall` does."""
    with preparing("alltoall", name, process_set) as prepare:
        rows = prepare.row_counts(tensor, splits)
        request = prepare.alltoall(prepare.group([tensor])[0], rows, partial(_alltoall_result, splits))
    return request.submit()


def _alltoall_result(splits: object, result: Tensor, received: list[int]) -> Tensor | tuple[Tensor, Tensor]:
    return result if splits is None else (result, torch.tensor(received, dtype=torch.int32, device="cpu"))


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce tensors over all ranks and return this rank's part. Collective.

    Args:
        tensor: at least one dimension, cut along the first as `torch.tensor_split` does; shape and dtype must agree.

    The other arguments are those of `allreduce`; there is no `Adasum` here, and no fp8, int8 or int4.
    """
    how = name, compression, op, process_set, prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], *how)[0]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start what `reducescatter` does."""
    with preparing("reducescatter", name, process_set) as prepare:
        how = op, prescale_factor, postscale_factor
        request = prepare.reducescatter(prepare.group([tensor]), *how, itemgetter(0))
    return request.submit()


def grouped_reducescatter(
    tensors: _Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter several tensors as one operation; see `reducescatter`. Collective."""
    with preparing("reducescatter", name, process_set) as prepare:
        if (wire := wire_of(compression)) is not None:
            raise ConfigError(f"reducescatter does not travel in {wire}; use Compression.none, fp16 or bf16")
        tensors = prepare.listed(tensors)
        sent, contexts = zip(*map(compression.compress, tensors), strict=True) if tensors else ((), ())
    parts = _differentiable(name, process_set).reducescatter(sent, op, prescale_factor, postscale_factor)
    return [compression.decompress(each, context) for each, context in zip(parts, contexts, strict=True)]


def grouped_reducescatter_async(
    tensors: _Tensors,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start what `grouped_reducescatter` does."""
    with preparing("reducescatter", name, process_set) as prepare:
        request = prepare.reducescatter(prepare.group(tensors), op, prescale_factor, postscale_factor, list)
    return request.submit()
