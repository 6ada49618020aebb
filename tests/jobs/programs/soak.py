"""Train the toy of `elastic_training.py` until a file named ``enough`` is there, from the last commit on disk.

    ringreduce run --elastic --max-restarts 9 -np 4 python soak.py FOLDER

Each rank writes down, in each world, what it holds; see `tests/jobs/soak.py`.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import elastic_training as program

import ringreduce as rr


def descriptors() -> int:
    """Return how many are open but those of other processes, which come when one is first waited for."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            found += os.readlink(each) != "anon_inode:[pidfd]"
    return found


def main() -> None:
    folder, restart = Path(sys.argv[1]), int(os.environ.get("RINGREDUCE_RESTART", "0"))
    killer = program.Killer(folder, int(os.environ["OMPI_COMM_WORLD_RANK"]), [])
    way = program.begin("toy", killer)
    state = way.make_state(number=0, members=[])
    state.keep_in_memory(10)
    state.keep_on_disk(folder / "commits", every=2)
    file = (folder / f"{restart}-{killer.rank}.jsonl").open("w")

    @rr.elastic.run
    def train(state: Any) -> None:
        nbytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # resident
        holds = {"descriptors": descriptors(), "nbytes": nbytes, "pid": os.getpid(), "restart": restart}
        print(json.dumps(holds), file=file, flush=True)
        present = folder / f"pid-{os.getpid()}"
        program.train_on(
            state,
            way,
            killer,
            every=1,
            goes_on=lambda: not rr.broadcast_object((folder / "enough").exists()),
            note=lambda: present.write_text(str(rr.size())),
        )

    train(state)
    program.write_end(folder, str(killer.rank), state, way)


if __name__ == "__main__":
    main()
