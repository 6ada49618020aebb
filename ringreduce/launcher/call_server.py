"""A call of a function over TCP: ranks that share no folder with the program fetch it there, and send results back."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from ringreduce.common.launch import SECRET_VARIABLE, launch
from ringreduce.launcher.agent_server import served

__all__ = ["KEEPALIVE", "VARIABLE", "call_served", "connected", "leave_there", "requests_served"]

#: Address, port and token of the program, in the environment of its ranks.
VARIABLE = SECRET_VARIABLE
_MOST_NBYTES = 1 << 20  # of a request
_CONNECT_S = 60.0
#: Options of a connection, each with its level: a host is lost if it does not answer for about 30 s. TCP sends
#: keepalives only while all data is acknowledged; the last option is for data that is not.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)


@contextmanager
def requests_served(address: str, answer: Callable[[dict[str, Any], BufferedRWPair], object]) -> Iterator[str]:
    """Answer requests of ranks as long as this context lasts.

    Args:
        address: of this host, by which ranks reach it.
        answer: called with each request that has the token, and its stream, on a thread of its own.

    Yields:
        The value of `VARIABLE` for the ranks. It is a secret: who has it may send pickles.

    Raises:
        OSError: this host has no such address.
    """
    token = secrets.token_hex(16)

    def each(connection: socket.socket) -> None:
        for option in KEEPALIVE:
            connection.setsockopt(*option)
        with connection.makefile("rwb") as stream:
            request = json.loads(stream.readline(_MOST_NBYTES))
            if hmac.compare_digest(str(request.pop("token")), token):
                answer(request, stream)

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
    with served(server, each):
        yield f"{address}|{server.getsockname()[1]}|{token}"


@contextmanager
def call_served(address: str, call: bytes, folder: Path) -> Iterator[str]:
    """Hand a call to ranks, and write what these return into a folder, whole files; see `requests_served`."""

    def answer(request: Mapping[str, Any], stream: BufferedRWPair) -> None:
        if request["what"] == "call":
            stream.write(call)
            return
        kind = "result" if request["what"] == "result" else "failure"
        place = folder / f"{request['job']:d}-{request['rank']:d}.{kind}"
        coming = place.with_suffix(".coming")
        with coming.open("wb") as file:
            shutil.copyfileobj(stream, file)
        if coming.stat().st_size == request["nbytes"]:  # else the rank has ended meanwhile
            coming.rename(place)
            stream.write(b"kept\n")

    with requests_served(address, answer) as value:
        yield value


# ---- in a rank ----


@contextmanager
def connected(request: Mapping[str, Any]) -> Iterator[tuple[socket.socket, BufferedRWPair]]:
    """Send a request to the program that started this rank.

    Yields:
        The connection, and its stream.

    Raises:
        OSError: that program cannot be reached, or has ended.
    """
    address, port, token = os.environ[VARIABLE].split("|")
    with socket.create_connection((address, int(port)), _CONNECT_S) as connection:
        connection.settimeout(None)
        with connection.makefile("rwb") as stream:
            stream.write(json.dumps({**request, "token": token}).encode() + b"\n")
            stream.flush()
            yield connection, stream


def leave_there(what: str, content: bytes) -> None:
    """Send what this rank returned (``"result"``) or its traceback (``"failure"``) to the program.

    Raises:
        OSError: it cannot be reached, or has not kept it.
    """
    rank = launch().rank
    request = {"what": what, "job": launch().restarts, "rank": rank, "nbytes": len(content)}
    with connected(request) as (connection, stream):
        stream.write(content)
        stream.flush()
        connection.shutdown(socket.SHUT_WR)
        if stream.readline() != b"kept\n":
            raise ConnectionError(f"the program that called the function has not kept the {what} of rank {rank}")
