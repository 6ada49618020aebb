"""Where the blocks of a schedule are, how they travel, and memory that a schedule needs while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import Call
from ringreduce.common.partition import Segment
from ringreduce.transport.shared.private import PrivateMemory

__all__ = ["INNER_NBYTES", "Coding", "Elements", "Memory", "Scratch"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

#: Bytes of direct accesses that are combined and copied on at a time: few enough to stay in L2.
INNER_NBYTES = 256 << 10


class Elements(Protocol):
    """What a schedule needs of a buffer: its contiguous parts."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def itemsize(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Array: ...


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a schedule's blocks are.

    Attributes:
        mine: this rank's buffer, one-dimensional; where something is loaded or stored directly, an array.
        peers: the buffers of ranks whose memory can be touched, or copied at least, by rank.
        peer_segments: for peers whose blocks are elsewhere than here: their segments, by rank.
        result: where loads and reductions put what they make, and from where it is stored to peers; also where steps
            with messages combine by rank. None: ``mine``.
        result_segments: where blocks are in the result; None: as in ``mine``.
        peer_results: what stores go to, by rank; None: ``peers``.
        copies: returns, for a peer, `INNER_NBYTES` bytes into which pieces of its private memory are copied, to be
            reduced.
        make_scratch: returns memory of the same kind for so many elements, to receive messages in; None: NumPy's.
    """

    mine: Elements
    peers: Mapping[int, Array | PrivateMemory] = field(default_factory=dict)
    peer_segments: dict[int, list[Segment]] = field(default_factory=dict)
    result: Array | None = None
    result_segments: list[Segment] | None = None
    peer_results: Mapping[int, Array | PrivateMemory] | None = None
    copies: Callable[[int], Bytes] = lambda peer: np.empty(INNER_NBYTES, np.uint8)
    make_scratch: Callable[[int], Array] | None = None


class Coding(Protocol):
    """How blocks are encoded in messages.

    A part is where blocks are in the buffer. All methods but `nbytes` return a function, which works on what is there
    when it is called.
    """

    def nbytes(self, part: slice) -> int:
        """Return the bytes that an encoded part takes."""

    def encode(self, part: slice, target: Bytes) -> Call:
        """Return what encodes a part."""

    def decode(self, source: Bytes, part: slice) -> Call:
        """Return what overwrites a part with what was received."""

    def combine(self, part: slice, arrived: Sequence[tuple[int, Bytes]], target: Bytes) -> Call:
        """Return what reduces a part with what other ranks sent of it, in the order of ranks.

        Args:
            part: gets what the result decodes to.
            arrived: (rank, what it sent).
            target: gets the result, encoded.
        """


class Scratch:
    """Memory in which one stream receives what is to be reduced; each step uses all of it again."""

    def __init__(self, make: Callable[[int], Array]) -> None:
        self._make = make
        self._chunks: list[Array] = []
        self._taken = 0

    def reset(self) -> None:
        self._taken = 0

    def take(self, count: int) -> Array:
        """Return ``count`` elements that no other `take` since the last `reset` has returned."""
        if self._taken == len(self._chunks):
            self._chunks.append(self._make(count))
        elif self._chunks[self._taken].size < count:
            self._chunks[self._taken] = self._make(count)
        self._taken += 1
        return self._chunks[self._taken - 1][:count]
