"""The hosts that a scheduler has granted to the job in which this process runs: Slurm, PBS or LSF."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.mpirun import output_of

__all__ = ["Allocation", "expand"]

_MOST_HOSTS = 1 << 17  # more are a mistake in a list, and would take all memory
_PART = re.compile(r"([^\[\],]*)\[([^\[\]]+)\]|([^\[\],]+)")
_RANGE = re.compile("([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a scheduler has granted.

    Attributes:
        scheduler: ``"slurm"``, ``"pbs"`` or ``"lsf"``.
        slots: by host, in its order.
    """

    scheduler: str
    slots: dict[str, int]

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Allocation | None:
        """Return the allocation that the environment describes; None: there is none.

        Args:
            environ: the variables that the scheduler has set.

        Raises:
            ConfigError: a scheduler's list cannot be read.
        """
        if environ.get("SLURM_JOB_NODELIST"):
            return cls("slurm", _slurm(environ))
        if environ.get("PBS_NODEFILE"):
            return cls("pbs", Counter(_lines("PBS_NODEFILE", environ)))
        if environ.get("LSB_MCPU_HOSTS"):
            return cls("lsf", _pairs(environ["LSB_MCPU_HOSTS"]))
        if environ.get("LSB_DJOB_HOSTFILE"):
            return cls("lsf", Counter(_lines("LSB_DJOB_HOSTFILE", environ)))
        return None


def _slurm(environ: Mapping[str, str]) -> dict[str, int]:
    listed = environ["SLURM_JOB_NODELIST"]
    hosts = output_of("scontrol", "show", "hostnames", listed).split() or expand(listed)
    name = next((each for each in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE") if environ.get(each)), None)
    counts = [1] * len(hosts) if name is None else _repeated(name, environ[name])
    if len(counts) == 1:
        counts *= len(hosts)
    if len(counts) != len(hosts):
        raise ConfigError(
            f"{name}={environ[name or '']} is for {len(counts)} hosts, and Slurm has granted {len(hosts)}"
        )
    return dict(zip(hosts, counts, strict=True))


def expand(text: str) -> list[str]:
    """Return the hosts of a list of Slurm's: ``gpu[01-03,7],login`` is gpu01, gpu02, gpu03, gpu7 and login.

    Args:
        text: names, each with any number of brackets, separated by commas.

    Raises:
        ConfigError: that is something else.
    """
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        if not part or _PART.sub("", part):
            raise ConfigError(f"SLURM_JOB_NODELIST={text[:80]!r} cannot be read at {part[:40]!r}")
        names = [""]
        for found in _PART.finditer(part):
            ends = [found[3]] if found[3] is not None else [found[1] + each for each in _numbers(found[2], text)]
            names = [name + end for name in names for end in ends]
            if len(names) > _MOST_HOSTS:
                raise ConfigError(f"SLURM_JOB_NODELIST={text[:80]!r} is of more than {_MOST_HOSTS} hosts")
        hosts += names
    return hosts


def _numbers(text: str, whole: str) -> Iterator[str]:
    """Yield the numbers of ``01-03,7``, with the zeros in front that the first of a range has."""
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None or int(found[2] or found[1]) - int(found[1]) not in range(_MOST_HOSTS):
            raise ConfigError(f"SLURM_JOB_NODELIST={whole[:80]!r} cannot be read at {part[:40]!r}")
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield str(number).zfill(len(found[1]))


def _repeated(name: str, text: str) -> list[int]:
    """Return the counts of ``2(x3),1``: 2, 2, 2, 1."""
    found = [_COUNT.fullmatch(part) for part in text.split(",")]
    counts: list[int] = []
    for each in found:
        if each is None or int(each[2] or 1) > _MOST_HOSTS:
            raise ConfigError(f"{name}={text[:80]!r} cannot be read; expected counts as in 2(x3),1")
        counts += [int(each[1])] * int(each[2] or 1)
    return counts


def _lines(name: str, environ: Mapping[str, str]) -> list[str]:
    try:
        text = Path(environ[name]).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{name}={environ[name]}: {error.strerror}") from None
    return text.split()


def _pairs(text: str) -> dict[str, int]:
    words = text.split()
    if len(words) % 2 or not all(word.isdigit() for word in words[1::2]):
        raise ConfigError(f"LSB_MCPU_HOSTS={text[:80]!r} cannot be read; expected hosts and counts as in 'a 2 b 2'")
    slots: Counter[str] = Counter()
    for host, count in zip(words[::2], words[1::2], strict=True):
        slots[host] += int(count)
    return slots
