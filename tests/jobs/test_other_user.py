"""Another user of the host: what he tries against a job and its files is refused, or does no harm."""

from __future__ import annotations

import base64
import http.client
import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launching import LIMIT_S, RINGREDUCE, job_environment

from ringreduce.audit.chain import ChainedFile
from ringreduce.common.errors import ConfigError
from ringreduce.common.keys import read_secret, write_secret
from ringreduce.common.sealed_files import PLAIN
from ringreduce.elastic import CommitStore
from ringreduce.launcher import host_agent
from ringreduce.launcher.shells import shell
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.start import make_folder
from ringreduce.observe.out.serving import Answer, TextServer, token_folder
from ringreduce.observe.seen.recorder import FlightRecorder
from ringreduce.observe.seen.trace_file import TraceFile

PYTHON = "/usr/bin/python3"  # that of the tests may lie where he cannot go

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes users"),
    pytest.mark.skipif(shutil.which("useradd") is None, reason="there is no useradd"),
    pytest.mark.skipif(not os.path.exists(PYTHON), reason=f"there is no {PYTHON}"),
]


class Other(NamedTuple):
    """A user who has nothing to do with the job; not a system's one, as those may be in groups."""

    uid: int

    def does(self, program: str, *arguments: object, limit_s: float = 60.0) -> Any:
        """Return what a program of his prints, as JSON."""
        command = [PYTHON, "-I", "-c", program, *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=limit_s, cwd="/", env={},
            user=self.uid, group=self.uid, extra_groups=[],
        )  # fmt: skip
        return json.loads(done.stdout or "null")


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    for each in pwd.getpwall():  # of tests that were killed
        if each.pw_name.startswith("rr-other-") and not Path("/proc", each.pw_name.removeprefix("rr-other-")).exists():
            subprocess.run(["userdel", each.pw_name], check=True)
    name = f"rr-other-{os.getpid()}"
    subprocess.run(["useradd", "--no-create-home", "--user-group", "--shell", "/bin/false", name], check=True)
    try:
        uid = int(subprocess.run(["id", "-u", name], capture_output=True, text=True, check=True).stdout)
        yield Other(uid)
    finally:
        subprocess.run(["userdel", name], check=True)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder like /tmp: all may write to it, and nobody removes what others have there."""
    path = Path(f"/var/tmp/ringreduce-other-{os.getpid()}")
    path.mkdir()
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


# ---- a job that runs ----

JOB = """
import os, pickle, sys, time
import numpy as np
import ringreduce as rr
from ringreduce.elastic import CommitStore

rr.init()
known = np.frombuffer(b"a diagnosis that nobody else is to read" * 1000, np.uint8)
private = rr.empty(known.size, np.uint8)
private[:] = known
if rr.rank() == 0:
    store = CommitStore(sys.argv[1] + "/commits", 3, pickle.dump, pickle.load)
    store.prepare()
    store.put(1, known)
    store.settle()
rr.dump(sys.argv[1] + "/dumps")
assert (rr.allreduce(private, rr.MAX) == known).all()
print("ready", os.getpid(), flush=True)
while not os.path.exists(sys.argv[1] + "/go"):
    time.sleep(0.02)  # as others do something to this job
for _ in range(20):
    assert rr.allreduce(np.arange(50_000.0), rr.SUM)[-1] == 49_999 * rr.size()
    assert rr.broadcast_object({"said": rr.rank()}) == {"said": 0}
print("well", flush=True)
"""

#: Arguments: paths of files and folders, and processes. Prints what could be read, and what could be written to.
READS = """
import json, os, sys
read, written = [], []

def attempt(path):
    try:
        with open(path, "rb") as file:
            read.append([path, file.read(1 << 24).hex()])
    except OSError:
        pass
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        written.append(path)
    except OSError:
        pass

paths, pids = json.loads(sys.argv[1])
for each in paths:
    attempt(each)
    for folder, names, files in os.walk(each):
        for name in files:
            attempt(os.path.join(folder, name))
        for name in names:
            try:
                os.mkdir(os.path.join(folder, name, "mine"))
                written.append(os.path.join(folder, name))
            except OSError:
                pass
