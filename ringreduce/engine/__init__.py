"""Named asynchronous operations: negotiated by name, fused, run in one order on all ranks."""

from ringreduce.engine.engine import Engine, ReentrancyGuard
from ringreduce.engine.operations import (
    BlockingCall,
    CollectiveOp,
    Gather,
    InPlace,
    InPlaceAllreduce,
    Operation,
    Reduction,
    Refusal,
    unnamed,
)

Entrance = ReentrancyGuard  # its earlier name

__all__ = [
    "BlockingCall",
    "CollectiveOp",
    "Engine",
    "Entrance",
    "Gather",
    "InPlace",
    "InPlaceAllreduce",
    "Operation",
    "Reduction",
    "ReentrancyGuard",
    "Refusal",
    "unnamed",
]
