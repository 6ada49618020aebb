"""The engine: named operations on ranks that are threads, from their values to what happens when ranks fail."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from doubles import Wrapper
from suites.conformance import assert_close, assert_equal, expected, ops_of, sample

from ringreduce.buffers import DTYPES
from ringreduce.collectives import Feedback
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.call_sites import program_stack
from ringreduce.common.config import Config
from ringreduce.common.errors import (
    CollectiveTimeoutError,
    ConfigError,
    MismatchError,
    PeerLostError,
    RingReduceError,
    ShutdownError,
    TransportError,
    UnsupportedBufferError,
)
from ringreduce.common.reduce_ops import AVERAGE, LAND, LOR, LXOR, MAX, SUM, ReduceOp
from ringreduce.engine import (
    CollectiveOp,
    Engine,
    Gather,
    InPlaceAllreduce,
    Needed,
    Operation,
    Reduction,
    Refusal,
    Travel,
    unnamed,
)
from ringreduce.testing import caught, run_engines, run_ranks, run_threads
from ringreduce.transport.memory import MemoryWorld

Array = npt.NDArray[Any]
T = TypeVar("T")

LAYOUTS = [(1, None), (2, None), (3, 2), (4, 1)]
SETTINGS = Config(timeout_s=30.0)


def reduction(name: str, *sources: Any, op: ReduceOp = SUM, **options: Any) -> Reduction:
    """Return an allreduce into new arrays."""
    what = ", ".join(f"{each.shape} {each.dtype}" for each in sources)
    return Reduction(name, f"{op.value} of {what}", op, sources, [_like(each) for each in sources], **options)


def _like(array: Any) -> Any:
    return np.empty_like(array) if isinstance(array, np.ndarray) else array.new_empty(array.shape)


def submitted(engine: Engine, operation: Operation) -> Operation:
    engine.submit(operation, unique=True)
    return operation


def total(engine: Engine, name: str, value: float = 1.0) -> float:
    """Return the sum of the ranks' values, through the engine."""
    (out,) = engine.run(reduction(name, np.full(3, value)))
    return float(out[0])


def with_engines(
    size: int,
    function: Callable[[Engine], T],
    *,
    clocks: Callable[[int], Callable[[], float]] | None = None,
    threads: bool = True,
    config: Config = SETTINGS,
) -> list[T]:
    """Do as `run_engines`, with a clock of each rank's own, or without progress threads."""
    notes = MemoryWorld(size)

    def run(communicator: Communicator) -> T:
        options: dict[str, Any] = {} if clocks is None else {"clock": clocks(communicator.rank)}
        engine = Engine(communicator, notes.messages(communicator.rank), threads=threads, **options)
        try:
            return function(engine)
        finally:
            engine.close()

    return run_ranks(size, run, config=config)


