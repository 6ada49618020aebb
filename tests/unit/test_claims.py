"""The documents state what benchmarks/claims.toml lists, and the list is measured as it says."""

from __future__ import annotations

import re
from pathlib import Path

import claims
import pytest

ROOT = Path(__file__).parents[2]


RUNS, CLAIMS = claims.load()


def example(**changes):
    fields = {
        "id": "x",
        "run": "r",
        "measure": "speedup",
        "figure": "≥ 2x",
        "stated_in": "docs/speed.md",
        "row": "1 MiB",
        "column": "over MPI",
        "at_least": 2.0,
        "size": 1 << 20,
        "peer": "mpi",
    }
    return claims.Claim(**{**fields, **changes})


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_documents_state_the_figure(claim):
    """The table cell that a claim names holds its figure, word for word."""
    document = (ROOT / claim.stated_in).read_text(encoding="utf-8")
    assert claims.stated(document, claim.row, claim.column) == claim.figure


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_figures_are_their_limits(claim):
    """The figure that readers see is the limit that is measured, in the same direction, and its run exists."""
    sign, number, unit = re.fullmatch(r"([≥≤]) ([\d.]+) ?(x|%|us)", claim.figure).groups()
    limit = claim.at_least if sign == "≥" else claim.at_most
    assert limit == pytest.approx(float(number) / (100 if unit == "%" else 1))
    assert None in (claim.at_least, claim.at_most)
    assert claim.run in RUNS


def test_ids_are_unique():
    """Every claim can be named."""
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)


def test_a_claim_holds_up_to_its_limit():
    """Limits belong to what is claimed."""
    least, most = example(), example(at_least=None, at_most=2.0)
    assert [least.holds(value) for value in (1.9, 2.0, 2.1)] == [False, True, True]
    assert [most.holds(value) for value in (1.9, 2.0, 2.1)] == [True, True, False]


def test_shares_of_the_bound_stand_beside_figures():
    """Those of the call in place, with the same report; figures that are of no call have none."""
    call = {"size": 1 << 20, "type": "float", "time_us": {"median": 10.0}, "vs": {"mpi": {"speedup": 3.0}}}
    results = [{**call, "in_place": False, "bound_share": None}, {**call, "in_place": True, "bound_share": 0.425}]
    (verdict,) = claims.judge([example()], {"results": results})
    assert (verdict.value, verdict.share) == (3.0, 0.425)
    assert claims.line(verdict).split() == ["x", "≥", "2x", "3.00", "42%", "holds"]
    ratio = example(measure="ratio", size=None, peer="a/b")
    assert claims.judge([ratio], {"ratios": {"a/b": 4.0}}) == [claims.Verdict(ratio, 4.0)]


def test_a_run_that_fails_refutes_its_claims():
    """No report, no claim; the table says why."""
    (verdict,) = claims.judge([example()], "exit status 124 (time limit)")
    assert not verdict.holds
    assert "time limit" in claims.line(verdict)
    assert "DOES NOT HOLD" in claims.line(verdict)


def test_markdown_states_what_is_listed():
    """The tables that are printed for the documents pass the check of the documents."""
    document = claims.markdown(CLAIMS)
    assert [claims.stated(document, claim.row, claim.column) for claim in CLAIMS] == [claim.figure for claim in CLAIMS]
