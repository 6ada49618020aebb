"""Buckets that are reduced during the backward pass: on a guess, and used only if the guess was right.

Between nodes the network is the bottleneck, and it idles during the backward pass unless buckets travel as soon as they
are complete. Whether one is, nobody can know: a program may run several backward passes before a step, and change
gradients in between. The guess is that every gradient is added to as often as in the step before. What is guessed to be
complete is copied, the copy is reduced under a name of the bucket's own (as ranks may guess differently, or go through
different parts of the graph), and when the step comes, all ranks compare what they sent with what they have then. If
one finds a difference, the bucket is reduced again, as it would have been anyway: a wrong guess costs time and nothing
else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from ringreduce.torch.buckets import Bucket

__all__ = ["EarlyReduction"]


class EarlyReduction:
    """The reduction of one bucket during the backward pass.

    Args:
        bucket: whose gradients.
        copy: a bucket for the same gradients, in memory of its own.

    Attributes:
        copy: what travels.
        started: whether this rank has sent the bucket since the last step.
        active: how many ranks took part; None: it was not reduced since the last step. The same on all ranks.
        wanted: whether some rank had a gradient for it in the last step; the same on all ranks.
        before: what the bucket's reducer has kept from earlier steps; for `GradientBuckets`.
    """

    __slots__ = ("_bucket", "_counts", "_expected", "_left", "_sent", "active", "before", "copy", "started", "wanted")

    def __init__(self, bucket: Bucket, copy: Bucket) -> None:
        self._bucket = bucket
        self.copy = copy
        self.started = False
        self.active: int | None = None
        self.wanted = False
        self.before: dict[str, torch.Tensor] = {}
        self._sent: tuple[int, bytes] | None = None
        self._counts = [0] * len(bucket.slots)
        self._expected = [0] * len(bucket.slots)
        self._left = 0

    def count(self, index: int) -> bool:
        """Take note that something was added to a gradient; return whether the bucket seems to be complete now."""
        self._counts[index] += 1
        if self._counts[index] == self._expected[index]:
            self._left -= 1
            return self._left == 0 and self.may_start()
        return False

    def may_start(self) -> bool:
        """Whether there is reason to start, and it was not done yet."""
        return self.wanted and not self.started and self.active is None

    def begin_step(self, wanted: bool) -> None:
        """Forget what was done since the last step, but for how often each gradient was added to."""
        self._expected, self._counts = self._counts, [0] * len(self._counts)
        self._left = sum(expected > 0 for expected in self._expected)
        self.started, self.wanted, self.active = False, wanted, None

    def fill(self) -> None:
        """Copy the gradients as they are now, zeros where there is none."""
        self.started = True
        slots, copies = self._bucket.slots, self.copy.slots
        grads = [slot.parameter.grad for slot in slots]
        if not all(grad is None or _is_plain(grad, slot.place) for grad, slot in zip(grads, slots, strict=True)):
            self.copy.flat.zero_()
            self._sent = None  # it is not what this rank has
            return
        if all(slot.is_filled() for slot in slots):
            self.copy.flat.copy_(self._bucket.flat)
        else:
            pairs = [(copy.place, grad) for copy, grad in zip(copies, grads, strict=True) if grad is not None]
            missing = [copy.place for copy, grad in zip(copies, grads, strict=True) if grad is None]
            with torch.no_grad():
                if pairs:
                    torch._foreach_copy_([place for place, _ in pairs], [grad for _, grad in pairs])
                if missing:
                    torch._foreach_zero_(missing)
        self._sent = _signature(self.copy.flat)

    def was_wrong(self) -> bool:
        """Whether it was reduced, and what this rank sent is not what it has now."""
        return self.active is not None and not self._is_still_right()

    def _is_still_right(self) -> bool:
        """Bring the gradients to their places, and compare them with what was sent."""
        bucket = self._bucket
        if self._sent is None or bucket.is_kept():
            return False
        bucket.collect()
        missing = []
        for slot in bucket.slots:
            if slot.parameter.grad is None:
                missing.append(slot.place)
            elif not slot.is_filled():
                return False
        if missing:
            torch._foreach_zero_(missing)
        return _signature(bucket.flat) == self._sent


def _is_plain(grad: torch.Tensor, place: torch.Tensor) -> bool:
    return (
        grad.is_cpu
        and grad.layout is torch.strided
        and not grad.requires_grad
        and grad.dtype == place.dtype
        and grad.shape == place.shape
    )


def _signature(flat: torch.Tensor) -> tuple[int, bytes]:
    """Return what differs, as good as certainly, if anything in a bucket does; at the speed of memory.

    The sum of the bits shows any change of one place, and what may cancel out in it (a change of all signs) shows in
    the sum of the values.
    """
    bits = flat.view(torch.uint8).numpy()
    return int(bits.view(np.uint64).sum(dtype=np.uint64)), flat.sum().reshape(1).view(torch.uint8).numpy().tobytes()
