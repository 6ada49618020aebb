"""The command line: ``python -m ringreduce <command>``, alone or under mpirun.

Every rank runs the same command; rank 0 speaks for all. Wrong use is one line and exit status 2 on every rank.
"""

from __future__ import annotations

import os
import pwd
import sys
import tempfile
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from typing import Any, NoReturn

import click

import ringreduce
from ringreduce.audit.run_record import AuditRecord, refusal
from ringreduce.cli.wrong_options import guess
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError, ForeignFileError, RingReduceError, UnsupportedBufferError
from ringreduce.common.launch import launch

#: Where each command is. A module is imported when a command of it is asked for: `run` needs none of the others.
_PLACES = {
    "audit": "audits.audit",
    "bench": "commands.bench",
    "compare": "reports.compare",
    "doctor": "reports.doctor",
    "explain": "commands.explain",
    "export": "reports.export",
    "keygen": "keygen.command",
    "reproduce": "audits.reproduce",
    "run": "run.command",
    "simulate": "simulate.command",
    "submit": "submit.command",
    "timeline": "reports.timeline",
    "top": "reports.top",
    "tune": "commands.tune",
    "unseal": "unseal.command",
}


class _WorldGroup(click.Group):
    """A group of commands that all ranks run at once, and leave at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_PLACES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _PLACES and cmd_name not in self.commands:
            module, _, name = _PLACES[cmd_name].partition(".")
            self.add_command(getattr(import_module(f"ringreduce.cli.{module}"), name))
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            raise click.UsageError(f"No such command {name!r}{guess(name, _PLACES)}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ForeignFileError as error:
            if not launch().rank:
                AuditRecord.add_alone(Config.from_environ(), "refused", refusal(str(ctx.invoked_subcommand), error))
            raise

    def main(self, *arguments: Any, **options: Any) -> Any:
        if not options.get("standalone_mode", True):
            return super().main(*arguments, **options)
        options["standalone_mode"] = False
        if not os.environ.get("HOME"):  # without which Open MPI does not start
            os.environ["HOME"] = _home()
        try:
            with redirect_stdout(None) if launch().rank else nullcontext():  # or every rank would print the help
                status = super().main(*arguments, **options)
        except click.UsageError as error:
            hint = f" ({error.ctx.command_path} --help says more)" if error.ctx else ""
            return _leave(2, f"{error.format_message()}{hint}")
        except click.ClickException as error:
            return _leave(error.exit_code, error.format_message())
        except (ConfigError, UnsupportedBufferError) as error:
            return _leave(2, str(error))
        except click.Abort:
            return _leave(130, "interrupted")
        return _leave(status if isinstance(status, int) else 0)


_HELP = """Start a job, see what its ranks do, and measure what they could.

\b
  ringreduce doctor                      what this machine offers, and what to mend
  ringreduce run -np 2 python train.py   two ranks that train together
  ringreduce top                         what running jobs do

`ringreduce COMMAND --help` says more of each.
"""


@click.group(
    cls=_WorldGroup,
    help=_HELP,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True},
)
@click.version_option(ringreduce.__version__, prog_name="ringreduce")
@click.pass_context
def main(context: click.Context) -> None:
    """Show what there is, where no command is given."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _home() -> str:
    """Return the folder of this user; where the system knows none, that for temporary files."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return tempfile.gettempdir()


def _leave(status: int, complaint: str | None = None) -> NoReturn:
    """End this process with ``status``, once rank 0 has said why.

    A launcher ends the whole job as soon as one rank reports failure, so the others wait until the line is out.
    """
    started = ringreduce.is_initialized() or (status == 2 and _start())
    if complaint and (not started or ringreduce.rank() == 0):
        click.echo(f"Error: {complaint}", err=True)
    sys.stdout.flush()
    if started:
        ringreduce.barrier()
        ringreduce.shutdown()
    sys.exit(status)


def _start() -> bool:
    """Start the world only to learn who is rank 0; False where that fails too."""
    try:
        ringreduce.init()
    except RingReduceError:
        return False
    return True
