"""Parts run as process groups of their own, under time limits that nothing survives."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

#: What a group has between being asked to end and being ended.
GRACE_S = 8.0


def find_mpirun(environment: dict[str, str]) -> str | None:
    """Return the launcher, that of a wheel on PYTHONPATH before the system's; None if there is none.

    Its library is made known to mpi4py through ``environment``.
    """
    for folder in filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)):
        if (Path(folder) / "bin" / "mpirun").is_file():
            _prepend(environment, "PATH", str(Path(folder) / "bin"))
            _prepend(environment, "LD_LIBRARY_PATH", str(Path(folder) / "lib"))
            return str(Path(folder) / "bin" / "mpirun")
    return shutil.which("mpirun", path=environment.get("PATH"))


def _prepend(environment: dict[str, str], name: str, folder: str) -> None:
    environment[name] = os.pathsep.join(filter(None, (folder, environment.get(name))))


def run(command: Sequence[str], limit_s: float, environment: Mapping[str, str], log: Path) -> tuple[int | None, float]:
    """Run a command as a process group of its own.

    Args:
        command: what to run.
        limit_s: seconds that it may take.
        environment: all of its variables.
        log: gets its output.

    Returns:
        Its exit status, None if it was ended by the limit; and the seconds that it took.
    """
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            returncode: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            returncode = None
            _signal(process, signal.SIGTERM)  # a launcher ends its ranks, which may be groups of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            _signal(process, signal.SIGKILL)
            process.wait()
    return returncode, time.monotonic() - begin


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
