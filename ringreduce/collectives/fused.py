"""One-shot and two-shot on one node as fused loops over the board: what `execute` would do, with less around it.

The schedules of `one_shot` and `two_shot` say who reads and writes what, and are what `verify` proves. Small messages
and private buffers want two things that a generic executor cannot give: the data in the same breath as the flag, and
pieces that are copied in, reduced and copied out while they are in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import Kernels
from ringreduce.common.instruments import Instruments
from ringreduce.common.partition import Partition, pieces
from ringreduce.transport.shared.board import STAGE_NBYTES, Arrival, Board, signature_hash

__all__ = ["Mailbox", "Staged"]

Array = npt.NDArray[Any]

#: A piece of a private buffer. Smaller ones would stay in L2, but a piece costs a barrier and some 10 us of Python;
#: from 256 KiB to 4 MiB this was the quickest, at all sizes.
_PIECE_NBYTES = STAGE_NBYTES


class Mailbox:
    """A small allreduce in one barrier: every rank puts its data beside its flag and reads the others'.

    Args:
        board: the ranks of the node; all of the process set.
        instruments: who is told of steps.
        signature: what the user called.
        dtype: the storage type of the elements.
        shape: of what this rank puts into its mailbox; the same on all ranks.
        kernels: what reduces.
    """

    def __init__(
        self,
        board: Board,
        instruments: Instruments,
        signature: str,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        kernels: Kernels,
    ) -> None:
        self._board = board
        self._instruments = instruments
        self._arrival = Arrival(signature, signature_hash(signature))
        mailboxes = [board.mailboxes(parity, dtype, shape) for parity in (0, 1)]
        self._mine = tuple(each[board.index] for each in mailboxes)
        self._reduce = tuple(map(kernels.combine, mailboxes))

    def run(self, source: Array, target: Array) -> None:
        """Reduce ``source`` into ``target``, of any strides: every rank reduces all mailboxes in rank order."""
        parity = self._board.number + 1 & 1
        np.copyto(self._mine[parity], source)
        self._board.arrive(self._arrival)
        if self._instruments.observers:
            self._instruments.step("post and meet")
        if target.flags.c_contiguous:
            self._reduce[parity](target)
        else:  # 16-bit kernels take no odd strides, and NumPy's differ in which of two NaNs they keep
            result = np.empty(target.shape, target.dtype)
            self._reduce[parity](result)
            np.copyto(target, result)
        if self._instruments.observers:
            self._instruments.step("reduce")


class Staged:
    """The two-shot for private buffers: pieces pass through staging areas, one barrier each.

    In turn k every rank reduces its slice of piece k from all staging areas, and copies what the others own of piece
    k + 1 into its own; then, after the barrier, it copies the others' results for piece k out. Two areas for each
    direction are enough: nobody is more than one barrier ahead.
    """

    def __init__(
        self,
        board: Board,
        instruments: Instruments,
        signature: str,
        dtype: np.dtype[Any],
        count: int,
        kernels: Kernels,
    ) -> None:
        self._board = board
        self._instruments = instruments
        self._signature = signature
        self._kernels = kernels
        length = _PIECE_NBYTES // dtype.itemsize
        areas = [board.stages(number, dtype, (length,)) for number in range(4)]
        self._pieces = [
            _Piece.of(piece, board.index, incoming=areas[number % 2], results=areas[2 + number % 2])
            for number, piece in enumerate(pieces(0, count, length))
        ]

    def copy_in(self, source: Array, number: int = 0) -> None:
        """Stage what the other ranks own of a piece; the first may be staged before the ranks have met."""
        if number < len(self._pieces):
            for part, stage in self._pieces[number].sent:
                np.copyto(stage, source[part])

    def run(self, source: Array, target: Array) -> None:
        """Reduce ``source`` into ``target`` (which may be the same) once every rank has staged its first piece."""
        board, combine, instruments = self._board, self._kernels.combine, self._instruments
        for number, piece in enumerate(self._pieces, start=1):
            if piece.result.size:
                combine([*piece.before, source[piece.mine], *piece.after])(piece.result)
                np.copyto(target[piece.mine], piece.result)
            self.copy_in(source, number)
            if instruments.observers:
                instruments.step(f"reduce piece {number}, stage the next")
            board.barrier(self._signature)
            if instruments.observers:
                instruments.step("barrier")
            for part, result in piece.received:
                np.copyto(target[part], result)
            if instruments.observers:
                instruments.step(f"fetch piece {number}")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece, cut into a slice for each rank; slices are of the array, everything else is in staging areas.

    Attributes:
        mine: the slice that this rank reduces.
        before: what lower ranks have staged of it.
        after: what higher ranks have staged of it.
        result: where its result goes, for the others to fetch.
        sent: (slice, this rank's stage) of what others reduce.
        received: (slice, its owner's result) of the same.
    """

    mine: slice
    before: tuple[Array, ...]
    after: tuple[Array, ...]
    result: Array
    sent: tuple[tuple[slice, Array], ...]
    received: tuple[tuple[slice, Array], ...]

    @classmethod
    def of(cls, piece: slice, me: int, incoming: list[Array], results: list[Array]) -> _Piece:
        places = Partition.even(piece.stop - piece.start, len(incoming), align=16).segment
        parts = [slice(piece.start + place.start, piece.start + place.stop) for place in places]
        others = [rank for rank, part in enumerate(parts) if rank != me and part.start < part.stop]
        return cls(
            mine=parts[me],
            before=tuple(stage[places[me]] for stage in incoming[:me]),
            after=tuple(stage[places[me]] for stage in incoming[me + 1 :]),
            result=results[me][places[me]],
            sent=tuple((parts[rank], incoming[me][places[rank]]) for rank in others),
            received=tuple((parts[rank], results[rank][places[rank]]) for rank in others),
        )
