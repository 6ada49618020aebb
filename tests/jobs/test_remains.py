"""What jobs leave in the folder for temporary files: nothing, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import launching
import pytest
from test_termination import appeared, ended_within

RUN = (sys.executable, "-m", "ringreduce", "run")

#: Makes some steps of a job, elastic or not; what rank 1 of three does in the third is an argument.
PROGRAM = """
import os, signal, sys
import numpy as np
import ringreduce as rr
from ringreduce import runtime
from ringreduce.elastic import ObjectState, run

rr.init()
state = ObjectState(step=0)

@run
def train(state):
    while state.step < 4:
        rr.allreduce(np.ones(3))
        runtime._process.own().observer.recorder.write_status()
        if rr.rank() == 1 and state.step == 2 and rr.size() == 3:
            exec(sys.argv[1])
        state.step += 1
        state.commit()

train(state)
"""


@pytest.mark.parametrize(
    ("options", "ending", "status"),
    [
        ((), "pass", 0),
        ((), "raise ValueError", 1),
        ((), "sys.exit(3)", 3),
        (("--elastic", "--min-np", "2"), "os.kill(os.getpid(), signal.SIGKILL)", 0),
    ],
    ids=["ends well", "raises", "exits", "goes on without a rank"],
)
def test_a_job_leaves_no_files_behind(tmp_path: Path, options: tuple[str, ...], ending: str, status: int) -> None:
    """Nor empty folders."""
    words = (*RUN, "-np", "3", *options, sys.executable, "-c", PROGRAM, ending)
    done = launching.run(*words, TMPDIR=str(tmp_path), XDG_RUNTIME_DIR=None)
    assert done.returncode == status, done.stderr
    assert list(tmp_path.rglob("*")) == []


def test_a_launcher_that_is_killed_leaves_no_files_behind(tmp_path: Path, environment: dict[str, str]) -> None:
    """What it has made is removed by those that it leaves behind."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    ending = f"open('{tmp_path}/new', 'w').write(str(os.getpid())); os.rename('{tmp_path}/new', '{tmp_path}/pid')"
    words = (*RUN, "-np", "3", sys.executable, "-c", PROGRAM, f"{ending}; signal.pause()")
    variables = {**environment, "TMPDIR": str(folder), "XDG_RUNTIME_DIR": ""}
    with subprocess.Popen(words, env=variables, stderr=subprocess.DEVNULL) as job:
        rank = int(appeared(tmp_path / "pid").read_text())
        (session,) = folder.glob("ompi.*")
        os.kill(job.pid, signal.SIGKILL)
        assert ended_within([rank, int(session.suffix[1:])], 30.0)  # the other one is mpirun
    assert list(folder.rglob("*")) == []
