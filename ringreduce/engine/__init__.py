"""Named asynchronous operations: negotiated by name, fused, run in one order on all ranks."""

from ringreduce.engine.engine import Engine, Entrance
from ringreduce.engine.operations import BlockingCall, Gather, InPlace, Operation, Reduction, Refusal, unnamed

__all__ = ["BlockingCall", "Engine", "Entrance", "Gather", "InPlace", "Operation", "Reduction", "Refusal", "unnamed"]
