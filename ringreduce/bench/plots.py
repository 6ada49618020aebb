"""``bench --plot`` and ``bench all --report``: curves of what was measured, and a page of all collectives."""

from __future__ import annotations

import html
import io
import itertools
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ringreduce.bench.formats import cells_of
from ringreduce.bench.results import Report
from ringreduce.common.errors import ConfigError
from ringreduce.common.files import write_file
from ringreduce.common.html_pages import COLOURS, html_page, html_table
from ringreduce.common.quantities import format_nbytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CURVES = [COLOURS[name] for name in ("blue", "orange", "green", "purple", "amber", "sky", "grey")]
_LINES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)))
_DASHES = (*_LINES, *_LINES, _LINES[3], _LINES[1])  # of ten curves, like the markers
_MARKERS = "os^Dv<>phX"
_PEERS = ("mpi", "gloo", "nccl")  # whose curves look alike in all pictures
# Inches, of each panel of a picture. The panels stand one below the other: as on a phone.
_WIDTH = 6.0
_HEIGHT = 4.2
#: Of a picture on a dark screen: paper, ink and grid. It has a paper of its own, so that it is legible on any page.
_DARK = """<style>@media (prefers-color-scheme: dark) {
svg [style*="fill: #ffffff"] { fill: #1b1d21 !important }
svg text { fill: #e4e4e4 !important }
svg [style*="stroke: #000000"] { stroke: #e4e4e4 !important }
}</style>"""
_SUFFIXES = (".png", ".svg", ".pdf")

Curve = dict[int, float]  # microseconds by size in bytes


def panels(count: int, title: str) -> tuple[Figure, list[Any]]:
    """Return an empty picture and its axes, one below the other.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(_WIDTH, _HEIGHT * count + 0.3), layout="constrained")
    drawn.suptitle(textwrap.fill(title, 84), fontsize=9)
    return drawn, list(drawn.subplots(count, 1, squeeze=False)[:, 0])


def curve_style(number: int) -> dict[str, Any]:
    """Return how a curve looks: where two coincide, the lower one shows beside and between the dashes of the upper."""
    marks = {"marker": _MARKERS[number % len(_MARKERS)], "markersize": 6 - min(number, 4) * 0.6}
    looks = {"color": _CURVES[number % len(_CURVES)], "linestyle": _DASHES[number % len(_DASHES)]}
    return {**looks, **marks, "linewidth": 2.6 - min(number, 4) * 0.35, "markerfacecolor": "#ffffff"}


def size_axis(axes: Any) -> None:
    """Make the axis across that of sizes in bytes."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel("size of the buffer of a rank")
    axes.xaxis.set_major_formatter(lambda size, _: format_nbytes(round(size)).replace(" ", "\u2009"))
    axes.tick_params(axis="x", labelrotation=30)
    axes.grid(visible=True, alpha=0.3)


def to_svg(drawn: Figure, description: str | None = None) -> str:
    """Return a picture as SVG, which is dark where the reader's screen is.

    Args:
        drawn: the picture.
        description: for its metadata.
    """
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ringreduce"}):
        drawn.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Description": description})
    head, end, rest = text.getvalue().partition("</metadata>\n")
    return f"{head}{end}{_DARK}\n{rest}"


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
    if report.known_bounds:
        found["bound"] = {bound.nbytes: bound.time_us for bound in report.known_bounds}
    return found


def figure(report: Report) -> Figure:
    """Return a picture of a report: time and bus bandwidth over size, both axes logarithmic.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    collective = report.rows[0].best.case.collective
    machine = report.machine
    factor = collective.bus_factor(machine.nranks) / 1e3
    drawn, (times, speeds) = panels(2, f"{collective.name}, {machine.placement}")
    found = curves(report)
    ours = [name for name in found if name not in (*_PEERS, "bound")]
    numbers = {name: number for number, name in enumerate([*ours[:1], *_PEERS, *ours[1:]])}
    for name, curve in found.items():
        sizes = sorted(curve)
        bound = {"label": "bound", "color": "#000000", "linestyle": ":", "linewidth": 1.2}
        style = bound if name == "bound" else {"label": name, **curve_style(numbers[name])}
        times.plot(sizes, [curve[size] for size in sizes], **style)
        moved = [size for size in sizes if curve[size]]
        speeds.plot(moved, [size / curve[size] * factor for size in moved], **style)
    for axes, label in ((times, "time (microseconds)"), (speeds, "bus bandwidth (GB/s)")):
        size_axis(axes)
        axes.set(ylabel=label, yscale="log")
    times.legend(frameon=False)
    return drawn


def write(drawn: Figure, path: str) -> None:
    """Write a picture to a file; its name says whether as PNG, SVG or PDF.

    Raises:
        ConfigError: the file cannot be written.
    """
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind == "svg":
        write_file(path, to_svg(drawn).encode())
    else:
        picture = io.BytesIO()
        drawn.savefig(picture, format=kind, dpi=150)
        write_file(path, picture.getvalue())


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
    parts = [f"<p>{html.escape(each)}</p>" for each in facts]
    if any(report.settings.peers for report in reports):
        losses = [f"<li>{html.escape(text)}</li>" for report in reports for text in _lost(report)]
        if busy := [report.settings.collective for report in reports if report.busy]:
            losses.append(f"<li>of {', '.join(busy)} nothing can be said: other programs ran meanwhile</li>")
        parts.append(f"<h2>Where others were faster</h2><ul>{''.join(losses) or '<li>nowhere</li>'}</ul>")
    parts += [f"<p>{report.settings.collective}: {html.escape(report.busy)}</p>" for report in reports if report.busy]
    parts += [_section(report) for report in reports]
    parts.append(f"<p>Wrong elements: {sum(report.nwrong or 0 for report in reports)}</p>")
    return html_page("ringreduce bench", "".join(parts))


def _section(report: Report) -> str:
    name = report.settings.collective
    peers = report.settings.peers
    heads = ["size", "time (us)", "busbw (GB/s)", "algorithm", "transport", "bound", *(f"vs {each}" for each in peers)]
    if not report.known_bounds:
        heads.remove("bound")
    rows = ([cells_of(row, peers)[head] for head in heads] for row in report.rows)
    svg = to_svg(figure(report))
    svg = svg[svg.index("<svg") :]
    # Several pictures share a page: the ids of one must not be those of another.
    for reference in ('id="', 'href="#', "url(#"):
        svg = svg.replace(reference, f"{reference}{name}-")
    return f"<h2>{name}</h2><section>{svg}{html_table(heads, rows)}</section>"


def _lost(report: Report) -> Iterator[str]:
    for best in (row.best for row in report.rows if not report.busy):
        for peer in best.peers:
            speedup = best.speedup(peer)
            if speedup is not None and speedup < 1:
                size = format_nbytes(best.case.nbytes)
                yield f"{best.case.collective.name} of {size}: {peer} took {speedup:.2f} of the time"
