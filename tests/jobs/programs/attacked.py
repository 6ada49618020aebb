"""Ranks of a sealed world of which one is attacked, in one case after the other; see tests/jobs/test_attacks.py.

    attacked.py PHASE ACTION...

In each case all ranks have to get an error, rank 0 records it if it says that a message has changed, and the next world
works. Rank 0 prints each case that was so.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import attacks
import numpy as np
from attacks import ATTACK
from mpi4py import MPI

import ringreduce as rr
from ringreduce.audit.chain import examine

JOB = MPI.COMM_WORLD
LIMIT_S = "30"
SHORT_LIMIT_S = "1"  # where nothing comes in place of a message: all ranks wait so long
#: Which rank is attacked, and at which exchange of `init`: the greetings, the answers of rank 0, the first sealed one,
#: and those by which channels get their keys.
IN_INIT = ((-1, 0), (0, 1), (-1, 2), (0, 3), (-1, 4), (0, 5))


def rows(rank: int) -> np.ndarray:
    """Return what a rank gives; of a length that no number of ranks divides."""
    return np.arange(5003.0) * (rank + 1)


def collectives() -> None:
    """Make some calls, twice, and require the right results."""
    rank, size = rr.rank(), rr.size()
    total = sum(map(rows, range(size)))
    for _ in range(2):
        np.testing.assert_array_equal(rr.allreduce(rows(rank), rr.SUM, algorithm="ring"), total)
        np.testing.assert_array_equal(rr.allgather(rows(rank)), np.concatenate([*map(rows, range(size))]))
        np.testing.assert_array_equal(rr.broadcast(rows(rank), size - 1), rows(size - 1))


def objects() -> None:
    """Exchange objects, twice."""
    for number in range(2):
        given = [{"rank": rank, "rows": rows(rank + number).tolist()} for rank in range(rr.size())]
        assert rr.allgather_object(given[rr.rank()]) == given
        assert rr.broadcast_object(given[0] if rr.rank() == 0 else None) == given[0]


def engine() -> None:
    """Start operations that are negotiated, and wait for them in another order."""
    plans = [rr.allreduce_init(rows(rr.rank()) + number) for number in range(3)]
    for _ in range(2):
        for plan in plans:
            plan.start()
        for number, plan in reversed([*enumerate(plans)]):
            np.testing.assert_array_equal(plan.wait(), sum(rows(rank) + number for rank in range(rr.size())))


PHASES = {"collectives": collectives, "objects": objects, "engine": engine, "init": lambda: None}


def outcomes(phase: str, kind: str, action: str, place: int, who: int = -1) -> list[rr.RingReduceError | None]:
    """Return what each rank gets while one is attacked, usually the last; a wrong number ends the job."""
    victim = JOB.rank == who % JOB.size
    error = None
    ATTACK.disarm()
    try:
        if phase == "init" and victim:
            ATTACK.arm(kind, action, place)
        rr.init()
        if phase != "init" and victim:
            ATTACK.arm(kind, action, place)
        PHASES[phase]()
        for _ in range(2):
            rr.barrier()
    except rr.RingReduceError as caught:
        error = caught
    ATTACK.disarm()
    with suppress(rr.RingReduceError):
        rr.shutdown()
    return JOB.allgather(error)


def require_errors(case: object, errors: list[rr.RingReduceError | None]) -> None:
    """Require that all ranks have got an error, and that rank 0 has recorded a changed message of which it knows."""
    assert all(errors), (case, errors)
    said = f"{type(errors[0]).__name__}: {errors[0]}"
    if JOB.rank == 0 and isinstance(errors[0], rr.ChangedMessageError):
        lines = examine(Path(os.environ["RINGREDUCE_AUDIT"]).read_bytes()).lines
        assert said in [each["facts"]["error"] for each in lines if each["event"] == "refused"], (case, said)


def attack_init(actions: list[str]) -> None:
    """Attack each of these exchanges in each way."""
    for who, place in IN_INIT:
        for action in actions:
            os.environ["RINGREDUCE_TIMEOUT"] = SHORT_LIMIT_S
            errors = outcomes("init", "exchange", action, place, who)
            require_errors((action, place), errors)
            kinds = (rr.ChangedMessageError, rr.ConfigError, rr.MismatchError)
            assert any(isinstance(each, kinds) for each in errors), (action, place, errors)
            end_case("init", "exchange", action, place)


def attack_calls(phase: str, actions: list[str]) -> None:
    """Attack messages of each kind in each way: the first one, or one in the middle."""
    os.environ["RINGREDUCE_TIMEOUT"] = LIMIT_S
    assert not any(outcomes(phase, "none", "", 0))
    counts = JOB.bcast(ATTACK.counts, JOB.size - 1)
    for kind in ("data", "note"):
        assert counts[kind] > 1
        middle = counts[kind] // 2 if kind == "data" else 1  # of notes there may be fewer, if ranks do not wait
        for action in actions:
            waits = action in ("drop", "swap", "repeat")
            for place in [middle] if waits else [0, middle]:
                os.environ["RINGREDUCE_TIMEOUT"] = SHORT_LIMIT_S if waits else LIMIT_S
                errors = outcomes(phase, kind, action, place)
                if action != "repeat" or any(errors):  # it may come when nobody takes messages any more
                    require_errors((kind, action, place), errors)
                if not waits:
                    assert any(isinstance(each, rr.ChangedMessageError) for each in errors), (kind, action, errors)
                    assert any("does not open" in str(each) for each in errors), (kind, action, errors)
                end_case(phase, kind, action, place)


def end_case(*case: object) -> None:
    """Require that the next world works."""
    os.environ["RINGREDUCE_TIMEOUT"] = LIMIT_S
    errors = outcomes("collectives", "none", "", 0)
    assert not any(errors), (case, errors)
    if JOB.rank == 0:
        print(*case, flush=True)


if __name__ == "__main__":
    attacks.install()
    if sys.argv[1] == "init":
        attack_init(sys.argv[2:])
    else:
        attack_calls(sys.argv[1], sys.argv[2:])
    rr.init()
