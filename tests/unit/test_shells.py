"""The programs of the shells between mpirun and a rank, as arguments of a command line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ringreduce.launcher import shells

PROGRAMS = sorted(Path(shells.__file__).parent.glob("sh/*.sh"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_is_one_line_that_means_the_same(path: Path) -> None:
    """Bash writes the line and the file, which has comments, in the same words."""
    command, option, line, name = shells.shell(path.stem)
    assert (command, option, name) == ("sh", "-c", f"ringreduce-{path.stem}")
    assert "\n" not in line
    assert "#" not in line

    def words(program: str) -> str:
        text = f"all() {{\n{program}\n}}\ndeclare -f all"
        return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, timeout=30).stdout

    assert words(line) == words(path.read_text(encoding="ascii"))


def test_there_are_programs() -> None:
    """For all that may stand between mpirun and a rank."""
    assert [path.stem for path in PROGRAMS] == ["horovod", "host", "log", "process", "rank", "torch"]
