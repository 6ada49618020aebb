"""The earlier name of `ringreduce.engine.coordinator.fuse`."""

from ringreduce.engine.coordinator import fuse as plan

__all__ = ["plan"]
