"""A commit of what the ranks of a node have in common: one copy, of which each rank makes a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ringreduce.common.partition import Partition

if TYPE_CHECKING:
    from ringreduce.training.strategies.parts import Sharding

_Bytes = npt.NDArray[np.uint8]


class NodeCommit:
    """A copy of memory of the node that the ranks update together.

    Until all ranks have copied their parts, that memory is itself the commit, as no rank begins another update before.
    After a death, a rank restores from that memory if not all ranks had copied, and from the copy otherwise.

    Args:
        sharding: of the memory.

    Attributes:
        is_whole: whether the copy is the last commit.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._pairs: list[tuple[_Bytes, _Bytes]] = []  # memory, and its copy
        self._prepared = self.is_whole = False
        self._unchanging: Sequence[_Bytes] = ()

    def leave_out(self, unchanging: Sequence[_Bytes]) -> None:
        """Copy no memory of the node, from now on, to which nobody stores any more."""
        self._unchanging = unchanging

    def prepare(self, memory: Sequence[_Bytes]) -> None:
        """Make room for a copy of memory of the node, all that is to be copied. Collective."""
        known = {id(each): (each, copy) for each, copy in self._pairs}
        self._pairs = [known.get(id(each)) or (each, self._sharding.node_memory(each.nbytes)) for each in memory]
        self._prepared = True

    def take(self) -> None:
        """Copy this rank's part of what was prepared, and wait for the others. Collective."""
        if not self._prepared:
            return
        self._prepared = self.is_whole = False
        self._sharding.meet("about to commit")  # no rank goes on from the last commit any more
        for memory, copy in self._pairs:
            part = Partition.even(memory.nbytes, self._sharding.node_size).segment[self._sharding.node_index]
            copy[part] = memory[part]
        self._sharding.meet("committed")
        self.is_whole = True
        self._unchanging = ()

    def copy_of(self, address: int, nbytes: int) -> _Bytes | None:
        """Return the copy of some bytes of memory; None: they are not in it, and the caller copies them."""
        pairs = [*self._pairs, *((each, each) for each in self._unchanging)]
        return _counterpart(pairs, address, nbytes)

    def original_of(self, address: int, nbytes: int) -> _Bytes | None:
        """Return the memory of which some bytes are the copy; None: they are in no copy."""
        return _counterpart([(copy, memory) for memory, copy in self._pairs], address, nbytes)


def _counterpart(pairs: Sequence[tuple[_Bytes, _Bytes]], address: int, nbytes: int) -> _Bytes | None:
    """Return what lies in the second of a pair where some bytes lie in the first."""
    for one, other in pairs:
        start = address - one.ctypes.data
        if start >= 0 and start + nbytes <= one.nbytes:
            return other[start : start + nbytes]
    return None
