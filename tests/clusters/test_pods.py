"""MPI jobs of Kubernetes: a launcher and workers, with the files and variables that Kubeflow gives their containers."""

from __future__ import annotations

import pytest
from machines import Cluster, cluster_of

operator = cluster_of("pods", 3)
trainer = cluster_of("trainjob", 3)


@pytest.mark.parametrize("kind", ["operator", "trainer"])
def test_ranks_run_in_the_workers(kind: str, request: pytest.FixtureRequest) -> None:
    """As many in each as it has slots, none in the launcher."""
    cluster: Cluster = request.getfixturevalue(kind)
    workers = ["train-worker-0", "train-worker-1"] if kind == "operator" else ["train-node-0-0", "train-node-0-1"]
    expected = [f"rank {rank} of 4 on {workers[rank // 2]}" for rank in range(4)]
    port = () if kind == "operator" else ("--ssh-port", "2222")  # where sshd of a user who is not root listens
    for asked in ((), ("-np", "4")):
        done = cluster.run(0, "ringreduce", "run", *port, *asked, "python", "who.py")
        assert (done.status, done.ranks()) == (0, expected), done.text


def test_more_ranks_than_the_workers_have_slots(operator: Cluster) -> None:
    """Are refused; they are not put where the launcher is."""
    done = operator.run(0, "ringreduce", "run", "-np", "5", "python", "who.py")
    assert done.status == 2, done.text
    assert "more than the 4 slots of the allocation" in done.text


def test_a_dry_run_names_the_file_of_hosts(operator: Cluster) -> None:
    """And the variable that names it."""
    done = operator.run(0, "ringreduce", "run", "--dry-run", "python", "who.py")
    assert "from OMPI_MCA_orte_default_hostfile: train-worker-0.train.default.svc:2," in done.text, done.text


def test_a_discovery_script_is_found_after_it_has_changed(operator: Cluster) -> None:
    """Kubelet exchanges the folder that its path goes through; the path that users give stays."""
    program = """
import sys
import ringreduce as rr
rr.init()
print("rank", rr.rank(), "of", rr.size(), flush=True)
"""
    operator.write("size.py", program)
    asked = ("--elastic", "-np", "2", "--max-np", "4", "--slots", "2")
    asked += ("--host-discovery-script", "/etc/mpi/discover_hosts.sh")
    operator.list_workers(1, 2)
    operator.list_workers(2, 2)
    done = operator.run(0, "ringreduce", "run", *asked, "python", "size.py")
    assert (done.status, len(done.ranks())) == (0, 4), done.text
    assert "its last answer counts" not in done.text


@pytest.mark.parametrize(
    ("signal", "options"),
    [("TERM", ""), ("TERM", "--elastic"), pytest.param("USR1", "", marks=pytest.mark.thorough), ("USR1", "--elastic")],
)
def test_a_signal_to_the_launcher_stops_the_ranks(operator: Cluster, signal: str, options: str) -> None:
    """As kubelet sends it to the first process of the pod, in which no rank runs."""
    program = """
import os, sys
from pathlib import Path
import ringreduce as rr
rr.init()
while not rr.stopping():
    Path("ready").touch()
print("rank", rr.rank(), "saved", flush=True)
sys.exit(os.EX_TEMPFAIL)
"""
    operator.write("stops.py", program)
    line = f"""
rm -f ready
ringreduce run --grace 40 {options} python stops.py &
while [ ! -e ready ]; do sleep 0.1; done
kill -{signal} $!
wait $!
"""
    done = operator.run(0, "bash", "-c", line)
    assert (done.status, done.ranks()) == (75, [f"rank {rank} saved" for rank in range(4)]), done.text


def test_ranks_that_do_not_stop_end_with_the_grace(operator: Cluster) -> None:
    """A program that never asks ends as by any signal."""
    operator.write("goes.py", "import ringreduce as rr\nrr.init()\nopen('ready', 'w')\nwhile True: rr.barrier()\n")
    line = """
rm -f ready
ringreduce run --grace 0.5 python goes.py &
while [ ! -e ready ]; do sleep 0.1; done
kill -TERM $!
wait $!
"""
    done = operator.run(0, "bash", "-c", line)
    assert done.status == 143, done.text
    assert "ended by SIGTERM; all ranks have ended" in done.text
