"""Commands that report on a machine, on running jobs, and on traces; and that of a model out of commits."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import ringreduce
from ringreduce.audit.run_record import AuditRecord
from ringreduce.cli.run import Parsed
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError, ForeignFileError
from ringreduce.common.files import replace_file, require_own, write_file
from ringreduce.common.launch import launch
from ringreduce.common.quantities import format_nbytes, parse_share
from ringreduce.common.sealed_files import PLAIN, KeyFile, disk_keys
from ringreduce.doctor import doctor as machine
from ringreduce.doctor import dumps, trace_report
from ringreduce.doctor import top as jobs
from ringreduce.elastic.commit_store import CommitStore
from ringreduce.observe.job import job_report

_SHARE = Parsed("share", parse_share)


@click.command("doctor", short_help="Say what this machine offers, and what is wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the findings, and what they were made of.")
@click.option(
    "--dump",
    "folder",
    type=click.Path(exists=True, file_okay=False),
    help="Say what ranks waited for, from what they have written to RINGREDUCE_DUMP=...",
)
def doctor(as_json: bool, folder: str | None) -> int:
    """Say what this machine offers to the ranks of this job, what is wrong, and what to do about it.

    Run it alone, and as the job will run: mpirun -np N python -m ringreduce doctor. Where ranks differ, the report
    names them. The exit status is 1 if there is a problem; warnings are about speed.

    With --dump, run it alone, after a job that ran with RINGREDUCE_DUMP=FOLDER has failed, or after `kill -USR1` to its
    ranks.
    """
    if folder is not None:
        said = dumps.diagnose(dumps.load(folder, _keys()))
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
@click.option(
    "--job",
    metavar="NAME|[HOST]:PORT",
    help="Show the job whose name begins so; or all ranks, of all hosts, of the one that has this --status.",
)
@click.option(
    "--status-token-file",
    "token_file",
    type=click.Path(dir_okay=False),
    help="The token of that job, unless it is yours on this machine.",
)
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
def top(job: str | None, token_file: str | None, once: bool, as_json: bool, every_s: float, port: int | None) -> None:
    """Show the ranks of your jobs on this machine: how fast they are, and whom they wait for.

    With --job :9400 or --job HOST:9400 it shows all ranks of the job that was started with --status 9400.

    Rates are those of the last ten seconds. Steps are those of torch's optimizers, samples those of hvd's
    DistributedSampler; other programs tell of theirs by ringreduce.count(). The job writes a small file once a second
    for this; RINGREDUCE_STATUS=0 turns that off.
    """
    if port is not None:
        if job is not None and ":" in job:
            raise click.UsageError(f"{job} serves /metrics itself; leave out --prometheus")
        jobs.serve(port, job, lambda address: click.echo(address, err=True))
    elif as_json:
        click.echo(json.dumps([asdict(each) for each in jobs.seen(job, token_file)], indent=1))
    else:
        jobs.show(job, token_file, once=once, every_s=every_s)


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

    Medians over the steps, in milliseconds. "comm" is the time in which only communication went on; "waiting" is that
    in which other ranks had not come to it yet; "hidden" is communication that ran during forward, backward or
    optimizer. "rest" is all else: loading data, Python. A rank was "last" in a step if it was the last to come to a
    reduction or another collective; "late" is by how much it came after the last but one then, on average over all
    steps. Without steps, as of programs without torch, the collectives are listed.
    """
    found = trace_report.report(trace_report.load(trace, _keys()), skip)
    if page is not None:
        write_file(page, trace_report.to_html(found, trace).encode())
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        trace_report.show(found)


@click.command("compare", short_help="Say what differs between two jobs.")
@click.argument("before", type=click.Path(exists=True, dir_okay=False))
@click.argument("after", type=click.Path(exists=True, dir_okay=False))
@click.option("--tolerance", type=_SHARE, default="5%", help="Steps may take so much longer: 5% or 0.05.")
def compare(before: str, after: str, tolerance: float) -> int:
    """Say how the steps of the job with the report AFTER differ from those of BEFORE, beyond noise.

    `ringreduce run --report FILE` writes a report. The exit status is 1 if steps have become slower than the tolerance
    allows: for continuous integration. Noise is what the median of a step's time varies within a job by chance; what
    else differs between two jobs on one machine, only a second run of each shows.
    """
    lines, is_slower = job_report.compare(job_report.load(before), job_report.load(after), tolerance)
    click.echo("\n".join(lines))
    return int(is_slower)


