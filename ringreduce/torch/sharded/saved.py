"""What the state dict of a `DistributedOptimizer` has besides that of the wrapped optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ringreduce.torch.compression import each_array
from ringreduce.training.optimizers.optimizer import Training
from ringreduce.training.strategies.late import require_room, staleness_of

#: Keys of state dicts.
_COMPRESSION = "compression"
_LATE = "late"


def add_training(state: dict[str, Any], training: Training) -> None:
    """Add to a state what compression keeps on this rank, and averages that are still to be applied."""
    if training.late is not None:
        state[_LATE] = training.late.state()
    if kept := training.state_dict():
        state[_COMPRESSION] = {**kept, "buckets": each_array(torch.from_numpy, kept["buckets"])}


def take_training(state: dict[str, Any], training: Training) -> Callable[[], None]:
    """Remove from a state what `add_training` has added; return a function that loads it.

    Raises:
        ConfigError: it has more averages than the staleness allows.
    """
    kept = state.pop(_COMPRESSION, None)
    late = copy.deepcopy(state.pop(_LATE, []))
    require_room(late, staleness_of(training.options))

    def load() -> None:
        parameters = [parameter for _, parameter in training.named()]
        for gradients in late:
            for number, average in gradients.items():  # a checkpoint is in host memory
                gradients[number] = average.to(parameters[number].device)
        if (averages := training.reducer.late if late else training.late) is not None:
            averages.load(late)
        if kept is None:
            training.reducer.load_state_dict({})
        else:
            arrays = each_array(lambda tensor: tensor.cpu().numpy(), kept["buckets"])
            training.load_state_dict(kept["rank"], kept["size"], arrays)

    return load
