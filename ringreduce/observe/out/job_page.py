"""The page of a job: its state, its time lines, its hosts and ranks; without scripts."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta

from ringreduce.common.errors import name_ranks
from ringreduce.common.html_pages import COLOURS, html_page, html_table
from ringreduce.common.quantities import format_nbytes, format_seconds, plural
from ringreduce.observe.job.job_view import JobHealth, RankRow
from ringreduce.observe.seen.metrics import Family

Line = Sequence[tuple[float, float]]

_STATES = {
    **{"makes steps": "green", "has made no step": "pale", "is waited for": "amber", "waits": "sky"},
    **{"is silent, or has failed": "orange"},
}


def job_page(
    health: JobHealth,
    ranks: Sequence[RankRow],
    metrics: Sequence[Family],
    before: Sequence[Family],
    passed_s: float,
    lines: Mapping[str, Line],
) -> str:
    """Return the page.

    Args:
        health: of the job, from `JobView.health`.
        ranks: from `rows`.
        metrics: what ``/metrics`` shows.
        before: the same some seconds ago: of counters, the page has by how much they grow a second.
        passed_s: these seconds.
        lines: from `JobView.lines`.
    """
    command = " ".join(health.command or ())
    moments = [moment for line in lines.values() for moment, _ in line]
    span_s = max(moments) - min(moments) if moments else 0.0
    of_hosts = _cells("host", metrics, before, passed_s)
    of_ranks = _cells("rank", metrics, before, passed_s)
    for row in ranks:
        of_rank = of_ranks[str(row.rank)]
        of_ranks[str(row.rank)] = {"host": row.host, **of_rank, "waits": row.trouble or row.waiting or ""}
    body = [
        f"<p><code>{html.escape(command)}</code></p>",
        _state(health, ranks),
        f"<h2>Last {_duration(span_s)}</h2>",
        f'<div class="charts">{"".join(_chart(name, line) for name, line in lines.items())}</div>',
        f"<h2>{plural(health.ranks, 'rank')}</h2>",
        _squares(ranks),
        f"<h2>{plural(len(of_hosts), 'host')}</h2>",
        _table("host", of_hosts),
        "<h2>Rank by rank</h2>",
        _table("rank", of_ranks, words=True),
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
    finite = [(moment, value) for moment, value in line if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    values = [value for _, value in finite]
    low = min(0.0, *values)
    most = max(values)
    high = 1.0 if name.endswith("_ratio") else max(most, low + 1e-9)
    begin = finite[0][0]
    span = finite[-1][0] - begin or 1.0
    places = [((moment - begin) / span * 300, 60 - (value - low) / (high - low) * 58) for moment, value in finite]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    title = html.escape(name.removeprefix("value "))
    last = f"<b>{_figure(name, line[-1][1])}</b> <small>at most {_figure(name, most)}</small>"
    return (
        f"<figure><figcaption>{title}: {last}</figcaption>"
        f'<svg viewBox="0 0 300 62" preserveAspectRatio="none" role="img" aria-label="{title}">'
        f'<polyline points="{points}" fill="none" stroke="{COLOURS["blue"]}" stroke-width="2"'
        ' vector-effect="non-scaling-stroke"/></svg></figure>'
    )


def _figure(name: str, value: float) -> str:
    """Write a value of a metric, whose name ends in its unit."""
    if "ratio" in name:
        return f"{value:.0%}"
    if "bytes" in name:
        return format_nbytes(round(value))
    return format_seconds(value) if name.endswith("_seconds") else f"{value:.4g}"


# ---- hosts and ranks ----


def _cells(
    label: str, metrics: Sequence[Family], before: Sequence[Family], passed_s: float
) -> defaultdict[str, dict[str, str]]:
    """Return the metrics of hosts or ranks: host or rank -> metric, with its other labels -> text."""
    known = {(name, *labels.values()): value for name, _, _, samples in before for labels, value in samples}
    cells: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name, kind, _, samples in metrics:
        for labels, value in samples:
            others = [text for key, text in labels.items() if key not in ("job", label)]
            if label not in labels or name == "rank_info":
                continue
            text = _figure(name, value)
            if kind == "counter":
                growth = (value - known.get((name, *labels.values()), value)) / passed_s if passed_s > 0 else 0.0
                text = f"{growth:.0%}" if "seconds" in name else f"{_figure(name, growth)}/s"
            cells[labels[label]][" ".join([name, *others])] = text
    return cells


def _table(label: str, cells: Mapping[str, Mapping[str, str]], *, words: bool = False) -> str:
    columns = dict.fromkeys(column for texts in cells.values() for column in texts)
    rows = ((name, *(texts.get(column, "-") for column in columns)) for name, texts in cells.items())
    return html_table([label, *(column.replace("_", " ") for column in columns)], rows, words=words)


def _squares(ranks: Sequence[RankRow]) -> str:
    """Return a square for each rank, by hosts."""
    # The rank that a text of `RankRow` names as the one that is waited for now, if it is one.
    named = ((each.waiting or "").rpartition(" for rank ")[2] for each in ranks)
    awaited = {int(text) for text in named if text.isdigit()}
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


def _state_of(row: RankRow, awaited: set[int]) -> str:
    if row.trouble:
        return "is silent, or has failed"
    if row.rank in awaited or (row.slow is not None and row.slow.rank == row.rank):
        return "is waited for"
    if row.waiting:
        return "waits"
    return "makes steps" if row.steps else "has made no step"
