"""What local training, as of `ringreduce.keras.callbacks.DiLoCoCallback`, asks of a model and its optimizer."""

from __future__ import annotations

from typing import Any

from ringreduce.common.errors import ConfigError
from ringreduce.runtime import rank
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.options.refusals import LOCAL, SAMPLES, STALENESS, refusal


def require_whole_steps(model: Any, process_set: ProcessSet) -> None:
    """Raise `ConfigError` unless each batch is a step that reduces gradients over the ranks of the process set."""
    optimizer = model.optimizer
    mine = process_set.ranks
    if model.steps_per_execution != 1:
        raise ConfigError("DiLoCoCallback counts steps: compile the model with steps_per_execution=1")
    if optimizer is None:
        return
    if hasattr(optimizer, "inner_optimizer"):
        raise ConfigError(
            "replicas make equally many steps, but a LossScaleOptimizer skips steps when gradients overflow: "
            "train in bfloat16, or with a loss_scale_factor"
        )
    if optimizer.gradient_accumulation_steps:
        raise ConfigError("DiLoCoCallback counts each batch as a step: train without gradient_accumulation_steps")
    distribution = getattr(optimizer, "distribution", None)
    if distribution is None or not distribution.process_set.included():
        together = [rank()]
    else:
        together = distribution.process_set.ranks
        if distribution.reduction.staleness:
            raise refusal(LOCAL, STALENESS)
        if distribution.reduction.samples is not None:
            raise refusal(LOCAL, SAMPLES)
    if together != mine:
        raise ConfigError(
            f"the optimizer reduces gradients over the ranks {together}, but the replica has {mine}: compile the model "
            "with DistributedOptimizer(optimizer, process_set=local.process_set), where local is the DiLoCoCallback"
        )
