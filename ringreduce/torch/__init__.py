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

import sys

from ringreduce.common.libraries import require_framework

_BUILDS = " (for the builds that there are see https://pytorch.org/get-started)"
require_framework("torch", __name__, f"{_BUILDS}; ringreduce itself takes NumPy arrays without it")

# ruff: noqa: E402  # what follows imports torch
import ringreduce_torch_backend
from ringreduce import runtime
from ringreduce.algorithms import Collective
from ringreduce.collectives.communicator import Communicator
from ringreduce.runtime import set_conventions
from ringreduce.runtime.names import *  # noqa: F403  # for type checkers, which see no further than one star
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
from ringreduce.torch.data import DistributedSampler, Shard
from ringreduce.torch.functions import *  # noqa: F403  # what these export is written down there, and not once more
from ringreduce.torch.local import DiLoCo, LocalSGD
from ringreduce.torch.mpi_ops import *  # noqa: F403
from ringreduce.torch.ops import *  # noqa: F403
from ringreduce.torch.optimizer import DistributedOptimizer
from ringreduce.torch.reductions import *  # noqa: F403
from ringreduce.torch.sharded import ShardedStep, Stepper
from ringreduce.torch.sync_batch_norm import SyncBatchNorm
from ringreduce.torch.uncompiled import leave_uncompiled
from ringreduce.training.averages import weighted_average
from ringreduce.training.built import *  # noqa: F403
from ringreduce.training.ops import *  # noqa: F403
from ringreduce.training.shares import loading, share

__all__ = [
    "DiLoCo",
    "DistributedOptimizer",
    "DistributedSampler",
    "LocalSGD",
    "Shard",
    "SyncBatchNorm",
    "checkpoint",
    "compression",
    "data",
    "elastic",
    "functions",
    "load_checkpoint",
    "loading",
    "mpi_ops",
    "optimizer",
    "save_checkpoint",
    "set_conventions",
    "share",
    "sync_batch_norm",
    "weighted_average",
]
__all__ += functions.__all__
__all__ += mpi_ops.__all__
__all__.sort()

runtime.follow_timelines(phases.follow)
phases.count_steps()
ringreduce_torch_backend.register()  # where torch has not done so itself
for _name, _module in list(sys.modules.items()):
    if _name.startswith(("ringreduce.training", "ringreduce.torch.")) and _module is not phases:
        leave_uncompiled(_module)
# What the wrapped optimizer and closures do can be compiled.
_around = [DistributedOptimizer.step, DistributedOptimizer._evaluate, DiLoCo.step]
leave_uncompiled(*_around, Stepper.step, ShardedStep.step, ShardedStep._evaluated, callees=False)
for _place in (runtime, Communicator):
    leave_uncompiled(_place.barrier, *(getattr(_place, each.value) for each in Collective))
