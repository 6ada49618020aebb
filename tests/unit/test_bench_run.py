"""The measuring loop of ``bench`` on a world in memory: what it runs, counts and refuses."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from ringreduce.bench import bench
from ringreduce.bench.cases import COLLECTIVES, OPS, TYPES
from ringreduce.bench.measure import Contender, ProcessorTimes, Summary
from ringreduce.bench.results import Report, Settings
from ringreduce.cli.commands import ProgressLine
from ringreduce.common.errors import ConfigError
from ringreduce.testing import run_ranks

FAST = {"min_nbytes": 8, "max_nbytes": 512, "step_factor": 8, "iterations": 2, "warmup": 0}


class Faulty:
    """A communicator that adds one to the first element of what ``collective`` returns on ``rank``."""

    def __init__(self, communicator, collective: str, rank: int) -> None:
        self._communicator = communicator
        self._collective = collective
        self._at = rank

    def __getattr__(self, name: str):
        value = getattr(self._communicator, name)
        if name != self._collective or self._communicator.rank != self._at:
            return value

        def call(array, *arguments, **options):
            result = value(array, *arguments, **options)
            if array.dtype == np.float32:  # not the times and counts of the benchmark itself
                result.reshape(-1)[0] += 1
            return result

        return call


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


def test_bandwidth_in_the_layout_of_osu():
    """Size and megabytes per second."""
    reports, printed = run(Settings("bandwidth", format="osu", **FAST))
    lines = [line.split() for line in printed.splitlines() if not line.startswith("#")]
    assert "Bandwidth (MB/s)" in printed
    for line, row in zip(lines, reports[0].rows, strict=True):
        case, time = row.best.case, row.best.time
        assert float(line[1]) == pytest.approx(case.nbytes / time.mean, abs=0.01)


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
