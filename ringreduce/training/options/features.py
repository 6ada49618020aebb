"""Names of options and uses of optimizers, as errors and documents call them; and the options of strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ringreduce.common.errors import ConfigError

ADASUM = "Adasum"
BACKWARD = 'reduce_in="backward"'
CLOSURE = "step(closure)"
COMPILED = "a compiled model"
COMPRESSION = "powersgd, topk or a custom compressor"
ELASTIC = "elastic training"
JOIN = "join"
LOCAL = "DiLoCo or LocalSGD"
OVERLAP = "overlap=True"
PREDIVISION = "gradient_predivide_factor"
SAMPLES = "numbers of samples"
SCALER = "a GradScaler"
SHARD = "shard"
SHARES = 'a sampler with shares="speed"'
SKIPPING = "skip_synchronize"
SKIP_UNUSED = "skip_unused=True"
SPARSE = "sparse gradients"
SPLIT = "split_updates=True"
WIRE_FORMATS = "a wire format"

# ---- of TensorFlow and Keras alone ----

ACCUMULATION = "gradient_accumulation_steps or backward_passes_per_step"
FIRST_TENSORFLOW = "an optimizer of tf.compat.v1.train"
GLOBAL_NORM = "global_clipnorm"
KERAS = "an optimizer of Keras"
LOCAL_VARIABLES = "local variables"
LOSS_SCALES = "a LossScaleOptimizer"

#: Advice for steps that have another weight on each rank.
SAMPLER_KNOWS = 'use a sampler with shares="speed", which knows the numbers of samples before the step'
#: Advice in place of a LossScaleOptimizer.
NO_SCALES = "give the optimizer a loss_scale_factor, or train in bfloat16"


@dataclass(frozen=True, eq=False)
class StrategyOption:
    """The option of optimizers that chooses a strategy; the strategy's file declares it.

    Attributes:
        name: what the argument is called.
        default: its value where the strategy is not chosen.
        annotation: its type.
        meaning: its entry in docstrings.
        feature: what errors and documents call the strategy.
        check: returns what a value means, or raises a `ConfigError`.
        refuses: other features that do not go together with it, and why.
        overlaps: whether buckets may be reduced before the step.
        is_late: whether later steps apply the averages of a step: the ranks agree in the first step alone, gradients
            stay in buckets of their step, and commits have averages.
    """

    name: str
    default: Any
    annotation: str
    meaning: str
    feature: str
    check: Callable[[Any], Any]
    refuses: Mapping[str, str]
    overlaps: bool = True
    is_late: bool = False

    def require_allowed(self, use: str) -> None:
        """Raise a `ConfigError` if a use does not go together with it."""
        if use in self.refuses:
            raise refused(use, self.feature, self.refuses[use])


def refused(one: str, other: str, why: str) -> ConfigError:
    """Return the error for two features that do not go together."""
    return ConfigError(f"{one} and {other} do not go together: {why}")
