"""``ringreduce top``: what the jobs of this user on this machine do now."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ringreduce.bench.cases import format_nbytes
from ringreduce.common.errors import ConfigError, name_ranks
from ringreduce.observe.status import read_all

__all__ = ["found", "prometheus_text", "rows", "serve", "show"]

Status = dict[str, Any]

_WAITING_S = 1.0  # in one call; less is usual
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
    with (
        Live(_shown(found(job), job), console=console, auto_refresh=False, screen=True) as live,
        suppress(KeyboardInterrupt),
    ):
        while True:
            time.sleep(every_s)  # nobody says when there is something new
            live.update(_shown(found(job), job), refresh=True)


def rows(statuses: Sequence[Status]) -> list[dict[str, Any]]:
    """Return what is shown of each rank, given what they say (`ringreduce.status`).

    Returns:
        job, rank, size, host, pid, command, seconds (since it began), age_s (since it said so), steps, samples,
        steps_per_s, samples_per_s, communication (share of time, 0 to 1), nbytes, waiting (text, or None), error.
        Rates are None where there is nothing to tell them from.
    """
    waiting = {(each["job"], each["rank"]): "" for each in statuses}
    for job in {each["job"] for each in statuses}:
        waiting |= _waiting([each for each in statuses if each["job"] == job])
    found = []
    for each in statuses:
        then, now = each["samples"][0], each["samples"][-1]
        passed = now[0] - then[0]
        rates = [(new - old) / passed if passed > 0 else None for new, old in zip(now[1:], then[1:], strict=True)]
        text = waiting[each["job"], each["rank"]]
        if not text and each["late"] is not None:
            rank, seconds = each["late"]
            text = f"last for rank {rank}, {seconds * 1e3:.0f} ms" if rank != each["rank"] else ""
        same = {key: each[key] for key in ("job", "rank", "size", "host", "pid", "command", "nbytes", "error")}
        found.append(
            {
                **same,
                "seconds": each["now"] - each["began"],
                "age_s": max(time.time() - each["now"], 0.0),
                "steps": now[1],
                "samples": now[2],
                "steps_per_s": rates[0],
                "samples_per_s": rates[1],
                "communication": None if rates[2] is None else min(rates[2], 1.0),
                "waiting": text or None,
            }
        )
    return found


def _waiting(ranks: Sequence[Status]) -> dict[tuple[str, int], str]:
    """Return whom the ranks of a job wait for, in words, by job and rank."""
    found = {}
    for each in ranks:
        for name, members, operation, since in each["operations"]:
            if each["now"] - since >= _WAITING_S:
                same = [name, members, operation]
                come = {other["rank"] for other in ranks if any(entry[:3] == same for entry in other["operations"])}
                absent = [rank for rank in members if rank not in come]
                found[each["job"], each["rank"]] = _said(each["now"] - since, repr(operation), absent)
    names = {name for each in ranks for name, *_ in each["sets"]}
    for name in names:
        last = {each["rank"]: entry for each in ranks for entry in each["sets"] if entry[0] == name}
        inside = [entry[2] for entry in last.values() if entry[4] is not None]
        for each in ranks:
            _, members, number, what, since = last.get(each["rank"], (name, [], 0, "", None))
            if since is None or each["now"] - since < _WAITING_S or number < max(inside):
                continue
            absent = [rank for rank in members if rank in last and last[rank][2] < number]
            unseen = [rank for rank in members if rank not in last]
            found[each["job"], each["rank"]] = _said(each["now"] - since, what, absent or unseen)
    return found


def _said(seconds: float, what: str, absent: list[int]) -> str:
    return f"{seconds:.0f} s in {what} for {name_ranks(absent) if absent else 'all, who have come'}"


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
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("rank", justify="right")
        for heading in ("steps", "steps/s", "samples/s", "comm", "memory"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("waits")
        for each in mine:
            share = each["communication"]
            stale = f"silent for {each['age_s']:.0f} s" if each["age_s"] > _OLD_S else None
            table.add_row(
                str(each["rank"]),
                str(each["steps"]),
                _rate(each["steps_per_s"]),
                _rate(each["samples_per_s"]),
                "-" if share is None else f"{share:.0%}",
                format_nbytes(each["nbytes"]),
                Text(each["error"] or stale or each["waiting"] or ""),
                style="red" if each["error"] else None,
            )
        parts += [Text(title, no_wrap=True, overflow="ellipsis"), table, Text("")]
    return Group(*parts[:-1])


def _rate(value: float | None) -> str:
    return "-" if not value else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


_METRICS = {
    "steps": ("ringreduce_steps_total", "counter", "Training steps."),
    "samples": ("ringreduce_samples_total", "counter", "Samples that were read."),
    "communication": ("ringreduce_communication_ratio", "gauge", "Share of time spent in communication."),
    "nbytes": ("ringreduce_resident_memory_bytes", "gauge", "Resident memory."),
    "age_s": ("ringreduce_silence_seconds", "gauge", "Since the rank has told of itself."),
}


def prometheus_text(ranks: Sequence[dict[str, Any]]) -> str:
    """Return what `rows` has found in the text format of Prometheus, version 0.0.4."""
    lines = []
    for key, (name, kind, meaning) in _METRICS.items():
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        lines += [
            f'{name}{{job="{each["job"]}",rank="{each["rank"]}"}} {each[key]:g}'
            for each in ranks
            if each[key] is not None
        ]
    return "\n".join(lines) + "\n"


def serve(port: int, text: Callable[[], str], tell: Callable[[str], object]) -> None:
    """Serve a text to Prometheus on this machine, until it is interrupted.

    Args:
        port: 0 for any.
        text: is asked for at each request.
        tell: gets the address.

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
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
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
        tell(f"http://127.0.0.1:{server.server_port}/metrics")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
