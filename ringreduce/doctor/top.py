"""``ringreduce top``: what the jobs of this user on this machine do now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ringreduce.common.errors import ConfigError, name_ranks
from ringreduce.common.quantities import format_nbytes
from ringreduce.doctor.dumps import waits
from ringreduce.doctor.tables import table
from ringreduce.observe.metrics import openmetrics
from ringreduce.observe.snapshots import Snapshot, read_all

__all__ = ["found", "prometheus_text", "rows", "serve", "show"]

_WAITING_S = 1.0  # in one call; less is usual
_HEADINGS = ("rank", "steps", "steps/s", "samples/s", "comm", "memory", "waits")
_OLD_S = 5.0  # a rank that has written nothing for so long is busy without letting go of Python, or stopped


def found(job: str | None) -> list[dict[str, Any]]:
    """Return what is shown of the ranks of this user's jobs on this machine; None: of all of them."""
    return rows([each for each in read_all() if each["job"].startswith(job or "")])


def show(job: str | None, *, once: bool, every_s: float) -> None:
    """Show it in the terminal, until it is interrupted; once, if there is no terminal."""
    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(_shown(found(job), job))
        return
    live = Live(_shown(found(job), job), console=console, auto_refresh=False, screen=True)
    with live, suppress(KeyboardInterrupt):
        while True:
            time.sleep(every_s)  # nobody says when there is something new
            live.update(_shown(found(job), job), refresh=True)


def rows(statuses: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """Return what is shown of each rank, given what they say (`ringreduce.observe.snapshots`).

    Returns:
        job, rank, size, host, pid, command, seconds (since it began), age_s (since it said so), steps, samples,
        steps_per_s, samples_per_s, communication (share of time, 0 to 1), nbytes, waiting (text, or None), error.
        Rates are None where nothing earlier is known.
    """
    return [
        row
        for job in dict.fromkeys(each["job"] for each in statuses)
        for row in _rows_of({each["rank"]: each for each in statuses if each["job"] == job})
    ]


def _rows_of(ranks: Mapping[int, Snapshot]) -> Iterator[dict[str, Any]]:
    """Yield what is shown of the ranks of a job."""
    waiting = _waiting(ranks)
    for rank, each in ranks.items():
        then = each["samples"][0]
        now = each["samples"][-1]
        passed = now[0] - then[0]
        rates = [(new - old) / passed if passed > 0 else None for new, old in zip(now[1:], then[1:], strict=True)]
        text = waiting.get(rank)
        if text is None and each.get("slow") is not None and each["slow"][0] == rank:
            text = each["slow"][1]
        elif text is None and each["late"] is not None and each["late"][0] != rank:
            text = f"last for rank {each['late'][0]}, {each['late'][1] * 1e3:.0f} ms"
        yield {
            **{key: each[key] for key in ("job", "rank", "size", "host", "pid", "command", "nbytes", "error")},
            "seconds": each["time"] - each["began"],
            "age_s": max(time.time() - each["time"], 0.0),
            "steps": now[1],
            "samples": now[2],
            "steps_per_s": rates[0],
            "samples_per_s": rates[1],
            "communication": None if rates[2] is None else min(rates[2], 1.0),
            "waiting": text,
        }


def _waiting(ranks: Mapping[int, Snapshot]) -> dict[int, str]:
    """Return whom the ranks of a job wait for, in words, by rank."""
    found = {}
    for wait in waits(ranks):
        absent = wait.absent or wait.unseen
        whom = name_ranks(absent) if absent else "all, who have come"
        for rank, entry in wait.present.items():
            what, since = (entry["collective"], "started") if wait.is_call else (repr(entry["name"]), "submitted")
            seconds = ranks[rank]["time"] - entry[since]
            if seconds >= _WAITING_S:
                found[rank] = f"{seconds:.0f} s in {what} for {whom}"
    return found


def _shown(ranks: Sequence[dict[str, Any]], job: str | None) -> Any:
    if not ranks:
        which = f"no job of this user whose name begins with {job}" if job else "no job of this user"
        return Text(f"{which} runs on this machine (or RINGREDUCE_STATUS=0 hides it)")
    parts: list[Any] = []
    for job in dict.fromkeys(each["job"] for each in ranks):
        mine = [each for each in ranks if each["job"] == job]
        first = mine[0]
        here = "" if len(mine) == first["size"] else f", {len(mine)} of them seen here"
        command = " ".join(first["command"])
        title = f"{job}: {first['size']} ranks{here}, {first['seconds']:.0f} s, {command}"
        failed = [each["error"] is not None for each in mine]
        cells = table(_HEADINGS, map(_cells, mine), red=failed, text=1)
        parts += [Text(title, no_wrap=True, overflow="ellipsis"), cells, Text("")]
    return Group(*parts[:-1])


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    share = row["communication"]
    stale = f"silent for {row['age_s']:.0f} s" if row["age_s"] > _OLD_S else None
    return (
        str(row["rank"]),
        str(row["steps"]),
        _rate(row["steps_per_s"]),
        _rate(row["samples_per_s"]),
        "-" if share is None else f"{share:.0%}",
        format_nbytes(row["nbytes"]),
        row["error"] or stale or row["waiting"] or "",
    )


def _rate(value: float | None) -> str:
    return "-" if not value else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


_METRICS = {
    "steps": ("steps", "counter", "Training steps."),
    "samples": ("samples", "counter", "Samples that were read."),
    "communication": ("communication_ratio", "gauge", "Share of time spent in communication."),
    "nbytes": ("resident_memory_bytes", "gauge", "Resident memory."),
    "age_s": ("silence_seconds", "gauge", "Since the rank has told of itself."),
}


def prometheus_text(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return what `rows` has found for Prometheus."""
    return openmetrics(
        (
            *about,
            [({"job": each["job"], "rank": each["rank"]}, each[key]) for each in ranks if each[key] is not None],
        )
        for key, about in _METRICS.items()
    )


def serve(port: int, text: Callable[[], str], report: Callable[[str], object]) -> None:
    """Serve a text to Prometheus on this machine, until it is interrupted.

    Args:
        port: 0 for any.
        text: is asked for at each request.
        report: gets the address.

    Raises:
        ConfigError: the port cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that the base calls
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/openmetrics-text; version=1.0.0; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing of each request."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be served: {error.strerror}; name another one, or 0 for any") from None
    with server:
        report(f"http://127.0.0.1:{server.server_port}/metrics")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
