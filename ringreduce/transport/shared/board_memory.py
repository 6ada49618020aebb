"""The memory of a board: what lies where in the part of each rank of a node.

A part has two pages of flags and texts that only its rank writes, and areas that its peers read (or write, between
barriers):

    line 0, 1   entry:   call number, signature hash, places of input and result, four more numbers, for even and odd
                calls
    line 2      barrier: how many barriers this rank has reached
    line 3      counters: how many calls this rank has begun, and barriers; whether compiled code has published an even
                call, an odd call since `Board` has. No other rank reads it
    line 4      status: not 0 once the rank takes part in no further call; processors fetch lines in pairs, and nothing
                beside this one is ever written in a call
    line 6 ...  what this rank called, as text, written only when a mismatch was seen
    page 1      why this rank takes part in no further call, written before its status
    numbers     two of `_NUMBERS_NBYTES`: numbers published at entry that the line cannot hold, for even and odd calls
    mailboxes   two of `MAILBOX_NBYTES`, for even and odd calls: inputs on their way, in parts that take turns
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ringreduce.buffers import Array, address_of, unowned
from ringreduce.native.layout import FROM_LINE, FROM_MAILBOX, LINE_NBYTES, MAILBOX_NBYTES, PLACES

#: The largest input that is mailed.
MAILED_NBYTES = 256 << 10
#: Where small inputs are in a mailbox comes again after so many calls, half of them even.
TURNS = 64
#: Parts that take turns have so many bytes together: they stay near a core, and the core that has read one forgets it.
_TURNING_NBYTES = 1 << 20

COUNTERS_LINE = 3
STATUS_LINE = 4
#: Of an entry line: input and result are in these places, and numbers behind them.
SOURCE = PLACES
TARGET = SOURCE + 1
_PUBLISHED = TARGET + 1
#: So many numbers are published in the line itself.
NPUBLISHED = LINE_NBYTES // 8 - _PUBLISHED

_PAGE = 4096
_CALLED = slice(6 * LINE_NBYTES, _PAGE)
_WHY = slice(_PAGE, 2 * _PAGE)
_NUMBERS = 2 * _PAGE
_NUMBERS_NBYTES = 2 * _PAGE  # a number for each of a thousand members
_MAILBOXES = _NUMBERS + 2 * _NUMBERS_NBYTES
PART_NBYTES = _MAILBOXES + 2 * MAILBOX_NBYTES
#: So many bytes of a new part are 0.
CLEARED_NBYTES = _MAILBOXES


@lru_cache(maxsize=1024)
def rooms_of(nbytes: int) -> tuple[int, int]:
    """Return the bytes of a part of a mailbox for an input of so many, and how many take turns; powers of two.

    They take turns, as a line that another core has just read is written more slowly.
    """
    assert nbytes <= MAILBOX_NBYTES
    room = 1 << (max(nbytes, LINE_NBYTES) - 1).bit_length()
    return room, max(1, min(_TURNING_NBYTES // room, TURNS // 2))


class BoardMemory:
    """The parts of all members.

    Args:
        parts: by member, as bytes.
        index: which member this rank is.

    Attributes:
        lines: by member, its lines 0 to 4.
        addresses: by member, where its part is.
        others: where the parts of the other members are.
        called, why: by member, the areas of its texts.
    """

    def __init__(self, parts: Sequence[Array], index: int) -> None:
        self._parts = parts
        self._index = index
        self.addresses = [address_of(part) for part in self._parts]
        self.others = [address for member, address in enumerate(self.addresses) if member != index]
        self.lines = [
            [part[line * LINE_NBYTES :][:LINE_NBYTES].data.cast("q") for line in range(STATUS_LINE + 1)]
            for part in self._parts
        ]
        self.called = [part[_CALLED] for part in self._parts]
        self.why = [part[_WHY] for part in self._parts]
        self._mailboxes = [
            (part[_MAILBOXES:], address + _MAILBOXES) for part, address in zip(parts, self.addresses, strict=True)
        ]
        #: Where the other members publish places and numbers, for the instructions of a compiled call.
        self.entries = [FROM_LINE + address + PLACES * 8 for address in self.others]
        # Numbers that a line cannot hold, by parity and member.
        self._longer = tuple(
            [part[_NUMBERS + parity * _NUMBERS_NBYTES :][:_NUMBERS_NBYTES].data.cast("q") for part in self._parts]
            for parity in (0, 1)
        )

    def mailboxes(self, turn: int, dtype: np.dtype[Any], count: int) -> list[Array]:
        """Return where so many elements of every member are in its mailbox in a call, in the order of members.

        Args:
            turn: the number of the call, or that modulo `TURNS`; -1: any, for the instructions of a compiled call.
            dtype, count: of the elements.
        """
        nbytes = count * dtype.itemsize
        room, rooms = rooms_of(nbytes)
        if turn < 0:
            return [unowned(part[:nbytes].view(dtype), FROM_MAILBOX + address) for part, address in self._mailboxes]
        offset = (turn & 1) * MAILBOX_NBYTES + ((turn >> 1) & (rooms - 1)) * room
        return [part[offset : offset + nbytes].view(dtype) for part, _ in self._mailboxes]

    def publish(self, parity: int, numbers: tuple[int, ...]) -> None:
        """Let the other members read numbers once this rank has entered the call."""
        if len(numbers) > NPUBLISHED:
            self._longer[parity][self._index][: len(numbers)] = array("q", numbers)
        else:
            self.lines[self._index][parity][_PUBLISHED : _PUBLISHED + len(numbers)] = array("q", numbers)

    def published(self, parity: int, count: int) -> list[int]:
        """Return source, target and numbers of each of the other members in a call that all have entered."""
        found: list[int] = []
        for number, lines in enumerate(self.lines):
            if number != self._index:
                line = lines[parity]
                found += line[SOURCE:_PUBLISHED].tolist()
                area = line[_PUBLISHED:] if count <= NPUBLISHED else self._longer[parity][number]
                found += area[:count].tolist()
        return found


def write_text(area: Array, text: bytes) -> None:
    """Write a text that the others read once a flag is set."""
    assert 8 + len(text) <= len(area)
    area[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    area[:8].view(np.int64)[0] = len(text)


def read_text(area: Array) -> bytes:
    """Return such a text."""
    return area[8 : 8 + int(area[:8].view(np.int64)[0])].tobytes()
