"""The settings, read once from the environment: no other module looks there."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ringreduce.conventions import Conventions
from ringreduce.errors import ConfigError

__all__ = [
    "HOROVOD",
    "LAUNCHERS",
    "TORCHRUN",
    "VERSION",
    "Config",
    "Launcher",
    "gpu_switches",
    "ignored_variables",
    "launched_rank",
    "parse_nbytes",
    "several_processes",
]

#: Of ringreduce.
VERSION = "0.1.0"

_T = TypeVar("_T")

#: Variables of ours that are not settings: the name of a host that is simulated, the time limit of a test.
_ELSEWHERE = {"RINGREDUCE_HOST", "RINGREDUCE_TEST_TIMEOUT"}


class Launcher(NamedTuple):
    """What starts ranks, and where it says so in their environment.

    Attributes:
        name: for people.
        size: the variable that says how many ranks it has started.
        rank: the variable that says which of them a process is.
    """

    name: str
    size: str
    rank: str


LAUNCHERS = (
    Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    Launcher("mpiexec of MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK"),
    Launcher("mpiexec of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    Launcher("PALS", "PALS_NRANKS", "PALS_RANKID"),
    Launcher("flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    Launcher("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
)
#: Starts processes that find each other without MPI: torchrun, and others that set the same variables, such as Ray.
TORCHRUN = Launcher("torchrun (or what sets its variables)", "WORLD_SIZE", "RANK")
#: Has no variable for the size, but where a rank is not 0 there are others.
_PMIX_RANK = "PMIX_RANK"
#: In which MPI libraries are told to take addresses of GPU memory, and NCCL to take several ranks on one GPU.
_GPU_SWITCHES = ("MV2_USE_CUDA", "MPICH_GPU_SUPPORT_ENABLED", "NCCL_MULTI_RANK_GPU_ENABLE")


def _as_is(text: str) -> str:
    return text


def _unless_zero(text: str) -> str:
    return "" if text == "0" else text


#: Variables of Horovod that mean something here: ours of the same meaning, and what stands for it there ("": nothing).
#: They are read wherever ours is not set, whatever the script imports: users who change the import have set them too.
HOROVOD: dict[str, tuple[str, Callable[[str], str]]] = {
    # Horovod's 0: nothing is fused. Here a group that holds a byte is closed.
    "HOROVOD_FUSION_THRESHOLD": ("RINGREDUCE_FUSION", lambda text: "1" if text == "0" else text),
    "HOROVOD_LOG_LEVEL": ("RINGREDUCE_LOG_LEVEL", _as_is),
    # Before the next one, as it overrides it.
    "HOROVOD_STALL_CHECK_DISABLE": ("RINGREDUCE_STALL_WARNING", lambda text: "0" if _unless_zero(text) else ""),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("RINGREDUCE_STALL_WARNING", _as_is),
    # Horovod's 0: wait for ever, which nothing does here.
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("RINGREDUCE_TIMEOUT", _unless_zero),
    # Horovod's DYNAMIC: the program starts it, which it always may here.
    "HOROVOD_TIMELINE": ("RINGREDUCE_TIMELINE", lambda text: "" if text == "DYNAMIC" else text),
    "HOROVOD_TIMELINE_MARK_CYCLES": ("RINGREDUCE_TIMELINE_MARK_BATCHES", _as_is),
}
#: Variables of Horovod that ask for what is always so here.
_HOROVOD_ALWAYS = {"HOROVOD_DYNAMIC_PROCESS_SETS"}
_LOG_LEVELS = {"TRACE": "DEBUG", "FATAL": "CRITICAL"}


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of a world; they must be equal on all ranks, and ``init`` checks that they are.

    Attributes:
        timeout_s: how long (seconds) any wait for a peer may last. ``RINGREDUCE_TIMEOUT``
        node_size: treat every so many consecutive ranks as a node. ``RINGREDUCE_NODE_SIZE``
        shared_memory: whether ranks of a node may share memory. ``RINGREDUCE_SHARED_MEMORY``
        algorithm: the allreduce algorithm to use wherever it can run. ``RINGREDUCE_ALGORITHM``
        segment_nbytes: the most bytes of a block that travel at once, so that transfers overlap. ``RINGREDUCE_SEGMENT``
        fusion_nbytes: small asynchronous allreduces travel together; a group that holds so many bytes is closed.
            ``RINGREDUCE_FUSION``
        stall_warning_s: warn about an operation that some rank has not submitted for so long (seconds); None: never.
            ``RINGREDUCE_STALL_WARNING``, 0 for never
        log_level: of the logger ``ringreduce``, which ``init`` sets; None: as it is. ``RINGREDUCE_LOG_LEVEL``
        deterministic: whether allreduces add in the order of ranks, for the same bits wherever these run; see
            `Communicator.allreduce`. Then wire formats are refused, those of ``compression=`` too.
            ``RINGREDUCE_DETERMINISTIC``
        timeline: the file into which `init` starts a timeline; None: none. ``RINGREDUCE_TIMELINE``
        timeline_marks_batches: whether it has marks where operations that travel together start.
            ``RINGREDUCE_TIMELINE_MARK_BATCHES``
        bucket_nbytes: gradients travel together in buckets; a bucket that holds so many bytes is closed.
            ``RINGREDUCE_BUCKET``
        tuning: the folder of the tables that ``ringreduce tune`` makes and `init` looks for; None: none.
            ``RINGREDUCE_TUNING``, 0 for none; else the folder ``ringreduce`` in that of the user's caches
        cuda_aware: whether the MPI library takes addresses of GPU memory; None: ask it. ``RINGREDUCE_CUDA_AWARE``, 1, 0
            or auto
        conventions: whose numbers come out where Horovod's differ from the chain rule's. ``RINGREDUCE_CONVENTIONS``,
            chain_rule or horovod; else those of `ringreduce.runtime.set_conventions`
        standalone: whether this process is a world of its own, whatever has started it beside others.
            ``RINGREDUCE_STANDALONE``
        launched_size: how many ranks the launcher says it started, None when there was no launcher.
    """

    timeout_s: float = 300.0
    node_size: int | None = None
    shared_memory: bool = True
    algorithm: str | None = None
    segment_nbytes: int = 128 << 10
    # On one node, 1 to 100 MiB differ by no more than the measurement does; this is small enough for gradients that are
    # copied into a bucket to be still in the last-level cache when it is reduced.
    bucket_nbytes: int = 4 << 20
    fusion_nbytes: int = 1 << 20
    stall_warning_s: float | None = 60.0
    log_level: str | None = None
    deterministic: bool = False
    timeline: str | None = None
    timeline_marks_batches: bool = False
    tuning: str | None = None
    cuda_aware: bool | None = None
    conventions: Conventions = Conventions.CHAIN_RULE
    standalone: bool = False
    launched_size: int | None = None

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str] = os.environ, conventions: Conventions = Conventions.CHAIN_RULE
    ) -> Config:
        """Read the settings; a variable that is unset or empty keeps its default.

        Where Horovod has a variable of the same meaning, it is read if ours is not set; see `HOROVOD`.

        Args:
            environ: the variables.
            conventions: the default of the field of that name.

        Raises:
            ConfigError: a variable holds something that cannot be understood.
        """
        standard = cls(conventions=conventions)
        sizes = [int(environ[each.size]) for each in LAUNCHERS if environ.get(each.size, "").isdigit()]
        return cls(
            timeout_s=_read(environ, "RINGREDUCE_TIMEOUT", _positive_float, standard.timeout_s),
            node_size=_read(environ, "RINGREDUCE_NODE_SIZE", _positive_int, standard.node_size),
            shared_memory=_read(environ, "RINGREDUCE_SHARED_MEMORY", _switch, standard.shared_memory),
            algorithm=_read(environ, "RINGREDUCE_ALGORITHM", str, standard.algorithm),
            segment_nbytes=_read(environ, "RINGREDUCE_SEGMENT", parse_nbytes, standard.segment_nbytes),
            bucket_nbytes=_read(environ, "RINGREDUCE_BUCKET", parse_nbytes, standard.bucket_nbytes),
            fusion_nbytes=_read(environ, "RINGREDUCE_FUSION", parse_nbytes, standard.fusion_nbytes),
            stall_warning_s=_read(environ, "RINGREDUCE_STALL_WARNING", _seconds_or_never, standard.stall_warning_s),
            log_level=_read(environ, "RINGREDUCE_LOG_LEVEL", _log_level, standard.log_level),
            deterministic=_read(environ, "RINGREDUCE_DETERMINISTIC", _switch, standard.deterministic),
            timeline=_read(environ, "RINGREDUCE_TIMELINE", str, standard.timeline),
            timeline_marks_batches=_read(
                environ, "RINGREDUCE_TIMELINE_MARK_BATCHES", _switch, standard.timeline_marks_batches
            ),
            tuning=_tuning_folder(environ),
            cuda_aware=_read(environ, "RINGREDUCE_CUDA_AWARE", _switch_or_auto, standard.cuda_aware),
            conventions=_read(environ, "RINGREDUCE_CONVENTIONS", Conventions.parse, standard.conventions),
            standalone=_read(environ, "RINGREDUCE_STANDALONE", _switch, standard.standalone),
            launched_size=sizes[0] if sizes else None,
        )