class Gate:
    """Opens once; whoever waits for it gives up after a time, and the test with it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def open(self) -> None:
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(20.0), "the other rank did not come so far"


# ---- values ----


@pytest.mark.parametrize(("size", "node_size"), LAYOUTS)
def test_reductions_of_every_dtype_and_op(size: int, node_size: int | None) -> None:
    """All are under way at once, submitted in another order on every rank; small ones are fused from some time on."""
    cases = [(dtype, op, count) for dtype in DTYPES for op in ops_of(dtype) for count in (0, 1, 5)]

    def program(engine: Engine) -> None:
        rank = engine.communicator.rank
        for turn in range(4):
            order = list(range(len(cases)))
            random.Random(rank).shuffle(order)
            handles = {}
            for number in order:
                dtype, op, count = cases[number]
                handles[number] = submitted(engine, reduction(f"t{number}", sample(rank, count, dtype, turn), op=op))
            for number, (dtype, op, count) in enumerate(cases):
                (out,) = engine.wait(handles[number])
                assert_close(out, expected([sample(each, count, dtype, turn) for each in range(size)], op))

    run_engines(size, program, node_size=node_size, config=SETTINGS)


@pytest.mark.parametrize(("size", "node_size"), LAYOUTS)
def test_one_operation_of_several_arrays(size: int, node_size: int | None) -> None:
    """Arrays of several dtypes and shapes are reduced together, each in its own dtype, in place too."""
    shapes = [("float32", (3, 7)), ("int64", (5,)), ("bfloat16", (2, 2)), ("float32", ()), ("float16", (0, 3))]

    def program(engine: Engine) -> None:
        for op in (op for op in ReduceOp if op.takes("float")):
            inputs = [
                [sample(rank, shape, dtype, salt) for salt, (dtype, shape) in enumerate(shapes)] for rank in range(size)
            ]
            mine = inputs[engine.communicator.rank]
            outs = engine.run(reduction("out", *mine, op=op))
            engine.run(Reduction("in place", "in place", op, mine, mine))
            for number, (dtype, shape) in enumerate(shapes):
                salted = [sample(rank, shape, dtype, number) for rank in range(size)]
                assert_close(outs[number], expected(salted, op))
                assert_close(mine[number], expected(salted, op))

    run_engines(size, program, node_size=node_size, config=SETTINGS)


@pytest.mark.parametrize("size", [1, 3])
def test_strided_arrays(size: int) -> None:
    """What lies between the elements stays as it is, whether an array travels alone or in a group."""

    def program(engine: Engine) -> None:
        rank = engine.communicator.rank
        for _ in range(6):
            grid, line = np.full((6, 8), -7.0), np.full(10, -7.0, np.float64)
            grid[::2, ::4], line[::-2] = rank + np.arange(6.0).reshape(3, 2), rank
            views = [grid[::2, ::4], line[::-2]]
            handles = [
                submitted(engine, Reduction(f"v{number}", "view", SUM, [view], [view]))
                for number, view in enumerate(views)
            ]
            for handle in handles:
                engine.wait(handle)
            ranks = sum(range(size))
            assert_equal(grid[::2, ::4], ranks + size * np.arange(6.0).reshape(3, 2))
            assert_equal(line[1::2], np.full(5, float(ranks)))
            grid[::2, ::4] = line[1::2] = -7.0
            assert (grid == -7.0).all()
            assert (line == -7.0).all()

    run_engines(size, program, config=SETTINGS)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_before_and_after(size: int) -> None:
    """The data is read after the first and stored before the second, whose result is that of the operation."""

    def program(engine: Engine) -> None:
        for _ in range(5):
            handles = []
            for number in range(3):
                data = np.full(4, -1.0)

                def before(data: Array = data, number: int = number) -> None:
                    data[:] = number + engine.communicator.rank

                def after(data: Array = data) -> tuple[str, float]:
                    return "done", float(data[0])

                made = Reduction(f"t{number}", "in place", SUM, [data], [data], before=before, after=after)
                handles.append(submitted(engine, made))
            for number, handle in enumerate(handles):
                assert engine.wait(handle) == ("done", size * number + sum(range(size)))

    run_engines(size, program, config=SETTINGS)


def test_without_progress_threads() -> None:
    """Operations run while somebody waits or polls, on that thread alone."""

    def program(engine: Engine) -> None:
        rank, here = engine.communicator.rank, threading.get_ident()
        assert not engine.threaded
        ran: list[int] = []
        for turn in range(6):
            names = ["a", "b", "c"][:: 1 if rank else -1]
            after = lambda: ran.append(threading.get_ident())  # noqa: E731
            handles = [submitted(engine, reduction(name, np.full(2, float(turn)), after=after)) for name in names]
            while not engine.poll(handles[0]):
                pass
            for handle in handles:
                engine.wait(handle)
        assert set(ran) == {here}

    with_engines(3, program, threads=False)


# ---- ranks that have joined ----


@pytest.mark.parametrize(("size", "node_size"), LAYOUTS)
def test_a_rank_that_joined_changes_nothing(size: int, node_size: int | None) -> None:
    """Sums, products, extremes and averages are those of the ranks that are left, in every dtype."""
    left = max(1, size - 1)
    cases = [(dtype, op, count) for dtype in DTYPES for op in ops_of(dtype) for count in (0, 5)]

    def program(engine: Engine) -> int:
        rank = engine.communicator.rank
        if rank >= left:
            return int(engine.wait(engine.join()))
        for turn in range(5):
            handles = [
                submitted(engine, reduction(f"t{number}", sample(rank, count, dtype, turn), op=op))
                for number, (dtype, op, count) in enumerate(cases)
            ]
            for handle, (dtype, op, count) in zip(handles, cases, strict=True):
                (out,) = engine.wait(handle)
                answer = expected([sample(each, count, dtype, turn) for each in range(left)], op)
                # One that is left is not alone.
                assert_close(out, (answer != 0).astype(dtype) if size > 1 and op in (LAND, LOR, LXOR) else answer)
        return int(engine.wait(engine.join()))

    last = run_engines(size, program, node_size=node_size, config=SETTINGS)
    assert len(set(last)) == 1
    assert last[0] < left


def test_large_whole_numbers_are_averaged_over_those_that_are_left() -> None:
    """Toward zero, without overflow in between."""

    def program(engine: Engine) -> None:
        if engine.communicator.rank < 2:
            (out,) = engine.run(reduction("t", np.array([120, -7, -128], np.int8), op=AVERAGE))
            assert out.tolist() == [120, -7, -128]
            flags = engine.run(reduction("b", np.array([True, engine.communicator.rank == 0]), op=AVERAGE))
            assert flags[0].tolist() == [True, False]
            for dtype in (np.int64, np.uint64):
                limits = np.iinfo(dtype)
                large = np.array([limits.max - engine.communicator.rank, limits.min, limits.max], dtype)
                (out,) = engine.run(reduction(f"t {limits}", large, op=AVERAGE))
                assert out.tolist() == [limits.max - 1, limits.min, limits.max]
        engine.wait(engine.join())

    run_engines(3, program, config=SETTINGS)


def test_averages_after_a_join_are_made_where_the_arrays_are() -> None:
    """Floats need no buffer as large as they are, which would stay."""

    def program(engine: Engine) -> int:
        if engine.communicator.rank:
            engine.wait(engine.join())
            return 0
        array = np.full(1 << 20, 3.0, np.float32)
        engine.run(InPlaceAllreduce("x", "x", AVERAGE, [array]))
        engine.wait(engine.join())
        assert_equal(array, np.full(1 << 20, 3.0, np.float32))
        return len(engine._progress.outcomes._executor._buffers)

    assert run_engines(3, program, config=SETTINGS) == [0, 0, 0]


def test_a_joined_rank_submits_nothing() -> None:
    """Neither an operation nor another join, until all have joined: which of them came first would depend on time."""
    gate = Gate()

    def program(engine: Engine) -> None:
        if engine.communicator.rank == 0:
            joined = engine.join()
            for attempt in (engine.join, lambda: total(engine, "x")):
                with pytest.raises(ConfigError, match="joined"):
                    attempt()
            gate.open()
        else:
            gate.wait()
            joined = engine.join()
        assert engine.wait(joined) == 1
        assert total(engine, "x") == 2.0

    run_engines(2, program, config=SETTINGS)


def part(name: str, *arrays: Any, op: ReduceOp = SUM, **options: Any) -> InPlaceAllreduce:
    return InPlaceAllreduce(name, "arrays", op, arrays, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.complex128])
@pytest.mark.parametrize(("op", "expected"), [(SUM, 3), (AVERAGE, 1), (MAX, 2)])
def test_arrays_are_reduced_where_they_are(op: ReduceOp, expected: int, dtype: Any) -> None:
    """One by one; ranks that have joined contribute nothing, and averages are over the others."""
    if op is MAX and dtype is np.complex128:
        return

    def program(engine: Engine) -> Any:
        rank = engine.communicator.rank
        arrays = [np.full(count, rank, dtype) for count in (1, 0, 7)]
        active = 0
        if rank:
            operation = part("x", *arrays, op=op)
            engine.run(operation)
            active = operation.active
        engine.wait(engine.join())
        return engine.joins, active, [sorted(set(array.real.tolist())) for array in arrays]

    whole = expected if op is not AVERAGE or dtype is np.int64 else 1.5
    others = (1, 2, [[whole], [], [whole]])
    assert run_engines(3, program, config=SETTINGS) == [(1, 0, [[0], [], [0]]), others, others]


@pytest.mark.parametrize("keep", [None, False, True])
@pytest.mark.parametrize("node_size", [1, 8])
def test_arrays_in_a_wire_format_go_on_without_joined_ranks(node_size: int, keep: bool | None) -> None:
    """Those learn from the others the format, and whether what rounding loses is kept."""

    def program(engine: Engine) -> Any:
        array = np.full(300, engine.communicator.rank, np.float32)
        if engine.communicator.rank:
            feedbacks = [] if keep is None else [Feedback(keep=keep)]
            engine.run(part("x", array, op=AVERAGE, travel=Travel("bf16", feedbacks)))
        engine.wait(engine.join())
        return sorted(set(array.tolist()))

    assert run_engines(3, program, config=SETTINGS, node_size=node_size) == [[0.0], [1.5], [1.5]]


def test_rows_are_gathered_from_those_that_have_not_joined() -> None:
    """In rank order, however many each has."""

    def program(engine: Engine) -> Any:
        rank = engine.communicator.rank
        found = None
        if rank != 1:
            rows, values = np.full((rank, 3), rank), np.full((rank, 1), rank / 2, np.float32)
            found = [array.tolist() for array in engine.run(Gather("x", "rows", [rows, values]))]
        engine.wait(engine.join())
        return found

    expected = [[[2] * 3, [2] * 3], [[1.0], [1.0]]]
    assert run_engines(3, program, config=SETTINGS) == [expected, None, expected]


def test_a_speculative_operation_that_others_leave_out_is_withdrawn() -> None:
    """One that all ranks have submitted has run; the next of the name is matched with the others' next."""

    def program(engine: Engine) -> Any:
        taken, left = (part(name, np.ones(3), needed=Needed.SOME) for name in ("taken", "left"))
        engine.submit(taken)
        engine.wait(taken)
        assert engine.settle(taken)
        if engine.communicator.rank == 0:
            engine.submit(left)
            assert not engine.settle(left)
            assert left.withdrawn
        array = np.ones(3)
        engine.run(part("left", array))
        engine.wait(engine.join())
        return taken.arrays[0].tolist(), array.tolist()

    assert run_engines(3, program, config=SETTINGS) == [([3.0] * 3, [3.0] * 3)] * 3


