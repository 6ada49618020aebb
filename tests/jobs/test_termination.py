"""How jobs end when something goes wrong: promptly, with the reason, and with a non-zero exit code."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launching import LIMIT_S, RINGREDUCE, run, run_job, run_program

#: What a rank does that has started MPI, and does not come.
RECEIVES = "from mpi4py import MPI; MPI.COMM_WORLD.recv(source=1)"


@pytest.mark.parametrize(
    ("program", "who"),
    [
        ("process_sets.join = broken if rank else process_sets.join; rr.init()", "rank 1 of 2"),
        ("rr.init(comm=[rank]); broken() if rank else MPI.COMM_WORLD.Barrier()", "of 1 (rank 1 of 2 in the job)"),
    ],
    ids=["in init", "in a world of its own"],
)
def test_an_exception_ends_the_job_wherever_the_others_wait(program: str, who: str):
    """Half-way through init, or in ways of their own."""
    job = run_program(f"""
        from mpi4py import MPI
        import ringreduce as rr
        from ringreduce.runtime import process_sets
        def broken(*arguments, **options):
            raise ValueError("the reason")
        rank = MPI.COMM_WORLD.rank
        {program}
    """)
    assert job.returncode == 1, job.stderr
    assert "ValueError: the reason" in job.stderr
    assert f"{who} failed" in job.stderr


def test_ranks_in_pid_namespaces_of_their_own_do_not_share_memory():
    """With a container for each rank, pids and descriptors can be equal: no rank takes its own memory for a peer's."""
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("pid namespaces cannot be made here")
    program = """if True:
        import numpy as np
        import ringreduce as rr
        rr.init()
        assert rr.allreduce(np.full(4, 1 + rr.rank())).tolist() == [3] * 4
        assert len(rr.world().topology.nodes) == 2
        rr.shutdown()
    """
    job = run_program(
        f"""
        import os, sys
        command = {namespace!r} + [sys.executable, "-c", {program!r}]
        os.execvp(command[0], command)
        """,
        OMPI_MCA_btl="self,tcp",  # the library's own shared memory does not survive this either
    ).well()
    assert "ranks of its machine run in separate pid namespaces" in job.stderr


def test_ending_without_shutdown_is_clean():
    """A script that never calls shutdown ends with exit code 0 and writes nothing."""
    job = run_program("import ringreduce as rr; rr.init(); rr.barrier()")
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(3)", 3, "rank 1 of 2 exits with code 3; ending the job"),
        ("sys.exit('no\\ndata')", 1, "rank 1 of 2 exits with code 1: no data; ending the job"),
        ("raise KeyboardInterrupt", 130, "rank 1 of 2 was interrupted; ending the job"),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "rank 1 of 2 was interrupted; ending the job"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "ringreduce: rank 1 of 2 was ended by SIGTERM"),
        ("os.kill(os.getppid(), signal.SIGINT); signal.pause()", 1, ""),  # Ctrl-C, which a terminal sends to mpirun
        ("raise ValueError('the reason')", 1, "ValueError: the reason\n"),
        ("raise SystemExit(0)", 1, "PeerLostError: rank 1 is lost: it has shut down"),
    ],
)
def test_the_job_ends_as_the_rank_that_ends_it(ending: str, code: int, said: str):
    """With that rank's exit code, and its reason among the last lines, while the other waits in a collective."""
    job = run_program(f"""
        import os, signal, sys
        import ringreduce as rr
        rr.init()
        if rr.rank() == 1:
            {ending}
        rr.barrier()
    """)
    assert job.returncode == code, job.stderr
    assert said in job.stderr
    assert ("Traceback" in job.stderr) == ("Error" in said)
    assert ("rank 1 of 2 failed; ending the job\n" in job.stderr) == ("raise ValueError" in ending)