for pid in pids:
    for name in ("environ", "mem", "maps", "fd/0", "fd/1", "fd/2", "cmdline", "map_files", "stack"):
        attempt(f"/proc/{pid}/{name}")
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            attempt(f"/proc/{pid}/fd/{name}")
    except OSError:
        pass
print(json.dumps([read, written]))
"""

SIGNALS = """
import json, os, sys
sent = []
for pid in json.loads(sys.argv[1]):
    for number in (0, 10, 12, 15, 9):
        try:
            os.kill(pid, number)
        except PermissionError:
            continue
        sent.append([pid, number])
print(json.dumps(sent))
"""

#: Argument: addresses with ports, and names of Unix sockets. To each: nothing, what means nothing, and a lot of it.
CONNECTS = """
import json, socket, sys
reached = []
for family, where in json.loads(sys.argv[1]):
    lots = (bytes(range(256)) * 40, b"\\xff" * 5000, b"\\0" * 5000)
    for said in (b"", bytes(range(24)), b"GET / HTTP/1.0\\r\\n\\r\\n", *lots):
        peer = socket.socket(socket.AF_UNIX if family == "unix" else socket.AF_INET)
        peer.settimeout(5)
        try:
            peer.connect(where if family == "unix" else tuple(where))
            peer.sendall(said)
        except OSError:
            continue
        reached.append(peer)
print(len(reached))
"""


def family_of(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    found, left = [], [pid]
    while left:
        one = left.pop()
        found.append(one)
        for task in Path(f"/proc/{one}/task").iterdir():
            left += map(int, (task / "children").read_text().split())
    return found


def sockets_of(pids: list[int]) -> list[tuple[str, Any]]:
    """Return where processes listen: TCP ports by their addresses, and Unix sockets by their names."""
    inodes = {os.readlink(each)[8:-1] for pid in pids for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_socket()}
    found: list[tuple[str, Any]] = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in inodes:
            address, port = words[1].split(":")
            ip = socket.inet_ntoa(bytes.fromhex(address)[::-1])
            found.append(("tcp", ["127.0.0.1" if ip == "0.0.0.0" else ip, int(port, 16)]))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[6] in inodes and len(words) > 7:
            found.append(("unix", words[7].replace("@", "\0", 1) if words[7].startswith("@") else words[7]))
    return found


def test_a_job_that_runs(other: Other, place: Path) -> None:
    """He reads none of its files and none of its memory, ends none of its processes, and makes no number wrong."""
    write_secret(place / "key")
    text = (place / "key").read_bytes().splitlines()[1]
    (place / "job.py").touch(0o600)
    (place / "job.py").write_text(JOB)
    before = set(Path("/dev/shm").iterdir())
    files = {name: str(place / name.lower()) for name in ("TIMELINE", "AUDIT")}
    settings: dict[str, str | None] = {f"RINGREDUCE_{name}": path for name, path in files.items()}
    settings |= {"TMPDIR": str(place), "XDG_RUNTIME_DIR": "", "RINGREDUCE_NODE_SIZE": "2", "RINGREDUCE_STATUS": "1"}
    settings["RINGREDUCE_DUMP"] = str(place / "dump")
    settings["OMPI_MCA_btl"] = None  # as users start a job
    command = [
        "timeout", "--kill-after=5", str(LIMIT_S), str(RINGREDUCE), "run", "-np", "4", f"--encrypt={place / 'key'}",
        sys.executable, str(place / "job.py"), str(place),
    ]  # fmt: skip
    with (
        job_environment(**settings) as variables,
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job,
    ):
        assert job.stdout is not None
        ready = [job.stdout.readline().split() for _ in range(4)]
        assert [each[:1] for each in ready] == [["ready"]] * 4, job.communicate()
        pids = family_of(job.pid)
        assert {int(each[1]) for each in ready} < set(pids)
        assert any((place / "commits").iterdir())
        mine = [str(each) for each in Path("/dev/shm").iterdir() if each not in before]
        assert mine
        read, written = other.does(READS, json.dumps([[str(place), *mine], pids]))
        sent = other.does(SIGNALS, json.dumps(pids))
        reached = other.does(CONNECTS, json.dumps(sockets_of(pids)))
        of_ranks = sockets_of([int(each[1]) for each in ready])
        (place / "go").touch()
        said, complained = job.communicate()
    assert (job.returncode, said) == (0, "well\n" * 4), complained
    assert (sent, written) == ([], [])
    assert reached > 0  # what listens is mpirun, and it takes no harm
    assert [each for each in of_ranks if each[0] == "tcp"] == []
    read = {path: bytes.fromhex(content) for path, content in read}
    assert {path.rsplit("/")[-1].rstrip("0123456789") for path in read} == {"cmdline"}
    for content in read.values():
        for form in (text, base64.b64decode(text)):
            assert form not in content


# ---- names that he takes beforehand ----

#: Arguments: a path, and where a link is to lead. What is in its place: a folder, a file, or a link, all open to all.
SQUATS = """
import os, sys
path, target = sys.argv[1:]
os.umask(0)
if target:
    os.symlink(target, path)
