"""The options of Horovod's command, and what each of them is here: two tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = ["OPTIONS", "Option"]

#: A row for each option: its names; what its value is called, if it takes one; what becomes of it; what it does here.
_TABLE = """
-np --num --num-proc | N | run -np | how many ranks
-H --hosts | h1:2,h2:2 | run -H | hosts and their slots
-hostfile --hostfile | FILE | run --hostfile | a file with lines: h1 slots=2
-p --ssh-port | PORT | run --ssh-port | where ssh reaches the other hosts
--network-interface --network-interfaces | NAMES | run --network-interface | for messages
--mpi-args | OPTIONS | run --mpi-args | more options for mpirun
--output-filename | FOLDER | run --log-dir | a file for each rank: rank-0.log
--start-timeout --elastic-timeout | SECONDS | run --start-timeout | wait so long for slots, and for all to call init()
--verbose | | run --verbose | show the command line of mpirun
--min-np --min-num-proc | N | run --min-np | an elastic job ends with fewer ranks
--max-np --max-num-proc | N | run --max-np | an elastic job grows to so many
--slots --slots-per-host | N | run --slots | of hosts listed without a number
--host-discovery-script | FILE | run --host-discovery-script | prints host:slots lines
--commits | FOLDER | set RINGREDUCE_COMMITS | commits of a job that grows, for all hosts; else here, while it runs
--reset-limit | N | run --reset-limit | how often the ranks may change
--blacklist-cooldown-range | MIN MAX | run --cooldown | seconds for which failing hosts are not used
--fusion-threshold-mb | MIB | set RINGREDUCE_FUSION | closes a group of fused tensors
--timeline-filename | FILE | set RINGREDUCE_TIMELINE | a trace of the job
--timeline-mark-cycles | | set HOROVOD_TIMELINE_MARK_CYCLES | marks where operations start
--no-stall-check | | set RINGREDUCE_STALL_WARNING | no warning of ranks that do not come
--stall-check-warning-time-seconds | SECONDS | set RINGREDUCE_STALL_WARNING | when to warn
--stall-check-shutdown-time-seconds | SECONDS | set RINGREDUCE_TIMEOUT | when to give up
--log-level | LEVEL | set HOROVOD_LOG_LEVEL | of ringreduce's logger
--config-file | FILE | file | these in a file, as Horovod's YAML has them
-cb --check-build | | show check | what there is on this machine: `ringreduce doctor`
-v --version | | show version | this version
-h --help | | show help | this text
--gloo --use-gloo | | refuse | there is only MPI here, and no Gloo; leave it out
--jsrun | | refuse | jobs start under mpirun here, which runs on the hosts of an LSF allocation
"""
#: Options that mean nothing here, those that take a value with = behind their last name; and why.
_UNNEEDED = """
--mpi --use-mpi | MPI is what there is
--tcp --tcp-flag | messages of one machine take shared memory; see --mpi-args
--binding-args= | say it with --mpi-args
--mpi-threads-disable, --no-mpi-threads-disable | ringreduce asks MPI for the threads that it needs
--disable-cache | mpirun checks no hosts beforehand, so nothing is kept of that
-i --ssh-identity-file= | name it in ~/.ssh/config
-prefix-timestamp --prefix-output-with-timestamp | see --mpi-args
--log-with-timestamp | log lines carry the time if the program's logging does
--log-without-timestamp --log-hide-timestamp --no-log-with-timestamp | the program's logging decides
--no-timeline-mark-cycles, --stall-check | that is so already
--cycle-time-ms= | nothing waits for a cycle here: what all ranks have submitted runs at once
--cache-capacity= | there is no cache of responses to size: ranks remember what they agreed on
--hierarchical-allreduce, --hierarchical-allgather, --torus-allreduce, --no-hierarchical-allreduce, \
    --no-hierarchical-allgather, --no-torus-allreduce \
    | the algorithm is chosen for each size; see `ringreduce explain`, and RINGREDUCE_ALGORITHM
--autotune, --no-autotune, --autotune-log-file=, --autotune-warmup-samples=, --autotune-steps-per-sample=, \
    --autotune-bayes-opt-max-samples=, --autotune-gaussian-process-noise= \
    | `mpirun ... ringreduce tune` measures once, beforehand, and later runs choose by its table
--num-nccl-streams= | see docs/gpu.md for what GPUs use
--thread-affinity= | no thread of ours is bound to a core
--ccl-bgt-affinity= | there is no oneCCL here
--gloo-timeout-seconds= | there is only MPI here, and no Gloo; leave it out
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
        text: what it does here, or why it does nothing.
    """

    names: tuple[str, ...]
    value: str
    kind: str
    target: str
    text: str

    @property
    def keys(self) -> list[str]:
        """What it is called in a file of ``--config-file``."""
        return [name.strip("-").replace("-", "_") for name in self.names]

    def convert(self, text: str) -> str:
        """Return the text of the variable from that of the option."""
        return _CONVERSIONS.get(self.names[0], str)(text)


def _cells(table: str) -> Iterator[list[str]]:
    for row in table.strip().splitlines():
        yield [cell.strip() for cell in row.split("|")]


def _options() -> Iterator[Option]:
    for names, value, here, text in _cells(_TABLE):
        kind, _, target = here.partition(" ")
        yield Option(tuple(names.split()), value, kind, target, text)
    for options, text in _cells(_UNNEEDED):
        for names in options.split(","):
            value = "VALUE" if "=" in names else ""
            yield Option(tuple(names.replace("=", "").split()), value, "none", "", text)


OPTIONS = tuple(_options())
