"""How the end of a rank becomes the end of the job, promptly and with the reason: errors, exit codes, signals, orphans.

MPI's own exit handler waits for the other ranks, which may wait for this one, for ever. So what ends a rank before it
has shut down ends the job: an uncaught exception, with the traceback; `sys.exit` with a code other than 0, with that
code; SIGTERM and Ctrl-C, with one line. A rank whose launcher has ended ends itself, as nobody else will.

Exits that do not go through `sys.exit` as it is after `init` are not seen: ``raise SystemExit(3)``, the ``exit(3)`` of
interactive sessions, and a ``from sys import exit`` before. Then this rank shuts down as at a good end, and the others
notice that it has ended when they wait for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary, TracebackException
from types import FrameType, TracebackType
from typing import Any, NoReturn

from ringreduce.common import processes
from ringreduce.common.errors import MismatchError, PeerLostError
from ringreduce.common.launch import launch
from ringreduce.common.lifetime import Lifetime
from ringreduce.runtime.worlds import OwnWorld

_ORPHANED = 70  # The exit code of a rank whose launcher has ended: EX_SOFTWARE of sysexits.h.
_TO_END_S = 3.0
_INTERRUPTED = 128 + signal.SIGINT
_STANDARD_ERROR = 2
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_MARK = "_ringreduce"  # The attribute of an exit that knows when it ends the program.


class Termination:
    """The ends of this process, a rank of a job of several. Installed once, for all worlds that it is in.

    Args:
        abort: ends all ranks of the job at once, or this one alone, with an exit code.
        own: returns the world; None: it is not there yet, or not any more.
        others_go_on: whether ``abort`` ends this process alone.

    Attributes:
        who: names this rank in what is written: ``rank 1 of 4``.
        lifetime: of the world; once it is closed, or in a forked process, everything ends as it would without this.
    """

    def __init__(
        self,
        abort: Callable[[int], None],
        own: Callable[[], OwnWorld | None],
        *,
        others_go_on: bool = False,
    ) -> None:
        self.who = ""
        self.lifetime = Lifetime()
        self._then = "the others may go on" if others_go_on else "ending the job"
        self._others_go_on = others_go_on
        self._abort = abort
        self._own = own
        self._exit_code: int | None = None  # The code that `sys.exit` ends the program with.
        self._exit_words = ""  # The text that `sys.exit` got in place of a code.
        self._except_hook = sys.excepthook
        self._exit = sys.exit
        self._last_error: object = getattr(sys, "last_value", None)  # The last uncaught error from before this.

    def install(self) -> None:
        """Take part in every end of this process from now on; in SIGTERM if this is the main thread.

        And end this rank soon after its launcher, if there is one in sight; and with the shell that `ringreduce run`
        has put over it, as the others then count this rank as dead.
        """
        sys.excepthook = self._on_exception
        sys.exit = _named_like(self._exit, self._on_sys_exit)
        if threading.current_thread() is threading.main_thread() and processes.is_default(signal.SIGTERM):
            signal.signal(signal.SIGTERM, self._on_signal)
            processes.end_children_by_sigterm()
        shell = launch().shell
        if shell is not None:
            if shell == os.getppid():
                # The kernel does it, as this process may be in the end of MPI then.
                processes.end_with_parent(shell, signal.SIGKILL)
            else:
                processes.watch(shell, lambda: os.kill(os.getpid(), signal.SIGKILL))
            # A stopped shell would not report how this rank ends.
            processes.at_exit(lambda: processes.continue_stopped(shell))
        pid = processes.launcher()
        if pid is not None:
            processes.watch(pid, lambda: self._on_orphaned(pid))

    def at_exit(self) -> bool:
        """Look at how the program ends, at the interpreter's exit; returns whether it ends well.

        A rank that exits with another code than 0, or for an exception that a hook of the program's own has taken, ends
        the job.
        """
        if not self._acts():
            return True
        # The interpreter keeps the exception that ends the program there, before it calls any hook.
        error = getattr(sys, "last_value", None)
        own = self._own()
        if self._exit_code == os.EX_TEMPFAIL and own is not None and own.stops:
            return True  # All ranks do the same.
        if self._exit_code:
            words = f": {self._exit_words}" if self._exit_words else ""
            code = self._exit_code
            why = f"exits with code {self._exit_code}{words}"
        elif error is not self._last_error and _ends_program(getattr(sys, "last_traceback", None)):
            code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
            why = f"failed: {type(error).__name__}"
        else:
            return True
        try:
            # In this order: the others end the job as soon as they know, and the launcher names the rank by this line.
            _write_line(f"{self.who} {why}; {self._then}")
            self._detach(f"it {why}")
            self._flush()
        finally:
            self._end_job(code)
        return False

    def _end_job(self, code: int) -> None:
        """End all ranks; but only this rank, while `ringreduce run` waits for ranks to end after SIGTERM."""
        if code == os.EX_TEMPFAIL:
            code = 1  # The other code would say that all ranks have agreed to stop.
        if processes.launcher_is_stopped():
            _flush_streams()
            os._exit(code)
        self._abort(code)

    def _acts(self) -> bool:
        """Return whether this is the rank, and not a process that it has forked, and has a world."""
        return not (self.lifetime.closed or self.lifetime.forked)

    def _detach(self, reason: str) -> bool:
        """Let the other ranks know that this one ends, and why; return whether it is the first of its node."""
        own = self._own()
        return own is None or own.detach(reason)

    def _flush(self) -> None:
        if (own := self._own()) is not None:
            own.flush()

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not (self._acts() and _ends_program(traceback)):
            self._except_hook(kind, error, traceback)
            return
        code = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
        try:
            self._report(kind, error, traceback)
            _flush_streams()
            self._flush()  # The trace has to show what led here.
            own = self._own()
            audit = None if own is None else own.recording.record
            if audit is not None and audit.leaves_refusals and not self._others_go_on:
                time.sleep(_TO_END_S)  # Rank 0 ends the job, once it has recorded what was refused.
        finally:
            self._end_job(code)

    def _report(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Let the other ranks and the user know of an exception that ends this one."""
        if issubclass(kind, KeyboardInterrupt):
            if self._detach("it was interrupted"):
                _write_line(f"{self.who} was interrupted; {self._then}")
        elif isinstance(error, PeerLostError) and error.ends_job and not self._others_go_on:
            _write_line(f"{self.who} ends: {error}")
            time.sleep(_TO_END_S)  # That rank ends the job, with its own exit code.
        else:
            if (own := self._own()) is not None:
                own.note_refusal(error)
            self._detach(f"it failed: {kind.__name__}: {error}")
            if self._except_hook is sys.__excepthook__:
                # In one piece, as the ranks write to one place.
                shown = TracebackException(kind, error, traceback)
                if isinstance(error, MismatchError):
                    _leave_out_own_frames(shown)
                _write_line(f"{self.who} failed; {self._then}\n" + "".join(shown.format()))
            else:
                self._except_hook(kind, error, traceback)

    def _on_sys_exit(self, status: Any = None, /) -> NoReturn:
        try:
            self._exit(status)
        except SystemExit as error:
            if self._acts() and threading.current_thread() is threading.main_thread():
                setattr(error, _MARK, _ExitMark(lambda: self._keep_exit_code(status)))
            raise

    def _keep_exit_code(self, status: Any) -> None:
        # An exit may have others as its context; it is freed before these.
        if self._exit_code is None and self._acts():
            self._exit_code = _exit_code(status)
            self._exit_words = " ".join(status.split()) if isinstance(status, str) else ""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        try:
            if self._acts():
                name = signal.Signals(number).name
                if self._detach(f"it was ended by {name}"):
                    _write_line(f"{self.who} was ended by {name}")
                self._flush()
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _on_orphaned(self, pid: int) -> None:
        if not self._acts():
            return
        _write_line(f"{self.who} ends, as its launcher (process {pid}) is gone")
        self._flush()
        self.lifetime.close()
        os.kill(os.getpid(), signal.SIGTERM)  # The program's own handler can save by this.
        time.sleep(_TO_END_S)  # The handler has so much time.
        os._exit(_ORPHANED)


