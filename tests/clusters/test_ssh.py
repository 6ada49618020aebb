"""Jobs over real ssh, from a virtual environment that no login shell knows."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import SEEN, Cluster, Done, cluster_of

cluster = cluster_of("ssh", 3)


def hosts(cluster: Cluster, *slots: int) -> str:
    """Return the first hosts with their slots, as for -H."""
    return ",".join(f"{cluster.host(number)}:{count}" for number, count in enumerate(slots))


def places(cluster: Cluster, *slots: int) -> list[str]:
    """Return what ranks say that fill hosts with these slots."""
    numbers = [number for number, count in enumerate(slots) for _ in range(count)]
    return [f"rank {rank} of {len(numbers)} on {cluster.host(number)}" for rank, number in enumerate(numbers)]


@pytest.mark.parametrize("slots", [pytest.param((1, 1), marks=pytest.mark.thorough), (2, 1), (1, 1, 2)])
def test_ranks_run_on_the_hosts_that_are_named(cluster: Cluster, slots: tuple[int, ...]) -> None:
    """The interpreter of the environment is found on each, as is the module that it runs."""
    done = cluster.run(0, "ringreduce", "run", "-H", hosts(cluster, *slots), "python", "who.py")
    assert (done.status, done.ranks()) == (0, places(cluster, *slots)), done.text


def test_a_launcher_outside_of_the_job(cluster: Cluster) -> None:
    """Where the job is started, no rank need run."""
    listed = f"{cluster.host(1)}:1,{cluster.host(2)}:1"
    done = cluster.run(0, "ringreduce", "run", "-H", listed, "who.py")
    assert (done.status, len(done.ranks())) == (0, 2), done.text
    assert cluster.host(0) not in "".join(done.ranks())


@pytest.mark.thorough
def test_horovodrun_hands_on_the_environment(cluster: Cluster) -> None:
    """All variables but those that belong to a host; `ringreduce run` those that are named, unless it is asked to."""
    cluster.write(
        "variable.py", "import os, ringreduce as rr; rr.init()\nprint('rank', rr.rank(), os.environ.get('MINE'))"
    )
    asked = ("-np", "2", "-H", hosts(cluster, 1, 1), "python", "variable.py")
    mine = {"MINE": "here"}
    assert cluster.run(0, "horovodrun", *asked, variables=mine).ranks() == ["rank 0 here", "rank 1 here"]
    assert cluster.run(0, "ringreduce", "run", *asked, variables=mine).ranks() == ["rank 0 here", "rank 1 None"]
    done = cluster.run(0, "ringreduce", "run", "--env=all", *asked, variables=mine)
    assert done.ranks() == ["rank 0 here", "rank 1 here"], done.text


@pytest.mark.thorough
def test_threads_of_a_rank_have_cores(cluster: Cluster) -> None:
    """On several hosts, a rank may use as many cores as it has threads, which are its share of the host's cores."""
    program = "import os; print('rank', len(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    cores = len(os.sched_getaffinity(0))
    for count in (1, 2):
        asked = ("-H", hosts(cluster, count, count), "python", "-c", program)
        done = cluster.run(0, "ringreduce", "run", *asked)
        assert done.ranks() == [f"rank {cores} {max(cores // count, 1)}"] * 2 * count, done.text
    done = cluster.run(0, "ringreduce", "run", "-x", "OMP_NUM_THREADS=2", "-H", hosts(cluster, 1, 1), *asked[2:])
    assert done.ranks() == [f"rank {cores} 2"] * 2, done.text


STORE = """
import os, socket
import torch.distributed as dist
from ringreduce import runtime

def listening():
    inodes = {os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if each.isdecimal()
              and os.path.islink(f"/proc/self/fd/{each}")}
    rows = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/self/net/{kind}")]
    return sorted(row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes)

runtime.init()
before = listening()
dist.init_process_group("ringreduce")
group = dist.new_group([0, 2])
gathered = [None] * 3
dist.all_gather_object(gathered, socket.gethostname())
print("rank", dist.get_rank(), len(set(gathered)), listening() == before, flush=True)
dist.destroy_process_group()
"""


