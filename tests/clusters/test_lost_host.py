"""Elastic jobs on hosts that are lost: without power, without a cable, with packets that vanish; and that come back."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import pytest
from machines import Cluster, cluster_of

cluster = cluster_of("ssh", 3)
slurm = cluster_of("slurm", 3)
pods = cluster_of("pods", 4, slots=1)

LEFT_S = 20.0  # that daemons of hosts that live have to end, with their ranks
STEPS = 30
LOST_AT = 12
#: Weights depend on each step, and on each once. In step 12 of its first job, the rank on the doomed host waits for its
#: end. A job that is to take a host back trains on until it has.
TRAIN = """
import os, pathlib, signal, socket, sys
import torch
import ringreduce.torch as hvd

doomed, commits, steps, lost_at, sizes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
disk = sys.argv[6]
restart = int(os.environ.get("RINGREDUCE_RESTART", "0"))
hvd.init()
model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())

@hvd.elastic.run
def train(state):
    while state.step < steps or hvd.size() < sizes:
        if state.step == lost_at and restart == 0 and socket.gethostname() == doomed:
            pathlib.Path(commits, "waits").touch()
            while True:
                signal.pause()
        optimizer.zero_grad()
        model(torch.full((1, 3), float(state.step + 1), dtype=torch.float64)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        if restart and state.step == lost_at + 1:
            pathlib.Path(commits, "again").touch()

state = hvd.elastic.TorchState(model, optimizer, step=0)
begun = state.keep_on_disk(disk, replicas=1 if disk == commits else 2)
train(state)
total = -sum(range(1, state.step + 1))
where = f"rank {hvd.rank()} of {hvd.size()} on {socket.gethostname()}"
print(where, model.weight.tolist() == [[total] * 3] and (begun is not None) == (restart > 0), flush=True)
"""


class Training:
    """A job that runs, and whose output is in a file.

    Args:
        cluster: on which.
        doomed: the name by which the host that is to be lost calls itself.
        words: what starts the ranks, up to the program.
        sizes: how many ranks it has to have at the end.
        disk: a folder that each host has for itself, for commits; empty: they are in one that all share.
    """

    def __init__(self, cluster: Cluster, doomed: str, *words: str, sizes: int = 1, disk: str = "") -> None:
        self.commits = cluster.shared / f"commits-{time.monotonic_ns()}"
        self.commits.mkdir(mode=0o700)
        program = cluster.write("train.py", TRAIN)
        arguments = (doomed, str(self.commits), str(STEPS), str(LOST_AT), str(sizes), disk or str(self.commits))
        line = cluster.line(0, "timeout", "--kill-after=5", "170", *words, "python", str(program), *arguments)
        self._output = cluster.shared / f"{self.commits.name}.txt"
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=cluster.shared
            )

    def until(self, name: str) -> None:
        """Wait until a rank has made a file."""
        while not (self.commits / name).exists():
            assert self._process.poll() is None, self.text
            time.sleep(0.05)  # nothing says so; the watchdog of the test ends this

    @property
    def text(self) -> str:
        """What was written so far."""
        return self._output.read_text()

    def end(self) -> tuple[int, list[str]]:
        """Return the status, and what the ranks said at the end, sorted."""
        status = self._process.wait()
        return status, sorted(line for line in self.text.splitlines() if line.startswith("rank "))


def nothing_is_left(cluster: Cluster, *numbers: int) -> None:
    """Require that no rank and no daemon stays on hosts that live; daemons end soon after their mpirun."""
    deadline = time.monotonic() + LEFT_S
    for number in numbers:
        while True:
            found = cluster.run(number, "sh", "-c", "ps -eo args | grep -E '[t]rain.py|[p]rted|[p]rterun' || true")
            if found.text == "":
                break
            assert time.monotonic() < deadline, f"on host {number}: {found.text}"
            time.sleep(0.2)  # they do not say when they have ended


def elastic(cluster: Cluster, *options: str) -> tuple[str, ...]:
    """Return what starts an elastic job of three ranks on three hosts."""
    listed = ",".join(f"{cluster.host(number)}:1" for number in range(3))
    return ("ringreduce", "run", "--elastic", "-np", "3", "-H", listed, *options)


def vanish(cluster: Cluster, number: int) -> None:
    """Let all that is sent to and from a host be lost, while its links are up."""
    for host, peer in ((0, number), (number, 0), (1, number), (number, 1)):
        address = f"10.113.0.{peer + 1}"
        lost = ("ip", "neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0")
        assert cluster.run(host, *lost).status == 0


def end_daemon(cluster: Cluster, number: int) -> None:
    """Kill mpirun's daemon on a host, which lives on."""
    assert cluster.run(number, "pkill", "-KILL", "prted").status == 0


@pytest.mark.thorough
def test_hosts_need_no_folder_in_common(cluster: Cluster) -> None:
    """The host of rank 0, which wrote the first copy, is lost; the other one is copied to a host that has none."""
    listed = ",".join(f"{cluster.host(number)}:1" for number in (1, 2, 0))
    doomed = cluster.host(1)
    words = ("ringreduce", "run", "--elastic", "-np", "2", "-H", listed)
    training = Training(cluster, doomed, *words, sizes=2, disk=f"/root/{time.monotonic_ns()}/commits")
    training.until("waits")
    cluster.die(1)
    status, said = training.end()
    cluster.boot(1)
    assert status == 0, training.text
    hosts = {line.split()[5]: line.split()[6] for line in said}
    assert hosts == {cluster.host(0): "True", cluster.host(2): "True"}, training.text
    assert "are lost" not in training.text
    nothing_is_left(cluster, 0, 2)


@pytest.mark.thorough
def test_a_killed_daemon_ends_no_elastic_job(cluster: Cluster) -> None:
    """The job begins again from its last commit: on all hosts, or without that one, as mpirun says of it."""
    training = Training(cluster, cluster.host(2), *elastic(cluster))
    training.until("waits")
    end_daemon(cluster, 2)
    status, said = training.end()
    assert status == 0, training.text
    assert said in [
        [f"rank {rank} of {size} on {cluster.host(rank)} True" for rank in range(size)] for size in (2, 3)
    ], training.text
    nothing_is_left(cluster, 0, 1, 2)


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param(Cluster.die, id="power"),
        pytest.param(Cluster.unplug, id="cable", marks=pytest.mark.thorough),
        pytest.param(vanish, id="packets"),
    ],
)
def test_a_job_begins_again_without_a_lost_host(cluster: Cluster, lose: Callable[[Cluster, int], None]) -> None:
    """From its last commit: each step is made once, and nothing is left on the hosts that live."""
    doomed = cluster.host(2)
    training = Training(cluster, doomed, *elastic(cluster))
    training.until("waits")
    lose(cluster, 2)
    ended = training.end()
    cluster.boot(2)
    for number in range(3):  # their tables of neighbours may have been changed
        cluster.run(number, "ip", "neigh", "flush", "dev", "eth0", "nud", "permanent")
    assert ended == (0, [f"rank {rank} of 2 on {cluster.host(rank)} True" for rank in range(2)]), training.text
    assert f"ringreduce: {doomed} is lost: " in training.text
    assert f"the job begins again from its last commit, without {doomed}" in training.text
    nothing_is_left(cluster, 0, 1)


