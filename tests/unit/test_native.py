"""Compiled loops: the same bits as NumPy's path, in memory of each kind; ranks that are late, and that err."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.buffers import DTYPES, native
from ringreduce.collectives.plans.node_allreduce import Mailed, TwoShot
from ringreduce.collectives.plans.node_movements import _Loads
from ringreduce.common.config import Config
from ringreduce.native import cache, layout
from ringreduce.native.cache import Loops, loops
from ringreduce.native.catalog import KERNELS
from ringreduce.testing import run_ranks
from ringreduce.transport.messages import Messages
from ringreduce.transport.shared import compiled, node
from ringreduce.transport.shared.threads import Threads
from ringreduce.transport.waiting import Waiter

pytest.importorskip("numba")

import llvmlite.binding as llvm
from llvmlite import ir

from ringreduce.native import intrinsics

CACHES = Config.from_environ().caches
COMPILED = Config(timeout_s=30.0, caches=CACHES)
NUMPY = Config(timeout_s=30.0, native=False)


def bits(dtype: str, count: int, rank: int) -> np.ndarray:
    """Return elements of all sizes, as they are stored; for floats, also infinity, -0 and the smallest."""
    draw = np.random.default_rng([count, rank])
    storage = DTYPES[dtype].storage
    if DTYPES[dtype].integral:
        limits = np.iinfo(storage)
        return draw.integers(limits.min, limits.max, count, storage, endpoint=True)
    if dtype == "bfloat16":
        found = (draw.standard_normal(count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        special = np.array([0x7F80, 0x8000, 0x0001, 0x7F7F, 0x3F81], np.uint16)
    else:
        found = (draw.standard_normal(count) * 10.0 ** draw.integers(-4, 4, count)).astype(storage)
        special = np.array([np.inf, -0.0, np.finfo(storage).tiny / 4, np.finfo(storage).max, 1.0], storage)
    for index, value in enumerate(special[: count // 2]):
        found[(3 * index + rank) % count] = value
    return found


def reduce(comm: rr.Communicator, dtype: str, op: str, count: int) -> list[bytes]:
    """Return results of an allreduce into memory of all kinds, four times each: the third call is compiled."""
    row = DTYPES[dtype]
    mine = native(bits(dtype, count, comm.rank), row, "numpy")
    private, shared = np.empty_like(mine), comm.empty(count, dtype)
    results = []
    for _ in range(4):
        results.append(comm.allreduce(mine, op=op))
        for source, target in (
            (mine, private),
            (mine, shared),
            (shared, private),
            (shared, shared),
            (private, private),
        ):
            if source is not mine:
                source[...] = mine
            comm.allreduce(source, out=target, op=op)
            results.append(target.copy())
        mixed = shared if comm.rank % 2 else private  # places of both kinds in one call
        mixed[...] = mine
        comm.allreduce(mixed, out=mixed, op=op)
        results.append(mixed.copy())
    return [each.tobytes() for each in results]


@pytest.mark.parametrize(("dtype", "op"), KERNELS, ids=" ".join)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_have_the_bits_of_numpys_path(dtype: str, op: str, size: int) -> None:
    """For few elements and many, odd counts, memory of all kinds; all results of all ranks are alike."""
    for count in (1, 77, 5001, 70001):
        expected = run_ranks(size, lambda comm, count=count: reduce(comm, dtype, op, count), config=NUMPY)
        found = run_ranks(size, lambda comm, count=count: reduce(comm, dtype, op, count), config=COMPILED)
        assert found == expected
        assert len({result for rank in found for result in rank}) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_nan_comes_of_nan_alone(dtype: str, op: str) -> None:
    """A NaN of any rank is one in the result, in its place; which NaN it is, nothing says."""

    def body(comm: rr.Communicator) -> np.ndarray:
        array = bits(dtype, 301, comm.rank)
        if array.dtype.kind == "f":
            array[comm.rank :: 17] = np.nan
        for _ in range(3):
            result = comm.allreduce(array, op=op)
        return result

    expected = run_ranks(3, body, config=NUMPY)
    for found in run_ranks(3, body, config=COMPILED):
        np.testing.assert_array_equal(found, expected[0])


def moved(comm: rr.Communicator, count: int) -> list[bytes]:
    """Return results of all collectives but allreduces, several times each, with as many rows, then with others."""
    size, rank = comm.size, comm.rank
    results: list[np.ndarray | None] = []
    for kind in (np.empty, comm.empty):
        mine = kind(size * count, "float32")
        for step in range(6):
            mine[...] = bits("float32", size * count, rank + 10 * step)
            rows = count if step < 4 else rank + 1
            root = step % 2
            splits = [(rank + to + step // 4) % 2 for to in range(size)]
            whole, part = kind(size * size * count, "float32"), kind(count, "float32")
            results += [
                comm.broadcast(mine, root=0),
                comm.broadcast(mine, root=root),
                comm.reduce(mine, root=0),
                comm.reduce(mine, op="max", root=root),
                comm.reduce_scatter(mine, op="average"),
                comm.reduce_scatter(mine, out=part),
                comm.allgather(mine[:rows]),
                comm.allgather(mine, out=whole),
                comm.gather(mine[:rows]),
                comm.scatter(mine.reshape(size, count)[:, :rows] if rank == 0 else None),
                comm.alltoall(mine, out=mine),
                comm.alltoall(mine[: sum(splits)], splits=splits)[0],
            ]
    return [b"" if each is None else np.ascontiguousarray(each).tobytes() for each in results]


@pytest.fixture(params=[False, True], ids=["near", "far"])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies for other ranks as where cores share a cache; or all of them past the caches, as where they do not."""
    make = compiled._PlanMemory.__init__

    def make_far(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self._memory[layout.FAR] = 1 << 40

    if request.param:
        monkeypatch.setattr(compiled._PlanMemory, "__init__", make_far)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 77, 5001, 30_011])
