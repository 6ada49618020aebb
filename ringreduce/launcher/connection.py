"""Connections of the program that started a job with its processes on hosts: by TCP, or by pipes of ssh and srun.

By TCP, both ends have the same token, which no message carries. It keys a code (HMAC-SHA256, RFC 2104) for each frame,
which covers the frame's number and direction and a random number of either end. So without the token a frame can
neither be made nor changed, left out or sent again. Frames are not encrypted. By pipes there is no token: these are
ssh's or srun's own.

The file takes the standard library alone, as a process on a host may have nothing else.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

_PROTOCOL = b"ringreduce connection 1"
_NONCE_NBYTES = 16
_CODE_NBYTES = 32
_FRAME_NBYTES = 1 << 20
_LENGTH = struct.Struct(">I")
_END = b"\n"  # of a frame: srun passes on whole lines
_NUMBER = struct.Struct(">QI")
#: What a connection gets to show that it has the token.
_GREETING_S = 20.0
#: So many connections may be about to show it; the oldest makes room for another one.
_MOST_STRANGERS = 64
_TRIES = 5
_BETWEEN_TRIES_S = 0.5
_CONNECT_S = 30.0
_NO_FILE_LEFT_S = 0.05
#: Options of a connection, each with its level: a host is lost if it does not answer for about 30 s. TCP sends
#: keepalives only while all data is acknowledged; the last option is for data that is not.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)


class Pipes:
    """The standard input and output of this process, with the methods of a socket that a connection needs."""

    def fileno(self) -> int:
        """Return the descriptor of the input."""
        return 0

    def recv_into(self, room: memoryview) -> int:
        """Read some bytes; return how many, 0 at the end."""
        return os.readv(0, [room])

    def sendall(self, content: bytes | memoryview) -> None:
        """Write all bytes."""
        left = memoryview(content)
        while left:
            left = left[os.write(1, left) :]


class HostConnection:
    """One end of a connection; with a token, after both ends have sent each other their random numbers.

    One thread may send while another one receives.

    Args:
        peer: the socket or the pipes.
        token: which the other end has, too; empty: nobody else can write to these pipes.
        answers: whether this is the end that listened.

    Attributes:
        sending: a lock for threads that send.
        heard: when the last frame came, in seconds of the clock.

    Raises:
        OSError: the connection breaks.
    """

    def __init__(self, peer: socket.socket | Pipes, token: str = "", *, answers: bool = False) -> None:
        self._peer = peer
        self.fileno = peer.fileno
        self._send_key = self._receive_key = b""
        self._nsent = 0
        self._nreceived = 0
        self.sending = threading.Lock()
        self.heard = time.monotonic()
        if not token:
            return
        mine = secrets.token_bytes(_NONCE_NBYTES)
        peer.sendall(mine)
        theirs = self._read(_NONCE_NBYTES)
        asked, answered = (theirs, mine) if answers else (mine, theirs)

        def key(direction: bytes) -> bytes:
            return hmac.digest(token.encode(), _PROTOCOL + direction + asked + answered, "sha256")

        self._send_key, self._receive_key = (key(b"<"), key(b">")) if answers else (key(b">"), key(b"<"))

    def send(self, frame: bytes | memoryview) -> None:
        """Send a frame of at most 1 MiB.

        Raises:
            OSError: the connection is broken.
        """
        content = memoryview(frame)
        code = _code(self._send_key, self._nsent, content)
        self._nsent += 1
        self._peer.sendall(_LENGTH.pack(content.nbytes) + code)
        self._peer.sendall(content)
        self._peer.sendall(_END)

    def receive(self) -> bytes:
        """Return the next frame.

        Raises:
            EOFError: there is none: the other end has closed the connection, or ended.
            ConnectionError: the frame is not the other end's next one.
            OSError: the connection is broken.
        """
        head = self._read(_LENGTH.size + (_CODE_NBYTES if self._receive_key else 0))
        (nbytes,) = _LENGTH.unpack(head[: _LENGTH.size])
        if nbytes > _FRAME_NBYTES:
            raise ConnectionError("a frame is too long to be one")
        content = self._read(nbytes + len(_END))[:-1]
        code = _code(self._receive_key, self._nreceived, content)
        if not hmac.compare_digest(code, head[_LENGTH.size :]):
            raise ConnectionError("a frame does not come from the other end")
        self._nreceived += 1
        self.heard = time.monotonic()
        return content

    def send_json(self, value: object) -> None:
        """Send a value that JSON has."""
        self.send(json.dumps(value).encode())

    def receive_json(self) -> Any:
        """Return a value that came by `send_json`; for errors see `receive`."""
        return json.loads(self.receive())

    def send_content(self, content: bytes) -> None:
        """Send any number of bytes, as frames and an empty one at the end."""
        left = memoryview(content)
        while left:
            self.send(left[:_FRAME_NBYTES])
            left = left[_FRAME_NBYTES:]
        self.send(b"")

    def receive_content(self) -> Iterator[bytes]:
        """Yield what came by `send_content`, in pieces; an error comes before the last one if it is not whole."""
        yield from iter(self.receive, b"")

    def _read(self, nbytes: int) -> bytes:
        content = bytearray(nbytes)
        left = memoryview(content)
        while left:
            count = self._peer.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]
        return bytes(content)


def _code(key: bytes, number: int, content: bytes | memoryview) -> bytes:
    """Return the code of a frame; none without a key."""
    if not key:
        return b""
    code = hmac.new(key, _NUMBER.pack(number, len(content)), "sha256")
    code.update(content)
    return code.digest()


@contextmanager
def connected(ticket: str, request: object) -> Iterator[HostConnection]:
    """Connect to a program that listens, and send it a request that JSON has.

    Args:
        ticket: as `listening` has yielded it there.
        request: what it is to answer.

    Raises:
        OSError: that program cannot be reached, has ended, or has another ticket.
    """
    address, port, token = ticket.split("|")
    for left in reversed(range(_TRIES)):
        try:
            peer = socket.create_connection((address, int(port)), _CONNECT_S)
        except ConnectionRefusedError:  # nobody listens any more
            raise
        except OSError:
            if not left:
                raise
        else:
            with peer:
                try:
                    _keep_alive(peer)
                    connection = HostConnection(peer, token, answers=False)
                    connection.send_json(request)
                    connection.receive()  # that it has been taken
                except (OSError, EOFError) as error:  # strangers may have crowded it out
                    if not left:
                        raise ConnectionError(f"the program at {address} does not take this connection") from error
                else:
                    peer.settimeout(None)
                    yield connection
                    return
        time.sleep(_BETWEEN_TRIES_S)


@contextmanager
def listening(address: str, answer: Callable[[dict[str, Any], HostConnection], object]) -> Iterator[str]:
    """Answer the requests of who has the ticket, as long as this context lasts.

    Args:
        address: of this host, by which the others reach it.
        answer: called with each request and its connection, on a thread of its own.

    Yields:
        The ticket: address, port and token. It is a secret.

    Raises:
        OSError: this host has no such address.
    """
    token = secrets.token_hex(16)
    strangers: dict[socket.socket, None] = {}
    changing = threading.Lock()

    def greet(peer: socket.socket) -> None:
        with changing:
            while len(strangers) >= _MOST_STRANGERS:
                oldest = next(iter(strangers))
                del strangers[oldest]
                with suppress(OSError):  # it has just ended
                    oldest.shutdown(socket.SHUT_RDWR)
            strangers[peer] = None
        try:
            _keep_alive(peer)
            peer.settimeout(_GREETING_S)
            connection = HostConnection(peer, token, answers=True)
            request = connection.receive_json()
        finally:
            with changing:
                strangers.pop(peer, None)
        peer.settimeout(None)
        connection.send(b"")
        answer(request, connection)

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
    with served(server, greet):
        yield f"{address}|{server.getsockname()[1]}|{token}"


def _keep_alive(peer: socket.socket) -> None:
    for option in _KEEPALIVE:
        peer.setsockopt(*option)


@contextmanager
def served(server: socket.socket, answer: Callable[[socket.socket], object]) -> Iterator[None]:
    """Call a function with each connection to a listening socket, on a thread of its own; close the socket at the end.

    Connections that break are the business of who made them.
    """
    ended = threading.Event()

    def accept() -> None:
        while not ended.is_set():
            try:
                connection, _ = server.accept()
            except OSError:  # the socket is closed, or this process has no file left
                ended.wait(_NO_FILE_LEFT_S)
                continue
            threading.Thread(target=each, args=(connection,), name="ringreduce answers", daemon=True).start()

    def each(connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError, EOFError):
            answer(connection)

    with ExitStack() as at_end:
        at_end.callback(server.close)
        at_end.callback(server.shutdown, socket.SHUT_RDWR)  # which ends accept
        at_end.callback(ended.set)
        threading.Thread(target=accept, name="ringreduce accepts", daemon=True).start()
        yield
