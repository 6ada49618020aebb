"""Collectives on pytrees of JAX arrays, inside and outside of `jax.jit`.

Inside of `jit` a collective is a call of the compiled program; `scan` and `cond` take it as any other, `grad`, `vmap`
and `remat`, too, unless its docstring excludes them. Outside it runs at once. The arrays of a tree are one operation;
in a compiled program, an allreduce of a large tree is several, last arrays first. Operations have names, as in
`ringreduce.torch.ops`. Without one, an operation of a compiled program is named by its line in the source and its
number in the program. A program makes its collectives in the order in which they were traced, whatever else it computes
on some ranks. JAX drops operations whose results are unused, collectives, too, except `reduce` and `gather`: use a
result on all ranks or on none.

Gradients are those of the sum of all ranks' losses, as the chain rule gives them; see `ringreduce.common.conventions`.

All functions raise, besides what they list: `UnsupportedBufferError` and `ConfigError` for arguments; on all ranks
`MismatchError` where these do not agree; `CollectiveTimeoutError`, `PeerLostError`, `ShutdownError`. From a compiled
program JAX raises an error of its own, a RuntimeError or a ValueError; `error_of` returns ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ringreduce.buffers import DType
from ringreduce.collectives.sums.prefix import require_no_average
from ringreduce.common.arguments import real_number
from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.reduce_ops import AVERAGE, SUM, ReduceOp
from ringreduce.jax.calls import (
    ALIKE,
    BROADCAST_GRADIENT,
    CompiledCall,
    Shape,
    is_traced,
    name_here,
    ranks_of,
    request_of,
    run_compiled,
)
from ringreduce.jax.leaves import is_sparse, usable, usable_leaves
from ringreduce.jax.steps import StepReduction
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.error_text import raise_unseen
from ringreduce.training.binding.host import HOST
from ringreduce.training.binding.identity import Identity
from ringreduce.training.calls.differentiable import Differentiable
from ringreduce.training.calls.requests import RequestBuilder
from ringreduce.training.options.options import Op, chosen_op

#: Smaller results become arrays of JAX all together, by a program that returns its arguments: quicker than one by one.
_LEAST_PUT_NBYTES = 1 << 20


class _Collectives(Differentiable):
    """Collectives on arrays of JAX, at once or in the program that is being traced: there, ranks have equal shapes.

    Attributes:
        identity: of the arrays; None: they have none.
        step: whose gradients the arrays are; None: they are no gradients.
    """

    __slots__ = ("identity", "step")

    def __init__(
        self, *given: Any, identity: Identity | None = None, step: StepReduction | None = None, **how: Any
    ) -> None:
        super().__init__(*given, **how)
        self.identity = identity
        self.step = step

    def exchange(self, values: Sequence[Any]) -> Sequence[Any]:
        """Send an equal part of each array to every rank."""
        return self._flow("alltoall", None, adjoint=_Collectives.exchange, values=values)

    def broadcast(self, values: Sequence[Any], root: int) -> Sequence[Any]:
        """Return the arrays of the root, a rank of the world."""
        return self._flow(
            "broadcast", None, adjoint=lambda back, grads: back.broadcast_back(grads, root), values=values, root=root
        )

    def broadcast_back(self, values: Sequence[Any], root: int) -> Sequence[Any]:
        """Return what becomes of the gradients of broadcast arrays: their total on the root, zeros on the others."""
        how: dict[str, Any] = {"op": self._conventions.gradient_op, "root": root}
        return self._flow(
            BROADCAST_GRADIENT, None, adjoint=lambda back, grads: back.broadcast(grads, root), values=values, **how
        )

    def reduce(self, values: Sequence[Any], op: Op, root: int) -> Sequence[Any]:
        """Return what the arrays of all ranks come to on the root, a rank of the world; on others their own arrays."""
        return self._one_way("reduce", "allreduce", values, op=op, root=root, always=True)

    def gather(self, values: Sequence[Any], root: int) -> Sequence[Any]:
        """Concatenate arrays along their first dimension on the root; return on other ranks their own arrays."""
        return self._one_way("gather", "allgather", values, root=root, always=True)

    def scatter(self, values: Sequence[Any], root: int) -> Sequence[Any]:
        """Return this rank's parts of the root's arrays."""
        return self._one_way("scatter", "alltoall", values, root=root)

    def scan(self, values: Sequence[Any], op: Op) -> Sequence[Any]:
        """Reduce arrays over the ranks up to this one."""
        with RequestBuilder("scan", self._name, self._process_set):
            require_no_average(ReduceOp.parse(op), "scan")
        return self._one_way("scan", "allgather", values, op=op)

    def _one_way(self, kind: str, instead: str, values: Sequence[Any], **how: Any) -> Sequence[Any]:
        """Carry out a collective that no gradient flows through.

        To ask for one is an error: without an adjoint, a backward pass would leave it out where no result is used.
        """

        def refuse(*_: object) -> NoReturn:
            raise ConfigError(f"no gradient flows through {kind}; use {instead}, or jax.lax.stop_gradient")

        return self._flow(kind, None, adjoint=refuse, values=values, **how)

    def _times(self, value: Any, factor: float) -> Any:
        wide = value.astype(jnp.float32) if DType.of(value.dtype).half else value
        return (wide * factor).astype(value.dtype)

    def _joined(self, parts: Sequence[Any], shapes: Sequence[Any]) -> Sequence[Any]:
        op = self._conventions.gradient_op
        return self._flow(
            "allgather",
            None,
            adjoint=lambda back, grads: back.reducescatter(grads, op, 1.0, 1.0),
            values=parts,
            shapes=shapes,
        )

    def _first_rows(self, rows: Sequence[int]) -> list[int]:
        return [self._process_set.rank() * row_count for row_count in rows]

    def _flow(
        self,
        kind: str,
        prepared: object,
        adjoint: Callable[[Any, Sequence[Any]], Sequence[Any]],
        values: Sequence[Any],
        shapes: Sequence[Shape] | None = None,
        *,
        always: bool = False,
        **how: Any,
    ) -> Sequence[Any]:
        with RequestBuilder(kind, self._name, self._process_set):
            call = self._call(kind, **how)
            traced = is_traced(values)
            shapes = shapes or [
                _result_shape(call, value.shape, process_set=self._process_set, traced=traced) for value in values
            ]
        if traced:
            back = partial(adjoint, self._back())
            return run_compiled(call, shapes, adjoint=back, leaves=values, step=self.step, always=always)
        if self.step is not None:
            self.step.look(values, call.operation)
        return _run_at_once(call, values)

    def _call(
        self,
        kind: str,
        op: Op = SUM,
        prescale: Any = 1.0,
        postscale: Any = 1.0,
        wire: str | None = None,
        root: int | None = None,
    ) -> CompiledCall:
        """Return a collective whose arguments are checked."""
        chosen = ReduceOp.parse(op) if kind in ("reduce", "reducescatter", "scan") else chosen_op(op, None)
        word = chosen.value if isinstance(chosen, ReduceOp) else chosen
        scales = real_number("prescale_factor", prescale), real_number("postscale_factor", postscale)
        sender = -1 if root is None else self._process_set.rank_of(root)
        made = CompiledCall(kind, self._name, ranks_of(self._process_set), word, *scales, wire, sender)
        return made._replace(identity=self.identity)


def _run_at_once(call: CompiledCall, leaves: Sequence[Any]) -> Sequence[Any]:
    results = request_of(call, [np.asarray(leaf) for leaf in leaves]).carry_out()
    small = call.kind not in ("allgather", "gather") and sum(result.nbytes for result in results) < _LEAST_PUT_NBYTES
    placed = _together(results) if small else jax.device_put(results)
    return list(map(_beside, leaves, placed))


#: Programs are made for shapes, which may differ from call to call in an allgather or a gather.
_together = jax.jit(lambda arrays: arrays)


def _beside(like: Any, array: Any) -> Any:
    """Return an array on the devices of another one."""
    return array if array.devices() == like.devices() else jax.device_put(array, like.sharding)


def _result_shape(call: CompiledCall, shape: Shape, process_set: ProcessSet, traced: bool) -> Shape:
    """Return the shape of a result, where ranks have equal shapes."""
    kind = call.kind
    if kind in ALIKE:
        return shape
    if not shape:
        raise UnsupportedBufferError(f"{kind} needs arrays with at least one dimension, got a scalar")
    rows = shape[0]
    size = process_set.size()
    if kind == "allgather" or (kind == "gather" and process_set.rank() == call.root):
        rows *= size
    elif kind == "gather":
        pass
    elif kind == "reducescatter":
        if traced and 0 < rows < size:  # XLA leaves out what makes nothing, which would be on some ranks alone
            raise ConfigError(f"in jit, reducescatter needs a row for each of the {size} ranks, got {rows}")
        rows = rows // size + (process_set.rank() < rows % size)
    elif rows % size:
        raise ConfigError(f"{kind} sends equal parts, but {rows} rows go to {size} ranks")
    elif kind == "scatter":
        rows //= size
    return (rows, *shape[1:])


# ---- what programs call ----


def _on_leaves(
    collective: Callable[..., Sequence[Any]],
    kind: str,
    tree: Any,
    name: str | None,
    process_set: ProcessSet,
    *given: Any,
    identity: Identity | None = None,
    step: StepReduction | None = None,
) -> Any:
    """Carry out a collective on all arrays of a tree, now or in the program that is being traced.

    Args:
        collective: of `_Collectives`.
        kind, tree, name, process_set: as usual.
        *given: the other arguments of the collective.
        identity: of the tree, if it has one.
        step: whose gradients the arrays are; None: they are no gradients.
    """
    is_leaf = None if kind == "broadcast" else is_sparse
    leaves, structure = jax.tree.flatten(tree, is_leaf)
    if not leaves:
        return tree
    raise_unseen()
    name = name or name_here(kind, leaves)
    with RequestBuilder(kind, name, process_set):
        keys = [is_key(leaf) for leaf in leaves]
        values = usable_leaves(tree, leaves, lambda leaf: _words(kind, leaf) if is_key(leaf) else usable(leaf), is_leaf)
    collectives = _Collectives(HOST, name, process_set, identity=identity, step=step)
    results = collective(collectives, values, *given)
    made = [_as_key(result, leaf) if key else result for key, leaf, result in zip(keys, leaves, results, strict=True)]
    return jax.tree.unflatten(structure, made)


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is a random key, or several."""
    return isinstance(leaf, jax.Array) and bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _words(kind: str, key: Any) -> Any:
    """Return random keys as the integers that they are made of; those of a key are the last dimension."""
    if kind not in ("allgather", "alltoall", "broadcast", "gather", "scatter"):
        raise UnsupportedBufferError(
            f"{kind} computes with numbers, and random keys are none; use broadcast or allgather, or pass "
            "jax.random.key_data(key)"
        )
    if kind != "broadcast" and not key.ndim:
        raise UnsupportedBufferError(f"{kind} needs arrays with at least one dimension, got one random key: key[None]")
    return jax.random.key_data(key)


