"""A bounded store of what was made, for when it is needed again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """At most so many values by keys; those that were stored longest ago go first.

    Values are read and stored as in any dictionary, without a call of Python: a small collective has some ten in all.
    Who takes a value out (`pop`) while it uses it, and stores it again, shares it with no other thread, and keeps it
    among the last ones. That makes no other value go: until room is made, there may be more by those that were in use.

    Args:
        limit: how many.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def make_room(self) -> None:
        """Drop values until one more may be stored; to be called before that, for a new key."""
        while len(self) >= self._limit:
            self.popitem(last=False)
