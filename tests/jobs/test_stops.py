"""Jobs that are asked to stop: no step is lost or repeated, and run again they end in the bits of one that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import launching
import pytest
from launching import LIMIT_S, RINGREDUCE, job_environment, needs

from ringreduce.common import processes

PROGRAM = launching.PROGRAMS / "stopped_training.py"
STEPS = 12
STOPPED = os.EX_TEMPFAIL


def train(folder: Path, way: str, ranks: int, *warnings: str, command: tuple[object, ...] | None = None) -> int:
    """Train on so many ranks until the job ends; return its status."""
    folder.mkdir(exist_ok=True)
    binding, _, backend = way.partition("-")
    settings = {"KERAS_BACKEND": backend if binding == "keras" else None, "TF_CPP_MIN_LOG_LEVEL": "3"}
    start = command or (RINGREDUCE, "run", "--elastic", "-np", ranks)
    done = launching.run(*start, sys.executable, PROGRAM, folder, way, *warnings, **settings)
    assert "Traceback" not in done.stderr, done.stderr
    assert "failed" not in done.stderr, done.stderr
    return done.returncode


def assert_nothing_is_lost(folder: Path, undisturbed: Path, ranks: int) -> None:
    """Each rank has made each step once, and the weights have the bits of a training that nothing has stopped."""
    for rank in range(ranks):
        assert (folder / f"steps-{rank}").read_text().split() == [str(step) for step in range(STEPS)]
    assert (folder / "weights").read_bytes() == (undisturbed / "weights").read_bytes()


def moments(way: str, ranks: int, seed: int) -> list[str]:
    """Return who is warned, in which steps, and how: at random, no two in steps that follow each other."""
    draw, count = random.Random(f"{way} {ranks} {seed}"), COUNTS[seed]
    steps = [at + step for at, step in enumerate(sorted(draw.sample(range(STEPS - count), count)))]
    hows = [
        draw.choice(["SIGTERM", "SIGUSR1", "handler", "twice", f"after {draw.uniform(0, 0.01):.5f}"]) for _ in steps
    ]
    return [f"{draw.randrange(ranks)}@{step}:{how}" for step, how in zip(steps, hows, strict=True)]


WAYS = ["numpy", "torch", "torch-node", "torch-all", "torch-late", "torch-local", "torch-diloco", "jax", "tensorflow"]
WAYS += ["keras-tensorflow", "keras-jax", "keras-torch"]
#: By seed: how many moments. With 1 to 4 ranks these are 60 of each way.
COUNTS = (5, 4, 4, 2)
ALL = [(way, ranks, seed) for way in WAYS for ranks in (1, 2, 3, 4) for seed in range(len(COUNTS))]
CASES = [  # in which ranks are warned in each way
    ("numpy", 1, 2), ("numpy", 3, 3), ("torch-all", 2, 3),
    ("torch-diloco", 2, 3), ("jax", 2, 3), ("keras-jax", 2, 3),
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """A function that returns the folder of a training that nothing stops, in some way on so many ranks; made once."""

    @cache
    def made(way: str, ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        assert train(folder, way, ranks) == 0
        return folder

    return made


@pytest.mark.limit(400)  # up to seven jobs, of which a framework takes ten seconds to import where others have cores
@pytest.mark.parametrize(
    ("way", "ranks", "seed"), [pytest.param(*each, marks=() if each in CASES else pytest.mark.thorough) for each in ALL]
)
def test_a_job_that_is_stopped_loses_no_step(
    tmp_path: Path, undisturbed: Callable[[str, int], Path], way: str, ranks: int, seed: int
) -> None:
    """Whichever rank is warned, in whichever step: all write that step to disk and end with status 75, each time."""
    binding, _, option = way.partition("-")
    needs(*{"jax": ["jax", "optax"], "keras": ["keras", option]}.get(binding, [binding]))
    warnings = moments(way, ranks, seed)
    statuses = [train(tmp_path / "stopped", way, ranks, *warnings) for _ in range(len(warnings) + 1)]
    assert statuses == [STOPPED] * len(warnings) + [0]
    assert_nothing_is_lost(tmp_path / "stopped", undisturbed(way, ranks), ranks)


RESTARTS = ("--elastic", "--max-restarts", "3")
FROM_OUTSIDE = ("launcher SIGTERM", "mpirun SIGTERM", "launcher SIGUSR1")
IN_PLACE = """
import sys
from ringreduce.cli import main
from ringreduce.launcher import start
from ringreduce.launcher.mpirun import Mpirun
found = Mpirun.ask(sys.argv.pop(1))
start.find = lambda *, required=True: found
main()
"""


def in_place_of_mpirun(folder: Path) -> tuple[object, ...]:
    """Return the words of a launcher that finds a shell script, as sites and Intel MPI have it, which runs mpirun."""
    script = folder / "mpirun"
    script.write_text(f'#!/bin/sh\n"{RINGREDUCE.with_name("mpirun")}" "$@"\nexit $?\n')
    script.chmod(0o755)
    return sys.executable, "-c", IN_PLACE, script, "run"


@pytest.mark.parametrize(
    ("in_place", "options", "how"),
    [
        *((False, *each) for each in product((RESTARTS, ()), FROM_OUTSIDE)),
        (True, ("--elastic",), "launcher SIGUSR1"),
        (True, (), "mpirun SIGUSR1"),
    ],
)
def test_signals_from_outside_stop_a_job(
    tmp_path: Path, undisturbed: Callable[[str, int], Path], in_place: bool, options: tuple[str, ...], how: str
) -> None:
    """To the launcher or to mpirun, which may be a script; no restart is spent, and the status is that of a stop."""
    command = (*(in_place_of_mpirun(tmp_path) if in_place else (RINGREDUCE, "run")), *options, "-np", 2)
    statuses = [train(tmp_path / "stopped", "numpy", 2, f"1@3:{how}", command=command) for _ in range(2)]
    assert statuses == [STOPPED, 0]
    assert_nothing_is_lost(tmp_path / "stopped", undisturbed("numpy", 2), 2)


SENDS = """
import os, signal, sys, threading, time
import ringreduce as rr
from ringreduce.common import processes
heard = threading.Event()
signal.signal(signal.SIGUSR2, lambda number, frame: heard.set())
rr.init()
rr.barrier()
if rr.rank() == 0:
    names = dict(processes.ancestors())
    over = list(names)[list(names).index(processes.launcher()) + 1:]
    launcher = next(pid for pid in over if names[pid] not in ("mpirun", "sh"))
    os.kill(launcher, getattr(signal, sys.argv[1]))
