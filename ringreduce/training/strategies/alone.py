"""The steps of a rank that has no others: its gradients are the averages."""

from __future__ import annotations

from typing import Any

from ringreduce.common.errors import ConfigError
from ringreduce.training.strategies.samples import SampleNumbers
from ringreduce.training.strategies.strategy import Contribution, Strategy


class LoneSteps(Strategy):
    """Returns gradients as they are.

    Args:
        numbers: of samples, which are checked as on several ranks.
    """

    def __init__(self, numbers: SampleNumbers) -> None:
        self._numbers = numbers

    def reduce(self, contribution: Contribution) -> list[Any]:
        samples = None if contribution.samples is None else self._numbers.of_step(contribution.samples)
        if isinstance(samples, ConfigError):
            raise samples
        return contribution.gradients
