"""Handles of operations that were started, and the end of a rank's data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

from ringreduce.common.errors import ConfigError
from ringreduce.engine import Engine, Operation
from ringreduce.runtime import global_process_set

_numbers = itertools.count(1)


class Handle:
    """Stands for an operation that was started; `poll` and `synchronize` take it.

    ``int(handle)`` is its number, as in Horovod, and ``handle()`` waits, as `synchronize` does.

    It is no number itself: `torch.compile` would take it for a constant, and compile again for every operation.
    """

    __slots__ = ("__weakref__", "_number", "_release", "engine", "finish", "operation")

    def __init__(
        self,
        operation: Operation,
        engine: Engine,
        finish: Callable[[object], object] | None = None,
        release: Callable[[], object] | None = None,
    ) -> None:
        self._number = next(_numbers)
        self.operation = operation
        self.engine = engine
        self.finish = finish
        self._release = release

    def release_if_done(self) -> bool:
        """Return whether the operation is done; then its arrays are the program's again."""
        if self.operation.done and self._release is not None:
            self._release()
        return self.operation.done

    def __index__(self) -> int:
        return self._number

    def __call__(self) -> Any:
        return synchronize(self)


def poll(handle: Handle) -> bool:
    """Return whether an operation is done, so that `synchronize` will not wait."""
    _checked(handle).engine.poll(handle.operation)
    return handle.release_if_done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation; return its result. It may be called again, and returns the same.

    Raises:
        MismatchError, CollectiveTimeoutError, PeerLostError, ShutdownError: the operation failed.
        ConfigError: this is no handle.
    """
    engine = _checked(handle).engine
    try:
        result = engine.wait(handle.operation)
    finally:
        handle.release_if_done()
    if handle.finish is not None:
        handle.finish(result)
    return result


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ConfigError(f"expected a handle, as the *_async functions return it; got {handle!r}")
    return handle


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have. Collective over all ranks.

    Allreduces of the others go on without this rank: it counts for nothing in sums, products, minima and maxima, and
    averages are over the other ranks (by Horovod's conventions over all, see `ringreduce.common.conventions`).
    Other operations raise a `MismatchError` on the ranks that submit them. While the others step, this rank's weights
    stay as they are: afterwards, broadcast those of the rank that joined last.

    Args:
        device: ignored; Horovod has it.

    Returns:
        The rank that joined last: it has seen all steps.
    """
    engine = global_process_set.engine
    return cast(int, engine.wait(engine.join()))
