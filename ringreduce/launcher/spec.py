"""The options of ``ringreduce run``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from threading import TIMEOUT_MAX

from ringreduce.common.errors import ConfigError, ForeignFileError
from ringreduce.common.files import read_file, require_ours
from ringreduce.launcher.hosts import Cooldown, parse_host_file, parse_hosts

_MOST_NBYTES = 16 << 20  # of a file of hosts
#: How hosts are named in a file, and on the command line.
_EXAMPLE = ("a line is like: localhost slots=2", "give it as in -H localhost:2")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The options of a job; None or empty: not given.

    Attributes:
        program: program to start, with its arguments.
        ranks: number of ranks.
        hosts: hosts with their slots, as in ``h1:2,h2:2``.
        hostfile: a file of hosts.
        exported: variables for all ranks, ``NAME`` or ``NAME=VALUE``.
        folder: folder for the output of each rank; None: all is shown.
        prefix: whether lines of output begin with the rank.
        key_file: path, on all hosts, of the file with the secret by which messages are sealed.
        status: where rank 0 serves what the job does, ``[HOST:]PORT``; None: nowhere.
        token_file: path, on the host of rank 0, of the file with the token for that; None: one that is made.
        elastic: whether ranks go on without others.
        least, most: the fewest ranks that go on, and the number to which the job grows.
        restarts: number of restarts after failures.
        script: path of a program that prints the hosts.
        slots: slots of hosts without a number.
        cooldown: time for which a host counts as failing; None: for ever.
        reset_limit: the most changes of the ranks, by deaths, restarts or growth; None: any number.
        start_timeout_s: seconds to wait for enough slots, and in `init` for the last rank.
        host_timeout_s: seconds without a mark after which a host is lost; 0: never.
        interfaces: names of networks for messages, separated by commas.
        ssh_port: port of sshd on other hosts; None: the standard one.
        more: options for mpirun.
        verbose: whether to show the command line, the variables that are set, and mpirun's own notices of failures.
        grace_s: seconds that ranks have to end after SIGTERM before they are killed.
        requeue: whether to ask the scheduler to run a stopped job again.
        stop_before_s: seconds before the end of the allocation at which ranks are asked to stop; None: they are not.
        stdin: whether rank 0 reads this command's standard input.
        oversubscribe: whether there may be more ranks than slots.
        env: variables that other hosts get: ``"all"`` that do not belong to this host, or those that are
            ``"named"``: by ``exported``, and by the prefixes of ringreduce, Horovod and OpenMP.
        horovod: whether ranks get Horovod's variables, ``HOROVOD_RANK`` and so on.
        rank_variables: whether ranks get the variables of torch's launcher, ``RANK`` and so on.
        ship: whether hosts get a copy of the environment and the program first.
        ship_paths: files and folders that they get, too.
        keep: whether the copies stay at the end, for the next job.
        report: file to which rank 0 writes at the end what steps took, and why; None: none.
        watchdog_s: seconds without progress of any rank after which a job counts as stalled; None: no limit.
        watchdog_first_s: the same limit until the first step, if that is longer.
        watchdog_action: what is done then: ``"dump"``, ``"end"`` or ``"restart"``.
        quiet: whether it says nothing of that.
        results: a folder that other hosts get, too, and from which what ranks write there comes back.
    """

    program: tuple[str, ...]
    ranks: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    exported: tuple[str, ...] = ()
    folder: str | None = None
    prefix: bool = False
    key_file: str | None = None
    status: str | None = None
    token_file: str | None = None
    elastic: bool = False
    least: int | None = None
    most: int | None = None
    restarts: int = 0
    script: str | None = None
    slots: int | None = None
    cooldown: Cooldown | None = None
    reset_limit: int | None = None
    start_timeout_s: float = 600.0
    host_timeout_s: float = 10.0
    interfaces: str | None = None
    ssh_port: int | None = None
    more: tuple[str, ...] = ()
    verbose: bool = False
    grace_s: float = 5.0
    requeue: bool = False
    stop_before_s: float | None = None
    stdin: bool = False
    oversubscribe: bool = False
    env: str = "named"
    horovod: bool = False
    rank_variables: bool = True
    ship: bool = False
    ship_paths: tuple[str, ...] = ()
    keep: bool = False
    report: str | None = None
    watchdog_s: float | None = None
    watchdog_first_s: float = 600.0
    watchdog_action: str = "dump"
    quiet: bool = False
    results: str | None = None

    @property
    def growth(self) -> list[str]:
        """The options that were given by which a job begins again on other hosts."""
        options = {
            "--max-np": self.most,
            "--host-discovery-script": self.script,
            "--cooldown": self.cooldown,
            "--reset-limit": self.reset_limit,
        }
        return [name for name, value in options.items() if value is not None]

    def require_sense(self) -> None:
        """Raise a `ConfigError` if options contradict each other."""
        given = ["--min-np"] * (self.least is not None) + ["--slots"] * (self.slots is not None) + self.growth
        if self.token_file is not None and self.status is None:
            raise ConfigError("--status-token-file is for what is served; add --status")
        if given and not self.elastic:
            raise ConfigError(f"{given[0]} is for elastic jobs; add --elastic")
        if self.watchdog_s is None and self.watchdog_action != "dump":
            raise ConfigError("--watchdog-action is for jobs that stall; add --watchdog SECONDS")
        if self.watchdog_action == "restart" and not self.restarts:
            raise ConfigError("--watchdog-action restart needs --max-restarts")
        for option, limit_s in (("--watchdog", self.watchdog_s), ("--watchdog-first", self.watchdog_first_s)):
            if limit_s is not None and not 0 < limit_s < TIMEOUT_MAX:
                raise ConfigError(f"{option} {limit_s:g} is no time to wait; give seconds, more than 0")
        if (self.ship_paths or self.keep) and not self.ship:
            raise ConfigError(f"{'--ship-path' if self.ship_paths else '--keep'} is for copies; add --ship")
        if self.ship and self.script is not None:
            raise ConfigError("--ship copies to hosts before the job; --host-discovery-script finds others later")
        if self.script is not None and (self.hosts or self.hostfile):
            raise ConfigError("--host-discovery-script names all hosts; leave out -H and --hostfile")
        if self.hosts and self.hostfile:
            raise ConfigError("-H and --hostfile both name the hosts; give one of them")
        if not 0 < self.start_timeout_s < TIMEOUT_MAX:
            raise ConfigError(f"--start-timeout {self.start_timeout_s:g} is no time to wait; give seconds, more than 0")
        if not 0 <= self.grace_s < TIMEOUT_MAX:
            raise ConfigError(f"--grace {self.grace_s:g} is no time to wait; give seconds, 0 or more")
        if self.stop_before_s is not None and self.stop_before_s <= 0:
            raise ConfigError("--stop-before: give a time above 0, as in 90s, 5m or 1.5h")
        if self.host_timeout_s and not 5 <= self.host_timeout_s < TIMEOUT_MAX:
            raise ConfigError(f"--host-timeout {self.host_timeout_s:g}: give at least 5 seconds, or 0 for never")
        if self.prefix and (self.elastic or self.folder):
            other = "--log-dir" if self.folder else "--elastic"
            raise ConfigError(f"--prefix does not go with {other}; without it, --log-dir has a file for each rank")
        if self.folder and self.growth:  # its shell would let go of the signal by which ranks are asked to begin again
            raise ConfigError(f"--log-dir does not go with {self.growth[0]}: ranks would not hear of other hosts")

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
