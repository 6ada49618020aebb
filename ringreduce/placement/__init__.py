"""Between a validated call and a schedule: where the data lies, what has to be copied, which plan can be used again."""

from ringreduce.placement.allreduce import Allreduce, OperandReducer
from ringreduce.placement.bound import BoundCall
from ringreduce.placement.context import Context, Signature
from ringreduce.placement.ending import close_all
from ringreduce.placement.gpu import STAGED, Gpu, OnDevice, ordinal
from ringreduce.placement.moves import Moves
from ringreduce.placement.wire import Feedback, WireAllreduce

__all__ = [
    "STAGED",
    "Allreduce",
    "BoundCall",
    "Context",
    "Feedback",
    "Gpu",
    "Moves",
    "OnDevice",
    "OperandReducer",
    "Signature",
    "WireAllreduce",
    "close_all",
    "ordinal",
]
