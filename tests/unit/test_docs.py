"""Documentation that is made from the code is what the code makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ringreduce.algorithms import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]


def test_the_index_of_algorithms_is_up_to_date() -> None:
    """docs/algorithms.md is what scripts/algorithm_docs writes; run it after a change of an algorithm."""
    command = [sys.executable, str(ROOT / "scripts" / "algorithm_docs"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert checked.returncode == 0, f"run scripts/algorithm_docs:\n{checked.stdout}{checked.stderr}"


def test_advice_is_for_packages_that_an_index_has() -> None:
    """This package is installed from a checkout, so nobody is told to install it, or its extras, by name."""
    paths = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "ringreduce").rglob("*.py")]
    assert [str(path) for path in paths if "ringreduce[" in path.read_text(encoding="utf-8")] == []


def test_the_index_of_algorithms_is_complete() -> None:
    """Every algorithm has a row in the table of its collective, which says what it does and when it wins."""
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for algorithm in ALGORITHMS:
        _, _, section = page.partition(f"\n## {algorithm.collective.value}\n")
        rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith(f"| [{algorithm.name}]")]
        assert len(rows) == 1, algorithm
        assert "; wins " in algorithm.summary
