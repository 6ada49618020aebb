"""Signals and standard input of `ringreduce run` and `horovodrun`: what of them reaches the ranks, and how they end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import launching
import pytest
from launching import LIMIT_S, RINGREDUCE, Job, job_environment

#: Each rank says that it is ready, and goes on until it is told to end by a line of `go`, or by a signal.
READY = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["OMPI_COMM_WORLD_RANK"]
def is_ready():
    with open(folder / "ready", "w") as file:
        file.write("x")
    holds = open(folder / "lives", "w")  # until this process ends
    return holds
"""
LOOPS = """
import ringreduce as rr
rr.init()
holds = is_ready()
while rr.allreduce(int(len(list(folder.glob("dumps/rank-*.json"))) < rr.size())):
    pass
print("rank", rank, "came to its end", flush=True)
"""
#: Rank 1 ends first, in a way that ends a job at other times; rank 0 ends once the process of rank 1 has.
SAVES = """
how = sys.argv[2]
if how != "alone":
    import ringreduce as rr
    rr.init()
def end(number, frame):
    if rank == "0":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        os.set_blocking(first, True)
        os.read(first, 1)
        again = signal.sigtimedwait([signal.SIGTERM], 2.0)  # that mpirun would send before it kills
        (folder / "saved").write_text("not all" if again else "all")
        print("saved", flush=True)
    sys.exit(7)
first = os.open(folder / "first", os.O_RDWR if rank == "1" else os.O_RDONLY | os.O_NONBLOCK)
signal.signal(signal.SIGTERM, signal.SIG_DFL if rank == "1" and how == "dies" else end)
holds = is_ready()
while True:
    signal.pause()
"""
STAYS = """
signal.signal(signal.SIGTERM, lambda number, frame: None)
if rank == "0":
    import subprocess
    child = subprocess.Popen(["sleep", "1000"], stdout=open(folder / "lives", "w"))
holds = is_ready()
while True:
    signal.pause()
"""
STAYS_AND_SAYS_SO = STAYS.replace("None)", "print('asked', flush=True, file=open(folder / 'ready', 'w')))")
WAITS = "holds = is_ready(); time.sleep(100)"
READS_FIRST = """
holds = is_ready()
if rank == "0":
    sys.stderr.write(open(folder / "first").read())
"""
READS = "import os, sys; text = sys.stdin.read(); print(os.environ['OMPI_COMM_WORLD_RANK'], len(text))"


