"""Collectives on pytrees of JAX arrays, inside and outside of `jax.jit`. The arrays of a tree are one operation.

Inside of `jit` a collective is a call of the compiled program; `grad`, `vmap`, `remat`, `scan` and `cond` take it as
any other. Outside it runs at once. Operations have names, as in `ringreduce.torch.ops`. Without one, an operation of a
compiled program is named by its line in the source and its number in the program, so that operations match in
whatever order the ranks run them. JAX leaves out computations whose results nobody uses, and collectives, too: use a
result on all ranks or on none.

Gradients are those of the sum of all ranks' losses, as the chain rule gives them; see `ringreduce.common.conventions`.

All functions raise, besides what they list: `UnsupportedBufferError` and `ConfigError` for arguments; on all ranks
`MismatchError` where these do not agree; `CollectiveTimeoutError`, `PeerLostError`, `ShutdownError`. From a compiled
program JAX raises an error of its own, a RuntimeError or a ValueError; `error_of` returns ours.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Sequence
from ctypes import memmove
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend import core

from ringreduce.buffers import DType
from ringreduce.common.arguments import real_number
from ringreduce.common.call_sites import place_of, program_stack
from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM, ReduceOp
from ringreduce.jax import ffi
from ringreduce.jax.calls import ALIKE, SETS, Call, ranks_of, request_of
from ringreduce.jax.ffi import error_of
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.requests import Adasum, Op, ReproducibleSum, Request, RequestBuilder, chosen_op

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReproducibleSum",
    "Sum",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "error_of",
    "reducescatter",
]

Average, Sum, Min, Max, Product = AVERAGE, SUM, MIN, MAX, PRODUCT

_Shape = tuple[int, ...]

#: Smaller results become arrays of JAX all together, by a program that returns its arguments: quicker than one by one.
_LEAST_PUT_NBYTES = 1 << 20

#: So many requests of compiled programs are kept, of arrays up to this size.
_KEPT, _LARGEST_REPEATED_NBYTES = 128, 64 << 10


# ---- in compiled programs ----


class _Repeated(NamedTuple):
    """A small request of a compiled program, on memory of its own: looking at other memory takes longer than a copy.

    Attributes:
        request: it can be carried out again and again.
        sources, targets: addresses and sizes of its arrays.
    """

    request: Request
    sources: Sequence[tuple[int, int]]
    targets: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, call: Call, arguments: ffi.Memory, results: ffi.Memory) -> _Repeated:
        targets = results.empty_like()
        sources = targets if call.kind == "allreduce" else arguments.empty_like()
        spans = [[(each.ctypes.data, each.nbytes) for each in arrays] for arrays in (sources, targets)]
        return cls(request_of(call, sources, targets), *spans)

    def carry_out(self, arguments: ffi.Memory, results: ffi.Memory) -> None:
        for (own, nbytes), address in zip(self.sources, arguments.addresses, strict=True):
            memmove(own, address, nbytes)
        self.request.carry_out()
        for (own, nbytes), address in zip(self.targets, results.addresses, strict=True):
            memmove(address, own, nbytes)


#: Those that are not under way; the last used is the last.
_repeated: OrderedDict[tuple[Any, ...], _Repeated] = OrderedDict()


def _handle(text: bytes, arguments: ffi.Memory, results: ffi.Memory) -> None:
    """Carry out a call of a compiled program."""
    ffi.raise_pending()
    call = _read(text)
    process_set = SETS[call.ranks]
    key = text, arguments.layout, results.layout, ref(process_set.engine) if process_set.connected else None
    repeated = _repeated.pop(key, None)  # another thread may come here meanwhile
    if repeated is None and max(arguments.nbytes, results.nbytes) > _LARGEST_REPEATED_NBYTES:
        request_of(call, arguments.views(), results.views()).carry_out()
        return
    if repeated is None:
        repeated = _Repeated.of(call, arguments, results)
    repeated.carry_out(arguments, results)
    _repeated[key] = repeated
    if len(_repeated) > _KEPT:
        _repeated.popitem(last=False)


@lru_cache(4096)
def _read(text: bytes) -> Call:
    kind, name, ranks, *rest = json.loads(text)
    return Call(kind, name, None if ranks is None else tuple(ranks), *rest)


ffi.register(_handle)
# Else a compiled program returns before it has run, and JAX raises its failure only where a result is read. JAX looks
# at this when it makes its first array; if there is one already, the next collective raises it (`raise_pending`).
jax.config.update("jax_cpu_enable_async_dispatch", False)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_compiled(call: Call, shapes: tuple[_Shape, ...], leaves: Sequence[Any]) -> list[Any]:
    """Return a call of the compiled program that makes arrays of these shapes, of the dtypes of what goes in."""
    text, batched = json.dumps(call), "broadcast_all" if call.kind in ALIKE else "sequential"
    if call.compression is None:
        return ffi.call(text, leaves, shapes, batched=batched)
    whole = custom_vmap(lambda *given: ffi.call(text, given, shapes, batched=batched))
    whole.def_vmap(_refuse_batch)
    return whole(*leaves)  # type: ignore[no-any-return]


def _refuse_batch(*_: Any) -> Any:
    raise ConfigError("compressed gradients cannot be mapped by vmap: map what computes them, not the transformation")


def _forward(call: Call, shapes: tuple[_Shape, ...], leaves: Sequence[Any]) -> tuple[list[Any], list[_Shape]]:
    return run_compiled(call, shapes, leaves), [each.shape for each in leaves]


def _backward(
    call: Call, _: tuple[_Shape, ...], shapes: Sequence[_Shape], cotangents: Sequence[Any]
) -> tuple[list[Any]]:
    if call.compression is not None or call.op not in (AVERAGE.value, SUM.value, ReproducibleSum):
        raise ConfigError(f"no gradient flows through {call.kind} with op {call.op}; use average or sum")
    made = list(cotangents)
    floating = [number for number, each in enumerate(cotangents) if each.dtype != jax.dtypes.float0]
    if floating:
        given, wanted = [cotangents[number] for number in floating], [shapes[number] for number in floating]
        for number, each in zip(floating, _adjoint(call, wanted, given), strict=True):
            made[number] = each
    return (made,)


run_compiled.defvjp(_forward, _backward)


def _adjoint(call: Call, shapes: Sequence[_Shape], cotangents: Sequence[Any]) -> Sequence[Any]:
    """Return the gradients of a call's arrays, which have these shapes; see `ringreduce.training.differentiable`."""
    process_set = SETS[call.ranks]
    conventions = process_set.communicator.config.conventions
    back, like = call._replace(name=f"gradient of {call.name}"), tuple(each.shape for each in cotangents)
    if call.kind in ("allreduce", "alltoall"):
        return run_compiled(back, like, cotangents)  # type: ignore[no-any-return]
    if call.kind == "reducescatter":
        size = process_set.size()
        factor = call.prescale * call.postscale * conventions.scattered_gradient_factor(size)
        factor /= size if call.op == AVERAGE.value else 1
        gathered = run_compiled(Call("allgather", back.name, call.ranks), tuple(map(tuple, shapes)), cotangents)
        return [each * factor for each in gathered]
    kind = "allreduce" if call.kind == "allgather" else "gradient of broadcast"
    totals = run_compiled(back._replace(kind=kind, op=conventions.gradient_op.value), like, cotangents)
    if call.kind == "allgather":
        first = process_set.rank()
        return [total[first * shape[0] :][: shape[0]] for total, shape in zip(totals, shapes, strict=True)]
    return totals  # type: ignore[no-any-return]


