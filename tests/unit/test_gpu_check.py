"""scripts/gpu_check and ``bench --device cuda`` as far as that goes without a GPU: on one that is in host memory."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_doubles.driver import HostArray, HostDriver, HostMachine
from gpu_doubles.ranks import run_gpu_ranks

import ringreduce as rr
from ringreduce.bench import bench
from ringreduce.bench.cases import COLLECTIVES
from ringreduce.bench.measure import Contender
from ringreduce.bench.peers import StagedMpi
from ringreduce.bench.places import OnDevice
from ringreduce.bench.results import Report, Settings
from ringreduce.buffers.device_driver import Driver
from ringreduce.common.config import Config
from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.inventory import Inventory
from ringreduce.testing import run_ranks

with contextlib.suppress(ImportError):
    import torch  # noqa: F401  # here, since threads that import it at once see half of it

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:  # scripts, which belong to no package
    gpu_check = importlib.import_module("gpu_check")
    collectives, judges, kernels, launching, report, speed, workers = (
        importlib.import_module(f"gpu.{name}")
        for name in ("collectives", "judges", "kernels", "launching", "report", "speed", "workers")
    )
finally:
    sys.path.remove(BENCHMARKS)

Check, Outcome = report.Check, report.Outcome
#: What HostArrays can do: their library makes no new arrays.
WITH_OUT = ("allreduce", "reduce_scatter", "broadcast")


class FlatArray(HostArray):
    """A host array with what else benchmarks do with CuPy's: slices and views, which are the same memory."""

    def __getitem__(self, part: slice) -> FlatArray:
        start, stop, _ = part.indices(self.size)
        return self._at(self.address + start * self.dtype.itemsize, stop - start, self.dtype)

    def view(self, dtype: Any) -> FlatArray:
        return self._at(self.address, self.nbytes // np.dtype(dtype).itemsize, np.dtype(dtype))

    def fill(self, value: int) -> None:
        self.driver.view(self.address, self.nbytes).view(self.dtype)[:] = value

    def _at(self, address: int, count: int, dtype: np.dtype[Any]) -> FlatArray:
        array = FlatArray(self.driver, address, (count,), dtype)
        array.stream = self.stream
        array.keeps = self  # type: ignore[attr-defined]
        return array


class HostTools:
    """What measuring takes, for a host driver."""

    def __init__(self, driver: HostDriver) -> None:
        self.driver: Driver = driver
        self._host = driver

    def empty(self, nbytes: int) -> FlatArray:
        return FlatArray(self._host, self._host.allocate(nbytes), (nbytes,), np.uint8)

    def ready(self) -> None:
        event = self._host.make_event()
        self._host.record(event, 0)
        self._host.synchronize(event)
        self._host.free_event(event)

    def time(self, call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        self.ready()
        return time.perf_counter() - begin

    @contextlib.contextmanager
    def on(self, stream: int, *arrays: FlatArray) -> Iterator[None]:
        for array in arrays:
            array.stream = stream
        yield
        for array in arrays:
            array.stream = None


class HostPlace(OnDevice):
    """Arrays of a host driver; shared ones in the arena of the communicator's ranks."""

    def empty(self, nbytes: int, *, shared: bool) -> Any:
        devices = self._world.gpu._devices
        if not shared or devices is None:
            return self._tools.empty(nbytes)
        block = devices.arena.allocate(nbytes)
        array = FlatArray(self.driver, block.address, (nbytes,), np.uint8)  # type: ignore[arg-type]
        array.keeps = block  # type: ignore[attr-defined]
        return array


def on_gpu(size: int, work: Callable[[Any, HostPlace, HostTools], Any], *, shared: bool = True, seed: int = 0) -> Any:
    """Run ``work(world, place, tools)`` on ranks that share a GPU in host memory; return what they return."""

    def run(world: rr.Communicator, driver: HostDriver) -> Any:
        tools = HostTools(driver)
        place = HostPlace(world, tools)
        world.gpu.use(None)
        return work(world, place, tools)

    return run_gpu_ranks(size, run, exports=shared, seed=seed, nbytes=1 << 31, config=Config(timeout_s=20.0))


# ---- the benchmark on a GPU ----


def settings(collective: str, **others: Any) -> Settings:
    fast = {"min_nbytes": 64, "max_nbytes": 4096, "step_factor": 64, "iterations": 2, "warmup": 0, "device": "cuda"}
    return Settings(collective, **{**fast, **others})


@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
@pytest.mark.parametrize("collective", WITH_OUT)
def test_the_benchmark_verifies_results_on_a_gpu(collective: str, shared: bool) -> None:
    """Collectives are right, named by what ran, and measured against the copy within the GPU."""
    printed: list[str] = []

    def work(world: Any, place: HostPlace, tools: HostTools) -> Report:
        wanted = settings(collective, types=("float", "bfloat16", "int32"), ops=("sum", "avg"), shared_buffers=shared)
        return bench.run(world, wanted, printed.append, place)

    found = on_gpu(3, work)[0]
    assert found.nwrong == 0
    path = {(each.case.type_name, each.case.op_name): (each.algorithm, each.transport) for each in found.results}
    if collective == "allreduce":
        assert path["float", "sum"] == path["bfloat16", "avg"] == ("kernels", "device")
        assert path["int32", "avg"][1] == "staged"
        assert all(row.in_place.bound_share > 0 for row in found.rows)
        assert "copy 4 KiB within the GPU once for each of its ranks" in "".join(printed)
    else:
        assert {transport for _, transport in path.values()} == {"staged"}
    assert "GPU in host memory, 3 ranks on a GPU" in "".join(printed)


def test_the_benchmark_counts_what_is_not_written_on_a_gpu() -> None:
    """A collective that leaves its output alone is wrong throughout, as outputs are poisoned."""

    def work(world: Any, place: HostPlace, tools: HostTools) -> int:
        counter = collectives.Counter(world, place, 1)
        case = bench.Case(COLLECTIVES["broadcast"], "float", None, 0, world.size, 1003)
        array, out = (place.new(1003, case.dtype) for _ in range(2))
        return counter.wrong(case, Contender("idle", array, lambda: out, out))

    assert on_gpu(2, work) == [2006, 2006]


def test_the_bound_is_a_copy_for_each_rank_of_the_gpu() -> None:
    """One of the ranks that share a GPU copies, as often as there are such ranks; the others do nothing."""

    def work(world: Any, place: HostPlace, tools: HostTools) -> int:
        driver: Any = place.driver
        (way,) = place.bounds(4096)
        driver.log.clear()
        way.call()
        return sum(line.startswith("copy 4096") for line in driver.log)

    assert on_gpu(3, work) == [3, 0, 0]


def test_mpi_by_hand_goes_down_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer copies down, runs the host's collective and copies up; what it pinned it unpins."""

    class Doubling:
        def __init__(self, world: Any) -> None:
            self.closed = False

        def contender(self, case: Any, **options: Any) -> Contender:
            array = np.zeros(case.input_count, case.dtype)

            def double() -> np.ndarray:
                array[:] *= 2
                return array

            return Contender("mpi", array, double)

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr("ringreduce.bench.peers.MpiPeer", Doubling)
    driver = HostDriver()
    driver.make_stream()

    def run(world: Any) -> None:
        place = HostPlace(world, HostTools(driver))
        peer = StagedMpi(world, place)
        contender = peer.contender(bench.Case(COLLECTIVES["allreduce"], "float", "sum", 0, 1, 5))
        assert contender is not None
        place.store(contender.source, lambda values: values.fill(3))
        assert place.fetch(contender.call()).tolist() == [6] * 5
        peer.close()

    run_ranks(1, run)
    assert sum(line.startswith("register") for line in driver.log) == 1
    assert sum(line.startswith("unregister") for line in driver.log) == 1


def test_the_benchmark_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CuPy, arrays on a GPU are refused with what to install."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedBufferError, match=r"pip install 'cupy-cuda12x\[ctk\]'"):
        run_ranks(1, lambda world: bench.run(world, settings("allreduce"), print))


# ---- the checks themselves ----


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_right_collectives_pass(size: int) -> None:
    """Every check of results, of staging and of streams passes where nothing is wrong."""

    def work(world: Any, place: HostPlace, tools: HostTools) -> list[Any]:
        counter = collectives.Counter(world, place, 7, counts=(1, 1003), large=20_003)
        found = list(collectives.check_results(counter, WITH_OUT))
        found += collectives.check_staging(counter)
        return [*found, collectives.check_streams(counter, tools.on, count=3001, noise=1 << 14, turns=4)]

    for found in on_gpu(size, work):
        assert [check.name for check in found if not check.passed] == [], found


@pytest.mark.parametrize("seed", range(4))
def test_a_missing_wait_is_seen(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stream does not wait for an event, the check of streams fails."""

    def work(world: Any, place: HostPlace, tools: HostTools) -> bool:
        counter = collectives.Counter(world, place, 7)
        return bool(collectives.check_streams(counter, tools.on, count=301, noise=1 << 12, turns=4).passed)

    assert on_gpu(2, work, seed=seed) == [True, True]
    monkeypatch.setattr(HostDriver, "wait", lambda self, stream, event: None)
    assert on_gpu(2, work, seed=seed) == [False, False]


def test_torch_tensors_are_checked_as_they_are_on_a_gpu() -> None:
    """The check of tensors passes on the CPU, where tensors of all types and layouts are known to be right."""
    pytest.importorskip("torch")

    def work(world: Any) -> list[Any]:
        counter = collectives.Counter(world, None, 3)
        return list(collectives.check_torch(counter, "cpu"))

    for found in run_ranks(2, work):
        assert [check for check in found if not check.passed] == []
        assert len(found) == 6


def test_right_kernels_pass_and_wrong_ones_are_named() -> None:
    """Reductions and the kernels that meet are right on the host; one that adds too much is named."""
    assert [check.passed for check in kernels.check_kernels(HostDriver(), 1, 1003)] == [True] * 2
    machine = HostMachine()
    right = machine.families["reduce"]

    def wrong(name: str) -> Any:
        return right(name.replace("<int16,sum>", "<int16,max>"))

    machine.families["reduce"] = wrong
    found = {check.name: check for check in kernels.check_kernels(HostDriver(machine), 1, 1003)}
    assert found["kernels of the family reduce equal NumPy"].detail == "wrong: combine<int16,sum>"


def test_speeds_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allreduces give figures, shares of bounds and a verdict on each; without peers Gloo's comparison fails."""
    monkeypatch.setattr(bench, "PEERS", {"mpi": NoPeer, "gloo": NoPeer})

    def work(world: Any, place: HostPlace, tools: HostTools) -> list[list[Any]]:
        checks = (speed.check_one_kernel, 1 << 20), (speed.check_staged, 1 << 16)
        return [list(check(world, place, lambda text: None, nbytes)) for check, nbytes in checks]

    one_kernel, staged = on_gpu(2, work)[0]
    by_end = {check.name.rpartition(": ")[2]: check for check in one_kernel}
    assert by_end["results"].passed
    assert by_end["by kernels"].passed
    share = by_end["share of 2 P n / copy bandwidth"]
    assert share.target == 0.7
    assert share.figure > 0
    assert not by_end["times as fast as torch's Gloo on CUDA tensors"].passed
    assert by_end["times as fast as MPI by hand through pinned memory"].passed
    assert any(check.target == 0.7 and check.figure > 0 for check in staged)
    assert staged[0].passed


class NoPeer:
    """A library that can do nothing."""

    def __init__(self, world: Any, place: Any) -> None:
        pass

    def contender(self, case: Any, **options: Any) -> None:
        return None

    def close(self) -> None:
        pass


# ---- the report ----


def test_bounds_are_what_the_formulas_say() -> None:
    """An allreduce on one GPU reads and writes P n bytes; through the host, P n bytes go each way."""
    assert report.allreduce_bound_s(1 << 30, 4, 4e12) == pytest.approx(2 * 4 * 2**30 / 4e12)
    assert report.staged_bound_s(10**9, 2, 50e9) == pytest.approx(0.04)


@pytest.mark.parametrize(("figure", "passed"), [(0.69, False), (0.7, True), (math.nan, False), (math.inf, True)])
def test_figures_reach_their_targets(figure: float, passed: bool) -> None:
    """A figure passes from its target on; none passes that is not a number."""
    assert Check.at_least("share", figure, 0.7, "").passed is passed


GOOD = json.dumps({"checks": [{"name": "a", "passed": True}], "versions": {"NumPy": "2"}})
BAD = json.dumps({"checks": [{"name": "a", "passed": True}, {"name": "b", "passed": False, "detail": "3 wrong"}]})


@pytest.mark.parametrize(
    ("returncode", "found", "passed", "problem"),
    [
        (0, GOOD, True, ""),
        (0, BAD, False, ""),
        (1, GOOD, False, "exit status 1: the end"),
        (None, GOOD, False, "did not end in time: the end"),
        (0, None, False, "left no report"),
        (0, GOOD[:-5], False, "its report is cut off"),
        (0, '{"checks": [], "versions": {}}', False, ""),
    ],
)
def test_verdicts(returncode: int | None, found: str | None, passed: bool, problem: str) -> None:
    """A part passes only if it ended well, in time, and found something, all of it right."""
    outcome = report.judge("part", returncode, 1.0, found, "\nthe end\n")
    assert (outcome.passed, outcome.problem) == (passed, problem)


def test_the_reason_of_a_failure_is_not_the_launchers() -> None:
    """Of what a launcher and its ranks say, the first error's line is repeated."""
    said = "Traceback ...\n  File x\nringreduce.TransportError: lost\n-----\nprterun ended it\n-----\n"
    assert report.judge("part", 1, 1.0, None, said).problem == "exit status 1: ringreduce.TransportError: lost"
    assert report.judge("part", 1, 1.0, None, "").problem == "exit status 1: it said nothing"


def test_reports_say_what_failed_and_what_was_not_run() -> None:
    """Both reports have every verdict, every figure beside its target, and what one GPU cannot show."""
    outcomes = [
        Outcome("one", "", 3.0, (Check.at_least("share", 0.8, 0.7, "", "a | b"), Check.stated("rate", 4.0, "GB/s"))),
        Outcome("two", "", 4.0, (Check("bits", False, "7 wrong"),)),
        Outcome("three", "not run: there is no mpirun", 0.0),
    ]
    machine = {"gpu": "NVIDIA X", "date": "2026-01-02", "driver": "1"}
    text = report.as_markdown(outcomes, machine, ["several nodes"])
    for line in (
        "1 of 3 parts passed.",
        "| one | passed | 2 of 2 | 3 |",
        "| share | 0.8  | ≥ 0.7  | reached | a / b |",
        "- two: bits: 7 wrong",
        "- three: not run: there is no mpirun",
        "- driver: 1",
        "- several nodes",
    ):
        assert line in text.splitlines(), text
    content = json.loads(report.as_json(outcomes, machine, ["several nodes"]))
    assert content["passed"] is False
    assert [part["passed"] for part in content["parts"]] == [True, False, False]
    assert report.slug("NVIDIA H200 (x2)") == "nvidia-h200-x2"


# ---- the running of parts ----


def launcher(folder: Path, text: str) -> str:
    """Make a script that stands for mpirun in a folder's bin; return its path."""
    path = folder / "bin" / "mpirun"
    for each in (path.parent, folder / "lib"):
        each.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def script(folder: Path, text: str) -> list[str]:
    path = folder / "part.py"
    path.write_text(text, encoding="utf-8")
    return [sys.executable, str(path)]


def test_a_part_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """What outlasts its limit is stopped with its children, and there is no exit status."""
    lock = tmp_path / "lock"
    endless = f"""
import fcntl, signal, subprocess, sys
held = open({str(lock)!r}, "w")
fcntl.flock(held, fcntl.LOCK_EX)
stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
subprocess.Popen([sys.executable, "-c", stubborn], pass_fds=[held.fileno()])
signal.pause()
"""
    returncode, _ = launching.run(script(tmp_path, endless), 2.0, os.environ, tmp_path / "log")
    assert returncode is None
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # which the last of them lets go of as it ends


@dataclass(frozen=True)
class Snippet(gpu_check.Part):  # type: ignore[misc, name-defined]
    """A part that is a few words of Python; ``found`` is where it leaves what it finds."""

    worker: str = "snippet"
    ranks: int = 0
    limit_s: float = 30.0
    code: str = ""

    def command(self, mpirun: str | None, found: Path, limit_s: float) -> list[str]:
        return [sys.executable, "-c", f"from pathlib import Path; found = Path({str(found)!r}); {self.code}"]


INVENTORY = Inventory("580.1", 13000, ("cupy-cuda13x 14",), 13000, 0, (HostDriver().device,))


def test_a_failing_part_does_not_stop_the_others(tmp_path: Path) -> None:
    """All parts run, both reports are written, and the exit status is 1 because one failed, 0 if none did."""
    parts = [Snippet("bad", code="raise SystemExit('broken')"), Snippet("good", code=f"found.write_text({GOOD!r})")]
    assert gpu_check.check(parts, INVENTORY, tmp_path / "results") == 1
    (path,) = (tmp_path / "results").glob("*.json")
    content = json.loads(path.read_text())
    assert [part["passed"] for part in content["parts"]] == [False, True]
    assert "broken" in content["parts"][0]["problem"]
    assert "gpu-in-host-memory" in path.name
    assert path.with_suffix(".md").exists()
    assert gpu_check.check(parts[1:], INVENTORY, tmp_path / "results") == 0


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """One line, and the exit status 2."""
    (tmp_path / "cupy.py").write_text("raise ImportError('libcuda.so.1 is missing')", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(BENCHMARKS).parent)])}
    done = subprocess.run(
        [sys.executable, f"{BENCHMARKS}/gpu_check.py"], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (2, "")
    said = "no GPU can be used here, so nothing was checked: ImportError: libcuda.so.1 is missing\n"
    assert done.stderr == said


def test_a_launcher_on_the_python_path_is_found(tmp_path: Path) -> None:
    """The mpirun of a wheel goes before the system's, and mpi4py is told where its library lies."""
    found = launcher(tmp_path, 'test "$LD_LIBRARY_PATH" = "${0%/bin/mpirun}/lib:/before"')
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    for folder in (tmp_path, packages):
        environment = {"PYTHONPATH": f"/nowhere:{folder}", "PATH": "/usr/bin", "LD_LIBRARY_PATH": "/before"}
        assert launching.find_mpirun(environment) == (found, "")
        assert environment["LD_LIBRARY_PATH"] == f"{tmp_path / 'lib'}:/before"
        assert environment["PATH"] == f"{tmp_path / 'bin'}:/usr/bin"


GOOD_EXAMPLE = "x\ntest accuracy: 95.90% of 1000 digits\nweights: bitwise identical on 2 ranks\n"


def test_one_rank_is_not_called_ranks() -> None:
    """What is said of one rank is in the singular, and looked for so."""
    checks = judges.judge_example(GOOD_EXAMPLE.replace("2 ranks", "1 rank"), 1)
    assert [check.passed for check in checks] == [True, True]
    assert checks[0].name == "the example's weights are bitwise equal on 1 rank"


@pytest.mark.parametrize(
    ("said", "verdicts"),
    [
        (GOOD_EXAMPLE, [True, True]),
        (GOOD_EXAMPLE.replace("2 ranks", "1 ranks"), [False, True]),
        (GOOD_EXAMPLE.replace("2 ranks", "24 ranks"), [False, True]),
        (GOOD_EXAMPLE.replace("bitwise identical", "DIFFERENT"), [False, True]),
        (GOOD_EXAMPLE.replace("95.90", "89.99"), [True, False]),
        (GOOD_EXAMPLE.replace("95.90", "nan"), [True, False]),
        ("", [False, False]),
    ],
)
def test_the_example_is_judged_by_what_it_says(said: str, verdicts: list[bool]) -> None:
    """Equal weights on as many ranks as were started, and nine digits of ten, pass; all else and silence do not."""
    assert [check.passed for check in judges.judge_example(said, 2)] == verdicts


def test_every_part_has_a_worker_and_all_fit() -> None:
    """Names are unique, and each part's limit is within that of all."""
    names = [part.name for part in gpu_check.PARTS]
    assert len(set(names)) == len(names)
    assert {part.worker for part in gpu_check.PARTS} == {*workers.WORKERS, *gpu_check.OTHERS}
    assert all(part.limit_s < gpu_check.LIMIT_S for part in gpu_check.PARTS)


# ---- what the benchmark says ran ----


@pytest.mark.parametrize(("algorithm", "path"), [("auto", ("kernels", "device")), ("ring", ("ring", "staged"))])
def test_the_benchmark_names_what_ran(algorithm: str, path: tuple[str, str]) -> None:
    """Kernels where nothing is asked for by name; the CPU's algorithm where that is, beside host memory."""

    def work(world: Any, place: HostPlace, tools: HostTools) -> Report:
        return bench.run(world, settings("allreduce", algorithm=algorithm), lambda text: None, place)

    found = on_gpu(2, work)[0]
    assert {(each.algorithm, each.transport) for each in found.results} == {path}


def test_a_launcher_that_cannot_run_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose libraries are missing is not taken; if there is no other, its complaint is the reason."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nowhere"))
    launcher(tmp_path / "broken", "echo 'libprrte.so.3: cannot open' >&2; echo more >&2; exit 127")
    whole = launcher(tmp_path / "whole", "exit 0")
    path = f"{tmp_path / 'broken' / 'bin'}:{tmp_path / 'whole' / 'bin'}"
    environment = {"PYTHONPATH": str(tmp_path / "broken"), "PATH": path}
    assert launching.find_mpirun(environment) == (whole, "")
    assert environment["LD_LIBRARY_PATH"] == str(tmp_path / "whole" / "lib")
    environment = {"PYTHONPATH": str(tmp_path / "broken"), "PATH": "/nowhere"}
    none, why = launching.find_mpirun(environment)
    assert none is None
    assert why.endswith("does not run: libprrte.so.3: cannot open; pip --target drops lib/: use --prefix")
    assert "LD_LIBRARY_PATH" not in environment
    assert launching.find_mpirun({"PATH": "/nowhere"}) == (None, "there is no mpirun")


