"""Buckets: communication memory in which gradients travel together, each at its place.

The framework and the program decide what a gradient is: None, or the array that the backward pass or the program made.
A bucket decides only where its values are. Before a bucket is reduced it collects its gradients: it copies each to its
place, and from then on the place is the gradient, until somebody replaces it.

A program may keep an array that was a gradient in an earlier step, for example to compare the gradients of several
tasks. While it does, the bucket writes nothing to that place, and is reduced in other memory.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from ringreduce.buffers.codecs import CODECS
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.common.reduce_ops import AVERAGE, ReduceOp
from ringreduce.engine import About, CollectiveOp, Context, InPlaceAllreduce, Needed, Operation, Travel
from ringreduce.engine.coordinator import fuse
from ringreduce.training.binding.framework import Found, Hooks, Look, Memory, Named, Removable, Slot, Sparse, remove_all
from ringreduce.training.compression import Reducer, State, WireState, has_reducers, reduces
from ringreduce.training.gradients.record import OptimizerRanks
from ringreduce.training.gradients.weights import Weights
from ringreduce.training.options.options import Options

#: Gradients of at least so many bytes are collected as soon as the backward pass has made them. From this size on,
#: glibc's malloc hands freed memory back to the kernel, so that gradients which live until they are cleared cost a page
#: fault per 4 KiB.
LARGE_NBYTES = 128 << 10

#: Gradients begin on cache lines.
ALIGNMENT_NBYTES = 64

#: Returns a function that reduces this rank's parts of buckets, and in words what these are, which must agree; None
#: where the rank needs all. Arguments: the op, the buckets, what travels of each.
MakesParts = Callable[
    [ReduceOp, Sequence["Bucket"], Sequence[Any]], tuple[Callable[[Communicator], object], str] | None
]

_GONE = -1  # the number of a parameter that the optimizer has no more


class Bucket:
    """Some gradients in one piece of communication memory.

    Its methods take the gradients of all parameters as a list, and change the list where a gradient becomes another
    array: mostly the place.

    Args:
        memory: the gradients'.
        parameters: whose gradients; all of one kind.
        communicator: makes the memory.

    Attributes:
        flat: all of it, one-dimensional.
        itemsize: bytes of an element.
        slots: the parameters, in order, and their places.
        places: where these are in ``flat``.
        numbers: of its parameters, among all of the optimizer's.
        reducer: compresses the bucket, and keeps state from step to step; None: the bucket travels as it is.
        hooks: end with the bucket.
    """

    def __init__(self, memory: Memory, parameters: Sequence[Any], communicator: Communicator) -> None:
        self._memory = memory
        self._communicator = communicator
        lengths = [memory.kind(each)[1] for each in parameters]
        starts = list(accumulate(map(padded, lengths), initial=0))
        self.flat, self.slots = memory.lay_out(communicator, parameters, starts)
        self.itemsize = itemsize = starts[-1] // max(len(self.flat), 1) or 1
        self.places = [slice(start // itemsize, end // itemsize) for start, end in pairwise(starts)]
        ends = [start + length for start, length in zip(starts, lengths, strict=False)]
        self._padding = [
            slice(end // itemsize, next_start // itemsize)
            for end, next_start in zip(ends, starts[1:], strict=True)
            if end < next_start
        ]
        self.numbers = list(range(len(self.slots)))
        self.reducer: Reducer | None = None
        self.hooks: list[Removable] = []

    def compress(self, compression: Any, saved: dict[int, State], number: int) -> None:
        """Get a new reducer, if the compression has one for it; it takes what was saved for the bucket's number."""
        if has_reducers(compression) and reduces(compression, self.flat.dtype):
            shapes = [self._memory.shape_in_memory(slot.place) for slot in self.slots]
            self.reducer = compression.reducer(shapes, self.places)
            if number in saved:
                self.reducer.load_state_dict(saved.pop(number))

    @property
    def is_compressed(self) -> bool:
        """Whether it is reduced by its reducer, on its own."""
        return self.reducer is not None and not isinstance(self.reducer, WireState)

    @property
    def wire(self) -> str | None:
        """The format in which it travels; None: as it is."""
        return self.reducer.wire if isinstance(self.reducer, WireState) else None

    @property
    def travels(self) -> tuple[str | None, bool]:
        """What is equal for buckets that travel together: the format, and whether they are in host memory."""
        return self.wire, self._memory.streams.is_on_host(self.flat)

    def number(self, numbers: Mapping[int, int]) -> None:
        """Take the numbers of its parameters from all, by ``id``."""
        self.numbers = [numbers.get(id(slot.parameter), _GONE) for slot in self.slots]

    def retire(self) -> None:
        """Remove the hooks; the bucket is of no use any more."""
        remove_all(self.hooks)

    def look(self, gradients: Sequence[Any]) -> list[int]:
        """Return how each gradient and its place are; see `Look.IN_PLACE`."""
        return [slot.look(gradients[number]) for number, slot in zip(self.numbers, self.slots, strict=True)]

    def collect(self) -> bool:
        """Move what the parameters have as ``grad`` to its places, where it can be; return whether all could be moved.

        If so, places of parameters without a gradient become zeros.
        """
        looks = self._collect(self.slots)
        if max(looks, default=0) > Look.EMPTY:
            return False
        self.clear_padding()
        self._clear([slot for slot, found in zip(self.slots, looks, strict=True) if found == Look.EMPTY])
        return True

    def _collect(self, slots: Sequence[Slot]) -> list[int]:
        looks = [slot.look(slot.parameter.grad) for slot in slots]
        moving = [slot for slot, found in zip(slots, looks, strict=True) if found == Look.MOVABLE]
        if moving:
            self._memory.pack([slot.place for slot in moving], [slot.parameter.grad for slot in moving])
            for slot in moving:
                slot.parameter.grad = slot.place
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

        def collect(slots: Sequence[Slot]) -> None:
            for slot, found in zip(slots, self._collect(slots), strict=True):
                if found == Look.MOVABLE:
                    moved[id(slot.parameter)] = id(slot.place), hooks.version(slot.place)

        least = LARGE_NBYTES // self.itemsize
        large = [number for number, place in enumerate(self.places) if place.stop - place.start >= least]
        for before, number, after in zip([-1, *large], large, [*large[1:], len(self.slots)], strict=False):
            # With the small gradients beside it: were these to stay where they are (a bias), they would remain between
            # freed large ones, and malloc could reuse neither.
            beside = self.slots[before + 1 : after]
            self.hooks += hooks.after_adding(self.slots[number].parameter, partial(collect, beside))

    def fill(self, gradients: list[Any], found: bytes) -> None:
        """Put the gradient of every used parameter in its place, zeros where this rank has none.

        Args:
            gradients: see the class.
            found: of each, what the ranks have: `Found.DENSE` if some rank has a dense gradient, and none a sparse one.
        """
        elsewhere = []
        missing = []
        for number, slot in zip(self.numbers, self.slots, strict=True):
            given = gradients[number]
            if found[number] != Found.DENSE:  # no rank has a gradient, or some rank has a sparse one
                if given is slot.place:
                    gradients[number] = self._memory.clone(slot.place)
                missing.append(slot)
            elif given is None:
                missing.append(slot)
                gradients[number] = slot.place
            elif given is not slot.place:
                elsewhere.append((number, slot))
        self._move(gradients, elsewhere)
        self._clear(missing)

    def clear_padding(self) -> None:
        """Make what is between the gradients zero again, if the bucket travels in blocks that share a scale.

        A NaN or an infinity in a block is a NaN in all of it once it is reduced. Gradients are replaced in the next
        step, and the padding beside them would spread the NaN to them, in that step and all later ones.
        """
        if self.wire is not None and CODECS[self.wire].block > 1 and self._padding:
            padding = [self.flat[part] for part in self._padding]
            self._memory.pack(padding, [None] * len(padding))

    def apart(self) -> Bucket:
        """Return a bucket for the same gradients in memory of its own."""
        made = Bucket(self._memory, [slot.parameter for slot in self.slots], self._communicator)
        made.follow(self)
        return made

    def follow(self, bucket: Bucket) -> None:
        """Take over numbers and reducer of a bucket for the same gradients."""
        self.numbers = bucket.numbers
        self.reducer = bucket.reducer

    def take_back(self, gradients: list[Any], apart: Bucket, before: Mapping[int, Any]) -> None:
        """Take the gradients out of a bucket that `apart` returned: to their places here if they were there before.

        Args:
            gradients: see the class.
            apart: filled and reduced.
            before: its gradients, by number, before ``apart`` was filled.
        """
        for number, slot in zip(self.numbers, apart.slots, strict=True):
            if gradients[number] is slot.place:
                gradients[number] = self._memory.clone(slot.place)
        here = zip(self.numbers, self.slots, strict=True)
        self._move(gradients, [(number, slot) for number, slot in here if before[number] is slot.place])

    def _move(self, gradients: list[Any], moving: Sequence[tuple[int, Slot]]) -> None:
        """Move some gradients, of which the numbers are given, to their places."""
        if moving:
            self._memory.pack([slot.place for _, slot in moving], [gradients[number] for number, _ in moving])
            for number, slot in moving:
                gradients[number] = slot.place

    def _clear(self, slots: Sequence[Slot]) -> None:
        if slots:
            self._memory.pack([slot.place for slot in slots], [None] * len(slots))


