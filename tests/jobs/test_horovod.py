"""Horovod scripts as whole jobs, and the ranks that ``horovod.run`` starts."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Job, needs, run, run_job, run_program

EXAMPLES = Path(__file__).parents[2] / "examples"


# ---- scripts ----


@pytest.mark.parametrize(
    "options", [["--fp16-allreduce", "--no-cuda"], ["--use-adasum", "--model", "resnet8"]], ids=lambda each: each[0]
)
def test_the_synthetic_benchmark_runs_as_it_stands(options: list[str]) -> None:
    """A script that imports horovod.torch trains, and rank 0 alone prints rates per rank and in total."""
    needs("torch")
    short = ["--batch-size", "2", "--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "2"]
    job = run_job(2, "-m", "ringreduce.horovod", str(EXAMPLES / "synthetic_benchmark.py"), *short, *options).well()
    assert len(re.findall(r"^Iter #\d: [\d.]+ img/sec per rank$", job.stdout, re.MULTILINE)) == 2
    (each,) = re.findall(r"^Img/sec per rank: ([\d.]+) \+-[\d.]+$", job.stdout, re.MULTILINE)
    (total,) = re.findall(r"^Total img/sec on 2 rank\(s\): ([\d.]+) \+-[\d.]+$", job.stdout, re.MULTILINE)
    assert float(total) >= float(each) > 0


def test_variables_of_horovod_reach_the_job() -> None:
    """What is honoured is in force on all ranks; what is not is named once."""
    job = run_program(
        """
        import logging
        import ringreduce as rr
        rr.init()
        config = rr.config()
        print(config.fusion_nbytes, config.stall_warning_s, config.timeout_s, config.log_level)
        """,
        HOROVOD_FUSION_THRESHOLD="65536",
        HOROVOD_STALL_CHECK_TIME_SECONDS="7",
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="40",
        HOROVOD_LOG_LEVEL="warning",
        HOROVOD_DYNAMIC_PROCESS_SETS="1",
        HOROVOD_CYCLE_TIME="0.1",
        HOROVOD_AUTOTUNE="1",
    ).well()
    assert job.stdout.splitlines() == ["65536 7.0 40.0 WARNING"] * 2
    assert job.stderr.count("HOROVOD_AUTOTUNE, HOROVOD_CYCLE_TIME") == 1
    assert job.stderr.count("HOROVOD_") == 2


# ---- horovod.run ----

#: Functions for the ranks: in a module of their own, and again in the script.
FUNCTIONS = """
import os, signal, sys, threading
import ringreduce as rr
from ringreduce.common.launch import launch

class Seen:
    def __init__(self, *values): self.values = values
    def __eq__(self, other): return self.values == other.values

def work(factor, offset=0):
    import horovod.torch as hvd
    hvd.init()
    return Seen(hvd.rank() * factor + offset, hvd.size(), hvd.allgather_object(hvd.rank()))

def place():
    rr.init()
    return os.environ["HOROVOD_RANK"], rr.config().conventions.value

def fail(rank, how):
    rr.init()
    if rr.rank() == rank:
        how()
    rr.barrier()

def raise_it(): raise KeyError("the reason")
def leave(): sys.exit(0)
def die(): os.kill(os.getpid(), signal.SIGKILL)

def go_on():
    from ringreduce.elastic import ObjectState, run
    rr.init()
    @run
    def train(state):
        while state.step < 5:
            if state.step == 2 and rr.rank() == 1 and rr.size() == 3:
                die()
            rr.barrier()
            state.step += 1
            state.commit()
        return rr.size(), state.step
    return train(ObjectState(rr.broadcast_object, rr.rank, step=0))

def fail_early(): raise_it() if launch().rank else rr.init()
def fail_and_stay(): stay(); raise_it()
def stay(): threading.Thread(target=threading.Event().wait).start()
def no_result(): return threading.Lock()
"""


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[[str], Job]:
    """A function that runs a script, which begins with FUNCTIONS, without a launcher."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)

    def run_it(source: str) -> Job:
        body = textwrap.indent(textwrap.dedent(source), "    ")
        script = f"import functions, horovod\n{FUNCTIONS}\nif __name__ == '__main__':\n{body}"
        (tmp_path / "train.py").write_text(script)
        return run(sys.executable, "-m", "ringreduce.horovod", "train.py", cwd=tmp_path)

    return run_it


def test_run_returns_results_in_the_order_of_ranks(run_script, tmp_path: Path) -> None:
    """Functions and classes of the script and of modules beside it reach the ranks and come back; nothing is left."""
    needs("torch")
    run_script(f"""
        import tempfile
        tempfile.tempdir = {str(tmp_path / "temporary")!r}
        os.mkdir(tempfile.tempdir)
        expected = [Seen(10 * rank + 1, 2, [0, 1]) for rank in range(2)]
        assert horovod.run(work, args=(10,), kwargs={{"offset": 1}}, num_proc=2) == expected
        assert horovod.run(functions.work, (2, 5), {{}}, 1) == [functions.Seen(5, 1, [0])]
        assert "mpi4py" not in sys.modules and not rr.is_initialized()
        assert os.listdir(tempfile.tempdir) == []
    """).well()


