"""The examples do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import look

EXAMPLES = Path(__file__).parents[2] / "examples"
TRANSFORMER = [str(EXAMPLES / "char_transformer.py"), "--batch-size=12", "--every=1", "--sample=20"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_mnist_learns(run_job, tmp_path: Path, ranks: int):
    """The CNN reaches 96 % on digits it has not seen, all ranks end with the same weights, and rank 0 draws it."""
    pytest.importorskip("torch")
    picture = tmp_path / "curves.svg"
    job = run_job(ranks, str(EXAMPLES / "mnist.py"), "--plot", str(picture), limit_s=55)
    assert job.returncode == 0, job.stderr
    accuracy = re.search(r"test accuracy: ([\d.]+)% of 1000", job.stdout)
    assert accuracy is not None, job.stdout
    assert float(accuracy[1]) >= 96
    assert f"weights: bitwise identical on {ranks} rank{'s' * (ranks != 1)}\n" in job.stdout
    assert look(picture) == {}


def losses_of(output: str) -> list[float]:
    return [float(each) for each in re.findall(r"training loss ([\d.]+)", output)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of the transformer in one process, without any parallelism: it learns more than frequencies."""
    pytest.importorskip("torch")
    command = [sys.executable, *TRANSFORMER, "--parallel=none", "--steps=40"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    learned = re.search(r"never trained on: ([\d.]+).*\n.*characters alone: ([\d.]+)", done.stdout)
    assert learned is not None, done.stdout
    assert float(learned[1]) < float(learned[2]) - 0.5
    return losses_of(done.stdout)


@pytest.mark.parametrize(("kind", "ranks"), [("data", 3), ("fsdp", 2), ("tensor", 2), ("pipeline", 2), ("mesh", 4)])
def test_kinds_of_parallelism_compute_the_same(run_job, alone: list[float], kind: str, ranks: int):
    """The transformer has the losses of one process, whatever is cut between the ranks, and all hold equal weights."""
    job = run_job(ranks, *TRANSFORMER, f"--parallel={kind}", "--steps=8", limit_s=55)
    assert job.returncode == 0, job.stderr
    assert losses_of(job.stdout) == pytest.approx(alone[:8], abs=3e-4)
    assert "weights: bitwise identical" in job.stdout
