"""Loaders whose batches come from a method `_iterate` of a subclass, read ahead by a thread if asynchronous."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any


class BaseDataLoader:
    """Gives the batches of `_iterate`, each as `_process_batch` returns it. Subclasses have both, and a length."""

    def __len__(self) -> int:
        """Return how many batches there are."""
        raise NotImplementedError  # subclasses know how many

    def _iterate(self) -> Iterator[Any]:
        """Return the batches of one epoch."""
        raise NotImplementedError  # subclasses read them

    def _process_batch(self, batch: Any) -> Any:
        """Return what the program gets for a batch; on its own thread."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin(BaseDataLoader):
    """Reads batches ahead: ``class Loader(AsyncDataLoaderMixin, PlainLoader)``.

    Each iteration has a thread of its own, which ends with it. An error of `_iterate` is raised in its turn.

    Args:
        async_loader_queue_size: how many batches are read ahead; 0: none, and there is no thread.
        *args, **kwargs: of the other loader.
    """

    def __init__(self, async_loader_queue_size: int = 5, *args: Any, **kwargs: Any) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self._readers: set[_Reader] = set()
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the reading, of iterations that have begun; these end after the batches that they have given."""
        for reader in list(self._readers):
            reader.close()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()
            return
        reader = _Reader(self._iterate(), self.async_loader_queue_size)
        self._readers.add(reader)
        try:
            for batch in reader.batches():
                yield self._process_batch(batch)
        finally:
            self._readers.discard(reader)
            reader.close()


class _Reader:
    """Reads batches on a thread.

    Args:
        batches: to read.
        most: how many to hold.
    """

    def __init__(self, batches: Iterable[Any], most: int) -> None:
        self._held: SimpleQueue[Any] = SimpleQueue()  # batches, and in the end this reader
        self._room = threading.Semaphore(most)
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(batches,), name="reads batches ahead", daemon=True)
        self._thread.start()

    def batches(self) -> Iterator[Any]:
        while (batch := self._held.get()) is not self and not self._closed:
            self._room.release()
            yield batch
        if self._error is not None and not self._closed:
            raise self._error

    def close(self) -> None:
        """End the thread, once it has read the batch at which it is."""
        self._closed = True
        self._room.release()
        self._thread.join()

    def _read(self, batches: Iterable[Any]) -> None:
        try:
            for batch in batches:
                self._room.acquire()
                if self._closed:
                    return
                self._held.put(batch)
        except BaseException as error:  # for the thread that takes the batches
            self._error = error
        finally:
            self._held.put(self)
