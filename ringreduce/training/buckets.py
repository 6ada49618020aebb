"""Buckets: communication memory in which gradients travel together, each at its place.

The framework and the program decide what a gradient is: None, or the array that the backward pass or the program made.
A bucket decides only where its values are. Before a bucket is reduced it collects its gradients: it copies each to its
place, and from then on the place is the gradient, until somebody replaces it.

A program may keep an array that was a gradient in an earlier step, for example to compare the gradients of several
tasks. While it does, the bucket writes nothing to that place, and is reduced in other memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from ringreduce.collectives.communicator import Communicator
from ringreduce.engine.fusion import plan
from ringreduce.training.compression import Reducer, State, WireState, has_reducers, reduces
from ringreduce.training.framework import Parameters

__all__ = ["ALIGNMENT_NBYTES", "LARGE_NBYTES", "Bucket", "Buckets", "names_in"]

#: Gradients of at least so many bytes are collected as soon as the backward pass has made them. From this size on,
#: glibc's malloc hands freed memory back to the kernel, so that gradients which live until they are cleared cost a page
#: fault per 4 KiB.
LARGE_NBYTES = 128 << 10

#: Gradients begin on cache lines.
ALIGNMENT_NBYTES = 64


class Bucket:
    """Some gradients in one piece of communication memory.

    Args:
        framework: the parameters'.
        parameters: whose gradients; all of one kind.
        communicator: makes the memory.
        moved: gets an entry for each gradient that the bucket moves to its place: by the ``id`` of the parameter, the
            ``id`` of the place and its version at that time.

    Attributes:
        flat: all of it, one-dimensional.
        slots: the parameters, in order, and their places.
        places: where these are in ``flat``.
        reducer: compresses the bucket, and keeps state from step to step; None: the bucket travels as it is.
    """

    __slots__ = ("_communicator", "_framework", "_hooks", "_moved", "flat", "places", "reducer", "slots")

    def __init__(
        self,
        framework: Parameters,
        parameters: Sequence[Any],
        communicator: Communicator,
        moved: dict[int, tuple[int, int]],
    ) -> None:
        self._framework, self._communicator, self._moved = framework, communicator, moved
        kinds = [framework.kind(parameter) for parameter in parameters]
        starts = list(accumulate(map(_padded, (nbytes for _, nbytes in kinds)), initial=0))
        self.flat, self.slots = framework.lay_out(communicator, parameters, starts)
        itemsize = starts[-1] // max(len(self.flat), 1) or 1
        self.places = [slice(start // itemsize, end // itemsize) for start, end in pairwise(starts)]
        self.reducer: Reducer | WireState | None = None
        self._hooks: list[Any] = []

    def collect_at_once(self) -> None:
        """From now on, collect large gradients as soon as the backward pass has made them."""
        for slot in self.slots:
            if self._framework.is_on_host(slot.parameter) and self._framework.kind(slot.parameter)[1] >= LARGE_NBYTES:
                # The whole bucket, not only this gradient: small gradients that stay where they are (a bias) would
                # remain between freed large ones, and malloc could reuse neither.
                self._hooks += self._framework.after_adding(slot.parameter, self.collect)

    def retire(self) -> None:
        """Remove the parameters' hooks; the bucket is of no use any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def is_kept(self) -> bool:
        """Return whether the program holds an earlier gradient that reducing this bucket would overwrite."""
        return any(not slot.is_filled() and slot.is_kept() for slot in self.slots)

    def collect(self) -> None:
        """Move gradients to their places, but for those that cannot be moved and those whose place is kept."""
        framework = self._framework
        self._move(
            [
                slot
                for slot in self.slots
                if (gradient := framework.gradient(slot.parameter)) is not None
                and gradient is not slot.place
                and framework.movable(slot)
                and not slot.is_kept()
            ]
        )

    def fill_for_now(self) -> bool:
        """Move gradients to their places, zeros where there is none yet; return False if some cannot be moved.

        Parameters without a gradient keep None.
        """
        if self.is_kept() or any(slot.is_outgrown() for slot in self.slots):
            return False
        self.collect()
        missing = [slot.place for slot in self.slots if self._framework.gradient(slot.parameter) is None]
        if len(missing) + sum(slot.is_filled() for slot in self.slots) < len(self.slots):
            return False
        self._framework.zero(missing)
        return True

    def fill(self, used: frozenset[int]) -> None:
        """Put the gradient of every used parameter in its place, zeros where this rank has none.

        Args:
            used: ids of the parameters that have a dense gradient on some rank.
        """
        framework = self._framework
        elsewhere, missing = [], []
        for slot in self.slots:
            gradient = framework.gradient(slot.parameter)
            if id(slot.parameter) not in used:  # no rank has a gradient, or some rank has a sparse one
                if gradient is slot.place:
                    framework.set_gradient(slot.parameter, framework.clone(gradient))
                missing.append(slot.place)
            elif slot.is_filled():
                continue
            elif gradient is not None and gradient is not slot.place:
                elsewhere.append(slot)
            else:
                missing.append(slot.place)
                framework.set_gradient(slot.parameter, slot.place)
        self._move(elsewhere)
        framework.zero(missing)

    def holds(self, parameters: frozenset[int]) -> bool:
        """Return whether some of these parameters, by id, have their place here."""
        return any(id(slot.parameter) in parameters for slot in self.slots)

    def placed(self) -> list[Any]:
        """Return the slots whose place is the gradient, even if the program has given it other memory."""
        return [slot for slot in self.slots if self._framework.gradient(slot.parameter) is slot.place]

    def adopt(self, used: frozenset[int]) -> None:
        """Make places the gradients of used parameters that had none when `fill_for_now` filled the bucket."""
        for slot in self.slots:
            if id(slot.parameter) in used and self._framework.gradient(slot.parameter) is None:
                self._framework.set_gradient(slot.parameter, slot.place)

    def apart(self) -> Bucket:
        """Return a bucket for the same gradients in memory of its own."""
        made = Bucket(self._framework, [slot.parameter for slot in self.slots], self._communicator, self._moved)
        made.reducer = self.reducer
        return made

    def take_back(self, apart: Bucket, placed: Sequence[Any]) -> None:
        """Take the gradients out of a bucket that `apart` returned: to their places here if they were there before.

        Args:
            apart: filled and reduced.
            placed: what `placed` returned before ``apart`` was filled.
        """
        framework = self._framework
        for slot in apart.slots:
            if framework.gradient(slot.parameter) is slot.place:
                framework.set_gradient(slot.parameter, framework.clone(slot.place))
        self._move(placed)

    def _move(self, slots: Sequence[Any]) -> None:
        if slots:
            framework = self._framework
            framework.copy([slot.place for slot in slots], [framework.gradient(slot.parameter) for slot in slots])
            for slot in slots:
                framework.set_gradient(slot.parameter, slot.place)
                self._moved[id(slot.parameter)] = id(slot.place), framework.version(slot.place)


def names_in(buckets: Sequence[Bucket], named: Callable[[], Sequence[tuple[str, Any]]]) -> list[str]:
    """Return the names of the parameters whose gradients are in some buckets, given those of all."""
    names = {id(parameter): name for name, parameter in named()}
    return [names.get(id(slot.parameter), "a parameter that is gone") for bucket in buckets for slot in bucket.slots]


class Buckets:
    """The buckets of one optimizer.

    A parameter gets its place in the first reduction in which some rank has a gradient for it. All ranks learn of that
    in the same reduction and so make the same buckets, whether a parameter was there from the start, was added or
    thawed later, or is never used and takes no memory.

    Args:
        framework: the gradients'.
        communicator: makes the memory.
        nbytes: a bucket that holds so many bytes is closed; must agree on all ranks.
        groups: numbers of groups, by the ids of their parameters; the gradients of a group, if of one kind, share a
            bucket.
        compression: makes the reducers of buckets; without effect here if it does not reduce buckets itself.

    Attributes:
        layout: a checksum of which parameter is where; equal on ranks whose buckets are.
        moved: as for `Bucket`.
    """

    def __init__(
        self,
        framework: Parameters,
        communicator: Communicator,
        nbytes: int,
        groups: Mapping[int, int],
        compression: object,
    ) -> None:
        self._framework, self._communicator = framework, communicator
        self._nbytes, self._groups, self._compression = nbytes, groups, compression
        self._buckets: list[Bucket] = []
        self._placed: set[int] = set()
        self._saved: dict[int, State] = {}
        self.layout = 0
        self.moved: dict[int, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def update(self, parameters: Sequence[Any], dense: Sequence[Any]) -> bool:
        """Drop buckets of parameters that have changed, place parameters that have no bucket; return whether any did.

        Args:
            parameters: all of the optimizer's, in registration order.
            dense: those that have a dense gradient on some rank.
        """
        outgrown = [bucket for bucket in self._buckets if any(slot.is_outgrown() for slot in bucket.slots)]
        for bucket in outgrown:
            self._placed.difference_update(id(slot.parameter) for slot in bucket.slots)
            bucket.retire()
            self._buckets.remove(bucket)
        new = [parameter for parameter in dense if id(parameter) not in self._placed]
        self._place(new)
        if outgrown or new:
            numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
            where = [[numbers.get(id(slot.parameter)) for slot in bucket.slots] for bucket in self._buckets]
            self.layout = zlib.crc32(repr(where).encode())
        return bool(outgrown or new)

    def clear(self) -> None:
        """Drop all buckets; gradients stay where they are."""
        for bucket in self._buckets:
            bucket.retire()
        self._buckets.clear()
        self._placed.clear()
        self.layout = 0

    def state_dict(self) -> dict[int, State]:
        """Return what compressing keeps on this rank, by the number of the bucket; empty where it keeps nothing."""
        kept = {
            number: bucket.reducer.state_dict()
            for number, bucket in enumerate(self._buckets)
            if bucket.reducer is not None
        }
        return {number: state for number, state in (self._saved | kept).items() if state}

    def load_state_dict(self, state: Mapping[int, State]) -> None:
        """Load what `state_dict` returned, for the buckets that exist and for those that will be made.

        A bucket for which it holds nothing begins anew.

        Raises:
            ConfigError: it was saved for other buckets.
        """
        self._saved = dict(state)
        for number, bucket in enumerate(self._buckets):
            self._give_reducer(number, bucket)

    def _give_reducer(self, number: int, bucket: Bucket) -> None:
        if has_reducers(self._compression) and reduces(self._compression, bucket.flat.dtype):
            shapes = [self._framework.shape_in_memory(slot.place) for slot in bucket.slots]
            bucket.reducer = self._compression.reducer(shapes, bucket.places)
            if (saved := self._saved.pop(number, None)) is not None:
                bucket.reducer.load_state_dict(saved)

    def _place(self, parameters: Sequence[Any]) -> None:
        """Make buckets for parameters, last registered first: in the order of the backward pass."""
        unique = list({id(parameter): parameter for parameter in reversed(parameters)}.values())
        items: list[tuple[Hashable, int]] = []
        for parameter in unique:
            kind, nbytes = self._framework.kind(parameter)
            group = self._groups.get(id(parameter))
            items.append(((kind, group), _padded(nbytes) if group is None else 0))  # a group's bucket is never full
        for members in plan(items, self._nbytes):
            bucket = Bucket(self._framework, [unique[index] for index in members], self._communicator, self.moved)
            self._give_reducer(len(self._buckets), bucket)
            self._buckets.append(bucket)
            self._placed.update(id(slot.parameter) for slot in bucket.slots)
            bucket.collect_at_once()


def _padded(nbytes: int) -> int:
    """Return how many bytes of a bucket a gradient of so many bytes takes."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
