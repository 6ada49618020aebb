"""`ringreduce.spark.run`: a session in one process for the quick test, a cluster of two executors for the others."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pyspark = pytest.importorskip("pyspark", reason="`scripts/install engines` makes the environment that has Spark")

import cloudpickle  # noqa: E402  # that environment has it
import ray_programs as programs  # noqa: E402
import slot_jobs  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402
from slot_jobs import END_S, ROLES, Job, driver_ends, is_eventually, kill, left_behind, loop  # noqa: E402

import ringreduce as rr  # noqa: E402
import ringreduce.spark  # noqa: E402
from ringreduce.common.errors import CollectiveError, ConfigError  # noqa: E402

for each in (programs, slot_jobs, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(each)  # tasks do not find them

pytestmark = [
    pytest.mark.limit(500),
    pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java, as Debian's openjdk-17-jre-headless"),
]
#: Starts Java quicker, and takes less of this machine.
JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
CLUSTER = "local-cluster[2,2,1024]"


def session(master: str, **settings: str) -> Any:
    """Start Spark in this process."""
    builder = SparkSession.builder.master(master)
    given = {"spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    for name, value in {**given, **settings}.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    return made


@pytest.fixture(scope="module", autouse=True)
def temporary() -> Iterator[None]:
    """A folder for temporary files of these tests alone; its path is short, as those of sockets have to be."""
    with (
        tempfile.TemporaryDirectory(prefix="rs", dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setenv("JAVA_TOOL_OPTIONS", JAVA)
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture
def spark(temporary: None) -> Iterator[Any]:
    """The cluster: sessions that are started already stay, as Spark has one in a process."""
    yield session(CLUSTER)
    assert is_eventually(lambda: not left_behind(), END_S), left_behind()


def place() -> tuple[float, list[str]]:
    """Return a sum over all ranks, and the names of the processes above this one."""
    from ringreduce.common.processes import ancestors

    return programs.total(), [name for _, name in ancestors()]


def counted(start: int, *, rows: Any) -> tuple[int, int, list[int]]:
    """Return the rank, the number of columns, and the numbers in the first column of all rows."""
    rr.init()
    batches = [*rows]
    columns = {each.num_columns for each in batches}
    return rr.rank(), max(columns, default=0), [start + number for each in batches for number in each[0].to_pylist()]


def test_two_ranks_are_children_of_tasks() -> None:
    """Also what they return, their rows, an error, and what is refused; then nothing is left."""
    spark = session("local[2]")
    try:
        found = ringreduce.spark.run(place, num_proc=2)
        assert [total for total, _ in found] == [2.0, 2.0]
        assert all("java" in names for _, names in found)
        rows = spark.range(10).repartition(2)
        parts = ringreduce.spark.run(counted, (100,), rows=rows)
        assert [each[:2] for each in parts] == [(0, 1), (1, 1)]
        assert sorted(number for *_, numbers in parts for number in numbers) == [*range(100, 110)]
        with pytest.raises(CollectiveError, match="rank 1 of 2 failed:\nTraceback") as caught:
            ringreduce.spark.run(programs.fail, (1,), num_proc=2)
        assert str(caught.value).count("KeyError: 'on purpose'") == 1
        for wrong in (0, -1, 1.5):
            with pytest.raises(ConfigError, match="at least 1"):
                ringreduce.spark.run(place, num_proc=wrong)
        with pytest.raises(ConfigError, match="3 ranks take as many tasks at a time, and this Spark cluster runs 2"):
            ringreduce.spark.run(place, num_proc=3, start_timeout=0.5)
        with pytest.raises(ConfigError, match="rows takes a DataFrame"):
            ringreduce.spark.run(place, rows=[1, 2])
        with pytest.raises(ConfigError, match="takes no stdout"):
            ringreduce.spark.run(place, stdout=sys.stdout)
        with pytest.raises(ConfigError, match="takes no --elastic"):
            ringreduce.spark.run(place, options=["--elastic"])
        assert [total for total, _ in ringreduce.spark.run_elastic(place, num_proc=2, min_np=1)] == [2.0, 2.0]
        with pytest.raises(ConfigError, match="num_proc 2 is not between min_num_proc 3 and max_num_proc 2"):
            ringreduce.spark.run_elastic(place, num_proc=2, min_num_proc=3)
        with pytest.raises(ConfigError, match="max_num_proc is a number of ranks, at least 1, not 0"):
            ringreduce.spark.run_elastic(place, num_proc=2, max_np=0)
        with pytest.raises(ConfigError, match="run_elastic takes no stderr"):
            ringreduce.spark.run_elastic(place, num_proc=2, stderr=sys.stderr)
    finally:
        spark.stop()
    with pytest.raises(ConfigError, match="there is no SparkContext"):
        ringreduce.spark.run(place, num_proc=2)
    assert is_eventually(lambda: not left_behind(), END_S), left_behind()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["spark.dynamicAllocation.enabled", "spark.speculation"])
def test_settings_that_move_tasks_are_refused(name: str) -> None:
    made = session("local[1]", **{name: "true"})
    try:
        with pytest.raises(ConfigError, match=f"does not go together with {name}=true: it "):
            ringreduce.spark.run(place, num_proc=1)
    finally:
        made.stop()
    SparkSession.builder._options.clear()


@pytest.mark.thorough
def test_results_equal_those_under_mpirun(spark: Any) -> None:
    for each in (programs.digits, programs.torch_digits):
        under_mpirun = rr.run(each, num_proc=3, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert ringreduce.spark.run(each, num_proc=3) == under_mpirun


@pytest.mark.thorough
def test_rows_are_all_there_once(spark: Any) -> None:
    """Dealt out anew, or as they lie; of many batches, of one column more, and none at all."""
    rows = spark.range(100_000, numPartitions=3).selectExpr("id", "id * 2 AS twice")
    for count in (4, None):
        parts = ringreduce.spark.run(counted, (0,), num_proc=count, rows=rows)
        assert [rank for rank, *_ in parts] == [*range(count or 3)]
        assert {columns for _, columns, _ in parts} == {2}
        assert sorted(number for *_, numbers in parts for number in numbers) == [*range(100_000)]
        assert count is not None or [numbers[0] for *_, numbers in parts] == [0, 33333, 66666]
    assert ringreduce.spark.run(counted, (0,), rows=rows.where("id < 0")) == [(rank, 0, []) for rank in range(3)]


@pytest.mark.thorough
def test_rows_that_fail(spark: Any) -> None:
    """They end the call before it begins: no rank takes a part of the rows for all. What was cached stays so."""
    bad = spark.range(100_000, numPartitions=2).selectExpr("if(id > 90000, raise_error('on purpose'), id) AS x")
    with pytest.raises(CollectiveError, match="Spark cannot compute the rows"):
        ringreduce.spark.run(counted, (0,), rows=bad)
    kept = spark.range(10, numPartitions=2).cache()
    ringreduce.spark.run(counted, (0,), rows=kept)
    assert kept.is_cached
    kept.unpersist()


@pytest.mark.thorough
def test_large_arguments_many_starts_and_two_at_once(spark: Any) -> None:
    big = np.random.default_rng(0).standard_normal(100_000_000 // 8)
    for back in ringreduce.spark.run(programs.echo, (big,), num_proc=2):
        assert np.array_equal(back, big)
    for _ in range(50):
        assert ringreduce.spark.run(programs.total, num_proc=2) == [2.0, 2.0]
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(ringreduce.spark.run(programs.total, num_proc=2)))
        for _ in range(2)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(2 * END_S)
    assert found == [[2.0] * 2] * 2


def pids_named(word: str) -> list[int]:
    """Return the processes of this test whose command lines have a word."""
    mine = f"TMPDIR={os.environ['TMPDIR']}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word in (folder / "cmdline").read_bytes().decode(errors="replace") and mine in (
                folder / "environ"
            ).read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


@pytest.mark.thorough
@pytest.mark.parametrize("time", ["once", "twice"])
@pytest.mark.parametrize("role", [*ROLES, "executor", "task", "cancel"])
def test_a_death_leaves_nothing(spark: Any, role: str, time: str, tmp_path: Path) -> None:
    """What comes at random moments comes twice."""
    job = Job(lambda file: ringreduce.spark.run(loop, (file,), num_proc=3), size=3, file=tmp_path / "seen")
    end(spark, role)
    assert isinstance(job.ended(), CollectiveError)
    assert is_eventually(lambda: not left_behind(), END_S), left_behind()
    assert ringreduce.spark.run(programs.total, num_proc=3) == [3.0] * 3  # executors come again


def end(spark: Any, role: str) -> None:
    """Let the job that runs end, as it is cancelled or something of it dies."""
    if role == "cancel":
        spark.sparkContext.cancelAllJobs()
    else:
        die(role)


def die(role: str) -> None:
    """Let something die that belongs to the job that runs."""
    if role == "executor":
        os.kill(pids_named("CoarseGrainedExecutorBackend")[-1], signal.SIGKILL)
    elif role == "task":
        os.kill(pids_named("pyspark.daemon")[-1], signal.SIGKILL)
    else:
        kill(role)


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["rank", "daemon", "slot", "agent", "executor", "task"])
def test_an_elastic_job_survives(spark: Any, role: str, tmp_path: Path) -> None:
    """What ends ranks alone is survived by the others; all begin again without a task, until Spark has another one."""

    def run(folder: str) -> Any:
        return ringreduce.spark.run_elastic(slot_jobs.train, (folder,), num_proc=3, min_num_proc=1)

    left = slot_jobs.deaths_survived(run, tmp_path, lambda: die(role), again=role != "rank")
    assert left == 2 if role == "rank" else left in (1, 2, 3)
    assert is_eventually(lambda: not left_behind(), END_S), left_behind()


@pytest.mark.thorough
def test_a_task_that_comes_again_is_taken(spark: Any, tmp_path: Path) -> None:
    """At a commit: the job has three ranks again."""

    def died() -> None:
        die("executor")
        assert is_eventually(lambda: [*tmp_path.glob("seen-[2-9]-3.0")], 2 * slot_jobs.START_S)

    def run(folder: str) -> Any:
        return ringreduce.spark.run_elastic(slot_jobs.train, (folder,), min_np=1, num_proc=3)

    assert slot_jobs.deaths_survived(run, tmp_path, died, again=True) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["mpirun", "launcher", "cancel"])
def test_what_ends_an_elastic_job(spark: Any, role: str, tmp_path: Path) -> None:
    call = lambda file: ringreduce.spark.run_elastic(loop, (file,), num_proc=3, min_num_proc=1)  # noqa: E731
    job = Job(call, size=3, file=tmp_path / "seen")
    end(spark, role)
    assert isinstance(job.ended(), CollectiveError)
    assert is_eventually(lambda: not left_behind(), END_S), left_behind()


DRIVER = """
import sys
import cloudpickle
import ringreduce.spark
import slot_jobs
from pyspark.sql import SparkSession
cloudpickle.register_pickle_by_value(slot_jobs)
builder = SparkSession.builder.master(sys.argv[1]).config("spark.driver.host", "127.0.0.1")
builder.config("spark.ui.enabled", "false").getOrCreate()
ringreduce.spark.run(slot_jobs.loop, (sys.argv[2],), num_proc=2)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_end_of_the_program_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    text = driver_ends(DRIVER, ["local[2]"], number, tmp_path / "seen", size=2)
    assert ("KeyboardInterrupt" in text) == (number == signal.SIGINT), text
    assert is_eventually(lambda: not left_behind(), END_S), left_behind()
