"""What ranks send each other when a call fails: what each called, from where, and why one aborted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from ringreduce.common.errors import (
    ChangedMessageError,
    CollectiveError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    RingReduceError,
    TransportError,
)

#: The code of the program that was running and the instruction that each piece had come to, the innermost first.
Stack = tuple[tuple[CodeType, int], ...]

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
#: Of frameworks that call this package in between, or write the code that does (to files of random names).
_CALLERS = (
    *("/torch/autograd/", "/torch/distributed/", "/torch/_tensor.py"),
    *("/tensorflow/python/", "/keras/src/", "/__autograph_generated_file", "/jax/_src/", "/optax/"),
)
_DEPTH = 16  # Frames of the program: more cost more, and rarely distinguish more calls.
# Less than a page of the board, even if JSON escapes every character.
_TEXT_LENGTH = 1200
_PLACE_LENGTH = 200


class CallSite(NamedTuple):
    """What one rank called, and where in its program.

    Attributes:
        text: the call, the collective first: ``allreduce(sum, shape 5, float32)``.
        place: the line of the program that made it, ``train.py:12``; empty if the order of the program does not matter.
        stack: a hash of the lines of the program that were running; equal in processes that run the same program.
    """

    text: str
    place: str = ""
    stack: str = ""

    @classmethod
    def at(cls, text: str, stack: Stack) -> CallSite:
        """Return a call that was made from this stack."""
        lines = [
            f"{os.path.basename(code.co_filename)}:{_line(code, at)}:{_expression(code, at)}" for code, at in stack
        ]
        place = lines[0].rpartition(":")[0] if lines else ""
        return cls(text, place, blake2b(" ".join(lines).encode(), digest_size=16).hexdigest())

    @classmethod
    def here(cls, text: str) -> CallSite:
        """Return a call that the program is making now."""
        return cls.at(text, program_stack())

    @classmethod
    def from_json(cls, text: bytes) -> CallSite:
        """Read what `to_json` wrote."""
        return cls(*json.loads(text))

    def to_json(self) -> bytes:
        """Return it as one line of ASCII of less than 3000 bytes; the end of a long call is cut off."""
        return json.dumps([_plain(self.text, _TEXT_LENGTH), _plain(self.place, _PLACE_LENGTH), self.stack]).encode()


def refusal(name: str, error: BaseException) -> str:
    """Say that a rank cannot make a call of this name, and why; the end of a long reason is cut off."""
    reason = str(error) if isinstance(error, RingReduceError) else _described(error)
    return f"{name}(refused: {reason[:_TEXT_LENGTH]})"


def is_refusal(text: str) -> bool:
    """Return whether `refusal` made a text."""
    return "(refused: " in text


def disagreement(calls: Mapping[int, CallSite], texts: Mapping[int, str] | None = None) -> MismatchError:
    """Return the error of ranks that made different calls.

    They are in step if all made the same call of the program, from the same lines, whatever they called there. Then
    each has behind it one call that came to nothing. Otherwise nobody can know whose next call belongs to whose.

    Args:
        calls: what each rank called.
        texts: what the error says that each called, and those that called nothing; None: as the calls say it.
    """
    in_step = len({call.stack for call in calls.values()}) == 1
    places = {rank: call.place for rank, call in calls.items()}
    return MismatchError(
        texts or {rank: call.text for rank, call in calls.items()}, in_step=in_step, places={} if in_step else places
    )


class _AbortFields(NamedTuple):
    reason: str
    failed_rank: int | None
    late: bool
    changed: bool


class AbortReason(_AbortFields):
    """Why a rank takes part in nothing any more.

    Attributes:
        reason: in words; empty if it has shut down. The end of a long one is cut off.
        failed_rank: the rank whose failure is the reason, this rank itself if it was ended; None: no rank has failed.
        late: whether it has waited for too long.
        changed: whether it has got a message that had changed on its way.
    """

    __slots__ = ()

    def __new__(
        cls, reason: str = "", failed_rank: int | None = None, late: bool = False, changed: bool = False
    ) -> AbortReason:
        return super().__new__(cls, _plain(reason, _TEXT_LENGTH), failed_rank, late, changed)

    @classmethod
    def after(cls, failure: BaseException | None) -> AbortReason:
        """Return what a failure means for the others; None: an ordinary end."""
        if failure is None:
            return cls()
        if isinstance(failure, PeerLostError):
            # The reason comes without what this rank was doing.
            return cls(failure.reason.partition("; ")[0], failure.rank)
        late = isinstance(failure, CollectiveTimeoutError)
        reason = str(failure) if late else _described(failure)
        return cls(reason, late=late, changed=isinstance(failure, ChangedMessageError))

    def error(self, rank: int, doing: str) -> CollectiveError:
        """Return the error for a rank that waits for that one; ``doing`` says what the waiting rank does."""
        if not self.reason:
            return PeerLostError(rank, f"it has shut down; {doing}")
        if self.failed_rank is not None:
            return PeerLostError(self.failed_rank, f"{self.reason}; {doing}", ends_job=self.failed_rank == rank)
        other = ChangedMessageError if self.changed else TransportError
        kind = CollectiveTimeoutError if self.late else other
        return kind(f"rank {rank} has given up ({self.reason}); {doing}")


def program_stack(depth: int = _DEPTH) -> Stack:
    """Return the innermost frames of the program, at most so many, from that on which has called this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    frames: list[tuple[CodeType, int]] = []
    while frame is not None and len(frames) < depth:
        frames.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(frames)


def place_of(stack: Stack) -> str:
    """Return the innermost line: ``/home/me/train.py:12``."""
    if not stack:
        return "an unknown line, on a thread that is not the program's"
    code, at = stack[0]
    return f"{code.co_filename}:{_line(code, at)}"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _plain(text: str, length: int) -> str:
    line = " ".join(text.split())[:length]
    return "".join(character if character.isascii() and character.isprintable() else "?" for character in line)


def _line(code: CodeType, instruction: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
    return next(lines, code.co_firstlineno)


def _expression(code: CodeType, instruction: int) -> str:
    """Return which expression of the line an instruction is of, as far as Python knows.

    The instruction itself would not do: from Python 3.13 on, both branches of ``f(1.0 if wrong else 1)`` have a call of
    their own.
    """
    if sys.version_info >= (3, 11):
        _, end_line, column, end_column = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
        if column is not None:
            return f"{column}-{end_line}-{end_column}"
    return str(instruction)


@lru_cache(maxsize=4096)
def _is_ours(path: str) -> bool:
    return path.startswith(_PACKAGE) or any(caller in path for caller in _CALLERS)
