"""Connections of a program with its processes on hosts, and what nobody can do without their token."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from ringreduce.launcher.connection import HostConnection, connected, listening

TOKEN = "0123456789abcdef"


@contextmanager
def two_ends() -> Iterator[tuple[HostConnection, HostConnection, socket.socket, socket.socket]]:
    """Yield the end that asks, the end that answers, and their sockets."""
    ours, theirs = socket.socketpair()
    answering: list[HostConnection] = []
    with ours, theirs:
        thread = threading.Thread(target=lambda: answering.append(HostConnection(theirs, TOKEN, answers=True)))
        thread.start()
        asking = HostConnection(ours, TOKEN, answers=False)
        thread.join(30)
        yield asking, answering[0], ours, theirs


def test_frames_come_in_order_in_both_directions() -> None:
    with two_ends() as (asking, answering, _, _):
        for number in range(3):
            asking.send_json([number, "?"])
            answering.send_json({"to": number})
        assert [answering.receive_json() for _ in range(3)] == [[0, "?"], [1, "?"], [2, "?"]]
        assert [asking.receive_json() for _ in range(3)] == [{"to": 0}, {"to": 1}, {"to": 2}]


@pytest.mark.parametrize("nbytes", [0, 1, (1 << 20) - 1, 1 << 20, 3_000_001])
def test_content_of_any_size_comes_whole(nbytes: int) -> None:
    content = os.urandom(nbytes)
    with two_ends() as (asking, answering, _, _):
        thread = threading.Thread(target=asking.send_content, args=(content,))
        thread.start()
        assert b"".join(answering.receive_content()) == content
        thread.join(30)


def test_content_that_is_cut_short_is_an_error() -> None:
    with two_ends() as (asking, answering, ours, _):
        asking.send(b"a part")
        ours.shutdown(socket.SHUT_RDWR)
        with pytest.raises(EOFError):
            list(answering.receive_content())


@pytest.mark.parametrize("at", [0, 3, 4, 35, 36, 40])
def test_a_changed_frame_is_an_error(at: int) -> None:
    """Whichever of its bytes is another one: of the length, the code or the content."""
    with two_ends() as (asking, answering, ours, theirs):
        asking.send(b"frame")
        frame = bytearray(theirs.recv(4 + 32 + 6, socket.MSG_WAITALL))
        frame[at] ^= 1
        ours.sendall(frame)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises((ConnectionError, EOFError)):
            answering.receive()


def test_a_frame_that_comes_again_is_an_error() -> None:
    with two_ends() as (asking, answering, ours, theirs):
        asking.send(b"frame")
        frame = theirs.recv(4 + 32 + 6, socket.MSG_WAITALL)
        ours.sendall(frame + frame)
        assert answering.receive() == b"frame"
        with pytest.raises(ConnectionError, match="does not come from the other end"):
            answering.receive()


def test_a_frame_that_is_left_out_is_an_error() -> None:
    with two_ends() as (asking, answering, _, theirs):
        asking.send(b"first")
        theirs.recv(4 + 32 + 6, socket.MSG_WAITALL)
        asking.send(b"second")
        with pytest.raises(ConnectionError, match="does not come from the other end"):
            answering.receive()


def test_a_frame_that_is_sent_back_is_an_error() -> None:
    with two_ends() as (asking, _, _, theirs):
        asking.send(b"frame")
        theirs.sendall(theirs.recv(4 + 32 + 6, socket.MSG_WAITALL))
        with pytest.raises(ConnectionError, match="does not come from the other end"):
            asking.receive()


def test_a_recorded_connection_cannot_be_replayed() -> None:
    """The other end has another random number each time."""
    with two_ends() as (asking, _, _, theirs):
        asking.send(b"request")
        recorded = theirs.recv(4 + 32 + 8, socket.MSG_WAITALL)
    with two_ends() as (_, answering, ours, _):
        ours.sendall(recorded)
        with pytest.raises(ConnectionError, match="does not come from the other end"):
            answering.receive()


def test_the_token_is_in_no_message() -> None:
    with two_ends() as (asking, _, _, theirs):
        asking.send_json({"what": "call"})
        assert TOKEN.encode() not in theirs.recv(1 << 16)


def echo(request: dict[str, Any], connection: HostConnection) -> None:
    connection.send_json(request)


def test_without_the_token_nothing_is_answered() -> None:
    answered: list[object] = []
    with listening("127.0.0.1", lambda request, connection: answered.append(request)) as ticket:
        address, port, token = ticket.split("|")
        with pytest.raises(ConnectionError, match="does not take this connection"):
            connected(f"{address}|{port}|{token[:-1]}x", {"what": "call"}).__enter__()
    assert answered == []
    with pytest.raises(ConnectionRefusedError):
        connected(ticket, {}).__enter__()


def test_strangers_keep_nobody_out() -> None:
    """More idle connections than are greeted at a time, some of which have sent garbage."""
    with ExitStack() as at_end, listening("127.0.0.1", echo) as ticket:
        address, port, _ = ticket.split("|")
        for number in range(200):
            stranger = at_end.enter_context(socket.create_connection((address, int(port)), 30))
            if number % 3 == 0:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with connected(ticket, {"what": "call"}) as connection:
            assert connection.receive_json() == {"what": "call"}


def test_requests_are_answered_at_the_same_time() -> None:
    """One that waits for the other does not hold it up."""
    both = threading.Barrier(2)

    def answer(request: dict[str, Any], connection: HostConnection) -> None:
        both.wait(30)
        connection.send_json("both")

    with listening("127.0.0.1", answer) as ticket, connected(ticket, {}) as one, connected(ticket, {}) as other:
        assert one.receive_json() == other.receive_json() == "both"
