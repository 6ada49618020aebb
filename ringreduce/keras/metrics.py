"""Metrics of all ranks: averages over the samples that each has seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from ringreduce.common.arguments import CheckingArguments
from ringreduce.keras.backends import as_numpy
from ringreduce.runtime.blocking import world
from ringreduce.training.binding.identity import agreed_names
from ringreduce.training.calls.averages import weighted_average

UNKNOWN = -1.0  # No number of samples is negative.


def samples_of(model: Any) -> float:
    """Return over how many samples the metrics of a model are, since they were reset: as its metric ``loss`` says."""
    losses = [metric for metric in model.metrics if metric.name == "loss" and isinstance(metric, keras.metrics.Mean)]
    return float(as_numpy(losses[0].count)) if losses else UNKNOWN


def averages_of(logs: Mapping[str, Any], trained: float, evaluated: float, *, weighted: bool) -> dict[str, Any]:
    """Return the averages of metrics over the ranks. Collective.

    Args:
        logs: the metrics by name: those of training, and as ``val_...`` those of evaluation. One of several numbers is
            averaged element by element.
        trained, evaluated: over how many samples each of them are on this rank.
        weighted: whether these numbers are the ranks' weights. Where some rank does not know its number, or none has
            any, all have the same weight.

    Raises:
        UnsupportedBufferError: a metric is ragged, or of strings. The other ranks get a `MismatchError`.
        MismatchError: the ranks have different metrics, or of other shapes.
    """
    names = agreed_names(logs)  # Keras counts metrics, too: one rank's "auc_1" is another's "auc"
    mine = np.array([[trained, evaluated]] if weighted else [[UNKNOWN, UNKNOWN]])
    everyone = world().allgather(mine)
    averages: dict[str, Any] = {}
    for column, are_of_evaluation in enumerate((False, True)):
        counts = everyone[:, column]
        own = mine[0, column]
        weight = own if counts.min() >= 0 and len(set(counts.tolist())) > 1 else 1.0
        chosen = {names[key]: key for key in logs if key.startswith("val_") == are_of_evaluation}
        if chosen:
            with CheckingArguments(world(), "weighted_average"):
                values = {name: _in_host_memory(logs[key], key) for name, key in chosen.items()}
            means = weighted_average(values, weight)
            averages |= {key: means[name] for name, key in chosen.items()}
    return averages


def _in_host_memory(value: Any, name: str) -> Any:
    return as_numpy(value, f"the metric {name}") if keras.ops.is_tensor(value) else value
