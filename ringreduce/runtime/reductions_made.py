"""What a program has made of its worlds: whether one that trains with a framework has ever reduced gradients."""

from __future__ import annotations

import sys
from collections.abc import Container

from ringreduce.common.quantities import format_nbytes
from ringreduce.runtime.worlds import OwnWorld

#: What reduces gradients, by the module of a binding; those that are built on another one come before it.
_BINDINGS = {
    "ringreduce.keras": "Is the model compiled with DistributedOptimizer(optimizer)?",
    "ringreduce.tensorflow": "Are gradients those of a DistributedGradientTape, or is the optimizer a "
    "DistributedOptimizer?",
    "ringreduce.jax": "Are gradients given to a DistributedGradientTransformation?",
    "ringreduce.torch": "Is the optimizer wrapped in DistributedOptimizer, and what that returns used in its place?",
}
#: Calls with which programs begin, and with which those that only divide work collect results.
_NO_REDUCTIONS = frozenset(("allgather", "barrier", "broadcast"))


class Usage:
    """What the worlds of this process were used for.

    Attributes:
        reduced: whether an optimizer of ours has reduced gradients, or what is not seen any more may have done so.
        reduced_nbytes: so much was reduced by all calls.
        trained_nbytes: so much an optimizer has updated; 0: that is not known.
        steps: of optimizers, as far as they were counted.
        rank, size: of this process in its last world, and how many ranks that had.
    """

    def __init__(self) -> None:
        self.reduced = False
        self.reduced_nbytes = self.trained_nbytes = 0
        self.steps = 0
        self.rank = 0
        self.size = 1

    def add(self, world: OwnWorld) -> None:
        """Take note of what a world was used for; to be called before it ends. Local."""
        self.rank = world.rank
        self.size = world.size
        engines = [process_set.engine for process_set in world.sets.values() if process_set.included()]
        self.reduced |= world.divided or not world.lifetime.open or any(engine.pacemaker.begun for engine in engines)
        totals = world.metrics().collectives
        self.reduced_nbytes += sum(total.nbytes for name, total in totals.items() if name not in _NO_REDUCTIONS)
        self.steps += world.observer.recorder.steps

    def warning(self, modules: Container[str] = sys.modules) -> str | None:
        """Return what is to be said when the program ends; None: nothing.

        Args:
            modules: that it has imported.
        """
        binding = next((name for name in _BINDINGS if name in modules), None)
        if self.reduced or self.rank or self.size == 1 or binding is None:
            return None
        trained = "if this program has trained: "
        least = 1
        if binding == "ringreduce.torch":
            if not self.steps:  # Torch counts the steps of all optimizers, so nothing was trained.
                return None
            trained = f"{self.steps} optimizer steps were made on this rank, and "
            least = max(self.trained_nbytes, 1)  # A program that averages gradients by hand has reduced as much.
        if self.reduced_nbytes >= least:
            return None
        what = "nothing was ever reduced"
        if self.reduced_nbytes:
            some = format_nbytes(self.reduced_nbytes)
            what = f"no gradients were reduced: {some} in all, of {format_nbytes(least)} of parameters,"
        return f"{trained}{what} over the {self.size} ranks. {_BINDINGS[binding]}"