#: Where it is depends on the version of JAX.
_trace_state = getattr(core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state

#: The traces that are under way, each with its number of collectives, which numbers those of one line.
_traces: deque[tuple[Any, list[int]]] = deque(maxlen=16)


def name_here(kind: str, leaves: Sequence[Any]) -> str | None:
    """Return the name of a collective that the program gave none: None, unless the arrays are those of a trace.

    Then it is the line of the program, and the collective's number in the trace.
    """
    if not _is_traced(leaves):
        return None
    trace = _trace_state(convention="ringreduce")
    count = next((count for other, count in _traces if other == trace), None)
    if count is None:
        count = [0]
        _traces.append((trace, count))
    count[0] += 1
    place = place_of(program_stack(1)).rpartition("/")[2]
    return f"{kind} {count[0]} compiled at {place}"


def _is_traced(leaves: Sequence[Any]) -> bool:
    return any(isinstance(each, jax.core.Tracer) for each in leaves)


# ---- what programs call ----


def _collective(
    tree: Any,
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    op: Op = SUM,
    root: int | None = None,
    wire: str | None = None,
    **factors: Any,
) -> Any:
    """Carry out a collective on all arrays of a tree, now or in the program that is being traced.

    Args:
        tree, kind, name, process_set, op, wire: as given.
        root: as a rank of the world.
        factors: ``prescale`` and ``postscale``.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    ffi.raise_pending()
    name = name or name_here(kind, leaves)
    with RequestBuilder(kind, name, process_set):
        leaves = [_usable(each) for each in leaves]
        chosen = ReduceOp.parse(op) if kind == "reducescatter" else chosen_op(op, None)
        word = chosen.value if isinstance(chosen, ReduceOp) else chosen
        sender = -1 if root is None else process_set.rank_of(root)
        scales: dict[str, Any] = {each: real_number(f"{each}_factor", factor) for each, factor in factors.items()}
        call = Call(kind, name, ranks_of(process_set), word, root=sender, wire=wire, **scales)
        shapes = tuple(_result_shape(kind, each.shape, process_set) for each in leaves)
    if _is_traced(leaves):
        return jax.tree.unflatten(structure, run_compiled(call, shapes, leaves))
    results = request_of(call, [np.asarray(each) for each in leaves]).carry_out()
    small = kind != "allgather" and sum(each.nbytes for each in results) < _LEAST_PUT_NBYTES
    made = _together(results) if small else jax.device_put(results)
    return jax.tree.unflatten(structure, list(map(_beside, leaves, made)))


#: Programs are made for shapes, which may differ from call to call in an allgather.
_together = jax.jit(lambda arrays: arrays)


def _beside(like: Any, array: Any) -> Any:
    """Return an array on the devices of another one."""
    away = any(device.platform != "cpu" for device in like.devices()) or len(like.devices()) > 1
    return jax.device_put(array, like.sharding) if away else array


def _result_shape(kind: str, shape: tuple[int, ...], process_set: ProcessSet) -> tuple[int, ...]:
    """Return the shape of a result, where ranks have equal shapes."""
    if kind in ("allreduce", "broadcast"):
        return shape
    if not shape:
        raise UnsupportedBufferError(f"{kind} needs arrays with at least one dimension, got a scalar")
    rows, size = shape[0], process_set.size()
    if kind == "allgather":
        rows *= size
    elif kind == "reducescatter":
        rows = rows // size + (process_set.rank() < rows % size)
    elif rows % size:
        raise ConfigError(f"alltoall sends equal parts, but {rows} rows go to {size} ranks")
    return (rows, *shape[1:])


def _usable(leaf: Any) -> Any:
    """Return a leaf as an array of JAX."""
    try:
        array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    except TypeError as error:
        raise UnsupportedBufferError(
            f"a leaf of the tree is of type {type(leaf).__name__}, which is no array; use broadcast_object or "
            "allgather_object for other things"
        ) from error
    DType.of(array.dtype)  # raises for dtypes that collectives do not take
    return array


def allreduce(
    tree: Any,
    op: Op = AVERAGE,
    *,
    name: str | None = None,
    compression: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce arrays over all ranks, element by element, into new ones. Collective.

    Args:
        tree: arrays, or numbers, as a pytree; its shapes and dtypes must agree on all ranks.
        op: `Average`, `Sum`, `Min`, `Max`, `Product`, `Adasum` or `ReproducibleSum`; must agree. Integers are averaged
            toward zero. Gradients flow through `Average`, `Sum` and `ReproducibleSum`.
        name: matches it with the other ranks' calls. None: outside of `jit` calls match in order, inside of it by the
            line of the program.
        compression: the format in which floats travel between nodes: ``"fp16"``, ``"bf16"``, ``"fp8"``, ``"int8"`` or
            ``"int4"``; None: as they are. Must agree. Rounding errors are dropped; `DistributedGradientTransformation`
            keeps them for the next step.
        prescale_factor: multiplies the input; must agree.
        postscale_factor: multiplies the result; must agree.
        process_set: the ranks that take part.
    """
    factors: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
    return _collective(tree, "allreduce", name, process_set, op, wire=compression, **factors)


def reducescatter(
    tree: Any,
    op: Op = AVERAGE,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce arrays over all ranks and return this rank's part of each. Collective.

    Args:
        tree: arrays of at least one dimension, as a pytree, cut along the first as `numpy.array_split` does; shapes and
            dtypes must agree.
        op: as for `allreduce`, but not `Adasum` and `ReproducibleSum`.
        name, prescale_factor, postscale_factor, process_set: as for `allreduce`.
    """
    factors: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
    return _collective(tree, "reducescatter", name, process_set, op, **factors)


def allgather(tree: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the ranks' arrays along the first dimension, in rank order. Collective.

    Args:
        tree: arrays of at least one dimension, as a pytree. Outside of `jit` the first may differ between ranks; the
            others and the dtypes must agree.
        name, process_set: as for `allreduce`.
    """
    return _collective(tree, "allgather", name, process_set)


def alltoall(tree: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Send an equal part of each array to every rank, and concatenate what they sent, in rank order. Collective.

    Args:
        tree: arrays, as a pytree, whose first dimension is a multiple of the number of ranks; shapes and dtypes must
            agree.
        name, process_set: as for `allreduce`.
    """
    return _collective(tree, "alltoall", name, process_set)


def broadcast(
    tree: Any, root_rank: int = 0, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's arrays. Collective.

    Args:
        tree: arrays, as a pytree; shapes and dtypes must agree on all ranks, values count at the root only.
        root_rank: the sender, as a rank of the world; must agree.
        name, process_set: as for `allreduce`.
    """
    return _collective(tree, "broadcast", name, process_set, root=root_rank)
