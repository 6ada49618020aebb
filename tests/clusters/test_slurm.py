"""Jobs of a real Slurm: `ringreduce run` and `srun` in its allocations."""

from __future__ import annotations

import pytest
from machines import SEEN, Cluster, cluster_of

cluster = cluster_of("slurm", 3, slots=4)


def first_hosts(cluster: Cluster, count: int) -> str:
    """Return the option that asks Slurm for the first hosts: others may be idle sooner after an earlier job."""
    return f"--nodelist={','.join(map(cluster.host, range(count)))}"


@pytest.mark.parametrize(
    ("asked", "slots"), [(("-N2", "-n4", "--ntasks-per-node=2"), (2, 2)), (("-N3", "-n5"), (3, 1, 1)), (("-n1",), (1,))]
)
def test_ranks_run_on_the_hosts_of_the_allocation(
    cluster: Cluster, asked: tuple[str, ...], slots: tuple[int, ...]
) -> None:
    """As many on each as Slurm has granted there."""
    done = cluster.run(
        0, "salloc", "-Q", *asked, first_hosts(cluster, len(slots)), "ringreduce", "run", "python", "who.py"
    )
    numbers = [number for number, count in enumerate(slots) for _ in range(count)]
    expected = [f"rank {rank} of {len(numbers)} on {cluster.host(number)}" for rank, number in enumerate(numbers)]
    assert (done.status, done.ranks()) == (0, expected), done.text


def test_a_dry_run_says_which_hosts_slurm_has_granted(cluster: Cluster) -> None:
    """By which variable, and how many slots each has."""
    asked = ("-N2", "-n2", first_hosts(cluster, 2))
    done = cluster.run(0, "salloc", "-Q", *asked, "ringreduce", "run", "--dry-run", "python", "who.py")
    first, second = cluster.host(0), cluster.host(1)
    assert f"# hosts of Slurm, from SLURM_JOB_NODELIST: {first}:1,{second}:1; tried on Slurm 22.05\n" in done.text


def test_more_ranks_than_slurm_has_granted(cluster: Cluster) -> None:
    """Are refused, with what there is."""
    done = cluster.run(0, "salloc", "-Q", "-N2", "-n2", "ringreduce", "run", "-np", "4", "python", "who.py")
    assert done.status == 2, done.text
    assert "more than the 2 slots of the allocation" in done.text


def test_a_heterogeneous_job_is_refused(cluster: Cluster) -> None:
    """One rank would train alone; the message says what runs."""
    asked = ("salloc", "-Q", "-N1", "-n1", ":", "-N2", "-n2")
    done = cluster.run(0, *asked, "ringreduce", "run", "python", "who.py")
    assert done.status == 2, done.text
    assert "heterogeneous job of Slurm (2 components)" in done.text


@pytest.mark.parametrize("slots", [(2, 2), (1, 1, 1)])
def test_srun_starts_ranks(cluster: Cluster, slots: tuple[int, ...]) -> None:
    """By PMIx."""
    asked = (f"-N{len(slots)}", f"-n{sum(slots)}", f"--ntasks-per-node={slots[0]}", first_hosts(cluster, len(slots)))
    quiet = {"PMIX_MCA_psec": "native"}
    done = cluster.run(0, "srun", "--mpi=pmix", *asked, "python", "who.py", variables=quiet)
    numbers = [number for number, count in enumerate(slots) for _ in range(count)]
    expected = [f"rank {rank} of {len(numbers)} on {cluster.host(number)}" for rank, number in enumerate(numbers)]
    assert (done.status, done.ranks()) == (0, expected), done.text
    assert "Sorry!" not in done.text


def test_one_address_shows_what_srun_has_started(cluster: Cluster) -> None:
    """By a variable: rank 0 hears the ranks of other hosts, and alone listens."""
    cluster.write("seen.py", SEEN)
    token = str(cluster.shared / "token")
    settings = {"PMIX_MCA_psec": "native", "RINGREDUCE_STATUS": "9400", "RINGREDUCE_STATUS_TOKEN_FILE": str(token)}
    asked = ("-N2", "-n3", first_hosts(cluster, 2))
    done = cluster.run(0, "srun", "--mpi=pmix", *asked, "python", "seen.py", token, variables=settings)
    expected = [f"rank {rank} of 3 on {cluster.host(number)}" for rank, number in enumerate((0, 0, 1))]
    assert (done.status, done.ranks()) == (0, expected), done.text


@pytest.mark.parametrize("kind", ["pmi2", "none"])
def test_srun_that_does_not_connect_open_mpi(cluster: Cluster, kind: str) -> None:
    """Ends in one sentence that names what does."""
    done = cluster.run(0, "srun", f"--mpi={kind}", "-N2", "-n2", "python", "who.py")
    assert done.status, done.text
    assert "srun --mpi=pmix" in done.text
    assert "MPICH" not in done.text
