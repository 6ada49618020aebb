"""Inputs with known answers: every rank and element differs, and every sum and product is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import DTYPES, DType, narrow, new
from ringreduce.common.reduce_ops import ReduceOp

Array = npt.NDArray[Any]


def sample(rank: int, shape: int | tuple[int, ...], dtype: str, salt: int = 0) -> Array:
    """Return the input of ``rank``: small whole numbers, negative ones too where there are any, as a NumPy array.

    Sums over 16 ranks fit into eight bits, so they are exact in every dtype; ``salt`` gives other numbers.
    """
    index = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    mixed = (index * 7 + rank * 5 + salt * 3 + index // 11) % 8
    row = DTYPES[dtype]
    if row.kind == "bool":
        flags: Array = mixed % 3 == 0
        return flags
    if row.kind != "uint":
        mixed = mixed - 3
    values = mixed + 1j * ((mixed + rank) % 3) if row.kind == "complex" else mixed
    return _as_dtype(values, row)


def expected(arrays: list[Array], op: ReduceOp) -> Array:
    """Return what a reduction of the ranks' arrays must give, computed one rank after the other in a wide type."""
    row = DType.of(arrays[0].dtype)
    wide = [_widest(array, row) for array in arrays]
    total = wide[0].copy()
    for each in wide[1:]:
        if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            total = total + each
        elif op is ReduceOp.PRODUCT:
            total = total * each
        else:
            total = np.minimum(total, each) if op is ReduceOp.MIN else np.maximum(total, each)
    if op is ReduceOp.AVERAGE:
        whole = row.integral
        total = np.trunc(total / len(arrays)).astype(np.int64) if whole else total / len(arrays)
    return _as_dtype(total, row)


def _widest(array: Array, row: DType) -> Array:
    if row.kind == "complex":
        return array.astype(np.complex128)
    return array.astype(np.float64 if row.kind == "float" else np.int64)


def _as_dtype(values: Array, row: DType) -> Array:
    made: Array = new(values.shape, row, "numpy")
    if row.name == "bfloat16":
        narrow(values.astype(np.float32), row, made.view(np.uint16))
    else:
        # Integers wrap around, as a sum in their own type does.
        np.copyto(made, values.astype(row.storage))
    return made
