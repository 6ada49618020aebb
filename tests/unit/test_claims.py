"""docs/benchmarks.md states what benchmarks/claims.toml lists, and the list is measured as it says."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import claims
import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "benchmarks.md"
RUNS = claims.load()
CLAIMS = [claim for run in RUNS.values() for claim in run.claims]


def example(measure="speedup 1M mpi", figure="≥ 2x"):
    return claims.Claim(row="1 MiB", column="over MPI", measure=measure, figure=figure)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.row}, {claim.column}")
def test_the_document_states_the_figure(claim):
    """The table cell that a claim names holds its figure, word for word, and the figure is a limit."""
    assert claims.stated(DOCUMENT.read_text(encoding="utf-8"), claim.row, claim.column) == claim.figure
    assert claims.FIGURE.fullmatch(claim.figure)


def test_each_cell_has_one_figure():
    """Nothing is claimed twice, with another limit."""
    assert len({(claim.row, claim.column) for claim in CLAIMS}) == len(CLAIMS)


def test_a_claim_holds_up_to_its_limit():
    """Limits belong to what is claimed."""
    least, most, share = (example(figure=figure) for figure in ("≥ 2x", "≤ 2 us", "≥ 90 %"))
    assert [least.holds(value) for value in (1.9, 2.0, 2.1)] == [False, True, True]
    assert [most.holds(value) for value in (1.9, 2.0, 2.1)] == [True, True, False]
    assert [share.holds(value) for value in (0.89, 0.9, 0.91)] == [False, True, True]
    assert not any(each.holds(math.nan) for each in (least, most, share))


def test_shares_of_the_bound_stand_beside_figures():
    """Those of the call in place, with the same report; figures that are of no call have none."""
    call = {"size": 1 << 20, "type": "float", "time_us": {"median": 10.0}, "vs": {"mpi": {"speedup": 3.0}}}
    results = [{**call, "in_place": False, "bound_share": None}, {**call, "in_place": True, "bound_share": 0.425}]
    (verdict,) = claims.judge([example()], {"results": results})
    assert (verdict.value, verdict.share) == (3.0, 0.425)
    assert claims.line(verdict).split() == ["speedup", "1M", "mpi", "≥", "2x", "3.00", "42%", "holds"]
    ratio = example(measure="ratio a/b")
    assert claims.judge([ratio], {"ratios": {"a/b": 4.0}}) == [claims.Verdict(ratio, 4.0)]


def test_a_run_that_fails_refutes_its_claims():
    """No report, no claim; the table says why."""
    (verdict,) = claims.judge([example()], "exit status 124 (time limit)")
    assert not verdict.holds
    assert "time limit" in claims.line(verdict)
    assert "DOES NOT HOLD" in claims.line(verdict)


def test_a_run_without_its_environment_is_skipped(monkeypatch, tmp_path, capsys):
    """A line says how to make the environment; nothing is measured, so nothing is refuted."""
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["claims", "intel-private-2"])
    assert claims.main() == 0
    skipped = "# intel-private-2: skipped, as scripts/install intelmpi has not made .venv-intelmpi"
    assert capsys.readouterr().out.splitlines()[1:] == [skipped, "0 of 0 claims hold"]


def test_markdown_states_what_is_listed():
    """The tables that are printed for the document pass the check of the document."""
    document = claims.markdown(CLAIMS)
    assert [claims.stated(document, claim.row, claim.column) for claim in CLAIMS] == [claim.figure for claim in CLAIMS]