@contextmanager
def started(
    folder: Path,
    program: str,
    *arguments: str,
    options: tuple[str, ...] = (),
    command: str = "ringreduce run",
    prepare: Callable[[], object] = lambda: None,
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a job of two ranks; once both are ready, yield it, and a file that ends when none of its processes runs."""
    for name in ("ready", "lives", "first"):
        os.mkfifo(folder / name)
    ready = os.open(folder / "ready", os.O_RDWR)  # so that it does not end between two ranks
    lives = os.open(folder / "lives", os.O_RDONLY | os.O_NONBLOCK)
    name, *words = command.split()
    line = [RINGREDUCE.with_name(name), *words, "-np", "2", *options, sys.executable, "-c", READY + program, folder]
    with (
        job_environment(RINGREDUCE_DUMP=str(folder / "dumps")) as environment,
        subprocess.Popen(
            [*line, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment,
            preexec_fn=lambda: (signal.signal(signal.SIGINT, signal.default_int_handler), prepare()),
        ) as job,
    ):
        try:
            count = 0
            while count < 2:
                assert select.select([ready], [], [], LIMIT_S)[0]
                count += len(os.read(ready, 2 - count))
            yield job, lives
        finally:
            os.close(ready)
            os.close(lives)
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


def ask_to_end(job: subprocess.Popen[str], folder: Path) -> None:
    """Send SIGTERM to a job, and wait until a rank has it."""
    job.send_signal(signal.SIGTERM)
    heard = os.open(folder / "ready", os.O_RDONLY | os.O_NONBLOCK)
    assert select.select([heard], [], [], LIMIT_S)[0]
    os.close(heard)


def assert_nothing_is_left(lives: int) -> None:
    """No process of a rank, nor what it has started."""
    assert select.select([lives], [], [], LIMIT_S)[0]
    assert os.read(lives, 1) == b""


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("ringreduce run", ()),
        ("ringreduce run", ("--elastic",)),
        ("horovodrun", ()),
        ("ringreduce run", ("--log-dir",)),
    ],
    ids=["run", "elastic", "horovodrun", "log-dir"],
)
def test_sigusr1_makes_ranks_write_their_calls(tmp_path: Path, command: str, options: tuple[str, ...]) -> None:
    """As under mpirun; the job goes on."""
    options = (*options, str(tmp_path / "logs")) if "--log-dir" in options else options
    with started(tmp_path, LOOPS, command=command, options=options) as (job, _):
        job.send_signal(signal.SIGUSR1)
        said, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, errors
    assert "rank 0 came to its end" in said
    assert {each.name for each in (tmp_path / "dumps").iterdir()} == {"rank-0.json", "rank-1.json"}


@pytest.mark.parametrize("options", [(), ("--elastic",)], ids=["", "elastic"])
def test_signals_of_users_reach_the_handlers_of_ranks(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Of any program."""
    program = """
signal.signal(signal.SIGUSR1, lambda *_: print("rank", rank, "heard the first", flush=True))
signal.signal(signal.SIGUSR2, lambda *_: (print("rank", rank, "heard the second", flush=True), os._exit(0)))
holds = is_ready()
while True:
    signal.pause()
"""
    with started(tmp_path, program, options=options) as (job, _):
        assert job.stdout is not None
        job.send_signal(signal.SIGUSR1)
        said = [job.stdout.readline() for _ in range(2)]
        job.send_signal(signal.SIGUSR2)
        more, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, errors
    assert sorted(said) == ["rank 0 heard the first\n", "rank 1 heard the first\n"]
    assert sorted(more.splitlines()) == ["rank 0 heard the second", "rank 1 heard the second"]


@pytest.mark.parametrize("how", ["alone", "exits", "dies"])
@pytest.mark.parametrize(
    ("command", "options"),
    [
        pytest.param("ringreduce run", (), id="run"),
        pytest.param("ringreduce run", ("--elastic", "--max-restarts", "2"), id="elastic"),
        pytest.param("horovodrun", (), id="horovodrun", marks=pytest.mark.thorough),
    ],
)
def test_a_rank_may_save_after_sigterm(tmp_path: Path, command: str, options: tuple[str, ...], how: str) -> None:
    """Also when another rank has ended before, with a status or by the signal; the job is not started again."""
    options = (*options, "--grace", "60") if command == "ringreduce run" else options
    with started(tmp_path, SAVES, how, command=command, options=options) as (job, lives):
        job.send_signal(signal.SIGTERM)
        said, errors = job.communicate(timeout=LIMIT_S)
        assert_nothing_is_left(lives)
    assert job.returncode == 143, errors
    assert (tmp_path / "saved").read_text() == "all"
    assert said == "saved\n"
    assert "ringreduce: ended by SIGTERM; all ranks have ended\n" in errors


@pytest.mark.parametrize("options", [(), ("--elastic",)], ids=["", "elastic"])
def test_what_a_rank_has_started_gets_no_sigterm(tmp_path: Path, options: tuple[str, ...]) -> None:
    """It is the rank's to end: processes that load data, for example, are needed until the step ends."""
    program = """
import subprocess
child = subprocess.Popen(["sh", "-c", "read _; echo lives"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
def end(number, frame):
    print("rank", rank, child.communicate("\\n")[0], end="", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
holds = is_ready()
while True:
    signal.pause()
"""
    with started(tmp_path, program, options=(*options, "--grace", "60")) as (job, lives):
        job.send_signal(signal.SIGTERM)
        said, errors = job.communicate(timeout=LIMIT_S)
        assert_nothing_is_left(lives)
    assert job.returncode == 143, errors
    assert sorted(said.splitlines()) == ["rank 0 lives", "rank 1 lives"]


def test_ranks_may_end_well_after_sigterm(tmp_path: Path) -> None:
    """They do not wait in the end of MPI for an mpirun that is stopped."""
    program = """
import ringreduce as rr
rr.init()
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
holds = is_ready()
while True:
    signal.pause()
"""
    with started(tmp_path, program, options=("--grace", "10000")) as (job, lives):
        job.send_signal(signal.SIGTERM)
        errors = job.communicate(timeout=LIMIT_S)[1]
        assert_nothing_is_left(lives)
    assert job.returncode == 143, errors


def test_ranks_end_with_a_launcher_that_is_killed_while_they_save(tmp_path: Path) -> None:
    """It has stopped mpirun, which ends with it by SIGTERM once it goes on."""
    with started(tmp_path, STAYS_AND_SAYS_SO, options=("--grace", "10000")) as (job, lives):
        ask_to_end(job, tmp_path)
        job.kill()
        assert_nothing_is_left(lives)


@pytest.mark.parametrize("options", [("--grace", "0.5"), ("--elastic", "--grace", "0.5"), ("--grace", "0")])
def test_ranks_that_do_not_end_by_sigterm_are_killed(tmp_path: Path, options: tuple[str, ...]) -> None:
    """With what they have started."""
    with started(tmp_path, STAYS, options=options) as (job, lives):
        job.send_signal(signal.SIGTERM)
        errors = job.communicate(timeout=LIMIT_S)[1]
        assert_nothing_is_left(lives)
    assert job.returncode == 143, errors


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_does_not_wait(tmp_path: Path, second: signal.Signals) -> None:
    """As whoever sends it does not."""
    with started(tmp_path, STAYS_AND_SAYS_SO, options=("--grace", "10000")) as (job, lives):
        ask_to_end(job, tmp_path)
        job.send_signal(second)
        errors = job.communicate(timeout=LIMIT_S)[1]
        assert_nothing_is_left(lives)
    assert job.returncode in (128 + second, 143), errors


@pytest.mark.parametrize(
    ("number", "to_all", "status", "words"),
    [
        (signal.SIGINT, False, 130, "ringreduce: interrupted; ending all ranks\n"),
        (signal.SIGINT, True, 130, "ringreduce: interrupted; ending all ranks\n"),  # as from a terminal
        (signal.SIGTERM, False, 143, "ringreduce: ended by SIGTERM; all ranks have ended\n"),
        (signal.SIGHUP, False, 129, "ringreduce: ended by SIGHUP; all ranks have ended\n"),
        (signal.SIGHUP, True, 129, "ringreduce: ended by SIGHUP; all ranks have ended\n"),  # as the shell is closed
    ],
)
def test_a_signal_ends_all_ranks(tmp_path: Path, number: signal.Signals, to_all: bool, status: int, words: str) -> None:
    """And the launcher says so, also where mpirun does not get it."""
    with started(tmp_path, WAITS) as (job, _):
        (os.killpg if to_all else os.kill)(job.pid, number)
        errors = job.communicate(timeout=LIMIT_S)[1]
    assert job.returncode == status
    assert words in errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("options", [(), ("--elastic", "--max-restarts", "3")], ids=["", "elastic"])
def test_ranks_end_with_a_launcher_that_is_killed(
    tmp_path: Path, number: signal.Signals, options: tuple[str, ...]
) -> None:
    """Whatever they do, and however often they may be started again."""
    with started(tmp_path, WAITS, options=options) as (job, lives):
        job.send_signal(number)
        assert_nothing_is_left(lives)


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under nohup: mpirun alone would end by it."""
    ignore = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    with started(tmp_path, READS_FIRST, prepare=ignore) as (job, _):
        os.killpg(job.pid, signal.SIGHUP)
        (tmp_path / "first").write_text("x")
        errors = job.communicate(timeout=LIMIT_S)[1]
    assert job.returncode == 0, errors


def test_a_job_goes_on_when_nobody_reads_what_it_says(tmp_path: Path) -> None:
    """As after the end of a terminal whose shell has disowned it."""
    with started(tmp_path, READS_FIRST) as (job, _):
        assert job.stderr is not None
        job.stderr.close()
        (tmp_path / "first").write_text("x" * 1000)
        assert job.wait(timeout=LIMIT_S) == 0


def read(text: str, *arguments: object, command: str = "ringreduce run") -> Job:
    """Run a command line whose standard input is a text."""
    name, *words = command.split()
    line = [RINGREDUCE.with_name(name), *words, "-np", 2, *arguments]
    return launching.run("sh", "-c", 'printf %s "$0" | "$@"', text, *line, limit_s=60)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("ringreduce run", ("-", "a")),
        ("ringreduce run", ("-u", "-", "a")),
        ("ringreduce run", ()),
        ("ringreduce run --elastic", ("-", "a")),
        ("horovodrun", ("-", "a")),
    ],
)
def test_all_ranks_run_a_program_on_standard_input(command: str, words: tuple[str, ...]) -> None:
    """And see its end."""
    program = "import os, sys\nprint(os.environ['OMPI_COMM_WORLD_RANK'], sys.argv[1:])"
    done = read(program, sys.executable, *words, command=command).well()
    assert sorted(done.stdout.splitlines()) == [f"{rank} {[*words][-1:]}" for rank in range(2)]


@pytest.mark.parametrize("options", [(), ("--elastic",)], ids=["", "elastic"])
def test_rank_0_reads_standard_input_on_demand(options: tuple[str, ...]) -> None:
    """To its end; the others read nothing."""
    done = read("x" * 100_000, "--stdin", *options, sys.executable, "-c", READS).well()
    assert sorted(done.stdout.splitlines()) == ["0 100000", "1 0"]


@pytest.mark.parametrize("command", ["ringreduce run", "ringreduce run --elastic", "horovodrun"])
def test_a_job_leaves_standard_input_to_the_script_around_it(command: str) -> None:
    """Ranks that read find nothing, at once."""
    name, *words = command.split()
    line = [RINGREDUCE.with_name(name), *words, "-np", 2, sys.executable, "-c", READS]
    script = 'printf "one\\ntwo\\n" | while read -r line; do echo "$line"; "$@"; done'
    done = launching.run("sh", "-c", script, "sh", *line, limit_s=60)
    assert sorted(done.stdout.splitlines()) == ["0 0", "0 0", "1 0", "1 0", "one", "two"], done.stderr


def test_standard_input_that_cannot_be_read_is_refused() -> None:
    """In a line, before any rank starts."""
    line = [RINGREDUCE, "run", "-np", 2, "--stdin", sys.executable, "-c", READS]
    done = launching.run("sh", "-c", '"$@" <&-', "sh", *line, limit_s=60)
    assert done.returncode == 2
    assert "--stdin: there is no standard input" in done.stderr


def test_a_job_needs_no_home() -> None:
    """Though Open MPI does."""
    line = [RINGREDUCE, "run", "-np", "2", sys.executable, "-c", "import ringreduce as rr; rr.init(); print(rr.size())"]
    assert launching.run(*line, limit_s=60, HOME=None).well().stdout == "2\n2\n"
