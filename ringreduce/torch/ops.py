"""Collectives on tensors, by Horovod's names: asynchronous or blocking, named, and open to autograd.

Every operation has a name; operations with one name meet, whatever order the ranks submit them in and from which
thread. Those without a name meet in the order in which they are submitted, each kind by itself. A name may come again
once its operation is done. What must agree between the ranks is said for each function; if it does not, all ranks that
submitted the operation get the same `MismatchError`, with the name and what each rank submitted, and later operations
work.

Tensors may lie on the CPU or on this rank's GPU, and results lie where the input does. In an allreduce each tensor lies
on the CPU or on the GPU on all ranks alike; elsewhere the ranks may differ. On a GPU, an operation comes after what the
caller has enqueued on its current stream, and what the caller enqueues there after the call (or after `synchronize`)
comes after the operation; nobody waits for the device where the data does not go through the host. `Adasum`,
`ReproducibleSum` and all but allreduces do go through it. Operations on a GPU do not travel with others, unless they
are a group, and after a `join` they raise a `MismatchError`.

``*_async`` functions return a `Handle`; `synchronize` returns the result. Until then the tensors belong to the
operation. Functions whose name ends in ``_`` work in place and out of autograd's sight, and so do the asynchronous
ones; gradients flow through the others. They are those of the sum of all ranks' losses, as the chain rule gives them;
`DistributedOptimizer`, which averages over the ranks, makes of them the gradient of the mean loss. (Horovod divides
those of `allgather` and `broadcast` by the number of ranks, which is off by that factor.) Backward passes are
collective too: a tensor must require gradients on all ranks or on none.

All functions raise, besides what they list:

* `UnsupportedBufferError`: a tensor cannot be used. At the call, and other operations are not affected.
* `ConfigError`: the name is under way, or an argument makes no sense. Likewise.
* `CollectiveTimeoutError`, `PeerLostError`, `ShutdownError`: a rank does not submit the operation in time, or never.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch

from ringreduce.adasum import adasum
from ringreduce.buffers import Operand
from ringreduce.communicator import Communicator
from ringreduce.engine import Call, Engine, Operation, Reduction
from ringreduce.errors import ConfigError, UnsupportedBufferError
from ringreduce.process_sets import ProcessSet
from ringreduce.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM, ReduceOp
from ringreduce.reproducible import reproducible_allreduce
from ringreduce.runtime import global_process_set
from ringreduce.torch.compression import Compression, Compressor, WireCompressor
from ringreduce.torch.streams import Crossing, gpu_of, on_host, on_this_stream, require_usable

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
    "changed",
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

#: Adaptive summation, see `ringreduce.adasum`.
Adasum = "adasum"

#: The exact sum, rounded once, whatever the number of ranks; see `ringreduce.reproducible`.
ReproducibleSum = "reproducible sum"

Tensors = Sequence[torch.Tensor]
Op = ReduceOp | str

_numbers = itertools.count(1)
#: For operations without a name, counted alike on all ranks of a set.
_backward_numbers: WeakKeyDictionary[Engine, itertools.count[int]] = WeakKeyDictionary()


class Handle(int):
    """An operation on its way, to be given to `poll` and `synchronize`; a number, as in Horovod."""

    operation: Operation
    engine: Engine
    crossing: Crossing | None

    @classmethod
    def of(cls, operation: Operation, engine: Engine, crossing: Crossing | None = None) -> Handle:
        made = cls(next(_numbers))
        made.operation, made.engine, made.crossing = operation, engine, crossing
        return made


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
    averages are over the ranks that are left. Other operations raise a `MismatchError` on the ranks that submit them.

    Args:
        device: without meaning here, taken for Horovod's sake.

    Returns:
        The rank that joined last: it has seen all steps.
    """
    engine = global_process_set.engine
    return cast(int, engine.wait(engine.join()))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks of the set have called it. Collective."""
    _carried_out(_call("barrier", None, "barrier", lambda communicator: None, process_set))


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
    outputs = [torch.empty_like(tensor)]
    how = _op(op, average), prescale_factor, postscale_factor
    return _submitted(
        _prepare_allreduce([_without_graph(tensor)], outputs, name, *how, process_set, lambda: outputs[0])
    )


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
    values = [_without_graph(tensor)]
    how = _op(op, average), prescale_factor, postscale_factor
    prepared = _prepare_allreduce(values, values, name, *how, process_set, lambda: changed(tensor))
    return cast(torch.Tensor, _carried_out(prepared))


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
    values = [_without_graph(tensor)]
    how = _op(op, average), prescale_factor, postscale_factor
    return _submitted(_prepare_allreduce(values, values, name, *how, process_set, lambda: changed(tensor)))


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
    sent, contexts = zip(*map(compression.compress, tensors), strict=True) if tensors else ((), ())
    how = _op(op, average), prescale_factor, postscale_factor, _wire(compression)
    reduced = _apply(_Allreduce, process_set, _backward_name(name, sent, process_set), name, *how, *sent)
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
    outputs = [torch.empty_like(each) for each in tensors]
    how = _op(op, average), prescale_factor, postscale_factor
    return _submitted(
        _prepare_allreduce(
            [_without_graph(each) for each in tensors], outputs, name, *how, process_set, lambda: outputs
        )
    )


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
    values = [_without_graph(each) for each in tensors]
    how = _op(op, average), prescale_factor, postscale_factor
    prepared = _prepare_allreduce(values, values, name, *how, process_set, lambda: [changed(each) for each in tensors])
    return cast("list[torch.Tensor]", _carried_out(prepared))


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
    values = [_without_graph(each) for each in tensors]
    how = _op(op, average), prescale_factor, postscale_factor
    return _submitted(
        _prepare_allreduce(values, values, name, *how, process_set, lambda: [changed(each) for each in tensors])
    )


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
    if not tensor.is_sparse:
        raise UnsupportedBufferError("sparse_allreduce_async takes sparse COO tensors; use allreduce for dense ones")
    op = ReduceOp.parse(op)
    _require_linear(op, "sparse_allreduce")
    mine = tensor.detach().coalesce()
    indices, values, shape = mine.indices().t().contiguous(), mine.values().contiguous(), tensor.shape

    def run(communicator: Communicator) -> torch.Tensor:
        places, numbers = communicator.allgather(indices), communicator.allgather(values)
        total = torch.sparse_coo_tensor(places.t(), numbers, shape, check_invariants=False).coalesce()
        return _averaged(total, communicator.size) if op is AVERAGE else total

    text = f"sparse_allreduce({op.value}, {_looks(tensor)})"
    handle = _submitted(_call("sparse_allreduce", name, text, run, process_set, [indices, values]))

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
    return _submitted(_prepare_allgather([tensor.detach()], name, process_set, lambda gathered: gathered[0]))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gather several tensors as one operation; see `allgather`. Collective."""
    return list(_apply(_Allgather, process_set, _backward_name(name, tensors, process_set), name, *tensors))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start what `grouped_allgather` does."""
    return _submitted(
        _prepare_allgather([each.detach() for each in tensors], name, process_set, lambda gathered: gathered)
    )


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
    backward = _backward_name(name, [tensor], process_set)
    return cast(
        torch.Tensor,
        _apply(_Broadcast, tensor, process_set.rank_of(root_rank), process_set, backward, name),
    )


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start what `broadcast` does."""
    return _submitted(_prepare_broadcast(tensor.detach(), None, process_set.rank_of(root_rank), name, process_set))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite a tensor with the root's; returns ``tensor``. Collective."""
    root = process_set.rank_of(root_rank)
    prepared = _prepare_broadcast(_without_graph(tensor), tensor, root, name, process_set)
    return cast(torch.Tensor, _carried_out(prepared))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start what `broadcast_` does."""
    return _submitted(
        _prepare_broadcast(_without_graph(tensor), tensor, process_set.rank_of(root_rank), name, process_set)
    )


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
    rows = _splits(tensor, splits, process_set)
    result, received = _apply(_Alltoall, tensor, rows, process_set, _backward_name(name, [tensor], process_set), name)
    return cast(torch.Tensor, result) if splits is None else (result, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `alltoall` does."""
    rows = _splits(tensor, splits, process_set)
    return _submitted(_prepare_alltoall(tensor.detach(), rows, name, process_set, alone=splits is None))


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

    The other arguments are those of `allreduce`; there is no `Adasum` here.
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
    how = op, prescale_factor, postscale_factor
    return _submitted(_prepare_reducescatter([tensor.detach()], name, *how, process_set, lambda parts: parts[0]))


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
    sent, contexts = zip(*map(compression.compress, tensors), strict=True) if tensors else ((), ())
    how = op, prescale_factor, postscale_factor
    parts = _apply(_ReduceScatter, process_set, _backward_name(name, sent, process_set), name, *how, *sent)
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
    how = op, prescale_factor, postscale_factor
    return _submitted(
        _prepare_reducescatter([each.detach() for each in tensors], name, *how, process_set, lambda parts: parts)
    )