def test_torchs_store_listens_nowhere(cluster: Cluster) -> None:
    """On several hosts ranks reach it by MPI, which has its own sockets."""
    cluster.write("store.py", STORE)
    done = cluster.run(0, "ringreduce", "run", "-H", hosts(cluster, 1, 1, 1), "python", "store.py")
    assert (done.status, done.ranks()) == (0, [f"rank {rank} 3 True" for rank in range(3)]), done.text


# ---- what can be wrong with a host ----


def in_terminal(cluster: Cluster, limit_s: float, *words: str) -> Done:
    """Run a command on the first host in a terminal, where programs may ask questions; nobody answers."""
    begin = time.monotonic()
    line = cluster.line(0, "timeout", "--foreground", "--kill-after=2", str(limit_s), *words)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cluster.shared)
        os.execvp(line[0], line)
    text = b""
    while select.select([terminal], [], [], limit_s + 5)[0]:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # of Linux at the end of a terminal
            break
        text += chunk
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return Done(os.waitstatus_to_exitcode(status), text.decode(errors="replace"), time.monotonic() - begin)


@pytest.fixture
def stranger(cluster: Cluster) -> Iterator[str]:
    """A host whose key the first one does not know."""
    host = cluster.host(2)
    cluster.run(0, "sh", "-c", f"cp ~/.ssh/known_hosts /tmp/known; sed -i /^{host},/d ~/.ssh/known_hosts")
    yield host
    cluster.run(0, "cp", "/tmp/known", "/root/.ssh/known_hosts")


def test_an_unknown_key_is_an_error_in_a_terminal_too(cluster: Cluster, stranger: str) -> None:
    """What ssh would ask there stops it, as it is no process of the terminal's own group."""
    done = in_terminal(cluster, 30, "ringreduce", "run", "-H", f"{cluster.host(0)}:1,{stranger}:1", "who.py")
    assert done.status not in (0, 124), done.text
    assert f"ringreduce: the key of {stranger} is not known here, or has changed: log in once by ssh" in done.text


def test_a_password_is_not_asked_for(cluster: Cluster) -> None:
    """By a host that does not take the key of the first one; in a terminal, too."""
    host = cluster.host(2)
    keys = "/root/.ssh/authorized_keys"
    cluster.run(2, "mount", "--bind", "/dev/null", keys)
    try:
        done = in_terminal(cluster, 30, "ringreduce", "run", "-H", f"{cluster.host(0)}:1,{host}:1", "who.py")
    finally:
        cluster.run(2, "umount", keys)
    assert done.status not in (0, 124), done.text
    said = f"ringreduce: {host} takes no key that is here, and nobody can type a password: `ssh-copy-id {host}`"
    assert said in done.text


def test_a_host_that_lacks_what_a_rank_needs_is_named(cluster: Cluster) -> None:
    """The script, the program or its Python, with where it is on the first host; another Python will not do."""
    here, there = cluster.host(0), cluster.host(1)
    asked = ("-H", hosts(cluster, 1, 1))
    cluster.run(0, "sh", "-c", "mkdir -p /opt/own && cp who.py /opt/own/ && printf '#!/bin/sh\n' >/opt/own/tool && "
                "chmod +x /opt/own/tool")  # fmt: skip
    cluster.run(1, "mkdir", "-p", "/opt/own")
    done = cluster.run(0, "ringreduce", "run", *asked, "python", "-W", "ignore", "/opt/own/who.py")
    assert done.status not in (0, 124), done.text
    assert f"rank 1 on {there} finds no who.py in /opt/own; on {here} it is there" in done.text
    done = cluster.run(0, "env", f"PATH=/opt/own:{os.environ['PATH']}", "ringreduce", "run", *asked, "tool")
    assert done.status not in (0, 124), done.text
    assert f"rank 1 on {there} finds no tool; on {here} it is /opt/own/tool" in done.text
    environment = f"mkdir -p /opt/env/bin && touch /opt/env/pyvenv.cfg && ln -sf {sys.executable} /opt/env/bin/python"
    assert cluster.run(0, "sh", "-c", environment).status == 0
    for path, python in ((f"/opt/env/bin:{os.environ['PATH']}", "python"), (os.environ["PATH"], "/opt/env/bin/python")):
        done = cluster.run(0, "env", f"PATH={path}", "ringreduce", "run", *asked, python, "-c", "pass")
        assert done.status not in (0, 124), done.text
        assert f"rank 1 on {there} finds no python in /opt/env/bin; on {here} it is there" in done.text, done.text