def test_ranks_in_groups_of_their_own_are_ended(tmp_path: Path) -> None:
    """What a launcher has put into other process groups ends with the part, whether or not it was told to."""
    lock = tmp_path / "lock"
    leaving = f"""
import fcntl, os, subprocess, sys
held = open({str(lock)!r}, "w")
fcntl.flock(held, fcntl.LOCK_EX)
stubborn = "import os, signal; os.setpgid(0, 0); signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); "
rank = subprocess.Popen(
    [sys.executable, "-c", stubborn + "signal.pause()"], pass_fds=[held.fileno()], stdout=subprocess.PIPE
)
rank.stdout.readline()
"""
    returncode, _ = launching.run(script(tmp_path, leaving), 20.0, os.environ, tmp_path / "log")
    assert returncode == 0
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_parts_have_no_terminal_and_do_not_wait_for_long() -> None:
    """Whatever the caller's terminal is; a time limit of the caller's own stays."""
    made = gpu_check.environment_of_parts({"TTY_COMPATIBLE": "1", "RINGREDUCE_TIMEOUT": "7"})
    assert (made["TTY_COMPATIBLE"], made["NO_COLOR"], made["RINGREDUCE_TIMEOUT"]) == ("0", "1", "7")
    assert gpu_check.environment_of_parts({})["RINGREDUCE_TIMEOUT"] == "20"


