"""Parts of a dataset that a program has drawn by itself: whether all ranks have drawn the same ones.

A sampler divides a part among the ranks as if all had the same one. If each rank has drawn its own, it trains on what
others validate on. The ranks compare a checksum of the first one before a step, as they do with hyper-parameters.
"""

from __future__ import annotations

import logging
import zlib
from typing import Any

import numpy as np

from ringreduce.runtime import global_process_set, is_initialized

_log = logging.getLogger(__name__)


class Subsets:
    """What this rank knows of the first part that a sampler of it divides; an engine keeps it.

    Attributes:
        checksum: of its indices; None: there was none yet, or the ranks have been told that theirs differ.
        told: whether they have been.
    """

    def __init__(self) -> None:
        self.checksum: int | None = None
        self.told = False

    @classmethod
    def divides(cls, dataset: Any) -> None:
        """Take note that a sampler divides a dataset; does nothing for one whose ``indices`` are no numbers. Local."""
        indices = np.asarray(getattr(dataset, "indices", None))  # a tensor has a method of that name
        if indices.dtype.kind not in "iu" or not is_initialized() or not global_process_set.included():
            return
        known = global_process_set.engine.attached[cls]
        if known.checksum is None and not known.told:
            known.checksum = zlib.crc32(indices.astype(np.int64).tobytes())

    def differ(self, rank: int) -> None:
        """Let rank 0 say, once, that the ranks have drawn different parts; to be called on all."""
        self.checksum = None
        self.told = True
        if rank == 0:
            _log.warning(
                "the ranks divide different samples: the Subset that a sampler was given has other indices on each "
                "rank, so that some train on what others validate on. Draw it alike on all ranks: random_split(..., "
                "generator=torch.Generator().manual_seed(0))"
            )
