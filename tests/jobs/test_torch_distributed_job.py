"""The backend of torch.distributed in whole jobs: how it is found, how jobs begin and end."""

from __future__ import annotations

import json
import os
import socket
import sys
import textwrap
from pathlib import Path
from typing import Any

import launching
import pytest
from launching import PROGRAMS, Job, needs, run_program

needs("torch")

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
WORDLESS = PROGRAM.replace('"ringreduce"', "")
IMPORTS = """
    import sys, torch
    print(hasattr(torch.distributed.Backend, "RINGREDUCE"), *{"ringreduce", "mpi4py"} & set(sys.modules))
"""
#: Variables of torch's own launcher that name what is not there.
WRONG = {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1", "RANK": "5", "WORLD_SIZE": "7"}
FROM_VARIABLES = """
    import os, sys, torch, torch.distributed as dist
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
    os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
    dist.init_process_group("ringreduce", init_method="env://")
    tensor = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    print("sum", tensor[0].item())
"""
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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a program in whose environment the package is installed, with its entry point."""
    installed = tmp_path_factory.mktemp("installed")
    folder = installed / "ringreduce-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ringreduce\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[torch.backends]\nringreduce = ringreduce_torch_backend:register\n")
    return {"PYTHONPATH": f"{installed}{os.pathsep}{ROOT}"}


def run(source: str, **environment: str) -> Job:
    """Run a program without a launcher."""
    return launching.run(sys.executable, "-c", textwrap.dedent(source), **environment)


# ---- programs that share jobs ----


@pytest.fixture(scope="module")
def together(found: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What programs print, which run one after the other in a job of two ranks, and then in one of one rank."""
    folder = tmp_path_factory.mktemp("together")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    plain = {"before": "", "after": ""}
    sources = {
        "imports": (IMPORTS, []),
        "one word": (PROGRAM.format(**plain), []),  # nothing of ours is imported yet
        "no word": (WORDLESS.format(**plain), []),
        "wrong": (PROGRAM.format(before=f"import os; os.environ.update({WRONG!r})", after=""), []),
        "variables": (FROM_VARIABLES, [port]),
        "training": (TRAINING, ["0", str(folder / "checkpoint")]),
        "one word, alone": (PROGRAM.format(**plain), []),
        "training, alone": (TRAINING, ["3", str(folder / "checkpoint")]),
    }
    commands = {}
    for name, (source, arguments) in sources.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
        commands[name] = [str(folder / f"{name}.py"), *arguments]
    said: dict[str, str] = {}
    for ranks in (2, 1):
        mine = {name: command for name, command in commands.items() if name.endswith("alone") == (ranks == 1)}
        said |= launching.run_together(ranks, folder, mine, **found)
    return {name: text.splitlines() for name, text in said.items()}


def test_importing_torch_loads_nothing_of_ours(together: dict[str, list[str]]):
    """The entry point registers the backend, and imports neither the package nor MPI."""
    assert together["imports"] == ["True"] * 2


def test_a_program_needs_one_word(together: dict[str, list[str]]):
    """No import of ours, no MASTER_ADDR, no rank; and no need to destroy the group."""
    assert together["one word"] == ["sum 2.0"] * 2
    assert together["one word, alone"] == ["sum 1.0"]


def test_a_program_needs_no_word_under_mpirun(together: dict[str, list[str]]):
    """Without a backend's name, and without the variables of torch's own launcher, ours is taken."""
    assert together["no word"] == ["sum 2.0"] * 2


def test_variables_that_torch_reads_beside_mpirun(together: dict[str, list[str]]):
    """They mean nothing, wrong ones too; init_method="env://" has torch read them, and works where they are right."""
    assert together["wrong"] == ["sum 2.0"] * 2
    assert together["variables"] == ["sum 3.0"] * 2


def test_a_checkpoint_of_torch_is_loaded_by_a_smaller_job(together: dict[str, list[str]]):
    """fully_shard and Adam go on with one rank where 2 have stopped, as a program that never stops."""
    import torch

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
    losses = [float(line.removeprefix("loss ")) for line in together["training"] + together["training, alone"]]
    assert losses == pytest.approx(expected, abs=1e-5)


# ---- ends of jobs ----


def test_a_job_that_is_killed_leaves_no_files(found: dict[str, str], tmp_path: Path):
    """Rank 0, which has made the file that all share, cannot remove it then; mpirun does."""
    room = tmp_path / "room"
    room.mkdir()
    after = "dist.barrier(); dist.get_rank() == 0 and os.kill(os.getpid(), 9); dist.barrier()"
    job = run_program(PROGRAM.format(before="import os", after=after), TMPDIR=str(room), **found)
    assert job.returncode != 0
    assert [each for each in room.rglob("*") if each.is_file()] == []


def test_an_uncaught_exception_ends_the_job(found: dict[str, str]):
    """Its traceback is seen, although torch puts a hook of its own before ours, and no rank waits for that one."""
    after = 'assert dist.get_rank() != 1, "unhappy"; dist.barrier()'
    job = run_program(PROGRAM.format(before="", after=after), **found)
    assert job.returncode != 0
    assert "AssertionError: unhappy" in job.stderr
    assert "sum" not in job.stdout


# ---- programs of one process ----


def test_without_the_entry_point(found: dict[str, str]):
    """Where torch loads no extensions, an import of ours registers the backend."""
    off = {**found, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    before = 'assert "ringreduce" not in dist.Backend.backend_list; import ringreduce.torch'
    assert run(PROGRAM.format(before=before, after="dist.destroy_process_group()"), **off).well().stdout == "sum 1.0\n"


SLURM = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
#: The start of a program: the variables that it finds, and what its error says, or nothing where it works.
STARTS = {
    "MPICH": (WORDLESS, {"PMI_SIZE": "1", "PMI_RANK": "0"}, ""),
    "MVAPICH": (WORDLESS, {"MV2_COMM_WORLD_SIZE": "1", "MV2_COMM_WORLD_RANK": "0"}, ""),
    "torchrun on one host": (PROGRAM, {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, "ringreduce run -np 4 python"),
    "torchrun on several hosts": (
        PROGRAM,
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"},
        "ringreduce run -np 4 -H HOST1:2,HOST2:2,... python",
    ),
    "an allocation of Slurm": (PROGRAM, SLURM, ""),
    "srun without MPI": (PROGRAM, {**SLURM, "SLURM_STEP_NUM_TASKS": "2"}, "srun --mpi=pmix python"),
}


@pytest.fixture(scope="module")
def starts(found: dict[str, str]) -> dict[str, list[Any]]:
    """How the programs of `STARTS` end: exit code, output, errors. One process that has imported torch forks them."""
    programs = {
        name: [textwrap.dedent(source.format(before="", after="dist.destroy_process_group()")), variables]
        for name, (source, variables, _) in STARTS.items()
    }
    done = launching.run(sys.executable, PROGRAMS / "forked.py", json.dumps(programs), **found).well()
    ends: dict[str, list[Any]] = json.loads(done.stdout)
    return ends


@pytest.mark.parametrize("name", STARTS)
def test_launchers_are_known_or_told_what_works(starts: dict[str, list[Any]], name: str):
    """A launcher of MPI needs no word; where each process would be a world of one, an error names the command.

    In an allocation of several processors, a program that is started alone is alone.
    """
    (code, output, errors), said = starts[name], STARTS[name][2]
    if said:
        assert code == 1
        assert "ConfigError" in errors
        assert said in errors
    else:
        assert (code, output) == (0, "sum 1.0\n"), errors


def test_the_folder_of_the_store_stays_until_the_world_ends() -> None:
    """Rank 0 removed it as it ended, while torch's store of another rank looked into it, and waited for minutes."""
    done = run_program("""
        import atexit
        from pathlib import Path
        import torch.distributed as dist
        import ringreduce.torch as hvd
        from ringreduce.torch.distributed import process_group

        def look():
            print("there:", Path(process_group._folders[0].name).is_dir())

        hvd.init()
        if hvd.rank() == 0:
            atexit.register(look)  # called before the world ends, and after all that is registered later
        dist.init_process_group("ringreduce")
        dist.destroy_process_group()
    """).well()
    assert done.stdout.split() == ["there:", "True"]