def test_a_mismatch_shows_the_lines_of_the_program():
    """And none inside of the package: what differs is what the ranks called."""
    job = run_program("import numpy as np\nimport ringreduce as rr\nrr.init()\nrr.allreduce(np.ones(1 + rr.rank()))")
    assert job.returncode == 1
    assert "rank 1: allreduce(sum, shape 2" in job.stderr
    assert {line for line in job.stderr.splitlines() if "File " in line} == {'  File "<string>", line 4, in <module>'}


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("try: sys.exit(3)\nexcept SystemExit: raise", 3),
        ("try: sys.exit(9)\nexcept SystemExit: sys.exit(4)", 4),
        ("def leave():\n  try: sys.exit(5)\n  finally: print()\nleave()", 5),
        ("click.command()(lambda: sys.exit(6))(args=[])", 6),
        ("sys.exit(2**40 + 7)", 7),
        ("sys.exit([1, 2])", 1),
    ],
)
def test_an_exit_ends_the_job_whatever_it_passes_through(tmp_path: Path, ending: str, code: int):
    """With what the system gets to see of its code."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nimport click\nimport ringreduce as rr\nrr.init()\nif rr.rank() == 1:\n"
        + textwrap.indent(ending, "    ")
        + "\nrr.barrier()\n"
    )
    job = run_job(2, str(script))
    assert job.returncode == code, job.stderr
    assert f"rank 1 of 2 exits with code {code}; ending the job" in job.stderr


def test_an_exit_is_what_it_is_elsewhere():
    """Its type and code are plain, it can be copied and pickled, and in a thread it ends that."""
    job = run_program("""
        import copy, pickle, sys, threading
        import ringreduce as rr
        rr.init()
        assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit
        for status in (None, 0, 3, True, "words", 2**80, [1]):
            try:
                sys.exit(status)
            except BaseException as error:
                assert type(error) is SystemExit and error.code is status
                for made in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
                    assert type(made) is SystemExit and made.code == status
                error.code = 7
        del made
        thread = threading.Thread(target=lambda: sys.exit(3))
        thread.start()
        thread.join()
        rr.barrier()
        sys.exit(256)  # 0, for the system
    """)
    assert (job.returncode, job.stderr) == (0, "")


@pytest.mark.parametrize(
    "before",
    [
        "sys.stdout.close(); sys.stderr.close()",
        "sys.excepthook = lambda *_: None",
        "sys.excepthook = lambda *_, hook=sys.excepthook: (hook(*_), print())",
        "rr.runtime._process.termination._except_hook = lambda *_: 1 / 0",
    ],
)
def test_an_exception_ends_the_job_whatever_becomes_of_what_is_said(before: str):
    """Also where nothing can be written any more, and where a hook of the program's own has taken the place of ours."""
    job = run_program(f"""
        import sys
        import ringreduce as rr
        import ringreduce.runtime
        rr.init()
        if rr.rank() == 1:
            {before}
            raise ValueError("the reason")
        rr.barrier()
    """)
    assert job.returncode == 1, job.stderr


def test_an_exception_that_ends_nothing_does_not_end_the_job():
    """Interactive consoles show exceptions by the hook, and so do programs."""
    job = run_program("""
        import code, io, sys
        import ringreduce as rr
        rr.init()
        sys.stdin = io.StringIO("raise ValueError('in a console')")
        code.interact(banner="", exitmsg="")
        try:
            raise ValueError("shown")
        except ValueError:
            sys.excepthook(*sys.exc_info())
        rr.barrier()
    """).well()
    assert job.stderr.count("ValueError: in a console") == job.stderr.count("ValueError: shown") == 2


def test_ranks_that_waited_in_vain_may_try_again():
    """Once all are there, `init` succeeds, however often it has failed before."""
    run_program(
        """
        from mpi4py import MPI
        import numpy as np
        import ringreduce as rr
        comm = MPI.COMM_WORLD.Dup()
        if comm.rank == 1:
            comm.recv(source=0)
        failed = 0
        while not rr.is_initialized():
            try:
                rr.init()
            except rr.CollectiveTimeoutError as error:
                failed += 1
                assert "rank" in str(error) and "ranks  " not in str(error), error
                if (comm.rank, failed) == (0, 2):
                    comm.send(None, 1)
        assert comm.rank == 1 or failed >= 1
        assert rr.allreduce(np.ones(3)).tolist() == [3.0] * 3
        """,
        ranks=3,
        RINGREDUCE_TIMEOUT="2",
    ).well()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_world_is_made_whole_or_not_at_all(tmp_path: Path, ranks: int):
    """A timeline that one rank cannot begin, or sets that are none: an error on all ranks, and all can try again."""
    run_program(
        f"""
        import os, threading
        import numpy as np
        from mpi4py import MPI
        import ringreduce as rr
        from ringreduce.testing import caught
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        def refused(**options):
            error = caught(rr.init, **options)
            assert isinstance(error, rr.ConfigError), error
            assert not rr.is_initialized() and rr.global_process_set.process_set_id is None
            assert threading.active_count() == threads, threading.enumerate()
            return str(error)
        threads = 1
        assert "got [0]" in refused(process_sets=[[0]])
        assert "got 'all'" in refused(process_sets="all")
        rr.init()
        threads = threading.active_count()
        rr.barrier()
        rr.shutdown()
        threads = threading.active_count()
        os.environ["RINGREDUCE_TIMELINE"] = "{tmp_path}/trace.json" if rank < size - 1 else "{tmp_path}/none/trace.json"
        for _ in range(2):
            assert ("none/trace.json' cannot be written" in (said := refused())), said
        del os.environ["RINGREDUCE_TIMELINE"]
        rr.init()
        assert rr.allreduce(np.ones(2)).tolist() == [size] * 2
        """,
        ranks=ranks,
    ).well()