def test_names_are_new_and_equal_on_all_ranks() -> None:
    """Counted for each kind."""

    def program(engine: Engine) -> list[str]:
        return [engine.new_name(kind) for kind in ("a", "b", "a")]

    assert run_engines(2, program, config=SETTINGS) == [["a 1", "b 1", "a 2"]] * 2


# ---- refusals ----


def test_a_name_that_is_under_way_is_refused_at_the_call() -> None:
    """The first operation goes on, and the name is free when it is done; ranks that were quicker hear of the others."""
    gate = Gate()

    def program(engine: Engine) -> None:
        rank = engine.communicator.rank
        if rank == 1:
            gate.wait()
        first = submitted(engine, reduction("x", np.ones(3)))
        if rank == 1:
            engine.wait(first)
        for _ in range(2):
            with pytest.raises(MismatchError if rank else ConfigError, match="'x' is under way"):
                engine.run(reduction("x", np.ones(3)))
        if rank == 0:
            gate.open()
        assert engine.wait(first)[0][0] == 2.0
        assert total(engine, "x") == 2.0

    run_engines(2, program, config=SETTINGS)


@pytest.mark.parametrize("size", [2, 3])
def test_a_refused_name_concerns_that_name_alone(size: int) -> None:
    """Whatever line each rank called from: other names, that name afterwards, and blocking calls go on."""

    def program(engine: Engine) -> None:
        rank = engine.communicator.rank
        if rank == 0:
            engine.refuse(Refusal("x", "allreduce", ConfigError("no such op")))
        else:
            error = caught(total, engine, "x", 1.0)
            assert isinstance(error, MismatchError)
            assert error.values[0] == "x: allreduce(refused: no such op)"
        assert total(engine, "y", 10.0) == 10 * size
        assert total(engine, "x", 100.0) == 100 * size
        assert_equal(engine.communicator.allreduce(np.ones(3)), np.full(3, float(size)))

    run_engines(size, program, config=SETTINGS)