elif path.endswith("/"):
    os.mkdir(path)
else:
    open(path, "w").close()
"""


def prepares_commits(place: Path) -> None:
    CommitStore(place / "name", 3, lambda content, file: None, lambda file: None).prepare()


def makes_token(place: Path) -> None:
    token_folder()


def begins_trace(place: Path) -> None:
    TraceFile(str(place / "name"), "job 1", 0, PLAIN).begin(b"")


def appends_to_record(place: Path) -> None:
    ChainedFile(str(place / "name"), alone=True).append({"said": "a line"})


def makes_key(place: Path) -> None:
    write_secret(place / "name")


def reads_key(place: Path) -> None:
    read_secret(place / "name", "KEY")


def takes_copy(place: Path) -> None:
    host_agent.require_own(str(place / "name"))


@pytest.mark.parametrize("target", ["folder", "file", "link to his", "link to ours"])
@pytest.mark.parametrize(
    "act", [prepares_commits, makes_token, begins_trace, appends_to_record, makes_key, reads_key, takes_copy]
)
def test_a_name_that_is_taken(
    other: Other, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, act: Callable[[Path], None], target: str
) -> None:
    """Is refused, and nothing of ours gets there: neither to what is his, nor where his link leads."""
    monkeypatch.setattr("tempfile.tempdir", str(place))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    name = place / (f"ringreduce-{os.geteuid()}" if act is makes_token else "name")
    ours = tmp_path / "ours"
    if act in (prepares_commits, makes_token, takes_copy):
        ours.mkdir(mode=0o700)
    else:
        ours.write_bytes(b"")
    his = place / "his"
    if target == "link to his":
        other.does(SQUATS, f"{his}/" if ours.is_dir() else his, "")
    where = {"folder": "", "file": "", "link to his": his, "link to ours": ours}[target]
    other.does(SQUATS, f"{name}/" if target == "folder" else name, where)
    with pytest.raises((OSError, ConfigError)):
        act(place)
    for each in (ours, his, name):
        if each.exists():
            assert not (list(each.iterdir()) if each.is_dir() else each.read_bytes())


def test_a_dump_in_his_folder(other: Other, place: Path) -> None:
    """He can remove it, and not read it; a link of his that has its name is not followed."""
    other.does(SQUATS, f"{place / 'dumps'}/", "")
    kept = place / "ours"
    kept.write_text("keep")
    other.does(SQUATS, place / "dumps" / "rank-0.json", kept)
    FlightRecorder(0, 1, None, []).dump(place / "dumps")
    assert kept.read_text() == "keep"
    read, _ = other.does(READS, json.dumps([[str(place / "dumps")], []]))
    assert read == []


def test_logs_in_his_folder(other: Other, place: Path) -> None:
    """Are not written: his link there would lead to a file of ours. The shell of a rank refuses it, too."""
    kept = place / "ours"
    kept.write_text("keep")
    other.does(SQUATS, f"{place / 'logs'}/", "")
    other.does(SQUATS, place / "logs" / "rank-0.log", kept)
    with pytest.raises(ConfigError, match="belongs to user"):
        make_folder(LaunchSpec(program=("true",), folder=str(place / "logs")))
    done = subprocess.run(
        [*shell("log"), str(place / "logs"), "echo", "a line"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, kept.read_text()) == (1, "", "keep")
    assert "belongs to another user, or others may write there" in done.stderr


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_of_hosts_that_is_his(other: Other, place: Path, is_link: bool) -> None:
    """Would have a job start where he likes."""
    (place / "ours").write_text("localhost slots=2\n")
    other.does(SQUATS, place / "hosts", place / "ours" if is_link else "")
    with pytest.raises(ConfigError, match="who can change it"):
        LaunchSpec(program=("true",), hostfile=str(place / "hosts")).named_hosts()


def test_he_cannot_lock_a_record(other: Other, place: Path) -> None:
    """Which takes reading it; a record that he may read is refused."""
    record = ChainedFile(str(place / "audit"), alone=True)
    record.append([{"event": "first"}])
    lock = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX)"
    with pytest.raises(subprocess.CalledProcessError):
        other.does(lock, place / "audit")
    (place / "audit").chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        record.append([{"event": "second"}])


#: Argument: a port. Holds as many connections as are taken, and says a byte to each.
HOLDS = """
import socket, sys, time
peers = []
for _ in range(64):
    peers.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10))
    peers[-1].sendall(b"GET / HTTP/1.1\\r\\nX: y\\r\\n")
