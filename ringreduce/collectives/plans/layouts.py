"""Where blocks of a collective on one node are, in the inputs and the result of a rank, given what the others have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ringreduce.algorithms import Collective
from ringreduce.collectives.call import Task
from ringreduce.collectives.rows import agreed_part, part_of, received_rows, rows_for
from ringreduce.common.partition import Partition, Segment


class Layout(NamedTuple):
    """Where blocks are, once each rank knows how much the others give.

    Attributes:
        received: the rows that come from each rank; of a scatter, what `agreed_part` returns.
        own: what this rank copies from its input to its result: slices of both; None: nothing.
        mine: where blocks are in this rank's input, if they are reduced.
        result: where they are in its result.
        peers: by rank, (elements, blocks) of each input that this rank loads from.
    """

    received: list[int]
    own: tuple[slice, slice] | None
    mine: Segment
    result: Segment
    peers: Mapping[int, tuple[int, Segment]]


def is_read(task: Task, rank: int) -> bool:
    """Return whether other ranks load from this rank's input."""
    collective = task.kind.collective
    if collective in (Collective.BROADCAST, Collective.SCATTER):
        return rank == task.kind.root
    return not collective.rooted or rank != task.kind.root


def parts_for_others(task: Task, rank: int, count: int, numbers: tuple[int, ...], size: int) -> list[slice]:
    """Return the parts of this rank's input that other ranks load."""
    collective = task.kind.collective
    if collective is Collective.REDUCE_SCATTER:
        own = Partition.of_sizes(task.kind.counts).segment[rank]
    elif collective is Collective.ALLTOALL:
        own = _sent(task, numbers, size).segment[rank]
    else:
        own = slice(0, 0)
    return [part for part in (slice(0, own.start), slice(own.stop, count)) if part.start < part.stop]


def _lay_out_broadcast(task: Task, rank: int, count: int, _: Sequence[tuple[int, ...]]) -> Layout:
    whole = slice(0, count)
    root = task.kind.root
    peers = {} if rank == root else {root: (count, (whole,))}
    return Layout([], own=(whole, whole) if rank == root else None, mine=(whole,), result=(whole,), peers=peers)


def _lay_out_reduce(task: Task, rank: int, count: int, numbers: Sequence[tuple[int, ...]]) -> Layout:
    whole = slice(0, count)
    root = task.kind.root
    if rank != root:
        return Layout([], own=None, mine=(whole,), result=(slice(0, 0),), peers={})
    peers = {peer: (count, (whole,)) for peer in range(len(numbers)) if peer != root}
    return Layout([], own=None, mine=(whole,), result=(whole,), peers=peers)


def _lay_out_reduce_scatter(task: Task, rank: int, count: int, _: Sequence[tuple[int, ...]]) -> Layout:
    blocks = Partition.of_sizes(task.kind.counts).segment
    result = tuple(slice(0, count if block == rank else 0) for block, count in enumerate(task.kind.counts))
    peers = {peer: (count, blocks) for peer in range(len(task.kind.counts)) if peer != rank}
    return Layout([], own=None, mine=blocks, result=result, peers=peers)


def _lay_out_allgather(task: Task, rank: int, _: int, numbers: Sequence[tuple[int, ...]]) -> Layout:
    rows = received_rows(task.signature.text, numbers, rank)
    counts = [count * task.kind.row for count in rows]
    result = Partition.of_sizes(counts).segment
    # A peer publishes its own block alone.
    peers = {peer: (count, (slice(0, count),) * len(counts)) for peer, count in enumerate(counts) if peer != rank}
    return Layout(rows, own=(slice(0, counts[rank]), result[rank]), mine=result, result=result, peers=peers)


def _lay_out_gather(task: Task, rank: int, count: int, numbers: Sequence[tuple[int, ...]]) -> Layout:
    if rank == task.kind.root:
        return _lay_out_allgather(task, rank, count, numbers=numbers)
    nothing = (slice(0, 0),) * len(numbers)
    return Layout(
        received_rows(task.signature.text, numbers, task.kind.root), own=None, mine=nothing, result=nothing, peers={}
    )


def _lay_out_scatter(task: Task, rank: int, _: int, numbers: Sequence[tuple[int, ...]]) -> Layout:
    """Return where parts are, in bytes."""
    part = agreed_part(task.signature.text, numbers, task.kind.root)
    shape, dtype = part_of(part)
    nbytes = prod(shape) * dtype.itemsize
    blocks = Partition.of_sizes([nbytes] * len(numbers)).segment
    result = tuple(slice(0, nbytes if block == rank else 0) for block in range(len(numbers)))
    if rank == task.kind.root:
        return Layout(part, own=(blocks[rank], slice(0, nbytes)), mine=blocks, result=result, peers={})
    return Layout(part, own=None, mine=result, result=result, peers={task.kind.root: (nbytes * len(numbers), blocks)})


def _sent(task: Task, numbers: tuple[int, ...], size: int) -> Partition:
    """Return what a rank with these numbers sends to each rank of an alltoall."""
    return Partition.of_sizes([rows_for(numbers, to) * task.kind.row for to in range(size)])


def _lay_out_alltoall(task: Task, rank: int, _: int, numbers: Sequence[tuple[int, ...]]) -> Layout:
    rows = received_rows(task.signature.text, numbers, rank)
    ranks = range(len(numbers))
    sending = [_sent(task, counts, len(numbers)) for counts in numbers]
    receiving = Partition.of_sizes([count * task.kind.row for count in rows]).segment
    nothing = (slice(0, 0),) * len(numbers)
    peers = {peer: (sending[peer].bounds[-1], sending[peer].segment + nothing) for peer in ranks if peer != rank}
    own = sending[rank].segment[rank], receiving[rank]
    return Layout(rows, own=own, mine=nothing + receiving, result=nothing + receiving, peers=peers)


#: What returns a layout, by collective: of a task, for a rank with so many elements, given the numbers of all.
LAYOUTS: dict[Collective, Callable[[Task, int, int, Sequence[tuple[int, ...]]], Layout]] = {
    Collective.BROADCAST: _lay_out_broadcast,
    Collective.REDUCE: _lay_out_reduce,
    Collective.REDUCE_SCATTER: _lay_out_reduce_scatter,
    Collective.ALLGATHER: _lay_out_allgather,
    Collective.GATHER: _lay_out_gather,
    Collective.SCATTER: _lay_out_scatter,
    Collective.ALLTOALL: _lay_out_alltoall,
}