def test_run_takes_what_horovods_does(run_script, tmp_path: Path) -> None:
    """Hosts, host files, environments and options for mpirun are used; the rest is named once."""
    (tmp_path / "hosts").write_text("# all of them\nlocalhost slots=2\n\n")
    done = run_script("""
        from horovod.runner import run
        environ = {**os.environ, "COLOUR": "blue"}
        assert run(os.getenv, ("COLOUR",), np=2, hosts="localhost:2", env=environ, use_mpi=True) == ["blue"] * 2
        assert run(os.getenv, ("COLOUR",), {}, 2, hostfile="hosts", use_gloo=True, disable_cache=True) == [None, None]
        # By position, as Horovod has them: what follows num_proc are the numbers of elastic jobs.
        positions = [None] * 9 + [None, None, "logs", 2, None, True, "--bind-to none", None, sys.executable]
        assert run(place, (), {}, 2, *positions) == [("0", "horovod"), ("1", "horovod")]
        assert sorted(os.listdir("logs")) == ["rank-0.log", "rank-1.log"]
    """).well()
    assert done.stderr.count("use_gloo has no meaning here") == 1
    assert done.stderr.count("disable_cache has no meaning here") == 1
    assert done.stderr.count("import work; work()") == 1


#: Calls of ``horovod.run``, and what the error says.
FAILURES = {
    "fail, (1, raise_it)": r"rank 1 of 2 failed:\nTraceback .*KeyError: 'the reason'",
    "fail, (0, leave)": r"rank 0 of 2 failed:\nTraceback .*in leave.*SystemExit: 0",
    "fail, (1, die)": r"of 2 ranks these had not returned: (0, )?1;|rank 1 is lost",
    "no_result": r"rank [01] of 2 failed:\nTraceback .*cannot pickle",
    "fail_early": r"rank 1 of 2 failed:\nTraceback .*in fail_early.*KeyError: 'the reason'",
    "fail_and_stay": r"rank [01] of 2 failed:\nTraceback .*KeyError: 'the reason'",
}


def test_run_raises_what_a_rank_failed_of(run_script) -> None:
    """Whatever a rank does, run ends promptly, with the traceback of the rank that was first."""
    done = run_script(f"""
        from horovod.common.exceptions import HorovodInternalError
        for call in {[*FAILURES]!r}:
            try:
                eval(f"horovod.run({{call}}, num_proc=2)")
            except HorovodInternalError as error:
                print(error, end="\\0")
    """).well()
    for complaint, said in zip([*FAILURES.values(), "^$"], done.stdout.split("\0"), strict=True):
        assert re.search(complaint, said, re.DOTALL), said


def test_run_refuses_what_cannot_work(run_script) -> None:
    """Wrong arguments are a ValueError here, and start nothing."""
    cases = {
        "len, num_proc=0": "run starts at least one rank, not 0",
        "len, hosts='a:1', hostfile='b'": "run takes hosts or hostfile, not both",
        "len, hostfile='none'": "the job ended with status 2",
        "len, (), {}, 2, 3, 2": "the job ended with status 2",  # fewer at most than at least
        "threading.Lock()": "run cannot send <unlocked _thread.lock object",
        "len, executable='/none/python'": "the job ended with status 2",
    }
    done = run_script(f"""
        for call, complaint in {cases!r}.items():
            try:
                eval(f"horovod.run({{call}})")
            except ValueError as error:
                assert str(error).startswith(complaint), error
            else:
                raise AssertionError(call)
    """).well()
    assert "'none' does not exist" in done.stderr
    assert "--min-np 3 is more than" in done.stderr
    assert "there is no program /none/python" in done.stderr


def test_run_starts_elastic_jobs(run_script) -> None:
    """They go on without a rank that dies, and return what the others did."""
    done = run_script("print(horovod.run(go_on, (), {}, 3, 2, 3))").well()
    assert done.stdout == "[(2, 5), (2, 5)]\n"


def test_run_cannot_send_what_no_file_defines() -> None:
    """Plain pickle refers to the script; where there is none, the error says what helps."""
    source = "import sys, ringreduce.horovod as h\nsys.modules['cloudpickle'] = None\ndef f(): pass\nh.run(f)"
    done = run(sys.executable, "-c", source)
    assert done.returncode == 1
    assert "which no file defines: pip install cloudpickle" in done.stderr


def test_a_script_that_starts_ranks_whenever_it_is_imported_is_refused(tmp_path: Path) -> None:
    """Without the line that tells the script from the module, ranks would start ranks."""
    (tmp_path / "forever.py").write_text("import ringreduce.horovod\ndef f(): pass\nringreduce.horovod.run(f)\n")
    done = run(sys.executable, "forever.py", cwd=tmp_path)
    assert done.returncode == 1
    assert 'put the call under if __name__ == "__main__":' in done.stderr
