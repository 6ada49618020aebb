"""Pods of an MPI job that are podman's containers of an image; `kubeflow.py` has what they get of kubelet and Kubeflow.

Each has the network of a host of the cluster. The workers, all but the first, run the sshd of the image; the launcher
is a new container each time, which ends with its command.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from _cluster.kubeflow import Job
from _cluster.links import ClusterError, address, call, host_name, hosts_of
from _cluster.machines import folder_of, shared_of

__all__ = ["DATA", "entering", "is_up", "provide", "remove", "start"]

#: Where all containers see the folder that they share, as a claim to a volume would give them.
DATA = "/data"
_SSHD = ("/usr/sbin/sshd", "-De")


def provide(name: str, job: Job, image: str) -> None:
    """Make what the containers mount."""
    folder = folder_of(name)
    shared_of(name).mkdir(parents=True)
    shared_of(name).chmod(0o1777)
    job.mount_keys(folder / "keys", folder / "job_key")
    job.mount_hosts(folder / "hosts")
    (folder / "job.json").write_text(json.dumps({"image": image, **asdict(job)}))


def start(name: str) -> None:
    """Start the workers."""
    for number in range(1, len(hosts_of(name))):
        call(*_line(name, number, ["--detach"], _SSHD))


def is_up(name: str) -> bool:
    """Return whether the hosts of a cluster are containers."""
    return _file(name).exists()


def entering(name: str, number: int, command: Sequence[str]) -> list[str]:
    """Return the command line that runs a command in a worker, or as the launcher."""
    if number:
        return ["podman", "exec", host_name(name, number), *command]
    return _line(name, 0, ["--rm"], command)


def remove(name: str) -> None:
    """End the containers, with all that is in them."""
    if is_up(name):
        names = [host_name(name, number) for number in range(len(hosts_of(name)))]
        call("podman", "rm", "--force", "--ignore", "--time", "0", *names)


def _file(name: str) -> Path:
    return folder_of(name) / "job.json"


def _line(name: str, number: int, options: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return podman's command line for a pod."""
    saved = json.loads(_file(name).read_text())
    image = saved.pop("image")
    job = Job(**saved)
    pods = job.names()
    if number >= len(pods):
        raise ClusterError(f"the job has {len(pods)} pods")
    folder = folder_of(name)
    mounts = [(folder / "keys", f"{job.home}/.ssh:ro"), (shared_of(name), DATA)]
    mounts += [] if number else [(folder / "hosts", "/etc/mpi:ro")]
    hosts = job.hosts_lines([address(each) for each in range(len(pods))])
    return [
        *("podman", "run", *options, "--name", host_name(name, number), "--hostname", pods[number].partition(".")[0]),
        *("--network", f"ns:/run/netns/{host_name(name, number)}", "--ulimit", "host", "--pull", "never"),
        *(f"--add-host={pod}:{at}" for pod, at in hosts),
        *(f"--volume={source}:{target}" for source, target in mounts),
        *(f"--env={key}={value}" for key, value in job.variables(launcher=number == 0).items()),
        *((f"--user={job.user}",) if job.user else ()),
        *(image, *command),
    ]
