"""How many functions of the package a call goes through: a number that, unlike a time, is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.testing import run_ranks

#: By the ranks of a node: the most function calls of rank 0 in an allreduce of 256 KiB in private memory, in place; the
#: first one, the same again, and one of another array of the same kind. docs/benchmarks.md shows the table.
LIMITS = {None: {"first": 110, "again": 18, "other": 60}, 1: {"again": 40}}


def calls_of(function: Callable[[], object]) -> int:
    """Return how many functions of the package begin while a function runs, on this thread."""
    count = 0

    def observe(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and "/ringreduce/" in frame.f_code.co_filename

    sys.setprofile(observe)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("node_size", LIMITS)
def test_a_call_goes_through_few_functions(node_size: int | None) -> None:
    """The table holds; the fewest of several worlds count, as a rank that waits for the other looks again and again."""
    least: dict[str, int] = {}

    def program(communicator: rr.Communicator) -> None:
        arrays = [np.zeros(65536, np.float32) for _ in range(3)]
        turns = ("first", arrays[0]), *[("again", arrays[0])] * 4, ("other", arrays[1]), ("other", arrays[2])
        for name, array in turns:

            def reduce(array: np.ndarray = array) -> None:
                communicator.allreduce(array, out=array)

            if communicator.rank == 0:
                least[name] = min(least.get(name, 1 << 30), calls_of(reduce))
            else:
                reduce()

    for _ in range(10):
        run_ranks(2, program, node_size=node_size)
    limits = LIMITS[node_size]
    assert {name: least[name] for name in limits if least[name] > limits[name]} == {}
