"""``ringreduce timeline report``: where the time of training steps went, on each rank, and who came last."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ringreduce.common.errors import ConfigError, ForeignFileError
from ringreduce.common.html_pages import COLOURS, html_page, html_table
from ringreduce.common.instruments import Pace, charge
from ringreduce.common.quantities import format_nbytes
from ringreduce.common.sealed_files import PLAIN, KeyFile
from ringreduce.doctor.tables import table
from ringreduce.doctor.trace_steps import Event, TracedStep, steps_of
from ringreduce.observe.seen.pace import find_slow
from ringreduce.observe.seen.trace_file import collect, read_trace

_WIDE = 1000  # columns, which no table takes
_LEGIBLE = 9.0  # percent of the window, of the shortest bar that has its number in it: on a phone, too

#: What a step's time is divided into, and the colours of these parts.
PARTS = {
    "forward": COLOURS["sky"],
    "backward": COLOURS["yellow"],
    "optimizer": COLOURS["purple"],
    "communication": COLOURS["orange"],
    "waiting": COLOURS["blue"],
    "rest": COLOURS["pale"],
}


#: Of the table: the headings, and how the cells are written.
_STEPS = {
    **{"rank": "{rank}", "steps": "{steps}", "step ms": "{step:.2f}"},
    **{part.replace("communication", "comm"): f"{{{part}:.2f}}" for part in (*PARTS, "hidden")},
    **{"last": "{last:.0%}", "late ms": "{late:.2f}"},
}
_CALLS = {
    **{"rank": "{rank}", "collective": "{collective}", "calls": "{calls}", "size": "{size}"},
    **{"total ms": "{total:.2f}", "median ms": "{median:.3f}"},
}


def show(found: Mapping[str, Any]) -> None:
    """Print the table of a report."""
    made = table(*_cells(found))
    # At least as wide as the table: a number is whole, or it is misread.
    width = Console(width=_WIDE).measure(made).maximum
    console = Console(highlight=False, width=max(Console().width, width))
    console.print(made)
    if said := waited_for(found):
        console.print(said)


def waited_for(found: Mapping[str, Any]) -> str:
    """Return for which rank of a report the others waited, in words; empty if they hardly did."""
    slow = found.get("slow")
    if slow is None:
        return ""
    who = "one another in turn: one" if slow["rank"] < 0 else f"rank {slow['rank']}: it"
    return (
        f"The others waited for {who} was last in {100 * slow['part']:.3g}% of the steps, "
        f"{slow['late_s'] * 1e3:.2f} ms after the last but one."
    )


def load(path: str | Path, keys: KeyFile = PLAIN) -> list[Event]:
    """Return the events of a trace, those included that ranks which were killed have written beside it.

    Args:
        path: of its file.
        keys: opens the file, if it is sealed.

    Raises:
        ConfigError: it is none of ringreduce's, or these keys do not open it.
    """
    collect(path, keys)
    try:
        text = read_trace(path, keys).decode()
    except (OSError, ValueError) as error:
        kind = ForeignFileError if isinstance(error, ForeignFileError) else ConfigError
        raise kind(f"{path} cannot be read: {error}") from None
    try:
        events: list[Event] = json.loads(text)
        if "job" in events[0]["args"]:
            return events
    except ValueError:
        if text.startswith('[\n{"name": "trace"'):
            raise ConfigError(f"{path} ends in the middle of a trace: was it copied while the job wrote it?") from None
    except (KeyError, IndexError, TypeError):
        pass  # JSON of something else
    raise ConfigError(f"{path} is no trace of ringreduce")


def report(events: Sequence[Event], skip: int = 0) -> dict[str, Any]:
    """Return where the time of steps went.

    Args:
        events: of a trace.
        skip: steps at the beginning that do not count.

    Returns:
        ``ranks``: for each rank ``rank``, ``steps`` (how many), medians in milliseconds of ``step``, the `PARTS` and
        ``hidden``, ``last`` (the share of steps in which the others waited for it) and ``late`` (milliseconds after the
        last but one in these, on average over all steps). ``slow``: as `find_slow` returns it, or None. Without steps,
        as of programs without torch, ``collectives``: for each rank and collective ``rank``, ``collective``, ``calls``,
        ``nbytes``, and milliseconds in all (``total``) and of a call (``median``).

    Raises:
        ConfigError: there are neither steps nor collectives in it.
    """
    steps, late = steps_of(events, skip)
    if not steps:
        if any("step" in event.get("args", {}) for event in events):
            raise ConfigError(f"all training steps of this trace are among the first {skip}, which are left out")
        calls = _collectives(events)
        if not calls:
            raise ConfigError("there are neither training steps nor collectives in this trace")
        return {"ranks": [], "collectives": calls}
    paces = _paces(steps, late)
    ranks = [
        {
            "rank": rank,
            "steps": len(found),
            **{part: _median_ms(each.parts[part] for each in found) for part in ("step", *PARTS, "hidden")},
            "last": pace.last / max(pace.steps, 1),
            "late": pace.late_s / max(pace.steps, 1) * 1e3,
        }
        for (rank, found), pace in zip(steps.items(), paces, strict=True)
    ]
    slow = find_slow(paces, [range(len(paces))], [*steps], enough=1)
    return {"ranks": ranks, "slow": None if slow is None else slow._asdict()}


def _paces(steps: Mapping[int, Sequence[TracedStep]], late: Mapping[int, Mapping[int, float]]) -> list[Pace]:
    """Return how each rank went through the steps that all have; what it used meanwhile is in no trace."""
    came = [[each[rank] / 1e6 for each in late.values()] for rank in steps]
    own_s = [
        sum(each.parts["step"] - each.parts["waiting"] for each in found if each.number in late) / 1e6
        for found in steps.values()
    ]
    return [
        Pace(len(late), own, last, late_s, waited_s, 0.0, 0.0, 0.0, 0, 0.0, ())
        for own, (last, late_s, waited_s) in zip(own_s, charge(came), strict=True)
    ]


def _collectives(events: Sequence[Event]) -> list[dict[str, Any]]:
    found: defaultdict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and "nbytes" in event["args"]:
            found[event["pid"], event["name"]].append(event)
    return [
        {
            "rank": rank,
            "collective": name,
            "calls": len(calls),
            "nbytes": sum(each["args"]["nbytes"] for each in calls),
            "total": sum(each["dur"] for each in calls) / 1e3,
            "median": _median_ms(each["dur"] for each in calls),
        }
        for (rank, name), calls in sorted(found.items())
    ]


def _cells(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the cells of the table of a report."""
    columns = _STEPS
    rows = found["ranks"]
    if not rows:
        columns = _CALLS
        rows = [{**each, "size": format_nbytes(each["nbytes"])} for each in found["collectives"]]
    return list(columns), [[cell.format(**each) for cell in columns.values()] for each in rows]


