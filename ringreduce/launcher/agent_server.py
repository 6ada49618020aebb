"""Starts mpirun's daemons by a function, in place of ssh: for hosts that Ray, Spark or Dask start processes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ringreduce.common.launch import MESSAGES_HERE
from ringreduce.launcher import agent
from ringreduce.launcher.connection import served

#: An engine's worker: its Python, its folder, its path of modules and its host, in the environment of ranks below it.
#: mpirun passes none of these on to other hosts.
PYTHON = "_RINGREDUCE_PYTHON"
_FOLDER = "_RINGREDUCE_FOLDER"
_PATH = "_RINGREDUCE_PATH"
HOST = "_RINGREDUCE_HOST"
#: The ticket of the program's `listening`, in the environment of a rank. mpirun passes it on to no other host: there,
#: the process that has started its daemon sets it.
TICKET = "_RINGREDUCE_TICKET"

#: What says in which allocation or job this process is: mpirun is to take the named hosts, by the agent.
_OF_ANOTHER_JOB = re.compile("(SLURM|PBS|LSB|PE|FLUX|PMI)_.*|PMIX_(?!MCA_).*|OMPI_COMM_WORLD_.*|PRTE_MCA_plm_ssh_args")


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder of this user alone, removed at the end of the context or of this process, however that ends."""
    folder = Path(tempfile.mkdtemp(prefix="ringreduce-"))
    # The input of the keeper ends with this process. In its own session: what is sent to the terminal's processes does
    # not end it.
    line = ["sh", "-c", 'read -r _; rm -rf "$1"', "ringreduce-keeper", str(folder)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True) as keeper:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            keeper.kill()


@contextmanager
def agent_server(start: Callable[[str, str], int], folder: Path) -> Iterator[dict[str, str]]:
    """Run what mpirun asks its agent for, as long as this context lasts.

    Args:
        start: runs a command of a shell on a host, and returns its status when it has ended; it is called on threads
            of its own, for several hosts at once. An exception is the status of a host that is not reached, and a line.
        folder: of this user alone, for the socket and the messages of ranks.

    Yields:
        The environment for ``ringreduce run``, whose mpirun has the agent.
    """

    def answer(connection: socket.socket) -> None:
        with connection.makefile("rwb") as stream:
            host, command = json.loads(stream.readline())
            try:
                status = start(host, command)
            except Exception as error:
                said = " ".join(str(error).split()) or type(error).__name__
                print(f"ringreduce: cannot start mpirun's daemon on {host}: {said}", file=sys.stderr, flush=True)
                status = agent.UNREACHABLE
            stream.write(b"%d\n" % status)

    path = str(folder / "agent")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(socket.SOMAXCONN)
    environ = {name: value for name, value in os.environ.items() if _OF_ANOTHER_JOB.fullmatch(name) is None}
    environ["PRTE_MCA_plm"] = "ssh"
    environ["PRTE_MCA_plm_ssh_no_tree_spawn"] = "1"  # other hosts have no agent
    # Hosts may be parts of one machine, by whose names and addresses Open MPI knows them. Some ranks then count others
    # as ranks of their node, which do not count them: Open MPI's collectives by node would wait for ever.
    environ["OMPI_MCA_coll"] = _without_han(environ.get("OMPI_MCA_coll", ""))
    environ["PRTE_MCA_plm_ssh_agent"] = " ".join([sys.executable, "-I", "-S", str(Path(agent.__file__)), path])
    environ[MESSAGES_HERE] = str(folder)
    with served(server, answer):
        yield environ


def _without_han(components: str) -> str:
    """Return a list of Open MPI's components that has no han: those it may use, or after a ^ those it may not."""
    names = [each for each in components.removeprefix("^").split(",") if each]
    others = [each for each in names if each != "han"]
    is_of_used = not components.startswith("^") and others
    return ",".join(others) if is_of_used else "^" + ",".join([*others, "han"])


# ---- on the host of a rank ----


def worker_environment(host: str) -> dict[str, str]:
    """Return the variables by which ranks of a host find the Python, folder and modules of this process."""
    return {PYTHON: sys.executable, _FOLDER: os.getcwd(), _PATH: os.pathsep.join(sys.path), HOST: host}


def as_worker() -> None:
    """Take the folder and the path of modules of the worker of this host, below which this rank is."""
    os.chdir(os.environ[_FOLDER])
    sys.path[:] = os.environ[_PATH].split(os.pathsep)
