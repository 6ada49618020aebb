"""Compiled calls at a board: their plans in memory, and what Python does where one has waited for long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ringreduce.buffers import Array, address_of
from ringreduce.common.partition import Partition
from ringreduce.native import layout
from ringreduce.native.library import Library
from ringreduce.transport.shared.board import Board, Signature
from ringreduce.transport.shared.board_memory import COUNTERS_LINE, MAILBOX_NBYTES

_HELD_POLLS = 100  # about 3 us
_POLLS = 5000  # about 100 us
_YIELDS = 200  # where ranks outnumber cores
#: How often to poll for as long again: who gives a core of a busy machine away gets it back milliseconds later.
_AGAIN = 20
#: From so many bytes on, other threads may compute in Python while this one adds.
_RELEASED_NBYTES = 64 << 10


class CompiledCalls(NamedTuple):
    """Compiled calls of the ranks of a node, for elements of a dtype and an operation.

    Attributes:
        library: has them.
        kernel: what reduces, of `Library.kernels`.
    """

    library: Library
    kernel: tuple[int, ...]

    def mailed(self, board: Board, entry: Signature, nbytes: int) -> MailedCall:
        """Return an allreduce of so many bytes by mailboxes."""
        room = -(-nbytes // layout.LINE_NBYTES) * layout.LINE_NBYTES
        turns = (
            4 if 4 * room <= MAILBOX_NBYTES else 2 if 2 * room <= MAILBOX_NBYTES else 1
        )  # as `BoardMemory.mailboxes`
        plan = _PlanMemory(
            board,
            entry,
            self.kernel,
            nbytes,
            share=nbytes,
            rest=board.memory.mailbox_addresses(),
            mailbox=(room, turns, MAILBOX_NBYTES),
        )
        return MailedCall(self.library, board, entry.text, plan)

    def two_shot(
        self,
        board: Board,
        entry: Signature,
        sources: Mapping[int, Array],
        targets: Mapping[int, Array],
        others: Sequence[int],
    ) -> TwoShotCall:
        """Return an allreduce in memory that all ranks can touch.

        Args:
            board: the ranks.
            entry: what this one publishes.
            sources, targets: inputs and results, by member.
            others: the places that the others publish.
        """
        target = targets[board.members[0]]
        block = Partition.even(target.size, len(board.members), layout.LINE_NBYTES // target.itemsize).segment[
            board.index
        ]
        views = [each[member] for each in (sources, targets) for member in board.members]
        starts = [address_of(view) + block.start * target.itemsize for view in views]
        share = (block.stop - block.start) * target.itemsize
        plan = _PlanMemory(board, entry, self.kernel, target.nbytes, share=share, rest=[*starts, *others])
        return TwoShotCall(self.library, board, entry.text, plan)


class _PlanMemory:
    """The plan of a compiled call in memory, and its address; see `ringreduce.native.layout`."""

    def __init__(
        self,
        board: Board,
        entry: Signature,
        kernel: tuple[int, ...],
        nbytes: int,
        *,
        share: int,
        rest: Sequence[int],
        mailbox: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        self._scratch = np.empty(layout.SCRATCH_NBYTES, np.uint8)
        size = len(board.members)
        lines = board.memory.addresses.copy()
        mine = lines.pop(board.index)
        crowded = board.waiter.crowded
        fields = {
            layout.SIZE: size,
            layout.INDEX: board.index,
            layout.MINE: mine,
            layout.COUNTERS: mine + COUNTERS_LINE * layout.LINE_NBYTES,
            layout.CODE: entry.code,
            layout.SOURCE: entry.source,
            layout.TARGET: entry.target,
            layout.SCRATCH: address_of(self._scratch),
            layout.COUNT: share // kernel[0],
            layout.HELD_POLLS: 0 if crowded else _HELD_POLLS,
            layout.POLLS: 0 if crowded else _POLLS,
            layout.YIELDS: _YIELDS if crowded else 0,
            layout.RELEASES: int(nbytes >= _RELEASED_NBYTES),
        }
        fields.update(zip((layout.ITEMSIZE, layout.PAIR, layout.FINISH, layout.GROW, layout.END), kernel, strict=True))
        fields.update(zip((layout.ROOM, layout.TURNS, layout.MAILBOX), mailbox, strict=True))
        self._memory = np.zeros(layout.FIELDS + 5 * size, np.int64)
        self._memory[list(fields)] = list(fields.values())
        rest = [*lines, *rest]
        self._memory[layout.FIELDS : layout.FIELDS + len(rest)] = rest
        self.address = address_of(self._memory)


class _CompiledCall:
    def __init__(self, library: Library, board: Board, text: str, plan: _PlanMemory) -> None:
        self._library = library
        self._board = board
        self._text = text
        self._plan = plan  # its memory lives as long as this

    def _finish(self, call: Callable[[int], int], code: int) -> int:
        """Finish a call that is not done, waiting as long as may be; return `DONE` or `MOVED`.

        Args:
            call: calls it again, given where it is to go on.
            code: what it has returned.

        Raises:
            MismatchError, CollectiveTimeoutError, PeerLostError: see `Board`.
        """
        board = self._board
        tries = 0
        while code in (layout.LATE_ENTRY, layout.LATE_BARRIER):
            if tries == _AGAIN or board.waiter.crowded or board.waiter.patient():
                wait = board.wait_for_entries if code == layout.LATE_ENTRY else board.barrier_again
                wait(self._text)
            tries += 1
            code = call(code)
        if code == layout.MISMATCH:
            board.disagree(self._text)
        return code


class MailedCall(_CompiledCall):
    """An allreduce of memory of any kind, by mailboxes."""

    def bound(self, source: int, target: int) -> Callable[[], object]:
        """Return what makes the call from one address to another."""
        mailed = self._library.mailed
        plan = self._plan.address
        go_on = self._go_on

        def run() -> None:
            if code := mailed(plan, source, target, layout.DONE):
                go_on(code, source, target)

        return run

    def into_any(self, source: int) -> Callable[[Array], object]:
        """Return what makes the call from an address to any flat array."""
        mailed = self._library.mailed
        plan = self._plan.address
        go_on = self._go_on

        def run(result: Array) -> None:
            target = address_of(result)
            if code := mailed(plan, source, target, layout.DONE):
                go_on(code, source, target)

        return run

    def _go_on(self, code: int, source: int, target: int) -> None:
        call = partial(self._library.mailed, self._plan.address, source, target)
        if self._finish(call, code) == layout.MOVED:
            self._board.barrier(self._text)
            call(layout.LATE_BARRIER)


class TwoShotCall(_CompiledCall):
    """An allreduce in memory that all ranks can touch, bound to where their arrays are."""

    def run(self) -> bool:
        """Make the call; return whether it is done. If not, all have entered, and arrays are in other places."""
        code = self._library.two_shot(self._plan.address, layout.DONE)
        return not code or not self._finish(partial(self._library.two_shot, self._plan.address), code)
