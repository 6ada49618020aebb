"""Any strategy, and how long this rank takes for its own part of a step."""

from __future__ import annotations

from typing import Any

from ringreduce.training.strategies.strategy import Contribution, PendingAverages, StepContext, Strategy


class PacedSteps(Strategy):
    """Measures the steps of another strategy, and counts them anew when all ranks have joined.

    Rank 0 says which rank the others wait for.

    Args:
        context: of the optimizer.
        inner: makes the steps.
    """

    def __init__(self, context: StepContext, inner: Strategy) -> None:
        engine = context.ranks.engine
        self._context = context
        self._inner = inner
        self._engine = engine
        self._pacemaker = engine.pacemaker
        self._lags = inner.late is not None
        self._joins = engine.joins
        self._weighs = context.options.weighs

    def reduce(self, contribution: Contribution) -> list[Any]:
        pacemaker = self._pacemaker
        if self._lags:  # no rank waits for reports of others, so joins cannot tell them apart
            pacemaker.arrive(None)
        else:
            joins = self._engine.joins
            if joins != self._joins:
                self._joins = joins
                self._context.count.restart()
                self._context.checks.after_join()
            pacemaker.arrive(joins)
        averages = self._inner.reduce(contribution)
        if pacemaker.leave():
            self._context.checks.look_at_paces(weighs=self._weighs)
        return averages

    @property
    def late(self) -> PendingAverages | None:
        return self._inner.late
