"""Data-parallel training with Keras 3, on its backends tensorflow, jax and torch.

    import ringreduce.keras as hvd

    hvd.init()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], verbose=2 * (hvd.rank() == 0))

Import it before the first model is made: on the backend jax, errors are then raised where they happen. Gradients are
reduced in host memory; on the backend jax, the step has to run on the CPU.
"""

from ringreduce.common.libraries import require_framework

require_framework("keras", __name__)

# ruff: noqa: E402  # what follows imports Keras
from ringreduce.keras import callbacks, elastic
from ringreduce.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from ringreduce.keras.optimizer import Compression, DistributedOptimizer, PartialDistributedOptimizer, load_model
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
from ringreduce.runtime.built import (
    ccl_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.calls.averages import weighted_average
from ringreduce.training.calls.handles import join
from ringreduce.training.calls.objects import allgather_object, broadcast_object
from ringreduce.training.calls.ops import Adasum, Average, Max, Min, Product, ReproducibleSum, Sum
from ringreduce.training.calls.requests import barrier
from ringreduce.training.data.resumable import ResumableLoader
from ringreduce.training.data.shares import loading, share

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "ReproducibleSum",
    "ResumableLoader",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "loading",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "share",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "weighted_average",
]
