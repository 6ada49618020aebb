"""Files of jobs for schedulers: the templates in ``jobs/``, filled in."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from ringreduce.common.errors import ConfigError

#: By scheduler, the command that reads a job's file from standard input.
SUBMIT = {"slurm": ("sbatch",), "k8s": ("kubectl", "create", "-f", "-")}
#: By scheduler, the template of a job, and that of an elastic one.
TEMPLATES = {"slurm": ("slurm-run.sh", "slurm-elastic.sh"), "k8s": ("mpijob.yaml", "mpijob.yaml")}


def fill(template: str, command: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return the text of a job's file.

    Args:
        template: one of `TEMPLATES`.
        command: command that starts the ranks.
        values: name of the job; nodes, how many hosts; ranks on each; cores of each rank; time_s, seconds after which
            the scheduler ends it; and for Kubernetes image, that of its containers.
    """
    time_s = values["time_s"]
    return Template((files(__package__) / "jobs" / template).read_text("ascii")).substitute(
        values,
        shell_command=shlex.join(command),
        command_as_json=json.dumps([*command]),
        cores_of_node=values["ranks"] * values["cores"],
        clock=f"{time_s // 3600:02}:{time_s // 60 % 60:02}:{time_s % 60:02}",
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
