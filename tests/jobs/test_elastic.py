"""Elastic training of the example, and `ringreduce run`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"


def run(*arguments: str | Path, limit_s: int = 60) -> subprocess.CompletedProcess[str]:
    """Run ``ringreduce run`` with these arguments."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not on the path")
    command = [sys.executable, "-m", "ringreduce", "run", *map(str, arguments)]
    return subprocess.run(
        ["timeout", "--kill-after=5", str(limit_s), *command], capture_output=True, text=True, check=False
    )


def weights(done: subprocess.CompletedProcess[str]) -> str:
    """Return what the example says of its weights in the end."""
    found = re.search("weights: ([0-9a-f]{16})", done.stdout)
    assert done.returncode == 0, done.stderr
    assert found is not None, done.stdout
    return found[1]


def test_a_job_that_begins_again_ends_in_the_same_bits(tmp_path: Path) -> None:
    """With too few ranks left, the job goes on from disk, as many ranks as before: as if nothing had happened."""
    pytest.importorskip("torch")
    undisturbed = run("--elastic", "-np", 2, sys.executable, EXAMPLE)
    again = run(
        *("--elastic", "-np", 2, "--min-np", 2, "--max-restarts", 1, sys.executable, EXAMPLE),
        *("--folder", tmp_path / "commits", "--fail", "0@33"),
    )
    assert weights(again) == weights(undisturbed)
    assert "too few ranks are left, 1 where RINGREDUCE_MIN_NP=2" in again.stderr
    assert "starting it again (1 of 1)" in again.stderr
    assert re.search("going on from commit (25|30) on disk", again.stdout)


def test_the_others_go_on_without_a_rank(tmp_path: Path) -> None:
    """A model of torch trains to the end on the ranks that are left."""
    pytest.importorskip("torch")
    done = run("--elastic", "-np", 3, sys.executable, EXAMPLE, "--epochs", 1, "--fail", "0@20")
    assert weights(done)
    assert "3 ranks train from step 0" in done.stdout
    assert "2 ranks train from step 20" in done.stdout


NOT_ELASTIC = """
import os, signal
import numpy as np
import ringreduce as rr

rr.init()
rr.barrier()
if rr.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
rr.allreduce(np.ones(3))
"""


def test_a_program_that_is_not_elastic_ends_with_a_rank() -> None:
    """What nobody takes ends the others too, with the reason, and the job has failed."""
    done = run("--elastic", "-np", 3, sys.executable, "-c", NOT_ELASTIC)
    assert done.returncode == 1
    assert "rank 1 is lost" in done.stderr


STOPS_IN_RECOVERY = """
import os, signal
import numpy as np
import ringreduce as rr
from ringreduce.elastic import ObjectState, run
from ringreduce.transport import job

rr.init()
me = rr.rank()
meet = job.MpiRanks._meet

def meet_and_stop(self, waiter):
    meet(self, waiter)
    os.kill(os.getpid(), signal.SIGSTOP)

@run
def train(state):
    while state.step < 5:
        if (me, state.step) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        state.total += float(rr.allreduce(np.ones(1))[0])
        state.step += 1
        state.commit()

if me == 2:
    job.MpiRanks._meet = meet_and_stop
state = ObjectState(rr.broadcast_object, rr.rank, step=0, total=0.0)
train(state)
print(rr.size(), state.total)
"""