def ignored_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of our variables and of Horovod's that are set and mean nothing here; for people, sorted."""
    known = {"HOROVOD_": {*HOROVOD, *_HOROVOD_ALWAYS}, "RINGREDUCE_": _our_variables() | _ELSEWHERE}
    return sorted(
        _guess(name, prefix, meant)
        for prefix, meant in known.items()
        for name, text in environ.items()
        if name.startswith(prefix) and text and name not in meant
    )


def _our_variables() -> set[str]:
    """Return the names of our variables: those that are looked for where settings are read."""
    asked: set[str] = set()

    class Nothing(dict[str, str]):
        def get(self, name: str, default: object = None) -> str:
            asked.add(name)
            return ""

    Config.from_environ(Nothing())
    return asked


def _guess(name: str, prefix: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.removeprefix(prefix), [each.removeprefix(prefix) for each in known], 1, 0.75)
    return f"{name} (did you mean {prefix}{close[0]}?)" if close else name


def launched_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return which of its processes the launcher says this is, 0 without a launcher: for who speaks before ``init``."""
    return next((int(environ[each.rank]) for each in LAUNCHERS if environ.get(each.rank, "").isdigit()), 0)


def several_processes(environ: Mapping[str, str] = os.environ) -> tuple[Launcher, str] | None:
    """Return what has started this process as one of several, and the variable that proves it; None: nothing.

    An allocation of several processors, as of an interactive Slurm session, proves nothing: programs start there alone.
    """
    for launcher in (TORCHRUN, *LAUNCHERS):
        size, rank = environ.get(launcher.size, ""), environ.get(launcher.rank, "")
        if size.isdigit() and rank.isdigit():
            if int(size) > 1:
                return launcher, f"{launcher.size}={size}"
            if launcher is not TORCHRUN:  # it has started this process alone, whatever the others have started
                return None
    rank = environ.get(_PMIX_RANK, "")
    return (LAUNCHERS[0], f"{_PMIX_RANK}={rank}") if rank.isdigit() and int(rank) > 0 else None


def gpu_switches(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the switches of MPI libraries and NCCL that concern GPUs, those that are set; they may differ by rank."""
    return {name: environ[name] for name in _GPU_SWITCHES if environ.get(name)}


