"""Processes of `ringreduce run` on hosts, and what they send back: here, as on any other host."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import messages_in
from ringreduce.launcher import host_agent
from ringreduce.launcher.connection import HostConnection
from ringreduce.launcher.marks import Mark, RankMessages
from ringreduce.launcher.reach import Agent, agent_line, hear, let_open

CALL = bytes(range(256)) * 4000
TOKEN = "shared-1"
#: Of descriptors: that which `select` cannot take any more.
MOST = 1024


def started(
    line: list[str], begins: bytes, folder: Path, messages: list[tuple[str, str]], changed: threading.Condition
) -> Agent:
    """Start an agent here, whose messages are kept."""
    return Agent(
        "there",
        line,
        begins,
        changed=changed,
        take=lambda what, value: messages.append((what, value)),
        folder=folder,
        lost=lambda error: None,
    )


class Host:
    """The agent of a host, and what it has sent.

    Args:
        here: folder for results.
        request: what it is asked for.
    """

    def __init__(self, here: Path, **request: Any) -> None:
        line, texts = agent_line(sys.executable)
        asked = {"results": None, "files": [], "copy": None, **request}
        self._changed = threading.Condition()
        self.messages: list[tuple[str, str]] = []
        self.agent = started(line, texts + json.dumps(asked).encode() + b"\n", here, self.messages, self._changed)

    def answer(self) -> str:
        """Return its answer."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.agent.answer, 60)
        return self.agent.answer

    def passes_on(self, number: int) -> None:
        """Let it pass on what has come."""
        self.agent.connection.send_json(["pass on", number])
        with self._changed:
            assert self._changed.wait_for(lambda: self.agent.has_passed_on(number), 60)

    def end(self) -> None:
        """Let it end."""
        self.agent.close_input()
        self.agent.drain(60)
        assert self.agent.has_ended(60)


def begin(folder: Path, here: Path | None = None) -> Host:
    """Start the agent of a host, for a call."""
    messages = folder.with_name(f"{folder.name}-messages")
    return Host(here or folder, folder=str(messages), results=str(folder), token=TOKEN)


def exchange(tmp_path: Path) -> None:
    """Let a rank of a host leave results of awkward sizes; all come, each as soon as it is whole."""
    there = tmp_path / "there"
    here = tmp_path / "here"
    here.mkdir()
    host = begin(there, here)
    assert host.answer() == "ready"
    assert not host.agent.value["has call"]
    host.agent.connection.send_json([host_agent.CALL, ""])
    host.agent.connection.send_content(CALL)
    host.passes_on(1)
    assert (there / "call").read_bytes() == CALL
    assert there.stat().st_mode & 0o777 == 0o700
    results = {"0-1.result": b"", "0-7.failure": b"\0\0\0\1x", "12-3.result": os.urandom(3_000_001)}
    (there / "0-2.unfinished").touch()
    for name, content in results.items():
        (there / "new").write_bytes(content)
        (there / "new").rename(there / name)
    host.passes_on(2)
    assert {each.name: each.read_bytes() for each in here.iterdir()} == results
    host.end()
    assert not there.exists()


def test_what_ranks_leave_comes_back(tmp_path: Path) -> None:
    """Before the job ends; then nothing is left on the host."""
    exchange(tmp_path)


