"""Python objects of the ranks of a communicator, by pickle.

Unpickling runs what the sender wrote: use these only among the processes of one job that you trust. The memory of large
arrays inside an object that is broadcast stays out of the pickle and travels as it is, so that the state of a large
optimizer travels at full speed.

Every rank runs the same collectives even if it cannot pack its object: it sends the reason in its place. Ranks unpack
objects after the last collective.

Before a rank takes memory for the objects of others, all ranks know how many bytes these have, and refuse more than
``RINGREDUCE_OBJECT_LIMIT``.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError

#: How arrays inside an object that is broadcast are pickled, by type, as in `copyreg.dispatch_table`: of NumPy arrays.
#: A binding enters the arrays of its framework when it is imported.
REDUCERS: dict[type, Callable[[Any], Any]] = {}

_SMALL_NBYTES = 16 << 10  # Arrays up to this size stay in the pickle: a collective for each would take longer.
_PIECE_NBYTES = 16 << 20  # A rank sends another one at most so many bytes at once.
_NUMBERS_NBYTES = 32  # What comes first in a parcel; then a pickle, if that fits.


def gather(communicator: Communicator, obj: Any) -> list[Any]:
    """Give every rank copies of the objects of all ranks, in rank order. Collective.

    Raises:
        ConfigError: some rank's object does not pickle, or they are too large together. Raised on all ranks.
    """
    mine = packed(lambda: pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))
    return [pickle.loads(part) for part in gather_packed(communicator, *mine)]


def packed(pack: Callable[[], bytes]) -> tuple[bytes, Exception | None]:
    """Return what ``pack`` returns, and None; or, if it fails, the reason as text, and the error."""
    try:
        return pack(), None
    except Exception as error:  # An object's own methods may raise anything.
        return f"{type(error).__name__}: {error}".encode(errors="replace"), error


def _raise_unsendable(rank: int, reason: bytes, cause: Exception | None) -> NoReturn:
    raise ConfigError(f"the object of rank {rank} cannot be sent: {reason.decode()}") from cause


def _require_small_enough(communicator: Communicator, nbytes: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise on all ranks if objects are too large together; before any rank has taken memory for those of others.

    Args:
        communicator: of the ranks.
        nbytes: of each object, pickled; the same on all ranks.
        ranks: whose they are.
    """
    limit = communicator.config.object_limit_nbytes
    total = sum(nbytes)
    if total <= limit:
        return
    most = max(nbytes)
    others = f" ({total} bytes with those of the other ranks)" if total > most else ""
    raise ConfigError(
        f"the object of rank {ranks[nbytes.index(most)]} has {most} bytes{others}, more than "
        f"RINGREDUCE_OBJECT_LIMIT={limit}: send less, or set this variable to more"
    )


def skeleton(obj: Any, memories: list[npt.NDArray[np.uint8]]) -> bytes:
    """Pickle an object without the memory of its large arrays, which is appended to ``memories``, as bytes."""

    def leave_out(memory: pickle.PickleBuffer) -> bool:
        raw = memory.raw()
        if raw.nbytes > _SMALL_NBYTES:
            memories.append(np.frombuffer(raw, np.uint8))
        return raw.nbytes <= _SMALL_NBYTES  # A small one goes into the pickle.

    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=leave_out)
    pickler.dispatch_table = {**copyreg.dispatch_table, **REDUCERS}
    pickler.dump(obj)
    return file.getvalue()


def broadcast_packed(
    communicator: Communicator,
    root: int,
    data: bytes,
    failure: Exception | None,
    memories: list[npt.NDArray[np.uint8]],
) -> tuple[Any, list[npt.NDArray[np.uint8]]]:
    """Give every rank what `skeleton` made on the root; raise on all ranks if that has failed."""
    total = len(data) + sum(memory.size for memory in memories)
    parcel = _fill(communicator.parcel, data, len(data), failure is not None, len(memories), total)
    communicator.broadcast(parcel, root, out=parcel)
    nbytes, failed, count, total = parcel[:_NUMBERS_NBYTES].view(np.int64).tolist()
    _require_small_enough(communicator, [total], [root])
    is_root = communicator.rank == root
    pickled = parcel[_NUMBERS_NBYTES:][:nbytes].copy()
    if pickled.size < nbytes:
        pickled = np.frombuffer(data, np.uint8) if is_root else np.empty(nbytes, np.uint8)
        pickled = communicator.broadcast(pickled, root)
    if failed:
        _raise_unsendable(root, pickled.tobytes(), failure)
    if not count:
        return pickled, []
    lengths = communicator.broadcast(np.array([memory.size for memory in memories] or [0] * count, np.int64), root)
    received = memories if is_root else [np.empty(length, np.uint8) for length in lengths]
    for array in received:
        communicator.broadcast(array, root, out=array if array.flags.writeable else None)
    return pickled, received


