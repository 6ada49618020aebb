"""How mpirun's daemons are started by a function."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringreduce.launcher.agent_server import agent_server, private_folder


def asked(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run the agent as mpirun does."""
    line = [*shlex.split(environ["PRTE_MCA_plm_ssh_agent"]), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)


def test_the_agent_has_the_function_start_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the host and the command; its status is the agent's. An error is a status, and a line here with the host."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    calls = []

    def start(host: str, command: str) -> int:
        calls.append((host, command))
        if host == "lost":
            raise RuntimeError("no such\nnode")
        return -9 if host == "h2" else 3

    with private_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        with agent_server(start, folder) as environ:
            assert "SLURM_JOB_ID" not in environ, "mpirun would start its daemons by srun"
            assert asked(environ, "-x", "h1", "A=1;", "prted --uri 'a b'").returncode == 3
            for host in ("lost", "h2"):
                lost = asked(environ, host, "prted")
                assert lost.returncode == {"lost": 255, "h2": 247}[host]
                assert lost.stderr == f"ringreduce: what mpirun has started on {host} is lost\n"
            assert environ["OMPI_MCA_coll"] == "^han"
        late = asked(environ, "h1", "prted")
    assert late.returncode == 255
    assert "nothing starts commands on h1" in late.stderr
    assert calls == [("h1", "A=1; prted --uri 'a b'"), ("lost", "prted"), ("h2", "prted")]
    assert not folder.exists()
    assert capsys.readouterr().err == "ringreduce: cannot start mpirun's daemon on lost: no such node\n"


@pytest.mark.parametrize(
    ("given", "used"),
    [("^ml,hcoll", "^ml,hcoll,han"), ("^han,ml", "^ml,han"), ("basic,tuned", "basic,tuned"), ("han,basic", "basic")],
)
def test_ranks_use_no_han_whatever_is_set(monkeypatch: pytest.MonkeyPatch, given: str, used: str) -> None:
    """And the rest of what a site has set stays."""
    monkeypatch.setenv("OMPI_MCA_coll", given)
    with private_folder() as folder, agent_server(lambda host, command: 0, folder) as environ:
        assert environ["OMPI_MCA_coll"] == used


def test_a_killed_process_leaves_no_folder() -> None:
    source = (
        "import time\n"
        "from ringreduce.launcher.agent_server import private_folder\n"
        "with private_folder() as folder:\n"
        "    print(folder, flush=True)\n"
        "    time.sleep(1000)  # it is killed before\n"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process:
        folder = Path(process.stdout.readline().strip())
        try:
            keeper = os.pidfd_open(int(_keeper_of(folder)))
        finally:
            process.send_signal(signal.SIGKILL)
        waiting = select.poll()
        waiting.register(keeper, select.POLLIN)
        assert waiting.poll(30_000), "it goes on"
        os.close(keeper)
    assert not folder.exists()


def _keeper_of(folder: Path) -> str:
    for _ in range(1000):  # a program that has just been started has no command line for an instant
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if each.read_bytes().split(b"\0")[-2:-1] == [str(folder).encode()]:
                    return each.parent.name
            except OSError:
                continue  # it has ended
    raise AssertionError("there is no keeper")
