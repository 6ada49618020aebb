"""The image of docker/Dockerfile, built by podman in a store of its own, of which nothing is left."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import requires, version
from pathlib import Path

from machines import Cluster, ended, why_not
from packaging.requirements import Requirement

CHECKOUT = Path(__file__).parents[2]
#: What the Dockerfile begins with, and the release of Debian whose own Python takes its place here.
BASE, SUITE, PYTHON = "python:3.11-slim", "bookworm", "3.11"
NAME = "ringreduce:1"
#: Control groups and limits are not to be had in many containers, where tests run.
CONFIGURATION = """[containers]
default_ulimits = []
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
runtime = "runc"
tmp_dir = "{folder}/engine"
[network]
network_backend = "netavark"
"""
STORAGE = """[storage]
driver = "overlay"
graphroot = "{folder}/store"
runroot = "{folder}/run"
"""


class Podman:
    """podman, whose images and containers lie in a folder.

    Args:
        folder: to make; `close` removes it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        (folder / "containers.conf").write_text(CONFIGURATION.format(folder=folder))
        (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
        self.variables = {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }

    def __call__(self, *words: str, timeout_s: float = 60.0) -> str:
        """Return what it prints; it must end well within the limit."""
        return called(["podman", *words], timeout_s, self.variables)

    def build(self) -> None:
        """Build the image of the Dockerfile, with torch for CPUs alone, and one with a program on top of it."""
        base = self._folder / "base"
        packages = "python3,python3-pip,ca-certificates"
        called(["debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(base)], timeout_s=400)
        (base / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
        # Debian marks its Python as one that pip may not change; that of the image is not marked.
        for mark in base.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            mark.unlink()
        archive = self._folder / "base.tar"
        called(["tar", "--directory", str(base), "--create", "--file", str(archive), "."], timeout_s=120)
        self("import", str(archive), f"localhost/{BASE}", timeout_s=200)
        archive.unlink()
        shutil.rmtree(base)
        index = self._packages()
        files = "nofile={}:{}".format(
            *resource.getrlimit(resource.RLIMIT_NOFILE)
        )  # more takes another right than root's
        self(
            *("build", "--pull=never", "--network=host", f"--ulimit={files}", "--file", "docker/Dockerfile"),
            *("--build-arg=TORCH_INDEX=file:///index/torch", f"--volume={index}:/index:ro"),
            *(f"--volume={index / 'pip.conf'}:/etc/pip.conf:ro", f"--tag={NAME}", str(CHECKOUT)),
            timeout_s=500,
        )
        shutil.rmtree(index)

    def add(self, name: str, files: Iterable[Path]) -> None:
        """Make an image as users do: from the one that was built, with files in its folder."""
        folder = self._folder / "added"
        folder.mkdir()
        for file in files:
            shutil.copy(file, folder)
        (folder / "Dockerfile").write_text(f"FROM {NAME}\nCOPY *.py /app/\n")
        self("build", "--pull=never", f"--tag={name}", str(folder), timeout_s=100)
        shutil.rmtree(folder)

    def _packages(self) -> Path:
        """Download what the image needs, by the settings of this machine; return a folder with two indexes for pip.

        That of torch has all that torch needs, the other has no torch: the build fails if it does not ask the first.
        """
        index = self._folder / "index"
        wheels = index / "wheels"
        needed = [Requirement(line) for line in requires("ringreduce") or ()]
        extras = ({"extra": ""}, {"extra": "mpi"}, {"extra": "torch"})
        wanted = [each for each in needed if each.marker is None or any(map(each.marker.evaluate, extras))]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", f"--python-version={PYTHON}"]
        pip += ["--constraint", str(CHECKOUT / "constraints.txt"), "--dest", str(wheels), "setuptools>=77"]
        called([*pip, *(f"{each.name}{each.specifier}" for each in wanted)], timeout_s=400)
        for wheel in wheels.iterdir():
            project = re.sub("[-_.]+", "-", wheel.name.partition("-")[0]).lower()
            for name in ("torch", "others"):
                if (name, project) != ("others", "torch"):
                    page = index / name / project / "index.html"
                    page.parent.mkdir(parents=True)
                    page.write_text(f'<a href="../../wheels/{wheel.name}">{wheel.name}</a>\n')
        (index / "pip.conf").write_text("[global]\nindex-url = file:///index/others\n")
        return index

    def close(self) -> None:
        """Remove all images and containers, and the mounts of the store."""
        for words in (("rm", "--all", "--force", "--time", "0"), ("rmi", "--all", "--force")):
            subprocess.run(["podman", *words], env={**os.environ, **self.variables}, timeout=60, check=False)
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in reversed([each for each in mounts if each.startswith(f"{self._folder}/")]):
            subprocess.run(["umount", "--lazy", mount], timeout=20, check=False)
        shutil.rmtree(self._folder)


class Pods(Cluster):
    """A job of a launcher and two workers of two slots each, which are containers of an image.

    Args:
        kind: ``"pods"`` or ``"trainjob"``.
        user: as whom they run.
        image: its name.
    """

    def __init__(self, kind: str, user: int, image: str) -> None:
        super().__init__(kind, 3, options=("--image", image, "--user", str(user)))
        worker = "train-node-0" if kind == "trainjob" else "train-worker"
        self.workers = (f"{worker}-0", f"{worker}-1")
        self.run_by = ("ringreduce", "run", *(("--ssh-port", "2222") if user else ()))

    def _limited(self, number: int, limit: Sequence[str], words: Sequence[str]) -> list[str]:
        return [*limit, *self.line(number, *words)]


def called(command: Sequence[str], timeout_s: float, variables: dict[str, str] | None = None) -> str:
    """Return what a command prints; it must end well within the limit, or it is ended."""
    limited = ["timeout", "--kill-after=10", str(timeout_s), *command]
    done = ended(limited, timeout_s, variables={**os.environ, **(variables or {})})
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}"
    return done.stdout


def why_no_image() -> str:
    """Return why no image can be built and run here; empty if one can."""
    reason = why_not("links")
    missing = [program for program in ("podman", "runc", "debootstrap") if shutil.which(program) is None]
    if not reason and missing:
        return f"there is no {' and no '.join(missing)}"
    if not reason and "+cpu" not in version("torch"):
        return "torch is not its build for CPUs here, and the image would be one of many GB"
    return reason