@pytest.mark.thorough
def test_a_host_that_comes_back_is_used_at_a_commit(cluster: Cluster) -> None:
    """Once it answers; the job then begins again with as many ranks as at first."""
    training = Training(cluster, cluster.host(2), *elastic(cluster), sizes=3)
    training.until("waits")
    cluster.die(2)
    training.until("again")
    cluster.boot(2)
    ended = training.end()
    assert ended == (0, [f"rank {rank} of 3 on {cluster.host(rank)} True" for rank in range(3)]), training.text
    assert f"{cluster.host(2)} answers again" in training.text


@pytest.mark.thorough
def test_a_spare_host_takes_the_place_of_a_lost_one(cluster: Cluster) -> None:
    """Where more hosts are listed than ranks need."""
    doomed = cluster.host(1)
    training = Training(cluster, doomed, *elastic(cluster, "-np", "2"), sizes=2)
    training.until("waits")
    cluster.die(1)
    ended = training.end()
    cluster.boot(1)
    expected = [f"rank 0 of 2 on {cluster.host(0)} True", f"rank 1 of 2 on {cluster.host(2)} True"]
    assert ended == (0, expected), training.text


def test_a_job_that_is_not_elastic_ends(cluster: Cluster) -> None:
    """With the name of the host."""
    doomed = cluster.host(2)
    listed = ",".join(f"{cluster.host(number)}:1" for number in range(3))
    training = Training(cluster, doomed, "ringreduce", "run", "-H", listed)
    training.until("waits")
    cluster.die(2)
    status, said = training.end()
    cluster.boot(2)
    assert (status != 0, said) == (True, []), training.text
    assert f"{doomed} is lost" in training.text
    nothing_is_left(cluster, 0, 1)


@pytest.mark.thorough
def test_slurm_keeps_an_allocation_whose_host_is_lost(slurm: Cluster) -> None:
    """With --no-kill; the job begins again on the other hosts of it."""
    doomed = slurm.host(2)
    asked = ("salloc", "-Q", "--no-kill", "-N3", "-n3", "--ntasks-per-node=1")
    training = Training(slurm, doomed, *asked, "ringreduce", "run", "--elastic")
    training.until("waits")
    slurm.die(2)
    ended = training.end()
    assert ended == (0, [f"rank {rank} of 2 on {slurm.host(rank)} True" for rank in range(2)]), training.text
    nothing_is_left(slurm, 0, 1)


@pytest.mark.thorough
def test_a_pod_that_is_deleted(pods: Cluster) -> None:
    """The job begins again in the others."""
    training = Training(pods, "train-worker-2", "ringreduce", "run", "--elastic", "-np", "3")
    training.until("waits")
    pods.die(3)
    ended = training.end()
    assert ended == (0, [f"rank {rank} of 2 on train-worker-{rank} True" for rank in range(2)]), training.text
