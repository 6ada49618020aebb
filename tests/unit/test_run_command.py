"""`ringreduce run`: what is read of a job's standard error, and what its discovery script says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringreduce import processes
from ringreduce.cli import discovery
from ringreduce.cli.job import SUPERVISOR, Mark, MarkReader

DIED = b"\x1eringreduce: rank 3 on n1.cluster has died\n"


@pytest.mark.parametrize(
    ("text", "rest", "marks"),
    [
        (DIED, b"", [Mark("has died", 3, "n1.cluster")]),
        (b"a" + DIED + b"b\n" + processes.WENT_ON, b"ab\n", [Mark("has died", 3, "n1.cluster"), Mark("went on")]),
        (processes.BEGIN_AGAIN * 2, b"", [Mark("begin again")] * 2),
        (b"no mark \x1e\n\x1eringreduce: is none\n\x1e\x1e", b"no mark \x1e\n\x1eringreduce: is none\n\x1e\x1e", []),
        (DIED[:-1], DIED[:-1], []),
        (b"\x1eringreduce: rank 3 on " + b"n" * 400 + b" has died\n", None, []),
        (b"\xff\x00\r\n", b"\xff\x00\r\n", []),
    ],
)
@pytest.mark.parametrize("piece_nbytes", [1, 2, 7, 1000])
def test_marks_are_taken_out_and_the_rest_stays(
    text: bytes, rest: bytes | None, marks: list[Mark], piece_nbytes: int
) -> None:
    """In whatever pieces they come; what only looks like one is passed on."""
    reader, passed, found = MarkReader(), b"", []
    for first in range(0, len(text), piece_nbytes):
        out, new = reader.feed(text[first : first + piece_nbytes])
        passed, found = passed + out, found + new
    assert passed + reader.rest() == (text if rest is None else rest)
    assert found == marks


@pytest.mark.parametrize(
    ("program", "code", "ends"), [(["true"], 0, "has ended well"), (["sh", "-c", "exit 3"], -9, "has died")]
)
def test_the_shell_of_a_rank_says_how_that_ends(program: list[str], code: int, ends: str) -> None:
    """And turns any end but a good one into a signal."""
    environ = {**os.environ, "OMPI_COMM_WORLD_RANK": "5", "PMIX_HOSTNAME": "n1"}
    done = subprocess.run([*SUPERVISOR, *program], capture_output=True, check=False, env=environ)
    assert done.returncode == code
    assert MarkReader().feed(done.stderr) == (b"", [Mark("has begun", 5, "n1"), Mark(ends, 5, "n1")])


def test_the_signal_of_the_launcher_is_kept() -> None:
    """Until somebody asks, from before Python handles it on; a program that is started meanwhile does not end by it."""
    program = (
        "import os, signal, subprocess, sys, threading\n"
        "from ringreduce.processes import KeptSignal\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "done, begun = threading.Event(), threading.Event()\n"
        "def wait(): begun.set(); done.wait()\n"
        "thread = threading.Thread(target=wait)\n"
        "thread.start(); begun.wait()\n"
        "kept = KeptSignal(signal.SIGUSR2)\n"
        "print(kept.take())\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "print(kept.take(), kept.take())\n"
        "done.set(); thread.join()\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "print(kept.take(), kept.take())\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\n"
        "child.send_signal(signal.SIGUSR2)\n"
        "child.communicate()\n"
        "print(child.returncode)\n"
    )
    done = subprocess.run([*SUPERVISOR, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False", "True", "False", "0"]


def test_a_script_says_which_hosts_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails, or takes too long with all that it has started, is an error."""
    script = tmp_path / "discover"

    def output(source: str) -> str:
        script.write_text(f"#!/bin/sh\n{source}\n")
        script.chmod(0o755)
        return discovery._output(str(script))

    assert output("echo a:2; echo b") == "a:2\nb\n"
    with pytest.raises(subprocess.CalledProcessError, match="status 3"):
        output("echo a:2; exit 3")
    monkeypatch.setattr(discovery, "_LIMIT_S", 0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        output("sleep 100 & sleep 100")
