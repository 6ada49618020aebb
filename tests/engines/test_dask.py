"""`ringreduce.dask.run`, on three workers of a cluster on this machine."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

distributed = pytest.importorskip("distributed", reason="`scripts/install engines` makes the environment that has Dask")

import cloudpickle  # noqa: E402  # that environment has it
import ray_programs as programs  # noqa: E402
import slot_jobs  # noqa: E402
from slot_jobs import END_S, ROLES, Job, driver_ends, is_eventually, kill, left_behind, loop  # noqa: E402

import ringreduce as rr  # noqa: E402
import ringreduce.dask  # noqa: E402
from ringreduce.common.errors import CollectiveError, ConfigError  # noqa: E402

for each in (programs, slot_jobs, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(each)  # workers do not find them

pytestmark = pytest.mark.limit(400)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster in which workers that are killed come again, and a folder for temporary files of its own.

    The path of the folder is short, as those of sockets have to be.
    """
    with tempfile.TemporaryDirectory(prefix="rd", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        with distributed.LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0") as made:
            yield made.scheduler_address


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    with distributed.Client(address) as made:
        made.wait_for_workers(3, timeout=END_S)
        yield made
    assert is_eventually(lambda: not left_behind(), END_S), left_behind()


@pytest.mark.parametrize("adapts", [True, False])
def test_workers_that_come_later_are_waited_for(adapts: bool) -> None:
    """An adaptive cluster starts them for the job; where nobody does, an error says so."""
    with distributed.LocalCluster(n_workers=0, threads_per_worker=1, dashboard_address=":0") as cluster:
        if adapts:
            cluster.adapt(minimum=0, maximum=2)
        with distributed.Client(cluster) as client:
            if adapts:
                found = ringreduce.dask.run(client, programs.total, np=2, start_timeout=END_S)
                assert found == [2.0, 2.0]
            else:
                with pytest.raises(ConfigError, match="no workers, also after start_timeout"):
                    ringreduce.dask.run(client, programs.total, np=2, start_timeout=0.5)


def place() -> tuple[float, list[int]]:
    """Return a sum over all ranks, and the processes above this one."""
    from ringreduce.common.processes import ancestors

    return programs.total(), [pid for pid, _ in ancestors()]


def test_two_ranks_are_children_of_workers(client: Any) -> None:
    workers = {*client.run(os.getpid).values()}
    found = ringreduce.dask.run(client, place, np=2)
    assert [total for total, _ in found] == [2.0, 2.0]
    above = [workers & {*pids} for _, pids in found]
    assert len(above[0] | above[1]) == 2
    with pytest.raises(CollectiveError, match="rank 1 of 2 failed:\nTraceback") as caught:
        ringreduce.dask.run(client, programs.fail, (1,), np=2)
    assert str(caught.value).count("KeyError: 'on purpose'") == 1


def test_what_is_wrong_is_refused(client: Any, address: str) -> None:
    for wrong in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="at least 1"):
            ringreduce.dask.run(client, place, np=wrong)
    with pytest.raises(ConfigError, match="4 ranks take as many threads of workers, and the Dask cluster has 3"):
        ringreduce.dask.run(client, place, np=4, start_timeout=1)
    with pytest.raises(ConfigError, match=r"distributed\.Client"):
        ringreduce.dask.run(None, place)
    closed = distributed.Client(address)
    closed.close()
    with pytest.raises(ConfigError, match="the client of Dask is closed"):
        ringreduce.dask.run(closed, place)


@pytest.mark.thorough
def test_a_thread_that_stays_busy(client: Any) -> None:
    """The call ends within its time limit, and holds no worker afterwards."""
    event = distributed.Event("busy", client=client)
    task = client.submit(lambda: distributed.Event("busy").wait(), pure=False)
    with pytest.raises(ConfigError, match="1 of 3 tasks have not started within 2 s"):
        ringreduce.dask.run(client, place, start_timeout=2.0)
    event.set()
    task.result(timeout=END_S)
    assert len(ringreduce.dask.run(client, place)) == 3


def pieces_of(arrays: list[Any], more: list[Any], *, one: Any, none: list[Any]) -> tuple[Any, ...]:
    rr.init()
    for each in arrays:
        each += 1  # a rank may write to its copy
    return [(a.tolist(), b) for a, b in zip(arrays, more, strict=True)], one, none


