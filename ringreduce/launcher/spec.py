"""The options of ``ringreduce run``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError, ForeignFileError
from ringreduce.common.files import read_file, require_ours
from ringreduce.common.quantities import parse_seconds
from ringreduce.common.settings import OneOf, PathOf, Seconds, Setting, WholeNumber, option, rows, switch
from ringreduce.launcher.growth import Cooldown
from ringreduce.launcher.hosts import parse_host_file, parse_hosts

_MOST_NBYTES = 16 << 20  # of a file of hosts
#: How hosts are named in a file, and on the command line.
_EXAMPLE = ("a line is like: localhost slots=2", "give it as in -H localhost:2")


def _positive_time(text: str) -> float:
    time_s = parse_seconds(text)
    if not time_s:
        raise ValueError("expected a time above 0, such as 90s, 5m or 1.5h")
    return time_s


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


_ELASTIC = ("--elastic", "elastic jobs")
_COPIES = ("--ship", "copies")

#: Options that do not go together, and why.
_CONFLICTS = (
    ("--ship", "--host-discovery-script", "--ship copies to hosts before the job; {1} finds others later"),
    ("--host-discovery-script", "-H", "{0} names all hosts; leave out -H and --hostfile"),
    ("--host-discovery-script", "--hostfile", "{0} names all hosts; leave out -H and --hostfile"),
    ("-H", "--hostfile", "{0} and {1} both name the hosts; give one of them"),
    ("--prefix", "--log-dir", "{0} does not go with {1}; without it, --log-dir has a file for each rank"),
    ("--prefix", "--elastic", "{0} does not go with {1}; without it, --log-dir has a file for each rank"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The options of a job; None or empty: not given. Those that only set a variable of ranks have rows in `Config`.

    Attributes:
        program: program to start, with its arguments.
        settings: variables that options of `Config` set.
    """

    program: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)
    # As in `Config`, a row is to be read at once.
    # fmt: off
    ranks: int | None = option("-np -n --num-proc", WholeNumber(1), None, "How many ranks.",
        unset="1, or one per slot of the hosts", horovodrun="-np --num --num-proc")
    hosts: str | None = option("-H --hosts", str, None, "Hosts and their slots.", metavar="h1:2,h2:2",
        horovodrun="-H --hosts")
    hostfile: str | None = option("--hostfile", PathOf(exists=True), None,
        "A file of hosts, with lines like: h1 slots=2", horovodrun="-hostfile --hostfile")
    exported: tuple[str, ...] = option("-x", str, (), "A variable for all ranks. Repeatable.", metavar="NAME[=VALUE]",
        several=True)
    folder: str | None = option("--log-dir", PathOf(is_folder=True), None,
        "Write rank-0.log and so on; show rank 0 alone.", horovodrun="--output-filename")
    prefix: bool = option("--prefix/--no-prefix", switch, False,
        "Begin each line of output with its rank, in mpirun's own format.")
    elastic: bool = option("--elastic", switch, False,
        "Go on when ranks die; for programs that use ringreduce.elastic.")
    least: int | None = option("--min-np", WholeNumber(1), None, "End once fewer ranks survive.",
        variable="RINGREDUCE_MIN_NP", unset="1", needs=_ELASTIC, horovodrun="--min-np --min-num-proc")
    most: int | None = option("--max-np", WholeNumber(1), None, "Start or grow to so many.", unset="-np",
        needs=_ELASTIC, horovodrun="--max-np --max-num-proc")
    restarts: int = option("--max-restarts", WholeNumber(0), 0, "Start it again after it failed.")
    script: str | None = option("--host-discovery-script", PathOf(exists=True, is_program=True, whole=True), None,
        "Run every second; prints a line host or host:slots for each host that there is.", metavar="FILE",
        needs=_ELASTIC, horovodrun="--host-discovery-script")
    slots: int | None = option("--slots --slots-per-host", WholeNumber(1), None,
        "Slots of hosts listed without a number.", unset="1", needs=_ELASTIC, horovodrun="--slots --slots-per-host")
    cooldown: Cooldown | None = option("--cooldown", Cooldown.parse, None,  # noqa: RUF009
        'For how long a host is not used again after a rank of it died; "MIN MAX": twice as long with each death.',
        metavar="SECONDS", unset="for ever", needs=_ELASTIC)
    reset_limit: int | None = option("--reset-limit", WholeNumber(0), None,
        "End when the ranks would change more often, by deaths, restarts or growth.", unset="none", needs=_ELASTIC,
        horovodrun="--reset-limit")
    start_timeout_s: float = option("--start-timeout", Seconds(), 600.0,
        "Wait so long for --min-np slots, for ranks on their hosts, and from the first rank's init() for the last.",
        variable="RINGREDUCE_START_TIMEOUT", metavar="SECONDS", horovodrun="--start-timeout --elastic-timeout")
    host_timeout_s: float = option("--host-timeout", Seconds(5.0, zero=True), 10.0,
        "A host that says nothing for so long is lost; with --elastic, the job begins again without it. 0: never.",
        metavar="SECONDS")
    grace_s: float = option("--grace", Seconds(zero=True), 5.0,
        "After SIGTERM, ranks of this host have so long to end before they are killed.", metavar="SECONDS")
    requeue: bool = option("--requeue", switch, False, "Have Slurm run the job again if it has stopped (status 75).")
    stop_before_s: float | None = option("--stop-before", _positive_time, None,
        "Ask the ranks to stop so long before the allocation ends: 90s, 5m or 1h.", metavar="TIME")
    ship: bool = option("--ship", switch, False,
        "Copy the virtual environment and the program to a folder of each host first: nothing need be shared.")
    ship_paths: tuple[str, ...] = option("--ship-path", str, (),
        "With --ship, copy this file or folder, too. Repeatable.", metavar="PATH", several=True, needs=_COPIES)
    keep: bool = option("--keep", switch, False,
        "With --ship, keep the copies for the next job; else they are removed.", needs=_COPIES)
    oversubscribe: bool = option("--oversubscribe", switch, False,
        "Start more ranks than the hosts, or the allocation, have slots.")
    env: str = option("--env", OneOf(("named", "all")), "named",
        "What other hosts get of this environment: RINGREDUCE_*, HOROVOD_*, OMP_* and -x, or all but what belongs to "
        "this host.")
    stdin: bool = option("--stdin", switch, False, "Rank 0 reads this command's standard input; else it is empty.")
    interfaces: str | None = option("--network-interface", str, None, "For messages: eth0,eth1.", metavar="NAMES",
        horovodrun="--network-interface --network-interfaces")
    ssh_port: int | None = option("--ssh-port", WholeNumber(1, 65535), None, "Where ssh reaches the other hosts.",
        unset="ssh's own", horovodrun="-p --ssh-port")
    more: tuple[str, ...] = option("--mpi-args", _words, (), "More options for mpirun, as in a shell.",
        metavar="OPTIONS", horovodrun="--mpi-args")
    verbose: bool = option("--verbose", switch, False,
        "Show the command line of mpirun, what is set for it, and what it says of failures.", horovodrun="--verbose")
    rank_variables: bool = option("--rank-variables/--no-rank-variables", switch, True,
        "Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does; with "
        "--encrypt not the last two.")
    horovod: bool = option("--horovod-variables", switch, False, "Set HOROVOD_RANK and its kin.", hidden=True)
    results: str | None = option("--results", PathOf(exists=True, is_folder=True), None, "Of `ringreduce.run`.",
        hidden=True)
    # fmt: on

    @property
    def watchdog_action(self) -> str:
        """What follows if the job stalls, as `Config` has it; empty: the default."""
        return self.settings.get("RINGREDUCE_WATCHDOG_ACTION", "")

    @property
    def quiet(self) -> bool:
        """Whether nobody says at the end what steps took."""
        return self.settings.get("RINGREDUCE_VERDICT") == "0"

    def _given(self) -> dict[str, Setting]:
        """Return the options that were given, by their names in messages."""
        own = [row for name, default, row in rows(LaunchSpec) if getattr(self, name) != default]
        theirs = [row for _, _, row in rows(Config) if row.options and row.variable in self.settings]
        return {row.option: row for row in (*own, *theirs)}

    @property
    def growth(self) -> list[str]:
        """The options that were given by which a job begins again on other hosts."""
        growing = ("--max-np", "--host-discovery-script", "--cooldown", "--reset-limit")
        given = self._given()
        return [name for name in growing if name in given]

    def require_sense(self) -> None:
        """Raise a `ConfigError` if options contradict each other."""
        given = self._given()
        for name, row in given.items():
            if row.needs is not None and row.needs[0].split()[0] not in given:
                raise ConfigError(f"{name} is for {row.needs[1]}; add {row.needs[0]}")
        if self.watchdog_action == "restart" and not self.restarts:
            raise ConfigError("--watchdog-action restart needs --max-restarts")
        for one, other, why in _CONFLICTS:
            if one in given and other in given:
                raise ConfigError(why.format(one, other))
        if self.folder and self.growth:  # its shell would let go of the signal by which ranks are asked to begin again
            raise ConfigError(f"--log-dir does not go with {self.growth[0]}: ranks would not hear of other hosts")

    def set_for_ranks(self) -> dict[str, str]:
        """Return the variables of ranks that options set."""
        own = {row.variable: getattr(self, name) for name, _, row in rows(LaunchSpec) if row.variable}
        texts = {
            name: f"{value:g}" if isinstance(value, float) else str(value)
            for name, value in own.items()
            if value is not None
        }
        return {**texts, **self.settings}

    def variables(self, environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
        """Return the variables for all ranks; None: the value of this process.

        Raises:
            ConfigError: one has no name, or no value.
        """
        found: dict[str, str | None] = {}
        for each in self.exported:
            name, has_value, value = each.partition("=")
            if not name:
                raise ConfigError(f"-x {each!r} names no variable; expected NAME or NAME=VALUE")
            if not has_value and name not in environ:
                raise ConfigError(f"-x {name}: it is not set here; give a value, as in -x {name}=1")
            found[name] = value if has_value else None
        return found

    def require_own_script(self) -> None:
        """Raise a `ForeignFileError` if others could change the script that finds the hosts."""
        if self.script is not None:
            try:
                require_ours(self.script, os.stat(self.script))
            except ForeignFileError as error:
                raise ForeignFileError(f"--host-discovery-script {self.script}: {error}") from None

    def _hostfile_text(self, path: str) -> str:
        try:
            return read_file(path, most_nbytes=_MOST_NBYTES, ours=True).decode(errors="replace")
        except ForeignFileError as error:
            raise ForeignFileError(f"--hostfile {path}: {error}") from None
        except (ConfigError, OSError) as error:
            raise ConfigError(f"--hostfile {path}: {getattr(error, 'strerror', error)}") from None

    def named_hosts(self) -> dict[str, int]:
        """Return the slots by host that users name; empty if they name no hosts.

        Raises:
            ConfigError: they name no host with slots, or something else than hosts.
        """
        found: dict[str, int] = {}
        if self.hostfile is not None:
            found = parse_host_file(self._hostfile_text(self.hostfile), self.slots or 1)
        elif self.hosts is not None:
            found = parse_hosts(self.hosts, self.slots or 1)
        if not sum(found.values()) and (self.hostfile is not None or self.hosts is not None):
            where = f"--hostfile {self.hostfile}" if self.hostfile is not None else f"-H {self.hosts!r}"
            raise ConfigError(f"{where} has no host with slots; {_EXAMPLE[self.hostfile is None]}")
        return found