def test_a_part_that_lacks_a_package_is_not_run(tmp_path: Path) -> None:
    """The report names the package, and the part counts as failed."""
    part = Snippet("lacking", needs=("json", "no_such_package"))
    outcome = gpu_check.run_part(part, "mpirun", "", {}, tmp_path / "log", 99.0)
    assert outcome.problem == "not run: no_such_package is missing; bring its wheel"
    assert not outcome.passed


@pytest.mark.parametrize(
    ("said", "verdicts"),
    [
        ("PASSED tests/a.py::test_x[cuda-1]\n", [True, True]),
        ("PASSED tests/a.py::test_streams_that_race\n", [True, True]),
        ("PASSED tests/a.py::test_x[cpu-1]\n", [True, False]),
        ("PASSED tests/a.py::test_x[cuda]\nSKIPPED [3] tests/a.py:9: needs a GPU, CuPy and a torch\n", [True, False]),
        ("world: 2 ranks, this is rank 0\nPASSED tests/a.py::test_x[cuda]\n", [False, True]),
    ],
)
def test_tests_are_judged_by_those_on_a_gpu(said: str, verdicts: list[bool]) -> None:
    """Some ran there and none was skipped for want of one, on ranks that know of each other."""
    said = f"world: 2 ranks, this is rank 0; Open MPI\n{said}==== 9 passed, 3 skipped in 1.00s ====\n"
    assert [check.passed for check in judges.judge_tests(said, 2)] == verdicts


