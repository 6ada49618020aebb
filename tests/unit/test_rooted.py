"""Reduce, gather and scatter as users call them: who gets what, ``out=``, and what is refused on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from suites.conformance import assert_equal

import ringreduce as rr
from ringreduce.common.config import Config
from ringreduce.testing import caught, run_ranks

WORLDS = pytest.mark.parametrize(("size", "node_size"), [(1, None), (2, None), (3, None), (3, 1), (3, 2), (4, 2)])
NODES = pytest.mark.parametrize("node_size", [None, 1])


def in_world(size: int, node_size: int | None, function: Callable[[rr.Communicator], object], **settings) -> list:
    config = Config(timeout_s=20.0, segment_nbytes=32 << 10, **settings)
    return run_ranks(size, function, node_size=node_size, config=config)


def test_numbers_are_reduced_to_numbers() -> None:
    """A number on each rank becomes one at the root, of the same type."""

    def check(communicator: rr.Communicator) -> object:
        assert communicator.reduce(np.float32(0.5), 1, "average") == (0.5 if communicator.rank == 1 else None)
        return communicator.reduce(communicator.rank + 1, 1)

    results = in_world(3, None, check)
    assert results == [None, 6, None]
    assert type(results[1]) is int


@pytest.mark.parametrize("op", ["sum", "average"])
@pytest.mark.parametrize(("size", "node_size"), [(4, 2), (3, 1), (3, None)])
def test_deterministic_reductions_have_the_bits_of_the_allreduce(size: int, node_size: int | None, op: str) -> None:
    """Where bits must not depend on placement, those at a root are those of the allreduce, on any nodes."""

    def check(communicator: rr.Communicator) -> list[bytes]:
        found = []
        for count in (7, 20_011):
            mine = np.random.default_rng((count, communicator.rank)).standard_normal(count).astype(np.float32)
            same = communicator.allreduce(mine, op)
            for root in range(size):
                result = communicator.reduce(mine, root, op)
                if result is not None:
                    assert result.tobytes() == same.tobytes()
            found.append(same.tobytes())
        error = caught(communicator.reduce, np.ones(3), algorithm="load" if node_size is None else "chain")
        assert isinstance(error, rr.ConfigError)
        return found

    in_world(size, node_size, check, deterministic=True)


@NODES
def test_a_wrong_root_op_or_shape_is_a_mismatch_on_all_ranks(node_size: int | None) -> None:
    """Whatever differs between the ranks, all of them get the same error, and go on."""

    def check(communicator: rr.Communicator) -> list[str]:
        odd, array = communicator.rank == 1, np.ones((3, 2), np.float32)
        # Python 3.10 makes two calls of one with a condition in it, and ranks in different calls are not in step.
        op, dtype, name = ("max", np.float64, "gather") if odd else ("sum", np.float32, "scatter")
        given = None if odd else array
        wrong: list[Callable[[], object]] = [
            lambda: communicator.reduce(array, int(odd)),
            lambda: communicator.reduce(array, 0, op),
            lambda: communicator.reduce(array[: 3 - odd]),
            lambda: communicator.reduce(array.astype(dtype)),
            lambda: communicator.gather(array, int(odd)),
            lambda: communicator.gather(array[:, : 2 - odd]),
            lambda: communicator.gather(array, out=np.ones((9 + (communicator.rank == 0), 2), np.float32)),
            lambda: communicator.scatter(array, int(odd)),
            lambda: communicator.scatter(array[:, : 2 - odd]),
            lambda: communicator.scatter(array, out=np.ones((1, 2 - odd), np.float32)),
            lambda: communicator.scatter(given, out=np.ones((1, 2), dtype)),
            lambda: getattr(communicator, name)(array),
        ]
        texts = []
        for call in wrong:
            error = caught(call)
            if not (odd and isinstance(error, rr.UnsupportedBufferError)):  # its own mistake, seen at once
                assert isinstance(error, rr.MismatchError), error
            texts.append(str(error))
            assert communicator.allreduce(array)[0, 0] == 3.0
        return texts

    first, second, third = in_world(3, node_size, check)
    assert first == third
    assert sum(mine == other for mine, other in zip(first, second, strict=True)) == len(first) - 1
    assert "rank 1: scatter(root 0, parts of shape 1x2, float64)" in first[10]
    assert "out has 10 rows, and the result 9" in first[6]


@NODES
def test_what_a_rank_refuses_ends_for_all(node_size: int | None) -> None:
    """A mistake that one rank sees by itself is its own error, and the others hear the reason."""

    def check(communicator: rr.Communicator) -> None:
        array, root = np.ones((4, 2), np.float32), communicator.rank == 0
        mistakes = (array, np.ones(()), np.ones((3, *[1] * 31)), "ring", 3, np.float32(1))
        given: tuple[Any, ...] = mistakes if root else (None, None, None, None, 0, array[0])
        for call, words in (
            (lambda: communicator.scatter(given[0]), "4 rows do not divide into 3 equal parts"),
            (lambda: communicator.scatter(None), "the root has to pass an array"),
            (lambda: communicator.scatter(given[1]), "at least one dimension"),
            (lambda: communicator.scatter(given[2], algorithm=given[3]), "'ring'"),
            (lambda: communicator.reduce(array, given[4]), "root must be a rank, 0 to 2, got 3"),
            (lambda: communicator.reduce(array, out=array[:2]), r"out has shape \(2, 2\)"),
            (lambda: communicator.gather(given[5]), "at least one dimension"),
            (lambda: communicator.gather(array, out=np.ones((12, 2))), "out has shape"),
        ):
            error = caught(call)
            assert isinstance(error, (rr.ConfigError, rr.UnsupportedBufferError) if root else rr.MismatchError)
            with pytest.raises(type(error), match=words):
                raise error
            assert communicator.allreduce(array)[0, 0] == 3.0

    in_world(3, node_size, check)


def test_scatter_tells_shapes_of_many_dimensions() -> None:
    """Ranks that pass nothing get arrays of up to 32 dimensions; more are refused."""

    def check(communicator: rr.Communicator) -> None:
        for extra in (0, 1, 31):
            whole = np.arange(4.0).reshape(4, *[1] * extra)
            part = communicator.scatter(whole if communicator.rank == 1 else None, 1)
            assert_equal(part, whole[2 * communicator.rank :][:2])
        if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
            error = caught(communicator.scatter, np.ones((2, *[1] * 32)) if communicator.rank == 0 else None)
            assert isinstance(error, rr.UnsupportedBufferError if communicator.rank == 0 else rr.MismatchError)

    in_world(2, None, check)


def test_one_call_after_the_other_reads_its_own_data() -> None:
    """A rank that is ahead, as it has nothing to wait for, does not overwrite what the others still read."""

    def check(communicator: rr.Communicator) -> None:
        rank, size = communicator.rank, communicator.size
        for turn in range(60):
            root = turn % size
            for count in (3, 5000):
                mine = np.full(count, 10.0 * turn + rank)
                total, rows = communicator.reduce(mine, root), communicator.gather(mine[None], root)
                whole = np.repeat(mine, size) + np.arange(size * count)
                part = communicator.scatter(whole if rank == root else None, root)
                mine[:] = whole[:] = -1
                if rank == root:
                    assert (total == 10.0 * turn * size + size * (size - 1) / 2).all()
                    assert (rows == 10.0 * turn + np.arange(size)[:, None]).all()
                assert (part == 10.0 * turn + root + np.arange(rank * count, (rank + 1) * count)).all()

    for node_size in (None, 1):
        in_world(3, node_size, check)
