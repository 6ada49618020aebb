"""What the environment of a process says of its job, before `init`."""

from __future__ import annotations

from ringreduce.common.launch import launch


def get_env_rank_and_size() -> tuple[int, int]:
    """Return the rank and the number of ranks that the launcher has set; 0 and 1 without a launcher."""
    found = launch()
    return found.rank, found.size or 1