@pytest.mark.parametrize("between", [(), ("sh", "-c", '"$@"; true', "sh")], ids=["direct", "through a shell"])
def test_ranks_end_with_their_launcher(tmp_path: Path, environment: dict[str, str], between: tuple[str, ...]):
    """When the launcher is killed, and nobody else would end them, ranks end within seconds, whatever they do."""
    program = f"""if True:
        import os, time
        import numpy as np
        import ringreduce as rr
        rr.init()
        buffer = rr.empty(1000)
        rr.barrier()
        with open(f"{tmp_path}/{{rr.rank()}}.unfinished", "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, f"{tmp_path}/{{rr.rank()}}")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if rr.rank() == 0:
                buffer.sum()
            else:
                rr.world().empty(10)
    """
    job = subprocess.Popen(
        ["mpirun", "-np", "2", *between, sys.executable, "-c", program],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    ranks: list[int] = []
    try:
        ranks += [int(appeared(tmp_path / str(rank)).read_text()) for rank in range(2)]
        job.kill()
        job.wait()
        assert ended_within(ranks, 30.0)
    finally:
        job.kill()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("imports", "waiting"),
    [
        ("", "rr.allreduce(np.ones(4))"),
        ("", "rr.allreduce(np.ones(1 << 18))"),
        ("", "rr.recv(np.ones(4), 2)"),
        ("", "rr.recv(np.ones(1 << 18))"),
        ("", "rr.send(np.ones(1 << 18), 2)"),
        ("", "while True: rr.send(np.ones(1), 2)"),
        ("", "rr.allgather_object(1)"),
        ("from ringreduce.training.calls.requests import join", "join()"),
    ],
    ids=["small", "large", "receive", "receive from any", "send", "small sends", "an operation", "join"],
)
def test_survivors_name_the_rank_that_died(tmp_path: Path, imports: str, waiting: str):
    """All of them, and not one another, although they end one after the other."""
    job = run_program(
        f"""
        import os, signal
        import numpy as np
        import ringreduce as rr
        {imports}
        rr.init()
        for _ in range(3):
            rr.allgather_object(0)
            rr.barrier()
        if rr.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            {waiting}
        except rr.PeerLostError as error:
            # A link is made at once: MPI may end this rank between the making of a file and its writing.
            os.symlink(str(error.rank), "{tmp_path}/" + str(rr.rank()))
            raise
        """,
        ranks=3,
    )
    assert job.returncode != 0
    named = {path.name: os.readlink(path) for path in tmp_path.iterdir()}
    assert set(named.values()) <= {"2"}, named


@pytest.mark.parametrize("phase", ["LATE_ENTRY", "UNFINISHED", "LATE_BARRIER"])
def test_a_rank_may_die_in_any_phase_of_a_compiled_call(phase: str) -> None:
    """While it waits for the others to come, is at work, or waits for them at the end: they name it, and go on."""
    pytest.importorskip("numba")
    program = f"""
import os, signal
import numpy as np
from ringreduce.common.config import Config
from ringreduce.native import cache, layout
from ringreduce.transport.shared import compiled, node
if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
    library = cache.loops(Config.from_environ().caches).library

    def run(*arguments):
        code = library.run(*arguments)
        if code == layout.{phase}:
            os.kill(os.getpid(), signal.SIGKILL)
        return code

    node.loops = lambda folder, codecs: cache.Loops(library._replace(run=run))
    compiled._POLLS = compiled._HELD_POLLS = compiled._YIELDS = 0
import ringreduce as rr
rr.init()
array = rr.empty(4 << 20, "float32")
try:
    while True:
        rr.allreduce(array, out=array)
except rr.PeerLostError as error:
    assert error.rank == 2
    rr.go_on(error)
assert rr.allreduce(np.ones(1)) == rr.size() == 2
print("goes on")
"""
    done = run(RINGREDUCE, "run", "--elastic", "-np", 3, sys.executable, "-c", program)
    assert done.stdout.count("goes on") == 2, done.stderr