def test_training_is_judged_by_what_it_left() -> None:
    """Equal weights, on a GPU, on as many ranks as were started; nothing left is all wrong."""
    config = {"ranks": 2, "device": "cuda", "model": "mlp", "tensors": 48}
    left = {"config": config, "median_ms": {"ringreduce": 2.0, "gloo": 9.0}, "weights_agree": True}
    found = judges.judge_training(json.dumps(left), 2)
    assert all(check.passed for check in found)
    assert found[-1].figure == 4.5
    assert [check.passed for check in judges.judge_training(json.dumps(left), 4)].count(False) == 1
    config["device"] = "cpu"
    assert [check.passed for check in judges.judge_training(json.dumps(left), 2)].count(False) == 1
    for nothing in (None, "{"):
        assert not any(check.passed for check in judges.judge_training(nothing, 2))


def test_what_was_not_run_follows_from_what_was() -> None:
    """Each line goes where it was run; parts that were not run, and those not asked for, are named."""
    names = ["one", "two", "three"]
    shared = Outcome("one", "", 1.0, (Check("NCCL by its name", True, "not NCCL"),), {"CUDA-aware MPI": "says no"})
    late = Outcome("two", "not run: the time was up", 0.0)
    left = report.not_run([shared, late], 1, names)
    for line in (
        "several GPUs in one machine, and peer access between them",
        "NCCL beyond its refusal here",
        "CUDA-aware MPI; this MPI: says no",
        "several nodes",
        "the part two: not run: the time was up",
        "the part three: not asked for, or not yet",
    ):
        assert line in left, left
    ways = ("kernels that meet, over 2", "CUDA-aware MPI moves it")
    done = [Outcome(name, "", 1.0, (), {}, way) for name, way in zip(names, [*ways, ""], strict=True)]
    nccl = Outcome("one", "", 1.0, (Check("NCCL by its name", True, "NCCL did it; 0 wrong"),))
    assert report.not_run([*done, nccl], 2, names) == ["several nodes"]