def test_all_collectives_have_the_bits_of_numpys_path(cores: None, size: int, count: int) -> None:
    """Calls that come again, and calls to which ranks then bring other rows."""
    expected = run_ranks(size, lambda comm: moved(comm, count), config=NUMPY)
    assert run_ranks(size, lambda comm: moved(comm, count), config=COMPILED) == expected


def test_a_result_may_overlap_the_input(cores: None) -> None:
    """As NumPy copies: the root's own part is moved within one array."""

    def body(comm: rr.Communicator) -> list[bytes]:
        count = 200_000
        results = []
        whole = np.empty(2 * count, np.float32)
        mine = comm.empty(count, "float32")
        for step in range(5):
            mine[...] = comm.rank + step
            whole[...] = np.arange(whole.size) + step
            if comm.rank == 1:
                comm.gather(whole[count - 1000 : 2 * count - 1000], root=1, out=whole)
                results.append(whole.tobytes())
            else:
                comm.gather(mine, root=1)
            small = np.arange(60, dtype=np.float32) + step
            results.append(comm.alltoall(small[:40], out=small[10:50]).tobytes())
            results.append(comm.allgather(small[5:15], out=small[: 10 * comm.size]).tobytes())
        return results

    assert run_ranks(2, body, config=COMPILED) == run_ranks(2, body, config=NUMPY)


def test_an_interrupt_takes_back_that_a_rank_is_at_the_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that is still at work would believe what it loads from arrays that are the program's again."""
    interrupted = threading.Event()
    found = loops(CACHES).library

    def run(*arguments: int) -> int:
        code = found.run(*arguments)
        if code == layout.LATE_BARRIER:
            raise KeyboardInterrupt
        return code

    monkeypatch.setattr(node, "loops", lambda folder, codecs=(): Loops(found._replace(run=run)))
    monkeypatch.setattr(compiled, "_POLLS", 10)

    def body(comm: rr.Communicator) -> bool:
        array = comm.empty(1001, "float64")
        plans = comm._context.plans
        board = comm._context.board
        if comm.rank == 1:  # It never comes to the barrier of the last call.
            for _ in range(3):
                array[...] = 1
                comm.allreduce(array, out=array)
            (plan,) = (each for each in plans._plans.values() if isinstance(each, TwoShot))
            board.enter(plan._entry)
            assert interrupted.wait(30)
            return board.memory.lines[0][layout.BARRIER_LINE][0] <= board.epoch
        for _ in range(3):
            array[...] = 1
            comm.allreduce(array, out=array)
        with pytest.raises(KeyboardInterrupt):
            comm.allreduce(array, out=array)
        interrupted.set()
        return True

    assert run_ranks(2, body, config=COMPILED) == [True, True]


def test_an_error_of_a_thread_is_raised_when_all_have_ended() -> None:
    """And the threads work on."""
    threads = Threads(4)
    assert threads.start()
    ended: list[int] = []

    def part(number: int) -> None:
        ended.append(number)
        if number == 2:
            raise OSError("part 2")

    for _ in range(3):
        ended.clear()
        with pytest.raises(OSError, match="part 2"):
            threads.run([partial(part, number) for number in range(4)])
        assert sorted(ended) == [0, 1, 2, 3]
    threads.close()


def test_calls_are_compiled() -> None:
    """Those by mailboxes, and those in memory that the ranks share."""

    def body(comm: rr.Communicator) -> tuple[bool, bool, list[bool]]:
        array = comm.empty(1_000_000, "float32")
        array[...] = 1
        for _ in range(2):
            comm.allreduce(array, out=array)
        comm.allreduce(np.ones(10, np.float32))
        plans = comm._context.plans._plans.values()
        (shared,) = (each for each in plans if isinstance(each, TwoShot))
        (mailed,) = (each for each in plans if isinstance(each, Mailed))
        small = np.ones(10, np.float32)
        for _ in range(2):
            comm.allgather(small)
            comm.allgather(array)
        loads = [each for each in plans if isinstance(each, _Loads)]
        return mailed._compiled is not None, shared._compiled is not None, [each._ready is not None for each in loads]

    for size in (2, 3):
        assert run_ranks(size, body, config=COMPILED) == [(True, True, [True, True])] * size
        assert run_ranks(size, body, config=NUMPY) == [(False, False, [False, False])] * size


@pytest.mark.parametrize("lacking", [0, 1])
def test_one_rank_without_numba_has_all_use_numpy(
    lacking: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranks of a node agree, and a line of the first says why, if it has it itself."""
    here = threading.local()
    monkeypatch.setattr(node, "loops", lambda folder, codecs=(): here.loops)
    found = loops(CACHES)

    def install(messages: Messages) -> Messages:
        here.loops = Loops(why_not="Numba is not installed") if messages.rank == lacking else found
        return messages

    def body(comm: rr.Communicator) -> str:
        comm.allreduce(np.ones(3))
        assert comm._context.node.loops.library is None
        return comm.explain(10)

    said = run_ranks(3, body, config=COMPILED, wrap=install)
    assert "NumPy copies and adds" in said[0]
    said = [record.message for record in caplog.records]
    assert any(f"rank {lacking}: Numba is not installed" in text for text in said) == (lacking != 0)


@pytest.mark.parametrize("count", [10, 100_000])
def test_ranks_that_call_something_else_are_named(count: int) -> None:
    """In a call that repeats a compiled one, and all can go on."""

    def body(comm: rr.Communicator) -> str:
        array = comm.empty(count, "float32")
        array[...] = 1
        small = comm.empty(count - 1, "float32")
        for _ in range(3):
            comm.allreduce(array, out=array)
        comm.allreduce(small, out=small)
        with pytest.raises(rr.MismatchError) as caught:
            comm.allreduce(array if comm.rank else small, out=array if comm.rank else small)
        comm.allreduce(array, out=array)
        return str(caught.value)

    (first, *others) = run_ranks(3, body, config=COMPILED)
    assert f"shape {count}" in first
    assert f"shape {count - 1}" in first
    assert others == [first] * 2


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_a_rank_that_does_not_come_is_named(kind: str) -> None:
    """By the error of NumPy's path, after its time limit, and other threads go on meanwhile."""
    alone = threading.Event()

    def body(comm: rr.Communicator) -> str:
        array = np.ones(10, np.float32) if kind == "private" else comm.empty(10, "float32")
        array[...] = 1
        for _ in range(3):
            comm.allreduce(array, out=array)
        if comm.rank == 1:
            assert alone.wait(30)
            return ""
        try:
            comm.allreduce(array, out=array)
        except rr.CollectiveTimeoutError as error:
            return str(error)
        finally:
            alone.set()
        return "no error"

    found = run_ranks(2, body, config=replace(COMPILED, timeout_s=0.3))
    assert "rank 1" in found[0]


@pytest.mark.parametrize(("size", "steps"), [(2, 250), (3, 60)])
def test_calls_go_on_where_they_were(size: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait of a compiled call returns at once, and is entered again where it was: no sum is made twice."""
    monkeypatch.setattr(compiled, "_HELD_POLLS", 0)
    monkeypatch.setattr(compiled, "_POLLS", 0)
    monkeypatch.setattr(compiled, "_AGAIN", 1 << 30)
    monkeypatch.setattr(Waiter, "crowded", property(lambda self: False, lambda self, value: None), raising=False)

    def body(comm: rr.Communicator) -> None:
        total = size * (size + 1) // 2
        arrays = [np.empty(count, np.int64) for count in (5, 90_001)]
        arrays += [comm.empty(count, "int64") for count in (5, 40_001)]
        for step in range(steps):
            for array in arrays:
                array[...] = (comm.rank + 1) * (step + 1)
                comm.allreduce(array, out=array)
                assert (array == total * (step + 1)).all()
                parts = comm.allgather(array[:3])
                assert (parts == total * (step + 1)).all()

    run_ranks(size, body, config=COMPILED)


def test_long_calls_return_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that signals are heard: a call that moves more than is done in a millisecond."""
    codes: list[int] = []
    found = loops(CACHES).library

    def run(*arguments: int) -> int:
        codes.append(found.run(*arguments))
        return codes[-1]

    monkeypatch.setattr(node, "loops", lambda folder, codecs=(): Loops(found._replace(run=run)))

    def body(comm: rr.Communicator) -> None:
        array = comm.empty(3_000_001, "float64")
        for step in range(4):
            array[...] = comm.rank + step
            comm.allreduce(array, out=array)
            assert (array == 1 + 2 * step).all()

    run_ranks(2, body, config=COMPILED)
    assert codes.count(layout.UNFINISHED) > 8


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("op", ["sum", "average"])
def test_threads_change_no_bit(count: int, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads of a rank take parts of large arrays, of any collective."""
    monkeypatch.setattr(compiled, "_SHARED_OUT_NBYTES", 1 << 10)

    def body(comm: rr.Communicator) -> list[bytes]:
        array, other = (comm.empty(900_003, "float32") for _ in range(2))
        results = []
        for step in range(4):
            array[...] = bits("float32", array.size, comm.rank + step)
            comm.allreduce(array, out=other, op=op)
            results += [other.tobytes(), comm.reduce_scatter(array, op=op).tobytes()]
            results += [comm.broadcast(array, root=1).tobytes(), comm.allgather(array).tobytes()]
            comm.allreduce(array, out=array, op=op)
            results.append(array.tobytes())
        return results

    expected = run_ranks(3, body, config=NUMPY)
    before = threading.active_count()
    assert run_ranks(3, body, config=replace(COMPILED, threads=count)) == expected
    for thread in threading.enumerate():
        if thread.name == "ringreduce adds":
            thread.join(10)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("triple", "flags"),
    [
        ("aarch64-unknown-linux-gnu", ["ldar", "stlr", "dmb", "isb", "stnp"]),
        ("x86_64-unknown-linux-gnu", ["pause", "movnt", "sfence"]),
    ],
)
def test_flags_are_ordered_on_all_processors(triple: str, flags: list[str]) -> None:
    """LLVM's assembly loads flags with acquire and stores them with release; a poll waits some cycles.

    Stores past the caches come before the next flag: by a fence on x86, elsewhere by the release itself.
    """
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = triple
    word = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(word, [word, word]), "flags")
    builder = ir.IRBuilder(function.append_basic_block())

    class Numba:
        get_dummy_value = staticmethod(lambda: ir.Constant(word, 0))

    def add(intrinsic: Any, *arguments: ir.Value) -> ir.Value:
        _, generate = intrinsic._defn(None, *arguments)
        return generate(Numba, builder, None, arguments)

    add(intrinsics.stream_line, *function.args)
    add(intrinsics.end_streams)
    add(intrinsics.store_release, function.args[0], function.args[1])
    add(intrinsics.pause)
    found = add(intrinsics.load_acquire, function.args[0])
    add(intrinsics.fence)
    builder.ret(found)
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=2, codemodel="small")
    assembly = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert [flag for flag in flags if flag not in assembly] == []


def test_what_cannot_be_compiled_is_not_tried_by_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is kept for a while, and settings of Numba do not matter."""
    monkeypatch.setattr(cache.sys, "executable", "/bin/false")
    reasons = []
    for number in range(2):
        cache.loops.cache_clear()
        reasons.append(loops(str(tmp_path)).why_not)
        (failed,) = (tmp_path / "native").glob("*.failed")
        failed.write_text(f"reason {number}")
    cache.loops.cache_clear()
    assert reasons == [
        "they cannot be loaded: OSError: the compiler says nothing",
        "they cannot be loaded: OSError: reason 0",
    ]


def test_what_is_loaded_is_ours(tmp_path: Path) -> None:
    """A folder that others may write to is not used; nor is a file there that is no object code; ranks add by NumPy."""
    assert loops(str(tmp_path / "none")).library is not None
    folder = tmp_path / "open" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert loops(str(tmp_path / "open")).library is None
    (path,) = (tmp_path / "none" / "native").glob("*.o")
    other = tmp_path / "broken" / "native"
    other.mkdir(parents=True, mode=0o700)
    (other / path.name).write_bytes(b"not object code")
    assert loops(str(tmp_path / "broken")).library is None