def parse_nbytes(text: str) -> int:
    """Read a size such as ``8``, ``64K``, ``64KiB``, ``1mb`` or ``2G`` (1024-based, all of them) as bytes."""
    found = re.fullmatch("([0-9]+)(?:([KMG])(?:I?B)?|B)?", text.upper())
    if found is None or int(found[1]) == 0:
        raise ValueError("expected a positive size in bytes, such as 65536, 64K, 64KiB or 4MB, in units of 1024")
    return int(found[1]) << {None: 0, "K": 10, "M": 20, "G": 30}[found[2]]


def _read(environ: Mapping[str, str], name: str, parse: Callable[[str], _T], default: _T) -> _T:
    source, text = _look_up(environ, name)
    if not text:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{source}={environ[source]!r} in the environment: {error}") from None


def _look_up(environ: Mapping[str, str], name: str) -> tuple[str, str]:
    """Return the text of a variable of ours, and which variable it comes from: itself or one of Horovod's."""
    if environ.get(name):
        return name, environ[name]
    for theirs, (ours, convert) in HOROVOD.items():
        text = convert(environ.get(theirs, "")) if ours == name else ""
        if text:
            return theirs, text
    return name, ""


def _tuning_folder(environ: Mapping[str, str]) -> str | None:
    folder = environ.get("RINGREDUCE_TUNING")
    if folder:
        return None if folder == "0" else folder
    caches = environ.get("XDG_CACHE_HOME")  # the XDG base directory specification
    if not caches and environ.get("HOME"):
        caches = os.path.join(environ["HOME"], ".cache")
    return os.path.join(caches, "ringreduce") if caches else None


def _positive_int(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise ValueError("expected a positive whole number")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number of seconds") from None
    if not 0 < value < float("inf"):
        raise ValueError("expected a positive number of seconds")
    return value


def _seconds_or_never(text: str) -> float | None:
    return None if text == "0" else _positive_float(text)


def _log_level(text: str) -> str:
    level = _LOG_LEVELS.get(text.upper(), text.upper())
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError("expected one of debug, info, warning, error, critical")
    return level


def _switch(text: str) -> bool:
    values = {"1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False, "no": False}
    if text.lower() not in values:
        raise ValueError("expected 1 or 0")
    return values[text.lower()]


def _switch_or_auto(text: str) -> bool | None:
    return None if text.lower() == "auto" else _switch(text)