def test_the_report_is_written_after_every_part(tmp_path: Path) -> None:
    """Before the second part begins, the first one's verdict and output are there; the output of all is kept."""
    results = tmp_path / "results"
    shows = f"print(*[each.read_text() for each in sorted(Path({str(results)!r}).iterdir())])"
    parts = [
        Snippet("first", code=f"print('what first said'); found.write_text({GOOD!r})"),
        Snippet("second", code=f"{shows}; found.write_text({GOOD!r})"),
    ]
    assert gpu_check.check(parts, INVENTORY, results) == 0
    _, _, second = next(results.glob("*.log")).read_text().partition("=== second ===")
    assert "what first said" in second
    assert "1 of 1 parts passed" in second
    assert '"name": "second"' not in second
    assert not list(results.glob("*.part"))


@pytest.mark.slow
def test_a_hang_shows_where_it_is(tmp_path: Path) -> None:
    """A part that hangs shows its stacks before it is ended; that is the reason that is given."""
    code = f"""
import sys, time
sys.path[:0] = [{BENCHMARKS!r}]
import gpu_check
from gpu import workers
def waits_in_vain(note, nranks):
    time.sleep(60)
workers.WORKERS["hangs"] = waits_in_vain
from pathlib import Path
gpu_check.work("hangs", Path("found"), 1, 6.0)  # which is 5 s beyond the stacks
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(BENCHMARKS).parent)}
    returncode, seconds = launching.run(script(tmp_path, code), 6.0, environment, tmp_path / "log")
    said = (tmp_path / "log").read_text()
    assert returncode is None
    assert "in waits_in_vain" in said
    assert report.judge("x", returncode, seconds, None, said).problem == "did not end in time: Timeout (0:00:01)!"


def test_a_driver_that_raises_does_not_hide_the_kernels() -> None:
    """Its check fails and says what it raised."""
    assert kernels.check_contract(HostDriver()).passed
    driver = HostDriver()
    driver.fail("register")
    found = kernels.check_contract(driver)
    assert (found.passed, found.detail) == (False, "TransportError: rank 0 was told to fail to register")


def test_a_kernel_that_raises_is_named_and_the_others_are_tried() -> None:
    """Every instance that raises is named; after five, the rest of the family is left, and the next family begins."""
    for failing in (1, 100):
        machine, tried = HostMachine(), []
        right = machine.families["reduce"]

        def broken(name: str, tried: list[str] = tried, right: Any = right, failing: int = failing) -> Any:
            tried.append(name)
            if len(tried) <= failing:
                raise RuntimeError("an illegal address")
            return right(name)

        machine.families["reduce"] = broken
        reduce, shots = kernels.check_kernels(HostDriver(machine), 1, 101)
        assert (reduce.passed, shots.passed) == (False, True)
        assert f"wrong: {tried[0]} (RuntimeError: an illegal address)" in reduce.detail
        if failing == 1:
            assert reduce.detail.count("(") == 1
            assert tried == list(kernels.FAMILIES["reduce"])
        else:
            assert reduce.detail.endswith("the rest was not tried")
            assert tried == list(kernels.FAMILIES["reduce"][:5])


class Refusing:
    """A world that refuses allreduces of one kind while ``refuses``."""

    def __init__(self, world: Any, refuses: bool) -> None:
        self._world, self._refuses = world, refuses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def allreduce(self, array: Any, op: Any = "sum", **options: Any) -> Any:
        if self._refuses and array.dtype == np.float64 and op is ReduceOp.MAX:
            raise ValueError("of rank and file")
        return self._world.allreduce(array, op, **options)


@pytest.mark.slow
def test_collectives_go_on_after_what_all_ranks_raised() -> None:
    """A case that all ranks refuse is named and the next ones run; one that a single rank refuses ends the part."""

    def work(world: Any, place: HostPlace, tools: HostTools) -> Any:
        counter = collectives.Counter(Refusing(world, world.rank in who), place, 7, counts=(7,), large=7)
        try:
            return list(collectives.check_results(counter, ("allreduce",)))
        except (collectives.OutOfStepError, rr.MismatchError) as error:
            return str(error)

    who = {0, 1}
    for found in on_gpu(2, work):
        assert [check.passed for check in found] == [False, False]
        assert found[0].detail == "wrong: double max of 7: ValueError: of rank and file"
    who = {1}
    first, second = on_gpu(2, work)
    assert "the ranks disagree" in first
    assert second.endswith("this one: ValueError: of rank and file")


def test_it_is_seen_which_way_allreduces_take() -> None:
    """Where kernels cannot reach the ranks' memory, results are right and the check of the way fails."""

    def work(world: Any, place: HostPlace, tools: HostTools) -> Any:
        return collectives.check_way(collectives.Counter(world, place, 7), "before")

    for found in on_gpu(2, work):
        assert found.passed
        assert "one kernel per GPU" in found.detail
    for found in on_gpu(2, work, shared=False):
        assert not found.passed
        assert "host memory" in found.detail
    assert on_gpu(1, work)[0].passed


