"""The page of a job: its state, its time lines, its hosts and ranks; without scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta

from ringreduce.common.errors import name_ranks
from ringreduce.common.html_pages import COLOURS, html_page, html_table
from ringreduce.common.quantities import format_nbytes, format_seconds, plural
from ringreduce.observe.job.host_uses import HostUsage
from ringreduce.observe.job.job_view import JobHealth, RankRow

Line = Sequence[tuple[float, float]]

#: The time lines that come first, in this order; all but the first are shares.
_LINES = {
    "step_seconds": "time of a step",
    "communication_ratio": "share of communication",
    "waiting_ratio": "share of waiting for the last rank",
    "network_ratio": "busiest network interface",
    "disk_ratio": "busiest disk",
}
_STATES = {
    **{"makes steps": "green", "has made no step": "pale", "is waited for": "amber", "waits": "sky"},
    **{"is silent, or has failed": "orange"},
}


def job_page(
    health: JobHealth, ranks: Sequence[RankRow], hosts: Mapping[str, HostUsage], lines: Mapping[str, Line]
) -> str:
    """Return the page.

    Args:
        health: of the job, from `JobView.health`.
        ranks: from `rows`.
        hosts: from `usage`.
        lines: from `JobView.lines`.
    """
    command = " ".join(health.command or ())
    names = [*(name for name in _LINES if name in lines), *(name for name in lines if name not in _LINES)]
    moments = [moment for line in lines.values() for moment, _ in line]
    span_s = max(moments) - min(moments) if moments else 0.0
    body = [
        f"<p><code>{html.escape(command)}</code></p>",
        _state(health, ranks),
        f"<h2>Last {_duration(span_s)}</h2>",
        f'<div class="charts">{"".join(_chart(name, lines[name]) for name in names)}</div>',
        f"<h2>{plural(health.ranks, 'rank')}</h2>",
        _squares(ranks),
        f"<h2>{plural(len(hosts), 'host')}</h2>",
        html_table(_HOST_HEADINGS, (_host_cells(name, host) for name, host in hosts.items())),
        "<h2>Rank by rank</h2>",
        _table(ranks),
    ]
    return html_page(f"Job {health.job or 'that begins'}", "\n".join(body))


def _state(health: JobHealth, ranks: Sequence[RankRow]) -> str:
    """Return what matters most, in some words each."""
    steps_per_second = max((each.steps_per_second or 0.0 for each in ranks), default=0.0)
    samples_per_second = sum(each.samples_per_second or 0.0 for each in ranks)
    facts = {
        "runs for": _duration(max((each.running_seconds for each in ranks), default=0.0)),
        "steps": str(health.steps),
        "steps a second": f"{steps_per_second:.3g}" if steps_per_second else "",
        "samples a second": f"{samples_per_second:,.0f}" if samples_per_second else "",
        "since the last step": "" if health.last_step_age_s is None else _duration(health.last_step_age_s),
        "restarts": str(health.restarts or ""),
        "recoveries": str(health.recoveries or ""),
        "missing": name_ranks(health.missing) if health.missing else "",
    }
    cells = "".join(f"<div><b>{html.escape(value)}</b><br>{key}</div>" for key, value in facts.items() if value)
    slow = ranks[0].slow if ranks else None
    late = "" if slow is None else f"<p>{html.escape(slow.sentence)}</p>"
    errors = "".join(f"<p><b>rank {rank}: {html.escape(text)}</b></p>" for rank, text in health.errors.items())
    return f'<div class="state">{cells}</div>{late}{errors}'


def _duration(seconds: float) -> str:
    """Write a time as clocks do, ``1:02:03``, and less than a minute in seconds."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return str(timedelta(seconds=round(seconds)))


# ---- time lines ----


