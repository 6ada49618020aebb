"""A reducer of gradients that are arrays of NumPy, for tests of steps without a framework."""

from __future__ import annotations

from typing import Any

from ringreduce.engine import Engine
from ringreduce.training.binding.host import ArraySpec, HostMemory
from ringreduce.training.optimizers.reducer import GradientReducer
from ringreduce.training.optimizers.user_options import checked, named_options


def make_reducer(engine: Engine, named: list[tuple[str, ArraySpec]], **options: Any) -> GradientReducer:
    """Return a reducer with options as users give them.

    Args:
        engine: of the rank.
        named: the parameters; each step is of those that are in the list then.
        **options: of an optimizer.
    """
    chosen = checked(named_options(**options), engine.communicator.config, [spec for _, spec in named])
    settled = chosen.settled(engine.communicator, on_device=False)
    return GradientReducer(HostMemory(), engine, lambda: named, "values", "parameters", settled)
