"""Averages over the samples of all ranks, of which each has its own number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, overload

import numpy as np

from ringreduce.common.arguments import CheckingArguments, real_number
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import SUM
from ringreduce.runtime.blocking import world


@overload
def weighted_average(values: Mapping[str, float], weight: float) -> dict[str, float]: ...


@overload
def weighted_average(values: Mapping[str, Any], weight: float) -> dict[str, Any]: ...


@overload
def weighted_average(values: float, weight: float) -> float: ...


@overload
def weighted_average(values: Any, weight: float) -> Any: ...


def weighted_average(values: Any, weight: float) -> Any:
    """Average what the ranks have measured, each rank's with a weight: a loss over as many samples. Collective.

    What a rank of weight 0 has measured does not count, NaN included. Sums are made in float64.

    Args:
        values: a number, or an array or tensor; or such values by name. Names and shapes are the same on all ranks.
        weight: of this rank's, mostly its number of samples; at least 0.

    Returns:
        The average, or the averages by name: a float of one element, else an array in float64. The same on all ranks.
        NaN if all weights are 0.

    Raises:
        ConfigError: a value has no numbers, or the weight is negative or not finite. The other ranks get a
            `MismatchError`.
        MismatchError: the ranks have different names or shapes.
    """
    communicator = world()
    named = dict(sorted(values.items())) if isinstance(values, Mapping) else {"value": values}
    shapes = {name: tuple(getattr(each, "shape", ())) for name, each in named.items()}
    shapes = {name: shape if math.prod(shape) != 1 else () for name, shape in shapes.items()}
    said = ", ".join(f"{name} of shape {shape}" if shape else str(name) for name, shape in shapes.items())
    with CheckingArguments(communicator, "weighted_average", f"weighted_average({said})"):
        mine = real_number("weight", weight)
        if not 0.0 <= mine < math.inf:
            raise ConfigError(f"a weight is a finite number of at least 0, got {mine}")
        numbers = [_numbers(name, each, shapes[name]) for name, each in named.items()]
    sums = np.concatenate([*(each * mine if mine else np.zeros_like(each) for each in numbers), [mine]])
    communicator.allreduce(sums, SUM, out=sums)
    with np.errstate(invalid="ignore"):
        *averages, _ = np.split(sums / sums[-1], np.cumsum([len(each) for each in numbers], dtype=np.intp))
    found = {
        name: each.reshape(shape) if shape else each.item()
        for (name, shape), each in zip(shapes.items(), averages, strict=True)
    }
    return found if isinstance(values, Mapping) else found["value"]


def _numbers(name: str, value: Any, shape: tuple[int, ...]) -> Any:
    """Return the elements of a value, flat and in float64."""
    try:
        return np.asarray(value, np.float64).reshape(-1) if shape else np.array([float(value)])
    except Exception as error:  # whatever the conversion of somebody's type raises
        raise ConfigError(f"{name} is no number, nor an array of numbers in host memory: {error}") from None