def gather_packed(communicator: Communicator, data: bytes, failure: Exception | None) -> list[memoryview]:
    """Return the pickles of all ranks."""
    parcels = communicator.allgather(_fill(communicator.parcel, data, len(data), failure is not None))
    parcels = parcels.reshape(communicator.size, -1)
    headers = parcels[:, :_NUMBERS_NBYTES].view(np.int64)
    lengths = headers[:, 0].tolist()
    _require_small_enough(communicator, lengths, range(communicator.size))
    if max(lengths) <= parcels.shape[1] - _NUMBERS_NBYTES:
        parts = [parcel[_NUMBERS_NBYTES:][:length].data for parcel, length in zip(parcels, lengths, strict=True)]
    else:
        everyone = communicator.allgather(np.frombuffer(data, np.uint8))
        parts = [part.data for part in np.split(everyone, np.cumsum(lengths[:-1]))]
    for rank, (part, failed) in enumerate(zip(parts, headers[:, 1], strict=True)):
        if failed:
            _raise_unsendable(rank, part.tobytes(), failure if rank == communicator.rank else None)
    return parts


def _fill(parcel: npt.NDArray[np.uint8], data: bytes, *numbers: int) -> npt.NDArray[np.uint8]:
    """Write numbers into a parcel, and a pickle if that fits; return it."""
    parcel[: 8 * len(numbers)].view(np.int64)[:] = numbers
    room = parcel[_NUMBERS_NBYTES:]
    if len(data) <= room.size:
        room[: len(data)] = np.frombuffer(data, np.uint8)
    return parcel


def alltoall_packed(
    communicator: Communicator,
    parcels: Mapping[int, Sequence[npt.NDArray[np.uint8]]],
    failure: Exception | None,
) -> dict[int, list[npt.NDArray[np.uint8]]]:
    """Give ranks bytes, and return what comes here; raise on all ranks if one could not pack its own.

    In pieces: beside what is sent and what has come, there is only one piece for each rank in memory.

    Args:
        communicator: of the ranks.
        parcels: by the rank that gets them: any number of arrays.
        failure: why this rank could not pack.

    Returns:
        By the rank that sent them.
    """
    reason = None if failure is None else f"{type(failure).__name__}: {failure}"
    lengths = {dest: [array.size for array in arrays] for dest, arrays in parcels.items()}
    everyone = gather(communicator, (reason, lengths))
    for rank, (text, _) in enumerate(everyone):
        if text is not None:
            _raise_unsendable(rank, text.encode(errors="replace"), failure if rank == communicator.rank else None)
    me = communicator.rank
    received = {
        source: [np.empty(length, np.uint8) for length in theirs[me]]
        for source, (_, theirs) in enumerate(everyone)
        if me in theirs
    }
    incoming = {source: _pieces(arrays) for source, arrays in received.items()}
    outgoing = {dest: _pieces(arrays) for dest, arrays in parcels.items()}
    streams = (arrays for _, theirs in everyone for arrays in theirs.values())
    for number in range(max((sum(-(-n // _PIECE_NBYTES) for n in sizes) for sizes in streams), default=0)):
        now = [outgoing.get(dest, [])[number : number + 1] for dest in range(communicator.size)]
        sent = np.concatenate([np.empty(0, np.uint8), *(piece for pieces in now for piece in pieces)])
        came, counts = communicator.alltoall(sent, [sum(piece.size for piece in pieces) for pieces in now])
        ends = np.cumsum(counts).tolist()
        for source, (end, count) in enumerate(zip(ends, counts, strict=True)):
            if count:
                incoming[source][number][:] = came[end - count : end]
    return received


def _pieces(arrays: Sequence[npt.NDArray[np.uint8]]) -> list[npt.NDArray[np.uint8]]:
    return [array[begin : begin + _PIECE_NBYTES] for array in arrays for begin in range(0, array.size, _PIECE_NBYTES)]
