"""Train as `faults.py` does until a file named ``enough`` is there, from the last commit on disk; see `soak.py` above.

ringreduce run --elastic --max-restarts 9 -np 4 python soak.py FOLDER
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from faults import Training

import ringreduce as rr
from ringreduce.training.calls.objects import broadcast_object


class Soaked(Training):
    """A training that says which processes take part, and what they hold."""

    batch_size = 32  # with fewer rows, two ranks would not converge

    def __init__(self, folder: str) -> None:
        self.restart = int(os.environ.get("RINGREDUCE_RESTART", "0"))
        self.folder = Path(folder)
        super().__init__(folder, 10, [], name=f"{self.restart}-{rr.rank()}")
        self.state.keep_on_disk(self.folder / "commits", every=2)

    def _train(self, state: Any) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])  # resident
        self._write(descriptors=_descriptors(), nbytes=pages * os.sysconf("SC_PAGE_SIZE"), pid=os.getpid())
        self.pid = self.folder / f"pid-{os.getpid()}"
        super()._train(state)

    def _goes_on(self, state: Any) -> bool:
        within = bool(self.sampler.processed_indices)  # an epoch, which a death has cut short
        return within or not broadcast_object((self.folder / "enough").exists())

    def _step(self, batch: list[int]) -> None:
        super()._step(batch)
        self.pid.write_text(str(rr.size()))

    def _write(self, **what: Any) -> None:
        super()._write(restart=self.restart, **what)


def _descriptors() -> int:
    """Return how many are open but those of other processes, which come when one is first waited for."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            found += os.readlink(each) != "anon_inode:[pidfd]"
    return found


if __name__ == "__main__":
    rr.init()
    Soaked(sys.argv[1]).run()
