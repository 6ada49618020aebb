"""What the tests of whole jobs share: a way to run one under mpirun that always ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest


class Job(NamedTuple):
    """How a job ended: mpirun's exit code, what all ranks wrote, and how long it took."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


@pytest.fixture
def run_job() -> Callable[..., Job]:
    """A function that runs python under mpirun: ``run_job(ranks, "-m", "ringreduce", ...)``.

    ``source=`` runs program text in place of arguments, ``limit_s=`` is the time after which the job is killed, and
    other keywords become environment variables.
    """
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not on the path")

    def run(ranks: int, *arguments: str, source: str = "", limit_s: int = 50, **environment: str) -> Job:
        arguments = ("-c", textwrap.dedent(source)) if source else arguments
        crowded = ranks > len(os.sched_getaffinity(0))
        begin = time.monotonic()
        # A launcher that is killed leaves files, which a later one of the same pid would stumble over.
        with tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as folder:
            settings = {"TMPDIR": folder, "OMPI_MCA_mpi_yield_when_idle": str(int(crowded)), **environment}
            done = subprocess.run(
                ["timeout", "--kill-after=5", str(limit_s), "mpirun", "-np", str(ranks), sys.executable, *arguments],
                env={**os.environ, **settings},
                capture_output=True,
                text=True,
                check=False,
                timeout=limit_s + 8,
            )
        return Job(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)

    return run
