"""Operations: a program submits them to an engine, and they get a result or an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ringreduce.buffers import DType, Operand, operand_of, typed
from ringreduce.collectives import Feedback
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.call_sites import Stack, place_of, program_stack, refusal
from ringreduce.common.errors import RingReduceError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.engine.decisions import OperationKind, OperationSignature, Run
from ringreduce.engine.fused import AS_THEY_ARE, Executor, Travel, neutral_array

_UNNAMED = " without a name"
_PACKED_NBYTES = 32 << 10  # up to here two copies, through a buffer that is used again, are quicker than a new plan


class RefusedError(Exception):
    """This rank cannot run an operation, and has notified the others in a collective.

    Attributes:
        reason: the error that says why.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


#: Returns a context to carry an operation out in, on whichever thread; None: in none.
Context = Callable[[], AbstractContextManager[Any]] | None


class About(NamedTuple):
    """What people are told of an operation.

    Attributes:
        title: what errors call it; empty: by its name.
        parts: returns the names of what it is over, for observers; None: its own name says all.
    """

    title: str = ""
    parts: Callable[[], Sequence[str]] | None = None


_SAYS_ALL = About()


class Operation:
    """A named operation: it carries itself out, and has a result or an error then.

    Args:
        name: operations of the same name on all ranks belong together.
        signature: what must agree.
        stack: where the program made it; None: where the program is now.
        about: what people are told of it.
        within: returns a context to carry it out in, for operations that do so; None: in none.

    Attributes:
        done: whether it has ended; the result or the error is set before this becomes true.
        result: what `Engine.wait` returns.
        error: what it raises instead.
        refused: whether it has ended because the ranks submitted different ones under its name: none has begun. Not if
            a rank has submitted a `Refusal`.
        withdrawn: whether it has ended because this rank has withdrawn it.
        record: of `Instruments.operations`.
        about: the argument.
    """

    __slots__ = (
        "_within",
        "about",
        "done",
        "error",
        "name",
        "record",
        "refused",
        "result",
        "signature",
        "stack",
        "withdrawn",
    )

    def __init__(
        self,
        name: str,
        signature: OperationSignature,
        stack: Stack | None = None,
        about: About = _SAYS_ALL,
        within: Context = None,
    ) -> None:
        self.name = name
        self.signature = signature
        if stack is None:  # the lines of operations with a name are not compared: one is enough for people
            stack = program_stack() if name.endswith(_UNNAMED) else program_stack(1)
        self.stack = stack
        self.done = self.refused = self.withdrawn = False
        self.about = about
        self._within = within
        self.result: Any = None
        self.error: BaseException | None = None
        self.record = [0.0, 0.0, 0.0, name, signature.text, self.stack, None]

    def renew(self, stack: Stack | None = None, within: Context = None) -> None:
        """Forget how it has ended, so that it can be submitted again.

        Args:
            stack: where the program is now; None: where it was the last time.
            within: as for the class, from now on.
        """
        if stack is not None:
            self.stack = stack
        self._within = within
        self.done = self.refused = self.withdrawn = False
        self.result = self.error = None
        self.record = [0.0, 0.0, 0.0, self.name, self.signature.text, self.stack, None]

    def end(self, error: Exception | None, ended: float, *, refused: bool = False) -> None:
        """Be done, with the result that is set or an error.

        Args:
            error: None: the one that is set, or none.
            ended: when, of `time.perf_counter`.
            refused: see the class.
        """
        self.error = error or self.error
        self.record[2] = ended
        if self.error is not None:
            self.record[6] = repr(self.error)
            self.refused = refused
            self.withdrawn = isinstance(self.error, WithdrawnError)
        self.done = True

    def carry_out(self, executor: Executor, run: Run, together: Sequence[Any]) -> None:
        """Set the result, by collectives of the engine's communicator that all ranks call now.

        Args:
            executor: has the communicator, and packs arrays.
            run: what was decided; the same on all ranks.
            together: all operations of this rank that travel together, of one class; this one is the first.

        Raises:
            RefusedError: this rank could not begin; the others know why.
        """
        raise AssertionError(f"{type(self).__name__} is never run")

    @property
    def site(self) -> str:
        """Where the user's program submitted it, ``file:line``."""
        return place_of(self.stack)

    @property
    def title(self) -> str:
        """What errors call it."""
        return self.about.title or repr(self.name)

    def was_refused(self, error: BaseException) -> None:
        """Forget the error of an operation that was `refused`; raise it if it has ended in another way.

        The traceback of an error that is kept and the operation keep each other, and arrays, alive.
        """
        if not self.refused:
            raise error
        self.error = None


