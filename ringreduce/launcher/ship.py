"""``--ship``: copies the environment and the program to all hosts of a job, over what also starts their daemons.

Below one folder, the same on all hosts, each file has the path that it has here: ``/home/me/train.py`` becomes
``/tmp/ringreduce-ship-1000/JOB/root/home/me/train.py``. So the ranks of all hosts have the same command line. On this
host that ``root`` is a link to ``/``, so that it needs no copy; on others it is a link to the copy of this version,
which serves jobs of all hosts that have the same files.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import IO, cast

from ringreduce.common.errors import ConfigError
from ringreduce.launcher import unpack
from ringreduce.launcher.cargo import Cargo, base_python
from ringreduce.launcher.reach import Errand, HostProcess, ToAll, end_all, let_open, others
from ringreduce.launcher.start import Start
from ringreduce.launcher.stderr import say

#: Shows a bar with a text; within it, the function is called with the bytes that were copied so far, and with all.
_Progress = Callable[[str], AbstractContextManager[Callable[[int, int], object]]]


@contextmanager
def shipped(start: Start, progress: _Progress) -> Iterator[Start]:
    """Have the environment and the program on all hosts of a job, as long as this context lasts, or longer if it keeps.

    Args:
        start: what starts the job; of one that copies nothing, it is returned.
        progress: shows how much is copied.

    Yields:
        What starts the job on the copies.

    Raises:
        ConfigError: a host cannot take the copy, in whatever way; nothing is left then.
    """
    spec = start.spec
    names = others(start)
    if not spec.ship or not names:
        yield start
        return
    if start.mpirun.kind != "Open MPI" or start.mpirun.major < 5:
        raise ConfigError(f"--ship takes Open MPI 5; {start.mpirun.path} says {start.mpirun.said!r}")
    cargo = Cargo.of(spec)
    errand = Errand("--ship", base_python(), "the Python that this environment was made by", unpack)
    request = {
        "base": cargo.base,
        "name": cargo.name,
        "job": cargo.job,
        "links": False,
        "python": f"{cargo.store}{sys.executable}",
        "version": sys.version.partition("(")[0].strip(),
        "count": len(cargo.files) + 1,
        "keep": spec.keep,
    }
    let_open(len(names) + 1)
    hosts: list[HostProcess] = []
    try:
        # First this one: others may be this one by another name, and have the files then.
        hosts.append(errand.begin(os.uname().nodename, {**request, "links": True}, start=None))
        hosts[0].answer()
        for name in names:
            hosts.append(errand.begin(name, request, start))
        _send(errand, cargo, hosts[1:], progress)
        yield cargo.start(start)
    finally:
        late = end_all(hosts, start)
        if late:
            say(f"--ship: {' and '.join(late)} may still have {os.path.dirname(cargo.store)}")


def _send(errand: Errand, cargo: Cargo, hosts: Sequence[HostProcess], progress: _Progress) -> None:
    """Send the files to the hosts that do not have them."""
    without = [host for host in hosts if host.answer() == "wants"]
    has = [host.name for host in hosts if host not in without]
    if has:
        say(f"--ship: {' and '.join(has)} {'has' if len(has) == 1 else 'have'} this version already")
    if not without:
        return
    names = " and ".join(host.name for host in without)
    began = time.monotonic()
    with progress(f"copying to {names}") as show:
        total_nbytes = cargo.nbytes
        stream = ToAll(errand, without, lambda nbytes: show(min(nbytes, total_nbytes), total_nbytes))
        cargo.write(cast("IO[bytes]", stream))
        stream.flush()
        for host in without:
            host.answer()
    say(f"--ship: {cargo.nbytes / 1e6:.0f} MB copied to {names} in {time.monotonic() - began:.1f} s")
