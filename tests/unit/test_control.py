"""Control notes through shared memory: each arrives once, whole and in order, whatever its length and sender."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import pytest

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import TransportError
from ringreduce.native.layout import TAKEN
from ringreduce.testing import caught, run_ranks
from ringreduce.transport import control
from ringreduce.transport.control import NoteStream, SharedControlChannel
from ringreduce.transport.shared.arena import Arena
from ringreduce.transport.shared.board import fence
from ringreduce.transport.waiting import Waiter


def notes_of(communicator: Communicator) -> SharedControlChannel:
    context = communicator._context
    return SharedControlChannel(context.node, context.messages)


def note(sender: int, receiver: int, number: int) -> bytes:
    """Return the content of a note: of any length from nothing to more than a buffer holds."""
    generator = random.Random(f"{sender} {receiver} {number}")
    lengths = [0, 1, 3, 17, 1000, 1008, 1009, 4096, 32_000, 32_695, 32_696, 32_697, 50_000]
    return generator.randbytes(generator.choice(lengths))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_notes_arrive_whole_and_in_order(size: int) -> None:
    """What every rank posts to every other arrives there, though more is under way than fits into a buffer."""
    count = 60

    def check(communicator: Communicator) -> None:
        rank, notes = communicator.rank, notes_of(communicator)
        peers = [peer for peer in range(size) if peer != rank]
        for number in range(count):
            for peer in peers:
                notes.post(note(rank, peer, number), peer)
        heard: dict[int, list[bytes]] = {peer: [] for peer in peers}

        def everything() -> bool:
            while (arrived := notes.poll()) is not None:
                heard[arrived[0]].append(arrived[1])
            return all(len(each) == count for each in heard.values())

        Waiter(30.0, crowded=True).until(everything, lambda: "notes")
        for peer in peers:
            assert heard[peer] == [note(peer, rank, number) for number in range(count)]

    run_ranks(size, check)


def test_there_is_nothing_until_something_is_posted() -> None:
    """Polling never blocks, and a note that is posted is there at the next poll of its receiver, and of no other."""

    def check(communicator: Communicator) -> None:
        notes = notes_of(communicator)
        assert notes.poll() is None
        communicator.barrier()
        if communicator.rank == 0:
            notes.post(b"hello", 2)
        communicator.barrier()
        assert notes.poll() == ((0, b"hello") if communicator.rank == 2 else None)
        assert notes.poll() is None
        communicator.barrier()
        notes.close()
        notes.close()

    run_ranks(3, check)


def test_notes_need_no_more_memory_than_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are used again: two for a reader that keeps up; as many as are unread for one that does not."""
    made: list[int] = []
    allocate = Arena.allocate

    def counted(arena: Arena, nbytes: int, *more: Any) -> Any:
        made.append(nbytes)
        return allocate(arena, nbytes, *more)

    def check(communicator: Communicator) -> None:
        notes = notes_of(communicator)
        communicator.barrier()
        if communicator.rank == 0:
            monkeypatch.setattr(Arena, "allocate", counted)
        for turn in range(1000):
            if communicator.rank == 0:
                notes.post(bytes([turn % 256]) * 1000, 1)
            communicator.barrier()
            if communicator.rank == 1:
                assert notes.poll() == (0, bytes([turn % 256]) * 1000)
            communicator.barrier()
        if communicator.rank == 0:
            assert len(made) == 1
            for turn in range(1000):
                notes.post(bytes([turn % 256]) * 1000, 1)
            assert 30 <= len(made) <= 40
        communicator.barrier()
        if communicator.rank == 1:
            for turn in range(1000):
                assert notes.poll() == (0, bytes([turn % 256]) * 1000)
            assert notes.poll() is None
        communicator.barrier()

    run_ranks(2, check)


def test_a_signal_handler_cannot_break_a_note() -> None:
    """One that posts while its thread posts, or polls while it polls, gets an error; what it interrupted goes on."""

    def check(communicator: Communicator) -> None:
        notes = notes_of(communicator)
        stream = notes.streams[1 - communicator.rank]

        class Interrupting(bytes):
            def __radd__(self, other: bytes) -> bytes:
                assert isinstance(caught(notes.post, b"from the handler", 1), TransportError)
                return other + bytes(self)

        if communicator.rank == 0:
            for number in range(3):
                notes.post(Interrupting(bytes([number])), 1)
        communicator.barrier()
        if communicator.rank == 1:
            stream._fence = lambda: isinstance(caught(stream.take), TransportError) or pytest.fail("no error")
            assert [notes.poll() for _ in range(4)] == [(0, bytes([number])) for number in range(3)] + [None]
        communicator.barrier()

    run_ranks(2, check)


def test_processors_that_reorder_stores_get_a_fence() -> None:
    """x86 keeps stores in order and needs none; for any other the fence can be called any number of times."""
    assert fence("x86_64") is None
    order = fence("aarch64")
    for _ in range(3):
        order()


class InterruptError(Exception):
    """What a signal handler raises."""


def interrupted(call: Callable[[], object], after: int) -> bool:
    """Call a function, interrupted where a signal could be: in one of the calls that it makes; return whether it was.

    Args:
        call: the function.
        after: how many calls, beginning or ending, come first.
    """
    left = after

    def observe(frame: FrameType, event: str, what: object) -> None:
        nonlocal left
        if "/ringreduce/transport/" in frame.f_code.co_filename:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise InterruptError

    sys.setprofile(observe)
    try:
        call()
    except InterruptError:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_an_interrupt_leaves_a_whole_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes: the note that was put or taken is there or not, and all that follow are as they were put."""
    monkeypatch.setattr(control, "_LARGER_NBYTES", 0)
    monkeypatch.setattr(control, "_NOTES", 2)
    streams: dict[int, NoteStream] = {}

    def check(communicator: Communicator) -> None:
        rank = communicator.rank
        streams[rank] = notes_of(communicator).streams[1 - rank]
        communicator.barrier()
        if rank == 0:
            goes_through(streams[0], streams[1])
        communicator.barrier()

    def goes_through(writer: NoteStream, reader: NoteStream) -> None:
        numbers = count()
        for call in ("put", "take"):
            step = 0
            cut = True
            while cut:
                cut = False
                for length in (20_000, 20_000, 40_000):  # each time in another buffer, the last one in a larger one
                    expected = [bytes([next(numbers) % 256]) * length for _ in range(5)]
                    if call == "put":
                        cut |= interrupted(partial(writer.put, expected[0]), step)
                    else:
                        writer.put(expected[0])
                        cut |= interrupted(reader.take, step)
                    for each in expected[1:]:
                        writer.put(each)
                    found = []
                    while reader.put_there[0] != reader.state[TAKEN]:
                        found.append(reader.take())
                    assert found in (expected, expected[1:]), step
                step += 1
            assert step > 5

    run_ranks(2, check)
