"""What the library can do, by the names that Horovod's bindings of all frameworks have for it."""

from __future__ import annotations

import importlib.util

from ringreduce.gpu.inventory import nccl_version
from ringreduce.runtime import global_process_set


def mpi_built() -> bool:
    """Return whether mpi4py is installed, so that a launcher can start several ranks."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Return whether the ranks of this world are connected by MPI."""
    return global_process_set.communicator.size > 1


def mpi_threads_supported() -> bool:
    """Return whether operations go on while the program does something else."""
    return global_process_set.engine.threaded


def nccl_built() -> int:
    """Return the version of the NCCL that CuPy has found, 22703 for 2.27.3; 0 if there is no CuPy, or no NCCL."""
    return nccl_version()


def _absent() -> bool:
    """Return False: there are no Gloo, DDL and oneCCL here, and tensors may be on GPUs, but on none that take ROCm."""
    return False


gloo_built = gloo_enabled = ddl_built = ccl_built = rocm_built = _absent
