"""Send Python objects between ranks, by pickle; see `ringreduce.collectives.pickles`."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.collectives.pickles import alltoall_packed, broadcast_packed, gather_packed, packed, skeleton
from ringreduce.common.errors import ConfigError
from ringreduce.runtime import global_process_set, record_refusal
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.calls.requests import Request, RequestBuilder


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give every rank the root's object. Collective; for trusted jobs only, as it unpickles.

    Args:
        obj: what to send, anything that pickles; used on the root only. Contiguous NumPy arrays in it travel as
            they are, and so do tensors once `ringreduce.torch` is imported on the root.
        root_rank: the sender, as a rank of the world; must agree on all ranks.
        name: what matches it with the other ranks' calls; None: calls without a name match in order.
        process_set: the ranks that take part.

    Returns:
        ``obj`` itself on the root, a copy of it elsewhere. Tensors in the copy are on the CPU.

    Raises:
        ConfigError: the object does not pickle, or is larger than ``RINGREDUCE_OBJECT_LIMIT``. Raised on all ranks.
    """
    with RequestBuilder("broadcast_object", _named("broadcast_object", name), process_set) as prepare:
        root = process_set.rank_of(root_rank)
        is_root = process_set.rank() == root
        mine: list[npt.NDArray[np.uint8]] = []
        data, failure = packed(lambda: skeleton(obj, mine)) if is_root else (b"", None)
        request = prepare.call(
            "broadcast_object", lambda ranks: broadcast_packed(ranks, root, data=data, failure=failure, memories=mine)
        )
    pickled, memories = _carried_out("broadcast_object", request)
    return obj if is_root else pickle.loads(pickled, buffers=memories)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Give every rank the objects of all ranks. Collective; for trusted jobs only, as it unpickles.

    Args:
        obj: what this rank contributes, anything that pickles.
        name: as for `broadcast_object`.
        process_set: the ranks that take part.

    Returns:
        Copies of the objects, in rank order.

    Raises:
        ConfigError: some rank's object does not pickle, or all of them together are larger than
            ``RINGREDUCE_OBJECT_LIMIT``. Raised on all ranks.
    """
    with RequestBuilder("allgather_object", _named("allgather_object", name), process_set) as prepare:
        mine = packed(lambda: pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))
        request = prepare.call("allgather_object", lambda communicator: gather_packed(communicator, *mine))
    return [pickle.loads(part) for part in _carried_out("allgather_object", request)]


def alltoall_object(objects: Mapping[int, Any]) -> dict[int, Any]:
    """Give some ranks an object each. Collective; for trusted jobs only, as it unpickles.

    Memory of large arrays is neither copied into a pickle nor limited by ``RINGREDUCE_OBJECT_LIMIT``: these are states
    that the ranks have of the training.

    Args:
        objects: by the rank that gets it, anything that pickles; may differ between ranks.

    Returns:
        What this rank gets, by the rank that has sent it.

    Raises:
        ConfigError: some rank's object does not pickle. Raised on all ranks.
    """
    with RequestBuilder("alltoall_object", None, global_process_set) as prepare:
        parcels: dict[int, list[npt.NDArray[np.uint8]]] = {}
        failure: Exception | None = None
        for dest, obj in objects.items():
            memories: list[npt.NDArray[np.uint8]] = []
            data, failed = packed(partial(skeleton, obj, memories))
            parcels[dest] = [np.frombuffer(data, np.uint8), *memories]
            failure = failure or failed
        request = prepare.call(
            "alltoall_object", lambda communicator: alltoall_packed(communicator, parcels, failure=failure)
        )
    received: dict[int, list[npt.NDArray[np.uint8]]] = _carried_out("alltoall_object", request)
    return {source: pickle.loads(data.data, buffers=memories) for source, (data, *memories) in received.items()}


def _carried_out(call: str, request: Request) -> Any:
    try:
        return request.carry_out()
    except ConfigError as error:  # an object is too large, or does not pickle
        record_refusal(call, error)
        raise


def _named(kind: str, name: str | None) -> str | None:
    return f"{kind} {name}" if isinstance(name, str) else name  # `RequestBuilder` refuses what is no name
