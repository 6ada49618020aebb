"""The collectives as users call them: kinds of arrays, ``out=``, buffers and their lifetime, and what is refused."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from math import prod

import ml_dtypes
import numpy as np
import pytest
import torch
from suites.conformance import assert_equal, expected, sample

import ringreduce as rr
from ringreduce.common.config import Config
from ringreduce.native.layout import MAILBOX_NBYTES
from ringreduce.testing import caught, run_ranks

WORLDS = pytest.mark.parametrize(("size", "node_size"), [(1, None), (2, None), (3, None), (3, 1), (3, 2)])
COUNTS = (5, 40_000)  # through mailboxes and through pieces


def in_world(size: int, node_size: int | None, function: Callable[[rr.Communicator], object]) -> list[object]:
    return run_ranks(size, function, node_size=node_size, config=Config(timeout_s=20.0, segment_nbytes=32 << 10))


def inputs(communicator: rr.Communicator, shape: int | tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    return [sample(rank, shape, dtype) for rank in range(communicator.size)]


def as_torch(array: np.ndarray) -> torch.Tensor:
    """Copy a NumPy array, bfloat16 too, into a tensor."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def as_numpy(array: np.ndarray | torch.Tensor) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    if array.dtype == torch.bfloat16:
        return array.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return array.numpy()


# ---- kinds of results ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "complex64", "bool"])
@WORLDS
def test_results_have_the_kind_of_the_input(size: int, node_size: int | None, dtype: str) -> None:
    """NumPy in, NumPy out; torch in, torch out; the dtype stays, and the input is as it was; some get None."""

    def check(communicator: rr.Communicator) -> None:
        parts, root = inputs(communicator, (6, 2), dtype), size - 1
        total, own = expected(parts, rr.SUM), parts[communicator.rank]
        at_root = {"reduce": total, "gather": np.concatenate(parts)}
        scattered = np.split(parts[root], size)[communicator.rank]
        answers = {
            "allreduce": total,
            "reduce_scatter": np.array_split(total, communicator.size)[communicator.rank],
            "allgather": np.concatenate(parts),
            "broadcast": parts[0],
            "alltoall": np.concatenate([np.split(part, communicator.size)[communicator.rank] for part in parts]),
        }
        for convert in (np.copy, as_torch):
            array = convert(own)
            for name, answer in answers.items():
                result = getattr(communicator, name)(array)
                assert type(result) is type(array)
                assert result.dtype == array.dtype
                assert_equal(as_numpy(result), answer)
            for name, answer in at_root.items():
                result = getattr(communicator, name)(array, root)
                assert type(result) is (type(array) if communicator.rank == root else type(None))
                assert result is None or np.array_equal(as_numpy(result), answer)
            for given in (array, array if communicator.rank == root else None):
                result = communicator.scatter(given, root)
                assert type(result) is (np.ndarray if given is None else type(array))
                assert_equal(as_numpy(result), scattered)
            assert_equal(as_numpy(array), own)

    in_world(size, node_size, check)


def test_libraries_may_differ_between_ranks() -> None:
    """A rank with a tensor and a rank with an array reduce together, each getting its own kind."""

    def check(communicator: rr.Communicator) -> str:
        array = torch.ones(3) if communicator.rank else np.ones(3, np.float32)
        result = communicator.allreduce(array)
        assert as_numpy(result).tolist() == [2, 2, 2]
        return type(result).__name__

    assert in_world(2, None, check) == ["ndarray", "Tensor"]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_overflow_is_infinite_and_silent(dtype: str) -> None:
    """A sum that is too large is infinite on all ranks, and no warning is raised in the middle of a collective."""

    def check(communicator: rr.Communicator) -> None:
        for count in COUNTS:
            array = np.full(count, np.finfo(dtype).max, dtype)
            for algorithm in (None, "ring"):
                assert np.isposinf(communicator.allreduce(array, algorithm=algorithm)).all()
            assert np.isposinf(communicator.reduce_scatter(array)).all()

    for node_size in (None, 1):
        in_world(2, node_size, check)


# ---- out= ----


@WORLDS
def test_out_may_overlap_the_input(size: int, node_size: int | None) -> None:
    """A result that covers the input, in part, shifted or transposed, is that of the input as it was before the call.

    Also when the same arrays are passed again, and in memory that other ranks reach.
    """

    def check(communicator: rr.Communicator) -> None:
        rank, root = communicator.rank, size - 1
        for count, shared in itertools.product(COUNTS, (False, True)):
            parts, wholes = inputs(communicator, count), inputs(communicator, count * size)
            memory = communicator.empty(count * size + 3) if shared else np.empty(count * size + 3, np.float32)
            row, wide, own = memory[: count + 3], memory[:-2], slice(rank * count, (rank + 1) * count)
            total, share = expected(parts, rr.SUM), np.array_split(np.arange(count), size)[rank]
            on_rows = [
                ("allreduce", count, {}, total),
                ("broadcast", count, {"root": root}, parts[root]),
                ("reduce_scatter", len(share), {}, total[share]),
                ("reduce", count, {"root": root}, total if rank == root else None),
            ]
            pairs = ((row[3:], row[:-3]), (row[:-3], row[3:]), (row[:-3], row[-4::-1]))
            pieces = np.concatenate([each[own] for each in wholes])
            cases = [
                (name, parts[rank], source, target[:length], options, answer)
                for name, length, options, answer in on_rows
                for source, target in pairs
            ]
            cases += [
                ("allgather", parts[rank], memory[1 : count + 1], memory[: count * size], {}, np.concatenate(parts)),
                ("alltoall", wholes[rank], wide[1:], wide[:-1], {}, pieces),
                ("alltoall", wholes[rank], wide[1:], wide[1:], {}, pieces),
                ("scatter", wholes[root], wide[1:], memory[:count], {"root": root}, wholes[root][own]),
                ("scatter", wholes[root], wide[:-1], memory[1 : count + 1], {"root": root}, wholes[root][own]),
                ("reduce_scatter", wholes[rank], wide[:-1], wide[1 : count + 1], {}, expected(wholes, rr.SUM)[own]),
            ]
            for name, given, source, target, options, answer in cases:
                for _ in range(3):
                    source[:] = given
                    getattr(communicator, name)(source, out=target, **options)
                    assert_equal(*((source, given) if answer is None else (target, answer)))
        squares = inputs(communicator, (150, 150))
        for name, answer in (("allreduce", expected(squares, rr.SUM)), ("broadcast", squares[0])):
            square = squares[rank].copy()
            getattr(communicator, name)(square, out=square.T)
            assert_equal(square.T, answer)

    in_world(size, node_size, check)


