"""How the end of a rank becomes the end of the job, promptly and with the reason: errors, exit codes, signals, orphans.

MPI's own exit handler waits for the other ranks, which may wait for this one, for ever. So what ends a rank before it
has shut down ends the job: an uncaught exception, with the traceback; `sys.exit` with a code other than 0, with that
code; SIGTERM and Ctrl-C, with one line. And a rank whose launcher is gone ends itself, as nobody else will.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from traceback import format_exception
from types import FrameType, TracebackType
from typing import Any

from ringreduce import processes
from ringreduce.errors import PeerLostError

__all__ = ["Endings"]

_ORPHANED = 70  # the exit code of a rank whose launcher is gone: EX_SOFTWARE of sysexits.h
_TO_END_S = 3.0
_INTERRUPTED = 128 + signal.SIGINT


class Endings:
    """The ends of this process, a rank of a world of several. Installed once, for all worlds that it is in.

    Args:
        abort: ends all ranks of the job at once, with an exit code.
        flush: saves what is only in memory, for whoever looks into why the job has ended.
        leave: lets the other ranks know that this one ends, and why; returns whether it is the first of its node.

    Attributes:
        who: names this rank in what is written: ``rank 1 of 4``. Empty while there is no world of several; then
            everything ends as it would without this.
    """

    def __init__(self, abort: Callable[[int], None], flush: Callable[[], None], leave: Callable[[str], bool]) -> None:
        self.who = ""
        self._abort = abort
        self._flush = flush
        self._leave = leave
        self._process = os.getpid()
        self._exit_code: int | str | None = None
        self._watches = False
        self._except_hook = sys.excepthook
        self._exit = sys.exit

    def install(self) -> None:
        """Take part in every end of this process from now on; on the main thread, signals included."""
        sys.excepthook = self._on_exception
        sys.exit = self._on_sys_exit
        if _is_default(signal.SIGTERM):
            try:
                signal.signal(signal.SIGTERM, self._on_signal)
            except ValueError:  # only the main thread may
                return

    def watch_launcher(self) -> None:
        """End this rank soon after its launcher, if there is one in sight; does nothing the second time."""
        pid = None if self._watches else processes.launcher()
        if pid is not None:
            self._watches = True
            processes.watch(pid, lambda: self._on_orphaned(pid))

    def at_exit(self) -> bool:
        """Look at how the program ends, at the interpreter's exit; returns whether it ends well.

        A rank that exits with another code than 0 ends the job with it.
        """
        if not self._acts() or self._exit_code in (None, 0):
            return True
        code = self._exit_code if isinstance(self._exit_code, int) else 1
        self._leave(f"it exits with code {code}")
        self._say(f"{self.who} exits with code {code}; ending the job")
        self._flush()
        self._abort(code)
        return False

    def _acts(self) -> bool:
        """Return whether this is the rank, and not a process that it has forked, and there are others."""
        return bool(self.who) and os.getpid() == self._process

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not self._acts():
            self._except_hook(kind, error, traceback)
            return
        code = 1
        if issubclass(kind, KeyboardInterrupt):
            code = _INTERRUPTED
            if self._leave("it was interrupted"):
                self._say(f"{self.who} was interrupted; ending the job")
        elif isinstance(error, PeerLostError) and error.ends_job:
            self._say(f"{self.who} ends: {error}")
            time.sleep(_TO_END_S)  # that rank ends the job, with its own exit code
        else:
            self._leave(f"it failed: {kind.__name__}: {error}")
            if self._except_hook is sys.__excepthook__:
                # In one piece, as the ranks write to one place.
                self._say(f"{self.who} failed; ending the job\n" + "".join(format_exception(kind, error, traceback)))
            else:
                self._except_hook(kind, error, traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        self._flush()  # what led here is what the trace is for
        self._abort(code)

    def _on_sys_exit(self, status: Any = None, /) -> Any:
        if self._acts():
            raise _Exit(status, self._take_note)
        self._exit(status)

    def _take_note(self, status: Any) -> None:
        self._exit_code = status if isinstance(status, (int, type(None))) else 1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._acts():
            name = signal.Signals(number).name
            if self._leave(f"it was ended by {name}"):
                self._say(f"{self.who} was ended by {name}")
            self._flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _on_orphaned(self, pid: int) -> None:
        if not self._acts():
            return
        self._say(f"{self.who} ends, as its launcher (process {pid}) is gone")
        self._flush()
        self.who = ""
        os.kill(os.getpid(), signal.SIGTERM)  # so that the program's own handler can save what it wants to
        time.sleep(_TO_END_S)
        os._exit(_ORPHANED)

    def _say(self, text: str) -> None:
        try:
            sys.stderr.write(f"ringreduce: {text.rstrip()}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # whoever read it is gone
            return


class _Exit(SystemExit):
    """What `sys.exit` raises: takes note when the interpreter asks for the code, which it does only to end.

    Nobody else can know it: programs catch and drop this exception, and exit handlers are not told.

    Args:
        status: what was given to `sys.exit`.
        note: is called with that.
    """

    def __init__(self, status: Any, note: Callable[[Any], None]) -> None:
        super().__init__(status)
        self._status = status
        self._note = note

    @property
    def code(self) -> Any:  # type: ignore[override]
        try:
            sys._getframe(1)
        except ValueError:  # no code of Python has asked
            self._note(self._status)
        return self._status


def _is_default(number: int) -> bool:
    """Return whether nothing handles a signal, in Python or below it (`faulthandler` does so unseen)."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return True
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return not caught >> (number - 1) & 1
