"""Random numbers of Python, NumPy and torch that come again."""

from __future__ import annotations

from typing import Any

import torch

from ringreduce.training.data import generators


def seed(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch on this rank: with different numbers on each, every time.

    Args:
        seed: of the job; the same on all ranks.

    Raises:
        ConfigError: it is no whole number, at least 0.
    """
    torch.manual_seed(generators.seed_of_rank(seed))


class Generators(generators.Generators):
    """The global generators of this process, of Python, NumPy and torch: ``TorchState(generators=Generators(), ...)``.

    Each rank keeps its own. Those of GPUs are kept where torch has started to use them.
    """

    def seed(self, seed: int) -> None:
        """Seed those of the host with a number of 64 bits."""
        super().seed(seed)
        torch.default_generator.manual_seed(seed)

    def draw(self) -> int:
        """Return a random number of 62 bits, of torch's generator."""
        return int(torch.randint(1 << 62, (), device="cpu"))

    def read(self) -> Any:
        """Return where those of the host are, for `write`; quicker than `state_dict`."""
        return super().read(), torch.get_rng_state()

    def write(self, read: Any) -> None:
        """Go on from there."""
        super().write(read[0])
        torch.set_rng_state(read[1])

    def state_dict(self) -> dict[str, Any]:
        """Return where they are."""
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        return {**super().state_dict(), "torch": torch.get_rng_state(), "gpus": gpus}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        torch.set_rng_state(state["torch"])
        if state["gpus"]:
            torch.cuda.set_rng_state_all(state["gpus"])
