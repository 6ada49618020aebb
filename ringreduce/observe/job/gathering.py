"""Snapshots of all ranks, gathered at rank 0: a small note from each, once a second, beside all that the job sends."""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ringreduce.common.errors import ConfigError, RingReduceError, TransportError
from ringreduce.observe.seen.snapshots import Snapshot
from ringreduce.transport.messages import Messages

_log = logging.getLogger(__name__)

_REMEMBERED = 11  # of each rank, one a second, so that rates are those of ten seconds
_WINDOW_BITS = 13  # of compression: rank 0 has 8 KiB for each rank
_MEMORY_LEVEL = 5


class Gathering:
    """Sends this rank's snapshots to rank 0, which keeps the last ones of all ranks.

    A note holds what has changed, and is compressed with what came before as context: it is small, though snapshots
    are not.

    Args:
        messages: between all ranks, for this alone; None: there is no other rank, or none can be heard.
        rank, size: of this rank, and of its world.

    Attributes:
        nbytes: of all notes that this rank has sent or received.
    """

    def __init__(self, messages: Messages | None, rank: int, size: int) -> None:
        self._messages = messages
        self._rank = rank
        self._size = size
        self._said: dict[str, Any] = {}
        self._packing = zlib.compressobj(9, zlib.DEFLATED, -_WINDOW_BITS, _MEMORY_LEVEL)
        self._unpacking = [zlib.decompressobj(-_WINDOW_BITS) for _ in range(size if rank == 0 else 0)]
        self._kept: list[deque[Snapshot]] = [deque(maxlen=_REMEMBERED) for _ in range(size)]
        self._lock = threading.RLock()  # a signal handler may look, in the midst of a look
        self._hears = True
        self._refused: set[int] = set()
        self.nbytes = 0

    def tell(self, snapshot: Snapshot) -> None:
        """Hand a snapshot of this rank to rank 0; there, take what has come from the others, too. Never waits.

        Raises:
            TransportError: rank 0 cannot be reached.
        """
        snapshot = replace(snapshot, samples=snapshot.samples[-1:])
        if self._rank == 0:
            self._add(0, replace(snapshot, arrived=time.time()))
            self._hear()
        elif self._messages is not None:
            said = snapshot.to_json()
            values = _shortened(said.pop("values"), lambda value: float(f"{value:.6g}"))
            said = {**_shortened(said, lambda value: round(value, 3)), "values": values}
            changed = {key: value for key, value in said.items() if key not in self._said or self._said[key] != value}
            self._said = said
            text = json.dumps(changed, separators=(",", ":")).encode()
            note = self._packing.compress(text) + self._packing.flush(zlib.Z_SYNC_FLUSH)
            self.nbytes += len(note)
            self._messages.post(note, 0)

    def _hear(self) -> None:
        """Take what has come from the others."""
        messages = self._messages
        if messages is None or not self._hears:
            return
        try:
            for _ in range(2):  # a look that finds nothing lets MPI receive what the next one finds
                while (come := messages.poll()) is not None:
                    self._receive(*come)
        except TransportError as error:  # what comes later would be read with a context that lacks something
            self._hears = False
            _log.info("what the other ranks do is not heard any more: %s", error)

    def latest(self) -> list[Snapshot]:
        """Return the last snapshot of each rank that has sent one, in order of ranks; on rank 0.

        With ``arrived``, and the samples of the last ten seconds.
        """
        with self._lock:
            kept = [list(each) for each in self._kept if each]
        return [replace(each[-1], samples=tuple(one.samples[-1] for one in each)) for each in kept]

    def earlier(self) -> list[Snapshot]:
        """Return the same of about ten seconds ago."""
        with self._lock:
            return [each[0] for each in self._kept if each]

    def end(self, *, together: bool) -> None:
        """Give back the messages.

        Args:
            together: whether all ranks do so now; else some may be lost.
        """
        if self._messages is not None:
            with suppress(RingReduceError):
                (self._messages.close if together else self._messages.abandon)()
            self._messages = None

    def _receive(self, rank: int, note: bytes) -> None:
        self.nbytes += len(note)
        kept = self._kept[rank]
        try:
            changed = json.loads(self._unpacking[rank].decompress(note))
            now = time.time()
            self._add(rank, (kept[-1] if kept else Snapshot.from_json(changed)).changed(changed, now))
        except ConfigError as error:
            if rank not in self._refused:  # what follows is refused as well
                _log.error("what rank %d does is not shown: %s", rank, error)
            self._refused.add(rank)
        except (zlib.error, ValueError):
            return  # a note was lost, and nothing that follows can be read: this rank falls silent

    def _add(self, rank: int, snapshot: Snapshot) -> None:
        with self._lock:
            self._kept[rank].append(snapshot)


def _shortened(value: Any, shorten: Callable[[float], float]) -> Any:
    """Return a value of JSON with shorter numbers: digits that nobody looks at cannot be packed."""
    if isinstance(value, float):
        return shorten(value)
    if isinstance(value, dict):
        return {key: _shortened(each, shorten) for key, each in value.items()}
    return [_shortened(each, shorten) for each in value] if isinstance(value, list) else value
