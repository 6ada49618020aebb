"""`RayExecutor` on several hosts: network namespaces, with a node of Ray in each, as root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("ray", reason="`scripts/install engines` makes the environment that has Ray")

HERE = Path(__file__).parent
CLUSTER = HERE.parents[1] / "scripts" / "cluster"
#: Of `scripts/cluster`: the address of a host.
ADDRESS = "10.113.0.{}"
LIMIT_S = 500
DEATHS = 20
HOSTS = 3

pytestmark = [pytest.mark.thorough, pytest.mark.limit(1800)]


class Cluster(NamedTuple):
    """What there is on three hosts.

    Attributes:
        run: runs the program below on the first host, and returns what it writes.
        start: starts the node of Ray on a host, by its number.
    """

    run: Callable[..., str]
    start: Callable[[int], str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts with a node of Ray on each."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("hosts take root, and the ip of iproute2")
    name = f"ry{os.getpid() % 10_000}"
    folder = tmp_path_factory.mktemp("ray")
    environ = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # nothing but these hosts is in their network
        "RAY_health_check_period_ms": "1000",
    }

    def call(*words: str) -> str:
        line = [sys.executable, str(CLUSTER), "--name", name, *words]
        done = subprocess.run(
            line,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S + 60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(number: int) -> str:
        begins = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}"]
        joins = [f"--address={ADDRESS.format(1)}:6379"]
        options = [f"--node-ip-address={ADDRESS.format(number + 1)}", "--num-cpus=2"]
        options += ["--object-store-memory=100000000", "--disable-usage-stats"]
        return call("exec", str(number), "ray", "start", *(begins if number == 0 else joins), *options)

    call("up", str(HOSTS), "--rate", "10gbit")
    try:
        for number in range(HOSTS):
            start(number)
        run = [*("exec", "0", "timeout"), str(LIMIT_S), sys.executable, __file__]
        yield Cluster(lambda *words: call(*run, *words), start)
    finally:
        call("down")


def test_ranks_of_several_hosts_train_as_under_mpirun(cluster: Cluster) -> None:
    """Bit for bit, on two hosts; and nothing is left."""
    assert {"equal True", "left []"} <= {*cluster.run("train").splitlines()}


@pytest.mark.parametrize("what", ["daemon", "worker", "slot", "agent"])
def test_what_starts_daemons_dies(cluster: Cluster, what: str) -> None:
    """Or the daemon itself: the job ends, and nothing is left."""
    assert ends_of(cluster.run(what, str(DEATHS))) == ["CollectiveError", "left []"] * DEATHS


def ends_of(said: str) -> list[str]:
    """Return the lines that say how a job has ended and what is left."""
    return [line for line in said.splitlines() if line.startswith(("CollectiveError", "no error", "left "))]


def test_a_node_dies(cluster: Cluster) -> None:
    """The job ends, and nothing is left; a new node takes its place."""
    for _ in range(DEATHS):
        said = cluster.run("node", "1")
        assert ends_of(said) == ["CollectiveError", "left []"]
        restart_lost(cluster, said)


def restart_lost(cluster: Cluster, said: str) -> None:
    """Start the node again that a program has said it ended."""
    ((_, address),) = [line.split() for line in said.splitlines() if line.startswith("lost ")]
    cluster.start(int(address.rpartition(".")[2]) - 1)


def test_an_elastic_job_loses_a_node(cluster: Cluster, tmp_path: Path) -> None:
    """It begins again on the others, from its last commit, and takes the third; three times. No step is lost."""
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        said = cluster.run("elastic", str(folder))
        assert {"as one process True", "left []"} <= {*said.splitlines()}
        restart_lost(cluster, said)


# ---- the program ----


def main(what: str, argument: str = "1") -> None:
    """Start ranks on two hosts, end something, and say what came of it and what is left.

    Args:
        what: to end; or ``train``: nothing; or ``elastic``: a node, of an elastic job.
        argument: how often; for ``elastic``, a folder.
    """
    import ray

    ray.init(address=f"{ADDRESS.format(1)}:6379", log_to_driver=False)
    if what == "elastic":
        elastic(Path(argument))
    else:
        for _ in range(int(argument)):
            inelastic(what)


def inelastic(what: str) -> None:
    import ray_programs as programs

    import ringreduce as rr
    from ringreduce.common.errors import CollectiveError
    from ringreduce.ray import RayExecutor

    executor = RayExecutor(num_hosts=2, num_workers_per_host=2)
    executor.start()
    spaces = spaces_of(executor)
    if what == "train":
        on_two_nodes = {**os.environ, "RINGREDUCE_NODE_SIZE": "2"}
        print("equal", executor.run(programs.digits) == rr.run(programs.digits, np=4, env=on_two_nodes))
    else:
        assert executor.run(programs.total) == [4.0] * 4
        begun = executor.run_remote(programs.wait_for, [0])
        if what == "node":
            end_node_of(executor, spaces)
        else:
            words = {"daemon": "prted ", "worker": "ray::hold", "slot": "launcher.host_agent", "agent": "agent.py"}
            # A daemon is below a shell with the same words.
            os.kill(max(processes(spaces, words[what])), signal.SIGKILL)
        try:
            executor.run(programs.total)
            print("no error")
        except CollectiveError as error:
            print("CollectiveError", flush=True)
            print(error, file=sys.stderr)
        del begun
    executor.shutdown()
    print("left", left(spaces), flush=True)


def elastic(folder: Path) -> None:
    import ray_programs as programs

    from ringreduce.ray import RayExecutor

    executor = RayExecutor(num_workers=4, elastic=True)
    executor.start()
    spaces = spaces_of(executor)
    before = {each.host for each in executor._ranks.values()}
    with ThreadPoolExecutor() as pool:
        trained = pool.submit(executor.run, programs.train, [str(folder)])
        wait_for(lambda: trained.done() or any((folder / "commits").rglob("*.pt")))
        end_node_of(executor, spaces)
        wait_for(lambda: trained.done() or before != {each.host for each in executor._ranks.values()} != set())
        (folder / "trains-4").unlink()
        wait_for(lambda: trained.done() or (folder / "trains-4").exists())
        (folder / "finish").touch()
        found = trained.result()
    steps, sizes = found[0][2:]
    print("steps", steps, "by so many ranks:", sizes)
    print("as one process", found == [(rank, -float(steps), steps, sizes) for rank in range(4)])
    executor.shutdown()
    print("left", left(spaces))


def spaces_of(executor: Any) -> set[str]:
    """Return the networks of an executor's ranks, and this one."""
    return {os.readlink(f"/proc/{pid}/ns/net") for pid in [*executor.run(os.getpid), os.getpid()]}


