"""Functions that `ringreduce.run` calls on ranks of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path


def test_a_function_runs_on_ranks_of_its_own(tmp_path: Path) -> None:
    """`ringreduce.run` returns what the ranks returned, in order; if one fails, it raises with the traceback of that.

    The numbers are those of ringreduce, not Horovod's.
    """
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import ringreduce as rr

            def work(power, fails=False):
                rr.init()
                if fails and rr.rank() == 1:
                    raise KeyError("the reason")
                return rr.rank(), float(rr.allreduce(float(rr.rank() + 1) ** power)), rr.config().conventions.value

            if __name__ == "__main__":
                assert rr.run(work, (2,), np=2) == [(0, 5.0, "chain_rule"), (1, 5.0, "chain_rule")]
                try:
                    rr.run(work, (2,), {"fails": True}, np=2)
                except rr.CollectiveError as error:
                    assert "rank 1 of 2 failed" in str(error) and "KeyError: 'the reason'" in str(error), error
                else:
                    raise AssertionError
                assert not rr.is_initialized()
            """
        )
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