print("null", flush=True)
sys.stdin.read()
"""


def test_he_keeps_nobody_from_the_status(other: Other) -> None:
    """By connections without a token, however slow they are."""
    server = TextServer("127.0.0.1", 0, {"/": lambda: Answer("whole", "text/plain")}, "a token of some letters")
    server.start()
    port = server.server_address[1]
    command = [PYTHON, "-I", "-c", HOLDS, str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", env={}, user=other.uid, group=other.uid,
        extra_groups=[],
    ) as his:  # fmt: skip
        assert his.stdout is not None
        assert his.stdout.readline() == b"null\n"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/", headers={"Authorization": "Bearer a token of some letters"})
        assert connection.getresponse().read() == b"whole"
        connection.close()
        his.communicate()
    server.end()


@pytest.mark.parametrize("is_his", [False, True])
def test_a_folder_of_the_job(other: Other, place: Path, is_his: bool) -> None:
    """As root, mpirun takes one that is there. Where it is his, ranks do without it, and follow no link of his."""
    path = place / "ompi.1234"
    kept = place / "ours"
    kept.write_text("keep")
    if is_his:
        other.does(SQUATS, f"{path}/", "")
        other.does(SQUATS, path / "ringreduce-process-0", kept)
    else:
        path.mkdir()
    program = "from ringreduce.common.launch import launch; print(launch().job_folder)"
    done = subprocess.run(
        [*shell("process"), sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "PMIX_SERVER_TMPDIR": str(path), "OMPI_COMM_WORLD_RANK": "0"},
    )  # fmt: skip
    assert done.stdout == f"{None if is_his else path}\n"
    assert kept.read_text() == "keep"
    assert (path / "ringreduce-process-0").is_symlink() == is_his


#: Leaves a call in a folder of his that all may write to; it makes a file once it is unpickled.
LEAVES_A_CALL = r"""
import os, sys
folder, proof = sys.argv[1:]
os.umask(0)
os.mkdir(folder)
with open(f"{folder}/call", "wb") as file:
    file.write(f"cos\nsystem\n(S'touch {proof}'\ntR.".encode())
"""


def test_a_call_in_his_folder(other: Other, place: Path) -> None:
    """A worker loads no pickle from a folder of his."""
    folder, proof = place / "ringreduce-run-x", place / "ran"
    other.does(LEAVES_A_CALL, folder, proof)
    work = [sys.executable, "-c", "from ringreduce.launcher.function import work; work()", str(folder)]
    done = subprocess.run(work, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"ringreduce.run: {folder} belongs to user {other.uid}")
    assert not proof.exists()