class Reduction(Operation):
    """An allreduce of one or more arrays.

    Args:
        name: as for `Operation`.
        text: all that must agree, in words.
        op: how to reduce.
        sources: what this rank contributes.
        targets: where the results go, as many as there are sources and each of the shape and dtype of its own; possibly
            ``sources`` itself.
        before: called just before the data is read: to scale it.
        after: called when the results are there; returns the result of the operation.
        title: as for `About`.

    Attributes:
        given: the sources' memory.
        taken: the targets'.

    Raises:
        UnsupportedBufferError: an array cannot be used.
    """

    __slots__ = ("after", "before", "given", "op", "sources", "taken", "targets")

    def __init__(
        self,
        name: str,
        text: str,
        op: ReduceOp,
        sources: Sequence[Any],
        targets: Sequence[Any],
        *,
        before: Callable[[], object] | None = None,
        after: Callable[[], Any] | None = None,
        title: str = "",
    ) -> None:
        if targets is not sources and len(sources) == 1 and sources[0] is targets[0]:
            sources = targets
        self.given = [Operand.of(source) for source in sources]
        self.taken = self.given if targets is sources else [Operand.of(target) for target in targets]
        for taken in self.taken:
            taken.require_writable()
        if len(sources) == 1:
            (only,) = self.given
            counts: tuple[tuple[str, int], ...] = ((only.dtype.name, only.view.size),)
        else:
            counts = _counted(self.given)
        super().__init__(name, _reduction_signature(text, op, counts), about=About(title) if title else _SAYS_ALL)
        self.op = op
        self.sources = sources
        self.targets = targets
        self.before = before
        self.after = after

    def carry_out(self, executor: Executor, run: Run, together: Sequence[Reduction]) -> None:
        try:
            for each in together:
                if each.before is not None:
                    each.before()
        except Exception as error:
            executor.communicator.refuse("allreduce", error)
            raise RefusedError(error) from error
        is_new = self.targets is not self.sources  # then a call of its own would have to be planned
        small = is_new and self.given[0].nbytes <= _PACKED_NBYTES
        if small or len(run.operations) > 1 or len(self.sources) > 1 or run.active < executor.size:
            pairs = [pair for each in together for pair in zip(each.given, each.taken, strict=True)]
            executor.reduce_packed(self.op, run.totals, pairs, active=run.active)
        elif is_new:
            executor.communicator.allreduce(self.given[0], self.op, out=self.taken[0])
        else:
            array = self.sources[0]
            executor.communicator.allreduce(array, self.op, out=array)  # repeated with the same object, it is fastest
        for each in together:
            each.finish()

    def finish(self) -> None:
        """Set the result, now that the data is there."""
        try:
            self.result = self.targets if self.after is None else self.after()
        except Exception as error:  # an error of this rank alone: the ranks are in step
            self.error = error


class RepeatedReduction(Reduction):
    """A `Reduction` in place, like an earlier one.

    Args:
        name, op, after: as for `Reduction`.
        signature: of the earlier one.
        arrays: what is reduced, and kept meanwhile.
        given: their memory.
    """

    __slots__ = ()

    def __init__(
        self,
        name: str,
        signature: OperationSignature,
        op: ReduceOp,
        arrays: Sequence[Any],
        given: list[Operand],
        after: Callable[[], Any],
    ) -> None:
        Operation.__init__(self, name, signature)
        self.op = op
        self.before = None
        self.after = after
        self.sources = self.targets = arrays
        self.given = self.taken = given


@lru_cache(maxsize=4096)
def _reduction_signature(text: str, op: ReduceOp, counts: tuple[tuple[str, int], ...]) -> OperationSignature:
    return OperationSignature(text, OperationKind.REDUCTION, op.value, counts=counts)


def _counted(operands: Sequence[Operand]) -> tuple[tuple[str, int], ...]:
    """Return how many elements of each dtype there are."""
    counts: dict[str, int] = {}
    for operand in operands:
        counts[operand.dtype.name] = counts.get(operand.dtype.name, 0) + operand.view.size
    return tuple(counts.items())


class CollectiveOp(Operation):
    """Any other collective: a function that makes blocking calls, the same ones on all ranks.

    Args:
        name: as for `Operation`.
        text: all that must agree, in words.
        run: makes the calls on the engine's communicator and returns the result.
        about: as for `Operation`.

    Attributes:
        run: the argument.
    """

    __slots__ = ("run",)

    def __init__(self, name: str, text: str, run: Callable[[Communicator], Any], *, about: About = _SAYS_ALL) -> None:
        super().__init__(name, OperationSignature(text), about=about)
        self.run = run

    def running(self, run: Callable[[Communicator], Any]) -> CollectiveOp:
        """Return one like this that calls another function."""
        return CollectiveOp(self.name, self.signature.text, run, about=self.about)

    def carry_out(self, executor: Executor, run: Run, together: Sequence[Operation]) -> None:
        self.result = self.run(executor.communicator)


class Refusal(Operation):
    """A call that this rank cannot make: it ends the call on the other ranks as well, with the reason.

    Args:
        name: as for `Operation`: that of the call.
        kind: of the call.
        error: why.
        stack: where the program made it; None: it makes it now.
    """

    __slots__ = ()

    def __init__(self, name: str, kind: str, error: BaseException, stack: Stack | None = None) -> None:
        super().__init__(name, OperationSignature(refusal(kind, error), OperationKind.REFUSAL), stack)


