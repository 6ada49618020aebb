"""The options of Horovod's command, and what each of them is here: one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["NO_GLOO", "OPTIONS", "Option"]

NO_GLOO = "there is only MPI here, and no Gloo"
_HINTS = {
    "CACHE": "there is no cache of responses to size: ranks remember what they agreed on",
    "COMMITS": "where a job that grows keeps commits, for all hosts; without, for the time of the job, on this one",
    "CYCLES": "nothing waits for a cycle here: what all ranks have submitted runs at once",
    "GLOO": NO_GLOO,
    "HOSTS": "mpirun checks no hosts beforehand, so nothing is kept of that",
    "SCHEDULE": "the algorithm is chosen for each size; see `ringreduce explain`, and RINGREDUCE_ALGORITHM",
    "SEEN": "that is so already",
    "THREADS": "ringreduce asks MPI for the threads that it needs",
    "TUNE": "`mpirun ... ringreduce tune` measures once, beforehand, and later runs choose by its table",
}
#: A row for each option: its names; what its value is called, if it takes one; what it is here (an option of
#: ``ringreduce run``, a variable of the ranks, or nothing); section and key in a file of ``--config-file``; what it
#: does here or, of those that are nothing here, why.
_TABLE = """
-np --num --num-proc              | N         | -np                     | | how many ranks
-H --hosts                        | h1:2,h2:2 | -H                      | | hosts and their slots
-hostfile --hostfile              | FILE      | --hostfile              | | a file with lines: h1 slots=2
-p --ssh-port                     | PORT      | --ssh-port              | | where ssh reaches the other hosts
--network-interface --network-interfaces | NAMES | --network-interface  | | for messages
--mpi-args                        | OPTIONS   | --mpi-args              | | more options for mpirun
--output-filename                 | FOLDER    | --log-dir               | | a file for each rank: rank-0.log
--start-timeout       | SECONDS   | --start-timeout         | | wait so long for slots, and for all ranks to call init()
--elastic-timeout                 | SECONDS   | --start-timeout         | | the same
--verbose                         |           | --verbose               | | show the command line of mpirun
--min-np --min-num-proc           | N         | --min-np                | | an elastic job ends with fewer ranks
--max-np --max-num-proc           | N         | --max-np                | | an elastic job grows to so many
--slots --slots-per-host          | N         | --slots                 | | of hosts listed without a number
--host-discovery-script           | FILE      | --host-discovery-script | | prints host:slots lines
--commits | FOLDER | RINGREDUCE_COMMITS | | COMMITS
--reset-limit                     | N         | --reset-limit           | | how often the ranks may change
--blacklist-cooldown-range        | MIN MAX   | --cooldown              | | seconds for which failing hosts are not used
--fusion-threshold-mb  | MIB  | RINGREDUCE_FUSION   | params.fusion_threshold_mb | closes a group of fused tensors
--timeline-filename    | FILE | RINGREDUCE_TIMELINE | timeline.filename          | a trace of the job
--timeline-mark-cycles | | RINGREDUCE_TIMELINE_MARK_BATCHES | timeline.mark_cycles | marks where operations start
--no-stall-check       | | RINGREDUCE_STALL_WARNING | | no warning of ranks that do not come
--stall-check-warning-time-seconds|SECONDS|RINGREDUCE_STALL_WARNING|stall_check.warning_time_seconds|when to warn
--stall-check-shutdown-time-seconds|SECONDS|RINGREDUCE_TIMEOUT|stall_check.shutdown_time_seconds|when that is an error
--log-level            | LEVEL | HOROVOD_LOG_LEVEL | logging.level | of ringreduce's logger
--mpi --use-mpi        | | | | MPI is what there is
--tcp --tcp-flag       | | | | messages of one machine take shared memory; see --mpi-args
--binding-args         | OPTIONS | | | say it with --mpi-args
--mpi-threads-disable  | | | library_options.mpi_threads_disable | THREADS
--no-mpi-threads-disable | | | | THREADS
--disable-cache        | | | | HOSTS
-i --ssh-identity-file | FILE | | | name it in ~/.ssh/config
-prefix-timestamp --prefix-output-with-timestamp | | | | see --mpi-args
--log-with-timestamp   | | | logging.with_timestamp | log lines carry the time if the program's logging does
--log-without-timestamp --log-hide-timestamp --no-log-with-timestamp | | | | the program's logging decides
--no-timeline-mark-cycles | | | | SEEN
--stall-check          | | | | SEEN
--cycle-time-ms        | MS | | params.cycle_time_ms | CYCLES
--cache-capacity       | N | | params.cache_capacity | CACHE
--hierarchical-allreduce | | | params.hierarchical_allreduce | SCHEDULE
--hierarchical-allgather | | | params.hierarchical_allgather | SCHEDULE
--torus-allreduce      | | | params.torus_allreduce | SCHEDULE
--no-hierarchical-allreduce | | | | SCHEDULE
--no-hierarchical-allgather | | | | SCHEDULE
--no-torus-allreduce   | | | | SCHEDULE
--autotune             | | | autotune.enabled | TUNE
--no-autotune          | | | | TUNE
--autotune-log-file    | VALUE | | autotune.log_file | TUNE
--autotune-warmup-samples | VALUE | | autotune.warmup_samples | TUNE
--autotune-steps-per-sample | VALUE | | autotune.steps_per_sample | TUNE
--autotune-bayes-opt-max-samples | VALUE | | autotune.bayes_opt_max_samples | TUNE
--autotune-gaussian-process-noise | VALUE | | autotune.gaussian_process_noise | TUNE
--num-nccl-streams     | N | | library_options.num_nccl_streams | see docs/gpu.md for what GPUs use
--thread-affinity      | CORES | | library_options.thread_affinity | no thread of ours is bound to a core
--ccl-bgt-affinity     | CORES | | library_options.ccl_bgt_affinity | there is no oneCCL here
--gloo-timeout-seconds | SECONDS | | library_options.gloo_timeout_seconds | GLOO
"""


def _mebibytes(text: str) -> str:
    """Return bytes; 0, which is no fusion in Horovod, closes a group after its first byte."""
    return str(max(round(float(text) * (1 << 20)), 1))


def _seconds(text: str) -> str:
    float(text)
    return text


#: What makes the value of a variable from that of an option, where that is not the same.
_CONVERSIONS: dict[str, Callable[[str], str]] = {
    "--fusion-threshold-mb": _mebibytes,
    "--no-stall-check": lambda text: "0",
    "--stall-check-warning-time-seconds": _seconds,
    # 0: wait for ever, which nothing does here
    "--stall-check-shutdown-time-seconds": lambda text: "" if float(text) == 0 else text,
}


class Option(NamedTuple):
    """An option of Horovod's.

    Attributes:
        names: of the option.
        value: what its value is called; empty: it takes none.
        run: the option of ``ringreduce run`` that it is; empty: none.
        variable: the setting that it is; empty: none.
        place: section and key in a file of ``--config-file``, with a point between them; empty: it is in none.
        text: what it does here or, if it is neither option nor setting, why it means nothing.
    """

    names: tuple[str, ...]
    value: str
    run: str
    variable: str
    place: str
    text: str

    @classmethod
    def of_row(cls, row: str) -> Option:
        """Read a row of the table."""
        names, value, here, place, text = (cell.strip() for cell in row.split("|"))
        run, variable = (here, "") if here.startswith("-") else ("", here)
        return cls(tuple(names.split()), value, run, variable, place, _HINTS.get(text, text))

    @property
    def is_needed(self) -> bool:
        """Whether it means something here."""
        return bool(self.run or self.variable)

    def convert(self, text: str) -> str:
        """Return the text of the setting from that of the option."""
        return _CONVERSIONS.get(self.names[0], str)(text)


OPTIONS = tuple(map(Option.of_row, _TABLE.strip().splitlines()))