# ---- operations, made of tensors that have no graph ----


class _Prepared(NamedTuple):
    """An operation that only has to be started.

    Attributes:
        tensors: what it reads and writes, if some of it lies on a GPU, and then it is a `Call`; else None.
    """

    operation: Operation
    process_set: ProcessSet
    unique: bool
    tensors: Tensors | None = None


def _submitted(prepared: _Prepared) -> Handle:
    operation, process_set, unique, tensors = prepared
    engine = process_set.engine
    crossing = None
    if tensors is not None:
        assert isinstance(operation, Call)
        crossing = Crossing(tensors)
        operation.run = crossing.around(operation.run)
    engine.submit(operation, unique=unique)
    return Handle.of(operation, engine, crossing)


def _carried_out(prepared: _Prepared) -> Any:
    """Start an operation and wait for its result, on this thread: quicker than `_submitted` and `synchronize`."""
    operation, process_set, unique, tensors = prepared
    if tensors is not None:
        assert isinstance(operation, Call)
        operation.run = on_this_stream(operation.run, gpu_of(tensors))
    return process_set.engine.run(operation, unique=unique)


def _prepare_allreduce(
    sources: Tensors,
    targets: Tensors,
    name: str | None,
    op: Op,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    result: Callable[[], Any],
    wire: str | None = None,
) -> _Prepared:
    if not sources:
        raise ConfigError("a group must have at least one tensor")
    text = _allreduce_text(op, prescale, postscale, tuple([(each.shape, each.dtype) for each in sources]))
    if wire is not None:
        text = f"{text} as {wire}"
    on_gpu = gpu_of(sources) is not None or (targets is not sources and gpu_of(targets) is not None)
    if on_gpu:
        text = f"{text} on {', '.join(each.device.type for each in sources)}"

    def before() -> None:
        for source, target in zip(sources, targets, strict=True):
            _scale(source, prescale, target)

    def after() -> Any:
        for target in targets:
            _scale(target, postscale, target)
        return result()

    if op == Adasum:
        _check(process_set, sources, targets)

        def combine(communicator: Communicator) -> Any:
            before()
            with on_host(targets) as lent:
                adasum(communicator, lent)
            return after()

        return _call("allreduce", name, text, combine, process_set, sources, targets)
    if op == ReproducibleSum:
        _check(process_set, sources, targets)

        def add_up(communicator: Communicator) -> Any:
            before()
            with on_host(targets) as lent:
                for each in lent:
                    reproducible_allreduce(communicator, each, out=each)
            return after()

        return _call("allreduce", name, text, add_up, process_set, sources, targets)
    if wire is not None:
        _check(process_set, sources, targets)

        def encoded(communicator: Communicator) -> Any:
            before()
            for target in targets:
                communicator.allreduce(target, op, out=target, wire=wire if target.is_floating_point() else None)
            return after()

        return _call("allreduce", name, text, encoded, process_set, sources, targets)
    if on_gpu:
        _check(process_set, sources, targets)
        kind = ReduceOp.parse(op)

        def reduce(communicator: Communicator) -> Any:
            if prescale != 1.0:
                before()
            _reduce_together(communicator, kind, sources if prescale == 1.0 else targets, targets)
            return after()

        return _call("allreduce", name, text, reduce, process_set, sources, targets)
    reduction = Reduction(
        _key("allreduce", name),
        text,
        ReduceOp.parse(op),
        sources if prescale == 1.0 else targets,
        targets,
        before=None if prescale == 1.0 else before,
        after=result if postscale == 1.0 else after,
    )
    return _Prepared(reduction, process_set, name is not None)


