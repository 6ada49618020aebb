"""Persistent collectives: a program plans them once and runs them again and again."""

from __future__ import annotations

from typing import Any

from ringreduce.collectives import Call
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError
from ringreduce.engine import CollectiveOp, Engine, Operation


class Plan:
    """A collective with its arrays, planned once and run as often as wanted: a persistent collective of MPI-4.

    `ringreduce.allreduce_init` and its kin return plans. They are collective: the ranks compare what they plan. From
    then on all ranks run the plan, in the same order with their other calls. A plan keeps its arrays alive. What the
    input holds at each run counts, and each result goes into the same array.

        with rr.allreduce_init(array, out=array) as plan:
            for _ in range(100):
                array[:] = ...
                plan.run()  # or plan.start(), something else meanwhile, plan.wait()

    Source: MPI Forum, MPI: A Message-Passing Interface Standard, version 4.0, 2021, section 6.13.

    Args:
        communicator: of the ranks.
        engine: of the same ranks; carries out what `start` begins.
        call: to be made.

    Attributes:
        result: the array for the results.

    Raises:
        RingReduceError: as the call itself does; on making the plan, from `run` and from `wait`.
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
        """Begin the collective, on all ranks; returns at once. The arrays must not be used until `wait` returns."""
        self._require_idle()
        call = self._call
        operation = CollectiveOp(self._name, self._text, lambda communicator: communicator.run(call))
        self._engine.submit(operation)
        self._under_way = operation

    def wait(self) -> Any:
        """Wait for what `start` began, and return the result.

        Raises:
            ConfigError: it was not started.
        """
        operation, self._under_way = self._under_way, None
        if operation is None:
            raise ConfigError(f"the plan of {self._text} was not started")
        return self._engine.wait(operation)

    def close(self) -> None:
        """Wait for what `start` began, and let go of the arrays; the plan cannot run again. Safe to call twice."""
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
