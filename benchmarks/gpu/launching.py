"""Parts run as process groups of their own, under time limits that nothing survives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

#: What a group has between being asked to end and being ended.
GRACE_S = 8.0
#: What a session has between being killed and being gone.
_GONE_S = 5.0
#: What a launcher has to say its version.
_VERSION_S = 20.0
#: Where libraries are found anyway.
_SYSTEMS = (Path("/lib"), Path("/usr/lib"))


def find_mpirun(environment: dict[str, str]) -> tuple[str | None, str]:
    """Return the first launcher that can say its version, or None and why there is none.

    Those of wheels on PYTHONPATH come before that of this Python, and those on PATH come last. The programs and the
    library of the one that is returned are made known to ranks through ``environment``.
    """
    problem = ""
    for folder in _folders(environment):
        mpirun = folder / "mpirun"
        if not mpirun.is_file():
            continue
        tried, library = dict(environment), folder.parent / "lib"
        _prepend(tried, "PATH", folder)
        if library.is_dir() and library not in _SYSTEMS:
            _prepend(tried, "LD_LIBRARY_PATH", library)
        complaint = _complaint(mpirun, tried)
        if complaint is None:
            environment.update(tried)
            return str(mpirun), ""
        problem = problem or f"{mpirun} does not run: {complaint}; pip --target drops lib/: use --prefix"
    return None, problem or "there is no mpirun"


def _folders(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield where programs are: of PREFIX/lib/python3.X/site-packages in PREFIX/bin."""
    for name in filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)):
        folder = Path(name).absolute()
        yield folder / "bin"
        if folder.name in ("site-packages", "dist-packages") and len(folder.parents) > 2:
            yield folder.parents[2] / "bin"
    yield Path(sys.prefix) / "bin"
    yield from map(Path, filter(None, environment.get("PATH", "").split(os.pathsep)))


def _complaint(mpirun: Path, environment: Mapping[str, str]) -> str | None:
    """Return what a launcher complains of when it is to say its version, None if it says it."""
    try:
        asked = subprocess.run(
            [str(mpirun), "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_S,
            env=dict(environment),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if asked.returncode == 0:
        return None
    said = next((line.strip() for line in asked.stderr.splitlines() if line.strip()), f"status {asked.returncode}")
    return said.removeprefix(f"{mpirun}: ")


def _prepend(environment: dict[str, str], name: str, folder: Path) -> None:
    environment[name] = os.pathsep.join(filter(None, (str(folder), environment.get(name))))


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
            _end_session(process.pid)
            process.wait()
    return returncode, time.monotonic() - begin


def _end_session(session: int) -> None:
    """Kill all processes of a session, whatever their groups are, and wait until they are gone, for a while."""
    deadline = time.monotonic() + _GONE_S
    while (left := _living(session)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _living(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            # After the name, which may hold anything: state, parent, group, session.
            state, _, _, its, *_ = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(its) == session and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
