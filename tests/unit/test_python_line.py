"""Which program Python runs by a command line: asked of Python itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringreduce.launcher.python_line import ProgramSource, PythonLine, script_of

#: Says as what it runs, under which name, and its arguments.
PROGRAM = """
import json, sys
first, *arguments = sys.argv
if __spec__ is not None and __spec__.name != "__main__":
    print(json.dumps(["MODULE", __spec__.name, arguments]))
elif first in ("", "-"):
    print(json.dumps(["INPUT", "", arguments]))
elif first != "-c":
    print(json.dumps(["SCRIPT", first, arguments]))
"""
TEXT = "import json,sys;print(json.dumps(['TEXT','',sys.argv[1:]]))"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["-"],
        ["-", "x.py"],
        ["-u", "-", "--lr", "0.1"],
        ["-W", "ignore", "-X", "dev", "-"],
        ["x.py"],
        ["x.py", "-m", "x"],
        ["-u", "x.py", "-"],
        ["-W", "ignore", "x.py"],
        ["-Wignore", "x.py", "a"],
        ["-X", "importtime", "x.py"],
        ["-Ximporttime", "x.py"],
        ["-uW", "ignore", "x.py"],
        ["-uWignore", "-Bs", "x.py"],
        ["--check-hash-based-pycs", "default", "x.py"],
        ["--check-hash-based-pycs", "never", "-W", "ignore", "-m", "x", "-W"],
        ["-m", "x", "x.py"],
        ["-mx", "-c"],
        ["-Bmx"],
        ["-c", TEXT, "x.py", "-"],
        ["-uc", TEXT, "-m"],
        [f"-c{TEXT}", "x.py"],
        ["--", "x.py", "--"],
        ["-u", "--"],
        ["--version"],
        ["-V", "x.py"],
        ["-uV", "x.py"],
        ["-h"],
        ["--help", "x.py"],
    ],
    ids=" ".join,
)
def test_options_are_read_as_python_does(words: list[str], tmp_path: Path) -> None:
    """What a command line is found to run is what Python runs by it."""
    (tmp_path / "x.py").write_text(PROGRAM)
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=tmp_path, input=PROGRAM, capture_output=True, text=True, timeout=60, check=True)
    line = PythonLine.of(["python3", *words])
    name = "" if line.source is ProgramSource.TEXT else line.name
    found = None if line.source is ProgramSource.NOTHING else [line.source.name, name, [*line.arguments]]
    is_said = done.stdout.startswith("[")
    assert found == (json.loads(done.stdout) if is_said else None)


@pytest.mark.parametrize("name", ["python", "/usr/bin/python3.12", "python3.13t", "pypy3"])
def test_names_of_python(name: str) -> None:
    """With a version, or a folder; standard input has two names."""
    assert PythonLine.of([name, "x.py"]) == PythonLine(ProgramSource.SCRIPT, "x.py")
    assert PythonLine.of([name, "/dev/stdin"]) == PythonLine(ProgramSource.INPUT)


@pytest.mark.parametrize("words", [[], ["pythonic", "-"], ["cat", "-"], ["env", "python"]])
def test_other_programs(words: list[str]) -> None:
    """Are not Python, and what they do with their words is their own business."""
    assert PythonLine.of(words) is None


def test_scripts() -> None:
    """A module may run one; of another program it is the first word that is no option."""
    assert script_of(["python", "-W", "ignore", "x.py"]) == "x.py"
    assert script_of(["python", "-m", "cProfile", "-o", "out", "x.py", "y.py"]) == "x.py"
    assert script_of(["bash", "-e", "x.sh", "y"]) == "x.sh"
    for line in ("python", "python -c x.py", "python -m x y", "python --version", "./x.sh"):
        assert script_of(line.split()) == "", line
