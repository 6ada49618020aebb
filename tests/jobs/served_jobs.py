"""Jobs that are served, for tests."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import launching

#: Makes steps until there is a file ``end``. One rank does what it is asked to when there is a file ``now``.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import ringreduce as rr
from ringreduce.elastic import ObjectState, run

folder, victim, event = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rr.init()
me, begins = rr.rank(), "RINGREDUCE_RESTART" not in os.environ

def happen():
    (folder / "pid").write_text(str(os.getpid()))
    if event == "fail":
        raise ValueError("this is what fails")
    os.kill(os.getpid(), getattr(signal, event))

@run
def train(state):
    while not rr.allreduce(np.array([float((folder / "end").exists())]), op=rr.MAX)[0]:
        time.sleep(0.02)  # of a step
        rr.count(steps=1, samples=8)
        state.step += 1
        state.commit()
        if me == victim and begins and (folder / "now").exists():
            (folder / "now").unlink()
            happen()

train(ObjectState(rr.broadcast_object, rr.rank, step=0))
"""


class Running:
    """A job that runs.

    Args:
        port: where it is served.
        folder: of its program and its token.
        process: that has started it.
    """

    def __init__(self, port: int, folder: Path, process: subprocess.Popen[str]) -> None:
        self.port = port
        self.folder = folder
        self.process = process

    def get(self, path: str, token: str | None = None) -> str:
        """Return what it serves; as text, whatever the status is."""
        token = (self.folder / "token").read_text().strip() if token is None else token
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            return str(error.read().decode())

    def health(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return its health as soon as it is as wanted."""
        found: Any = "it was not served"
        deadline = time.monotonic() + launching.LIMIT_S - 20
        while time.monotonic() < deadline:
            try:
                found = json.loads(self.get("/health"))
                if wanted(found):
                    return dict(found)
            except OSError as error:  # it does not listen yet, or is between two worlds
                found = error
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)  # nothing says when there is something new
        raise AssertionError(f"the job never was as wanted: {found}")

    def happen(self) -> None:
        """Let the victim do what it is there for."""
        (self.folder / "now").touch()

    def end(self) -> str:
        """Let it end, well; return what it has written."""
        (self.folder / "end").touch()
        out, err = self.process.communicate(timeout=launching.LIMIT_S)
        assert self.process.returncode == 0, err
        return out + err


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(
    folder: Path, *command: object, victim: int = 0, event: str = "none", **variables: str
) -> Iterator[Running]:
    """Run the program by a command, in which ``PORT`` and ``TOKEN`` stand for where it is served, and with what."""
    port = free_port()
    program = folder / "train.py"
    program.write_text(PROGRAM)

    def filled(word: object) -> str:
        return str(word).replace("PORT", str(port)).replace("TOKEN", str(folder / "token"))

    words = ["timeout", "--kill-after=5", str(launching.LIMIT_S), *map(filled, command)]
    words += [sys.executable, str(program), str(folder), str(victim), event]
    with launching.job_environment(**{name: filled(text) for name, text in variables.items()}) as environment:
        process = subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            yield Running(port, folder, process)
        finally:
            if process.poll() is None:
                process.terminate()  # `timeout` passes it on to the job
                process.communicate(timeout=30)


RUN = (launching.RINGREDUCE, "run", "--status", "PORT", "--status-token-file", "TOKEN")


def everyone(size: int) -> Callable[[dict[str, Any]], bool]:
    """Return whether all ranks of a job of a size make steps."""
    return lambda health: health["ranks"] == size and not health["missing"] and health["steps"] > 0
