"""What ranks of a job read: which command lines take their program from standard input."""

from __future__ import annotations

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.stdin import StandardInput, reads_program


@pytest.mark.parametrize(
    ("line", "reads"),
    [
        ("python", True),
        ("/usr/bin/python3.12 -u - --lr 0.1", True),
        ("python3.13t -W error -X dev -", True),
        ("python /dev/stdin", True),
        ("python train.py -", False),
        ("python -m train -", False),
        ("python -uc print() -", False),
        ("python --version", False),
        ("pythonic -", False),
        ("cat -", False),
    ],
)
def test_which_programs_come_by_standard_input(line: str, reads: bool) -> None:
    """Those that Python reads there; a script that takes `-` is given."""
    assert reads_program(tuple(line.split())) is reads


def test_rank_0_of_another_host_reads_nothing() -> None:
    """What this command reads does not reach it."""
    with pytest.raises(ConfigError, match="rank 0 runs on another host"):
        StandardInput.take(LaunchSpec(program=("cat",), stdin=True), rank_0_is_here=False)
    assert StandardInput.take(LaunchSpec(program=("cat",)), rank_0_is_here=False) == StandardInput(passes=False)


def test_the_word_of_mpirun_for_it_counts() -> None:
    """Where users give it."""
    spec = LaunchSpec(program=("cat",), more=("--stdin", "1"))
    assert StandardInput.take(spec, rank_0_is_here=True) == StandardInput()


@pytest.mark.parametrize("grace", [-1.0, float("nan"), float("inf")])
def test_a_grace_is_a_time(grace: float) -> None:
    """In seconds."""
    with pytest.raises(ConfigError, match="--grace"):
        LaunchSpec(program=("true",), grace_s=grace).require_sense()