if sys.argv[1] == "SIGUSR2":
    assert heard.wait(60)
    print("heard", flush=True)
else:
    while not rr.stopping():
        pass
    if rr.rank() == 0:
        time.sleep(2)  # mpirun, unless it is stopped, ends the others half a second after the first
        print("saved", flush=True)
    sys.exit(os.EX_TEMPFAIL)
"""


@pytest.mark.parametrize(
    ("number", "status", "said"), [("SIGUSR2", 0, "heard\nheard\n"), ("SIGTERM", STOPPED, "saved\n")]
)
def test_signals_act_on_the_mpirun_under_a_script(tmp_path: Path, number: str, status: int, said: str) -> None:
    """It passes them on to all ranks, and is stopped while they save."""
    command = (*in_place_of_mpirun(tmp_path), "-np", 2, sys.executable, "-c", SENDS, number)
    done = launching.run(*command)
    assert (done.returncode, done.stdout) == (status, said), done.stderr


PLAIN = """
import os, signal, sys
import ringreduce as rr
rr.init()
first = os.open(sys.argv[1], os.O_RDWR)
for step in range(9):
    if step == 4 and rr.rank() == rr.size() - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if rr.stopping():
        if rr.rank() == 0:
            os.read(first, 1)  # saving takes longer than the end of the others
            print("saved", step, flush=True)
        else:
            os.write(first, b"x" * (rr.rank() == 1))
        sys.exit(os.EX_TEMPFAIL)
