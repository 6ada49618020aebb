"""What the launcher says to the processes that it starts, and what these say to `ringreduce run`."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

_log = logging.getLogger(__name__)


class Launcher(NamedTuple):
    """What starts ranks, and where it says so in their environment.

    Attributes:
        name: for people.
        size: the variable that says how many ranks it has started.
        rank: the variable that says which of them a process is.
        family: whose it is: ``"Open MPI"``, ``"MPICH"`` for all that is made from it, or empty: anybody's.
        programs: that stay until the ranks end, its daemons on other hosts included, by the names that the kernel gives
            them, of at most 15 characters.
    """

    name: str
    size: str
    rank: str
    family: str = ""
    programs: tuple[str, ...] = ()


_ORTE = ("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted")
_HYDRA = ("mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_pr")
SRUN = Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", programs=("srun", "slurmstepd"))
LAUNCHERS = (
    Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI", _ORTE),
    Launcher("mpiexec of MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK", "MPICH", _HYDRA),
    Launcher("mpiexec of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MPICH", ("mpiexec.mpd",)),
    SRUN,
    Launcher("PALS", "PALS_NRANKS", "PALS_RANKID", programs=("aprun", "apinit", "palsd")),
    Launcher("flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", programs=("flux-shell",)),
    Launcher("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", programs=("jsrun", "jsmd")),
)
#: Starts processes that find each other without MPI: torchrun, and others that set the same variables, such as Ray.
TORCHRUN = Launcher("torchrun (or what sets its variables)", "WORLD_SIZE", "RANK")
#: Has no variable for the size, but where a rank is not 0 there are others.
_PMIX_RANK = "PMIX_RANK"

#: The status with which a job is ended that stalls: that of timeout(1).
STALLED = 124

#: Schedulers: the variable with the number of the job, one that only jobs of it have, the one that says which hosts it
#: has granted, in words, if there is one, and the one that counts how often the job was run again.
_SCHEDULERS = {
    "Slurm": ("SLURM_JOB_ID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT"),
    "PBS": ("PBS_JOBID", "PBS_JOBID", "", ""),
    "LSF": ("LSB_JOBID", "LSB_JOBID", "LSB_MCPU_HOSTS", ""),
    "Grid Engine": ("JOB_ID", "PE_HOSTFILE", "", ""),
    "flux": ("FLUX_JOB_ID", "FLUX_JOB_ID", "", ""),
}

_FENCE = re.compile("[0-9]{20}-[0-9a-f]{8}")

#: The folder for messages to `ringreduce run` on a host where an engine runs mpirun's daemon. mpirun passes this
#: variable on to no other host, and it counts before the folder that all hosts have.
MESSAGES_HERE = "_RINGREDUCE_MESSAGES"

#: What `ringreduce run` sets, `horovodrun` (the folder of commits), and what calls functions on ranks (of engines).
VARIABLES = {
    f"RINGREDUCE_{name}"
    for name in (
        *("MESSAGES", "SHELL", "RESTARTABLE", "RESTART", "START_TIMEOUT", "COMMITS", "COMMIT_REPLICAS"),
        *("MIN_NP", "RESET_LIMIT", "FENCE", "MASTER_ADDR", "MASTER_PORT"),
    )
}


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher of a process says.

    Attributes:
        launcher: has started it as one of several processes; None: nothing has.
        proof: the variable that says so, with its value.
        rank: which of the launcher's processes this is; 0 without a launcher.
        size: how many ranks it has started; None: no launcher.
        job: the launcher's name for the job, equal in all its processes; empty where that is not known.
        local_size: how many of them on this host, as Open MPI or torchrun says it; None: that is not known.
        job_folder: on this host, removed when the job ends, however it does; None: there is none.
        survives_deaths: whether the job goes on when ranks die: Open MPI's ``mpirun --with-ft ulfm``.
        messages: the FIFO of this host to which messages to `ringreduce run` are written; None: there is none.
        shell: the process over this rank that reports its end to `ringreduce run`; None: there is none.
        is_restartable: whether `ringreduce run` starts the job again on other hosts when the ranks end for that, and
            requests that by SIGUSR2, which they have blocked.
        restarts: how often it has started this job before.
        start_timeout_s: how long ranks wait in `init` for ranks that have not called it; None: the time limit.
        least_size: elastic training ends once fewer ranks survive.
        reset_limit: how often at most ranks go on without others, before elastic training ends; None: as often as need
            be.
        commits: the folder in which ``horovodrun`` has elastic states keep their commits; None: it has not.
        commit_replicas: on how many hosts each of these commits is.
        networks, other_networks: over which Open MPI is told to send messages between hosts, and over which not.
        fence: the number and name of this start of the job, greater than those of all its starts before; None: the
            launcher gives none. See `ringreduce.elastic.runs`.
        doubts_silent: whether Open MPI counts ranks as dead that are silent, as a host is that stands still.
    """

    launcher: Launcher | None = None
    proof: str = ""
    rank: int = 0
    size: int | None = None
    job: str = ""
    local_size: int | None = None
    job_folder: str | None = None
    survives_deaths: bool = False
    messages: str | None = None
    shell: int | None = None
    is_restartable: bool = False
    restarts: int = 0
    start_timeout_s: float | None = None
    least_size: int = 1
    reset_limit: int | None = None
    commits: str | None = None
    commit_replicas: int = 1
    networks: str = ""
    other_networks: str = ""
    fence: str | None = None
    doubts_silent: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Launch:
        """Read what the environment says."""

        def number(*names: str) -> int | None:
            return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)

        launcher, proof = _several(environ, number)
        if launcher is not None and launcher.family == "MPICH" and environ.get("SLURM_MPI_TYPE") == "pmi2":
            launcher = SRUN  # In such a step srun speaks MPICH's protocol.
        folder = environ.get("PMIX_SERVER_TMPDIR", "")
        fence = environ.get("RINGREDUCE_FENCE", "")
        messages = environ.get(MESSAGES_HERE) or environ.get("RINGREDUCE_MESSAGES")
        limit_s: float | None = None
        with suppress(KeyError, ValueError):
            limit_s = float(environ["RINGREDUCE_START_TIMEOUT"])
        return cls(
            launcher,
            proof,
            rank=number(*(row.rank for row in LAUNCHERS)) or 0,
            size=number(*(row.size for row in LAUNCHERS)),
            job=_job(environ, launcher),
            local_size=number("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
            job_folder=folder if _is_own(folder) else None,
            survives_deaths=environ.get("OMPI_MCA_mpi_ft_enable", "0") in ("1", "true"),
            messages=messages_in(messages) if messages else None,
            shell=number("RINGREDUCE_SHELL"),
            is_restartable=environ.get("RINGREDUCE_RESTARTABLE") == "1",
            restarts=number("RINGREDUCE_RESTART") or 0,
            start_timeout_s=limit_s,
            least_size=number("RINGREDUCE_MIN_NP") or 1,
            reset_limit=number("RINGREDUCE_RESET_LIMIT"),
            commits=environ.get("RINGREDUCE_COMMITS") or None,
            commit_replicas=number("RINGREDUCE_COMMIT_REPLICAS") or 1,
            networks=environ.get("OMPI_MCA_btl_tcp_if_include", ""),
            other_networks=environ.get("OMPI_MCA_btl_tcp_if_exclude", ""),
            fence=fence if _FENCE.fullmatch(fence) else None,
            doubts_silent=environ.get("OMPI_MCA_mpi_ft_detector", "0") in ("1", "true"),
        )


def _is_own(folder: str) -> bool:
    """Return whether a folder is this user's; another one may have made it before mpirun did."""
    with suppress(OSError):
        return os.stat(folder).st_uid == os.geteuid() and os.access(folder, os.W_OK | os.X_OK)
    return False


def _job(environ: Mapping[str, str], launcher: Launcher | None) -> str:
    """Return what the launcher calls the job; ranks that ranks have started belong to the same one."""
    if launcher is SRUN:  # With another launcher, each host may be a step of its own.
        return ".".join(environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return environ.get("PMIX_NAMESPACE", "").partition("@")[0]


def _several(environ: Mapping[str, str], number: Callable[[str], int | None]) -> tuple[Launcher | None, str]:
    """Return what has started this process as one of several, and what proves it; None: nothing.

    An allocation of several processors, as of an interactive Slurm session, proves nothing: programs start there alone.
    Variables of torchrun's are often set for ranks of MPI, too, and by `ringreduce run` always.
    """
    others = () if "RINGREDUCE_MASTER_ADDR" in environ else (TORCHRUN,)
    for row in (TORCHRUN, *LAUNCHERS) if "TORCHELASTIC_RUN_ID" in environ else (*LAUNCHERS, *others):
        size = number(row.size)
        if size is not None and number(row.rank) is not None:
            if size > 1:
                return row, f"{row.size}={size}"
            if row is not TORCHRUN:  # It has started this process alone, whatever the others have started.
                return None, ""
    return (LAUNCHERS[0], f"{_PMIX_RANK}={number(_PMIX_RANK)}") if number(_PMIX_RANK) else (None, "")


def launch() -> Launch:
    """Return what the launcher of this process says."""
    return Launch.from_environ(os.environ)


def collectors() -> list[str]:
    """Return the addresses that OpenTelemetry's variables name for metrics and spans; none: collectors of this host."""
    names = (f"OTEL_EXPORTER_OTLP_{part}ENDPOINT" for part in ("", "METRICS_", "TRACES_"))
    return [os.environ[name] for name in names if os.environ.get(name)]


def allocation(environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Return what a scheduler says of the job that this process is in; None: there is no scheduler.

    Returns:
        scheduler, job (its number) and, where the scheduler says so, hosts and restarts (how often it was run again).
    """
    for name, (job, only, hosts, restarts) in _SCHEDULERS.items():
        if environ.get(job) and environ.get(only):
            facts = {
                "scheduler": name,
                "job": environ[job],
                "hosts": environ.get(hosts),
                "restarts": environ.get(restarts),
            }
            return {key: value for key, value in facts.items() if value}
    return None


def own_host() -> str:
    """Return the name of this host, as the launcher calls it where that says so."""
    return os.environ.get("PMIX_HOSTNAME") or os.uname().nodename


def messages_in(folder: str) -> str:
    """Return the path of the FIFO of this host in the folder for messages to `ringreduce run`.

    Hosts may share the folder, and be parts of one machine: each then has a network of its own.
    """
    return f"{folder}/{os.readlink('/proc/self/ns/net')}"


def notify_launcher(what: str) -> None:
    """Tell `ringreduce run` what this rank does, in a few small letters; nothing, if no shell of that is over it."""
    if launch().shell is None:
        return
    try:
        _send_message(what)
    except OSError as error:
        _log.warning("cannot report to `ringreduce run` that this rank %s: %s", what, error)


def report_begin() -> None:
    """Tell `ringreduce run`, if that hears this host, that a rank looks for the others, or means to be alone."""
    with suppress(OSError):
        _send_message("has begun")


def _send_message(what: str) -> None:
    launched = launch()
    if launched.messages is None:
        return
    # Opened for reading, too, and without waiting: a rank goes on where nobody reads.
    descriptor = os.open(launched.messages, os.O_RDWR | os.O_NONBLOCK)
    with open(descriptor, "wb", buffering=0) as fifo:
        fifo.write(f"{os.environ.get('RINGREDUCE_FENCE', '')} {launched.rank} {own_host()} {what}\n".encode())


def renew_rank_variables(rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Let the variables of torch's launcher say which rank this is now, if `ringreduce run` has set them.

    Those that say where rank 0 listens are taken back: it may have failed.
    """
    if os.environ.get("RINGREDUCE_MASTER_ADDR"):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size)}
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


def announce_stop() -> None:
    """Tell `ringreduce run`, and its shell over this rank, that all ranks have agreed to stop: 75 means that now."""
    notify_launcher("agrees to stop")
    shell = launch().shell
    if shell is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(shell, signal.SIGWINCH)
