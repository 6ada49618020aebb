"""The loop around elastic training: synchronise, train, and after a change of the ranks begin again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from ringreduce import runtime
from ringreduce.elastic.state import HostsUpdatedInterrupt, State
from ringreduce.errors import CollectiveError, PeerLostError

__all__ = ["run"]

P = ParamSpec("P")
S = TypeVar("S", bound=State)
T = TypeVar("T")


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a training function that takes a `State` first, so that it is called again when the ranks change.

    Before each call the state is synchronised, unless the ranks that are there hold the same state already. When hosts
    come or go, the function is called again with the state as it is; when a rank is lost, with what was committed last.
    In between ringreduce is shut down and started anew, and the state's reset callbacks are called. What is no change
    of the ranks (a mismatch, a wrong argument) is the program's and goes to the caller.

    A job whose rank has died ends today, as its launcher ends it; so it is an interrupt, or an error that the program
    raises itself, that leads here to another call.
    """

    @wraps(func)
    def repeated(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except CollectiveError as error:
                if not _is_a_change_of_ranks(error):
                    raise
                state.restore()
                skip_sync = False
            runtime.shutdown()
            runtime.init()
            state.on_reset()

    return repeated


def _is_a_change_of_ranks(error: CollectiveError) -> bool:
    # The base class alone: programs raise it, under Horovod's name for it, to say so.
    return isinstance(error, PeerLostError) or type(error) is CollectiveError