@pytest.mark.thorough
def test_a_host_without_ringreduce_is_named(cluster: Cluster) -> None:
    """Where it is on the first host is said, too; also where ranks write to files."""
    package = Path(__file__).parents[2] / "ringreduce"
    cluster.run(2, "rm", "-rf", str(package))  # of its own layer
    listed = f"{cluster.host(0)}:1,{cluster.host(2)}:1"
    jobs = [cluster.run(0, "ringreduce", "run", *more, "-H", listed, "who.py") for more in ((), ("--log-dir", "logs"))]
    cluster.boot(2)
    for done in jobs:
        assert done.status not in (0, 124), done.text
        assert f"there is no ringreduce on {cluster.host(2)}; here it is in {package}" in done.text


def test_a_machine_without_ssh(cluster: Cluster) -> None:
    """What is missing is named, and by which package it comes."""
    cluster.run(0, "mount", "--bind", "/dev/null", "/usr/bin/ssh")
    try:
        done = cluster.run(0, "ringreduce", "run", "-H", hosts(cluster, 1, 1), "who.py")
    finally:
        cluster.run(0, "umount", "/usr/bin/ssh")
    assert done.status == 2, done.text
    assert "no program ssh here: install openssh-client" in done.text


@pytest.mark.thorough
def test_a_host_that_sends_nothing(cluster: Cluster) -> None:
    """Whose packets are lost is named within the time that ssh waits for a connection."""
    lose = "ip neigh replace {} lladdr 02:00:00:00:00:99 nud permanent dev eth0"
    cluster.run(0, "sh", "-c", lose.format(f"$(getent hosts {cluster.host(1)} | cut -d' ' -f1)"))
    try:
        done = cluster.run(0, "ringreduce", "run", "-H", hosts(cluster, 1, 1), "who.py", timeout_s=40)
    finally:
        cluster.run(0, "sh", "-c", "ip neigh flush dev eth0 nud permanent")
    assert done.status not in (0, 124), done.text
    assert cluster.host(1) in done.text


@pytest.mark.thorough
def test_a_host_that_cannot_connect_back(cluster: Cluster) -> None:
    """It lets others log in, and its own connections to the first host are lost: it is named, before they give up."""
    first = cluster.run(0, "getent", "hosts", cluster.host(0)).text.split()[0]
    nobody = f"{first.rpartition('.')[0]}.99"
    lose = (
        "ip rule add ipproto tcp sport 22 lookup main pref 10",  # answers to logins
        f"ip rule add to {first} lookup 100 pref 20",
        f"ip route add default dev eth0 via {nobody} table 100",
        f"ip neigh replace {nobody} lladdr 02:00:00:00:00:99 nud permanent dev eth0",
    )
    cluster.run(1, "sh", "-c", " && ".join(lose))
    try:
        done = cluster.run(0, "ringreduce", "run", "-H", hosts(cluster, 1, 1, 1), "who.py", timeout_s=100)
    finally:
        for number in ("10", "20"):
            cluster.run(1, "ip", "rule", "del", "pref", number)
    assert done.status not in (0, 124), done.text
    assert f"ringreduce: {cluster.host(1)} cannot connect to mpirun on this host, though a login by ssh" in done.text


