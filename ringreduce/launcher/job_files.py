"""Files of jobs for schedulers: the templates in ``jobs/``, filled in."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from string import Template

from ringreduce.common.errors import ConfigError

#: By scheduler, the command that reads a job's file from standard input.
SUBMIT = {"slurm": ("sbatch",), "k8s": ("kubectl", "create", "-f", "-")}
#: By scheduler, the template of a job, and that of an elastic one.
TEMPLATES = {"slurm": ("slurm-run.sh", "slurm-elastic.sh"), "k8s": ("mpijob.yaml", "mpijob.yaml")}


def fill(
    template: str,
    command: Sequence[str],
    *,
    name: str,
    nodes: int,
    ranks: int,
    cores: int,
    time_s: int,
    image: str = "",
) -> str:
    """Return the text of a job's file.

    Args:
        template: one of `TEMPLATES`.
        command: command that starts the ranks.
        name: name of the job.
        nodes: number of hosts.
        ranks: ranks on each host.
        cores: cores of each rank.
        time_s: seconds after which the scheduler ends it.
        image: image of its containers.
    """
    return Template((files(__package__) / "jobs" / template).read_text("ascii")).substitute(
        shell_command=shlex.join(command),
        command_as_json=json.dumps([*command]),
        name=name,
        nodes=nodes,
        ranks=ranks,
        cores=cores,
        cores_of_node=ranks * cores,
        clock=f"{time_s // 3600:02}:{time_s // 60 % 60:02}:{time_s % 60:02}",
        time_s=time_s,
        image=image,
    )


def submit(scheduler: str, text: str) -> int:
    """Hand a file to its scheduler, and return the status of the command that takes it.

    Raises:
        ConfigError: there is no such command here.
    """
    try:
        return subprocess.run(SUBMIT[scheduler], input=text, text=True, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(f"there is no {SUBMIT[scheduler][0]} here; without --yes the file is printed") from None
