"""Which hosts a scheduler has granted, by the variables that it sets."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.schedulers import Allocation


def granted(environ: dict[str, str], library: str = "") -> tuple[str, dict[str, int]]:
    """Return the name of the scheduler that the variables speak of, and the slots by host."""
    found = Allocation.find(environ, library)
    return found.scheduler.name, found.slots


def in_slurm(listed: str) -> list[str]:
    """Return the hosts of a list of Slurm's."""
    return [*granted({"SLURM_JOB_NODELIST": listed})[1]]


def test_a_list_of_names_needs_no_command_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has Slurm's variables and may lack scontrol; a list that only this reads is refused then."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert in_slurm("b,a") == ["b", "a"]
    with pytest.raises(ConfigError, match=r"NODELIST='n\[1-2\]'.* No such file .*'scontrol'; name"):
        in_slurm("n[1-2]")
    failing = tmp_path / "scontrol"
    failing.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    failing.chmod(0o755)
    with pytest.raises(ConfigError, match=r"NODELIST='n\[1-2\]': broken; name them by -H"):
        in_slurm("n[1-2]")


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="there is no Slurm here")
def test_brackets_are_read_by_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Slurm's order, with the zeros of the first number; a list that it cannot read is an error."""
    settings = tmp_path / "slurm.conf"
    settings.write_text("ClusterName=lab\nSlurmctldHost=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(settings))
    assert in_slurm("gpu[08-10,2],login") == ["gpu08", "gpu09", "gpu10", "gpu2", "login"]
    with pytest.raises(ConfigError, match=r"NODELIST='a\[3-1\]'; name them by -H"):
        in_slurm("a[3-1]")


@pytest.mark.parametrize(
    ("environ", "slots"),
    [
        ({}, {"n1": 1, "n2": 1, "n3": 1}),
        ({"SLURM_TASKS_PER_NODE": "2(x2),1"}, {"n1": 2, "n2": 2, "n3": 1}),
        ({"SLURM_TASKS_PER_NODE": "4"}, {"n1": 4, "n2": 4, "n3": 4}),
        ({"SLURM_JOB_CPUS_PER_NODE": "8(x3)"}, {"n1": 8, "n2": 8, "n3": 8}),
    ],
)
def test_slurm_says_how_many_slots_each_host_has(environ: dict[str, str], slots: dict[str, int]) -> None:
    """By its tasks, or else by its processors."""
    assert granted({"SLURM_JOB_NODELIST": "n1,n2,n3", **environ}) == ("Slurm", slots)


@pytest.mark.parametrize("text", ["2(x2)", "two", "2(x9999999999)"])
def test_counts_that_do_not_fit_the_hosts_are_refused(text: str) -> None:
    """With both in the message."""
    with pytest.raises(ConfigError, match="SLURM_TASKS_PER_NODE"):
        Allocation.find({"SLURM_JOB_NODELIST": "n1,n2,n3", "SLURM_TASKS_PER_NODE": text})


def test_pbs_and_lsf_name_a_host_for_each_slot(tmp_path: Path) -> None:
    """In files, or LSF in a variable of hosts and counts; without any there is no allocation."""
    file = tmp_path / "hosts"
    file.write_text("a\nb\na\na\n")
    assert granted({"PBS_NODEFILE": str(file)}) == ("PBS", {"a": 3, "b": 1})
    assert granted({"LSB_DJOB_HOSTFILE": str(file)}) == ("LSF", {"a": 3, "b": 1})
    assert granted({"LSB_MCPU_HOSTS": "a 2 b 4"}) == ("LSF", {"a": 2, "b": 4})
    assert Allocation.find({"PATH": "/bin"}) is None
    with pytest.raises(ConfigError, match="LSB_MCPU_HOSTS"):
        Allocation.find({"LSB_MCPU_HOSTS": "a two"})
    with pytest.raises(ConfigError, match="PBS_NODEFILE"):
        Allocation.find({"PBS_NODEFILE": str(tmp_path / "none")})
    file.write_text("\n")
    with pytest.raises(ConfigError, match="no host with slots"):
        Allocation.find({"PBS_NODEFILE": str(file)})


def test_grid_engine_lists_hosts_with_slots_and_queues(tmp_path: Path) -> None:
    """A host may be there by several queues."""
    file = tmp_path / "hosts"
    file.write_text("a 2 all.q@a UNDEFINED\nb 1 all.q@b UNDEFINED\na 1 fast.q@a <NULL>\n")
    assert granted({"PE_HOSTFILE": str(file)}) == ("Grid Engine", {"a": 3, "b": 1})
    file.write_text("a two all.q@a\n")
    with pytest.raises(ConfigError, match="expected a host and its slots"):
        Allocation.find({"PE_HOSTFILE": str(file)})


FILES = [
    ("PRTE_MCA_prte_default_hostfile", "Open MPI"),
    ("OMPI_MCA_orte_default_hostfile", "Open MPI"),
    ("I_MPI_HYDRA_HOST_FILE", "Intel MPI"),
    ("HYDRA_HOST_FILE", "MPICH"),
]


@pytest.mark.parametrize(("variable", "library"), FILES)
def test_a_file_of_hosts_goes_before_a_scheduler(tmp_path: Path, variable: str, library: str) -> None:
    """It is meant for this job alone; a host without a number has the slots that are set for all."""
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb:3\nc\n")
    environ = {variable: str(file), "SLURM_JOB_NODELIST": "n1,n2,n3"}
    assert granted(environ, library) == ("a hostfile of the environment", {"a": 2, "b": 3, "c": 1})
    environ["OMPI_MCA_orte_set_default_slots"] = "4"
    assert granted(environ, library) == ("a hostfile of the environment", {"a": 2, "b": 3, "c": 4})
    described = Allocation.find(environ, library).describe()
    assert described == f"a hostfile of the environment, from {variable}: a:2,b:3,c:4"
    file.write_text("a slots=many\n")
    with pytest.raises(ConfigError, match=variable):
        Allocation.find(environ, library)


@pytest.mark.parametrize(("variable", "library"), FILES)
def test_a_file_of_hosts_for_another_library_gives_way(tmp_path: Path, variable: str, library: str) -> None:
    """To a scheduler, and to the library's own; where it is all that there is, an operator has set it for this job."""
    file, own = tmp_path / "hosts", tmp_path / "own"
    file.write_text("a slots=2\n")
    own.write_text("b slots=3\n")
    for mine, mpi in FILES:
        if mpi != library:
            assert granted({variable: str(file), "SLURM_JOB_NODELIST": "n1"}, mpi) == ("Slurm", {"n1": 1})
            assert granted({variable: str(file), mine: str(own)}, mpi)[1] == {"b": 3}
            assert granted({variable: str(file)}, mpi)[1] == {"a": 2}


def test_a_heterogeneous_job_is_refused() -> None:
    """Its lists are in other variables, and one component alone would be one rank."""
    with pytest.raises(ConfigError, match=r"heterogeneous job of Slurm \(2 components\)"):
        Allocation.find({"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a"})
