"""What local training, as of `ringreduce.keras.callbacks.DiLoCoCallback`, asks of a model and its optimizer."""

from __future__ import annotations

from typing import Any

from ringreduce.common.errors import ConfigError
from ringreduce.runtime import rank
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.optimizers.refusals import require_together
from ringreduce.training.options.features import ACCUMULATION, LOCAL, LOSS_SCALES, SAMPLES
from ringreduce.training.strategies.late import STALENESS


def require_whole_steps(model: Any, process_set: ProcessSet) -> None:
    """Raise `ConfigError` unless each batch is a step that reduces gradients over the ranks of the process set."""
    optimizer = model.optimizer
    mine = process_set.ranks
    if model.steps_per_execution != 1:
        raise ConfigError("DiLoCoCallback counts steps: compile the model with steps_per_execution=1")
    if optimizer is None:
        return
    distribution = getattr(optimizer, "distribution", None)
    if distribution is not None and not distribution.process_set.included():
        distribution = None
    used = {
        LOCAL: True,
        LOSS_SCALES: hasattr(optimizer, "inner_optimizer"),
        ACCUMULATION: optimizer.gradient_accumulation_steps,
        STALENESS.feature: distribution is not None and distribution.reduction.staleness,
        SAMPLES: distribution is not None and distribution.reduction.samples is not None,
    }
    require_together([name for name, is_used in used.items() if is_used])
    together = [rank()] if distribution is None else distribution.process_set.ranks
    if together != mine:
        raise ConfigError(
            f"the optimizer reduces gradients over the ranks {together}, but the replica has {mine}: compile the model "
            "with DistributedOptimizer(optimizer, process_set=local.process_set), where local is the DiLoCoCallback"
        )
