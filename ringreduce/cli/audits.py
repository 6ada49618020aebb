"""Commands on audit records: whether one is whole, what it says, and how to make a run again."""

from __future__ import annotations

import click

from ringreduce.audit.chain import Examination, examine
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.files import open_file
from ringreduce.common.keys import KEY_VARIABLE, read_secret
from ringreduce.common.launch import launch
from ringreduce.doctor import audit_report

_FILE = click.Path(exists=True, dir_okay=False)


@click.group("audit", short_help="Look at the record of a run.")
def audit() -> None:
    """Look at a record that RINGREDUCE_AUDIT=FILE has made."""


@audit.command("verify", short_help="Say whether a record is whole.")
@click.argument("file", type=_FILE)
@click.option("--has", "known", metavar="HASH", help="Also say whether the line with this hash is still there.")
@click.option(
    "--key",
    "key_file",
    type=click.Path(),
    help="Also say whether each line is signed by the key in this file, and the last run has an end.",
    show_default=f"that of {KEY_VARIABLE}",
)
def _verify(file: str, known: str | None, key_file: str | None) -> int:
    """Say whether no line of FILE was changed, removed, inserted or moved; else which line is the first wrong one.

    The exit status is 1 if one is wrong. Who does not have the key cannot make the chain anew; without a key, that and
    lines that were removed at the end are only found by the hash of a line that you have kept elsewhere, with --has. So
    are, in any case, whole runs that were removed at the end.
    """
    found = _examined(file)
    path, variable = (key_file, "--key") if key_file else (Config.from_environ().key_file, KEY_VARIABLE)
    key = None if path is None else read_secret(path, variable)
    whole, said = audit_report.verdict(found, known, key)
    click.echo("\n".join(f"{file}: {each}" for each in said))
    return int(not whole)


@audit.command("show", short_help="Print a record.")
@click.argument("file", type=_FILE)
def _show(file: str) -> int:
    """Print the runs of FILE: what they were made of, what they did, what was refused, how they ended.

    The exit status is 1 if a line is wrong; the lines before it are printed.
    """
    found = _examined(file)
    audit_report.show(found)
    return _complain(file, found)


@click.command("reproduce", short_help="Print the commands that make a run again.")
@click.argument("file", type=_FILE)
@click.option(
    "--world", help="The run whose token begins so, as `ringreduce audit show` prints it.", show_default="last"
)
def reproduce(file: str, world: str | None) -> int:
    """Print a shell program that makes a run of FILE again, and in comments what cannot be had.

    That is the checkout, the versions of packages, the settings and the command. The exit status is 1 if a line of the
    record is wrong.
    """
    found = _examined(file)
    click.echo("\n".join(audit_report.commands(found, world or "")))
    return _complain(file, found)


def _examined(file: str) -> Examination:
    """Read a record; other ranks than 0 end here, with status 0, as that one speaks for all."""
    if launch().rank:
        raise click.exceptions.Exit
    try:
        with open_file(file) as record:
            return examine(record.read())
    except (OSError, ConfigError) as error:
        raise ConfigError(f"{file} cannot be read: {getattr(error, 'strerror', error)}") from None


def _complain(file: str, found: Examination) -> int:
    if found.wrong is None:
        return 0
    click.echo(f"{file}: {audit_report.verdict(found, None)[1][0]}", err=True)
    return 1
