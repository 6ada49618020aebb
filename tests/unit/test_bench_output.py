"""What ``bench`` and ``explain`` take and write: options, complaints, layouts to the character, pictures, the page."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import numpy as np
import pytest
from click.testing import CliRunner
from doubles import Faulty

import ringreduce
import ringreduce.testing
from ringreduce.bench.cases import COLLECTIVES, Case
from ringreduce.bench.formats import CsvWriter, JsonWriter, NcclWriter, ShortWriter, to_json
from ringreduce.bench.measure import Summary
from ringreduce.bench.plots import curves, figure, page, write
from ringreduce.bench.results import CaseBound, Machine, Report, Result, Row, Settings
from ringreduce.cli import main

FAST = ["-n", "2", "-w", "0"]


@pytest.fixture(autouse=True)
def _no_world_left():
    """Every command leaves as it came: without a world."""
    yield
    ringreduce.shutdown()


def invoke(*arguments: str) -> click.testing.Result:
    return CliRunner().invoke(main, list(arguments), prog_name="python -m ringreduce")


def test_the_last_size_is_measured():
    """Also where the factor jumps over it; the help says so."""
    result = invoke("bench", "allreduce", "-b", "8", "-e", "100K", "-f", "32", *FAST)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if not line.startswith("#")]
    assert [row[0] for row in rows] == ["8", "256", "8192", "102400"]
    assert "measured too where the steps jump over it" in " ".join(invoke("bench", "--help").stdout.split())


def test_one_rank_has_no_bus_bandwidth():
    """It is N/A, not 0, and a line says how several ranks are started."""
    shown = invoke("bench", "allreduce", "-b", "1K", "-e", "1K", *FAST).stdout
    assert "ringreduce run -np 2 python -m ringreduce bench allreduce" in shown.splitlines()[-1]
    row = next(line.split() for line in shown.splitlines() if not line.startswith("#"))
    assert (row[7], row[11]) == ("N/A", "N/A")
    assert "# Avg bus bandwidth    : N/A" in shown


@pytest.mark.parametrize("command", ["bench", "tune", "explain"])
@pytest.mark.parametrize("option", ["-np", "-npp", "--np", "--num-proc"])
def test_ranks_are_started_in_front_of_a_command(command: str, option: str):
    """It has no option for that, whatever click makes of -np; the error says what to write."""
    result = invoke(command, option, "2")
    assert result.exit_code == 2
    assert f"{command} has no option {option}: it measures the ranks that run it. Start them in front" in result.stderr
    assert "ringreduce run -np N" in result.stderr


def test_bench_writes_json(tmp_path):
    """-J writes the report beside the table."""
    path = tmp_path / "report.json"
    result = invoke("bench", "broadcast", "-b", "8", "-e", "8", *FAST, "-J", str(path), "--format", "csv")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("collective,size,")
    report = json.loads(path.read_text())
    assert report["config"]["nranks"] == 1
    assert report["results"][0]["collective"] == "broadcast"
    assert f"bench: wrote {path}\n" in result.stderr


def test_wrong_elements_make_the_exit_status_1(monkeypatch):
    """A job whose results are wrong fails, after it has shown the table."""
    ringreduce.init()
    world = Faulty(ringreduce.world(), "allreduce", 0)
    monkeypatch.setattr(ringreduce, "world", lambda: world)
    result = invoke("bench", "allreduce", "-b", "1K", "-e", "1K", *FAST)
    assert result.exit_code == 1
    assert "# Out of bounds values : 4 FAILED" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["bench", "allreduce", "-b", "8Q"], "'8Q': expected a positive size"),
        (["bench", "allreduce", "-b", "0"], "'0': expected a positive size"),
        (["bench", "allreduce", "-b", "1M", "-e", "1K"], "--maxbytes 1024 is smaller than --minbytes 1048576"),
        (["bench", "allreduce", "-f", "1"], "stepfactor"),
        (["bench", "allreduce", "-d", "float,quad"], "'quad' is not one of int8, uint8"),
        (["bench", "allreduce", "-o", "xor"], "'xor' is not one of sum, prod, max, min, avg, all"),
        (["bench", "allreduce", "--vs", "nccl"], "'nccl' is not one of mpi, gloo"),
        (["bench", "allreduce", "--algorithm", "rnig", *FAST], "choose auto, all or one of"),
        (["bench", "broadcast", "-r", "7", *FAST], "there is no rank 7 to be the root; the last is rank 0"),
        (["bench", "allreduce", "-J", "/no/such/folder/x.json"], "cannot be written: No such file"),
        (["bench", "scan"], "'scan' is not one of"),
        (["bench", "all", "--plot", "x.png"], "with all there is --report"),
        (["bench", "allreduce", "--plot", "x.jpg"], "ends in .png, .svg, .pdf"),
        (["bench", "allreduce", "--plot", "nowhere/x.png"], "nowhere/x.png cannot be written: No such file"),
        (["bench", "allreduce", "-N", "0", "--plot", "x.png"], "-N 0 comes to no end"),
        (["bnech"], "No such command 'bnech'"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], complaint: str):
    """What cannot be understood is named in one line on standard error, before anything is measured; status 2."""
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("Error: ")
    assert complaint in result.stderr


def test_explain_is_a_table():
    """A row for each size, whole where no terminal is narrower; what could run is said once, and not in each row."""
    shown = invoke("explain", "-b", "4K", "-e", "1M", "-f", "16").stdout.splitlines()
    assert shown[0] == "allreduce of float in host memory, 1 rank on 1 node"
    assert shown[1].split() == ["size", "algorithm", "transport", "why"]
    rows = [line.split() for line in shown[2:-1]]
    assert [row[:2] for row in rows] == [["4", "KiB"], ["64", "KiB"], ["1", "MiB"]]
    names = ringreduce.testing.run_ranks(1, lambda world: world.algorithms("allreduce"))[0]
    assert all(row[2] in names for row in rows)
    assert shown[-1].startswith("all that can run here: ")
    assert sum("can run here" in line for line in shown) == 1


@pytest.mark.parametrize("command", [[], ["bench"], ["explain"]])
def test_help(command: list[str]):
    """Help exits with 0, fits 120 columns and starts no world."""
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Usage: python -m ringreduce" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 120
    assert not ringreduce.is_initialized()


def test_without_a_command_there_is_help():
    """Nobody did anything wrong who only wants to see what there is."""
    result = invoke()
    assert result.exit_code == 0
    assert result.stdout == invoke("--help").stdout
    assert result.stderr == ""


def test_no_option_is_without_help():
    """Every option of every command says what it does."""
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        for parameter in command.params:
            assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


MACHINE = Machine(
    versions={"ringreduce": "0.1.0", "python": "3.11.7", "numpy": "2.4.6"},
    mpi_library="Open MPI v5.0.11",
    nranks=4,
    placement="4 ranks on 1 node",
    nnodes=1,
    cores=2,
    cpu="A Processor",
    timestamp="2026-01-02T03:04:05+00:00",
)

SETTINGS = Settings("allreduce", 8, 128 << 20, peers=("mpi", "gloo"))


def summary(*us: float) -> Summary:
    return Summary.of_seconds(np.array(us) * 1e-6)


def row(collective: str = "allreduce", nbytes: int = 8, nwrong: int | None = 0) -> Row:
    """Return a row with 6.51 us out of place and 6.47 us in place."""
    kind = COLLECTIVES[collective]
    case = Case.of_nbytes(kind, "float", "sum", 0, 4, nbytes)
    outer = Result(case, "two_shot", "shared", "private", False, summary(6.51), nwrong)
    if not kind.in_place:
        return Row(dataclasses.replace(outer, peers={"mpi": summary(13.02), "gloo": None}), None)
    peers = {"mpi": summary(12.94), "gloo": None}
    inner = Result(case, "two_shot", "shared", "private", True, summary(6.43, 6.47, 6.59), nwrong, 0.425, peers)
    return Row(outer, inner)


def report(*rows: Row) -> Report:
    return Report(SETTINGS, MACHINE, rows, (CaseBound(64 << 20, 5000.0, "negate"),))


def test_one_core_is_one():
    """A rank that is bound to a core runs on 1 core."""
    machine = dataclasses.replace(MACHINE, cores=1)
    assert "# 4 ranks on 1 node, 1 core, A Processor;" in NcclWriter(SETTINGS).head(machine)


def test_nccl_head():
    """The lines before the first row begin with '#' and end with the column heads of nccl-tests, ours to the right."""
    assert NcclWriter(SETTINGS).head(MACHINE).splitlines() == [
        "# ringreduce version 0.1.0, layout of nccl-tests",
        "# Collective test starting: all_reduce_perf",
        "# nRanks 4 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: auto iters: auto agg iters: 1 "
        "validation: 1",
        "# 4 ranks on 1 node, 2 cores, A Processor; Open MPI v5.0.11",
        "# private buffers; time: median over the iterations of the slowest rank's time",
        "# auto: 300 iterations for small sizes, later as many as make 1 GiB, never fewer than 16",
        "# mpi, gloo: blocking calls on private buffers; they and ours take short turns",
        "#",
        "#                                                              out-of-place                       in-place",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw"
        "  #wrong           algorithm   transport   bound    vs mpi   vs gloo",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)"
        "  (GB/s)",
    ]


def test_nccl_row():
    """The columns of nccl-tests stand where its own format puts them, and ours follow."""
    assert NcclWriter(SETTINGS).row(row()) == (
        "           8             2     float     sum      -1     6.51    0.00    0.00       0     6.47    0.00    0.00"
        "       0            two_shot      shared     42%     2.00x       N/A\n"
    )


def test_nccl_row_without_verification():
    """With ``-c 0`` nothing is known about the results."""
    assert NcclWriter(SETTINGS).row(row(nwrong=None)).split()[8::4][:2] == ["N/A", "N/A"]


def test_nccl_row_without_in_place():
    """A collective without an in-place form leaves that half empty; its speed-ups are those out of place."""
    settings = dataclasses.replace(SETTINGS, collective="alltoall", peers=("mpi",))
    assert NcclWriter(settings).row(row("alltoall", 4096)) == (
        "        4096           256     float    none      -1     6.51    0.63    0.47       0      N/A     N/A     N/A"
        "     N/A            two_shot      shared     N/A     2.00x\n"
    )


def test_a_peer_that_was_not_measured_is_not_available():
    """As where no peer can do the job."""
    alone = dataclasses.replace(row("alltoall").best, peers={})
    for layout in (NcclWriter, ShortWriter):
        assert layout(SETTINGS).row(Row(alone, None)).split()[-2:] == ["N/A", "N/A"]


def test_nccl_row_of_a_broadcast_names_the_root():
    """Only a broadcast has a root."""
    settings = dataclasses.replace(SETTINGS, collective="broadcast", peers=())
    assert NcclWriter(settings).row(row("broadcast")).split()[2:5] == ["float", "none", "0"]


def test_nccl_row_with_spread():
    """``-I`` appends the spread of the iterations."""
    settings = dataclasses.replace(SETTINGS, peers=(), per_iteration=True)
    writer = NcclWriter(settings)
    heads = writer.head(MACHINE).splitlines()[-2].split()
    assert heads[-4:] == ["i_min", "i_max", "i_p99", "i_cv%"]
    assert writer.row(row()).split()[-4:] == ["6.43", "6.59", "6.59", "1.0"]


@pytest.mark.parametrize(
    ("us", "text"), [(6.5, "6.50"), (99.99, "99.99"), (150.25, "150.2"), (9999.0, "9999.0"), (79064.3, "79064")]
)
def test_nccl_times_keep_to_their_column(us: float, text: str):
    """Times lose decimals as they grow, so that columns stay in place."""
    made = row()
    outer = dataclasses.replace(made.out_of_place, time=summary(us))
    assert NcclWriter(SETTINGS).row(Row(outer, made.in_place)).split()[5] == text


def test_nccl_foot():
    """The end says whether all was right, the mean bus bandwidth, and the bound."""
    assert NcclWriter(SETTINGS).foot(report(row(nbytes=1 << 20))).splitlines() == [
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 242.354",
        "# Bound                : 5000.0 us for 64 MiB (negate)",
        "# Collective test concluded: all_reduce_perf",
        "#",
    ]


def test_nccl_foot_tells_of_wrong_elements():
    """Wrong elements are summed over the results and named as failure; unverified results are not called right."""
    assert NcclWriter(SETTINGS).foot(report(row(nwrong=2))).splitlines()[0] == "# Out of bounds values : 4 FAILED"
    assert NcclWriter(SETTINGS).foot(report(row(nwrong=None))).splitlines()[0] == "# Out of bounds values : N/A"


def test_csv():
    """One line per result under one head, peers in columns of their own, nothing where nothing is known."""
    writer = CsvWriter(SETTINGS)
    lines = list(csv.DictReader(io.StringIO(writer.head(MACHINE) + writer.row(row()) + writer.foot(report(row())))))
    assert [line["in_place"] for line in lines] == ["False", "True"]
    inner = lines[1]
    assert (inner["collective"], inner["size"], inner["count"], inner["redop"]) == ("allreduce", "8", "2", "sum")
    assert float(inner["time_us_median"]) == pytest.approx(6.47)
    assert float(inner["mpi_median_us"]) == pytest.approx(12.94)
    assert float(inner["mpi_speedup"]) == pytest.approx(2)
    assert (inner["gloo_median_us"], inner["gloo_speedup"]) == ("", "")
    assert (lines[0]["mpi_median_us"], lines[0]["bound_share"]) == ("", "")
    assert None not in inner  # no line is longer than the head


def test_json_writer_is_silent_until_the_end():
    """Standard output is one JSON document."""
    writer = JsonWriter(SETTINGS)
    assert writer.head(MACHINE) + writer.row(row()) == ""
    assert writer.foot(report(row())) == to_json(report(row()))


def test_json():
    """The report has the documented entries, with the types that they are documented to have."""
    made = json.loads(to_json(report(row())))
    assert set(made) == {"config", "bound", "results", "out_of_bounds", "average_bus_bandwidth", "busy"}
    assert made["config"]["versions"]["ringreduce"] == "0.1.0"
    assert {"mpi_library", "nranks", "nnodes", "cores", "cpu", "iterations", "algorithm"} <= set(made["config"])
    entry = {"nbytes": 64 << 20, "time_us": 5000.0, "method": "negate"}
    assert made["bound"] == {**entry, "by_size": [entry]}
    outer, inner = made["results"]
    assert inner == {
        "collective": "allreduce",
        "size": 8,
        "count": 2,
        "type": "float",
        "redop": "sum",
        "root": -1,
        "algorithm": "two_shot",
        "transport": "shared",
        "buffers": "private",
        "in_place": True,
        "iterations": 3,
        "time_us": pytest.approx(
            {
                **{"min": 6.43, "median": 6.47, "mean": 6.496666667, "p90": 6.566, "p95": 6.578, "p99": 6.5876},
                **{"max": 6.59, "deviation": 0.067986927},
            }
        ),
        "alg_bw": pytest.approx(8 / 6470),
        "bus_bw": pytest.approx(12 / 6470),
        "nwrong": 0,
        "bound_share": 0.425,
        "vs": {"mpi": {"median_us": pytest.approx(12.94), "speedup": pytest.approx(2)}, "gloo": None},
    }
    assert (outer["in_place"], outer["vs"], outer["bound_share"]) == (False, {}, None)


def test_the_short_table():
    """It fits 80 columns with a peer, and says what the wide one says of the form in place."""
    settings = dataclasses.replace(SETTINGS, peers=("mpi",))
    text = ShortWriter(settings).head(MACHINE) + ShortWriter(settings).row(row(nbytes=1 << 20))
    assert text.splitlines() == [
        "allreduce, 4 ranks on 1 node, private buffers, in place",
        "      size  time (us)  busbw (GB/s)  #wrong  algorithm          bound   vs mpi",
        "     1 MiB       6.47        243.10       0  two_shot             42%    2.00x",
    ]
    assert ShortWriter(settings).foot(report(row(nwrong=3))) == "wrong elements: 6\n"
    assert ShortWriter(settings).foot(report(row())) == ""
    gathered = dataclasses.replace(settings, collective="alltoall", peers=())
    lines = (ShortWriter(gathered).head(MACHINE) + ShortWriter(gathered).row(row("alltoall"))).splitlines()
    assert lines[2].split()[-2:] == ["two_shot", "N/A"]


# ---- pictures, from results that are known ----

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")

ODD_MACHINE = dataclasses.replace(MACHINE, mpi_library="Open <MPI> v5.0.11")

USE = re.compile(r"(?<=url\(#)[^)]+|(?<=^#)[^ ]+$")  # of what an id stands for

SIZES = [8, 1 << 10, 1 << 20]


def point(nbytes: int, us: float, collective: str = "allreduce", **more: Any) -> Row:
    """Return a row with our time, twice that for MPI, and none for Gloo."""
    kind = COLLECTIVES[collective]
    case = Case.of_nbytes(kind, more.pop("type_name", "float"), "sum" if kind.reduces else None, 0, 4, nbytes)
    peers = {"mpi": summary(us * more.pop("slower", 2.0)), "gloo": None}
    name = more.pop("algorithm", "two_shot")
    result = Result(case, name, "shared", "private", kind.in_place, summary(us), 0, None, peers)
    return Row(result, result if kind.in_place else None)


def drawn(*rows: Row, **settings: Any) -> Report:
    name = rows[0].best.case.collective.name
    bounds = (CaseBound(8, 1.0, "negate"), CaseBound(1 << 20, 90.0, "negate")) if name == "allreduce" else ()
    return Report(Settings(name, 8, 1 << 20, peers=("mpi", "gloo"), **settings), ODD_MACHINE, rows, bounds)


def test_curves_are_ours_the_peers_and_the_bound():
    """By size; a peer that cannot do anything has none."""
    found = curves(drawn(*(point(size, 5.0 + size / 1e4) for size in SIZES)))
    assert list(found) == ["ringreduce", "mpi", "bound"]
    assert found["ringreduce"] == pytest.approx({size: 5.0 + size / 1e4 for size in SIZES})
    assert found["mpi"] == pytest.approx({size: 10.0 + size / 5e3 for size in SIZES})
    assert found["bound"] == {8: 1.0, 1 << 20: 90.0}


def test_several_types_or_algorithms_have_a_curve_each():
    """Named by what tells them apart; peers, which belong to none of them, are left out."""
    of_types = curves(drawn(point(8, 5.0), point(8, 6.0, type_name="double")))
    assert list(of_types) == ["float", "double", "bound"]
    of_algorithms = curves(drawn(point(8, 5.0), point(8, 6.0, algorithm="ring"), algorithm="all"))
    assert list(of_algorithms) == ["two_shot", "ring", "bound"]
    assert list(curves(drawn(point(8, 5.0), point(16, 6.0, algorithm="ring")))) == ["ringreduce", "mpi", "bound"]


@needs_matplotlib
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_is_written(tmp_path: Path, suffix: str):
    """In the format that its name asks for, and something is on it."""
    path = tmp_path / f"curves.{suffix}"
    write(figure(drawn(*(point(size, 5.0 + size / 1e4) for size in SIZES))), str(path))
    content = path.read_bytes()
    if suffix == "png":
        image = pytest.importorskip("PIL.Image").open(path)
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10
    elif suffix == "svg":
        text = "".join(ElementTree.fromstring(content).itertext())
        assert "ringreduce" in content.decode() or "ringreduce" in text
    else:
        assert content.startswith(b"%PDF")


@needs_matplotlib
def test_the_page_holds_everything_and_needs_nothing():
    """A section for each collective with its picture and figures, where others were faster, and no id twice."""
    reports = [
        drawn(*(point(size, 5.0) for size in SIZES)),
        drawn(point(1 << 10, 10.0, "alltoall", slower=0.75)),
        drawn(point(8, 4.0, "latency")),
    ]
    text = page(reports)
    assert "http://" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert "<script" not in text
    tree = ElementTree.fromstring(text.partition("\n")[2].replace('<meta charset="utf-8">', ""))
    assert [each.text for each in tree.iter("h2")] == ["Where others were faster", "allreduce", "alltoall", "latency"]
    assert [each.text for each in tree.iter("li")] == ["alltoall of 1 KiB: mpi took 0.75 of the time"]
    ids = [each.get("id") for each in tree.iter() if each.get("id")]
    assert len(ids) == len(set(ids))
    used = {found for each in tree.iter() for value in each.attrib.values() for found in USE.findall(value)}
    assert used
    assert used <= set(ids)
    assert "Open <MPI> v5.0.11; ringreduce 0.1.0" in " ".join(each.text or "" for each in tree.iter("p"))
    faster = page([dataclasses.replace(reports[0])])
    assert "<li>nowhere</li>" in faster


@needs_matplotlib
@pytest.mark.parametrize(
    "change",
    [{"busy": "other processes took 1.50 cores"}, {"bounds": (CaseBound(8, 9.0, "negate"), CaseBound(16, 5.0, "add"))}],
    ids=["busy", "falls"],
)
def test_of_a_busy_machine_there_is_no_bound_and_no_verdict(change: dict[str, Any]):
    """Nor where what should bound the times falls with size; without noise, others may still have been faster."""
    report = dataclasses.replace(drawn(*(point(size, 5.0) for size in SIZES)), **change)
    assert "bound" not in curves(report)
    text = page([report])
    assert ">bound<" not in text
    assert ("of allreduce nothing can be said: other programs ran meanwhile" in text) == ("busy" in change)
    assert ("<li>nowhere</li>" in text) == ("bounds" in change)
