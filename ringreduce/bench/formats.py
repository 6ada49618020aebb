"""Results as text: the layouts of nccl-tests and of the OSU micro-benchmarks, a short one, JSON, CSV. Pure functions.

A writer gives the lines before the first result, those of one row as soon as it is measured, and those at the end.
Our own columns stand to the right of the standard ones, where programs that read the standard ones do not look.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass

from ringreduce.bench.cases import COLLECTIVES, format_nbytes, plural
from ringreduce.bench.results import Machine, Report, Result, Row, Settings

__all__ = ["WRITERS", "CsvWriter", "JsonWriter", "NcclWriter", "OsuWriter", "ShortWriter", "Writer", "to_json"]

_CSV_COLUMNS = [
    *("collective", "size", "count", "type", "redop", "root", "algorithm", "transport", "buffers", "in_place"),
    *("iterations", "time_us_min", "time_us_median", "time_us_p95", "alg_bw", "bus_bw", "nwrong", "bound_share"),
    *("time_us_mean", "time_us_p90", "time_us_p99", "time_us_max", "time_us_deviation"),
]


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


class NcclWriter(Writer):
    """The table of nccl-tests, then: algorithm, transport, share of the bound, speed-ups, spread of the iterations."""

    def head(self, machine: Machine) -> str:
        settings, collective = self.settings, COLLECTIVES[self.settings.collective]
        new = ", results in new arrays" if settings.new_results else ""
        step = f"{settings.step_nbytes}(bytes)" if settings.step_nbytes else f"{settings.step_factor}(factor)"
        lines = [
            f"ringreduce version {machine.versions['ringreduce']}, layout of nccl-tests",
            f"Collective test starting: {collective.nccl_name}",
            f"nRanks {machine.nranks} minBytes {settings.min_nbytes} maxBytes {settings.max_nbytes} "
            f"step: {step} warmup iters: {_or_auto(settings.warmup)} iters: {_or_auto(settings.iterations)} "
            f"agg iters: {settings.aggregated} validation: {settings.check}",
            f"{machine.placement}, {plural(machine.cores, 'core')}, {machine.cpu}; {machine.mpi_library or 'no MPI'}",
            f"{settings.buffers} buffers{new}; time: median over the iterations of the slowest rank's time",
        ]
        if settings.iterations is None:
            lines.append("auto: 300 iterations for small sizes, later as many as make 1 GiB, never fewer than 16")
        if machine.gpu is not None:
            lines.append(f"arrays on the GPU, times by events on the stream; {machine.gpu}")
        if settings.peers and machine.gpu is not None:
            lines.append("mpi: by hand, through pinned memory; gloo: on CUDA tensors; they and ours take short turns")
        elif settings.peers:
            lines.append(
                f"{', '.join(settings.peers)}: blocking calls on private buffers; they and ours take short turns"
            )
        return "".join(f"# {line}\n" for line in lines) + "#\n" + self._column_heads()

    def row(self, row: Row) -> str:
        result = row.out_of_place
        case = result.case
        root = case.root if case.collective.rooted else -1
        line = f"{case.nbytes:>12}  {case.count:>12}  {case.type_name:>8}  {case.op_name or 'none':>6}  {root:>6}"
        line += _half(row.out_of_place) + _half(row.in_place)
        return line + "".join(f"  {text:>{len(head)}}" for head, text in self._extra(row)) + "\n"

    def foot(self, report: Report) -> str:
        nwrong = report.nwrong
        verdict = "N/A" if nwrong is None else f"{nwrong} {'OK' if nwrong == 0 else 'FAILED'}"
        lines = [f"Out of bounds values : {verdict}", f"Avg bus bandwidth    : {report.mean_bus_bw:g}"]
        if report.bounds:
            bound = report.bounds[-1]
            work = f"read and write {format_nbytes(bound.nbytes)} in place on every rank at once ({bound.method})"
            if self.settings.device == "cuda":
                work = f"copy {format_nbytes(bound.nbytes)} within the GPU once for each of its ranks"
            lines.append(f"Memory-traffic bound : {bound.time_us:.1f} us to {work}: {bound.gb_per_s:.1f} GB/s per rank")
        lines.append(f"Collective test concluded: {COLLECTIVES[self.settings.collective].nccl_name}")
        return "".join(f"# {line}\n" for line in lines) + "#\n"

    def _column_heads(self) -> str:
        extra = "".join(f"  {head}" for head in self._extra_heads())
        halves = "  {:>7}  {:>6}  {:>6}  {:>6}" * 2
        names, units = ("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", "")
        lines = [
            f"{'':63}{'out-of-place':<35}{'in-place':<20}",
            f"  {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}{halves.format(*names * 2)}{extra}",
            f"  {'(B)':>10}  {'(elements)':>12}{'':26}{halves.format(*units * 2)}",
        ]
        return "".join(f"#{line[1:].rstrip()}\n" for line in lines)

    def _extra_heads(self) -> list[str]:
        heads = [f"{'algorithm':>18}", f"{'transport':>10}"]
        if self.settings.collective == "allreduce":
            heads.append(f"{'bound':>6}")
        heads += [f"{'vs ' + peer:>8}" for peer in self.settings.peers]
        if self.settings.per_iteration:
            heads += [f"{name:>8}" for name in ("i_min", "i_max", "i_p99", "i_cv%")]
        return heads

    def _extra(self, row: Row) -> Iterable[tuple[str, str]]:
        best = row.best
        texts = [best.algorithm, best.transport]
        if self.settings.collective == "allreduce":
            texts.append(_or_na(best.bound_share, "{:.0%}"))
        texts += [_or_na(best.speedup(peer), "{:.2f}x") for peer in self.settings.peers]
        if self.settings.per_iteration:
            time = best.time
            texts += [_time(time.minimum), _time(time.maximum), _time(time.p99), f"{time.variation:.1f}"]
        return zip(self._extra_heads(), texts, strict=True)


class ShortWriter(Writer):
    """A table for people, of at most 80 columns with one peer: the form in place, where there is one."""

    def head(self, machine: Machine) -> str:
        settings, collective = self.settings, COLLECTIVES[self.settings.collective]
        in_place = "in place" if collective.in_place and not settings.new_results else "out of place"
        head = f"{collective.name}, {machine.placement}, {settings.buffers} buffers, {in_place}\n"
        columns = f"{'size':>10}{'time (us)':>11}{'busbw (GB/s)':>14}{'#wrong':>8}  {'algorithm':<18}"
        columns += f"{'bound':>6}" if collective.name == "allreduce" else ""
        return head + columns + "".join(f"{'vs ' + peer:>9}" for peer in settings.peers) + "\n"

    def row(self, row: Row) -> str:
        best, case = row.best, row.best.case
        several = len(self.settings.types) > 1 or len(self.settings.ops) > 1
        what = f" {case.type_name} {case.op_name or ''}".rstrip() if several else ""
        line = f"{format_nbytes(case.nbytes):>10}{_time(best.time.median):>11}{best.bus_bw:>14.2f}"
        line += f"{'N/A' if best.nwrong is None else best.nwrong:>8}  {best.algorithm + what:<18}"
        line += f"{_or_na(best.bound_share, '{:.0%}'):>6}" if case.collective.name == "allreduce" else ""
        return line + "".join(f"{_or_na(best.speedup(peer), '{:.2f}x'):>9}" for peer in self.settings.peers) + "\n"

    def foot(self, report: Report) -> str:
        return f"wrong elements: {report.nwrong}\n" if report.nwrong else ""


class OsuWriter(Writer):
    """Size and latency as the OSU micro-benchmarks print them; in place where the collective can."""

    def head(self, machine: Machine) -> str:
        collective = COLLECTIVES[self.settings.collective]
        if collective.name == "bandwidth":
            return (
                f"# OSU MPI Bandwidth Test layout, ringreduce {machine.versions['ringreduce']}\n"
                f"# messages one after the other, {collective.messages} before an answer\n"
                f"# Datatype: {', '.join(self.settings.types)}.\n{'# Size':<10}{'Bandwidth (MB/s)':>18}\n"
            )
        name = f"{collective.osu_name} " if collective.osu_name else ""
        where = "in place" if collective.in_place and not self.settings.new_results else "out of place"
        columns = f"{'# Size':<10}{'Avg Latency(us)':>18}"
        if self.settings.per_iteration:
            columns += f"{'Min Latency(us)':>18}{'Max Latency(us)':>18}{'Iterations':>12}"
            columns += "".join(f"{f'P{p} Tail Lat(us)':>20}" for p in (50, 90, 99))
        return (
            f"# OSU MPI {name}Latency Test layout, ringreduce {machine.versions['ringreduce']}\n"
            f"# {where}; Avg: mean over the iterations of the slowest rank's time\n"
            f"# Datatype: {', '.join(self.settings.types)}.\n" + columns + "\n"
        )

    def row(self, row: Row) -> str:
        time, case = row.best.time, row.best.case
        if case.collective.name == "bandwidth":
            return f"{case.nbytes:<10}{case.nbytes / time.mean if time.mean else 0:>18.2f}\n"
        line = f"{case.nbytes:<10}{time.mean:>18.2f}"
        if self.settings.per_iteration:
            line += f"{time.minimum:>18.2f}{time.maximum:>18.2f}{time.iterations:>12}"
            line += "".join(f"{value:>20.2f}" for value in (time.median, time.p90, time.p99))
        return line + "\n"

    def foot(self, report: Report) -> str:
        return f"# Wrong elements: {report.nwrong}\n" if report.nwrong else ""


class CsvWriter(Writer):
    """The entries of the JSON report as flat columns, one line per result."""

    def head(self, machine: Machine) -> str:
        return ",".join(self._columns()) + "\n"

    def row(self, row: Row) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns(), extrasaction="ignore", lineterminator="\n")
        for result in row.results:
            entry = result.as_dict()
            entry |= {f"time_us_{name}": us for name, us in entry["time_us"].items()}
            for peer, times in entry["vs"].items():
                entry |= {f"{peer}_{name}": value for name, value in (times or {}).items()}
            writer.writerow(entry)
        return text.getvalue()

    def _columns(self) -> list[str]:
        return [
            *_CSV_COLUMNS,
            *(f"{peer}_{name}" for peer in self.settings.peers for name in ("median_us", "speedup")),
        ]


class JsonWriter(Writer):
    """The whole report at the end, nothing before."""

    def foot(self, report: Report) -> str:
        return to_json(report)


#: Name for ``--format`` -> layout.
WRITERS: dict[str, type[Writer]] = {
    "nccl": NcclWriter,
    "short": ShortWriter,
    "osu": OsuWriter,
    "json": JsonWriter,
    "csv": CsvWriter,
}


def to_json(report: Report) -> str:
    """Return the report as JSON text."""
    return json.dumps(report.as_dict(), indent=1) + "\n"


def _half(result: Result | None) -> str:
    if result is None:
        return "  {:>7}  {:>6}  {:>6}  {:>6}".format(*["N/A"] * 4)
    wrong = "N/A" if result.nwrong is None else f"{result.nwrong:g}"
    return f"  {_time(result.time.median):>7}  {result.alg_bw:>6.2f}  {result.bus_bw:>6.2f}  {wrong:>6}"


def _time(us: float) -> str:
    """Write microseconds in at most seven characters, up to ten seconds."""
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 10_000 else f"{us:.0f}"


def _or_auto(value: int | None) -> str:
    return "auto" if value is None else str(value)


def _or_na(value: float | None, form: str) -> str:
    return "N/A" if value is None else form.format(value)
