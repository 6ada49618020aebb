"""The compiled loops of this machine: made once, and kept in a folder of this user's, as what is loaded is code."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ringreduce.common.config import environment_without
from ringreduce.common.files import lock_file, own_folder, read_file, replace_file
from ringreduce.native.library import Library, load, processor

_log = logging.getLogger(__name__)

_MOST_NBYTES = 16 << 20
_MAKING_S = 120.0
#: After a failure the other ranks, and other jobs, do not try again for so long.
_AGAIN_S = 600.0


class Loops(NamedTuple):
    """The compiled functions, or why there are none.

    Attributes:
        library: the functions; None: there are none, and NumPy does their work.
        why_not: why.
        failed: whether something went wrong; else they were not asked for, or are not installed.
    """

    library: Library | None = None
    why_not: str = ""
    failed: bool = False


@cache
def loops(folder: str | None, codecs: Sequence[str] = ()) -> Loops:
    """Return the compiled functions of this machine, made if need be.

    Args:
        folder: of the user's caches; None: there is none.
        codecs: `CODECS`, in a world of several nodes, which is what encodes; a tuple. To compile them takes seconds.
    """
    if find_spec("llvmlite") is None or find_spec("numba") is None:
        return Loops(why_not="Numba is not installed")
    if folder is None:
        return Loops(why_not="there is no folder for caches: HOME and XDG_CACHE_HOME are not set")
    place = Path(folder, "native")
    try:
        own_folder(place)
        path = place / f"{_name()}{'-codecs' if codecs else ''}.o"
        if not path.exists():
            _make(path, codecs)
        return Loops(load(read_file(path, most_nbytes=_MOST_NBYTES, ours=True), codecs))
    except Exception as error:  # Whatever is wrong with Numba or the folder, NumPy does it, too.
        return Loops(why_not=f"they cannot be loaded: {type(error).__name__}: {error}", failed=True)


def _name() -> str:
    """Return a hash of all that the machine code depends on."""
    from importlib.metadata import version  # Worlds without compiled loops do not load it.

    python = platform.python_version(), platform.python_implementation(), sys.abiflags, str(object.__basicsize__)
    parts = [*python, version("llvmlite"), version("numba"), *processor()]
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join([*(each.encode() for each in parts), *texts])).hexdigest()[:32]


def _make(path: Path, codecs: Sequence[str]) -> None:
    """Have another process compile, unless one does so already: Numba takes memory that ranks need not keep.

    Raises:
        OSError, subprocess.SubprocessError: it cannot, or could not a while ago, or takes too long.
    """
    failed = path.with_suffix(".failed")
    with _locked(path.with_suffix(".lock")):
        if path.exists():
            return
        if failed.exists() and time.time() - failed.stat().st_mtime < _AGAIN_S:
            raise OSError(failed.read_text(encoding="utf-8"))
        _log.info("compiling loops for this processor, once: %s", path)
        command = [sys.executable, "-m", "ringreduce.native.object_code", str(path), *codecs]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_MAKING_S,
            stdin=subprocess.DEVNULL,
            env=environment_without("NUMBA_"),  # They would change the code.
        )
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["the compiler says nothing"])[-1]
            replace_file(failed, lambda file: file.write(reason.encode()))
            raise OSError(reason)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that one process of this host has at a time; wait for it for some time.

    Raises:
        TimeoutError: another process has held it for that long.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        lock_file(descriptor, _MAKING_S)
        yield
    finally:
        os.close(descriptor)