def test_another_number_of_ranks_ends_a_part() -> None:
    """Ranks that do not know of each other are a failed check, and an error."""
    noted: list[Any] = []

    def work(world: Any) -> None:
        workers.expect_ranks(noted.append, world, 1)
        with pytest.raises(RuntimeError, match="2 ranks were started, and the world has 1"):
            workers.expect_ranks(noted.append, world, 2)

    run_ranks(1, work)
    assert [check.passed for check in noted] == [True, False]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("--device cuda: no GPU\n\n----------\n  Exit code:    1\n----------\n", "--device cuda: no GPU"),
        (
            "ok     a\n----------\nrank 1 exited on signal 9 (Killed).\n----------\n",
            "rank 1 exited on signal 9 (Killed).",
        ),
        ("----------\nprterun was not able\n----------\n", "prterun was not able"),
        ("ok     a\nFatal Python error: Segmentation fault\n\nlast\n", "Fatal Python error: Segmentation fault"),
        (
            "E  assert 1\nFAILED a.py::test_b[cuda] - assert 1\n==== 1 failed ====\n",
            "FAILED a.py::test_b[cuda] - assert 1",
        ),
    ],
)
def test_reasons_of_all_kinds(said: str, reason: str) -> None:
    """What a program says itself comes before what its launcher says of it, but for signals."""
    assert report.judge("part", 1, 1.0, None, said).problem == f"exit status 1: {reason}"


