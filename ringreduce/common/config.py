"""The settings, read once from the environment: no other module looks there."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from ringreduce.common.conventions import Conventions
from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import VARIABLES, Launch
from ringreduce.common.quantities import parse_nbytes

#: Of ringreduce.
VERSION = "0.1.0"

#: Variables of ours that are not settings: what the launcher says, the name of a host that is simulated, and the time
#: limit of a test.
_ELSEWHERE = {*VARIABLES, "RINGREDUCE_HOST", "RINGREDUCE_TEST_TIMEOUT"}
#: Settings of MPI libraries to take addresses of GPU memory, and of NCCL to take several ranks on one GPU.
_GPU_SWITCHES = ("MV2_USE_CUDA", "MPICH_GPU_SUPPORT_ENABLED", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID")


def _unless_zero(text: str) -> str:
    return "" if text == "0" else text


#: Variables of Horovod that mean something here: the field of `Config`, and the value there ("": nothing).
#: They are read wherever ours is not set, whatever the script imports: users who change the import have set them too.
HOROVOD: dict[str, tuple[str, Callable[[str], str]]] = {
    # Horovod's 0: nothing is fused. Here a group that holds a byte is closed.
    "HOROVOD_FUSION_THRESHOLD": ("fusion_nbytes", lambda text: "1" if text == "0" else text),
    "HOROVOD_LOG_LEVEL": ("log_level", str),
    # Before the next one, as it overrides it.
    "HOROVOD_STALL_CHECK_DISABLE": ("stall_warning_s", lambda text: "0" if _unless_zero(text) else ""),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("stall_warning_s", str),
    # Horovod's 0: wait for ever, which nothing does here.
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("timeout_s", _unless_zero),
    # Horovod's DYNAMIC: the program starts it, which it always may here.
    "HOROVOD_TIMELINE": ("timeline", lambda text: "" if text == "DYNAMIC" else text),
    "HOROVOD_TIMELINE_MARK_CYCLES": ("timeline_marks_batches", str),
}
#: Variables of Horovod that ask for what is always so here, or that ``horovodrun`` sets for the program.
_HOROVOD_ALWAYS = {"HOROVOD_DYNAMIC_PROCESS_SETS"} | {
    f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
}
_ON = ("1", "on", "true", "yes")
_OFF = ("0", "off", "false", "no")
_LOG_LEVELS = {"TRACE": "DEBUG", "FATAL": "CRITICAL"}


def _or_zero(parse: Callable[[str], Any], zero: Any) -> Callable[[str], Any]:
    """Return what reads a text like another function, but ``0`` as this."""
    return lambda text: zero if text == "0" else parse(text)


def _positive_int(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise ValueError("expected a positive whole number")
    return int(text)


def _whole_number(text: str) -> int:
    if not text.isdigit():
        raise ValueError("expected a whole number, 0 or more")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number of seconds") from None
    if not 0 < value < float("inf"):
        raise ValueError("expected a positive number of seconds")
    return value


def _log_level(text: str) -> str:
    level = _LOG_LEVELS.get(text.upper(), text.upper())
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError("expected one of debug, info, warning, error, critical")
    return level


def _switch(text: str) -> bool:
    if text.lower() not in (*_ON, *_OFF):
        raise ValueError("expected 1 or 0")
    return text.lower() in _ON


def parse_address(text: str) -> tuple[str, int]:
    """Read where something listens: ``HOST:PORT``, ``[::1]:PORT``, or ``:PORT`` and ``PORT`` of this machine alone.

    Raises:
        ValueError: it is none.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 1 < int(port) < 1 << 16):
        raise ValueError("expected [HOST:]PORT, with a port from 2 to 65535")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"expected the host in brackets, as in [{host}]:{port}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _seen(text: str) -> bool:
    return text.lower() not in _OFF


def _address(text: str) -> tuple[str, int] | None:
    if text.lower() in (*_ON, *_OFF):
        return None
    try:
        return parse_address(text)
    except ValueError as error:
        raise ValueError(f"{error}; or 1 or 0") from None


def _action(text: str) -> str:
    if text not in ("dump", "end", "restart"):
        raise ValueError("expected dump, end or restart")
    return text


