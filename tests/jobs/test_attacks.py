"""Sealed jobs over TCP, each rank a host, in which somebody does something to messages of one rank."""

from __future__ import annotations

import sys
from pathlib import Path

import launching
import pytest
from launching import PROGRAMS, RINGREDUCE, Job

from ringreduce.audit.chain import examine, is_signed
from ringreduce.common.keys import read_secret, write_secret

ALL = ("change", "repeat", "drop", "swap", "cut")


def run(folder: Path, *words: object, **environment: str | None) -> Job:
    """Run a command with a key and a record in a folder; what travels goes by TCP, as between hosts."""
    if not (folder / "key").exists():
        write_secret(folder / "key")
    return launching.run(
        *words,
        RINGREDUCE_KEY_FILE=str(folder / "key"),
        RINGREDUCE_AUDIT=str(folder / "audit"),
        RINGREDUCE_NODE_SIZE="1",
        OMPI_MCA_btl="self,tcp",
        PYTHONPATH=str(PROGRAMS),
        **environment,
    )


def refused(folder: Path) -> list[str]:
    """Return the errors of what was refused, by the record; all its lines are whole and signed."""
    found = examine((folder / "audit").read_bytes())
    key = read_secret(folder / "key", "KEY")
    assert (found.wrong, [each["line"] for each in found.lines if not is_signed(each, key)]) == (None, [])
    return [each["facts"]["error"] for each in found.lines if each["event"] == "refused"]


@pytest.mark.parametrize(
    ("ranks", "phase", "actions"),
    [
        (2, "collectives", ALL),
        (3, "engine", ("change", "drop")),
        (3, "init", ("change",)),
        *(
            pytest.param(ranks, phase, ALL, marks=[pytest.mark.thorough, pytest.mark.limit(300)])
            for ranks in (2, 3)
            for phase in ("collectives", "engine", "objects", "init")
            if (ranks, phase) != (2, "collectives")
        ),
    ],
)
def test_an_attacked_message_is_an_error_on_all_ranks(
    ranks: int, phase: str, actions: tuple[str, ...], tmp_path: Path
) -> None:
    """Within the time limit; none has a wrong number. Rank 0 records it, and the next world works."""
    done = run(tmp_path, "mpirun", "-np", ranks, sys.executable, PROGRAMS / "attacked.py", phase, *actions).well()
    cases = [line.split() for line in done.stdout.splitlines()]
    kinds = ("exchange",) if phase == "init" else ("data", "note")
    assert {(case[1], case[2]) for case in cases} == {(kind, action) for kind in kinds for action in actions}
    assert any("does not open" in each for each in refused(tmp_path))


FATAL = """
import attacks, sys
import numpy as np
import ringreduce as rr

attacks.install()
rr.init()
if rr.rank() == 1:
    attacks.ATTACK.arm(sys.argv[1], "change", 0)
rr.allreduce(np.ones(5003), rr.SUM, algorithm="ring")
print("went on")
rr.barrier()
"""


@pytest.mark.parametrize("kind", ["data", "note"])
def test_an_error_that_ends_the_job_is_recorded_before(kind: str, tmp_path: Path) -> None:
    """By rank 0, which hears of it, and by the rank that got the message, as they share a host."""
    done = run(tmp_path, RINGREDUCE, "run", "-np", 3, sys.executable, "-c", FATAL, kind)
    assert done.returncode != 0
    assert "ChangedMessageError" in done.stderr
    errors = refused(tmp_path)
    assert any("from rank 1" in each and "does not open" in each for each in errors), (errors, done.stderr)


RECOVERING = """
import attacks, os, signal, sys
import numpy as np
import ringreduce as rr
from attacks import ATTACK

action, place, victim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
attacks.install()
rr.init()
me = rr.rank()
met = []
failure = None
try:
    rr.barrier()  # so that nobody is in init any more
    if me == rr.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rr.barrier()
except rr.CollectiveError as error:
    failure = error
if me == victim:
    ATTACK.arm("exchange", action, place)
while True:
    try:
        rr.go_on(failure)
        total = rr.allreduce(np.ones(5003) * (rr.rank() + 1), rr.SUM)
        assert (total == sum(range(rr.size() + 1))).all(), total
        rr.barrier()
        break
    except rr.RingReduceError as error:
        met.append(type(error).__name__)
        ATTACK.disarm()
        if isinstance(error, rr.CollectiveError):
            failure = error
print(me, rr.size(), *met, flush=True)
"""


@pytest.mark.parametrize(
    ("ranks", "action", "place", "victim"),
    [
        (3, "change", 2, 1),
        *(
            pytest.param(ranks, action, place, victim, marks=pytest.mark.thorough)
            for ranks in (3, 4)
            for action in ALL
            for place, victim in ((0, 1), (1, 0), (2, 0), (4, ranks - 2))
        ),
    ],
)
def test_an_attacked_recovery_is_an_error_on_all_survivors(
    ranks: int, action: str, place: int, victim: int, tmp_path: Path
) -> None:
    """A rank has died, and the others agree on a new key; then they try again, and their numbers are right."""
    words = (RINGREDUCE, "run", "--elastic", "-np", ranks, sys.executable, "-c", RECOVERING, action, place, victim)
    done = run(tmp_path, *words, RINGREDUCE_TIMEOUT="3").well()
    said = [line.split() for line in sorted(done.stdout.splitlines())]
    assert [each[:2] for each in said] == [[str(rank), str(ranks - 1)] for rank in range(ranks - 1)], done.stderr
    assert all(each[2:] for each in said), done.stdout
    assert refused(tmp_path) or action in ("drop", "repeat", "swap"), done.stdout


REPLAYING = """
import attacks, sys
from pathlib import Path
import attacked
import ringreduce as rr
from attacks import ATTACK

attacks.install()
path, *kinds = sys.argv[1:]
last = attacked.JOB.rank == attacked.JOB.size - 1
if last:
    ATTACK.arm("none", "", 0)
    if kinds:
        ATTACK.load(Path(path), *kinds)
rr.init()
attacked.collectives()
attacked.engine()
rr.barrier()
if last:
    assert ATTACK.replay is None or len(ATTACK.replay) == 0, "not all was sent"
    ATTACK.save(Path(path))
"""


def test_two_jobs_with_one_key_cannot_talk_to_each_other(tmp_path: Path) -> None:
    """What a rank has sent in one job comes in place of what it sends in another one: all of it, or a part."""
    job = ("mpirun", "-np", 2, sys.executable, "-c", REPLAYING, tmp_path / "sent")
    done = run(tmp_path, *job).well()
    assert refused(tmp_path) == []
    for kinds, said in (
        (("exchange", "note", "data"), "or they belong to another job"),
        (("note",), "does not open"),
        (("data",), "does not open"),
    ):
        before = len(refused(tmp_path))
        done = run(tmp_path, *job, *kinds)
        assert done.returncode != 0
        assert said in done.stderr
        assert "AssertionError" not in done.stderr
        assert len(refused(tmp_path)) > before
