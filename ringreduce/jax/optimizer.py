"""Optax transformations that average gradients over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ringreduce.common.arguments import real_number
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, SUM, ReduceOp
from ringreduce.jax.calls import Call, Compressed, checked_compression, ranks_of
from ringreduce.jax.ops import allreduce, name_here, run_compiled
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.compression import BucketCompression
from ringreduce.training.requests import Op, RequestBuilder, chosen_op

__all__ = ["DistributedGradientTransformation", "DistributedState", "RankState"]


@jax.tree_util.register_pytree_with_keys_class
class RankState:
    """Arrays that each rank has of its own, by name; `broadcast_parameters` leaves them as they are."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    def tree_flatten_with_keys(self) -> tuple[Sequence[tuple[Any, Any]], Sequence[str]]:
        names = sorted(self.arrays)
        return [(jax.tree_util.DictKey(name), self.arrays[name]) for name in names], tuple(names)

    @classmethod
    def tree_unflatten(cls, names: Sequence[str], arrays: Sequence[Any]) -> RankState:
        return cls(dict(zip(names, arrays, strict=True)))


class DistributedState(NamedTuple):
    """The state of a `DistributedGradientTransformation` that compresses gradients.

    Attributes:
        inner: that of the transformation it wraps.
        lost: what compression has not sent yet.
    """

    inner: Any
    lost: RankState


def DistributedGradientTransformation(  # noqa: N802  # it stands for a class, as Horovod's do
    tx: optax.GradientTransformation,
    op: Op = AVERAGE,
    compression: Any = None,
    process_set: ProcessSet = global_process_set,
    *,
    gradient_predivide_factor: float = 1.0,
    name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that averages gradients over the ranks and passes them on to another one.

    It may be used inside and outside of `jit`. Its ``update`` is collective, and so is its ``init`` with a compression.

    Args:
        tx: what the averages go to. Clipping belongs in here, so that it sees the averages.
        op: `Average`, `Sum` or `Adasum`; must agree on all ranks.
        compression: of float32 gradients: the name of a wire format (``"fp16"``, ``"int8"``), `PowerSGD` or `TopK`.
            What it loses is added to the next gradients; the state holds it, each rank its own. Must agree.
        process_set: the ranks that train together.
        gradient_predivide_factor: averages are divided by this before they are summed, and by the rest afterwards.
        name: of the operation, as for `ringreduce.jax.allreduce`.

    Returns:
        A transformation whose state is that of ``tx``, or with a compression a `DistributedState`.

    Raises:
        ConfigError: an argument is wrong.
    """
    with RequestBuilder("DistributedGradientTransformation", name, process_set):
        kind, factor = chosen_op(op, None), real_number("gradient_predivide_factor", gradient_predivide_factor)
        if factor != 1.0 and kind is not AVERAGE:
            raise ConfigError("gradient_predivide_factor is a part of averaging; use it with op=Average")
        wanted = None if compression is None else checked_compression(compression)
        if wanted is not None and kind not in (AVERAGE, SUM):
            raise ConfigError(f"compressed gradients are averaged or summed (op Average or Sum), got {op}")
    made = _Distributed(optax.with_extra_args_support(tx), kind, wanted, process_set, factor, name)
    return optax.GradientTransformationExtraArgs(made.init, made.update)


class _Distributed(NamedTuple):
    """A transformation whose gradients are averaged over the ranks; see `DistributedGradientTransformation`."""

    inner: Any
    op: Op
    compression: BucketCompression | None
    process_set: ProcessSet
    factor: float
    name: str | None

    def init(self, params: Any) -> Any:
        if self.compression is None:
            return self.inner.init(params)
        shapes = [each.shape for each in jax.tree.leaves(params) if _is_compressed(each)]
        compressed = Compressed(self.compression, shapes)
        with RequestBuilder("DistributedGradientTransformation", self.name, self.process_set) as prepare:
            request = prepare.call(compressed.key, compressed.begin)
        lost = {each: jnp.asarray(array) for each, array in request.carry_out().items()}
        return DistributedState(self.inner.init(params), RankState(lost))

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if self.compression is None:
            return self.inner.update(self.reduce(updates), state, params, **extra)  # type: ignore[no-any-return]
        updates, lost = self.compress(self.compression, updates, state.lost)
        updates, changed = self.inner.update(updates, state.inner, params, **extra)
        return updates, DistributedState(changed, lost)

    def reduce(self, updates: Any) -> Any:
        return allreduce(
            updates,
            self.op,
            name=self.name,
            prescale_factor=1.0 / self.factor,
            postscale_factor=self.factor,
            process_set=self.process_set,
        )

    def compress(self, compression: BucketCompression, updates: Any, lost: RankState) -> tuple[Any, RankState]:
        """Return reduced gradients, and what compression loses now; gradients of other dtypes travel as they are."""
        assert isinstance(self.op, ReduceOp)
        leaves, structure = jax.tree.flatten(updates)
        chosen = [number for number, each in enumerate(leaves) if _is_compressed(each)]
        names = sorted(lost.arrays)
        arrays = [*(leaves[number] for number in chosen), *(lost.arrays[each] for each in names)]
        compressed = Compressed(compression, [leaves[number].shape for number in chosen], names)
        kind, ranks = "compressed allreduce", ranks_of(self.process_set)
        name = self.name or name_here(kind, arrays)
        call = Call(kind, name, ranks, self.op.value, compression=compressed.key)
        shapes = tuple(each.shape for each in arrays)
        made = run_compiled(call, shapes, arrays)
        rest = self.reduce([None if number in chosen else each for number, each in enumerate(leaves)])
        for number, each in zip(chosen, made, strict=False):
            rest[number] = each
        return jax.tree.unflatten(structure, rest), RankState(dict(zip(names, made[len(chosen) :], strict=True)))


def _is_compressed(leaf: Any) -> bool:
    return bool(leaf.dtype == jnp.float32)
