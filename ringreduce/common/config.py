"""The settings, read once from the environment: no other module looks there."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringreduce.common.conventions import Conventions
from ringreduce.common.keys import KEY_VARIABLE
from ringreduce.common.launch import VARIABLES, Launch
from ringreduce.common.quantities import parse_nbytes
from ringreduce.common.settings import (
    OneOf,
    PathOf,
    Seconds,
    Setting,
    WholeNumber,
    address_told,
    address_unless_switch,
    described,
    is_on,
    or_zero,
    rows,
    setting,
    switch,
)

#: Of ringreduce.
VERSION = "0.1.0"

#: Variables of ours that are not settings: what the launcher says, the name of a host that is simulated, and the time
#: limit of a test.
_ELSEWHERE = {*VARIABLES, "RINGREDUCE_HOST", "RINGREDUCE_TEST_TIMEOUT"}
#: Settings of MPI libraries to take addresses of GPU memory, and of NCCL to take several ranks on one GPU.
_GPU_SWITCHES = ("MV2_USE_CUDA", "MPICH_GPU_SUPPORT_ENABLED", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID")


#: Variables of Horovod that ask for what is always so here, or that ``horovodrun`` sets for the program.
_HOROVOD_ALWAYS = {"HOROVOD_DYNAMIC_PROCESS_SETS"} | {
    f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
}
_LOG_LEVELS = {"TRACE": "DEBUG", "FATAL": "CRITICAL"}


def _log_level(text: str) -> str:
    level = _LOG_LEVELS.get(text.upper(), text.upper())
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError("expected one of debug, info, warning, error, critical")
    return level


def _unless_zero(text: str) -> str:
    return "" if text == "0" else text


def default_key_file() -> Path:
    """Return where a user's key is, by the XDG base directory specification."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder, "ringreduce", "key")


def runtime_folder() -> Path:
    """Return where processes of this user on this machine leave what others of them look for; it may not be there."""
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.access(own, os.W_OK):
        return Path(own) / "ringreduce"
    return Path(tempfile.gettempdir()) / f"ringreduce-{os.geteuid()}"


