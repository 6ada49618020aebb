"""Command lines and variables for each MPI library, and how its launcher is found."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.launcher import mpirun
from ringreduce.launcher.mpirun import Mpirun
from ringreduce.launcher.schedulers import SCHEDULERS
from ringreduce.launcher.spec import LaunchSpec

OPEN_MPI = Mpirun("mpirun", "Open MPI", 5)
OLD_OPEN_MPI = Mpirun("mpirun", "Open MPI", 4)
MPICH = Mpirun("mpiexec", "MPICH", 5)
INTEL = Mpirun("mpiexec", "Intel MPI", 2021)
TRUE = LaunchSpec(program=("true",))


@pytest.mark.parametrize(
    ("said", "kind", "major"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs", "Open MPI", 5),
        ("mpirun (Open MPI) 4.1.6", "Open MPI", 4),
        ("HYDRA build details:\n    Version:           5.0.2\n", "MPICH", 5),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 20241121", "Intel MPI", 2021),
        ("a program of somebody else", "", 0),
    ],
)
def test_a_launcher_is_known_by_its_version(said: str, kind: str, major: int) -> None:
    """Open MPI, MPICH and Intel MPI take different options; others are told what all take."""
    launcher = Mpirun.from_version("mpirun", said)
    assert (launcher.kind, launcher.major) == (kind, major)


@pytest.mark.parametrize(
    ("launcher", "options", "line"),
    [
        (OPEN_MPI, {}, "mpirun -np 3 python t.py"),
        (OPEN_MPI, {"slots": {"a": 2, "b": 1}}, "mpirun -np 3 --host a:2,b:1 python t.py"),
        (OPEN_MPI, {"slots": {"a": 4}, "hostfile": "f"}, "mpirun -np 3 --hostfile f python t.py"),
        (OPEN_MPI, {"elastic": True, "exported": ["A", "B"]}, "mpirun --with-ft ulfm -np 3 -x A -x B python t.py"),
        (
            OPEN_MPI,
            {"prefix": True, "more": ["--map-by", "core"]},
            "mpirun -np 3 --output rank --map-by core python t.py",
        ),
        (OLD_OPEN_MPI, {"prefix": True}, "mpirun -np 3 --tag-output python t.py"),
        (MPICH, {}, "mpiexec -np 3 python t.py"),
        (MPICH, {"exported": ["A"]}, "mpiexec -np 3 python t.py"),  # it sends all variables by itself
        (MPICH, {"slots": {"a": 2, "b": 2}, "hostfile": "f"}, "mpiexec -np 3 -hosts a:2,b:2 python t.py"),
        (MPICH, {"prefix": True, "interfaces": "e0"}, "mpiexec -prepend-rank -iface e0 -np 3 python t.py"),
        (INTEL, {}, "mpiexec -np 3 python t.py"),
        (INTEL, {"slots": {"a": 2, "b": 2}}, "mpiexec -n 2 -host a python t.py : -n 1 -host b python t.py"),
        (INTEL, {"slots": {"a": 3, "b": 2}, "more": ["-v"]}, "mpiexec -v -n 3 -host a python t.py"),
    ],
)
def test_each_library_gets_its_options(launcher: Mpirun, options: dict[str, object], line: str) -> None:
    """The same wish, in the words of each launcher."""
    given = {name: options.pop(name) for name in ("hostfile", "exported") if name in options}
    slots, program = options.pop("slots", {}), ("python", "t.py")
    spec = LaunchSpec(program=program, **options)  # type: ignore[arg-type]
    command = launcher.command(spec, 3, slots, program=program, **given)  # type: ignore[arg-type]
    assert " ".join(command) == line


@pytest.mark.parametrize("launcher", [MPICH, INTEL])
def test_more_ranks_than_slots_are_refused(launcher: Mpirun) -> None:
    """Hydra would put them somewhere."""
    with pytest.raises(ConfigError, match="-np 3 is more than the 2 slots of the hosts"):
        launcher.command(TRUE, 3, {"a": 1, "b": 1}, program=["true"])


@pytest.mark.parametrize(
    ("launcher", "ranks", "remote", "expected", "absent"),
    [
        (OPEN_MPI, 4, False, {"OMPI_MCA_btl_tcp_if_include": "lo", "OMP_NUM_THREADS": "2"}, "oversubscribe"),
        (OPEN_MPI, 4, False, {"PRTE_MCA_hwloc_default_binding_policy": "none"}, "yield"),
        (OPEN_MPI, 9, False, {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}, "binding"),
        (OPEN_MPI, 9, False, {"OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}, "binding"),
        (OLD_OPEN_MPI, 9, False, {"OMPI_MCA_rmaps_base_oversubscribe": "1"}, "PRTE"),
        (OLD_OPEN_MPI, 2, False, {"OMPI_MCA_hwloc_base_binding_policy": "none"}, "PRTE"),
        (OPEN_MPI, 9, True, {"OMPI_MCA_btl": "^ofi"}, "btl_tcp"),
        (OPEN_MPI, 2, True, {"PRTE_MCA_hwloc_default_binding_policy": "none"}, "OMP_"),
        (OPEN_MPI, 2, False, {"OMPI_MCA_btl": "self,sm"}, "yield"),
        (OLD_OPEN_MPI, 2, False, {"OMPI_MCA_btl": "self,vader"}, "PRTE"),
        (MPICH, 9, False, {"OMP_NUM_THREADS": "1"}, "OMPI"),
        (MPICH, 9, True, {}, "OMP"),
        (INTEL, 4, False, {"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"}, "OMPI"),
        (INTEL, 8, False, {"I_MPI_FABRICS": "shm"}, "PIN"),
        (INTEL, 8, True, {"I_MPI_PIN": "0"}, "FABRICS"),
    ],
)
def test_what_a_machine_of_eight_cores_needs_is_set(
    monkeypatch: pytest.MonkeyPatch, launcher: Mpirun, ranks: int, remote: bool, expected: dict[str, str], absent: str
) -> None:
    """Threads share the cores among the ranks; what users have set is left as it is."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    found = launcher.settings(TRUE, ranks, {}, remote=remote)
    assert expected.items() <= found.items()
    assert absent not in " ".join(found)
    assert launcher.settings(TRUE, ranks, found, remote=remote) == {}


