"""Loads and stores of a block in the memory of a node, piece by piece, so that a piece is stored while it is cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ringreduce.buffers import Array, Call, address_of, copying
from ringreduce.common.partition import pieces
from ringreduce.transport.shared.private import PrivateMemory

#: (rank, what is at hand of it) of several ranks.
Views = Sequence[tuple[int, Any]]

#: Bytes of direct accesses that are combined and copied on at a time: few enough to stay in L2.
INNER_NBYTES = 256 << 10


def load_and_store(
    result: Array,
    loads: Views,
    stores: Views,
    combine: Callable[[Sequence[Array]], Callable[[Array], object]] | None,
    copies: Callable[[int], Array],
    *,
    in_place: bool,
) -> Iterator[Call]:
    """Bind what one rank does with one block.

    Args:
        result: gets the block, and is what is stored.
        loads: (rank, memory) of what is reduced, in the order of ranks, this one's among them: arrays, or memory of
            other processes. Where nothing is reduced, of what is copied to the result, if anything is.
        stores: (rank, memory) of where the result is stored.
        combine: binds the reduction of pieces; None: nothing is reduced.
        copies: returns, for a rank, `INNER_NBYTES` bytes into which pieces of memory of its process are copied.
        in_place: whether the result is stored to the memory of the terms.
    """
    touchable = all(isinstance(view, np.ndarray) for _, view in loads)
    # The sum may grow in the memory of the lowest rank, and takes no scratch from the cache: it goes there anyway.
    grows = in_place and touchable and combine is not None and len(stores) == len(loads) - 1 > 1
    limit = INNER_NBYTES // result.itemsize if combine or stores else result.size
    for piece in pieces(0, result.size, max(1, limit)):
        target = result[piece]
        if combine is None:
            for _, view in loads:
                yield view[piece].copy_to(target) if isinstance(view, PrivateMemory) else copying(target, view[piece])
        else:
            terms: list[Array] = []
            for rank, view in loads:
                # The same object, if it is the same memory: then NumPy need not find that out in each call.
                terms.append(target if view is result else view[piece])
                if isinstance(view, PrivateMemory):
                    terms[-1] = copies(rank)[: target.nbytes].view(target.dtype)
                    yield view[piece].copy_to(terms[-1])
            yield partial(combine(terms), terms[0] if grows else target)
            if grows:
                yield from [copying(term, terms[0]) for term in terms[1:]]
                continue
        for _, view in stores:
            if isinstance(view, PrivateMemory):
                yield view[piece].copy_from(target)
            elif address_of(view[piece]) != address_of(target):
                yield copying(view[piece], target)