"""


@pytest.mark.parametrize(
    "command",
    [("ringreduce", "run", "-np", "3"), ("ringreduce", "run", "--elastic", "-np", "3"), ("mpirun", "-np", "3")],
)
def test_a_plain_loop_saves_before_the_job_ends(tmp_path: Path, command: tuple[str, ...]) -> None:
    """All ranks learn of it in the step in which one was warned; those that end first do not end the job."""
    os.mkfifo(tmp_path / "first")
    name, *words = command
    start = RINGREDUCE if name == "ringreduce" else name
    done = launching.run(start, *words, sys.executable, "-c", PLAIN, tmp_path / "first")
    assert (done.returncode, done.stdout) == (STOPPED, "saved 4\n"), done.stderr


HAS_CHILDREN = """
import atexit, multiprocessing, os, signal, subprocess, sys
import ringreduce as rr

def wait(ready):
    ready.send(None)
    while True:
        signal.pause()

def start(method):
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=wait, args=(there,), daemon=True)
    child.start()
    here.recv()
    return child

def at_exit():
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    forked = os.fork()
    if not forked:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(forked, 0)
    program = subprocess.run(["sh", "-c", "kill -TERM $$; exit 0"])
    print("at exit", os.waitstatus_to_exitcode(status), program.returncode, flush=True)

if __name__ == "__main__":
    atexit.register(at_exit)
    rr.init()
    children = {"before": start("fork")}
    rr.stopping()
    children["unasked"] = start("fork")
    rr.request_stop()
    children["asked"] = start("fork")
    assert rr.stopping()
    children |= {method: start(method) for method in ("fork", "spawn", "forkserver")}
    for name, child in children.items():
        child.terminate()
        child.join()
        print(name, child.exitcode, flush=True)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print("pool", pool.map(abs, [-1]), flush=True)
    left = start("fork")  # which multiprocessing ends at exit, as the next one, which may not even have begun
    multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True).start()
    sys.exit(os.EX_TEMPFAIL)
"""


def test_sigterm_ends_what_a_rank_has_started(tmp_path: Path) -> None:
    """Whenever and however it was started; the rank itself goes on to its exit, whatever warns it meanwhile."""
    program = tmp_path / "program.py"
    program.write_text(HAS_CHILDREN)
    done = launching.run(RINGREDUCE, "run", "-np", 2, sys.executable, program)
    assert done.returncode == STOPPED, done.stderr
    ends = [f"{name} -15" for name in ("before", "unasked", "asked", "fork", "spawn", "forkserver")]
    assert sorted(done.stdout.splitlines()) == sorted([*ends, "pool [1]", "at exit -15 -15"] * 2)


@pytest.mark.parametrize("options", [(), ("--elastic",)])
def test_a_warning_that_comes_before_the_ranks_stops_them(options: tuple[str, ...]) -> None:
    """Schedulers send one, whenever that is: in the same moment as the launcher can take it."""
    program = "import ringreduce as rr, sys; rr.init()\nwhile not rr.stopping(): rr.barrier()\nsys.exit(75)"
    line = [RINGREDUCE, "run", "-np", "2", *options, sys.executable, "-c", program]
    with job_environment() as environment, subprocess.Popen(line, stderr=subprocess.PIPE, env=environment) as job:
        try:
            while not processes.handles(job.pid, signal.SIGUSR1):
                assert job.poll() is None
            job.send_signal(signal.SIGUSR1)
            _, said = job.communicate(timeout=LIMIT_S)
        finally:
            job.terminate()
    assert job.returncode == STOPPED, said


NEVER_ASKS = """
import os, signal
import ringreduce as rr
rr.init()
rr.barrier()
if rr.rank() == 1:
    {before}
    os.kill(os.getpid(), signal.SIGTERM)
