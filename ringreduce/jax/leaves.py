"""Leaves of pytrees, as arrays that collectives take; what they do not take is refused with its path and the remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringreduce.buffers import DType
from ringreduce.common.errors import UnsupportedBufferError


def is_sparse(leaf: Any) -> bool:
    """Return whether a part of a tree is a sparse array: to reduce would be its values, but not its indices."""
    sparse = sys.modules.get("jax.experimental.sparse")  # Only a program with such arrays has imported it.
    return sparse is not None and isinstance(leaf, sparse.JAXSparse)


def usable_leaves(
    tree: Any,
    leaves: Sequence[Any],
    use: Callable[[Any], Any],
    is_leaf: Callable[[Any], bool] | None = is_sparse,
) -> list[Any]:
    """Return what a function makes of the leaves of a tree. If it refuses one, the error names its path in the tree."""
    made: list[Any] = []
    try:
        made.extend(map(use, leaves))
    except UnsupportedBufferError as error:
        path, _ = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)[len(made)]
        if not path:
            raise
        raise UnsupportedBufferError(f"{jax.tree_util.keystr(path)}: {error}") from error
    return made


def usable(leaf: Any) -> Any:
    """Return a leaf as an array of JAX.

    Raises:
        UnsupportedBufferError: collectives do not take it.
    """
    if is_sparse(leaf):
        raise UnsupportedBufferError(
            "a sparse array, whose indices may differ between ranks; pass .todense(), or .data if all ranks have the "
            "same indices"
        )
    if isinstance(leaf, (np.ndarray, np.generic)):
        require_numbers(leaf)
        leaf = in_native_order(leaf)
    try:
        array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    except TypeError as error:
        raise UnsupportedBufferError(
            f"a leaf of the tree is of type {type(leaf).__name__}, which is no array; use broadcast_object or "
            "allgather_object for other things"
        ) from error
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise UnsupportedBufferError("random keys are no numbers; pass jax.random.key_data(key)")
    DType.of(array.dtype)  # Raises for dtypes that collectives do not take.
    return array


def require_numbers(array: Any) -> None:
    """Raise `UnsupportedBufferError` if an array of NumPy is not of numbers that collectives take."""
    if array.dtype == jax.dtypes.float0:
        raise UnsupportedBufferError(
            "the gradient of integers (float0) has no values; differentiate with respect to floats alone, without "
            "allow_int"
        )
    if array.dtype.kind in "OSUT":
        raise UnsupportedBufferError(
            f"an array of {'objects' if array.dtype.kind == 'O' else 'strings'} holds no numbers; pad rows of "
            "unequal lengths, or pass each as an array of its own, and use broadcast_object for others"
        )
    DType.of(array.dtype.newbyteorder("="))


def in_native_order(array: Any) -> Any:
    """Return an array of NumPy in this machine's byte order, which JAX and collectives take alone."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
