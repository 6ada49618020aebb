"""The examples of the documentation, between ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from documents import EXAMPLES, lacking, run_example, warnings_of

import ringreduce as rr


@pytest.mark.sizes(2)
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")  # of Keras
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`:UserWarning")  # of Lightning
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # as well
@pytest.mark.parametrize(("page", "name", "source"), EXAMPLES)
def test_examples_run(
    page: Path,
    name: str,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A program of a page runs from top to bottom on all ranks, in one folder, and warns of nothing."""
    if lacking(source):
        pytest.skip(f"it needs {', '.join(lacking(source))}")
    rr.init()
    monkeypatch.chdir(rr.broadcast_object(str(tmp_path_factory.mktemp("page"))))
    run_example(page, name, source)
    assert warnings_of(caplog.records) == []
