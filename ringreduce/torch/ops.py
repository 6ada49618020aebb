"""Collectives on tensors, by Horovod's names: asynchronous or blocking, named, and open to autograd.

Every operation has a name; operations with one name meet, whatever order the ranks submit them in and from which
thread. Those without a name meet in the order in which they are submitted, each kind by itself. A name is a str, and
may come again once its operation is done. What must agree between the ranks is said for each function; if it does not,
all ranks that submitted the operation get the same `MismatchError`, with the name and what each rank submitted. Later
operations work, unless the operation had no name and the ranks submitted it from different lines of the program: then
nobody can tell which of them belong together, and every later one raises a `TransportError`, until `shutdown()` and
`init()`.

Tensors may lie on the CPU or on this rank's GPU, and results lie where the input does. In an allreduce each tensor lies
on the CPU or on the GPU on all ranks alike; elsewhere the ranks may differ. On a GPU, an operation comes after what the
caller has enqueued on its current stream, and what the caller enqueues there after the call (or after `synchronize`)
comes after the operation; nobody waits for the device where the data does not go through the host. `Adasum`,
`ReproducibleSum` and all but allreduces do go through it. Operations on a GPU do not travel with others, unless they
are a group, and after a `join` they raise a `MismatchError`.

``*_async`` functions return a `Handle`; `synchronize` returns the result. Until then the tensors belong to the
operation. Functions whose name ends in ``_`` work in place and out of autograd's sight, and so do the asynchronous
ones; gradients flow through the others. They are those of the sum of all ranks' losses, as the chain rule gives them;
`DistributedOptimizer`, which averages over the ranks, makes of them the gradient of the mean loss. By Horovod's
conventions those of `allgather`, `broadcast` and `reducescatter` differ by a factor; `ringreduce.conventions` says by
which. Backward passes are collective too: a tensor must require gradients on all ranks or on none.

All functions raise, besides what they list:

* `UnsupportedBufferError`: a tensor cannot be used. At the call; it counts as one that does not agree, so the other
  ranks get a `MismatchError` with the reason when they submit theirs, and what was said above holds for later ones.
* `ConfigError`: the name is under way, or an argument makes no sense. Likewise. (Of a name
  that is no str, those ranks hear that gave none.)
* `CollectiveTimeoutError`, `PeerLostError`, `ShutdownError`: a rank does not submit the operation in time, or never.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from ringreduce.arguments import row_counts
from ringreduce.communicator import Communicator
from ringreduce.errors import ConfigError, UnsupportedBufferError
from ringreduce.process_sets import ProcessSet
from ringreduce.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM, ReduceOp
from ringreduce.runtime import global_process_set
from ringreduce.torch import differentiable
from ringreduce.torch.compression import Compression, Compressor, WireCompressor
from ringreduce.torch.prepared import (
    Adasum,
    Handle,
    Op,
    ReproducibleSum,
    Tensors,
    averaged,
    changed,
    checking_submission,
    listed,
    looks,
    prepare_allgather,
    prepare_allreduce,
    prepare_alltoall,
    prepare_broadcast,
    prepare_call,
    prepare_reducescatter,
    require_rows,
    require_tensors,
    without_graph,
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

# ---- handles ----


def poll(handle: Handle | Callable[[], Any]) -> bool:
    """Return whether an operation is done, so that `synchronize` will not wait."""
    if callable(handle):
        return all(poll(each) for each in getattr(handle, "handles", ()))
    return _checked(handle).engine.poll(handle.operation)


def synchronize(handle: Handle | Callable[[], Any]) -> Any:
    """Wait for an operation; return its result. It may be called again, and returns the same.

    Raises:
        MismatchError, CollectiveTimeoutError, PeerLostError, ShutdownError: the operation failed.
        ConfigError: this is no handle.
    """
    if callable(handle):
        return handle()
    result = _checked(handle).engine.wait(handle.operation)
    if handle.crossing is not None:
        handle.crossing.finish(result)
    return result


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have. Collective over all ranks.

    Allreduces of the others go on without this rank: it counts for nothing in sums, products, minima and maxima, and
    averages are over the ranks that are left (by Horovod's conventions over all, see `ringreduce.conventions`). Other
    operations raise a `MismatchError` on the ranks that submit them. An optimizer's steps of the others leave this
    rank's weights as they are: afterwards, broadcast those of the rank that joined last.

    Args:
        device: without meaning here, taken for Horovod's sake.

    Returns:
        The rank that joined last: it has seen all steps.
    """
    engine = global_process_set.engine
    return cast(int, engine.wait(engine.join()))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks of the set have called it. Collective."""
    with checking_submission("barrier", None, process_set):
        prepared = prepare_call("barrier", None, "barrier", lambda communicator: None, process_set)
    prepared.carry_out()


# ---- allreduce ----


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
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
    (reduced,) = grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return reduced


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `allreduce` does; its result is a new tensor."""
    with checking_submission("allreduce", name, process_set):
        source = without_graph(tensor)
        outputs = [torch.empty_like(source)]
        how = _op(op, average), prescale_factor, postscale_factor
        prepared = prepare_allreduce([source], outputs, name, *how, process_set, lambda: outputs[0])
    return prepared.submit()


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce like `allreduce`, but in place; returns ``tensor``. Collective."""
    with checking_submission("allreduce", name, process_set):
        values = [without_graph(tensor)]
        how = _op(op, average), prescale_factor, postscale_factor
        prepared = prepare_allreduce(values, values, name, *how, process_set, lambda: changed(tensor))
    return cast(torch.Tensor, prepared.carry_out())


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `allreduce_` does."""
    with checking_submission("allreduce", name, process_set):
        values = [without_graph(tensor)]
        how = _op(op, average), prescale_factor, postscale_factor
        prepared = prepare_allreduce(values, values, name, *how, process_set, lambda: changed(tensor))
    return prepared.submit()


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors as one operation: all of them or, after an error, none. Collective.

    Args:
        tensors: as for `allreduce` each; dtypes may be mixed.

    The other arguments are those of `allreduce`.
    """
    with checking_submission("allreduce", name, process_set):
        how = _op(op, average), prescale_factor, postscale_factor, _wire(compression)
        tensors = listed(tensors)
        require_tensors(*tensors)
        sent, contexts = zip(*map(compression.compress, tensors), strict=True) if tensors else ((), ())
    reduced = differentiable.allreduce(sent, name, *how, process_set)
    return [compression.decompress(each, context) for each, context in zip(reduced, contexts, strict=True)]


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `grouped_allreduce` does; its result is a list of new tensors."""
    with checking_submission("allreduce", name, process_set):
        tensors = listed(tensors)
        sources = [without_graph(each) for each in tensors]
        outputs = [torch.empty_like(each) for each in sources]
        how = _op(op, average), prescale_factor, postscale_factor
        prepared = prepare_allreduce(sources, outputs, name, *how, process_set, lambda: outputs)
    return prepared.submit()


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce like `grouped_allreduce`, but in place; returns ``tensors``. Collective."""
    with checking_submission("allreduce", name, process_set):
        tensors = listed(tensors)
        values = [without_graph(each) for each in tensors]
        how = _op(op, average), prescale_factor, postscale_factor
        result = partial(_all_changed, tensors)
        prepared = prepare_allreduce(values, values, name, *how, process_set, result)
    return cast("list[torch.Tensor]", prepared.carry_out())


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `grouped_allreduce_` does."""
    with checking_submission("allreduce", name, process_set):
        tensors = listed(tensors)
        values = [without_graph(each) for each in tensors]
        how = _op(op, average), prescale_factor, postscale_factor
        result = partial(_all_changed, tensors)
        prepared = prepare_allreduce(values, values, name, *how, process_set, result)
    return prepared.submit()


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: Op = Average, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to sum or average sparse COO tensors; what each rank has is gathered, nothing made dense.

    Args:
        tensor: sparse; its shape and dtype must agree, how much it holds may differ.
        name: see the module; must agree.
        op: `Average` or `Sum`; must agree.
        process_set: the ranks that take part.

    Returns:
        A function that waits and returns the coalesced tensor, which `synchronize` takes as well.
    """
    with checking_submission("sparse_allreduce", name, process_set):
        require_tensors(tensor)
        if not tensor.is_sparse:
            raise UnsupportedBufferError(
                "sparse_allreduce_async takes sparse COO tensors; use allreduce for dense ones"
            )
        op = ReduceOp.parse(op)
        if op not in (AVERAGE, SUM):
            raise ConfigError(f"sparse_allreduce_async averages or sums (op Average or Sum), got op {op.value}")
        mine = tensor.detach().coalesce()
        indices, values, shape = mine.indices().t().contiguous(), mine.values().contiguous(), tensor.shape

    def run(communicator: Communicator) -> torch.Tensor:
        places, numbers = communicator.allgather(indices), communicator.allgather(values)
        total = torch.sparse_coo_tensor(places.t(), numbers, shape, check_invariants=False).coalesce()
        return averaged(total, communicator.size) if op is AVERAGE else total

    text = f"sparse_allreduce({op.value}, {looks(tensor)})"
    handle = prepare_call("sparse_allreduce", name, text, run, process_set, [indices, values]).submit()

    def wait() -> torch.Tensor:
        return cast(torch.Tensor, synchronize(handle))

    wait.handles = (handle,)  # type: ignore[attr-defined]
    return wait


# ---- allgather ----


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the ranks' tensors along the first dimension, in rank order. Collective.

    Args:
        tensor: at least one dimension. The first may differ between ranks, and be 0; the others and the dtype must
            agree.
        name: see the module; must agree.
        process_set: the ranks that take part.
    """
    (gathered,) = grouped_allgather([tensor], name, process_set)
    return gathered


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start what `allgather` does."""
    with checking_submission("allgather", name, process_set):
        prepared = prepare_allgather([without_graph(tensor)], name, process_set, lambda gathered: gathered[0])
    return prepared.submit()


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gather several tensors as one operation; see `allgather`. Collective."""
    with checking_submission("allgather", name, process_set):
        tensors = listed(tensors)
    return differentiable.allgather(tensors, name, process_set)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start what `grouped_allgather` does."""
    with checking_submission("allgather", name, process_set):
        tensors = listed(tensors)
        sources = [without_graph(each) for each in tensors]
        prepared = prepare_allgather(sources, name, process_set, lambda gathered: gathered)
    return prepared.submit()


# ---- broadcast ----


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the root's tensor, as a new one. Collective.

    Args:
        tensor: any shape; shape and dtype must agree on all ranks, values count at the root only.
        root_rank: the sender, as a rank of the world; must agree.
        name: see the module; must agree.
        process_set: the ranks that take part.
    """
    with checking_submission("broadcast", name, process_set):
        root = process_set.rank_of(root_rank)
    return differentiable.broadcast(tensor, root, name, process_set)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start what `broadcast` does."""
    with checking_submission("broadcast", name, process_set):
        root = process_set.rank_of(root_rank)
        prepared = prepare_broadcast(without_graph(tensor), None, root, name, process_set)
    return prepared.submit()


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite a tensor with the root's; returns ``tensor``. Collective."""
    with checking_submission("broadcast", name, process_set):
        root = process_set.rank_of(root_rank)
        prepared = prepare_broadcast(without_graph(tensor), tensor, root, name, process_set)
    return cast(torch.Tensor, prepared.carry_out())


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start what `broadcast_` does."""
    with checking_submission("broadcast", name, process_set):
        root = process_set.rank_of(root_rank)
        prepared = prepare_broadcast(without_graph(tensor), tensor, root, name, process_set)
    return prepared.submit()


# ---- alltoall ----


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send a part of one's tensor to every rank, and get one's part of theirs. Collective.

    Args:
        tensor: at least one dimension; all but the first must agree on all ranks, and the dtype.
        splits: rows for rank 0, 1, ... of the set; may differ between ranks. None: equal parts.
        name: see the module; must agree.
        process_set: the ranks that take part.

    Returns:
        What the ranks sent here, in rank order; with ``splits`` also how many rows came from each (int32).
    """
    with checking_submission("alltoall", name, process_set):
        rows = _splits(tensor, splits, process_set)
    result, received = differentiable.alltoall(tensor, rows, name, process_set)
    return result if splits is None else (result, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `alltoall` does."""
    with checking_submission("alltoall", name, process_set):
        rows = _splits(tensor, splits, process_set)
        prepared = prepare_alltoall(without_graph(tensor), rows, name, process_set, alone=splits is None)
    return prepared.submit()


# ---- reducescatter ----


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce tensors over all ranks and return this rank's part. Collective.

    Args:
        tensor: at least one dimension, cut along the first as `torch.tensor_split` does; shape and dtype must agree.

    The other arguments are those of `allreduce`; there is no `Adasum` here, and no fp8, int8 or int4.
    """
    (part,) = grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)
    return part


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start what `reducescatter` does."""
    with checking_submission("reducescatter", name, process_set):
        how = op, prescale_factor, postscale_factor
        prepared = prepare_reducescatter([without_graph(tensor)], name, *how, process_set, lambda parts: parts[0])
    return prepared.submit()


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter several tensors as one operation; see `reducescatter`. Collective."""
    with checking_submission("reducescatter", name, process_set):
        if (wire := _wire(compression)) is not None:
            raise ConfigError(f"reducescatter does not travel in {wire}; use Compression.none, fp16 or bf16")
        tensors = listed(tensors)
        require_tensors(*tensors)
        sent, contexts = zip(*map(compression.compress, tensors), strict=True) if tensors else ((), ())
    how = op, prescale_factor, postscale_factor
    parts = differentiable.reducescatter(sent, name, *how, process_set)
    return [compression.decompress(each, context) for each, context in zip(parts, contexts, strict=True)]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start what `grouped_reducescatter` does."""
    with checking_submission("reducescatter", name, process_set):
        tensors = listed(tensors)
        sources = [without_graph(each) for each in tensors]
        how = op, prescale_factor, postscale_factor
        prepared = prepare_reducescatter(sources, name, *how, process_set, lambda parts: parts)
    return prepared.submit()


# ---- arguments ----


def _all_changed(tensors: Tensors) -> list[torch.Tensor]:
    return [changed(each) for each in tensors]


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ConfigError(f"expected a handle, as the *_async functions return it; got {handle!r}")
    return handle


def _op(op: Op | None, average: bool | None) -> Op:
    """Return the reduce op from it and from the argument by which it was said before there were several."""
    if average is not None:
        if op is not None:
            raise ConfigError("give op or average, not both")
        warnings.warn("average= is deprecated; say op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    if op is None:
        return Average
    return op if op in (Adasum, ReproducibleSum) else ReduceOp.parse(op)


def _wire(compression: type[Compressor]) -> str | None:
    """Return the wire format of a compression that leaves tensors as they are.

    Raises:
        ConfigError: it is no compression, or one of buckets.
    """
    if not hasattr(compression, "compress"):
        raise ConfigError(
            f"compression={compression!r} is not for single tensors; give one of hvd.Compression but powersgd and topk"
        )
    return None if compression.compress is not WireCompressor.compress else getattr(compression, "wire", None)


def _splits(tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, process_set: ProcessSet) -> list[int]:
    require_rows([tensor], "alltoall")
    given = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    return row_counts(given, tensor.shape[0], process_set.size())