rr.barrier()
"""


@pytest.mark.parametrize(
    ("options", "before", "reason"),
    [
        ((), "pass", "rank 1 of 2 was ended by SIGTERM"),
        (("--elastic",), "import sys; sys.exit(75)", "rank 1 of 2 exits with code 75"),
    ],
    ids=["never asks", "exits alone"],
)
def test_a_rank_that_ends_without_an_agreement_has_failed(options: tuple[str, ...], before: str, reason: str) -> None:
    """By SIGTERM, as before there was anything to ask, or with the status of a stop, while the others go on."""
    program = NEVER_ASKS.format(before=before)
    done = launching.run(RINGREDUCE, "run", *options, "-np", 2, sys.executable, "-c", program)
    assert done.returncode not in (0, STOPPED)
    assert reason in done.stderr


AGREED = "import time; rr.init(); rr.request_stop(); rr.stopping()\nif rank == 1: {}\nsys.exit(75)"
NO_STOPS = {
    "before init": ("if rank == 1: sys.exit(75)\nrr.init()", ("--elastic",)),
    "unasked": ("rr.init(); sys.exit(75)", ()),
    "one fails": (AGREED.format("raise OSError"), ()),
    "one fails, elastic": (AGREED.format("raise OSError"), ("--elastic",)),
    "one fails later": (AGREED.format("time.sleep(1); raise OSError"), ()),  # the other has ended by then
    "one is killed": (AGREED.format("os.kill(os.getpid(), 9)"), ()),
    "one is killed later": (AGREED.format("time.sleep(1); os.kill(os.getpid(), 9)"), ()),
}


@pytest.mark.parametrize("logs", [False, True], ids=["shown", "in files"])
@pytest.mark.parametrize("case", NO_STOPS)
def test_what_is_no_stop_has_failed(tmp_path: Path, case: str, logs: bool) -> None:
    """The status of a stop without an agreement to, or beside the failure of another rank, wherever that says so."""
    program, options = NO_STOPS[case]
    source = f"import os, sys, ringreduce as rr; rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n{program}"
    options += ("--log-dir", str(tmp_path)) if logs else ()
    done = launching.run(RINGREDUCE, "run", *options, "-np", 2, sys.executable, "-c", source)
    assert done.returncode not in (0, STOPPED), done.stderr


@pytest.mark.parametrize("options", [(), ("--elastic",)], ids=["", "elastic"])
def test_files_of_an_earlier_job_hide_no_stop(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Though one of its ranks has failed there; this job has fewer."""
    line = (RINGREDUCE, "run", *options, "--log-dir", tmp_path)
    failing = "import ringreduce as rr; rr.init()\nif rr.rank() == 2: raise OSError\nrr.barrier()"
    assert launching.run(*line, "-np", 3, sys.executable, "-c", failing).returncode not in (0, STOPPED)
    stopping = "import sys, ringreduce as rr; rr.init(); rr.request_stop(); rr.stopping(); sys.exit(75)"
    done = launching.run(*line, "-np", 2, sys.executable, "-c", stopping)
    assert done.returncode == STOPPED, done.stderr


FAILS_IN_GRACE = """
import os, signal, sys, time
import ringreduce as rr
from ringreduce.common import processes
rr.init()
if rr.rank() == 0:
    above = [pid for pid, _ in processes.ancestors()]
    os.kill(above[above.index(processes.launcher()) + 1], signal.SIGTERM)
while not rr.stopping():
    pass
if rr.rank() == {rank}:
    time.sleep(0.5)  # the other has ended by then, in most runs
    {fails}
sys.exit(os.EX_TEMPFAIL)
"""


