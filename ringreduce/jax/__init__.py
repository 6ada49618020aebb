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
from ringreduce.jax import elastic
from ringreduce.jax.functions import broadcast_parameters
from ringreduce.jax.local import DiLoCo, LocalSGD
from ringreduce.jax.messages import recv, send, sendrecv
from ringreduce.jax.ops import allgather, allreduce, alltoall, broadcast, gather, reduce, reducescatter, scan, scatter
from ringreduce.jax.optimizer import (
    DistributedGradientTransformation,
    DistributedState,
    DistributedTransformation,
    RankState,
)
from ringreduce.runtime import (
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    metrics,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.error_text import error_of
from ringreduce.training.calls.averages import weighted_average
from ringreduce.training.calls.handles import join
from ringreduce.training.calls.objects import allgather_object, broadcast_object
from ringreduce.training.calls.ops import Adasum, Average, Max, Min, Product, ReproducibleSum, Sum
from ringreduce.training.calls.requests import barrier
from ringreduce.training.compression.powersgd import PowerSGD
from ringreduce.training.compression.topk import TopK
from ringreduce.training.data.resumable import ResumableLoader
from ringreduce.training.data.shares import loading, share
from ringreduce.transport.point_to_point import PROC_NULL

__all__ = [
    "PROC_NULL",
    "Adasum",
    "Average",
    "DiLoCo",
    "DistributedGradientTransformation",
    "DistributedState",
    "DistributedTransformation",
    "LocalSGD",
    "Max",
    "Min",
    "PowerSGD",
    "ProcessSet",
    "Product",
    "RankState",
    "ReproducibleSum",
    "ResumableLoader",
    "Sum",
    "TopK",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "elastic",
    "error_of",
    "gather",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "loading",
    "local_rank",
    "local_size",
    "metrics",
    "rank",
    "recv",
    "reduce",
    "reducescatter",
    "remove_process_set",
    "scan",
    "scatter",
    "send",
    "sendrecv",
    "share",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "weighted_average",
]
