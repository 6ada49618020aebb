"""All paths for arrays in host memory. The first that takes an algorithm and a problem carries it out."""

from __future__ import annotations

from ringreduce.collectives.call import Problem
from ringreduce.collectives.messages import HierarchicalPath, MessagePath, VendorPath
from ringreduce.collectives.one_shot import OneShotPath
from ringreduce.collectives.path import Path, SelfPath
from ringreduce.collectives.shared import SharedMemoryPath

__all__ = ["PATHS", "path_for"]

PATHS: tuple[type[Path], ...] = (
    SelfPath,
    VendorPath,
    OneShotPath,
    SharedMemoryPath,
    HierarchicalPath,
    MessagePath,
)


def path_for(algorithm: str, problem: Problem) -> type[Path]:
    """Return the path that carries out an algorithm for a problem; the same on all ranks.

    Raises:
        ConfigError: the collective has no such algorithm.
    """
    for path in PATHS:
        if path.takes(algorithm, problem):
            return path
    raise AssertionError(f"no path takes {algorithm} for {problem}")
