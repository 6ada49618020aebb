"""What is logged is seen with the rank, once, and not where the program logs by itself."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator

import pytest

from ringreduce.common import logs

LOG = logging.getLogger("ringreduce.somewhere")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """A function that returns the lines on standard error, in a process whose root logger has no handlers."""
    stream = io.StringIO()
    package, root = logging.getLogger("ringreduce"), logging.getLogger()
    level, handlers = package.level, root.handlers[:]
    monkeypatch.setattr(package, "handlers", [])

    def lines(*records: Callable[[], None]) -> list[str]:
        root.handlers.clear()  # not in the set-up of the test: pytest has handlers of its own for each phase
        monkeypatch.setattr("sys.stderr", stream)
        for each in records:
            each()
        root.handlers[:] = handlers
        return stream.getvalue().splitlines()

    yield lines
    package.setLevel(level)


def test_lines_begin_with_the_rank(written: Callable[..., list[str]]) -> None:
    """Warnings say so; what was asked for at the level of information is plain."""
    logs.set_up("INFO", "rank 1")
    assert written(
        lambda: LOG.info("four ranks"), lambda: LOG.warning("%d of them late", 2), lambda: LOG.debug("not asked for")
    ) == ["ringreduce: rank 1: four ranks", "ringreduce: rank 1: warning: 2 of them late"]


def test_setting_up_again_takes_the_place(written: Callable[..., list[str]]) -> None:
    """A process that starts world after world writes each line once, with its present rank."""
    for number in range(3):
        logs.set_up(None, f"rank {number}" if number else "")
    assert written(lambda: LOG.error("oh")) == ["ringreduce: rank 2: error: oh"]


def test_programs_that_log_by_themselves_are_not_talked_over(
    written: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Where there are handlers at the root, they see the records, and nobody else writes them."""
    logs.set_up(None, "rank 0")
    LOG.warning("once")
    assert (written(), caplog.messages) == ([], ["once"])


def test_a_handler_of_the_program_on_this_logger_takes_the_place_as_well(written: Callable[..., list[str]]) -> None:
    """Each record is written once, by the program's own handler."""
    logs.set_up(None, "rank 0")
    seen = io.StringIO()
    logging.getLogger("ringreduce").addHandler(logging.StreamHandler(seen))
    assert (written(lambda: LOG.warning("once")), seen.getvalue()) == ([], "once\n")