@pytest.mark.parametrize("check", ["check_one_kernel", "check_staged"])
def test_ours_is_noted_before_peers_begin(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures, and those that explain a miss, are there even if a peer ends the part."""
    monkeypatch.setattr(bench, "PEERS", {"mpi": RaisingPeer, "gloo": RaisingPeer})

    others = (1 << 12,) if check == "check_staged" else ()

    def work(world: Any, place: HostPlace, tools: HostTools) -> list[Any]:
        noted: list[Any] = []  # keeps what came before the error
        with pytest.raises(RuntimeError, match="no such library"):
            noted.extend(getattr(speed, check)(world, place, lambda text: None, 1 << 16, *others))
        return noted

    for noted in on_gpu(2, work):
        names = [each.name for each in noted]
        assert any(each.target == 0.7 for each in noted)
        if check == "check_one_kernel":
            assert sum("the kernel alone" in name for name in names) == 2
            (taken,) = (each for each in noted if each.name.endswith(": time"))
            assert "events" in taken.detail
            assert "wall clock" in taken.detail
        else:
            assert sum("on the host alone" in name for name in names) == 2
            assert next(each for each in noted if each.name.endswith("not by kernels")).passed


class RaisingPeer:
    """A library that is broken."""

    def __init__(self, world: Any, place: Any) -> None:
        raise RuntimeError("no such library")
