"""What a job serves: to those who have its token, and to nobody else."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from recorded_ranks import snapshot
from served_jobs import free_port

from ringreduce.cli import main, reports
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.observe.job.gathering import Gathering
from ringreduce.observe.job.job_view import JobView
from ringreduce.observe.observer import Observer
from ringreduce.observe.out.job_server import serve_job
from ringreduce.observe.out.metric_table import families_of_job, prometheus_text
from ringreduce.observe.out.serving import Answer, TextServer, ask, job_token, token_folder
from ringreduce.observe.seen.metrics import Metrics
from ringreduce.observe.seen.recorder import FlightRecorder
from ringreduce.observe.seen.step_clock import Spent, StepClock
from ringreduce.observe.seen.timeline import JobClock
from ringreduce.observe.watchers import Beginning
from ringreduce.transport.memory import MemoryWorld


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's token is."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "ringreduce"


@pytest.fixture
def server() -> Iterator[TextServer]:
    """A job of one rank."""
    gathering = Gathering(None, 0, 1)
    gathering.tell(snapshot(0, 1, 60.0))
    found = serve_job(("127.0.0.1", free_port()), None, gathering, JobView(1))
    yield found
    found.end()


def get(server: TextServer, path: str, authorization: str | None = None) -> tuple[int, str, dict[str, str]]:
    """Return the status, the text and the headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request("GET", path, headers={} if authorization is None else {"Authorization": authorization})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text, dict(response.getheaders())


def basic(token: str, user: str = "anybody") -> str:
    return "Basic " + b64encode(f"{user}:{token}".encode()).decode()


def test_metrics_of_a_program_without_steps(place: Path):
    """As a rank tells of itself from its start on: nothing was spent on steps, and all else is there."""
    recorder = FlightRecorder(0, 1, None, [])
    recorder.step_clock = StepClock(Spent)
    recorder.begin_status("j", lambda: Metrics.of([], []))
    told = recorder.write_status()
    recorder.end_status()
    text = prometheus_text(families_of_job(JobView(1), [told]))
    assert 'ringreduce_steps_total{job="j",rank="0"} 0' in text
    assert "ringreduce_resident_memory_bytes" in text
    assert "ringreduce_spent_seconds" not in text


def test_a_metric_that_cannot_be_made_is_left_out_and_the_others_come(caplog: pytest.LogCaptureFixture):
    """And said once."""
    told = snapshot(0, 1, 60.0)
    told = replace(told, resources=replace(told.resources, gc_pause_s="no number"))
    for _ in range(2):
        text = prometheus_text(families_of_job(JobView(1), [told]))
    assert "ringreduce_garbage_collection_seconds" not in text
    assert "ringreduce_steps_total" in text
    assert "ringreduce_disk_busy_seconds_total" in text
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == [
        "the metric garbage_collection_seconds_total is left out"
    ]


def test_an_answer_that_fails_is_one(caplog: pytest.LogCaptureFixture):
    """Its status is 500, a line of the log says why, once, and other paths are answered."""

    def fail() -> Answer:
        raise TypeError("'NoneType' object is not a mapping")

    failing = TextServer("127.0.0.1", 0, {"/": fail, "/good": lambda: Answer("yes", "text/plain")})
    failing.start()
    for _ in range(2):
        status, text, _ = get(failing, "/")
        assert (status, "cannot be made: TypeError" in text) == (500, True)
    assert get(failing, "/good")[:2] == (200, "yes")
    failing.end()
    (record,) = caplog.records
    assert "/ cannot be served: TypeError: 'NoneType' object is not a mapping (line " in record.getMessage()


def test_who_has_the_token_sees_the_job(server: TextServer):
    """As a bearer, as orchestrators send it, or as the password of any user, as browsers ask for it."""
    token, where = job_token(None, make=False)
    assert where.stat().st_mode & 0o777 == 0o600
    for header in (f"Bearer {token}", basic(token), basic(token, user="")):
        status, text, headers = get(server, "/health", header)
        assert (status, json.loads(text)["steps"]) == (200, 300)
    status, text, headers = get(server, "/", header)
    assert (status, headers["Refresh"], headers["Content-Type"]) == (200, "5", "text/html; charset=utf-8")
    assert "<h1>Job 0123abcd</h1>" in text
    assert token not in text
    status, text, headers = get(server, "/metrics?x=1", header)
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert '\nringreduce_steps_total{job="0123abcd",rank="0"} 300\n' in text
    assert get(server, "/elsewhere", header)[0] == 404


