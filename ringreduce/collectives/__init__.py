"""The paths, which carry calls between ranks: each says whether it takes a call and what that costs, and runs it.

A `Path` is for arrays in host memory; `Devices` knows those for device memory.
"""

from ringreduce.collectives.compressed import Feedback, Formats, codec_for
from ringreduce.collectives.context import Context, Signature
from ringreduce.collectives.operands import Operands
from ringreduce.collectives.path import DETERMINISTIC, NCCL, VENDOR, Call, Choice, Chosen, Path, Work
from ringreduce.collectives.paths import PATHS, Paths, path_for
from ringreduce.collectives.repeat import BoundCalls
from ringreduce.collectives.state import Standing
from ringreduce.common.cleanup import close_all

__all__ = [
    "DETERMINISTIC",
    "NCCL",
    "PATHS",
    "VENDOR",
    "BoundCalls",
    "Call",
    "Choice",
    "Chosen",
    "Context",
    "Feedback",
    "Formats",
    "Operands",
    "Path",
    "Paths",
    "Signature",
    "Standing",
    "Work",
    "close_all",
    "codec_for",
    "path_for",
]
