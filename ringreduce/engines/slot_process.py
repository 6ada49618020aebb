"""What runs mpirun's daemons on a node: a process beside the task of an engine that holds slots there.

It reads its ticket, its name and the file of `ringreduce.launcher.connection` from standard input, and connects to the
driver, whose commands it runs. It ends when the task ends, which closes that input, and when the driver does; then it
ends all processes below it, and removes its folder, where daemons have their files. Its status is 0 only if the driver
has said that it is to end. Its file takes the standard library alone, for a quick start.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

#: The variable with its folder, which belongs to the node: mpirun passes it on to no other.
FOLDER = "_RINGREDUCE_SLOT"
#: The socket there, at which the task gives data to ranks.
DATA = "data"
#: What it asks the driver for: commands.
SLOT = "slot"
#: Comes in place of a command.
END = "end"
#: Comes in place of the number of a command: what follows is a message of a rank here, for `ringreduce run`.
MESSAGE = "message"
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_EVERY_S = 0.05  # at commands that run
_BEAT_EVERY_S = 1.0  # meanwhile
_READ_NBYTES = 1 << 16


def _main() -> int:
    # Processes whose parents have ended become children of this one, where they are found.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # are for the task, which ends this process
        signal.signal(each, lambda *_: None)  # if they were ignored, the ranks would ignore them, too
    try:
        ticket, name, file = json.loads(sys.stdin.buffer.readline())
        with _module(file).connected(ticket, {"what": SLOT, "name": name}) as driver:
            try:
                return 0 if _serve(driver, name) else 1
            finally:
                _end_all()  # before the connection ends, for which the driver waits
    finally:
        shutil.rmtree(os.environ[FOLDER], ignore_errors=True)


def _module(file: str) -> Any:
    """Return a module of the standard library's alone, whose package this process does not import."""
    spec = spec_from_file_location("connection", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(driver: Any, name: str) -> bool:
    """Run the commands that come, each with its number; answer with number and status when one has ended.

    Args:
        driver: the connection.
        name: of the slot.

    Returns:
        Whether the driver has said that this is to end; else the task has ended, or the connection.
    """
    # Daemons that are killed leave their files.
    environ = {**os.environ, "PRTE_MCA_prte_tmpdir_base": os.environ[FOLDER]}
    # Where ranks here write messages; see `ringreduce.launcher.marks`.
    path = f"{os.environ[FOLDER]}/{os.readlink('/proc/self/ns/net')}"
    os.mkfifo(path, 0o600)
    fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    rest = b""
    beats_at = time.monotonic()
    waited: list[Any] = [0, driver, fifo]
    commands: dict[int, subprocess.Popen[bytes]] = {}
    while True:
        ready, _, _ = select.select(waited, [], [], _LOOK_EVERY_S if commands else None)
        if 0 in ready:
            return False
        if driver in ready:
            try:
                asked = driver.receive_json()
            except (OSError, EOFError):
                return False
            if asked == END:
                return True
            number, command = asked
            commands[number] = subprocess.Popen(["sh", "-c", command], stdin=subprocess.DEVNULL, env=environ)
        ended = {number: process for number, process in commands.items() if process.poll() is not None}
        with suppress(BlockingIOError):
            rest += os.read(fifo, _READ_NBYTES)
        *lines, rest = rest.split(b"\n")
        if commands and time.monotonic() >= beats_at:
            beats_at = time.monotonic() + _BEAT_EVERY_S
            lines.append(f"- 0 {name} lives".encode())
        for line in lines:
            with suppress(OSError):
                driver.send_json([MESSAGE, line.decode(errors="replace")])
        # What ranks have said before a command ended comes before its status.
        for number, process in ended.items():
            del commands[number]
            with suppress(OSError):  # the next look finds that the driver has ended
                driver.send_json([number, process.returncode])


def _end_all() -> None:
    """Kill all processes below this one, as each becomes a child of it once its parent has ended."""
    with suppress(ChildProcessError):
        while True:
            for name in filter(str.isdecimal, os.listdir("/proc")):
                with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                        os.kill(int(name), signal.SIGKILL)
            os.wait()


if __name__ == "__main__":
    sys.exit(_main())