class _ExitMark:
    """Is part of an exit, and so is freed with it: if the interpreter does that itself, the exit ends the program.

    Nothing else shows it: programs catch and drop exits, and exit handlers do not get them. The interpreter frees the
    exit that it ends with just before the exit handlers, when no Python code runs any more. All other exits are freed
    by code that runs, or after the exit handlers. An exit that the program keeps is not freed in time, and not seen.

    Args:
        then: is called if the exit ends the program.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:  # No code of Python runs.
            if threading.get_ident() == threading.main_thread().ident:
                self._then()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies of the exit, and what it is elsewhere, be without this."""
        return type(None), ()


def _named_like(original: Callable[..., Any], function: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """Return a function with the name of another, so that pickles of it mean what has that name."""

    def exit(status: Any = None, /) -> NoReturn:
        function(status)

    exit.__module__ = "sys"
    exit.__name__ = "exit"
    exit.__qualname__ = "exit"
    exit.__doc__ = original.__doc__
    return exit


def _exit_code(status: Any) -> int:
    """Return what the system gets to see of the argument of `sys.exit`."""
    if status is None or isinstance(status, int):
        number = int(status or 0)
        # The interpreter gives a C int to the system, which keeps 8 bits. It takes what fits in no C long for -1.
        return (number if -(1 << 63) <= number < 1 << 63 else -1) & 0xFF
    return 1


def _leave_out_own_frames(shown: TracebackException) -> None:
    """Keep what the program called, as a mismatch is about that; frames inside of this package say nothing of it."""
    own = [frame for frame in shown.stack if frame.filename.startswith(_PACKAGE)]
    if len(own) < len(shown.stack):
        shown.stack = StackSummary.from_list([frame for frame in shown.stack if frame not in own])


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # Its reader may have ended, or the program may have closed it.
            stream.flush()


def _ends_program(traceback: TracebackType | None) -> bool:
    """Return whether an exception that went uncaught ends the program.

    Interactive consoles and callbacks of C libraries have exceptions shown that end nothing; so do programs. Those
    were caught by code that goes on, or by code that was called by such code.
    """
    if traceback is None or sys.flags.interactive or sys.flags.inspect:
        return False
    outermost = traceback.tb_frame
    if outermost.f_back is not None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not outermost:
        frame = frame.f_back
    return frame is None


def _write_line(text: str) -> None:
    """Write to standard error, past its buffer: this may be in a signal handler, in the midst of writing."""
    rest = f"ringreduce: {text.rstrip()}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):  # Its reader may have ended.
        while rest:
            rest = rest[os.write(_STANDARD_ERROR, rest) :]
