"""The calls of docs/migrate/mpi4py.md beside those of mpi4py, in one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size


@pytest.fixture(params=["a node", "apart"])
def _nodes(request: pytest.FixtureRequest, nodes_of: Callable[[int | None], None]) -> None:
    nodes_of(None if request.param == "a node" else 1)


pytestmark = pytest.mark.usefixtures("_nodes")


def numbers(count: int, dtype: str = "float64") -> Any:
    """Return small whole numbers, others on each rank, some of them equal to another rank's."""
    return np.random.default_rng(RANK).integers(0, 9, count).astype(dtype)


@pytest.mark.parametrize("count", [1, 3, 1001])
def test_scatterv(count: int) -> None:
    """Rows by counts that the root knows, one of them 0, of any shape, also into an array that is there."""
    counts = [(rank * count) % (count + 2) for rank in range(SIZE)]
    rows = np.arange(2.0 * sum(counts)).reshape(-1, 2)
    for root in {0, SIZE - 1}:
        wanted = np.empty((counts[RANK], 2))
        COMM.Scatterv([rows, [2 * each for each in counts], MPI.DOUBLE] if root == RANK else None, wanted, root)
        part = rr.scatter(rows if root == RANK else None, root, counts if root == RANK else ())
        np.testing.assert_array_equal(part, wanted)
        out = np.empty_like(wanted)
        assert rr.scatter(rows, root, splits=counts, out=out) is out
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("count", [SIZE, 1001])
def test_reduce_scatter_with_counts(count: int) -> None:
    counts = [count - (SIZE - 1), *[1] * (SIZE - 1)]
    wanted = np.empty(counts[RANK])
    COMM.Reduce_scatter(numbers(count), wanted, counts, MPI.SUM)
    np.testing.assert_array_equal(rr.reduce_scatter(numbers(count), splits=counts), wanted)


@pytest.mark.parametrize(("ours", "theirs"), [(rr.maxloc, MPI.MAXLOC), (rr.minloc, MPI.MINLOC)])
def test_locations(ours: Any, theirs: MPI.Op) -> None:
    """Of equal elements the smallest location counts, be it a rank's number or a place that the rank gives."""
    mine = numbers(101)
    places = np.arange(101)[::-1] * (SIZE - RANK)
    pairs = np.zeros(101, np.dtype([("value", "f8"), ("place", "i4")], align=True))  # as a struct of C
    for given in (None, places, places.astype(np.int16), places.astype(np.uint32)):
        pairs["value"], pairs["place"] = mine, RANK if given is None else given
        wanted = np.empty_like(pairs)
        COMM.Allreduce([pairs, 101, MPI.DOUBLE_INT], [wanted, 101, MPI.DOUBLE_INT], theirs)
        values, where = ours(mine, given)
        np.testing.assert_array_equal(values, wanted["value"])
        np.testing.assert_array_equal(where, wanted["place"])
    assert ours(float(RANK)) == COMM.allreduce((float(RANK), RANK), theirs)
    values, where = ours(np.array([np.nan if RANK == SIZE - 1 else float(RANK)]))
    assert np.isnan(values[0])
    assert where[0] == SIZE - 1
    for wrong in (np.zeros(100, int), 1.5, np.uint64(1 << 63)):
        with pytest.raises(rr.UnsupportedBufferError, match="as the location of each element"):
            ours(mine, wrong)


@pytest.mark.sizes(3, 4)
def test_locations_in_a_process_set_are_ranks_of_the_world() -> None:
    some = rr.add_process_set([SIZE - 2, SIZE - 1])
    if some.included():
        value, where = rr.maxloc(float(RANK), process_set=some)
        assert (value, where) == (SIZE - 1, SIZE - 1)
        assert rr.broadcast(np.array([RANK]), int(where), process_set=some)[0] == SIZE - 1
    rr.remove_process_set(some)


@pytest.mark.parametrize("wrong", [[[1, 2], [3]], 1j, "text"])
def test_what_has_no_largest_element_is_refused_everywhere(wrong: Any) -> None:
    with pytest.raises(rr.RingReduceError):
        rr.maxloc(wrong if RANK == 0 else 1.0)
    assert rr.maxloc(float(RANK))[1] == SIZE - 1


@pytest.mark.parametrize(
    "op",
    ["band", "bor", "bxor", "land", "lor", "lxor", "min", "max", "sum", "product"],
)
def test_operations_and_prefixes(op: str) -> None:
    theirs = getattr(MPI, {"product": "PROD"}.get(op, op.upper()))
    mine = numbers(101, "int64")
    pairs: list[tuple[Any, Any]] = [(rr.allreduce, COMM.Allreduce), (rr.scan, COMM.Scan), (rr.exscan, COMM.Exscan)]
    for ours, wanted_by in pairs:
        wanted, made = np.full(101, -1), np.full(101, -1)
        wanted_by(mine, wanted, theirs)
        ours(mine, op, out=made)
        if RANK or ours is not rr.exscan:
            np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize("count", [1, 40_001])
def test_neighbours_of_an_edge(count: int) -> None:
    """A row of ranks, whose ends have one neighbour: what would come from none leaves the array as it is."""
    left, right = RANK - 1, RANK + 1
    ours = rr.PROC_NULL if left < 0 else left, rr.PROC_NULL if right == SIZE else right
    theirs = MPI.PROC_NULL if left < 0 else left, MPI.PROC_NULL if right == SIZE else right
    mine = np.full(count, float(RANK))
    for to, source in ((0, 1), (1, 0)):
        wanted, out = np.full(count, -1.0), np.full(count, -1.0)
        COMM.Sendrecv(mine, theirs[to], 0, wanted, theirs[source], 0)
        assert rr.sendrecv(mine, ours[to], out, ours[source]) is out
        np.testing.assert_array_equal(out, wanted)
        out[:] = -1
        coming = rr.irecv(out, ours[source], 3)
        sent = rr.isend(mine, ours[to], 3)
        assert coming.wait() == ours[source]
        assert sent.wait() == ours[to]
        np.testing.assert_array_equal(out, wanted)
    rr.send(mine, rr.PROC_NULL)
    assert rr.recv(mine, rr.PROC_NULL) is rr.PROC_NULL
    assert (mine == RANK).all()
    with pytest.raises(rr.ConfigError, match="tags are at least 0"):
        rr.send(mine, rr.PROC_NULL, -1)


def test_wrong_counts_end_the_call_everywhere() -> None:
    rows = np.zeros((3 * SIZE, 2))
    with pytest.raises(rr.RingReduceError, match=f"{4 * SIZE}|splits"):
        rr.scatter(rows, 0, [4] * SIZE)
    if SIZE > 1:
        with pytest.raises(rr.MismatchError, match="scatter by splits"):
            rr.scatter(rows, 0, [3] * SIZE if RANK == 0 else None)
    for wrong in (np.array(1.0), 2.5):
        with pytest.raises(rr.RingReduceError):
            rr.scatter(wrong if RANK == SIZE - 1 else rows if RANK == 0 else None, 0, [3] * SIZE)
    assert len(rr.scatter(rows, 0, [3] * SIZE)) == 3
