"""What a program has made of its worlds: whether one that trains with a framework has ever reduced anything."""

from __future__ import annotations

import sys
from collections.abc import Container

from ringreduce.runtime.worlds import OwnWorld

#: What reduces gradients, by the module of a binding; those that are built on another one come before it.
_BINDINGS = {
    "ringreduce.keras": "Is the model compiled with DistributedOptimizer(optimizer)?",
    "ringreduce.tensorflow": "Are gradients those of a DistributedGradientTape, or is the optimizer a "
    "DistributedOptimizer?",
    "ringreduce.jax": "Are gradients given to a DistributedGradientTransformation?",
    "ringreduce.torch": "Is the optimizer wrapped in DistributedOptimizer?",
}
#: Calls with which programs begin, and with which those that only divide work collect results.
_NO_REDUCTIONS = frozenset(("allgather", "barrier", "broadcast"))


class Usage:
    """What the worlds of this process were used for.

    Attributes:
        reduced: whether anything was reduced, or may have been.
        steps: of optimizers, as far as they were counted.
        rank, size: of this process in its last world, and how many ranks that had.
    """

    def __init__(self) -> None:
        self.reduced = False
        self.steps = 0
        self.rank = 0
        self.size = 1

    def add(self, world: OwnWorld) -> None:
        """Take note of what a world was used for; to be called before it ends. Local."""
        self.rank = world.rank
        self.size = world.size
        self.reduced |= (
            world.divided or not world.lifetime.open or not _NO_REDUCTIONS.issuperset(world.metrics().collectives)
        )
        self.steps += world.observer.recorder.steps

    def warning(self, modules: Container[str] = sys.modules) -> str | None:
        """Return what is to be said when the program ends; None: nothing.

        Args:
            modules: that it has imported.
        """
        binding = next((each for each in _BINDINGS if each in modules), None)
        if self.reduced or self.rank or self.size == 1 or binding is None:
            return None
        if binding == "ringreduce.torch":
            if not self.steps:  # torch counts those of all optimizers, so nothing was trained
                return None
            trained = f"{self.steps} optimizer steps were made on this rank, and "
        else:
            trained = "if this program has trained: "
        return f"{trained}nothing was ever reduced over the {self.size} ranks. {_BINDINGS[binding]}"
