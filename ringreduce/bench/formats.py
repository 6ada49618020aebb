"""Results as text: the layout of nccl-tests, a short one, JSON, CSV. Pure functions.

A line of a table is made by a format string whose fields have the names of the columns: their heads, and what they show
of a row. A writer gives the lines before the first result, those of one row as soon as it is measured, and those at the
end. Our own columns follow the standard ones, where programs that read the standard ones do not look.
"""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringreduce.bench.cases import COLLECTIVES
from ringreduce.bench.results import Machine, Report, Result, Row, Settings
from ringreduce.common.quantities import format_nbytes, plural

_CSV_COLUMNS = [
    *("collective", "size", "count", "type", "redop", "root", "algorithm", "transport", "buffers", "in_place"),
    *("iterations", "time_us_min", "time_us_median", "time_us_p95", "alg_bw", "bus_bw", "nwrong", "bound_share"),
    *("time_us_mean", "time_us_p90", "time_us_p99", "time_us_max", "time_us_deviation"),
]
_CASE = "{size:>12}  {count:>12}  {type:>8}  {redop:>6}  {root:>6}"
_HALF = "  {time:>7}  {algbw:>6}  {busbw:>6}  {#wrong:>6}"
_UNITS = {"size": "(B)", "count": "(elements)", "time": "(us)", "algbw": "(GB/s)", "busbw": "(GB/s)"}
_UNITS |= dict.fromkeys(("type", "redop", "root", "#wrong"), "")


class _Heads(dict[str, str]):
    """The heads of columns; those that are not listed are the columns' names."""

    def __missing__(self, name: str) -> str:
        return name


def heads_of(form: str, heads: Mapping[str, str], mark: str = "#") -> str:
    """Return the heads of a table whose lines have this form; ``mark`` takes the place of the first characters."""
    return f"{mark}{form.format_map(_Heads(heads))[len(mark) :].rstrip()}\n"


def cells_of(row: Row, peers: Sequence[str]) -> dict[str, Any]:
    """Return what tables show of a row, by column: of the form in place, where there is one."""
    best = row.best
    time = row.best.time
    cells = {"size": format_nbytes(best.case.nbytes), "time (us)": _time(time.median)}
    cells |= {"busbw (GB/s)": _bus_bw(best), "#wrong": _or_na(best.nwrong, "{}")}
    cells |= {"algorithm": best.algorithm, "transport": best.transport, "bound": _or_na(best.bound_share, "{:.0%}")}
    cells |= {"i_min": _time(time.min), "i_max": _time(time.max), "i_p99": _time(time.p99)}
    cells |= {f"vs {peer}": _or_na(best.speedup(peer), "{:.2f}x") for peer in peers}
    return cells | {"i_cv%": f"{time.variation:.1f}"}


def comments(*lines: str) -> str:
    """Return lines that programs skip."""
    return "".join(f"# {line}\n" for line in lines)


def csv_of(columns: Sequence[str], entries: Iterable[Mapping[str, Any]]) -> str:
    """Return entries as lines of CSV; what is in no column is left out."""
    text = io.StringIO()
    csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n").writerows(entries)
    return text.getvalue()


@dataclass(frozen=True, slots=True)
class Writer:
    """One layout. Each method returns whole lines, each ended by a newline, or nothing."""

    settings: Settings

    def head(self, machine: Machine) -> str:
        return ""

    def row(self, row: Row) -> str:
        return ""

    def foot(self, report: Report) -> str:
        return ""

    def comparisons(self, bound: str, peer: str) -> str:
        """Return the form of the columns about the bound and peers, with these places for each."""
        shown = [] if COLLECTIVES[self.settings.collective].point_to_point else [f"{{bound:{bound}}}"]
        return "".join([*shown, *(f"{{vs {name}:{peer}}}" for name in self.settings.peers)])


