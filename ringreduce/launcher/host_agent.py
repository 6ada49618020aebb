"""The agent of a host: it passes on what the ranks there say and return, and sends heartbeats.

`ringreduce run` starts it by ssh or srun, and then speaks with it by its standard input and output. It may first
receive the files of ``--ship``, which it keeps during the job, and removes. A task of an engine starts it beside
itself: then it connects to the program of the job, for which it runs mpirun's daemons, too, and in the end kills all
that runs below it.

The texts of this file and of `connection` go to a Python of the host, which need not have ringreduce: they take the
standard library alone. It reads one line of JSON, the request, and lives until its standard input ends: when the
launcher closes it, or the task or the launcher has ended in whatever way.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ringreduce.launcher.connection import HostConnection, Pipes, connected

#: The first line that this writes, after what shells of the host write.
GREETING = b"ringreduce-agent"
_READ_NBYTES = 1 << 16
_BEAT_EVERY_S = 1.0
#: The file with the call of `ringreduce.run`, and how the names of files end that ranks leave.
CALL = "call"
DONE = (".result", ".failure")
_LOOK_EVERY_S = 0.2  # for these
_LOOK_AT_COMMANDS_S = 0.05
#: What an agent asks the program of a job for, by a ticket: commands.
AGENT = "agent"
#: What that sends: a command with its number, and that the agent is to end.
RUN = "run"
END = "end"
_PR_SET_CHILD_SUBREAPER = 36
#: In the folder of a copy, the copy itself; in that of a job, a link to it, and one to the name of the host.
TREE = "root"
_HOST = "host"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def require_own(folder: str) -> None:
    """Make a folder that this user alone can use, unless it is there."""
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is no folder of this user alone; remove it, or set TMPDIR to another folder")


class _Fifo:
    """The FIFO in which ranks of this host write; see `ringreduce.launcher.marks`.

    Args:
        folder: for it; made where it is missing.

    Raises:
        OSError: there can be no such folder, or it is not this user's alone.
    """

    def __init__(self, folder: str) -> None:
        require_own(folder)
        self._folder = folder
        self._path = os.path.join(folder, os.readlink("/proc/self/ns/net"))
        with suppress(FileExistsError):
            os.mkfifo(self._path, 0o600)
        self.descriptor = os.open(self._path, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""
        try:  # The launcher itself, or another agent, may read the FIFO of this host.
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_ours = True
        except BlockingIOError:
            self.is_ours = False

    def read(self) -> list[bytes]:
        """Return the lines that have come."""
        with suppress(BlockingIOError):
            self._rest += os.read(self.descriptor, _READ_NBYTES)
        *lines, self._rest = self._rest.split(b"\n")
        return lines

    def remove(self) -> None:
        """Remove the FIFO, and the folder if that is empty."""
        if self.is_ours:
            with suppress(OSError):
                os.unlink(self._path)
                os.rmdir(self._folder)


class _Results:
    """The folder of a call of `ringreduce.run`: the call comes there, and what ranks leave is sent.

    Args:
        folder: by the same path on all hosts; made where it is missing.
        token: the name of a file in it, by which a host sees that it shares the folder with the launcher's.

    Attributes:
        is_shared: whether it does.

    Raises:
        OSError: there can be no such folder.
    """

    def __init__(self, folder: str, token: str) -> None:
        self._folder = folder
        self._sent: set[str] = set()
        self.is_shared = False
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            if not os.path.exists(os.path.join(folder, token)):
                raise
            self.is_shared = True

    def receive(self, connection: HostConnection) -> None:
        """Receive the call."""
        with open(os.path.join(self._folder, CALL), "xb") as file:
            file.writelines(connection.receive_content())

    def send(self, connection: HostConnection) -> None:
        """Send the files that have come: the name, and then the content."""
        for name in sorted({*([] if self.is_shared else os.listdir(self._folder))} - self._sent):
            if name.endswith(DONE):
                self._sent.add(name)
                connection.send_json(["file", name])
                with open(os.path.join(self._folder, name), "rb") as file:
                    while piece := file.read(_READ_NBYTES):
                        connection.send(piece)
                connection.send(b"")

    def remove(self) -> None:
        """Remove the folder, unless it is the launcher's."""
        if not self.is_shared:
            shutil.rmtree(self._folder, ignore_errors=True)


# ---- copies: several jobs of this user may use one at the same time, and the last of them removes it ----


def _open(folder: str, how: int) -> int | None:
    """Return a folder, open and locked; None: there is none, it was just removed, or others have it."""
    lock = None
    with suppress(FileNotFoundError, BlockingIOError):
        lock = os.open(folder, _FOLDER)
        fcntl.flock(lock, how)
        if os.path.samestat(os.fstat(lock), os.lstat(folder)):
            return lock
    if lock is not None:
        os.close(lock)
    return None


