"""`ringreduce run`: what is read of a job's standard error, and what its discovery script says."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
from click.testing import CliRunner

from ringreduce.cli import main
from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import messages_in, notify_launcher, renew_rank_variables, report_begin
from ringreduce.launcher import chains, growth, mpirun, start, states
from ringreduce.launcher.hosts import UNNAMED, SizePolicy, parse_hosts
from ringreduce.launcher.marks import Mark, RankMessages
from ringreduce.launcher.mpirun import Mpirun
from ringreduce.launcher.notices import Output
from ringreduce.launcher.rank_variables import with_free_port
from ringreduce.launcher.restarts import Restarts
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.start import HEARING, SUPERVISOR, Start
from ringreduce.launcher.stderr import say


@pytest.fixture
def messages(tmp_path: Path) -> Iterator[RankMessages]:
    """What receives the messages of ranks of this host, of launch f."""
    receiver = RankMessages(tmp_path)
    receiver.begin((), {"RINGREDUCE_FENCE": "f"})
    yield receiver
    receiver.close()


@pytest.mark.parametrize(
    ("lines", "marks"),
    [
        (b"f 3 n1.cluster has died\n", [Mark("has died", 3, "n1.cluster")]),
        (2 * b"f 0 n2 begins again\n", 2 * [Mark("begins again", 0, "n2")]),
        (b"e 0 n2 begins again\n 0 n2 begins again\nf 1 n2 lives\n", [Mark("lives", 1, "n2")]),
        (b"f x n2 lives\nf 3 " + b"n" * 400 + b" lives\n\xff\0\n\nf 1 n2 lives\n", [Mark("lives", 1, "n2")]),
        (b"f 1 n2 lives", []),
    ],
    ids=["one", "two", "of other launches", "no messages", "half a message"],
)
def test_messages_of_ranks_are_read(messages: RankMessages, lines: bytes, marks: list[Mark]) -> None:
    """In the order of their lines; what is none is dropped."""
    Path(messages_in(str(messages.folder))).write_bytes(lines)
    assert messages.read() == marks
    assert messages.read() == []


def test_a_folder_that_takes_no_fifo_is_refused(tmp_path: Path) -> None:
    """As that of some file systems, with the remedy."""
    with pytest.raises(ConfigError, match=r"cannot make a FIFO in .*; set TMPDIR to a local folder"):
        RankMessages(tmp_path / "none")


@pytest.mark.parametrize(
    ("program", "code", "ends"),
    [
        (["true"], 0, "has ended well"),
        (["sh", "-c", "exit 3"], -9, "has died"),
        (["sh", "-c", "exit 75"], -9, "has died"),
        (["sh", "-c", "kill -WINCH $PPID; exit 75"], 0, "has stopped"),
        (["sh", "-c", "kill -WINCH $PPID; exit 3"], -9, "has died"),
    ],
)
def test_the_shell_of_a_rank_says_how_that_ends(
    messages: RankMessages, program: list[str], code: int, ends: str
) -> None:
    """And turns any end but a good one into a signal; 75 is a good one where the ranks have agreed to stop."""
    variables = {"OMPI_COMM_WORLD_RANK": "5", "PMIX_HOSTNAME": "n1", "RINGREDUCE_FENCE": "f"}
    environ = {**os.environ, **variables, "RINGREDUCE_MESSAGES": str(messages.folder)}
    done = subprocess.run([*SUPERVISOR, *program], capture_output=True, check=False, env=environ)
    assert done.returncode == code
    assert done.stderr == b""
    assert messages.read() == [Mark(ends, 5, "n1")]


#: By launcher: the variables of a rank's number, the number of all, and the same within its node.
PLACE = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                 "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("slots", "sizes"),
    [({"a": 3, "b": 1, "c": 4}, (3, 1, 2)), ({}, (6,)), ({}, (2, 2, 2))],
    ids=["uneven hosts", "this machine", "hosts of a scheduler"],
)
@pytest.mark.parametrize("launcher", ["Open MPI", "MPICH"])
def test_a_rank_of_horovodrun_finds_its_place(slots: dict[str, int], sizes: tuple[int, ...], launcher: str) -> None:
    """Its number on the node, and that of the node among those which have a rank of this number."""
    ask = ("sh", "-c", 'echo "$HOROVOD_RANK" "$HOROVOD_SIZE" "$HOROVOD_LOCAL_RANK" "$HOROVOD_LOCAL_SIZE" '
           '"$HOROVOD_CROSS_RANK" "$HOROVOD_CROSS_SIZE" "$HOROVOD_HOSTNAME"')  # fmt: skip
    spec = LaunchSpec(program=ask, horovod=True)
    start = Start(spec, Mpirun("mpirun", launcher, 5), SizePolicy(1, 6), frozenset(), slots=slots)
    line, _ = start.line_and_settings({UNNAMED: 6}, {})
    places = [(node, local) for node, count in enumerate(sizes) for local in range(count)]
    for rank, (node, local) in enumerate(places):
        told = dict(zip(PLACE[launcher], map(str, (rank, 6, local, sizes[node])), strict=True))
        environ = {"PATH": os.environ["PATH"], **told}
        done = subprocess.run(line[line.index("sh") :], capture_output=True, text=True, check=True, env=environ)
        peers = [other for other, each in places if each == local]
        expected = [rank, 6, local, sizes[node], peers.index(node), len(peers), os.uname().nodename]
        assert done.stdout.split() == list(map(str, expected))


TORCHS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    ("options", "ranks", "master"),
    [
        ({}, {UNNAMED: 4}, "127.0.0.1 20001"),
        ({}, {"localhost": 2, os.uname().nodename: 2}, "127.0.0.1 20001"),
        ({}, {"h1": 2, "h2": 2}, "h1 20001"),
        ({}, {"localhost": 2, "h2": 2}, f"{os.uname().nodename} 20001"),
        ({"settings": {"RINGREDUCE_KEY_FILE": "/key"}}, {"h1": 2, "h2": 2}, ""),
        ({"exported": ("RINGREDUCE_KEY_FILE=/key",)}, {"h1": 2, "h2": 2}, ""),
        ({"exported": ("MASTER_ADDR=::1", "MASTER_PORT=7", "RINGREDUCE_KEY_FILE=/key")}, {"h1": 2, "h2": 2}, "::1 7"),
        ({"exported": ("MASTER_PORT=7",)}, {"h1": 2, "h2": 2}, "h1 7"),
        ({"rank_variables": False}, {"h1": 2, "h2": 2}, None),
    ],
)
@pytest.mark.parametrize("launcher", ["Open MPI", "MPICH"])
def test_a_rank_has_the_variables_of_torchs_launcher(
    options: dict[str, Any], ranks: dict[str, int], master: str | None, launcher: str
) -> None:
    """With a key it gets no place to meet where nothing would be encrypted, unless the user names one."""
    ask = ("sh", "-c", "echo " + " ".join(f"${name}" for name in TORCHS))
    spec = LaunchSpec(program=ask, **options)
    here = frozenset({os.uname().nodename, UNNAMED})
    whole = Start(spec, Mpirun("mpirun", launcher, 5), SizePolicy(1, 4), here, port=20001)
    line, settings = whole.line_and_settings(ranks, {})
    told = dict(zip(PLACE[launcher], "3412", strict=True))
    environ = {"PATH": os.environ["PATH"], "MASTER_ADDR": "stale", **settings, **told}
    done = subprocess.run(line[line.index("sh") :], capture_output=True, text=True, check=True, env=environ)
    expected = "stale" if master is None else f"3 4 1 2 {master}"
    assert done.stdout.split() == expected.split()


def test_a_port_is_free_for_rank_0_alone() -> None:
    """Nobody else gets it, nor another job; rank 0 can listen there, as servers do, and again after it has failed."""
    job_of_one = Start(LaunchSpec(program=("true",)), Mpirun("mpirun", "Open MPI", 5), SizePolicy(1, 1), frozenset())
    with with_free_port(job_of_one) as mine, with_free_port(job_of_one) as other:
        assert mine.port != other.port
        with socket.socket() as thief, pytest.raises(OSError, match="in use"):
            thief.bind(("", mine.port))
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")) * 2:
            with socket.socket(family) as rank_0:
                rank_0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                rank_0.bind((address, mine.port))
                rank_0.listen()
    off = replace(job_of_one, spec=replace(job_of_one.spec, rank_variables=False))
    with with_free_port(off) as same:
        assert same.port == 0


def test_the_launcher_hears_whether_ranks_have_begun(messages: RankMessages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no shell is over them, as in jobs that end with a rank; without a launcher they say nothing."""
    report_begin()
    monkeypatch.setenv("RINGREDUCE_MESSAGES", str(messages.folder))
    monkeypatch.setenv("RINGREDUCE_FENCE", "f")
    monkeypatch.setenv("PMIX_HOSTNAME", "n1")
    notify_launcher("has a commit")
    report_begin()
    assert messages.read() == [Mark("has begun", 0, "n1")]


