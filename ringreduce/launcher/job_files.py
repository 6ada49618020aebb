"""Files of jobs for schedulers, made from the complete ones in ``jobs/`` by other numbers and another command."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from ringreduce.common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The numbers and the command of a job.

    Attributes:
        name: name of the job.
        nodes: number of hosts.
        ranks: ranks on each host.
        cores: cores of each rank.
        time_s: seconds after which the scheduler ends it.
        image: image of its containers.
        command: command that starts the ranks.
    """

    name: str
    nodes: int
    ranks: int
    cores: int
    time_s: int
    image: str
    command: Sequence[str]


@dataclass(frozen=True, slots=True)
class JobFile:
    """A kind of file.

    Attributes:
        file: its name in ``jobs/``.
        elastic: the file for elastic jobs.
        submit: command that reads such a file from standard input.
        values: texts by the pattern that they replace in the file.
    """

    file: str
    elastic: str
    submit: tuple[str, ...]
    values: Mapping[str, Callable[[Asked], str]]

    def fill(self, asked: Asked, *, elastic: bool) -> str:
        """Return the text of the file for a job."""
        text = (files(__package__) / "jobs" / (self.elastic if elastic else self.file)).read_text("ascii")
        for pattern, value in self.values.items():
            new = value(asked).replace("\\", r"\\")  # or it would be a reference to what was found
            text, count = re.subn(pattern, new, text, flags=re.MULTILINE)
            assert count, pattern
        return text


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


KINDS = {
    "slurm": JobFile(
        "slurm-run.sh",
        "slurm-elastic.sh",
        ("sbatch",),
        {
            r"(?<=^#SBATCH --job-name=).*": lambda asked: asked.name,
            r"(?<=^#SBATCH --nodes=).*": lambda asked: str(asked.nodes),
            r"(?<=^#SBATCH --ntasks-per-node=).*": lambda asked: str(asked.ranks),
            r"(?<=^#SBATCH --cpus-per-task=).*": lambda asked: str(asked.cores),
            r"(?<=^#SBATCH --time=).*": lambda asked: _clock(asked.time_s),
            r"(^|(?<=^exec ))ringreduce run .*": lambda asked: shlex.join(asked.command),
        },
    ),
    "k8s": JobFile(
        "mpijob.yaml",
        "mpijob.yaml",
        ("kubectl", "create", "-f", "-"),
        {
            r"(?<=^  name: ).*": lambda asked: asked.name,
            r"(?<=slotsPerWorker: ).*": lambda asked: str(asked.ranks),
            r"(?<=activeDeadlineSeconds: ).*": lambda asked: str(asked.time_s),
            r"(?<=^    Worker:\n      replicas: ).*": lambda asked: str(asked.nodes),
            r"(?<=image: ).*": lambda asked: asked.image,
            r'(?<=cpu: ")\d+': lambda asked: str(asked.ranks * asked.cores),
            r'(?<=OMP_NUM_THREADS, value: ")\d+': lambda asked: str(asked.cores),
            r'(?<=args: )\["ringreduce".*': lambda asked: json.dumps(list(asked.command)),
        },
    ),
}


def submit(kind: JobFile, text: str) -> int:
    """Hand a file to its scheduler, and return the status of the command that takes it.

    Raises:
        ConfigError: there is no such command here.
    """
    try:
        return subprocess.run(kind.submit, input=text, text=True, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(f"there is no {kind.submit[0]} here; without --yes the file is printed") from None
