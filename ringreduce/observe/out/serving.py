"""Serves texts over HTTP: what a job does, to those who have its token."""

from __future__ import annotations

import base64
import json
import logging
import os
import secrets
import socket
import socketserver
import stat
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

from ringreduce.common.config import runtime_folder
from ringreduce.common.errors import ConfigError, ForeignFileError
from ringreduce.common.files import create_file
from ringreduce.common.keys import read_private
from ringreduce.common.settings import parse_address

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_log = logging.getLogger(__name__)

_TOKEN_FILE = "RINGREDUCE_STATUS_TOKEN_FILE"
_LEAST_TOKEN = 16  # characters
_LONGEST_TOKEN = 1024
_MOST_CLIENTS = 32  # with the token, and as many without it
_SLOW_S = 10.0  # a client that says nothing for so long is left; and a server, by clients


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Answer(NamedTuple):
    """What a request gets.

    Attributes:
        text: in UTF-8.
        kind: the type of its content.
        status: of HTTP.
        every_s: after how many seconds a browser asks again; None: never.
    """

    text: str
    kind: str
    status: int = HTTPStatus.OK
    every_s: int | None = None


class TextServer(socketserver.ThreadingTCPServer):
    """Serves texts, each request in a thread of its own.

    Args:
        host, port: where it listens.
        answers: by path, makes the text anew for each request.
        token: that requests must have, as a bearer token or as the password of any user; None: all are answered.

    Raises:
        ConfigError: the port cannot be used.
    """

    allow_reuse_address = True
    request_queue_size = 128  # of clients whose turn has not come; beyond it they try again after a second
    daemon_threads = True

    def __init__(
        self, host: str, port: int, answers: Mapping[str, Callable[[], Answer]], token: str | None = None
    ) -> None:
        self.answers = answers
        self.token = token
        self._strangers: dict[Any, None] = {}  # sockets of clients that have not shown a token, the oldest first
        self._known = 0  # clients that have
        self._changes = threading.Lock()
        self._failures: set[str] = set()
        self._ended = False
        self._thread: threading.Thread | None = None
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(f"port {port} of {host} cannot be served: {error.strerror}; name another one") from None
        self.address = _url(host, self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take a client; of those without a token, the oldest gives way, or slow ones would keep all others out."""
        with self._changes:
            if self._known >= _MOST_CLIENTS:
                return False
            if len(self._strangers) >= _MOST_CLIENTS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):  # it has just gone by itself
                    oldest.shutdown(socket.SHUT_RDWR)  # which ends its thread
            self._strangers[request] = None
        return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changes:
                self._strangers.pop(request, None)

    @contextmanager
    def answering(self, request: Any) -> Iterator[None]:
        """Know a client that has shown the token, as long as it is answered: it gives way to nobody."""
        with self._changes:
            self._strangers.pop(request, None)
            self._known += 1
        try:
            yield
        finally:
            with self._changes:
                self._known -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away, and of all else once what it is."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            self.say_failed("an answer", error)

    def answer(self, path: str) -> Answer:
        """Return the text of a path; that it cannot be made is an answer, and said once."""
        try:
            return self.answers[path]()
        except Exception as error:  # whatever it is, who asks gets to know it
            self.say_failed(path, error)
            said = f"{path} cannot be made: {type(error).__name__}; the log of rank 0 says more\n"
            return Answer(said, "text/plain", HTTPStatus.INTERNAL_SERVER_ERROR)

    def say_failed(self, what: str, error: BaseException) -> None:
        """Log a failure in a line, unless it was already."""
        said = f"{what} cannot be served: {type(error).__name__}: {error}"
        if said not in self._failures:
            self._failures.add(said)
            _log.error("%s%s", said, _place(error))

    def allows(self, header: str) -> bool:
        """Return whether a header ``Authorization`` has the token."""
        if self.token is None:
            return True
        kind, _, given = header.partition(" ")
        if kind.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        elif kind.lower() != "bearer":
            return False
        return secrets.compare_digest(given.strip().encode(), self.token.encode())

    def run(self) -> None:
        """Answer requests until `end` is called."""
        while not self._ended:
            self.handle_request()

    def start(self) -> None:
        """Answer requests in a thread of this process, until `end` is called."""
        self._thread = threading.Thread(target=self.run, name="ringreduce status", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Serve no more."""
        self._ended = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread that waits for requests
        if self._thread is not None:
            self._thread.join(_SLOW_S)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = _SLOW_S
    server_version = "ringreduce"
    sys_version = ""
    server: TextServer

    def do_GET(self) -> None:  # the name that the base calls
        if not self.server.allows(self.headers.get("Authorization", "")):
            said = "a token is needed, as a bearer or as the password\n"
            self._send(Answer(said, "text/plain", HTTPStatus.UNAUTHORIZED))
            return
        with self.server.answering(self.request):
            self._send(self._answer(self.path.partition("?")[0]))

    def _answer(self, path: str) -> Answer:
        answers = self.server.answers
        if path not in answers:
            return Answer(f"there is nothing here, but at {', '.join(answers)}\n", "text/plain", HTTPStatus.NOT_FOUND)
        return self.server.answer(path)

    def _send(self, said: Answer) -> None:
        body = said.text.encode()
        self.send_response(said.status)
        if said.status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Basic realm="ringreduce: any user, and the token as the password"')
        if said.every_s is not None:
            self.send_header("Refresh", str(said.every_s))
        self.send_header("Content-Type", said.kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing of each request."""


def _place(error: BaseException) -> str:
    """Return where an error was raised, in words."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" (line {trace.tb_lineno} of {trace.tb_frame.f_code.co_filename})"


def token_folder() -> Path:
    """Return where the token of this user on this machine is; made if need be, for this user alone.

    Raises:
        ForeignFileError: somebody else has a folder of that name.
    """
    path = runtime_folder()
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ForeignFileError(
            f"{path} is not a folder of this user's alone; remove it, or set XDG_RUNTIME_DIR or TMPDIR"
        )
    return path


def job_token(path: str | None, *, make: bool) -> tuple[str, Path]:
    """Return the token of a file, and the file.

    Args:
        path: of the file; None: that of this user on this machine.
        make: whether to make one where there is no such file.

    Raises:
        ConfigError: it cannot be read, others may read it, or it holds no token.
    """
    try:
        where = Path(path) if path is not None else token_folder() / "status.token"
        if make and not where.exists():
            new = where.with_name(f".{where.name}.{os.getpid()}")
            with create_file(new) as file:
                file.write(f"{secrets.token_urlsafe(24)}\n".encode())
            with suppress(FileExistsError):  # another job of this user's has just made one
                os.link(new, where)
            new.unlink()
        token = read_private(where, _TOKEN_FILE, _LONGEST_TOKEN).decode(errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"the token of the status in {error.filename or path}: {error.strerror}") from None
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{where} holds no token: at least {_LEAST_TOKEN} characters of ASCII, without blanks")
    return token, where


def ask(address: str, path: str, token_file: str | None) -> Any:
    """Return what a server of a job says, a value of JSON.

    Args:
        address: ``[HOST]:PORT``.
        path: of the text.
        token_file: with its token; None: that of this user on this machine.

    Raises:
        ConfigError: it does not answer, or not so.
    """
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise ConfigError(f"{address} is no address: {error}") from None
    token, where = job_token(token_file, make=False)
    request = urllib.request.Request(_url(host, port) + path, headers={"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_SLOW_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        error.close()  # it is the response
        why = f"it refuses the token of {where}" if error.code == HTTPStatus.UNAUTHORIZED else error.reason
    except OSError as error:
        why = str(getattr(error, "reason", error))
    except ValueError:
        why = "it is no job of ringreduce"
    raise ConfigError(f"there is no answer from {address}: {why}")
