"""Averages over the samples of all ranks, of which each has its own number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, overload

import numpy as np

from ringreduce import runtime
from ringreduce.common.arguments import CheckingArguments, real_number
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import SUM


@overload
def weighted_average(values: Mapping[str, Any], weight: float) -> dict[str, float]: ...


@overload
def weighted_average(values: float, weight: float) -> float: ...


def weighted_average(values: Any, weight: float) -> Any:
    """Average what the ranks have measured, each rank's with a weight: a loss over as many samples. Collective.

    What a rank of weight 0 has measured does not count, NaN included. Sums are made in float64.

    Args:
        values: a number, or an array or tensor of one element; or such numbers by name, the same names on all ranks.
        weight: of this rank's, mostly its number of samples; at least 0.

    Returns:
        The average, or the averages by name; the same on all ranks. NaN if all weights are 0.

    Raises:
        ConfigError: a value is no number, or the weight is negative or not finite. The other ranks get a
            `MismatchError`.
        MismatchError: the ranks have different names.
    """
    communicator = runtime.world()
    named = dict(sorted(values.items())) if isinstance(values, Mapping) else {"value": values}
    said = f"weighted_average({', '.join(named)})"
    with CheckingArguments(communicator, "weighted_average", said):
        mine = real_number("weight", weight)
        if not 0.0 <= mine < math.inf:
            raise ConfigError(f"a weight is a finite number of at least 0, got {mine}")
        numbers = [_number(name, each) for name, each in named.items()]
    sums = np.array([number * mine if mine else 0.0 for number in numbers] + [mine])
    communicator.allreduce(sums, SUM, out=sums)
    with np.errstate(invalid="ignore"):
        averages = (sums[:-1] / sums[-1]).tolist()
    found = dict(zip(named, averages, strict=True))
    return found if isinstance(values, Mapping) else found["value"]


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is no number: {error}") from None
