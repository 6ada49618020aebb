"""Which options of optimizers, and which uses of them, go together: one table, which docs/recipes/methods.md repeats.

`REFUSED` has each pair that is refused, and why. All other pairs work: tests/parallel/test_combinations.py proves each.
`REFUSED_IN_KERAS` has pairs of what only TensorFlow and Keras have. Those of strategies are declared by these.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

from ringreduce.common.errors import ConfigError
from ringreduce.training.options.features import (
    ACCUMULATION,
    ADASUM,
    BACKWARD,
    CLOSURE,
    COMPILED,
    COMPRESSION,
    ELASTIC,
    FIRST_TENSORFLOW,
    GLOBAL_NORM,
    JOIN,
    KERAS,
    LOCAL,
    LOCAL_VARIABLES,
    LOSS_SCALES,
    NO_SCALES,
    OVERLAP,
    PREDIVISION,
    SAMPLER_KNOWS,
    SAMPLES,
    SCALER,
    SHARD,
    SHARES,
    SKIP_UNUSED,
    SKIPPING,
    SPARSE,
    SPLIT,
    WIRE_FORMATS,
    refused,
)
from ringreduce.training.strategies.chosen import STRATEGIES

_STRATEGIES = [(option.feature, option.refuses) for option in STRATEGIES]
_OF_KERAS = {ACCUMULATION, FIRST_TENSORFLOW, GLOBAL_NORM, KERAS, LOCAL_VARIABLES, LOSS_SCALES}
_OF_STRATEGIES = {(other, feature): why for feature, refuses in _STRATEGIES for other, why in refuses.items()}

#: All of these, of which some pairs are refused.
FEATURES = (
    ADASUM,
    BACKWARD,
    CLOSURE,
    COMPILED,
    COMPRESSION,
    ELASTIC,
    JOIN,
    LOCAL,
    OVERLAP,
    PREDIVISION,
    SAMPLES,
    SCALER,
    SHARD,
    SHARES,
    SKIPPING,
    SKIP_UNUSED,
    SPARSE,
    SPLIT,
    WIRE_FORMATS,
    *(feature for feature, _ in _STRATEGIES),
)

#: Why two do not go together.
REFUSED: dict[tuple[str, str], str] = {
    (ADASUM, JOIN): "changes are combined in pairs of ranks, none of which may be missing",
    (ADASUM, LOCAL): "exchanges between replicas are averages",
    (ADASUM, PREDIVISION): "it is for averages, and Adasum makes none",
    (ADASUM, SHARD): "each rank steps by itself, so that nodes cannot share parameters",
    (ADASUM, SPLIT): "each rank steps with its own gradients",
    (LOCAL, SCALER): "replicas make equally many steps, but each would skip different ones; train in bfloat16",
    (BACKWARD, LOCAL): "a replica reduces its gradients in its step",
    (COMPRESSION, LOCAL): "the differences between replicas travel in wire formats",
    (LOCAL, OVERLAP): "a replica measures by itself whether overlap pays",
    (LOCAL, PREDIVISION): "the differences between replicas are averaged as they are",
    (JOIN, LOCAL): "replicas make equally many steps",
    (JOIN, SHARD): "all ranks of a node update the parameters that they share",
    (CLOSURE, SCALER): "torch's GradScaler takes no closure",
    (LOCAL, SKIPPING): "no synchronize() comes before a step, so none can be skipped",
    (LOCAL, SKIP_UNUSED): "it is an argument of DistributedOptimizer alone",
    (LOCAL, SPLIT): "it is an argument of DistributedOptimizer alone",
    (ADASUM, SKIPPING): "the changes of the step are reduced, not gradients",
    (SHARD, SPLIT): "it already lets each rank update some of the parameters",
    (ADASUM, SAMPLES): "numbers of samples are weights of an average",
    (BACKWARD, SAMPLES): f"gradients are averaged before the step gets its number; {SAMPLER_KNOWS}",
    (LOCAL, SAMPLES): "in an exchange, the weight of a replica is its number of ranks",
    (SAMPLES, SCALER): f"gradients are averaged before the step gets its number; {SAMPLER_KNOWS}",
    (SAMPLES, SKIPPING): f"synchronize() or clip_grad_norm_() has averaged gradients before the step; {SAMPLER_KNOWS}",
    (ADASUM, SHARES): "numbers of samples are weights of an average",
    (LOCAL, SHARES): "in an exchange, the weight of a replica is its number of ranks",
    **{pair: why for pair, why in _OF_STRATEGIES.items() if not {*pair} & _OF_KERAS},
}

#: Likewise, of what programs of TensorFlow and Keras have besides.
REFUSED_IN_KERAS: dict[tuple[str, str], str] = {
    (ADASUM, KERAS): "it combines the changes of a step, for optimizers of tf.compat.v1.train",
    (ADASUM, ACCUMULATION): "each backward pass makes a step",
    (LOCAL, LOSS_SCALES): f"replicas make equally many steps, but each would skip different ones; {NO_SCALES}",
    (LOCAL, ACCUMULATION): "DiLoCoCallback counts each batch as a step",
    (LOCAL_VARIABLES, LOSS_SCALES): "losses cannot be scaled dynamically: a rank whose own gradients overflow would "
    f"skip a step that the others make; {NO_SCALES}",
    (LOCAL_VARIABLES, GLOBAL_NORM): "the norm of all gradients differs between the ranks, which would clip those of "
    "common variables differently; use clipnorm or clipvalue",
    **{pair: why for pair, why in _OF_STRATEGIES.items() if {*pair} & _OF_KERAS},
}
_ALL = {**REFUSED, **REFUSED_IN_KERAS}


def are_refused(one: str, other: str) -> bool:
    """Return whether two names do not go together."""
    return (one, other) in _ALL or (other, one) in _ALL


def refusal(one: str, other: str) -> ConfigError:
    """Return the error for two names that do not go together."""
    reason = _ALL.get((one, other)) or _ALL[other, one]
    return refused(one, other, reason)


def require_together(used: Collection[str]) -> None:
    """Raise the `ConfigError` of two names, if there are two that do not go together."""
    for one, other in combinations(used, 2):
        if are_refused(one, other):
            raise refusal(one, other)
