"""Steps like the one before: a rank makes the last step again, without an agreement.

A step in which nothing has changed since the last one needs no agreement. Each rank submits the reduction of the
buckets at once, under the name of the agreement and with a signature that holds the rank's record. If a rank submits
another record, or the agreement itself, the negotiation refuses the operation on all ranks before a byte has moved, and
all agree first. The more often that happens, the longer they wait before they try again.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from ringreduce.common.call_sites import program_stack
from ringreduce.common.errors import MismatchError
from ringreduce.common.reduce_ops import SUM
from ringreduce.engine import InPlaceAllreduce, Operation
from ringreduce.training.binding.framework import Found, Look, Slot
from ringreduce.training.gradients.buckets import Bucket, MakesParts
from ringreduce.training.strategies.samples import SampleNumbers
from ringreduce.training.strategies.step_agreement import Patience
from ringreduce.training.strategies.strategy import Contribution, Partner, StepContext, Strategy
from ringreduce.training.strategies.whole import WholeSteps


@dataclass(slots=True)
class _LastStep:
    """A step that can be made again without an agreement.

    Attributes:
        found: what every rank must find, again.
        parameters: all of them.
        buckets: all of them.
        flats: their memory.
        slots: all of these, with the number of the parameter.
        text: says all of this, to compare it between ranks.
        operation: reduces the buckets, again and again; None: there is none yet, or each step needs its own.
    """

    found: bytes
    parameters: Sequence[Any]
    buckets: Sequence[Bucket]
    flats: Sequence[Any]
    slots: Sequence[tuple[int, Slot]]
    text: str
    operation: InPlaceAllreduce | None = None


class RepeatedSteps(Strategy):
    """Makes the last step again where it can, and leaves any other to `WholeSteps`.

    Args:
        context: of the optimizer.
        whole: makes the other steps.
        partners: as for ``whole``.
        numbers: of samples.
        patience: when to try.
        parts: as for ``whole``.
    """

    def __init__(
        self,
        context: StepContext,
        whole: WholeSteps,
        partners: Sequence[Partner],
        numbers: SampleNumbers,
        patience: Patience,
        parts: MakesParts | None,
    ) -> None:
        options = context.options
        self._context = context
        self._whole = whole
        self._partners = partners
        self._numbers = numbers
        self._patience = patience
        self._parts = parts
        self._last: _LastStep | None = None
        self._found = b""  # what the last agreement has found
        self._in_backward = options.in_backward
        adds_to_sums = self._in_backward and options.op is SUM
        self._can_repeat = not adds_to_sums and options.predivide_factor == 1.0 and options.compressor is None

    def reduce(self, contribution: Contribution) -> list[Any]:
        checks = self._context.checks
        try:
            if not checks.idle:
                checks.look(self._context.count.reduced, contribution.gradients)
            samples = self._numbers.of_step(contribution.samples)
            same = self._last is not None and samples == self._numbers.told
            for partner in self._partners:
                same &= partner.settle()
            repeated = same and self._again(contribution)
            if not repeated:
                self._whole.reduce(contribution._replace(samples=samples))
                self._remember(contribution.parameters)
        except BaseException as error:
            self._last = None
            self._patience.count(alike=False)
            for partner in self._partners:
                partner.break_off(error)
            raise
        self._context.count.add()
        for partner in self._partners:
            partner.reduced(contribution.gradients, repeated=repeated)
        return contribution.gradients

    def _again(self, contribution: Contribution) -> bool:
        """Reduce the buckets as in the last step; return False if a rank does something else, and nothing was done."""
        last = self._last
        assert last is not None
        parameters = contribution.parameters
        if contribution.found != last.found or len(parameters) != len(last.parameters):
            return False
        if self._context.count.looks_closer or not all(map(is_, parameters, last.parameters)):
            return False
        if not self._collect(last.slots, contribution.gradients):
            return False
        operation = self._operation(last)
        try:
            self._context.ranks.run(operation)
        except MismatchError as error:
            self._patience.heed(error, operation)
            self._last = None
            return False
        return True

    def _collect(self, slots: Sequence[tuple[int, Slot]], gradients: list[Any]) -> bool:
        """Move gradients to their places; return False if that cannot be, and nothing was moved."""
        moving = []
        places = []
        for number, slot in slots:
            look = slot.look(gradients[number])
            if look == Look.MOVABLE:
                moving.append(number)
                places.append(slot.place)
            elif look != Look.IN_PLACE:
                return False
        if moving:
            self._context.memory.pack(places, [gradients[number] for number in moving])
            for number, place in zip(moving, places, strict=True):
                gradients[number] = place
        return True

    def _operation(self, last: _LastStep) -> Operation:
        operation = last.operation
        if operation is not None:
            operation.renew(program_stack(1), self._context.buckets.within(last.buckets, last.flats))
            return operation
        name = f"{self._context.ranks.name}, step"
        text = last.text
        if self._in_backward:
            text += f", {self._context.count.stepped - self._context.count.reduced}"
        made = self._context.buckets.reduction(name, text, last.buckets, last.flats, self._parts)
        # Kept if the operation of the next step is equal. Parts may change, in the backward pass the text counts steps,
        # and a state that is loaded brings other feedbacks.
        if (
            isinstance(made, InPlaceAllreduce)
            and self._parts is None
            and not (self._in_backward or made.travel.feedbacks)
        ):
            last.operation = made
        return made

    def _remember(self, parameters: Sequence[Any]) -> None:
        """Let the next step repeat this one, if it was like those before and nothing about it is special."""
        found = self._whole.found
        self._patience.count(alike=found == self._found)
        self._found = found
        self._last = None
        buckets = list(self._context.buckets)
        weights = self._context.buckets.weights
        slots = [(number, slot) for each in buckets for number, slot in zip(each.numbers, each.slots, strict=True)]
        if (
            self._can_repeat
            and not self._context.checks.compares_data
            and self._patience.is_over
            and not any(partner.is_learning for partner in self._partners)
            and len(slots) == sum(found) > 0  # all that have a gradient have a place
            and max(found) == Found.DENSE
            and not any(bucket.is_compressed for bucket in buckets)
            and len({bucket.travels for bucket in buckets}) == 1
            and (weights is None or weights.everyone)
        ):
            alike = zlib.crc32(found + repr(self._numbers.counts).encode(), self._context.buckets.layout)
            text = f"a step of {self._context.ranks.name} like the last, {alike:08x}"
            self._last = _LastStep(
                found, parameters, buckets=buckets, flats=[each.flat for each in buckets], slots=slots, text=text
            )
