"""``ringreduce run``: the options of a job under mpirun."""

from __future__ import annotations

import inspect
import os
import shlex
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import click

from ringreduce.cli.keygen import default_key_file
from ringreduce.cli.progress_bar import bytes_bar
from ringreduce.cli.wrong_options import ProgramCommand, guess, options_of
from ringreduce.common.config import Config, parse_address
from ringreduce.common.errors import ConfigError
from ringreduce.common.keys import KEY_VARIABLE
from ringreduce.common.processes import ignore
from ringreduce.common.quantities import parse_seconds
from ringreduce.common.sealed_files import disk_keys
from ringreduce.launcher.allocations_end import run_again
from ringreduce.launcher.hosts import Cooldown, Hosts
from ringreduce.launcher.job import say
from ringreduce.launcher.own_networks import without_own_networks
from ringreduce.launcher.rank_variables import with_free_port
from ringreduce.launcher.restarts import Restarts
from ringreduce.launcher.result_folder import with_results
from ringreduce.launcher.ship import shipped
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.start import make_folder, prepare
from ringreduce.observe.trace_file import collect

#: What one would do comes first; the options fill several screens.
_HELP = """Start PROGRAM as several ranks, which train together.

\b
  ringreduce run -np 4 python train.py --lr 0.1
  ringreduce run -H h1:2,h2:2 --log-dir logs python train.py
  ringreduce run --elastic -np 4 --min-np 2 --max-restarts 3 python train.py

"""


class Parsed(click.ParamType[Any]):
    """What a function reads from a text; it raises a ValueError where it cannot.

    Args:
        name: of the type, as help shows it.
        parse: the function.
        complaint: the message for a text (0) and an error (1).
    """

    def __init__(self, name: str, parse: Callable[[str], Any], complaint: str = "{0!r}: {1}") -> None:
        self.name = name
        self._parse = parse
        self._complaint = complaint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(self._complaint.format(value, error), param, ctx)


