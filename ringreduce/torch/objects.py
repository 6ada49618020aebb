"""Send Python objects between ranks, by pickle.

Unpickling runs what the sender wrote: use these only among the processes of one job that you trust. Tensors inside
an object are not pickled but broadcast as they are, so that the state of a large optimizer travels at full speed.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch

from ringreduce.buffers import DTYPES
from ringreduce.communicator import Communicator
from ringreduce.runtime import world

__all__ = ["allgather_object", "broadcast_object", "gather"]


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Give every rank the root's object. Collective; for trusted jobs only, as it unpickles.

    Args:
        obj: what to send, anything that pickles; looked at on the root only.
        root_rank: the sender; must agree on all ranks.
        name: a label without meaning here, taken for Horovod's sake.

    Returns:
        ``obj`` itself on the root, a copy of it elsewhere. Tensors in the copy are on the CPU.
    """
    communicator = world()
    if communicator.rank == root_rank:
        skeleton, tensors = _take_apart(obj)
        _broadcast_bytes(communicator, skeleton, root_rank)
    else:
        obj, tensors = _put_together(_broadcast_bytes(communicator, None, root_rank))
    for tensor in tensors:
        communicator.broadcast(tensor, root_rank, out=tensor)
    return obj


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Give every rank the objects of all ranks. Collective; for trusted jobs only, as it unpickles.

    Args:
        obj: what this rank contributes, anything that pickles.
        name: a label without meaning here, taken for Horovod's sake.

    Returns:
        Copies of the objects, in rank order.
    """
    return gather(world(), obj)


def gather(communicator: Communicator, obj: Any) -> list[Any]:
    """Do what `allgather_object` says, on any communicator."""
    mine = np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
    sizes = communicator.allgather(np.array([mine.size], np.int64))
    everyone = communicator.allgather(mine)
    return [pickle.loads(part.tobytes()) for part in np.split(everyone, np.cumsum(sizes)[:-1])]


def _broadcast_bytes(communicator: Communicator, data: bytes | None, root: int) -> bytes:
    """Give every rank the root's bytes; the others pass None."""
    nbytes = communicator.broadcast(np.array([len(data or b"")], np.int64), root)
    room = np.empty(nbytes[0], np.uint8) if data is None else np.frombuffer(data, np.uint8)
    received: bytes = communicator.broadcast(room, root).tobytes()
    return received


class _Pickler(pickle.Pickler):
    """Leaves plain tensors out of the pickle, and writes in their place how to make room for them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not _travels_by_itself(obj):
            return None
        self.tensors.append(obj)
        # The strides of a dense tensor are kept (channels_last), those of a view of something larger are not.
        return tuple(obj.shape), torch.empty_like(obj, device="meta").stride(), obj.dtype


class _Unpickler(pickle.Unpickler):
    """Puts empty tensors where `_Pickler` left some out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_load(self, pid: Any) -> torch.Tensor:
        shape, stride, dtype = pid
        self.tensors.append(torch.empty_strided(shape, stride, dtype=dtype))
        return self.tensors[-1]


def _travels_by_itself(obj: Any) -> bool:
    return (
        type(obj) is torch.Tensor
        and obj.layout is torch.strided
        and not obj.requires_grad
        and str(obj.dtype).removeprefix("torch.") in DTYPES
    )


def _take_apart(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(obj)
    # Contiguous, because broadcasting in place refuses tensors whose elements share memory (after expand).
    return file.getvalue(), [tensor.cpu().contiguous() for tensor in pickler.tensors]


def _put_together(skeleton: bytes) -> tuple[Any, list[torch.Tensor]]:
    unpickler = _Unpickler(io.BytesIO(skeleton))
    return unpickler.load(), unpickler.tensors
