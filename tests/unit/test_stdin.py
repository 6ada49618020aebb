"""What ranks of a job read."""

from __future__ import annotations

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.stdin import StandardInput


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