def views(shape: tuple[int, int]) -> dict[str, Callable[[], np.ndarray]]:
    """Return ways to make arrays of a shape whose elements do not lie one after the other."""
    rows, columns = shape
    return {
        "transposed": lambda: np.zeros((columns, rows), np.float32).T,
        "strided": lambda: np.zeros((2 * rows, 3 * columns), np.float32)[::2, 1::3],
        "reversed": lambda: np.zeros(shape, np.float32)[::-1, ::-1],
        "torch": lambda: torch.zeros(columns, rows).t(),
        "torch slice": lambda: torch.zeros(2 * rows, columns + 2)[::2, 1:-1],
    }


@pytest.mark.parametrize("kind", views((1, 1)))
@WORLDS
def test_non_contiguous_arrays_work_everywhere(size: int, node_size: int | None, kind: str) -> None:
    """Inputs and outputs of any strides give the results of contiguous ones, and nothing beside them is touched."""

    def check(communicator: rr.Communicator) -> None:
        for shape in ((6, 3), (180, 130)):
            make = views(shape)[kind]
            parts = inputs(communicator, shape)
            own, total = parts[communicator.rank], expected(parts, rr.SUM)

            def filled() -> object:
                view = make()  # noqa: B023
                as_numpy(view)[...] = own  # noqa: B023
                return view

            def outside(view: object) -> float:
                """Return the sum of what lies around a view."""
                whole = as_numpy(view).base if isinstance(view, np.ndarray) else as_numpy(view._base)
                return float(whole.sum() - as_numpy(view).sum())

            assert_equal(as_numpy(communicator.allreduce(filled())), total)
            assert_equal(as_numpy(communicator.allgather(filled())), np.concatenate(parts))
            assert_equal(as_numpy(communicator.broadcast(filled())), parts[0])
            part = np.array_split(total, size)[communicator.rank]
            assert_equal(as_numpy(communicator.reduce_scatter(filled())), part)
            pieces = [np.split(each, size)[communicator.rank] for each in parts]
            assert_equal(as_numpy(communicator.alltoall(filled())), np.concatenate(pieces))
            for out in (make(), filled()):
                communicator.allreduce(filled(), out=out)
                assert_equal(as_numpy(out), total)
                assert outside(out) == 0
            array = filled()
            for turn in range(3):
                communicator.allreduce(array, out=array)
                assert_equal(as_numpy(array), total * size**turn)
            assert outside(array) == 0
            out = make()
            communicator.broadcast(filled(), out=out)
            assert_equal(as_numpy(out), parts[0])
            out = make()[: len(part)]
            communicator.reduce_scatter(filled(), out=out)
            assert_equal(as_numpy(out), part)
            communicator.scatter(filled(), out=out)
            assert_equal(as_numpy(out), np.split(parts[0], size)[communicator.rank])
            out, rows = make(), views((size * shape[0], shape[1]))[kind]()
            for root in range(size):
                communicator.reduce(filled(), root, out=out)
                communicator.gather(filled(), root, out=rows)
                if communicator.rank >= root:  # later roots leave it as it is
                    assert_equal(as_numpy(out), total if communicator.rank == root else np.zeros_like(total))
                    assert_equal(as_numpy(rows), np.concatenate(parts) * np.float32(communicator.rank == root))

    in_world(size, node_size, check)


@pytest.mark.parametrize("name", ["allreduce", "broadcast", "reduce_scatter"])
def test_a_wrong_out_is_refused(name: str) -> None:
    """Shape, dtype, kind and writability of ``out`` are checked before anything moves: the next collective works."""

    def check(communicator: rr.Communicator) -> None:
        array = np.ones(6, np.float32)
        length = 3 if name == "reduce_scatter" else 6
        frozen = np.zeros(length, np.float32)
        frozen.flags.writeable = False
        for out, words in (
            (np.zeros(length + 1, np.float32), r"out has shape \(\d,\)"),
            (np.zeros((length, 1), np.float32), "out has shape"),
            (np.zeros(length), "dtype float64"),
            (frozen, "read-only"),
            (np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (length,), (0,)), "share memory"),
            (torch.zeros(1).expand(length), "share memory"),
            ([0.0] * length, "got list"),
        ):
            with pytest.raises(rr.UnsupportedBufferError, match=words):
                getattr(communicator, name)(array, out=out)
        assert communicator.allreduce(array).tolist() == [2.0] * 6

    in_world(2, None, check)


