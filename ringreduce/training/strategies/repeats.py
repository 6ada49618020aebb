"""Steps like the one before: what a rank remembers of a step, to make it again without an agreement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ringreduce.training.binding.framework import Slot
from ringreduce.training.gradients.buckets import Bucket

__all__ = ["RepeatedStep"]


class RepeatedStep(NamedTuple):
    """A step that can be made again without an agreement.

    Attributes:
        found: what every rank must find, again.
        parameters: all of them.
        buckets: all of them.
        flats: their memory.
        slots: all of these, with the number of the parameter.
        text: says all of this, to compare it between ranks.
    """

    found: bytes
    parameters: Sequence[Any]
    buckets: Sequence[Bucket]
    flats: Sequence[Any]
    slots: Sequence[tuple[int, Slot]]
    text: str