def test_descriptors_above_1024(tmp_path: Path) -> None:
    """Which a process has that reaches 500 hosts, each by two files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST, limits[1]))
    held = []
    try:
        let_open(MOST)
        while not held or held[-1] <= MOST:
            held.append(os.open(os.devnull, os.O_RDONLY))
        exchange(tmp_path)
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_more_hosts_than_there_may_be_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are refused, with the limit."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (MOST, MOST))
    let_open(1)
    with pytest.raises(ConfigError, match=rf"500 hosts take 1\d\d\d open files here, and there may be {MOST} "):
        let_open(500)


def test_a_folder_that_hosts_share(tmp_path: Path) -> None:
    """Stays as it is; it is known by a file in it, not by its name."""
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / TOKEN).touch()
    host = begin(folder)
    assert host.answer() == "ready"
    assert host.agent.value["has call"]
    host.end()
    assert [each.name for each in folder.iterdir()] == [TOKEN]
    (folder / TOKEN).unlink()
    refuses(begin(folder), "there: .*: File exists; set TMPDIR")


def refuses(host: Host, why: str) -> None:
    """Require that a host says so, and ends."""
    assert host.answer() == "failed"
    assert re.match(why, host.agent.why_not("", "")), host.agent.value
    host.end()


def test_a_host_that_cannot_have_the_folder(tmp_path: Path) -> None:
    """Says so at once."""
    host = begin(tmp_path / "no" / "there")
    refuses(host, "there: .*: No such file or directory; set TMPDIR to a folder that each")


def test_a_launcher_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    """Even before the host has the whole call."""
    host = begin(tmp_path / "there")
    assert host.answer() == "ready"
    host.agent.connection.send_json([host_agent.CALL, ""])
    host.agent.connection.send(b"a part")
    host.end()
    assert [*tmp_path.iterdir()] == []


def heard(folder: Path, *frames: bytes) -> list[tuple[str, str]]:
    """Return the messages among what an agent sends, until it ends."""
    taken: list[tuple[str, str]] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for frame in frames:
            HostConnection(theirs).send(frame)
        theirs.shutdown(socket.SHUT_WR)
        with suppress(EOFError):
            hear(HostConnection(ours), folder, lambda what, value: taken.append((what, value)))
    return taken


@pytest.mark.parametrize("name", ["../0-1.result", "0-1.result/x", "call", "0-1.unfinished", "", "0-0.result"])
def test_only_results_come(tmp_path: Path, name: str) -> None:
    """A host writes no other file, and none twice."""
    heard(tmp_path, b'["file", "0-0.result"]', b"ab", b"", b'["message", "f 0 n1 has come"]')
    with pytest.raises(ValueError, match="is no result"):
        heard(tmp_path, json.dumps(["file", name]).encode(), b"x", b"")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"ab"]


def test_noise_of_shells_is_nothing(tmp_path: Path) -> None:
    """As of a greeting; messages of ranks come after that."""
    frame = r'\0\0\0\36["message", "f 0 n1 has come"]\n'
    line = ["sh", "-c", f"printf 'Welcome\\n\\n{host_agent.GREETING.decode()}\\n{frame}'"]
    taken: list[tuple[str, str]] = []
    agent = started(line, b"", tmp_path, taken, threading.Condition())
    agent.drain(60)
    assert agent.has_ended(60)
    assert taken == [("message", "f 0 n1 has come")]


# ---- the messages of ranks ----


def test_an_agent_passes_on_what_ranks_say(tmp_path: Path) -> None:
    """All that has come before it is asked, in order; it leaves nothing behind."""
    folder = tmp_path / "there"
    host = Host(tmp_path, folder=str(folder))
    assert host.answer() == "ready"
    assert folder.stat().st_mode & 0o777 == 0o700
    Path(messages_in(str(folder))).write_text("f 0 n1 has come\nf 1 n1 has died\n")
    host.passes_on(1)
    assert [value for what, value in host.messages if what == "message"] == ["f 0 n1 has come", "f 1 n1 has died"]
    host.end()
    assert [*tmp_path.iterdir()] == []


def test_one_agent_of_a_host_reads_what_its_ranks_say(tmp_path: Path) -> None:
    """The others leave the FIFO alone: so does the launcher's own host, which has two names, say."""
    messages = RankMessages(tmp_path)
    messages.begin((), {"RINGREDUCE_FENCE": "f"})
    host = Host(tmp_path, folder=str(tmp_path))
    assert host.answer() == "ready"
    Path(messages_in(str(tmp_path))).write_text("f 0 n1 has come\n")
    host.end()
    assert messages.read() == [Mark("has come", 0, "n1")]
    messages.close()


def test_an_agent_takes_no_folder_that_others_may_write_to(tmp_path: Path) -> None:
    """Its host is named, with the remedy."""
    tmp_path.chmod(0o777)
    refuses(Host(tmp_path, folder=str(tmp_path)), "there: .* is no folder of this user alone; .* set TMPDIR")
    assert [*tmp_path.iterdir()] == []
