"""A call of a function for ranks that share no folder with the program: they fetch it there, and send back results."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ringreduce.common.launch import launch
from ringreduce.launcher.connection import HostConnection, connected

#: The ticket of the program's `listening`, in the environment of a rank. mpirun passes it on to no other host: there,
#: the process that has started its daemon sets it.
VARIABLE = "_RINGREDUCE_TICKET"
#: What ranks ask for: the call, and to keep what they send.
REQUESTS = ("call", "result", "failure")
_MOST = 10**9  # jobs and ranks


def call_answers(call: bytes, folder: Path, size: int | None) -> Callable[[Mapping[str, Any], HostConnection], None]:
    """Return what answers the requests of ranks: it hands out a call, and writes what they return, as whole files.

    Args:
        call: pickled.
        folder: for one file of each rank of a job.
        size: number of ranks; None: unknown.
    """

    def answer(request: Mapping[str, Any], connection: HostConnection) -> None:
        if request["what"] == "call":
            connection.send_content(call)
            return
        job, rank = int(request["job"]), int(request["rank"])
        if not (0 <= job < _MOST and 0 <= rank < (size or _MOST)):
            raise ValueError(f"there is no rank {rank} of job {job}")
        path = folder / f"{job}-{rank}.{request['what']}"
        if path.exists():
            raise FileExistsError(f"rank {rank} has returned already")
        coming = path.with_suffix(".coming")
        with coming.open("wb") as file:
            for piece in connection.receive_content():
                file.write(piece)
        coming.rename(path)
        connection.send_json("kept")

    return answer


# ---- in a rank ----


def fetch_call() -> bytes:
    """Return the call that the program which started this rank has for it.

    Raises:
        OSError: that program cannot be reached.
        EOFError: it has ended.
    """
    with connected(os.environ[VARIABLE], {"what": "call"}) as connection:
        return b"".join(connection.receive_content())


def leave_there(what: str, content: bytes) -> None:
    """Send what this rank returned (``"result"``) or its traceback (``"failure"``) to the program.

    Raises:
        OSError: it cannot be reached, or has not kept it.
    """
    rank = launch().rank
    with connected(os.environ[VARIABLE], {"what": what, "job": launch().restarts, "rank": rank}) as connection:
        try:
            connection.send_content(content)
            connection.receive_json()
        except (OSError, EOFError):
            raise ConnectionError(
                f"the program that called the function has not kept the {what} of rank {rank}"
            ) from None
