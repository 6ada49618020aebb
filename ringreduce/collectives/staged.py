"""The two-shot for private buffers: pieces pass through staging areas of the board, one barrier each.

`verify` proves the schedule of `two_shot`, which says who reads what. This carries it out in pieces that are copied in,
reduced and copied out while they are in the cache, which `BoundSchedule` cannot.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import Call, Kernels
from ringreduce.common.instruments import Instruments
from ringreduce.common.partition import Partition
from ringreduce.transport.shared.board import STAGE_NBYTES, Board

__all__ = ["Staged", "Staging"]

Array = npt.NDArray[Any]

#: A piece of a private buffer. Smaller ones would stay in L2, but a piece costs a barrier and some 10 us of Python;
#: from 256 KiB to 4 MiB this was the quickest, at all sizes.
_PIECE_NBYTES = STAGE_NBYTES


class _Piece(NamedTuple):
    """A piece of the array, cut into a slice for each rank.

    Attributes:
        mine: the slice that this rank reduces.
        terms: what the ranks have staged of it, in rank order; this rank's is not used.
        result: where its result goes, for the others to fetch.
        given: (slice, this rank's stage) of what others reduce.
        taken: (slice, its owner's result) of the same.
    """

    mine: slice
    terms: list[Array]
    result: Array
    given: list[tuple[slice, Array]]
    taken: list[tuple[slice, Array]]


class Staging:
    """The staging areas for arrays of one length and dtype.

    Args:
        board: the ranks of the node; all of the process set.
        instruments: the observers.
        signature: of the call.
        dtype: of the elements.
        count: how many there are.
        kernels: what reduces.
    """

    reusable = True

    def __init__(
        self,
        board: Board,
        instruments: Instruments,
        signature: str,
        dtype: np.dtype[Any],
        count: int,
        kernels: Kernels,
    ) -> None:
        self.board, self.instruments, self.signature = board, instruments, signature
        self._kernels = kernels
        length, me = _PIECE_NBYTES // dtype.itemsize, board.index
        areas = board.stages(dtype)
        self._pieces = []
        for number, start in enumerate(range(0, count, length)):
            incoming, results = areas[number % 2], areas[2 + number % 2]
            places = Partition.even(min(length, count - start), len(incoming), align=16).segment
            own = places[me]
            piece = _Piece(slice(start + own.start, start + own.stop), [], results[me][own], [], [])
            for rank, place in enumerate(places):
                piece.terms.append(incoming[rank][own])
                if rank != me and place.start < place.stop:
                    part = slice(start + place.start, start + place.stop)
                    piece.given.append((part, incoming[me][place]))
                    piece.taken.append((part, results[rank][place]))
            self._pieces.append(piece)

    def bind(self, source: Array, target: Array) -> Staged:
        """Bind the reduction of ``source`` into ``target``: flat arrays, the same memory or apart."""
        me = self.board.index
        stages: list[list[Call]] = []
        rounds: list[tuple[list[Call], list[Call]]] = []
        for piece in self._pieces:
            stages.append([partial(np.copyto, stage, source[part]) for part, stage in piece.given])
            reduces: list[Call] = []
            if piece.result.size:
                terms = piece.terms.copy()
                terms[me] = source[piece.mine]
                reduces = [partial(self._kernels.combine(terms), piece.result)]
                reduces.append(partial(np.copyto, target[piece.mine], piece.result))
            rounds.append((reduces, [partial(np.copyto, target[part], result) for part, result in piece.taken]))
        return Staged(self, stages, rounds)

    def close(self) -> None:
        """Nothing to give back: the areas are the board's."""


class Staged:
    """The two-shot through staging areas, bound to the arrays of this rank.

    In turn k every rank reduces its slice of piece k from all staging areas, and copies what the others own of piece
    k + 1 into its own; then, after the barrier, it copies the others' results for piece k out. Two areas for each
    direction are enough: nobody is more than one barrier ahead.

    Args:
        staging: the areas.
        stages: by piece, what copies in what the other ranks own.
        rounds: by piece, what reduces this rank's slice, and what fetches the others'.
    """

    def __init__(self, staging: Staging, stages: list[list[Call]], rounds: list[tuple[list[Call], list[Call]]]) -> None:
        self._board, self._instruments, self._signature = staging.board, staging.instruments, staging.signature
        self._rounds = rounds
        self._first = stages[0] if stages else []
        self._later = [*stages[1:], []]

    def copy_in(self) -> None:
        """Stage what the other ranks own of the first piece; may be called before the ranks have met."""
        for call in self._first:
            call()

    def run(self) -> None:
        """Reduce, once every rank has staged its first piece."""
        observed = self._instruments.observers
        for number, (reduces, fetches) in enumerate(self._rounds):
            for call in reduces:
                call()
            for call in self._later[number]:
                call()
            if observed:
                self._instruments.step(f"reduce piece {number + 1}, stage the next")
            self._board.barrier(self._signature)
            if observed:
                self._instruments.step("barrier")
            for call in fetches:
                call()
            if observed:
                self._instruments.step(f"fetch piece {number + 1}")
