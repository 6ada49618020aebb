"""Control notes through shared memory: each arrives once, whole and in order, whatever its length and sender."""

from __future__ import annotations

import random

import pytest

from ringreduce.collectives.communicator import Communicator
from ringreduce.testing import run_ranks
from ringreduce.transport.control import SharedControlChannel
from ringreduce.transport.shared.board import fence
from ringreduce.transport.waiting import Waiter


def notes_of(communicator: Communicator) -> SharedControlChannel:
    context = communicator._context
    return SharedControlChannel(context.node, context.messages)


def note(sender: int, receiver: int, number: int) -> bytes:
    """Return the content of a note: of any length from nothing to several times what a ring holds."""
    generator = random.Random(f"{sender} {receiver} {number}")
    return generator.randbytes(generator.choice([0, 1, 3, 17, 1000, 1008, 1009, 1024, 1025, 16384, 50_000]))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_notes_arrive_whole_and_in_order(size: int) -> None:
    """What every rank posts to every other arrives there, though the rings are full most of the time."""
    count, done = 60, set[int]()

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

        def finished() -> bool:  # until then this rank polls, as its own notes may still wait for room
            done.add(rank)
            return len(done) == size

        Waiter(30.0, crowded=True).until(lambda: everything() and finished(), lambda: "notes")
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


def test_processors_that_reorder_stores_get_a_fence() -> None:
    """x86 keeps stores in order and needs none; for any other the fence can be called any number of times."""
    assert fence("x86_64") is None
    order = fence("aarch64")
    assert order is not None
    for _ in range(3):
        order()
