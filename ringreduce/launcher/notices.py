"""What Open MPI writes to the standard error of a job, and users do not see."""

from __future__ import annotations

import re
from collections.abc import Callable


def _beginnings(*words: bytes) -> bytes:
    """Return the pattern of what may become one of these words."""
    return b"|".join(re.escape(each[:count]) for each in words for count in range(len(each)))


#: How the boxes begin in which Open MPI says that a rank has failed, under a line of dashes.
_FAILURES = (
    b"MPI_ABORT was invoked on rank ",
    b"prterun detected that one or more processes ",
    b"prterun has exited due to process rank ",
    b"prterun noticed that process rank ",
    b"PRTE has lost communication with a remote daemon.",
)
_OPENING = rb"(?<=[\n\0])-{70,99}\n"
_BODY = b"(?:" + b"|".join(map(re.escape, _FAILURES)) + rb")(?:(?!\n-{70,99}\n)[^\0]){0,4096}"
_END = rb"\n-{70,99}\n\0*"  # prterun writes NUL bytes behind it
_BOX = _OPENING + _BODY + _END
#: The process id of mpirun, in the name that it gives a process.
_NAMED = re.compile(rb"Process name: +\[prterun-[^\s@]{1,255}-([0-9]+)@")
#: What may become one: some dashes, a part of the first words, or a box that is not closed or may not be at its end.
_BEGUN = _beginnings(*_FAILURES)
_HALF_BOX = rb"(?<=[\n\0])-{1,99}\Z|" + _OPENING + b"(?:" + _BEGUN + b"|" + _BODY + b"(?:" + _END + rb")?)\Z"


#: Lines of Open MPI that mean nothing for a job, by how they begin: its ssh was in a group of its own before it was put
#: into one, and a connection was closed while libevent still waited for it.
_HARMLESS = (
    (rb"\[[^\s\]]{1,255}:[0-9]{1,7}\]", b" plm:ssh: Warning: setpgid("),
    (rb"\[warn\]", b" Epoll "),
)
_LINE = rb"(?<=[\n\0])(?:" + b"|".join(who + re.escape(what) for who, what in _HARMLESS) + rb")[^\n]{0,400}\n"
#: What may become one.
_HALF_LINE = b"|".join(
    rb"(?<=[\n\0])" + who + b"(?:" + _beginnings(what) + b"|" + re.escape(what) + rb"[^\n]{0,400})\Z"
    for who, what in _HARMLESS
)
_HALF_LINE += rb"|(?<=[\n\0])\[(?:[^\s\]]{0,255}|[^\s\]]{1,255}:[0-9]{1,7})\Z"


class Output:
    """The standard error of a job, without the boxes in which Open MPI says that a rank has failed.

    `ringreduce run` says that itself. Boxes of another mpirun, which a rank may have started, pass if it names itself
    in there. Lines of Open MPI that mean nothing do not pass.

    Args:
        pid: returns the process id of mpirun; None: all boxes and lines pass.
    """

    def __init__(self, pid: Callable[[], int] | None) -> None:
        self._pid = pid
        self._held = b"\n"  # the last byte that has passed, and what may be the beginning of a box

    def feed(self, chunk: bytes) -> bytes:
        """Return the output that passes; the beginning of a possible box waits."""
        return self._pass(chunk, _BOX + rb"(?=[^\0])", _HALF_BOX + b"|" + _HALF_LINE)

    def idle(self) -> bytes:
        """Return the lines that wait for a box, since none has followed for long; and all that wait at the end."""
        return self._pass(b"", _BOX, rb"(?!)")

    def _pass(self, chunk: bytes, boxes: bytes, waiting: bytes) -> bytes:
        if self._pid is None:
            return chunk
        text = re.sub(_LINE, b"", re.sub(boxes, self._kept, self._held + chunk))
        half = re.search(waiting, text)
        end = len(text) if half is None else half.start()
        self._held = text[end - 1 :]
        return text[1:end]

    def _kept(self, box: re.Match[bytes]) -> bytes:
        named = _NAMED.search(box[0])
        is_others = named is not None and self._pid is not None and int(named[1]) != self._pid()
        return box[0] if is_others else b""
