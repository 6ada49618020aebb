"""A communication hook for torch's DistributedDataParallel on ringreduce: buckets in shared memory, or compressed.

    from ringreduce.torch.distributed import ddp

    model = ddp.adopt(DistributedDataParallel(model, gradient_as_bucket_view=True))

Torch allocates the buckets of DDP in the private memory of the process, which other ranks can only copy. Where
gradients are views of the buckets, the hook moves both to memory that the ranks of the node share, once, and from then
on they reduce them in place.
"""

# No annotations from the __future__: torch checks those of the hook, and takes no text.

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, and not in the types
from torch.nn.parallel import DistributedDataParallel

from ringreduce.common.arguments import CheckingArguments
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE
from ringreduce.runtime.groups import Group
from ringreduce.torch.compression import Compression, Compressor
from ringreduce.torch.distributed.collectives import group_of
from ringreduce.torch.distributed.works import CollectiveWork
from ringreduce.torch.tensors.gradients import shape_in_memory
from ringreduce.training.compression import BucketCompression, Reducer, has_reducers, reduces


class AllreduceState:
    """What `allreduce_hook` has to know, and what it keeps from step to step.

    What a compression has not sent yet is kept for each bucket and sent in the next step; where DDP divides the
    parameters into other buckets, as it does once after the first step, that is dropped.

    Args:
        process_group: that of the DDP model, on ringreduce; None: the default group.
        compression: one of `Compression`, with settings or without, or a `Compressor` of yours; must agree.

    Raises:
        ConfigError: the process group is none of ringreduce's.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        compression: type[Compressor] | BucketCompression = Compression.none,
    ) -> None:
        self.group: Group = group_of(process_group)
        self.compression = compression
        self._reducers: dict[int, tuple[list[tuple[int, ...]], Reducer]] = {}
        self._shared: dict[int, int] = {}  # address of the memory that was made for a bucket

    def share(self, bucket: GradBucket) -> None:
        """Move a bucket, and the gradients that are views of it, to memory that the ranks of the node share. Local.

        Does nothing where that was done, or where gradients are memory of their own.
        """
        buffer = bucket.buffer()
        first = buffer.data_ptr()
        if self._shared.get(bucket.index()) == first:
            return
        offsets = []
        for parameter in bucket.parameters():
            # The gradient is the very tensor into which DDP copies, so that to change its memory changes DDP's.
            gradient = parameter.grad
            if gradient is None or not 0 <= gradient.data_ptr() - first < buffer.nbytes:
                return
            offsets.append((gradient, (gradient.data_ptr() - first) // buffer.itemsize))
        with torch.no_grad():
            memory = torch.from_numpy(self.group.communicator.empty(buffer.nbytes, np.uint8)).view(buffer.dtype)
            memory.copy_(buffer)
            for gradient, offset in offsets:
                gradient.set_(memory.untyped_storage(), offset, gradient.shape, gradient.stride())
            buffer.set_(memory.untyped_storage(), 0, buffer.shape, buffer.stride())
        self._shared[bucket.index()] = memory.data_ptr()

    def reduce(self, index: int, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        """Average a bucket over the ranks, in place. Collective.

        Args:
            index: of the bucket.
            buffer: the gradients of all its parameters, one after the other.
            parameters: their order and shapes.
        """
        communicator = self.group.communicator
        if has_reducers(self.compression) and reduces(self.compression, buffer.dtype):
            with CheckingArguments(communicator, "allreduce_hook"):
                reducer = self._reducer(index, parameters)
            flat: Any = buffer.numpy() if buffer.dtype is torch.float32 else buffer
            reducer.reduce(communicator, flat, average=True)
            return
        compressor = self.compression if isinstance(self.compression, type) else Compression.none
        with CheckingArguments(communicator, "allreduce_hook"):
            sent, context = compressor.compress(buffer)
        communicator.allreduce(sent, AVERAGE, out=sent)
        if sent is not buffer:
            buffer.copy_(compressor.decompress(sent, context))

    def _reducer(self, index: int, parameters: Sequence[torch.Tensor]) -> Reducer:
        shapes = [tuple(shape_in_memory(each)) for each in parameters]
        known, reducer = self._reducers.get(index, (None, None))
        if reducer is None or known != shapes:
            assert has_reducers(self.compression)
            ends = list(accumulate(each.numel() for each in parameters))
            places = [slice(end - each.numel(), end) for end, each in zip(ends, parameters, strict=True)]
            reducer = self.compression.reducer(shapes, places)
            self._reducers[index] = shapes, reducer
        return reducer


def adopt(
    model: DistributedDataParallel, compression: type[Compressor] | BucketCompression = Compression.none
) -> DistributedDataParallel:
    """Give a model `allreduce_hook`, and return it.

    Args:
        model: on a process group of ringreduce, with ``gradient_as_bucket_view=True``, without a hook so far.
        compression: as for `AllreduceState`.

    Raises:
        ConfigError: the process group is none of ringreduce's; or gradients are memory of their own, so that buckets
            would stay private.
    """
    if not model.gradient_as_bucket_view and compression is Compression.none:
        raise ConfigError(
            "adopt() takes DistributedDataParallel(..., gradient_as_bucket_view=True): "
            "buckets move to shared memory together with the gradients that are views of them"
        )
    model.register_comm_hook(AllreduceState(model.process_group, compression), allreduce_hook)
    return model


def allreduce_hook(state: AllreduceState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients: what ``DistributedDataParallel.register_comm_hook`` takes.

    Args:
        state: of this model alone.
        bucket: dense gradients on the CPU.

    Returns:
        A future of the averages, which are in the memory of the bucket.
    """
    state.share(bucket)
    index = bucket.index()
    buffer = bucket.buffer()
    parameters = bucket.parameters()
    task = state.group.submit(lambda: state.reduce(index, buffer, parameters), "allreduce_hook", here=False)
    future: torch.futures.Future[torch.Tensor] = CollectiveWork(task, [buffer]).get_future()
    return future.then(lambda done: done.value()[0])
