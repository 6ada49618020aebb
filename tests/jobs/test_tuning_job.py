"""Jobs that look for a tuning table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launching import run_job, run_program

#: What makes what stands where a job looks for its table: a pipe, a folder, a file of a terabyte, one that is nested
#: without end, and a number of 4000 digits.
REFUSED = [
    "os.mkfifo(path)",
    "path.mkdir()",
    "path.touch(); os.truncate(path, 1 << 40)",
    "path.write_text('[' * 100_000)",
    "path.write_text('{\"format\": %s}' % ('7' * 4000))",
]


def test_a_job_goes_on_without_a_table_that_is_refused(tmp_path: Path):
    """Rank 0 says so in one line of the log, nothing waits, and all ranks work."""
    job = run_program(
        f"""
        import os
        from pathlib import Path
        import numpy as np
        import ringreduce as rr
        from ringreduce.collectives.choice.tuning import Key
        rr.init()
        for number, make in enumerate({REFUSED!r}):
            folder = Path({str(tmp_path)!r}, str(number))
            path = folder / Key(rr.world().topology, rr.world().library).file_name
            os.environ["RINGREDUCE_TUNING"] = str(folder)
            if rr.rank() == 0:
                folder.mkdir()
                exec(make)
            rr.barrier()
            rr.shutdown()
            rr.init()
            assert rr.allreduce(np.ones(3)).tolist() == [2.0] * 3
        """,
        RINGREDUCE_TUNING=str(tmp_path),
    ).well()
    lines = job.stderr.splitlines()
    assert len(lines) == len(REFUSED)
    assert all("going on without a tuning table" in line and len(line) < 600 for line in lines)


def test_a_job_without_a_table_works(tmp_path: Path):
    """Whether or not the folder can be looked into, and where the settings leave little to choose."""
    (tmp_path / "tables").mkdir()
    job = run_program(f"""
        import os
        import numpy as np
        import ringreduce as rr
        for folder in ("tables", 300 * "x"):  # too long for file systems
            for deterministic in "01":
                os.environ.update(RINGREDUCE_TUNING={str(tmp_path)!r} + "/" + folder)
                os.environ.update(RINGREDUCE_DETERMINISTIC=deterministic)
                rr.init()
                assert rr.allreduce(np.ones(3)).tolist() == [2.0] * 3
                rr.shutdown()
    """).well()
    assert job.stderr == ""


def test_a_table_is_not_made_beside_other_work(tmp_path: Path):
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
