"""Objects that ranks send each other, without torch; those with tensors are in test_torch_functions.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ringreduce as rr

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


def test_what_cannot_be_pickled_is_refused_on_all_ranks(world: rr.Communicator) -> None:
    """With whose object it is; afterwards all go on."""
    mine = (lambda: None) if world.rank == 0 else 1
    for call in (rr.broadcast_object, rr.allgather_object):
        with pytest.raises(rr.ConfigError, match="the object of rank 0 cannot be sent: "):
            call(mine)
    assert rr.broadcast_object(world.rank) == 0
