"""What all ranks must draw alike, as each then takes its share of it: parts of a dataset, orders, streams.

If each rank has drawn a part of its own, it trains on what others validate on; if each draws an order of its own, some
samples come twice and others never; if a stream is divided already, most of it is lost. The ranks compare checksums
before a step, as they do with hyper-parameters.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.runtime import global_process_set, is_initialized

_log = logging.getLogger(__name__)

#: What is compared -> what rank 0 says where it differs.
_SAID = {
    "subset": (
        "the ranks divide different samples: the Subset that a sampler was given has other indices on each rank, so "
        "that some train on what others validate on. Draw it alike on all ranks: random_split(..., "
        "generator=torch.Generator().manual_seed(0))"
    ),
    "order": (
        "the ranks draw different indices from the sampler at {place}, so that some samples come twice and others "
        "never. It must draw alike on all ranks, from the same weights and data: by an attribute generator that is "
        "None, which ShardSampler seeds, or by a seed that all ranks share"
    ),
    "stream": (
        "the ranks read different samples from the source of the Shard at {place}. Of as many samples as there are "
        "ranks, a Shard keeps one: if the source is divided among the ranks already, the others are lost; iterate it "
        "without Shard then. If all read the same data and change it at random, do so after the Shard"
    ),
}


class Subsets:
    """The first of each kind that a program divides; an engine keeps it."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Callable[[], int], str]] = {}  # with its line of the program

    @classmethod
    def divides(cls, dataset: Any) -> None:
        """Take note that a sampler divides a dataset; does nothing for one whose ``indices`` are no numbers. Local."""
        indices = np.asarray(getattr(dataset, "indices", None))  # a tensor has a method of that name
        if indices.dtype.kind in "iu":
            checksum = zlib.crc32(indices.astype(np.int64).tobytes())
            cls.compare("subset", lambda: checksum)

    @classmethod
    def compare(cls, kind: str, found: Callable[[], int], place: str = "") -> None:
        """Compare a checksum before the next steps, if it is the first of its kind. Local; without a world, nothing.

        Args:
            kind: ``"subset"``, ``"order"`` or ``"stream"``.
            found: returns it; negative: there is none yet.
            place: a line of the program.
        """
        if is_initialized() and global_process_set.included():
            global_process_set.engine.attached[cls]._found.setdefault(kind, (found, place))

    def checksums(self) -> dict[str, int]:
        """Return what this rank knows, by kind."""
        known = {kind: found() for kind, (found, _) in self._found.items()}
        return {kind: checksum for kind, checksum in known.items() if checksum >= 0}

    def tell(self, rank: int, differs: Callable[[str], bool]) -> None:
        """Let rank 0 say, once, what differs between the ranks; to be called on all."""
        for kind, said in _SAID.items():
            if differs(kind):
                _, place = self._found.get(kind, (None, ""))
                self._found[kind] = (lambda: -1), place
                if rank == 0:
                    _log.warning(said.format(place=place or "an unknown line"))
