"""The files of jobs that the documents show run as they are written, with smaller numbers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from machines import WHO, Cluster, Done, cluster_of

slurm = cluster_of("slurm", 2, slots=4)
ssh = cluster_of("ssh", 2)
pods = cluster_of("pods", 3)
trainer = cluster_of("trainjob", 3)

FILES = Path(__file__).parents[2] / "docs" / "clusters"


def submitted(cluster: Cluster, *words: str) -> Done:
    """Return how a job of Slurm ended, with what it wrote."""
    done = cluster.run(0, "sbatch", "--wait", "--quiet", "-o", "job.txt", *words)
    return Done(done.status, (cluster.shared / "job.txt").read_text() + done.text, done.seconds)


#: What each rank may use: cores, and threads by its variable.
CORES = """
print("cores of", rr.rank(), len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS"), flush=True)
"""


def places(*names: str) -> list[str]:
    """Return what two ranks on each of the hosts say."""
    return [f"rank {rank} of {2 * len(names)} on {names[rank // 2]}" for rank in range(2 * len(names))]


@pytest.mark.parametrize(
    "name", ["slurm.sh", "slurm-run.sh", pytest.param("slurm-elastic.sh", marks=pytest.mark.thorough)]
)
def test_jobs_of_slurm(slurm: Cluster, name: str) -> None:
    """By sbatch, with two ranks of two cores on each of two hosts."""
    slurm.write("train.py", WHO + CORES)
    done = submitted(slurm, "--ntasks-per-node=2", str(FILES / name))
    assert (done.status, done.ranks()) == (0, places(slurm.host(0), slurm.host(1))), done.text
    cores = len(os.sched_getaffinity(0))  # neither Slurm, in this cluster, nor mpirun binds a rank
    found = sorted(line for line in done.text.splitlines() if line.startswith("cores of "))
    assert found == [f"cores of {rank} {cores} 2" for rank in range(4)], done.text
    assert "Sorry!" not in done.text


def test_a_job_that_submit_has_handed_to_slurm(slurm: Cluster) -> None:
    """With the hosts and ranks that were asked for; without --yes, it is printed alone."""
    slurm.write("train.py", WHO)
    asked = ("--nodes", "2", "--ranks-per-node", "2", "--cores-per-rank", "2", "--time", "00:05:00")
    program = ("--log-dir", "submitted", "python", "train.py")
    printed = slurm.run(0, "ringreduce", "submit", "slurm", *asked, *program)
    assert (printed.status, "#SBATCH --nodes=2\n" in printed.text) == (0, True), printed.text
    done = slurm.run(0, "env", "SBATCH_WAIT=1", "ringreduce", "submit", "slurm", "--yes", *asked, *program)
    assert done.status == 0, done.text
    assert "Submitted batch job" in done.text
    said = [(slurm.shared / "submitted" / f"rank-{rank}.log").read_text().strip() for rank in range(4)]
    assert said == places(slurm.host(0), slurm.host(1))


@pytest.mark.parametrize("kind", ["pods", "trainer"])
def test_commands_of_kubernetes(kind: str, request: pytest.FixtureRequest) -> None:
    """In the launcher's pod: ranks run in the workers."""
    cluster: Cluster = request.getfixturevalue(kind)
    cluster.write("train.py", WHO)
    text = (FILES / ("mpijob.yaml" if kind == "pods" else "trainjob.yaml")).read_text()
    (command,) = re.findall(r'args: \["(ringreduce.*)"\]', text)
    names = ("train-worker-0", "train-worker-1") if kind == "pods" else ("train-node-0-0", "train-node-0-1")
    done = cluster.run(0, "env", "OMP_NUM_THREADS=1", *command.split('", "'))
    assert (done.status, done.ranks()) == (0, places(*names)), done.text


@pytest.mark.parametrize("name", ["pbs.sh", "lsf.sh", "gridengine.sh"])
def test_jobs_that_have_the_variables_of_a_scheduler(ssh: Cluster, name: str) -> None:
    """Those that it sets: ranks run on its hosts, reached by ssh."""
    first, second = ssh.host(0), ssh.host(1)
    ssh.write("train.py", WHO)
    lines = ssh.write("lines", f"{first}\n{first}\n{second}\n{second}\n")
    granted = ssh.write("granted", f"{first} 2 all.q@{first} UNDEFINED\n{second} 2 all.q@{second} UNDEFINED\n")
    variables = {
        "pbs.sh": {"PBS_NODEFILE": str(lines), "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": "1.a"},
        "lsf.sh": {"LSB_MCPU_HOSTS": f"{first} 2 {second} 2", "LSB_JOBID": "1"},
        "gridengine.sh": {"PE_HOSTFILE": str(granted), "JOB_ID": "1"},
    }[name] | {"PBS_O_WORKDIR": str(ssh.shared)}
    done = ssh.run(0, "bash", str(FILES / name), variables=variables)
    assert (done.status, done.ranks()) == (0, places(first, second)), done.text


def test_ranks_in_one_container(ssh: Cluster) -> None:
    """A user namespace, as Apptainer makes one, takes the place of the container."""
    ssh.write("train.py", WHO + "assert rr.local_size() == 4\n")
    inside = ssh.write("apptainer", '#!/bin/sh\nshift 2\nexec unshare --user --map-root-user --mount "$@"\n')
    inside.chmod(0o755)
    done = ssh.run(0, "sh", "-c", f'PATH={ssh.shared}:$PATH exec bash "$0"', str(FILES / "apptainer.sh"))
    assert (done.status, len(done.ranks())) == (0, 4), done.text
