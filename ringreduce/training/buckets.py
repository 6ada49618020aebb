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

from ringreduce.collectives import Feedback
from ringreduce.collectives.communicator import Communicator
from ringreduce.engine.coordinator import fuse
from ringreduce.training.compression import Reducer, State, WireState, has_reducers, reduces
from ringreduce.training.framework import EMPTY, FILLED, MOVABLE, OUTGROWN, Hooks, Memory, Removable
from ringreduce.training.options import Options

__all__ = ["ALIGNMENT_NBYTES", "LARGE_NBYTES", "Bucket", "Buckets", "names_in"]

#: Gradients of at least so many bytes are collected as soon as the backward pass has made them. From this size on,
#: glibc's malloc hands freed memory back to the kernel, so that gradients which live until they are cleared cost a page
#: fault per 4 KiB.
LARGE_NBYTES = 128 << 10

#: Gradients begin on cache lines.
ALIGNMENT_NBYTES = 64


_GONE = -1  # the number of a parameter that the optimizer has no more


class Bucket:
    """Some gradients in one piece of communication memory.

    Its methods take the gradients of its parameters as a list, in the order of the slots, and change the list where
    the gradient becomes another array: mostly the place.

    Args:
        memory: the gradients'.
        parameters: whose gradients; all of one kind.
        communicator: makes the memory.

    Attributes:
        flat: all of it, one-dimensional.
        slots: the parameters, in order, and their places.
        places: where these are in ``flat``.
        numbers: of its parameters, among all of the optimizer's.
        reducer: compresses the bucket, and keeps state from step to step; None: the bucket travels as it is.
        hooks: end with the bucket.
    """

    __slots__ = ("_communicator", "_memory", "flat", "hooks", "numbers", "places", "reducer", "slots")

    def __init__(self, memory: Memory, parameters: Sequence[Any], communicator: Communicator) -> None:
        self._memory, self._communicator = memory, communicator
        starts = list(accumulate((_padded(memory.kind(each)[1]) for each in parameters), initial=0))
        self.flat, self.slots = memory.lay_out(communicator, parameters, starts)
        itemsize = starts[-1] // max(len(self.flat), 1) or 1
        self.places = [slice(start // itemsize, end // itemsize) for start, end in pairwise(starts)]
        self.numbers: list[int] = []
        self.reducer: Reducer | WireState | None = None
        self.hooks: list[Removable] = []

    @property
    def is_compressed(self) -> bool:
        """Whether it is reduced by its reducer, on its own."""
        return self.reducer is not None and not isinstance(self.reducer, WireState)

    @property
    def wire(self) -> str | None:
        """The format in which it travels; None: as it is."""
        return self.reducer.wire if isinstance(self.reducer, WireState) else None

    @property
    def feedbacks(self) -> list[Feedback]:
        """What rounding to that format keeps, for an operation on this bucket."""
        return [self.reducer.feedback] if isinstance(self.reducer, WireState) else []

    def retire(self) -> None:
        """Remove the hooks; the bucket is of no use any more."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def look(self, gradients: Sequence[Any]) -> list[int]:
        """Return how each gradient and its place are; see `FILLED`."""
        return [slot.look(gradient) for slot, gradient in zip(self.slots, gradients, strict=True)]

    def change(self, gradients: list[Any], how: Callable[[list[Any]], object]) -> None:
        """Let a method of this bucket change those of all gradients that are its own."""
        mine = [gradients[number] for number in self.numbers]
        how(mine)
        for number, gradient in zip(self.numbers, mine, strict=True):
            gradients[number] = gradient

    def collect(self, gradients: list[Any], *, zeros: bool = False) -> list[int]:
        """Move the gradients to their places that can be; return where they were, as `look` does.

        Args:
            gradients: see the class.
            zeros: whether places of parameters without a gradient become zeros, if all others are in theirs then.
        """
        looks = self.look(gradients)
        self.move(gradients, [index for index, found in enumerate(looks) if found == MOVABLE])
        if zeros and max(looks, default=0) <= EMPTY:
            self._clear([index for index, found in enumerate(looks) if found == EMPTY])
        return looks

    def collect_own(self, *, zeros: bool = False) -> list[int]:
        """Collect what the parameters have as ``grad``; see `collect`. Those that have none keep None."""
        gradients = [slot.parameter.grad for slot in self.slots]
        looks = self.collect(gradients, zeros=zeros)
        for slot, gradient, found in zip(self.slots, gradients, looks, strict=True):
            if found == MOVABLE:
                slot.parameter.grad = gradient
        return looks

    def collect_at_once(self, hooks: Hooks, moved: dict[int, tuple[int, int]]) -> None:
        """From now on, collect large gradients as soon as the backward pass has made them.

        Args:
            hooks: the framework's.
            moved: gets an entry for each gradient that is moved so: by the ``id`` of the parameter, the ``id`` of the
                place and its version at that time.
        """
        if not self._memory.streams.is_on_host(self.flat):
            return

        def collect() -> None:
            for slot, found in zip(self.slots, self.collect_own(), strict=True):
                if found == MOVABLE:
                    moved[id(slot.parameter)] = id(slot.place), hooks.version(slot.place)

        for slot in self.slots:
            if self._memory.kind(slot.parameter)[1] >= LARGE_NBYTES:
                # The whole bucket, not only this gradient: small gradients that stay where they are (a bias) would
                # remain between freed large ones, and malloc could reuse neither.
                self.hooks += hooks.after_adding(slot.parameter, collect)

    def fill(self, gradients: list[Any], used: frozenset[int]) -> None:
        """Put the gradient of every used parameter in its place, zeros where this rank has none.

        Args:
            gradients: see the class.
            used: ids of the parameters that have a dense gradient on some rank.
        """
        elsewhere, missing = [], []
        for index, (slot, found) in enumerate(zip(self.slots, self.look(gradients), strict=True)):
            if id(slot.parameter) not in used:  # no rank has a gradient, or some rank has a sparse one
                if gradients[index] is slot.place:
                    gradients[index] = self._memory.clone(slot.place)
                missing.append(index)
            elif found == FILLED:
                continue
            elif gradients[index] is not None and gradients[index] is not slot.place:
                elsewhere.append(index)
            else:
                missing.append(index)
                gradients[index] = slot.place
        self.move(gradients, elsewhere)
        self._clear(missing)

    def adopt(self, gradients: list[Any], used: frozenset[int]) -> None:
        """Make places the gradients of used parameters that had none when `collect` made zeros of them."""
        for index, slot in enumerate(self.slots):
            if gradients[index] is None and id(slot.parameter) in used:
                gradients[index] = slot.place

    def holds(self, parameters: frozenset[int]) -> bool:
        """Return whether some of these parameters, by id, have their place here."""
        return any(id(slot.parameter) in parameters for slot in self.slots)

    def apart(self) -> Bucket:
        """Return a bucket for the same gradients in memory of its own."""
        made = Bucket(self._memory, [slot.parameter for slot in self.slots], self._communicator)
        made.reducer = self.reducer
        return made

    def take_back(self, gradients: list[Any], apart: Bucket, before: Sequence[Any]) -> None:
        """Take the gradients out of a bucket that `apart` returned: to their places here if they were there before.

        Args:
            gradients: see the class.
            apart: filled and reduced.
            before: the gradients before ``apart`` was filled.
        """
        for index, slot in enumerate(apart.slots):
            if gradients[index] is slot.place:
                gradients[index] = self._memory.clone(slot.place)
        self.move(gradients, [index for index, slot in enumerate(self.slots) if before[index] is slot.place])

    def move(self, gradients: list[Any], indices: Sequence[int]) -> None:
        """Move some gradients to their places."""
        if indices:
            places = [self.slots[index].place for index in indices]
            self._memory.pack(places, [gradients[index] for index in indices])
            for index, place in zip(indices, places, strict=True):
                gradients[index] = place

    def _clear(self, indices: Sequence[int]) -> None:
        if indices:
            self._memory.pack([self.slots[index].place for index in indices], [None] * len(indices))


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
        memory: the gradients'.
        communicator: makes the memory of buckets.
        options: of the optimizer, checked.

    Attributes:
        layout: a checksum of which parameter is where; equal on ranks whose buckets are.
        moved: as for `Bucket.collect_at_once`.
    """

    def __init__(self, memory: Memory, communicator: Communicator, options: Options) -> None:
        self._memory, self._communicator, self._options = memory, communicator, options
        self._buckets: list[Bucket] = []
        self._placed: set[int] = set()
        self._saved: dict[int, State] = {}
        self.layout = 0
        self.moved: dict[int, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def update(self, parameters: Sequence[Any], dense: Sequence[Any]) -> list[Bucket]:
        """Drop buckets of parameters that are gone or have changed; place those that have no bucket.

        Args:
            parameters: all of the optimizer's, in registration order.
            dense: those that have a dense gradient on some rank.

        Returns:
            The buckets that were dropped or made.
        """
        self.number(parameters)
        changed = [
            bucket
            for bucket in self._buckets
            if OUTGROWN in bucket.look([None] * len(bucket.slots)) or _GONE in bucket.numbers
        ]
        for bucket in changed:
            self._placed.difference_update(id(slot.parameter) for slot in bucket.slots)
            bucket.retire()
            self._buckets.remove(bucket)
        changed += self._place([parameter for parameter in dense if id(parameter) not in self._placed])
        if changed:
            self.number(parameters)
            self.layout = zlib.crc32(repr([bucket.numbers for bucket in self._buckets]).encode())
        return changed

    def number(self, parameters: Sequence[Any]) -> None:
        """Let the buckets know the numbers of their parameters, given all of the optimizer's."""
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        for bucket in self._buckets:
            bucket.numbers = [numbers.get(id(slot.parameter), _GONE) for slot in bucket.slots]

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
        compression = self._options.compression
        if has_reducers(compression) and reduces(compression, bucket.flat.dtype):
            shapes = [self._memory.shape_in_memory(slot.place) for slot in bucket.slots]
            bucket.reducer = compression.reducer(shapes, bucket.places)
            if (saved := self._saved.pop(number, None)) is not None:
                bucket.reducer.load_state_dict(saved)

    def _place(self, parameters: Sequence[Any]) -> list[Bucket]:
        """Make buckets for parameters, last registered first: in the order of the backward pass."""
        unique = list({id(parameter): parameter for parameter in reversed(parameters)}.values())
        items: list[tuple[Hashable, int]] = []
        for parameter in unique:
            kind, nbytes = self._memory.kind(parameter)
            group = self._options.groups.get(id(parameter))
            items.append(((kind, group), _padded(nbytes) if group is None else 0))  # a group's bucket is never full
        made = []
        for members in fuse(items, self._options.bucket_nbytes):
            bucket = Bucket(self._memory, [unique[index] for index in members], self._communicator)
            self._give_reducer(len(self._buckets), bucket)
            self._buckets.append(bucket)
            self._placed.update(id(slot.parameter) for slot in bucket.slots)
            if isinstance(self._memory, Hooks):
                bucket.collect_at_once(self._memory, self.moved)
            made.append(bucket)
        return made


def _padded(nbytes: int) -> int:
    """Return how many bytes of a bucket a gradient of so many bytes takes."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
