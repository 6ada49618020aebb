"""Elastic jobs on hosts that are lost: without power, without a cable, with packets that vanish; and that come back."""

from __future__ import annotations

import re
import subprocess
import time
from itertools import pairwise

import pytest
from lost_hosts import LOSSES, Training, elastic, end_daemon, listed, nothing_is_left, ranks_of
from machines import Cluster, cluster_of, environ

cluster = cluster_of("ssh", 3)
slurm = cluster_of("slurm", 3)
pods = cluster_of("pods", 4, slots=1)


@pytest.mark.thorough
def test_hosts_need_no_folder_in_common(cluster: Cluster) -> None:
    """The host of rank 0, which wrote the first copy, is lost; the other one is copied to a host that has none."""
    listed = ",".join(f"{cluster.host(number)}:1" for number in (1, 2, 0))
    doomed = cluster.host(1)
    words = ("ringreduce", "run", "--elastic", "-np", "2", "-H", listed)
    training = Training(cluster, doomed, *words, sizes=2, replicas=2)
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
    assert said in [ranks_of(cluster, size) for size in (2, 3)], training.text
    nothing_is_left(cluster, 0, 1, 2)


HEARS = """
import pathlib, sys
import numpy as np
import ringreduce as rr

rr.init()
rr.barrier()
pathlib.Path(sys.argv[1]).touch()
try:
    while True:
        rr.allreduce(np.ones(3))
except rr.PeerLostError as error:
    print("rank", rr.rank(), error, flush=True)
"""


@pytest.mark.thorough
def test_each_rank_hears_which_host_is_lost(cluster: Cluster) -> None:
    """With Open MPI's own detector, before mpirun notices the loss and ends them all."""
    cluster.write("hears.py", HEARS)
    begun = cluster.shared / "hears"
    detector = [word for name in ("", "_thread") for word in ("-x", f"OMPI_MCA_mpi_ft_detector{name}=1")]
    line = cluster.line(0, "timeout", "60", *elastic(cluster, *detector), "python", "hears.py", str(begun))
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=cluster.shared, env=environ()) as job:
        while not begun.exists():
            assert job.poll() is None
            time.sleep(0.02)  # nothing says so; the watchdog of the test ends this
        cluster.die(2)
        said, _ = job.communicate()
    cluster.boot(2)
    for rank in (0, 1):
        assert re.search(rf"rank {rank} rank 2 is lost: .*\(on {cluster.host(2)}\)", said), said


@pytest.mark.parametrize("what", ["power", pytest.param("cable", marks=pytest.mark.thorough), "packets"])
def test_a_job_begins_again_without_a_lost_host(cluster: Cluster, what: str) -> None:
    """From its last commit: each step is made once, and nothing is left on the hosts that live."""
    doomed = cluster.host(2)
    training = Training(cluster, doomed, *elastic(cluster))
    training.until("waits")
    LOSSES[what].lose(cluster)
    ended = training.end()
    cluster.boot(2)
    for number in range(3):  # their tables of neighbours may have been changed
        cluster.run(number, "ip", "neigh", "flush", "dev", "eth0", "nud", "permanent")
    assert ended == (0, ranks_of(cluster, 2)), training.text
    assert f"ringreduce: {doomed} is lost: " in training.text
    assert f"the job begins again from its last commit, without {doomed}" in training.text
    nothing_is_left(cluster, 0, 1)


@pytest.mark.thorough
def test_a_lost_host_that_a_script_does_not_list_any_more(cluster: Cluster) -> None:
    """The job goes on without it, on the hosts that the script names, and spends no restart."""
    script = cluster.write("hosts.sh", f"#!/bin/sh\ncat {cluster.shared}/listed\n")
    script.chmod(0o755)
    cluster.write("listed", "".join(f"{cluster.host(number)}:1\n" for number in range(3)))
    doomed = cluster.host(2)
    words = ("ringreduce", "run", "--elastic", "-np", "3", "--host-discovery-script", str(script))
    training = Training(cluster, doomed, *words)
    training.until("waits")
    cluster.die(2)
    cluster.write("listed.new", "".join(f"{cluster.host(number)}:1\n" for number in range(2)))
    (cluster.shared / "listed.new").rename(cluster.shared / "listed")
    ended = training.end()
    cluster.boot(2)
    assert ended == (0, ranks_of(cluster, 2)), training.text
    assert f"{doomed} is no longer listed" in training.text
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
    assert ended == (0, ranks_of(cluster, 3)), training.text
    assert f"{cluster.host(2)} answers again" in training.text


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_host_that_stood_still_brings_back_nothing(cluster: Cluster, replicas: int) -> None:
    """Its rank, alone with its copy, may make a step or two, and commit them; what the others made meanwhile stays."""
    training = Training(cluster, cluster.host(2), *elastic(cluster), sizes=3, pause_s=0.1, replicas=replicas)
    training.until("waits")
    cluster.freeze(2)
    training.until("again")
    cluster.thaw(2)
    ended = training.end()
    assert ended == (0, ranks_of(cluster, 3)), training.text
    assert f"{cluster.host(2)} answers again" in training.text
    _, *later = [set(made) for _, made in sorted(training.steps().items())]
    assert all(len(one & other) <= 1 for one, other in pairwise(later)), training.steps()


def test_a_job_starts_without_a_host_that_is_down(cluster: Cluster) -> None:
    """It has hosts enough for --min-np."""
    cluster.die(2)
    line = ("ringreduce", "run", "--elastic", "-np", "3", "--min-np", "2", "-H", listed(cluster), "python", "who.py")
    done = cluster.run(0, *line)
    cluster.boot(2)
    assert done.status == 0, done.text
    assert f"the job begins without {cluster.host(2)}" in done.text
    assert {f"rank {rank} of 2 on {cluster.host(rank)}" for rank in range(2)} <= set(done.ranks()), done.text


@pytest.mark.thorough
def test_a_lost_host_is_waited_for_where_others_are_too_few(cluster: Cluster) -> None:
    """It is named meanwhile; once it answers, the job begins again from its last commit, with all ranks."""
    doomed = cluster.host(2)
    training = Training(cluster, doomed, *elastic(cluster, "--min-np", "3"))
    training.until("waits")
    cluster.die(2)
    training.until_said(f"waiting for 3 slots; 2 can be used; {doomed} is lost")
    cluster.boot(2)
    ended = training.end()
    assert ended == (0, ranks_of(cluster, 3)), training.text
    assert f"{doomed} answers again" in training.text


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
    training = Training(cluster, doomed, "ringreduce", "run", "-H", listed(cluster))
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
    assert ended == (0, ranks_of(slurm, 2)), training.text
    nothing_is_left(slurm, 0, 1)


@pytest.mark.thorough
def test_a_pod_that_is_deleted(pods: Cluster) -> None:
    """The job begins again in the others."""
    training = Training(pods, "train-worker-2", "ringreduce", "run", "--elastic", "-np", "3")
    training.until("waits")
    pods.die(3)
    ended = training.end()
    assert ended == (0, [f"rank {rank} of 2 on train-worker-{rank} True" for rank in range(2)]), training.text
