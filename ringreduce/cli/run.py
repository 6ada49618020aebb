"""``ringreduce run``: the options of a job under mpirun."""

from __future__ import annotations

import inspect
import os
import shlex
import signal
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import click

from ringreduce.cli.progress_bar import bytes_bar
from ringreduce.cli.wrong_options import ProgramCommand, require_program
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.keys import KEY_VARIABLE
from ringreduce.common.processes import ignore
from ringreduce.common.sealed_files import disk_keys
from ringreduce.common.settings import OneOf, PathOf, Setting, WholeNumber, rows
from ringreduce.launcher.agents import with_agents
from ringreduce.launcher.allocations_end import run_again
from ringreduce.launcher.hosts import Hosts
from ringreduce.launcher.rank_variables import with_free_port
from ringreduce.launcher.restarts import Restarts
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.start import make_folder, prepare
from ringreduce.launcher.stderr import say
from ringreduce.observe.seen.trace_file import collect

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
    """

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


class _RunCommand(ProgramCommand):
    """``--encrypt`` may have a value, but only as in ``--encrypt=FILE``: what follows it else is the program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = [*args]
        rest = super().parse_args(ctx, [f"{word}=" if word == "--encrypt" else word for word in args])
        if program := ctx.params.get("program"):
            ctx.params["program"] = (*given[-len(program) :],)  # which may have such an option, too
        return rest


class _UsablePath(click.Path):
    """A path that can be used as its row says, in the form in which it is handed on."""

    def __init__(self, path: PathOf) -> None:
        super().__init__(
            exists=path.exists, file_okay=not path.is_folder, dir_okay=path.is_folder, executable=path.is_program
        )
        self._path = path

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._path(str(super().convert(value, param, ctx)))


def _kind(name: str, read: Callable[[str], Any]) -> click.ParamType[Any]:
    """Return click's type for what reads the value of an option."""
    if isinstance(read, PathOf):
        return _UsablePath(read)
    if isinstance(read, WholeNumber):
        return click.IntRange(read.least, read.most)
    if isinstance(read, OneOf):
        return click.Choice(read.words)
    return click.STRING if read is str else Parsed(name, read)


def _text_for_ranks(row: Setting) -> Callable[[str], Any]:
    """Return what makes the text of a variable from that of an option."""

    def read(text: str) -> str:
        told = row.told(text)
        row.parse(told)
        return told

    return row.told if isinstance(row.told, PathOf) else row.parse if isinstance(row.parse, OneOf) else read


#: The options that set a variable of the ranks, and are nothing else.
_OF_RANKS = {name: row for name, _, row in rows(Config) if row.options}


def options_from(
    table: type, read: Callable[[Setting], Callable[[str], Any]] = attrgetter("parse")
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return what adds an option for each row of a table that has one; what is not given is None.

    Args:
        table: with the rows.
        read: returns what reads the option of a row.
    """

    def add(function: Callable[..., int]) -> Callable[..., int]:
        for name, default, row in reversed([*rows(table)]):
            if not row.options:
                continue
            kind: dict[str, Any] = {"multiple": row.several}
            if row.switch or isinstance(default, bool):
                kind = {"flag_value": row.switch} if row.switch else {"is_flag": True}
            else:
                of = getattr(row.parse, "__name__", name).removeprefix("parse_")
                kind["type"] = _kind(of, read(row))
            standard = f"{default:g}" if isinstance(default, float) else str(default)
            if isinstance(default, bool):
                standard = row.options[0].partition("/--")[0 if default else 2].strip("-")
            shown = row.unset or (standard not in ("None", "()", "") and standard)
            texts = {"metavar": row.metavar or None, "help": row.help, "hidden": row.hidden, "show_default": shown}
            function = click.option(*row.options, name, default=None, **texts, **kind)(function)
        return function

    return add


@click.command(
    "run",
    cls=_RunCommand,
    short_help="Start a job.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@options_from(LaunchSpec)
@options_from(Config, _text_for_ranks)
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
    given = {name: value for name, value in options.items() if value not in (None, ())}
    texts = {row.variable: given.pop(name) for name, row in _OF_RANKS.items() if name in given}
    spec = LaunchSpec(settings=texts, **given)
    require_program(spec.program, [command], otherwise="options of the program come after its name")
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
    if start.spec.rank_variables and (KEY_VARIABLE in spec.settings or os.environ.get(KEY_VARIABLE)):
        say("ranks get no MASTER_ADDR and MASTER_PORT, as torch's own backends do not encrypt; -x sets them")
    start = start.with_stdin()  # Where there is no standard input, the next file that is opened would be taken for it.
    with with_agents(start, bytes_bar) as (start, hearing), with_free_port(start) as start:
        status = Restarts(start, hearing=hearing).run()
        if status == os.EX_TEMPFAIL:  # a second warning must not keep the job from being run again
            ignore(signal.SIGTERM)
            ignore(signal.SIGUSR1)
    with suppress(ConfigError):  # then there is no trace
        exported = {name: value for name, value in spec.variables().items() if value is not None}
        settings_there = Config.from_environ({**os.environ, **spec.settings, **exported})
        if settings_there.timeline:  # ranks that were killed have left their parts
            collect(settings_there.timeline, disk_keys(settings_there.disk_key_file))
    if status == os.EX_TEMPFAIL and spec.requeue:
        say(run_again(os.environ))
    return status


command.help = _HELP + inspect.cleandoc(command.help or "")
