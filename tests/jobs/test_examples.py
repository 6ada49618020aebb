"""The examples do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("ranks", [1, 2])
def test_mnist_learns(run_job, ranks: int):
    """The CNN reaches 96 % on digits it has not seen, and all ranks end with the same weights."""
    pytest.importorskip("torch")
    job = run_job(ranks, str(EXAMPLES / "mnist.py"), limit_s=55)
    assert job.returncode == 0, job.stderr
    accuracy = re.search(r"test accuracy: ([\d.]+)% of 1000", job.stdout)
    assert accuracy is not None, job.stdout
    assert float(accuracy[1]) >= 96
    assert f"weights: bitwise identical on {ranks} rank{'s' * (ranks != 1)}\n" in job.stdout
