"""`run`: start ranks, call a function on all of them, and return their results."""

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
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ringreduce.common.errors import CollectiveError, ConfigError
from ringreduce.common.files import require_own
from ringreduce.common.launch import launch, report_begin
from ringreduce.common.processes import end_with_parent
from ringreduce.common.settings import rows

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

#: What gives Horovod's names to a process that imports it: ranks do, if the program that starts them has.
_HOROVOD = "ringreduce.horovod"
#: In the order in which `run` looks at these arguments.
_NO_MEANING = (
    "use_gloo has no meaning here: there is only MPI, and no Gloo",
    "disable_cache has no meaning here: mpirun checks no hosts beforehand, so nothing is kept of that",
    "ssh_identity_file has no meaning here: name it in ~/.ssh/config",
)
#: No grace: the command gets SIGTERM only when the caller has an error already, or ends.
_RUN = (sys.executable, "-m", "ringreduce", "run", "--grace=0")
_WORK = ("-c", "from ringreduce.launcher.function import work; work()")
#: The exit status of commands that have refused their arguments.
_WRONG_USE = 2
#: What a job gets to end by itself (seconds), once one has failed and once all have returned: the latter may
#: still be writing files in exit handlers.
_AFTER_FAILURE_S = 5.0
_AFTER_SUCCESS_S = 60.0
#: How long it has to end after it was asked to, before it is killed.
_TO_END_S = 5.0


