"""Which options of optimizers, and which uses of them, go together: one table, which docs/recipes/methods.md repeats.

`REFUSED` has each pair that is refused, and why. All other pairs work: tests/parallel/test_combinations.py proves each.
`REFUSED_IN_KERAS` has pairs of what only TensorFlow and Keras have.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

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
STALENESS = "staleness"
WIRE_FORMATS = "a wire format"

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
    STALENESS,
    WIRE_FORMATS,
)

_SAMPLER_KNOWS = 'use a sampler with shares="speed", which knows the numbers of samples before the step'

#: Why two do not go together.
REFUSED: dict[tuple[str, str], str] = {
    (ADASUM, JOIN): "changes are combined in pairs of ranks, none of which may be missing",
    (ADASUM, LOCAL): "exchanges between replicas are averages",
    (ADASUM, PREDIVISION): "it is for averages, and Adasum makes none",
    (ADASUM, SHARD): "each rank steps by itself, so that nodes cannot share parameters",
    (ADASUM, SPLIT): "each rank steps with its own gradients",
    (ADASUM, STALENESS): "it combines the changes of steps, not gradients",
    (LOCAL, SCALER): "replicas make equally many steps, but each would skip different ones; train in bfloat16",
    (BACKWARD, LOCAL): "a replica reduces its gradients in its step",
    (COMPRESSION, LOCAL): "the differences between replicas travel in wire formats",
    (LOCAL, OVERLAP): "a replica measures by itself whether overlap pays",
    (LOCAL, PREDIVISION): "the differences between replicas are averaged as they are",
    (LOCAL, STALENESS): "`delay` already lets steps go on during an exchange",
    (COMPRESSION, STALENESS): "it reduces a bucket in several collectives, which wait for all ranks",
    (JOIN, LOCAL): "replicas make equally many steps",
    (JOIN, SHARD): "all ranks of a node update the parameters that they share",
    (JOIN, STALENESS): "a rank that joins would lack the last averages",
    (OVERLAP, STALENESS): "the reduction already goes on during the next step",
    (PREDIVISION, STALENESS): "buckets are scaled before and after a reduction for which the step waits",
    (BACKWARD, STALENESS): "a gradient is replaced by an older average, to which the next pass must not add",
    (CLOSURE, SCALER): "torch's GradScaler takes no closure",
    (SCALER, STALENESS): "the scale would be that of another step",
    (LOCAL, SKIPPING): "no synchronize() comes before a step, so none can be skipped",
    (LOCAL, SKIP_UNUSED): "it is an argument of DistributedOptimizer alone",
    (LOCAL, SPLIT): "it is an argument of DistributedOptimizer alone",
    (ADASUM, SKIPPING): "the changes of the step are reduced, not gradients",
    (SHARD, SPLIT): "it already lets each rank update some of the parameters",
    (SHARD, STALENESS): "the ranks of a node read each other's buckets, so that each step waits for all of them",
    (SKIPPING, STALENESS): "a step applies what another step has submitted",
    (SKIP_UNUSED, STALENESS): "whether other ranks use a parameter is known too late",
    (SPARSE, STALENESS): "rows are gathered by all ranks together; use sparse_as_dense=True",
    (STALENESS, CLOSURE): "a closure is called again for gradients of the same step",
    (ADASUM, SAMPLES): "numbers of samples are weights of an average",
    (BACKWARD, SAMPLES): f"gradients are averaged before the step gets its number; {_SAMPLER_KNOWS}",
    (LOCAL, SAMPLES): "in an exchange, the weight of a replica is its number of ranks",
    (SAMPLES, SCALER): f"gradients are averaged before the step gets its number; {_SAMPLER_KNOWS}",
    (SAMPLES, SKIPPING): f"synchronize() or clip_grad_norm_() has averaged gradients before the step; {_SAMPLER_KNOWS}",
    (SAMPLES, STALENESS): f"ranks would wait for each other's numbers; {_SAMPLER_KNOWS}",
    (ADASUM, SHARES): "numbers of samples are weights of an average",
    (LOCAL, SHARES): "in an exchange, the weight of a replica is its number of ranks",
}

ACCUMULATION = "gradient_accumulation_steps or backward_passes_per_step"
FIRST_TENSORFLOW = "an optimizer of tf.compat.v1.train"
GLOBAL_NORM = "global_clipnorm"
KERAS = "an optimizer of Keras"
LOCAL_VARIABLES = "local variables"
LOSS_SCALES = "a LossScaleOptimizer"

_NO_SCALES = "give the optimizer a loss_scale_factor, or train in bfloat16"

#: Likewise, of what programs of TensorFlow and Keras have besides.
REFUSED_IN_KERAS: dict[tuple[str, str], str] = {
    (ADASUM, KERAS): "it combines the changes of a step, for optimizers of tf.compat.v1.train",
    (ADASUM, ACCUMULATION): "each backward pass makes a step",
    (STALENESS, FIRST_TENSORFLOW): "it is for optimizers of Keras",
    (STALENESS, LOSS_SCALES): f"the scale would be that of another step; {_NO_SCALES}",
    (STALENESS, ACCUMULATION): "each backward pass makes a step",
    (LOCAL, LOSS_SCALES): f"replicas make equally many steps, but each would skip different ones; {_NO_SCALES}",
    (LOCAL, ACCUMULATION): "DiLoCoCallback counts each batch as a step",
    (LOCAL_VARIABLES, LOSS_SCALES): "losses cannot be scaled dynamically: a rank whose own gradients overflow would "
    f"skip a step that the others make; {_NO_SCALES}",
    (LOCAL_VARIABLES, GLOBAL_NORM): "the norm of all gradients differs between the ranks, which would clip those of "
    "common variables differently; use clipnorm or clipvalue",
}
_ALL = {**REFUSED, **REFUSED_IN_KERAS}


def are_refused(one: str, other: str) -> bool:
    """Return whether two names do not go together."""
    return (one, other) in _ALL or (other, one) in _ALL


def refusal(one: str, other: str) -> ConfigError:
    """Return the error for two names that do not go together."""
    reason = _ALL.get((one, other)) or _ALL[other, one]
    return ConfigError(f"{one} and {other} do not go together: {reason}")


def require_together(used: Collection[str]) -> None:
    """Raise the `ConfigError` of two names, if there are two that do not go together."""
    for one, other in combinations(used, 2):
        if are_refused(one, other):
            raise refusal(one, other)
