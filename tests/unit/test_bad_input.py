"""Ranks that do not come to a call are named; they make other libraries hang."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.common.config import Config
from ringreduce.testing import caught, run_ranks

NODES = pytest.mark.parametrize("node_size", [None, 1, 2], ids=["one node", "messages", "hierarchy"])


def last(communicator: rr.Communicator) -> bool:
    return communicator.rank == communicator.size - 1


@NODES
def test_an_absent_rank_is_named_within_the_time_limit(node_size: int | None) -> None:
    """One rank never calls: the others get an error that names it and what they called, and do not hang."""
    done = threading.Barrier(3)

    def check(communicator: rr.Communicator) -> Exception | None:
        error = None if last(communicator) else caught(communicator.allreduce, np.ones(4))
        done.wait(30.0)
        return error

    errors = run_ranks(3, check, node_size=node_size, config=Config(timeout_s=0.1))
    for error in errors[:2]:
        assert isinstance(error, rr.CollectiveTimeoutError)
        assert re.search(r"waited 0\.1 s for ranks? .*\b2\b.*allreduce\(sum, shape 4, float64\)", str(error))


@pytest.mark.parametrize("call", [lambda each: each.allreduce(np.ones(4)), lambda each: each.broadcast(np.ones(4))])
def test_a_rank_that_leaves_out_a_known_call_is_named(call: Callable[[rr.Communicator], object]) -> None:
    """Between nodes, who has waited for some time asks who has come; it names nobody who is only waited for, too."""
    done = threading.Barrier(3)

    def check(communicator: rr.Communicator) -> Exception | None:
        for _ in range(2):
            call(communicator)
        communicator._context.agreement.patience_s = 0.0
        error = None if last(communicator) else caught(call, communicator)
        done.wait(30.0)
        return error

    for error in run_ranks(3, check, node_size=1, config=Config(timeout_s=1.0))[:2]:
        assert isinstance(error, rr.CollectiveTimeoutError)
        assert "ranks [2] to call a collective; this rank called " in str(error)