class _RunCommand(ProgramCommand):
    """``--encrypt`` may have a value, but only as in ``--encrypt=FILE``: what follows it else is the program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = [*args]
        rest = super().parse_args(ctx, [f"{word}=" if word == "--encrypt" else word for word in args])
        if program := ctx.params.get("program"):
            ctx.params["program"] = (*given[-len(program) :],)  # which may have such an option, too
        return rest


def _key_file(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path or default_key_file())


def _address(text: str) -> str:
    host, port = parse_address(text)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


@click.command(
    "run",
    cls=_RunCommand,
    short_help="Start a job.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "-np",
    "-n",
    "--num-proc",
    "ranks",
    type=click.IntRange(1),
    show_default="1, or one per slot of the hosts",
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
@click.option(
    "--encrypt",
    "key_file",
    metavar="[=FILE]",
    callback=_key_file,
    help="Encrypt messages of ranks; FILE, or your key of `ringreduce keygen`, lies in this place on all hosts.",
)
@click.option(
    "--status",
    type=Parsed("address", _address),
    metavar="[HOST:]PORT",
    help="Serve what all ranks do, from the host of rank 0, to who has the token: a page, /metrics and /health.",
)
@click.option(
    "--status-token-file",
    "token_file",
    type=click.Path(dir_okay=False),
    callback=lambda context, option, file: file and os.path.abspath(file),
    help="The token; made if there is no such file. Else all of your jobs on a host have one, which `top --job` finds.",
)
@click.option("--elastic", is_flag=True, help="Go on when ranks die; for programs that use ringreduce.elastic.")
@click.option("--min-np", "least", type=click.IntRange(1), show_default="1", help="End once fewer ranks survive.")
@click.option("--max-np", "most", type=click.IntRange(1), show_default="-np", help="Start or grow to so many.")
@click.option("--max-restarts", "restarts", type=click.IntRange(0), default=0, help="Start it again after it failed.")
@click.option(
    "--host-discovery-script",
    "script",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, executable=True),
    callback=lambda context, option, file: file and os.path.abspath(file),  # as given: links may change what they name
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
    type=Parsed("seconds", Cooldown.parse),
    show_default="for ever",
    help='For how long a host is not used again after a rank of it died; "MIN MAX": twice as long with each death.',
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
    type=float,
    default=600.0,
    metavar="SECONDS",
    show_default="600",
    help="Wait so long for --min-np slots, for ranks on their hosts, and from the first rank's init() for the last.",
)
@click.option(
    "--host-timeout",
    "host_timeout_s",
    type=float,
    default=10.0,
    metavar="SECONDS",
    show_default="10",
    help="A host that says nothing for so long is lost; with --elastic, the job begins again without it. 0: never.",
)
@click.option(
    "--grace",
    "grace_s",
    type=float,
    default=5.0,
    metavar="SECONDS",
    show_default="5",
    help="After SIGTERM, ranks of this host have so long to end before they are killed.",
)
@click.option("--requeue", is_flag=True, help="Have Slurm run the job again if it has stopped (status 75).")
@click.option(
    "--stop-before",
    "stop_before_s",
    type=Parsed("time", parse_seconds),
    metavar="TIME",
    help="Ask the ranks to stop so long before the allocation ends: 90, 5m or 1h.",
)
@click.option(
    "--ship",
    is_flag=True,
    help="Copy the virtual environment and the program to a folder of each host first: nothing need be shared.",
)
@click.option(
    "--ship-path",
    "ship_paths",
    multiple=True,
    metavar="PATH",
    help="With --ship, copy this file or folder, too. Repeatable.",
)
@click.option("--keep", is_flag=True, help="With --ship, keep the copies for the next job; else they are removed.")
@click.option("--oversubscribe", is_flag=True, help="Start more ranks than the hosts, or the allocation, have slots.")
@click.option(
    "--env",
    type=click.Choice(["named", "all"]),
    default="named",
    show_default=True,
    help="What other hosts get of this environment: RINGREDUCE_*, HOROVOD_*, OMP_* and -x, or all but what "
    "belongs to this host.",
)
@click.option("--stdin", is_flag=True, help="Rank 0 reads this command's standard input; else it is empty.")
@click.option("--network-interface", "interfaces", metavar="NAMES", help="For messages: eth0,eth1.")
@click.option("--ssh-port", type=click.IntRange(1, 65535), show_default="ssh's own", help="Of the other hosts.")
@click.option(
    "--mpi-args",
    "more",
    type=Parsed("options", shlex.split),
    default="",
    help="More options for mpirun, as in a shell.",
)
@click.option(
    "--verbose", is_flag=True, help="Show the command line of mpirun, what is set for it, and what it says of failures."
)
@click.option(
    "--report",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    callback=lambda context, option, file: file and os.path.abspath(file),
    help="Write what steps took, and why, to this file of rank 0's host: for `ringreduce compare`.",
)
@click.option(
    "--watchdog",
    "watchdog_s",
    type=float,
    metavar="SECONDS",
    help="Say why if no rank has made a step, a collective or a report for so long.",
)
@click.option(
    "--watchdog-first",
    "watchdog_first_s",
    type=float,
    default=600.0,
    metavar="SECONDS",
    show_default=True,
    help="The same until the first step or report of any rank, if that is longer: programs compile then.",
)
@click.option(
    "--watchdog-action",
    type=click.Choice(["dump", "end", "restart"]),
    default="dump",
    show_default=True,
    help="And then let ranks go on, end the job with status 124, or start it again, by --max-restarts.",
)
@click.option("--quiet", is_flag=True, help="Do not say at the end what steps took, and why.")
@click.option(
    "--rank-variables/--no-rank-variables",
    default=True,
    show_default=True,
    help="Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does; with "
    "--encrypt not the last two.",
)
@click.option("--horovod-variables", "horovod", is_flag=True, hidden=True, help="Set HOROVOD_RANK and its kin.")
@click.option("--results", type=click.Path(exists=True, file_okay=False), hidden=True, help="Of `ringreduce.run`.")
@click.option("--dry-run", is_flag=True, help="Print the command, and what is set for it; start nothing.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(dry_run: bool, **options: Any) -> int:
    """It runs under the mpirun of the MPI library that mpi4py loads; one that ends in .py and is no command, under this
    Python.

    Open MPI, MPICH or Intel MPI: whatever that wants on this machine is set; --verbose shows it. Inside an allocation
    of Slurm, PBS, LSF, Grid Engine or an MPI job of Kubernetes, ranks run on its hosts. If a rank fails, the job
    ends. The traceback of that rank is shown last, and the exit status is the rank's. With --elastic the status is 0
    if some ranks have reached the end. Ctrl-C ends all ranks. So does SIGTERM, but ranks of this host have --grace
    seconds, for example to save. SIGUSR1 and SIGUSR2 are passed on to all ranks. A job whose ranks have stopped, for
    they were asked to (see `ringreduce.stopping`), ends with status 75: run again, it goes on. On all hosts the program
    must lie in the same place, unless --ship copies it.

    With --elastic, the job survives ranks that die, by any cause, and goes on without them: see
    `ringreduce.elastic.run`. It needs Open MPI 5.

    With --max-np, --host-discovery-script or --cooldown it grows, too: when there are slots for more ranks, the ranks
    put their next commit on disk and end, and the job begins again with it, on the hosts that there are then.
    PROGRAM must call `state.keep_on_disk`.
    """
    spec = LaunchSpec(**options)
    if spec.program[0].startswith("-"):
        name = spec.program[0]
        asked = guess(name, options_of(command))
        raise click.UsageError(f"there is no option {name}{asked or '; options of the program come after its name'}")
    start = prepare(spec)
    if dry_run:
        if start.allocation is not None:
            click.echo(f"# hosts of {start.allocation.describe()}; tried on {start.allocation.scheduler.tried}")
        if spec.ship:
            click.echo("# --ship copies files to the hosts first; paths of these files lead to the copies then")
        line, settings = start.line_and_settings(Hosts(start.listed).next_ranks(start.policy, 0.0), {})
        click.echo(f"{start.describe(settings)} {shlex.join(line)}".strip())
        return 0
    make_folder(spec)
    if start.spec.rank_variables and (spec.key_file is not None or os.environ.get(KEY_VARIABLE)):
        say("ranks get no MASTER_ADDR and MASTER_PORT, as torch's own backends do not encrypt; -x sets them")
    start = without_own_networks(start)
    with shipped(start, bytes_bar) as start, with_results(start) as start, with_free_port(start) as start:
        status = Restarts(start.with_stdin()).run()
        if status == os.EX_TEMPFAIL:  # a second warning must not keep the job from being run again
            ignore(signal.SIGTERM)
            ignore(signal.SIGUSR1)
    with suppress(ConfigError):  # then there is no trace
        given = {name: value for name, value in spec.variables().items() if value is not None}
        settings_there = Config.from_environ({**os.environ, **given})
        if settings_there.timeline:  # ranks that were killed have left their parts
            collect(settings_there.timeline, disk_keys(settings_there.disk_key_file))
    if status == os.EX_TEMPFAIL and spec.requeue:
        say(run_again(os.environ))
    return status


command.help = _HELP + inspect.cleandoc(command.help or "")
