"""The schedulers, and the variables in which they give a job its hosts.

One table: adding a scheduler is a row, and a function from its variables to slots by host.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ringreduce.common.errors import ConfigError
from ringreduce.common.files import read_file
from ringreduce.launcher.hosts import parse_host_file

_MOST_HOSTS = 1 << 17  # more are a mistake in a list, and would take all memory
_ANSWER_S = 10.0  # that Slurm's commands get
_MOST_NBYTES = 16 << 20  # of a file of hosts
_SHOWN = 80  # of a text that is refused
#: Slurm's way to say that several hosts in a row have equally many slots.
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A row of the table.

    Attributes:
        name: its name, as people write it.
        components: names of the parts of Open MPI that read the allocation, or start daemons in it.
        variables: names; one that is set and not empty means that there is an allocation.
        read: returns the slots by host, given the variable that is set and all others.
        library: whose variables they are, of the MPI libraries; empty: of none.
        tried: on what this row has run.
    """

    name: str
    components: frozenset[str]
    variables: tuple[str, ...]
    read: Callable[[str, Mapping[str, str]], dict[str, int]]
    library: str = ""
    tried: str = "no cluster: its variables alone"


@dataclass(frozen=True, slots=True)
class Allocation:
    """The hosts that a scheduler has granted.

    Attributes:
        scheduler: its row of the table.
        variable: name of the variable that has them.
        slots: slots by host, in the scheduler's order.
    """

    scheduler: Scheduler
    variable: str
    slots: dict[str, int]

    @classmethod
    def find(cls, environ: Mapping[str, str], library: str = "") -> Allocation | None:
        """Return the allocation that the environment describes; None if there is none.

        Args:
            environ: the variables.
            library: of the job, `Mpirun.kind`. Files of hosts for other libraries count where there is nothing else: an
                operator sets that of the library which users have named to it.

        Raises:
            ConfigError: a scheduler's list cannot be read, or has no host with slots.
        """
        for scheduler in sorted(SCHEDULERS, key=lambda each: each.library not in ("", library)):
            for variable in scheduler.variables:
                if environ.get(variable):
                    slots = scheduler.read(variable, environ)
                    if not sum(slots.values()):
                        raise ConfigError(
                            f"{variable}={environ[variable][:_SHOWN]} of {scheduler.name} has no host with slots"
                        )
                    return cls(scheduler, variable, slots)
        return None

    @staticmethod
    def scheduler_here(environ: Mapping[str, str]) -> Scheduler | None:
        """Return the scheduler of this process, by which mpirun reaches hosts whoever has named them; None: none."""
        here = (each for each in SCHEDULERS if each.components and any(map(environ.get, each.variables)))
        return next(here, None)

    def describe(self) -> str:
        """Return one line: the scheduler, the variable, and the slots by host."""
        listed = ",".join(f"{host}:{count}" for host, count in self.slots.items())
        return f"{self.scheduler.name}, from {self.variable}: {listed}"


def slurm_job(environ: Mapping[str, str]) -> str:
    """Return the number of the job of Slurm in which this process is, for Slurm's commands; empty: it is in none."""
    return environ.get("SLURM_JOB_ID", "")


def has_qrsh(environ: Mapping[str, str]) -> bool:
    """Return whether Open MPI reaches the hosts of this job of Grid Engine by its qrsh, as it decides by these."""
    if not all(map(environ.get, ("SGE_ROOT", "ARC", "PE_HOSTFILE", "JOB_ID"))):
        return False
    return os.access(Path(environ["SGE_ROOT"], "bin", environ["ARC"], "qrsh"), os.X_OK)


def slurm_step() -> list[str]:
    """Return the words before a command that runs once on a host of this job of Slurm, beside all that runs there."""
    return ["srun", "--mpi=none", "--overlap", "--nodes=1", "--ntasks=1"]


def ask_slurm(*command: str) -> tuple[int, str]:
    """Return the status of one of Slurm's commands and its output; of one that fails, that or its complaint."""
    environ = {**os.environ, "SLURM_TIME_FORMAT": "standard"}  # the user may have chosen another one
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S, env=environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout.strip() or (done.stderr.strip() if done.returncode else ""))


def _hostfile(variable: str, environ: Mapping[str, str]) -> dict[str, int]:
    """Read a file of hosts; a host without a number has the slots that the operator sets for all."""
    default = environ.get("OMPI_MCA_orte_set_default_slots", "")
    text = _text(variable, environ)
    try:
        return parse_host_file(text, int(default) if default.isdigit() else 1)
    except ConfigError as error:
        raise ConfigError(f"{variable}={environ[variable]}: {error}") from None


def _components(variable: str, environ: Mapping[str, str]) -> dict[str, int]:
    raise ConfigError(
        f"this is a heterogeneous job of Slurm ({environ[variable]} components), whose hosts mpirun cannot use "
        "together; submit one component, or start the ranks by srun --mpi=pmix --het-group=0,1 python train.py"
    )