def test_read_only_input_is_fine() -> None:
    """What is only read may be read-only, of any size and dtype."""

    def check(communicator: rr.Communicator) -> None:
        for count in COUNTS:
            for dtype in ("float32", "float16", "bfloat16", "int32"):
                parts = inputs(communicator, count, dtype)
                array = parts[communicator.rank].copy()
                array.flags.writeable = False
                assert_equal(communicator.allreduce(array), expected(parts, rr.SUM))
                communicator.reduce_scatter(array)
                communicator.allgather(array)
                communicator.broadcast(array)

    for node_size in (None, 1):
        in_world(2, node_size, check)


# ---- buffers ----


def test_communication_buffers_are_aligned_and_of_any_dtype() -> None:
    """A buffer has the shape and dtype that were asked for, also no elements at all, and starts on a cache line."""

    def check(communicator: rr.Communicator) -> None:
        for shape in (0, 1, 7, (2, 3), (0, 4), (), np.int64(5), (np.int64(2), np.uint8(3)), [2, 2]):
            for dtype in (np.float32, "float64", "bfloat16", np.dtype("int8"), torch.float16, bool):
                buffer = communicator.empty(shape, dtype)
                assert isinstance(buffer, np.ndarray)
                assert buffer.shape == np.empty(shape).shape
                assert buffer.ctypes.data % 64 == 0
                assert buffer.flags.c_contiguous
                assert buffer.flags.writeable
                buffer[...] = 1
        assert communicator.empty(3).dtype == np.float32
        assert communicator.empty(3, "bfloat16").dtype == ml_dtypes.bfloat16
        for shape in (-1, (3, -1)):
            with pytest.raises(rr.ConfigError, match="shape"):
                communicator.empty(shape)
        with pytest.raises(rr.UnsupportedBufferError, match=r"float128|longdouble"):
            communicator.empty(3, np.longdouble)

    in_world(1, None, check)


def test_a_shared_buffer_is_reduced_where_it_lies() -> None:
    """In place on communication buffers nothing is copied: no staging area is touched, views and tensors included."""

    def check(communicator: rr.Communicator) -> None:
        count = 50_000
        memory = communicator._context.board.memory
        boxes = [memory.mailboxes(parity, np.dtype(np.uint8), MAILBOX_NBYTES) for parity in (0, 1)]
        for areas in boxes:
            areas[communicator._context.board.index][:] = 0
        communicator.barrier()
        parts = inputs(communicator, count)
        buffer = communicator.empty(count + 16)
        for array in (buffer[:count], buffer[16:], torch.from_numpy(buffer)[5 : 5 + count]):
            as_numpy(array)[...] = parts[communicator.rank]
            communicator.barrier()
            communicator.allreduce(array, out=array)
            assert_equal(as_numpy(array), expected(parts, rr.SUM))
        communicator.barrier()
        assert not any(area.any() for areas in boxes for area in areas)

    in_world(3, None, check)


