"""Collectives that a program plans once and runs again and again."""

from __future__ import annotations

from typing import Any

from ringreduce.collectives import Call
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError
from ringreduce.engine import CollectiveOp, Engine, Operation

__all__ = ["Plan"]


class Plan:
    """A collective with its arrays, planned once and run as often as wanted: a persistent collective of MPI-4.

    `ringreduce.allreduce_init` and its kin make plans: collective calls, in which the ranks compare what they plan.
    After that all ranks run the plan in the same order with their other calls. It keeps its arrays alive; what the
    input holds at each run counts, and each result goes into the same array.

        with rr.allreduce_init(array, out=array) as plan:
            for _ in range(100):
                array[:] = ...
                plan.run()              # or plan.start(), something else meanwhile, plan.wait()

    Source: MPI Forum, MPI: A Message-Passing Interface Standard, version 4.0, 2021, section 6.13.

    Args:
        communicator: of the ranks.
        engine: of the same ranks; runs plans that are started.
        call: what to run.

    Attributes:
        result: the array for the results.

    Raises:
        RingReduceError: as the call itself; from making it, `run`, and `wait`.
    """

    def __init__(self, communicator: Communicator, engine: Engine, call: Call) -> None:
        self._communicator, self._engine = communicator, engine
        self._call, self._text = communicator.plan(call)
        self._name = engine.new_name(f"the plan of {self._text}")
        self._under_way: Operation | None = None
        self._open = True

    @property
    def result(self) -> Any:
        return self._call.out

    def run(self) -> Any:
        """Carry the collective out, and return the result. Collective."""
        self._require_idle()
        return self._communicator.run(self._call)

    def start(self) -> None:
        """Begin to carry the collective out; returns at once. The arrays must stay as they are until `wait` returns."""
        self._require_idle()
        call = self._call
        operation = CollectiveOp(self._name, self._text, lambda communicator: communicator.run(call))
        self._engine.submit(operation)
        self._under_way = operation

    def wait(self) -> Any:
        """Return the result of what `start` began, once it is there.

        Raises:
            ConfigError: it was not started.
        """
        operation, self._under_way = self._under_way, None
        if operation is None:
            raise ConfigError(f"the plan of {self._text} was not started")
        return self._engine.wait(operation)

    def close(self) -> None:
        """Let go of the arrays, after what is under way; the plan cannot run again. Safe to call twice."""
        if self._under_way is not None:
            self.wait()
        self._open = False
        self._call = self._call._replace(array=None, out=None)

    def _require_idle(self) -> None:
        if not self._open:
            raise ConfigError(f"the plan of {self._text} is closed")
        if self._under_way is not None:
            raise ConfigError(f"the plan of {self._text} is under way; call wait() first")

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._under_way = None  # the ranks may no longer be in step
        self.close()
