"""What ranks of a job read."""

from __future__ import annotations

import io

import click
import pytest

from ringreduce.cli import main
from ringreduce.common.errors import ConfigError
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.stdin import is_passed_on, reader, with_program


def test_rank_0_of_another_host_reads_nothing() -> None:
    """What this command reads does not reach it."""
    with pytest.raises(ConfigError, match="rank 0 runs on another host"):
        reader(rank_0_is_here=False)


def test_the_word_of_mpirun_for_it_counts() -> None:
    """Where users give it."""
    assert is_passed_on(LaunchSpec(program=("cat",), more=("--stdin", "1")))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python", "python -c TEXT"),
        ("python -u -W ignore - a -", "python -u -W ignore -c TEXT a -"),
        ("python -u -- - a", "python -u -c TEXT a"),
        ("python train.py -", "python train.py -"),
        ("cat -", "cat -"),
    ],
)
def test_a_program_is_a_text_of_the_command_line(line: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of standard input; arguments stay, and what another program reads is not read."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"TEXT")))
    assert " ".join(with_program(LaunchSpec(program=tuple(line.split()))).program) == expected


@pytest.mark.parametrize(("text", "complaint"), [(b"#" * 131_072, "131072 bytes"), (b"'\xff'", "is not UTF-8")])
def test_a_program_that_no_command_line_holds_is_refused(
    text: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to do instead."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    with pytest.raises(ConfigError, match=f"{complaint}.*put it in a file"):
        with_program(LaunchSpec(program=("python",)))


@pytest.mark.parametrize("grace", ["-1", "nan", "inf", "soon"])
def test_a_grace_is_a_time(grace: str) -> None:
    """In seconds."""
    with pytest.raises(click.UsageError) as error:
        main(["run", "--grace", grace, "true"], standalone_mode=False)
    assert f"Invalid value for '--grace': '{grace}': expected a" in error.value.format_message()
