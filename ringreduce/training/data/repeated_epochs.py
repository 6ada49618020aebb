"""Epochs that have the order of the one before, as the program does not say that another one begins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TypeVar

from ringreduce.runtime import count, rank_and_size

T = TypeVar("T")

_log = logging.getLogger(__name__)


class RepeatedEpochs:
    """Watches the iterations of a sampler that was never told of an epoch."""

    def __init__(self) -> None:
        self._trained = False  # whether steps were made while the order was gone through
        self._told = False

    def watched(self, samples: Iterator[T]) -> Iterator[T]:
        """Yield samples; if steps are made meanwhile, and were in an earlier iteration, let rank 0 say so once.

        Iterations that overlap are those of several loaders, and one without steps measures: neither is told.
        """
        again = self._trained
        steps = count()
        yield from samples
        if count() == steps:
            return
        self._trained = True
        if again and not self._told and rank_and_size()[0] == 0:
            self._told = True
            _log.warning(
                "two epochs in a row had the same order, as the sampler was not told that another one begins: say "
                "sampler.set_epoch(epoch) before each epoch"
            )