def _gpu(text: str) -> str:
    if text.lower() not in ("staged", "nccl", "mpi"):
        raise ValueError("expected staged, nccl or mpi")
    return text.lower()


def _setting(variable: str, parse: Callable[[str], Any], default: Any) -> Any:
    """Declare a field of `Config`: its variable, what reads that, and the value where it is not set."""
    return field(default=default, metadata={"variable": variable, "parse": parse})


def runtime_folder() -> Path:
    """Return where processes of this user on this machine leave what others of them look for; it may not be there."""
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.access(own, os.W_OK):
        return Path(own) / "ringreduce"
    return Path(tempfile.gettempdir()) / f"ringreduce-{os.geteuid()}"


#: What `Launch` reads and users may set as well: checked here, where a wrong text can be told.
_LAUNCHED = {
    "RINGREDUCE_COMMIT_REPLICAS": _positive_int,
    "RINGREDUCE_MIN_NP": _positive_int,
    "RINGREDUCE_RESET_LIMIT": _whole_number,
}


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of a world; they must be equal on all ranks, and ``init`` checks that they are.

    Attributes:
        timeout_s: how long (seconds) any wait for a peer may last. ``RINGREDUCE_TIMEOUT``
        node_size: treat every so many consecutive ranks as a node. ``RINGREDUCE_NODE_SIZE``
        shared_memory: whether ranks of a node may share memory. ``RINGREDUCE_SHARED_MEMORY``
        private_memory: whether ranks of a node may copy each other's private memory.
            ``RINGREDUCE_PRIVATE_MEMORY``
        results_nbytes: new arrays that collectives return lie in memory that the ranks of the node share, as long as
            those of a rank that live take no more than so many bytes together; None: a quarter of the machine's memory,
            divided by the ranks of the node. ``RINGREDUCE_RESULTS_BYTES``, 0 for none
        algorithm: the allreduce algorithm to use wherever it can run. ``RINGREDUCE_ALGORITHM``
        segment_nbytes: the most bytes of a block that travel at once, so that transfers overlap.
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
            ``RINGREDUCE_TIMELINE_MARKS``
        bucket_nbytes: gradients travel together in buckets; a bucket that holds so many bytes is closed.
            ``RINGREDUCE_BUCKET``
        tuning: the folder of the tables that ``ringreduce tune`` makes and `init` looks for; None: none.
            ``RINGREDUCE_TUNING``, 0 for none; else the folder ``ringreduce`` in that of the user's caches
        gpu: what allreduces of arrays on GPUs go by: ``"staged"``: pinned host memory; ``"nccl"``; ``"mpi"``: an MPI
            library that takes addresses of GPU memory, and CuPy's sums. ``RINGREDUCE_GPU``
        conventions: whose numbers come out where Horovod's differ from the chain rule's. ``RINGREDUCE_CONVENTIONS``,
            chain_rule or horovod; else those of `ringreduce.runtime.set_conventions`
        standalone: whether this process is a world of its own, whatever has started it beside others.
            ``RINGREDUCE_STANDALONE``
        check_weights_every: so many steps of an optimizer come to one before which the ranks compare checksums of their
            weights; None: never (but for the first few). ``RINGREDUCE_CHECK``
        check_finite_every: the same for looking whether all gradients are numbers; gradients are then not reduced
            during the backward pass. Overflows are left to what scales losses and leaves out steps.
            ``RINGREDUCE_CHECK_FINITE``
        check_data: whether the ranks compare checksums of their gradients in the first three steps of an optimizer, to
            warn if all train on the same data. ``RINGREDUCE_CHECK_DATA``
        checksum: whether what travels in messages is compared with what was sent, by a CRC-32. ``RINGREDUCE_CHECKSUM``
        key_file: the file with the secret by which messages are sealed; None: they are not.
            ``RINGREDUCE_KEY_FILE``
        status: whether `ringreduce top` sees the ranks. ``RINGREDUCE_STATUS``
        status_address: where rank 0 serves what all ranks do, a host and a port; None: nowhere.
            ``RINGREDUCE_STATUS=[HOST:]PORT``
        status_token_file: the file with the token that this asks for; None: one that is made for this user.
            ``RINGREDUCE_STATUS_TOKEN_FILE``
        otlp: whether rank 0 sends what all ranks do to a collector of OpenTelemetry. ``RINGREDUCE_OTLP``
        verdict: whether rank 0 says at the end, on standard error, what steps took and why. ``RINGREDUCE_VERDICT``
        report: the file to which rank 0 writes that at the end, as JSON; None: none. ``RINGREDUCE_REPORT``
        watchdog_s: rank 0 says what a job waits for in which no rank has made a step, a collective or a report for so
            long (seconds); None: never. ``RINGREDUCE_WATCHDOG``
        watchdog_first_s: the same until any rank has made a step or a report, if that is longer (seconds): programs
            compile then. ``RINGREDUCE_WATCHDOG_FIRST``
        watchdog_action: what follows: ``"dump"``: nothing, each rank has written down what it does; ``"end"``: the job
            is ended; ``"restart"``: and started again. ``RINGREDUCE_WATCHDOG_ACTION``
        dump: the folder into which a rank writes what it has done last, when no call is possible any more, or on
            SIGUSR1; None: none. ``RINGREDUCE_DUMP``
        audit: the file to which rank 0 appends a record of the run (see `ringreduce.observe.audit`); None: none.
            ``RINGREDUCE_AUDIT``
        disk_key_file: the file with the secret by which commits, checkpoints, exported models, traces and dumps are
            sealed; None: they are not. ``RINGREDUCE_DISK_KEY_FILE``
        object_limit_nbytes: the most bytes that the objects of one call, of all ranks together, may take once they are
            pickled. ``RINGREDUCE_OBJECT_LIMIT``
        launched_size: how many ranks the launcher says it started, None when there was no launcher.
    """

    timeout_s: float = _setting("RINGREDUCE_TIMEOUT", _positive_float, 300.0)
    node_size: int | None = _setting("RINGREDUCE_NODE_SIZE", _positive_int, None)
    shared_memory: bool = _setting("RINGREDUCE_SHARED_MEMORY", _switch, True)
    private_memory: bool = _setting("RINGREDUCE_PRIVATE_MEMORY", _switch, True)
    results_nbytes: int | None = _setting("RINGREDUCE_RESULTS_BYTES", _or_zero(parse_nbytes, 0), None)
    algorithm: str | None = _setting("RINGREDUCE_ALGORITHM", str, None)
    segment_nbytes: int = 256 << 10
    # On one node, 1 to 100 MiB differ by no more than measurements do. Between hosts 4 MiB take a tenth more of the
    # processor; larger ones are complete later in the backward pass.
    bucket_nbytes: int = _setting("RINGREDUCE_BUCKET", parse_nbytes, 8 << 20)
    fusion_nbytes: int = _setting("RINGREDUCE_FUSION", parse_nbytes, 1 << 20)
    stall_warning_s: float | None = _setting("RINGREDUCE_STALL_WARNING", _or_zero(_positive_float, None), 60.0)
    log_level: str | None = _setting("RINGREDUCE_LOG_LEVEL", _log_level, None)
    deterministic: bool = _setting("RINGREDUCE_DETERMINISTIC", _switch, False)
    timeline: str | None = _setting("RINGREDUCE_TIMELINE", str, None)
    timeline_marks_batches: bool = _setting("RINGREDUCE_TIMELINE_MARKS", _switch, False)
    tuning: str | None = _setting("RINGREDUCE_TUNING", _or_zero(str, None), None)
    gpu: str = _setting("RINGREDUCE_GPU", _gpu, "staged")
    conventions: Conventions = _setting("RINGREDUCE_CONVENTIONS", Conventions.parse, Conventions.CHAIN_RULE)  # noqa: RUF009
    standalone: bool = _setting("RINGREDUCE_STANDALONE", _switch, False)
    check_weights_every: int | None = _setting("RINGREDUCE_CHECK", _positive_int, None)
    check_finite_every: int | None = _setting("RINGREDUCE_CHECK_FINITE", _positive_int, None)
    check_data: bool = _setting("RINGREDUCE_CHECK_DATA", _switch, True)
    checksum: bool = _setting("RINGREDUCE_CHECKSUM", _switch, False)
    key_file: str | None = _setting("RINGREDUCE_KEY_FILE", str, None)
    status: bool = _setting("RINGREDUCE_STATUS", _seen, True)
    status_address: tuple[str, int] | None = _setting("RINGREDUCE_STATUS", _address, None)
    status_token_file: str | None = _setting("RINGREDUCE_STATUS_TOKEN_FILE", str, None)
    otlp: bool = _setting("RINGREDUCE_OTLP", _switch, False)
    verdict: bool = _setting("RINGREDUCE_VERDICT", _switch, False)
    report: str | None = _setting("RINGREDUCE_REPORT", str, None)
    watchdog_s: float | None = _setting("RINGREDUCE_WATCHDOG", _or_zero(_positive_float, None), None)
    watchdog_first_s: float = _setting("RINGREDUCE_WATCHDOG_FIRST", _positive_float, 600.0)
    watchdog_action: str = _setting("RINGREDUCE_WATCHDOG_ACTION", _action, "dump")
    dump: str | None = _setting("RINGREDUCE_DUMP", _or_zero(str, None), None)
    audit: str | None = _setting("RINGREDUCE_AUDIT", str, None)
    disk_key_file: str | None = _setting("RINGREDUCE_DISK_KEY_FILE", str, None)
    object_limit_nbytes: int = _setting("RINGREDUCE_OBJECT_LIMIT", parse_nbytes, 4 << 30)
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
        for name, parse in _LAUNCHED.items():
            if environ.get(name):
                _parsed(environ, name, text=environ[name], parse=parse)
        standard = cls(conventions=conventions, tuning=_caches(environ))
        read = {each.name: _read(environ, each, getattr(standard, each.name)) for each in _settings()}
        return cls(**read, launched_size=Launch.from_environ(environ).size)


def _settings() -> list[Field[Any]]:
    """Return the fields of `Config` that are read from the environment."""
    return [each for each in fields(Config) if each.metadata]


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
    ours = {each.metadata["variable"] for each in _settings()}
    return {"HOROVOD_": {*HOROVOD, *_HOROVOD_ALWAYS}, "RINGREDUCE_": ours | _ELSEWHERE}


def _guess(name: str, prefix: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.removeprefix(prefix), [each.removeprefix(prefix) for each in known], 1, 0.75)
    return f"{name} (did you mean {prefix}{close[0]}?)" if close else name


def find_ranks_of_cpus(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have Accelerate, and what is made of it, look for ranks on CPUs; else each process would train alone.

    To be called before an ``Accelerator`` is made. What a user has set stays.
    """
    environ.setdefault("ACCELERATE_USE_CPU", "true")


