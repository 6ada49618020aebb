"""One address for a job: what rank 0 serves, whatever happens to the ranks."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import launching
import pytest
from served_jobs import RUN, everyone, running


def ranks_in(metrics: str) -> set[str]:
    """Return the ranks of which there are steps in the text for Prometheus."""
    lines = [line for line in metrics.splitlines() if line.startswith("ringreduce_steps_total{")]
    return {line.partition('rank="')[2].partition('"')[0] for line in lines}


def command_lines() -> list[bytes]:
    """Return those of all processes that can be read."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # another user's, or it has ended
            found.append(path.read_bytes())
    return found


def test_all_ranks_are_seen(tmp_path: Path) -> None:
    """In the metrics, on the page and by `top`, under our launcher; the token is in no command line and no output."""
    with running(tmp_path, *RUN, "-np", 3) as job:
        job.health(lambda health: everyone(3)(health) and len(ranks_in(job.get("/metrics"))) == 3)
        token = (tmp_path / "token").read_text().strip()
        lines = command_lines()
        assert any(str(tmp_path / "train.py").encode() in line for line in lines)
        assert not any(token.encode() in line for line in lines)
        page = job.get("/")
        assert "<h2>3 ranks</h2>" in page
        assert "a token is needed" in job.get("/", token="another one")
        words = ("top", "--once", "--job", f":{job.port}", "--status-token-file", tmp_path / "token")
        shown = launching.run(launching.RINGREDUCE, *words)
        assert ": 3 ranks, " in shown.stdout, shown.stderr
        written = job.end()
    assert f"rank 0 serves what the job does at http://127.0.0.1:{job.port}/" in written
    assert token not in written + page + shown.stdout


def test_under_mpirun(tmp_path: Path) -> None:
    """By the variable alone."""
    with running(tmp_path, "mpirun", "-np", 2, RINGREDUCE_STATUS="PORT", RINGREDUCE_STATUS_TOKEN_FILE="TOKEN") as job:
        job.health(lambda health: everyone(2)(health) and ranks_in(job.get("/metrics")) == {"0", "1"})
        job.end()


def test_one_rank(tmp_path: Path) -> None:
    """It has a view, too, without a launcher."""
    with running(tmp_path, "env", RINGREDUCE_STATUS="PORT", RINGREDUCE_STATUS_TOKEN_FILE="TOKEN") as job:
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
        job.health(lambda health: health["missing"] == [1] and not health["alive"] and health["last_step_age_s"] > 5)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)
        job.health(lambda health: health["alive"] and health["last_step_age_s"] < 5)
        job.end()
