"""The numbers that ranks exchange in collectives to which each may give any number of rows, and what they mean.

Every rank sends all others a few numbers when a call begins. First the rows of the array for its result; -1: one is
made as large as is needed. Then how many rows it gives: one number for all ranks, or one for each. In a scatter: the
dtype of its part (-1: as the root has it), the number of dimensions, and the shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.buffers import DTYPES, DType
from ringreduce.common.arguments import shape_text
from ringreduce.common.errors import MismatchError, UnsupportedBufferError

_MOST_DIMENSIONS = 32
_DTYPE_NAMES = tuple(DTYPES)


def rows_for(numbers: Sequence[int], rank: int) -> int:
    """Return how many rows a rank gets from the one with these numbers."""
    return numbers[rank + 1] if len(numbers) > 2 else numbers[1]


def received_rows(signature: str, everyone: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Return how many rows a rank gets from each.

    Args:
        signature: of the call.
        everyone: the numbers of all ranks, in rank order.
        rank: who gets the rows.

    Raises:
        MismatchError: on all ranks: on some, the array for the result is too small or too large.
    """
    received = [[rows_for(numbers, rank) for numbers in everyone] for rank in range(len(everyone))]
    if all(numbers[0] in (-1, sum(rows)) for numbers, rows in zip(everyone, received, strict=True)):
        return received[rank]
    texts = {}
    for number, (of_rank, rows) in enumerate(zip(everyone, received, strict=True)):
        wrong = of_rank[0] not in (-1, sum(rows))
        texts[number] = f"{signature}, out has {of_rank[0]} rows, and the result {sum(rows)}" if wrong else signature
    raise MismatchError(texts)


def part_numbers(part: tuple[tuple[int, ...], DType] | None) -> tuple[int, ...]:
    """Return the numbers of a rank in a scatter: dtype and shape of its part; None: as the root has them.

    Raises:
        UnsupportedBufferError: the part has more than 32 dimensions.
    """
    shape, kind = ((), -1) if part is None else (part[0], _DTYPE_NAMES.index(part[1].name))
    if len(shape) > _MOST_DIMENSIONS:
        raise UnsupportedBufferError(f"scatter takes arrays of at most {_MOST_DIMENSIONS} dimensions, got {len(shape)}")
    return (kind, len(shape), *shape, *[0] * (_MOST_DIMENSIONS - len(shape)))


def agreed_part(signature: str, everyone: Sequence[Sequence[int]], root: int) -> list[int]:
    """Return the part that every rank gets in a scatter, for `part_of`.

    Args:
        signature: of the call.
        everyone: the numbers of all ranks, in rank order.
        root: which of them gives the parts.

    Raises:
        MismatchError: on all ranks: some expect other parts than the root gives.
    """
    of_root = tuple(everyone[root])
    if any(tuple(numbers) not in (of_root, _ANY_PART) for numbers in everyone):
        texts = {}
        for rank, of_rank in enumerate(everyone):
            shape, dtype = part_of(_part(of_rank))
            wanted = "" if tuple(of_rank) == _ANY_PART else f", parts of shape {shape_text(shape)}, {dtype.name}"
            texts[rank] = f"{signature[:-1]}{wanted})"
        raise MismatchError(texts)
    return _part(of_root)


def part_of(agreed: Sequence[int]) -> tuple[tuple[int, ...], DType]:
    """Return shape and dtype of what `agreed_part` returned."""
    return tuple(agreed[1:]), DTYPES[_DTYPE_NAMES[agreed[0]]]


def _part(numbers: Sequence[int]) -> list[int]:
    return [numbers[0], *numbers[2 : numbers[1] + 2]]


#: Of a scatter: a rank that takes whatever the root gives.
_ANY_PART = part_numbers(None)