def _as_key(words: Any, like: Any) -> Any:
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))


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
    how = op, prescale_factor, postscale_factor, compression
    return _on_leaves(_Collectives.allreduce, "allreduce", tree, name, process_set, *how)


def reduce_gradients(
    step: StepReduction | None,
    tree: Any,
    op: Op,
    *,
    name: str | None = None,
    compression: str | None = None,
    predivide_factor: float,
    process_set: ProcessSet,
    identity: Identity | None,
) -> Any:
    """Do what `allreduce` does for gradients. Collective.

    Args:
        step: whose gradients these are; None: they are not looked at.
        tree, op, name, compression, process_set: as for `allreduce`.
        predivide_factor: divides the gradients before they are summed, and multiplies the sums.
        identity: tells the gradients from others, on all ranks.
    """
    how = op, 1.0 / predivide_factor, predivide_factor, compression
    return _on_leaves(_Collectives.allreduce, "allreduce", tree, name, process_set, *how, identity=identity, step=step)


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
            dtypes must agree. Inside of `jit` there must be a row for each rank.
        op: as for `allreduce`, but not `Adasum` and `ReproducibleSum`.
        name, prescale_factor, postscale_factor, process_set: as for `allreduce`.
    """
    how = op, prescale_factor, postscale_factor
    return _on_leaves(_Collectives.reducescatter, "reducescatter", tree, name, process_set, *how)


def allgather(tree: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the ranks' arrays along the first dimension, in rank order. Collective.

    Args:
        tree: arrays of at least one dimension, random keys too, as a pytree. Outside of `jit` the first may differ
            between ranks; the others and the dtypes must agree.
        name, process_set: as for `allreduce`.
    """
    return _on_leaves(_Collectives.allgather, "allgather", tree=tree, name=name, process_set=process_set)


