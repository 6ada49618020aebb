"""Commands that report on a machine, on running jobs, and on traces."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ringreduce.common.errors import ConfigError
from ringreduce.doctor import doctor as machine
from ringreduce.doctor import dumps, torch_traces, trace_report
from ringreduce.doctor import top as jobs

__all__ = ["doctor", "timeline", "top"]


@click.command("doctor", short_help="Say what this machine offers, and what is wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the findings, and what they were made of.")
@click.option(
    "--dump",
    "folder",
    type=click.Path(exists=True, file_okay=False),
    help="Say what ranks waited for, from what they have written to RINGREDUCE_DUMP=...",
)
@click.option(
    "--torch-traces",
    "traces",
    type=click.Path(file_okay=False),
    help="With --dump: write it into this folder, too, as files that torch's flight recorder tools read.",
)
def doctor(as_json: bool, folder: str | None, traces: str | None) -> int:
    """Say what this machine offers to the ranks of this job, what is wrong, and what to do about it.

    Run it alone, and as the job will run: mpirun -np N python -m ringreduce doctor. Where ranks differ, the report
    names them. The exit status is 1 if there is a problem; warnings are about speed.

    With --dump, run it alone, after a job that ran with RINGREDUCE_DUMP=FOLDER has failed, or after `kill -USR1` to its
    ranks. With --torch-traces OUT, torch's tool reads the same: python -m
    torch.distributed.flight_recorder.fr_trace OUT -p ringreduce_rank_
    """
    if traces is not None and folder is None:
        raise click.UsageError("--torch-traces writes what --dump FOLDER has found; give both")
    if folder is not None:
        found_there = dumps.load(folder)
        if traces is not None:
            torch_traces.write(found_there, traces)
        said = dumps.diagnose(found_there)
        click.echo(json.dumps(said) if as_json else "\n".join(said))
        return 0
    seen = machine.look()
    if seen is None:
        return 0  # rank 0 speaks for all, and must have printed its report before a launcher notices a failure
    found, ranks = seen
    # A launcher lends its ranks a terminal, wherever its own output goes: colours would be letters in a file.
    colours = False if ranks[0].launcher[0] else None  # None: on terminals
    text = machine.to_text(found, lambda text, colour: click.style(text, fg=colour))
    click.echo(machine.to_json(found, ranks) if as_json else text, nl=False, color=colours)
    return int(any(each.level == "problem" for row in found.values() for each in row))


@click.command("top", short_help="Show what running jobs do.")
@click.option("--job", help="Show the job whose name begins so.", metavar="NAME")
@click.option("--once", is_flag=True, help="Print it once and end.")
@click.option("--json", "as_json", is_flag=True, help="Print it once as JSON, a list of ranks.")
@click.option(
    "--every", "every_s", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between two looks."
)
@click.option(
    "--prometheus",
    "port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve it at http://127.0.0.1:PORT/metrics, for Prometheus, until this is interrupted.",
)
def top(job: str | None, once: bool, as_json: bool, every_s: float, port: int | None) -> None:
    """Show the ranks of your jobs on this machine: how fast they are, and whom they wait for.

    Rates are those of the last ten seconds. Steps are those of torch's optimizers, samples those of hvd's
    DistributedSampler; other programs tell of theirs by ringreduce.count(). The job writes a small file once a second
    for this; RINGREDUCE_STATUS=0 turns that off.
    """
    if port is not None:
        jobs.serve(port, lambda: jobs.prometheus_text(jobs.found(job)), lambda address: click.echo(address, err=True))
    elif as_json:
        click.echo(json.dumps(jobs.found(job), indent=1))
    else:
        jobs.show(job, once=once, every_s=every_s)


@click.group("timeline", short_help="Look at a trace.")
def timeline() -> None:
    """Look at a trace that RINGREDUCE_TIMELINE or start_timeline has written."""


@timeline.command("report", short_help="Say where the time of steps went.")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False))
@click.option("--html", "page", type=click.Path(dir_okay=False), metavar="FILE", help="Write a page to look at.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option("--skip", type=click.IntRange(0), default=1, show_default=True, help="Leave out the first steps.")
def _report(trace: str, page: str | None, as_json: bool, skip: int) -> None:
    """Say where the time of the training steps in TRACE went, on each rank.

    Medians over the steps, in milliseconds. "comm" is the time in which only communication went on; "hidden" is
    communication that ran during forward, backward or optimizer. "rest" is all else: loading data, Python. A rank was
    "last" in a step if it was the last to end its backward pass; "late" is by how much it came after the first one, on
    average over all steps. Without steps, as of programs without torch, the collectives are listed.
    """
    found = trace_report.report(trace_report.load(trace), skip)
    if page is not None:
        try:
            Path(page).write_text(trace_report.to_html(found, trace), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{page} cannot be written: {error.strerror}") from None
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        trace_report.show(found)