#: What `Launch` reads and users may set as well: checked here, where a wrong text can be told.
_LAUNCHED = {
    "RINGREDUCE_COMMIT_REPLICAS": WholeNumber(1),
    "RINGREDUCE_MIN_NP": WholeNumber(1),
    "RINGREDUCE_RESET_LIMIT": WholeNumber(0),
}


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of a world. ``init`` checks that those that must be equal on all ranks are.

    Attributes:
        segment_nbytes: the most bytes of a block that travel at once, so that transfers overlap.
        caches: the folder for what is kept from job to job; None: there is none.
        launched_size: how many ranks the launcher says it started; None: there was no launcher.
    """

    # The formatter would give each argument a line, and a row could not be read at once.
    # fmt: off
    # Horovod's 0: wait for ever, which nothing does here.
    timeout_s: float = setting("RINGREDUCE_TIMEOUT", Seconds(), 300.0,
        "seconds that a rank waits for another; in an [elastic](failures.md#how-does-training-go-on-when-ranks-die) "
        "job the others then go on without it", of_horovod={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": _unless_zero})
    algorithm: str | None = setting("RINGREDUCE_ALGORITHM", str, None,
        "the allreduce algorithm to use wherever it can run; `python -m ringreduce explain -b 4K -e 64M` shows the "
        "choice", unset="the best known")
    node_size: int | None = setting("RINGREDUCE_NODE_SIZE", WholeNumber(1), None,
        "how many consecutive ranks to treat as a node, to try hierarchies on one machine",
        unset="the ranks of each machine")
    shared_memory: bool = setting("RINGREDUCE_SHARED_MEMORY", switch, True, "0: all bytes go over MPI",
        moved={"private": "RINGREDUCE_PRIVATE_MEMORY", "results": "RINGREDUCE_RESULTS_BYTES"})
    private_memory: bool = setting("RINGREDUCE_PRIVATE_MEMORY", switch, True,
        "0: ranks of a node do not copy each other's private arrays, which the system may forbid anyway")
    results_nbytes: int | None = setting("RINGREDUCE_RESULTS_BYTES", or_zero(parse_nbytes, 0), None,
        "the shared memory that the new arrays of collectives may take together, as `2G`; 0: they are private",
        unset="a quarter of the machine's memory, divided by the ranks of the node")
    native: bool = setting("RINGREDUCE_NATIVE", switch, True,
        "0: NumPy copies and adds between ranks of a node; else loops do that Numba compiles once a machine",
        may_differ=True)
    threads: int | None = setting("RINGREDUCE_THREADS", WholeNumber(1), None,
        "how many threads of a rank copy and add large arrays in memory that the ranks of a node share",
        unset="its cores, divided by the ranks that share them, at most 8", may_differ=True)
    segment_nbytes: int = 256 << 10
    # Horovod's 0: nothing is fused. Here a group that holds a byte is closed.
    fusion_nbytes: int = setting("RINGREDUCE_FUSION", parse_nbytes, 1 << 20,
        "bytes at which a group of fused allreduces is closed", unset="1M",
        of_horovod={"HOROVOD_FUSION_THRESHOLD": lambda text: "1" if text == "0" else text})
    # Of Horovod's variables, the first overrides the second.
    stall_warning_s: float | None = setting("RINGREDUCE_STALL_WARNING", or_zero(Seconds(), None), 60.0,
        "seconds after which to warn that a rank has not submitted an operation; 0: never",
        of_horovod={
            "HOROVOD_STALL_CHECK_DISABLE": lambda text: "0" if _unless_zero(text) else "",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": str}, observes=True)
    log_level: str | None = setting("RINGREDUCE_LOG_LEVEL", _log_level, None,
        "level of the logger `ringreduce`: debug, info (what was chosen at start), warning, error",
        unset="as the program sets it", may_differ=True, observes=True, of_horovod={"HOROVOD_LOG_LEVEL": str})
    # Horovod's DYNAMIC: the program starts it, which it always may here.
    timeline: str | None = setting("RINGREDUCE_TIMELINE", str, None,
        "a file for a [trace of the whole job](observe.md)", may_differ=True, observes=True,
        moved={"marks": "RINGREDUCE_TIMELINE_MARKS"},
        of_horovod={"HOROVOD_TIMELINE": lambda text: "" if text == "DYNAMIC" else text})
    timeline_marks_batches: bool = setting("RINGREDUCE_TIMELINE_MARKS", switch, False,
        "1: the trace has marks where operations start", of_horovod={"HOROVOD_TIMELINE_MARK_CYCLES": str},
        observes=True)
    tuning: str | None = setting("RINGREDUCE_TUNING", or_zero(str, None), None,
        "the folder for tables of [`ringreduce tune`](tuning.md), which decide on algorithms; 0: none",
        unset="`~/.cache/ringreduce`", may_differ=True, observes=True)
    gpu: str = setting("RINGREDUCE_GPU", OneOf(("staged", "nccl", "mpi")), "staged",
        "what carries allreduces of arrays on [GPUs](gpu.md): `staged` (host memory), `nccl` or `mpi`")
    deterministic: bool = setting("RINGREDUCE_DETERMINISTIC", switch, False,
        "1: all allreduces add in the order of ranks; wire formats are refused, also as `compression=`")
    conventions: Conventions = setting("RINGREDUCE_CONVENTIONS", Conventions.parse,  # noqa: RUF009
        Conventions.CHAIN_RULE,
        "`chain_rule` or `horovod`: [whose numbers](migrate/horovod.md#two-conventions) where these differ",
        unset="chain_rule")
    check_weights_every: int | None = setting("RINGREDUCE_CHECK", WholeNumber(1), None,
        "`100`: every 100 steps the ranks compare checksums of their weights; the error names parameter and ranks",
        unset="never",
        moved={"finite": "RINGREDUCE_CHECK_FINITE", "data": "RINGREDUCE_CHECK_DATA"})
    check_finite_every: int | None = setting("RINGREDUCE_CHECK_FINITE", WholeNumber(1), None,
        "`100`: every 100 steps gradients are checked for NaN and infinity before they are reduced, unless a loss "
        "scaler skips the step; the error names gradient and rank", unset="never")
    check_data: bool = setting("RINGREDUCE_CHECK_DATA", switch, True,
        "0: no warning where gradients are equal on all ranks in the first three steps, as with the same data")
    checksum: bool = setting("RINGREDUCE_CHECKSUM", switch, False,
        "1: messages of arrays between nodes carry a checksum")
    key_file: str | None = setting(KEY_VARIABLE, str, None,
        "a file of `ringreduce keygen`, on every host: messages are "
        "[encrypted](security.md#how-do-i-encrypt-messages-between-hosts)", may_differ=True, options=("--encrypt",),
        metavar="[=FILE]", told=lambda path: os.path.abspath(path or default_key_file()),
        help="Encrypt messages of ranks; FILE, or your key of `ringreduce keygen`, lies in this place on all hosts.")
    dump: str | None = setting("RINGREDUCE_DUMP", or_zero(str, None), None,
        "a folder for the [last calls](observe.md#who-was-waited-for) of every rank, if a wait fails",
        may_differ=True, observes=True)
    status: bool = setting("RINGREDUCE_STATUS", is_on, True,
        "0: `ringreduce top` does not see the ranks; `[HOST:]PORT`: rank 0 serves [all "
        "of the job](observe.md#one-address-for-a-job) there, too", may_differ=True, observes=True,
        moved={"token": "RINGREDUCE_STATUS_TOKEN_FILE"})
    status_address: tuple[str, int] | None = setting("RINGREDUCE_STATUS", address_unless_switch, None,
        options=("--status",), metavar="[HOST:]PORT", told=address_told,
        help="Serve what all ranks do, from the host of rank 0, to who has the token: a page, /metrics and /health.",
        observes=True)
    status_token_file: str | None = setting("RINGREDUCE_STATUS_TOKEN_FILE", str, None,
        "the file with the token that is asked for there; it is made if there is none", unset="one of this user",
        may_differ=True, observes=True, options=("--status-token-file",), told=PathOf(whole=True),
        needs=("--status", "what is served"),
        help="The token; made if there is no such file. Else all of your jobs on a host have one, which `top --job` "
        "finds.")
    otlp: bool = setting("RINGREDUCE_OTLP", switch, False,
        "1: rank 0 sends what all ranks do to a collector of [OpenTelemetry](observe.md#opentelemetry)", observes=True)
    verdict: bool = setting("RINGREDUCE_VERDICT", switch, False,
        "1: rank 0 says at the end what steps took, and [why](slow.md); `ringreduce run` sets 1, and 0 with the "
        "option", always="1", options=("--quiet",), switch="0",
        help="Do not say at the end what steps took, and why.", observes=True)
    report: str | None = setting("RINGREDUCE_REPORT", str, None,
        "a file to which rank 0 writes the same as JSON, for `ringreduce compare`", options=("--report",),
        told=PathOf(whole=True),
        help="Write what steps took, and why, to this file of rank 0's host: for `ringreduce compare`.", observes=True)
    watchdog_s: float | None = setting("RINGREDUCE_WATCHDOG", or_zero(Seconds(), None), None,
        "seconds after which rank 0 says why [nothing happens](slow.md#nothing-happens): no step, collective or "
        "report", unset="never",
        moved={"first": "RINGREDUCE_WATCHDOG_FIRST", "action": "RINGREDUCE_WATCHDOG_ACTION"}, options=("--watchdog",),
        metavar="SECONDS", help="Say why if no rank has made a step, a collective or a report for so long.",
        observes=True)
    watchdog_first_s: float = setting("RINGREDUCE_WATCHDOG_FIRST", Seconds(), 600.0,
        "the same until the first step or report of any rank, if that is longer: programs compile then",
        options=("--watchdog-first",), metavar="SECONDS",
        help="The same until the first step or report of any rank, if that is longer: programs compile then.",
        observes=True)
    watchdog_action: str = setting("RINGREDUCE_WATCHDOG_ACTION", OneOf(("dump", "end", "restart")), "dump",
        "`dump`: the job goes on; `end`: it is ended with status 124; `restart`: and started again",
        options=("--watchdog-action",), needs=("--watchdog SECONDS", "jobs that stall"),
        help="And then let ranks go on, end the job with status 124, or start it again, by --max-restarts.",
        observes=True)
    audit: str | None = setting("RINGREDUCE_AUDIT", str, None,
        "a file to which the run appends [what it was made of](audit.md)", observes=True)
    disk_key_file: str | None = setting("RINGREDUCE_DISK_KEY_FILE", str, None,
        "a file with a key that seals [commits, checkpoints, models, traces and "
        "dumps](security.md#how-do-i-encrypt-files)")
    object_limit_nbytes: int = setting("RINGREDUCE_OBJECT_LIMIT", parse_nbytes, 4 << 30,
        "the most bytes of all ranks in one `broadcast_object` or `allgather_object`; more is an error", unset="4G")
    # On one node, 1 to 100 MiB differ by no more than measurements do. Between hosts 4 MiB take a tenth more of the
    # processor; larger ones are complete later in the backward pass.
    bucket_nbytes: int = setting("RINGREDUCE_BUCKET", parse_nbytes, 8 << 20,
        "bytes at which a bucket of gradients is closed", unset="8M")
    standalone: bool = setting("RINGREDUCE_STANDALONE", switch, False,
        "1: this process is a world of one rank, although a rank or a launcher has started it")
    # fmt: on
    caches: str | None = field(default=None, compare=False)
    launched_size: int | None = None

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str] = os.environ, conventions: Conventions = Conventions.CHAIN_RULE
    ) -> Config:
        """Read the settings; a variable that is unset or empty keeps its default.

        Where Horovod has a variable of the same meaning, it is read if ours is not set, whatever the script imports:
        users who change the import have set it, too.

        Args:
            environ: the variables.
            conventions: the default of the field of that name.

        Raises:
            ConfigError: a variable holds something that cannot be understood.
        """
        for name, parse in _LAUNCHED.items():
            if environ.get(name):
                Setting(parse).read(name, environ[name], shown=environ[name])
        caches = _caches(environ)
        standard = cls(conventions=conventions, tuning=caches)
        read = {name: _read(environ, row, getattr(standard, name)) for name, _, row in rows(cls)}
        return cls(**read, caches=caches, launched_size=Launch.from_environ(environ).size)


Config.__doc__ = described(Config)

#: Variables of Horovod that mean something here.
HOROVOD = tuple(name for _, _, row in rows(Config) for name in row.of_horovod)


def ignored_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of our variables and of Horovod's that are set and mean nothing here; for people, sorted."""
    return sorted(
        _guess(name, prefix, meant)
        for prefix, meant in _known().items()
        for name, text in environ.items()
        if name.startswith(prefix) and text and name not in meant
    )


