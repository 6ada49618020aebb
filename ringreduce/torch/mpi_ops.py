"""What Horovod scripts find in ``horovod.torch.mpi_ops``: all operations, the world, and what the library can do."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ringreduce.common.errors import CollectiveError as HorovodInternalError
from ringreduce.gpu.inventory import nccl_version
from ringreduce.runtime import global_process_set, names, world
from ringreduce.runtime.names import *  # noqa: F403
from ringreduce.torch import ops
from ringreduce.torch.compression import Compression
from ringreduce.torch.ops import *  # noqa: F403  # what it exports is written down there, and not once more
from ringreduce.training.requests import Handle

__all__ = [
    "Compression",
    "HorovodInternalError",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]
__all__ += names.__all__ + ops.__all__
__all__.sort()

#: What programs note of operations under way, by handle; forgotten with the handle. Operations here keep their tensors.
_handle_map: WeakKeyDictionary[Handle, Any] = WeakKeyDictionary()

_basics = sys.modules[__name__]  # in Horovod an object whose methods are the functions that are here


def mpi_built() -> bool:
    """Return whether mpi4py is installed, so that a launcher can start several ranks."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Return whether the ranks of this world are connected by MPI."""
    return world().size > 1


def mpi_threads_supported() -> bool:
    """Return whether operations go on while the program does something else."""
    return global_process_set.engine.threaded


def gloo_built() -> bool:
    """Return False: there is no Gloo here."""
    return False


def gloo_enabled() -> bool:
    """Return False: there is no Gloo here."""
    return False


def nccl_built() -> int:
    """Return the version of the NCCL that CuPy has found, 22703 for 2.27.3; 0 if there is no CuPy, or no NCCL."""
    return nccl_version()


def ddl_built() -> bool:
    """Return False: there is no DDL here."""
    return False


def ccl_built() -> bool:
    """Return False: there is no oneCCL here."""
    return False


def cuda_built() -> bool:
    """Return whether CUDA tensors can be used: torch is built for CUDA, and CuPy is installed. There may be no GPU."""
    return torch.version.cuda is not None and importlib.util.find_spec("cupy") is not None


def rocm_built() -> bool:
    """Return False: tensors may be on GPUs, but on none that take ROCm."""
    return False
