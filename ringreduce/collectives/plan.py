"""Plans: calls bound to algorithm, path and memory, made once and run each time the call is repeated.

They are what MPI-4's persistent collectives and UCC's ``collective_init`` and ``post`` are. `Plans` is the one cache of
a communicator. Its keys say what a plan is bound to; a repeated call is found by its array objects.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ringreduce.buffers import Operand
from ringreduce.buffers.numpy_private import address_field
from ringreduce.common.instruments import Tally
from ringreduce.common.lifetime import close_all

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
    """

    reusable = True

    @abstractmethod
    def run(self, source: Operand, place: Place) -> None:
        """Carry the call out. Collective.

        Args:
            source: this rank's input, flat; where it was when the plan was made, if the plan is bound to that.
            place: called once, returns the memory for the result.

        Raises:
            MismatchError, CollectiveTimeoutError, TransportError: see `Communicator`.
        """

    def close(self) -> None:  # noqa: B027  most plans have nothing to give back
        """Give back what it is bound to."""


class RepeatedCall(NamedTuple):
    """How to make a call again, with the arrays that it was made with.

    Attributes:
        op, algorithm: as the caller passed them.
        is_array: whether an array still has the memory and the layout that it had when the call was made.
        is_out: the same of ``out``; None: that was ``array``, or nothing.
        run: makes the call; returns a new array for the result, if the caller gave none.
        tally: counts the call.
        nbytes: of the call, for the tally.
        counts_result: whether the bytes of its result count instead, whose size other ranks decide.
        plan: what it runs.
    """

    op: Any
    algorithm: Any
    is_array: Callable[[Any], bool]
    is_out: Callable[[Any], bool] | None
    run: Callable[[], Any]
    tally: Tally
    nbytes: int
    counts_result: bool
    plan: BoundCall


class Kept(Protocol):
    """What the cache keeps: a `BoundCall`, or a schedule that several plans run.

    Attributes:
        reusable: as for `BoundCall`.
    """

    reusable: bool

    def close(self) -> None: ...


K = TypeVar("K", bound=Kept)
C = TypeVar("C")


class Plans:
    """The plans of one communicator.

    Attributes:
        repeats: how to make calls again: by the ids of array and out, the name of the collective, and the root.
        crowded: whether there are too many plans, so that `trim` is to be called after this call.
    """

    def __init__(self) -> None:
        self.crowded = False
        self._plans: OrderedDict[Hashable, Kept] = OrderedDict()
        self._choices: dict[Hashable, Any] = {}
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
        repeats = self.repeats.copy()  # the end of an array may remove one at any time
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

    def choice(self, kind: Hashable, make: Callable[[], C]) -> C:
        """Return what was chosen for a kind of call; choose if it is new."""
        found: C | None = self._choices.get(kind)
        if found is None:
            if len(self._choices) >= _CHOICES:
                self._choices.clear()
            found = self._choices[kind] = make()
        return found

    def forget(self) -> None:
        """Forget all choices and repeats. Plans stay: after a failure, messages may still arrive in their memory."""
        self.repeats.clear()
        self._choices.clear()

    def close(self) -> None:
        """Close all plans."""
        self.forget()
        plans = list(reversed(self._plans.values()))
        self._plans.clear()
        close_all(*(plan.close for plan in plans))


def unchanged(
    array: Any, out: Any, forget: Callable[[object], object]
) -> tuple[Callable[[Any], bool], Callable[[Any], bool] | None]:
    """Return `is_array` and `is_out` of a `RepeatedCall` for the arrays of a call.

    Args:
        array, out: of the call.
        forget: called when one of them is freed.
    """
    is_out = None if out is None or out is array else _same(out, forget, written=True)
    return _same(array, forget, written=out is array), is_out


def _same(array: Any, forget: Callable[[object], object], *, written: bool) -> Callable[[Any], bool]:
    """Return a function that says whether an array is this one, with the memory and layout of now; it does not keep it.

    Args:
        array: of NumPy or torch; None: nothing was passed.
        forget: called when the array is freed.
        written: whether it must still be writable.
    """
    if array is None:
        return lambda given: given is None
    known: Callable[[], Any] = weakref.ref(array, forget)
    if isinstance(array, np.ndarray):  # a weak reference forbids `resize`; all else can be assigned
        # It is not read once the array is freed: `forget` has removed what reads it before another object gets its id.
        data = address_field(array)
        address = data.value
        shape = array.shape
        strides = array.strides
        dtype = array.dtype

        def is_same(given: Any, keeps: object = known) -> bool:
            return (
                data.value == address
                and given.strides == strides
                and given.shape == shape
                and given.dtype is dtype
                and (not written or given.flags.writeable)
            )

        return is_same
    # `set_`, `resize_`, ``data =`` and `t_` change a tensor, also to a lazy view; and its storage can be made smaller.
    address = array.data_ptr()
    kind = array.dtype
    size = array.shape
    strides = array.stride()
    nbytes = array.untyped_storage().nbytes()
    return lambda given: (
        known() is given
        and given.data_ptr() == address
        and given.dtype is kind
        and given.shape == size
        and given.stride() == strides
        and given.untyped_storage().nbytes() == nbytes
        and not (given.is_conj() or given.is_neg())
    )
