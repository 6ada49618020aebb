"""``bench`` and ``explain`` as whole jobs under mpirun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import launching
import pytest
from browser import look
from launching import RINGREDUCE, Job, needs, run_job

from ringreduce.bench.cases import COLLECTIVES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def mpirun(ranks: int, *arguments: object) -> Job:
    """Run the command line on so many ranks."""
    return run_job(ranks, "-m", "ringreduce", *arguments)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def test_table_of_two_ranks():
    """The table parses like that of nccl-tests: one row per size, numbers in the standard columns, nothing wrong."""
    done = mpirun(2, "bench", "allreduce", "-b", "8", "-e", "1M", "-f", "64", "-n", "5", "--vs", "mpi").well()
    table = rows(done.stdout)
    assert [row[0] for row in table] == ["8", "512", "32768", "1048576"]
    for row in table:
        assert row[2:5] == ["float", "sum", "-1"]
        time, algbw, busbw, wrong = (float(cell) for cell in row[9:13])
        assert time > 0
        assert algbw == pytest.approx(float(row[0]) / time / 1e3, abs=0.011)
        assert busbw == pytest.approx(algbw, abs=0.011)  # the factor of allreduce is 1 for two ranks
        assert (row[8], wrong) == ("0", 0)
        assert row[16].endswith("x")
    assert "# Out of bounds values : 0 OK" in done.stdout


def test_all_algorithms_on_shared_buffers(tmp_path):
    """--algorithm all measures several algorithms, and -J gets them all with the peers' figures."""
    needs("torch")
    path = tmp_path / "report.json"
    mpirun(
        *(2, "bench", "allreduce", "-b", "64K", "-e", "64K", "-n", "3", "--algorithm", "all", "--buffers", "shared"),
        *("--vs", "mpi,gloo", "-J", str(path)),
    ).well()
    report = json.loads(path.read_text())
    assert report["config"]["nranks"] == 2
    assert report["config"]["mpi_library"]
    algorithms = {result["algorithm"] for result in report["results"]}
    assert {"two_shot", "ring", "mpi"} <= algorithms
    for result in report["results"]:
        assert result["nwrong"] == 0
        if result["in_place"]:
            assert result["vs"]["mpi"]["speedup"] > 0
            assert result["vs"]["gloo"]["median_us"] > 0
            assert result["bound_share"] > 0


def test_wrong_use_is_said_once():
    """All ranks end with status 2, and only rank 0 says why."""
    done = mpirun(2, "bench", "allreduce", "--root", "2")
    assert done.returncode == 2
    assert done.stderr.count("there is no rank 2 to be the root; the last is rank 1") == 1
    assert rows(done.stdout) == []


@pytest.mark.parametrize(
    ("arguments", "text"), [(("explain", "-b", "1M", "-e", "1M"), "1 MiB"), (("bench", "--help"), "Usage:")]
)
def test_one_rank_speaks(arguments: tuple[str, ...], text: str):
    """Rank 0 speaks for all, also when it only explains the options."""
    done = mpirun(2, *arguments).well()
    assert done.stdout.count(text) == 1


def test_asynchronous_operations(tmp_path: Path):
    """The benchmark has the latency of one operation and the time of many, and verifies both."""
    needs("torch")
    path = tmp_path / "figures.json"
    run_job(2, str(BENCHMARKS / "asynchronous.py"), "-n", "5", "-J", str(path)).well()
    assert [(each["operations"], each["nbytes"]) for each in json.loads(path.read_text())] == [(1, 4), (160, 65536)]


def test_overlap() -> None:
    """The benchmark measures each library alone and beside a computation, and verifies its sums."""
    needs("torch")
    done = run_job(2, str(BENCHMARKS / "overlap.py"), "--vs", "mpi,gloo", "-n", "3", "8", "64K").well()
    sizes = [row[:3] for row in rows(done.stdout)[1:]]
    assert sizes == [[*size.split(), name] for size in ("8 B", "64 KiB") for name in ("ringreduce", "mpi", "gloo")]


def test_recovery() -> None:
    """The benchmark kills the last rank until one is left."""
    line = [RINGREDUCE, "run", "--elastic", "-np", 3, sys.executable, BENCHMARKS / "recovery.py"]
    done = launching.run(*line, limit_s=100).well()
    assert [row[0] for row in rows(done.stdout)] == ["left", "2", "1"]


def test_all_collectives_on_a_page_with_pictures(tmp_path: Path) -> None:
    """Everything is measured and right, and the page shows each."""
    needs("matplotlib")
    page, picture = tmp_path / "report.html", tmp_path / "allreduce.svg"
    few = ["-b", "8", "-e", "4K", "-f", "512", "-n", "5", "-w", "1", "--vs", "mpi"]
    done = mpirun(2, "bench", "all", *few, "--report", str(page), "--format", "json").well()
    reports = json.loads(done.stdout)
    assert [each["config"]["collective"] for each in reports] == list(COLLECTIVES)
    assert not any(result["nwrong"] for report in reports for result in report["results"])
    text = page.read_text()
    assert text.count("<svg") == len(COLLECTIVES)
    assert all(f"<h2>{name}</h2>" in text for name in COLLECTIVES)
    assert done.stderr.count(f"bench: wrote {page}\n") == 1
    done = mpirun(2, "bench", "allreduce", *few, "--plot", str(picture)).well()
    assert done.stderr.count(f"bench: wrote {picture}\n") == 1
    assert "<svg" in picture.read_text()
    done = mpirun(2, "bench", "all", "-b", "8", "-e", "8", "-n", "2", "-w", "0", "--format", "csv")
    assert [line.partition(",")[0] for line in done.stdout.splitlines()].count("collective") == 1
    assert look(page, picture) == {}