@pytest.mark.parametrize(("mib", "expected"), [(0, "^ofi"), (16, "^ofi"), (64, "self,sm")])
def test_where_memory_for_messages_is_missing_they_go_over_lo(
    monkeypatch: pytest.MonkeyPatch, mib: int, expected: str
) -> None:
    """Open MPI would not start; the 64 MiB that containers have are enough."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=mib << 20))
    found = OPEN_MPI.settings(TRUE, 2, {}, remote=False)
    assert (found["OMPI_MCA_btl"], found["OMPI_MCA_btl_tcp_if_include"]) == (expected, "lo")
    spec = LaunchSpec(program=("true",), interfaces="eth0")
    assert OPEN_MPI.settings(spec, 2, {}, remote=False)["OMPI_MCA_btl"] == "^ofi"


def test_the_end_of_an_elastic_job_waits_for_nobody() -> None:
    """Ranks of a program that imports mpi4py first end MPI where mpi4py does, and there one that died is waited for."""
    elastic = LaunchSpec(program=("true",), elastic=True)
    set_for = {each: OPEN_MPI.settings(each, 2, {}, remote=True) for each in (elastic, TRUE)}
    assert [found.get("OMPI_MCA_async_mpi_finalize") for found in set_for.values()] == ["1", None]


@pytest.mark.parametrize(("launcher", "is_set"), [(OPEN_MPI, True), (OLD_OPEN_MPI, True), (MPICH, False)])
def test_root_is_allowed_where_that_is_refused(monkeypatch: pytest.MonkeyPatch, launcher: Mpirun, is_set: bool) -> None:
    """Open MPI alone refuses to start as root."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in launcher.settings(TRUE, 1, {}, remote=True)) is is_set


@pytest.mark.parametrize(
    ("launcher", "variable"),
    [
        (OPEN_MPI, "PRTE_MCA_plm_ssh_args"),
        (OLD_OPEN_MPI, "OMPI_MCA_plm_rsh_args"),
        (MPICH, "HYDRA_LAUNCHER_EXTRA_ARGS"),
        (INTEL, "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
    ],
)
def test_the_port_of_ssh_goes_to_the_launcher(launcher: Mpirun, variable: str) -> None:
    """Each has a variable of its own for that."""
    spec = LaunchSpec(program=("true",), ssh_port=2222)
    assert launcher.settings(spec, 2, {}, remote=True)[variable].endswith(" -p 2222")


def test_more_ranks_than_slots_are_spread_over_the_hosts() -> None:
    """Open MPI would put all on the first, by what is set for one machine, too."""
    name = "PRTE_MCA_rmaps_default_mapping_policy"
    spec = LaunchSpec(program=("true",), oversubscribe=True)
    assert OPEN_MPI.settings(spec, 5, {}, remote=True)[name] == "slot:oversubscribe"
    assert OPEN_MPI.settings(TRUE, 5, {name: ":oversubscribe"}, remote=True)[name] == "slot:oversubscribe"
    assert name not in OPEN_MPI.settings(spec, 5, {name: "node:oversubscribe"}, remote=True)
    assert OPEN_MPI.settings(spec, 5, {}, remote=False)[name] == ":oversubscribe"


def test_ssh_asks_nothing_and_does_not_wait_for_ever() -> None:
    """But as users have set it: what they say goes first, and is not said twice."""
    settings = OPEN_MPI.settings(TRUE, 2, {}, remote=True, by_ssh=True)
    assert settings["PRTE_MCA_plm_ssh_args"].startswith("-o BatchMode=yes -o ConnectTimeout=10")
    own = {"PRTE_MCA_plm_ssh_args": "-i key -o connecttimeout=3"}
    options = OPEN_MPI.settings(TRUE, 2, own, remote=True, by_ssh=True)["PRTE_MCA_plm_ssh_args"]
    assert options.startswith("-i key -o connecttimeout=3 -o BatchMode=yes")
    assert "ConnectTimeout" not in options
    operators = {"OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10"}
    options = OPEN_MPI.settings(TRUE, 2, operators, remote=True, by_ssh=True)["PRTE_MCA_plm_ssh_args"]
    assert options.startswith("-o ConnectionAttempts=10 -o BatchMode=yes")
    assert "PRTE_MCA_plm_ssh_args" not in OPEN_MPI.settings(TRUE, 2, {}, remote=True)


def fake(path: Path, said: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_launcher_is_that_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first on the path: the library's own folder comes first, and another family is passed over."""
    stranger = fake(tmp_path / "path" / "mpirun", "mpirun (Open MPI) 5.0.11")
    own = fake(tmp_path / "bin" / "mpiexec", "HYDRA build details: Version: 5.0")
    monkeypatch.setattr("sys.executable", str(tmp_path / "path" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    monkeypatch.setattr(mpirun, "_library", lambda: ("MPICH Version: 5.0.2", str(tmp_path / "lib" / "libmpi.so.12")))
    assert mpirun.find().path == own
    monkeypatch.setattr(mpirun, "_library", lambda: ("Open MPI v5.0.11", ""))
    assert mpirun.find().path == stranger
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(mpirun, "_library", lambda: ("MPICH Version: 5.0.2", ""))
    with pytest.raises(ConfigError, match=r"mpi4py loads MPICH Version: 5.0.2, and .*Open MPI"):
        mpirun.find()
    script = fake(tmp_path / "path" / "mpiexec", "it does not find its parts")
    assert mpirun.find().path == script  # nobody knows whose it is
    os.remove(script)
    os.remove(stranger)
    with pytest.raises(ConfigError, match="there is no mpirun beside Python or on the path"):
        mpirun.find()


def test_the_library_is_named_without_starting_mpi() -> None:
    """As mpi4py loads it here."""
    pytest.importorskip("mpi4py")
    library, file = mpirun._library()
    assert any(name in library for name in ("Open MPI", "MPICH", "Intel"))
    assert "libmpi" in file


def test_a_launcher_that_knows_a_scheduler_is_asked(tmp_path: Path) -> None:
    """Open MPI was built with components for some schedulers; Hydra knows all but files of hosts that others name."""
    rows = {each.name: each for each in SCHEDULERS}
    listed, slurm, pbs, lsf = (rows[name] for name in ("a hostfile of the environment", "Slurm", "PBS", "LSF"))
    fake(tmp_path / "prte_info", "   MCA ras: slurm (MCA v2.1.0)\n   MCA ras: pbs (MCA\n   MCA plm: slurm (MCA")
    launcher = Mpirun(str(tmp_path / "mpirun"), "Open MPI", 5)
    assert [launcher.reads(each) for each in (slurm, pbs, lsf, listed)] == [True, True, False, False]
    assert [launcher.needs_ssh(each) for each in (slurm, pbs, None)] == [False, True, True]
    assert not Mpirun(str(tmp_path / "mpirun"), "Open MPI", 4).reads(slurm)  # there is no ompi_info to ask
    assert MPICH.reads(lsf)
    assert not MPICH.reads(listed)
