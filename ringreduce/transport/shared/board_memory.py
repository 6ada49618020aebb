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
    mailboxes   two of `MAILBOX_NBYTES`: data of small collectives, for even and odd calls; in parts, if they are small
    staging     four of `STAGE_NBYTES`: pieces of private buffers on their way (two in, two out)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ringreduce.buffers import Array, address_of
from ringreduce.native.layout import LINE_NBYTES, PLACES

MAILBOX_NBYTES = 256 << 10
STAGE_NBYTES = 1 << 20

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
_STAGES = _MAILBOXES + 2 * MAILBOX_NBYTES
PART_NBYTES = _STAGES + 4 * STAGE_NBYTES
#: So many bytes of a new part are 0.
CLEARED_NBYTES = _MAILBOXES


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
        # Numbers that a line cannot hold, by parity and member.
        self._longer = tuple(
            [part[_NUMBERS + parity * _NUMBERS_NBYTES :][:_NUMBERS_NBYTES].data.cast("q") for part in self._parts]
            for parity in (0, 1)
        )

    def entries(self, number: int) -> list[int]:
        """Return where the other members publish places and numbers in a call."""
        return [address + (number & 1) * LINE_NBYTES + PLACES * 8 for address in self.others]

    def mailboxes(self, number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> list[Array]:
        """Return every member's mailbox in a call as an array, in the order of members.

        Calls take parts of a mailbox in turn: a line that another core has just read is written more slowly. Which part
        depends on the number modulo `TURNS`.

        Args:
            number: of the call.
            dtype, shape: of the array.
        """
        nbytes = dtype.itemsize * prod(shape)
        assert nbytes <= MAILBOX_NBYTES
        room = -(-nbytes // LINE_NBYTES) * LINE_NBYTES
        parts = 4 if 4 * room <= MAILBOX_NBYTES else 2 if 2 * room <= MAILBOX_NBYTES else 1
        offset = _MAILBOXES + (number & 1) * MAILBOX_NBYTES + (number >> 1) % parts * room
        return [part[offset : offset + nbytes].view(dtype).reshape(shape) for part in self._parts]

    def stages(self, dtype: np.dtype[Any]) -> list[list[Array]]:
        """Return every member's four staging areas as flat arrays: by area, in the order of members."""
        starts = range(_STAGES, PART_NBYTES, STAGE_NBYTES)
        return [[part[start : start + STAGE_NBYTES].view(dtype) for part in self._parts] for start in starts]

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