def test_a_rank_that_shuts_down_after_a_call_that_it_could_not_make_says_so() -> None:
    """Rather than only that it has shut down: ranks that make the call would look for the wrong thing."""
    closed = Gate()

    def program(engine: Engine) -> None:
        if engine.communicator.rank == 0:
            engine.refuse(Refusal("x", "allreduce", ConfigError("no such op")))
            engine.close()
            closed.open()
        else:
            closed.wait()
            with pytest.raises(TransportError, match="no such op"):
                total(engine, "x")

    with_engines(2, program)


def test_a_refused_call_ends_if_the_ranks_cannot_tell_each_other_about_it() -> None:
    """With what went wrong then, as everything does."""

    def program(engine: Engine) -> None:
        if engine.communicator.rank == 1:
            engine.communicator.abort(TransportError("its network is gone"))
        name = unnamed("allreduce")
        with pytest.raises(TransportError, match="its network is gone"):
            engine.run(reduction(name, np.ones(3 + engine.communicator.rank)), unique=False)

    run_engines(2, program, config=SETTINGS)


@pytest.mark.parametrize("array", [np.zeros(3, "U1"), np.broadcast_to(np.zeros(1), 3), [1.0]])
def test_an_array_that_cannot_be_used_is_refused_at_the_call(array: Any) -> None:
    """Before any other rank hears of it."""
    with pytest.raises(UnsupportedBufferError):
        Reduction("x", "x", SUM, [array], [array])


@pytest.mark.parametrize("node_size", [None, 1])
def test_a_call_that_the_communicator_refuses_ends_alone(node_size: int | None) -> None:
    """The error is that of the communicator; later operations work."""

    def program(engine: Engine) -> None:
        def run(communicator: Communicator) -> Any:
            return communicator.allreduce(np.ones(4), "no such op")

        for _ in range(2):
            assert isinstance(caught(engine.run, CollectiveOp("c", "c", run)), ConfigError)
            assert total(engine, "x") == 2.0

    run_engines(2, program, node_size=node_size, config=SETTINGS)


# ---- failures ----


class BrokenError(Exception):
    """What a program's own code raises."""


def _broken() -> None:
    raise BrokenError("on purpose")


