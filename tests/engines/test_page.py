"""The programs of docs/engines.md: Ray, Spark, Dask and mpirun start ranks that train to the same accuracy."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, titled

pytestmark = pytest.mark.limit(700)


def accuracy(*command: str, folder: Path) -> str:
    """Run a program in a folder, and return the accuracy that it prints."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(r"([\d.]+)% of 1000 other digits are recognised", done.stdout)
    return str(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page."""
    folder = tmp_path_factory.mktemp("page")
    for name, source in titled(ROOT / "docs" / "engines.md").items():
        (folder / name).write_text(source)
    return folder


@pytest.fixture(scope="module")
def under_mpirun(folder: Path) -> str:
    """The accuracy of ranks that mpirun has started."""
    command = [sys.executable, "-m", "ringreduce", "run", "-np", "2", sys.executable, "digits.py"]
    found = accuracy(*command, folder=folder)
    assert float(found) > 95
    return found


@pytest.mark.parametrize(
    ("program", "library"),
    [
        ("ray_digits.py", "ray"),
        pytest.param("spark_digits.py", "pyspark", marks=pytest.mark.thorough),
        pytest.param("dask_digits.py", "distributed", marks=pytest.mark.thorough),
    ],
)
def test_the_accuracy_is_that_under_mpirun(program: str, library: str, folder: Path, under_mpirun: str) -> None:
    pytest.importorskip(library, reason="`scripts/install engines` makes the environment that has it")
    if library == "pyspark" and shutil.which("java") is None:
        pytest.skip("there is no Java, as Debian's openjdk-17-jre-headless")
    assert accuracy(sys.executable, program, folder=folder) == under_mpirun