def test_nobody_else_does(server: TextServer):
    """Whatever else is sent; nothing of the job is in the answer, and not whether there is such a path."""
    token, _ = job_token(None, make=False)
    wrong = ["Bearer", "Bearer ", "Bearer x", f"Bearer {token}x", f"Token {token}", token, basic("x"), basic("")]
    wrong += ["Basic !", "Basic " + b64encode(b"\xff\xfe").decode(), basic("x", user=token)]
    for header in (None, *wrong):
        for path in ("/", "/metrics", "/health", "/ranks", "/elsewhere"):
            status, text, headers = get(server, path, header)
            assert (status, text) == (401, "a token is needed, as a bearer or as the password\n")
            assert headers["WWW-Authenticate"].startswith("Basic ")


def test_it_listens_where_it_was_asked_to(server: TextServer):
    """On the loopback alone, and no more once it has ended: the port is free at once."""
    port = server.server_address[1]
    assert server.socket.getsockname()[0] == "127.0.0.1"
    server.end()
    again = TextServer("127.0.0.1", port, {})
    again.server_close()


def test_many_clients_take_no_more_than_some_threads(server: TextServer):
    """Those that say nothing, or a byte now and then, keep nobody from an answer: the oldest of them give way."""
    token, _ = job_token(None, make=False)
    port = server.server_address[1]
    silent = []
    for begin in (b"", b"GET / HTTP/1.1\r\nX: y\r\n"):
        for _ in range(40):
            silent.append(socket.create_connection(("127.0.0.1", port), timeout=30))
            silent[-1].sendall(begin)
        assert get(server, "/", f"Bearer {token}")[0] == 200
    for each in silent[:40]:
        assert each.recv(1) == b""
    silent[-1].sendall(f"Authorization: Bearer {token}\r\n\r\n".encode())
    assert silent[-1].recv(12) == b"HTTP/1.0 200"
    for each in silent:
        each.close()


def test_who_is_answered_gives_way_to_nobody(server: TextServer):
    """However many come without a token, while the answer is made."""
    token, _ = job_token(None, make=False)
    port = server.server_address[1]
    silent = []

    def answer() -> Answer:
        for _ in range(80):
            silent.append(socket.create_connection(("127.0.0.1", port), timeout=30))
        assert silent[0].recv(1) == b""
        return Answer("whole", "text/plain")

    server.answers = {"/": answer}
    assert get(server, "/", f"Bearer {token}")[:2] == (200, "whole")
    for each in silent:
        each.close()


def test_the_token_of_a_file(tmp_path: Path):
    """Is made once, and then taken; others may not read it, and what is too short is none."""
    path = tmp_path / "token"
    token, where = job_token(str(path), make=True)
    assert (where, path.stat().st_mode & 0o777) == (path, 0o600)
    assert job_token(str(path), make=True)[0] == token
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="other users may read"):
        job_token(str(path), make=True)
    path.chmod(0o600)
    for text in ("", "short", "two words, which are long", "with ümlauts, of two bytes"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="holds no token: at least 16 characters"):
            job_token(str(path), make=True)
    with pytest.raises(ConfigError, match=r"nowhere.*No such file"):
        job_token(str(tmp_path / "nowhere" / "token"), make=True)
    with pytest.raises(ConfigError, match="No such file"):
        job_token(None, make=False)
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["token"]


