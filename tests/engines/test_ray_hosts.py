"""`RayExecutor` on several hosts: network namespaces, with a node of Ray in each, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="`scripts/install engines` makes the environment that has Ray")

HERE = Path(__file__).parent
CLUSTER = HERE.parents[1] / "scripts" / "cluster"
#: Of `scripts/cluster`: the address of a host.
ADDRESS = "10.113.0.{}"
LIMIT_S = 100

pytestmark = [pytest.mark.thorough, pytest.mark.limit(600)]


@pytest.fixture(scope="module")
def run_on_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """A function that runs the program below on the first of three hosts, and returns what it and Ray write."""
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

    call("up", "3", "--rate", "10gbit")
    try:
        for number in range(3):
            begins = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}"]
            joins = [f"--address={ADDRESS.format(1)}:6379"]
            options = [f"--node-ip-address={ADDRESS.format(number + 1)}", "--num-cpus=2"]
            options += ["--object-store-memory=100000000", "--disable-usage-stats"]
            call("exec", str(number), "ray", "start", *(begins if number == 0 else joins), *options)
        yield lambda *words: call("exec", "0", "timeout", str(LIMIT_S), sys.executable, __file__, *words)
    finally:
        call("down")


def test_ranks_of_several_hosts_train_as_under_mpirun(run_on_host: Callable[..., str]) -> None:
    """Bit for bit, on two hosts; and nothing is left."""
    assert {"equal True", "left []"} <= {*run_on_host("train").splitlines()}


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("what", ["daemon", "worker"])
def test_a_daemon_that_dies_ends_the_job(run_on_host: Callable[..., str], what: str, number: int) -> None:
    """Or the worker of Ray that runs it; all ranks end, and nothing is left."""
    assert {"CollectiveError", "left []"} <= {*run_on_host(what).splitlines()}


def test_a_node_that_dies_ends_the_job(run_on_host: Callable[..., str]) -> None:
    """The last test, as the cluster has one node less then."""
    assert {"CollectiveError", "left []"} <= {*run_on_host("node").splitlines()}


def test_an_elastic_job_goes_on_without_a_node_and_takes_another(
    run_on_host: Callable[..., str], tmp_path: Path
) -> None:
    """From its last commit; with a node of those that are left, or a new one."""


# ---- the program ----


def main(what: str) -> None:
    """Start ranks on two hosts, end something, and say what came of it and what is left."""
    import signal
    import time

    import ray
    import ray_programs as programs

    import ringreduce as rr
    from ringreduce.common.errors import CollectiveError
    from ringreduce.ray import RayExecutor

    def processes(*parts: str) -> list[int]:
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

    ray.init(address=f"{ADDRESS.format(1)}:6379", log_to_driver=False)
    executor = RayExecutor(num_hosts=2, num_workers_per_host=2)
    executor.start()
    pids = executor.run(os.getpid)
    spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in [*pids, os.getpid()]}
    others = [each for each in executor._ranks.values() if each.host != ADDRESS.format(1)]
    if what == "train":
        on_two_nodes = {**os.environ, "RINGREDUCE_NODE_SIZE": "2"}
        print("equal", executor.run(programs.digits) == rr.run(programs.digits, np=4, env=on_two_nodes))
    else:
        assert executor.run(programs.total) == [4.0] * 4
        begun = executor.run_remote(programs.wait_for, [0])
        if what == "node":
            (victim,) = processes("raylet/raylet", f"--node_ip_address={others[0].host} ")
        elif what == "daemon":
            victim = max(pid for pid in processes("prted ") if os.readlink(f"/proc/{pid}/exe").endswith("prted"))
        else:
            (victim, *_) = processes("ray::hold")
        os.kill(victim, signal.SIGKILL)
        try:
            executor.run(programs.total)
            print("no error")
        except CollectiveError as error:
            print("CollectiveError", flush=True)
            print(error, file=sys.stderr)
        del begun
    executor.shutdown()
    until = time.monotonic() + 30
    while True:
        left = [each["state"] for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
        left += [str(pid) for part in ("prted ", "stand_in", "ringreduce run") for pid in processes(part)]
        if not left or time.monotonic() > until:
            break
        time.sleep(0.2)  # Ray removes groups, and what was killed ends, a little later
    print("left", left)


if __name__ == "__main__":
    main(sys.argv[1])