def _reduce_together(communicator: Communicator, op: ReduceOp, sources: Tensors, targets: Tensors) -> None:
    """Reduce tensors of which some lie on a GPU; those of one dtype that do travel together."""
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


def _prepare_allgather(
    tensors: Tensors, name: str | None, process_set: ProcessSet, result: Callable[[list[torch.Tensor]], Any]
) -> _Prepared:
    _check(process_set, tensors)
    _require_rows(tensors, "allgather")
    text = f"allgather({_looks(*tensors, any_rows=True)})"

    def run(communicator: Communicator) -> Any:
        return result([communicator.allgather(each) for each in tensors])

    return _call("allgather", name, text, run, process_set, tensors)


def _prepare_broadcast(
    values: torch.Tensor, in_place: torch.Tensor | None, root: int, name: str | None, process_set: ProcessSet
) -> _Prepared:
    _check(process_set, [values], [values] if in_place is not None else [])
    text = f"broadcast(root {root}, {_looks(values)})"

    def run(communicator: Communicator) -> torch.Tensor:
        if in_place is None:
            return cast(torch.Tensor, communicator.broadcast(values, root))
        communicator.broadcast(values, root, out=values)
        return changed(in_place)

    return _call("broadcast", name, text, run, process_set, [values])


def _prepare_alltoall(
    tensor: torch.Tensor, rows: list[int], name: str | None, process_set: ProcessSet, *, alone: bool
) -> _Prepared:
    _check(process_set, [tensor])
    text = f"alltoall({_looks(tensor, any_rows=True)})"

    def run(communicator: Communicator) -> Any:
        result, received = communicator.alltoall(tensor, rows)
        return result if alone else (result, torch.tensor(received, dtype=torch.int32))

    return _call("alltoall", name, text, run, process_set, [tensor])


