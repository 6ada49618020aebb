"""Gradients that a program does not clear between two steps of an optimizer that has shards.

A backward pass adds to what the last one has left. Without shards that is the average on all ranks. With them a rank
needs the averages of its own part alone, and has its own gradients elsewhere: to add to these would mix the two. So

- the first step leaves averages everywhere, and shows whether the program clears gradients; if it does not, all later
  steps leave averages everywhere, too,
- if it has cleared them so far, a step leaves this rank's part alone. If the program then adds to it after all, the
  part is multiplied by the number of ranks first, and the rest becomes zero: the next average over the ranks is what it
  would be, had all of them added to averages,
- where that cannot be, the next step raises an error on all ranks.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ringreduce.common.errors import ConfigError
from ringreduce.training.binding.framework import Found, Hooks, InPlace, Memory, Removable, Slot

if TYPE_CHECKING:
    from ringreduce.training.gradients.buckets import Bucket
    from ringreduce.training.gradients.record import Record

_REMEDY = (
    "clear gradients before the next backward pass (optimizer.zero_grad()), or call optimizer.synchronize() before the "
    "step, after which all ranks have all averages"
)


@dataclass(slots=True)
class _Left:
    """The gradient of a parameter as the last reduction has left it.

    Attributes:
        slot: of the parameter.
        own: this rank's part of it, in elements.
        found: returns the gradient; None: it is gone.
        version: of the gradient then.
        is_part: whether it is the average in this rank's part alone.
        hooks: by which it is heard that the framework is about to add to it.
    """

    slot: Slot
    own: slice
    found: Callable[[], Any] = lambda: None
    version: int = 0
    is_part: bool = False
    hooks: Sequence[Removable] = ()

    def leave(self, gradient: Any, memory: Any, *, is_part: bool) -> None:
        """Take note of the gradient as a reduction leaves it."""
        if gradient is self.slot.place:
            self.found = partial(getattr, self.slot, "place")
        else:
            self.found = weakref.ref(gradient)
            is_part = is_part and memory.found([gradient])[0] == Found.DENSE
        self.version = memory.version(gradient)
        self.is_part = is_part


class Uncleared:
    """What a program does to reduced gradients before they are reduced again.

    Args:
        memory: the gradients'; parameters keep them in an attribute ``grad``.
        buckets: where they are.
        size: the number of ranks.
        divides: whether reductions may leave a rank its own part alone.

    Attributes:
        divides: likewise, as long as the program has cleared all gradients; equal on all ranks in a reduction.
        scaled: the parameters, by id, whose parts were multiplied before something was added to them.
    """

    def __init__(self, memory: Memory, buckets: Iterable[Bucket], size: int, *, divides: bool) -> None:
        assert isinstance(memory, InPlace)
        self._memory: Any = memory
        self._buckets = buckets
        self._size = size
        self._parted: set[int] = set()  # the parameters, by id, of which this rank gets its own part alone
        self._parts_only = False
        self._may_divide = divides and isinstance(memory, Hooks)
        self.divides = False  # until it is known whether it may
        self._known: dict[int, _Left] = {}  # by the parameter's id
        self._open: set[int] = set()  # of which it is not known yet what was done to them
        self.scaled: set[int] = set()
        self._written: set[int] = set()  # of which a rank had its part alone
        self._kept = False

    def watch(self, bucket: Bucket, own: Iterable[slice]) -> None:
        """Take note of a new bucket.

        Args:
            bucket: of gradients.
            own: this rank's part of each parameter.
        """
        if not self._may_divide:
            return
        for slot, part in zip(bucket.slots, own, strict=True):
            self._known[id(slot.parameter)] = _Left(slot, part)

    def forget(self, buckets: Collection[Bucket]) -> None:
        """Forget parameters that are in none of these buckets."""
        known = {id(slot.parameter) for bucket in buckets for slot in bucket.slots}
        self._known = {key: left for key, left in self._known.items() if key in known}
        for ids in (self._open, self.scaled, self._written):
            ids &= known

    def cleared(self) -> None:
        """Take note that all gradients are None or zero."""
        for ids in (self._open, self.scaled, self._written):
            ids.clear()

    def adding(self, key: int) -> None:
        """Take note that the framework is about to add to the gradient of a parameter, given its ``id``."""
        if key in self._open:
            self._open.discard(key)
            self._look(key)
        elif self.scaled or self._written:
            self._forget_cleared()

    def parts_of(self, buckets: Iterable[Bucket]) -> None:
        """Take note that the reduction leaves this rank its own part of some buckets alone."""
        self._parted |= {id(slot.parameter) for bucket in buckets for slot in bucket.slots}

    def settle(self) -> bool:
        """Look at gradients that were not added to, before a reduction. Local.

        Returns:
            Whether all were cleared, so that this reduction needs no agreement on them.
        """
        self._parted.clear()
        while self._open:
            key = self._open.pop()
            self._look(key)
        self._forget_cleared()
        if not self._kept:
            self.divides = self._may_divide and bool(self._known)
        return not (self._kept or self._written)

    def _forget_cleared(self) -> None:
        for ids in (self.scaled, self._written):
            ids -= {key for key in ids if self._known[key].slot.parameter.grad is None}

    def _look(self, key: int) -> None:
        left = self._known[key]
        gradient = left.slot.parameter.grad
        if gradient is None:
            return
        if gradient is not left.found():
            self._kept = True  # the program has made another one, maybe of this
            return
        is_written = self._memory.version(gradient) != left.version
        if is_written and self._memory.is_zero(gradient):
            return
        self._kept = True
        if left.is_part and is_written:
            self._written.add(key)
        elif left.is_part:
            self._memory.keep_part(gradient, left.own, self._size)  # what is reduced next is as if whole
            left.is_part = False
            self.scaled.add(key)

    # ---- what the ranks tell each other ----

    def report(self, record: Record, parameters: Sequence[Any]) -> None:
        """Say what was found by `settle`."""
        numbers = [number for number, each in enumerate(parameters) if id(each) in self.scaled]
        record.uncleared[:], record.overwritten[:] = self._kept, bool(self._written)
        record.sign("scaled", zlib.crc32(repr(numbers).encode()))

    def heed(self, record: Record, described: str) -> None:
        """Take note of what the ranks have found.

        Raises:
            ConfigError: averages are not what they would be without shards.
        """
        if record.overwritten.any():
            problem = "the program has written into gradients that a step had left"
        elif record.differs("scaled"):
            problem = "some ranks have cleared gradients after a step, and others have not"
        elif self.scaled and record.counted.any():
            problem = "a backward pass has added to gradients that a step had left, and ranks have numbers of samples"
        else:
            if record.uncleared.any():
                self._divide_no_more()
            return
        raise ConfigError(f"{problem}, of {described}: with shard a rank has the averages of its part only; {_REMEDY}")

    def _divide_no_more(self) -> None:
        self._may_divide = self.divides = self._kept = False
        for hook in (hook for left in self._known.values() for hook in left.hooks):
            hook.remove()
        self._known.clear()
        self.cleared()

    @contextmanager
    def own_parts(self) -> Iterator[None]:
        """Return a context in which gradients are reduced of which a rank needs its own part alone."""
        self._parts_only = True
        try:
            yield
        finally:
            self._parts_only = False

    @property
    def in_parts(self) -> bool:
        """Whether this reduction may leave a rank its own part alone."""
        return self._parts_only and self.divides

    def reduced(self, gradients: Sequence[Any]) -> None:
        """Take note of the gradients of all parameters, which were reduced. Local."""
        if not self._may_divide:
            return
        self.cleared()
        self._kept = False
        for bucket in self._buckets:
            for number, slot in zip(bucket.numbers, bucket.slots, strict=True):
                gradient = gradients[number]
                if gradient is not None:
                    key = id(slot.parameter)
                    left = self._leave(key, gradient, is_part=key in self._parted)
                    if not left.hooks:
                        # From now on; the framework may add to none yet.
                        left.hooks = self._memory.before_adding(slot.parameter, partial(_heard, weakref.ref(self), key))
                        bucket.hooks.extend(left.hooks)

    def part_changed(self) -> None:
        """Take note that, where steps leave a rank its part alone, the gradients were changed in these."""
        if not self.divides:
            return
        for left in self._known.values():
            gradient = left.slot.parameter.grad
            if gradient is not None and gradient is left.found():
                self._leave(id(left.slot.parameter), gradient, is_part=True)

    def require_reduced(self) -> None:
        """Raise a `ConfigError` if a step is to be made with parts that were multiplied, to be reduced again."""
        if self.scaled:
            raise ConfigError(
                "a backward pass has added to averages, and the step is to use the sums as they are, within "
                f"skip_synchronize(): with shard a rank has the averages of its part only; {_REMEDY}"
            )

    def _leave(self, key: int, gradient: Any, *, is_part: bool) -> _Left:
        left = self._known[key]
        left.leave(gradient, self._memory, is_part=is_part)
        self._open.add(key)
        return left


def _heard(this: weakref.ref[Uncleared], key: int) -> None:
    if (uncleared := this()) is not None:
        uncleared.adding(key)
