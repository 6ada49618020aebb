"""Threads, as scripts of Horovod start them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any


def in_thread(
    target: Callable[..., object],
    args: Iterable[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls a function, and return it.

    Args:
        target: the function.
        args: its arguments, in a tuple or a list.
        name: of the thread.
        daemon: whether the process may end while the thread runs.
        silent: whether to drop what the function raises, in place of a traceback on standard error.
    """

    def run() -> None:
        with suppress(*[Exception] * silent):
            target(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread
