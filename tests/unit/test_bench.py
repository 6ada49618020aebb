"""What ``bench`` measures and counts: sizes, names, bounds, known answers, times, and the loop on a world in memory."""

from __future__ import annotations

import gc
import math
import os
import threading
from importlib import import_module

import numpy as np
import pytest
from doubles import Faulty

from ringreduce.bench import bench
from ringreduce.bench.bounds import HostBounds, traffic
from ringreduce.bench.cases import COLLECTIVES, OPS, TYPES, Case, Reference, rest_value, sizes
from ringreduce.bench.measure import (
    CallStopwatch,
    Contender,
    ProcessorTimes,
    Summary,
    iterations_for,
    time_in_turn,
    turn_for,
    warmup_for,
)
from ringreduce.bench.results import Report, Settings
from ringreduce.cli.progress_bar import ProgressLine
from ringreduce.common.errors import ConfigError
from ringreduce.common.quantities import format_nbytes, plural
from ringreduce.common.reduce_ops import MAX
from ringreduce.testing import run_ranks


def make_case(collective: str, type_name: str = "float", nranks: int = 4, nbytes: int = 4096) -> Case:
    return Case.of_nbytes(COLLECTIVES[collective], type_name, "sum", 0, nranks, nbytes)


def test_sizes_grow_by_factor():
    """Without a step in bytes, each size is the one before times the factor; the last one is measured in any case."""
    assert list(sizes(8, 4096, None, 8)) == [8, 64, 512, 4096]
    assert list(sizes(8, 5000, None, 8)) == [8, 64, 512, 4096, 5000]
    assert list(sizes(8, 64 << 20, None, 8))[-2:] == [16 << 20, 64 << 20]
    assert list(sizes(8, 9, None, 8)) == [8, 9]
    assert list(sizes(8, 8, None, 8)) == [8]


def test_sizes_grow_by_steps():
    """A step in bytes is added instead."""
    assert list(sizes(8, 40, 16, 8)) == [8, 24, 40]
    assert list(sizes(8, 41, 16, 8)) == [8, 24, 40, 41]


def test_one_is_not_many():
    """A number stands before the word in its form."""
    assert [plural(number, "core") for number in (0, 1, 1.0, 2, 2.5)] == [
        *("0 cores", "1 core", "1 core", "2 cores", "2.5 cores")
    ]


@pytest.mark.parametrize(
    ("collective", "count", "given", "got"),
    [
        ("allreduce", 1024, 1024, 1024),
        ("broadcast", 1024, 1024, 1024),
        ("reduce_scatter", 256, 1024, 256),
        ("allgather", 256, 256, 1024),
        ("alltoall", 256, 1024, 1024),
        ("reduce", 1024, 1024, 1024),
        ("gather", 256, 256, 1024),
        ("scatter", 256, 1024, 256),
        ("sendrecv", 1024, 1024, 1024),
        ("latency", 1024, 1024, 1024),
        ("bandwidth", 1024, 1024, 1024),
    ],
)
def test_size_is_that_of_the_larger_side(collective: str, count: int, given: int, got: int):
    """4 KiB of float over 4 ranks: counts are per part where the buffer is divided, as in nccl-tests."""
    made = make_case(collective)
    assert (made.count, made.input_count, made.output_count, made.nbytes) == (count, given, got, 4096)


def test_sizes_are_rounded_down_to_equal_parts():
    """What cannot be divided equally is left off."""
    assert make_case("alltoall", nranks=3, nbytes=100).nbytes == 96


def test_no_case_is_empty():
    """A size below one element per rank becomes one element per rank."""
    assert make_case("allgather", "double", nranks=4, nbytes=8).nbytes == 32


def test_collectives_that_do_not_reduce_have_no_operation():
    """The operation of an allgather is none, whatever was asked for."""
    assert make_case("allgather").op_name is None
    assert make_case("allreduce").op_name == "sum"


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        *(("allreduce", 1.5), ("reduce_scatter", 0.75), ("allgather", 0.75), ("alltoall", 0.75), ("broadcast", 1.0)),
        *(("reduce", 1.0), ("gather", 0.75), ("scatter", 0.75)),
        *(("sendrecv", 1.0), ("latency", 1.0), ("bandwidth", 1.0)),
    ],
)
def test_bus_factor(collective: str, factor: float):
    """Bus bandwidth has the correction factors of nccl-tests; here for 4 ranks."""
    assert COLLECTIVES[collective].bus_factor(4) == factor


def test_types_have_the_names_of_nccl_tests_first():
    """``-d all`` means the first ten types; our own names of others follow."""
    nccl = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16"]
    assert list(TYPES)[:10] == nccl
    assert TYPES["half"].name == "float16"
    assert {"int16", "uint16", "bool", "complex64", "complex128"} == set(TYPES) - set(nccl)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(8, "8 B"), (65536, "64 KiB"), (3 << 19, "1.5 MiB"), (2 << 30, "2 GiB"), (1000, "1000 B")]
)
def test_format_nbytes(nbytes: int, text: str):
    """Sizes are written in the largest 1024-based unit that fits."""
    assert format_nbytes(nbytes) == text


@pytest.mark.parametrize("nbytes", [4, 8, 4096, (1 << 20) + 4])
def test_an_allreduce_changes_every_element_once(nbytes: int) -> None:
    for contender in traffic(make_case("allreduce", nranks=2, nbytes=nbytes)):
        contender.source.fill(3.0)
        assert np.isin(contender.call(), [-3.0, 4.0]).all()
        assert contender.source.nbytes == nbytes


@pytest.mark.parametrize(
    ("collective", "nbytes"),
    [
        ("allgather", 900),
        ("alltoall", 900),
        ("broadcast", 1200),
        ("reduce", 1200),
        ("gather", 900),
        ("reduce_scatter", 300),
    ],
)
def test_others_copy_what_comes_from_other_ranks(collective: str, nbytes: int) -> None:
    """Of 1200 bytes with 4 ranks; of a reduce_scatter its part of the result."""
    (contender,) = traffic(make_case(collective, nbytes=1200))
    contender.source.fill(7)
    copied = contender.call()
    assert copied.nbytes == nbytes
    assert (copied == 7).all()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_meet_before_they_move_anything(size: int) -> None:
    """Nobody returns before the slowest has come."""
    came = [0] * size

    def body(world):
        (copy,) = HostBounds(world).contenders(make_case("allgather", nranks=size, nbytes=64))
        for turn in range(1, 6):
            came[world.rank] = turn
            copy.call()
            assert min(came) >= turn
            world.barrier()

    run_ranks(size, body)


def test_one_node_has_no_links() -> None:
    assert run_ranks(
        2, lambda world: HostBounds(world).between_nodes_us(make_case("allreduce", nranks=2, nbytes=1 << 20))
    ) == [0.0, 0.0]


def test_bytes_between_nodes_follow_the_bus_factor_of_nodes() -> None:
    """3 nodes of 2 ranks: an allreduce takes 4/3 n across each link, an allgather 2/3 n, an alltoall 2/3 n per rank."""

    def body(world):
        bounds = HostBounds(world)
        latency, *found = (
            bounds.between_nodes_us(make_case(name, nranks=6, nbytes=nbytes))
            for name, nbytes in (
                ("broadcast", 24),
                ("broadcast", 24 << 20),
                ("allreduce", 24 << 20),
                ("allgather", 24 << 20),
                ("alltoall", 24 << 20),
            )
        )
        return [each - latency for each in found]

    for broadcast, *others in run_ranks(6, body, node_size=2):
        assert [each / broadcast for each in others] == pytest.approx([4 / 3, 2 / 3, 4 / 3], rel=1e-3)


RANKS = 3

NAMES = [name for name in TYPES if name != "bfloat16"]


def given_inputs(reference: Reference) -> list[np.ndarray]:
    """Return what each rank puts in."""
    case = reference.case
    arrays = [np.empty(case.input_count, case.dtype) for _ in range(case.nranks)]
    for rank, array in enumerate(arrays):
        reference.fill(array, rank)
    return arrays


def reduced(arrays: list[np.ndarray], op_name: str) -> np.ndarray:
    """Reduce element by element with Python's own numbers, which neither round (here) nor wrap around."""
    dtype = arrays[0].dtype
    if dtype.kind == "b":
        combine = any if op_name in ("sum", "max") else all
    else:
        combine = {
            "sum": sum,
            "prod": math.prod,
            "min": lambda column: min(column, key=ordered),
            "max": lambda column: max(column, key=ordered),
            "avg": average,
        }[op_name]
    results = [combine(column) for column in zip(*(array.tolist() for array in arrays), strict=True)]
    if dtype.kind in "iu":
        bits = 8 * dtype.itemsize
        wrapped = np.array([int(result) % (1 << bits) for result in results], np.dtype(f"u{dtype.itemsize}"))
        return wrapped.view(dtype)
    return np.array(results).astype(dtype)


def ordered(value: complex) -> tuple[float, float]:
    return (value.real, value.imag) if isinstance(value, complex) else (value, 0)


def average(column: tuple) -> complex:
    total = sum(column)
    return int(total / abs(total)) * (abs(total) // len(column)) if isinstance(total, int) and total else total / RANKS


def example(collective: str, type_name: str = "float", op_name: str = "sum", count: int = 40) -> Reference:
    return Reference(Case(COLLECTIVES[collective], type_name, op_name, 1, RANKS, count), seed=5)


@pytest.mark.parametrize("op_name", OPS)
@pytest.mark.parametrize("type_name", NAMES)
def test_the_true_result_is_right(type_name: str, op_name: str):
    """What Python's numbers give counts as right for every type and operation, and one changed element as wrong."""
    reference = example("allreduce", type_name, op_name)
    result = reduced(given_inputs(reference), op_name)
    assert reference.count_wrong(result, 0) == 0
    result[17] = not result[17] if result.dtype == bool else result[17] + 1
    assert reference.count_wrong(result, 0) == 1


@pytest.mark.parametrize("op_name", OPS)
def test_bfloat16_is_exact_or_rounded(op_name: str):
    """A result that was computed in float64 and rounded once counts as right."""
    pytest.importorskip("ml_dtypes")
    reference = example("allreduce", "bfloat16", op_name)
    wide = [array.astype(np.float64) for array in given_inputs(reference)]
    result = reduced(wide, op_name).astype(reference.case.dtype)
    assert reference.count_wrong(result, 2) == 0
    result[3] += 1
    assert reference.count_wrong(result, 2) == 1


def outputs(collective: str, given: list[np.ndarray]) -> list[np.ndarray | None]:
    """Return what each rank must get, of 40 elements for each part; rank 1 is the root."""
    total, everything = reduced(given, "sum"), np.concatenate(given)
    parts = [slice(40 * rank, 40 * rank + 40) for rank in range(RANKS)]
    return {
        "allreduce": [total] * RANKS,
        "reduce_scatter": [total[part] for part in parts],
        "allgather": [everything] * RANKS,
        "broadcast": [given[1]] * RANKS,
        "alltoall": [np.concatenate([each[part] for each in given]) for part in parts],
        "reduce": [None, total, None],
        "gather": [None, everything, None],
        "scatter": [given[1][part] for part in parts],
        "sendrecv": [given[rank - 1] for rank in range(RANKS)],
        "latency": [given[1], given[0], None],
        "bandwidth": [None, given[0], None],
    }[collective]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_results_of_all_collectives(collective: str):
    """A root has all of it, other ranks nothing; of messages each has what its peer has sent; all else is wrong."""
    given = given_inputs(reference := example(collective))
    for rank, right in enumerate(outputs(collective, given)):
        assert reference.count_wrong(right, rank) == 0
        if right is not None:
            assert reference.count_wrong(None, rank) == right.size
            assert reference.count_wrong(np.concatenate([right[:-1], right[-1:] + 1]), rank) == 1


def test_swapped_blocks_are_wrong():
    """Blocks of a power of two elements that took each other's place are noticed, also beyond the table's period."""
    reference = example("allreduce", "int64", count=1 << 18)
    result = sum(given_inputs(reference))
    assert reference.count_wrong(result, 0) == 0
    blocks = result.reshape(4, -1)
    blocks[[0, 3]] = blocks[[3, 0]]
    assert reference.count_wrong(result, 0) == 1 << 17


def test_a_result_of_the_wrong_length_is_wrong_throughout():
    """Every element that should be there counts."""
    assert example("allreduce").count_wrong(np.zeros(39, np.float32), 0) == 40


def test_nan_is_wrong():
    """NaN compares equal to nothing, also where there is a tolerance."""
    for op_name in ("sum", "avg"):
        assert example("allreduce", "float", op_name).count_wrong(np.full(40, np.nan, np.float32), 0) == 40


def test_inputs_differ():
    """Ranks and seeds give different inputs, so that an old result or a peer's cannot pass."""
    first, second, third = given_inputs(example("allreduce", count=1000))
    other = given_inputs(Reference(example("allreduce", count=1000).case, seed=6))[0]
    for array in (second, third, other):
        assert np.count_nonzero(first != array) > 800


@pytest.mark.parametrize("op_name", OPS)
def test_rest_value_stays(op_name: str):
    """Repeated in-place calls on the rest value keep it, so that timing never meets infinities."""
    value = rest_value(OPS[op_name])
    columns = [np.full(1, value, np.float32)] * RANKS
    assert reduced(columns, op_name).tolist() == [value]


class Log:
    """A world of two whose other rank takes ``other_s`` per call, and a record of what happens."""

    def __init__(self, other_s: float) -> None:
        self.events: list[str] = []
        self.now = 0.0
        self._other_s = other_s

    def barrier(self) -> None:
        self.events.append("barrier")

    def allreduce(self, array, op, *, out=None):
        assert op is MAX
        self.events.append("allreduce")
        return np.maximum(array, self._other_s)

    def contender(self, name: str, seconds: list[float]) -> Contender:
        """Return one whose calls take so long, one after the other."""
        durations = iter(seconds)

        def call() -> np.ndarray:
            assert not gc.isenabled() or name not in self.events
            self.events.append(name)
            self.now += next(durations)
            return np.empty(0)

        return Contender(name, np.empty(0), call)


def test_contenders_take_turns():
    """After the warm-up, turns alternate; each begins with two untimed calls, timed ones stand behind a barrier."""
    log = Log(0.0)
    contenders = [log.contender(name, [1.0] * 15) for name in "ab"]
    times = time_in_turn(log, contenders, 10, 1, watch=CallStopwatch(lambda: log.now))
    first, second = (["x", "x", *["barrier", "x"] * iterations] for iterations in (8, 2))
    turns = [event.replace("x", name) for turn in (first, second) for name in "ab" for event in turn]
    assert log.events == ["a", "b", *turns, "allreduce"]
    assert [row.tolist() for row in times] == [[1.0] * 10] * 2


def test_the_slowest_rank_counts():
    """An iteration takes as long as it took on the rank that was slowest in it."""
    log = Log(other_s=2.0)
    (times,) = time_in_turn(
        log, [log.contender("a", [9.0, 9.0, 1.0, 3.0, 1.5])], 3, 0, watch=CallStopwatch(lambda: log.now)
    )
    assert times.tolist() == [2.0, 3.0, 2.0]


def test_garbage_collection_is_on_again_afterwards():
    """The collector pauses while the clock runs, and only then."""
    assert gc.isenabled()
    log = Log(0.0)
    time_in_turn(log, [log.contender("a", [1.0] * 3)], 1, 0, watch=CallStopwatch(lambda: log.now))
    assert gc.isenabled()


def test_summary():
    """Seconds become microseconds; order does not matter."""
    summary = Summary.of_seconds(np.array([5, 1, 2, 3, 4]) * 1e-6)
    assert summary.iterations == 5
    assert (summary.min, summary.max) == pytest.approx((1, 5))
    assert (summary.median, summary.mean) == pytest.approx((3, 3))
    assert (summary.p90, summary.p95, summary.p99) == pytest.approx((4.6, 4.8, 4.96))
    assert summary.variation == pytest.approx(100 * 2**0.5 / 3)


def test_summary_of_one():
    """A single iteration is all there is to say."""
    summary = Summary.of_seconds(np.array([2e-6]))
    assert (summary.min, summary.median, summary.p95, summary.deviation) == pytest.approx((2, 2, 2, 0))


@pytest.mark.parametrize(
    ("nbytes", "iterations"), [(0, 300), (8, 300), (65536, 300), (1 << 20, 300), (16 << 20, 64), (64 << 20, 16)]
)
def test_iterations_follow_the_size(nbytes: int, iterations: int):
    """Small sizes get enough iterations for a steady median, large ones few enough to finish."""
    assert iterations_for(nbytes) == iterations


def test_warmup_follows_the_iterations():
    """Short calls are warmed up ten times, long ones three times."""
    assert (warmup_for(300), warmup_for(12)) == (10, 3)


def test_turns_follow_the_iterations():
    """About eight turns, each of at least eight timed calls."""
    assert (turn_for(300), turn_for(16), turn_for(1)) == (37, 8, 8)


@pytest.mark.parametrize(
    ("times", "part"),
    [
        ((100.0, 100.0, 100.0), 1.0),
        ((100.0, 100.0, 150.0), 0.5),
        ((100.0, 100.0, 200.0), 0.0),
        ((100.0, 100.0, 250.0), -0.5),  # they disturb each other
        ((100.0, 100.0, 90.0), 1.0),  # noise: no more than all of it can be hidden
        ((100.0, 40.0, 100.0), None),  # a computation that is too short, or too long, hides something else
        ((100.0, 210.0, 210.0), None),
    ],
)
def test_the_part_that_is_hidden(times: tuple[float, float, float], part: float | None) -> None:
    """As the OSU micro-benchmarks define it: what both together take longer than the computation, of the allreduce."""
    pytest.importorskip("torch")
    assert import_module("overlap").hidden(*times) == part


FAST = {"min_nbytes": 8, "max_nbytes": 512, "step_factor": 8, "iterations": 2, "warmup": 0}


def run(
    settings: Settings, ranks: int = 2, fault: str | None = None, progress=None, **options
) -> tuple[list[Report], str]:
    """Run the benchmark on ``ranks`` threads; return each rank's report and what was printed."""
    printed: list[str] = []

    def body(communicator):
        world = communicator if fault is None else Faulty(communicator, fault, ranks - 1)
        return bench.run(world, settings, printed.append, progress=progress, **options)

    return run_ranks(ranks, body), "".join(printed)


@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_right_results_pass(collective: str, shared: bool):
    """Every collective is measured, verified and found right, on both kinds of buffers."""
    reports, printed = run(Settings(collective, shared_buffers=shared, **FAST), ranks=3)
    assert [report.nwrong for report in reports] == [0, 0, 0]
    rows = [line for line in printed.splitlines() if not line.startswith("#")]
    assert [line.split()[0] for line in rows] == [str(row.out_of_place.case.nbytes) for row in reports[0].rows]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_new_results_are_measured_alone(collective: str):
    """Where results are to be new arrays there is no form in place, and the head says so."""
    reports, printed = run(Settings(collective, new_results=True, **FAST))
    assert [report.nwrong for report in reports] == [0, 0]
    assert all(row.in_place is None for row in reports[0].rows)
    assert "results in new arrays" in printed


@pytest.mark.parametrize("collective", [name for name, each in COLLECTIVES.items() if not each.of_two])
def test_wrong_results_fail(collective: str):
    """One wrong element on the last rank is counted on every rank, and shown."""
    settings = Settings(collective, root=1, **{**FAST, "max_nbytes": 8, "check": 2})
    reports, printed = run(settings, fault=collective)
    results = 2 if COLLECTIVES[collective].in_place else 1
    expected = results * 3  # verified twice before and once after the timing
    assert [report.nwrong for report in reports] == [expected, expected]
    assert f"# Out of bounds values : {expected} FAILED\n" in printed


def test_unverified_results_are_not_called_right():
    """With ``-c 0`` nothing is verified: N/A in the table."""
    reports, printed = run(Settings("allreduce", check=0, **FAST), fault="allreduce")
    assert reports[0].nwrong is None
    assert "# Out of bounds values : N/A\n" in printed


def test_all_types_and_operations():
    """``-d all -o all``: every type of nccl-tests with every operation, every result right."""
    pytest.importorskip("ml_dtypes")
    settings = Settings("allreduce", types=tuple(TYPES), ops=tuple(OPS), **{**FAST, "min_nbytes": 512})
    reports, _ = run(settings)
    assert {(row.best.case.type_name, row.best.case.op_name, row.best.nwrong) for row in reports[0].rows} == {
        (type_name, op_name, 0) for type_name in TYPES for op_name in OPS
    }


def test_calls_in_a_row_and_cycles():
    """``-m`` times several calls as one and divides; ``-N`` does all again; what is done is told."""
    told = []
    settings = Settings("allreduce", aggregated=3, cycles=2, **FAST)
    reports, printed = run(settings, progress=lambda *done: told.append(done))
    assert reports[0].nwrong == 0
    assert [row.best.case.nbytes for row in reports[0].rows] == [8, 64, 512] * 2
    assert "agg iters: 3" in printed
    assert sorted(told) == sorted([(done, 6) for done in range(1, 7)] * 2)


def test_repeated_calls():
    """The result of the last is returned; once is the contender itself."""
    calls = iter(range(10))
    once = Contender("ours", np.empty(0), lambda: next(calls))
    assert once.repeated(1) is once
    assert [once.repeated(3).call(), next(calls)] == [2, 3]


def test_progress_is_told_now_and_then(capsys: pytest.CaptureFixture[str]):
    """Not with each part, not at the end, and with what is left of the time at the same pace."""
    now = [0.0]
    progress = ProgressLine("bench allreduce", lambda: now[0])
    for done in range(1, 6):
        now[0] += 3.0
        progress(done, 5)
    assert capsys.readouterr().err == (
        "ringreduce: bench allreduce: 2 of 5 measured, about 9 s to go\n"
        "ringreduce: bench allreduce: 4 of 5 measured, about 3 s to go\n"
    )


def test_all_algorithms():
    """``--algorithm all`` gives one row per size for each algorithm that the communicator offers."""
    reports, _ = run(Settings("allreduce", algorithm="all", **FAST), ranks=4)
    offered = run_ranks(4, lambda communicator: communicator.algorithms("allreduce"))[0]
    assert [row.best.algorithm for row in reports[0].rows] == offered * 3
    assert reports[0].nwrong == 0


def test_auto_names_what_ran():
    """A row of ``auto`` shows the algorithm that was chosen and the transport that carried it."""
    reports, _ = run(Settings("allreduce", **FAST))
    best = reports[0].rows[0].best
    assert best.algorithm != "auto"
    assert best.transport


def test_bounds_are_measured():
    """Every size of a collective has a bound, and its in-place result a share of it; messages have none."""
    reports, _ = run(Settings("allreduce", **FAST))
    assert [bound.nbytes for bound in reports[0].bounds] == [8, 64, 512]
    assert all(bound.time_us > 0 for bound in reports[0].bounds)
    assert all(row.best.bound_share > 0 and row.out_of_place.bound_share is None for row in reports[0].rows)
    reports, _ = run(Settings("alltoall", **FAST))
    assert all(row.best.bound_share > 0 for row in reports[0].rows)
    reports, _ = run(Settings("latency", **FAST))
    assert (reports[0].bounds, reports[0].rows[0].best.bound_share) == ((), None)


def test_one_rank_has_no_bound():
    """Its result is its input: nothing is read or written, so a share of what memory allows says nothing."""
    reports, printed = run(Settings("allreduce", **FAST), ranks=1)
    assert reports[0].bounds == ()
    assert [result.bound_share for result in reports[0].results] == [None] * 6
    assert reports[0].as_dict()["bound"] is None
    rows = [line.split() for line in printed.splitlines() if not line.startswith("#")]
    assert [row[-1] for row in rows] == ["N/A"] * 3
    assert not any(line.startswith("# Bound") for line in printed.splitlines())


def test_sizes_below_one_element_per_rank_are_measured_once():
    """8 and 16 bytes of double over 4 ranks are the same case."""
    reports, _ = run(Settings("allgather", types=("double",), **{**FAST, "step_factor": 2, "max_nbytes": 64}), ranks=4)
    assert [row.best.case.nbytes for row in reports[0].rows] == [32, 64]


def test_messages_between_two_ranks_take_two():
    """Latency and bandwidth of one rank are refused."""
    for name in ("latency", "bandwidth"):
        with pytest.raises(ConfigError, match=f"{name} takes two ranks"):
            run(Settings(name, **FAST), ranks=1)


def test_times_are_those_of_one_message():
    """Where a call is several messages, figures are of one: half of there and back, a sixteenth of a window."""
    assert Summary.of_seconds(np.array([8e-6, 16e-6]), COLLECTIVES["latency"].messages).max == pytest.approx(8.0)
    assert Summary.of_seconds(np.array([16e-6]), COLLECTIVES["bandwidth"].messages).median == pytest.approx(1.0)


@pytest.mark.parametrize(("taken", "busy"), [(0.1, False), (1.5, True)])
def test_a_busy_machine_is_told(taken: float, busy: bool):
    """All ranks report what others took of their machine's time while they measured; the JSON report has it."""
    begun: set[int] = set()  # the threads that have looked once

    def read() -> ProcessorTimes:
        first = threading.get_ident() not in begun
        begun.add(threading.get_ident())
        return ProcessorTimes(0.0, 0.0, 0.0, 7) if first else ProcessorTimes(1.0, taken, 0.0, 7)

    reports, _ = run(Settings("allgather", **FAST), read=read)
    assert len({report.busy for report in reports}) == 1
    assert ("other processes took 1.50 cores on average" in reports[0].busy) == busy
    assert reports[0].as_dict()["busy"] == (reports[0].busy or None)


def test_cores_are_those_of_the_machine():
    """A launcher binds ranks to some cores; the machine has them all."""
    free = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(free)})
        (report, *_), _ = run(Settings("allgather", **FAST), ranks=1)
    finally:
        os.sched_setaffinity(0, free)
    assert report.machine.cores == os.cpu_count()