def test_what_a_rank_has_sent_before_it_died_is_received() -> None:
    """By all others; what it has not sent is an error that names it, and they go on."""
    program = """
import os, signal
import numpy as np
import ringreduce as rr
rr.init()
rank, out = rr.rank(), np.zeros(3)
if rank == 0:
    rr.send(np.ones(3), 1)
    rr.send(np.full(3, 2.0), 2)
    os.kill(os.getpid(), signal.SIGKILL)
rr.recv(out, 0)
assert (out == rank).all()
try:
    rr.recv(out, 0)
except rr.PeerLostError as error:
    assert error.rank == 0
    rr.go_on(error)
assert rr.allreduce(np.ones(1)) == rr.size() == 2
print("goes on")
"""
    done = run(RINGREDUCE, "run", "--elastic", "-np", 3, sys.executable, "-c", program)
    assert done.stdout.count("goes on") == 2, done.stderr


@pytest.mark.parametrize(
    ("absent", "present", "said"),
    [
        ("sys.stdin.read()", "rr.init()", "waited 2 s in init() for rank 1 to call it"),
        (RECEIVES, "rr.init()", "CollectiveTimeoutError: waited 2 s for rank 1 to start ringreduce"),
        (RECEIVES, "rr.init(comm=[0, 1])", "CollectiveTimeoutError: waited 2 s for rank 1 to call"),
    ],
    ids=["without MPI", "with MPI", "part"],
)
def test_ranks_do_not_wait_in_init_without_limit(absent: str, present: str, said: str):
    """For one that has not started MPI, nor for one that never calls it; the error names that one, and the job ends."""
    others = "12" if "comm" in present else "1"
    job = run_program(
        f"""
        import os, sys
        if os.environ["OMPI_COMM_WORLD_RANK"] in {others!r}:
            os.dup2(os.pipe()[0], 0)
            {absent}
        import ringreduce as rr
        {present}
        """,
        ranks=3,
        RINGREDUCE_TIMEOUT="2",
    )
    assert job.returncode not in (0, 124)
    assert said in job.stderr


def test_ranks_of_different_versions_do_not_start():
    """They may not understand each other; all are told, with the hosts."""
    job = run_program("""
        from mpi4py import MPI
        from ringreduce import runtime
        from ringreduce.runtime import bootstrap
        if MPI.COMM_WORLD.rank == 1:
            bootstrap.VERSION = "0.0.1"
        runtime.init()
    """)
    assert job.returncode != 0
    assert re.search(r"rank 0: ringreduce \S+ on \S+\n  rank 1: ringreduce 0.0.1 on \S+\n", job.stderr)


def test_what_was_chosen_is_logged_by_one_rank():
    """At the level of information: versions, ranks, launcher, what connects them, the tuning table, the settings."""
    job = run_program("import ringreduce as rr; rr.init()", RINGREDUCE_LOG_LEVEL="info", RINGREDUCE_BUCKET="1M").well()
    lines = job.stderr.splitlines()
    assert all(line.startswith("ringreduce: rank 0: ") for line in lines), lines
    for said in ("Python", "2 ranks on 1 node, started by Open MPI's mpirun", "shared memory", "bucket_nbytes=1048576"):
        assert said in job.stderr


def appeared(path: Path) -> Path:
    """Return a path once there is a file."""
    end = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        select.select([], [], [], 0.01)
    return path


def ended_within(pids: list[int], limit_s: float) -> bool:
    """Return whether processes end within a time (seconds)."""
    end = time.monotonic() + limit_s
    watched = [os.pidfd_open(pid) for pid in pids if os.path.exists(f"/proc/{pid}")]
    try:
        return all(select.select([each], [], [], max(0.0, end - time.monotonic()))[0] for each in watched)
    finally:
        for each in watched:
            os.close(each)
