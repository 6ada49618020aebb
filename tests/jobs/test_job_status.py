"""One address for a job: what rank 0 serves, whatever happens to the ranks."""

from __future__ import annotations

import json
import os
import signal
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
import pytest

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


def ranks_in(metrics: str) -> set[str]:
    """Return the ranks of which there are steps in the text for Prometheus."""
    lines = [line for line in metrics.splitlines() if line.startswith("ringreduce_steps_total{")]
    return {line.partition('rank="')[2].partition('"')[0] for line in lines}


def test_all_ranks_are_seen(tmp_path: Path) -> None:
    """In the metrics, on the page and by `top`, under our launcher; the token is in no command line and no output."""
    with running(tmp_path, *RUN, "-np", 3) as job:
        job.health(lambda health: everyone(3)(health) and len(ranks_in(job.get("/metrics"))) == 3)
        token = (tmp_path / "token").read_text().strip()
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
        assert any(str(tmp_path / "train.py").encode() in line for line in lines)
        assert not any(token.encode() in line for line in lines)
        page = job.get("/")
        assert "<h2>3 ranks</h2>" in page
        assert "a token is needed" in job.get("/", token="another one")
        shown = launching.run(
            *(
                launching.RINGREDUCE,
                "top",
                "--once",
                "--job",
                f":{job.port}",
                "--status-token-file",
                tmp_path / "token",
            ),
        )
        assert ": 3 ranks, " in shown.stdout, shown.stderr
        written = job.end()
    assert f"rank 0 serves what the job does at http://127.0.0.1:{job.port}/" in written
    assert token not in written + page + shown.stdout


def test_under_mpirun(tmp_path: Path) -> None:
    """By the variable alone."""
    with running(tmp_path, "mpirun", "-np", 2, RINGREDUCE_STATUS="PORT,token:TOKEN") as job:
        job.health(lambda health: everyone(2)(health) and ranks_in(job.get("/metrics")) == {"0", "1"})
        job.end()


def test_one_rank(tmp_path: Path) -> None:
    """It has a view, too, without a launcher."""
    with running(tmp_path, "env", RINGREDUCE_STATUS="PORT,token:TOKEN") as job:
        job.health(everyone(1))
        assert ranks_in(job.get("/metrics")) == {"0"}
        job.end()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """The job runs all the same, and says why it is not seen."""
    (tmp_path / "end").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running(tmp_path, launching.RINGREDUCE, "run", "--status", port, "-np", 2) as job:
            assert f"port {port} of 127.0.0.1 cannot be served: Address already in use" in job.end()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_and_the_others_go_on(victim: int, tmp_path: Path) -> None:
    """The new rank 0 serves where the old one has, and counts the recovery."""
    with running(tmp_path, *RUN, "--elastic", "-np", 3, victim=victim, event="SIGKILL") as job:
        first = job.health(everyone(3))
        assert first["recoveries"] == 0
        job.happen()
        health = job.health(lambda health: everyone(2)(health) and health["recoveries"] == 1)
        assert health["errors"] == {}
        job.end()


def test_a_job_that_starts_again(tmp_path: Path) -> None:
    """Is served again, and counts the restart."""
    with running(tmp_path, *RUN, "--max-restarts", 1, "-np", 2, victim=1, event="fail") as job:
        job.health(everyone(2))
        job.happen()
        assert job.health(lambda health: everyone(2)(health) and health["restarts"] == 1)["alive"]
        job.end()


def test_a_rank_that_is_stopped_is_missing(tmp_path: Path) -> None:
    """After ten seconds; the age of the last step grows; it is back once it goes on."""
    with running(tmp_path, *RUN, "-np", 2, victim=1, event="SIGSTOP") as job:
        job.health(everyone(2))
        job.happen()
        health = job.health(lambda health: bool(health["missing"]))
        assert (health["missing"], health["alive"]) == ([1], False)
        assert health["last_step_age_s"] > 5
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)
        job.health(lambda health: health["alive"] and health["last_step_age_s"] < 5)
        job.end()
