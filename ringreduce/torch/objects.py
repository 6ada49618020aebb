"""Send Python objects between ranks, by pickle.

Unpickling runs what the sender wrote: use these only among the processes of one job that you trust. Tensors inside
an object are not pickled but broadcast as they are, so that the state of a large optimizer travels at full speed.

Every rank goes through the same collectives whatever becomes of its object: a rank that cannot pack one sends the
reason in its place, and objects are unpacked after the last collective.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from ringreduce.buffers import DTYPES
from ringreduce.communicator import Communicator
from ringreduce.engine import Call, unnamed
from ringreduce.errors import ConfigError
from ringreduce.process_sets import ProcessSet
from ringreduce.runtime import global_process_set
from ringreduce.torch.prepared import checking_submission
from ringreduce.torch.streams import on_this_stream

__all__ = ["allgather_object", "broadcast_object", "carry_out", "gather"]


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give every rank the root's object. Collective; for trusted jobs only, as it unpickles.

    Args:
        obj: what to send, anything that pickles; looked at on the root only.
        root_rank: the sender, as a rank of the world; must agree on all ranks.
        name: what matches it with the other ranks' calls; None: it meets the other calls without a name in their order.
        process_set: the ranks that take part.

    Returns:
        ``obj`` itself on the root, a copy of it elsewhere. Tensors in the copy are on the CPU.

    Raises:
        ConfigError: the object does not pickle. Raised on all ranks.
    """
    with checking_submission("broadcast_object", _named("broadcast_object", name), process_set):
        root = process_set.rank_of(root_rank)
    skeleton, tensors = carry_out("broadcast_object", name, lambda ranks: _broadcast(ranks, obj, root), process_set)
    return obj if process_set.rank() == root else _Unpickler(io.BytesIO(skeleton), tensors).load()


def _broadcast(communicator: Communicator, obj: Any, root: int) -> tuple[bytes, list[torch.Tensor]]:
    """Return the root's object in pieces, except on the root itself."""
    skeleton = b""
    tensors: list[torch.Tensor] = []
    if communicator.rank == root:
        data, failure = _packed(lambda: pickle.dumps(_take_apart(obj, tensors), pickle.HIGHEST_PROTOCOL))
        _broadcast_bytes(communicator, data, failure, root)
    else:
        skeleton, looks = pickle.loads(_broadcast_bytes(communicator, None, None, root))
        tensors = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in looks]
    for tensor in tensors:
        communicator.broadcast(tensor, root, out=tensor)
    return skeleton, tensors


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Give every rank the objects of all ranks. Collective; for trusted jobs only, as it unpickles.

    Args:
        obj: what this rank contributes, anything that pickles.
        name: as for `broadcast_object`.
        process_set: the ranks that take part.

    Returns:
        Copies of the objects, in rank order.

    Raises:
        ConfigError: some rank's object does not pickle. Raised on all ranks.
    """
    # Of the name and the set; what is wrong with an object, the ranks tell each other on the way.
    checking_submission("allgather_object", _named("allgather_object", name), process_set)
    parts = carry_out("allgather_object", name, lambda communicator: _gather_parts(communicator, obj), process_set)
    return [pickle.loads(part) for part in parts]


def carry_out(
    kind: str,
    name: str | None,
    run: Callable[[Communicator], Any],
    process_set: ProcessSet,
    text: str = "",
    device: torch.device | None = None,
) -> Any:
    """Run a function of blocking collectives on all ranks of a set, as one named operation, and return its result.

    So it may be called from any thread, ends in an error on ranks whose peers have joined, and is seen by the stall
    watch. What it does on a GPU (``device``, or the current one) it does on the caller's stream. Collective.
    """
    named = _named(kind, name) or unnamed(kind)
    return process_set.engine.run(Call(named, text or kind, on_this_stream(run, device)), unique=name is not None)


def _named(kind: str, name: str | None) -> str | None:
    return f"{kind} {name}" if isinstance(name, str) else name  # what is no name is refused as it is


def gather(communicator: Communicator, obj: Any) -> list[Any]:
    """Do what `allgather_object` says, on any communicator."""
    return [pickle.loads(part) for part in _gather_parts(communicator, obj)]


def _gather_parts(communicator: Communicator, obj: Any) -> list[bytes]:
    """Return the pickles of the objects of all ranks."""
    data, failure = _packed(lambda: pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))
    headers = communicator.allgather(np.array([[len(data), failure is not None]], np.int64))
    everyone = communicator.allgather(np.frombuffer(data, np.uint8))
    parts = [part.tobytes() for part in np.split(everyone, np.cumsum(headers[:-1, 0]))]
    for rank, (part, (_, failed)) in enumerate(zip(parts, headers, strict=True)):
        if failed:
            _raise_unsendable(rank, part, failure if rank == communicator.rank else None)
    return parts


def _packed(pack: Callable[[], bytes]) -> tuple[bytes, Exception | None]:
    """Return what ``pack`` does, or the reason why it failed, as text, and the error."""
    try:
        return pack(), None
    except Exception as error:  # whatever an object's own methods raise
        return f"{type(error).__name__}: {error}".encode(errors="replace"), error


def _raise_unsendable(rank: int, reason: bytes, cause: Exception | None) -> NoReturn:
    raise ConfigError(f"the object of rank {rank} cannot be sent: {reason.decode()}") from cause


def _broadcast_bytes(communicator: Communicator, data: bytes | None, failure: Exception | None, root: int) -> bytes:
    """Give every rank the root's bytes; the others pass None. If the root could not make any, raise why, everywhere."""
    header = np.array([len(data or b""), failure is not None], np.int64)
    nbytes, failed = communicator.broadcast(header, root).tolist()
    room = np.empty(nbytes, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    received: bytes = communicator.broadcast(room, root).tobytes()
    if failed:
        _raise_unsendable(root, received, failure)
    return received


class _Pickler(pickle.Pickler):
    """Leaves plain tensors out of the pickle, and writes their numbers in their place."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # by id: what occurs twice is one tensor on the other side too

    def persistent_id(self, obj: Any) -> Any:
        if not _travels_by_itself(obj):
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number


class _Unpickler(pickle.Unpickler):
    """Puts tensors where `_Pickler` left some out."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        return self._tensors[pid]


def _travels_by_itself(obj: Any) -> bool:
    return (
        type(obj) is torch.Tensor
        and obj.layout is torch.strided
        and not obj.requires_grad
        and str(obj.dtype).removeprefix("torch.") in DTYPES
    )


def _take_apart(obj: Any, tensors: list[torch.Tensor]) -> tuple[bytes, list[Any]]:
    """Return an object without its tensors, and their shapes, strides and dtypes; append them, ready to be sent."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(obj)
    # The strides of a dense tensor are kept (channels_last), those of a view of something larger are not.
    looks = [
        (tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride(), tensor.dtype)
        for tensor in pickler.tensors
    ]
    # Contiguous, because broadcasting in place refuses tensors whose elements share memory (after expand).
    tensors += [tensor.cpu().resolve_conj().resolve_neg().contiguous() for tensor in pickler.tensors]
    return file.getvalue(), looks
