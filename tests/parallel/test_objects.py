"""Objects that ranks send each other, without torch; those with tensors are in test_torch_functions.py."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.collectives import pickles
from ringreduce.testing import caught
from ringreduce.training.calls.objects import alltoall_object

LARGE = 100_003  # elements of arrays whose memory is left out of the pickle


def arrays_of(rank: int) -> dict[str, Any]:
    """Arrays of many kinds that every rank can make for every rank."""
    large = np.arange(LARGE, dtype=np.float64) + rank
    fixed = np.arange(LARGE) - rank
    fixed.flags.writeable = False
    return {
        "large": large,
        "large in Fortran's order": np.asfortranarray(large[:-1].reshape(2, -1)),
        "strided": large[::2],
        "read-only": fixed,
        "broadcast": np.broadcast_to(np.float32(rank), (1 << 16,)),
        "small": np.arange(3, dtype=np.int8) * rank,
        "scalar": np.array(1.5 + rank),
        "number": np.float16(rank),
        "empty": np.empty((0, 3), np.complex64),
        "big-endian": np.full(LARGE, rank, ">i4"),
        "records": np.zeros(LARGE, [("a", "f4"), ("b", "i8")]),
        "words": np.array([{"of": rank}, "any", None], object),
    }


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert type(actual[name]) is type(value), name
        assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape), name
        assert np.array_equal(actual[name], value), name


@pytest.mark.parametrize("root", ["first", "last"])
def test_arrays_inside_objects_are_broadcast(world: rr.Communicator, root: str) -> None:
    """Of any dtype, order and strides, with their values; those that could be written to still can be."""
    sender = 0 if root == "first" else world.size - 1
    mine = arrays_of(world.rank)
    received = rr.broadcast_object(mine, sender)
    assert (received is mine) == (world.rank == sender)
    assert_equal(received, arrays_of(sender))
    assert received["large in Fortran's order"].flags.f_contiguous
    for name in ("large", "strided", "small", "scalar", "empty"):
        assert received[name].flags.writeable, name
    received["large"][:] = world.rank  # everybody's own
    assert rr.allgather_object(float(received["large"][0])) == list(range(world.size))


@pytest.mark.sizes(2, 3, 4)
def test_an_array_that_occurs_twice_is_sent_once(world: rr.Communicator) -> None:
    """And is one array on the other side, too."""
    large = np.ones(LARGE)
    rr.broadcast_object(None)
    before = rr.metrics().collectives["broadcast"].nbytes
    first, second = rr.broadcast_object([large, large], world.size - 1)
    assert first is second
    assert large.nbytes < rr.metrics().collectives["broadcast"].nbytes - before < 1.1 * large.nbytes


def test_small_objects_come_whole(world: rr.Communicator) -> None:
    """Of all sizes around the one that travels with the numbers before it, whether rank by rank or together."""
    for nbytes in (0, 1, 7, *range(world.parcel.nbytes - 60, world.parcel.nbytes + 20)):
        root = nbytes % world.size
        assert rr.broadcast_object(bytes([world.rank]) * nbytes, root) == bytes([root]) * nbytes
        everyone = rr.allgather_object(bytes([world.rank]) * (nbytes + world.rank))
        assert everyone == [bytes([rank]) * (nbytes + rank) for rank in range(world.size)]


def test_objects_are_gathered(world: rr.Communicator) -> None:
    """Of different sizes, in rank order, arrays included; under a name and without one."""
    for name in (None, "objects"):
        everyone = rr.allgather_object({**arrays_of(world.rank), "more": np.zeros(1000 * world.rank)}, name)
        assert [each.pop("more").size for each in everyone] == [1000 * rank for rank in range(world.size)]
        for rank, each in enumerate(everyone):
            assert_equal(each, arrays_of(rank))


@pytest.mark.sizes(3, 4)
def test_objects_stay_in_their_process_set(world: rr.Communicator) -> None:
    """Roots are ranks of the world; ranks outside the set send and get nothing."""
    last = world.size - 1
    some = rr.add_process_set([0, last])
    if some.included():
        assert rr.broadcast_object({"from": world.rank}, last, process_set=some) == {"from": last}
        assert rr.allgather_object(world.rank, process_set=some) == [0, last]
    rr.remove_process_set(some)


@pytest.fixture
def limited(begin_world: Callable[..., None]) -> int:
    """A world in which objects may have so many bytes."""
    begin_world(OBJECT_LIMIT="1M")
    return 1 << 20


@pytest.mark.parametrize("kind", ["in the pickle", "beside it"])
def test_an_object_that_is_too_large_is_refused_on_all_ranks(limited: int, kind: str) -> None:
    """With the rank, the bytes and the limit, while nobody else has taken memory for it; afterwards all go on."""
    last, large = rr.size() - 1, bytes(limited) if kind == "in the pickle" else np.zeros(limited, np.uint8)
    tracemalloc.start()
    error = caught(rr.broadcast_object, large if rr.rank() == last else None, last)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(error, rr.ConfigError)
    found = re.fullmatch(
        rf"the object of rank {last} has (\d+) bytes, more than RINGREDUCE_OBJECT_LIMIT={limited}: .*", str(error)
    )
    assert found, error
    assert limited < int(found[1]) < limited + 1000  # and the pickle's own
    assert peak < limited // 2 or rr.rank() == last
    assert len(rr.broadcast_object(bytes(limited - 1000), last)) == limited - 1000


def test_objects_that_are_too_large_together_are_refused_on_all_ranks(limited: int) -> None:
    """Though each would do alone; the largest is named."""
    share = limited // rr.size()
    assert [len(each) for each in rr.allgather_object(bytes(share - 1000))] == [share - 1000] * rr.size()
    tracemalloc.start()
    error = caught(rr.allgather_object, bytes(share + rr.rank()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(error, rr.ConfigError)
    assert str(error).startswith(f"the object of rank {rr.size() - 1} has ")
    assert ("with those of the other ranks" in str(error)) == (rr.size() > 1)
    assert f"more than RINGREDUCE_OBJECT_LIMIT={limited}: " in str(error)
    assert peak < 3 * share + limited // 8  # the object and its pickle
    assert rr.allgather_object(rr.rank()) == list(range(rr.size()))


def test_each_rank_gets_an_object_of_its_own(world: rr.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """From those that send it one, in pieces smaller than the arrays: from the rank before, and two others."""
    monkeypatch.setattr(pickles, "_PIECE_NBYTES", 70_001)
    mine = {(world.rank + 1) % world.size: arrays_of(world.rank)}
    if world.rank == world.size - 1:
        mine[world.rank] = None
    if world.rank == 0:
        mine[world.size // 2] = arrays_of(0)
    got = alltoall_object(mine)
    expected = {
        **{(world.rank - 1) % world.size: arrays_of((world.rank - 1) % world.size)},
        **({world.rank: None} if world.rank == world.size - 1 else {}),
        **({0: arrays_of(0)} if world.rank == world.size // 2 else {}),
    }
    assert got.keys() == expected.keys()
    for source, sent in expected.items():
        if sent is None:
            assert got[source] is None
        else:
            assert_equal(got[source], sent)
    assert alltoall_object({}) == {}


def test_an_object_for_one_rank_that_does_not_pickle_is_refused_on_all(world: rr.Communicator) -> None:
    """By the number of its rank; the next ones arrive."""
    last = world.size - 1
    with pytest.raises(rr.ConfigError, match=f"the object of rank {last} cannot be sent"):
        alltoall_object({0: (lambda: None) if world.rank == last else 1})
    assert alltoall_object({last: world.rank}) == (dict(enumerate(range(world.size))) if world.rank == last else {})
