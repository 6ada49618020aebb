"""The agent of `ringreduce run` on a host: it passes on the messages of the ranks there, and sends heartbeats.

The text of this file goes to a Python of the host, which need not have ringreduce: it takes the standard library alone.
It reads one line of JSON, the request, and lives until its standard input ends: when the launcher closes it, or has
ended in whatever way.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import stat
import sys
import time
from contextlib import suppress
from typing import Any

_READ_NBYTES = 1 << 16
_BEAT_EVERY_S = 1.0


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


def _answer(request: dict[str, Any], what: str, value: object = "") -> None:
    left = memoryview(f"\n{request['mark']}{json.dumps([what, value])}\n".encode())
    while left:
        left = left[os.write(1, left) :]


def _serve(request: dict[str, Any], fifo: _Fifo) -> None:
    """Pass on messages until the input ends; each line of that asks for those that have come so far."""
    waited = [0, fifo.descriptor] if fifo.is_ours else [0]
    beats_at = time.monotonic()
    while True:
        ready, _, _ = select.select(waited, [], [], max(beats_at - time.monotonic(), 0.0))
        if time.monotonic() >= beats_at:
            beats_at = time.monotonic() + _BEAT_EVERY_S
            _answer(request, "lives")
        asked = os.read(0, _READ_NBYTES) if 0 in ready else b"\n"
        while lines := fifo.read() if fifo.is_ours else []:
            for line in lines:
                _answer(request, "message", line.decode(errors="replace"))
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
    try:
        fifo = _Fifo(request["folder"])
    except OSError as error:
        _answer(request, "failed", f"{error}; set TMPDIR to a folder that each host has")
        sys.exit(1)
    try:
        _answer(request, "ready")
        _serve(request, fifo)
    except OSError:  # The launcher has ended.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    finally:
        fifo.remove()


if __name__ == "__main__":
    _main()