def _prepare_reducescatter(
    tensors: Tensors,
    name: str | None,
    op: Op,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    result: Callable[[list[torch.Tensor]], Any],
) -> _Prepared:
    if op == Adasum:
        raise ConfigError("there is no reducescatter with Adasum, which looks at whole tensors; use allreduce")
    kind = ReduceOp.parse(op)
    _check(process_set, tensors)
    _require_rows(tensors, "reducescatter")
    text = f"reducescatter({kind.value}, {_looks(*tensors)}, scaled by {prescale} and {postscale})"

    def run(communicator: Communicator) -> Any:
        parts = []
        for each in tensors:
            part = communicator.reduce_scatter(_scaled(each, prescale), kind)
            parts.append(_scaled(part, postscale))
        return result(parts)

    return _call("reducescatter", name, text, run, process_set, tensors)


def _call(
    kind: str,
    name: str | None,
    text: str,
    run: Callable[[Communicator], Any],
    process_set: ProcessSet,
    sources: Tensors = (),
    targets: Tensors = (),
) -> _Prepared:
    on_gpu = gpu_of(sources) is not None or gpu_of(targets) is not None
    tensors = [*sources, *targets] if on_gpu else None
    return _Prepared(Call(_key(kind, name), text, run), process_set, name is not None, tensors)


def _key(kind: str, name: str | None) -> str:
    return f"{kind} without a name" if name is None else name


