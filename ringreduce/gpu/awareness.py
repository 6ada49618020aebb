"""Can the MPI library take addresses of GPU memory? It is asked, never tried: one that cannot ends in a segfault.

No question is answered by all libraries. In this order: the kinds of memory that MPI 4.1 lets a communicator name, the
extensions of Open MPI and MPICH, the switches of MVAPICH and Cray MPICH. No library that said yes was
tried on a device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: Of MPICH's ``MPIX_GPU_query_support``.
_MPICH_CUDA = 0

#: Part of what a library calls itself, and the variable in which "1" switches its support on.
_SWITCHES = (("MVAPICH", "MV2_USE_CUDA"), ("CRAY", "MPICH_GPU_SUPPORT_ENABLED"))


@dataclass(frozen=True, slots=True)
class CudaAwareness:
    """Whether MPI calls take addresses of GPU memory (None: the library does not say), and how that is known."""

    aware: bool | None
    reason: str


def cuda_awareness(environ: Mapping[str, str]) -> CudaAwareness:
    """Ask the MPI library of this process, initialising MPI if need be. Local, not collective.

    "Aware" says nothing of speed, nor that reductions are done on the GPU: use it to move bytes, after synchronising
    the stream that made them.

    Args:
        environ: the environment, for libraries that have a variable in place of an answer.
    """
    from mpi4py import MPI

    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    # The loader looks for a name in the extension and then in what that was linked to: the library which is in use.
    extension = ctypes.CDLL(MPI.__file__)
    return conclude(MPI.Get_library_version(), kinds, find=lambda name: getattr(extension, name, None), environ=environ)


def conclude(
    library: str, kinds: str, find: Callable[[str], Callable[..., Any] | None], environ: Mapping[str, str]
) -> CudaAwareness:
    """Draw the conclusion from what there is.

    Args:
        library: what it calls itself.
        kinds: ``mpi_memory_alloc_kinds`` of the world, e.g. ``mpi,system,cuda:device``; empty where it has none.
        find: returns a C function of the library by name, None if there is no such function.
        environ: the environment.
    """
    variable = next((switch for name, switch in _SWITCHES if name in library.upper()), None)
    if "cuda" in (kind.split(":")[0].strip() for kind in kinds.split(",")):
        return CudaAwareness(True, f"mpi_memory_alloc_kinds is {kinds}")
    # MPICH has both functions, and in some versions the one that Open MPI has too ends the program (a wrong assertion).
    for name, ask in (("MPIX_GPU_query_support", _ask_mpich), ("MPIX_Query_cuda_support", _ask_open_mpi)):
        function = find(name)
        if function is not None:
            aware = ask(function)
            if aware or variable is None:
                return CudaAwareness(aware, f"{name} says {'yes' if aware else 'no'}")
    if variable is not None:
        aware = environ.get(variable) == "1"
        return CudaAwareness(aware, f"{variable} is {'1' if aware else 'not 1'}")
    return CudaAwareness(None, "the library does not report whether it is")


def _ask_open_mpi(function: Callable[..., Any]) -> bool:
    return bool(function() == 1)


def _ask_mpich(function: Callable[..., Any]) -> bool:
    supported = ctypes.c_int(0)
    failed = function(_MPICH_CUDA, ctypes.byref(supported))
    return not failed and supported.value != 0
