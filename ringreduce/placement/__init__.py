"""Between a validated call and a schedule: where the data lies, what has to be copied, which plan can be used again."""

from ringreduce.placement.allreduce import Allreduce, Runner
from ringreduce.placement.bound import BoundCall
from ringreduce.placement.context import Context, Signature
from ringreduce.placement.gpu import Gpu, OnDevice, ordinal
from ringreduce.placement.moves import Moves
from ringreduce.placement.wire import Feedback, WireAllreduce

__all__ = [
    "Allreduce",
    "BoundCall",
    "Context",
    "Feedback",
    "Gpu",
    "Moves",
    "OnDevice",
    "Runner",
    "Signature",
    "WireAllreduce",
    "ordinal",
]