def test_top_shows_a_job_by_its_address(server: TextServer, tmp_path: Path):
    """A colon makes an address; errors say what is wrong."""
    port = server.server_address[1]
    shown = CliRunner().invoke(main, ["top", "--once", "--job", f":{port}"], standalone_mode=False)
    assert "0123abcd: 1 ranks, " in shown.output
    told = CliRunner().invoke(main, ["top", "--json", "--job", f"localhost:{port}"], standalone_mode=False)
    assert [(each["rank"], each["steps"]) for each in json.loads(told.output)] == [(0, 300)]
    none = CliRunner().invoke(main, ["top", "--once", "--job", f"{port}"], standalone_mode=False)
    assert f"no job of this user whose name begins with {port}" in none.output
    other = tmp_path / "other"
    job_token(str(other), make=True)
    with pytest.raises(ConfigError, match=f"it refuses the token of {other}"):
        reports.top.main(["--once", "--job", f":{port}", "--status-token-file", str(other)], standalone_mode=False)
    server.end()
    with pytest.raises(ConfigError, match=f"there is no answer from :{port}: .*refused"):
        ask(f":{port}", "/ranks", None)
    with pytest.raises(ConfigError, match=r"node7: is no address: expected \[HOST:\]PORT"):
        ask("node7:", "/ranks", None)


def observed(config: Config) -> Observer:
    """Return what observes a rank that is alone."""
    made = Observer(0, 1, JobClock("0123abcd" * 4, 0.0), config, [], [])
    made.begin(
        Beginning(
            config=config, messages=MemoryWorld(1, 30.0).messages(0), library="none", metrics=lambda: Metrics.of([], [])
        )
    )
    return made


def test_a_port_that_is_taken_is_no_harm(caplog: pytest.LogCaptureFixture):
    """The job goes on, and a warning says why nobody sees it; so it is where the token cannot be had."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        observed(Config(status_address=("127.0.0.1", port))).end()
    assert f"port {port} of 127.0.0.1 cannot be served: Address already in use" in caplog.text
    observed(Config(status_address=("127.0.0.1", free_port()), status_token_file="/nowhere/token")).end()
    assert "/nowhere/.token" in caplog.text


def test_sealed_messages_are_not_shown_in_the_open(place: Path):
    """The status has no encryption of its own, so other hosts do not get it then. What has begun before is ended."""
    with pytest.raises(ConfigError, match=r"leave out its host, and reach it by ssh -L 9400:127.0.0.1:9400"):
        observed(Config(status_address=("0.0.0.0", 9400), key_file="/keys/key"))
    assert not place.exists()


class Unsent:
    """Stands for what sends to a collector."""

    def __init__(self, *of_job: object) -> None:
        pass

    def end(self, *, waits: bool) -> None:
        pass


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_sealed_messages_are_not_collected_in_the_open(monkeypatch: pytest.MonkeyPatch, name: str):
    """By a collector on another host: its address must be one of https; one on this host is none."""
    config = Config(otlp=True, key_file="/keys/key")
    monkeypatch.setitem(sys.modules, "ringreduce.observe.out.otlp", SimpleNamespace(Telemetry=Unsent))
    monkeypatch.setenv(name, "http://collector:4318/v1")
    with pytest.raises(ConfigError, match=r"would go to http://collector:4318/v1 unencrypted: let OTEL_EXPORTER"):
        observed(config)
    observed(Config(otlp=True)).end()
    for address in ("https://collector:4318", "http://localhost:4318", "http://[::1]:4318", ""):
        monkeypatch.setenv(name, address)
        observed(config).end()


def test_a_child_does_not_keep_the_port():
    """A process that the rank has forked serves nothing, and the port is free once the rank's world ends."""
    port = free_port()
    mine = observed(Config(status_address=("127.0.0.1", port)))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        mine.forked()
        os.read(read, 1)
        os._exit(0)
    try:
        mine.end()
        again = TextServer("127.0.0.1", port, {})
        again.server_close()
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)


def test_a_folder_of_somebody_else_is_refused(place: Path):
    """Nobody else may read the token, and no link leads elsewhere."""
    place.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="not a folder of this user's alone"):
        token_folder()
    place.rmdir()
    place.symlink_to(place.parent)
    with pytest.raises(ConfigError, match="not a folder of this user's alone"):
        token_folder()
