"""``bench --plot`` and ``bench all --report``: curves of what was measured, and a page of all collectives."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ringreduce.bench.cases import format_nbytes
from ringreduce.bench.results import Report
from ringreduce.common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["curves", "figure", "page", "require_matplotlib", "save"]

#: Of curves: ours, then peers by name, and the bound.
_COLOURS = {"mpi": "#f58518", "gloo": "#e45756", "nccl": "#72b7b2", "bound": "#9d9d9d"}
_OURS = ("#4c78a8", "#54a24b", "#b279a2", "#9d755d", "#2f4b7c", "#7a5195")
_SUFFIXES = (".png", ".svg", ".pdf")

Curve = dict[int, float]  # microseconds by size in bytes


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
    times: dict[str, dict[int, list[float]]] = {}  # several, where everything is measured several times
    for each, parts in zip(best, names, strict=True):
        told_apart = (part for part, is_apart in zip(parts, apart, strict=True) if is_apart)
        name = " ".join(told_apart) if several else "ringreduce"
        times.setdefault(name, {}).setdefault(each.case.nbytes, []).append(each.time.median)
        for peer, time in each.peers.items():
            if time is not None and not several:
                times.setdefault(peer, {}).setdefault(each.case.nbytes, []).append(time.median)
    found: dict[str, Curve] = {
        name: {nbytes: median(cycles) for nbytes, cycles in curve.items()} for name, curve in times.items()
    }
    if report.bounds and not several:
        found["bound"] = {bound.nbytes: bound.time_us for bound in report.bounds}
    return found


def figure(report: Report) -> Figure:
    """Return a picture of a report: time and bus bandwidth over size, both axes logarithmic where that helps.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    collective, machine = report.rows[0].best.case.collective, report.machine
    factor = collective.bus_factor(machine.nranks)
    drawn = Figure(figsize=(10, 4.2), layout="constrained")
    times, speeds = drawn.subplots(1, 2)
    ours = iter(_OURS * len(report.rows))
    for name, curve in curves(report).items():
        sizes = sorted(curve)
        style: dict[str, Any] = {"label": "memory bound" if name == "bound" else name}
        style["color"] = _COLOURS[name] if name in _COLOURS else next(ours)
        style["linestyle"] = "--" if name == "bound" else "-"
        style["marker"] = None if name == "bound" else "o"
        times.plot(sizes, [curve[size] for size in sizes], markersize=3, **style)
        moved = [size for size in sizes if curve[size]]
        speeds.plot(moved, [size / curve[size] / 1e3 * factor for size in moved], markersize=3, **style)
    for axes, label in ((times, "time (us)"), (speeds, "bus bandwidth (GB/s)")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("size")
        axes.set_ylabel(label)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_nbytes(round(size)).replace(" ", "\u2009")))
        axes.tick_params(axis="x", labelrotation=30)
        axes.set_yscale("log")
        axes.grid(visible=True, alpha=0.3)
    times.legend(frameon=False)
    drawn.suptitle(f"{collective.name}, {machine.placement}", fontsize=11)
    return drawn


def save(report: Report, path: str) -> None:
    """Write the picture of a report to a file; its name says whether as PNG, SVG or PDF.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    drawn = figure(report)
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
    lost = [text for report in reports for text in _lost(report)]
    losses = "".join(f"<li>{html.escape(text)}</li>" for text in lost)
    parts = [f"<p>{html.escape(each)}</p>" for each in facts]
    if any(report.settings.peers for report in reports):
        parts.append(f"<h2>Where others were faster</h2><ul>{losses or '<li>nowhere</li>'}</ul>")
    parts += [f"<p>{report.settings.collective}: {html.escape(report.busy)}</p>" for report in reports if report.busy]
    parts += [_section(report) for report in reports]
    wrong = sum(report.nwrong or 0 for report in reports)
    parts.append(f"<p>Wrong elements: {wrong}</p>")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>ringreduce bench</title><style>
body {{ font: 14px system-ui, sans-serif; margin: 2em; max-width: 70em; }}
td, th {{ text-align: right; padding: 2px 10px; }}
svg {{ max-width: 100%; height: auto; }}
</style></head><body><h1>ringreduce bench</h1>
{"".join(parts)}
</body></html>
"""


def _section(report: Report) -> str:
    peers = report.settings.peers
    headings = [
        "size",
        "time (us)",
        "busbw (GB/s)",
        "algorithm",
        "transport",
        "bound",
        *(f"vs {each}" for each in peers),
    ]
    rows = []
    for row in report.rows:
        best = row.best
        bound = "" if best.bound_share is None else f"{best.bound_share:.0%}"
        speedups = [best.speedup(peer) if peer in best.peers else None for peer in peers]
        cells = [
            format_nbytes(best.case.nbytes),
            f"{best.time.median:.1f}",
            f"{best.bus_bw:.2f}",
            best.algorithm,
            best.transport,
            bound,
            *("" if each is None else f"{each:.2f}x" for each in speedups),
        ]
        rows.append("<tr>" + "".join(f"<td>{html.escape(each)}</td>" for each in cells) + "</tr>")
    head = "".join(f"<th>{each}</th>" for each in headings)
    return f"<h2>{report.settings.collective}</h2>{_svg(report)}<table><tr>{head}</tr>{''.join(rows)}</table>"


def _svg(report: Report) -> str:
    text = io.StringIO()
    figure(report).savefig(text, format="svg")
    whole = text.getvalue()
    # Several pictures share a page: the ids of one must not be those of another.
    return (
        whole[whole.index("<svg") :]
        .replace('id="', f'id="{report.settings.collective}-')
        .replace('href="#', f'href="#{report.settings.collective}-')
        .replace("url(#", f"url(#{report.settings.collective}-")
    )


def _lost(report: Report) -> list[str]:
    found = []
    for row in report.rows:
        best = row.best
        for peer in best.peers:
            speedup = best.speedup(peer)
            if speedup is not None and speedup < 1:
                size = format_nbytes(best.case.nbytes)
                found.append(f"{best.case.collective.name} of {size}: {peer} took {speedup:.2f} of the time")
    return found
