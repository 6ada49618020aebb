"""Pods of an MPI job, played by machines: what kubelet and Kubeflow's MPI operator (v2beta1) or Trainer (v2) give them.

The first machine is the launcher, the others are workers. Nothing of Kubernetes runs: mounts, variables and modes of
files are those that the containers of an MPIJob, or of a TrainJob, get for Open MPI. There is no image: the programs of
/usr/local/bin are those of the environment of Python that has started the cluster.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from _cluster.links import address, call, host_name, hosts_of
from _cluster.machines import entering, folder_of, give, set_environment

__all__ = ["list_workers", "provide"]

_PROGRAMS = ("python", "python3", "mpirun", "mpiexec", "prterun", "prted", "prte", "ringreduce", "horovodrun")
# Kubelet's folders of secrets are open to all, and sshd would refuse them; Kubeflow's own image sets the same.
_IMAGE_SSHD = """HostKey /etc/ssh/host_key
PermitRootLogin yes
UsePAM no
StrictModes no
MaxStartups 100
"""
#: What containers of the image, of the launcher, and of one that the operator makes find in their environment.
_IMAGE = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
_LAUNCHER = {
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}
_OPERATOR = {"K_MPI_JOB_ROLE": "launcher", "NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_DRIVER_CAPABILITIES": ""}
_IMAGE_SSH = "Host *\n    StrictHostKeyChecking no\n    UserKnownHostsFile /dev/null\n    LogLevel ERROR\n"


def provide(name: str, slots: int, kind: str) -> None:
    """Make pods of a cluster's machines, before they boot.

    Args:
        name: of the cluster.
        slots: of each worker.
        kind: ``"mpijob"`` or ``"trainjob"``.
    """
    hosts = hosts_of(name)
    pods = _pods(len(hosts), kind)
    lines = [f"{address(number)} {pod} {pod.partition('.')[0]}\n" for number, pod in enumerate(pods)]
    secret = _secret(folder_of(name))
    for number, pod in enumerate(pods):
        home = folder_of(name) / host_name(name, number) / "files" / "root"
        shutil.rmtree(home / ".ssh")
        _mount(home / ".ssh", secret, mode=0o1777, file_mode=0o600)
        give(name, number, "etc/hosts", "127.0.0.1 localhost\n" + "".join(lines))
        give(name, number, "etc/hostname", pod.partition(".")[0])
        give(name, number, "etc/ssh/sshd_config", _IMAGE_SSHD)
        give(name, number, "etc/ssh/ssh_config", _IMAGE_SSH)
        _install(name, number)
        set_environment(name, number, {**_IMAGE, **({"K_MPI_JOB_ROLE": "worker"} if kind == "mpijob" else {})})
    listed = _listed(pods[1:], slots)
    _mount(folder_of(name) / host_name(name, 0) / "files" / "etc" / "mpi", listed, mode=0o755, file_mode=0o444)
    own = _OPERATOR if kind == "mpijob" else {}
    slots_said = {"OMPI_MCA_orte_set_default_slots": str(slots)}
    set_environment(name, 0, {**_IMAGE, **_LAUNCHER, **slots_said, **own})


def _install(name: str, number: int) -> None:
    """Let a host have the programs of this Python's environment, and nothing that root's shells set on this machine."""
    path = f"export PYTHONPATH={os.environ['PYTHONPATH']}\n" if "PYTHONPATH" in os.environ else ""
    for program in _PROGRAMS:
        file = Path(sys.prefix) / "bin" / program
        if file.exists():
            give(name, number, f"usr/local/bin/{program}", f'#!/bin/sh\n{path}exec {file} "$@"\n', mode=0o755)
    for file_name in (".bashrc", ".profile", ".bash_profile"):
        give(name, number, f"root/{file_name}", "")


def _pods(count: int, kind: str) -> list[str]:
    """Return the names of the pods in the network: the launcher's, then those of the workers."""
    if kind == "mpijob":
        return ["train-launcher", *(f"train-worker-{each}.train.default.svc" for each in range(count - 1))]
    return ["train-launcher-0-0.train", *(f"train-node-0-{each}.train" for each in range(count - 1))]


def _secret(folder: Path) -> dict[str, str]:
    key = folder / "job_key"
    call("ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", "", "-f", str(key))
    public = key.with_suffix(".pub").read_text()
    return {"id_rsa": key.read_text(), "id_rsa.pub": public, "authorized_keys": public}


def _listed(workers: list[str], slots: int) -> dict[str, str]:
    return {
        "hostfile": "".join(f"{worker} slots={slots}\n" for worker in workers),
        "discover_hosts.sh": "#!/bin/sh\n" + "".join(f"echo {worker}:{slots}\n" for worker in workers),
    }


def _mount(folder: Path, files: dict[str, str], mode: int, file_mode: int) -> None:
    """Write files as kubelet does: in a new folder, to which one link points that all files' links go through."""
    dated = f"..{time.strftime('%Y_%m_%d_%H_%M_%S')}.{time.monotonic_ns()}"
    (folder / dated).mkdir(parents=True, mode=0o755)
    for file, text in files.items():
        path = folder / dated / file
        path.write_text(text)
        path.chmod(file_mode | (0o111 if text.startswith("#!") else 0))
    os.symlink(dated, folder / "..data")
    for file in files:
        os.symlink(f"..data/{file}", folder / file)
    folder.chmod(mode)


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
    kind = "mpijob" if (folder_of(name) / "kind").read_text() == "pods" else "trainjob"
    new = folder_of(name) / "shared" / "new-hosts"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    for file, text in _listed(_pods(len(hosts_of(name)), kind)[1 : 1 + count], slots).items():
        (new / file).write_text(text)
        (new / file).chmod(0o555 if text.startswith("#!") else 0o444)
    subprocess.run(entering(name, 0, ["sh", "-c", _EXCHANGE, str(new)]), check=True)
