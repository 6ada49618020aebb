"""Buckets that are reduced during the backward pass: on a guess, and used only if the guess was right.

Between nodes the network is the bottleneck, and it idles during the backward pass unless buckets travel as soon as they
are complete. Whether one is, nobody can know: a program may run several backward passes before a step, and change
gradients in between. The guess is that every gradient is added to as often as in the step before. What is guessed to be
complete is copied, the copy is reduced under a name of the bucket's own (as ranks may guess differently, or go through
different parts of the graph), and when the step comes, all ranks compare what they sent with what they have then. If
one finds a difference, the bucket is reduced again, as it would have been anyway: a wrong guess costs time and nothing
else.

Who touches what: counting and `fill` run where the backward pass does, or at the beginning of the step, until the
bucket is submitted; from then on the copy is the engine's, on whichever thread drives it, until it is reduced;
`compare` and `begin_step` run in the engine's procedure for the step. A rank submits all parts that it owes before it
submits the step, so all that was sent has been reduced, on all ranks, when the step begins.

On a GPU the copy is made on the stream of the backward pass, and reduced on a stream of the ranks' own; the step's
stream waits for that. Checksums are made and compared there, of all buckets at once: the host waits for the GPU once in
a step. Whatever wrote to a gradient is noticed, as it is the bytes that are compared.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial

import torch
from torch.utils.hooks import RemovableHandle

from ringreduce.communicator import Communicator
from ringreduce.engine import Operation
from ringreduce.torch.bucket import Bucket
from ringreduce.torch.streams import Handover, gpu_of
from ringreduce.training.compression import State

__all__ = ["EarlyReduction", "settled"]

# Of checksums on a GPU: the words that are summed at once, so that their products take little memory, and the base.
_PIECE = 1 << 22
_BASE = 0x2545F4914F6CDD1D


class EarlyReduction:
    """The reduction of one bucket during the backward pass.

    Args:
        bucket: whose gradients.
        communicator: makes the copy's memory.

    Attributes:
        copy: what travels: a bucket for the same gradients, in memory of its own.
        started: whether this rank has sent the bucket since the last step.
        active: how many ranks took part; None: it was not reduced since the last step. The same on all ranks.
        wanted: whether some rank had a gradient for it in the last step; the same on all ranks.
        part: what this rank has submitted last; None: nothing yet.
        reducer_state: of the bucket's reducer before ``copy`` was reduced.
    """

    __slots__ = (
        "_bucket",
        "_counts",
        "_expected",
        "_faithful",
        "_handover",
        "_hooks",
        "_incomplete",
        "_sent_checksum",
        "active",
        "copy",
        "part",
        "reducer_state",
        "started",
        "wanted",
    )

    def __init__(self, bucket: Bucket, communicator: Communicator) -> None:
        self._bucket = bucket
        self.copy = bucket.spare(communicator)
        self.started = False
        self.active: int | None = None
        self.wanted = False
        self.part: Operation | None = None
        self.reducer_state: State = {}
        self._faithful = False  # whether the copy was made of what this rank has
        self._sent_checksum: int | torch.Tensor = 0
        device = gpu_of([bucket.flat])
        self._handover = None if device is None else Handover(device)
        if device is not None:
            _weights(bucket.flat.device, _PIECE)  # made now, as that keeps the GPU waiting
        self._counts = [0] * len(bucket.slots)
        self._expected = [0] * len(bucket.slots)
        self._incomplete = 0
        self._hooks: list[RemovableHandle] = []

    def watch(self, start: weakref.WeakMethod[Callable[[EarlyReduction], object]]) -> None:
        """Count what the backward pass adds, and have the reduction started when the bucket seems to be complete."""
        for index, slot in enumerate(self._bucket.slots):
            self._hooks += slot.after_gradient(partial(self._count, index, start))

    def retire(self) -> None:
        """Count no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _count(self, index: int, start: weakref.WeakMethod[Callable[[EarlyReduction], object]]) -> None:
        if self._handover is not None:
            self._handover.note()
        self._counts[index] += 1
        if self._counts[index] == self._expected[index]:
            self._incomplete -= 1
            if self._incomplete == 0 and self.should_start() and (starting := start()) is not None:
                starting(self)

    def should_start(self) -> bool:
        """Whether there is reason to start, it was not done yet, and nothing is under way."""
        return self.wanted and not self.started and self.active is None and (self.part is None or self.part.done)

    def spoil(self) -> None:
        """Let `compare` find a difference, whatever there is."""
        self._faithful = False

    def begin_step(self, wanted: bool) -> None:
        """Forget what was done since the last step, but for how often each gradient was added to."""
        self._expected, self._counts = self._counts, [0] * len(self._counts)
        self._incomplete = sum(expected > 0 for expected in self._expected)
        self.started, self.wanted, self.active = False, wanted, None

    def fill(self) -> None:
        """Copy the gradients as they are now, zeros where there is none."""
        self.started = True
        if self._handover is None:
            self._copy()
            return
        with self._handover.filling():
            self._copy()

    def reducing(self, communicator: Communicator) -> AbstractContextManager[None]:
        """Return the context in which the copy is reduced."""
        return nullcontext() if self._handover is None else self._handover.working(communicator)

    def sign(self) -> None:
        """Take note of what this rank sends; within `reducing`, on a GPU with nobody waiting."""
        if not self._faithful:
            return
        if self._handover is None:
            self._sent_checksum = _checksum(self.copy.flat)
        else:
            sent = _checksum_on_device(self.copy.flat)
            if not isinstance(self._sent_checksum, torch.Tensor):
                self._sent_checksum = torch.empty_like(sent)
            self._sent_checksum.copy_(sent)  # memory that no other stream will be given
            self._handover.reach()

    def come_back(self) -> None:
        """Let the current stream wait until the copy is reduced, if it is on a GPU."""
        if self._handover is not None:
            self._handover.come_back()

    def _copy(self) -> None:
        slots, copies = self._bucket.slots, self.copy.slots
        grads = [slot.parameter.grad for slot in slots]
        if not all(grad is None or _is_plain(grad, slot.place) for grad, slot in zip(grads, slots, strict=True)):
            self.copy.flat.zero_()
            self._faithful = False
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
        self._faithful = True

    def compare(self) -> bool | torch.Tensor:
        """Bring the gradients to their places; return whether what this rank has sent is not what it has now.

        A tensor on the GPU says so if that is to be computed yet; see `settled`. False if nothing was reduced.
        """
        bucket = self._bucket
        if self.active is None:
            return False
        if not self._faithful or bucket.is_kept() or any(slot.is_outgrown() for slot in bucket.slots):
            return True
        bucket.collect()
        missing = []
        for slot in bucket.slots:
            if slot.parameter.grad is None:
                missing.append(slot.place)
            elif not slot.is_filled():
                return True
        if missing:
            torch._foreach_zero_(missing)
        if isinstance(self._sent_checksum, torch.Tensor):
            assert self._handover is not None
            self._handover.follow()  # it was computed on the ranks' own stream
            return (_checksum_on_device(bucket.flat) != self._sent_checksum).any()
        return _checksum(bucket.flat) != self._sent_checksum


