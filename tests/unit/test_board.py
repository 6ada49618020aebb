"""The board: barriers, mailboxes, and the errors that all members of a node see alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from ringreduce.common.call_sites import AbortReason
from ringreduce.common.errors import CollectiveTimeoutError, PeerLostError, TransportError
from ringreduce.native.layout import MAILBOX_NBYTES
from ringreduce.testing import caught, run_threads
from ringreduce.transport.memory import MemorySegments, MemoryWorld
from ringreduce.transport.shared.arena import Arena, place_in
from ringreduce.transport.shared.board import NOWHERE, Board, Signature, allocate_part, signature_hash
from ringreduce.transport.shared.board_memory import MAILED_NBYTES
from ringreduce.transport.waiting import Waiter

T = TypeVar("T")

#: From another process, on another day: all ranks must compute the same.
BARRIER_HASH = 7000561993883189029


class MortalSegments(MemorySegments):
    """Segments of ranks whose processes may be said to have ended."""

    dead: frozenset[int] = frozenset()

    def alive(self, rank: int) -> bool:
        return rank not in self.dead


def on_boards(
    size: int, function: Callable[[Board], T], timeout_s: float = 20.0, dead: frozenset[int] = frozenset()
) -> list[T]:
    """Call ``function`` with the board of each rank, on threads; ranks are numbered 10, 11, ... in the process set."""
    world = MemoryWorld(10 + size)
    members = [10 + index for index in range(size)]
    arenas, waiters = [], []
    for member in members:
        segments = MortalSegments(world, member)
        segments.dead = dead
        arenas.append(Arena(segments))
        waiters.append(Waiter(timeout_s, crowded=True))
    places = [allocate_part(arena) for arena in arenas]
    boards = [
        Board(arena, members, places, member, waiter)
        for arena, member, waiter in zip(arenas, members, waiters, strict=True)
    ]

    def fail() -> None:
        for waiter in waiters:
            waiter.timeout_s = 0.0

    return run_threads(size, lambda index: function(boards[index]), on_error=fail)


def arrive(
    board: Board, signature: str, source: int = NOWHERE, target: int = NOWHERE, numbers: tuple[int, ...] = ()
) -> list[int]:
    return board.enter(Signature(signature, signature_hash(signature), source, target, numbers=numbers))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_nobody_passes_a_barrier_before_all_have_reached_it(size: int) -> None:
    """What a rank wrote before a barrier all others see behind it, as often as they meet."""
    written = np.zeros((50, size), np.int64)

    def meet(board: Board) -> None:
        for turn in range(50):
            written[turn, board.index] = 1
            board.barrier("barrier") if turn % 3 else arrive(board, "call")
            assert written[turn].all()

    on_boards(size, meet)


@pytest.mark.parametrize("size", [2, 3])
def test_mailboxes_alternate(size: int) -> None:
    """A rank may fill its mailbox for the next call while others still read: the two calls' boxes are different."""

    def swap(board: Board) -> None:
        boxes = [board.memory.mailboxes(parity, np.dtype(np.int64), 3) for parity in (0, 1)]
        parities = []
        for turn in range(40):
            boxes[(board.number + 1) & 1][board.index][:] = 100 * turn + board.index
            arrive(board, "swap")
            parity = board.number & 1
            parities.append(parity)
            assert [box.tolist() for box in boxes[parity]] == [[100 * turn + index] * 3 for index in range(size)]
        assert parities == [1, 0] * 20

    on_boards(size, swap)


def test_areas_of_the_board_do_not_overlap() -> None:
    """Mailboxes of full size lie apart from each other and from the flags."""

    def fill(board: Board) -> None:
        areas = [board.memory.mailboxes(parity, np.dtype(np.uint8), MAILBOX_NBYTES)[board.index] for parity in (0, 1)]
        for number, area in enumerate(areas):
            area[:] = number + 1
        arrive(board, "call")
        assert [(area == number + 1).all() for number, area in enumerate(areas)] == [True] * len(areas)

    on_boards(2, fill)


def test_places_are_those_of_this_call() -> None:
    """Every rank learns where the others' inputs and results lie in this call, also when they have moved."""

    def publish(board: Board) -> None:
        for turn in range(4):
            places = arrive(board, "call", place_in(board.index + 1, turn * 64), -5000 - board.index)
            others = [index for index in range(3) if index != board.index]
            assert board.peers == [10 + index for index in others]
            assert places[::2] == [place_in(index + 1, turn * 64) for index in others]
            assert places[1::2] == [-5000 - index for index in others]
        assert arrive(board, "call") == [NOWHERE] * 4

    on_boards(3, publish)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 1000])