def _remove(folder: str) -> None:
    """Remove a folder of copies that no job uses."""
    lock = _open(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if lock is None:
        return
    gone = tempfile.mkdtemp(prefix=f"{os.path.basename(folder)}.", dir=os.path.dirname(folder))
    os.rename(folder, gone)  # so that no part of it is taken for all of it
    for _ in range(2):  # a rank that was ending may have written something meanwhile
        shutil.rmtree(gone, ignore_errors=True)
    os.close(lock)


class _ShippedCopies:
    """The copies of ``--ship`` of this user on this host, as long as a job uses them.

    Args:
        base: the folder of all of them.
        at_end: gets what removes those that are not kept.

    Raises:
        OSError: the folder is not this user's alone.
    """

    def __init__(self, base: str, at_end: ExitStack) -> None:
        self._base = base
        self._at_end = at_end
        lock = None
        while lock is None:  # another job has just removed it, as it was empty
            with suppress(FileNotFoundError):
                require_own(base)
                lock = _open(base, fcntl.LOCK_SH)
        at_end.callback(self._remove_base, lock)

    def _remove_base(self, lock: int) -> None:
        os.close(lock)
        alone = _open(self._base, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if alone is not None:
            with suppress(OSError):  # There are others.
                os.rmdir(self._base)
            os.close(alone)

    def remove_others(self, name: str) -> None:
        """Remove other versions of the same environment that were kept, and what was broken off."""
        for other in os.listdir(self._base):
            if other.startswith(name.partition("-")[0] + "-") and other != name:
                _remove(os.path.join(self._base, other))

    def have(self, name: str, fill: Callable[[str], object], *, keep: bool = False) -> None:
        """Have a folder from now on: one that is there, or a new one, once it is whole."""
        folder = os.path.join(self._base, name)
        while (lock := _open(folder, fcntl.LOCK_SH)) is None:
            coming = tempfile.mkdtemp(prefix=f"{name}.", dir=self._base)
            held = _open(coming, fcntl.LOCK_SH)
            if held is None:  # taken for what was broken off
                continue
            try:
                fill(coming)
                with suppress(OSError):  # another job was quicker
                    os.rename(coming, folder)
            finally:
                shutil.rmtree(coming, ignore_errors=True)
                os.close(held)
        if not keep:
            self._at_end.callback(_remove, folder)
        self._at_end.callback(os.close, lock)


def _receive(connection: HostConnection, folder: str) -> None:
    """Receive an archive of tar, and unpack it in a folder."""
    connection.send_json(["wants", ""])
    pieces = connection.receive_content()
    coming: Any = SimpleNamespace(read=lambda nbytes: next(pieces, b""))
    with tarfile.open(fileobj=coming, mode="r|") as archive:
        # Links lead to the Python of this host. What is sent comes from the same user.
        archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        archive.extractall(os.path.join(folder, TREE))
    for _ in pieces:  # zeros at the end
        pass


def have_copy(request: dict[str, Any], connection: HostConnection, at_end: ExitStack) -> None:
    """Have the files of a job, and what leads to them by the same path on all hosts.

    Args:
        request: ``base``, the folder of this user's copies; ``name``, of this version; ``job``, of what leads to it;
            ``leads here``: this host starts the job, and has the files; ``version`` of the Python that they take;
            ``keep``: whether the copy stays.
        connection: brings the files.
        at_end: gets what removes them.
    """
    base = request["base"]
    job = os.path.join(base, request["job"])
    here = os.uname().nodename
    version = sys.version.partition("(")[0].strip()
    if version != request["version"]:
        raise OSError(f"the Python of the environment should be {request['version']}, and here it is {version}")
    copies = _ShippedCopies(base, at_end)
    copies.remove_others(request["name"])
    leads_to = "/"
    # The host that starts the job may have another name, too.
    if not request["leads here"] and os.path.realpath(os.path.join(job, TREE)) != "/":
        copies.have(request["name"], partial(_receive, connection), keep=request["keep"])
        leads_to = os.path.join(base, request["name"], TREE)

    def lead(folder: str) -> None:
        os.symlink(here, os.path.join(folder, _HOST))
        os.symlink(leads_to, os.path.join(folder, TREE))

    copies.have(request["job"], lead)
    other = os.readlink(os.path.join(job, _HOST))
    if other != here:
        raise OSError(f"it shares {base} with {other}; set TMPDIR to a folder that each host has for itself")


def _serve(
    connection: HostConnection,
    fifo: _Fifo,
    results: _Results | None,
    folder: str,
    signals: list[int],
    *,
    has_task: bool,
) -> bool:
    """Pass on what comes, and run commands, until the connection or the task ends.

    Args:
        connection: to the program of the job.
        fifo: for messages of ranks.
        results: of ranks; None: they leave none here.
        folder: for files of daemons: those that are killed leave them.
        signals: that have come.
        has_task: whether a task has started this.

    Returns:
        Whether this was to end.
    """
    waited: list[Any] = [connection, *([fifo.descriptor] if fifo.is_ours else []), *([0] if has_task else [])]
    environ = {**os.environ, "PRTE_MCA_prte_tmpdir_base": folder}
    commands: dict[int, subprocess.Popen[bytes]] = {}
    beats_at = time.monotonic()
    what: str | None = ""
    while what not in (None, END):
        limit_s = max(beats_at - time.monotonic(), 0.0)
        limit_s = limit_s if results is None else min(limit_s, _LOOK_EVERY_S)
        ready, _, _ = select.select(waited, [], [], min(limit_s, _LOOK_AT_COMMANDS_S) if commands else limit_s)
        if time.monotonic() >= beats_at:
            beats_at = time.monotonic() + _BEAT_EVERY_S
            connection.send_json(["lives", ""])
        if signals:
            connection.send_json(["is warned", ""])
            signals.clear()
        what = ""
        value: Any = None
        if connection in ready:
            try:
                what, value = connection.receive_json()
            except EOFError:
                what = None
        elif 0 in ready:
            what = None
        if what == CALL and results is not None:
            results.receive(connection)
        if what == RUN:
            number, command = value
            commands[number] = subprocess.Popen(["sh", "-c", command], stdin=subprocess.DEVNULL, env=environ)
        ended = {number: status for number, each in commands.items() if (status := each.poll()) is not None}
        # What ranks have said and left before a command ended comes before its status.
        while lines := fifo.read() if fifo.is_ours else []:
            for line in lines:
                connection.send_json(["message", line.decode(errors="replace")])
        if results is not None:
            results.send(connection)
        for number, status in ended.items():
            del commands[number]
            connection.send_json(["ended", [number, status]])
        if what == "pass on":
            connection.send_json(["passed on", value])
    return what == END


def _end_all() -> None:
    """Kill all processes below this one, as each becomes a child of it once its parent has ended."""
    with suppress(ChildProcessError):
        while True:
            for name in filter(str.isdecimal, os.listdir("/proc")):
                with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                        os.kill(int(name), signal.SIGKILL)
            os.wait()


def _texts(files: list[str]) -> str:
    with suppress(OSError):
        return "".join(Path(file).read_text("ascii") for file in files)
    return ""


def main() -> None:
    """Serve the request on standard input."""
    # Who ends a job may signal all its processes, and its ranks have messages until they end. What this starts does not
    # ignore signals.
    signals: list[int] = []
    for each in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR2):
        signal.signal(each, lambda *_: None)
    for each in (signal.SIGTERM, signal.SIGUSR1):  # as Slurm sends them to all steps of a job
        signal.signal(each, lambda number, _: signals.append(number))
    request = json.loads(sys.stdin.buffer.readline())
    folder = request["folder"]
    ticket = request.get("ticket")
    has_ended_well = ticket is None
    with ExitStack() as at_end, suppress(EOFError, ConnectionError):  # The launcher has ended.
        if ticket is None:
            os.write(1, b"\n" + GREETING + b"\n")
            connection = HostConnection(Pipes())
        else:
            # Processes whose parents have ended become children of this one, where they are found.
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            at_end.callback(shutil.rmtree, folder, ignore_errors=True)
            connection = at_end.enter_context(connected(ticket, {"what": AGENT, "name": request["name"]}))
            at_end.callback(_end_all)  # before the connection ends, for which the program waits
        try:
            if request["copy"] is not None:
                have_copy(request["copy"], connection, at_end)
            fifo = _Fifo(folder)
            at_end.callback(fifo.remove)
            results = None
            if request["results"]:
                results = _Results(request["results"], request["token"])
                at_end.callback(results.remove)
            has_call = results is None or results.is_shared
            connection.send_json(["ready", {"has call": has_call, "texts": _texts(request["files"])}])
            is_to_end = _serve(connection, fifo, results, folder, signals, has_task=ticket is not None)
            has_ended_well = has_ended_well or is_to_end
        except ConnectionError:
            raise
        except (OSError, tarfile.TarError) as error:
            why = str(error)
            if isinstance(error, OSError) and error.filename:
                why = (
                    f"{error.filename}: {error.strerror}; set TMPDIR to a folder that each host has, or that all share"
                )
            connection.send_json(["failed", why])
            has_ended_well = False
    sys.exit(0 if has_ended_well else 1)