def accelerate_uses_cpus(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether Accelerate is set to use CPUs, also where torch sees a GPU."""
    return environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t")


def gpu_switches(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the switches of MPI libraries and NCCL that concern GPUs, those that are set; they may differ by rank."""
    return {name: environ[name] for name in _GPU_SWITCHES if environ.get(name)}


def _read(environ: Mapping[str, str], setting: Field[Any], default: Any) -> Any:
    """Read a setting from its variable or, where that does not say it, from Horovod's."""
    variable = setting.metadata["variable"]
    texts = {variable: environ.get(variable, "")}
    others = ((name, convert) for name, (field, convert) in HOROVOD.items() if field == setting.name)
    texts |= {name: convert(environ.get(name, "")) for name, convert in others}
    source = next((each for each, text in texts.items() if text), None)
    if source is None:
        return default
    return _parsed(environ, source, text=texts[source], parse=setting.metadata["parse"])


def _parsed(environ: Mapping[str, str], source: str, text: str, parse: Callable[[str], Any]) -> Any:
    """Return what a variable's text says."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{source}={environ[source]!r} in the environment: {error}") from None


def _caches(environ: Mapping[str, str]) -> str | None:
    """Return the folder for our files in that of the user's caches, by the XDG base directory specification."""
    caches = environ.get("XDG_CACHE_HOME")
    if not caches and environ.get("HOME"):
        caches = os.path.join(environ["HOME"], ".cache")
    return os.path.join(caches, "ringreduce") if caches else None
