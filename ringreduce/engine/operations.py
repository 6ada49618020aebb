"""Operations: a program submits them to an engine, and they get a result or an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from ringreduce.engine.fused import Executor, neutral_array

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


class Operation:
    """A named operation: it carries itself out, and has a result or an error then.

    Args:
        name: operations of the same name on all ranks belong together.
        signature: what must agree.
        stack: where the program made it; None: where the program is now.

    Attributes:
        done: whether it has ended; the result or the error is set before this becomes true.
        result: what `Engine.wait` returns.
        error: what it raises instead.
        refused: whether it has ended because the ranks submitted different ones under its name: none has begun. Not if
            a rank has submitted a `Refusal`.
        withdrawn: whether it has ended because this rank has withdrawn it.
        record: of `Instruments.operations`.
        parts: returns the names of what it is over, for observers; None: its own name says all.
    """

    __slots__ = (
        "_title",
        "done",
        "error",
        "name",
        "parts",
        "record",
        "refused",
        "result",
        "signature",
        "stack",
        "withdrawn",
    )

    def __init__(self, name: str, signature: OperationSignature, stack: Stack | None = None) -> None:
        self.name = name
        self.signature = signature
        if stack is None:  # the lines of operations with a name are not compared: one is enough for people
            stack = program_stack() if name.endswith(_UNNAMED) else program_stack(1)
        self.stack = stack
        self.done = self.refused = self.withdrawn = False
        self.parts: Callable[[], Sequence[str]] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.record = [0.0, 0.0, 0.0, name, signature.text, self.stack, None]

    def require_everyone(self) -> None:
        """Have it refused if a rank has joined; to be called before it is submitted."""
        self.signature = self.signature._replace(kind=OperationKind.CALL)

    def renew(self, stack: Stack | None = None) -> None:
        """Forget how it has ended, so that it can be submitted again.

        Args:
            stack: where the program is now; None: where it was the last time.
        """
        if stack is not None:
            self.stack = stack
        self.done = self.refused = self.withdrawn = False
        self.result = self.error = None
        self.record = [0.0, 0.0, 0.0, self.name, self.signature.text, self.stack, None]

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
        """What errors call it: by its name, unless this is set."""
        return getattr(self, "_title", None) or repr(self.name)

    @title.setter
    def title(self, title: str) -> None:
        self._title = title


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
        super().__init__(name, _reduction_signature(text, op, counts))
        self.op = op
        self.sources = sources
        self.targets = targets
        self.before = before
        self.after = after

    @classmethod
    def again(
        cls,
        name: str,
        signature: OperationSignature,
        op: ReduceOp,
        arrays: Sequence[Any],
        given: list[Operand],
        after: Callable[[], Any],
    ) -> Reduction:
        """Return an operation in place, like an earlier one of this signature.

        Args:
            name, op, after: as for the class.
            signature: of the earlier one.
            arrays: what is reduced, and kept meanwhile.
            given: their memory.
        """
        made = cls.__new__(cls)
        Operation.__init__(made, name, signature)
        made.op = op
        made.before = None
        made.after = after
        made.sources = made.targets = arrays
        made.given = made.taken = given
        return made

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
            try:
                each.result = each.targets if each.after is None else each.after()
            except Exception as error:  # an error of this rank alone: the ranks are in step
                each.error = error


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

    Attributes:
        before: called just before; None: nothing is.
    """

    __slots__ = ("before", "run")

    def __init__(self, name: str, text: str, run: Callable[[Communicator], Any]) -> None:
        super().__init__(name, OperationSignature(text))
        self.run = run
        self.before: Callable[[], object] | None = None

    def carry_out(self, executor: Executor, run: Run, together: Sequence[Operation]) -> None:
        if self.before is not None:
            self.before()
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


class InPlaceAllreduce(Operation):
    """An allreduce of one or more arrays, each of them where it is: they travel neither together nor with others.

    Ranks that have joined take part with neutral elements.

    Args:
        name: as for `Operation`.
        text: all that must agree, in words.
        op: how to reduce; averages are over the ranks that have not joined, or as `Conventions` say.
        arrays: contiguous, in host memory or all on this rank's GPU; of equal dtypes and lengths on all ranks.
        wire: the format in which they travel; None: as they are.
        feedbacks: what rounding to that format keeps, for each array.
        speculative: whether other ranks may leave it out; see `Engine.withdraw`.
        within: returns a context to carry it out in, on whichever thread; None: in none.

    Attributes:
        weights: as for `Communicator.allreduce`, if no rank has joined.
        before: called before the data is read, in that context; None: nothing is.
        after: called when the results are there; returns the result of the operation. None: it has none.
        active: how many ranks contributed, once it is done.
    """

    __slots__ = ("active", "after", "arrays", "before", "feedbacks", "op", "weights", "within")

    def __init__(
        self,
        name: str,
        text: str,
        op: ReduceOp,
        arrays: Sequence[Any],
        *,
        wire: str | None = None,
        feedbacks: Sequence[Any] = (),
        speculative: bool = False,
        within: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        parts = tuple((dtype.name, count) for dtype, count in map(_elements, arrays))
        super().__init__(
            name,
            OperationSignature(
                text,
                OperationKind.IN_PLACE,
                op.value,
                counts=parts,
                wire=wire or "",
                feedback=bool(feedbacks),
                speculative=speculative,
            ),
        )
        self.op = op
        self.arrays = arrays
        self.feedbacks = feedbacks
        self.within = within
        self.weights: Sequence[float] = ()
        self.before: Callable[[], object] | None = None
        self.after: Callable[[], Any] | None = None
        self.active = 0

    def carry_out(self, executor: Executor, run: Run, together: Sequence[Operation]) -> None:
        with nullcontext() if self.within is None else self.within():
            if self.before is not None:
                self.before()
            wire = self.signature.wire or None
            executor.reduce_in_place(
                self.op, self.arrays, wire, feedbacks=self.feedbacks, active=run.active, weights=self.weights
            )
        self.active = run.active
        if self.after is not None:
            self.result = self.after()


class Gather(Operation):
    """An allgather of rows, to which ranks that have joined contribute none; its result is a list of arrays.

    Args:
        name: as for `Operation`.
        text: all that must agree, in words.
        arrays: two-dimensional; the ranks may have different numbers of rows.
        within: as for `InPlaceAllreduce`.
    """

    __slots__ = ("arrays", "within")

    def __init__(
        self,
        name: str,
        text: str,
        arrays: Sequence[Any],
        within: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        parts = tuple((_elements(array)[0].name, array.shape[1]) for array in arrays)
        super().__init__(name, OperationSignature(text, OperationKind.GATHER, counts=parts))
        self.arrays = arrays
        self.within = within

    def carry_out(self, executor: Executor, run: Run, together: Sequence[Operation]) -> None:
        with nullcontext() if self.within is None else self.within():
            self.result = [executor.communicator.allgather(array) for array in self.arrays]


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
    executor.reduce_in_place(op, arrays, signature.wire or None, feedbacks=feedbacks, active=run.active)


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
