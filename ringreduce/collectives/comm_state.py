"""Whether a rank may make calls, one at a time, and what a call that failed means for those after it.

| what ended a call on this rank                       | the other ranks             | calls after it               |
|------------------------------------------------------|-----------------------------|------------------------------|
| its own arguments, before another rank knew of the   | get the reason in place of  | go on                        |
| call                                                 | the call, and end it, too   |                              |
| a mismatch, after which the ranks are in step        | get the same error          | go on; between nodes, after  |
|                                                      |                             | all have given up the        |
|                                                      |                             | messages under way           |
| anything else: which calls of the ranks match is no  | do not wait for this rank   | are refused                  |
| longer known                                         |                             |                              |
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any

from ringreduce.buffers import quiet_context
from ringreduce.collectives.context import Context
from ringreduce.common.call_sites import refusal
from ringreduce.common.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigError,
    MismatchError,
    RingReduceError,
)
from ringreduce.common.instruments import Instruments, Tally


class CommState:
    """Whether one rank may make calls in one process set.

    Args:
        context: the ranks.

    Attributes:
        lifetime: of the communicator.
        calls: counts the calls that this rank has begun, as its ``number``, which is ``counters[0]``.
        quiet: the context in which calls run. It can be entered only once at a time, and so keeps calls apart.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.calls = context.calls
        self.lifetime = context.lifetime
        self.lifetime.listen_while_held("failed", self._failed)
        self.lifetime.listen_while_held("forked", self._forked)
        self._behind = 0  # How many calls this rank had begun before the present one.
        self.quiet = quiet_context()

    # ---- calls ----

    def call(self, collective: str, carry_out: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call that the program asks for, unless another one is under way.

        Args:
            collective: its name, which the other ranks get with the reason if this one cannot make it.
            carry_out: makes the call, with the arguments; passes `fail` every error after the call has begun to run.
            arguments: for that.
        """
        try:
            return self.quiet.run(self._carry_out, collective, carry_out, arguments)
        except RuntimeError as error:
            _require_alone(error)
            raise

    def _carry_out(self, collective: str, carry_out: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        self._behind = self.calls.counters[0]
        try:
            return carry_out(*arguments)
        except Exception as error:
            if self._is_local(error):
                self._refuse(collective, error)
            raise

    def refuse(self, name: str, error: Exception) -> None:
        """Tell the others, in place of a call of this name, that this rank cannot make it. Collective."""
        if self.lifetime.open:
            self.call(name, self._refuse, name, error)

    # ---- what ends calls ----

    def end(self, collective: str, error: BaseException, begun: int) -> None:
        """Decide what an error that has ended a repeated call means, for this call and later ones; see the module.

        Args:
            collective: its name.
            error: what came out of running it in `quiet`.
            begun: how many calls this rank had begun before it.

        Raises:
            ConfigError: another call was under way.
        """
        _require_alone(error)
        self._behind = begun
        if self._is_local(error):
            self.quiet.run(self._refuse, collective, error)
        else:
            self.break_off(error)

    def fail(self, error: BaseException) -> None:
        """Decide what an error that has ended a call means for later calls; see the module."""
        if not self._is_local(error):
            self.break_off(error)

    def break_off(self, error: BaseException) -> None:
        """Do what `fail` does, for a call that other ranks know of."""
        self._context.plans.forget()
        if isinstance(error, MismatchError) and error.in_step and not self._context.single_node:
            try:
                self._context.recover(error, self.calls.number)
            except BaseException as raised:  # Also of a signal handler: messages are under way still.
                error.in_step = False
                self.abort(raised)
                if not isinstance(raised, RingReduceError):
                    raise
                return
        shares = len(self._context.topology.nodes) < self._context.topology.size
        if self.lifetime.failure is None and isinstance(error, CollectiveTimeoutError) and shares:
            error.args = (f"{error}; a rank of this machine that is late may still write to the arrays of the call",)
        if not (isinstance(error, MismatchError) and error.in_step):
            self.abort(error)

    def abort(self, error: BaseException) -> None:
        """Refuse all further calls, and notify the ranks that wait: which calls match is no longer known."""
        self._context.plans.forget()
        self.lifetime.fail(error)

    def _failed(self, error: BaseException) -> None:
        with suppress(RingReduceError):
            self._context.detach(error)

    def _forked(self) -> None:
        self._context.plans.forget()
        self.quiet = quiet_context()  # The rank may be in the midst of a call.

    def _is_local(self, error: BaseException) -> bool:
        """Return whether a call has failed on this rank alone, before any other rank knows of it."""
        begun = self.calls.number != self._behind
        ours = isinstance(error, Exception) and not isinstance(error, CollectiveError)
        return ours and self.lifetime.open and not begun

    def _refuse(self, name: str, error: BaseException) -> None:
        """Enter a call with the reason why this rank cannot make it, so that it ends for all."""
        if self._context.topology.size == 1:
            return
        try:
            self._context.refuse(refusal(name, error))
        except MismatchError as mismatch:
            self.break_off(mismatch)
            if self.lifetime.failure is not None:
                raise error from mismatch
        except BaseException as failed:
            self.break_off(failed)
            raise error from failed


class CallTimer:
    """The context of a collective that runs: calls the observers, counts the call, and passes errors on.

    A class, as a generator for a context manager would take a microsecond of the three that a small call has.

    Args:
        instruments: the observers.
        tally: counts the call.
        collective, algorithm, nbytes: what runs.
        fail: called with an error; None for messages from one rank to another, whose errors concern these two alone,
            and which are not among the calls that all ranks make.

    Attributes:
        nbytes: of the call, for the tally; may change while it runs.
    """

    __slots__ = ("_algorithm", "_call", "_collective", "_fail", "_instruments", "_tally", "nbytes")

    def __init__(
        self,
        instruments: Instruments,
        tally: Tally,
        collective: str,
        algorithm: str,
        nbytes: int,
        fail: Callable[[BaseException], object] | None = None,
    ) -> None:
        self._fail = fail
        self._instruments = instruments
        self._tally = tally
        self._collective = collective
        self._algorithm = algorithm
        self.nbytes = nbytes

    def __enter__(self) -> None:
        if self._instruments.observers:
            self._instruments.notify("collective_started", self._collective, self._algorithm, self.nbytes)
        self._call: list[Any] = [perf_counter(), 0.0, self._collective, self.nbytes]
        if self._fail is not None:  # A call that is kept has the same number on all ranks.
            self._instruments.calls.append(self._call)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            if self._fail is not None:
                self._fail(error)
            return
        self._call[1] = ended = perf_counter()
        seconds = ended - self._call[0]
        tally = self._tally
        tally.calls += 1
        tally.nbytes += self.nbytes
        tally.seconds += seconds
        instruments = self._instruments
        if instruments.observers:
            instruments.notify("collective_finished", self._collective, self._algorithm, self.nbytes, seconds)


def _require_alone(error: BaseException) -> None:
    """Raise a `ConfigError` if a call could not begin because another one was under way.

    Args:
        error: raised by running in `CommState.quiet`; to be caught by the function that called that.

    Raises:
        ConfigError: another call was under way.
    """
    raised_here = error.__traceback__ is not None and error.__traceback__.tb_next is None
    if type(error) is RuntimeError and raised_here:
        raise ConfigError(
            "another collective is under way in this process, on another thread or interrupted by the signal handler "
            "that makes this call; the functions of ringreduce take one call at a time (those of ringreduce.torch may "
            "be called from any thread), and a signal handler sets a flag that the program looks at between its steps"
        ) from None
