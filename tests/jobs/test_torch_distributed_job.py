"""The backend of torch.distributed in whole jobs: how it is found, how jobs begin and end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]

PROGRAM = """
    import torch, torch.distributed as dist
    {before}
    dist.init_process_group("ringreduce")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, async_op=True).wait()
    {after}
    print("sum", tensor[0].item())
"""


@pytest.fixture
def found(tmp_path: Path) -> dict[str, str]:
    """The environment of a program in whose environment the package is installed, with its entry point."""
    folder = tmp_path / "ringreduce-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ringreduce\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[torch.backends]\nringreduce = ringreduce_torch_backend:register\n")
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def run(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program without a launcher."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_program_needs_one_word(run_job: Callable, found: dict[str, str], ranks: int):
    """No import of ours, no MASTER_ADDR, no rank; and no need to destroy the group."""
    job = run_job(ranks, source=PROGRAM.format(before="", after=""), **found)
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == [f"sum {float(ranks)}"] * ranks


def test_importing_torch_loads_nothing_of_ours(found: dict[str, str]):
    """The entry point registers the backend, and imports neither the package nor MPI."""
    done = run(
        """
        import sys, torch
        assert hasattr(torch.distributed.Backend, "RINGREDUCE")
        assert not {"ringreduce", "mpi4py"} & set(sys.modules)
        """,
        **found,
    )
    assert done.returncode == 0, done.stderr


def test_without_the_entry_point(found: dict[str, str]):
    """Where torch loads no extensions, an import of ours registers the backend."""
    off = {**found, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = run(PROGRAM.format(before="import ringreduce.torch", after="dist.destroy_process_group()"), **off)
    assert (done.returncode, done.stdout) == (0, "sum 1.0\n"), done.stderr
    assert "ringreduce" not in run("import torch; print(torch.distributed.Backend.backend_list)", **off).stdout


def test_torchrun_is_told_what_works(found: dict[str, str]):
    """Each process would be a world of one: an error that names the command."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    done = run(PROGRAM.format(before="", after=""), **found, **variables)
    assert done.returncode == 1
    assert "ConfigError" in done.stderr
    assert "mpirun -np 2 python" in done.stderr


def test_an_uncaught_exception_ends_the_job(run_job: Callable, found: dict[str, str]):
    """Its traceback is seen, although torch puts a hook of its own before ours, and no rank waits for that one."""
    after = 'assert dist.get_rank() != 1, "unhappy"; dist.barrier()'
    job = run_job(2, source=PROGRAM.format(before="", after=after), **found)
    assert job.returncode != 0
    assert "AssertionError: unhappy" in job.stderr
    assert "sum" not in job.stdout
