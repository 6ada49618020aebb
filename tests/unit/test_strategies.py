"""How steps get their averages: each strategy is one class behind one interface, and another one is easily added."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.engine import Engine
from ringreduce.testing import run_engines
from ringreduce.training.binding.host import ArraySpec, HostMemory
from ringreduce.training.optimizers.reducer import GradientReducer
from ringreduce.training.options.options import Options
from ringreduce.training.strategies.strategy import Contribution, Strategy

ROOT = Path(__file__).parents[2]


def toy_strategy() -> type[Strategy]:
    """Return the class that CONTRIBUTING.md shows."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Add a strategy\n")[2]
    (program,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    made: type[Strategy] = names["EverySecond"]
    return made


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_strategy_of_the_documents_skips_every_second_exchange(size: int) -> None:
    """It wraps what `strategy_for` has chosen."""

    def train(engine: Engine) -> None:
        named = [("a", ArraySpec((3,), np.float32))]
        options = Options(op=rr.SUM).checked(engine.communicator.config, [spec for _, spec in named])
        settled = options.settled(engine.communicator, on_device=False)
        reducer = GradientReducer(HostMemory(), engine, lambda: named, "values", "parameters", settled)
        strategy: Any = toy_strategy()
        skipping = strategy(reducer._strategy)
        for step in range(1, 12):
            mine = np.full(3, step * (engine.communicator.rank + 1), np.float32)
            (reduced,) = skipping.reduce(Contribution([spec for _, spec in named], [mine], found=b"\1", samples=None))
            if step % 2:
                assert reduced is None
            else:
                assert reduced.tolist() == [(step - 1 + step) * size * (size + 1) // 2] * 3

    run_engines(size, train)


@pytest.mark.parametrize(
    ("size", "options", "chain"),
    [
        (1, {}, ["LoneSteps"]),
        (1, {"staleness": 2}, ["PacedSteps", "LateAverages"]),
        (2, {}, ["PacedSteps", "RepeatedSteps", "WholeSteps"]),
        (2, {"staleness": 1}, ["PacedSteps", "LateAverages"]),
    ],
)
def test_options_choose_the_strategy(size: int, options: dict[str, Any], chain: list[str]) -> None:
    """From the outside in."""

    def choose(engine: Engine) -> list[str]:
        checked = Options(**options).checked(engine.communicator.config, [])
        settled = checked.settled(engine.communicator, on_device=False)
        strategy: Any = GradientReducer(HostMemory(), engine, list, "values", "parameters", settled)._strategy
        found = []
        while strategy is not None:
            found.append(type(strategy).__name__)
            strategy = getattr(strategy, "_inner", getattr(strategy, "_whole", None))
        return found

    assert run_engines(size, choose) == [chain] * size
