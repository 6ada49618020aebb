"""What every transport and every communicator must do: run these on all ranks at once, whatever carries the bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective, schedule_for
from ringreduce.buffers import DTYPES, DType, narrow, new
from ringreduce.collectives import Choice
from ringreduce.collectives.call import Path
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.instruments import Instrument
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.transport.messages import Messages
from ringreduce.transport.waiting import Waiter

Array = npt.NDArray[Any]


def check_messages(messages: Messages) -> None:
    """Check point-to-point messages, notes and exchanges. Every rank calls it."""
    waiter = Waiter(timeout_s=30.0, crowded=True)
    rank = messages.rank
    size = messages.size
    assert messages.exchange(f"rank {rank}".encode()) == [f"rank {peer}".encode() for peer in range(size)]
    assert messages.exchange(b"") == [b""] * size
    ahead = (rank + 1) % size
    behind = (rank - 1) % size
    _check_order(messages, waiter, ahead=ahead, behind=behind)
    _check_restarts(messages, waiter, ahead=ahead, behind=behind)
    _check_notes(messages, waiter)
    _check_renewal(messages, waiter, ahead=ahead, behind=behind)


def _check_order(messages: Messages, waiter: Waiter, ahead: int, behind: int) -> None:
    """Messages of one tag arrive in order; another tag does not disturb them; some come back before others."""
    tags = (1, messages.max_tag)
    sent = [np.full(5, 10.0 * messages.rank + number) for number in range(4)]
    received = [np.empty(5) for _ in sent]
    requests = [messages.recv(data, behind, tags[number % 2]) for number, data in enumerate(received)]
    requests += [messages.send(data, ahead, tags[number % 2]) for number, data in enumerate(sent)]
    messages.start(requests)
    seen: list[int] = []

    def everything() -> bool:
        seen.extend(messages.test_some(requests))
        return len(seen) == len(requests)

    waiter.until(everything, lambda: "messages in a ring")
    assert sorted(seen) == list(range(len(requests))), "each completion is reported exactly once"
    assert messages.test_all(requests)
    for number, data in enumerate(received):
        assert (data == 10.0 * behind + number).all()
    messages.free(requests)


def _check_restarts(messages: Messages, waiter: Waiter, ahead: int, behind: int) -> None:
    """Requests can be started again and again, and take the data as it is then."""
    outgoing = np.zeros(3, np.int32)
    incoming = np.zeros(3, np.int32)
    requests = [messages.send(outgoing, ahead, 7), messages.recv(incoming, behind, 7)]
    for turn in range(3):
        outgoing[:] = 100 * messages.rank + turn
        messages.start(requests)
        waiter.until(lambda: messages.test_all(requests), lambda: "messages in a ring")
        assert (incoming == 100 * behind + turn).all()
    messages.free(requests)


def _check_renewal(messages: Messages, waiter: Waiter, ahead: int, behind: int) -> None:
    """Messages given up on both sides, or on one, match nothing later; the same requests work again."""
    outgoing = np.zeros(3, np.int32)
    incoming = np.zeros(3, np.int32)
    send, late, never = (messages.send(outgoing, ahead, 5), *(messages.recv(incoming, behind, tag) for tag in (5, 6)))
    for turn in range(1, 4):
        outgoing[:] = -turn
        if turn != 3 or messages.rank == 0:
            messages.start([send, never])
            messages.give_up([send, never])
        messages.renew()
        outgoing[:] = 100 * messages.rank + turn
        messages.start([send, late])
        waiter.until(lambda: messages.test_all([send, late]), lambda: "messages in a ring")
        assert (incoming == 100 * behind + turn).all()
    messages.free([send, late, never])


def _check_notes(messages: Messages, waiter: Waiter) -> None:
    """Notes reach every other rank, in order, beside the messages."""
    others = [peer for peer in range(messages.size) if peer != messages.rank]
    for number in range(2):
        for peer in others:
            messages.post(f"{number} from {messages.rank} to {peer}".encode(), peer)
    heard: dict[int, list[bytes]] = {peer: [] for peer in others}

    def everything() -> bool:
        arrived = messages.poll()
        if arrived is not None:
            heard[arrived[0]].append(arrived[1])
        return sum(map(len, heard.values())) == 2 * len(others)

    waiter.until(everything, lambda: "notes")
    for peer, notes in heard.items():
        assert notes == [f"{number} from {peer} to {messages.rank}".encode() for number in range(2)]
    messages.exchange(b"")


def check_collectives(communicator: Communicator, *, algorithms: bool = True) -> None:
    """Check every collective on awkward sizes against answers computed alone. Every rank calls it.

    Args:
        communicator: what to check.
        algorithms: whether to go through all algorithms as well as the automatic choice.
    """
    checks = {
        "allreduce": (_check_allreduce, _counts(communicator.size)),
        "reduce": (_check_reduce, [0, communicator.size + 1, 4099, 70_001]),
        "reduce_scatter": (_check_reduce_scatter, _counts(communicator.size)),
        "allgather": (_check_allgather, [0, 1, 5, 5000]),
        "gather": (_check_gather, [0, 5, 5000]),
        "scatter": (_check_scatter, [0, 3, 4001]),
        "broadcast": (_check_broadcast, _counts(communicator.size)),
        "alltoall": (_check_alltoall, [0, 1, 3, 4001]),
    }
    for collective, (check, counts) in checks.items():
        for name in [None, *communicator.algorithms(collective)] if algorithms else [None]:
            for count in counts:
                check(communicator, count, name)
    for dtype in DTYPES:
        for op in ops_of(dtype):
            _check_dtype(communicator, dtype, op)
    communicator.barrier()


def check_choices(communicator: Communicator) -> None:
    """Check that every call does what was said of it: for all dtypes, ops and names of algorithms. Every rank calls it.

    What a call does is seen by its observers: the name that they get, and the steps, which differ between paths.
    """
    watch = _Watch()
    communicator.instruments.add(watch)
    for dtype, row in DTYPES.items():
        for op in ops_of(dtype):
            for nbytes in _SAID_NBYTES:
                array = sample(communicator.rank, nbytes // row.itemsize, dtype)
                by_name = dtype in _SAID_BY_NAME and nbytes in _SAID_NBYTES[1::2]
                asked = ["deterministic", *communicator.algorithms()] if by_name else []
                for name in (None, *asked):
                    choice = communicator.choose("allreduce", array.nbytes, dtype, name, op=op)
                    communicator.allreduce(array, op, algorithm=name)
                    watch.check(communicator, Collective.ALLREDUCE, choice)
                    if name is None:
                        said = communicator.explain(array.nbytes, dtype, op=op)
                        assert f": {choice.algorithm} over {choice.transport} ({choice.reason})" in said
                choice = communicator.choose("reduce", array.nbytes, dtype, op=op)
                communicator.reduce(array, communicator.size - 1, op)
                watch.check(communicator, Collective.REDUCE, choice, communicator.size - 1)
                rows = array[: array.size // communicator.size * communicator.size]
                choice = communicator.choose("reduce_scatter", rows.nbytes, dtype, op=op)
                communicator.reduce_scatter(rows, op)
                watch.check(communicator, Collective.REDUCE_SCATTER, choice)
    others = (Collective.BROADCAST, Collective.ALLGATHER, Collective.ALLTOALL, Collective.GATHER, Collective.SCATTER)
    for nbytes in _SAID_NBYTES:
        array = sample(communicator.rank, nbytes // communicator.size * communicator.size, "float16")
        for collective in others:
            choice = communicator.choose(collective, array.nbytes, "float16")
            getattr(communicator, collective.value)(array)
            watch.check(communicator, collective, choice)
    communicator.instruments.remove(watch)
    communicator.barrier()


#: On either side of the limits of the rules and of mailboxes, also where elements are reduced in a wider type.
_SAID_NBYTES = (0, 40, 9 << 10, 17 << 10, 33 << 10, 100 << 10)
#: Of each kind one, whose calls are also made by the names of algorithms.
_SAID_BY_NAME = ("float32", "float16", "int8")


class _Watch(Instrument):
    """Takes down what the last collective did."""

    def __init__(self) -> None:
        self.name = ""
        self.steps: list[str] = []

    def collective_started(self, collective: str, algorithm: str, nbytes: int) -> None:
        self.name = f"{collective} by {algorithm}"
        self.steps.clear()

    def step_finished(self, step: str) -> None:
        self.steps.append(step)

    def check(self, communicator: Communicator, collective: Collective, choice: Choice, root: int = 0) -> None:
        """Hold it to what was chosen."""
        assert self.name == f"{collective.value} by {choice.algorithm}"
        if choice.path in (Path.HIERARCHICAL, Path.MESSAGES):
            schedule = schedule_for(collective, choice.algorithm, communicator.rank, communicator.topology, root)
            found = {int(step.split()[1]) for step in self.steps if step.startswith("step ")}
            assert found == set(range(1, len(schedule.steps) + 1)), (choice, self.steps)
            return
        first: dict[object, set[str]] = {
            Path.ALONE: set(),
            Path.ONE_SHOT: {"rendezvous"},
            Path.SHARED: {"rendezvous"},
            Path.LIBRARY: {"the library's own allreduce"},
        }
        assert set(self.steps[:1]) <= first[choice.path], (choice, self.steps)


def _counts(size: int) -> list[int]:
    """Return counts around the number of ranks, a prime, and one that takes several pieces and segments."""
    return sorted({0, 1, size - 1, size, size + 1, 97, 4099, 300_007})


@lru_cache(maxsize=16)  # making them takes longer than most calls, and all algorithms get the same
def _inputs(size: int, shape: int | tuple[int, ...], dtype: str, salt: int = 0) -> list[Array]:
    """Return what each rank contributes; nobody may change it."""
    return [sample(rank, shape, dtype=dtype, salt=salt) for rank in range(size)]


@lru_cache(maxsize=16)
def _answer(size: int, shape: int | tuple[int, ...], dtype: str, op: ReduceOp, salt: int = 0) -> Array:
    """Return what a reduction of these inputs must give; nobody may change it."""
    return expected(_inputs(size, shape, dtype, salt), op)


def _check_allreduce(communicator: Communicator, count: int, algorithm: str | None) -> None:
    inputs = _inputs(communicator.size, count, "float32")
    answer = _answer(communicator.size, count, "float32", ReduceOp.SUM)
    mine = inputs[communicator.rank].copy()
    out_of_place = communicator.allreduce(mine, algorithm=algorithm)
    assert_equal(out_of_place, answer)
    assert_equal(mine, inputs[communicator.rank])
    assert communicator.allreduce(mine, out=mine, algorithm=algorithm) is mine
    assert_equal(mine, answer)
    shared = communicator.empty(count)
    for _ in range(2):  # the second call finds everything bound
        shared[...] = inputs[communicator.rank]
        communicator.allreduce(shared, out=shared, algorithm=algorithm)
        assert_equal(shared, answer)


def _check_dtype(communicator: Communicator, dtype: str, op: ReduceOp) -> None:
    # Small ones go through mailboxes, large ones through pieces; an odd shape is not aligned.
    for shape in ((3, 7), (33, 1021)):
        mine = _inputs(communicator.size, shape, dtype, 2)[communicator.rank]
        answer = _answer(communicator.size, shape, dtype, op, 2)
        assert_close(communicator.allreduce(mine, op), answer)
        if (result := communicator.reduce(mine, communicator.size // 2, op)) is not None:
            assert_close(result, answer)


def _check_reduce(communicator: Communicator, count: int, algorithm: str | None) -> None:
    rank = communicator.rank
    inputs = _inputs(communicator.size, count, "float32")
    answer = _answer(communicator.size, count, "float32", ReduceOp.SUM)
    mine = inputs[rank].copy()
    shared = communicator.empty(count)
    cases = ((mine, None), (shared, np.empty_like(mine)), (mine, communicator.empty(count)), (shared, shared))
    for root in {0, communicator.size // 2, communicator.size - 1}:
        for array, out in cases:
            for _ in range(1 if algorithm else 2):  # the second call finds everything bound
                array[...] = inputs[rank]
                result = communicator.reduce(array, root, out=out, algorithm=algorithm)
                if rank != root:
                    assert result is None
                else:
                    assert result is not None
                    assert out is None or result is out
                    assert_equal(result, answer)
                if rank != root or out is not array:
                    assert_equal(array, inputs[rank])


def _check_reduce_scatter(communicator: Communicator, rows: int, algorithm: str | None) -> None:
    mine = _inputs(communicator.size, (rows, 3), "int64")[communicator.rank]
    answer = _answer(communicator.size, (rows, 3), "int64", ReduceOp.SUM)
    parts = np.array_split(answer, communicator.size)
    result = communicator.reduce_scatter(mine, algorithm=algorithm)
    assert_equal(result, parts[communicator.rank])
    bounds = [rows * rank**2 // communicator.size**2 for rank in range(communicator.size + 1)]
    mine = mine.copy()  # inputs are kept
    out = mine[slice(*bounds[communicator.rank :][:2])]
    splits = np.diff(bounds).tolist()
    assert communicator.reduce_scatter(mine, splits=splits, out=out, algorithm=algorithm) is out
    assert_equal(out, answer[slice(*bounds[communicator.rank :][:2])])


def _check_allgather(communicator: Communicator, rows: int, algorithm: str | None) -> None:
    size = communicator.size
    for lengths in ([rows] * size, [(rows * rank) // 2 for rank in range(size)]):
        inputs = [sample(rank, (length, 2), "float64") for rank, length in enumerate(lengths)]
        gathered = communicator.allgather(inputs[communicator.rank], algorithm=algorithm)
        assert_equal(gathered, np.concatenate(inputs))


def _check_gather(communicator: Communicator, rows: int, algorithm: str | None) -> None:
    rank = communicator.rank
    size = communicator.size
    for lengths in ([rows] * size, [(rows * rank) // 2 for rank in range(size)]):
        inputs = [sample(rank, (length, 2), "float64") for rank, length in enumerate(lengths)]
        answer = np.concatenate(inputs)
        before = sum(lengths[:rank])
        for root in {0, size - 1}:
            for out in (None, communicator.empty(answer.shape, np.float64)):
                mine = inputs[rank]
                if out is not None and rank == root:  # in place
                    mine = out[before : before + lengths[rank]]
                    mine[...] = inputs[rank]
                for _ in range(1 if algorithm else 2):
                    gathered = communicator.gather(mine, root, out=out, algorithm=algorithm)
                    if rank == root:
                        assert gathered is not None
                        assert out is None or gathered is out
                        assert_equal(gathered, answer)
                    else:
                        assert gathered is None


def _check_scatter(communicator: Communicator, rows: int, algorithm: str | None) -> None:
    rank = communicator.rank
    size = communicator.size
    for root in {0, size - 1}:
        whole = sample(root, (rows * size, 2), "int32")
        part = whole[rank * rows : (rank + 1) * rows]
        shared = communicator.empty(whole.shape, np.int32)
        for given in (whole, shared):
            given[...] = sample(root, (rows * size, 2), "int32")
            for out in (None, given[rank * rows : (rank + 1) * rows]):
                array = given if rank == root or (out is None and rank % 2) else None
                result = communicator.scatter(array, root, out=out, algorithm=algorithm)
                assert out is None or result is out
                assert_equal(result, part)


def _check_broadcast(communicator: Communicator, count: int, algorithm: str | None) -> None:
    for root in range(communicator.size):
        inputs = _inputs(communicator.size, count, "int32")
        mine = inputs[communicator.rank].copy()
        assert_equal(communicator.broadcast(mine, root, algorithm=algorithm), inputs[root])
        assert_equal(mine, inputs[communicator.rank])
        communicator.broadcast(mine, root, out=mine, algorithm=algorithm)
        assert_equal(mine, inputs[root])


def _check_alltoall(communicator: Communicator, rows: int, algorithm: str | None) -> None:
    rank = communicator.rank
    size = communicator.size
    splits = [[(rows * (sender + 1) + receiver) % (rows + 2) for receiver in range(size)] for sender in range(size)]
    inputs = [sample(sender, (sum(splits[sender]), 2), "float32") for sender in range(size)]
    parts = [np.split(inputs[sender], np.cumsum(splits[sender])[:-1])[rank] for sender in range(size)]
    received, counts = communicator.alltoall(inputs[rank], splits[rank], algorithm=algorithm)
    assert counts == [splits[sender][rank] for sender in range(size)]
    assert_equal(received, np.concatenate(parts))


def assert_equal(actual: Array, wanted: Array) -> None:
    """Check shape, dtype and every element."""
    assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
    wrong = np.flatnonzero(np.asarray(actual != wanted))
    assert not wrong.size, f"{wrong.size} of {wanted.size} elements are wrong, the first at {wrong[0]}"


def assert_close(actual: Array, wanted: Array) -> None:
    """Check shape and dtype, and that elements agree to within the last place (averages are rounded)."""
    assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
    if wanted.dtype.kind in "biu":
        assert_equal(actual, wanted)
        return
    wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
    bits = {"bfloat16": 8, "float16": 11, "float64": 53, "complex128": 53}.get(wanted.dtype.name, 24)
    difference = np.abs(actual.astype(wide) - wanted.astype(wide))
    assert (difference <= 2.0 ** (1 - bits) * np.abs(wanted.astype(wide))).all(), difference.max()


# ---- inputs with known answers: every rank and element differs, and every sum and product is exact ----


def sample(rank: int, shape: int | tuple[int, ...], dtype: str, salt: int = 0) -> Array:
    """Return the input of ``rank``: small whole numbers, negative ones too where there are any, as a NumPy array.

    Sums over 16 ranks fit into eight bits, so they are exact in every dtype; ``salt`` gives other numbers.
    """
    index = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    mixed = (index * 7 + rank * 5 + salt * 3 + index // 11) % 8
    row = DTYPES[dtype]
    if row.kind == "bool":
        flags: Array = mixed % 3 == 0
        return flags
    if row.kind != "uint":
        mixed = mixed - 3
    values = mixed + 1j * ((mixed + rank) % 3) if row.kind == "complex" else mixed
    return _as_dtype(values, row)


def ops_of(dtype: str) -> list[ReduceOp]:
    """Return the operations for a dtype."""
    return [op for op in ReduceOp if op.takes(DTYPES[dtype].kind)]


#: What combines two arrays, but for sums and products.
FOLDS = {
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
    ReduceOp.LAND: np.logical_and,
    ReduceOp.LOR: np.logical_or,
    ReduceOp.LXOR: np.logical_xor,
}


def expected(arrays: list[Array], op: ReduceOp) -> Array:
    """Return what a reduction of the ranks' arrays must give, computed one rank after the other in a wide type."""
    row = DType.of(arrays[0].dtype)
    wide = [_widest(array, row) for array in arrays]
    total = wide[0].copy()
    for each in wide[1:]:
        if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            total = total + each
        elif op is ReduceOp.PRODUCT:
            total = total * each
        else:
            total = FOLDS[op](total, each)
    if op is ReduceOp.AVERAGE:
        whole = row.integral
        total = np.trunc(total / len(arrays)).astype(np.int64) if whole else total / len(arrays)
    return _as_dtype(total, row)


def _widest(array: Array, row: DType) -> Array:
    if row.kind == "complex":
        return array.astype(np.complex128)
    return array.astype(np.float64 if row.kind == "float" else np.int64)


def _as_dtype(values: Array, row: DType) -> Array:
    made: Array = new(values.shape, row, "numpy")
    if row.name == "bfloat16":
        narrow(values.astype(np.float32), row, made.view(np.uint16))
    else:
        # Integers wrap around, as a sum in their own type does.
        np.copyto(made, values.astype(row.storage))
    return made
