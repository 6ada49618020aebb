"""Collectives on tensors, by Horovod's names: asynchronous or blocking, named, and open to autograd.

Every operation has a name; operations with one name belong together, whatever order the ranks submit them in and from
which thread. Those without a name do so in the order in which they are submitted, each kind by itself. A name is a str,
and may come again once its operation is done. What must agree between the ranks is said for each function; if it does
not, all ranks that submitted the operation get the same `MismatchError`, with the name and what each rank submitted.
Later operations work, unless the operation had no name and the ranks submitted it from different lines of the program:
then it is not known which of them match, and every later one raises a `TransportError`, until `shutdown()`
and `init()`.

Tensors may be on the CPU or on this rank's GPU, and results are where the input is. In an allreduce each tensor is on
the CPU or on the GPU on all ranks alike; elsewhere the ranks may differ. On a GPU, an operation comes after what the
caller has enqueued on its current stream, and what the caller enqueues there after the call (or after `synchronize`)
comes after the operation. The data goes through the host, unless ``RINGREDUCE_GPU`` asks for something else, and so it
always does in `Adasum`, `ReproducibleSum` and all but allreduces. Operations on a GPU do not travel with others, unless
they are a group, and after a `join` they raise a `MismatchError`.

``*_async`` functions return a `Handle`; `synchronize` returns the result. Until then the tensors belong to the
operation, and torch refuses to resize the storage of a CPU tensor that it uses.

Functions whose name ends in ``_`` work in place and out of autograd's sight, and so do the asynchronous ones; gradients
flow through the others. They are those of the sum of all ranks' losses, as the chain rule gives them;
`DistributedOptimizer`, which averages over the ranks, makes of them the gradient of the mean loss. By Horovod's
conventions those of `allgather`, `broadcast` and `reducescatter` differ by a factor; `ringreduce.common.conventions`
says by which. Backward passes are collective too: a tensor must require gradients on all ranks or on none.

All functions raise, besides what they list:

* `UnsupportedBufferError`: a tensor cannot be used. At the call; it counts as one that does not agree, so the other
  ranks get a `MismatchError` with the reason when they submit theirs, and what was said above holds for later ones.
* `ConfigError`: the name is under way, or an argument makes no sense. Likewise. (A name that is no str
  is an error on ranks that gave no name, too.)
* `CollectiveTimeoutError`, `PeerLostError`, `ShutdownError`: a rank does not submit the operation in time, or never.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor

from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.torch.tensors.arrays import differentiable, preparing
from ringreduce.training.calls.handles import Handle
from ringreduce.training.calls.requests import Request

_Tensors = Sequence[Tensor]


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension, in rank order. Collective.

    Args:
        tensor: at least one dimension. The first may differ between ranks, and be 0; the others and the dtype must
            agree.
        name, process_set: as for `allreduce`.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start what `allgather` does."""
    with preparing("allgather", name, process_set) as prepare:
        request = prepare.allgather(prepare.group([tensor]), itemgetter(0))
    return request.submit()


def grouped_allgather(
    tensors: _Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gather several tensors as one operation; see `allgather`. Collective."""
    with preparing("allgather", name, process_set) as prepare:
        tensors = prepare.listed(tensors)
    return list(differentiable(name, process_set).allgather(tensors))


def grouped_allgather_async(
    tensors: _Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start what `grouped_allgather` does."""
    with preparing("allgather", name, process_set) as prepare:
        request = prepare.allgather(prepare.group(tensors), list)
    return request.submit()


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the root's tensor, as a new one. Collective.

    Args:
        tensor: any shape; shape and dtype must agree on all ranks, values count at the root only.
        root_rank: the sender, as a rank of the world; must agree.
        name, process_set: as for `allreduce`.
    """
    with preparing("broadcast", name, process_set) as prepare:
        root = process_set.rank_of(root_rank)
        prepare.require(tensor)
    return cast(Tensor, differentiable(name, process_set).broadcast(tensor, root))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start what `broadcast` does."""
    return _broadcast(tensor, root_rank, name=name, process_set=process_set).submit()


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite a tensor with the root's; returns ``tensor``. Collective."""
    return cast(Tensor, _broadcast(tensor, root_rank, name=name, process_set=process_set, in_place=True).carry_out())


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start what `broadcast_` does."""
    return _broadcast(tensor, root_rank, name=name, process_set=process_set, in_place=True).submit()


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool = False
) -> Request:
    with preparing("broadcast", name, process_set) as prepare:
        root = process_set.rank_of(root_rank)
        return prepare.broadcast(prepare.group([tensor])[0], root, tensor if in_place else None)


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send a part of one's tensor to every rank, and get one's part of theirs. Collective.

    Args:
        tensor: at least one dimension; all but the first must agree on all ranks, and the dtype.
        splits: rows for rank 0, 1, ... of the set; may differ between ranks. None: equal parts.
        name, process_set: as for `allreduce`.

    Returns:
        What the ranks sent here, in rank order; with ``splits`` also how many rows came from each (int32).
    """
    with preparing("alltoall", name, process_set) as prepare:
        rows = prepare.row_counts(tensor, splits)
    return _alltoall_result(splits, *differentiable(name, process_set).alltoall(tensor, rows))


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `alltoall` does."""
    with preparing("alltoall", name, process_set) as prepare:
        rows = prepare.row_counts(tensor, splits)
        request = prepare.alltoall(prepare.group([tensor])[0], rows, partial(_alltoall_result, splits))
    return request.submit()


def _alltoall_result(splits: object, result: Tensor, received: list[int]) -> Tensor | tuple[Tensor, Tensor]:
    return result if splits is None else (result, torch.tensor(received, dtype=torch.int32, device="cpu"))