def _chart(name: str, line: Line) -> str:
    """Return a time line, from the oldest value to the last, between 0 and the largest; of shares, to 1."""
    title = _LINES.get(name, name.removeprefix("value "))
    finite = [(moment, value) for moment, value in line if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    values = [value for _, value in finite]
    low = min(0.0, *values)
    most = max(values)
    high = 1.0 if name in _LINES and name != "step_seconds" else max(most, low + 1e-9)
    begin = finite[0][0]
    span = finite[-1][0] - begin or 1.0
    places = [((moment - begin) / span * 300, 60 - (value - low) / (high - low) * 58) for moment, value in finite]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    title = html.escape(title)
    said = f"<b>{_figure(name, line[-1][1])}</b> <small>at most {_figure(name, most)}</small>"
    return (
        f"<figure><figcaption>{title}: {said}</figcaption>"
        f'<svg viewBox="0 0 300 62" preserveAspectRatio="none" role="img" aria-label="{title}">'
        f'<polyline points="{points}" fill="none" stroke="{COLOURS["blue"]}" stroke-width="2"'
        ' vector-effect="non-scaling-stroke"/></svg></figure>'
    )


def _figure(name: str, value: float) -> str:
    if name == "step_seconds":
        return format_seconds(value)
    return f"{value:.0%}" if name in _LINES else f"{value:.4g}"


# ---- hosts ----

_HOST_HEADINGS = ("host", "ranks", "processor", "steal", "memory", "network in, out", "resent", "disk read, written")


def _host_cells(name: str, host: HostUsage) -> Sequence[str]:
    limit = host.memory_limit_nbytes
    used = host.memory_nbytes
    network = [
        f"{each}: {_nbytes(rates.rx_nbytes, rates.tx_nbytes)} ({_share(rates.share)})"
        for each, rates in host.interfaces.items()
    ]
    disks = [
        f"{each}: {_nbytes(rates.read_nbytes, rates.written_nbytes)}, busy {_share(rates.busy_s)}"
        for each, rates in host.disks.items()
    ]
    return (
        name,
        name_ranks(host.ranks).partition(" ")[2],
        _share(host.processor),
        _share(host.steal),
        "-" if used is None or limit is None else f"{format_nbytes(used)} of {format_nbytes(limit)}",
        "; ".join(network) or "-",
        "-" if host.retransmitted is None else f"{host.retransmitted:.2%}",
        "; ".join(disks) or "-",
    )


def _nbytes(*rates: float) -> str:
    return ", ".join(format_nbytes(round(each)) for each in rates) + "/s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


# ---- ranks ----


def _squares(ranks: Sequence[RankRow]) -> str:
    """Return a square for each rank, by hosts."""
    awaited = {int(text) for each in ranks for text in _named(each.waiting)}
    lines = []
    for host in dict.fromkeys(each.host for each in ranks):
        squares = []
        for each in (each for each in ranks if each.host == host):
            state = _state_of(each, awaited)
            told = html.escape(f"rank {each.rank} {state}" + (f": {each.waiting}" if each.waiting else ""))
            squares.append(f'<i style="background:{COLOURS[_STATES[state]]}" title="{told}"></i>')
        lines.append(f"<div>{html.escape(host)}<br>{''.join(squares)}</div>")
    key = "".join(
        f'<span><i style="background:{COLOURS[colour]}"></i>{state}</span>' for state, colour in _STATES.items()
    )
    return f'<div class="squares">{"".join(lines)}</div><p class="key">{key}</p>'


def _named(waiting: str | None) -> list[str]:
    """Return the rank that a text of `RankRow` names as the one that is waited for now, if it is one."""
    whom = (waiting or "").rpartition(" for rank ")[2]
    return [whom] if waiting and whom.isdigit() else []


def _state_of(row: RankRow, awaited: set[int]) -> str:
    if row.trouble:
        return "is silent, or has failed"
    if row.rank in awaited or (row.slow is not None and row.slow.rank == row.rank):
        return "is waited for"
    if row.waiting:
        return "waits"
    return "makes steps" if row.steps else "has made no step"


def _table(ranks: Sequence[RankRow]) -> str:
    headings = ("rank", "host", "steps", "steps/s", "samples/s", "communication", "waited", "memory", "waits")
    cells = (
        (
            str(each.rank),
            each.host,
            str(each.steps),
            _rate(each.steps_per_second),
            _rate(each.samples_per_second),
            _share(each.communication_ratio),
            _share(each.waiting_ratio),
            format_nbytes(each.resident_memory_bytes),
            each.trouble or each.waiting or "",
        )
        for each in ranks
    )
    return html_table(headings, cells, words=True)


def _rate(value: float | None) -> str:
    return f"{value:.3g}" if value else "-"
