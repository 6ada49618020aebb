"""Collectives on pytrees of JAX arrays, inside and outside of `jax.jit`. The arrays of a tree are one operation.

Inside of `jit` a collective is a call of the compiled program; `grad`, `vmap`, `remat`, `scan` and `cond` take it as
any other. Outside it runs at once. Operations have names, as in `ringreduce.torch.ops`. Without one, an operation of a
compiled program is named by its line in the source and its number in the program, so that operations match in
whatever order the ranks run them. JAX leaves out computations whose results nobody uses, and collectives, too: use a
result on all ranks or on none.

Gradients are those of the sum of all ranks' losses, as the chain rule gives them; see `ringreduce.common.conventions`.

All functions raise, besides what they list: `UnsupportedBufferError` and `ConfigError` for arguments; on all ranks
`MismatchError` where these do not agree; `CollectiveTimeoutError`, `PeerLostError`, `ShutdownError`. From a compiled
program JAX raises an error of its own; `error_of` returns ours.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.extend.core import get_opaque_trace_state

from ringreduce.buffers import DType
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.arguments import real_number
from ringreduce.common.call_sites import place_of, program_stack
from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM, ReduceOp
from ringreduce.jax import ffi
from ringreduce.jax.compressed import find
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.requests import Adasum, Op, ReproducibleSum, RequestBuilder, chosen_op, in_words

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

_log = logging.getLogger(__name__)

_Host = npt.NDArray[Any]
_Spec = tuple[tuple[int, ...], str]

#: Smaller results are copied into JAX's memory: an array over other memory takes longer to make.
_LEAST_ALIASED_NBYTES = 4096


class Call(NamedTuple):
    """A collective on a list of arrays, as values that a compiled program can hold.

    Attributes:
        kind: of collective.
        name: of the operation; None: it has none.
        ranks: of the process set; None: all.
        op: how to reduce.
        prescale: multiplies what goes in.
        postscale: multiplies what comes out.
        root: the rank of the set that sends; -1: none does.
        wire: the format in which floats travel between nodes.
        compression: the key of a `Compressed`, which reduces the arrays.
    """

    kind: str
    name: str | None
    ranks: tuple[int, ...] | None
    op: str = SUM.value
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    wire: str | None = None
    compression: str | None = None


#: The process sets that calls have named, by their ranks.
_sets: dict[tuple[int, ...] | None, ProcessSet] = {None: global_process_set}


@lru_cache(4096)
def _read(text: str) -> Call:
    kind, name, ranks, *rest = json.loads(text)
    return Call(kind, name, None if ranks is None else tuple(ranks), *rest)


# ---- on the host's memory ----


def carry_out(call: Call, sources: Sequence[_Host], targets: Sequence[_Host] | None = None) -> Sequence[_Host]:
    """Return what the collective makes of arrays of the host: new ones, or ``targets``."""
    with RequestBuilder(call.kind, call.name, _sets[call.ranks]) as prepare:
        if call.kind == "allreduce":
            given = prepare.new_like(sources) if targets is None else targets
            request = prepare.allreduce(sources, given, call.op, call.prescale, call.postscale, wire=call.wire)
        elif call.kind == "reducescatter":
            request = prepare.reducescatter(sources, ReduceOp(call.op), call.prescale, call.postscale, list)
        elif targets is None and call.kind == "allgather":
            request = prepare.allgather(sources, list)
        elif call.compression is not None and targets is not None:
            compressed = find(call.compression)
            text = f"allreduce({call.op}, {in_words(*sources[: compressed.count])}) as {call.compression}"
            average = call.op == AVERAGE.value
            run = partial(compressed.reduce, sources=sources, targets=targets, average=average)
            request = prepare.call(text, run, sources, targets)
        else:
            outs = [None] * len(sources) if targets is None else targets
            text = f"{call.kind}({call.op}, root {call.root}, {in_words(*(targets or sources))})"
            request = prepare.call(text, partial(_one_by_one, call, sources, outs), sources, targets or ())
    made: Sequence[_Host] = request.carry_out()
    if targets is not None and made is not targets:
        for target, each in zip(targets, made, strict=True):
            if each is not target:
                np.copyto(target, each)
    return made


def _one_by_one(call: Call, sources: Sequence[_Host], outs: Sequence[_Host | None], ranks: Communicator) -> list[_Host]:
    """Make a blocking collective of each array."""
    made = []
    for source, out in zip(sources, outs, strict=True):
        if call.kind == "allgather":
            made.append(ranks.allgather(source, out=out))
        elif call.kind == "alltoall":
            made.append(ranks.alltoall(source, out=out))
        elif call.kind == "broadcast":
            made.append(ranks.broadcast(source, call.root, out=out))
        else:  # the gradient of a broadcast, which is the root's
            made.append(ranks.allreduce(source, call.op, out=out))
            if ranks.rank != call.root:
                made[-1].fill(0)
    return made


# ---- in compiled programs ----


def _handle(text: str, sources: Sequence[_Host], targets: Sequence[_Host], waits: bool) -> None:
    """Carry out a call of a compiled program. If that does not wait, its failure is kept for `raise_pending`."""
    try:
        raise_pending()
        carry_out(_read(text), sources, targets)
    except BaseException as error:
        if not waits and error not in _pending:
            _pending.append(error)
        raise


_pending: deque[BaseException] = deque(maxlen=1)
_failures: deque[tuple[int, BaseException]] = deque(maxlen=16)
_MARK = re.compile(r"\[ringreduce error ([0-9]+)\]")


def _describe(error: BaseException) -> str:
    """Return a text by which `error_of` finds the error again."""
    number = _failures[-1][0] + 1 if _failures else 1
    _failures.append((number, error))
    return f"{type(error).__name__}: {error} [ringreduce error {number}]"


def error_of(error: BaseException) -> BaseException:
    """Return the error of ringreduce that made a compiled program fail; ``error`` itself, if it was another one.

    Args:
        error: that JAX raised, whose text has ours in it.
    """
    found = _MARK.search(str(error))
    original = dict(_failures).get(int(found[1])) if found is not None else None
    if original is None:
        return error
    if original in _pending:
        _pending.clear()
    return original


def raise_pending() -> None:
    """Raise the failure of a compiled program that JAX did not wait for, if nobody has seen it yet."""
    if _pending:
        raise _pending.popleft()


ffi.register(_handle, _describe)
# Else a compiled program returns before it has run, and JAX raises its failure only where a result is read. JAX looks
# at this when it makes its first array; if there is one already, the next collective raises it (`raise_pending`).
jax.config.update("jax_cpu_enable_async_dispatch", False)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_compiled(call: Call, specs: tuple[_Spec, ...], leaves: Sequence[Any]) -> list[Any]:
    """Return a call of the compiled program that makes arrays of these shapes and dtypes."""
    elementwise = call.kind not in ("allgather", "alltoall", "reducescatter")
    described = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in specs]
    return ffi.call(json.dumps(call), leaves, described, batched="broadcast_all" if elementwise else "sequential")


def _forward(call: Call, specs: tuple[_Spec, ...], leaves: Sequence[Any]) -> tuple[list[Any], list[tuple[int, ...]]]:
    return run_compiled(call, specs, leaves), [each.shape for each in leaves]


def _backward(call: Call, specs: tuple[_Spec, ...], shapes: list[Any], cotangents: Sequence[Any]) -> tuple[list[Any]]:
    if call.kind in ("allreduce", "reducescatter") and call.op not in (AVERAGE.value, SUM.value, ReproducibleSum):
        raise ConfigError(f"no gradient flows through {call.kind} with op {call.op}; use average or sum")
    floating = [number for number, each in enumerate(cotangents) if each.dtype != jax.dtypes.float0]
    made = list(cotangents)
    if floating:
        rows = [shapes[number] for number in floating]
        for number, each in zip(floating, _adjoint(call, rows, [cotangents[n] for n in floating]), strict=True):
            made[number] = each
    return (made,)


run_compiled.defvjp(_forward, _backward)


def _adjoint(call: Call, shapes: Sequence[tuple[int, ...]], cotangents: Sequence[Any]) -> list[Any]:
    """Return the gradients of a call's arrays, which have these shapes; see `ringreduce.training.differentiable`."""
    process_set = _sets[call.ranks]
    conventions = process_set.communicator.config.conventions
    back = call._replace(name=f"gradient of {call.name}")
    like = tuple((tuple(each.shape), each.dtype.name) for each in cotangents)
    if call.kind in ("allreduce", "alltoall"):
        return list(run_compiled(back, like, cotangents))
    if call.kind == "reducescatter":
        size = process_set.size()
        factor = call.prescale * call.postscale * conventions.scattered_gradient_factor(size)
        factor /= size if call.op == AVERAGE.value else 1
        whole = tuple((tuple(shape), each.dtype.name) for shape, each in zip(shapes, cotangents, strict=True))
        gathered = run_compiled(Call("allgather", back.name, call.ranks), whole, cotangents)
        return [each * factor for each in gathered]
    op = conventions.gradient_op.value
    if call.kind == "allgather":
        totals = run_compiled(Call("allreduce", back.name, call.ranks, op), like, cotangents)
        first = process_set.rank()
        return [total[first * shape[0] :][: shape[0]] for total, shape in zip(totals, shapes, strict=True)]
    return list(
        run_compiled(Call("gradient of broadcast", back.name, call.ranks, op, root=call.root), like, cotangents)
    )