class Join(Operation):
    """The end of this rank's data; done when all ranks have joined. See `Engine.join`."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("join", OperationSignature("join"))


class Needed(Enum):
    """Which ranks must submit an operation of arrays that are reduced where they are."""

    PRESENT = auto()  # those that have not joined
    EVERYONE = auto()  # all: it is refused if one has joined
    SOME = auto()  # others may leave it out; see `Engine.withdraw`


class InPlaceAllreduce(Operation):
    """An allreduce of one or more arrays, each of them where it is: they travel neither together nor with others.

    Ranks that have joined take part with neutral elements.

    Args:
        name: as for `Operation`.
        text: all that must agree, in words.
        op: how to reduce; averages are over the ranks that have not joined, or as `Conventions` say.
        arrays: contiguous, in host memory or all on this rank's GPU; of equal dtypes and lengths on all ranks.
        travel: how they travel. With weights, everyone is needed.
        needed: which ranks must submit it.
        within: returns a context to carry it out in, on whichever thread; None: in none.
        about: as for `Operation`.

    Attributes:
        arrays, travel: the arguments.
        active: how many ranks contributed, once it is done.
    """

    __slots__ = ("_op", "active", "arrays", "travel")

    def __init__(
        self,
        name: str,
        text: str,
        op: ReduceOp,
        arrays: Sequence[Any],
        *,
        travel: Travel = AS_THEY_ARE,
        needed: Needed = Needed.PRESENT,
        within: Context = None,
        about: About = _SAYS_ALL,
    ) -> None:
        signature = OperationSignature(
            text,
            OperationKind.CALL if needed is Needed.EVERYONE else OperationKind.IN_PLACE,
            op.value,
            counts=tuple((dtype.name, count) for dtype, count in map(_elements, arrays)),
            wire=travel.wire or "",
            feedback=bool(travel.feedbacks),
            speculative=needed is Needed.SOME,
        )
        super().__init__(name, signature, about=about, within=within)
        self._op = op
        self.arrays = arrays
        self.travel = travel
        self.active = 0

    def carry_out(self, executor: Executor, run: Run, together: Sequence[Operation]) -> None:
        with nullcontext() if self._within is None else self._within():
            executor.reduce_in_place(self._op, self.arrays, self.travel, active=run.active)
        self.active = run.active


class Gather(Operation):
    """An allgather of rows, to which ranks that have joined contribute none; its result is a list of arrays.

    Args:
        name: as for `Operation`.
        text: all that must agree, in words.
        arrays: two-dimensional; the ranks may have different numbers of rows.
        within: as for `InPlaceAllreduce`.
        title: as for `About`.
    """

    __slots__ = ("_arrays",)

    def __init__(self, name: str, text: str, arrays: Sequence[Any], within: Context = None, title: str = "") -> None:
        parts = tuple((_elements(array)[0].name, array.shape[1]) for array in arrays)
        signature = OperationSignature(text, OperationKind.GATHER, counts=parts)
        super().__init__(name, signature, about=About(title), within=within)
        self._arrays = arrays

    def carry_out(self, executor: Executor, run: Run, together: Sequence[Operation]) -> None:
        with nullcontext() if self._within is None else self._within():
            self.result = [executor.communicator.allgather(array) for array in self._arrays]


def contribute_neutral(executor: Executor, run: Run) -> None:
    """Take part in operations that other ranks have submitted after this one joined, with neutral elements."""
    signature = run.operations[0].signature
    if signature.kind is OperationKind.GATHER:
        for name, length in signature.counts:
            executor.communicator.allgather(typed(np.empty(0, np.uint8), DType.of(name)).reshape(0, length))
        return
    op = ReduceOp(signature.op)
    if signature.kind is OperationKind.REDUCTION:
        executor.reduce_packed(op, run.totals, [], active=run.active)
        return
    assert signature.kind is OperationKind.IN_PLACE, signature
    arrays = [neutral_array(op, DType.of(name), count) for name, count in signature.counts]
    feedbacks = [Feedback(keep=False) for _ in arrays] if signature.feedback else []  # all ranks give them, or none
    executor.reduce_in_place(op, arrays, Travel(signature.wire or None, feedbacks), active=run.active)


class WithdrawnError(RingReduceError):
    """What ends an operation that this rank has withdrawn; no program sees it."""


class Withdrawal(NamedTuple):
    """Asks the engine to withdraw speculative operations of this rank."""

    operations: Sequence[Operation]


def _elements(array: Any) -> tuple[DType, int]:
    """Return the dtype and the number of elements of an array, wherever it is."""
    operand = operand_of(array)
    return operand.dtype, operand.count


def unnamed(kind: str) -> str:
    """Return the name that all operations of a kind share to which the program gave none; they match in order."""
    return kind + _UNNAMED


def is_unnamed(name: str) -> bool:
    """Return whether a name is one that `unnamed` gives."""
    return name.endswith(_UNNAMED)
