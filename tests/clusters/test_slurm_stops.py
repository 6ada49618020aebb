"""Jobs that a real Slurm asks to stop, and runs again: none of their steps is lost or repeated."""

from __future__ import annotations

import re
import time
from itertools import product
from pathlib import Path

import pytest
from machines import Cluster, cluster_of

cluster = cluster_of("slurm", 2, slots=2)
ROOT = Path(__file__).parents[2]

#: Prints each step, and in the end the bits of its weights. In its first run it goes on until it is asked to stop.
PROGRAM = """
import os, sys
import numpy as np
import ringreduce as rr
from ringreduce.elastic import run
from ringreduce.elastic import NumpyState

rr.init()
waits = "SLURM_RESTART_COUNT" not in os.environ and sys.argv[1] == "waits"

@run
def train(state):
    while state.step < 7:
        state.weights = state.weights * 1.1 + rr.allreduce(np.full(3, state.step + rr.rank() / 7))
        state.step += 1
        if rr.rank() == 0:
            print("rank 0 step", state.step, flush=True)
        while waits and state.step == 4:
            state.commit()
        state.commit()

state = NumpyState(weights=np.zeros(3), step=0)
state.keep_on_disk(sys.argv[2], every=1000)
train(state)
if rr.rank() == 0:
    print("rank 0 weights", state.weights.tobytes().hex(), flush=True)
"""
LIMIT_S = 100.0  # of one wait; a scheduler looks when it does


def wait_for(cluster: Cluster, job: str, wanted: str) -> str:
    """Return what Slurm says of a job once that fits a regular expression."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        said = cluster.run(0, "scontrol", "show", "job", job).text
        if re.search(wanted, said, re.DOTALL):
            return said
        assert time.monotonic() < deadline, said + "".join(each.read_text() for each in cluster.shared.glob("*.out"))
        time.sleep(0.2)  # Slurm and its jobs do not say when


def submit(cluster: Cluster, name: str, options: tuple[str, ...], line: str) -> str:
    """Submit a batch script of one line; return the number of the job."""
    return submit_file(
        cluster, name, options, cluster.write(f"{name}.sh", f"#!/bin/bash\nexport PYTHONUNBUFFERED=1\n{line}\n")
    )


def submit_file(cluster: Cluster, name: str, options: tuple[str, ...], script: Path) -> str:
    """Submit a batch script; return the number of the job."""
    output = cluster.shared / f"{name}.out"
    said = cluster.run(0, "sbatch", "--parsable", "--open-mode=append", f"--output={output}", *options, str(script))
    assert said.status == 0, said.text
    return said.text.strip().splitlines()[-1]


def end_of(cluster: Cluster, name: str, job: str, queued: bool) -> list[str]:
    """Return what rank 0 has printed in all runs of a job, which ends well; let it begin at once if it is queued."""
    if queued:
        wait_for(cluster, job, "JobState=PENDING.*Restarts=1 ")
        # In the second in which its last run ended, Slurm refuses the credential of a job: it has just been revoked.
        ended = int(time.time())
        while int(time.time()) <= ended + 1:
            time.sleep(0.2)  # a later time to start is looked at twice a minute
        cluster.run(0, "scontrol", "update", f"jobid={job}", "starttime=now")
    said = wait_for(cluster, job, "JobState=(COMPLETED|FAILED|TIMEOUT|CANCELLED|PREEMPTED) ")
    output = (cluster.shared / f"{name}.out").read_text()
    assert "JobState=COMPLETED" in said, said + output
    return [line for line in output.splitlines() if line.startswith("rank 0 ")]


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[str]:
    """What rank 0 prints of a training that nothing stops."""
    cluster.write("stops.py", PROGRAM)
    done = cluster.run(0, "salloc", "-Q", "-N1", "-n2", "ringreduce", "run", "python", "stops.py", "goes", "none")
    assert done.status == 0, done.text
    found = [line for line in done.text.splitlines() if line.startswith("rank 0 ")]
    assert len(found) == 8
    return found


CASES = [("main", "-N1", ""), ("patient", "-N2", ""), ("main", "-N2", "--elastic")]
OTHERS = [("main", "-N2", ""), ("patient", "-N1", ""), ("main", "-N1", "--elastic"), ("patient", "-N2", "--elastic")]
OTHERS += [("main", "-N2", "srun"), ("patient", "-N2", "srun")]


#: How ranks are started without the launcher, and run again, as in docs/failures.md.
SRUN = """export PMIX_MCA_psec=native
srun --mpi=pmix {program}
[ $? -ne 75 ] || scontrol requeue "$SLURM_JOB_ID"
"""


def start(cluster: Cluster, name: str, options: tuple[str, ...], how: str) -> str:
    """Submit a training and wait until it waits to be stopped; return the number of the job.

    Args:
        cluster: with Slurm.
        name: of the job.
        options: of sbatch.
        how: "srun", or further options of the launcher.
    """
    program = f"python stops.py waits commits-{name}"
    line = SRUN.format(program=program) if how == "srun" else f"exec ringreduce run --requeue {how} {program}"
    job = submit(cluster, name, (*options, "-n2", "--exclusive", "--requeue"), line)
    wait_for_step_4(cluster, name)
    return job


def wait_for_step_4(cluster: Cluster, name: str) -> None:
    """Wait until a training waits to be stopped."""
    deadline = time.monotonic() + LIMIT_S
    output = cluster.shared / f"{name}.out"
    while not output.exists() or "step 4" not in output.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)  # Slurm and its jobs do not say when


@pytest.mark.parametrize(
    ("partition", "nodes", "how"), [*CASES, *(pytest.param(*each, marks=pytest.mark.thorough) for each in OTHERS)]
)
def test_a_job_that_is_preempted(
    cluster: Cluster, undisturbed: list[str], partition: str, nodes: str, how: str
) -> None:
    """At once, or with a time of grace: whatever Slurm signals then counts as one warning."""
    name = f"preempted-{partition}{nodes}{how}"
    job = start(cluster, name, (nodes, "-p", partition), how)
    urgent = cluster.run(0, "srun", "-p", "urgent", "-N2", "--exclusive", "true")
    assert urgent.status == 0, urgent.text
    assert end_of(cluster, name, job, queued=True) == undisturbed


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
def test_a_signal_to_the_batch_script(cluster: Cluster, undisturbed: list[str], signal: str) -> None:
    """Which becomes the launcher."""
    job = start(cluster, f"signal-{signal}", ("-N2",), "")
    cluster.run(0, "scancel", "--batch", f"--signal={signal}", job)
    assert end_of(cluster, f"signal-{signal}", job, queued=True) == undisturbed


def test_the_signal_that_the_documents_file_asks_for(cluster: Cluster, undisturbed: list[str]) -> None:
    """Its job is queued again by its own lines."""
    cluster.write("train.py", "import sys\nsys.argv[1:] = ['waits', 'commits-file']\n" + PROGRAM)
    smaller = ("--ntasks-per-node=1", "--cpus-per-task=1")
    job = submit_file(cluster, "file", smaller, ROOT / "docs" / "clusters" / "slurm-elastic.sh")
    wait_for_step_4(cluster, "file")
    cluster.run(0, "scancel", "--batch", "--signal=USR1", job)
    assert end_of(cluster, "file", job, queued=True) == undisturbed


@pytest.mark.parametrize(("nodes", "how"), [("-N1", ""), ("-N2", "--elastic"), ("-N2", ""), ("-N2", "srun")])
def test_a_signal_to_the_steps(cluster: Cluster, undisturbed: list[str], nodes: str, how: str) -> None:
    """And not to the batch script: on one host ranks are no step, on several mpirun's daemons are; by srun, ranks."""
    name = f"steps{nodes}{how}"
    job = start(cluster, name, (nodes,), how)
    cluster.run(0, "scancel", "--signal=USR1", job)
    assert end_of(cluster, name, job, queued=True) == undisturbed


