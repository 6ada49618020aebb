"""What exchanges of LocalSGD and DiLoCo must come to: the weights of all ranks in one process, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Weights = dict[str, Array]


class Exchanges:
    """The exchanges of all ranks, by closed form.

    Args:
        options: period, delay, fragments, outer_lr and outer_momentum, as for `DiLoCo`.
        warmup_steps: how many first steps exchange nothing.
        fragments: the names of the parameters in each.

    Attributes:
        others: the names of what is averaged once per period, without outer steps.
        steps: how many were made.
    """

    def __init__(self, options: dict[str, Any], warmup_steps: int, fragments: Sequence[Sequence[str]]) -> None:
        self._options, self._warmup_steps = options, warmup_steps
        self._fragments = [list(each) for each in fragments]
        self.others: list[str] = []
        self.steps = 0
        self._agreed: Weights = {}
        self._momentum: Weights = {}
        self._then: dict[int, list[Weights]] = {}

    def _groups(self) -> list[list[str]]:
        return [*self._fragments, self.others]

    def has(self, name: str) -> bool:
        """Return whether this is a parameter."""
        return any(name in each for each in self._fragments)

    def state_dict(self) -> dict[str, Any]:
        """Return what another job goes on from, after `synchronize`."""
        return {"steps": self.steps, "agreed": dict(self._agreed), "momentum": dict(self._momentum)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what another job has saved."""
        self.steps, self._agreed, self._momentum = state["steps"], dict(state["agreed"]), dict(state["momentum"])

    def before_step(self, ranks: Sequence[Weights]) -> None:
        """Note what all ranks begin with."""
        if self.steps == self._warmup_steps:
            for name in (name for group in self._fragments for name in group):
                self._agreed[name] = ranks[0][name].copy()
                self._momentum.setdefault(name, np.zeros_like(ranks[0][name]))

    def after_step(self, ranks: Sequence[Weights]) -> None:
        """Begin and end exchanges; changes the values of the ranks."""
        self.steps += 1
        local = self.steps - self._warmup_steps
        if local <= 0:
            return
        period, delay = self._options["period"], self._options["delay"]
        for number, names in enumerate(self._groups()):
            start = number * period // self._options["fragments"] if number < len(self._fragments) else 0
            if (local - start) % period == 0:
                self._then[number] = [{name: rank[name].copy() for name in names} for rank in ranks]
            if (local - delay - start) % period == 0 and number in self._then:
                self._end(number, ranks)

    def _end(self, number: int, ranks: Sequence[Weights]) -> None:
        then = self._then.pop(number)
        for name in self._groups()[number]:
            agreed = np.mean([each[name] for each in then], axis=0)
            if number < len(self._fragments) and not self._averages_weights():
                lr, mu = self._options["outer_lr"], self._options["outer_momentum"]
                delta = self._agreed[name] - agreed
                self._momentum[name] = mu * self._momentum[name] + delta
                agreed = self._agreed[name] - lr * (delta + mu * self._momentum[name])
            self._agreed[name] = agreed
            for rank, before in zip(ranks, then, strict=True):
                rank[name] = agreed + (rank[name] - before[name])

    def _averages_weights(self) -> bool:
        return bool(self._options["outer_lr"] == 1.0 and self._options["outer_momentum"] == 0.0)

    def synchronize(self, ranks: Sequence[Weights]) -> None:
        """End all exchanges, and average what the ranks have."""
        for number in [*self._then]:
            self._end(number, ranks)
        self.average(ranks)

    def average(self, ranks: Sequence[Weights]) -> None:
        """Forget exchanges that are under way, and average what the ranks have."""
        self._then.clear()
        for name in (name for group in self._groups() for name in group):
            self._agreed[name] = np.asarray(np.mean([each[name] for each in ranks], axis=0))
            for rank in ranks:
                rank[name] = self._agreed[name].copy()
