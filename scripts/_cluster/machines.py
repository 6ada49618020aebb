"""Hosts that behave as machines: processes, files, memory and an sshd of their own; they can lose their power."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from _cluster.links import ClusterError, address, call, host_name, hosts_of, pids_of, require_hosts, set_link

__all__ = [
    "boot",
    "die",
    "entering",
    "folder_of",
    "forget",
    "give",
    "provide",
    "set_environment",
    "set_still",
    "set_user",
    "shared_of",
]

_BOOT = Path(__file__).with_name("boot.sh")
_BOOT_S = 20.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MEMORY_NBYTES = 1 << 31  # at most, for files in /dev/shm
_SSHD = """HostKey /etc/ssh/host_key
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
MaxStartups 100
PrintMotd no
PrintLastLog no
"""


def folder_of(name: str) -> Path:
    """Return the folder of all that a cluster keeps. Not in /tmp, where each host has its own."""
    return Path("/var/tmp") / f"ringreduce-cluster-{name}"


def shared_of(name: str) -> Path:
    """Return the folder that all hosts of a cluster share, at the same path."""
    return folder_of(name) / "shared"


def provide(name: str) -> None:
    """Write the files that each host has for itself: names, keys, and what its sshd takes."""
    hosts = hosts_of(name)
    if not shutil.which("sshd"):
        raise ClusterError("there is no sshd here: apt-get install openssh-server")
    folder = folder_of(name)
    shared_of(name).mkdir(parents=True)
    folder.chmod(0o755)
    _make_key(folder / "user_key")
    for host in hosts:
        _make_key(folder / host / "files" / "etc" / "ssh" / "host_key")
        (folder / host / "layer").mkdir()
    known = [
        f"{host},{address(number)} {(folder / host / 'files/etc/ssh/host_key.pub').read_text()}"
        for number, host in enumerate(hosts)
    ]
    for number, host in enumerate(hosts):
        give(name, number, "etc/ssh/sshd_config", _SSHD)
        give(name, number, "etc/hosts", (Path("/etc/netns") / host / "hosts").read_text())
        for path, text in {
            "id_ed25519": (folder / "user_key").read_text(),
            "authorized_keys": (folder / "user_key.pub").read_text(),
            "known_hosts": "".join(known),
        }.items():
            give(name, number, f"root/.ssh/{path}", text, mode=0o600)
        (folder / host / "files" / "root" / ".ssh").chmod(0o700)
        (folder / host / "files" / "root").chmod(0o700)


def _make_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path))


def give(name: str, number: int, path: str, text: str, mode: int = 0o644) -> None:
    """Let a host have a file of its own from its next boot on; the path begins at its root."""
    file = folder_of(name) / host_name(name, number) / "files" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)


def set_environment(name: str, number: int, variables: dict[str, str]) -> None:
    """Set the variables of the programs that `exec` starts on a host: these alone, as in a container."""
    lines = (f"{key}={value}\n" for key, value in variables.items())
    path = folder_of(name) / host_name(name, number) / "environment"
    path.write_text("".join(lines))


def set_user(name: str, number: int, user: int) -> None:
    """Let the programs that `exec` starts on a host run as a user with a group of the same number; not as root."""
    (folder_of(name) / host_name(name, number) / "user").write_text(str(user))


def boot(name: str, numbers: Iterable[int]) -> None:
    """Start machines, all at the same time; what is left of an earlier life is ended."""
    began = []
    for number in numbers:
        host = require_hosts(name, number + 1)[number]
        for pid in pids_of(host):
            with suppress(ProcessLookupError):  # it ends by itself
                os.kill(pid, signal.SIGKILL)
        set_link(host, "up")
        folder = folder_of(name) / host
        if not folder.exists():
            raise ClusterError(f"{host} is a link alone; machines are made by `up ssh`, `up slurm` or `up pods`")
        line = ["ip", "netns", "exec", host, "unshare", "--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child"]
        line += ["bash", str(_BOOT), _name_in(folder), str(folder), str(shared_of(name)), str(_MEMORY_NBYTES)]
        line += _in_empty_folders()
        log = (folder / "boot.log").open("w+")
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={"PATH": _PATH, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8"},
        )
        began.append((host, process, folder / "boot.log"))
    deadline = time.monotonic() + _BOOT_S
    for host, process, path in began:
        while "up\n" not in path.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ClusterError(f"{host} does not boot: {path.read_text().strip()}")
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (path.parent / "first").write_text(children[0])


def _in_empty_folders() -> list[str]:
    """Return the checkout and Python's environment, where these lie in folders that each host has empty."""
    wanted = (Path(__file__).resolve().parents[2], Path(sys.prefix).resolve())
    found = [each for each in wanted if str(each).startswith(("/tmp/", "/run/"))]
    return [str(each) for each in found if not any(other in each.parents for other in found)]


def _name_in(folder: Path) -> str:
    """Return how a machine calls itself: its host's name, or that of the pod that it plays."""
    given = folder / "files" / "etc" / "hostname"
    return given.read_text().strip() if given.exists() else folder.name


def _first(name: str, number: int) -> str:
    """Return the number of the first process of a machine; empty: it has no power, or is a link alone."""
    path = folder_of(name) / host_name(name, number) / "first"
    pid = path.read_text() if path.exists() else ""
    return pid if pid and Path("/proc", pid).exists() else ""


def die(name: str, number: int) -> None:
    """Take the power of a machine: its link and its processes end at once, and nothing is sent."""
    host = require_hosts(name, number + 1)[number]
    first = _first(name, number)
    if not first:
        raise ClusterError(f"{host} has no power, or is a link alone")
    set_link(host, "down")
    os.kill(int(first), signal.SIGKILL)


def set_still(name: str, number: int, still: bool) -> None:
    """Let all of a machine but its first process stand still, as where it is paused, or go on."""
    first = _first(name, number)
    for pid in pids_of(require_hosts(name, number + 1)[number]):
        with suppress(ProcessLookupError):
            if str(pid) != first:
                os.kill(pid, signal.SIGSTOP if still else signal.SIGCONT)


def entering(name: str, number: int, command: Sequence[str]) -> list[str]:
    """Return the command line that runs a command on a host, in this folder if the host has it."""
    host = require_hosts(name, number + 1)[number]
    folder = folder_of(name) / host
    if not folder.exists():
        return [
            *("ip", "netns", "exec", host, "unshare", "--uts", "bash", "-c"),
            f"hostname {host}; exec {shlex.join(command)}",
        ]
    first = _first(name, number)
    if not first:
        raise ClusterError(f"{host} has no power; `boot {number}` starts it")
    environment = folder / "environment"
    variables = ["-i", *environment.read_text().splitlines()] if environment.exists() else []
    user = (folder / "user").read_text() if (folder / "user").exists() else ""
    become = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"] if user else []
    here = 'cd "$0" 2>/dev/null || cd /; exec env "$@"'
    return [
        *("nsenter", "-t", first, "--net", "--mount", "--uts", "--pid", "--ipc", "--root"),
        *("sh", "-c", here, os.getcwd(), *variables, *become, *command),
    ]


def forget(name: str) -> None:
    """Remove all that the cluster has kept, once its hosts are gone."""
    shutil.rmtree(folder_of(name), ignore_errors=True)