@pytest.mark.parametrize("node_size", [None, 1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_error_in_after_ends_its_operation_alone(size: int, node_size: int | None) -> None:
    """The data has come in by then, so the ranks are in step: what travels in the same group is not affected."""

    def program(engine: Engine) -> None:
        rank = engine.communicator.rank
        for _ in range(6):
            good = [reduction(name, np.ones(3)) for name in "ab"]
            bad = reduction("c", np.ones(3), after=_broken if rank == 0 else None)
            for each in (good[0], bad, good[1]):
                engine.submit(each)
            assert [engine.wait(each)[0][0] for each in good] == [size, size]
            if rank == 0:
                with pytest.raises(BrokenError):
                    engine.wait(bad)

    run_engines(size, program, node_size=node_size, config=SETTINGS)


@pytest.mark.parametrize("node_size", [None, 1])
@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_in_before_ends_the_operation_on_all_ranks(broken: int, node_size: int | None) -> None:
    """Here with that error, on the others with its reason, long before the time limit; the next operations work."""

    def program(engine: Engine) -> None:
        rank = engine.communicator.rank
        operation = submitted(engine, reduction("x", np.ones(3), before=_broken if rank == broken else None))
        with pytest.raises(BrokenError if rank == broken else MismatchError, match="on purpose"):
            engine.wait(operation)
        assert total(engine, "x") == 3.0

    run_engines(3, program, node_size=node_size, config=Config(timeout_s=300.0))


@pytest.mark.parametrize("node_size", [None, 1])
@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_in_a_call_ends_everything_at_once(broken: int, node_size: int | None) -> None:
    """Here with that error, on the others, which may wait for this rank's data, with what it says of it; long before
    the time limit.
    """
    all_know = threading.Barrier(3, timeout=20.0)

    def program(engine: Engine) -> None:
        rank = engine.communicator.rank

        def run(communicator: Communicator) -> None:
            if rank == broken:
                _broken()
            communicator.barrier()

        other = submitted(engine, reduction("never everywhere", np.ones(2))) if rank == broken else None
        operation = submitted(engine, CollectiveOp("x", "x", run))
        with pytest.raises(BrokenError if rank == broken else TransportError, match="on purpose"):
            engine.wait(operation)
        if other is not None:
            with pytest.raises(BrokenError):
                engine.wait(other)
        with pytest.raises(TransportError):
            total(engine, "y")
        all_know.wait()

    run_engines(3, program, node_size=node_size, config=Config(timeout_s=300.0))


# ---- calls that a rank cannot make, and calls that do not belong together ----


@pytest.mark.parametrize("name", ["x", unnamed("allreduce")])
@pytest.mark.parametrize("refusing", [0, 2])
def test_a_refusal_meets_the_call_of_the_others(name: str, refusing: int) -> None:
    """In its turn under its name; the rank that refuses waits for nobody."""

    def program(engine: Engine) -> list[object]:
        found: list[object] = []
        for step in range(4):
            operation: Operation = reduction(name, np.full(3, 10.0**step))
            if (engine.communicator.rank, step) == (refusing, 2):
                operation = Refusal(name, "allreduce", ValueError("not a tensor"))
            operation.stack = program_stack()  # one line for both, as where an argument is wrong
            if isinstance(operation, Refusal):
                engine.refuse(operation)
                continue
            try:
                found.append(engine.run(operation, unique=False)[0][0])
            except MismatchError as error:
                found.append(error.values[refusing])
        return found

    results = run_engines(3, program, config=SETTINGS)
    expected: list[object] = [3.0, 30.0, "allreduce(refused: ValueError: not a tensor)", 3000.0]
    if name == "x":
        expected[2] = f"x: {expected[2]}"
    for rank, found in enumerate(results):
        assert found == ([3.0, 30.0, 3000.0] if rank == refusing else expected)


@pytest.mark.parametrize(("size", "node_size"), LAYOUTS)
def test_ranks_may_differ_in_whether_they_reduce_in_place(size: int, node_size: int | None) -> None:
    """A small result that is new goes through a buffer, one in place does not; that is this rank's own matter."""

    def program(engine: Engine) -> Array:
        mine, others = (np.full((5, 3), engine.communicator.rank, np.float32) for _ in range(2))
        targets = [mine if engine.communicator.rank == 0 else others]
        engine.run(Reduction("x", "sum of one array", SUM, [mine], targets))
        return targets[0]

    for each in run_engines(size, program, node_size=node_size, config=SETTINGS):
        assert_equal(each, np.full((5, 3), sum(range(size)), np.float32))


def test_unnamed_operations_of_different_lines_end_everything() -> None:
    """A rank that has left out a call pairs its next one with another call: where they differ, nothing goes on."""

    def program(engine: Engine) -> MismatchError:
        name = unnamed("allreduce")
        error = None
        if engine.communicator.rank != 1:
            error = caught(engine.run, reduction(name, np.ones(3)), unique=False)
        error = error or caught(engine.run, reduction(name, np.ones(4)), unique=False)
        assert isinstance(error, MismatchError)
        assert not error.in_step
        with pytest.raises(TransportError, match="out of step"):
            total(engine, "named")
        return error

    errors = run_engines(3, program, config=SETTINGS)
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).count("test_engine.py:") == 2


def test_unnamed_operations_of_one_line_go_on() -> None:
    """Where all ranks made the same call with different arguments, each has one behind it that came to nothing."""

    def program(engine: Engine) -> list[object]:
        found: list[object] = []
        for step in range(3):
            count = 4 if (engine.communicator.rank, step) == (1, 1) else 3
            error = caught(engine.run, reduction(unnamed("allreduce"), np.ones(count)), unique=False)
            found.append(None if error is None else (type(error), error.in_step))
        return found

    assert run_engines(2, program, config=SETTINGS) == [[None, (MismatchError, True), None]] * 2


@pytest.mark.parametrize("call", ["submit", "run", "wait", "poll", "join", "close"])
def test_what_runs_inside_the_engine_cannot_wait_for_it(call: str) -> None:
    """A callback that calls the engine again, or a signal handler that interrupts it, is told so at once."""

    def program(engine: Engine) -> None:
        other = reduction("other", np.ones(1))
        calls: dict[str, Callable[[], object]] = {
            "submit": lambda: engine.submit(reduction("more", np.ones(1))),
            "run": lambda: engine.run(reduction("more", np.ones(1))),
            "wait": lambda: engine.wait(other),
            "poll": lambda: engine.poll(other),
            "join": engine.join,
            "close": engine.close,
        }
        errors: list[object] = []
        outer = reduction("outer", np.ones(3), before=lambda: errors.append(caught(calls[call])))
        assert engine.run(outer)[0][0] == 2.0
        assert isinstance(errors[0], ConfigError)
        assert "sets a flag" in str(errors[0])
        assert engine.run(other)[0][0] == 2.0

    run_engines(2, program, config=SETTINGS)


def test_a_join_has_a_time_limit() -> None:
    """It names the ranks that neither join nor submit anything, which hear of it."""
    gate = Gate()

    def program(engine: Engine) -> None:
        if engine.communicator.rank == 1:
            gate.wait()
        else:
            with pytest.raises(CollectiveTimeoutError, match="since rank 1 last submitted anything"):
                engine.wait(engine.join())
            gate.open()
        assert "join" in str(caught(total, engine, "x"))

    with_engines(2, program, clocks=clocks({0: 0.2}))


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("size", [2, 3])
def test_closing_ends_what_is_under_way(size: int, leaver: int) -> None:
    """In a `ShutdownError` here; there, because a rank is lost, also what is submitted later and those that joined."""
    gate = Gate()

    def program(engine: Engine) -> None:
        rank = engine.communicator.rank
        assert total(engine, "before") == size
        if rank == leaver:
            handle = submitted(engine, reduction("x", np.ones(3)))
            engine.close()
            engine.close()
            assert engine.poll(handle)
            with pytest.raises(ShutdownError):
                engine.wait(handle)
            for attempt in (engine.join, lambda: total(engine, "y")):
                with pytest.raises(ShutdownError):
                    attempt()
            gate.open()
            return
        early = submitted(engine, reduction("y", np.ones(3)))
        joined = engine.join() if rank == 2 else None
        with pytest.raises(PeerLostError, match=f"rank {leaver} is lost: it has shut down; this rank waits for 'y'"):
            engine.wait(early)
        if joined is not None:
            with pytest.raises(PeerLostError, match="'join'"):
                engine.wait(joined)
        gate.wait()
        with pytest.raises(PeerLostError):
            total(engine, "x")
        with pytest.raises(PeerLostError):
            engine.wait(engine.join())

    run_engines(size, program, config=Config(timeout_s=300.0))


def test_closing_while_other_threads_wait() -> None:
    """They return at once, with a `ShutdownError`."""

    def program(engine: Engine) -> None:
        errors: list[RingReduceError | None] = []
        handles = [submitted(engine, reduction(f"x{number}", np.ones(3))) for number in range(4)]
        threads = [
            threading.Thread(target=lambda handle=handle: errors.append(caught(engine.wait, handle)), daemon=True)
            for handle in handles
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        engine.close()
        for thread in threads:
            thread.join(20.0)
        assert [type(error) for error in errors] == [ShutdownError] * 8

    notes = MemoryWorld(2)  # whose rank 1 never says anything

    def silent(communicator: Communicator) -> None:
        if communicator.rank == 0:
            program(Engine(communicator, notes.messages(0)))

    run_ranks(2, silent, config=SETTINGS)


# ---- time ----


def clocks(steps: dict[int, float]) -> Callable[[int], Callable[[], float]]:
    """Return clocks that go on by some seconds each time that they are read: by none, where nothing is said."""

    def clock_of(rank: int) -> Callable[[], float]:
        ticks = itertools.count()
        return lambda: next(ticks) * steps.get(rank, 0.0)

    return clock_of


@pytest.mark.parametrize(("submitter", "missing"), [(0, "ranks 1-2"), (1, "rank 2")])
def test_the_time_limit_names_who_is_missing(submitter: int, missing: str) -> None:
    """Of the ranks that have not joined; the error is raised where the operation was submitted."""
    gate = Gate()

    def program(engine: Engine) -> None:
        rank = engine.communicator.rank
        if rank == submitter:
            with pytest.raises(CollectiveTimeoutError, match=f"for {missing} to submit 'x'"):
                engine.run(reduction("x", np.ones(3)))
            gate.open()
        elif rank == 0:
            engine.join()
        gate.wait()

    with_engines(3, program, clocks=clocks({0: 0.2}))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_wait_in_different_orders_get_an_error_long_before_the_time_limit(size: int) -> None:
    """It names what each waits for. Later operations match again; what was submitted besides goes on."""

    def program(engine: Engine) -> str:
        rank = engine.communicator.rank
        beside = submitted(engine, reduction("beside", np.ones(3)))
        error = caught(engine.run, reduction("b" if rank == 1 else "a", np.ones(3)))
        assert isinstance(error, MismatchError)
        assert error.in_step
        assert error.values == {each: f"waits for {'b' if each == 1 else 'a'!r}" for each in range(size)}
        assert total(engine, "a") == size
        assert engine.wait(beside)[0].tolist() == [size] * 3
        return str(error)

    (text,) = set(run_engines(size, program, config=Config(timeout_s=600.0)))
    assert text.count("test_engine.py:") == 2
    assert "in one order on all ranks" in text


def test_unnamed_operations_that_wait_in_different_orders_end_everything() -> None:
    """Of calls without a name nobody knows which of the later ones match."""

    def program(engine: Engine) -> None:
        name = unnamed("allreduce" if engine.communicator.rank else "broadcast")
        error = caught(engine.run, reduction(name, np.ones(3)), unique=False)
        assert isinstance(error, MismatchError)
        assert not error.in_step
        with pytest.raises(TransportError, match="out of step"):
            total(engine, "named")

    run_engines(3, program, config=Config(timeout_s=600.0))


def test_where_several_threads_wait_another_one_may_submit_what_a_rank_lacks() -> None:
    """Nothing ends early then, however long the ranks wait for different operations by the clock."""
    gates = [Gate(), Gate()]

    def clock_of(rank: int) -> Callable[[], float]:
        ticks = itertools.count()

        def clock() -> float:
            tick = next(ticks)
            if tick == 60:  # six seconds
                gates[rank].open()
            return tick * 0.1

        return clock

    def program(engine: Engine) -> list[float]:
        rank, totals = engine.communicator.rank, list[float]()
        engine.expect_any_order()

        def follow() -> None:
            gates[rank].wait()
            totals.append(total(engine, "ba"[rank]))

        other = threading.Thread(target=follow)
        other.start()
        totals.append(total(engine, "ab"[rank]))
        gates[rank].open()  # if the other rank's clock was ahead
        other.join()
        return totals

    assert with_engines(2, program, clocks=clock_of, config=Config(timeout_s=1e9)) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("submitter", [0, 1])
def test_after_a_time_out_nothing_runs(submitter: int) -> None:
    """The missing rank may be late or have left something out, so what belongs together is not known any more."""
    given_up = Gate()
    now = [0.0]

    def program(engine: Engine) -> None:
        rank = engine.communicator.rank
        if rank == submitter:
            waits = [submitted(engine, reduction(name, np.full(3, 100.0))) for name in ("x", "y")]
            while not engine.poll(waits[0]):
                now[0] += 1.0
            errors = [caught(engine.wait, each) for each in waits]
            given_up.open()
        else:
            given_up.wait()
            errors = [caught(total, engine, name, 10.0) for name in ("x", "y")]
        for error in errors:
            assert isinstance(error, CollectiveTimeoutError | TransportError)
        told = " ".join(map(str, errors))
        assert ("for rank" if rank == submitter else "for this rank to submit 'x'") in told
        assert isinstance(caught(total, engine, "x"), TransportError)

    with_engines(2, program, clocks=lambda rank: lambda: now[0] if rank == 0 else 0.0)


def _polled(engine: Engine, operation: Operation) -> None:
    """Poll until an operation is done, and raise its error."""
    engine.submit(operation)
    while not engine.poll(operation):
        pass
    engine.wait(operation)


@pytest.mark.parametrize(
    "wait",
    [
        lambda engine: engine.run(reduction("x", np.ones(3))),
        lambda engine: _polled(engine, reduction("x", np.ones(3))),
        lambda engine: engine.wait(engine.join()),
    ],
    ids=["operation", "poll", "join"],
)
def test_a_coordinator_that_says_nothing_is_given_up(wait: Callable[[Engine], object]) -> None:
    """Some time after the limit, when it should have said that a rank is missing."""
    notes = MemoryWorld(2)
    done = Gate()

    def program(communicator: Communicator) -> None:
        if communicator.rank == 1:
            engine = Engine(communicator, notes.messages(1), clock=clocks({1: 0.5})(1))
            with pytest.raises(PeerLostError, match="rank 0 is lost: it has sent nothing"):
                wait(engine)
            engine.close()
            done.open()
        done.wait()

    run_ranks(2, program, config=SETTINGS)


def test_a_coordinator_has_nothing_to_say_of_a_speculative_operation_that_others_leave_out() -> None:
    """However long that is: it is not given up, and what comes next is carried out."""
    waited, withdrawn = Gate(), Gate()
    now = [0.0]

    def advance() -> float:
        now[0] += 0.5
        if now[0] > 3 * SETTINGS.timeout_s:
            waited.open()
        return now[0]

    def program(engine: Engine) -> float:
        if engine.communicator.rank == 1:
            left = part("left", np.ones(3), needed=Needed.SOME)
            engine.submit(left)
            waited.wait()
            assert left.error is None
            engine.withdraw([left])
            withdrawn.open()
        else:
            withdrawn.wait()
        return total(engine, "x")

    assert with_engines(2, program, clocks=lambda rank: advance if rank == 1 else lambda: 0.0) == [2.0, 2.0]


def test_a_process_that_ended_is_found() -> None:
    """Whatever waits ends, without a thought of the time limit."""
    notes = MemoryWorld(2)

    def program(communicator: Communicator) -> None:
        if communicator.rank == 0:
            lost = lambda doing: PeerLostError(1, f"its process has ended; {doing}")  # noqa: E731
            engine = Engine(communicator, notes.messages(0), find_failed=lost, clock=clocks({0: 0.2})(0))
            with pytest.raises(PeerLostError, match="rank 1 is lost: its process has ended"):
                engine.run(reduction("x", np.ones(3)))
            engine.close()

    run_ranks(2, program, config=SETTINGS)


def test_a_stalled_operation_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Once, by the lowest rank that waits, with who is missing and where it was submitted."""
    gate = Gate()

    def program(engine: Engine) -> None:
        rank = engine.communicator.rank
        if rank in (1, 2):
            assert isinstance(caught(engine.run, reduction("slow", np.ones(3))), CollectiveTimeoutError)
            if rank == 1:
                gate.open()
        elif rank == 0:
            engine.join()
        gate.wait()

    with caplog.at_level(logging.WARNING, "ringreduce"):
        with_engines(4, program, clocks=clocks({0: 0.2}), config=Config(timeout_s=30.0, stall_warning_s=20.0))
    messages = [record.getMessage() for record in caplog.records if "stalled" in record.getMessage()]
    assert len(messages) == 1
    assert messages[0].startswith("stalled: 'slow' has waited for 2")
    assert "missing: rank 3" in messages[0]
    assert f"Submitted at {__file__}:" in messages[0]


# ---- threads ----


@pytest.mark.parametrize("size", [1, 3])
def test_many_threads_submit_and_wait(size: int) -> None:
    """Each gets its own results, whoever drives."""

    def program(engine: Engine) -> None:
        rank = engine.communicator.rank

        def work(thread: int) -> None:
            for turn in range(4):
                value = float(thread + turn + rank)
                handles = [
                    submitted(engine, reduction(f"{thread} {number}", np.full(3 + number, value)))
                    for number in range(3)
                ]
                answer = size * (thread + turn) + sum(range(size))
                if thread == 1:
                    while not engine.poll(handles[1]):
                        pass
                assert [engine.wait(handle)[0][0] for handle in handles] == [answer] * 3
                assert total(engine, f"{thread} run", value) == answer

        run_threads(4, work)

    run_engines(size, program, config=SETTINGS)


def test_several_threads_wait_for_one_operation() -> None:
    """All of them get its result."""

    def program(engine: Engine) -> None:
        for turn in range(20):
            handle = submitted(engine, reduction("x", np.full(3, float(turn))))
            assert run_threads(3, lambda _, handle=handle: engine.wait(handle)[0][0]) == [2.0 * turn] * 3

    run_engines(2, program, config=SETTINGS)


def test_operations_end_while_nobody_waits() -> None:
    """The progress thread carries them out; whoever looks finds them done."""

    def program(engine: Engine) -> None:
        assert engine.threaded
        for _ in range(20):
            done = Gate()
            handle = submitted(engine, reduction("x", np.ones(3), after=done.open))
            done.wait()
            engine.wait(handle)
            assert engine.poll(handle)

    run_engines(2, program, config=SETTINGS)


# ---- what waiting costs ----


class CountingChannel(Wrapper):
    """Counts the notes that a rank posts."""

    posted = 0

    def post(self, note: bytes, peer: int) -> None:
        self.posted += 1
        self._inner.post(note, peer)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_operation_waits_for_no_clock(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations begin and end while the engine's clock stands still and nobody sleeps: there are no cycles."""
    notes = MemoryWorld(size)

    def program(communicator: Communicator) -> None:
        engine = Engine(communicator, notes.messages(communicator.rank), threads=False, clock=lambda: 0.0)
        for turn in range(8):
            handles = [reduction(f"{turn % 2} {number}", np.ones(3)) for number in range(3)]
            for handle in handles:
                engine.submit(handle)
            assert [engine.wait(handle)[0].tolist() for handle in handles] == [[size] * 3] * 3
        engine.close()

    def never(*_: Any) -> NoReturn:
        raise AssertionError("slept")

    monkeypatch.setattr("ringreduce.engine.driver.time", SimpleNamespace(sleep=never))
    run_ranks(size, program, config=SETTINGS)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_wait_say_so_once(size: int) -> None:
    """However often they look and however long it takes, waiting ranks send nothing: there are no empty rounds."""
    notes = MemoryWorld(size)
    meeting = threading.Barrier(size, timeout=20.0)

    def program(communicator: Communicator) -> None:
        rank = communicator.rank
        counted = CountingChannel(notes.messages(rank))
        ticks = itertools.count()
        engine = Engine(communicator, counted, threads=False, clock=lambda: next(ticks) * 0.01)
        for turn in range(8):  # first the names are new, then all ranks know them
            mine = reduction(f"rank {rank}", np.ones(3))
            engine.submit(mine)
            for _ in range(2):  # what is still on its way from the last turn is heard first, and what comes of it
                for _ in range(50):
                    engine.poll(mine)
                meeting.wait()
            before = counted.posted
            for _ in range(300):
                assert not engine.poll(mine)
            assert counted.posted == before, f"in turn {turn}"
            meeting.wait()
            others = [reduction(f"rank {each}", np.ones(3)) for each in range(size) if each != rank]
            for other in others:
                engine.submit(other)
            for each in (mine, *others):
                assert engine.wait(each)[0].tolist() == [size] * 3
            meeting.wait()
        engine.close()

    run_ranks(size, program, config=SETTINGS)
