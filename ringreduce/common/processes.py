"""Which processes this one belongs to: its host, the launcher, and the rank that has started it, if it is none."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from ringreduce.common.finalizers import when_ended
from ringreduce.common.launch import LAUNCHERS

#: The name by which a rank announces itself to the processes that it starts.
RANK = "ringreduce-rank"
#: What starts ranks and stays with them until they end.
_PROGRAMS = {name for row in LAUNCHERS for name in row.programs}
_LOOK_EVERY_S = 1.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # Loaded now: there must be no import between fork and exec.
_ignored: set[signal.Signals] = set()  # Signals that `ignore` has set.
_libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
_libc.signal.restype = ctypes.c_void_p
_P = TypeVar("_P", bound="ProcessStat")


class ProcessStat(NamedTuple):
    """A process, as the kernel described it in ``/proc/PID/stat``.

    Attributes:
        pid: process id.
        name: the first 15 characters of its name.
        state: letter for its state.
        parent: process id of its parent, which changes when that ends.
        began: start time in ticks, which differs for another process of the same id.
        wait_status: how it has ended, as `os.wait` says it, while that is kept for its parent (state Z).
    """

    pid: int
    name: str
    state: str
    parent: int
    began: int
    wait_status: int

    @classmethod
    def read(cls: type[_P], pid: int) -> _P | None:
        """Return the present state of a process; None if there is no such process."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        name, _, rest = text.partition("(")[2].rpartition(") ")
        words = rest.split()
        return cls(pid, name, words[0], parent=int(words[1]), began=int(words[19]), wait_status=int(words[49]))

    @property
    def lives(self) -> bool:
        """Whether it still ran, and was no zombie."""
        return self.state not in "ZX"


@cache
def place() -> str:
    """Return eight letters that processes of one host have in common, to which a pid means the same."""
    return hashlib.sha256(f"{host_name()} {pid_namespace()}".encode()).hexdigest()[:8]


def host_name() -> str:
    """Return what is equal for two processes if and only if they run on one machine (or one of its containers)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def pid_namespace() -> str:
    """Return what is equal for two processes of a machine if and only if a pid means the same to both."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class Announcement:
    """A text that other processes of this user can read, until it is closed or this process ends.

    It is a file in memory that this process holds open, so nothing remains of it however the process ends.

    Args:
        name: by which others look for it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._descriptor: int | None = None
        self._closed = False
        self._lock = threading.RLock()  # A signal handler may close it in the midst of `replace`.

    def replace(self, text: bytes) -> None:
        """Announce this text in place of the last one. Readers get one of the two, whole.

        It does nothing on a system without such files.
        """
        try:
            new = os.memfd_create(self._name, os.MFD_CLOEXEC)
        except (OSError, AttributeError):
            return
        try:
            os.write(new, text)
            with self._lock:
                if self._closed:
                    return
                if self._descriptor is None:
                    self._descriptor = os.dup(new)
                else:
                    os.dup2(new, self._descriptor, inheritable=False)
        finally:
            os.close(new)

    def close(self) -> None:
        """Announce nothing any more."""
        with self._lock:
            self._closed = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def announced(pid: int, name: str) -> Iterator[bytes]:
    """Yield what a process announces by this name; while that is replaced, also the new text, which may be cut off."""
    # The process may have ended, or be somebody else's.
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(OSError):
                if os.readlink(entry.path).startswith(f"/memfd:{name} "):
                    with open(entry.path, "rb") as file:
                        yield file.read()


def rank_above() -> bytes | None:
    """Return what the nearest ancestor that is a rank announces; None: there is none, or a launcher came in between."""
    for pid, name in ancestors():
        if name in _PROGRAMS:
            return None
        for text in announced(pid, RANK):
            return text
    return None


def launcher() -> int | None:
    """Return the nearest ancestor that is a launcher or one of its daemons, None if there is none in sight."""
    return next((pid for pid, name in ancestors() if name in _PROGRAMS), None)


def launcher_is_stopped() -> bool:
    """Return whether `launcher` is stopped, as while ranks end by SIGTERM: MPI would wait for it."""
    pid = launcher()
    return pid is not None and is_stopped(pid)


def is_launcher(name: str) -> bool:
    """Return whether a process of this name, as the kernel has it, starts ranks and stays with them until they end."""
    return name in _PROGRAMS


def ancestors() -> Iterator[tuple[int, str]]:
    """Yield the processes above this one, the nearest first, each with its name; as far as they can be seen."""
    pid = os.getppid()
    while pid > 0:
        process = ProcessStat.read(pid)
        if process is None:
            return
        yield pid, process.name
        pid = process.parent


def handles(pid: int, number: int) -> bool:
    """Return whether a process handles a signal by itself, so that it does not end by it."""
    return _has_in("SigCgt:", pid, number)


def is_default(number: int) -> bool:
    """Return whether nothing here handles a signal, in Python or below it (`faulthandler` does so unseen)."""
    return signal.getsignal(number) is signal.SIG_DFL and not handles(os.getpid(), number)


def ignore(number: signal.Signals) -> None:
    """Let a signal do nothing in this process, to its very end; programs that it starts do not inherit that.

    Python drops its own handlers before a process has ended. A signal that is ignored stays so, but in all programs
    that are started, too. A handler in C does neither; this one is a function that changes nothing.
    """
    _ignored.add(number)
    signal.signal(number, signal.SIG_IGN)  # Python then leaves it alone at its end.
    _libc.signal(number, ctypes.cast(_libc.abs, ctypes.c_void_p))


def is_own_handler(handler: object) -> bool:
    """Return whether a handler of a signal is one of ringreduce's."""
    return callable(handler) and str(getattr(handler, "__module__", "")).startswith("ringreduce.")


