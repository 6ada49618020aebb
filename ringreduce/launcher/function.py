"""`run`: call a function on several ranks that it starts, and return what all of them returned."""

from __future__ import annotations

import importlib
import logging
import math
import os
import pickle
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

__all__ = ["call_on_ranks", "find_pickle", "run"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

#: The exit status of commands that have refused their arguments.
_WRONG_USE = 2
#: What a job gets to end by itself (seconds), once one has failed and once all have returned: the latter may
#: still be writing files in exit handlers.
_AFTER_FAILURE_S = 5.0
_AFTER_SUCCESS_S = 60.0
#: What it gets once it is told to end, before it is killed.
_TO_END_S = 5.0


def run(
    func: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    *,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> list[_T]:
    """Call a function on new ranks, one process each, and wait for them; from a script or a notebook.

    The function calls `init` itself. It, its arguments and what it returns go by cloudpickle if that is installed, so
    that it may be a lambda or defined in a notebook, and by pickle if not; then the script that defines it must keep
    what it does under ``if __name__ == "__main__":``, as for `multiprocessing`. ``ringreduce run`` starts the ranks.

    Args:
        func: what to call.
        args: its arguments.
        kwargs: its keyword arguments.
        np: how many ranks to start.
        options: more options of ``ringreduce run``, as ``["-H", "h1:2,h2:2"]``. All hosts must share the folder for
            temporary files (``TMPDIR``), and this installation.
        env: the environment of the ranks on this host; None: that of this process.

    Returns:
        What the ranks returned, in their order.

    Raises:
        ConfigError: an argument is wrong, mpirun is missing, or the function cannot be pickled.
        CollectiveError: a rank failed, and ended the job; the message has its traceback.
    """
    if np < 1:
        raise ConfigError(f"run starts at least one rank, not {np}")
    launcher = [sys.executable, "-m", "ringreduce", "run", "-np", str(np), *options]
    worker = [sys.executable, "-m", "ringreduce.launcher.worker"]
    return call_on_ranks(launcher, worker, func, args, kwargs, np, env)


def call_on_ranks(
    launcher: Sequence[str],
    worker: Sequence[str],
    func: Callable[..., _T],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    size: int | None,
    env: Mapping[str, str] | None,
) -> list[_T]:
    """Start a job in which each rank calls a function; return what they returned.

    Args:
        launcher: the command that starts the ranks, up to the program.
        worker: the program, which gets a folder and passes it to `ringreduce.launcher.worker.main`.
        func: what to call.
        args: its arguments.
        kwargs: its keyword arguments.
        size: how many ranks there are; None: the job goes on when some fail.
        env: as for `run`.

    Raises:
        ConfigError, CollectiveError: as `run`.
    """
    call = _pickled_call(func, tuple(args), dict(kwargs or {}))
    # Readable by this user alone, as it must be: pickles are programs.
    with tempfile.TemporaryDirectory(prefix="ringreduce-run-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "call").write_bytes(call)
        status = _carry_out([*launcher, *worker, name], env, folder, size)
        return _results(folder, size, status)


def find_pickle() -> Any:
    """Return cloudpickle if it is installed, else pickle: what calls and their results go by."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def _pickled_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return what a worker needs: a preparation for `multiprocessing.spawn.prepare`, and then the call."""
    import multiprocessing  # which would make the import of ringreduce slower

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


def _carry_out(command: Sequence[str], env: Mapping[str, str] | None, folder: Path, size: int | None) -> int:
    """Run a job until it ends, or until its time is over once a rank has failed or all have returned.

    Args:
        command: the launcher and its arguments.
        env: its environment.
        folder: where the ranks put what they return.
        size: how many there are; None: the job goes on when some fail.

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
            if size is None:
                continue
            if any(folder.glob("*.failure")):
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
            elif len(list(folder.glob("*.result"))) == size:
                deadline = min(deadline, time.monotonic() + _AFTER_SUCCESS_S)
        _log.warning("the job has not ended by itself; ending it")
        return -signal.SIGTERM
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=_TO_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _results(folder: Path, size: int | None, status: int) -> list[Any]:
    """Return what the ranks left in the folder, or raise what the first that failed did.

    Args:
        folder: where they are; files begin with the number of the job, as one that grows is several, and the rank.
        size: how many ranks had to return; None: those that did count, if the job has ended well.
        status: of the job.
    """
    paths = sorted(folder.glob("*.result"), key=_job_and_rank)
    if size is None and status == 0 and paths:
        last, _ = _job_and_rank(paths[-1])
        return [pickle.loads(path.read_bytes()) for path in paths if _job_and_rank(path)[0] == last]
    failed = sorted(folder.glob("*.failure"), key=lambda path: path.stat().st_mtime)
    if failed:
        text = failed[0].read_text(encoding="utf-8")
        raise CollectiveError(f"rank {_job_and_rank(failed[0])[1]} of {size or 'the job'} failed:\n{text}")
    missing = set(range(size or 1)) - {_job_and_rank(path)[1] for path in paths}
    if missing:
        wrong_use = status == _WRONG_USE
        said = f"the job ended with status {status}, and of {size or 'its'} ranks these had not returned: "
        said += f"{', '.join(map(str, sorted(missing)))}; its output says why"
        raise ConfigError(said) if wrong_use else CollectiveError(said)
    if status:
        _log.warning("all ranks returned, but the job ended with status %d", status)
    return [pickle.loads(path.read_bytes()) for path in paths]


def _job_and_rank(path: Path) -> tuple[int, int]:
    job, rank = path.stem.split("-")
    return int(job), int(rank)
