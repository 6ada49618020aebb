"""What Horovod scripts find in ``horovod.torch.mpi_ops``: all operations, the world, and what the library can do."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ringreduce.common.errors import CollectiveError as HorovodInternalError
from ringreduce.runtime.world_names import (
    ProcessSet,
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
from ringreduce.torch.compression import Compression
from ringreduce.torch.ops import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from ringreduce.torch.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from ringreduce.training.calls.built import (
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
from ringreduce.training.calls.ops import Adasum, Average, Max, Min, Product, ReproducibleSum, Sum
from ringreduce.training.calls.requests import Handle, barrier, join, poll, synchronize

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReproducibleSum",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

#: What programs note of operations under way, by handle; forgotten with the handle. Operations here keep their tensors.
_handle_map: WeakKeyDictionary[Handle, Any] = WeakKeyDictionary()

_basics = sys.modules[__name__]  # in Horovod an object whose methods are the functions that are here


def cuda_built() -> bool:
    """Return whether CUDA tensors can be used: torch is built for CUDA, and CuPy is installed. There may be no GPU."""
    return torch.version.cuda is not None and importlib.util.find_spec("cupy") is not None
