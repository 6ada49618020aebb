"""Plans: calls bound to algorithm, path and memory, made once and run each time the call is repeated.

They are what MPI-4's persistent collectives and UCC's ``collective_init`` and ``post`` are. `Plans` is the one cache of
a communicator. Its keys say what a plan is bound to; a repeated call is found by its array objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from ringreduce.buffers import Array, Operand
from ringreduce.common.instruments import Tally
from ringreduce.common.lifetime import close_all
from ringreduce.common.recent import Recent

#: Returns flat, contiguous memory for a result; called with the rows that come from each rank; of a scatter, with what
#: `ringreduce.collectives.rows.agreed_part` returns; of reductions and broadcasts, with nothing.
Place = Callable[[Sequence[int]], Operand]

#: The most plans of one communicator, and how many stay once there are more: those used last.
_LIMIT = 256
_STAY = 192
#: Choices of algorithm and path, which are a few hundred bytes each.
_CHOICES = 4096


def constant(target: Operand, rows: Sequence[int]) -> Operand:
    """Return the target; with that bound, a `Place` that is known before."""
    return target


class BoundCall(ABC):
    """A call that is bound to algorithm, path and memory. It keeps no array of the caller's alive.

    Attributes:
        reusable: whether it may be run again; if not, it is closed after one call.
        settled: whether `repeated` and `into_any` are final; calls that come again are compiled.
    """

    reusable = True
    settled = True

    @abstractmethod
    def run(self, source: Operand, place: Place) -> None:
        """Carry the call out. Collective.

        Args:
            source: this rank's input, flat; where it was when the plan was made, if the plan is bound to that.
            place: returns the memory for the result; called again, as others now send other rows, other memory.

        Raises:
            MismatchError, CollectiveTimeoutError, TransportError: see `Communicator`.
        """

    def repeated(self, source: Operand, target: Operand) -> Callable[[], object]:
        """Return what runs the call from one array into another (or the same); it owns neither.

        Args:
            source, target: flat, and without their owners.
        """
        run = self.into_any(source)
        return partial(self.run, source, partial(constant, target)) if run is None else partial(run, target.view)

    def into_any(self, source: Operand) -> Callable[[Array], object] | None:
        """Return what runs the call from one array into any contiguous one; None: the plan is bound to the result, too.

        Args:
            source: flat, and without its owner.
        """
        return None

    def close(self) -> None:  # noqa: B027  most plans have nothing to give back
        """Give back what it is bound to."""


class RepeatedCall(NamedTuple):
    """How to make a call again, with the arrays that it was made with.

    Attributes:
        op, algorithm: as the caller passed them.
        is_array: whether an array still has the memory and the layout that it had when the call was made.
        is_out: the same of ``out``; None: that was ``array``, or nothing.
        unchanged: the address of what `Library.is_same` takes to find that out of both; 0: nothing does.
        run: makes the call; returns a new array for the result, if the caller gave none.
        tally: counts the call.
        nbytes: of the call, for the tally.
        counts_result: whether the bytes of its result count instead, whose size other ranks decide.
        plan: what it runs.
        kept: memory that lives as long.
    """

    op: Any
    algorithm: Any
    is_array: Callable[[Any], bool]
    is_out: Callable[[Any], bool] | None
    unchanged: int
    run: Callable[[], Any]
    tally: Tally
    nbytes: int
    counts_result: bool
    plan: BoundCall
    kept: Array | None


class Kept(Protocol):
    """What the cache keeps: a `BoundCall`, or a schedule that several plans run.

    Attributes:
        reusable: as for `BoundCall`.
    """

    reusable: bool

    def close(self) -> None: ...


K = TypeVar("K", bound=Kept)


class Plans:
    """The plans of one communicator.

    Attributes:
        choices: what was chosen for each kind of call.
        repeats: how to make calls again: by the ids of array and out, the name of the collective, and the root.
        crowded: whether there are too many plans, so that `trim` is to be called after this call.
        closed: how often plans were closed.
    """

    def __init__(self) -> None:
        self.crowded = False
        self.closed = 0
        self._plans: OrderedDict[Hashable, Kept] = OrderedDict()
        self.choices = Recent[Hashable, Any](_CHOICES)
        self.repeats: dict[tuple[int, int, str, int], RepeatedCall] = {}

    def get(self, key: Hashable, make: Callable[[], K]) -> K:
        """Return the plan of ``key``; make it if there is none."""
        plan: Any = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            return plan  # type: ignore[no-any-return]
        plan = make()
        if plan.reusable:
            self._plans[key] = plan
            self.crowded = len(self._plans) > _LIMIT
        return plan  # type: ignore[no-any-return]

    def trim(self) -> None:
        """Close the plans that were unused for longest, as there are too many. No call may be under way.

        A repeated call does not look its plan up, so plans count as used now as long as such a call may come.
        """
        self.crowded = False
        self.closed += 1
        repeats = self.repeats.copy()  # A copy, as the end of an array may remove one at any time.
        repeated = {id(repeat.plan) for repeat in repeats.values()}
        for key in [key for key, plan in self._plans.items() if id(plan) in repeated]:
            self._plans.move_to_end(key)
        closed = set()
        while len(self._plans) > _STAY:
            plan = self._plans.popitem(last=False)[1]
            closed.add(id(plan))
            plan.close()
        for call, repeat in repeats.items():
            if id(repeat.plan) in closed:
                self.repeats.pop(call, None)

    def forget(self) -> None:
        """Forget all choices and repeats. Plans stay: after a failure, messages may still arrive in their memory."""
        self.repeats.clear()
        self.choices.clear()

    def close(self) -> None:
        """Close all plans."""
        self.forget()
        self.closed += 1
        plans = list(reversed(self._plans.values()))
        self._plans.clear()
        close_all(*(plan.close for plan in plans))
