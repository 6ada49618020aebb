"""What the tests of whole jobs share: command lines and jobs that always end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

RINGREDUCE = Path(sys.executable).with_name("ringreduce")
PROGRAMS = Path(__file__).with_name("programs")
WITHOUT_COMPILER = Path(__file__).parents[1] / "without_compiler"
#: A job is ended before the watchdog of tests/conftest.py ends the test.
LIMIT_S = float(os.environ.get("RINGREDUCE_TEST_TIMEOUT", "120")) - 10


class Job(NamedTuple):
    """How a command line ended: its exit code, what all ranks wrote, and how long it took."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def well(self) -> Job:
        """Return itself, of a job that has ended well."""
        assert self.returncode == 0, self.stdout + self.stderr
        return self


def needs(*libraries: str) -> None:
    """Skip the test, or at module level the file, where one of some libraries is not installed.

    `pytest.importorskip` would import them, which takes seconds, into processes of tests that only start jobs.
    """
    for name in libraries:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


@contextmanager
def job_environment(**changes: str | None) -> Iterator[dict[str, str]]:
    """The variables of a job outside of any allocation, with ``changes``; None: without that one.

    A launcher that is killed leaves files, which a later one of the same pid would stumble over: each job has a folder
    of its own for those.
    """
    with tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as folder:
        settings: dict[str, str | None] = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PBS_", "LSB_"))},
            "PYTHONUNBUFFERED": None,  # users seldom have it, and it hides what is left in buffers
            "TMPDIR": folder,
            "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks that wait give their core to other ranks, and to other tests
            "PYTHONPATH": str(WITHOUT_COMPILER),  # torch starts in half the time
            **changes,
        }
        yield {name: value for name, value in settings.items() if value is not None}


def run(*command: object, limit_s: float = LIMIT_S, cwd: Path | None = None, **environment: str | None) -> Job:
    """Run a command line outside of any allocation.

    Args:
        command: its words.
        limit_s: the time (seconds) after which it is killed; it ends what hangs, not what is slow.
        cwd: where it runs.
        environment: variables; None: without it.
    """
    begin = time.monotonic()
    with job_environment(**environment) as variables:
        done = subprocess.run(
            ["timeout", "--kill-after=5", str(limit_s), *map(str, command)],
            cwd=cwd,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
    return Job(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)


def run_job(ranks: int, *arguments: object, limit_s: float = LIMIT_S, **environment: str | None) -> Job:
    """Run python under mpirun: ``run_job(2, "-m", "ringreduce", "doctor")``."""
    return run("mpirun", "-np", ranks, sys.executable, *arguments, limit_s=limit_s, **environment)


def run_program(source: str, *, ranks: int = 2, **environment: str | None) -> Job:
    """Run the text of a program under mpirun."""
    return run_job(ranks, "-c", textwrap.dedent(source), **environment)


def run_together(ranks: int, folder: Path, scripts: dict[str, list[str]], **environment: str | None) -> dict[str, str]:
    """Run scripts one after the other on the same ranks, which import libraries once; return what each has printed.

    Args:
        ranks: how many.
        folder: where the output is kept.
        scripts: by a name, each with its arguments.
        environment: variables, as for `run`.
    """
    run_job(ranks, PROGRAMS / "together.py", folder, json.dumps(scripts), **environment).well()
    return {name: "".join((folder / f"{name}-{rank}").read_text() for rank in range(ranks)) for name in scripts}