def test_a_rank_that_the_launcher_does_not_hear_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a host without an agent: a warning says what is not heard, but for the beginning."""
    monkeypatch.setenv("RINGREDUCE_MESSAGES", str(tmp_path))
    report_begin()
    assert caplog.text == ""
    monkeypatch.setenv("RINGREDUCE_SHELL", str(os.getppid()))
    notify_launcher("has a commit")
    assert "cannot report to `ringreduce run` that this rank has a commit" in caplog.text


def test_a_world_that_goes_on_renews_the_variables_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `ringreduce run` has set them; where rank 0 listens, nobody may listen any more."""
    for name, value in zip(TORCHS, ("3", "4", "3", "4", "h1", "20001"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RINGREDUCE_MASTER_ADDR", raising=False)
    renew_rank_variables(1, 2, 0, 1)
    assert os.environ["RANK"] == "3"  # it was the program's own
    monkeypatch.setenv("RINGREDUCE_MASTER_ADDR", "h1")
    renew_rank_variables(1, 2, 0, 1)
    assert [os.environ.get(name) for name in TORCHS] == ["1", "2", "0", "1", None, None]


def test_what_the_launcher_says_waits_until_a_rank_looks() -> None:
    """Whatever threads there are, and as the rank ends; what it starts does not end by it, and no handler is called."""
    program = (
        "import os, signal, subprocess, sys, threading\n"
        "import ringreduce as rr\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "signal.signal(signal.SIGUSR2, lambda number, frame: print('handled'))\n"
        "rr.init()\n"
        "def tell(): os.kill(os.getpid(), signal.SIGUSR2)\n"
        "print(rr.hosts_changed())\n"
        "tell(); tell()\n"
        "print(rr.hosts_changed(), rr.hosts_changed())\n"
        "def look(): tell(); print(rr.hosts_changed(), flush=True)\n"
        "thread = threading.Thread(target=look); thread.start(); thread.join()\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\n"
        "child.send_signal(signal.SIGUSR2)\n"
        "child.communicate()\n"
        "print(child.returncode)\n"
        "import atexit; atexit.register(tell)\n"
    )
    environ = {**os.environ, "RINGREDUCE_RESTARTABLE": "1"}
    command = [*SUPERVISOR, *HEARING, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ, timeout=50)
    assert done.stdout.split() == ["False", "True", "False", "True", "0"]


def test_a_script_says_which_hosts_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails, or takes too long with all that it has started, is an error."""
    script = tmp_path / "discover"

    def output(source: str) -> str:
        script.write_text(f"#!/bin/sh\n{source}\n")
        script.chmod(0o755)
        return growth._output(str(script))

    assert output("echo a:2; echo b") == "a:2\nb\n"
    assert output("printf '\\377a:2\\n'") == "\ufffda:2\n"
    with pytest.raises(subprocess.CalledProcessError, match="status 3"):
        output("echo a:2; exit 3")
    monkeypatch.setattr(growth, "_SCRIPT_S", 0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        output("sleep 100 & sleep 100")
    with pytest.raises(subprocess.TimeoutExpired):  # nobody waits for what has left the script's session
        output("setsid sleep 5 & sleep 100")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"\xffa:2\n", "'\ufffda:2' is no host"),
        (b"a:" + b"9" * 5000, "is no host"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_no_answer_of_a_script_ends_the_asking(
    bad: bytes | Exception, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said once, and the last good answer counts until there is another."""
    script, answer = tmp_path / "discover", tmp_path / "answer"
    script.write_text(f"#!/bin/sh\ncat {answer}\n")
    script.chmod(0o755)
    asked = growth.Discovery(str(script), partial(parse_hosts, slots=1), say)
    answer.write_bytes(b"a:2\n")
    asked.ask()
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(bad, Exception):
            patch.setattr(growth, "_output", Mock(side_effect=bad))
        else:
            answer.write_bytes(bad)
        asked.ask()
        asked.ask()
    complaint = capsys.readouterr().err
    assert complaint.count("failed, and its last answer counts: ") == 1
    assert said in complaint
    assert asked.hosts() == {"a": 2}
    answer.write_bytes(b"b\n")
    asked.ask()
    assert asked.hosts() == {"b": 1}


def test_the_examples_of_the_help_are_lines() -> None:
    """Each stands on a line of its own, and no escape is left of what keeps it there."""
    shown = CliRunner().invoke(main, ["run", "--help"], standalone_mode=False).output
    assert "\\" not in shown
    assert "  ringreduce run -np 4 python train.py --lr 0.1\n" in shown
    assert shown.index("--lr 0.1") < shown.index("Options:")


def test_help_begins_with_what_one_would_do() -> None:
    """And a name that there is not with the one that was meant."""
    shown = CliRunner().invoke(main, ["--help"], standalone_mode=False).output
    assert shown.index("  ringreduce run -np 2 python train.py ") < shown.index("Options:")
    for words, said in ((["benhc"], "did you mean bench?"), (["run", "--elastc", "a.py"], "did you mean --elastic?")):
        with pytest.raises(click.UsageError, match=re.escape(said)):
            main(words, standalone_mode=False)


def boxed(text: bytes) -> bytes:
    """Return a notice as Open MPI writes it."""
    return b"-" * 74 + b"\n" + text + b"\n\nmore\n" + b"-" * 74 + b"\n"


@pytest.mark.parametrize("most", [1, 3, 60, 1000])
def test_notices_of_open_mpi_are_dropped_and_the_rest_stays(most: int, rng: Any) -> None:
    """In whatever pieces they come; lines and boxes that only look like them are passed on, NUL bytes too."""
    others = boxed(b"prterun detected that one or more processes \n   Process name: [prterun-a-b-78@1,1]")
    own = boxed(b"mine") + others + b"x" + b"-" * 80 + b"\nMPI_ABORT was\0\n---\n"
    own += b"[warn] Epoch 3\n[n1:12] plm:ssh: Error: setpgid(0,0) failed\nx[warn] Epoll y\n[=>  ] 3 %\r[n1:"
    own += b"\n[warn] Epo\n--"
    warned = b"[warn] Epoll MOD(1) on fd 23 failed. Old events were 6; read change was 0 (none): Bad file descriptor\n"
    text = (
        b"a\n"
        + b"[n1.x:4711] plm:ssh: Warning: setpgid(4718,4718) failed in parent with errno=Permission denied(13)\n"
        + 2 * warned
        + boxed(b"MPI_ABORT was invoked on rank 1 in")
        + boxed(b"prterun noticed that process rank 1")
        + boxed(b"prterun detected that one or more processes \n   Process name: [prterun-a-b-77@1,1]")
        + b"\0"
        + own
    )
    notices, passed = Output(lambda: 77), b""
    while text:
        count = int(rng.integers(1, most + 1))
        passed, text = passed + notices.feed(text[:count]), text[count:]
    assert passed + notices.idle() == b"a\n" + own
    assert notices.feed(b"\n" + boxed(b"prterun has exited due to process rank 0") + b"z") == b"\nz"


def run_in_place_of_mpirun(*program: str, messages: RankMessages | None = None) -> int:
    """Return the status of a job whose mpirun is a program."""

    class InPlace(Start):
        def command(self, ranks: Mapping[str, int], more: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
            return [*program], {**os.environ, **more}

    mpirun_5 = Mpirun("mpirun", "Open MPI", 5)
    one_rank = InPlace(LaunchSpec(program=("true",)), mpirun_5, SizePolicy(1, 1), frozenset(), listed={UNNAMED: 1})
    return Restarts(one_rank, hearing=messages).run()


def test_an_mpirun_that_does_not_end_is_killed_with_its_ranks(
    messages: RankMessages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some time after it was asked to end."""
    monkeypatch.setitem(states._LIMITS_S, states.Phase.ENDING, 0.1)
    tells = f'echo "$RINGREDUCE_FENCE 0 n1 stalls" >"{messages_in(str(messages.folder))}"'
    stays = f'trap "" INT; {tells}; sleep 1000; true'
    assert run_in_place_of_mpirun("sh", "-c", stays, messages=messages) == 128 + signal.SIGKILL


def test_an_mpirun_that_notices_no_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As Open MPI's where it has killed a rank that was just connecting to it: its threads wait for each other."""
    monkeypatch.setattr(chains, "_STUCK_LOOKS", 1)
    monkeypatch.setattr(chains, "_FIRST_LOOKS", 2)
    assert run_in_place_of_mpirun("sh", "-c", "true & exec sleep 1000") == 128 + signal.SIGKILL
    assert "takes no note of processes of its own that have ended: it hangs" in capfd.readouterr().err


def test_a_job_ends_with_mpirun_whatever_holds_its_output(messages: RankMessages, tmp_path: Path) -> None:
    """As an ssh that stays for later does; heartbeats of hosts come all the time meanwhile."""
    beats = f'while :; do echo "- 0 h lives" >"{messages_in(str(messages.folder))}"; done'
    try:
        assert run_in_place_of_mpirun("sh", "-c", f"({beats}) & echo $! >{tmp_path}/pid", messages=messages) == 0
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("options", [[], ["-np", "1"], ["-x", "A=1"]])
def test_one_rank_takes_no_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """Where there is none, a single rank runs all the same; several say what to install."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mpirun, "_NAMES", ("no-mpirun",))
    assert main(["run", *options, "echo", "hi"], standalone_mode=False) == 0
    assert "hi" in capfd.readouterr().out
    with pytest.raises(ConfigError, match="there is no mpirun"):
        main(["run", *options, "-np", "2", "echo", "hi"], standalone_mode=False)


@pytest.mark.parametrize(
    ("kind", "variable"),
    [("MPICH", "HYDRA_LAUNCHER_EXTRA_ARGS"), ("Intel MPI", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")],
)
def test_hosts_that_are_named_in_an_allocation_are_reached_by_its_scheduler(
    monkeypatch: pytest.MonkeyPatch, kind: str, variable: str
) -> None:
    """So that srun gets no options of ssh; those of another library choose nothing."""
    monkeypatch.setattr(start.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(start, "find", lambda required=True: Mpirun("mpiexec", kind, 5))
    spec = LaunchSpec(program=("true",), hosts="a:1,b:1")
    strangers = [name for library, names in start.AGENTS.items() if library != kind for name in names]
    for name in strangers:
        monkeypatch.setenv(name, "x")
    _, settings = start.prepare(spec).line_and_settings({UNNAMED: 2}, {})
    assert "BatchMode" in settings[variable]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "c")
    _, settings = start.prepare(spec).line_and_settings({UNNAMED: 2}, {})
    assert variable not in settings


def test_grid_engines_qrsh_gets_no_options_of_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Open MPI takes it in place of ssh, where it finds it; it knows none of them."""
    monkeypatch.setattr(start, "find", lambda required=True: Mpirun("mpirun", "Open MPI", 5))
    hosts = tmp_path / "hosts"
    hosts.write_text("a 1 q@a UNDEFINED\nb 1 q@b UNDEFINED\n")
    for name, value in {"SGE_ROOT": tmp_path, "ARC": "lx", "PE_HOSTFILE": hosts, "JOB_ID": "7"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(start.shutil, "which", lambda name: f"/bin/{name}")
    for has_qrsh in (False, True):
        if has_qrsh:
            (tmp_path / "bin" / "lx").mkdir(parents=True)
            (tmp_path / "bin" / "lx" / "qrsh").touch(0o755)
        _, settings = start.prepare(LaunchSpec(program=("true",))).line_and_settings({"a": 1, "b": 1}, {})
        assert ("PRTE_MCA_plm_ssh_args" in settings) is not has_qrsh


def test_a_daemon_of_named_hosts_in_an_allocation_is_as_one_of_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM of Slurm is kept from it, and a restart waits for no host that is lost."""
    monkeypatch.setattr(start, "find", lambda required=True: Mpirun("mpirun", "Open MPI", 5))
    monkeypatch.setattr(Mpirun, "_has", lambda self, framework, scheduler: "slurm" in scheduler.components)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a,b")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    made = start.prepare(LaunchSpec(program=("true",), hosts="a:1,b:1", elastic=True))
    _, settings = made.line_and_settings({"a": 1, "b": 1}, {})
    assert settings["SLURM_OVERLAP"] == "1"
    assert "--block-signal=TERM,USR1" in settings["PRTE_MCA_prte_launch_agent"]
    assert "PRTE_MCA_plm_ssh_args" not in settings