class NcclWriter(Writer):
    """The table of nccl-tests, then: algorithm, transport, share of the bound, speed-ups, spread of the iterations."""

    def _ours(self) -> str:
        spread = "  {i_min:>8}  {i_max:>8}  {i_p99:>8}  {i_cv%:>8}" if self.settings.per_iteration else ""
        return "  {algorithm:>18}  {transport:>10}" + self.comparisons(">8", ">10") + spread

    def head(self, machine: Machine) -> str:
        settings = self.settings
        new = ", results in new arrays" if settings.new_results else ""
        step = f"{settings.step_nbytes}(bytes)" if settings.step_nbytes else f"{settings.step_factor}(factor)"
        lines = [
            f"ringreduce version {machine.versions['ringreduce']}, layout of nccl-tests",
            f"Collective test starting: {COLLECTIVES[settings.collective].nccl_name}",
            f"nRanks {machine.nranks} minBytes {settings.min_nbytes} maxBytes {settings.max_nbytes} "
            f"step: {step} warmup iters: {_or_auto(settings.warmup)} iters: {_or_auto(settings.iterations)} "
            f"agg iters: {settings.aggregated} validation: {settings.check}",
            f"{machine.placement}, {plural(machine.cores, 'core')}, {machine.cpu}; {machine.mpi_library or 'no MPI'}",
            f"{settings.buffers} buffers{new}; time: median over the iterations of the slowest rank's time",
        ]
        if settings.iterations is None:
            lines.append("auto: 300 iterations for small sizes, later as many as make 1 GiB, never fewer than 16")
        peers = f"{', '.join(settings.peers)}: blocking calls on private buffers"
        if machine.gpu is not None:
            lines.append(f"arrays on the GPU, times by events on the stream; {machine.gpu}")
            peers = "mpi: by hand, through pinned memory; gloo: on CUDA tensors"
        if settings.peers:
            lines.append(f"{peers}; they and ours take short turns")
        form = _CASE + _HALF * 2
        heads = heads_of(form + self._ours(), {}) + heads_of(form, _UNITS)
        return f"{comments(*lines)}#\n#{'':62}{'out-of-place':<35}in-place\n{heads}"

    def row(self, row: Row) -> str:
        case = row.best.case
        cells = {"size": case.nbytes, "count": case.count, "type": case.type_name, "redop": case.op_name or "none"}
        line = _CASE.format_map({**cells, "root": case.shown_root}) + _half(row.out_of_place) + _half(row.in_place)
        return line + self._ours().format_map(cells_of(row, self.settings.peers)) + "\n"

    def foot(self, report: Report) -> str:
        nwrong = report.nwrong
        verdict = "N/A" if nwrong is None else f"{nwrong} {'OK' if nwrong == 0 else 'FAILED'}"
        mean = "N/A" if report.machine.nranks == 1 else f"{report.mean_bus_bw:g}"
        lines = [f"Out of bounds values : {verdict}", f"Avg bus bandwidth    : {mean}"]
        if report.known_bounds:
            bound = report.known_bounds[-1]
            by = "copies within the GPU, one for each of its ranks" if self.settings.device == "cuda" else bound.method
            lines.append(f"Bound                : {bound.time_us:.1f} us for {format_nbytes(bound.nbytes)} ({by})")
        lines.append(f"Collective test concluded: {COLLECTIVES[self.settings.collective].nccl_name}")
        return comments(*lines) + "#\n"


class ShortWriter(Writer):
    """A table for people, of at most 80 columns with one peer: the form in place, where there is one."""

    def _form(self) -> str:
        return "{size:>10}{time (us):>11}{busbw (GB/s):>14}{#wrong:>8}  {algorithm:<18}" + self.comparisons(">6", ">9")

    def head(self, machine: Machine) -> str:
        settings = self.settings
        head = f"{settings.collective}, {machine.placement}, {settings.buffers} buffers, {settings.form}\n"
        return head + heads_of(self._form(), {}, mark="")

    def row(self, row: Row) -> str:
        settings = self.settings
        case = row.best.case
        cells = cells_of(row, self.settings.peers)
        if len(settings.types) > 1 or len(settings.ops) > 1:
            cells["algorithm"] += f" {case.type_name} {case.op_name or ''}".rstrip()
        return self._form().format_map(cells) + "\n"

    def foot(self, report: Report) -> str:
        return f"wrong elements: {report.nwrong}\n" if report.nwrong else ""


class CsvWriter(Writer):
    """The entries of the JSON report as flat columns, one line per result."""

    def head(self, machine: Machine) -> str:
        return ",".join(self._names()) + "\n"

    def row(self, row: Row) -> str:
        entries = [result.as_dict() for result in row.results]
        for entry in entries:
            entry |= {f"time_us_{name}": us for name, us in entry["time_us"].items()}
            for peer, times in entry["vs"].items():
                entry |= {f"{peer}_{name}": value for name, value in (times or {}).items()}
        return csv_of(self._names(), entries)

    def _names(self) -> list[str]:
        return _CSV_COLUMNS + [f"{peer}_{name}" for peer in self.settings.peers for name in ("median_us", "speedup")]


class JsonWriter(Writer):
    """The whole report at the end, nothing before."""

    def foot(self, report: Report) -> str:
        return to_json(report)


#: Name for ``--format`` -> layout.
WRITERS: dict[str, type[Writer]] = {
    "nccl": NcclWriter,
    "short": ShortWriter,
    "json": JsonWriter,
    "csv": CsvWriter,
}


def to_json(report: Report) -> str:
    """Return the report as JSON text."""
    return json.dumps(report.as_dict(), indent=1) + "\n"


def _half(result: Result | None) -> str:
    if result is None:
        return _HALF.format_map(defaultdict(lambda: "N/A"))
    cells = {"time": _time(result.time.median), "algbw": f"{result.alg_bw:.2f}", "busbw": _bus_bw(result)}
    return _HALF.format_map({**cells, "#wrong": _or_na(result.nwrong, "{:g}")})


def _bus_bw(result: Result) -> str:
    """Write a bus bandwidth; one rank has none."""
    return "N/A" if result.case.nranks == 1 else f"{result.bus_bw:.2f}"


def _time(us: float) -> str:
    """Write microseconds in at most seven characters, up to ten seconds."""
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 10_000 else f"{us:.0f}"


def _or_auto(value: int | None) -> str:
    return "auto" if value is None else str(value)


def _or_na(value: float | None, form: str) -> str:
    return "N/A" if value is None else form.format(value)