@pytest.mark.parametrize("nbytes", [4096, 32 << 10, 512 << 10])
def test_results_take_the_memory_of_those_before(nbytes: int) -> None:
    """No plan keeps a result alive, wherever the input is."""

    def check(communicator: rr.Communicator) -> None:
        for array in (np.ones(nbytes // 4, np.float32), communicator.empty(nbytes // 4)):
            addresses = {communicator.allreduce(array).ctypes.data for _ in range(30)}
            assert len(addresses) <= 2

    in_world(2, None, check)


def test_buffers_live_as_long_as_their_views() -> None:
    """Memory of a dropped buffer is used again, that of a view that is kept is not; after close it stays valid."""

    def check(communicator: rr.Communicator) -> None:
        buffer = communicator.empty(100_000)
        address = buffer.ctypes.data
        view = torch.from_numpy(buffer)[50_000:]
        communicator.allreduce(buffer, out=buffer)
        view.fill_(3)
        del buffer
        gc.collect()
        other = communicator.empty(100_000)
        other[:] = 0
        assert other.ctypes.data != address
        assert (view == 3).all()
        del view
        gc.collect()
        again = communicator.empty(100_000)
        assert again.ctypes.data == address
        communicator.barrier()
        communicator.close()
        again[:] = 5
        assert (again == 5).all()

    in_world(2, None, check)


@pytest.mark.parametrize("make", [lambda count: np.ones(count, np.float32), torch.ones], ids=["numpy", "torch"])
@pytest.mark.parametrize("node_size", [None, 1, 2])
def test_no_plan_keeps_an_array_alive(node_size: int | None, make: Callable) -> None:
    """However often an array was reduced, in place or not, it is freed when its owner drops it."""

    def check(communicator: rr.Communicator) -> None:
        for count in (*COUNTS, 300_000):
            array, out = make(count), make(count)
            for algorithm in (None, "ring"):
                for _ in range(3):
                    communicator.allreduce(array, out=array, algorithm=algorithm)
                    communicator.allreduce(array, out=out, algorithm=algorithm)
            communicator.reduce_scatter(array)
            communicator.allgather(array)
            communicator.broadcast(array, out=out)
            communicator.alltoall(array[: count // 3 * 3])
            watched = [weakref.ref(array), weakref.ref(out)]
            del array, out
            assert [each() for each in watched] == [None, None]
        assert communicator._context.plans.repeats == {}

    in_world(3, node_size, check)


# ---- repeated in-place calls, which are bound ----


@pytest.mark.parametrize("count", COUNTS)
def test_repeats_follow_a_tensor_to_other_memory(count: int) -> None:
    """A tensor that is resized, given other memory or transposed is reduced as it is now."""

    def check(communicator: rr.Communicator) -> None:
        tensor = torch.ones(count)

        def reduce() -> torch.Tensor:
            tensor.fill_(communicator.rank + 1)
            for factor in (3, 6, 12):
                communicator.allreduce(tensor, out=tensor)
                assert (tensor == factor).all()
            return tensor

        reduce()
        for resized in (count - 2, count + 5000):
            tensor.resize_(resized)
            reduce()
        other = torch.zeros(count)
        tensor.set_(other)
        reduce()
        assert (other == 12).all()
        tensor.data = torch.zeros(count, 2)
        reduce()
        tensor.data = torch.zeros(count, dtype=torch.float64)
        assert reduce().dtype == torch.float64
        tensor.data = tensor.data.view(torch.int64)
        assert reduce().dtype == torch.int64
        tensor.resize_(count // 5, 5)
        reduce()
        tensor.set_(tensor.untyped_storage(), 1, (count - 1,))
        reduce()

    in_world(2, None, check)


def test_a_tensor_that_becomes_a_lazy_view_of_its_memory() -> None:
    """One that is conjugated by ``data =`` has the same memory, shape and strides, and other values."""

    def body(communicator: rr.Communicator) -> list[complex]:
        tensor, out = torch.full((4,), 1 + 2j), torch.empty(4, dtype=torch.complex64)
        found = []
        for _ in range(3):
            found.append(complex(communicator.allreduce(tensor, out=out)[0]))
            tensor.data = tensor.data.conj()
        return found

    assert run_ranks(2, body) == [[2 + 4j, 2 - 4j, 2 + 4j]] * 2


def test_a_tensor_transposed_in_place_on_one_rank() -> None:
    """Elements are matched by their indices, also where the strides changed since the call was bound."""

    def check(communicator: rr.Communicator) -> None:
        for side in (3, 200):
            tensor = torch.arange(side * side, dtype=torch.float32).reshape(side, side)
            wanted = tensor * 2
            own = tensor.clone()
            communicator.allreduce(own, out=own)
            if communicator.rank == 1:
                own.t_()
            own.copy_(tensor)
            communicator.allreduce(own, out=own)
            assert torch.equal(own, wanted)

    in_world(2, None, check)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_repeats_follow_an_array_to_another_shape_and_dtype(count: int) -> None:
    """An array that is given another shape or dtype in place is reduced as it is now."""

    def check(communicator: rr.Communicator) -> None:
        array = np.ones(count, np.float32)
        communicator.allreduce(array, out=array)
        array.shape = (count // 5, 5)
        communicator.allreduce(array, out=array)
        assert (array == 4).all()
        array.dtype = np.int32
        array[:] = 1 << 24 | 1  # no float32
        for factor in (2, 4):
            communicator.allreduce(array, out=array)
            assert (array == factor * (1 << 24 | 1)).all()

    in_world(2, None, check)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("node_size", [None, 1])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_repeats_follow_an_array_to_other_strides_and_memory(node_size: int | None, count: int) -> None:
    """An array whose strides or address a program changes between two calls is reduced as it is now."""

    def check(communicator: rr.Communicator) -> None:
        rank = communicator.rank
        memory = np.arange(2 * count, dtype=np.float64) + rank
        array = memory[:count]
        for _ in range(2):
            communicator.allreduce(array)
        array.strides = (16,)
        for _ in range(3):
            assert_equal(communicator.allreduce(array), np.arange(0, 2 * count, 2) * 2.0 + 1)
            assert_equal(communicator.broadcast(array, root=1), np.arange(0, 2 * count, 2) + 1.0)
        own = np.zeros(count)
        for _ in range(2):
            communicator.allreduce(own, out=own)
        own.__setstate__(np.arange(float(count)).__reduce__()[2])
        communicator.allreduce(own, out=own)
        assert_equal(own, np.arange(count) * 2.0)

    in_world(2, node_size, check)


@pytest.mark.parametrize("make", [lambda each, n: np.ones(n), lambda each, n: torch.ones(n), rr.Communicator.empty])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("node_size", [None, 1])
def test_operations_and_algorithms_alternate_on_one_array(node_size: int | None, count: int, make: Callable) -> None:
    """What was bound for one op or algorithm is not used for another, in whatever order they come."""

    def check(communicator: rr.Communicator) -> None:
        array = make(communicator, count)
        for op, algorithm, answer in (
            ("sum", None, 3),
            ("max", None, 2),
            ("sum", "ring", 3),
            ("sum", None, 3),
            ("product", None, 2),
            (rr.AVERAGE, None, 1.5),
            (rr.SUM, "auto", 3),
            ("sum", None, 3),
            ("min", "recursive_doubling", 1),
        ):
            for _ in range(2):
                array[:] = communicator.rank + 1
                communicator.allreduce(array, op, out=array, algorithm=algorithm)
                assert (array == answer).all(), (op, algorithm)

    in_world(2, node_size, check)


def test_arrays_at_a_reused_id_are_not_confused() -> None:
    """Arrays come and go, often at the same address and id, with other shapes and dtypes."""

    def check(communicator: rr.Communicator) -> None:
        for turn in range(60):
            dtype = ("float32", "int64", "float16")[turn % 3]
            array = np.full(3 + turn % 4, communicator.rank + turn, dtype)
            for _ in range(2):
                array[:] = communicator.rank + turn
                communicator.allreduce(array, out=array)
            assert array.tolist() == [2 * turn + 1] * (3 + turn % 4)
        assert len(communicator._context.plans.repeats) <= 1

    in_world(2, None, check)


# ---- splits, roots, names ----


def test_alltoall_reports_what_came() -> None:
    """With splits the rows per sender are returned; splits may be any sequence of whole numbers, zeros included."""

    def check(communicator: rr.Communicator) -> None:
        rank = communicator.rank
        for splits in ([rank, 2], (rank, 2), np.array([rank, 2]), torch.tensor([rank, 2])):
            rows = np.full((rank + 2, 3), rank)
            received, counts = communicator.alltoall(rows, splits)
            assert counts == ([0, 1] if rank == 0 else [2, 2])
            assert received[:, 0].tolist() == [0] * counts[0] + [1] * counts[1]

    in_world(2, None, check)


def test_wrong_splits_are_refused() -> None:
    """Of the wrong number, sign or sum, which the error shows, or none for rows that do not divide equally."""

    def check(communicator: rr.Communicator) -> None:
        for splits in ([4], [1, 1, 2], [5, -1], [2, 1], [], [4, 4]):
            with pytest.raises(rr.ConfigError, match=r"splits must be 2 numbers .* the 4 rows, got \["):
                communicator.alltoall(np.ones((4, 2)), splits)
        with pytest.raises(rr.ConfigError, match="3 rows do not divide into 2 equal parts; give splits"):
            communicator.alltoall(np.ones(3))

    in_world(2, None, check)


def test_scalars_have_no_rows() -> None:
    """What is cut along the first dimension needs one; allreduce and broadcast take scalars too."""

    def check(communicator: rr.Communicator) -> None:
        scalar = np.array(2.0)
        for name in ("reduce_scatter", "allgather", "alltoall"):
            with pytest.raises(rr.UnsupportedBufferError, match=f"{name} needs an array with at least one dimension"):
                getattr(communicator, name)(scalar)
        for node_scalar in (scalar, torch.tensor(2.0, dtype=torch.float64)):
            result = communicator.allreduce(node_scalar)
            assert (float(result), tuple(result.shape)) == (4.0, ())
            assert float(communicator.broadcast(node_scalar)) == 2.0
        communicator.allreduce(scalar, out=scalar)
        assert float(scalar) == 4.0

    in_world(2, None, check)
    in_world(2, 1, check)


def test_unknown_names_are_refused() -> None:
    """Algorithms, operations, collectives and roots that do not exist are ConfigErrors that list the ones that do."""

    def check(communicator: rr.Communicator) -> None:
        array = np.ones(4)
        for call, words in (
            *((partial(communicator.broadcast, array, root), f"0 to 1, got {root}") for root in (-1, 2, 10)),
            (lambda: communicator.allreduce(array, algorithm="bogus"), "allreduce algorithm 'bogus'; choose one of"),
            (lambda: communicator.allreduce(array, algorithm="mpi"), "talk over MPI"),
            (lambda: communicator.broadcast(array, algorithm="ring"), "broadcast algorithm 'ring'; choose one of"),
            (lambda: communicator.alltoall(array, algorithm="x"), "alltoall algorithm 'x'"),
            (lambda: communicator.allgather(array, algorithm="x"), "allgather algorithm 'x'"),
            (lambda: communicator.reduce_scatter(array, algorithm="x"), "reduce_scatter algorithm 'x'"),
            (lambda: communicator.allreduce(array, "mean"), "unknown reduce operation 'mean'"),
            (lambda: communicator.explain(8, collective="scan"), "unknown collective 'scan'; choose one of"),
            (lambda: communicator.algorithms("gossip"), "unknown collective"),
        ):
            with pytest.raises(rr.ConfigError, match=words):
                call()
        assert communicator.allreduce(array).tolist() == [2.0] * 4

    in_world(2, None, check)


def test_an_algorithm_that_cannot_run_here_says_why() -> None:
    """What takes shared memory is refused between nodes, with the topology in the message."""
    error = in_world(2, 1, lambda each: caught(each.allreduce, np.ones(4), algorithm="two_shot"))[0]
    assert isinstance(error, rr.ConfigError)
    assert "2 nodes x 1" in str(error)


@pytest.mark.parametrize(
    ("node_size", "algorithm", "transport"),
    [
        (None, "two_shot", "shared"),
        (None, "ring", "memory"),
        (1, "ring", "memory"),
        (2, "hierarchical", "shared+memory"),
    ],
)
def test_transports_are_named(node_size: int | None, algorithm: str, transport: str) -> None:
    """`transport_name` says what moves the bytes of an algorithm, and `explain` what would run."""

    def check(communicator: rr.Communicator) -> None:
        assert communicator.transport_name(algorithm) == transport
        text = communicator.explain(1 << 20, "float32")
        assert communicator.choose("allreduce", 1 << 20).algorithm in text

    in_world(4, node_size, check)


def test_transports_have_their_names_where_sums_are_to_be_deterministic() -> None:
    """What moves the bytes of an algorithm is known, though it cannot be asked for: tuning tables go by it."""

    def check(communicator: rr.Communicator) -> list[str]:
        return [communicator.transport_name(name) for name in ("ring", "two_shot", "nccl")]

    assert run_ranks(2, check, config=Config(timeout_s=10.0, deterministic=True)) == [["memory", "shared", "nccl"]] * 2


# ---- the end ----


def test_a_closed_communicator_refuses() -> None:
    """After close every collective and `empty` is a ShutdownError with the remedy; closing again does nothing."""

    def check(communicator: rr.Communicator) -> None:
        array = np.ones(4)
        communicator.allreduce(array, out=array)
        communicator.barrier()
        communicator.close()
        communicator.close()
        names = ("allreduce", "reduce_scatter", "allgather", "broadcast", "alltoall")
        for call in (
            *(partial(getattr(communicator, name), array) for name in names),
            partial(communicator.allreduce, array, out=array),
            communicator.barrier,
            partial(communicator.empty, 3),
        ):
            with pytest.raises(rr.ShutdownError, match=r"ringreduce\.init"):
                call()

    for size, node_size in ((1, None), (2, None), (2, 1)):
        in_world(size, node_size, check)


# ---- deterministic sums ----


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "complex64"])
@pytest.mark.parametrize("op", ["sum", "average"])
def test_deterministic_sums_have_the_bits_of_any_placement(size: int, dtype: str, op: str) -> None:
    """One node or several, large or small, whole or in parts, in place or not: terms are added in rank order."""
    count = 40_003
    data = [np.random.default_rng(rank).standard_normal(count).astype(dtype) for rank in range(size)]

    def check(communicator: rr.Communicator) -> list[bytes]:
        mine = data[communicator.rank]
        whole = communicator.allreduce(mine, op, deterministic=True)
        parts = [communicator.allreduce(part, op, deterministic=True) for part in np.array_split(mine, 7)]
        buffer = communicator.empty(count, dtype)
        buffer[:] = mine
        communicator.allreduce(buffer, op, out=buffer, deterministic=True)
        assert whole.tobytes() == np.concatenate(parts).tobytes() == buffer.tobytes()
        return [whole.tobytes(), communicator.allreduce(mine[:5], op, deterministic=True).tobytes()]

    results = [result for node_size in (None, 1, 2) for result in run_ranks(size, check, node_size=node_size)]
    assert all(each == results[0] for each in results)


def test_all_allreduces_are_deterministic_where_the_settings_say_so() -> None:
    """Without a word in the call; an algorithm that adds otherwise is refused."""

    def check(communicator: rr.Communicator) -> bytes:
        mine = np.random.default_rng(communicator.rank).standard_normal(5001).astype(np.float32)
        for asked in ({}, {"deterministic": True}):
            assert isinstance(caught(communicator.allreduce, mine, algorithm="ring", **asked), rr.ConfigError)
        result = communicator.allreduce(mine)
        assert result.tobytes() == communicator.allreduce(mine, deterministic=True).tobytes()
        return result.tobytes()

    config = rr.Config(timeout_s=30.0, deterministic=True)
    results = [each for node_size in (None, 1, 2) for each in run_ranks(4, check, node_size=node_size, config=config)]
    assert len(set(results)) == 1


def test_a_bound_call_outlives_its_plan() -> None:
    """One rank keeps so many buffers that its plan for the first is dropped; the call on it is the same as before.

    The call was bound to the plan, which went on with its views gone, in step with nobody.
    """

    def body(communicator: rr.Communicator) -> float:
        first = communicator.empty(5000)
        kept = []
        for _ in range(300):
            first[:] = communicator.rank + 1
            communicator.allreduce(first, out=first)
            other = communicator.empty(5000)
            other[:] = communicator.rank + 1
            communicator.allreduce(other, out=other)
            if communicator.rank == 1:
                kept.append(other)
        return float(first.min() + first.max())

    assert run_ranks(2, body) == [6.0, 6.0]


@pytest.mark.parametrize("node_size", [None, 1])
def test_the_plan_of_a_repeated_call_stays(node_size: int | None) -> None:
    """Where there are too many plans, those go whose arrays are gone, and not one that is only repeated."""

    def body(communicator: rr.Communicator) -> None:
        first, memory, repeats = communicator.empty(5000), [], communicator._context.plans.repeats
        communicator.allreduce(first, out=first)
        (plan,) = [repeat.plan for repeat in repeats.values()]
        for turn in range(300):
            memory.append(communicator.empty(5000))
            view = memory[-1][:]
            communicator.allreduce(view, out=view)
            del view
            first[:] = turn
            communicator.allreduce(first, out=first)
            assert (first == 2 * turn).all()
            assert [repeat.plan for repeat in repeats.values()] == [plan]
        assert len(communicator._context.plans._plans) < 300

    run_ranks(2, body, node_size=node_size)


@pytest.mark.parametrize("name", ["allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall"])
@pytest.mark.parametrize("node_size", [None, 1])
def test_new_results_that_are_kept_leave_few_plans(node_size: int | None, name: str) -> None:
    """Where a rank keeps all results of a call that it repeats, each is elsewhere, and old plans for them go."""

    def body(communicator: rr.Communicator) -> int:
        array, kept = communicator.empty(2 * 5000), []
        for turn in range(400):
            array[:] = turn + communicator.rank
            result = getattr(communicator, name)(array)
            expected_first = turn if name in ("broadcast", "allgather", "alltoall") else 2 * turn + 1
            assert result[0] == expected_first
            if communicator.rank == 1:
                kept.append(result)
        assert communicator.tallies[name].calls == 400
        return len(communicator._context.plans._plans)

    assert max(run_ranks(2, body, node_size=node_size)) < 300


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_results_go_into_views_of_any_stride(dtype: str) -> None:
    """Reversed views are reduced in place, for 16-bit floats too, whose kernels take no negative strides."""

    def body(communicator: rr.Communicator) -> list[float]:
        array = np.arange(5).astype(dtype)
        communicator.allreduce(array[::-1], out=array[::-1])
        return array.tolist()

    assert run_ranks(2, body) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2


def test_rows_of_ragged_calls_leave_nothing_behind() -> None:
    """An allgather with other rows each time is one kind of call, not ever more of them."""

    def body(communicator: rr.Communicator) -> int:
        for rows in range(20):
            communicator.allgather(np.ones((rows + communicator.rank, 2)))
        return len(communicator._context.plans.choices)

    assert run_ranks(2, body) == [1, 1]


@pytest.mark.parametrize(("private_memory", "node_size"), [(True, None), (False, None), (True, 1)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_calls_that_come_again(size: int, private_memory: bool, node_size: int | None) -> None:
    """Collectives give NumPy's results again and again: on arrays that stay and whose content changes, in any memory.

    Inputs are ranks' own, the arena's on some ranks, and small and large; results go to new arrays, to given ones, and
    in place.
    """
    config = Config(timeout_s=30, private_memory=private_memory)

    def body(communicator: rr.Communicator) -> None:
        rank = communicator.rank

        def kept(count: int, memory: str) -> np.ndarray:
            if memory == "gaps":
                return np.empty(2 * count, np.int64)[::2]
            return communicator.empty(count, np.int64) if memory == "shared" else np.empty(count, np.int64)

        for count in (3, 40_003):
            for memory in ("private", "shared", "shared" if rank == 0 else "private", "gaps"):
                whole, out = kept(count * size, memory), kept(count * size, memory)
                given, part, root = kept(count, memory), kept(count, memory), size - 1
                for turn in range(3):
                    wholes = [np.arange(count * size) * (1 + q) + turn for q in range(size)]
                    total, own = sum(wholes), slice(rank * count, (rank + 1) * count)
                    pieces = np.concatenate([each[own] for each in wholes])
                    whole[:] = wholes[rank]
                    assert_equal(communicator.allreduce(whole), total)
                    assert_equal(communicator.allreduce(whole, out=out), total)
                    assert_equal(communicator.alltoall(whole), pieces)
                    assert_equal(communicator.alltoall(whole, out=out), pieces)
                    assert_equal(communicator.alltoall(whole, [count] * size)[0], pieces)
                    assert_equal(communicator.broadcast(whole, root), wholes[root])
                    assert_equal(communicator.broadcast(whole, root, out=out), wholes[root])
                    assert_equal(communicator.reduce_scatter(whole), total[own])
                    assert_equal(communicator.reduce_scatter(whole, out=part), total[own])
                    assert_equal(whole, wholes[rank])
                    assert_equal(communicator.reduce_scatter(whole, out=whole[own]), total[own])
                    whole[:] = wholes[rank]
                    assert_equal(communicator.broadcast(whole, root, out=whole), wholes[root])
                    given[:] = whole[own] = wholes[rank][own]
                    gathered = np.concatenate([each[q * count :][:count] for q, each in enumerate(wholes)])
                    assert_equal(communicator.allgather(given), gathered)
                    assert_equal(communicator.allgather(given, out=out), gathered)
                    assert_equal(communicator.allgather(whole[own], out=whole), gathered)
                    for room in (None, out):
                        rows = communicator.gather(given, root, out=room)
                        assert rank != root or np.array_equal(rows, gathered)
                        summed = communicator.reduce(whole, root, out=room)
                        assert rank != root or np.array_equal(summed, size * gathered)
                    whole[:] = wholes[rank]
                    for array in (whole, whole if rank == root else None):
                        for room in (None, part, whole[own] if rank == root else part):
                            assert_equal(communicator.scatter(array, root, out=room), wholes[root][own])
                    assert_equal(
                        communicator.allreduce(given, out=given),
                        sum(each[q * count :][:count] for q, each in enumerate(wholes)),
                    )

    run_ranks(size, body, node_size=node_size, config=config)


@pytest.mark.parametrize("node_size", [None, 1, 2])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_no_rank_leaves_before_all_have_come(size: int, node_size: int | None) -> None:
    """A barrier, and calls of which a rank could have its part early, wait for all, when they are known, too."""
    came = [0] * size

    def body(communicator: rr.Communicator) -> None:
        array = np.ones(3)
        calls: list[Callable[[], object]] = [
            communicator.barrier,
            lambda: communicator.broadcast(array, size - 1),
            lambda: communicator.reduce(array, 1),
            lambda: communicator.gather(array),
            lambda: communicator.scatter(np.ones(size)),
            lambda: communicator.allreduce(np.empty(0)),
        ]
        for turn in range(1, 8):
            for number, call in enumerate(calls):
                came[communicator.rank] = mine = turn * len(calls) + number
                call()
                assert min(came) >= mine

    in_world(size, node_size, body)


@pytest.mark.parametrize("node_size", [None, 1])
def test_results_of_any_size_come_again(node_size: int | None) -> None:
    """A rank that passes the same, or nothing, gets what the others give then; metrics count the bytes of that."""

    def body(communicator: rr.Communicator) -> None:
        rank, size, nbytes = communicator.rank, communicator.size, {"scatter": 0, "allgather": 0, "gather": 0}
        same_rows = np.full(2, 7.0)
        for turn in range(8):
            shape, dtype = [((3, 2), np.float32), ((5001,), np.int64), ((1, 2, 2), np.float64)][turn % 3]
            whole = np.arange(size * prod(shape)).reshape(size * shape[0], *shape[1:]).astype(dtype) + turn
            part = communicator.scatter(whole if rank == 1 else None, 1)
            assert part.dtype == dtype
            assert_equal(part, whole[rank * shape[0] :][: shape[0]])
            nbytes["scatter"] += whole.nbytes if rank == 1 else part.nbytes
            rows = np.full(turn, 7.0) if rank == 1 else same_rows
            together = np.full(2 * (size - 1) + turn, 7.0)
            assert_equal(communicator.allgather(rows), together)
            nbytes["allgather"] += together.nbytes
            gathered = communicator.gather(rows)
            if rank == 0:
                assert_equal(gathered, together)
            nbytes["gather"] += together.nbytes if rank == 0 else rows.nbytes
        assert {name: communicator.tallies[name].nbytes for name in nbytes} == nbytes

    run_ranks(3, body, node_size=node_size)


@pytest.mark.parametrize("node_size", [None, 1])
def test_ragged_results_go_where_there_is_room(node_size: int | None) -> None:
    """Rows of any number go into a given array that holds them, also one with gaps; one that does not is refused."""

    def body(communicator: rr.Communicator) -> None:
        rank = communicator.rank
        rows = np.full((rank + 1, 2), rank, np.float32)
        wanted = np.repeat(np.arange(3, dtype=np.float32), [2 * (q + 1) for q in range(3)]).reshape(6, 2)
        for out in (np.empty((6, 2), np.float32), np.empty((12, 2), np.float32)[::2]):
            assert communicator.allgather(rows, out=out) is out
            assert_equal(out, wanted)
        splits = [1 + (rank == peer) for peer in range(3)]
        sent = np.full(4, rank, np.int32)
        received, counts = communicator.alltoall(sent, splits, out=np.empty(4, np.int32))
        assert counts == splits
        assert_equal(received, np.repeat(np.arange(3, dtype=np.int32), splits))
        for call in (
            lambda: communicator.allgather(rows, out=np.empty((6 + (rank == 1), 2), np.float32)),
            lambda: communicator.alltoall(sent, splits, out=np.empty(4 + (rank == 1), np.int32)),
        ):
            error = caught(call)
            assert isinstance(error, rr.MismatchError)
            assert "out has" in error.values[1]
            assert "out has" not in error.values[0]
        for out in (np.empty((6, 2)), np.empty((6, 3), np.float32), np.empty(6, np.float32)):
            with pytest.raises((rr.UnsupportedBufferError, rr.MismatchError)):
                communicator.allgather(rows, out=out)
        assert_equal(communicator.allgather(rows), wanted)

    run_ranks(3, body, node_size=node_size)


@pytest.mark.parametrize("count", [16_383, 16_384, 65_537])
@pytest.mark.parametrize("algorithm", [None, "one_shot"])
def test_averages_of_integers_may_outgrow_the_mailbox(count: int, algorithm: str | None) -> None:
    """They are summed in 64 bits, which are eight times as many bytes as those by which the algorithm was chosen."""

    def check(communicator: rr.Communicator) -> None:
        mine = np.full(count, communicator.rank + 1, np.int8)
        assert (communicator.allreduce(mine, "average", algorithm=algorithm) == 2).all()

    run_ranks(3, check)


def test_uneven_rows_that_lie_in_the_result() -> None:
    """Rows that are a part of the result, but not where they belong, are not overwritten before others have read."""

    def body(communicator: rr.Communicator) -> None:
        rank, row = communicator.rank, 5000
        wanted = np.repeat(np.arange(3.0), [row * (q + 1) for q in range(3)]).reshape(6, row)
        for _ in range(5):
            out = np.full((6, row), -1.0)
            mine = out[2:4] if rank == 1 else np.empty((rank + 1, row))
            mine[:] = rank
            assert_equal(communicator.allgather(mine, out=out), wanted)

    run_ranks(3, body)


def test_arrays_that_have_changed_are_looked_at_again() -> None:
    """A bound call notices that a result became read-only."""

    def body(communicator: rr.Communicator) -> None:
        array = np.ones(4)
        communicator.allreduce(array, out=array)
        array.flags.writeable = False
        with pytest.raises((rr.UnsupportedBufferError, rr.MismatchError)):
            communicator.allreduce(array, out=array)
        assert array.tolist() == [2.0] * 4

    run_ranks(2, body)


def test_a_repeated_call_that_cannot_begin_is_refused() -> None:
    """Where there is no memory for the result of one rank, all ranks hear of it, and go on."""

    def body(communicator: rr.Communicator) -> None:
        array = np.ones(20_000)
        communicator.allreduce(array)

        def full(*_: object) -> None:
            raise MemoryError("full")

        lend = communicator._context.arena.result
        if communicator.rank == 1:
            communicator._context.arena.result = full  # type: ignore[method-assign]
        with pytest.raises(MemoryError if communicator.rank == 1 else rr.MismatchError):
            communicator.allreduce(array)
        communicator._context.arena.result = lend  # type: ignore[method-assign]
        assert_equal(communicator.allreduce(array), np.full(20_000, 2.0))

    run_ranks(2, body)


def test_a_call_in_which_a_rank_gave_up_is_not_repeated() -> None:
    """Another thread may give up during a call, which ends well; the next one is refused as others are."""

    def body(communicator: rr.Communicator) -> None:
        class GivingUp(rr.Instrument):
            def collective_finished(self, *_: object) -> None:
                communicator.abort(RuntimeError("enough"))

        array, observer = np.ones(3), GivingUp()
        communicator.instruments.add(observer)
        communicator.allreduce(array, out=array)
        communicator.instruments.remove(observer)
        with pytest.raises(rr.TransportError, match="enough"):
            communicator.allreduce(array, out=array)
        assert array.tolist() == [2.0] * 3

    run_ranks(2, body)