# ---- autograd ----


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, process_set: ProcessSet, backward: str, name: str | None, op: Op, *rest: Any) -> Any:
        prescale, postscale, wire, *tensors = rest
        ctx.process_set, ctx.backward_name, ctx.how = process_set, backward, (op, prescale, postscale, wire)
        outputs = [torch.empty_like(each) for each in tensors]
        sources = [each.detach() for each in tensors]
        how = op, prescale, postscale
        prepared = _prepare_allreduce(sources, outputs, name, *how, process_set, lambda: outputs, wire)
        return tuple(_carried_out(prepared))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _require_linear(ctx.how[0], "allreduce")
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
        return tuple(_carried_out(_prepare_allgather(sources, name, process_set, lambda gathered: gathered)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows = torch.tensor([ctx.rows])
        everyone = _carried_out(
            _prepare_allgather([rows], f"{ctx.backward_name} rows", ctx.process_set, lambda gathered: gathered[0])
        )
        starts = everyone[: ctx.process_set.rank()].sum(0).tolist()
        name = ctx.backward_name
        totals = _apply(_Allreduce, ctx.process_set, f"{name}'", name, SUM, 1.0, 1.0, None, *grads)
        mine = [total.narrow(0, start, own) for total, start, own in zip(totals, starts, ctx.rows, strict=True)]
        return None, None, None, *mine


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root: int, process_set: ProcessSet, backward: str, name: str | None
    ) -> Any:
        ctx.process_set, ctx.backward_name, ctx.root = process_set, backward, root
        return _carried_out(_prepare_broadcast(tensor.detach(), None, root, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        name = ctx.backward_name
        (total,) = _apply(_Allreduce, ctx.process_set, f"{name}'", name, SUM, 1.0, 1.0, None, grads[0])
        mine = total if ctx.process_set.rank() == ctx.root else torch.zeros_like(total)
        return mine, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, process_set: ProcessSet, backward: str, name: str | None, op: Op, *rest: Any) -> Any:
        prescale, postscale, *tensors = rest
        ctx.process_set, ctx.backward_name = process_set, backward
        ctx.op, ctx.factor = op, prescale * postscale
        sources = [each.detach() for each in tensors]
        prepared = _prepare_reducescatter(sources, name, op, prescale, postscale, process_set, lambda parts: parts)
        return tuple(_carried_out(prepared))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _require_linear(ctx.op, "reducescatter")
        name = ctx.backward_name
        wholes = _apply(_Allgather, ctx.process_set, f"{name}'", name, *grads)
        factor = ctx.factor / ctx.process_set.size() if ReduceOp.parse(ctx.op) is AVERAGE else ctx.factor
        return None, None, None, None, None, None, *[_scaled(whole, factor) for whole in wholes]


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, rows: list[int], process_set: ProcessSet, backward: str, name: str | None
    ) -> Any:
        prepared = _prepare_alltoall(tensor.detach(), rows, name, process_set, alone=False)
        result, received = _carried_out(prepared)
        ctx.process_set, ctx.backward_name, ctx.received = process_set, backward, received.tolist()
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        name = ctx.backward_name
        back = _apply(_Alltoall, grads[0], ctx.received, ctx.process_set, f"{name}'", name)[0]
        return back, None, None, None, None


class _NoGraph:
    """What a forward pass notes for a backward pass that will not come."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        pass


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in arguments):
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    return function.forward(_NoGraph(), *arguments)  # half as long


def _backward_name(name: str | None, tensors: Tensors, process_set: ProcessSet) -> str:
    """Return what the backward pass calls its operation: the passes of several operations may come in any order."""
    if name is not None:
        return f"gradient of {name}"
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        numbers = _backward_numbers.setdefault(process_set.engine, itertools.count(1))
        return f"gradient {next(numbers)}"
    return "gradient"


# ---- arguments ----


def _wire(compression: type[Compressor]) -> str | None:
    """Return the wire format of a compression that leaves tensors as they are."""
    return None if compression.compress is not WireCompressor.compress else getattr(compression, "wire", None)


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


def _check(process_set: ProcessSet, sources: Tensors, targets: Tensors = ()) -> None:
    """Refuse on this rank, at the call, what could not be carried out later."""
    if not sources:
        raise ConfigError("a group must have at least one tensor")
    for source in sources:
        if source.is_cuda:
            require_usable(process_set.engine.communicator, source)
        else:
            Operand.of(source)
    for target in targets:
        if target.is_cuda:
            require_usable(process_set.engine.communicator, target, writable=True)
        else:
            Operand.of(target).require_writable()


def _require_rows(tensors: Tensors, what: str) -> None:
    if any(each.dim() == 0 for each in tensors):
        raise UnsupportedBufferError(f"{what} needs tensors with at least one dimension, got a scalar")


def _splits(tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, process_set: ProcessSet) -> list[int]:
    _require_rows([tensor], "alltoall")
    size, rows = process_set.size(), tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ConfigError(f"{rows} rows do not divide among {size} ranks; give splits")
        return [rows // size] * size
    listed = [int(each) for each in splits]
    if len(listed) != size or min(listed) < 0 or sum(listed) != rows:
        raise ConfigError(f"splits must be {size} numbers >= 0 that add up to the {rows} rows, got {listed}")
    return listed


def _require_linear(op: Op, collective: str) -> None:
    if op not in (AVERAGE, SUM, "average", "sum", ReproducibleSum):
        word = op.value if isinstance(op, ReduceOp) else op
        raise ConfigError(f"no gradient flows through {collective} with op {word}; use average or sum, or detach")


@lru_cache(maxsize=4096)
def _allreduce_text(
    op: Op, prescale: float, postscale: float, tensors: tuple[tuple[torch.Size, torch.dtype], ...]
) -> str:
    kind = "allreduce" if len(tensors) == 1 else "grouped allreduce"
    word = op if isinstance(op, str) else op.value
    looks = ", ".join(_look(shape, dtype) for shape, dtype in tensors)
    scales = f", scaled by {prescale} and {postscale}" if (prescale, postscale) != (1.0, 1.0) else ""
    return f"{kind}({word}, {looks}{scales})"


def _looks(*tensors: torch.Tensor, any_rows: bool = False) -> str:
    """Say the shapes and dtypes of tensors; with a star for rows that may differ between ranks."""
    return ", ".join(_look(["*", *each.shape[1:]] if any_rows else each.shape, each.dtype) for each in tensors)


def _look(dims: Sequence[int | str], dtype: torch.dtype) -> str:
    shape = "x".join(map(str, dims)) if dims else "scalar"
    return f"{shape} {str(dtype)[6:]}"


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.to(torch.float64) * factor).to(tensor.dtype)


def _scale(source: torch.Tensor, factor: float, target: torch.Tensor) -> None:
    """Store the scaled tensor in ``target``, which may be the source itself."""
    if factor == 1.0:
        if target is not source:
            target.copy_(source)
        return
    # On whatever thread this is, tensors that were made in inference mode may be changed in it alone.
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        if source.is_floating_point() or source.is_complex():
            torch.mul(source, factor, out=target)
        else:
            target.copy_(_scaled(source, factor))


def _averaged(total: torch.Tensor, size: int) -> torch.Tensor:
    """Divide by a number of ranks; integers toward zero."""
    whole = not (total.is_floating_point() or total.is_complex())
    return torch.div(total, size, rounding_mode="trunc" if whole else None)


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it can be, because calls that are repeated with the same object are fastest."""
    return tensor.detach() if tensor.requires_grad else tensor


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """Tell autograd that a collective wrote into a tensor, so that it refuses to use a saved value that is gone."""
    try:
        torch.autograd.graph.increment_version(tensor)
    except RuntimeError:
        if not tensor.is_inference():  # those have no version, and asking for it first takes a microsecond
            raise
    return tensor
