"""Collectives of a group on arrays whose shapes the caller has fixed on both sides, and on lists of arrays.

They are made of those of a `Communicator`, whose arguments and errors they share. Arrays are in host memory; results go
into arrays of the caller, of any strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce.buffers import Operand, like, operand_of, require_host
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.arguments import CheckingArguments
from ringreduce.common.errors import ConfigError, MismatchError, UnsupportedBufferError
from ringreduce.common.reduce_ops import ReduceOp

# ---- reductions ----


def allreduce(comm: Communicator, out: Any, array: Any, op: ReduceOp | str) -> None:
    """Reduce arrays.

    Args:
        out: may be ``array``.
        array: the number of elements and the dtype must agree.
        op: must agree.
    """
    comm.allreduce(array, op, out=out)


def reduce(comm: Communicator, out: Any, array: Any, op: ReduceOp | str, root: int) -> None:
    """Reduce arrays into ``out`` of the root; those of the others stay as they are. ``root`` must agree."""
    comm.reduce(array, root, op, out=out)


def reduce_scatter(comm: Communicator, out: Any, array: Any, op: ReduceOp | str) -> None:
    """Reduce arrays and give each rank its part.

    Args:
        out: this rank's part; of the same number of elements on all ranks.
        array: as many times that as there are ranks, in any shape; or an array for each rank, whose shapes may differ.
        op: as for `allreduce`.
    """
    with CheckingArguments(comm, "reduce_scatter"):
        target = _host(out)
        room = _room(out, target)
        if isinstance(array, (list, tuple)):
            flat, counts = _parts_of(comm, out, target, arrays=array)
        else:
            source = _host(array)
            _require_usable([target], [source])
            if source.count != comm.size * target.count:
                raise ConfigError(
                    f"reduce_scatter takes {comm.size} times the elements of the output, got an input of shape "
                    f"{source.shape} and an output of shape {target.shape}"
                )
            flat = _flat(array, source)
            counts = [target.count] * comm.size
    comm.reduce_scatter(flat, op, None if len(set(counts)) == 1 else counts, out=room)
    _fetch(target, room)


def _parts_of(comm: Communicator, out: Any, target: Operand, arrays: Sequence[Any]) -> tuple[Any, list[int]]:
    """Return the arrays for the ranks, one after the other, and the elements of each."""
    operands = _one_per_rank(comm, "reduce_scatter", arrays)
    _require_usable([target], operands)
    counts = [operand.count for operand in operands]
    if target.count != counts[comm.rank]:
        raise ConfigError(
            f"reduce_scatter: the output has {target.count} elements, and this rank's part of the input "
            f"{counts[comm.rank]}"
        )
    return _joined(out, arrays, operands), counts


# ---- moving ----


def broadcast(comm: Communicator, out: Any, array: Any, root: int) -> None:
    """Give every rank the root's array; the number of elements, dtype and ``root`` must agree."""
    comm.broadcast(array, root, out=out)


def allgather(comm: Communicator, out: Any, array: Any) -> None:
    """Give every rank all arrays, one after the other.

    Args:
        out: as many times the elements of ``array`` as there are ranks, in any shape; or an array for each rank, whose
            shapes may differ.
        array: may be this rank's part of ``out``; the number of elements, if ``out`` is one array, and the dtype must
            agree.
    """
    if isinstance(out, (list, tuple)):
        _allgather_list(comm, out, array)
        return
    with CheckingArguments(comm, "allgather"):
        target = _host(out)
        source = _host(array)
        _require_usable([target], [source])
        if target.count != comm.size * source.count:
            raise ConfigError(
                f"allgather takes an output of {comm.size} times the elements of the input, got an input of shape "
                f"{source.shape} and an output of shape {target.shape}"
            )
        room = _room(out, target)
        flat = _flat(array, source)
    comm.allgather(flat, out=room)  # The allgather finds out whether all have given as much.
    _fetch(target, room)


def _allgather_list(comm: Communicator, outs: Sequence[Any], array: Any) -> None:
    with CheckingArguments(comm, "allgather"):
        operands = _one_per_rank(comm, "allgather", outs)
        source = _host(array)
        _require_usable(operands, [source])
        counts = [operand.count for operand in operands]
        if counts[comm.rank] != source.count:
            raise ConfigError(
                f"allgather: this rank's input has {source.count} elements, and output {comm.rank} has "
                f"{counts[comm.rank]}"
            )
        room = like(array, (sum(counts),))
        text = f"allgather({counts}, {source.dtype.name})"
        flat = array.reshape(source.count)
    if len(set(counts)) > 1:  # With equal counts the allgather finds out whether all have given as much.
        comm.rendezvous(text)
    comm.allgather(flat, out=room)
    _store_parts(operands, room)


def gather(comm: Communicator, outs: Sequence[Any] | None, array: Any, root: int) -> None:
    """Give the root all arrays.

    Args:
        outs: at the root an array for each rank; None elsewhere.
        array: the number of elements and the dtype must agree.
        root: must agree.
    """
    with CheckingArguments(comm, "gather"):
        source = _host(array)
        room = None
        targets = list[Operand]()
        if comm.rank == root:
            targets = _one_per_rank(comm, "gather", outs)
            _require_usable(targets, [source])
            _require_equal_counts("gather", "output", targets, one="input", operand=source)
            room = like(array, (comm.size, source.count))
        row = array.reshape(1, source.count)
    comm.gather(row, root, out=room)
    if room is not None:
        _store_parts(targets, room.reshape(comm.size * source.count))


