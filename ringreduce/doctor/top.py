"""``ringreduce top``: what the jobs of this user on this machine do now."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ringreduce.common.errors import ConfigError
from ringreduce.common.quantities import format_nbytes
from ringreduce.doctor.tables import table
from ringreduce.observe.job.job_view import RankRow, rows
from ringreduce.observe.out.metric_table import families_of, prometheus_text
from ringreduce.observe.out.serving import OPENMETRICS, Answer, TextServer, ask
from ringreduce.observe.seen.recorder import read_all
from ringreduce.observe.seen.snapshots import Snapshot, from_json

_HEADINGS = ("rank", "steps", "steps/s", "samples/s", "comm", "waited", "memory", "waits")


def seen(job: str | None, token_file: str | None = None) -> list[RankRow]:
    """Return what is shown of the ranks of a job, or of all of this user's jobs on this machine.

    Args:
        job: what its name begins with, or the address that serves it, with a colon; None: all jobs.
        token_file: with the token of an address; None: that of this user on this machine.

    Raises:
        ConfigError: the address does not answer, or a job of another version does.
    """
    if job is not None and ":" in job:
        return [from_json(RankRow, each) for each in ask(job, "/ranks", token_file)]
    return rows(_said(job))


def _said(job: str | None) -> list[Snapshot]:
    """Return what ranks of this machine say."""
    return [each for each in read_all() if each.job.startswith(job or "")]


def show(job: str | None, token_file: str | None, *, once: bool, every_s: float) -> None:
    """Show it in the terminal, until it is interrupted; once, if there is no terminal."""
    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(_shown(seen(job, token_file), job))
        return

    def look() -> Any:
        try:
            return _shown(seen(job, token_file), job)
        except ConfigError as error:  # as while a job begins again
            return Text(str(error))

    live = Live(look(), console=console, auto_refresh=False, screen=True)
    with live, suppress(KeyboardInterrupt):
        while True:
            time.sleep(every_s)  # nobody says when there is something new
            live.update(look(), refresh=True)


def _shown(ranks: Sequence[RankRow], job: str | None) -> Any:
    if not ranks:
        which = f"no job of this user whose name begins with {job}" if job else "no job of this user"
        return Text(f"{which} runs on this machine (or RINGREDUCE_STATUS=0 hides it)")
    parts: list[Any] = []
    for job in dict.fromkeys(each.job for each in ranks):
        mine = [each for each in ranks if each.job == job]
        first = mine[0]
        here = "" if len(mine) == first.size else f", {len(mine)} of them seen here"
        command = " ".join(first.command)
        title = f"{job}: {first.size} ranks{here}, {first.running_seconds:.0f} s, {command}"
        hosts = len({each.host for each in mine})
        headings = (_HEADINGS[0], *["host"] * (hosts > 1), *_HEADINGS[1:])
        failed = [each.error is not None for each in mine]
        cells = table(headings, (_cells(each, hosts) for each in mine), red=failed, text=1)
        parts += [Text(title, no_wrap=True, overflow="ellipsis"), cells]
        if (slow := first.slow) is not None and slow.rank < 0:
            parts.append(Text(slow.sentence))
        parts.append(Text(""))
    return Group(*parts[:-1])


def _cells(row: RankRow, hosts: int) -> Sequence[str]:
    return (
        str(row.rank),
        *[row.host] * (hosts > 1),
        str(row.steps),
        _rate(row.steps_per_second),
        _rate(row.samples_per_second),
        *("-" if each is None else f"{each:.0%}" for each in (row.communication_ratio, row.waiting_ratio)),
        format_nbytes(row.resident_memory_bytes),
        row.trouble or row.waiting or "",
    )


def _rate(value: float | None) -> str:
    return "-" if not value else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def serve(port: int, job: str | None, report: Callable[[str], object]) -> None:
    """Serve what jobs of this machine do to Prometheus, until this is interrupted.

    Args:
        port: 0 for any.
        job: which; None: all of them.
        report: gets the address.

    Raises:
        ConfigError: the port cannot be used.
    """
    server = TextServer(
        "127.0.0.1", port, {"/metrics": lambda: Answer(prometheus_text(families_of(_said(job))), OPENMETRICS)}
    )
    report(f"{server.address}/metrics")
    with suppress(KeyboardInterrupt):
        server.run()
    server.end()
