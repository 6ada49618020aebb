"""Ranks where Ray, Spark or Dask already run: the engine starts mpirun's daemons on its hosts, and MPI the ranks.

An engine has two things: a function that runs a command on one of its hosts, in a slot that a task of it holds there,
and the slots by host, by its own names for them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.keys import KEY_VARIABLE
from ringreduce.common.libraries import require_library
from ringreduce.engines.slots import Slots, folder_of_call
from ringreduce.launcher.agent_server import PYTHON, agent_server, as_worker
from ringreduce.launcher.function import carry_out, pickled_call, results, work


def engine(name: str, extra: str) -> ModuleType:
    """Import the library of an engine.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    require_library(name, name, needed_by=f"ringreduce.{extra}", remedy=f"pip install {name}")
    return importlib.import_module(name)


def refuse_key(options: Sequence[str] = (), variables: Collection[str] = ()) -> None:
    """Raise a ConfigError if ranks are to encrypt what they send: who reads the network could be one of them.

    Args:
        options: of ``ringreduce run``.
        variables: names of those that ranks get.
    """
    asked = [word for word in options if word.partition("=")[0] in ("--encrypt", KEY_VARIABLE)]
    if asked or KEY_VARIABLE in variables or Config.from_environ().key_file is not None:
        raise ConfigError(
            f"{KEY_VARIABLE} and --encrypt are not for ranks on Ray, Spark and Dask: the function and the results of "
            "these are not encrypted there, and the engine carries their token. Start the job by `ringreduce run "
            "--encrypt`, or put the network into a tunnel (WireGuard, IPsec) and unset the key"
        )


def job_line(options: Sequence[str], module: str, function: str) -> list[str]:
    """Return the command line that starts a job, whose ranks call a function without arguments.

    Args:
        options: of ``ringreduce run``; they name the hosts.
        module, function: of the installed package.

    Raises:
        ConfigError: see `refuse_key`.
    """
    refuse_key(options)
    program = f'exec "${PYTHON}" -c "from {module} import {function}; {function}()"'
    # No grace: ranks get SIGTERM only when the caller has an error already, or ends.
    fixed = ("--grace=0", "--no-rank-variables")  # the names of its hosts lead nowhere
    return [sys.executable, "-m", "ringreduce", "run", *fixed, *options, "sh", "-c", program]


def on_hosts(hosts: Mapping[str, int]) -> list[str]:
    """Return the options of ``ringreduce run`` for a rank in each slot, by host."""
    listed = ",".join(f"{host}:{slots}" for host, slots in hosts.items())
    return ["-np", str(sum(hosts.values())), "-H", listed]


def run_on(
    held: Slots,
    hosts: Mapping[str, int],
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    look: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Call a function on new ranks on the hosts of an engine, and wait for them.

    Args:
        held: the slots of its hosts.
        hosts: slots by host, by names that ``held`` knows: addresses, or words without dots, as mpirun cuts names
            there; none if the options have a program that lists them.
        fn, args, kwargs: the call; pickled by cloudpickle, if it is installed.
        options: more options of ``ringreduce run``; with ``--elastic``, ranks that die are survived.
        env: variables for all ranks.
        look: called again and again; what it raises ends the job.

    Returns:
        The results of the ranks, in their order; of an elastic job those of ranks that have reached the end.

    Raises:
        ConfigError: an argument is wrong, mpirun is missing, or the function cannot be pickled.
        CollectiveError: a rank failed, and ended the job; the message has its traceback.
    """
    held.call = pickled_call(fn, tuple(args), dict(kwargs or {}), here=False)
    size = None if "--elastic" in options else sum(hosts.values())
    exported = [word for name in env or () for word in ("-x", name)]  # values are in no command line
    where = on_hosts(hosts) if hosts else []
    line = job_line([*where, *exported, *options], "ringreduce.engines", "work_there")
    with agent_server(held.start, held.folder) as environ:
        # The folder is removed also where mpirun is killed, and leaves its files.
        environ |= {"TMPDIR": str(held.folder), **(env or {})}
        return results(held.folder, size, carry_out(line, environ, folder=held.folder, size=size, look=look))


# ---- in a rank ----


def work_there() -> None:
    """Make the call that `run_on` hands out, and leave the result or the traceback for it.

    In a process of its own: one rank, on a host that need not share a folder with the program.
    """
    as_worker()
    work(folder_of_call(), refuse_key)  # this host may have a setting of its own