def _median_ms(microseconds: Iterable[float]) -> float:
    return statistics.median(microseconds) / 1e3


def to_html(found: dict[str, Any], title: str) -> str:
    """Return a report as a page that needs nothing else: a table, and a bar for each rank if there are steps."""
    legend = "".join(f'<span><i style="background:{colour}"></i>{part}</span>' for part, colour in PARTS.items())
    numbers = html_table(*_cells(found))
    steps = f"""<p>Where the time of a training step went on each rank: medians in milliseconds.</p>
{_bars(found)}
<p class="key">{legend}</p>
{numbers}
<p>{waited_for(found)}</p>
<p>comm: the time in which only communication went on; waiting: that in which other ranks had not come to it yet; rest:
all else, such as loading data. hidden: communication that ran during forward, backward or optimizer. last: in how many
steps the others waited for the rank; late: by how much it came after the last but one then, on average over all
steps.</p>"""
    calls = f"<p>Collectives on each rank. There are no training steps in this trace.</p>\n{numbers}"
    return html_page(title, steps if found["ranks"] else calls)


def _bars(found: Mapping[str, Any]) -> str:
    """Return a bar for each rank over an axis in milliseconds; lengths are shares of the window, text is not scaled."""
    longest = max((sum(each[part] for part in PARTS) for each in found["ranks"]), default=0.0) or 1.0
    lines = []
    y = 0
    for each in found["ranks"]:
        x = 0.0
        lines.append(f'<text x="0" y="{y + 14}">rank {each["rank"]}</text>')
        for part, colour in PARTS.items():
            width = each[part] / longest * 100
            place = f'x="{x:.2f}%" y="{y + 19}" width="{width:.2f}%" height="22" fill="{colour}"'
            dark = ' class="on-dark"' if colour == COLOURS["blue"] else ""
            lines.append(f"<rect {place}{dark}><title>rank {each['rank']}, {part}: {each[part]:.2f} ms</title></rect>")
            if width > _LEGIBLE:
                lines.append(f'<text x="{x + width / 2:.2f}%" y="{y + 35}">{each[part]:.3g}</text>')
            x += width
        y += 48
    lines.append(f'<line x1="0" x2="100%" y1="{y}" y2="{y}"/>')
    for quarter, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        text = f"{longest * quarter / 4:.3g}{' ms' if quarter == 4 else ''}"
        lines.append(f'<line x1="{quarter * 25}%" x2="{quarter * 25}%" y1="{y}" y2="{y + 5}"/>')
        lines.append(f'<text x="{quarter * 25}%" y="{y + 20}" text-anchor="{anchor}">{text}</text>')
    label = "time of a step by part, in milliseconds"
    return f'<svg class="bars" style="height:{y + 26}px" role="img" aria-label="{label}">{"".join(lines)}</svg>'
