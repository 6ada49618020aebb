"""The table of what torch.distributed does on CPUs: the column of ringreduce is right."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import launching
from launching import needs

needs("torch")

ROOT = Path(__file__).parents[2]


def test_our_column_is_right() -> None:
    """Each row that ringreduce offers equals one process, and docs/torch_distributed.md has the rows of the script."""
    job = launching.run(sys.executable, ROOT / "benchmarks" / "torch_cpu.py", "--backend", "ringreduce").well()
    assert "ResourceWarning" not in job.stderr
    rows = re.findall(r"^\| (.*) \| .* \| (right|no) \|$", job.stdout, re.MULTILINE)
    assert len(rows) == 14
    page = (ROOT / "docs" / "torch_distributed.md").read_text(encoding="utf-8")
    assert [row for row, result in rows if not re.search(rf"^\| {re.escape(row)} \|.* {result} \|$", page, re.M)] == []
