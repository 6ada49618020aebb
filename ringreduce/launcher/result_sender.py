"""What `ringreduce.run` runs on each other host: it receives the call, and sends back what the ranks there leave.

The text of this file goes to a Python of the host, which need not have ringreduce: it imports the standard library
alone. It reads one line of JSON, the request, then the call, and then waits for the end of its input: when the launcher
closes it, or has ended in whatever way.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
from contextlib import suppress
from typing import Any

#: The file with the call, and how the names of files end that ranks leave.
CALL = "call"
DONE = (".result", ".failure")
_PIECE_NBYTES = 1 << 18
_LOOK_EVERY_S = 0.2


def _answer(request: dict[str, Any], what: str, value: object = "") -> None:
    sys.stdout.buffer.write(f"\n{request['mark']}{json.dumps([what, value])}\n".encode())
    sys.stdout.buffer.flush()


def _receive(path: str, nbytes: int) -> None:
    # What has come so far: a read of so many bytes would wait for more than there are.
    stdin: Any = sys.stdin.buffer
    with open(path, "xb") as file:
        while nbytes:
            piece = stdin.read1(min(nbytes, _PIECE_NBYTES))
            if not piece:
                raise EOFError
            file.write(piece)
            nbytes -= len(piece)


def _send(request: dict[str, Any], folder: str, name: str) -> None:
    """Send a file: an answer with its name and size, and then its bytes."""
    with open(os.path.join(folder, name), "rb") as file:
        _answer(request, "file", [name, os.fstat(file.fileno()).st_size])
        shutil.copyfileobj(file, sys.stdout.buffer, _PIECE_NBYTES)
        sys.stdout.buffer.flush()


def serve(request: dict[str, Any]) -> None:
    """Have the folder of a call, until the input ends.

    Args:
        request: ``folder``, the same on all hosts; ``token``, the name of a file in it, by which a host sees that it
            shares the folder; ``nbytes``: of the call; ``mark``: begins answers.

    Raises:
        OSError: there can be no such folder.
        EOFError: the launcher has ended.
    """
    folder = request["folder"]
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not os.path.exists(os.path.join(folder, request["token"])):
            raise
        _answer(request, "shares")
        sys.stdin.buffer.read()
        return
    try:
        _answer(request, "wants")
        _receive(os.path.join(folder, CALL), request["nbytes"])
        _answer(request, "has")
        sent: set[str] = set()
        ends = False
        while not ends:
            ends = bool(select.select([0], [], [], _LOOK_EVERY_S)[0])  # all that comes now is the end
            for name in sorted(set(os.listdir(folder)) - sent):
                if name.endswith(DONE):
                    _send(request, folder, name)
                    sent.add(name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _main() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Ranks may be returning when all processes of a job get SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    request = json.loads(sys.stdin.buffer.readline())
    try:
        serve(request)
    except BrokenPipeError:  # the launcher has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the end of Python would write there again
    except EOFError:
        pass
    except OSError as error:
        with suppress(OSError):
            where = error.filename or request["folder"]
            remedy = "set TMPDIR to a folder that each host has, or to one that all share"
            _answer(request, "failed", f"{where}: {error.strerror}; {remedy}")
        sys.exit(1)


if __name__ == "__main__":
    _main()
