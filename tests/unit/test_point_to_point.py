"""Arrays from one rank to another, between ranks that are threads of this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringreduce.buffers import Operand
from ringreduce.common.errors import CollectiveTimeoutError, PeerLostError, ShutdownError, TransportError
from ringreduce.common.lifetime import Lifetime
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.point_to_point import PeerTransfer, PointToPoint
from ringreduce.transport.waiting import Waiter


def ends(size: int, lost: Any = None) -> list[PointToPoint]:
    """Return a side for each rank; this thread plays them all."""
    world = MemoryWorld(size)
    return [PointToPoint(world.messages(rank), Waiter(0.2), lambda doing: lost, Lifetime()) for rank in range(size)]


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 100_000])
def test_messages_come_in_order_by_tag(nbytes: int):
    """Small ones are sent at once, large ones when they are received; receives may come first, or from any rank."""
    sides = ends(3)
    data = [np.full(nbytes, each, np.uint8) for each in range(4)]
    room = [np.full(nbytes, 99, np.uint8) for _ in range(4)]
    early = sides[2].recv(Operand.of(room[0]), 0, 7)
    sent = [sides[0].send(Operand.of(data[each]), 2, 7 if each < 2 else 8) for each in range(3)]
    sent.append(sides[1].send(Operand.of(data[3]), 2, 7))
    assert all(each.done == (nbytes <= 4096) for each in sent)
    second = sides[2].recv(Operand.of(room[2]), 0, 8)
    third, fourth = sides[2].recv(Operand.of(room[1]), None, 7), sides[2].recv(Operand.of(room[3]), None, 7)
    for each in (early, second, third, fourth):
        sides[2].wait(each)
    for number, each in enumerate(sent):
        sides[number // 3].wait(each)
    assert [third.peer, fourth.peer] == [0, 1]
    assert all(np.array_equal(one, other) for one, other in zip(room, data, strict=True))
    assert not any(each.busy for each in sides)


def test_waits_end():
    """In time, with the loss of a rank, and when the group ends."""
    sides = ends(2)
    room = Operand.of(np.zeros(3, np.uint8))
    with pytest.raises(CollectiveTimeoutError, match="receive from rank 1"):
        sides[0].wait(sides[0].recv(room, 1, 0), 0.01)
    alone = ends(2, PeerLostError(1, "gone"))[0]
    with pytest.raises(PeerLostError):
        alone.wait(alone.recv(room, 1, 0))
    pending = sides[0].recv(room, 1, 0)
    sides[0].close()
    with pytest.raises(ShutdownError):
        sides[0].wait(pending)
    with pytest.raises(ShutdownError):
        sides[0].send(room, 1, 0)


def test_what_has_ended_stays_as_it_is():
    """A receive that a failure has ended takes nothing more, and the group has nothing under way."""
    sides = ends(2)
    room = np.zeros(3, np.uint8)
    pending = sides[1].recv(Operand.of(room), 0, 0)
    failure = PeerLostError(0, "gone")
    sides[1].fail(failure)
    sides[0].send(Operand.of(np.ones(3, np.uint8)), 1, 0)
    sides[1].advance()
    assert pending.error is failure
    assert not room.any()
    assert not sides[1].busy


def test_a_message_after_a_failure_says_what_failed():
    """It does not speak of messages that failed, nor of ranks out of step, where a group was aborted."""
    sides = ends(2)
    sides[0].fail(TransportError("the group was aborted"))
    with pytest.raises(TransportError, match=r"can follow an earlier failure: .*the group was aborted"):
        sides[0].send(Operand.of(np.zeros(3, np.uint8)), 1, 0)


def test_an_interrupted_send_gives_its_number_to_no_other():
    """What is sent next arrives where it belongs, though the note of the interrupted array is there."""
    sides = ends(2)
    post = sides[0]._messages.post

    def interrupted(note: bytes, peer: int) -> None:
        sides[0]._messages.post = post
        post(note, peer)
        raise KeyboardInterrupt

    sides[0]._messages.post = interrupted
    with pytest.raises(KeyboardInterrupt):
        sides[0].send(Operand.of(np.full(5000, 1, np.uint8)), 1, 0)
    sides[0].send(Operand.of(np.full(5000, 2, np.uint8)), 1, 0)
    rooms = [np.zeros(5000, np.uint8) for _ in range(2)]
    first, second = (sides[1].recv(Operand.of(room), 0, 0) for room in rooms)
    sides[1].wait(second)
    assert not first.done
    assert (rooms[1] == 2).all()


def test_a_receive_that_cannot_start_ends():
    """At once, with the reason, not at its time limit; as does what comes after it."""
    sides = ends(2)
    failure = TransportError("the sender is gone")

    def fails(requests: object) -> None:
        raise failure

    sides[1]._messages.start = fails
    pending = [sides[1].recv(Operand.of(np.zeros(5000, np.uint8)), 0, 0) for _ in range(2)]
    sides[0].send(Operand.of(np.ones(5000, np.uint8)), 1, 0)
    for each in pending:
        with pytest.raises(TransportError, match="the sender is gone"):
            sides[1].wait(each)
    assert not sides[1].busy


def interrupt_once(messages: Any, name: str) -> None:
    """Let a method of a transport be interrupted the next time that it is called."""
    usual = getattr(messages, name)

    def interrupted(requests: object) -> None:
        setattr(messages, name, usual)
        raise KeyboardInterrupt

    setattr(messages, name, interrupted)


@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_large_array_arrives_though_a_rank_was_interrupted_while_it_moved(interrupted: int):
    """The sender or the receiver, who then waits again; afterwards nothing is under way."""
    sides = ends(2)
    room = np.zeros(5000, np.uint8)
    coming = sides[1].recv(Operand.of(room), 0, 0)
    transfers = [sides[0].send(Operand.of(np.ones(5000, np.uint8)), 1, 0), coming]
    interrupt_once(sides[interrupted]._messages, "test_all")
    with pytest.raises(KeyboardInterrupt):
        sides[interrupted].wait(transfers[interrupted])
    for each in (1, 0):
        sides[each].wait(transfers[each])
    assert (room == 1).all()
    assert not any(each.busy for each in sides)


@pytest.mark.parametrize("interrupted", [0, 1])
def test_the_next_large_array_arrives_though_a_rank_was_interrupted_before_one_moved(interrupted: int):
    """That one is dropped where the interrupt was; the other side can wait for it in vain."""
    sides = ends(2)
    rooms = [np.zeros(5000, np.uint8) for _ in range(2)]
    sides[1].recv(Operand.of(rooms[0]), 0, 0)
    interrupt_once(sides[interrupted]._messages, "start")

    def send(value: int) -> PeerTransfer:
        sent = sides[0].send(Operand.of(np.full(5000, value, np.uint8)), 1, 0)
        sides[1].advance()
        return sent

    with pytest.raises(KeyboardInterrupt):
        send(1)
    second = sides[1].recv(Operand.of(rooms[1]), 0, 0)
    sent = send(2)
    sides[1].wait(second)
    sides[0].wait(sent)
    assert (rooms[1] == 2).all()
    assert not rooms[0].any()
    assert [each.busy for each in sides] == [interrupted == 1, interrupted == 0]
