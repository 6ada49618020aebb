"""What Kubeflow and kubelet give the containers of an MPIJob (v2beta1) or of a TrainJob (v1alpha1, by Trainer 2.4).

One launcher and its workers, for Open MPI: their names, mounts with the modes of all files, variables, and user.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from _cluster.links import call

__all__ = ["USER", "Job", "mount"]

#: The user of containers that do not run as root, and their group; docker/Dockerfile makes it.
USER = 1000
_SSH_ARGS = "-o ConnectionAttempts=10"
_HOSTFILE = "/etc/mpi/hostfile"


@dataclass(frozen=True, slots=True)
class Job:
    """A job of pods.

    Attributes:
        kind: ``"mpijob"`` or ``"trainjob"``.
        workers: how many workers it has, beside its launcher.
        slots: of each worker.
        user: of the containers: 0 or `USER`.
    """

    kind: str
    workers: int
    slots: int
    user: int = 0

    @property
    def home(self) -> str:
        """The home folder in the containers; the keys are mounted in its ``.ssh``."""
        return "/home/mpiuser" if self.user else "/root"

    def names(self) -> list[str]:
        """Return the names of the pods in the network: the launcher's, then those of the workers."""
        if self.kind == "mpijob":
            return ["train-launcher", *(f"train-worker-{each}.train.default.svc" for each in range(self.workers))]
        return ["train-launcher-0-0.train", *(f"train-node-0-{each}.train" for each in range(self.workers))]

    def hosts_lines(self, addresses: list[str]) -> list[tuple[str, str]]:
        """Return (name, address) of all pods, by their long names and their short ones."""
        pairs = list(zip(self.names(), addresses, strict=True))
        return [*pairs, *((name.partition(".")[0], at) for name, at in pairs if "." in name)]

    def variables(self, launcher: bool) -> dict[str, str]:
        """Return the variables that a container gets beside those of its manifest and image."""
        role = {"K_MPI_JOB_ROLE": "launcher" if launcher else "worker"} if self.kind == "mpijob" else {}
        if not launcher:
            return role
        given = {
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_default_hostfile": _HOSTFILE,
            "OMPI_MCA_plm_rsh_args": _SSH_ARGS,
            "OMPI_MCA_orte_set_default_slots": str(self.slots),
        }
        if self.kind == "mpijob":
            return {**role, **given, "NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_DRIVER_CAPABILITIES": ""}
        return {
            **given,
            "PRTE_MCA_prte_keep_fqdn_hostnames": "false",
            "PRTE_MCA_prte_default_hostfile": _HOSTFILE,
            "PRTE_MCA_plm_ssh_args": _SSH_ARGS,
            "PRTE_MCA_prte_set_default_slots": str(self.slots),
        }

    def mount_keys(self, folder: Path, key: Path) -> None:
        """Make the folder that containers see as ``.ssh`` in their home folder.

        Args:
            folder: to make.
            key: file of the job's key; it is made if there is none.
        """
        if not key.exists():
            call("ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", "", "-f", str(key))
        public = key.with_suffix(".pub").read_text()
        if self.kind == "trainjob":
            modes, group = (0o640, 0o644), USER  # the manifest's fsGroup
        else:
            modes, group = (0o644, 0o644) if self.user else (0o600, 0o600), None
        files = {"id_rsa": key.read_text(), "id_rsa.pub": public, "authorized_keys": public}
        mount(folder, files, modes={"id_rsa": modes[0]}, mode=modes[1])
        folder.chmod(0o1777)
        if group is not None:  # as kubelet does for a volume that can only be read
            for path in (folder, *folder.rglob("*")):
                os.chown(path, -1, group, follow_symlinks=False)
                if path.is_dir() and not path.is_symlink():
                    path.chmod(path.stat().st_mode | 0o2550)

    def mount_hosts(self, folder: Path, workers: int | None = None) -> None:
        """Make the folder that the launcher sees as ``/etc/mpi``, which lists all workers, or the first so many."""
        mount(folder, self.listed(workers), modes={"discover_hosts.sh": 0o555}, mode=0o444)

    def listed(self, workers: int | None = None) -> dict[str, str]:
        """Return the files that list all workers, or the first so many."""
        names = self.names()[1:][:workers]
        hostfile = "".join(f"{name} slots={self.slots}\n" for name in names)
        script = "#!/bin/sh\n" + "".join(f"echo {name}\n" for name in names)
        return {"hostfile": hostfile, **({"discover_hosts.sh": script} if self.kind == "mpijob" else {})}


def mount(folder: Path, files: dict[str, str], modes: dict[str, int], mode: int) -> None:
    """Write files as kubelet does: in a new folder, to which one link points that all files' links go through.

    Args:
        folder: to make.
        files: texts by name.
        modes: of single files.
        mode: of the others.
    """
    dated = f"..{time.strftime('%Y_%m_%d_%H_%M_%S')}.{time.monotonic_ns()}"
    (folder / dated).mkdir(parents=True)
    (folder / dated).chmod(0o755)
    for name, text in files.items():
        path = folder / dated / name
        path.write_text(text)
        path.chmod(modes.get(name, mode))
    os.symlink(dated, folder / "..data")
    for name in files:
        os.symlink(f"..data/{name}", folder / name)