#: The traces that are under way, each with its number of collectives, which numbers those of one line.
_traces: deque[tuple[Any, list[int]]] = deque(maxlen=16)


def name_here(kind: str) -> str:
    """Return the name of a collective that is traced now: the line of the program, and its number in the trace."""
    trace = get_opaque_trace_state(convention="ringreduce")
    count = next((count for other, count in _traces if other == trace), None)
    if count is None:
        count = [0]
        _traces.append((trace, count))
    count[0] += 1
    place = place_of(program_stack(1)).rpartition("/")[2]
    return f"{kind} {count[0]} compiled at {place}"


# ---- what programs call ----


def _collective(
    tree: Any, kind: str, name: str | None, process_set: ProcessSet, checked: Callable[[], dict[str, Any]] = dict
) -> Any:
    """Carry out a collective on all arrays of a tree, now or in the program that is being traced.

    Args:
        checked: returns fields of the `Call`.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    raise_pending()
    traced = any(isinstance(each, jax.core.Tracer) for each in leaves)
    if traced and name is None:
        name = name_here(kind)
    with RequestBuilder(kind, name, process_set):
        leaves = [_usable(each) for each in leaves]
        call = Call(kind, name, ranks_of(process_set), **checked())
        specs = tuple((_result_shape(kind, each.shape, process_set), each.dtype.name) for each in leaves)
    if traced:
        return jax.tree.unflatten(structure, run_compiled(call, specs, leaves))
    results = carry_out(call, [np.asarray(each) for each in leaves])
    return jax.tree.unflatten(structure, list(map(_array_like, results, leaves)))


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


def ranks_of(process_set: ProcessSet) -> tuple[int, ...] | None:
    """Return how a `Call` names a process set."""
    ranks = None if process_set is global_process_set else tuple(process_set.ranks or ())
    _sets[ranks] = process_set
    return ranks


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


def _array_like(result: _Host, like: Any) -> Any:
    """Return a result as an array of JAX, on the devices of the array that it came from."""
    if result.nbytes < _LEAST_ALIASED_NBYTES or result.dtype.name in ("bool", "bfloat16"):
        array = jnp.asarray(result)
    else:
        array = jnp.from_dlpack(result)
    away = any(device.platform != "cpu" for device in like.devices()) or len(like.devices()) > 1
    return jax.device_put(array, like.sharding) if away else array


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

    def checked() -> dict[str, Any]:
        kind = chosen_op(op, None)
        word = kind.value if isinstance(kind, ReduceOp) else kind
        return {"op": word, **_factors(prescale_factor, postscale_factor), "wire": compression}

    return _collective(tree, "allreduce", name, process_set, checked)


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

    def checked() -> dict[str, Any]:
        return {"op": ReduceOp.parse(op).value, **_factors(prescale_factor, postscale_factor)}

    return _collective(tree, "reducescatter", name, process_set, checked)


def _factors(prescale: float, postscale: float) -> dict[str, float]:
    return {
        "prescale": real_number("prescale_factor", prescale),
        "postscale": real_number("postscale_factor", postscale),
    }


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
    return _collective(tree, "broadcast", name, process_set, lambda: {"root": process_set.rank_of(root_rank)})
