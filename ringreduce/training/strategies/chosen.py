"""The one place that chooses how steps get their averages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ringreduce.training.options.features import StrategyOption
from ringreduce.training.strategies.alone import LoneSteps
from ringreduce.training.strategies.late import STALENESS, LateAverages
from ringreduce.training.strategies.overlapped import Overlap
from ringreduce.training.strategies.paced import PacedSteps
from ringreduce.training.strategies.parts import Sharding, ShardPartner
from ringreduce.training.strategies.repeated import RepeatedSteps
from ringreduce.training.strategies.samples import SampleNumbers
from ringreduce.training.strategies.step_agreement import Patience, StepAgreement
from ringreduce.training.strategies.strategy import Partner, StepContext, Strategy
from ringreduce.training.strategies.whole import WholeSteps

#: What makes the strategy that an option chooses, of the agreement of the ranks, or of the strategy that would be
#: there without it.
STRATEGIES: dict[StrategyOption, Callable[[StepContext, StepAgreement, Callable[[], Strategy]], Strategy]] = {
    STALENESS: lambda context, agreement, inner: LateAverages(context, agreement),
}


def strategy_for(
    context: StepContext,
    settings: Callable[[], Mapping[str, str]],
    overlap: Overlap | None,
    sharding: Sharding | None,
) -> Strategy:
    """Return what makes the steps of an optimizer.

    Args:
        context: of the optimizer; its options decide.
        settings: as for `StepAgreement`.
        overlap: reduces buckets before the step; None: nothing does.
        sharding: has the parameters in memory of the node; None: each rank has its own.
    """
    partners: list[Partner] = [] if overlap is None else [overlap]
    if sharding is not None:
        partners.append(ShardPartner(sharding))
    parts = None if sharding is None else sharding.reduction
    patience = Patience()
    numbers = SampleNumbers(context)
    agreement = StepAgreement(context, partners, settings=settings, patience=patience)

    def plain() -> Strategy:
        if context.ranks.size == 1:
            return LoneSteps(numbers)
        whole = WholeSteps(context, agreement, partners, numbers=numbers, patience=patience, parts=parts)
        return RepeatedSteps(context, whole, partners, numbers=numbers, patience=patience, parts=parts)

    chosen = context.options.chosen
    make: Callable[[], Strategy] = plain
    for option in chosen:
        make = partial(STRATEGIES[option], context, agreement, make)
    return make() if context.ranks.size == 1 and not chosen else PacedSteps(context, make())