def alltoall(tree: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Send an equal part of each array to every rank, and concatenate what they sent, in rank order. Collective.

    Args:
        tree: arrays, random keys too, as a pytree, whose first dimension is a multiple of the number of ranks; shapes
            and dtypes must agree.
        name, process_set: as for `allreduce`.
    """
    return _on_leaves(_Collectives.exchange, "alltoall", tree=tree, name=name, process_set=process_set)


def broadcast(
    tree: Any, root_rank: int = 0, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's arrays. Collective.

    Args:
        tree: arrays, random keys too, as a pytree; shapes and dtypes must agree on all ranks, values count at the root
            only.
        root_rank: the sender, as a rank of the world; must agree.
        name, process_set: as for `allreduce`.
    """
    return _on_leaves(_Collectives.broadcast, "broadcast", tree, name, process_set, root_rank)


def reduce(
    tree: Any,
    op: Op = AVERAGE,
    root_rank: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce arrays over all ranks, element by element; the root alone gets the result. Collective.

    The compiled program makes it, whether its result is used or not. No gradient flows through it. `jax.checkpoint`
    refuses it, and so does `vmap` on a GPU.

    Args:
        tree: arrays, or numbers, as a pytree; its shapes and dtypes must agree on all ranks.
        op: as for `allreduce`, but not `Adasum` and `ReproducibleSum`.
        root_rank: the receiver, as a rank of the world; must agree.
        name, process_set: as for `allreduce`.

    Returns:
        The results at the root; on other ranks their own arrays.
    """
    return _on_leaves(_Collectives.reduce, "reduce", tree, name, process_set, op, root_rank)


def gather(
    tree: Any, root_rank: int = 0, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the ranks' arrays along the first dimension, in rank order; the root alone gets them. Collective.

    See `reduce` for compiled programs.

    Args:
        tree: as for `allgather`.
        root_rank: the receiver, as a rank of the world; must agree.
        name, process_set: as for `allreduce`.

    Returns:
        The concatenated arrays at the root; on other ranks their own.
    """
    return _on_leaves(_Collectives.gather, "gather", tree, name, process_set, root_rank)


def scatter(
    tree: Any, root_rank: int = 0, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Cut the root's arrays into equal parts along the first dimension, and give each rank one. Collective.

    No gradient flows through it.

    Args:
        tree: arrays, random keys too, as a pytree, whose first dimension is a multiple of the number of ranks; shapes
            and dtypes must agree on all ranks, values count at the root only.
        root_rank: the sender, as a rank of the world; must agree.
        name, process_set: as for `allreduce`.
    """
    return _on_leaves(_Collectives.scatter, "scatter", tree, name, process_set, root_rank)


def scan(tree: Any, op: Op = SUM, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Reduce arrays over the ranks up to each rank: rank r gets what ranks 0 to r come to. Collective.

    No gradient flows through it. It uses the communicator of blocking collectives, as `ringreduce.scan` does: no other
    thread may make one of these at the same time.

    Args:
        tree: as for `allreduce`.
        op: as for `allreduce`, but not `Average`, `Adasum` and `ReproducibleSum`.
        name, process_set: as for `allreduce`.
    """
    return _on_leaves(_Collectives.scan, "scan", tree, name, process_set, op)
