"""Functions that `ringreduce.run` calls on ranks of its own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
from documents import ROOT, blocks
from launching import LIMIT_S, run


def test_a_function_runs_on_ranks_of_its_own(tmp_path: Path) -> None:
    """`ringreduce.run` returns what the ranks returned, in order; if one fails, it raises with the traceback of that.

    The numbers are those of ringreduce, not Horovod's.
    """
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
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
        """)
    )
    run(sys.executable, program).well()


def test_the_cells_of_the_documents_run(tmp_path: Path) -> None:
    """Those of docs/observe.md, from a file in place of a notebook, which would need cloudpickle."""
    page = ROOT / "docs" / "observe.md"
    (defined,) = (text for _, text in blocks(page, "python") if text.startswith("def train"))
    ((_, called),) = blocks(page, "pycon")
    (tmp_path / "cell.py").write_text(defined)
    (tmp_path / "called.txt").write_text(called)
    program = tmp_path / "program.py"
    program.write_text(
        "import cell, doctest, sys\n"
        "if __name__ == '__main__':\n"
        "    failed, tried = doctest.testfile('called.txt', globs={'train': cell.train})\n"
        "    sys.exit(failed or tried < 3)\n"
    )
    run(sys.executable, program, cwd=tmp_path).well()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_ranks_end_with_the_program_that_called_run(
    tmp_path: Path, environment: dict[str, str], number: signal.Signals
) -> None:
    """Soon, however it ends."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    reader = os.open(ready, os.O_RDONLY | os.O_NONBLOCK)
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
            import time
            import ringreduce as rr

            def work():
                rr.init()
                file = open({str(ready)!r}, "w")
                file.write("x")
                file.flush()
                time.sleep(60)

            if __name__ == "__main__":
                rr.run(work, np=2)
        """)
    )
    listen = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # which a shell may have switched off
    job = subprocess.Popen([sys.executable, program], stderr=subprocess.DEVNULL, env=environment, preexec_fn=listen)
    try:
        started = b""
        while len(started) < 2:
            assert select.select([reader], [], [], LIMIT_S)[0]
            started += os.read(reader, 2)
        job.send_signal(number)
        job.wait()
        while select.select([reader], [], [], 30.0)[0]:
            if not os.read(reader, 100):  # no rank has it open any more
                return
        pytest.fail("ranks run 30 s after the end of the program")
    finally:
        job.kill()
        job.wait()
        os.close(reader)
