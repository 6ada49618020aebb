"""A job that does one thing again and again and says how its memory grows.

    . scripts/_env && launch 2 600 python tests/jobs/programs/memory.py algorithms 1000
    RINGREDUCE_NODE_SIZE=1 launch 2 600 python tests/jobs/programs/memory.py mismatches 10000
    launch 2 600 python tests/jobs/programs/memory.py worlds 300

It ends with exit code 0 if no rank has grown, after the first tenth of the repetitions, by more than `LIMITS_MIB`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import ringreduce as rr
from ringreduce.testing import caught

NBYTES = 4 << 20
LIMITS_MIB = {"algorithms": 1.5 * NBYTES / 2**20, "mismatches": 24.0, "worlds": 24.0}  # the first is of buffers


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def algorithms() -> Iterator[tuple[str, Callable[[], object]]]:
    """Allreduces of 4 MiB by each algorithm, in private memory and in a communication buffer."""
    rr.init()
    private, shared = np.zeros(NBYTES // 4, np.float32), rr.empty(NBYTES // 4)
    shared[:] = 0
    for name in rr.world().algorithms():

        def both(name: str = name) -> None:
            rr.allreduce(private, out=private, algorithm=name)
            rr.allreduce(shared, out=shared, algorithm=name)

        yield name, both


def mismatches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that all ranks know, confused by one of them in turn, so that messages are under way."""
    rr.init()
    rr.world()._context.agreement.patience_s = 0.01  # how long a rank waits before it grows suspicious
    arrays = [np.ones(count, np.float32) for count in (80_000, 80_001)]
    for array in arrays:
        rr.allreduce(array)
    turn = 0

    def confuse() -> None:
        nonlocal turn
        turn += 1
        error = caught(rr.allreduce, arrays[turn % rr.size() == rr.rank()])
        assert isinstance(error, rr.MismatchError)
        assert error.in_step
        if turn % 10 == 0:
            assert (rr.allreduce(arrays[0]) == rr.size()).all()

    yield "mismatches", confuse


def worlds() -> Iterator[tuple[str, Callable[[], object]]]:
    """Worlds that come and go."""

    def begin_and_end() -> None:
        rr.init()
        assert rr.allreduce(np.ones(3))[0] == rr.size()
        rr.shutdown()

    yield "worlds", begin_and_end


def main() -> None:
    what, times = sys.argv[1], int(sys.argv[2])
    grown = []
    for name, action in {"algorithms": algorithms, "mismatches": mismatches, "worlds": worlds}[what]():
        for number in range(times):
            action()
            if number == times // 10:
                before = resident_mib()
        growth = resident_mib() - before
        grown.append(growth)
        if not rr.is_initialized() or rr.rank() == 0:
            print(f"{name}: {before:.0f} MiB, and {growth:.1f} more in the last {times - times // 10}", flush=True)
    if max(grown) > LIMITS_MIB[what]:
        sys.exit(f"grown by {max(grown):.1f} MiB")


if __name__ == "__main__":
    main()
