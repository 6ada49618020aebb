"""``ringreduce run``: a job under mpirun, with what that needs here; once more if it fails, or to grow."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import click

from ringreduce.common.errors import ConfigError
from ringreduce.launcher import failures
from ringreduce.launcher.allocation import Allocation
from ringreduce.launcher.discovery import Discovery
from ringreduce.launcher.hosts import Cooldown, Hosts, Rules, is_here, parse_host_file, parse_hosts
from ringreduce.launcher.launchers import Launcher, Network, find
from ringreduce.launcher.restarts import Restarts, Wishes
from ringreduce.launcher.start import UNNAMED, Start

__all__ = ["command"]

_START_TIMEOUT_S = 600.0
_EXAMPLES = """\b
Examples:
  ringreduce run -np 4 python train.py --lr 0.1
  ringreduce run -H h1:2,h2:2 --log-dir logs python train.py
  ringreduce run --elastic -np 4 --min-np 2 --max-restarts 3 python train.py
"""


def _cooldown(context: click.Context, parameter: click.Parameter, text: str | None) -> Cooldown | None:
    """Read the option; click's callback."""
    try:
        return None if text is None else Cooldown.parse(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}", context, parameter) from None


def _words(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Split the option as a shell does; click's callback."""
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}", context, parameter) from None


