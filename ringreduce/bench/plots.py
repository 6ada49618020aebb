"""``bench --plot`` and ``bench all --report``: curves of what was measured, and a page of all collectives."""

from __future__ import annotations

import html
import io
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ringreduce.bench.cases import format_nbytes
from ringreduce.bench.formats import cells_of
from ringreduce.bench.results import Report
from ringreduce.common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["curves", "figure", "html_page", "html_table", "page", "require_matplotlib", "save", "write"]

#: Of curves: ours, then peers by name, and the bound.
_COLOURS = {"mpi": "#f58518", "gloo": "#e45756", "nccl": "#72b7b2", "bound": "#9d9d9d"}
_OURS = ("#4c78a8", "#54a24b", "#b279a2", "#9d755d", "#2f4b7c", "#7a5195")
_SUFFIXES = (".png", ".svg", ".pdf")

Curve = dict[int, float]  # microseconds by size in bytes


def html_page(title: str, body: str) -> str:
    """Return a page that needs nothing else."""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>
body {{ font: 14px system-ui, sans-serif; margin: 2em; max-width: 70em; }}
td, th {{ text-align: right; padding: 2px 10px; }}
svg {{ max-width: 100%; height: auto; }}
i {{ display: inline-block; width: 1em; height: 1em; margin: 0 .4em 0 1em; vertical-align: middle; }}
</style></head><body>
<h1>{html.escape(title)}</h1>
{body}
</body></html>
"""


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of a page."""
    lines = [("th", headings), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{html.escape(each)}</{tag}>" for each in row) for tag, row in lines)
    return f"<table>{''.join(f'<tr>{each}</tr>' for each in cells)}</table>"


def require_matplotlib(path: str | None = None) -> None:
    """Check that pictures can be made, before anything is measured for one.

    Args:
        path: of the picture, whose name says what kind it is; None: there is none.

    Raises:
        ConfigError: matplotlib is not installed, or the name ends in something else.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("pictures need matplotlib, which is not installed: pip install matplotlib") from None
    if path is not None and Path(path).suffix not in _SUFFIXES:
        raise ConfigError(f"the name of a picture ends in {', '.join(_SUFFIXES)}; got {path}")


def curves(report: Report) -> dict[str, Curve]:
    """Return the median times of a report by name: ours for each type, operation and algorithm; peers; the bound."""
    best = [row.best for row in report.rows]
    names = [(each.case.type_name, each.case.op_name or "", each.algorithm) for each in best]
    apart = [len(set(parts)) > 1 for parts in zip(*names, strict=True)]
    several = apart[0] or apart[1] or report.settings.algorithm == "all"
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))  # everything once per cycle
    for each, parts in zip(best, names, strict=True):
        name = " ".join(itertools.compress(parts, apart)) if several else "ringreduce"
        for who, time in {name: each.time, **({} if several else each.peers)}.items():
            if time is not None:
                times[who][each.case.nbytes].append(time.median)
    found = {name: {nbytes: median(cycles) for nbytes, cycles in curve.items()} for name, curve in times.items()}
    if report.bounds and not several:
        found["bound"] = {bound.nbytes: bound.time_us for bound in report.bounds}
    return found


def figure(report: Report) -> Figure:
    """Return a picture of a report: time and bus bandwidth over size, both axes logarithmic.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    collective, machine = report.rows[0].best.case.collective, report.machine
    factor = collective.bus_factor(machine.nranks) / 1e3
    drawn = Figure(figsize=(10, 4.2), layout="constrained")
    times, speeds = drawn.subplots(1, 2)
    ours = itertools.cycle(_OURS)
    for name, curve in curves(report).items():
        sizes = sorted(curve)
        style: dict[str, Any] = {"color": _COLOURS.get(name) or next(ours), "markersize": 3}
        style |= {"label": "memory bound", "linestyle": "--"} if name == "bound" else {"label": name, "marker": "o"}
        times.plot(sizes, [curve[size] for size in sizes], **style)
        moved = [size for size in sizes if curve[size]]
        speeds.plot(moved, [size / curve[size] * factor for size in moved], **style)
    for axes, label in ((times, "time (us)"), (speeds, "bus bandwidth (GB/s)")):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="size", ylabel=label, yscale="log")
        axes.xaxis.set_major_formatter(lambda size, _: format_nbytes(round(size)).replace(" ", "\u2009"))
        axes.tick_params(axis="x", labelrotation=30)
        axes.grid(visible=True, alpha=0.3)
    times.legend(frameon=False)
    drawn.suptitle(f"{collective.name}, {machine.placement}", fontsize=11)
    return drawn


def save(report: Report, path: str) -> None:
    """Write the picture of a report to a file; its name says whether as PNG, SVG or PDF.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    write(figure(report), path)


def write(drawn: Figure, path: str) -> None:
    """Write a picture to a file; its name says whether as PNG, SVG or PDF.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        drawn.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def page(reports: Sequence[Report]) -> str:
    """Return a page of several collectives that needs nothing else: curves, tables, and where a peer was faster.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    machine = reports[0].machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    facts = [
        f"{machine.placement}, {machine.cores} cores, {machine.cpu}",
        f"{machine.mpi_library or 'no MPI'}; {versions}",
        machine.timestamp,
    ]
    losses = [f"<li>{html.escape(text)}</li>" for report in reports for text in _lost(report)]
    parts = [f"<p>{html.escape(each)}</p>" for each in facts]
    if any(report.settings.peers for report in reports):
        parts.append(f"<h2>Where others were faster</h2><ul>{''.join(losses) or '<li>nowhere</li>'}</ul>")
    parts += [f"<p>{report.settings.collective}: {html.escape(report.busy)}</p>" for report in reports if report.busy]
    parts += [_section(report) for report in reports]
    parts.append(f"<p>Wrong elements: {sum(report.nwrong or 0 for report in reports)}</p>")
    return html_page("ringreduce bench", "".join(parts))


def _section(report: Report) -> str:
    name, peers = report.settings.collective, report.settings.peers
    heads = ["size", "time (us)", "busbw (GB/s)", "algorithm", "transport", "bound", *(f"vs {each}" for each in peers)]
    rows = ([cells_of(row, peers)[head] for head in heads] for row in report.rows)
    text = io.StringIO()
    figure(report).savefig(text, format="svg")
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    # Several pictures share a page: the ids of one must not be those of another.
    for reference in ('id="', 'href="#', "url(#"):
        svg = svg.replace(reference, f"{reference}{name}-")
    return f"<h2>{name}</h2>{svg}{html_table(heads, rows)}"


def _lost(report: Report) -> Iterator[str]:
    for best in (row.best for row in report.rows):
        for peer in best.peers:
            speedup = best.speedup(peer)
            if speedup is not None and speedup < 1:
                size = format_nbytes(best.case.nbytes)
                yield f"{best.case.collective.name} of {size}: {peer} took {speedup:.2f} of the time"
