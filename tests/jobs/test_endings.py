"""How jobs end when something goes wrong: promptly, with the reason, and with a non-zero exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

#: A job that ends at once takes about two seconds; one that hangs is stopped by RINGREDUCE_TIMEOUT, 300 s by default.
PROMPT_S = 20


def test_an_exception_on_one_rank_ends_the_job(run_job):
    """The other ranks wait in a collective; the job ends nevertheless, and the traceback is there to read."""
    job = run_job(
        3,
        source="""
        import ringreduce as rr
        rr.init()
        if rr.rank() == 1:
            raise ValueError("the reason")
        rr.barrier()
        """,
    )
    assert job.returncode != 0
    assert job.seconds < PROMPT_S
    assert "ValueError: the reason" in job.stderr
    assert "rank 1 of 3" in job.stderr


def test_an_exception_before_init_ends_the_job(run_job):
    """A rank that fails before the world exists does not leave the others waiting for it in init."""
    job = run_job(
        2,
        source="""
        import os
        if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
            raise ValueError("the reason")
        import ringreduce as rr
        rr.init()
        rr.barrier()
        """,
    )
    assert job.returncode != 0
    assert job.seconds < PROMPT_S
    assert "ValueError: the reason" in job.stderr


def test_interrupt_ends_the_job(run_job):
    """Ctrl-C, which a terminal sends to mpirun, ends ranks that wait in a collective."""
    job = run_job(
        2,
        source="""
        import os, signal
        import ringreduce as rr
        rr.init()
        rr.barrier()
        if rr.rank() == 0:
            os.kill(os.getppid(), signal.SIGINT)
            signal.pause()
        rr.barrier()
        """,
    )
    assert job.returncode != 0
    assert job.seconds < PROMPT_S


def test_a_killed_rank_ends_the_job(run_job):
    """When the system kills a rank, the others do not wait for it for ever."""
    job = run_job(
        2,
        source="""
        import os, signal
        import numpy as np
        import ringreduce as rr
        rr.init()
        rr.barrier()
        if rr.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        rr.allreduce(np.ones(1 << 20))
        """,
    )
    assert job.returncode != 0
    assert job.seconds < PROMPT_S


def test_a_mismatch_is_one_error_on_all_ranks(run_job):
    """Ranks that call different things all get the same MismatchError, and can go on from there."""
    job = run_job(
        3,
        source="""
        import numpy as np
        import ringreduce as rr
        rr.init()
        try:
            rr.allreduce(np.ones(5 + (rr.rank() == 2)))
        except rr.MismatchError as error:
            print(f"<{str(error)!r}>", flush=True)  # in one line: the ranks' lines mix
        assert rr.allreduce(np.ones(4))[0] == 3
        rr.shutdown()
        """,
    )
    assert job.returncode == 0, job.stderr
    reports = re.findall("<(.*?)>", job.stdout)
    assert (len(reports), len(set(reports))) == (3, 1)
    assert re.search("ranks 0-1: .*shape 5.*rank 2: .*shape 6", reports[0])


def test_ending_without_shutdown_is_clean(run_job):
    """A script that never calls shutdown ends with exit code 0 and writes nothing."""
    job = run_job(2, source="import ringreduce as rr; rr.init(); rr.barrier()")
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")


def test_one_process_needs_no_mpi():
    """Without a launcher the world is this process, and mpi4py is not even looked for."""
    source = """if True:
        import sys
        sys.modules["mpi4py"] = None
        import numpy as np
        import ringreduce as rr
        rr.init()
        assert (rr.rank(), rr.size(), rr.local_rank(), rr.cross_size()) == (0, 1, 0, 1)
        assert rr.allreduce(np.arange(3)).tolist() == [0, 1, 2]
    """
    launcher = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    subprocess.run([sys.executable, "-c", source], env=environment, check=True, timeout=30)


def test_a_terminated_process_is_not_mistaken_for_success(run_job):
    """SIGTERM on one rank (a batch system's way to end a job) gives a non-zero exit code."""
    job = run_job(
        2,
        source=f"""
        import os
        import ringreduce as rr
        rr.init()
        if rr.rank() == 1:
            os.kill(os.getpid(), {int(signal.SIGTERM)})
        rr.barrier()
        """,
    )
    assert job.returncode != 0
    assert job.seconds < PROMPT_S