def test_a_rank_that_stops_while_the_others_look_who_is_left_is_killed(tmp_path: Path) -> None:
    """MPI waits for it without limit; the others do not: they go on without both."""
    program = tmp_path / "train.py"
    program.write_text(STOPS_IN_RECOVERY)
    done = run("--elastic", "-np", 4, "env", "RINGREDUCE_TIMEOUT=3", sys.executable, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 14.0"] * 2
    assert "rank 2 of the job does not go on, and is killed" in done.stderr


NEVER_TOGETHER = """
import ringreduce as rr
from ringreduce.elastic import ObjectState, run
import numpy as np

rr.init()

@run
def train(state):
    if rr.rank() == 0:
        rr.allreduce(np.ones(3))
    else:
        rr.barrier()
        rr.global_process_set.engine.communicator.barrier()

train(ObjectState())
"""


def test_a_mistake_of_the_program_ends_it(tmp_path: Path) -> None:
    """Where nobody has died, the others are not restarted for ever."""
    done = run("--elastic", "-np", 2, sys.executable, "-c", NEVER_TOGETHER, limit_s=50)
    assert done.returncode == 1
    assert "disagree" in done.stderr


def test_the_job_ends_with_what_has_started_it() -> None:
    """A scheduler that ends `ringreduce run` ends the ranks, and none are started again."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not on the path")
    program = "import ringreduce as rr, time; rr.init(); print('started', flush=True); time.sleep(100)"
    command = [sys.executable, "-m", "ringreduce", "run", "-np", "2", "--max-restarts", "1"]
    command += [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"started\n"
        job.terminate()
        assert job.wait(30) != 0
        assert job.stdout.read().count(b"started") <= 1  # which ends when no rank is left


def test_the_exit_status_is_that_of_the_job() -> None:
    """Without --elastic any rank that fails ends the job with its code."""
    assert run("-np", 2, sys.executable, "-c", "import ringreduce; ringreduce.init()").returncode == 0
    code = "import sys, ringreduce; ringreduce.init(); sys.exit(3 if ringreduce.rank() else 0)"
    assert run("-np", 2, sys.executable, "-c", code).returncode == 3


def test_a_dry_run_prints_what_would_be_started(tmp_path: Path) -> None:
    """Hosts and variables go to mpirun as they are, quoted, and the program with its own options; nothing starts."""
    hosts = tmp_path / "hosts"
    hosts.write_text("h1 slots=2\n")
    done = run("--dry-run", "-np", 3, "--hostfile", hosts, "python", "train.py", "--lr", "0.1", "-np", "a b")
    assert done.returncode == 0
    assert f"-np 3 --hostfile {hosts}" in done.stdout
    assert done.stdout.endswith("python train.py --lr 0.1 -np 'a b'\n")
    assert "--with-ft" not in done.stdout
    elastic = run("--dry-run", "--elastic", "--min-np", 2, "-np", 4, "python", "train.py")
    assert "RINGREDUCE_MIN_NP=2" in elastic.stdout
    assert "mpirun --with-ft ulfm -np 4 sh -c" in elastic.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-np", "0", "python"), "0 is not in the range"),
        (("-np", "2"), "Missing argument"),
        (("--min-np", "2", "-np", "4", "python"), "add --elastic"),
        (("--elastic", "--min-pn", "2", "-np", "4", "python"), "there is no option --min-pn"),
        (("--elastic", "--min-np", "5", "-np", "4", "python"), "more than the 4 ranks"),
        (("--hostfile", "/there/is/none", "python"), "does not exist"),
        (("--max-np", "4", "-np", "2", "python"), "--max-np is for elastic jobs; add --elastic"),
        (("--reset-limit", "4", "python"), "--reset-limit is for elastic jobs; add --elastic"),
        (("--elastic", "--max-np", "2", "-np", "4", "python"), "--max-np 2 is less than the 4 ranks of -np"),
        (("--elastic", "--max-np", "4", "-np", "2", "python"), "say where there are more: -H localhost:4"),
        (("--elastic", "--cooldown", "soon", "python"), "'soon': expected seconds, or the least and the most"),
        (("--elastic", "--cooldown", "0", "-H", "a b", "python"), "'a b' is no host"),
        (
            ("--elastic", "--max-np", "4", "--min-np", "3", "-H", "a,b", "python"),
            "the hosts have 2 slots, and --min-np is 3",
        ),
        (("--elastic", "--host-discovery-script", "/bin/true", "-H", "a", "python"), "leave out -H and --hostfile"),
        (("--elastic", "--host-discovery-script", __file__, "python"), "is not executable"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], said: str) -> None:
    """They end with status 2, and nothing is started."""
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("variable", "value", "refused"),
    [
        ("OMPI_MCA_pml", "ucx", True),
        ("OMPI_MCA_pml", "cm", True),
        ("OMPI_MCA_pml", "^ob1", True),
        ("OMPI_MCA_mtl", "ofi", True),
        ("OMPI_MCA_pml", "ob1", False),
        ("OMPI_MCA_pml", "^ucx,cm", False),
        ("OMPI_MCA_mtl", "^ofi", False),
    ],
)
def test_messages_that_survive_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, refused: bool
) -> None:
    """Before anything starts, with what to set."""
    monkeypatch.setenv(variable, value)
    done = run("--dry-run", "--elastic", "-np", 2, "true")
    assert done.returncode == (2 if refused else 0)
    assert (f"{variable}={value} in the environment" in done.stderr) is refused


@pytest.mark.parametrize(
    ("arguments", "environ", "set_here"),
    [
        ((), {}, True),
        (("-H", "localhost:2"), {}, False),
        (("--elastic", "--cooldown", "0", "-H", "localhost:2"), {}, True),
        (("-H", "other:2"), {}, False),
        ((), {"OMPI_MCA_btl_tcp_if_include": "eth0"}, False),
        ((), {"OMPI_MCA_btl_tcp_if_exclude": "eth0"}, False),
    ],
)
def test_a_job_of_one_machine_stays_on_it(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], environ: dict[str, str], set_here: bool
) -> None:
    """Its messages take no other interface than lo, unless the user has chosen one."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    done = run("--dry-run", "-np", 2, *arguments, "true")
    assert ("OMPI_MCA_btl_tcp_if_include=lo" in done.stdout) is set_here


def test_a_library_that_survives_nothing_is_refused(tmp_path: Path) -> None:
    """--elastic says which MPI it takes."""
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho HYDRA build details:\n")
    fake.chmod(0o755)
    program = "import sys; sys.executable = sys.argv.pop(1); from ringreduce.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "python"), "run", "--elastic", "-np", "2", "true"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
    )
    assert done.returncode == 2
    assert "--elastic takes Open MPI 5" in done.stderr
