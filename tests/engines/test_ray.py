"""`RayExecutor`: ranks that are actors of Ray."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="`scripts/install engines` makes the environment that has Ray")

import ray_programs as programs  # noqa: E402

import ringreduce as rr  # noqa: E402
from ringreduce.common.errors import CollectiveError, ConfigError  # noqa: E402
from ringreduce.ray import RayExecutor  # noqa: E402

#: Else Ray has its workers yield to all other processes.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray's own name
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    """Ray on this machine, which ends with this process."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        num_cpus=6,
        object_store_memory=200_000_000,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RINGREDUCE_TUNING": "0"}},
    )
    yield
    ray.shutdown()


def left_behind() -> list[str]:
    """Return the processes below this one that belong to a job, groups of Ray that are not removed, and files."""
    children = subprocess.run(
        ["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    jobs = [each for each in children if "ringreduce" in each]
    groups = [each["state"] for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
    files = [str(each) for each in Path(os.environ.get("TMPDIR", "/tmp")).glob("ringreduce-*/agent")]
    return [*jobs, *groups, *files]


def settled(limit_s: float = 30.0) -> list[str]:
    """Return what is left behind once nothing is, or the time is over: Ray removes groups a little later."""
    until = time.monotonic() + limit_s
    while (left := left_behind()) and time.monotonic() < until:
        time.sleep(0.1)  # there is nothing to wait on
    free = ray.available_resources().get("CPU", 0.0)
    while free < 6 and time.monotonic() < until:
        time.sleep(0.1)  # as above
        free = ray.available_resources().get("CPU", 0.0)
    return [*left, *([f"{free} of 6 cores are free"] if free < 6 else [])]


@pytest.mark.usefixtures("_ray")
def test_two_ranks_train_keep_their_state_and_fail() -> None:
    """As under mpirun, bit for bit; an error has the traceback, once, and the rank; nothing is left."""
    with RayExecutor(num_workers=2) as executor:
        trained = executor.run(programs.digits)
        with pytest.raises(CollectiveError, match="rank 1 of 2 failed:\nTraceback") as caught:
            executor.run(programs.fail, kwargs={"rank": 1})
        assert str(caught.value).count("KeyError: 'on purpose'") == 1
        assert executor.run(programs.total) == [2.0, 2.0]
    assert [each[:2] for each in trained] == [(0, 2), (1, 2)]
    assert trained == rr.run(programs.digits, np=2)
    executor.start(programs.Counter, executable_args=[5])
    first = executor.execute(lambda counter: counter.add(1))
    assert [each[:2] for each in first] == [(0, 7), (1, 7)]
    assert executor.execute(lambda counter: counter.add(2)) == [(rank, 11, process) for rank, _, process in first]
    assert executor.execute_single(lambda counter: counter.count) == 11
    assert ray.get(executor.run_remote(programs.total)) == [2.0, 2.0]
    executor.shutdown()
    assert settled() == []
    with pytest.raises(ConfigError, match="is not started"):
        executor.run(programs.total)


def test_horovods_names_and_runtime_environments(tmp_path: Path) -> None:
    """A program that has Horovod's names gives them to its ranks; these find the files of a ``working_dir``."""
    (tmp_path / "beside.py").write_text("value = 41\n")
    line = [sys.executable, "-c", _HOROVOD, str(tmp_path)]
    done = subprocess.run(line, timeout=100, check=False, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[(0, '0', 41, '7'), (1, '1', 41, '7')]"], done.stderr


_HOROVOD = """
import sys
import ringreduce.horovod
from horovod.ray import RayExecutor
import ray

def where():
    import beside, os
    import horovod.torch as hvd
    hvd.init()
    return hvd.rank(), os.environ["HOROVOD_RANK"], beside.value, os.environ["OF_RANKS"]

ray.init(
    num_cpus=2,
    object_store_memory=80_000_000,
    include_dashboard=False,
    log_to_driver=False,
    runtime_env={"working_dir": sys.argv[1]},
)
executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), num_hosts=1, num_workers_per_host=2, use_gpu=False)
executor.start(extra_env_vars={"OF_RANKS": "7"})
print(executor.run(where))
executor.shutdown()
"""


@pytest.mark.usefixtures("_ray")
def test_no_room_is_an_error() -> None:
    """It names what the cluster has, and leaves nothing."""
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    with pytest.raises(ConfigError, match=r"no room for 2 times \{'CPU': 100.0\}"):
        RayExecutor(settings, num_workers=2, cpus_per_worker=100).start()
    assert settled() == []


@pytest.mark.usefixtures("_ray")
def test_an_error_of_what_is_made_is_named() -> None:
    """And the ranks end."""
    executor = RayExecutor(num_workers=2)
    with pytest.raises(CollectiveError, match=r"(?s)rank \d of 2 failed.*TypeError"):
        executor.start(programs.Counter)
    assert settled() == []


# ---- with TEST_ALL ----


@pytest.mark.thorough
@pytest.mark.usefixtures("_ray")
def test_torch_trains_as_under_mpirun() -> None:
    """Bit for bit."""
    with RayExecutor(num_workers=4) as executor:
        assert executor.run(programs.torch_digits) == rr.run(programs.torch_digits, np=4)


@pytest.mark.thorough
@pytest.mark.limit(600)
@pytest.mark.usefixtures("_ray")
@pytest.mark.parametrize("what", ["fn", "actor", "job"])
def test_deaths_end_the_job(what: str) -> None:
    """By a rank that kills itself, an actor that is killed, or the launcher: all end, and nothing stays."""
    for number in range(20 if what == "actor" else 5):
        executor = RayExecutor(num_workers=2)
        executor.start()
        calls = executor.run(programs.total)
        assert calls == [2.0, 2.0]
        call = partial(executor.run, programs.die if what == "fn" else programs.wait_for, [number % 2])
        with pytest.raises(CollectiveError, match=r"rank [01] of 2 (has died|failed)|the job has ended"):
            _while_dying(executor, what, number % 2, call)
        with pytest.raises(ConfigError, match="is not started, or was shut down"):
            executor.run(programs.total)
        assert settled() == [], number


def _while_dying(executor: Any, what: str, rank: int, call: Any) -> None:
    """Make a call, in which an actor or the launcher is killed."""
    if what == "actor":
        begun = executor.run_remote(programs.wait_for, [rank])
        ray.kill(executor._ranks[rank].actor)
        del begun
    if what == "job":
        listed = subprocess.run(
            ["pgrep", "-f", "-P", str(os.getpid()), "ringreduce run"], capture_output=True, text=True, check=True
        )
        executor.run_remote(programs.wait_for, [rank])
        os.kill(int(listed.stdout.split()[0]), signal.SIGKILL)
    call()


@pytest.mark.thorough
@pytest.mark.limit(600)
@pytest.mark.usefixtures("_ray")
def test_an_elastic_job_survives_deaths() -> None:
    """20 times, one of three ranks; the others go on with the state that they have."""
    for number in range(20):
        with RayExecutor(num_workers=3, elastic=True) as executor:
            assert executor.run(programs.total) == [3.0, 3.0, 3.0]
            ray.kill(executor._ranks[number % 3].actor)
            assert executor.run(programs.total) == [2.0, 2.0]
            assert executor.run(programs.total) == [2.0, 2.0]
        assert settled() == [], number


@pytest.mark.thorough
@pytest.mark.limit(300)
@pytest.mark.usefixtures("_ray")
def test_an_elastic_job_takes_room_that_is_freed(tmp_path: Path) -> None:
    """At a commit, with new ranks; no step is lost or made twice. What `start` was given, they have as well."""

    @ray.remote(num_cpus=4)
    class Other:
        def is_there(self) -> bool:
            return True

    other = Other.remote()  # type: ignore[attr-defined]  # Ray's
    assert ray.get(other.is_there.remote())
    executor = RayExecutor(num_workers=2, max_workers=3)
    executor.start(programs.Counter, executable_args=[5], extra_env_vars={"OF_RANKS": "7"})
    with executor, ThreadPoolExecutor() as pool:
        trained = pool.submit(executor.run, programs.train, [str(tmp_path)])
        waits_for(tmp_path / "trains-2")
        ray.kill(other)
        waits_for(tmp_path / "trains-3")
        (tmp_path / "finish").touch()
        (_, _, steps, _), *_ = found = trained.result()
        assert found == [(rank, -float(steps), steps, [2, 3]) for rank in range(3)]
        assert executor.execute(lambda counter: counter.count) == [5, 5, 5]
        assert executor.run(os.getenv, ["OF_RANKS"]) == ["7", "7", "7"]
    assert settled() == []


def waits_for(path: Path, limit_s: float = 100.0) -> None:
    """Wait until a file is there."""
    until = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.1)  # there is nothing to wait on


@pytest.mark.thorough
@pytest.mark.limit(600)
@pytest.mark.usefixtures("_ray")
def test_many_starts_much_data_and_two_at_once() -> None:
    """50 starts; 100 MB in and out; two executors at the same time, and one inside of a task."""
    for _ in range(50):
        with RayExecutor(num_workers=2) as executor:
            assert executor.run(programs.total) == [2.0, 2.0]
    assert settled() == []
    much = np.arange(12_500_000, dtype=np.float64)
    with RayExecutor(num_workers=2) as one, RayExecutor(num_workers=3) as other:
        assert all(np.array_equal(each, much) for each in one.run(programs.echo, [much]))
        begun = other.run_remote(programs.total)
        assert one.run(programs.total) == [2.0, 2.0]
        assert ray.get(begun) == [3.0, 3.0, 3.0]
        del begun

    def inside() -> list[float]:
        with RayExecutor(num_workers=2) as executor:
            return list(executor.run(programs.total))

    assert ray.get(ray.remote(inside).remote(), timeout=60) == [2.0, 2.0]
    assert settled() == []


@pytest.mark.thorough
@pytest.mark.limit(400)
@pytest.mark.usefixtures("_ray")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_program_that_ends_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """Seven times: the driver is killed, or interrupted, while its ranks are at work."""
    address = ray.get_runtime_context().gcs_address
    for _ in range(7):
        program = subprocess.Popen(
            [sys.executable, "-c", _WAITS, address, str(HERE)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(HERE)},
        )
        assert program.stdout is not None
        assert program.stdout.readline() == "ranks wait\n"
        program.send_signal(number)
        program.communicate(timeout=60)
        assert settled() == []
        until = time.monotonic() + 30
        while (left := _of(tmp_path)) and time.monotonic() < until:
            time.sleep(0.1)  # mpirun ends after the program
        assert left == []


_WAITS = """
import sys
import ray, ray_programs as programs
from ringreduce.ray import RayExecutor

ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": sys.argv[2]}})
executor = RayExecutor(num_workers=2)
executor.start()
assert executor.run(programs.total) == [2.0, 2.0]
begun = executor.run_remote(programs.wait_for, [0])
print("ranks wait", flush=True)
executor.run(programs.total)
"""


@pytest.mark.thorough
@pytest.mark.limit(400)
def test_ranks_have_packages_of_a_runtime_environment() -> None:
    """A wheel, in the copy of this environment that Ray makes for that."""
    pytest.importorskip("virtualenv", reason="Ray makes environments by virtualenv")
    with tempfile.TemporaryDirectory(prefix="rr", dir="/tmp") as folder:  # Ray wants a short path
        wheel = Path(folder, "little_one-1.0-py3-none-any.whl")
        about = "little_one-1.0.dist-info"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr("little_one.py", "value = 41\n")
            file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: little-one\nVersion: 1.0\n")
            file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in file.namelist()))
        line = [sys.executable, "-c", _PACKAGES, folder, str(wheel)]
        done = subprocess.run(line, timeout=350, check=False, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[(0, 41), (1, 41)]"], done.stderr


_PACKAGES = """
import sys
import ray
from ringreduce.ray import RayExecutor

def value():
    import little_one
    import ringreduce as rr
    rr.init()
    return rr.rank(), little_one.value

ray.init(
    num_cpus=2,
    object_store_memory=80_000_000,
    include_dashboard=False,
    log_to_driver=False,
    _temp_dir=sys.argv[1],
    runtime_env={"pip": [sys.argv[2]]},
)
with RayExecutor(RayExecutor.create_settings(timeout_s=300), num_workers=2) as executor:
    print(executor.run(value))
ray.shutdown()
"""


@pytest.mark.thorough
@pytest.mark.limit(200)
def test_ray_stop_leaves_nothing() -> None:
    """In a namespace of processes, as it ends all of Ray that it sees."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a namespace of processes takes root, and the unshare of util-linux")
    line = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        _STOPS,
        "sh",
        sys.executable,
        _WAITS,
    ]
    with tempfile.TemporaryDirectory(prefix="rr", dir="/tmp") as folder:  # Ray wants a short path
        done = subprocess.run(
            [*line, str(HERE)],
            env={**os.environ, "TMPDIR": folder, "PYTHONPATH": str(HERE)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=150,
            check=False,
        )
        files = [*Path(folder).glob("ringreduce-*/agent")]
    said = done.stdout.splitlines()
    assert "ranks wait" in said
    assert any(each.startswith("status") for each in said), "Ray ends programs on its nodes, too"
    assert said[said.index("left:") + 1 :] == []
    assert files == []


#: Ends Ray below a program; then says what is left but this shell, ps and sleep.
_STOPS = """
ray start --head --port=0 --num-cpus=2 --object-store-memory=80000000 --include-dashboard=false >&2
{ "$1" -c "$2" auto "$3"; echo "status $?"; } | tee "$TMPDIR/said" &
until grep -q -e "ranks wait" -e status "$TMPDIR/said"; do sleep 0.2; done
ray stop >&2
wait
for each in 1 2 3 4 5 6 7 8 9 10; do
    ps -eo args= | grep -v -e "^sh -c" -e "^ps " -e "^grep " -e "^sleep " >"$TMPDIR/left" || break
    sleep 1
done
echo left:
cat "$TMPDIR/left"
"""


def _of(folder: Path) -> list[str]:
    """Return what a program left in its folder for temporary files, and processes that have it in their environment."""
    found = [str(each) for each in folder.glob("ringreduce-*")]
    for each in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={folder}".encode() in each.read_bytes().split(b"\0"):
                found.append((each.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended
    return found