@pytest.mark.thorough
def test_data_of_the_cluster_goes_from_workers_to_ranks(client: Any) -> None:
    """Each piece is in one rank, that of a worker which has it; pieces with one number are in one rank."""
    import dask.array

    array = client.persist(dask.array.arange(21, chunks=3))
    futures = client.map(lambda number: number * 10, range(7))
    one = client.submit(lambda: "one")
    with pytest.raises(ZeroDivisionError):
        ringreduce.dask.run(client, place, ([client.submit(lambda: 1 // 0)],))
    found = ringreduce.dask.run(client, pieces_of, (array, futures), {"one": one, "none": []})
    assert [rest for _, *rest in found] == [["one", []]] * 3
    pairs = sorted(pair for each, *_ in found for pair in each)
    assert pairs == [([3 * i + 1, 3 * i + 2, 3 * i + 3], 10 * i) for i in range(7)]
    assert np.array_equal(array.compute(), np.arange(21))  # workers keep theirs
    assert len(ringreduce.dask.run(client, pieces_of, (array, futures), {"one": 1, "none": []}, np=1)[0][0]) == 7


@pytest.mark.thorough
def test_results_equal_those_under_mpirun(client: Any) -> None:
    for each in (programs.digits, programs.torch_digits):
        under_mpirun = rr.run(each, num_proc=3, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert ringreduce.dask.run(client, each) == under_mpirun


@pytest.mark.thorough
def test_large_arguments_many_starts_and_two_at_once(client: Any) -> None:
    big = np.random.default_rng(0).standard_normal(100_000_000 // 8)
    for back in ringreduce.dask.run(client, programs.echo, (big,), np=2):
        assert np.array_equal(back, big)
    for _ in range(50):
        assert ringreduce.dask.run(client, programs.total, np=2) == [2.0, 2.0]
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(ringreduce.dask.run(client, programs.total))) for _ in range(2)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(2 * END_S)
    assert found == [[3.0] * 3] * 2


def end(client: Any, own: Any, role: str) -> None:
    """Let something die that belongs to the job that runs, or cancel its tasks, or close the client that runs it."""
    if role == "worker":
        os.kill(min(client.run(os.getpid).values()), signal.SIGKILL)
    elif role == "cancel":
        tasks = client.run_on_scheduler(lambda dask_scheduler: [*dask_scheduler.tasks])
        client.cancel([distributed.Future(key, client) for key in tasks], force=True)
    elif role == "close":
        own.close()
    else:
        kill(role)


@pytest.mark.thorough
@pytest.mark.parametrize("time", ["once", "twice"])
@pytest.mark.parametrize("role", [*ROLES, "worker", "cancel", "close"])
def test_a_death_leaves_nothing(client: Any, address: str, role: str, time: str, tmp_path: Path) -> None:
    """What comes at random moments comes twice."""
    with distributed.Client(address) as own:
        job = Job(lambda file: ringreduce.dask.run(own, loop, (file,)), size=3, file=tmp_path / "seen")
        end(client, own, role)
        error = job.ended()
    assert isinstance(error, CollectiveError)
    if role == "worker":
        assert "of Dask has ended, and with it rank" in str(error)


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["rank", "daemon", "slot", "agent", "worker"])
def test_an_elastic_job_survives(client: Any, role: str, tmp_path: Path) -> None:
    """What ends a rank alone is survived by the others; without a worker, all begin again from the last commit."""

    def run(folder: str) -> Any:
        return ringreduce.dask.run(client, slot_jobs.train, (folder,), options=["--elastic"])

    left = slot_jobs.deaths_survived(run, tmp_path, lambda: end(client, client, role), again=role != "rank")
    assert left in ((2, 3) if role == "agent" else (2,))  # mpirun does not say whose agent has died


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["mpirun", "launcher", "cancel", "close"])
def test_what_ends_an_elastic_job(client: Any, address: str, role: str, tmp_path: Path) -> None:
    with distributed.Client(address) as own:
        call = lambda file: ringreduce.dask.run(own, loop, (file,), options=["--elastic"])  # noqa: E731
        job = Job(call, size=3, file=tmp_path / "seen")
        end(client, own, role)
        assert isinstance(job.ended(), CollectiveError)


DRIVER = """
import sys
import distributed
import ringreduce.dask
from slot_jobs import loop
import cloudpickle
cloudpickle.register_pickle_by_value(sys.modules["slot_jobs"])
if __name__ == "__main__":
    ringreduce.dask.run(distributed.Client(sys.argv[1]), loop, (sys.argv[2],))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("client")
def test_the_end_of_the_program_leaves_nothing(address: str, number: signal.Signals, tmp_path: Path) -> None:
    text = driver_ends(DRIVER, [address], number, tmp_path / "seen", size=3)
    assert ("KeyboardInterrupt" in text) == (number == signal.SIGINT), text