@cache
def end_children_by_sigterm() -> None:
    """Let SIGTERM end what this process forks from now on, unless the program handles it: whoever forks waits for that.

    Handlers of this process are for ranks. One that comes before a child has none of them waits until then.
    """
    masks: dict[int, set[int | signal.Signals]] = {}  # Masks of signals by thread.

    def before() -> None:
        masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

    def in_child() -> None:
        if signal.SIGTERM in _ignored or is_own_handler(signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _ignored.clear()
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


def is_pending(pid: int, number: int) -> bool:
    """Return whether a process has got a signal that it blocks."""
    return _has_in("ShdPnd:", pid, number)


def _has_in(mask: str, pid: int, number: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            signals = next((int(line.split()[1], 16) for line in file if line.startswith(mask)), 0)
    except OSError:
        return False
    return bool(signals >> (number - 1) & 1)


def is_stopped(pid: int) -> bool:
    """Return whether a process is there and was stopped, by a signal or a debugger."""
    process = ProcessStat.read(pid)
    return process is not None and process.state in "Tt"


def continue_stopped(pid: int) -> None:
    """Let a process go on that a signal has stopped."""
    if is_stopped(pid):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGCONT)


def delayed_s() -> float:
    """Return how long the main thread of this process has waited for a core (seconds); 0 where nobody counts that."""
    try:
        return int(os.pread(_schedstat(os.getpid()), 64, 0).split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


@cache
def _schedstat(pid: int) -> int:
    return os.open(f"/proc/{pid}/schedstat", os.O_RDONLY)  # It stays open, as it is read in steps of a training.


def began(pid: int) -> int | None:
    """Return when a process began, in the kernel's ticks; None: it has ended. Others of its number began later."""
    process = ProcessStat.read(pid)
    return process.began if process is not None and process.lives else None


def has_ended(pid: int) -> bool:
    """Return whether there is no such process, or only what is kept of it for its parent."""
    return began(pid) is None


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Let the kernel send a signal to this process when its parent ends, in whatever way; at once if it has.

    Args:
        parent: that process; the thread of it that has started this one must not end before.
        number: the signal.
    """
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)
            os._exit(128 + number)  # The signal may be blocked.


class Forked:
    """Processes that this one forks at one moment: made before the fork; each side then records which one it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._ends: tuple[int, int] | None = None
        with suppress(OSError):  # Without a free descriptor nobody knows when they end.
            self._ends = os.pipe()  # Only the end of the last of these processes closes its writing end.
        if self._ends is not None:
            # Once, when they have ended, or when nobody is left who would ask.
            self._close_reading = when_ended(self, os.close, self._ends[0])

    def in_parent(self) -> None:
        """Let this process not be counted."""
        if self._ends is not None:
            os.close(self._ends[1])

    def in_child(self) -> None:
        """Be counted."""
        if self._ends is not None:
            self._close_reading()
            self._ends = None  # Its number may be another file's from now on.

    @property
    def ended(self) -> bool:
        """Whether all have ended, those that they have forked themselves included; may be asked on any thread."""
        with self._lock:
            if not self._ended and self._ends is not None:
                waiting = select.poll()
                waiting.register(self._ends[0], 0)  # At its end it becomes readable all the same.
                if waiting.poll(0):
                    self._close_reading()
                    self._ended = True
            return self._ended


def is_multiprocessing_child() -> bool:
    """Return whether `multiprocessing` has started this process, by any of its start methods."""
    # Children of multiprocessing have imported it, others need not.
    process = sys.modules.get("multiprocessing.process")
    if process is None:
        return False
    # While a child imports the script again, the first is not set yet.
    return process.parent_process() is not None or getattr(process.current_process(), "_inheriting", False)


def at_exit(function: Callable[[], object]) -> None:
    """Call a function when this process ends, not when one ends that it has forked."""
    process = os.getpid()

    def call() -> None:
        if os.getpid() == process:
            function()

    atexit.register(call)
    if is_multiprocessing_child():  # Most of these skip the exit handlers.
        util = importlib.import_module("multiprocessing.util")
        util.Finalize(None, call, exitpriority=0)


def watch(pid: int, on_end: Callable[[], None]) -> None:
    """Call a function, on a thread of its own, once a process has ended."""
    thread = threading.Thread(target=_wait_for_end, args=(pid, on_end), name=f"ringreduce watches {pid}", daemon=True)
    thread.start()


def _wait_for_end(pid: int, on_end: Callable[[], None]) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    except (OSError, AttributeError):  # This kernel has no process descriptors.
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(_LOOK_EVERY_S)  # Without a descriptor there is nothing to wait on.
    else:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        waiting.poll()
    on_end()
