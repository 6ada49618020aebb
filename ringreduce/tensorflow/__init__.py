"""Data-parallel training with TensorFlow 2.18 and newer: Horovod's interface on ringreduce's collectives.

    import ringreduce.tensorflow as hvd

    hvd.init()
    with tf.GradientTape() as tape:
        loss = ...
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)

Everything works at once, in a `tf.function`, and in graphs and sessions of TensorFlow 1. It runs on the host, so that
XLA cannot compile it (``jit_compile=True``).
"""

from ringreduce.common.libraries import require_framework

require_framework("tensorflow", __name__)

# ruff: noqa: E402  # what follows imports TensorFlow
import tensorflow

from ringreduce.common.errors import CollectiveError as HorovodInternalError
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
from ringreduce.tensorflow import (
    compression,
    elastic,
    functions,
    gradient_aggregation,
    gradients,
    mpi_ops,
    optimizer,
    sync_batch_norm,
    util,
)
from ringreduce.tensorflow.compression import Compression
from ringreduce.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from ringreduce.tensorflow.gradients import DistributedGradientTape, PartialDistributedGradientTape
from ringreduce.tensorflow.local import DiLoCo, LocalSGD
from ringreduce.tensorflow.numbers import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
from ringreduce.tensorflow.ops import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    cuda_built,
    gpu_available,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from ringreduce.tensorflow.optimizer import DistributedOptimizer
from ringreduce.tensorflow.sync_batch_norm import SyncBatchNormalization
from ringreduce.training.calls.averages import weighted_average
from ringreduce.training.calls.ops import Adasum, Average, Max, Min, Product, ReproducibleSum, Sum
from ringreduce.training.calls.requests import barrier
from ringreduce.training.data.resumable import ResumableLoader
from ringreduce.training.data.shares import loading, share

_executing_eagerly = tensorflow.executing_eagerly
_basics = mpi_ops  # in Horovod an object whose methods are the functions that are here

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DiLoCo",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "LocalSGD",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "ReproducibleSum",
    "ResumableLoader",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "compression",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "functions",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "gradient_aggregation",
    "gradients",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "loading",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "optimizer",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "share",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
    "sync_batch_norm",
    "util",
    "weighted_average",
]
