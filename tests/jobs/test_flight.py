"""The flight recorder: one sentence for who was waited for, after a job that hung."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import RINGREDUCE, Job, needs, run, run_program

STUCK = """
import sys, time
import numpy as np
import ringreduce as rr

def load_batch():
    time.sleep(60)

rr.init()
for _ in range(40):
    rr.allreduce(np.ones(4))
if rr.rank() == 1:
    load_batch()
{then}
"""
CALL = "rr.allreduce(np.ones(1 << 18, np.float32))"
OPERATION = "import ringreduce.torch as hvd, torch; hvd.allreduce(torch.ones(5), name='layer4.weight')"


def diagnosis(folder: Path, *options: object) -> Job:
    """Return what ``doctor --dump`` says."""
    return run(sys.executable, "-m", "ringreduce", "doctor", "--dump", folder, *options)


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (CALL, "rank 1 never entered blocking call 41, allreduce of 1 MiB, in which ranks 0, 2 waited"),
        (
            OPERATION,
            "rank 1 never submitted 'layer4.weight' (allreduce(average, 5 float32)), which ranks 0, 2 submitted",
        ),
    ],
)
def test_a_rank_that_did_not_come_is_named_with_its_place(tmp_path: Path, then: str, said: str) -> None:
    """The others, whose time is up, ask it to write down where it is; the report names the line of the program."""
    if then is OPERATION:
        needs("torch")
    folder = tmp_path / "dump"
    job = run_program(STUCK.format(then=then), ranks=3, RINGREDUCE_DUMP=str(folder), RINGREDUCE_TIMEOUT="3")
    assert "waited 3" in job.stderr, job.stderr
    text = diagnosis(folder).stdout
    assert said in text
    assert "in load_batch" in text
    assert json.loads(diagnosis(folder, "--json").stdout) == text.splitlines()
    assert folder.stat().st_mode & 0o777 == 0o700
    dumps = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    assert set(dumps) == {"rank-0.json", "rank-1.json", "rank-2.json"}
    assert [each["number"] for each in dumps["rank-1.json"]["sets"][0]["calls"]] == list(range(1, 41))
    assert "CollectiveTimeoutError" in dumps["rank-0.json"]["error"]


TRACED = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
import ringreduce as rr
from ringreduce.observe.seen.trace_file import collect

rr.init()
path = Path(sys.argv[1])

def seen(name):
    collect(path)
    events = json.loads(path.read_text())
    return {each["pid"] for each in events if each["name"] == name} == {0, 1}

for name in ("allreduce", "allgather"):
    getattr(rr, name)(np.ones(3))
    while not seen(name):  # the program has nothing more to tell meanwhile
        os.sched_yield()
rr.barrier()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trace_is_on_disk_though_its_program_waits_and_is_killed(tmp_path: Path) -> None:
    """With the events of all ranks, for who asks, and in the file, whole, when the launcher ends."""
    path = tmp_path / "trace.json"
    words = [RINGREDUCE, "run", "-np", 2, "-x", f"RINGREDUCE_TIMELINE={path}", sys.executable, "-c", TRACED, path]
    job = run(*words)
    assert "Traceback" not in job.stderr, job.stderr
    assert {event["pid"] for event in json.loads(path.read_text()) if event["name"] == "allgather"} == {0, 1}
    found = json.loads(run(sys.executable, "-m", "ringreduce", "timeline", "report", path, "--json").stdout)
    assert {each["rank"] for each in found["collectives"]} == {0, 1}


def test_a_folder_without_dumps_is_refused(tmp_path: Path) -> None:
    """And so is what is none."""
    done = diagnosis(tmp_path)
    assert (done.returncode, "no rank has written anything" in done.stderr) == (2, True)
    (tmp_path / "rank-0.json").write_text("[1]")
    done = diagnosis(tmp_path)
    assert (done.returncode, "is not what a rank has written down" in done.stderr) == (2, True)
