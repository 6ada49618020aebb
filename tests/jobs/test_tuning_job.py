"""Jobs that look for a tuning table."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

#: What stands where a job looks for its table, as a program that makes it from its ``path``.
REFUSED = {
    "a pipe": "os.mkfifo(path)",
    "a folder": "path.mkdir()",
    "a file of a terabyte": "path.touch(); os.truncate(path, 1 << 40)",
    "nested without end": "path.write_text('[' * 100_000)",
    "a number of 4000 digits": "path.write_text('{\"format\": %s}' % ('7' * 4000))",
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_a_job_goes_on_without_a_table_that_is_refused(run_job: Callable[..., Any], make: str, tmp_path: Any):
    """Rank 0 says so in one line of the log, nothing waits, and all ranks work."""
    job = run_job(
        2,
        source=f"""
        import os, sys
        from pathlib import Path
        import numpy as np
        import ringreduce as rr
        from ringreduce.runtime.worlds import tuning_key
        rr.init()
        path = Path({str(tmp_path)!r}) / tuning_key(rr.world()).file_name
        if rr.rank() == 0:
            {make}
        rr.barrier()
        rr.shutdown()
        rr.init()
        assert rr.allreduce(np.ones(3)).tolist() == [2.0] * 3
        """,
        RINGREDUCE_TUNING=str(tmp_path),
    ).well()
    (line,) = job.stderr.splitlines()
    assert "going on without a tuning table" in line
    assert len(line) < 600


@pytest.mark.parametrize("folder", ["tables", 300 * "x"], ids=["empty", "a name too long for file systems"])
@pytest.mark.parametrize("deterministic", ["0", "1"])
def test_a_job_without_a_table_works(run_job: Callable[..., Any], folder: str, deterministic: str, tmp_path: Any):
    """Whether or not the folder can be looked into, and where the settings leave little to choose."""
    (tmp_path / "tables").mkdir()
    job = run_job(
        2,
        source="""
        import numpy as np
        import ringreduce as rr
        rr.init()
        assert rr.allreduce(np.ones(3)).tolist() == [2.0] * 3
        """,
        RINGREDUCE_DETERMINISTIC=deterministic,
        RINGREDUCE_TUNING=str(tmp_path / folder),
    ).well()
    assert job.stderr == ""


def test_a_table_is_not_made_beside_other_work(run_job: Callable[..., Any], tmp_path: Any):
    """Where something else computes, tune writes nothing and says why once; asked to, it writes what explain tells."""
    tune = ("-m", "ringreduce", "tune", "--budget", "3", "--directory", str(tmp_path))
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        refused = run_job(2, *tune)
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.count("other processes took") == 1
        assert list(tmp_path.iterdir()) == []
        made = run_job(2, *tune, "--even-if-busy")
    finally:
        other.kill()
        other.wait()
    assert made.returncode == 0, made.stderr
    assert "other processes took" in made.stdout
    told = run_job(2, "-m", "ringreduce", "explain", "-b", "1M", "-e", "1M", RINGREDUCE_TUNING=str(tmp_path)).well()
    assert "measured while other processes took" in told.stdout