@pytest.mark.thorough
def test_a_host_whose_logins_hang(cluster: Cluster) -> None:
    """As where a shared file system is gone: it is named, once its ranks have not come in time."""
    cluster.run(1, "sh", "-c", "echo sleep 1000 >/root/.bashrc")  # of its own layer
    done = cluster.run(0, "ringreduce", "run", "--start-timeout", "5", "-H", hosts(cluster, 1, 1, 1), "who.py")
    cluster.boot(1)
    assert done.status not in (0, 124), done.text
    assert "ranks 0-2 of 3 did not come to their hosts within 5 s (--start-timeout)" in done.text
    assert re.findall(r"(\S+) is lost", done.text) == [cluster.host(1)]


@pytest.mark.thorough
def test_a_rank_that_fails_at_once(cluster: Cluster) -> None:
    """Ends the job, though Open MPI 5.0's mpirun then hangs in each third: it kills a rank that just connects to it."""
    cluster.write("fails.sh", "[ $OMPI_COMM_WORLD_RANK = 0 ] || { sleep $1; exit 3; }; python -c 'import mpi4py.MPI'")
    for delay_s in (0.02, 0.05, 0.08):
        asked = ("-H", hosts(cluster, 1, 0, 1), "sh", "fails.sh", str(delay_s))
        done = cluster.run(0, "ringreduce", "run", *asked)
        assert done.status not in (0, 124), done.text
        assert f"rank 1 on {cluster.host(2)} failed" in done.text


@pytest.mark.thorough
def test_more_ranks_than_slots(cluster: Cluster) -> None:
    """Are refused, unless they are asked for."""
    asked = ("-np", "3", "-H", hosts(cluster, 1, 1), "python", "who.py")
    refused = cluster.run(0, "ringreduce", "run", *asked)
    assert refused.status == 2
    assert "--oversubscribe" in refused.text
    for variables in ({}, {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}):  # also as for one machine
        done = cluster.run(0, "ringreduce", "run", "--oversubscribe", *asked, variables=variables)
        assert (done.status, len(done.ranks())) == (0, 3), done.text
        assert {line.rpartition(" ")[2] for line in done.ranks()} == {cluster.host(0), cluster.host(1)}


#: Calls a function three times: each rank returns where it is, and 24 MB; rank 2 raises an error; it is killed.
FUNCTION = """
import os, signal, socket, sys
import numpy as np
import ringreduce as rr

def work(what):
    rr.init()
    if rr.rank() == 2:
        if what == "raises":
            raise KeyError("the reason")
        if what == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    rr.barrier()
    return socket.gethostname(), np.full(3_000_001, float(rr.rank()))

if __name__ == "__main__":
    hosts, *calls = sys.argv[1:]
    for what in calls:
        try:
            for rank, (host, array) in enumerate(rr.run(work, (what,), num_proc=3, hosts=hosts)):
                print("rank", rank, "on", host, array.sum() == rank * 3_000_001)
        except (rr.CollectiveError, rr.ConfigError) as error:
            print(f"{what}: {type(error).__name__}:", str(error).replace("\\n", " "))
"""


def call(cluster: Cluster, *calls: str, folder: str) -> Done:
    """Call the function on three hosts, one rank each, with a folder for temporary files."""
    path = cluster.write("function.py", FUNCTION)
    return cluster.run(0, "python", str(path), hosts(cluster, 1, 1, 1), *calls, variables={"TMPDIR": folder})


def of_calls(cluster: Cluster, folder: str) -> str:
    """Return what calls have left on the hosts in a folder for temporary files."""
    return "".join(cluster.run(number, "find", folder, "-name", "ringreduce-run-*").text for number in range(3))


def returned(cluster: Cluster) -> list[str]:
    """Return what the program says where each rank has returned."""
    return [f"rank {rank} on {cluster.host(rank)} True" for rank in range(3)]


