"""Processes beside the ranks: what a rank starts is no rank, and several processes are never alone without knowing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Job, needs, run, run_job, run_program

#: A script as people write them: everything at module level, which spawned workers import again.
SCRIPT = """
import sys
import torch
import ringreduce.torch as hvd

hvd.init()
RANKS = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.is_initialized()
SETS = hvd.add_process_set([0]) if hvd.size() > 1 else None


class Shard(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert RANKS == (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.is_initialized())
        for call in (lambda: hvd.allreduce(torch.ones(2)), lambda: hvd.barrier(), lambda: hvd.broadcast_object(1)):
            try:
                call()
            except Exception as error:
                assert "is no rank itself" in str(error), error
            else:
                raise AssertionError("a worker communicates")
        hvd.shutdown()
        hvd.init()
        return torch.tensor(100 * hvd.rank() + index)


if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        workers = 2 if method == "fork" else 1  # others import everything again
        loader = torch.utils.data.DataLoader(Shard(), batch_size=4, num_workers=workers, multiprocessing_context=method)
        seen = torch.cat(list(loader))
        assert seen.tolist() == [100 * hvd.rank() + index for index in range(8)], seen
        total = hvd.allreduce(seen, op=hvd.Sum)
        assert total[0] == 100 * sum(range(hvd.size()))
    print("well", flush=True)
"""


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_workers_of_every_start_method_know_their_rank(tmp_path: Path, ranks: int) -> None:
    """They get the numbers of the rank that started them, cannot communicate, and do the ranks no harm."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = run_job(ranks, str(script)).well()
    assert job.stdout.count("well") == ranks


def test_what_a_forked_process_does_is_its_own() -> None:
    """What it writes, also to communication buffers, and how it ends, well or with an exception: data loaders fork."""
    job = run_program("""
        import os, sys
        import numpy as np
        import ringreduce as rr
        rr.init()
        buffer = rr.empty(5)
        buffer[:] = rr.rank()
        child = os.fork()
        if child == 0:
            buffer[:] = 1000
            rr.shutdown()
            assert rr.is_initialized()
            sys.excepthook(ValueError, ValueError("in the child"), None)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert rr.allreduce(buffer, out=buffer).tolist() == [1.0] * 5
    """).well()
    assert "ending the job" not in job.stderr


def test_a_worker_may_ask_anything_first(tmp_path: Path) -> None:
    """What it is told does not depend on what it has asked before."""
    script = tmp_path / "train.py"
    script.write_text("""
import multiprocessing
import sys
import numpy as np
import ringreduce as rr

def work(question):
    if question == "size":
        assert rr.global_process_set.size() == 2
    elif question == "ranks":
        assert rr.global_process_set.ranks == [0, 1] and rr.global_process_set.process_set_id == 0
    else:
        try:
            rr.allreduce(np.ones(2))
        except Exception as error:
            assert "is no rank itself" in str(error), error
        else:
            sys.exit("it communicates")

if __name__ == "__main__":
    rr.init()
    if rr.rank() == 0:
        for method in ("spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            questions = ("size", "ranks", "allreduce")
            children = [context.Process(target=work, args=[question]) for question in questions]
            for child in children:
                child.start()
            for child, question in zip(children, questions):
                child.join()
                assert child.exitcode == 0, (method, question)
    rr.barrier()
    """)
    run_job(2, str(script)).well()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_is_to_stand_alone_does(tmp_path: Path, method: str) -> None:
    """With RINGREDUCE_STANDALONE it starts a world of its own; and where the rank has none any more, too."""
    script = tmp_path / "train.py"
    script.write_text(f"""
import multiprocessing
import os
import numpy as np
import ringreduce as rr

def alone(standalone):
    if standalone:
        os.environ["RINGREDUCE_STANDALONE"] = "1"
    else:
        assert not rr.is_initialized()
    rr.init()
    assert (rr.size(), rr.allreduce(np.ones(2)).tolist()) == (1, [1.0, 1.0])
    rr.shutdown()

def start(standalone):
    child = multiprocessing.get_context("{method}").Process(target=alone, args=[standalone])
    child.start()
    child.join()
    assert child.exitcode == 0

if __name__ == "__main__":
    rr.init()
    start(True)
    rr.barrier()
    rr.shutdown()
    start(False)
    """)
    run_job(2, str(script)).well()


def test_a_child_of_a_rank_that_never_started_a_world_may_join() -> None:
    """A launcher may start a program that only starts others, by multiprocessing or not."""
    job = run_program("""
        import multiprocessing
        def train():
            import numpy as np
            import ringreduce as rr
            rr.init()
            assert rr.allreduce(np.ones(3)).tolist() == [2.0] * 3
            rr.shutdown()
            print("well", flush=True)
        if __name__ == "__main__":
            child = multiprocessing.get_context("fork").Process(target=train)
            child.start()
            child.join()
            assert child.exitcode == 0
    """).well()
    assert job.stdout.count("well") == 2


def test_other_programs_that_a_rank_starts_are_worlds_of_one() -> None:
    """They do not join the job whose environment they have inherited."""
    program = (
        "import ringreduce as rr; rr.init(); print(rr.rank(), rr.size(), rr.allreduce(__import__('numpy').ones(1)))"
    )
    run_program(f"""
        import subprocess, sys
        import ringreduce as rr
        rr.init()
        said = subprocess.run([sys.executable, "-c", {program!r}], check=True, capture_output=True, text=True).stdout
        assert said == "0 1 [1.]\\n", said
        rr.barrier()
    """).well()


def test_a_job_that_a_rank_launches_is_a_job_of_its_own() -> None:
    """A launcher between a rank and a process makes that one a rank of another job."""
    program = "import ringreduce as rr; rr.init(); print(rr.size(), flush=True)"
    run_program(f"""
        import os, subprocess, sys
        import ringreduce as rr
        rr.init()
        if rr.rank() == 0:
            clean = {{name: value for name, value in os.environ.items() if not name.startswith(("OMPI_C", "PMIX_"))}}
            command = ["mpirun", "-np", "2", sys.executable, "-c", {program!r}]
            said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30, env=clean).stdout
            assert said.split() == ["2", "2"], said
        rr.barrier()
    """).well()


# ---- several processes that MPI does not connect ----

ALONE = "import ringreduce as rr; rr.init(); print('size', rr.size())"
LAUNCHERS_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "RANK", "WORLD_SIZE", "TORCHELASTIC_")