def run(
    func: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> list[_T]:
    """Call a function on new ranks, one process each, and wait for them; from a script or a notebook.

    The function calls `init` itself. It, its arguments and what it returns go by cloudpickle if that is installed, so
    that it may be a lambda or defined in a notebook, and by pickle if not; then the script that defines it must keep
    what it does under ``if __name__ == "__main__":``, as for `multiprocessing`. ``ringreduce run`` starts the ranks.

    This is ``horovod.run``, too. In a program that has imported ``horovod``, the ranks have Horovod's module names,
    variables and numbers as well. With any of ``min_num_proc``, ``max_num_proc``, ``slots``, ``reset_limit`` and
    ``cooldown_range`` the job is elastic: it goes on without ranks that die, if the function trains by
    `ringreduce.elastic.run`.

    Args:
        func: function to call.
        args: its arguments.
        kwargs: its keyword arguments.
        num_proc: how many ranks to start.
        min_num_proc: fewer ranks end the job; None: ``num_proc``.
        max_num_proc: number of ranks to which it grows if ``hosts`` or ``hostfile`` has slots for them.
        slots: slots of hosts without a number.
        reset_limit: how often the ranks may change.
        cooldown_range: seconds for which a host is not used after a death: after the first, and at most.
        hosts: hosts and their ranks, ``"host1:2,host2:4"``; None: all here. They must have this installation and the
            script at the same paths, unless ``options`` has ``"--ship"``. What ranks return comes back over ssh, srun
            or the agent that mpirun uses; where mpirun uses none of these, hosts must share the folder for temporary
            files (``TMPDIR``).
        hostfile: the path of a file with a line ``host1 slots=2`` for each, in place of ``hosts``.
        start_timeout: seconds to wait for enough slots, and for all ranks to call ``init()``.
        ssh_port: port of sshd on the other hosts.
        ssh_identity_file, disable_cache, use_gloo: taken for Horovod's sake; a warning says why they mean nothing here.
        output_filename: folder for the output of each rank, a file each.
        verbose: whether to write the command to standard error.
        use_mpi: taken for Horovod's sake: it is always MPI.
        mpi_args: more options for mpirun, as in a shell.
        network_interface: names of interfaces for messages, separated by commas.
        executable: path of the Python to run; None: that of this process.
        np, min_np, max_np: other names of ``num_proc``, ``min_num_proc``, ``max_num_proc``.
        options: more options of ``ringreduce run``, as ``["-H", "h1:2,h2:2"]``.
        env: environment of the ranks on this host; None: that of this process.

    Returns:
        The results of the ranks, in their order; of an elastic job those of ranks that have reached the end.

    Raises:
        ConfigError: an argument is wrong, mpirun is missing, or the function cannot be pickled.
        CollectiveError: a rank failed, and ended the job; the message has its traceback.
    """
    if hosts is not None and hostfile is not None:
        raise ConfigError("run takes hosts or hostfile, not both")
    size = num_proc if np is None or num_proc != 1 else np
    if size < 1:
        raise ConfigError(f"run starts at least one rank, not {size}")
    for argument, why in zip((use_gloo, disable_cache, ssh_identity_file), _NO_MEANING, strict=True):
        if argument:
            _log.warning("%s", why)
    least = min_np if min_num_proc is None else min_num_proc
    most = max_np if max_num_proc is None else max_num_proc
    elastic = any(each is not None for each in (least, most, slots, reset_limit, cooldown_range))
    given = {
        **locals(),
        "num_proc": size,
        "min_num_proc": size if elastic and least is None else least,
        "max_num_proc": most if most is None or hosts or hostfile else min(most, size),  # there are no other slots
        "verbose": bool(verbose) or None,
    }
    words = ["--elastic"] * elastic + ["--horovod-variables"] * (_HOROVOD in sys.modules) + _options(given)
    if cooldown_range is not None:
        words.append(f"--cooldown={' '.join(map(str, cooldown_range))}")
    if "--ship" in options:
        words += _ship_paths()
    command = [*words, *options, executable or sys.executable, *_WORK]
    return _call_on_ranks(
        command, pickled_call(func, tuple(args), dict(kwargs or {})), size=None if elastic else size, env=env
    )


def _options(arguments: Mapping[str, Any]) -> list[str]:
    """Return the options of ``ringreduce run`` for arguments of `run`: rows of `LaunchSpec` have both names."""
    from ringreduce.launcher.spec import LaunchSpec  # which would make the import of ringreduce slower

    values = {row.options[-1]: arguments.get(name) for _, _, row in rows(LaunchSpec) for name in row.arguments}
    return [name if value is True else f"{name}={value}" for name, value in values.items() if value is not None]


def _ship_paths() -> list[str]:
    """Return the options by which other hosts get the script of this process, and what is beside it."""
    from ringreduce.launcher.ship import with_modules  # which would make the import of ringreduce slower

    script = getattr(sys.modules["__main__"], "__file__", None)
    return [f"--ship-path={path}" for path in (with_modules(script) if script else ())]


def _call_on_ranks(command: Sequence[str], call: bytes, size: int | None, env: Mapping[str, str] | None) -> list[Any]:
    """Start a job in which each rank makes a call; return their results.

    Args:
        command: options of ``ringreduce run``, and the program; a folder is appended.
        call: pickled call, as a worker reads it.
        size: number of ranks; None if the job may go on without some.
        env: as for `run`.
    """
    # Readable by this user alone, as it must be: pickles are programs.
    with tempfile.TemporaryDirectory(prefix="ringreduce-run-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "call").write_bytes(call)
        line = [*_RUN, f"--results={name}", *command, name]
        return results(folder, size, carry_out(line, env, folder=folder, size=size))


def _find_pickle() -> Any:
    """Return cloudpickle if it is installed, else pickle."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def pickled_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, here: bool = True
) -> bytes:
    """Return the input of a worker.

    It has modules to import, the folder of this environment, data for `multiprocessing.spawn.prepare`, and the call.

    Args:
        func, args, kwargs: the call.
        here: whether ranks have the folder and the path of modules of this process, not those of an engine's worker.

    Raises:
        ConfigError: it cannot be pickled.
    """
    import multiprocessing  # which would make the import of ringreduce slower

    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "run was called by a rank that it started, while that imports the script; "
            'put the call under if __name__ == "__main__":'
        )
    preparation: dict[str, Any] = {"sys_argv": sys.argv}
    preparation |= {"sys_path": sys.path, "dir": os.getcwd()} if here else {}
    pickler = _find_pickle()
    if pickler is pickle:  # the other takes along what the script defines
        main = _main_module()
        if not main and getattr(func, "__module__", None) == "__main__":
            raise ConfigError(f"run needs cloudpickle for {func!r}, which no file defines: pip install cloudpickle")
        preparation |= main
    try:
        modules = [name for name in (_HOROVOD,) if name in sys.modules]
        return pickle.dumps((modules, sys.prefix, preparation, pickler.dumps((func, args, kwargs))))
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


def carry_out(
    command: Sequence[str],
    env: Mapping[str, str] | None,
    folder: Path,
    size: int | None,
    look: Callable[[], object] = lambda: None,
) -> int:
    """Run a job until it ends; for some seconds more at most once a rank has failed or all have returned.

    Args:
        command: the launcher and its arguments.
        env: its environment.
        folder: folder for the results of the ranks.
        size: number of ranks; None if the job may go on without some.
        look: called again and again; what it raises ends the job.

    Returns:
        Its status.
    """
    process = begin(command, env)
    deadline = math.inf
    try:
        while time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=0.1)
            look()
            if size is None:
                continue
            if any(folder.glob("*.failure")):
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
            elif len(list(folder.glob("*.result"))) == size:
                deadline = min(deadline, time.monotonic() + _AFTER_SUCCESS_S)
        _log.warning("the job has not ended by itself; ending it")
        return -signal.SIGTERM
    finally:
        end(process)


def begin(command: Sequence[str], env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    """Start a job, which ends with this process, and with the thread that calls this."""
    # Its own session: an interrupt is for this process, which ends the other, and so does its end.
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a job, if it has not ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=_TO_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def results(folder: Path, size: int | None, status: int) -> list[Any]:
    """Return the results in the folder, or raise the error of the first rank that failed.

    Args:
        folder: folder of the results; names of files begin with the number of the job, if it grew, and the rank.
        size: number of ranks that had to return; None if any may, once the job has ended well.
        status: exit status of the job.
    """
    paths = sorted(folder.glob("*.result"), key=_job_and_rank)
    if size is None and status == 0 and paths:
        last, _ = _job_and_rank(paths[-1])
        return [pickle.loads(path.read_bytes()) for path in paths if _job_and_rank(path)[0] == last]
    # Those of jobs before the last one are of ranks that it went on without.
    failed = sorted(folder.glob("*.failure"), key=lambda path: (-_job_and_rank(path)[0], path.stat().st_mtime))
    if failed:
        text = failed[0].read_text(encoding="utf-8")
        raise CollectiveError(f"rank {_job_and_rank(failed[0])[1]} of {size or 'the job'} failed:\n{text}")
    missing = set(range(size or 1)) - {_job_and_rank(path)[1] for path in paths}
    if missing:
        said = f"the job ended with status {status}, and of {size or 'its'} ranks these had not returned: "
        said += f"{', '.join(map(str, sorted(missing)))}; its output says why"
        raise ConfigError(said) if status == _WRONG_USE else CollectiveError(said)
    if status:
        _log.warning("all ranks returned, but the job ended with status %d", status)
    return [pickle.loads(path.read_bytes()) for path in paths]


def _job_and_rank(path: Path) -> tuple[int, int]:
    job, rank = path.stem.split("-")
    return int(job), int(rank)


# ---- in a rank ----


def work(folder: Path | None = None, require: Callable[[], object] = lambda: None) -> None:
    """Make the call in a folder, and write its result or the traceback there.

    In a process of its own: one rank. A host that does not see the folder is named.

    Args:
        folder: None: the one that the command line names.
        require: raises why the call cannot be made here.
    """
    folder = folder or Path(sys.argv[1])
    if not folder.exists():
        sys.exit(
            f"ringreduce.run: {os.uname().nodename} does not see {folder}, where the call is; set TMPDIR to a folder "
            "that all hosts share, or name the hosts"
        )
    try:
        require_own(folder)  # what is there is unpickled
    except PermissionError as error:
        sys.exit(f"ringreduce.run: {error}")
    place = f"{launch().restarts}-{launch().rank}"
    try:
        require()
        result = make_call((folder / "call").read_bytes())
    except BaseException:
        _leave(folder / f"{place}.failure", traceback.format_exc().encode())
        raise
    _leave(folder / f"{place}.result", result)


def make_call(pickled: bytes) -> bytes:
    """Make the call that `pickled_call` has pickled; return its pickled result."""
    import multiprocessing.spawn

    report_begin()  # who called it gets all results: a function that calls no init is meant so
    modules, prefix, preparation, call = pickle.loads(pickled)
    for name in modules:
        importlib.import_module(name)
    # As in multiprocessing's own children: the script, if it is needed, runs under another name than __main__, and what
    # it starts on the way is refused.
    process: Any = multiprocessing.current_process()
    process._inheriting = True
    try:
        multiprocessing.spawn.prepare(_as_here(preparation, prefix))
    finally:
        del process._inheriting
    function, args, kwargs = pickle.loads(call)
    result: bytes = _find_pickle().dumps(function(*args, **kwargs))
    return result


def _as_here(preparation: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the data of a preparation with the paths of this host, which may have copies of ``--ship``.

    Args:
        preparation: with the paths of the host where the call was made.
        prefix: folder of the environment there.

    Raises:
        ConfigError: there is no script that defines the function.
    """
    root = sys.prefix.removesuffix(prefix)  # of the copies; all of it, if there are none
    root = "" if root == sys.prefix else root

    def here(path: str) -> str:
        return root + path if root and path and os.path.exists(root + path) else path

    found = {**preparation}
    if "dir" in preparation:
        found |= {"sys_path": [*map(here, preparation["sys_path"])], "dir": here(preparation["dir"])}
        if not os.path.isdir(found["dir"]):  # mpirun has left this process elsewhere, too
            del found["dir"]
    script = here(preparation.get("init_main_from_path", ""))
    if script:
        found["init_main_from_path"] = script
        if not os.path.isfile(script):
            raise ConfigError(
                f"{os.uname().nodename} has no {script}, which defines the function: copy it there, give "
                'options=["--ship"], or install cloudpickle'
            )
    return found


def _leave(path: Path, content: bytes) -> None:
    """Write a file that is either whole or not there."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    unfinished.rename(path)