def processes(spaces: set[str], *parts: str) -> list[int]:
    """Return the processes in some networks that have some words in their command line."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = each.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            is_here = os.readlink(each.parent / "ns" / "net") in spaces
        except OSError:
            continue  # it has ended
        if is_here and all(part in line for part in parts):
            found.append(int(each.parent.name))
    return found


def end_node_of(executor: Any, spaces: set[str]) -> None:
    """Kill the node of a rank that is not on this host, and say which it is."""
    host = next(each.host for each in executor._ranks.values() if each.host != ADDRESS.format(1))
    (raylet,) = processes(spaces, "raylet/raylet", f"--node_ip_address={host} ")
    os.kill(raylet, signal.SIGKILL)
    print("lost", host, flush=True)


def wait_for(true: Callable[[], object]) -> None:
    until = time.monotonic() + LIMIT_S / 4
    while not true():
        assert time.monotonic() < until
        time.sleep(0.1)  # there is nothing to wait on


def left(spaces: set[str]) -> list[str]:
    """Return what is left of a job once nothing is, or the time is over."""
    import ray

    until = time.monotonic() + 30
    words = ("prted ", "stand_in", "ringreduce run", "launcher.host_agent", "ray::hold", "ray::RankActor")
    while True:
        groups = [each["state"] for each in ray.util.placement_group_table().values()]
        found = [each for each in groups if each != "REMOVED"]
        found += [part for part in words for _ in processes(spaces, part)]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.2)  # Ray removes groups, and what was killed ends, a little later


if __name__ == "__main__":
    main(*sys.argv[1:])
