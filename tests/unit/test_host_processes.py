"""Processes of `ringreduce run` on hosts, and what they send back: here, as on any other host."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import messages_in
from ringreduce.launcher import host_agent
from ringreduce.launcher.agents import Incoming
from ringreduce.launcher.marks import Mark, RankMessages
from ringreduce.launcher.reach import MARK, Errand, HostProcess, HostRefusedError, ToAll, let_open

CALL = bytes(range(256)) * 4000
TOKEN = "shared-1"
#: Of descriptors: that which `select` cannot take any more.
MOST = 1024

ERRAND = Errand("ringreduce.run", sys.executable, "the Python that ranks need", host_agent)


def begin(folder: Path) -> HostProcess:
    """Start the agent of a host, for a call."""
    messages = folder.with_name(f"{folder.name}-messages")
    request = {"folder": str(messages), "results": str(folder), "token": TOKEN, "nbytes": len(CALL)}
    return ERRAND.begin("there", request, start=None)


def give_call(host: HostProcess) -> None:
    """Let a host have the call."""
    assert host.answer() == "wants"
    stream = ToAll(ERRAND, [host])
    stream.write(CALL)
    stream.flush()
    assert host.answer() == "ready"


def pieces(host: HostProcess) -> Iterator[bytes]:
    """Yield what a host sends, until it has ended."""
    yield host.rest
    while piece := os.read(host.output.fileno(), 4099):
        yield piece


def exchange(tmp_path: Path) -> None:
    """Let a rank of a host leave results of awkward sizes; all come, each as soon as it is whole."""
    there = tmp_path / "there"
    here = tmp_path / "here"
    here.mkdir()
    host = begin(there)
    give_call(host)
    assert (there / "call").read_bytes() == CALL
    assert there.stat().st_mode & 0o777 == 0o700
    results = {"0-1.result": b"", "0-7.failure": b"\n" + MARK.encode() + b"\n", "12-3.result": os.urandom(3_000_001)}
    (there / "0-2.unfinished").touch()
    for name, content in results.items():
        (there / "new").write_bytes(content)
        (there / "new").rename(there / name)
    incoming = Incoming(here, lambda what, text: None)
    for piece in pieces(host):
        incoming.feed(piece)
        if {*results} == {each.name for each in here.iterdir()}:
            host.close_input()
    assert {each.name: each.read_bytes() for each in here.iterdir()} == results
    assert host.has_ended(60)
    assert not there.exists()


def test_what_ranks_leave_comes_back(tmp_path: Path) -> None:
    """Before the job ends; then nothing is left on the host."""
    exchange(tmp_path)


def test_descriptors_above_1024(tmp_path: Path) -> None:
    """Which a process has that reaches 350 hosts, each by three files."""
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
    with pytest.raises(ConfigError, match=rf"350 hosts take 1\d\d\d open files here, and there may be {MOST} "):
        let_open(350)


def test_a_folder_that_hosts_share(tmp_path: Path) -> None:
    """Stays as it is; it is known by a file in it, not by its name."""
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / TOKEN).touch()
    host = begin(folder)
    assert host.answer() == "ready"
    host.close_input()
    assert host.has_ended(60)
    assert [each.name for each in folder.iterdir()] == [TOKEN]
    (folder / TOKEN).unlink()
    host = begin(folder)
    with pytest.raises(ConfigError, match=r"ringreduce\.run: there: .*: File exists; set TMPDIR"):
        host.answer()
    assert host.has_ended(60)


def test_a_host_that_cannot_have_the_folder(tmp_path: Path) -> None:
    """Says so at once."""
    host = begin(tmp_path / "no" / "there")
    with pytest.raises(ConfigError, match=r"there: .*: No such file or directory; set TMPDIR to a folder that each"):
        host.answer()
    assert host.has_ended(60)


def test_a_launcher_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    """Even before the host has the whole call."""
    host = begin(tmp_path / "there")
    assert host.answer() == "wants"
    host.close_input()
    assert host.has_ended(60)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["../0-1.result", "0-1.result/x", "call", "0-1.unfinished", ""])
def test_only_results_come(tmp_path: Path, name: str) -> None:
    """A host writes no other file."""
    with pytest.raises(ValueError, match="is no result"):
        Incoming(tmp_path, lambda what, text: None).feed(f'{MARK}["file", ["{name}", 1]]\nx'.encode())
    assert [*tmp_path.iterdir()] == []


def test_noise_of_shells_is_no_file(tmp_path: Path) -> None:
    """Lines between files, as of a shell's greeting, do not count; messages of ranks do."""
    taken = []
    incoming = Incoming(tmp_path, lambda what, text: taken.append((what, text)))
    incoming.feed(b"Welcome\n\n" + MARK.encode())
    incoming.feed(b'["file", ["0-0.result", 2]]\nab\nbye\n')
    assert (tmp_path / "0-0.result").read_bytes() == b"ab"
    incoming.feed(f'{MARK}["message", "f 0 n1 has come"]\n'.encode())
    assert taken == [("message", "f 0 n1 has come")]


# ---- the agent of a host ----


def begin_agent(folder: Path) -> HostProcess:
    """Start the agent of a host for a job that makes no call."""
    return ERRAND.begin("there", {"folder": str(folder), "results": None}, start=None)


def test_an_agent_passes_on_what_ranks_say(tmp_path: Path) -> None:
    """All that has come before it is asked, in order; it leaves nothing behind."""
    folder = tmp_path / "there"
    agent = begin_agent(folder)
    assert agent.answer() == "ready"
    assert folder.stat().st_mode & 0o777 == 0o700
    Path(messages_in(str(folder))).write_text("f 0 n1 has come\nf 1 n1 has died\n")
    agent.input.write(b"1\n")
    answers: list[list[str]] = []
    rest = b""
    while ["passed on", "1"] not in answers:
        rest += os.read(agent.output.fileno(), 4099)
        *lines, rest = rest.split(b"\n")
        answers += [json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK.encode())]
    assert [value for what, value in answers if what == "message"] == ["f 0 n1 has come", "f 1 n1 has died"]
    assert answers.index(["passed on", "1"]) > answers.index(["message", "f 1 n1 has died"])
    agent.close_input()
    assert agent.has_ended(60)
    assert [*tmp_path.iterdir()] == []


def test_one_agent_of_a_host_reads_what_its_ranks_say(tmp_path: Path) -> None:
    """The others leave the FIFO alone: so does the launcher's own host, which has two names, say."""
    messages = RankMessages(tmp_path)
    messages.begin((), {"RINGREDUCE_FENCE": "f"})
    agent = begin_agent(tmp_path)
    assert agent.answer() == "ready"
    Path(messages_in(str(tmp_path))).write_text("f 0 n1 has come\n")
    agent.close_input()
    assert agent.has_ended(60)
    assert messages.read() == [Mark("has come", 0, "n1")]
    messages.close()


def test_an_agent_takes_no_folder_that_others_may_write_to(tmp_path: Path) -> None:
    """Its host is named, with the remedy."""
    tmp_path.chmod(0o777)
    agent = begin_agent(tmp_path)
    with pytest.raises(HostRefusedError, match=r"there: .* of this user's alone; set TMPDIR"):
        agent.answer()
    assert agent.has_ended(60)
    assert [*tmp_path.iterdir()] == []
