"""Named asynchronous operations: negotiated by name, fused, run in one order on all ranks."""

from ringreduce.engine.engine import Engine, Entrance
from ringreduce.engine.operations import Call, Gather, InPlace, Operation, Reduction, Refusal, unnamed

__all__ = ["Call", "Engine", "Entrance", "Gather", "InPlace", "Operation", "Reduction", "Refusal", "unnamed"]
