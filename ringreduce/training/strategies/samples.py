"""Numbers of samples of a step: from the program, or from a sampler that divides by speed."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce.common.arguments import whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.training.data.shares import Shares, counts_of
from ringreduce.training.strategies.strategy import StepContext


class SampleNumbers:
    """Over how many samples the gradients of each rank are a mean: averages are weighted by these numbers.

    Attributes:
        told: this rank's, when the ranks have last exchanged them; None: ranks weigh equally.
        counts: those of all ranks, likewise, by rank; empty: ranks weigh equally.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._asked_in = -1  # the step for which a sampler was last asked
        self.told: int | None = None
        self.counts: dict[int, int] = {}

    def of_step(self, said: Any) -> int | ConfigError | None:
        """Return the number of this rank's samples in a step; None: it is not needed.

        Args:
            said: by the program. None: a sampler that divides by speed knows it; where there is none, ranks weigh
                equally.

        Returns:
            The number, or the error that is to be raised on all ranks.
        """
        context = self._context
        engine = context.ranks.engine
        if said is None and Shares not in engine.attached:
            return None
        try:
            if said is not None:
                samples = whole_number("samples", said, 0)
            else:
                counts = counts_of(engine, again=self._asked_in == context.count.stepped)
                if counts is None:
                    return None
                samples = counts[context.ranks.rank]
                self._asked_in = context.count.stepped
            if not context.options.weighs:
                raise ConfigError("numbers of samples are weights of an average; use op=Average with them")
        except ConfigError as error:
            return error
        return samples

    def exchange(self, samples: int | ConfigError | None) -> bool:
        """Exchange the numbers, which all ranks have or none has; return whether some have changed. Collective."""
        counts: dict[int, int] = {}
        if isinstance(samples, int):
            ranks = self._context.ranks
            rows = ranks.allgather(np.array([[ranks.rank, samples]], np.int64))
            counts = dict(rows.tolist())
        changed = counts != self.counts
        self.told = samples if isinstance(samples, int) else None
        self.counts = counts
        return changed
