"""`run`: call a function on several ranks that it starts, and return what all of them returned."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.function import call_on_ranks

__all__ = ["run"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_HOROVODRUN = (sys.executable, "-c", "from ringreduce.cli.horovodrun import main; main()")


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
    env: Mapping[str, str] | None = None,
) -> list[_T]:
    """Call a function on new ranks, one process each, and wait for them; Horovod's ``horovod.run``.

    The function calls ``hvd.init()`` itself. It, its arguments and what it returns go by cloudpickle if that is
    installed, so that it may be a lambda or defined in a notebook, and by pickle if not; then the script that defines
    it must keep what it does under ``if __name__ == "__main__":``, as for `multiprocessing`.

    The ranks start as ``horovodrun`` starts them. With any of ``min_num_proc``, ``max_num_proc``, ``slots``,
    ``reset_limit`` and ``cooldown_range`` the job is elastic: it goes on without ranks that die, if the function trains
    by ``hvd.elastic.run``.

    Args:
        func: what to call.
        args: its arguments.
        kwargs: its keyword arguments.
        num_proc: how many ranks to start.
        min_num_proc: fewer ranks end the job; None: ``num_proc``.
        max_num_proc: to how many it grows where ``hosts`` or ``hostfile`` has slots for them.
        slots: of hosts without a number.
        reset_limit: how often the ranks may change.
        cooldown_range: for how many seconds a host on which a rank has died is not used: at first, and at most.
        hosts: ``"host1:2,host2:4"``, where to start how many; None: all here. They must share the folder for temporary
            files (``TMPDIR``), and this installation.
        hostfile: the path of a file with a line ``host1 slots=2`` for each, in place of ``hosts``.
        start_timeout: for how many seconds to wait for enough slots, and for all ranks to call ``init()``.
        ssh_port: of the other hosts.
        ssh_identity_file, disable_cache: taken for Horovod's sake; a warning says what to do in their place.
        output_filename: a folder for a file of what each rank writes.
        verbose: whether to write the command to standard error.
        use_gloo, use_mpi: taken for Horovod's sake: it is always MPI.
        mpi_args: more options for mpirun, as in a shell.
        network_interface: names of those for messages, separated by commas.
        executable: the python to run; None: the one that runs this.
        np, min_np, max_np: older names of ``num_proc``, ``min_num_proc``, ``max_num_proc``.
        env: the environment of the ranks on this host; None: that of this process.

    Returns:
        What the ranks returned, in their order; of an elastic job those that have reached the end.

    Raises:
        ConfigError: an argument is wrong, mpirun is missing, or the function cannot be pickled.
        CollectiveError: a rank failed, and ended the job; the message has its traceback.
    """
    if hosts is not None and hostfile is not None:
        raise ConfigError("run takes hosts or hostfile, not both")
    if use_gloo:
        _log.warning("use_gloo has no meaning here: there is only MPI, and no Gloo")
    size = num_proc if np is None or num_proc != 1 else np
    if size < 1:
        raise ConfigError(f"run starts at least one rank, not {size}")
    least = min_np if min_num_proc is None else min_num_proc
    most = max_np if max_num_proc is None else max_num_proc
    if most is not None and hosts is None and hostfile is None:
        most = min(most, size)  # there are no other slots
    options = {
        "--num-proc": size,
        "--min-np": least,
        "--max-np": most,
        "--slots": slots,
        "--reset-limit": reset_limit,
        "--blacklist-cooldown-range": None if cooldown_range is None else " ".join(map(str, cooldown_range)),
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--mpi-args": mpi_args,
        "--network-interfaces": network_interface,
    }
    elastic = any(each is not None for each in (least, most, slots, reset_limit, cooldown_range))
    if elastic and least is None:
        options["--min-np"] = size
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    words += [name for name, value in {"--disable-cache": disable_cache, "--verbose": verbose}.items() if value]
    program = [executable or sys.executable, "-m", "ringreduce.horovod.worker"]
    return call_on_ranks([*_HOROVODRUN, *words], program, func, args, kwargs, None if elastic else size, env)
