"""When ranks are to stop as their allocation ends, and how a stopped job is run again."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.schedulers import ask_slurm, slurm_job

_ASK_AGAIN_S = 30.0  # after an answer


class StopBefore:
    """Says when ranks are to be asked to stop.

    Args:
        seconds: time before the end of the allocation.
        end: returns the end in seconds since 1970, or None if it is unknown. It is called again when the time has come,
            and every 30 s from then on, as limits can change.
        clock: returns the time, in seconds since 1970.

    Raises:
        ConfigError: the end of the allocation is unknown.
    """

    def __init__(
        self,
        seconds: float,
        end: Callable[[], float | None] = lambda: end_of_allocation(os.environ),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._seconds = seconds
        self._find = end
        self._clock = clock
        found = end()
        if found is None:
            raise ConfigError(
                "--stop-before: nobody says when this allocation ends: Slurm does where the job has a time limit "
                "(sbatch --time); elsewhere set SLURM_JOB_END_TIME to the end, in seconds since 1970"
            )
        self._end = found
        self._ask_at = -math.inf

    @property
    def left_s(self) -> float:
        """Seconds until the allocation ends."""
        return self._end - self._clock()

    def is_due(self) -> bool:
        """Return whether it is time to ask the ranks."""
        if self.left_s > self._seconds:
            return False
        if self._clock() >= self._ask_at:
            self._end = self._find() or self._end
            self._ask_at = self._clock() + _ASK_AGAIN_S
        return self.left_s <= self._seconds


def end_of_allocation(environ: Mapping[str, str]) -> float | None:
    """Return the end of this allocation in seconds since 1970, from Slurm or the environment; None if unknown."""
    job = slurm_job(environ)
    if job:
        status, said = ask_slurm("squeue", "-h", "-j", job, "-o", "%e")
        if status == 0 and said:
            try:
                return datetime.fromisoformat(said).timestamp()
            except ValueError:  # there is no limit
                return None
    stated = environ.get("SLURM_JOB_END_TIME", "")
    return float(stated) if stated.isdigit() else None


def run_again(environ: Mapping[str, str]) -> str:
    """Ask the scheduler to run a stopped job again; return the outcome as a sentence for users."""
    job = slurm_job(environ)
    if not job:
        return "--requeue: no scheduler is known here; status 75 says to the caller that the job is to be run again"
    status, said = ask_slurm("scontrol", "requeue", job)
    if status:
        return f"the job has stopped, and Slurm does not queue job {job} again; it says: {said}"
    return f"job {job} is queued again; to end it for good, scancel {job} once more"
