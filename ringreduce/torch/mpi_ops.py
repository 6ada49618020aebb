"""What Horovod scripts find in ``horovod.torch.mpi_ops``: all operations, and what the library can do."""

from __future__ import annotations

import importlib.util

from ringreduce.runtime import (
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    world,
)
from ringreduce.torch.ops import (
    Adasum,
    Average,
    Handle,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
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
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]


def mpi_built() -> bool:
    """Return whether mpi4py is installed, so that a launcher can start several ranks."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Return whether the ranks of this world are connected by MPI."""
    return world().size > 1


def mpi_threads_supported() -> bool:
    """Return whether operations go on while the program does something else."""
    return global_process_set.engine.threaded


def gloo_built() -> bool:
    """Return False: there is no Gloo here."""
    return False


def gloo_enabled() -> bool:
    """Return False: there is no Gloo here."""
    return False


def nccl_built() -> int:
    """Return 0: there is no NCCL here."""
    return 0


def ddl_built() -> bool:
    """Return False: there is no DDL here."""
    return False


def ccl_built() -> bool:
    """Return False: there is no oneCCL here."""
    return False


def cuda_built() -> bool:
    """Return False: tensors are on the CPU, for now."""
    return False


def rocm_built() -> bool:
    """Return False: tensors are on the CPU, for now."""
    return False
