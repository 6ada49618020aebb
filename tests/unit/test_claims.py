"""The documents state what benchmarks/claims.toml lists, and the list is measured as it says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _load_script():
    """Import benchmarks/claims.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("claims", ROOT / "benchmarks" / "claims.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


claims = _load_script()
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


REPORT = {
    "ratios": {"ringreduce/gloo": 0.6},
    "results": [
        {
            "in_place": in_place,
            "size": 1 << 20,
            "type": name,
            "bound_share": 0.75,
            "time_us": {"median": time},
            "vs": vs,
        }
        for name, time in (("float", 20.0), ("bfloat16", 30.0))
        for in_place, vs in ((False, {}), (True, {"mpi": {"median_us": 50.0, "speedup": 2.5}}))
    ],
}


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


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"measure": "speedup"}, 2.5),
        ({"measure": "bound_share"}, 0.75),
        ({"measure": "excess_us"}, -30.0),
        ({"measure": "type_ratio", "type": "bfloat16"}, 1.5),
        ({"measure": "step_ratio", "peer": "gloo"}, 0.6),
    ],
)
def test_values_come_from_the_report(changes, value):
    """Each kind of measure takes its figure from the in-place result of its size, or from the training report."""
    assert example(**changes).value(REPORT) == pytest.approx(value)


def test_a_claim_holds_up_to_its_limit():
    """Limits belong to what is claimed."""
    least, most = example(), example(at_least=None, at_most=2.0)
    assert [least.holds(value) for value in (1.9, 2.0, 2.1)] == [False, True, True]
    assert [most.holds(value) for value in (1.9, 2.0, 2.1)] == [True, True, False]


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


def test_stated_finds_cells_by_row_and_column():
    """Only a cell of the right row under the right head of the same table counts."""
    document = "| | a | b |\n|--|--|--|\n| x | 1 | 2 |\n\nprose\n\n| | c |\n|--|--|\n| x | 3 |\n"
    assert claims.stated(document, "x", "b") == "2"
    assert claims.stated(document, "x", "c") == "3"
    assert claims.stated(document, "y", "b") is None
    assert claims.stated(document, "x", "d") is None
