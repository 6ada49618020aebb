"""What training with JAX needs besides reductions: the root's parameters on all ranks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.jax.leaves import in_native_order, require_numbers
from ringreduce.jax.ops import is_key
from ringreduce.jax.optimizer import RankState
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.host import HOST
from ringreduce.training.calls.parameters import broadcast_parameters as _broadcast
from ringreduce.training.calls.requests import RequestBuilder


def broadcast_parameters(tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Return the root's arrays: parameters, the state of an optimizer, random keys. Collective; outside of `jit`.

    Args:
        tree: arrays and numbers, as a pytree; structure, shapes and dtypes must agree on all ranks, values count at the
            root only. What ranks have of their own (`RankState`) stays as it is.
        root_rank: whose values count, as a rank of the world; must agree.
        process_set: the ranks that take part. The others get their own arrays back.

    Returns:
        The same tree, with new arrays; numbers of Python stay such.

    Raises:
        UnsupportedBufferError: a leaf is neither an array nor a number, or is traced by `jit`. The other ranks get a
            `MismatchError`.
        MismatchError: the trees differ between ranks in more than their values.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, RankState))
    with RequestBuilder("broadcast_parameters", None, process_set):
        named = [
            (jax.tree_util.keystr(path), _writable(leaf, jax.tree_util.keystr(path)))
            for path, leaf in paths
            if not isinstance(leaf, RankState)
        ]
    _broadcast(HOST, named, root_rank=root_rank, process_set=process_set)
    arrays = iter(named)
    leaves = [leaf if isinstance(leaf, RankState) else like(next(arrays)[1], leaf) for _, leaf in paths]
    return jax.tree_util.tree_unflatten(structure, leaves)


def _writable(leaf: Any, path: str) -> Any:
    """Return the values of a leaf, at a path in its tree, in memory that may be overwritten."""
    if isinstance(leaf, jax.core.Tracer):
        raise UnsupportedBufferError("broadcast_parameters is called outside of jit; in there, use broadcast")
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        raise UnsupportedBufferError(
            f"{path or 'the leaf'}: broadcast_parameters takes arrays, got {type(leaf).__name__}; use broadcast_object "
            "for other things"
        )
    try:
        require_numbers(np.asarray(leaf))
    except UnsupportedBufferError as error:
        raise UnsupportedBufferError(f"{path or 'the leaf'}: {error}") from error
    return in_native_order(np.array(leaf))


def like(array: Any, leaf: Any) -> Any:
    """Return values as what the leaf is, where it is."""
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jax.device_put(array, leaf.sharding)
    return array if isinstance(leaf, np.ndarray) else type(leaf)(array[()])
