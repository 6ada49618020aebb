"""Reductions of tensors, on the terms of `ringreduce.torch.ops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ringreduce.buffers import Operand
from ringreduce.buffers.same import same_kind
from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.recent import Recent
from ringreduce.common.reduce_ops import AVERAGE, SUM, ReduceOp
from ringreduce.engine import Engine, Reduction
from ringreduce.engine.decisions import OperationSignature
from ringreduce.engine.operations import RepeatedReduction
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.torch.compression import Compression, Compressor, wire_of
from ringreduce.torch.tensors.arrays import TENSORS, differentiable, preparing, sparse_entries, sum_entries
from ringreduce.training.calls.handles import Handle
from ringreduce.training.calls.requests import Request, in_words
from ringreduce.training.options.options import Op, chosen_op

_Tensors = Sequence[Tensor]

#: To copy up to so much into memory of the ranks, and from there, takes less time than to look at an array.
_COPIED_NBYTES = 32 << 10
_REPEATS = 4096  # the most names of which is remembered how they came


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
    how = name, process_set, (op, average), (prescale_factor, postscale_factor)
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
    how = name, process_set, (op, average), (prescale_factor, postscale_factor)
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
    how = name, process_set, (op, average), (prescale_factor, postscale_factor)
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
    reduced = differentiable(name, process_set).allreduce(sent, *how)
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
    how = name, process_set, (op, average), (prescale_factor, postscale_factor)
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
    how = name, process_set, (op, average), (prescale_factor, postscale_factor)
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
    how = name, process_set, (op, average), (prescale_factor, postscale_factor)
    return _allreduce(tensors, *how, in_place=True).submit()


def _allreduce(
    tensors: _Tensors,
    name: str | None,
    process_set: ProcessSet,
    op: tuple[Op | None, bool | None],
    factors: tuple[float, float],
    *,
    first: bool = False,
    in_place: bool = False,
) -> Request:
    """Return a request to reduce tensors out of autograd's sight.

    Args:
        tensors, name, process_set: as for `allreduce`.
        op: and ``average``.
        factors: before and after the reduction.
        first: whether the result is the only tensor, not a list.
        in_place: whether the tensors are overwritten.
    """
    engine: Engine | None = None
    if first and type(name) is str and type(factors[0]) is type(factors[1]) is float and factors == (1.0, 1.0):
        try:
            engine = process_set.engine
        except Exception:  # it is refused where arguments are checked
            engine = None
    if engine is not None:
        repeated = _repeat(tensors[0], name, process_set, engine=engine, how=op, in_place=in_place)
        if repeated is not None:
            return repeated
    with preparing("allreduce", name, process_set) as prepare:
        tensors = prepare.listed(tensors)
        sources = [each.detach() if each.requires_grad else each for each in tensors]
        targets = sources if in_place else prepare.new_like(sources)
        given = tensors if in_place else targets
        result = partial(_result, given, first, in_place)
        request = prepare.allreduce(sources, targets, chosen_op(*op), *factors, result)
    if engine is not None:
        _remember(request, tensors[0], engine, how=op, in_place=in_place)
    return request


def _result(tensors: _Tensors, first: bool, in_place: bool) -> Any:
    if in_place:
        for each in tensors:
            TENSORS.changed(each)
    return tensors[0] if first else list(tensors)


class _Repeat(NamedTuple):
    """How to make a request again: to reduce one tensor under a name, not scaled.

    A result that is new is reduced in memory that is kept for the name, while no operation uses it.

    Attributes:
        how: ``op`` and ``average``, as the caller passed them.
        in_place: whether the tensor is overwritten.
        is_alike: whether a tensor can be used as this one.
        signature, op: of the operation.
        given: where it is reduced: where the tensor was the last time, or in ``memory``.
        memory: is copied to and from; None: the tensor is reduced where it is.
    """

    how: tuple[Any, Any]
    in_place: bool
    is_alike: Callable[[Tensor], bool]
    signature: OperationSignature
    op: ReduceOp
    given: list[Operand]
    memory: Tensor | None


class _Repeats(Recent[str, _Repeat | None]):
    """By names of operations, how to make them again; None: a name that has come once."""

    def __init__(self) -> None:
        super().__init__(_REPEATS)


def _repeat(
    tensor: Tensor, name: Any, process_set: ProcessSet, engine: Engine, how: tuple[Any, Any], in_place: bool
) -> Request | None:
    """Return a request that is like an earlier one of this name; None: there was none, or something has changed."""
    repeats = engine.attached[_Repeats]
    repeat = repeats.get(name)
    if repeat is None or repeat.how[0] is not how[0] or repeat.how[1] is not how[1] or repeat.in_place is not in_place:
        return None
    try:
        if not repeat.is_alike(tensor):
            return None
        memory = repeat.memory
        if memory is None:
            if repeat.given[0].address != tensor.data_ptr():
                repeat = repeats[name] = repeat._replace(given=[Operand.of(tensor).unowned()])
            arrays = [tensor]
            after = partial(_overwritten, tensor, tensor.untyped_storage())
        elif repeats.pop(name, None) is repeat:
            memory.copy_(tensor)
            arrays = [memory]
            after = partial(_copied, memory, repeats, name, repeat)
        else:  # another thread has taken it
            return None
    except Exception:  # an argument is wrong, and refused where arguments are checked
        return None
    operation = RepeatedReduction(name, repeat.signature, op=repeat.op, arrays=arrays, given=repeat.given, after=after)
    return Request(operation, process_set, unique=True, arrays=TENSORS, touched=arrays if memory is None else ())


def _overwritten(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return the result that is in a tensor, whose storage, now maybe another one, was kept for the operation."""
    return TENSORS.changed(tensor)