def may_show(name: str) -> bool:
    """Return whether the value of a variable can be shown: it means something here; others may be secret."""
    return any(name in meant for meant in _known().values())


def _known() -> dict[str, AbstractSet[str]]:
    """Return the variables that mean something here, by the prefix of their names."""
    ours = {row.variable for _, _, row in rows(Config)}
    return {"HOROVOD_": {*HOROVOD, *_HOROVOD_ALWAYS}, "RINGREDUCE_": ours | _ELSEWHERE}


def _guess(name: str, prefix: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.removeprefix(prefix), [var.removeprefix(prefix) for var in names], 1, 0.75)
    return f"{name} (did you mean {prefix}{close[0]}?)" if close else name


def find_ranks_of_cpus() -> None:
    """Have Accelerate, and what is made of it, look for ranks on CPUs; else each process would train alone.

    To be called before an ``Accelerator`` is made. What a user has set stays.
    """
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def accelerate_uses_cpus() -> bool:
    """Return whether Accelerate is set to use CPUs, also where torch sees a GPU."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t")


def environment_without(prefix: str) -> dict[str, str]:
    """Return an environment for a program that is not to have the variables of a library, by how they begin.

    Modules of the current folder do not stand in for its own.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefix)}
    return {**kept, "PYTHONSAFEPATH": "1"}


def gpu_switches(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the switches of MPI libraries and NCCL that concern GPUs, those that are set; they may differ by rank."""
    return {name: environ[name] for name in _GPU_SWITCHES if environ.get(name)}


def _read(environ: Mapping[str, str], row: Setting, default: Any) -> Any:
    """Read a setting from its variable or, where that does not say it, from Horovod's."""
    texts = {row.variable: environ.get(row.variable, "")}
    texts |= {name: convert(environ.get(name, "")) for name, convert in row.of_horovod.items()}
    source = next((name for name, text in texts.items() if text), None)
    return default if source is None else row.read(source, texts[source], shown=environ[source])


def _caches(environ: Mapping[str, str]) -> str | None:
    """Return the folder for our files in that of the user's caches, by the XDG base directory specification."""
    caches = environ.get("XDG_CACHE_HOME")
    if not caches and environ.get("HOME"):
        caches = os.path.join(environ["HOME"], ".cache")
    return os.path.join(caches, "ringreduce") if caches else None