class PlacedBuckets:
    """The buckets of one optimizer: which there are, and what is where.

    A parameter gets its place in the first reduction in which some rank has a gradient for it. All ranks learn of that
    in the same reduction and so make the same buckets, whether a parameter was there from the start, was added or
    thawed later, or is never used and takes no memory.

    Args:
        memory: the gradients'.
        ranks: carry operations out.
        options: settled; the same on all ranks.

    Attributes:
        memory, ranks, options: the arguments.
        layout: a checksum of which parameter is where; equal on ranks whose buckets are.
        moved: as for `Bucket.collect_at_once`.
    """

    def __init__(self, memory: Memory, ranks: OptimizerRanks, options: Options) -> None:
        self.memory = memory
        self.ranks = ranks
        self.options = options
        self._buckets: list[Bucket] = []
        self._placed: set[int] = set()
        self._saved: dict[int, State] = {}
        self.layout = 0
        self.moved: dict[int, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def update(self, parameters: Sequence[Any], found: bytes) -> list[Bucket]:
        """Drop buckets of parameters that were removed or have changed; place those that have no bucket.

        Args:
            parameters: all of the optimizer's, in registration order; as for `number`, which was called before.
            found: as for `Bucket.fill`.

        Returns:
            The buckets that were dropped or made.
        """
        changed = [
            bucket
            for bucket in self._buckets
            if _GONE in bucket.numbers or any(slot.look(None) == Look.STALE for slot in bucket.slots)
        ]
        for bucket in changed:
            self._placed -= {id(slot.parameter) for slot in bucket.slots}
            bucket.retire()
            self._buckets.remove(bucket)
        states = zip(parameters, found, strict=True)
        changed += self._place([each for each, it in states if it == Found.DENSE and id(each) not in self._placed])
        if changed:
            self.number(parameters)
            self.layout = zlib.crc32(repr([bucket.numbers for bucket in self._buckets]).encode())
        return changed

    def number(self, parameters: Sequence[Any]) -> None:
        """Let the buckets know the numbers of their parameters, given all of the optimizer's."""
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        for bucket in self._buckets:
            bucket.number(numbers)

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

        A bucket for which it holds nothing is reset.

        Raises:
            ConfigError: it was saved for other buckets.
        """
        self._saved = dict(state)
        for number, bucket in enumerate(self._buckets):
            bucket.compress(self.options.compression, self._saved, number)

    def _place(self, parameters: Sequence[Any]) -> list[Bucket]:
        """Make buckets for parameters, last registered first: in the order of the backward pass."""
        unique = list({id(parameter): parameter for parameter in reversed(parameters)}.values())
        items: list[tuple[Hashable, int]] = []
        for parameter in unique:
            kind, nbytes = self.memory.kind(parameter)
            group = self.options.groups.get(id(parameter))
            items.append(((kind, group), padded(nbytes) if group is None else 0))  # a group's bucket is never full
        made = []
        for members in fuse(items, self.options.bucket_nbytes):
            bucket = Bucket(self.memory, [unique[index] for index in members], self.ranks.engine.communicator)
            bucket.compress(self.options.compression, self._saved, len(self._buckets))
            self._buckets.append(bucket)
            self._placed |= {id(slot.parameter) for slot in bucket.slots}
            if isinstance(self.memory, Hooks) and not self.options.is_late:
                bucket.collect_at_once(self.memory, self.moved)
            made.append(bucket)
        return made


class Buckets(PlacedBuckets):
    """Reduces those buckets of one optimizer that the ranks have agreed to reduce. Methods are collective.

    Args:
        memory, ranks, options: as for `PlacedBuckets`.
        named: returns names and parameters.

    Attributes:
        weights: of averages, by `weigh`; None: they are equal.
    """

    def __init__(self, memory: Memory, ranks: OptimizerRanks, named: Callable[[], Named], options: Options) -> None:
        super().__init__(memory, ranks, options)
        self._named = named
        self.weights: Weights | None = None

    def weigh(self, samples: Mapping[int, int], active: int) -> None:
        """Weight averages from now on by numbers of samples.

        Args:
            samples: how many, by rank, of all that have not joined; empty: ranks weigh equally.
            active: how many ranks contribute.
        """
        self.weights = None
        if samples:
            self.weights = Weights.of(samples, self.ranks.rank, size=self.ranks.size, divisor=self.divisor(active))

    def reduce(
        self,
        reduced: Sequence[Bucket],
        gradients: list[Any],
        found: bytes,
        active: int,
        parts: MakesParts | None = None,
    ) -> None:
        """Fill the buckets of used parameters and reduce them: together, but one by one those that have a `Reducer`.

        Args:
            reduced: buckets that are reduced already.
            gradients: of all parameters; changed where another array takes the place of one.
            found: as for `Bucket.fill`.
            active: how many ranks contribute.
            parts: makes operations of which this rank needs its part alone; None: it needs all.
        """
        together: defaultdict[tuple[str | None, bool], list[Bucket]] = defaultdict(list)
        taken_back = []
        for bucket in self._buckets:
            if bucket in reduced or Found.DENSE not in [found[number] for number in bucket.numbers]:
                continue
            target = bucket
            if Look.ALIASED in bucket.look(gradients):
                target = bucket.apart()
                taken_back.append((bucket, target, {number: gradients[number] for number in bucket.numbers}))
            target.fill(gradients, found)
            if isinstance(target.reducer, WireState) or target.reducer is None:
                together[target.travels].append(target)
            else:
                self._compress(target.reducer, target.flat, active)
        for buckets in together.values():
            self._together(buckets, parts)
        for bucket, target, before in taken_back:
            bucket.take_back(gradients, target, before)

    def sparse(self, parameter: Any, gradient: Any, sparse_dims: int, active: int) -> Any:
        """Sum or average a gradient that is sparse on some rank: gather what the ranks have, make nothing dense."""
        memory = self.memory
        if not isinstance(memory, Sparse):
            raise UnsupportedBufferError("sparse gradients are not supported on this rank")
        places, values = memory.rows(parameter, gradient, sparse_dims)
        rows = places, values if self.weights is None else values * self.weights.factor
        text = f"a sparse gradient of {self.ranks.name}"
        places, values = self.ranks.gather("sparse", text, rows, memory.streams.around(rows))
        return memory.of_rows(parameter, places, values, self.divisor(active))

    def operation(
        self, name: str, text: str, buckets: Sequence[Bucket], sent: Sequence[Any], title: str = ""
    ) -> InPlaceAllreduce:
        """Return the reduction of buckets.

        Args:
            name: as for `InPlaceAllreduce`.
            text: likewise.
            buckets: they travel in one format.
            sent: what travels of each.
            title: as for `About`; empty: that of the step.
        """
        for bucket in buckets:
            bucket.clear_padding()
        within = self.within(buckets, sent)
        return self._operation(name, text, buckets, sent, within=within, needed=Needed.PRESENT, title=title)

    def early(self, name: str, bucket: Bucket, within: Context) -> InPlaceAllreduce:
        """Return the reduction of a bucket before the step, which other ranks may leave out.

        Args:
            name: as for `InPlaceAllreduce`.
            bucket: has been collected, on a stream of its own perhaps.
            within: as for `InPlaceAllreduce`.
        """
        text = f"a bucket of {self.ranks.name}"
        title = f"a bucket of {self.ranks.described}"
        return self._operation(name, text, [bucket], [bucket.flat], within=within, needed=Needed.SOME, title=title)

    def _operation(
        self, name: str, text: str, buckets: Sequence[Bucket], sent: Sequence[Any], *, title: str, **how: Any
    ) -> InPlaceAllreduce:
        feedbacks = [each.reducer.feedback for each in buckets if isinstance(each.reducer, WireState)]
        weights = self._weights_to_apply
        if weights is not None and weights.everyone:
            how["needed"] = Needed.EVERYONE
        in_collective = weights.of_ranks if weights is not None and self._weighs_inside(buckets) else ()
        travel = Travel(buckets[0].wire, feedbacks, in_collective)
        about = self._about(buckets, title)
        return InPlaceAllreduce(name, text, self.options.op, sent, travel=travel, about=about, **how)

    def reduction(
        self, name: str, text: str, buckets: Sequence[Bucket], sent: Sequence[Any], parts: MakesParts | None
    ) -> Operation:
        """Return the reduction of buckets before a step, or that of this rank's parts where it needs no more."""
        part = None if parts is None else parts(self.options.op, buckets, sent)
        if part is None:
            return self.operation(name, text, buckets=buckets, sent=sent)
        reduce, in_words = part

        def run(ranks: Communicator) -> None:
            with nullcontext() if self._weights_to_apply is None else self._weighted(sent, None):
                reduce(ranks)

        return CollectiveOp(name, f"{text}, {in_words}", run, about=self._about(buckets))

    def within(self, buckets: Sequence[Bucket], sent: Sequence[Any]) -> Context:
        """Return what makes the context in which to reduce buckets, as for `InPlaceAllreduce`.

        What travels is multiplied by this rank's weight there, unless the collective does that.
        """
        around = self.memory.streams.around(sent)
        if self.weights is None or self._weights_to_apply is None or self._weighs_inside(buckets):
            return around
        return partial(self._weighted, sent, around)

    @property
    def _weights_to_apply(self) -> Weights | None:
        """The weights that an operation applies; None: none, or what is compressed was multiplied before."""
        return self.weights if self.options.compressor is None else None

    def _weighs_inside(self, buckets: Sequence[Bucket]) -> bool:
        """Return whether the rank that adds up an element has all terms of it at hand, and multiplies them."""
        everyone = self.weights is not None and self.weights.everyone
        single_node = self.ranks.engine.communicator.topology.single_node
        return everyone and single_node and buckets[0].travels == (None, True)

    @contextmanager
    def _weighted(self, sent: Sequence[Any], around: Context) -> Iterator[None]:
        assert self.weights is not None
        with nullcontext() if around is None else around():
            self._scale(sent, self.weights.factor)
            yield

    def _about(self, buckets: Sequence[Bucket], title: str = "") -> About:
        return About(title or self.ranks.about.title, partial(self._names_in, buckets))

    def _names_in(self, buckets: Sequence[Bucket]) -> list[str]:
        """Return the names of the parameters whose gradients are in some buckets."""
        names = {id(parameter): name for name, parameter in self._named()}
        return [names.get(id(slot.parameter), "a parameter that is gone") for each in buckets for slot in each.slots]

    def _together(self, buckets: Sequence[Bucket], parts: MakesParts | None) -> None:
        factor = self.options.predivide_factor
        compressor = self.options.compressor
        flats = [bucket.flat for bucket in buckets]
        weight = 1.0 if self.weights is None or compressor is None else self.weights.factor
        self._scale(flats, weight / factor)
        compressed = [(flat, None) if compressor is None else compressor.compress(flat) for flat in flats]
        wire = buckets[0].wire
        name = self.ranks.name
        sent = [each for each, _ in compressed]
        title = f"{name}, buckets" + (f" in {wire}" if wire else "")
        self.ranks.run(
            self.reduction(title, f"{len(flats)} buckets of {name}", buckets=buckets, sent=sent, parts=parts)
        )
        for flat, (each, context) in zip(flats, compressed, strict=True):
            if each is not flat:
                self.memory.pack([flat], [compressor.decompress(each, context)])
        self._scale(flats, factor)

    def _compress(self, reducer: Reducer, flat: Any, active: int) -> None:
        factor = self.options.predivide_factor
        divisor = self.divisor(active)
        plain = factor == 1.0 and divisor == self.ranks.size  # then the reducer itself averages
        self._scale([flat], (1.0 if self.weights is None else self.weights.factor) / factor)
        with self.memory.streams.on_host(flat) as values:
            reducer.reduce(self.ranks, values, average=plain)
        self._scale([flat], 1.0 if plain else factor / divisor)

    def _scale(self, flats: Sequence[Any], factor: float) -> None:
        if factor != 1.0:
            for flat in flats:
                self.memory.scale(flat, factor)

    def divisor(self, active: int) -> int:
        """Return by which number the sum over the active ranks is divided; dense gradients, by their collective."""
        if self.options.op is not AVERAGE:
            return 1
        return self.ranks.engine.communicator.config.conventions.averaged_over(active, self.ranks.size)


def padded(nbytes: int) -> int:
    """Return how many bytes of a bucket a gradient of so many bytes takes."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
