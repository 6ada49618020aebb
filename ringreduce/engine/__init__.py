"""Named asynchronous operations: negotiated by name, fused, run in one order on all ranks."""

from ringreduce.engine.engine import Engine, Entrance
from ringreduce.engine.operations import Call, Operation, Procedure, Reduction, Refusal, Registered, unnamed

__all__ = [
    "Call",
    "Engine",
    "Entrance",
    "Operation",
    "Procedure",
    "Reduction",
    "Refusal",
    "Registered",
    "unnamed",
]
