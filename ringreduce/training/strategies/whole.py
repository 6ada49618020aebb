"""A step of which nothing is known before: the ranks agree on what they have, then reduce the buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce.common.errors import ConfigError
from ringreduce.training.binding.framework import Found
from ringreduce.training.gradients.buckets import MakesParts
from ringreduce.training.gradients.record import Record
from ringreduce.training.strategies.samples import SampleNumbers
from ringreduce.training.strategies.step_agreement import Patience, StepAgreement
from ringreduce.training.strategies.strategy import Contribution, Partner, StepContext, Strategy


class WholeSteps(Strategy):
    """Agrees with the other ranks, then reduces the buckets.

    Args:
        context: of the optimizer.
        agreement: of the ranks.
        partners: take part in it.
        numbers: of samples.
        patience: of what would repeat this step.
        parts: makes operations of which a rank needs its part alone; None: nothing does.

    Attributes:
        found: of which parameters ranks had gradients in the last step, as of `Memory.found`; empty: there was none.
    """

    def __init__(
        self,
        context: StepContext,
        agreement: StepAgreement,
        partners: Sequence[Partner],
        numbers: SampleNumbers,
        patience: Patience,
        parts: MakesParts | None,
    ) -> None:
        self._context = context
        self._agreement = agreement
        self._partners = partners
        self._numbers = numbers
        self._patience = patience
        self._parts = parts
        self.found = b""

    def reduce(self, contribution: Contribution) -> list[Any]:
        context = self._context
        buckets = context.buckets
        gradients = contribution.gradients
        samples = contribution.samples
        record, active = self._agreement.agree(contribution)
        self._require_cleared(record)
        buckets.number(contribution.parameters)
        early = [bucket for each in self._partners for bucket in each.conclude(record, active, gradients)]
        if early and isinstance(samples, int):
            raise ConfigError("buckets were averaged in the backward pass without weights; with samples, overlap=False")
        if self._numbers.exchange(samples):
            self._patience.excuse()
        buckets.weigh(self._numbers.counts, active)
        self.found = found = record.found.tobytes()
        moved = buckets.update(contribution.parameters, found)
        for partner in self._partners if moved else ():
            partner.moved()
        buckets.reduce(early, gradients, found, active, self._parts)
        for number, state in enumerate(found):
            if state >= Found.SPARSE:
                gradients[number] = buckets.sparse(
                    contribution.parameters[number],
                    gradients[number],
                    sparse_dims=state - Found.SPARSE,
                    active=active,
                )
        looks_next = context.checks.needs_own_gradients_in(context.count.reduced + 1)
        special = looks_next or bool(moved or self._numbers.counts)
        for partner in self._partners:
            partner.prepare(record, special=special, active=active)
        return gradients

    def _require_cleared(self, record: Record) -> None:
        context = self._context
        if context.options.in_backward and record.again.any():
            raise ConfigError(
                f"a backward pass has added to sums over the ranks, of {context.ranks.described}: clear them first, "
                "make all passes of a step but the last within no_sync(), or declare them with "
                "backward_passes_per_step"
            )