@pytest.mark.parametrize("fails", ["raise OSError", "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_of_one_rank_hides_no_failure_of_another(tmp_path: Path, rank: int, fails: str) -> None:
    """After SIGTERM, when mpirun is stopped and then returns the status of one of them; what they say is in files."""
    program = FAILS_IN_GRACE.format(rank=rank, fails=fails)
    line = (RINGREDUCE, "run", "--log-dir", tmp_path, "-np", 2, sys.executable, "-c", program)
    done = launching.run(*line)
    assert done.returncode not in (0, STOPPED), done.stderr


DIES_LATE = """
import os, signal, sys
import ringreduce as rr
rr.init()
print("begun", flush=True)
rr.request_stop()
rr.stopping()
if rr.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(os.EX_TEMPFAIL)
"""


@pytest.mark.parametrize("restarts", [0, 2])
def test_no_restart_is_begun_once_the_ranks_have_agreed_to_stop(restarts: int) -> None:
    """Though one of them dies meanwhile: if the job were to begin again, it is to be run again; else it has failed."""
    options = ("--elastic", "--max-restarts", restarts, "-np", 2)
    done = launching.run(RINGREDUCE, "run", *options, sys.executable, "-c", DIES_LATE)
    assert done.stdout.count("begun") == 2, done.stderr
    assert (done.returncode == STOPPED) is bool(restarts), done.stderr
    assert ("it is not started again here" in done.stderr) is bool(restarts)


DEATH = """
import os, signal, sys
import numpy as np
import ringreduce as rr
from ringreduce.elastic import run
from ringreduce.elastic.handlers import HandlingState

rr.init()
@run
def train(state):
    while True:
        state.step += 1
        rr.allreduce(np.ones(3))
        if state.step == 3 and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step == 5:
            rr.request_stop()
        state.commit()
state = HandlingState(step=0)
state.keep_on_disk(sys.argv[1])
train(state)
"""


def test_a_job_that_has_survived_a_death_can_stop(tmp_path: Path) -> None:
    """All that live have agreed to."""
    done = launching.run(RINGREDUCE, "run", "--elastic", "-np", 3, sys.executable, "-c", DEATH, tmp_path)
    assert done.returncode == STOPPED, done.stderr


def test_without_a_scheduler_the_status_is_for_the_caller() -> None:
    """Which `--requeue` says; and `--stop-before` needs an end."""
    program = "import os, sys, ringreduce as rr; rr.init(); rr.request_stop(); rr.stopping(); sys.exit(os.EX_TEMPFAIL)"
    done = launching.run(RINGREDUCE, "run", "--requeue", "-np", 1, sys.executable, "-c", program)
    assert done.returncode == STOPPED, done.stderr
    assert "no scheduler is known here; status 75 says to the caller" in done.stderr
    done = launching.run(RINGREDUCE, "run", "--stop-before", "5m", "-np", 1, sys.executable, "-c", program)
    assert done.returncode == 2
    assert "nobody says when this allocation ends" in done.stderr


LOOPS = """
import os, sys
import ringreduce as rr
rr.init()
while not rr.stopping():
    pass
sys.exit(os.EX_TEMPFAIL)
"""


def test_ranks_are_asked_before_the_end_of_the_allocation() -> None:
    """Once they listen; of an allocation that is at its end already, at once."""
    line = (RINGREDUCE, "run", "--stop-before", "1h", "-np", 2, sys.executable, "-c", LOOPS)
    done = launching.run(*line, SLURM_JOB_END_TIME="1700000000")
    assert done.returncode == STOPPED, done.stderr
    assert "the ranks are asked to stop" in done.stderr


def test_the_second_sigterm_ends_a_rank_at_once() -> None:
    """Three seconds after the first, whoever waits; until then it is one warning, of a scheduler that signals all."""
    program = """
import os, signal
import ringreduce as rr
from ringreduce.runtime.stop import StopRequest
now = 0.0
request = StopRequest(lambda: True, lambda: now)
request.listen()
for now in (0.0, 2.9, 3.1):
    os.kill(os.getpid(), signal.SIGTERM)
    print(now, request.made, flush=True)
"""
    done = launching.run(sys.executable, "-c", program)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "0.0 True\n2.9 True\n"), done.stderr


def test_warnings_of_a_rank_that_ends_are_no_new_ones() -> None:
    """As where Slurm signals all processes, and the launcher again: in its last moments Python has no handlers left."""
    program = """
import os, signal, sys
import ringreduce as rr

class Late:
    def __del__(self, kill=os.kill, me=os.getpid(), numbers=(signal.SIGTERM, signal.SIGUSR1)):
        for number in numbers:
            kill(me, number)
        os.write(1, b"late")

sys.modules["late"] = Late()  # is dropped as modules are
rr.init()
assert not rr.stopping()
os.kill(os.getpid(), signal.SIGUSR1)
assert rr.stopping()
rr.shutdown()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(os.EX_TEMPFAIL)
"""
    done = launching.run(sys.executable, "-c", program)
    assert (done.returncode, done.stdout) == (STOPPED, "late"), done.stderr
