"""Pods of an MPI job, played by machines, with what kubelet and Kubeflow give them (`kubeflow.py`).

The first machine is the launcher, the others are workers. Nothing of Kubernetes runs. There is no image: the programs
of /usr/local/bin are those of the environment of Python that has started the cluster, and sshd runs as root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from _cluster.kubeflow import USER, Job
from _cluster.links import ClusterError, address, host_name, hosts_of
from _cluster.machines import entering, folder_of, give, set_environment, set_user, shared_of

__all__ = ["list_workers", "provide"]

_PROGRAMS = ("python", "python3", "mpirun", "mpiexec", "prterun", "prted", "prte", "ringreduce", "horovodrun")
_DOCKER = Path(__file__).resolve().parents[2] / "docker"
_SSHD = "HostKey /etc/ssh/host_key\nUsePAM no\n"


def provide(name: str, job: Job) -> None:
    """Make pods of a cluster's machines, before they boot."""
    pods = job.names()
    lines = (f"{at} {pod}\n" for pod, at in job.hosts_lines([address(number) for number in range(len(pods))]))
    hosts = "127.0.0.1 localhost\n" + "".join(lines)
    if job.user:
        _require_readable(Path(__file__).parents[2], Path(sys.prefix), Path(sys.base_prefix))
        shared_of(name).chmod(0o1777)
    for number, pod in enumerate(pods):
        files = folder_of(name) / host_name(name, number) / "files"
        shutil.rmtree(files / "root" / ".ssh")
        home = files / job.home.lstrip("/")
        home.mkdir(parents=True, exist_ok=True)
        os.chown(home, job.user, job.user)
        job.mount_keys(home / ".ssh", folder_of(name) / "job_key")
        give(name, number, "etc/hosts", hosts)
        give(name, number, "etc/hostname", pod.partition(".")[0])
        give(name, number, "etc/ssh/sshd_config", _SSHD + (_DOCKER / "sshd.conf").read_text())
        give(name, number, "etc/ssh/ssh_config", (_DOCKER / "ssh.conf").read_text())
        if job.user:
            (files / "root").chmod(0o755)
            _add_user(name, number)
        _install(name, number)
        image = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": job.home}
        set_environment(name, number, {**image, **job.variables(launcher=number == 0)})
    job.mount_hosts(folder_of(name) / host_name(name, 0) / "files" / "etc" / "mpi")


def _require_readable(*folders: Path) -> None:
    """Raise a `ClusterError` if the user of the pods cannot reach a folder. /root is open to all in such pods."""
    for folder in map(Path.resolve, folders):
        for each in (folder, *folder.parents):
            if each != Path("/root") and each.stat().st_mode & 0o005 != 0o005:
                raise ClusterError(f"the pods' user, {USER}, may not read {each}")


def _add_user(name: str, number: int) -> None:
    """Let a host have the user of the image, whose sshd listens where that user's may."""
    for file, entry in (
        ("passwd", f"mpiuser:x:{USER}:{USER}::/home/mpiuser:/bin/bash"),
        ("group", f"mpiuser:x:{USER}:"),
    ):
        others = [line for line in Path("/etc", file).read_text().splitlines() if line.split(":")[2] != str(USER)]
        give(name, number, f"etc/{file}", "\n".join([*others, entry, ""]))
    config = folder_of(name) / host_name(name, number) / "files" / "etc" / "ssh" / "sshd_config"
    config.write_text(f"Port 2222\n{config.read_text()}")
    set_user(name, number, USER)


def _install(name: str, number: int) -> None:
    """Let a host have the programs of this Python's environment, and nothing that root's shells set on this machine."""
    path = f"export PYTHONPATH={os.environ['PYTHONPATH']}\n" if "PYTHONPATH" in os.environ else ""
    for program in _PROGRAMS:
        file = Path(sys.prefix) / "bin" / program
        if file.exists():
            give(name, number, f"usr/local/bin/{program}", f'#!/bin/sh\n{path}exec {file} "$@"\n', mode=0o755)
    for file_name in (".bashrc", ".profile", ".bash_profile"):
        give(name, number, f"root/{file_name}", "")


#: Exchanges the files of a mounted folder as kubelet's AtomicWriter does. Arguments: the folder with the new files.
_EXCHANGE = """set -e
cd /etc/mpi
before=$(readlink ..data)
now=..$(date +%Y_%m_%d_%H_%M_%S.%N)
cp -a "$0" "$now"
ln -s "$now" ..data_tmp
mv -T ..data_tmp ..data
rm -rf "$before"
"""


def list_workers(name: str, count: int, slots: int) -> None:
    """Let the launcher's files name the first so many workers from now on, as when an MPIJob's replicas change."""
    if (folder_of(name) / "kind").read_text() != "pods":
        raise ClusterError("only the workers of an MPIJob change while it runs; see `up pods`")
    job = Job("mpijob", len(hosts_of(name)) - 1, slots)
    new = folder_of(name) / "shared" / "new-hosts"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    for file, text in job.listed(count).items():
        (new / file).write_text(text)
        (new / file).chmod(0o555 if text.startswith("#!") else 0o444)
    subprocess.run(entering(name, 0, ["sh", "-c", _EXCHANGE, str(new)]), check=True)
