"""What `torch.distributed` calls works: collectives and messages that are under way, or done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from math import inf, isnan
from typing import Any

import torch
from torch.distributed import Work

from ringreduce.common.arguments import shown
from ringreduce.common.errors import ConfigError
from ringreduce.common.serial import SerialTask
from ringreduce.runtime.groups import Group
from ringreduce.torch.private import before_profiler_stops, end_span_with, is_called_by_autograd, keep_whole_works
from ringreduce.torch.tensors.arrays import TENSORS
from ringreduce.transport.point_to_point import PeerTransfer

_Tensors = Sequence[torch.Tensor]

#: As torch takes them: floats are seconds.
Timeout = timedelta | float | None

# Futures that are made in Python hold a Python object, and torch's C++ hook for float16 takes a list of tensors alone.
# TorchScript makes such futures, and runs their callbacks on a pool of threads: in no order that the ranks share.
_TENSORS_AFTER = """
def after(done: Future[None], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(done)
    return tensors

def tensors_after(done: Future[None], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(after, done, tensors)
"""


@cache
def _tensors_after() -> Callable[[Any, list[torch.Tensor]], Any]:
    """Return what makes a future of tensors, in the type of torch's C++, that is done after another future."""
    unit: Any = torch.jit.CompilationUnit(_TENSORS_AFTER)
    made: Callable[[Any, list[torch.Tensor]], Any] = unit.tensors_after
    return made


def limit_of(timeout: object) -> float | None:
    """Return a time limit in seconds; None: none was given, or infinity.

    Raises:
        ConfigError: it is neither a timedelta nor a number of seconds.
    """
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and not isnan(timeout):
        return float(timeout) if timeout < inf else None
    raise ConfigError(f"a timeout is a datetime.timedelta or a number of seconds, got {shown(timeout)}")


def seconds(timeout: Timeout) -> float | None:
    """Return a time limit of torch's as `limit_of` does, None if it means no limit: torch writes those as 0 or less."""
    limit_s = limit_of(timeout)
    return limit_s if limit_s is not None and limit_s > 0.0 else None


# A span that waits for a future writes the time into the profiler's memory once the future is done, also where the
# profiler has stopped and freed that memory: torch does not check it, and what is there by then, Python's objects for
# example, is overwritten. So the futures are ended before the profiler stops.

_awaited_by_spans: set[Any] = set()  # futures
_ending_spans = threading.Lock()


def end_span_after(task: SerialTask, span: Any) -> None:
    """Let a span of torch's profiler last until a task has ended, or until the profiler stops if that is earlier.

    Args:
        task: which may have ended already.
        span: a `torch.profiler.record_function` that the caller is in.
    """
    future = torch.futures.Future[Any]()
    end_span_with(span, future)
    _awaited_by_spans.add(future)
    task.when_done(partial(_end_span, future))


def _end_span(future: Any) -> None:
    with _ending_spans:
        if future in _awaited_by_spans:
            future.set_result(None)
            _awaited_by_spans.remove(future)  # only now, so that a profiler that stops meanwhile waits for the lock


def _end_spans() -> None:
    for future in list(_awaited_by_spans):
        _end_span(future)


def _end_spans_on_a_thread() -> None:
    if _awaited_by_spans:
        # For torch, spans that another thread ends are asynchronous, and all others are nested.
        thread = threading.Thread(target=_end_spans)
        thread.start()
        thread.join()


before_profiler_stops(_end_spans_on_a_thread)


class _Work(Work):
    """What both kinds have in common.

    Args:
        state: says whether it is done, and how it has ended.
        result: what its future gives.
    """

    def __init__(self, state: SerialTask | PeerTransfer, result: _Tensors) -> None:
        super().__init__()
        self._state = state
        self._result = list(result)
        self._future: Any = None

    def task(self) -> SerialTask:
        """Return what ends when this is done, without anybody waiting for it."""
        raise NotImplementedError

    def get_future(self) -> Any:
        """Return a future of the tensors; where the work fails, of its error.

        What it calls runs on the thread that ends the work, and may communicate.
        """
        typed = is_called_by_autograd()
        if self._future is None:
            task = self.task()
            result = self._result
            base = torch.futures.Future[Any]()

            def check(_: object) -> Any:
                if task.error is not None:
                    raise task.error
                return None if typed else result

            # A future that is given an exception crashes DDP, one whose callback raises does not.
            future = base.then(check)
            self._future = _tensors_after()(future, result) if typed else future
            task.when_done(lambda: base.set_result(None))
            if typed and task.done:  # C++ may read it at once: it has waited for this work
                with suppress(RuntimeError):  # of the task, which C++ finds in the future
                    self._future.wait()
        return self._future

    getFuture = get_future  # noqa: N815  # C++ has called it so, too

    def result(self) -> list[torch.Tensor]:
        """Return the tensors."""
        return self._result

    def synchronize(self) -> None:
        """Wait for it."""
        self.wait()

    def is_completed(self) -> bool:
        return self._state.done

    def is_success(self) -> bool:
        return self.is_completed() and self._state.error is None

    def exception(self) -> BaseException | None:
        return self._state.error


keep_whole_works(lambda work: work.get_future() if isinstance(work, _Work) else None)


class CollectiveWork(_Work):
    """A collective, which a task carries out."""

    _state: SerialTask

    def task(self) -> SerialTask:
        return self._state

    def wait(self, timeout: Timeout = None) -> bool:
        self._state.wait(seconds(timeout))
        return True


class MessageWork(_Work):
    """A message.

    Args:
        group: whose.
        transfer: moves it.
        tensor: its memory.
    """

    _state: PeerTransfer

    def __init__(self, group: Group, transfer: PeerTransfer, tensor: torch.Tensor) -> None:
        super().__init__(transfer, [tensor])
        self._group = group
        self._release = TENSORS.keep_in_place([] if transfer.done else [tensor])

    def task(self) -> SerialTask:
        task = self._group.delivered(self._state)
        task.when_done(self._release)
        return task

    def wait(self, timeout: Timeout = None) -> bool:
        try:
            self._group.wait(self._state, seconds(timeout))
        finally:
            self._release_if_done()
        return True

    def is_completed(self) -> bool:
        if not self._state.done:
            self._group.advance()
        return self._release_if_done()

    def _release_if_done(self) -> bool:
        if self._state.done:
            self._release()
        return self._state.done

    def source_rank(self) -> int:
        """Return the rank of the group that has sent it."""
        assert isinstance(self._state.peer, int)
        return self._state.peer

    _source_rank = source_rank
