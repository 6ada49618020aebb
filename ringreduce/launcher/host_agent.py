"""The agent of `ringreduce run` on a host: it passes on what the ranks there say and return, and sends heartbeats.

The text of this file goes to a Python of the host, which need not have ringreduce: it takes the standard library alone.
It reads one line of JSON, the request, and lives until its standard input ends: when the launcher closes it, or has
ended in whatever way.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import stat
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any

_READ_NBYTES = 1 << 16
_BEAT_EVERY_S = 1.0


#: The file with the call of `ringreduce.run`, and how the names of files end that ranks leave.
CALL = "call"
DONE = (".result", ".failure")
_LOOK_EVERY_S = 0.2  # for these


class _Fifo:
    """The FIFO in which ranks of this host write; see `ringreduce.launcher.marks`.

    Args:
        folder: for it; made where it is missing.

    Raises:
        OSError: there can be no such folder, or it is not this user's alone.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        status = os.lstat(folder)
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
            raise PermissionError(f"{folder} is not a folder of this user's alone")
        self._path = os.path.join(folder, os.readlink("/proc/self/ns/net"))
        with suppress(FileExistsError):
            os.mkfifo(self._path, 0o600)
        self.descriptor = os.open(self._path, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""
        try:  # The launcher itself, or another agent, may read the FIFO of this host.
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_ours = True
        except BlockingIOError:
            self.is_ours = False

    def read(self) -> list[bytes]:
        """Return the lines that have come."""
        with suppress(BlockingIOError):
            self._rest += os.read(self.descriptor, _READ_NBYTES)
        *lines, self._rest = self._rest.split(b"\n")
        return lines

    def remove(self) -> None:
        """Remove the FIFO, and the folder if that is empty."""
        if self.is_ours:
            with suppress(OSError):
                os.unlink(self._path)
                os.rmdir(self._folder)


class _Results:
    """The folder of a call of `ringreduce.run`: the call comes there, and what ranks leave is sent.

    Args:
        folder: by the same path on all hosts; made where it is missing.
        token: the name of a file in it, by which a host sees that it shares the folder with the launcher's.

    Attributes:
        is_shared: whether it does.

    Raises:
        OSError: there can be no such folder.
    """

    def __init__(self, folder: str, token: str) -> None:
        self._folder = folder
        self._sent: set[str] = set()
        self.is_shared = False
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            if not os.path.exists(os.path.join(folder, token)):
                raise
            self.is_shared = True

    def receive(self, nbytes: int) -> None:
        """Receive the call; an EOFError says that the launcher has ended."""
        with open(os.path.join(self._folder, CALL), "xb") as file:
            while nbytes:
                piece = os.read(0, min(nbytes, _READ_NBYTES))
                if not piece:
                    raise EOFError
                file.write(piece)
                nbytes -= len(piece)

    def send(self, request: dict[str, Any]) -> None:
        """Send the files that have come: an answer with name and size, and then the bytes."""
        for name in sorted({*os.listdir(self._folder)} - self._sent):
            if name.endswith(DONE):
                self._sent.add(name)
                with open(os.path.join(self._folder, name), "rb") as file:
                    _answer(request, "file", [name, os.fstat(file.fileno()).st_size])
                    while piece := file.read(_READ_NBYTES):
                        _write(piece)

    def remove(self) -> None:
        """Remove the folder, unless it is the launcher's."""
        if not self.is_shared:
            shutil.rmtree(self._folder, ignore_errors=True)


def _write(content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(1, left) :]


def _answer(request: dict[str, Any], what: str, value: object = "") -> None:
    _write(f"\n{request['mark']}{json.dumps([what, value])}\n".encode())


def _serve(request: dict[str, Any], fifo: _Fifo, results: _Results | None) -> None:
    """Pass on what comes until the input ends; each line of that asks for the messages that have come so far."""
    waited = [0, fifo.descriptor] if fifo.is_ours else [0]
    beats_at = time.monotonic()
    while True:
        limit_s = max(beats_at - time.monotonic(), 0.0)
        ready, _, _ = select.select(waited, [], [], limit_s if results is None else min(limit_s, _LOOK_EVERY_S))
        if time.monotonic() >= beats_at:
            beats_at = time.monotonic() + _BEAT_EVERY_S
            _answer(request, "lives")
        asked = os.read(0, _READ_NBYTES) if 0 in ready else b"\n"
        while lines := fifo.read() if fifo.is_ours else []:
            for line in lines:
                _answer(request, "message", line.decode(errors="replace"))
        if results is not None:
            results.send(request)
        if not asked:
            return
        if 0 in ready:
            for number in asked.decode().split():
                _answer(request, "passed on", number)


def _main() -> None:
    # Who ends a job may signal all its processes, and its ranks have messages until they end.
    for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)
    request = json.loads(sys.stdin.buffer.readline())
    with ExitStack() as at_end:
        results = None
        try:
            fifo = _Fifo(request["folder"])
            at_end.callback(fifo.remove)
            if request["results"]:
                results = _Results(request["results"], request["token"])
                at_end.callback(results.remove)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            _answer(request, "failed", f"{why}; set TMPDIR to a folder that each host has, or to one that all share")
            sys.exit(1)
        try:
            if results is not None and not results.is_shared:
                _answer(request, "wants")
                results.receive(request["nbytes"])
            _answer(request, "ready")
            _serve(request, fifo, None if results is None or results.is_shared else results)
        except OSError:  # The launcher has ended.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        except EOFError:
            pass


if __name__ == "__main__":
    _main()