def test_a_function_on_hosts_that_share_no_temporary_folder(cluster: Cluster) -> None:
    """What ranks of all hosts return comes back, and so does an error of one. Nothing is left on the hosts."""
    done = call(cluster, "returns", "raises", folder="/tmp")
    assert done.ranks() == returned(cluster), done.text
    assert "raises: CollectiveError: rank 2 of 3 failed: Traceback" in done.text
    assert "KeyError: 'the reason'" in done.text
    assert of_calls(cluster, "/tmp") == ""


@pytest.mark.thorough
def test_a_rank_of_a_function_that_dies_on_another_host(cluster: Cluster) -> None:
    """Is named, and nothing is left."""
    done = call(cluster, "is killed", folder="/tmp")
    assert "rank 2 was ended by SIGKILL" in done.text
    assert re.search("is killed: CollectiveError: .* of 3 ranks these had not returned: .*2", done.text), done.text
    assert of_calls(cluster, "/tmp") == ""


@pytest.mark.thorough
def test_a_function_on_hosts_that_share_a_temporary_folder(cluster: Cluster) -> None:
    """Its files are not copied."""
    folder = str(cluster.shared)
    done = call(cluster, "returns", "raises", folder=folder)
    assert done.ranks() == returned(cluster), done.text
    assert "raises: CollectiveError: rank 2 of 3 failed: Traceback" in done.text
    assert of_calls(cluster, folder) == ""


def test_a_function_on_a_host_that_has_no_temporary_folder(cluster: Cluster) -> None:
    """Is refused in one line that says what is needed, before any rank starts."""
    cluster.run(0, "mkdir", "-p", "/root/own")
    done = call(cluster, "returns", folder="/root/own")
    assert done.ranks() == [], done.text
    assert re.search(f"Error: ringreduce.run: {cluster.host(1)}: /root/own/.*: No such file or directory", done.text)
    assert "set TMPDIR to a folder that each host has" in done.text
    assert "returns: ConfigError" in done.text


@pytest.mark.parametrize("sealed", [False, True])
def test_one_address_shows_all_hosts(cluster: Cluster, sealed: bool) -> None:
    """Rank 0 hears the ranks of other hosts, in sealed notes, too, and alone listens."""
    cluster.write("seen.py", SEEN)
    token = str(cluster.shared / "token")
    options = ["--status", "9400", "--status-token-file", token]
    if sealed:
        assert cluster.run(0, "ringreduce", "keygen", str(cluster.shared / "key")).status == 0
        options.append(f"--encrypt={cluster.shared / 'key'}")
    done = cluster.run(0, "ringreduce", "run", *options, "-H", hosts(cluster, 1, 2), "python", "seen.py", token)
    assert (done.status, done.ranks()) == (0, places(cluster, 1, 2)), done.text


def test_a_network_that_each_host_has_for_itself_is_left_out(cluster: Cluster) -> None:
    """Docker's bridge has one address everywhere; where a user has chosen it, the error says so."""
    adds = "ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0; ip link set docker0 up"
    asked = ("ringreduce", "run", "-H", hosts(cluster, 1, 1), "--start-timeout", "30")
    try:
        for number in (0, 1):
            assert cluster.run(number, "sh", "-c", adds).status == 0
        done = cluster.run(0, *asked, "who.py")
        assert (done.status, done.ranks()) == (0, places(cluster, 1, 1)), done.text
        chosen = {"OMPI_MCA_btl_tcp_if_exclude": "lo"}
        done = cluster.run(0, *asked, "--start-timeout", "8", "who.py", variables=chosen)
        assert done.status != 0
        ours = "docker0 (172.17.0.1): if ranks do not find each other there, name the network"
        # Where both ranks connect to themselves at once, Open MPI ends the job before the limit.
        assert ours in done.text or "Open MPI failed to TCP connect" in done.text, done.text
    finally:
        for number in (0, 1):
            cluster.run(number, "ip", "link", "delete", "docker0")
