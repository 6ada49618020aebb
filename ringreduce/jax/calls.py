"""Calls: collectives on lists of arrays, as values that compiled programs hold, carried out on the host's memory.

With lossy compression of gradients, what is lost is the program's, as arrays that go in and come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringreduce.buffers.codecs import CODECS
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, SUM, ReduceOp
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.compression import BucketCompression, State, WireFormat, WireState, has_reducers, signature_of
from ringreduce.training.requests import Request, RequestBuilder, in_words

Host = npt.NDArray[Any]


class Call(NamedTuple):
    """A collective on a list of arrays, as values that a compiled program can hold.

    Attributes:
        kind: of collective.
        name: of the operation; None: it has none.
        ranks: of the process set; None: all.
        op: how to reduce.
        prescale: multiplies what goes in.
        postscale: multiplies what comes out.
        root: the rank of the set that sends; -1: none does.
        wire: the format in which floats travel between nodes.
        compression: the key of a `Compressed`, which reduces the arrays.
    """

    kind: str
    name: str | None
    ranks: tuple[int, ...] | None
    op: str = SUM.value
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    wire: str | None = None
    compression: str | None = None


#: The process sets that calls have named, by their ranks.
SETS: dict[tuple[int, ...] | None, ProcessSet] = {None: global_process_set}


def ranks_of(process_set: ProcessSet) -> tuple[int, ...] | None:
    """Return how a `Call` names a process set."""
    ranks = None if process_set is global_process_set else tuple(process_set.ranks or ())
    SETS[ranks] = process_set
    return ranks


def request_of(call: Call, sources: Sequence[Host], targets: Sequence[Host] | None = None) -> Request:
    """Return a collective of arrays of the host, whose results are new arrays, or ``targets``."""
    with RequestBuilder(call.kind, call.name, SETS[call.ranks]) as prepare:
        if targets is None and call.kind in ALIKE:
            targets = prepare.new_like(sources)
        if call.kind == "allreduce":
            assert targets is not None
            return prepare.allreduce(sources, targets, call.op, call.prescale, call.postscale, wire=call.wire)
        if call.kind == "reducescatter":
            store = partial(_store, targets)
            return prepare.reducescatter(sources, ReduceOp(call.op), call.prescale, call.postscale, store)
        outs: Sequence[Any] = [None] * len(sources) if targets is None else targets
        run: Callable[[Communicator], Any]
        if call.compression is not None:
            text, average = call.compression, call.op == AVERAGE.value
            run = partial(_known[text].reduce, sources, outs, average)
        else:
            text = in_words(*(targets or sources), any_rows=call.kind == "allgather" and targets is None)
            run = partial(_one_by_one, _BLOCKING[call.kind], call, sources, outs)
        return prepare.call(f"{call.kind}({call.op}, root {call.root}, {text})", run, sources, targets or ())


def _one_by_one(
    run: _Blocking, call: Call, sources: Sequence[Host], outs: Sequence[Host | None], ranks: Communicator
) -> list[Host]:
    return [run(ranks, call, source, out) for source, out in zip(sources, outs, strict=True)]


def _reduce_to_root(ranks: Communicator, call: Call, source: Host, out: Host | None) -> Host:
    total: Host = ranks.allreduce(source, call.op, out=out)
    if ranks.rank != call.root:
        total.fill(0)
    return total


def _store(targets: Sequence[Host] | None, made: Sequence[Host]) -> Sequence[Host]:
    for target, each in zip(targets or (), made, strict=targets is not None):
        np.copyto(target, each)
    return made


_Blocking = Callable[[Communicator, Call, Host, "Host | None"], Host]

#: How collectives that are no reductions are made of one array, by kind.
_BLOCKING: dict[str, _Blocking] = {
    "allgather": lambda ranks, call, source, out: ranks.allgather(source, out=out),
    "alltoall": lambda ranks, call, source, out: ranks.alltoall(source, out=out),
    "broadcast": lambda ranks, call, source, out: ranks.broadcast(source, call.root, out=out),
    "gradient of broadcast": _reduce_to_root,
}

#: Kinds whose results have the shapes of what goes in, for any number of dimensions.
ALIKE = ("allreduce", "broadcast", "compressed allreduce", "gradient of broadcast")


def checked_compression(compression: Any) -> BucketCompression:
    """Return a compression as a user gives it: an object, a class, or the name of a wire format."""
    if isinstance(compression, str):
        if compression not in CODECS:
            raise ConfigError(f"unknown wire format {compression!r}; choose one of {', '.join(CODECS)}")
        compression = type(compression, (WireFormat,), {"wire": compression})
    if not has_reducers(compression):
        raise ConfigError(
            f"compression is one of {', '.join(CODECS)}, or a compression of buckets as PowerSGD; got {compression!r}"
        )
    made: BucketCompression = compression() if isinstance(compression, type) else compression
    return made


class Compressed:
    """Reduces lists of float32 arrays by a compression, as one bucket.

    Args:
        compression: of buckets.
        shapes: of the arrays; the same on all ranks.
        names: of what was lost.

    Attributes:
        key: of it in a `Call`: text that is the same on all ranks, and in all processes.
        count: the number of arrays; what was lost comes behind these.
    """

    def __init__(
        self, compression: BucketCompression, shapes: Sequence[tuple[int, ...]], names: Sequence[str] = ()
    ) -> None:
        self.count, self._names = len(shapes), names
        words = [*("x".join(map(str, shape)) or "scalar" for shape in shapes), *names]
        self.key = f"{signature_of(compression)} of {', '.join(words)}"
        bounds = list(accumulate(map(prod, shapes), initial=0))
        self._count, self._places = bounds[-1], [slice(*each) for each in pairwise(bounds)]
        self._reducer = compression.reducer(list(shapes), self._places)
        _known.setdefault(self.key, self)

    def begin(self, communicator: Communicator) -> State:
        """Return what is lost before the first call, by name: on each rank its own. Collective."""
        if isinstance(self._reducer, WireState):  # what a rank loses depends on how arrays travel between nodes
            self._reduce(communicator, communicator.empty(self._count), average=False)
        return self._reducer.state_dict()

    def reduce(
        self, sources: Sequence[Host], targets: Sequence[Host], average: bool, communicator: Communicator
    ) -> Sequence[Host]:
        """Return ``targets``: reduced arrays, and what is lost now. Collective.

        Args:
            sources: the arrays, and what was lost before, in the order of its names.
            targets: of the same shapes.
            average: whether sums are divided by the number of ranks.
            communicator: of the ranks.
        """
        flat = communicator.empty(self._count)
        for place, source in zip(self._places, sources, strict=False):
            flat[place] = source.ravel()
        self._reducer.load_state_dict(dict(zip(self._names, sources[self.count :], strict=True)))
        self._reduce(communicator, flat, average)
        for place, target in zip(self._places, targets, strict=False):
            target[...] = flat[place].reshape(target.shape)
        kept = self._reducer.state_dict()
        for name, target in zip(self._names, targets[self.count :], strict=True):
            # After a change of ranks it may have another length: then nothing is kept.
            target[...] = kept[name] if kept[name].shape == target.shape else 0
        return targets

    def _reduce(self, communicator: Communicator, flat: Host, average: bool) -> None:
        if isinstance(self._reducer, WireState):
            op, wire, feedback = AVERAGE if average else SUM, self._reducer.wire, self._reducer.feedback
            communicator.allreduce(flat, op, out=flat, compression=wire, feedback=feedback)
        else:
            self._reducer.reduce(communicator, flat, average)


#: Those of programs that were traced in this process, by key.
_known: dict[str, Compressed] = {}
