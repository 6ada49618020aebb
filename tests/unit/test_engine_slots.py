"""Slots that tasks of an engine hold, without an engine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringreduce.engines.slots import Slots, hold, slots
from ringreduce.launcher.connection import listening
from ringreduce.launcher.marks import Mark, RankMessages


@pytest.fixture
def held() -> Iterator[Slots]:
    """A slot, "a", that a task holds, which ends well once the job has ended."""
    with ThreadPoolExecutor(1) as pool:
        with slots("127.0.0.1") as held:
            task = pool.submit(hold, held.ticket, "a")
            held.wait(["a"], 30.0, lambda: None)
            yield held
        task.result(30.0)
    assert held.lost == []


def test_a_slot_runs_commands_until_its_job_ends(held: Slots) -> None:
    """And says how they have ended."""
    assert held.start("a", "exit 3") == 3


def test_a_slot_gets_a_call_and_brings_back_results(held: Slots) -> None:
    """Before its first command, and once; what ranks leave is there once the command has ended."""
    call = os.urandom(3_000_000)
    leave = 'cd "$_RINGREDUCE_SLOT/results" && cp call new && mv new 0-5.result && touch no-result'
    held.call = call
    assert [held.start("a", leave), held.start("a", "rm $_RINGREDUCE_SLOT/results/call")] == [0, 0]
    assert held.start("a", "test -e $_RINGREDUCE_SLOT/results/call") == 1
    assert (held.folder / "0-5.result").read_bytes() == call
    assert [path.name for path in held.folder.iterdir() if "result" in path.name] == ["0-5.result"]


def test_what_ranks_in_a_slot_say_is_passed_on(held: Slots) -> None:
    """To the FIFO of the launcher, before the command ends."""
    messages = RankMessages(held.folder)
    messages.begin((), {"RINGREDUCE_FENCE": "f"})
    assert held.start("a", 'echo "f 0 n1 has come" >"$_RINGREDUCE_MESSAGES/$(readlink /proc/self/ns/net)"') == 0
    assert Mark("has come", 0, "n1") in messages.read()
    messages.close()


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