def settled(answers: Sequence[bool | torch.Tensor]) -> list[bool]:
    """Return answers of `EarlyReduction.compare`, having waited for the GPU once, if for any."""
    pending = [answer for answer in answers if isinstance(answer, torch.Tensor)]
    known = iter(torch.stack(pending).tolist() if pending else ())
    return [next(known) if isinstance(answer, torch.Tensor) else answer for answer in answers]


def _is_plain(grad: torch.Tensor, place: torch.Tensor) -> bool:
    return (
        grad.is_cuda == place.is_cuda
        and grad.layout is torch.strided
        and not grad.requires_grad
        and grad.dtype == place.dtype
        and grad.shape == place.shape
    )


def _checksum(flat: torch.Tensor) -> int:
    """Return what shows any change, at 6 GB/s: networks between nodes are slower."""
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def _checksum_on_device(flat: torch.Tensor) -> torch.Tensor:
    """Return what shows any change, as a tensor where the bucket lies; nobody waits for it.

    A sum, modulo 2**64, of 32-bit words times odd weights of 63 bits: moving a value, or exchanging or negating two,
    changes it as well as changing one. The sums of pieces are the digits of a number to an odd base.
    """
    total = torch.zeros(1, dtype=torch.int64, device=flat.device)
    for words in torch.split(flat.view(torch.int32), _PIECE):
        total.mul_(_BASE).add_((words * _weights(flat.device, _PIECE)[: words.numel()]).sum())
    return total


@lru_cache(maxsize=8)
def _weights(device: torch.device, count: int) -> torch.Tensor:
    weights = torch.randint(0, 1 << 62, (count,), generator=torch.Generator().manual_seed(0), device="cpu")
    # The host waits for this copy, so that any stream may read it from now on.
    return weights.mul_(2).add_(1).to(device)
