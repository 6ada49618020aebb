"""Random numbers that come again: one seed for a job, and where each rank's generators are, for a commit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ringreduce.common.arguments import whole_number
from ringreduce.runtime import rank_and_size


def seed_of_rank(seed: int) -> int:
    """Seed Python's and NumPy's global generators of this rank; return its seed, of 64 bits, for others.

    Ranks have different seeds. They are those of the same seed and rank in every run.

    Args:
        seed: of the job; the same on all ranks.

    Raises:
        ConfigError: it is no whole number, at least 0.
    """
    seed = whole_number("seed", seed, 0)
    mine = mixed(seed, rank_and_size()[0])
    Generators().seed(mine)
    return mine


def mixed(*numbers: int) -> int:
    """Return a seed of 64 bits that depends on all of some numbers, each at least 0."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


class Generators:
    """The global generators of this process, of Python and NumPy, to be kept in a state: each rank has its own."""

    def seed(self, seed: int) -> None:
        """Seed them with a number of 64 bits."""
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def draw(self) -> int:
        """Return a random number of 62 bits, of the generator that programs seed most."""
        return int(np.random.randint(1 << 62))

    def read(self) -> Any:
        """Return where those of the host are, for `write`; quicker than `state_dict`."""
        return random.getstate(), np.random.get_state()

    def write(self, read: Any) -> None:
        """Go on from there."""
        random.setstate(read[0])
        np.random.set_state(read[1])

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore those of the host at the end."""
        before = self.read()
        try:
            yield
        finally:
            self.write(before)

    def state_dict(self) -> dict[str, Any]:
        """Return where they are, in plain numbers."""
        kind, numbers, gauss = random.getstate()
        legacy = dict(np.random.get_state(legacy=False))
        legacy["state"] = {"key": legacy["state"]["key"].tolist(), "pos": int(legacy["state"]["pos"])}
        return {"python": [kind, list(numbers), gauss], "numpy": legacy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        kind, numbers, gauss = state["python"]
        random.setstate((kind, tuple(numbers), gauss))
        legacy = dict(state["numpy"])
        legacy["state"] = {**legacy["state"], "key": np.array(legacy["state"]["key"], np.uint32)}
        np.random.set_state(legacy)
