"""What Horovod scripts find in ``horovod.torch.mpi_ops``: all operations, the world, and what the library can do."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ringreduce.common.errors import CollectiveError as HorovodInternalError
from ringreduce.runtime import names
from ringreduce.runtime.names import *  # noqa: F403
from ringreduce.torch import ops
from ringreduce.torch.compression import Compression
from ringreduce.torch.ops import *  # noqa: F403  # what it exports is written down there, and not once more
from ringreduce.training import built
from ringreduce.training.built import *  # noqa: F403
from ringreduce.training.requests import Handle

__all__ = ["Compression", "HorovodInternalError", "cuda_built"]
__all__ += built.__all__
__all__ += names.__all__
__all__ += ops.__all__
__all__.sort()

#: What programs note of operations under way, by handle; forgotten with the handle. Operations here keep their tensors.
_handle_map: WeakKeyDictionary[Handle, Any] = WeakKeyDictionary()

_basics = sys.modules[__name__]  # in Horovod an object whose methods are the functions that are here


def cuda_built() -> bool:
    """Return whether CUDA tensors can be used: torch is built for CUDA, and CuPy is installed. There may be no GPU."""
    return torch.version.cuda is not None and importlib.util.find_spec("cupy") is not None
