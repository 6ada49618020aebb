"""The paths, which carry calls between ranks: each says whether it takes a call and what that costs, and runs it.

A `Path` is for arrays in host memory; `Gpu` knows those for device memory.
"""

from ringreduce.paths.bound import BoundCalls
from ringreduce.paths.cleanup import close_all
from ringreduce.paths.context import Context, Signature
from ringreduce.paths.formats import Feedback, Formats, codec_for
from ringreduce.paths.gpu import STAGED, Gpu, ordinal
from ringreduce.paths.operands import Operands
from ringreduce.paths.path import DETERMINISTIC, NCCL, VENDOR, Call, Choice, Chosen, Path, Work
from ringreduce.paths.paths import PATHS, Paths, path_for
from ringreduce.paths.standing import Standing

__all__ = [
    "DETERMINISTIC",
    "NCCL",
    "PATHS",
    "STAGED",
    "VENDOR",
    "BoundCalls",
    "Call",
    "Choice",
    "Chosen",
    "Context",
    "Feedback",
    "Formats",
    "Gpu",
    "Operands",
    "Path",
    "Paths",
    "Signature",
    "Standing",
    "Work",
    "close_all",
    "codec_for",
    "ordinal",
    "path_for",
]
