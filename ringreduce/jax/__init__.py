"""Data-parallel training with JAX: collectives on pytrees, inside and outside of `jit`, and an optax transformation.

    import ringreduce.jax as rj

    rj.init()
    tx = rj.DistributedGradientTransformation(optax.adam(1e-3))
    params = rj.broadcast_parameters(params)
    opt_state = tx.init(params)

Import it before the first array is made: errors of compiled programs are then raised where they are called. Arrays are
reduced in host memory; a compiled program has to run on the CPU, outside of `jit` arrays of other devices are copied.
"""

from ringreduce.common.libraries import require_framework

require_framework("jax", __name__)
require_framework("optax", __name__)

# ruff: noqa: E402  # what follows imports them
from ringreduce.jax import elastic, ops
from ringreduce.jax.functions import broadcast_parameters
from ringreduce.jax.local import DiLoCo, LocalSGD
from ringreduce.jax.ops import *  # noqa: F403  # what it exports is written down there, and not once more
from ringreduce.jax.optimizer import (
    DistributedGradientTransformation,
    DistributedState,
    DistributedTransformation,
    RankState,
)
from ringreduce.runtime import names
from ringreduce.runtime.names import *  # noqa: F403
from ringreduce.training.averages import weighted_average
from ringreduce.training.compression.powersgd import PowerSGD
from ringreduce.training.compression.topk import TopK
from ringreduce.training.objects import allgather_object, broadcast_object
from ringreduce.training.requests import barrier, join
from ringreduce.training.shares import loading, share

__all__ = [
    "DiLoCo",
    "DistributedGradientTransformation",
    "DistributedState",
    "DistributedTransformation",
    "LocalSGD",
    "PowerSGD",
    "RankState",
    "TopK",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "broadcast_parameters",
    "elastic",
    "join",
    "loading",
    "share",
    "weighted_average",
]
__all__ += names.__all__
__all__ += ops.__all__
__all__.sort()