def test_numbers_are_those_of_this_call(count: int) -> None:
    """Every rank gets the numbers that the others have published in this call, few or many, behind their places."""

    def talk(board: Board) -> None:
        for turn in range(4):
            mine = tuple(turn * 10_000 + board.index * 1000 + i for i in range(count))
            found = arrive(board, "call", place_in(board.index + 1, turn * 64), numbers=mine)
            wanted: list[int] = []
            for index in (index for index in range(3) if index != board.index):
                wanted += [place_in(index + 1, turn * 64), NOWHERE]
                wanted += [turn * 10_000 + index * 1000 + i for i in range(count)]
            assert found == wanted

    on_boards(3, talk)


@pytest.mark.parametrize("count", [2, 1000])
def test_what_is_published_again_is_that_of_this_call(count: int) -> None:
    """Where one signature comes again, after others with and without numbers, its numbers are found again."""

    def publish(board: Board) -> None:
        again = Signature("call", signature_hash("call"), numbers=(board.index,) * count)
        wanted = [NOWHERE, NOWHERE, *[1 - board.index] * count]
        for turn in range(6):
            assert board.enter(again) == wanted
            assert arrive(board, "other") == [NOWHERE, NOWHERE]
            assert arrive(board, "call", numbers=(7 + turn,) * count) == [NOWHERE, NOWHERE, *[7 + turn] * count]

    on_boards(2, publish)


def test_a_long_signature_is_cut_not_refused() -> None:
    """A mismatch of calls with very long texts names what fits."""

    def call(board: Board) -> str:
        return str(caught(arrive, board, f"rank {board.index} é" + "é" * 5000))

    first, second = on_boards(2, call)
    assert first == second
    assert "rank 0" in first
    assert "rank 1" in first


def test_a_member_that_left_says_why_however_long_that_is() -> None:
    """The end is cut off, and the data of a collective that others are still in stays as it was."""

    def call(board: Board) -> object:
        arrive(board, "data")
        mailboxes = board.memory.mailboxes(0, np.dtype(np.uint8), MAILED_NBYTES)
        if board.index == 1:
            mailboxes[1][:] = 7
            board.detach(AbortReason('"é\\' * 100_000))
            return None
        error = caught(arrive, board, "next")
        assert (mailboxes[1] == 7).all()
        return error

    error = on_boards(2, call)[0]
    assert isinstance(error, TransportError)
    assert "given up" in str(error)


def test_a_member_that_left_after_its_part_is_not_missed() -> None:
    """A rank that reached a barrier and left at once does not fail those that come to it later."""

    def call(board: Board) -> None:
        arrive(board, "last")
        board.detach(AbortReason())

    on_boards(3, call)


def test_who_stops_waiting_at_a_barrier_has_not_come() -> None:
    """A rank whose wait fails may write to its arrays again: those that come later learn that they loaded too late."""
    given_up = threading.Event()

    def call(board: Board) -> object:
        arrive(board, "sum")
        if board.index == 0:
            board.waiter.timeout_s = 0.01
            error = caught(board.barrier, "sum")
            board.detach(AbortReason("it waited for too long"))
            given_up.set()
            return error
        assert given_up.wait(20)
        return caught(board.barrier, "sum")

    first, second = on_boards(2, call)
    assert isinstance(first, CollectiveTimeoutError)
    assert "it waited for too long" in str(second)


def test_a_member_whose_process_ended_is_named() -> None:
    """Who waits for a rank whose process is gone gets a PeerLostError that says so."""
    errors = on_boards(
        2, lambda board: caught(arrive, board, "sum") if board.index == 0 else None, dead=frozenset({11})
    )
    assert isinstance(errors[0], PeerLostError)
    assert (errors[0].rank, "process has ended" in str(errors[0])) == (11, True)


def test_the_time_limit_names_who_is_missing_and_in_what() -> None:
    """When members do not come the error names exactly those, and the call."""

    def call(board: Board) -> object:
        return caught(arrive, board, "allreduce of x") if board.index == 0 else None

    error = on_boards(3, call, timeout_s=0.01)[0]
    assert isinstance(error, CollectiveTimeoutError)
    assert "ranks 11-12 in allreduce of x" in str(error)


def test_counting_on_together_after_a_call_that_not_all_came_to() -> None:
    """Members that resume at the furthest count of any meet again, though one of them had gone a call ahead."""

    def call(board: Board) -> None:
        if board.index == 0:
            board.waiter.timeout_s = 0.01
            assert isinstance(caught(arrive, board, "alone"), CollectiveTimeoutError)
            board.waiter.timeout_s = 20.0
        assert board.number == (board.index == 0)
        board.resume(1, 0)
        for _ in range(3):
            arrive(board, "together")
            board.barrier("together")

    on_boards(2, call)


def test_signature_hashes_are_stable_numbers() -> None:
    """A hash is 63 bits, the same in every process, and different for different signatures."""
    assert signature_hash("barrier") == BARRIER_HASH
    hashes = {signature_hash(f"allreduce(sum, shape {count}, float32)") for count in range(10_000)}
    assert len(hashes) == 10_000
    assert all(0 <= each < 1 << 63 for each in hashes)
