"""Named asynchronous operations: negotiated by name, fused, run in one order on all ranks."""

from ringreduce.engine.engine import Engine, ReentrancyGuard
from ringreduce.engine.operations import (
    CollectiveOp,
    Gather,
    InPlaceAllreduce,
    Operation,
    Reduction,
    Refusal,
    unnamed,
)

__all__ = [
    "CollectiveOp",
    "Engine",
    "Gather",
    "InPlaceAllreduce",
    "Operation",
    "Reduction",
    "ReentrancyGuard",
    "Refusal",
    "unnamed",
]
