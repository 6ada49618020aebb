"""Slots that tasks of an engine hold, without an engine."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringreduce.engines.slots import hold, slots
from ringreduce.launcher.connection import listening


def test_a_slot_runs_commands_until_its_job_ends() -> None:
    """Its task then ends well."""
    with ThreadPoolExecutor(1) as pool:
        with slots("127.0.0.1") as held:
            task = pool.submit(hold, held.ticket, "a")
            held.wait(["a"], 30.0, lambda: None)
            assert held.start("a", "exit 3") == 3
        task.result(30.0)
    assert held.lost == []


def test_a_task_whose_connection_is_lost_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the engine runs it again; and so does one whose driver is not there."""

    def breaks(*request: object) -> None:
        pass

    with tempfile.TemporaryDirectory(prefix="rr", dir="/tmp") as folder:  # paths of sockets have to be short
        monkeypatch.setattr("tempfile.tempdir", folder)
        said = r"driver at 127\.0\.0\.1"
        with listening("127.0.0.1", breaks) as ticket, pytest.raises(ConnectionError, match=said):
            hold(ticket, "a")
        with pytest.raises(ConnectionError, match=said):
            hold(ticket, "a")
        assert [*Path(folder).iterdir()] == []