def _slurm(variable: str, environ: Mapping[str, str]) -> dict[str, int]:
    hosts = _hosts_of_slurm(environ[variable])
    name = next((each for each in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE") if environ.get(each)), None)
    counts = [1] * len(hosts) if name is None else _repeated(name, environ[name])
    if len(counts) == 1:
        counts *= len(hosts)
    if len(counts) != len(hosts):
        raise ConfigError(
            f"{name}={environ[name or '']} is for {len(counts)} hosts, and Slurm has granted {len(hosts)}"
        )
    return dict(zip(hosts, counts, strict=True))


def _hosts_of_slurm(listed: str) -> list[str]:
    """Return the hosts of a list such as ``gpu[08-10,2],login``."""
    if "[" not in listed:  # also a container without Slurm's commands can read this
        return listed.split(",")
    status, answer = ask_slurm("scontrol", "show", "hostnames", listed)
    if status or not answer:  # scontrol prints nothing, with status 0, for a list that it cannot read
        raise ConfigError(
            f"scontrol does not name the hosts of SLURM_JOB_NODELIST={listed[:_SHOWN]!r}"
            f"{answer and ': '}{answer}; name them by -H"
        )
    return answer.split()


def _repeated(name: str, text: str) -> list[int]:
    """Return the counts of ``2(x3),1``: 2, 2, 2, 1."""
    found = [_COUNT.fullmatch(part) for part in text.split(",")]
    counts: list[int] = []
    for each in found:
        if each is None or int(each[2] or 1) > _MOST_HOSTS:
            raise ConfigError(f"{name}={text[:80]!r} cannot be read; expected counts as in 2(x3),1")
        counts += [int(each[1])] * int(each[2] or 1)
    return counts


def _lines(variable: str, environ: Mapping[str, str]) -> dict[str, int]:
    """Read a file with a line for each slot."""
    return dict(Counter(_text(variable, environ).split()))


def _grid_engine(variable: str, environ: Mapping[str, str]) -> dict[str, int]:
    """Read a file with lines of host, slots, queue and processors."""
    slots: Counter[str] = Counter()
    for line in _text(variable, environ).splitlines():
        words = line.split()
        if len(words) < 2 or not words[1].isdigit():
            raise ConfigError(
                f"{variable}={environ[variable]} has the line {line[:_SHOWN]!r}; expected a host and its slots"
            )
        slots[words[0]] += int(words[1])
    return dict(slots)


def _text(variable: str, environ: Mapping[str, str]) -> str:
    try:
        return read_file(environ[variable], most_nbytes=_MOST_NBYTES).decode(errors="replace")
    except (ConfigError, OSError) as error:
        raise ConfigError(f"{variable}={environ[variable]}: {getattr(error, 'strerror', error)}") from None


def _pairs(variable: str, environ: Mapping[str, str]) -> dict[str, int]:
    words = environ[variable].split()
    if len(words) % 2 or not all(word.isdigit() for word in words[1::2]):
        raise ConfigError(
            f"{variable}={environ[variable][:_SHOWN]!r} cannot be read; expected hosts and counts as in 'a 2 b 2'"
        )
    slots: Counter[str] = Counter()
    for host, count in zip(words[::2], words[1::2], strict=True):
        slots[host] += int(count)
    return dict(slots)


#: A file of hosts that a variable of an MPI library names, as Kubeflow's MPI operator and Trainer set it.
_HOSTFILE = "a hostfile of the environment"
_OPEN_MPI = ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile")

_SLURM = frozenset({"slurm"})
_LSF = frozenset({"lsf"})

#: In the order in which they are looked for: a file that names the hosts is meant for this job alone.
SCHEDULERS = (
    Scheduler(_HOSTFILE, frozenset(), _OPEN_MPI, _hostfile, "Open MPI", "containers with the files of Kubeflow's pods"),
    Scheduler(_HOSTFILE, frozenset(), ("I_MPI_HYDRA_HOST_FILE",), _hostfile, "Intel MPI"),
    Scheduler(_HOSTFILE, frozenset(), ("HYDRA_HOST_FILE",), _hostfile, "MPICH"),
    Scheduler("Slurm", _SLURM, ("SLURM_HET_SIZE",), _components),
    Scheduler("Slurm", _SLURM, ("SLURM_JOB_NODELIST",), _slurm, tried="Slurm 22.05"),
    Scheduler("PBS", frozenset({"pbs", "tm"}), ("PBS_NODEFILE",), _lines),
    Scheduler("LSF", _LSF, ("LSB_MCPU_HOSTS",), _pairs),
    Scheduler("LSF", _LSF, ("LSB_DJOB_HOSTFILE",), _lines),
    Scheduler(
        "Grid Engine", frozenset({"gridengine"}), ("PE_HOSTFILE",), _grid_engine, tried="Son of Grid Engine 8.1.9"
    ),
)
