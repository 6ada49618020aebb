"""Compiled calls at a board: the instructions of a plan as numbers, and what Python does where one has waited for long.

A plan of NumPy's path is a list of calls: copies, and reductions that `CompiledKernels` has bound. `compile_call`
writes the same list as a program for `ringreduce.native`, with the rendezvous before it and the barrier behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, pairwise
from operator import setitem
from typing import NamedTuple

import numpy as np

from ringreduce.buffers import Array, Call, Kernels, address_of, unowned
from ringreduce.native import layout
from ringreduce.native.library import Library
from ringreduce.transport.shared.board import Board, Signature
from ringreduce.transport.shared.board_memory import COUNTERS_LINE, NPUBLISHED, STATUS_LINE, rooms_of
from ringreduce.transport.shared.threads import Threads

_HELD_POLLS = 100  # about 3 us
_POLLS = 5000  # about 100 us
_YIELDS = 200  # where ranks outnumber cores
#: How often to poll for as long again: who gives a core of a busy machine away gets it back milliseconds later.
_AGAIN = 20
#: From so many bytes on, other threads may compute in Python while this one adds.
_RELEASED_NBYTES = 64 << 10
#: From so many bytes on, waking threads costs little beside what they add.
_SHARED_OUT_NBYTES = 8 << 20
#: A copy is cut into instructions of so many bytes, so that signals are heard.
_COPIED_NBYTES = 256 << 10

#: An instruction: a call of NumPy's path, or its numbers.
Instruction = Call | list[int]

#: The rendezvous, and a barrier, to which a rank may come without waiting there.
ENTER = [layout.ENTER]
ARRIVE = [layout.ARRIVE]
BARRIER = [layout.ARRIVE, layout.AWAIT]


class _Functions(NamedTuple):
    """What reduces numbers.

    Attributes:
        library: has it.
        functions: of `Library.kernels`.
        divisor: of averages.
    """

    library: Library
    functions: tuple[int, ...]
    divisor: int


class CompiledReduction:
    """Reduces terms, flat and contiguous, in their order, into an array, which may be one of them.

    Args:
        kernel: what reduces them.
        terms: these.
        by_numpy: binds the same by NumPy, which is quicker for a single time.
    """

    def __init__(
        self, kernel: _Functions, terms: Sequence[Array], by_numpy: Callable[[], Callable[[Array], object]]
    ) -> None:
        self.kernel = kernel
        self.terms = terms
        self._by_numpy: Callable[[], Callable[[Array], object]] | None = by_numpy
        self._plan: _PlanMemory | None = None

    def __call__(self, target: Array) -> None:
        if self._by_numpy is not None:
            self._by_numpy()(target)
            self._by_numpy = None
            return
        if self._plan is None:
            program = _reduction(self, of_any_target(target))
            self._plan = _PlanMemory(self.kernel, program, len(self.terms), nbytes=target.nbytes)
        address = target.__array_interface__["data"][0]  # `address_of`, and `_PlanMemory.run`, would be calls.
        code = layout.DONE
        while code := self.kernel.library.run(self._plan.address, 0, address, code):
            pass


class CompiledKernels:
    """The kernels of one dtype and reduce op; see `ringreduce.buffers.Kernels`.

    Args:
        library: has them.
        dtype, op: names.
        size: how many ranks there are.
        by_numpy: the same of NumPy.
    """

    def __init__(self, library: Library, dtype: str, op: str, *, size: int, by_numpy: Kernels) -> None:
        self._by_numpy = by_numpy
        self._whole = _Functions(library, library.kernels[dtype, op], size)
        self._part = _Functions(library, library.kernels[dtype, "sum" if op == "average" else op], size)

    def combine(self, sources: Sequence[Array], *, complete: bool = True) -> Callable[[Array], object]:
        by_numpy = partial(self._by_numpy.combine, sources, complete=complete)
        return CompiledReduction(self._whole if complete else self._part, sources, by_numpy)


def of_any_source(array: Array) -> Array:
    """Return what instructions have in place of the source of a call, if they are for any; of this shape and dtype."""
    return unowned(array, layout.FROM_SOURCE)


def of_any_target(array: Array) -> Array:
    """Return the same in place of its target."""
    return unowned(array, layout.FROM_TARGET)


def expect(board: Board, others: Sequence[int]) -> list[int]:
    """Return the instructions that compare what the others have published with what a plan is bound to.

    Args:
        board: the ranks.
        others: as `Board.enter` returns it.
    """
    each = len(others) // len(board.peers)
    instructions: list[int] = []
    for position, address in enumerate(board.memory.entries):
        expected = others[position * each : (position + 1) * each]
        instructions += [layout.EXPECT, layout.MOVED, address, each, *expected]
    return instructions


def compile_call(
    library: Library,
    board: Board,
    entry: Signature,
    nbytes: int,
    instructions: Sequence[Instruction],
    *,
    mailed_nbytes: int = 0,
    threads: Threads | None = None,
) -> CompiledCall | None:
    """Compile a call; None: it copies memory of other processes, say, or publishes more numbers than a line holds.

    Args:
        library: runs it.
        board: the ranks.
        entry: what this one publishes.
        nbytes: of the call.
        instructions: in order; on arrays, or on `of_any_source` and `of_any_target`.
        mailed_nbytes: what `BoardMemory.mailboxes` were asked for.
        threads: carry out parts of a large call that is bound to where its arrays are; None: nothing is shared out.
    """
    if len(entry.numbers) > NPUBLISHED:
        return None
    kernel = _Functions(library, (0,) * 5, 0)
    program: list[list[int]] = []
    absent: set[int] = set()
    for each in instructions:
        if isinstance(each, list):
            program.append(each)
        elif not isinstance(each, partial):
            return None
        elif each.func is setitem:
            program += _copies(each.args[0], each.args[2])
        elif isinstance(each.func, CompiledReduction):
            kernel = each.func.kernel
            program += _reduction(each.func, each.args[0])
        elif each.func == board.require_present:
            (position, _) = each.args
            absent.add(position)
            status = board.memory.others[position] + STATUS_LINE * layout.LINE_NBYTES
            program.append([layout.EXPECT, layout.ABSENT, status, 1, 0])
        else:
            return None
    parts: list[_PlanMemory] = []
    size = len(board.members)
    large = nbytes >= _SHARED_OUT_NBYTES and not mailed_nbytes
    if threads is not None and large and threads.start():
        program, shares = _shared_out(program, threads.count)
        parts = [_PlanMemory(kernel, share, size, nbytes=nbytes) for share in shares]
    plan = _PlanMemory(kernel, program, size, board, entry, nbytes=nbytes, mailed_nbytes=mailed_nbytes)
    share = partial(_run_parts, threads, library, parts) if threads is not None and parts else None
    return CompiledCall(library, board, entry.text, (plan, instructions), absent=absent, share=share)


def _run_parts(threads: Threads, library: Library, parts: Sequence[_PlanMemory], source: int, target: int) -> None:
    threads.run([partial(part.run, library, source, target) for part in parts])


def _shared_out(program: list[list[int]], count: int) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Return a program without what several threads can do at once, up to its first barrier; and so many parts of that.

    A reduction and the copies that follow it are one piece; without reductions each copy is.
    """
    works = [each[0] in (layout.COPY, layout.REDUCE) for each in program]
    if True not in works:
        return program, []
    begin = works.index(True)
    end = next((at for at in range(begin, len(works)) if not works[at]), len(works))
    work = program[begin:end]
    kind = layout.REDUCE if any(each[0] == layout.REDUCE for each in work) else layout.COPY
    starts = [at for at, each in enumerate(work) if each[0] == kind or at == 0]
    bounds = [starts[len(starts) * part // count] for part in range(count)] + [len(work)]
    parts = [work[low:high] for low, high in pairwise(bounds) if low < high]
    return [*program[:begin], [layout.SHARE_OUT], *program[end:]], parts


def _copies(target: Array, source: Array) -> list[list[int]]:
    assert target.nbytes == source.nbytes
    to = address_of(target)
    of = address_of(source)
    return [
        [layout.COPY, to + start, of + start, min(_COPIED_NBYTES, target.nbytes - start)]
        for start in range(0, target.nbytes, _COPIED_NBYTES)
    ]


def _reduction(reduction: CompiledReduction, target: Array) -> list[list[int]]:
    terms = reduction.terms
    if len(terms) == 1:
        return _copies(target, terms[0])
    count = target.nbytes // reduction.kernel.functions[0]
    return [[layout.REDUCE, count, len(terms), address_of(target), *map(address_of, terms)]]


class _PlanMemory:
    """A plan in memory, and its address; see `ringreduce.native.layout`."""

    def __init__(
        self,
        kernel: _Functions,
        program: Iterable[list[int]],
        size: int,
        board: Board | None = None,
        entry: Signature | None = None,
        nbytes: int = 0,
        mailed_nbytes: int = 0,
    ) -> None:
        lines = [] if board is None else board.memory.others
        rest = [*lines, *chain.from_iterable(program), layout.END]
        self._memory = np.zeros(layout.FIELDS + len(rest), np.int64)
        self.address = address_of(self._memory)
        fields = dict(zip(_KERNEL_FIELDS, kernel.functions, strict=True))
        fields |= {
            layout.SIZE: 1 + len(lines),
            layout.DIVISOR: kernel.divisor,
            layout.COUNTERS: self.address,  # Without a board they do not matter.
            layout.RELEASES: int(nbytes >= _RELEASED_NBYTES),
        }
        if size > 2:
            self._scratch = np.empty(layout.SCRATCH_NBYTES, np.uint8)
            fields[layout.SCRATCH] = address_of(self._scratch)
        if mailed_nbytes:
            fields[layout.ROOM], fields[layout.ROOMS] = rooms_of(mailed_nbytes)
        if board is not None and entry is not None:
            crowded = board.waiter.crowded
            mine = board.memory.addresses[board.index]
            published = entry.code, entry.source, entry.target, *entry.numbers
            fields |= {
                layout.MINE: mine,
                layout.COUNTERS: mine + COUNTERS_LINE * layout.LINE_NBYTES,
                layout.HELD_POLLS: 0 if crowded else _HELD_POLLS,
                layout.POLLS: 0 if crowded else _POLLS,
                layout.YIELDS: _YIELDS if crowded else 0,
                layout.PUBLISHES: len(published),
            }
            fields.update(enumerate(published, layout.PUBLISHED))
        self._memory[list(fields)] = list(fields.values())
        self._memory[layout.FIELDS :] = rest

    @property
    def waits_at_barrier(self) -> bool:
        """Whether the call has returned where it is to wait at a barrier."""
        return bool(self._memory[self._memory[layout.NEXT]] == layout.AWAIT)

    def run(self, library: Library, source: int, target: int) -> None:
        """Run a program without a rendezvous."""
        code = layout.DONE
        while code := library.run(self.address, source, target, code):
            pass


_KERNEL_FIELDS = layout.ITEMSIZE, layout.PAIR, layout.FINISH, layout.GROW, layout.ROUND


class CompiledCall:
    """A call on one node: its plan, and what goes on with it after a long wait.

    Args:
        library: runs it.
        board: the ranks.
        text: of its signature.
        plan: this, and what has the memory whose addresses it has.
        absent: members of which it looks whether they have detached.
        share: carries out what the program shares out, given the addresses of source and target.
    """

    def __init__(
        self,
        library: Library,
        board: Board,
        text: str,
        plan: tuple[_PlanMemory, Sequence[Instruction]],
        absent: Iterable[int],
        share: Callable[[int, int], object] | None,
    ) -> None:
        self._library = library
        self._board = board
        self._text = text
        self._plan, self._instructions = plan
        self._absent = sorted(absent)
        self._share = share

    def bound(self, source: int, target: int) -> Callable[[], object]:
        """Return what makes the call from one address to another."""
        run = self._library.run
        plan = self._plan.address
        go_on = self._go_on
        take_back = self._take_back

        def call() -> None:
            try:
                if code := run(plan, source, target, layout.DONE):
                    go_on(code, source, target)
            except BaseException:
                take_back()
                raise

        return call

    def into_any(self, source: int) -> Callable[[Array], object]:
        """Return what makes the call from an address to any contiguous array."""
        run = self._library.run_into
        plan = self._plan.address
        go_on = self._go_on
        take_back = self._take_back

        def call(result: Array) -> None:
            try:
                if code := run(plan, source, id(result), layout.DONE):
                    go_on(code, source, address_of(result))
            except BaseException:
                take_back()
                raise

        return call

    def run(self, source: int = 0, target: int = 0) -> bool:
        """Make the call; return whether it is done. If not, all have entered, and others' arrays are elsewhere."""
        try:
            code = self._library.run(self._plan.address, source, target, layout.DONE)
            return not code or not self._finish(code, source, target)
        except BaseException:
            self._take_back()
            raise

    def _take_back(self) -> None:
        """Take back that this rank has reached the barrier at which an error, or an interrupt, has ended its wait."""
        if self._plan.waits_at_barrier:
            self._board.take_back()

    def _go_on(self, code: int, source: int, target: int) -> None:
        """Finish a call that is not done. Members whose arrays are elsewhere copy them after the rendezvous."""
        code = self._finish(code, source, target)
        if code == layout.MOVED:
            self._board.barrier(self._text)
        while code == layout.MOVED:
            code = self._finish(self._library.run(self._plan.address, source, target, code), source, target)

    def _finish(self, code: int, source: int, target: int) -> int:
        """Go on with a call, waiting as long as may be, until it is done or `MOVED`; return that.

        Raises:
            MismatchError, CollectiveTimeoutError, PeerLostError: see `Board`.
        """
        board = self._board
        tries = 0
        while code not in (layout.DONE, layout.MOVED):
            if code == layout.MISMATCH:
                board.disagree(self._text)
            if code == layout.SHARED_OUT and self._share is not None:
                self._share(source, target)
            if code == layout.ABSENT:
                for position in self._absent:
                    board.require_present(position, self._text)
            if code in (layout.LATE_ENTRY, layout.LATE_BARRIER):
                tries += 1
                if tries > _AGAIN or board.waiter.crowded or board.waiter.patient():
                    wait = board.wait_for_entries if code == layout.LATE_ENTRY else board.barrier_again
                    wait(self._text)
                    tries = 0
            code = self._library.run(self._plan.address, source, target, code)
        return code
