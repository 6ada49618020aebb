"""Data-parallel training of PyTorch models: Horovod's interface on ringreduce's collectives.

    import ringreduce.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

Where it differs from Horovod, it does so to be right: gradients flow through collectives as the chain rule says, an
optimizer keeps its state when it is wrapped, and parameters that no rank used are left alone.
"""

from ringreduce.runtime import (
    barrier,
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from ringreduce.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringreduce.torch.objects import allgather_object, broadcast_object
from ringreduce.torch.ops import (
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    broadcast,
    broadcast_,
    reducescatter,
)
from ringreduce.torch.optimizer import DistributedOptimizer

__all__ = [
    "Average",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
]
