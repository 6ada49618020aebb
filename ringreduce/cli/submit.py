"""``ringreduce submit``: a file of a job for a scheduler, printed or handed over."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import click

from ringreduce.cli.run import Parsed
from ringreduce.cli.run import command as run
from ringreduce.cli.wrong_options import require_program
from ringreduce.launcher.job_files import TEMPLATES, fill, submit

#: Of elastic jobs of Slurm: it signals up to a minute early, and a job that stops before it trains is queued for ever.
_SHORTEST_S = 600


def _seconds(text: str) -> int:
    """Return the seconds of HH:MM:SS."""
    found = re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", text)
    if found is None or not int(text.replace(":", "")):
        raise ValueError("give hours, minutes and seconds, as in 01:30:00")
    hours, minutes, seconds = map(int, found.groups())
    return 3600 * hours + 60 * minutes + seconds


def _matching(kind: str, pattern: str, complaint: str) -> Parsed:
    """Return the type of texts of a form."""

    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(complaint)
        return text

    return Parsed(kind, read)


#: A name that Slurm and Kubernetes take.
_NAME = _matching("name", "[a-z]([-a-z0-9]{0,38}[a-z0-9])?", "give at most 40 lower-case letters, digits and hyphens")
_TIME = Parsed("HH:MM:SS", _seconds)
_IMAGE = _matching("image", r"[\w./:@-]+", "that is no name of an image")


@click.group("submit", short_help="Print a job's file for Slurm or Kubernetes, or submit it.")
def command() -> None:
    """Print the file of a job that runs `ringreduce run`, or submit it."""


def _options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options that all schedulers have."""
    for add in reversed(
        (
            click.option("--yes", is_flag=True, help="Submit it; else it is printed."),
            click.option("--name", type=_NAME, default="train", help="Of the job."),
            click.option("--nodes", type=click.IntRange(1), default=2, help="How many hosts."),
            click.option("--ranks-per-node", "ranks", type=click.IntRange(1), default=4, help="On each host."),
            click.option("--cores-per-rank", "cores", type=click.IntRange(1), default=1, help="Of each rank."),
            click.option(
                "--time", "time_s", type=_TIME, default="01:00:00", help="After so long the scheduler ends it."
            ),
            click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED),
        )
    ):
        function = add(function)
    return function


#: What follows the options of submit goes to `ringreduce run` as it is.
_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@command.command("slurm", context_settings=_SETTINGS)
@_options
def _slurm(program: tuple[str, ...], yes: bool, **numbers: int | str) -> int:
    """Print a job for sbatch that runs `ringreduce run PROGRAM`.

    In front of PROGRAM come first these options, then those of `ringreduce run`. The job of --elastic keeps its hosts
    when one is lost, and is asked to stop two minutes before its end; with --requeue, Slurm then runs it again.
    """
    return _act("slurm", program, yes, numbers)


@command.command("k8s", context_settings=_SETTINGS)
@_options
@click.option("--image", required=True, type=_IMAGE, help="Of the containers, with PROGRAM in it.")
def _k8s(program: tuple[str, ...], yes: bool, **numbers: int | str) -> int:
    """Print an MPIJob for kubectl that runs `ringreduce run PROGRAM` in the workers.

    In front of PROGRAM come first these options, then those of `ringreduce run`.
    """
    return _act("k8s", program, yes, numbers)


def _act(scheduler: str, program: tuple[str, ...], yes: bool, numbers: Mapping[str, Any]) -> int:
    """Print or submit a job, once `ringreduce run` would take the options that it gets."""
    parsed = run.make_context("run", list(program)).params
    commands = click.get_current_context().command, run
    require_program(parsed["program"], commands, otherwise="those of submit come before those of run")
    if parsed["hosts"] or parsed["hostfile"]:
        raise click.UsageError("the scheduler names the hosts; leave out -H and --hostfile")
    if scheduler == "slurm" and parsed["elastic"] and numbers["time_s"] < _SHORTEST_S:
        raise click.UsageError(
            "an elastic job is asked to stop two minutes before its end; give it --time 00:10:00 or more"
        )
    text = fill(TEMPLATES[scheduler][bool(parsed["elastic"])], ("ringreduce", "run", *program), numbers)
    if yes:
        return submit(scheduler, text)
    click.echo(text, nl=False)
    return 0
