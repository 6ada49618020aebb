"""The options of Horovod's command, and what each of them is here: one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["OPTIONS", "Option"]

_HINTS = {
    "CACHE": "there is no cache of responses to size: ranks remember what they agreed on",
    "COMMITS": "where a job that grows keeps commits, for all hosts; without, for the time of the job, on this one",
    "CYCLES": "nothing waits for a cycle here: what all ranks have submitted runs at once",
    "GLOO": "there is only MPI here, and no Gloo; leave it out",
    "HOSTS": "mpirun checks no hosts beforehand, so nothing is kept of that",
    "SCHEDULE": "the algorithm is chosen for each size; see `ringreduce explain`, and RINGREDUCE_ALGORITHM",
    "SEEN": "that is so already",
    "THREADS": "ringreduce asks MPI for the threads that it needs",
    "TUNE": "`mpirun ... ringreduce tune` measures once, beforehand, and later runs choose by its table",
}
#: A row for each option: its names; what its value is called, if it takes one; what becomes of it; section and key in a
#: file of ``--config-file``; what it does here or, of those that do nothing here, why.
_TABLE = """
-np --num --num-proc | N | run -np | | how many ranks
-H --hosts | h1:2,h2:2 | run -H | | hosts and their slots
-hostfile --hostfile | FILE | run --hostfile | | a file with lines: h1 slots=2
-p --ssh-port | PORT | run --ssh-port | | where ssh reaches the other hosts
--network-interface --network-interfaces | NAMES | run --network-interface | | for messages
--mpi-args | OPTIONS | run --mpi-args | | more options for mpirun
--output-filename | FOLDER | run --log-dir | | a file for each rank: rank-0.log
--start-timeout | SECONDS | run --start-timeout | | wait so long for slots, and for all ranks to call init()
--elastic-timeout | SECONDS | run --start-timeout | | the same
--verbose | | run --verbose | | show the command line of mpirun
--min-np --min-num-proc | N | run --min-np | | an elastic job ends with fewer ranks
--max-np --max-num-proc | N | run --max-np | | an elastic job grows to so many
--slots --slots-per-host | N | run --slots | | of hosts listed without a number
--host-discovery-script | FILE | run --host-discovery-script | | prints host:slots lines
--commits | FOLDER | set RINGREDUCE_COMMITS | | COMMITS
--reset-limit | N | run --reset-limit | | how often the ranks may change
--blacklist-cooldown-range | MIN MAX | run --cooldown | | seconds for which failing hosts are not used
--fusion-threshold-mb | MIB | set RINGREDUCE_FUSION | params.fusion_threshold_mb | closes a group of fused tensors
--timeline-filename | FILE | set RINGREDUCE_TIMELINE | timeline.filename | a trace of the job
--timeline-mark-cycles | | set HOROVOD_TIMELINE_MARK_CYCLES | timeline.mark_cycles | marks where operations start
--no-stall-check | | set RINGREDUCE_STALL_WARNING | | no warning of ranks that do not come
--stall-check-warning-time-seconds|SECONDS|set RINGREDUCE_STALL_WARNING|stall_check.warning_time_seconds| when to warn
--stall-check-shutdown-time-seconds|SECONDS|set RINGREDUCE_TIMEOUT|stall_check.shutdown_time_seconds| when to give up
--log-level | LEVEL | set HOROVOD_LOG_LEVEL | logging.level | of ringreduce's logger
--mpi --use-mpi | | none | | MPI is what there is
--tcp --tcp-flag | | none | | messages of one machine take shared memory; see --mpi-args
--binding-args | OPTIONS | none | | say it with --mpi-args
--mpi-threads-disable | | none | library_options.mpi_threads_disable | THREADS
--no-mpi-threads-disable | | none | | THREADS
--disable-cache | | none | | HOSTS
-i --ssh-identity-file | FILE | none | | name it in ~/.ssh/config
-prefix-timestamp --prefix-output-with-timestamp | | none | | see --mpi-args
--log-with-timestamp | | none | logging.with_timestamp | log lines carry the time if the program's logging does
--log-without-timestamp --log-hide-timestamp --no-log-with-timestamp | | none | | the program's logging decides
--no-timeline-mark-cycles | | none | | SEEN
--stall-check | | none | | SEEN
--cycle-time-ms | MS | none | params.cycle_time_ms | CYCLES
--cache-capacity | N | none | params.cache_capacity | CACHE
--hierarchical-allreduce | | none | params.hierarchical_allreduce | SCHEDULE
--hierarchical-allgather | | none | params.hierarchical_allgather | SCHEDULE
--torus-allreduce | | none | params.torus_allreduce | SCHEDULE
--no-hierarchical-allreduce | | none | | SCHEDULE
--no-hierarchical-allgather | | none | | SCHEDULE
--no-torus-allreduce | | none | | SCHEDULE
--autotune | | none | autotune.enabled | TUNE
--no-autotune | | none | | TUNE
--autotune-log-file | VALUE | none | autotune.log_file | TUNE
--autotune-warmup-samples | VALUE | none | autotune.warmup_samples | TUNE
--autotune-steps-per-sample | VALUE | none | autotune.steps_per_sample | TUNE
--autotune-bayes-opt-max-samples | VALUE | none | autotune.bayes_opt_max_samples | TUNE
--autotune-gaussian-process-noise | VALUE | none | autotune.gaussian_process_noise | TUNE
--num-nccl-streams | N | none | library_options.num_nccl_streams | see docs/gpu.md for what GPUs use
--thread-affinity | CORES | none | library_options.thread_affinity | no thread of ours is bound to a core
--ccl-bgt-affinity | CORES | none | library_options.ccl_bgt_affinity | there is no oneCCL here
--gloo-timeout-seconds | SECONDS | none | library_options.gloo_timeout_seconds | GLOO
--config-file | FILE | file | | these in a file, as Horovod's YAML has them
-cb --check-build | | show check | | what there is on this machine: `ringreduce doctor`
-v --version | | show version | | this version
-h --help | | show help | | this text
--gloo --use-gloo | | refuse | | GLOO
--jsrun | | refuse | | jobs start under mpirun here, which runs on the hosts of an LSF allocation
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
        kind: what becomes of it: ``"run"``, an option of ``ringreduce run``; ``"set"``, a variable of the ranks;
            ``"file"``: it names a file of more; ``"show"``: something is shown, and no job started; ``"none"``: it
            means nothing here, and a warning says so; ``"refuse"``: it asks for what there is not.
        target: which option, variable, or what is shown.
        place: section and key in a file of ``--config-file``, with a point between them; empty: it is in none.
        text: what it does here, or why it does nothing.
    """

    names: tuple[str, ...]
    value: str
    kind: str
    target: str
    place: str
    text: str

    @classmethod
    def of_row(cls, row: str) -> Option:
        """Read a row of the table."""
        names, value, here, place, text = (cell.strip() for cell in row.split("|"))
        kind, _, target = here.partition(" ")
        return cls(tuple(names.split()), value, kind, target, place, _HINTS.get(text, text))

    def convert(self, text: str) -> str:
        """Return the text of the variable from that of the option."""
        return _CONVERSIONS.get(self.names[0], str)(text)


OPTIONS = tuple(map(Option.of_row, _TABLE.strip().splitlines()))
