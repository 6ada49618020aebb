"""The allreduce of pieces that pass through mailboxes, bound to the arrays of a rank."""

from __future__ import annotations

from ringreduce.buffers import Call
from ringreduce.common.instruments import Instruments
from ringreduce.transport.shared.board import Board
from ringreduce.transport.shared.compiled import BARRIER, Instruction


class Staged:
    """The two-shot through mailboxes, bound to the arrays of this rank.

    In turn k every rank reduces its slice of piece k from the areas of all, and copies what the others own of piece
    k + 1 into its own; then, after the barrier, it copies the others' results for piece k out. Two areas for each
    direction are enough: nobody is more than one barrier ahead.

    Args:
        board: the ranks.
        instruments: the observers of steps.
        text: of the signature.
        stages: by piece, what copies in what the other ranks own.
        rounds: by piece, what reduces this rank's slice, and what fetches the others'.
    """

    def __init__(
        self,
        board: Board,
        instruments: Instruments,
        text: str,
        *,
        stages: list[list[Call]],
        rounds: list[tuple[list[Call], list[Call]]],
    ) -> None:
        self._board = board
        self._instruments = instruments
        self._text = text
        self._rounds = rounds
        self._first = stages[0] if stages else []
        self._later = [*stages[1:], []]

    def copy_in(self) -> None:
        for call in self._first:
            call()

    def instructions(self) -> list[list[Instruction]]:
        """Return the instructions before the rendezvous, and then of each round."""
        rounds: list[list[Instruction]] = [
            [*reduces, *self._later[number], BARRIER, *fetches]
            for number, (reduces, fetches) in enumerate(self._rounds)
        ]
        return [[*self._first], *rounds]

    def run(self) -> None:
        observed = self._instruments.observers
        for number, (reduces, fetches) in enumerate(self._rounds):
            for call in reduces:
                call()
            for call in self._later[number]:
                call()
            if observed:
                self._instruments.step(f"reduce piece {number + 1}, stage the next")
            self._board.barrier(self._text)
            if observed:
                self._instruments.step("barrier")
            for call in fetches:
                call()
            if observed:
                self._instruments.step(f"fetch piece {number + 1}")