@pytest.mark.parametrize(("nodes", "how"), [("-N2", "--elastic"), pytest.param("-N1", "", marks=pytest.mark.thorough)])
def test_scancel_stops_a_job_that_is_then_queued_again(
    cluster: Cluster, undisturbed: list[str], nodes: str, how: str
) -> None:
    """As by any warning: it sends SIGTERM to all processes."""
    name = f"scancel{nodes}{how}"
    job = start(cluster, name, (nodes,), how)
    cluster.run(0, "scancel", job)
    assert end_of(cluster, name, job, queued=True) == undisturbed


def test_a_second_scancel_ends_a_job_that_is_queued_again(cluster: Cluster) -> None:
    """For good."""
    cluster.write("stops.py", PROGRAM)
    job = start(cluster, "cancelled", ("-N1",), "")
    cluster.run(0, "scancel", job)
    wait_for(cluster, job, "JobState=PENDING.*Restarts=1 ")
    cluster.run(0, "scancel", job)
    wait_for(cluster, job, "JobState=CANCELLED.*Restarts=1 ")


@pytest.mark.thorough
def test_scancel_under_srun_ends_the_job(cluster: Cluster) -> None:
    """The ranks stop, and their commit is on disk; the batch script ends by the signal, and asks for no other run."""
    cluster.write("stops.py", PROGRAM)
    job = start(cluster, "script", ("-N2",), "srun")
    cluster.run(0, "scancel", job)
    wait_for(cluster, job, "JobState=CANCELLED.*Restarts=0 ")
    assert cluster.run(0, "sh", "-c", "ls commits-script/*.pt").status == 0


@pytest.mark.thorough
def test_ranks_of_other_hosts_hear_a_signal_to_the_steps(cluster: Cluster) -> None:
    """Also without --requeue; the job stops, and is not queued again."""
    cluster.write("stops.py", PROGRAM)
    line = "exec ringreduce run python stops.py waits commits-heard"
    job = submit(cluster, "heard", ("-N2", "-n2", "--exclusive", "--requeue"), line)
    wait_for_step_4(cluster, "heard")
    cluster.run(0, "scancel", "--signal=USR1", job)
    wait_for(cluster, job, "JobState=FAILED.*Restarts=0 .*ExitCode=75:0")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("nodes", "how", "signal"),
    [
        ("-N2", "srun", "USR1@20"),  # the ranks are the step
        *product(("-N1", "-N2"), ("", "--elastic"), ("B:USR1@20", "USR1@20")),
    ],
)
def test_a_signal_before_the_limit(cluster: Cluster, undisturbed: list[str], nodes: str, how: str, signal: str) -> None:
    """To the batch script or the steps: 20 s before the limit, or up to a minute earlier, as Slurm looks."""
    name = f"limit{nodes}{how}{signal[0]}"
    job = start(cluster, name, (nodes, "--time=2", f"--signal={signal}"), how)
    assert end_of(cluster, name, job, queued=True) == undisturbed


def test_stop_before(cluster: Cluster, undisturbed: list[str]) -> None:
    """By the end that Slurm states for the job; without a limit there is none, and an error says so."""
    options = ("-N1", "-n2", "--time=2")
    line = "exec ringreduce run --requeue --stop-before 110s python stops.py waits commits-before"
    job = submit(cluster, "before", options, line)
    assert end_of(cluster, "before", job, queued=True) == undisturbed
    done = cluster.run(0, "salloc", "-Q", "-n1", "ringreduce", "run", "--stop-before", "5m", "true")
    assert done.status == 2, done.text
    assert "nobody says when this allocation ends" in done.text
