"""One-shot and two-shot on one node as fused loops over the board: what `execute` would do, with less around it.

The schedules of `one_shot` and `two_shot` say who reads and writes what, and are what `verify` proves. Small messages
and private buffers want two things that a generic executor cannot give: the data in the same breath as the flag, and
pieces that are copied in, reduced and copied out while they are in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import Kernels, quietly
from ringreduce.partition import Partition, pieces
from ringreduce.transport.board import STAGE_NBYTES, Board, signature_hash

__all__ = ["Mailbox", "OneShot", "Staged"]

Array = npt.NDArray[Any]

#: A piece of a private buffer: what others own of it is copied in, so half of it and the result fit into L2 at P = 2.
_PIECE_NBYTES = 512 << 10
assert _PIECE_NBYTES <= STAGE_NBYTES


class Mailbox:
    """A small collective in one barrier: every rank puts its data beside its flag and reads the others'.

    Args:
        board: the ranks of the node; all of the process set.
        signature: what the user called.
        dtype: the storage type of the elements.
        shape: of what this rank puts into its mailbox; the same on all ranks.
    """

    def __init__(self, board: Board, signature: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._board = board
        self._signature = signature
        self._code = signature_hash(signature)
        self._mailboxes = tuple(board.mailboxes(parity, dtype, shape) for parity in (0, 1))
        self._mine = tuple(mailboxes[board.index] for mailboxes in self._mailboxes)

    def close(self) -> None:
        """Nothing to give back: the mailboxes are the board's."""

    def swap(self, source: Array) -> list[Array]:
        """Give ``source`` to the others and return everyone's, in rank order; valid until the next call.

        A one-dimensional ``source`` may be shorter than the mailbox; the rest holds old data.
        """
        np.copyto(self._mine[self._board.next_parity][: len(source)], source)
        return self._mailboxes[self._board.arrive(self._signature, self._code)]


class OneShot(Mailbox):
    """The allreduce of small arrays, of any strides: every rank reduces all mailboxes in rank order."""

    def __init__(
        self, board: Board, signature: str, dtype: np.dtype[Any], shape: tuple[int, ...], kernels: Kernels
    ) -> None:
        super().__init__(board, signature, dtype, shape)
        self._reduce: tuple[Callable[[Array], object], ...] = tuple(
            kernels.combine(mailboxes) for mailboxes in self._mailboxes
        )

    @quietly
    def run(self, source: Array, target: Array) -> None:
        board = self._board
        np.copyto(self._mine[board.next_parity], source)
        self._reduce[board.arrive(self._signature, self._code)](target)


class Staged:
    """The two-shot for private buffers: pieces pass through staging areas, one barrier each.

    In turn k every rank reduces its slice of piece k from all staging areas, and copies what the others own of piece
    k + 1 into its own; then, after the barrier, it copies the others' results for piece k out. Two areas for each
    direction are enough: nobody is more than one barrier ahead.
    """

    def __init__(self, board: Board, signature: str, dtype: np.dtype[Any], count: int, kernels: Kernels) -> None:
        self._board = board
        self._signature = signature
        self._kernels = kernels
        self._me = board.index
        room = _PIECE_NBYTES // dtype.itemsize
        areas = [board.stages(number, dtype, (room,)) for number in range(4)]
        self._incoming, self._results = areas[:2], areas[2:]
        self._pieces = [_Piece.cut(piece, len(board.members), self._me) for piece in pieces(0, count, room)]

    def close(self) -> None:
        """Nothing to give back: the staging areas are the board's."""

    def copy_in(self, source: Array, number: int = 0) -> None:
        """Stage what the other ranks own of a piece; the first may be staged before the ranks have met."""
        if number < len(self._pieces):
            stage = self._incoming[number % 2][self._me]
            for _, part, place in self._pieces[number].theirs:
                np.copyto(stage[place], source[part])

    def run(self, source: Array, target: Array) -> None:
        """Reduce ``source`` into ``target`` (which may be the same) once every rank has staged its first piece."""
        for number, piece in enumerate(self._pieces):
            self._reduce(source, target, number)
            self.copy_in(source, number + 1)
            self._board.barrier(self._signature)
            results = self._results[number % 2]
            for owner, part, place in piece.theirs:
                np.copyto(target[part], results[owner][place])

    def _reduce(self, source: Array, target: Array, number: int) -> None:
        part, place = self._pieces[number].mine
        result = self._results[number % 2][self._me][place]
        if result.size:
            contributions = [stage[place] for stage in self._incoming[number % 2]]
            contributions[self._me] = source[part]
            self._kernels.combine(contributions)(result)
            np.copyto(target[part], result)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Who reduces what of a piece; each part as a slice of the array and one of the staging area.

    Attributes:
        mine: what this rank reduces.
        theirs: (owner, in the array, in the stage) of what the others reduce, where that is not empty.
    """

    mine: tuple[slice, slice]
    theirs: tuple[tuple[int, slice, slice], ...]

    @classmethod
    def cut(cls, piece: slice, size: int, me: int) -> _Piece:
        places = Partition.even(piece.stop - piece.start, size, align=16).segment
        parts = [slice(piece.start + place.start, piece.start + place.stop) for place in places]
        theirs = tuple(
            (owner, part, place)
            for owner, (part, place) in enumerate(zip(parts, places, strict=True))
            if owner != me and part.start < part.stop
        )
        return cls((parts[me], places[me]), theirs)
