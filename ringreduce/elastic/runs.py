"""Which of several histories of a training counts, where hosts stood still, were away, or were cut off from each other.

A run is what one world commits. Of two runs the one with the greater name counts, whatever numbers their commits have:

    FENCE-LAUNCH-LAUNCHER-WORLD

The fence is the launch, unless the ranks find runs with a greater one: then it is the next number. So each new job goes
before all that its ranks know of, also if clocks differ; and before what they do not know of, by the clock of the
launcher. The worlds of a job, which go on in place when ranks have failed, count on from 0. Names that
versions before this one have given are less than these.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable

from ringreduce.common.errors import ConfigError

_RUN = re.compile("([0-9]{20})-([0-9]{20})-([0-9a-f]{8})-([0-9]{8})")


class ReplacedError(ConfigError):
    """These ranks train what nobody goes on from: a later job, or other ranks of this one, have begun again."""


def own_token() -> str:
    """Return LAUNCH-LAUNCHER for a job whose launcher gives none (`ringreduce.common.launch.Launch.fence`)."""
    return f"{time.time_ns():020}-{secrets.token_hex(4)}"


def new_job(token: str, there: Iterable[str]) -> str:
    """Return the name of the first run of a job.

    Args:
        token: of the job.
        there: the names of all runs that its ranks find.

    Raises:
        ReplacedError: its launcher has begun the job again since.
    """
    number, launcher = token.split("-")
    matches = [match for match in map(_RUN.fullmatch, there) if match]
    if any(match[3] == launcher and match[2] > number for match in matches):
        raise ReplacedError("the launcher has begun this job again, while these ranks stood still; they end")
    fence = max([int(number), *(int(match[1]) + 1 for match in matches)])
    return f"{fence:020}-{token}-{0:08}"


def following(run: str) -> str:
    """Return the name of the run of the next world of the same job."""
    job, _, world = run.rpartition("-")
    return f"{job}-{int(world) + 1:08}"


def may_commit(before: int, left: int, doubtful: int) -> bool:
    """Return whether ranks that go on without others may commit: no others of their world can think the same.

    Args:
        before: number of ranks of the world that they had agreed on last.
        left: how many of these go on here.
        doubtful: how many of the others may live.
    """
    return doubtful == 0 or 2 * left > before