@click.command("export", short_help="Write a committed model to a file of its own.")
@click.argument("folder", type=click.Path(file_okay=False))
@click.argument("out", type=click.Path(dir_okay=False))
@click.option("--name", default="model", help="What the state of the training calls it.")
@click.option("--commit", "number", type=click.IntRange(0), show_default="the last whole one", help="Which commit.")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@click.option("--plain", is_flag=True, help="Do not seal OUT, though RINGREDUCE_DISK_KEY_FILE is set.")
def export(folder: str, out: str, name: str, number: int | None, force: bool, plain: bool) -> int:
    """Write the model of a commit in FOLDER (see keep_on_disk) to OUT, as a plain state dict.

    torch.load(OUT, weights_only=True) reads it, without ringreduce. Commits that are truncated or were changed are
    named and not used, nor is a folder that other users may write to. OUT is there whole or not at all, readable by its
    owner alone. With RINGREDUCE_DISK_KEY_FILE sealed commits are opened, and OUT is sealed; `ringreduce unseal` opens
    it.
    """
    if launch().rank:
        return 0  # rank 0 does it
    config = Config.from_environ()
    target = Path(out)
    if target.exists() and not force:
        raise ConfigError(f"{out} is there already; --force overwrites it")
    torch = _torch()
    if not os.path.lexists(folder):
        raise ConfigError(_no_commit(folder))
    try:
        require_own(Path(folder))
    except OSError as error:
        raise ForeignFileError(f"the commits in {folder} are not used: {error}") from None
    keys = disk_keys(config.disk_key_file)
    store = CommitStore(
        folder,
        1,
        write=torch.save,
        read=lambda file: torch.load(file, map_location="cpu", weights_only=True),
        keys=keys,
    )
    store.require_our_keys()
    number = _chosen(store, number)
    state = _state(store, number, name)
    try:
        seal = PLAIN if plain else keys
        replace_file(target, lambda file: seal.write(file, "a model", lambda inner: torch.save(state, inner)))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    if config.audit is not None:
        facts = {"file": os.path.abspath(out), "sha256": ringreduce.fingerprint(target), "name": name, "commit": number}
        AuditRecord.add_alone(config, "exported", {**facts, "folder": os.path.abspath(folder)})
    click.echo(f"{out}: {name} of commit {number}, {format_nbytes(target.stat().st_size)}")
    return 0


def _keys() -> KeyFile:
    return disk_keys(Config.from_environ().disk_key_file)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise ConfigError("ringreduce export needs PyTorch, which is not installed: pip install torch") from None
    return torch


def _no_commit(folder: str | Path) -> str:
    return f"there are no commits in {folder} yet: after state.keep_on_disk(FOLDER), the first commit() writes one"


def _chosen(store: CommitStore, number: int | None) -> int:
    """Return which commit to take, and say which ones are none."""
    found = store.examine()
    whole = [each for each, why in found.items() if not why]
    if number in whole:
        return number
    for each, why in found.items():
        if why:
            click.echo(f"commit {each} cannot be used: {why}", err=True)
    there = f"whole are {', '.join(map(str, whole))}" if whole else "none is whole"
    if not found:
        raise ConfigError(_no_commit(store.folder))
    if number is not None:
        raise ConfigError(f"there is no commit {number} in {store.folder} that can be used; {there}")
    if not whole:
        raise ConfigError(f"of the commits in {store.folder}, {there}")
    # On a host that was away, a commit of an earlier run may have a higher number.
    return max(whole, key=lambda each: (store.description(each).get("run", ""), each))


def _state(store: CommitStore, number: int, name: str) -> Any:
    try:
        objects = store.load(number)["objects"]
    except Exception as error:  # whatever torch says of a file that is not its own
        why = str(error).partition("\n")[0]
        raise ConfigError(f"commit {number} in {store.folder} is not that of a TorchState: {why}") from None
    if name not in objects:
        there = ", ".join(sorted(objects)) or "nothing that has a state dict"
        raise ConfigError(f"commit {number} holds no {name!r}; it holds {there}")
    return objects[name]
