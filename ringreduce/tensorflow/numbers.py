"""Numbers of the world as tensors: they are asked for when a graph runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce import runtime
from ringreduce.common.errors import ConfigError
from ringreduce.runtime.process import PROCESS
from ringreduce.tensorflow.calls import entry, run


def asked(ask: Callable[[], int]) -> Any:
    """Return a number as a tensor: of the world in which a graph runs, not of that in which it is made."""
    return run(lambda _: [np.array(ask(), np.int32)], [], lambda: [(tf.int32, [])], in_order=False)[0]


@entry
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of a process set, of all ranks if it is 0."""

    def ask() -> int:
        process_set = PROCESS.here().sets.get(process_set_id)
        if process_set is None:
            raise ConfigError(f"there is no process set {process_set_id}")
        return process_set.size()

    return asked(ask)


@entry
def rank_op(name: str | None = None) -> Any:
    """Return the rank of this process."""
    return asked(runtime.rank)


@entry
def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this node."""
    return asked(runtime.local_size)


@entry
def local_rank_op(name: str | None = None) -> Any:
    """Return the rank of this process on its node."""
    return asked(runtime.local_rank)


@entry
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this process is in a process set, 0 if not, -1 before ``init()``, and -2 if there is no such set."""

    def ask() -> int:
        if not runtime.is_initialized():
            return -1
        process_set = PROCESS.here().sets.get(process_set_id)
        return -2 if process_set is None else int(process_set.included())

    return asked(ask)
