"""What ``ringreduce run --ship`` runs on each host: it receives files, keeps them during the job, and removes them.

The text of this file goes to the host's own Python, which has no ringreduce: it imports the standard library alone. It
reads one line of JSON, the request, then perhaps an archive of tar, and then waits for the end of its input: when the
launcher closes it, or has ended in whatever way.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

#: In the folder of a copy: written last, with the name of the host; and the copy itself, or a link to it.
_WHOLE = "whole"
TREE = "root"
#: To what the link leads on the host that starts a job: it has all files by their own paths.
_ALL = "/"
_PIECE_NBYTES = 1 << 20


class _NoPlaceError(Exception):
    """This host cannot take the copy."""


def _answer(request: dict[str, Any], what: str, text: str = "") -> None:
    with suppress(OSError):  # the launcher has ended
        print(f"\n{request['mark']}{json.dumps([what, text])}", flush=True)


def _require_own(folder: str) -> None:
    """Make a folder that this user alone can use, unless it is there."""
    found = None
    while found is None:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        with suppress(FileNotFoundError):  # another job has just removed it, as it was empty
            found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise _NoPlaceError(f"{folder} is no folder of this user alone; remove it, or set TMPDIR to another folder")


def _is_at(lock: int, folder: str) -> bool:
    """Return whether an open folder is still the one of this name: another job may have removed it."""
    try:
        return os.path.samestat(os.fstat(lock), os.lstat(folder))
    except FileNotFoundError:
        return False


def _is_whole(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, _WHOLE))


def _lock(base: str, folder: str) -> int:
    """Return the open folder of a copy, locked: for this process alone, or whole and shared with other jobs."""
    while True:
        _require_own(base)
        with suppress(FileExistsError, FileNotFoundError):
            os.mkdir(folder, 0o700)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        alone = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another job uses it, or copies it now
            fcntl.flock(lock, fcntl.LOCK_SH)
            alone = False
        if _is_at(lock, folder) and (alone or _is_whole(folder)):
            return lock
        os.close(lock)


def _remove(base: str, folder: str, lock: int) -> None:
    """Remove a copy that no other job uses."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, _WHOLE))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)  # again: a rank that was ending may have written something meanwhile
    with suppress(OSError):  # there are others
        os.rmdir(base)


def _remove_others(base: str, name: str) -> None:
    """Remove other versions of the same environment that were kept, and that no job uses."""
    kind = name.partition("-")[0]
    others: list[str] = []
    with suppress(FileNotFoundError):  # another job has just removed the last of them
        others = os.listdir(base)
    for other in others:
        if other.startswith(f"{kind}-") and other != name:
            folder = os.path.join(base, other)
            with suppress(OSError):
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                _remove(base, folder, lock)
                os.close(lock)


def _receive(tree: str, expected: int, python: str, version: str) -> None:
    """Unpack an archive of so many files, and see whether its Python runs."""
    os.mkdir(tree, 0o700)
    # What has come so far: a read of so many bytes would wait for more than there are.
    stdin: Any = sys.stdin.buffer
    coming: Any = SimpleNamespace(read=stdin.read1)
    with tarfile.open(fileobj=coming, mode="r|") as archive:
        # Links lead to the Python of this host. What is sent comes from the same user.
        archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        count = 0
        for member in archive:
            archive.extract(member, tree)
            count += 1
    if count != expected:  # tarfile takes the end of its input for the end of an archive
        raise _NoPlaceError(f"the copy was broken off after {count} of {expected} files")
    line = [python, "-I", "-S", "-c", "import sys; print(sys.version)"]
    found = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if found.stdout.split("(")[0].strip() != version:
        said = found.stdout.split("(")[0].strip() or found.stderr.strip()
        raise _NoPlaceError(f"the Python of the environment should be {version}, and here it is {said}")


@contextmanager
def _place(base: str, name: str, make: Callable[[str], object], keep: bool) -> Iterator[str]:
    """Have a folder with a tree, for this process and for other jobs of the same name on this host.

    Args:
        base: the folder that it is in.
        name: of the folder.
        make: makes the tree, unless another job has.
        keep: whether it stays at the end; else the last job removes it.
    """
    folder = os.path.join(base, name)
    tree = os.path.join(folder, TREE)
    host = os.uname().nodename
    lock = _lock(base, folder)
    keeps = False
    try:
        if not _is_whole(folder):
            with suppress(FileNotFoundError):  # else one that was broken off
                os.unlink(tree) if os.path.islink(tree) else shutil.rmtree(tree)
            make(tree)
            with open(os.path.join(folder, _WHOLE), "x", encoding="utf-8") as file:
                file.write(host)
        with open(os.path.join(folder, _WHOLE), encoding="utf-8") as file:
            other = file.read()
        if other != host:
            keeps = True
            raise _NoPlaceError(
                f"it shares {base} with {other}; set TMPDIR to a folder that each host has for itself, or remove "
                f"{folder} if that was this host's name"
            )
        fcntl.flock(lock, fcntl.LOCK_SH)  # which lets go first
        if not (_is_at(lock, folder) and _is_whole(folder)):
            raise _NoPlaceError("another job has removed the copy meanwhile; start this one again")
        yield tree
        keeps = keep
    finally:
        if not keeps:
            _remove(base, folder, lock)


def hold(request: dict[str, Any]) -> None:
    """Have a copy, until the input ends.

    Args:
        request: ``base``, the folder of this user's copies; ``name``, of this version; ``job``, of what leads to it for
            jobs of the host that starts this one; ``links``: this is that host, which has the files and takes no copy;
            ``count``: of the files in the archive; ``python``: the interpreter of the copy; ``version``: what that
            should say; ``keep``: whether the copy stays; ``mark``: begins answers.
    """
    base = request["base"]
    name = request["name"]
    leads_to = _ALL if request["links"] else os.path.join(base, name, TREE)

    def receive(tree: str) -> None:
        _answer(request, "wants")
        _receive(tree, request["count"], python=request["python"], version=request["version"])

    _require_own(base)
    _remove_others(base, name)
    with ExitStack() as places:
        tree = places.enter_context(_place(base, request["job"], lambda tree: os.symlink(leads_to, tree), keep=False))
        if os.readlink(tree) != _ALL:  # else this is the host that starts the job, perhaps by another name
            places.enter_context(_place(base, name, receive, keep=request["keep"]))
        # Ranks may be saving when all processes of a job get SIGTERM. They have the copy until the input ends.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _answer(request, "has")
        while sys.stdin.buffer.read(_PIECE_NBYTES):
            pass


def _main() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as of Slurm to all steps, which is for the ranks
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    request = json.loads(sys.stdin.buffer.readline())
    try:
        hold(request)
    except (OSError, tarfile.TarError, _NoPlaceError) as error:
        _answer(request, "failed", str(error))
        sys.exit(1)


if __name__ == "__main__":
    _main()