@click.command(
    "run",
    epilog=_EXAMPLES,
    short_help="Start a job.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "-np",
    "-n",
    "--num-proc",
    "ranks",
    type=click.IntRange(1),
    show_default="all slots of the hosts, or of the allocation; 1 without",
    help="How many ranks.",
)
@click.option("-H", "--hosts", help="Hosts and their slots, as in h1:2,h2:2.")
@click.option(
    "--hostfile", type=click.Path(exists=True, dir_okay=False), help="A file of hosts, with lines like: h1 slots=2"
)
@click.option("-x", "exported", multiple=True, metavar="NAME[=VALUE]", help="A variable for all ranks. Repeatable.")
@click.option(
    "--log-dir",
    "folder",
    type=click.Path(file_okay=False),
    help="Write rank-0.log and so on; show rank 0 alone.",
)
@click.option("--prefix/--no-prefix", help="Begin each line of output with its rank, in mpirun's own format.")
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
    help="Wait so long for --min-np slots, and from the first rank's init() for the last.",
)
@click.option("--network-interface", "interfaces", metavar="NAMES", help="For messages: eth0,eth1.")
@click.option("--ssh-port", type=click.IntRange(1, 65535), show_default="ssh's own", help="Of the other hosts.")
@click.option("--mpi-args", "more", metavar="OPTIONS", callback=_words, help="More options for mpirun, as in a shell.")
@click.option(
    "--verbose", is_flag=True, help="Show the command line of mpirun, what is set for it, and what it says of failures."
)
@click.option("--horovod-variables", "horovod", is_flag=True, hidden=True, help="Set HOROVOD_RANK and its kin.")
@click.option("--dry-run", is_flag=True, help="Print the command, and what is set for it; start nothing.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    ranks: int | None,
    hosts: str | None,
    hostfile: str | None,
    exported: tuple[str, ...],
    folder: str | None,
    prefix: bool,
    elastic: bool,
    least: int | None,
    most: int | None,
    restarts: int,
    script: str | None,
    slots: int | None,
    cooldown: Cooldown | None,
    reset_limit: int | None,
    start_timeout_s: float | None,
    interfaces: str | None,
    ssh_port: int | None,
    more: tuple[str, ...],
    verbose: bool,
    horovod: bool,
    dry_run: bool,
    program: tuple[str, ...],
) -> int:
    """Start PROGRAM (python train.py ...) as several ranks, under the mpirun of the MPI library that mpi4py loads.

    A PROGRAM that ends in .py and is no command runs under this Python.

    Open MPI, MPICH or Intel MPI: whatever that wants on this machine is set; --verbose shows it. Inside an allocation
    of Slurm, PBS or LSF, ranks run on its hosts. If a rank fails, the job ends, the traceback of that rank is shown
    last, and the exit status is the rank's; with --elastic it is 0 as long as some ranks have reached the end. Ctrl-C
    and SIGTERM end all ranks. On all hosts the program must lie in the same place.

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
    others = {"--min-np": least, "--slots": slots}
    given = [name for name, value in {**others, **growth}.items() if value is not None]
    if given and not elastic:
        raise ConfigError(f"{given[0]} is for elastic jobs; add --elastic")
    if script is not None and (hosts or hostfile):
        raise ConfigError("--host-discovery-script names all hosts; leave out -H and --hostfile")
    if hosts and hostfile:
        raise ConfigError("-H and --hostfile both name the hosts; give one of them")
    watches = any(value is not None for value in growth.values())
    if prefix and (elastic or folder):
        other = "--log-dir" if folder else "--elastic"
        raise ConfigError(f"--prefix does not go with {other}; without it, --log-dir has a file for each rank")
    if folder and watches:
        given = [name for name, value in growth.items() if value is not None]
        raise ConfigError(f"--log-dir does not go with {given[0]}: the ranks of such jobs speak to the launcher")
    variables = _variables(exported)
    named = _named(hosts, hostfile, slots or 1)
    allocation = None if named or script else Allocation.find(os.environ)
    granted = named or (allocation.slots if allocation is not None else {})
    if ranks is None:
        there = sum(granted.values()) or 1
        ranks = there if most is None else min(there, most)
    if most is not None and most < ranks:
        raise ConfigError(f"--max-np {most} is less than the {ranks} ranks of -np")
    if most is not None and most > ranks and not (granted or script):
        raise ConfigError(
            f"--max-np {most} is more than the {ranks} slots of this machine that -np stands for; say where there are "
            f"more: -H localhost:{most}, --hostfile or --host-discovery-script"
        )
    starts = "-np" if most is None else "--max-np"
    if least is not None and least > (most or ranks):
        raise ConfigError(f"--min-np {least} is more than the {most or ranks} ranks that {starts} starts")
    name = os.uname().nodename
    here = frozenset({name, name.partition(".")[0], *(() if named else (UNNAMED,))})
    elsewhere = not all(is_here(host, here) for host in granted)
    program = _startable(program, checks=not (elsewhere or more or "PATH" in variables))
    if folder is not None and not dry_run:
        _make(Path(folder))
    if not elsewhere:
        _require_room(max(ranks, most or 0))
    launcher = find(required=ranks > 1 or elastic or elsewhere or prefix or bool(more))
    if elastic:
        _require_ob1(os.environ)
        _require_open_mpi(launcher)
    rules = Rules(least or 1, most or ranks, cooldown)
    by_host: Mapping[str, int] = granted if watches and granted else {UNNAMED: ranks}
    if sum(by_host.values()) < rules.least:
        raise ConfigError(f"the hosts have {sum(by_host.values())} slots, and --min-np is {rules.least}; see --slots")
    finds_itself = allocation is not None and launcher.reads(allocation.scheduler)
    start = Start(
        launcher,
        program,
        here,
        slots={} if finds_itself else granted,
        hostfile=hostfile if launcher.kind not in ("MPICH", "Intel MPI") else None,
        remote=bool(named) or elsewhere,
        least=least,
        elastic=elastic,
        watches=watches,
        start_timeout_s=_START_TIMEOUT_S if start_timeout_s is None else start_timeout_s,
        variables={name: value for name, value in variables.items() if value is not None},
        inherited=tuple(variables),
        folder=None if folder is None else os.path.abspath(folder),
        prefix=prefix,
        horovod=horovod,
        network=Network(interfaces or "", ssh_port),
        more=more,
        verbose=verbose,
    )
    if dry_run:
        at_first = {UNNAMED: ranks} if script else Hosts(by_host).next_ranks(rules, 0.0)
        line, settings = start.line_and_settings(at_first, {})
        click.echo(f"{start.describe(settings)} {shlex.join(line)}".strip())
        return 0
    wishes = Wishes(rules, elastic, watches, restarts, reset_limit, start.start_timeout_s, verbose)
    discovery = Discovery(script, slots or 1) if script else None
    if discovery is not None:
        discovery.start()
    listed = (lambda: by_host) if discovery is None else discovery.hosts

    def words(written: str) -> failures.Failure | None:
        found = failures.find_in_files(Path(folder)) if folder is not None else None
        return found or failures.find(written)

    return Restarts(wishes, listed, start.command, here, words=words).run()


def _variables(exported: tuple[str, ...]) -> dict[str, str | None]:
    """Return the variables of ``-x``, None for those that are as they are here."""
    found: dict[str, str | None] = {}
    for each in exported:
        name, has_value, value = each.partition("=")
        if not name:
            raise ConfigError(f"-x {each!r} names no variable; expected NAME or NAME=VALUE")
        if not has_value and name not in os.environ:
            raise ConfigError(f"-x {name}: it is not set here; give a value, as in -x {name}=1")
        found[name] = value if has_value else None
    return found


def _startable(program: tuple[str, ...], *, checks: bool) -> tuple[str, ...]:
    """Return what mpirun is to start; a script of Python that is here and no command runs under this Python.

    Args:
        program: with its arguments.
        checks: whether mpirun looks for it here, as this does.

    Raises:
        ConfigError: there is no such program.
    """
    name = program[0]
    is_path, is_here = os.sep in name, os.path.isfile(name)
    if name.endswith(".py") and is_here and not (is_path and os.access(name, os.X_OK) and _names_interpreter(name)):
        return sys.executable, *program
    if not checks or shutil.which(name) is not None:
        return program
    if is_here:
        raise ConfigError(f"{name} can be read, but not run; chmod +x {name}, or put what runs it in front")
    raise ConfigError(f"{name} is a folder, and no program" if os.path.isdir(name) else f"there is no program {name}")


def _names_interpreter(name: str) -> bool:
    try:
        with open(name, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:  # whoever runs it will say why
        return True


def _make(folder: Path) -> None:
    """Make the folder of the ranks' files, so that what is wrong with it is said once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"--log-dir {folder}: cannot write there: {error.strerror}") from None


def _require_room(ranks: int) -> None:
    """Raise a `ConfigError` if this machine cannot run so many processes."""
    mine, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = {"ulimit -u": mine} if mine != resource.RLIM_INFINITY else {}
    for name in ("pid_max", "threads-max"):
        with suppress(OSError, ValueError):
            limits[f"/proc/sys/kernel/{name}"] = int(Path("/proc/sys/kernel", name).read_text())
    name, most = min(limits.items(), key=lambda each: each[1], default=("", ranks))
    if ranks > most:
        raise ConfigError(f"{ranks} ranks are more than the {most} processes that this machine allows ({name})")


def _named(hosts: str | None, hostfile: str | None, slots: int) -> dict[str, int]:
    """Return the slots by host that users name; ``slots`` is for those without a number."""
    if hostfile is not None:
        return parse_host_file(Path(hostfile).read_text(encoding="utf-8", errors="replace"), slots)
    return parse_hosts(hosts or "", slots)


def _require_open_mpi(launcher: Launcher) -> None:
    if launcher.kind != "Open MPI" or launcher.major < 5:
        raise ConfigError(
            f"--elastic takes Open MPI 5, where ranks survive others; {launcher.path} says {launcher.said!r}"
        )


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
