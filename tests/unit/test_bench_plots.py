"""Pictures and the page of ``bench``: what they show, from results that are known."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from ringreduce.bench.cases import COLLECTIVES, Case
from ringreduce.bench.measure import Summary
from ringreduce.bench.plots import curves, page, require_matplotlib, save
from ringreduce.bench.results import Bound, Machine, Report, Result, Row, Settings
from ringreduce.common.errors import ConfigError

pytest.importorskip("matplotlib")

MACHINE = Machine(
    versions={"ringreduce": "0.1.0", "numpy": "2.4.6"},
    mpi_library="Open <MPI> v5.0.11",
    nranks=4,
    placement="4 ranks on 1 node",
    nnodes=1,
    cores=2,
    cpu="A Processor",
    timestamp="2026-01-02T03:04:05+00:00",
)
USE = re.compile(r"(?<=url\(#)[^)]+|(?<=^#)[^ ]+$")  # of what an id stands for
SIZES = [8, 1 << 10, 1 << 20]


def row(nbytes: int, us: float, collective: str = "allreduce", **more: Any) -> Row:
    """Return a row with our time, twice that for MPI, and none for Gloo."""
    kind = COLLECTIVES[collective]
    case = Case.of_nbytes(kind, more.pop("type_name", "float"), "sum" if kind.reduces else None, 0, 4, nbytes)
    time = Summary.of_seconds(np.array([us]) * 1e-6)
    peers = {"mpi": Summary.of_seconds(np.array([us * more.pop("slower", 2.0)]) * 1e-6), "gloo": None}
    result = Result(case, more.pop("algorithm", "two_shot"), "shared", "private", kind.in_place, time, 0, None, peers)
    return Row(result, result if kind.in_place else None)


def report(*rows: Row, **settings: Any) -> Report:
    name = rows[0].best.case.collective.name
    bounds = (Bound(8, 1.0, "negate"), Bound(1 << 20, 90.0, "negate")) if name == "allreduce" else ()
    return Report(Settings(name, 8, 1 << 20, peers=("mpi", "gloo"), **settings), MACHINE, rows, bounds)


def test_curves_are_ours_the_peers_and_the_bound():
    """By size; a peer that cannot do anything has none."""
    found = curves(report(*(row(size, 5.0 + size / 1e4) for size in SIZES)))
    assert list(found) == ["ringreduce", "mpi", "bound"]
    assert found["ringreduce"] == pytest.approx({size: 5.0 + size / 1e4 for size in SIZES})
    assert found["mpi"] == pytest.approx({size: 10.0 + size / 5e3 for size in SIZES})
    assert found["bound"] == {8: 1.0, 1 << 20: 90.0}


def test_several_types_or_algorithms_have_a_curve_each():
    """Named by what tells them apart; peers and bound, which belong to none of them, are left out."""
    of_types = curves(report(row(8, 5.0), row(8, 6.0, type_name="double")))
    assert list(of_types) == ["float", "double"]
    of_algorithms = curves(report(row(8, 5.0), row(8, 6.0, algorithm="ring"), algorithm="all"))
    assert list(of_algorithms) == ["two_shot", "ring"]
    assert list(curves(report(row(8, 5.0), row(16, 6.0, algorithm="ring")))) == ["ringreduce", "mpi", "bound"]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_is_written(tmp_path: Path, suffix: str):
    """In the format that its name asks for, and something is on it."""
    path = tmp_path / f"curves.{suffix}"
    save(report(*(row(size, 5.0 + size / 1e4) for size in SIZES)), str(path))
    content = path.read_bytes()
    if suffix == "png":
        image = pytest.importorskip("PIL.Image").open(path)
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10
    elif suffix == "svg":
        text = "".join(ElementTree.fromstring(content).itertext())
        assert "ringreduce" in content.decode() or "ringreduce" in text
    else:
        assert content.startswith(b"%PDF")


def test_the_page_holds_everything_and_needs_nothing():
    """A section for each collective with its picture and figures, where others were faster, and no id twice."""
    reports = [
        report(*(row(size, 5.0) for size in SIZES)),
        report(row(1 << 10, 10.0, "alltoall", slower=0.75)),
        report(row(8, 4.0, "latency")),
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


def test_the_name_of_a_picture_says_its_kind():
    """Before anything is measured."""
    with pytest.raises(ConfigError, match=r"ends in \.png, \.svg, \.pdf"):
        require_matplotlib("curves.jpg")