@pytest.fixture
def run_alone() -> Callable[..., Job]:
    """A function that runs a command with no launcher in its environment but what it is given."""
    inherited = [name for name in os.environ if name.startswith(LAUNCHERS_VARIABLES)]
    bare = dict.fromkeys(each for each in inherited if not each.startswith("OMPI_MCA_"))  # which are the user's
    return lambda *command, **environment: run(*command, **{**bare, **environment})


def test_torchrun_is_told_from_mpirun(run_alone) -> None:
    """What torchrun starts is not connected by MPI: it says so, and the command that works."""
    if shutil.which("torchrun") is None:
        pytest.skip("torch is not installed")
    done = run_alone("torchrun", "--nproc-per-node=2", "--no-python", sys.executable, "-c", ALONE)
    assert done.returncode != 0
    assert "torchrun (or what sets its variables) has started several processes (WORLD_SIZE=2)" in done.stderr
    assert "ringreduce run -np 2 python" in done.stderr
    assert "RINGREDUCE_STANDALONE=1" in done.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "4", "RANK": "1"}, "WORLD_SIZE=4"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE=2"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE=2"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "srun --mpi=pmix"),
    ],
)
def test_a_process_among_several_does_not_train_alone(run_alone, variables: dict[str, str], said: str) -> None:
    """Where the environment proves that there are others, and MPI sees one, `init` raises and names the proof."""
    done = run_alone(sys.executable, "-c", ALONE, **variables)
    assert done.returncode != 0
    assert said in done.stderr
    assert run_alone(sys.executable, "-c", ALONE, RINGREDUCE_STANDALONE="1", **variables).well().stdout == "size 1\n"


def test_the_mpirun_of_another_library_is_recognised(run_alone) -> None:
    """MPICH's mpiexec with an mpi4py that uses Open MPI starts as many worlds of one as processes: an error."""
    other = Path(__file__).parents[2] / ".venv-mpich" / "bin" / "mpiexec"
    if not other.exists():
        pytest.skip("there is no second MPI library; scripts/test installs one")
    done = run_alone(other, "-n", 2, sys.executable, "-c", ALONE)
    assert done.returncode != 0
    assert "(PMI_SIZE=2), but Open MPI" in done.stderr
    assert "mpirun -np N python" in done.stderr


def test_ranks_open_no_sockets() -> None:
    """Ringreduce itself opens none; what MPI opens is MPI's."""
    needs("torch")
    job = run_program("""
        import sys
        import numpy as np, torch
        opened = []
        sys.addaudithook(lambda name, given: opened.append(name) if name.startswith("socket.") else None)
        import ringreduce.torch as hvd
        hvd.init()
        model = torch.nn.Linear(4, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        hvd.broadcast_object({"a": 1})
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        torch.distributed.init_process_group("ringreduce")
        torch.distributed.all_reduce(torch.ones(3))
        torch.distributed.destroy_process_group()
        hvd.shutdown()
        print(sorted(set(opened) - {"socket.gethostname"}))
    """).well()
    assert job.stdout.splitlines() == ["[]", "[]"]


def test_private_memory_is_left_alone_where_that_is_wanted() -> None:
    """No collective, nor `init` itself, makes the system copy another process's memory; by default they do."""
    job = run_program("""
        import os
        import numpy as np
        from ringreduce.transport.shared import private
        made = []
        def noted(copy):
            return lambda pid, *given: (made.append(pid), copy(pid, *given))[1]
        private._readv, private._writev = noted(private._readv), noted(private._writev)
        import ringreduce as rr
        for wanted in "01":
            os.environ["RINGREDUCE_PRIVATE_MEMORY"] = wanted
            rr.init()
            for count in (5, 1 << 20):
                array = np.full(count, 1 + rr.rank())
                assert (rr.allreduce(array) == 3).all()
                rr.allreduce(array, out=array)
                rr.broadcast(array, 1, out=array)
                rr.allgather(array)
                rr.alltoall(np.zeros(2 * count))
                rr.reduce_scatter(np.zeros(2 * count))
            rr.shutdown()
            assert bool(made) == (wanted == "1")
    """)
    assert (job.returncode, job.stderr) == (0, "")
