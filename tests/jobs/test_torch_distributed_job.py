"""The backend of torch.distributed in whole jobs: how it is found, how jobs begin and end."""

from __future__ import annotations

import os
import socket
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import launching
import pytest
from launching import Job

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


def run(source: str, **environment: str) -> Job:
    """Run a program without a launcher."""
    return launching.run(sys.executable, "-c", textwrap.dedent(source), **environment)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_program_needs_one_word(run_job: Callable, found: dict[str, str], ranks: int):
    """No import of ours, no MASTER_ADDR, no rank; and no need to destroy the group."""
    job = run_job(ranks, source=PROGRAM.format(before="", after=""), **found)
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == [f"sum {float(ranks)}"] * ranks


def test_a_program_needs_no_word_under_mpirun(run_job: Callable, found: dict[str, str]):
    """Without a backend's name, and without the variables of torch's own launcher, ours is taken."""
    job = run_job(2, source=PROGRAM.format(before="", after="").replace('"ringreduce"', ""), **found)
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == ["sum 2.0"] * 2


@pytest.mark.parametrize(
    ("size", "rank"),
    [("PMI_SIZE", "PMI_RANK"), ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK")],
    ids=["MPICH", "MVAPICH"],
)
def test_a_program_needs_no_word_under_other_launchers(found: dict[str, str], size: str, rank: str):
    """All that start MPI programs are known."""
    program = PROGRAM.format(before="", after="").replace('"ringreduce"', "")
    done = run(program, **found, **{size: "1", rank: "0"})
    assert (done.returncode, done.stdout) == (0, "sum 1.0\n"), done.stderr


def test_a_job_that_is_killed_leaves_no_files(run_job: Callable, found: dict[str, str], tmp_path: Path):
    """Rank 0, which has made the file that all share, cannot remove it then; mpirun does."""
    room = tmp_path / "room"
    room.mkdir()
    after = "dist.barrier(); dist.get_rank() == 0 and os.kill(os.getpid(), 9); dist.barrier()"
    job = run_job(2, source=PROGRAM.format(before="import os", after=after), TMPDIR=str(room), **found)
    assert job.returncode != 0
    assert [each for each in room.rglob("*") if each.is_file()] == []


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


@pytest.mark.parametrize(
    ("local", "command"),
    [("4", "ringreduce run -np 4 python"), ("2", "ringreduce run -np 4 -H HOST1:2,HOST2:2,... python")],
    ids=["one host", "several hosts"],
)
def test_torchrun_is_told_what_works(found: dict[str, str], local: str, command: str):
    """Each process would be a world of one: an error that names the command."""
    variables = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    done = run(PROGRAM.format(before="", after=""), **found, **variables, LOCAL_WORLD_SIZE=local)
    assert done.returncode == 1
    assert "ConfigError" in done.stderr
    assert command in done.stderr


def test_slurm_without_mpi_is_told_what_works(found: dict[str, str]):
    """As under torchrun; in an allocation of several processors, a program that is started alone is alone."""
    variables = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    done = run(PROGRAM.format(before="", after="dist.destroy_process_group()"), **found, **variables)
    assert (done.returncode, done.stdout) == (0, "sum 1.0\n"), done.stderr
    done = run(PROGRAM.format(before="", after=""), **found, **variables, SLURM_STEP_NUM_TASKS="2")
    assert done.returncode == 1
    assert "ConfigError" in done.stderr
    assert "srun --mpi=pmix python" in done.stderr


def test_variables_that_torch_reads_beside_mpirun(run_job: Callable, found: dict[str, str]):
    """They mean nothing, wrong ones too; init_method="env://" has torch read them, and works where they are right."""
    wrong = {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1", "RANK": "5", "WORLD_SIZE": "7"}
    job = run_job(2, source=PROGRAM.format(before="", after=""), **found, **wrong)
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == ["sum 2.0"] * 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = """
        import os, torch, torch.distributed as dist
        os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
        os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
        dist.init_process_group("ringreduce", init_method="env://")
        tensor = torch.full((3,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor)
        print("sum", tensor[0].item())
        dist.destroy_process_group()
    """
    job = run_job(2, source=program, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **found)
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == ["sum 3.0"] * 2


def test_an_uncaught_exception_ends_the_job(run_job: Callable, found: dict[str, str]):
    """Its traceback is seen, although torch puts a hook of its own before ours, and no rank waits for that one."""
    after = 'assert dist.get_rank() != 1, "unhappy"; dist.barrier()'
    job = run_job(2, source=PROGRAM.format(before="", after=after), **found)
    assert job.returncode != 0
    assert "AssertionError: unhappy" in job.stderr
    assert "sum" not in job.stdout


TRAINING = """
    import sys
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    first, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("ringreduce")
    torch.manual_seed(0 if first == 0 else 1)  # other weights, where they are to be loaded
    model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if first:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for step in range(first, first + 3):
        rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
        rows = rows.chunk(dist.get_world_size())[dist.get_rank()]
        loss = nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print("loss", loss.item())
    if not first:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
"""


def test_a_checkpoint_of_torch_is_loaded_by_a_smaller_job(run_job: Callable, found: dict[str, str], tmp_path: Path):
    """fully_shard and Adam go on with one rank where 2 have stopped, as a program that never stops."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expected = []
    for step in range(6):
        rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(TRAINING))
    for ranks, first in (2, 0), (1, 3):
        job = run_job(ranks, str(program), str(first), str(tmp_path / "checkpoint"), **found)
        assert job.returncode == 0, job.stderr
        losses = [float(line.removeprefix("loss ")) for line in job.stdout.splitlines()]
        assert losses == pytest.approx(expected[first : first + 3], abs=1e-5)
