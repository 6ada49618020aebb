"""The options of Horovod's command, and what each of them is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["NO_GLOO", "OPTIONS", "Option"]

_MIB = 1 << 20


class Option(NamedTuple):
    """An option of Horovod's.

    Attributes:
        names: of the option.
        value: what its value is called; empty: it takes none.
        help: what it does here, in words.
        run: the option of ``ringreduce run`` that it is; empty: none.
        variable: the setting that it is; empty: none.
        convert: makes the text of the setting from that of the option.
        unneeded: why it means nothing here; empty: it means something.
        section, key: where a file of ``--config-file`` has it.
    """

    names: tuple[str, ...]
    value: str = ""
    help: str = ""
    run: str = ""
    variable: str = ""
    convert: Callable[[str], str] = str
    unneeded: str = ""
    section: str = ""
    key: str = ""


def _mebibytes(text: str) -> str:
    """Return bytes; 0, which is no fusion in Horovod, closes a group after its first byte."""
    return str(max(round(float(text) * _MIB), 1))


def _seconds(text: str) -> str:
    float(text)
    return text


_CYCLES = "nothing waits for a cycle here: what all ranks have submitted runs at once"
_CACHE = "there is no cache of responses to size: ranks remember what they agreed on"
_TUNE = "`mpirun ... ringreduce tune` measures once, beforehand, and later runs choose by its table"
_SCHEDULE = "the algorithm is chosen for each size; see `ringreduce explain`, and RINGREDUCE_ALGORITHM"
_SCHEDULES = ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce")
NO_GLOO = "there is only MPI here, and no Gloo"
_NCCL = "see docs/gpu.md for what GPUs use"

OPTIONS = (
    Option(("-np", "--num", "--num-proc"), "N", "how many ranks", run="-np"),
    Option(("-H", "--hosts"), "h1:2,h2:2", "hosts and their slots", run="-H"),
    Option(("-hostfile", "--hostfile"), "FILE", "a file with lines: h1 slots=2", run="--hostfile"),
    Option(("-p", "--ssh-port"), "PORT", "where ssh reaches the other hosts", run="--ssh-port"),
    Option(("--network-interface", "--network-interfaces"), "NAMES", "for messages", run="--network-interface"),
    Option(("--mpi-args",), "OPTIONS", "more options for mpirun", run="--mpi-args"),
    Option(("--output-filename",), "FOLDER", "a file for each rank: rank-0.log", run="--log-dir"),
    Option(
        ("--start-timeout",),
        "SECONDS",
        "wait so long for slots, and for all ranks to call init()",
        run="--start-timeout",
    ),
    Option(("--elastic-timeout",), "SECONDS", "the same", run="--start-timeout"),
    Option(("--verbose",), "", "show the command line of mpirun", run="--verbose"),
    Option(("--min-np", "--min-num-proc"), "N", "an elastic job ends with fewer ranks", run="--min-np"),
    Option(("--max-np", "--max-num-proc"), "N", "an elastic job grows to so many", run="--max-np"),
    Option(("--slots", "--slots-per-host"), "N", "of hosts listed without a number", run="--slots"),
    Option(("--host-discovery-script",), "FILE", "prints host:slots lines", run="--host-discovery-script"),
    Option(
        ("--commits",),
        "FOLDER",
        "where a job that grows keeps commits, shared by all hosts; without, for the time of the job, on this one",
        variable="RINGREDUCE_COMMITS",
    ),
    Option(("--reset-limit",), "N", "how often the ranks may change", run="--reset-limit"),
    Option(
        ("--blacklist-cooldown-range",), "MIN MAX", "seconds for which failing hosts are not used", run="--cooldown"
    ),
    Option(
        ("--fusion-threshold-mb",),
        "MIB",
        "closes a group of fused tensors",
        variable="RINGREDUCE_FUSION",
        convert=_mebibytes,
        section="params",
        key="fusion_threshold_mb",
    ),
    Option(
        ("--timeline-filename",),
        "FILE",
        "a trace of the job",
        variable="RINGREDUCE_TIMELINE",
        section="timeline",
        key="filename",
    ),
    Option(
        ("--timeline-mark-cycles",),
        "",
        "marks where operations start",
        variable="RINGREDUCE_TIMELINE_MARK_BATCHES",
        section="timeline",
        key="mark_cycles",
    ),
    Option(
        ("--no-stall-check",),
        "",
        "no warning of ranks that do not come",
        variable="RINGREDUCE_STALL_WARNING",
        convert=lambda text: "0",
    ),
    Option(
        ("--stall-check-warning-time-seconds",),
        "SECONDS",
        "when to warn of them",
        variable="RINGREDUCE_STALL_WARNING",
        convert=_seconds,
        section="stall_check",
        key="warning_time_seconds",
    ),
    Option(
        ("--stall-check-shutdown-time-seconds",),
        "SECONDS",
        "when that is an error",
        variable="RINGREDUCE_TIMEOUT",
        convert=lambda text: "" if float(text) == 0 else text,  # 0: wait for ever, which nothing does here
        section="stall_check",
        key="shutdown_time_seconds",
    ),
    Option(
        ("--log-level",),
        "LEVEL",
        "of ringreduce's logger",
        variable="HOROVOD_LOG_LEVEL",  # whose names are Horovod's
        section="logging",
        key="level",
    ),
    Option(("--mpi", "--use-mpi"), "", "", unneeded="MPI is what there is"),
    Option(("--tcp", "--tcp-flag"), "", "", unneeded="messages of one machine take shared memory; see --mpi-args"),
    Option(("--binding-args",), "OPTIONS", "", unneeded="say it with --mpi-args"),
    Option(
        ("--mpi-threads-disable",),
        unneeded="ringreduce asks MPI for the threads that it needs",
        section="library_options",
        key="mpi_threads_disable",
    ),
    Option(("--no-mpi-threads-disable",), "", "", unneeded="ringreduce asks MPI for the threads that it needs"),
    Option(("--disable-cache",), "", "", unneeded="mpirun checks no hosts beforehand, so nothing is kept of that"),
    Option(("-i", "--ssh-identity-file"), "FILE", "", unneeded="name it in ~/.ssh/config"),
    Option(("-prefix-timestamp", "--prefix-output-with-timestamp"), "", "", unneeded="see --mpi-args"),
    Option(
        ("--log-with-timestamp",),
        unneeded="log lines carry the time if the program's logging does",
        section="logging",
        key="with_timestamp",
    ),
    Option(
        ("--log-without-timestamp", "--log-hide-timestamp", "--no-log-with-timestamp"),
        unneeded="the program's logging decides",
    ),
    Option(("--no-timeline-mark-cycles",), "", "", unneeded="that is so already"),
    Option(("--stall-check",), "", "", unneeded="that is so already"),
    Option(("--cycle-time-ms",), "MS", "", unneeded=_CYCLES, section="params", key="cycle_time_ms"),
    Option(("--cache-capacity",), "N", "", unneeded=_CACHE, section="params", key="cache_capacity"),
    *(Option((f"--{name}",), unneeded=_SCHEDULE, section="params", key=name.replace("-", "_")) for name in _SCHEDULES),
    *(Option((f"--no-{name}",), unneeded=_SCHEDULE) for name in _SCHEDULES),
    Option(("--autotune",), "", "", unneeded=_TUNE, section="autotune", key="enabled"),
    Option(("--no-autotune",), "", "", unneeded=_TUNE),
    *(
        Option((f"--autotune-{name}",), "VALUE", unneeded=_TUNE, section="autotune", key=name.replace("-", "_"))
        for name in (
            "log-file",
            "warmup-samples",
            "steps-per-sample",
            "bayes-opt-max-samples",
            "gaussian-process-noise",
        )
    ),
    *(
        Option((f"--{name}",), value, unneeded=why, section="library_options", key=name.replace("-", "_"))
        for name, value, why in (
            ("num-nccl-streams", "N", _NCCL),
            ("thread-affinity", "CORES", "no thread of ours is bound to a core"),
            ("ccl-bgt-affinity", "CORES", "there is no oneCCL here"),
            ("gloo-timeout-seconds", "SECONDS", NO_GLOO),
        )
    ),
)