def _copied(memory: Tensor, repeats: _Repeats, name: str, repeat: _Repeat) -> Tensor:
    """Return the result that is in memory, which the next operation of this name may use then."""
    result = memory.clone()
    repeats[name] = repeat
    return result


def _remember(request: Request, tensor: Tensor, engine: Engine, how: tuple[Any, Any], in_place: bool) -> None:
    """Remember how to make a request again, if its name has come before."""
    operation = request.operation
    repeats = engine.attached[_Repeats]
    name = operation.name
    if name not in repeats:
        repeats.make_room()
        repeats[name] = None
    elif isinstance(operation, Reduction) and type(tensor) is Tensor:
        (given,) = operation.given
        is_alike = same_kind(tensor, given.nbytes)
        if not is_alike(tensor):
            return
        repeat = _Repeat(how, in_place, is_alike, operation.signature, operation.op, operation.given, None)
        if in_place:
            repeats[name] = repeat._replace(given=[given.unowned()])
        elif given.nbytes <= _COPIED_NBYTES:
            memory = engine.communicator.empty_like(tensor)
            repeats[name] = repeat._replace(given=[Operand.of(memory)], memory=memory)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: Op = AVERAGE, process_set: ProcessSet = global_process_set
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
        entries = sparse_entries(tensor)
        run = partial(sum_entries, entries=entries, shape=tensor.shape, op=op)
        request = prepare.call(f"sparse_allreduce({op.value}, {in_words(tensor)})", run, entries)
    return request.submit()


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = AVERAGE,
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
    op: Op = AVERAGE,
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
    op: Op = AVERAGE,
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
    parts = differentiable(name, process_set).reducescatter(sent, op, prescale_factor, postscale_factor)
    return [compression.decompress(each, context) for each, context in zip(parts, contexts, strict=True)]


def grouped_reducescatter_async(
    tensors: _Tensors,
    name: str | None = None,
    op: Op = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start what `grouped_reducescatter` does."""
    with preparing("reducescatter", name, process_set) as prepare:
        request = prepare.reducescatter(prepare.group(tensors), op, prescale_factor, postscale_factor, list)
    return request.submit()
