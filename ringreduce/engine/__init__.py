"""Named asynchronous operations: negotiated by name, fused, run in one order on all ranks."""

from ringreduce.engine.engine import Engine, EngineTally, Entrance
from ringreduce.engine.operations import Call, Operation, Procedure, Reduction, Refusal, unnamed

__all__ = ["Call", "Engine", "EngineTally", "Entrance", "Operation", "Procedure", "Reduction", "Refusal", "unnamed"]
