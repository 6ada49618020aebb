"""What an environment made by `scripts/install` offers to programs outside of the repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_type_checkers_find_the_package(tmp_path: Path):
    """A program anywhere is checked against the types of this package, installed as it is here."""
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text("import ringreduce\n")
    # Whether the module is found is all that is asked: what it holds would take half a minute.
    command = [sys.executable, "-m", "mypy", "--follow-imports=skip", "--cache-dir=/dev/null", program]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False).stdout
    assert said == "Success: no issues found in 1 source file\n"
