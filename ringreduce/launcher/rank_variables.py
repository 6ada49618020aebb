"""What programs need that know torch's launcher and not this one: a port at which rank 0 listens, held free for it."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from ringreduce.launcher.start import Start

#: Below those that systems give to connections, and above those at which Open MPI begins to look for one.
_PORTS = range(20000, 30000)
_DRAWS = 100


@contextmanager
def with_free_port(start: Start) -> Iterator[Start]:
    """Give the start of a job the port for rank 0; where that is on this host, no other program gets it meanwhile."""
    if not start.spec.rank_variables:
        yield start
        return
    with socket.socket() as held:
        for port in (*random.sample(_PORTS, _DRAWS), 0):
            with suppress(OSError):
                held.bind(("", port))
                break
        # Now, so that a program which binds with this option, as all do that listen at a given port, can; before, two
        # jobs could hold the same port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield replace(start, port=held.getsockname()[1])
