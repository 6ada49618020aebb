"""Adaptive summation: a sum for gradients that point apart, an average for those that agree.

Two vectors a and b become

    (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b

which is their sum where they are orthogonal and their average where they are equal, so that the learning rate need not
change with the number of ranks. More vectors are combined in pairs, then pairs of pairs.

Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, arXiv:2006.02924.

With P ranks and Q the largest power of two up to P, rank Q + i first combines its vector with that of rank i, for each
i below P - Q. Then, among the first Q, ranks whose numbers differ in one bit combine theirs, lowest bit
first. At the end rank i sends the result to rank Q + i. In a pair, a is the vector of the lower rank.

Every rank sends and receives n bytes in each of log2(Q) steps, and where Q < P in two more. (Halving the vectors, as in
the paper, would take 2 n in all; here the partners exchange whole ones, which keeps every layer in one piece.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ringreduce.buffers import Array, Operand, narrow, widen
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import UnsupportedBufferError


def adasum(communicator: Communicator, arrays: Sequence[Any]) -> None:
    """Combine arrays over all ranks by adaptive summation, in place; every rank ends with the same bits. Collective.

    Args:
        communicator: any number of ranks.
        arrays: floating-point arrays of any strides, each with coefficients of its own: one for each layer of a model.
            Shapes and dtypes must agree. 16-bit floats are combined in float32 and rounded once; dot products are taken
            in float64.

    Raises:
        UnsupportedBufferError: an array is not of real floats, or cannot be written to. Nothing has moved then.
    """
    operands = [Operand.of(array) for array in arrays]
    for operand in operands:
        operand.require_writable()
        if operand.dtype.kind != "float":
            raise UnsupportedBufferError(f"Adasum takes real floats, got {operand.dtype.name}")
    bounds = list(accumulate((operand.count for operand in operands), initial=0))
    layers = [slice(start, stop) for start, stop in pairwise(bounds)]
    double = any(operand.dtype.name == "float64" for operand in operands)
    vector: Array = np.empty(bounds[-1], np.float64 if double else np.float32)
    for operand, layer in zip(operands, layers, strict=True):
        flat = operand.flat()
        vector[layer] = widen(flat, operand.dtype) if operand.dtype.half else flat
    vector = _combine_all(communicator, vector, layers)
    for operand, layer in zip(operands, layers, strict=True):
        if operand.dtype.half:
            narrow(vector[layer].astype(np.float32).reshape(operand.shape), operand.dtype, operand.view)
        else:
            np.copyto(operand.view, vector[layer].reshape(operand.shape), casting="same_kind")


def _combine_all(ranks: Communicator, vector: Array, layers: Sequence[slice]) -> Array:
    power = 1 << (ranks.size.bit_length() - 1)
    extra = ranks.size - power
    partner: int | None
    if extra:
        partner = ranks.rank - power if ranks.rank >= power else ranks.rank + power if ranks.rank < extra else None
        vector = _combine_pair(ranks, vector, layers, partner=partner)
    distance = 1
    while distance < power:
        vector = _combine_pair(ranks, vector, layers, partner=ranks.rank ^ distance if ranks.rank < power else None)
        distance *= 2
    if extra:
        result = _exchange(ranks, vector, partner, sends=ranks.rank < power)
        vector = result if ranks.rank >= power else vector
    return vector


def _combine_pair(ranks: Communicator, mine: Array, layers: Sequence[slice], partner: int | None) -> Array:
    """Return the combination of this rank's vector and its partner's; without a partner, the vector."""
    theirs = _exchange(ranks, mine, partner)
    lower = partner is not None and ranks.rank < partner
    coefficients = np.empty((len(layers), 2))
    if lower:
        for index, layer in enumerate(layers):
            coefficients[index] = _coefficients(mine[layer].astype(np.float64), theirs[layer].astype(np.float64))
    # One rank's dot products for both: the last bits of a sum may depend on where in memory its terms are.
    sent = _exchange(ranks, coefficients.reshape(-1), partner, sends=lower)
    if partner is None:
        return mine
    if not lower:
        coefficients = sent.reshape(-1, 2)
    a, b = (mine, theirs) if lower else (theirs, mine)
    combined = np.empty_like(mine)
    for layer, (of_a, of_b) in zip(layers, coefficients, strict=True):
        np.multiply(a[layer], mine.dtype.type(of_a), out=combined[layer])
        combined[layer] += b[layer] * mine.dtype.type(of_b)
    return combined


def _exchange(ranks: Communicator, array: Array, partner: int | None, *, sends: bool = True) -> Array:
    """Exchange arrays with the partner; ``sends``: whether this rank sends its own. All ranks take part."""
    splits = [0] * ranks.size
    if partner is not None and sends:
        splits[partner] = array.size
    received: Array = ranks.alltoall(array if any(splits) else array[:0], splits)[0]
    return received


def _coefficients(a: Array, b: Array) -> tuple[float, float]:
    """Return the factors of a and b; a vector of zeros changes nothing."""
    dot = float(a @ b)
    of_a = float(a @ a)
    of_b = float(b @ b)
    return 1.0 - dot / (2.0 * of_a) if of_a > 0 else 1.0, 1.0 - dot / (2.0 * of_b) if of_b > 0 else 1.0
