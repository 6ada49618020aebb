"""Data-parallel training of PyTorch models: Horovod's interface on ringreduce's collectives.

    import ringreduce.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

Where it differs from Horovod, it does so to be right: an optimizer keeps its state when it is wrapped, and what cannot
work is an error on all ranks and not a hang. Gradients flow through collectives as the chain rule says, or by Horovod's
conventions: see `ringreduce.common.conventions`.
"""

import importlib.util
import sys
from typing import Any
from weakref import WeakKeyDictionary

from ringreduce.common.libraries import require_framework

_BUILDS = " (for the builds that there are see https://pytorch.org/get-started)"
require_framework("torch", __name__, f"{_BUILDS}; ringreduce itself takes NumPy arrays without it")

# ruff: noqa: E402  # what follows imports torch
import torch

import ringreduce_torch_backend
from ringreduce import runtime
from ringreduce.collectives import Collective
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import CollectiveError as HorovodInternalError
from ringreduce.runtime import (
    add_process_set,
    blocking,
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
    set_conventions,
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
from ringreduce.torch import (
    checkpoint,
    compression,
    data,
    elastic,
    functions,
    mpi_ops,
    optimizer,
    phases,
    sync_batch_norm,
)
from ringreduce.torch.checkpoint import load_checkpoint, save_checkpoint
from ringreduce.torch.compression import Compression
from ringreduce.torch.data import DistributedSampler, Shard
from ringreduce.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringreduce.torch.local import DiLoCo, LocalSGD
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
from ringreduce.torch.optimizer import DistributedOptimizer
from ringreduce.torch.private import get_batches_by
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
from ringreduce.torch.resumable import ResumableLoader, SeededDataset, get_batch
from ringreduce.torch.shard_sampler import ShardSampler
from ringreduce.torch.sharded.stepper import ShardedStep, Stepper
from ringreduce.torch.split_updates import SplitUpdates
from ringreduce.torch.sync_batch_norm import SyncBatchNorm
from ringreduce.torch.uncompiled import leave_uncompiled
from ringreduce.training.calls.averages import weighted_average
from ringreduce.training.calls.handles import Handle, join, poll, synchronize
from ringreduce.training.calls.objects import allgather_object, broadcast_object
from ringreduce.training.calls.ops import Adasum, Average, Max, Min, Product, ReproducibleSum, Sum
from ringreduce.training.calls.requests import barrier
from ringreduce.training.data.shares import loading, share

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "DistributedSampler",
    "Handle",
    "HorovodInternalError",
    "LocalSGD",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReproducibleSum",
    "ResumableLoader",
    "SeededDataset",
    "Shard",
    "ShardSampler",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
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
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "checkpoint",
    "compression",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "data",
    "ddl_built",
    "elastic",
    "functions",
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
    "load_checkpoint",
    "loading",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "optimizer",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "save_checkpoint",
    "set_conventions",
    "share",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "sync_batch_norm",
    "synchronize",
    "weighted_average",
]

#: What programs note of operations under way, by handle; forgotten with the handle. Operations here keep their tensors.
_handle_map: WeakKeyDictionary[Handle, Any] = WeakKeyDictionary()

_basics = mpi_ops  # in Horovod an object whose methods are the functions that are here


def cuda_built() -> bool:
    """Return whether CUDA tensors can be used: torch is built for CUDA, and CuPy is installed. There may be no GPU."""
    return torch.version.cuda is not None and importlib.util.find_spec("cupy") is not None


runtime.follow_timelines(phases.follow)
phases.count_steps()
get_batches_by(get_batch)
ringreduce_torch_backend.register()  # where torch has not done so itself
for _name, _module in list(sys.modules.items()):
    if _name.startswith(("ringreduce.training", "ringreduce.torch.")) and _module is not phases:
        leave_uncompiled(_module)
# What the wrapped optimizer and closures do can be compiled.
_around = [DistributedOptimizer.step, DistributedOptimizer._evaluate, DiLoCo.step]
_around += [Stepper.step, ShardedStep.step, ShardedStep._evaluated]
_around += [SplitUpdates.step, SplitUpdates._split_step, SplitUpdates._evaluated, SplitUpdates._update_missing]
leave_uncompiled(*_around, callees=False)
leave_uncompiled(runtime.count, runtime.report_value)
for _place in (blocking, Communicator):
    leave_uncompiled(_place.barrier, *(getattr(_place, each.value) for each in Collective))