def scatter(comm: Communicator, out: Any, arrays: Sequence[Any] | None, root: int) -> None:
    """Give each rank one of the root's arrays.

    Args:
        out: where it goes; the number of elements and the dtype must agree.
        arrays: at the root an array for each rank; None elsewhere.
        root: must agree.
    """
    with CheckingArguments(comm, "scatter"):
        target = _host(out)
        rows = None
        if comm.rank == root:
            sources = _one_per_rank(comm, "scatter", arrays)
            _require_usable([target], sources)
            _require_equal_counts("scatter", "input", sources, one="output", operand=target)
            rows = _joined(out, arrays or (), sources).reshape(comm.size, target.count)
        room = _room(out, target).reshape(1, target.count)
    comm.scatter(rows, root, out=room)
    _fetch(target, room)


def alltoall(comm: Communicator, out: Any, array: Any, received: Sequence[int], splits: Sequence[int]) -> None:
    """Send every rank its rows, and get those that the ranks send here.

    Args:
        out: at least one dimension; all but the first must agree, and the dtype.
        array: at least one dimension.
        received: rows of ``out`` that come from rank 0, 1, ...; empty: equal parts.
        splits: rows of ``array`` for rank 0, 1, ...; empty: equal parts.

    Raises:
        MismatchError: a rank sends another number of rows than this one expects. Where the sums agree, only this
            rank raises it.
    """
    with CheckingArguments(comm, "alltoall"):
        target = _host(out)
        source = _host(array)
        _require_usable([target], [source])
        expected = _splits(comm, "received rows", received, operand=target)
        sent = _splits(comm, "splits", splits, operand=source)
    _, came = comm.alltoall(array, sent, out=out)
    if came != expected:
        raise MismatchError({comm.rank: f"alltoall(expects {expected} rows of the ranks, and they send {came})"})


def alltoall_list(comm: Communicator, outs: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Send every rank one of this rank's arrays; the shapes may differ as long as both sides agree."""
    with CheckingArguments(comm, "alltoall"):
        targets, sources = (_one_per_rank(comm, "alltoall", side) for side in (outs, arrays))
        _require_usable(targets, sources)
        counts = [target.count for target in targets]
        flat = _joined(outs[0], arrays, sources)
        room = like(outs[0], (sum(counts),))
        sent = [source.count for source in sources]
    alltoall(comm, room, flat, received=counts, splits=sent)
    _store_parts(targets, room)


def _one_per_rank(comm: Communicator, name: str, arrays: Sequence[Any] | None) -> list[Operand]:
    if arrays is None or len(arrays) != comm.size:
        got = "none" if arrays is None else len(arrays)
        raise ConfigError(f"{name} takes an array for each of the {comm.size} ranks, got {got}")
    return [_host(array) for array in arrays]


def _splits(comm: Communicator, name: str, rows: Sequence[int], operand: Operand) -> list[int]:
    if not operand.shape:
        raise UnsupportedBufferError("alltoall takes arrays of at least one dimension")
    if not rows:
        if operand.shape[0] % comm.size:
            raise ConfigError(f"alltoall: {operand.shape[0]} rows do not divide equally among {comm.size} ranks")
        return [operand.shape[0] // comm.size] * comm.size
    listed = [int(count) for count in rows]
    if len(listed) != comm.size or min(listed) < 0 or sum(listed) != operand.shape[0]:
        raise ConfigError(
            f"alltoall: {name} are {comm.size} numbers that add up to the rows of the array, {operand.shape[0]}; "
            f"got {listed}"
        )
    return listed


def _joined(model: Any, arrays: Sequence[Any], operands: Sequence[Operand]) -> Any:
    """Return the elements of several arrays, one after the other, in a new array of the model's kind."""
    flat = like(model, (sum(operand.count for operand in operands),))
    view = _host(flat).view
    at = 0
    for source in operands:
        view[at : at + source.count].reshape(source.shape)[...] = source.view
        at += source.count
    return flat


def _store_parts(targets: Sequence[Operand], flat: Any) -> None:
    view = _host(flat).view
    at = 0
    for target in targets:
        target.view[...] = view[at : at + target.count].reshape(target.shape)
        at += target.count


def _require_equal_counts(name: str, many: str, operands: Sequence[Operand], one: str, operand: Operand) -> None:
    for other in operands:
        if other.count != operand.count:
            raise ConfigError(
                f"{name} takes {many}s of as many elements as the {one}, got an {one} of shape {operand.shape} and an "
                f"{many} of shape {other.shape}"
            )


def _host(array: Any) -> Operand:
    return require_host(operand_of(array), "a group")


def _flat(array: Any, operand: Operand) -> Any:
    """Return the elements in C order as one dimension: where they are so already, the same object, which is fastest."""
    return array if len(operand.shape) == 1 else array.reshape(operand.count)


def _room(out: Any, target: Operand) -> Any:
    """Return where a result goes that has the elements of ``out``, in one dimension; `_fetch` brings it there."""
    return _flat(out, target) if target.contiguous else like(out, (target.count,))


def _fetch(target: Operand, room: Any) -> None:
    if not target.contiguous:
        target.view[...] = _host(room).view.reshape(target.shape)


def _require_usable(outputs: Sequence[Operand], inputs: Sequence[Operand]) -> None:
    """Raise `UnsupportedBufferError` unless all have one dtype and the outputs can be written."""
    names = {operand.dtype.name for operand in (*outputs, *inputs)}
    if len(names) > 1:
        raise UnsupportedBufferError(f"all arrays of a call must have one dtype, got {', '.join(sorted(names))}")
    for output in outputs:
        output.require_writable()
