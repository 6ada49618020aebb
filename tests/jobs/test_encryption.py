"""Jobs whose messages are encrypted; each rank counts as a host of its own."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import launching
import pytest
from launching import RINGREDUCE, Job

from ringreduce.audit.chain import examine
from ringreduce.common.keys import write_secret


def run(*arguments: object, **environment: str | None) -> Job:
    """Run ``ringreduce run`` with these arguments."""
    return launching.run(RINGREDUCE, "run", *arguments, RINGREDUCE_NODE_SIZE="1", **environment)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A file with a key, where `ringreduce keygen` puts it."""
    path = tmp_path / "config" / "ringreduce" / "key"
    write_secret(path)
    return path


SHOWS_ALL = """
import os
import numpy as np
import ringreduce as rr

rr.init()
assert (rr.allreduce(np.ones(5000), rr.SUM) == 2).all()
assert rr.allgather_object("object") == ["object"] * 2
print(dict(os.environ), open("/proc/self/cmdline").read(), rr.config(), flush=True)
if rr.rank() == 1:
    raise ValueError("on purpose")
rr.barrier()
"""


def test_the_secret_stays_in_its_file(key_file: Path, tmp_path: Path):
    """A job that fails, with all that can be written: the environment has the path, and nothing has the key."""
    folder = tmp_path / "written"
    folder.mkdir(mode=0o700)
    done = run(
        *("-np", 2, "--verbose", "--encrypt", sys.executable, "-c", SHOWS_ALL),
        XDG_CONFIG_HOME=str(tmp_path / "config"),
        RINGREDUCE_DUMP=str(folder / "dump"),
        RINGREDUCE_AUDIT=str(folder / "audit"),
        RINGREDUCE_TIMELINE=str(folder / "trace.json"),
        RINGREDUCE_LOG_LEVEL="debug",
    )
    assert done.returncode == 1
    assert "ValueError: on purpose" in done.stderr
    assert f"'RINGREDUCE_KEY_FILE': '{key_file}'" in done.stdout
    text = key_file.read_text(encoding="ascii").splitlines()[1]
    raw = base64.b64decode(text)
    files = [each for each in folder.rglob("*") if each.is_file()]
    assert files
    for written in (done.stdout.encode(), done.stderr.encode(), *(each.read_bytes() for each in files)):
        for form in (text.encode(), raw, raw.hex().encode(), repr(raw)[2:-1].encode()):
            assert form not in written


def test_the_file_is_looked_at_before_anything_starts(key_file: Path, tmp_path: Path):
    """And a program may have an option of the same name."""
    program = (sys.executable, "-c", "import sys; print(sys.argv[1:])", "--encrypt", "--encrypt=x")
    done = run("-np", 2, f"--encrypt={tmp_path / 'none'}", *program)
    assert done.returncode != 0
    assert done.stdout == ""
    assert f"`ringreduce keygen {tmp_path / 'none'}` makes one" in done.stderr
    key_file.chmod(0o644)
    done = run("-np", 2, f"--encrypt={key_file}", *program)
    assert "chmod 600" in done.stderr
    assert done.stdout == ""
    key_file.chmod(0o600)
    assert run("-np", 2, f"--encrypt={key_file}", *program).well().stdout == "['--encrypt', '--encrypt=x']\n" * 2


OTHER_KEY = """
import os, sys
import ringreduce as rr

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.environ["RINGREDUCE_KEY_FILE"] = sys.argv[1]
rr.init()
"""


def test_a_rank_with_another_key_ends_the_job(key_file: Path, tmp_path: Path):
    """At once, and every rank names it. The record has it, whichever rank ends first."""
    write_secret(tmp_path / "other")
    words = ("-np", 3, f"--encrypt={key_file}", sys.executable, "-c", OTHER_KEY, tmp_path / "other")
    done = run(*words, RINGREDUCE_AUDIT=str(tmp_path / "audit"))
    assert done.returncode == 1
    assert "rank 0 does not agree with rank 1 on a key" in done.stderr
    (line,) = examine((tmp_path / "audit").read_bytes()).lines
    assert (line["event"], line["facts"]["what"]) == ("refused", "init")
    assert "rank 0 does not agree with rank 1 on a key" in line["facts"]["error"]


GOES_ON = """
import os, signal
import numpy as np
import ringreduce as rr
from ringreduce.elastic import ObjectState, run
from ringreduce.transport.sealed import Cipher

rr.init()
me = rr.rank()
sealed = [0]
original = Cipher.seal


def seal(self, *arguments):
    sealed[0] += 1
    original(self, *arguments)


Cipher.seal = seal
state = ObjectState(rr.broadcast_object, rr.rank, step=0, total=0.0)


@run
def train(state):
    while state.step < 12:
        if (me, state.step) in ((3, 4), (1, 8)):
            os.kill(os.getpid(), signal.SIGKILL)
        mine = np.full(5000, float(state.step))
        state.total += float(rr.allreduce(mine, rr.AVERAGE)[-1])
        before = sealed[0]
        rr.barrier()
        assert rr.size() == 1 or sealed[0] > before
        state.step += 1
        state.commit()


train(state)
print(rr.size(), state.total, flush=True)
"""


def test_an_elastic_job_goes_on(key_file: Path):
    """Two ranks die, one after the other: the survivors agree on a new key each time, and lose no step."""
    done = run("--elastic", "-np", 4, f"--encrypt={key_file}", sys.executable, "-c", GOES_ON).well()
    assert done.stdout.splitlines() == [f"2 {float(sum(range(12)))}"] * 2, done.stderr


WRONG_ORDER = """
import os, signal, sys
import numpy as np
import ringreduce as rr
from ringreduce.transport.mpi_job import MpiRanks

rr.init()
me = rr.rank()


def fail_and_go_on(dies):
    try:
        if me == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            rr.allreduce(np.ones(5))
    except rr.CollectiveError as error:
        for wrong in (-1, 1 << 63):
            try:
                rr.go_on(error, seniority=wrong)
            except rr.ConfigError:
                continue
            raise AssertionError(wrong)
        rr.go_on(error, seniority=me)


fail_and_go_on(dies=1)
assert rr.rank() == [3, None, 2, 1, 0][me], (me, rr.rank())
shrink = MpiRanks._shrink
MpiRanks._shrink = lambda self, priority: shrink(self, 0)  # what somebody has made of it on its way
try:
    fail_and_go_on(dies=3)
except rr.TransportError as error:
    print(error, flush=True)
"""


def test_somebody_who_changes_the_order_of_survivors_is_noticed(key_file: Path):
    """Rank 0 gives its state to the others: it is the one with the latest commit, and not who is made rank 0."""
    done = run("--elastic", "-np", 5, f"--encrypt={key_file}", sys.executable, "-c", WRONG_ORDER)
    said = "the ranks that go on have got a wrong order: by which they are ordered has changed on its way"
    assert done.stdout.splitlines() == [said] * 3, done.stderr
