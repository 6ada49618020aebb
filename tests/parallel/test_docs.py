"""The examples of the documentation, between ranks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import ringreduce as rr

pytest.importorskip("torch", "2.7")
from documents import EXAMPLES, name_of, run_examples


@pytest.mark.sizes(2)
@pytest.mark.parametrize("page", EXAMPLES, ids=name_of)
def test_examples_run(
    page: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The Python of a page runs from top to bottom on all ranks, in one folder, and warns of nothing."""
    rr.init()
    monkeypatch.chdir(rr.broadcast_object(str(tmp_path_factory.mktemp("page"))))
    run_examples(page)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []
