"""The backend of torch.distributed: its collectives against closed forms, and training against the same on Gloo."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch_models import DTYPES  # noqa: E402

import ringreduce as rr  # noqa: E402
import ringreduce.torch  # noqa: E402  # registers the backend, where torch has not done so
from ringreduce.common.errors import CollectiveTimeoutError, ConfigError, MismatchError, TransportError  # noqa: E402
from ringreduce.torch.distributed import process_group  # noqa: E402

# Torch has changed their names, and warns of the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
INTEGERS = [each for each in DTYPES if not (each.is_floating_point or each.is_complex)]


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("ringreduce")
    yield
    dist.destroy_process_group()


@pytest.fixture
def rank() -> int:
    return dist.get_rank()


@pytest.fixture
def size() -> int:
    return dist.get_world_size()


def small(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what every dtype holds, with its sums and products over 4 ranks, without rounding."""
    values = (torch.arange(count) + rank) % 3
    if dtype.is_complex:
        return torch.complex(values.double(), (values - rank).double()).to(dtype)
    return values.to(dtype)


def all_of(size: int, count: int, dtype: torch.dtype) -> np.ndarray:
    """Return what all ranks have, a row each, in a type that NumPy computes in."""
    wide = torch.complex128 if dtype.is_complex else dtype if dtype in INTEGERS else torch.float64
    return torch.stack([small(rank, count, dtype).to(wide) for rank in range(size)]).numpy()


REFERENCE: dict[str, Callable[[np.ndarray], Any]] = {
    "SUM": lambda every: every.any(0) if every.dtype == bool else every.sum(0, dtype=every.dtype),
    "PRODUCT": lambda every: every.all(0) if every.dtype == bool else every.prod(0, dtype=every.dtype),
    "MIN": lambda every: every.min(0),
    "MAX": lambda every: every.max(0),
    "AVG": lambda every: every.all(0) if every.dtype == bool else every.sum(0) / len(every),
    "BAND": np.bitwise_and.reduce,
    "BOR": np.bitwise_or.reduce,
    "BXOR": np.bitwise_xor.reduce,
}


def expected(op: str, every: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    result = torch.from_numpy(np.asarray(REFERENCE[op](every)))
    return result.to(torch.float64).trunc().to(dtype) if dtype in INTEGERS and op == "AVG" else result.to(dtype)


def takes(op: str, dtype: torch.dtype) -> bool:
    if op in ("BAND", "BOR", "BXOR"):
        return dtype in INTEGERS
    return not dtype.is_complex or op in ("SUM", "AVG")


OPS_AND_DTYPES = [(op, dtype) for op in REFERENCE for dtype in DTYPES if takes(op, dtype)]


# ---- reductions ----


@pytest.mark.spread("op")
@pytest.mark.parametrize(("op", "dtype"), OPS_AND_DTYPES, ids=lambda value: str(value).removeprefix("torch."))
def test_allreduce(op: str, dtype: torch.dtype, rank: int, size: int):
    """Every operation on every dtype gives on all ranks what NumPy makes of all ranks' values, at awkward sizes."""
    kind = getattr(dist.ReduceOp, op)
    for count in (0, 1, size - 1, size, size + 1, 127):
        want = expected(op, all_of(size, count, dtype), dtype)
        tensor = small(rank, count, dtype)
        dist.all_reduce(tensor, kind)
        torch.testing.assert_close(tensor, want)
        tensor = small(rank, count, dtype)
        work = dist.all_reduce(tensor, kind, async_op=True)
        assert work.wait()
        assert work.is_completed()
        torch.testing.assert_close(tensor, want)


@pytest.mark.spread("op")
@pytest.mark.parametrize("op", list(REFERENCE))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_reduce_and_reduce_scatter(op: str, dtype: torch.dtype, rank: int, size: int):
    """All forms of reduce and reduce_scatter agree with the same rows of NumPy's result."""
    if not takes(op, dtype):
        pytest.skip("floats have no bits to combine")
    kind = getattr(dist.ReduceOp, op)
    count = 3 * size
    want = expected(op, all_of(size, count, dtype), dtype)
    mine = want[3 * rank : 3 * rank + 3]
    for root in range(size):
        tensor = small(rank, count, dtype)
        dist.reduce(tensor, root, kind)
        torch.testing.assert_close(tensor, want if rank == root else small(rank, count, dtype))
    out = torch.empty(3, dtype=dtype)
    reduce_scatter_single(out, small(rank, count, dtype), kind)
    torch.testing.assert_close(out, mine)
    out = torch.empty(3, 1, dtype=dtype)
    reduce_scatter_single(out, small(rank, count, dtype).reshape(size, 3, 1), kind, async_op=True).wait()
    torch.testing.assert_close(out, mine[:, None])
    out = torch.empty(3, dtype=dtype)
    dist.reduce_scatter(out, list(small(rank, count, dtype).split(3)), kind)
    torch.testing.assert_close(out, mine)


def test_reduce_scatter_of_uneven_lists(rank: int, size: int):
    """The arrays for different ranks may differ in shape."""
    inputs = [torch.full((each + 1,), float(rank + each)) for each in range(size)]
    out = torch.empty(rank + 1)
    dist.reduce_scatter(out, inputs)
    torch.testing.assert_close(out, torch.full((rank + 1,), float(sum(range(size)) + rank * size)))


def test_premultiplied_sums(rank: int, size: int):
    """PREMUL_SUM multiplies each rank's values by its own factor before they are added."""
    op = dist._make_nccl_premul_sum(rank + 1.0)
    tensor = torch.ones(5)
    dist.all_reduce(tensor, op)
    torch.testing.assert_close(tensor, torch.full((5,), size * (size + 1) / 2))
    out = torch.empty(2)
    reduce_scatter_single(out, torch.ones(2 * size), op, async_op=True).wait()
    torch.testing.assert_close(out, torch.full((2,), size * (size + 1) / 2))


def test_coalesced_calls(rank: int, size: int):
    """What the coalescing manager collects comes out as if it had been called one by one."""
    tensors = [torch.full((each,), float(rank)) for each in (1, 5, 7)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as coalesced:
        for each in tensors:
            dist.all_reduce(each)
    coalesced.wait()
    assert [each.tolist() for each in tensors] == [[size * (size - 1) / 2] * each for each in (1, 5, 7)]
    outs = [torch.empty(each * size) for each in (1, 3)]
    with dist.distributed_c10d._coalescing_manager():
        for out in outs:
            all_gather_single(out, torch.full((out.numel() // size,), float(rank)))
    assert outs[1].tolist() == [float(each // 3) for each in range(3 * size)]
    halves = [torch.empty(2), torch.empty(4)]
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
        for out in halves:
            reduce_scatter_single(out, torch.ones(out.numel() * size))
    assert [each.tolist() for each in halves] == [[float(size)] * 2, [float(size)] * 4]


# ---- moving ----


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors have the same bits, whatever the dtype."""
    return tensor.dtype == other.dtype and torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.spread
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
def test_what_moves(dtype: torch.dtype, rank: int, size: int):
    """Broadcast, allgather, gather, scatter, alltoall and messages move every dtype, of every awkward size.

    Floats of 8 bits travel as bytes, in all that does not compute with them.
    """
    for count in (0, 1, size + 1, 131):
        every = [small(each, count, dtype) for each in range(size)]
        for root in range(size):
            tensor = every[rank].clone()
            dist.broadcast(tensor, root)
            assert same(tensor, every[root])
            outs = [torch.empty_like(tensor) for _ in every] if rank == root else None
            dist.gather(every[rank], outs, root)
            assert outs is None or all(map(same, outs, every))
            out = torch.empty_like(tensor)
            dist.scatter(out, every if rank == root else None, root)
            assert same(out, every[rank])
        outs = [torch.empty_like(every[0]) for _ in every]
        dist.all_gather(outs, every[rank], async_op=True).wait()
        assert all(map(same, outs, every))
        flat = torch.empty(size * count, dtype=dtype)
        all_gather_single(flat, every[rank])
        assert same(flat, torch.cat(every))
        dist.all_to_all_single(flat, torch.cat(every))
        assert same(flat, every[rank].repeat(size))
        outs = [torch.empty(rank + count, dtype=dtype) for _ in every]
        dist.all_to_all(outs, [small(rank, each + count, dtype) for each in range(size)])
        assert all(same(out, small(each, rank + count, dtype)) for each, out in enumerate(outs))
        if size > 1:
            works = [dist.isend(every[rank], (rank + 1) % size)]
            out = torch.empty_like(every[0])
            works.append(dist.irecv(out, (rank - 1) % size))
            for each in works:
                each.wait()
            assert same(out, every[(rank - 1) % size])


def test_sums_of_sparse_tensors(rank: int, size: int):
    """They are the sums of the dense ones, where ranks have other rows, some twice, and rank 0 none."""
    rows = [(7 * step + rank) % 5 for step in range(2 * rank)]
    values = torch.full((len(rows), 3), rank + 1.0)
    tensor = torch.sparse_coo_tensor([rows], values, (5, 3), check_invariants=True)
    want = tensor.to_dense()
    dist.all_reduce(want)
    average = tensor.clone()
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), want)
    dist.all_reduce(average, dist.ReduceOp.AVG, async_op=True).wait()
    torch.testing.assert_close(average.to_dense(), want / size)
    with pytest.raises(TypeError, match="summed and averaged"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)


def test_gathering_of_uneven_lists(rank: int, size: int):
    """Every rank may give another number of elements, as long as all know how many."""
    outs = [torch.empty(each, 2) for each in range(size)]
    dist.all_gather(outs, torch.full((rank, 2), float(rank)))
    assert all(torch.equal(out, torch.full((each, 2), float(each))) for each, out in enumerate(outs))


def test_alltoall_with_splits(rank: int, size: int):
    """Rows go where the splits say; rank r sends r + 1 rows to each rank, and r times as many to rank 0."""
    sent = [(rank + 1) * (rank + 1 if each == 0 else 1) for each in range(size)]
    came = [(each + 1) * (each + 1 if rank == 0 else 1) for each in range(size)]
    out = torch.empty(sum(came), 3)
    dist.all_to_all_single(out, torch.full((sum(sent), 3), float(rank)), came, sent)
    assert torch.equal(out, torch.cat([torch.full((rows, 3), float(each)) for each, rows in enumerate(came)]))


def test_objects(rank: int, size: int):
    """Object collectives work on all ranks and on some."""
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert [each["rank"] for each in objects] == list(range(size))
    said = [f"by {rank}", rank]
    dist.broadcast_object_list(said, src=size - 1)
    assert said == [f"by {size - 1}", size - 1]
    found = [None] * size if rank == 0 else None
    dist.gather_object((rank,), found, dst=0)
    assert rank or found == [(each,) for each in range(size)]
    out = [None]
    dist.scatter_object_list(out, [{each} for each in range(size)] if rank == 0 else None, src=0)
    assert out == [{rank}]
    if size > 1:
        sent = [{"from": rank}]
        if rank == 0:
            dist.send_object_list(sent, dst=1)
        elif rank == 1:
            dist.recv_object_list(sent, src=0)
            assert sent == [{"from": 0}]


# ---- messages ----


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("count", [1, 1024, 1025, 300_000])
def test_messages(count: int, rank: int, size: int):
    """Messages come in order, by tag, small or large, also where both sides send first or one waits elsewhere."""
    right, left = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(torch.full((count,), float(rank + each)), right, tag=each % 2) for each in range(4)]
    outs = [torch.empty(count) for _ in range(4)]
    dist.barrier()  # what is under way moves on meanwhile
    for each in (1, 3, 0, 2):
        dist.recv(outs[each], left, tag=each % 2)
    for each in sends:
        each.wait()
    assert all(torch.equal(out, torch.full((count,), float(left + each))) for each, out in enumerate(outs))
    if rank == 0:
        found = {}
        for _ in range(size - 1):
            out = torch.empty(count)
            sender = dist.recv(out)
            found[sender] = out[0].item()
        assert found == {each: float(each) for each in range(1, size)}
    else:
        dist.send(torch.full((count,), float(rank)), 0)


@pytest.mark.sizes(2, 4)
def test_a_large_send_ends_while_its_sender_waits_in_a_collective(rank: int, size: int):
    """The receiver comes to the barrier only after the message, and the sender moves that on from there."""
    peer = rank ^ 1
    data = torch.arange(200_000.0)
    if rank % 2 == 0:
        work = dist.isend(data, peer)
        dist.barrier()
        work.wait()
    else:
        out = torch.empty(200_000)
        dist.recv(out, peer)
        dist.barrier()
        assert torch.equal(out, data)


@pytest.mark.sizes(2, 3)
def test_messages_that_do_not_fit(rank: int):
    """What comes with another dtype or shape is an error at the receiver, and the next message is right."""
    for count in (4, 5000):
        if rank == 0:
            dist.send(torch.ones(count), 1)
            dist.send(torch.full((count,), 2.0), 1)
        elif rank == 1:
            with pytest.raises(MismatchError, match="float32"):
                dist.recv(torch.empty(count, dtype=torch.int32), 0)
            out = torch.empty(count)
            dist.recv(out, 0)
            assert torch.equal(out, torch.full((count,), 2.0))


@pytest.mark.sizes(2)
def test_messages_have_a_time_limit_and_futures(rank: int):
    """A wait in vain ends; the message can still come. Batches and futures work."""
    out = torch.ones(3)
    if rank == 0:
        work = dist.irecv(out, 1)
        with pytest.raises(CollectiveTimeoutError, match="rank 1"):
            work.wait(timedelta(seconds=0.2))
    dist.barrier()
    if rank == 1:
        dist.send(torch.ones(3), 0)
    else:
        work.wait()
        assert out.tolist() == [1.0] * 3
    send = dist.P2POp(dist.isend, torch.full((2,), float(rank)), 1 - rank)
    works = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, out[:2], 1 - rank)])
    works[1].get_future().wait()
    for each in works:
        each.wait()
    assert out.tolist() == [1.0 - rank] * 2 + [1.0]


# ---- layouts ----


def test_strided_views(rank: int, size: int):
    """Views with gaps and transposes come out right, and nothing outside of them is written."""
    whole = torch.full((6, 4), -1.0)
    view = whole[::2, 1:3]
    view.copy_(torch.full((3, 2), float(rank)))
    dist.all_reduce(view)
    total = size * (size - 1) / 2
    assert torch.equal(view, torch.full((3, 2), total))
    assert (whole[1::2] == -1).all()
    assert (whole[:, [0, 3]] == -1).all()
    square = (torch.arange(12.0).reshape(3, 4) + rank).t()
    dist.all_reduce(square, dist.ReduceOp.MAX)
    assert torch.equal(square, (torch.arange(12.0).reshape(3, 4) + size - 1).t())
    dist.broadcast(view, 0)
    wide = torch.full((2 * size, 2), -1.0)
    all_gather_single(wide[:, 0], torch.full((2, 2), float(rank))[:, 0])
    assert wide[:, 0].tolist() == [float(each // 2) for each in range(2 * size)]
    assert (wide[:, 1] == -1).all()
    out = torch.full((2, 2), -1.0)
    reduce_scatter_single(out[:, 0], torch.ones(2 * size, 2)[:, 0])
    assert out.tolist() == [[float(size), -1.0]] * 2
    outs = [torch.full((3, 4), -1.0)[:, ::2] for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((2, 3), float(rank)).t(), outs, 0)
    assert outs is None or all((out == each).all() for each, out in enumerate(outs))
    outs = [torch.full((3, 4), -1.0)[:, ::2] for _ in range(size)]
    dist.all_gather(outs, torch.full((2, 3), float(rank)).t())
    assert all((out == each).all() for each, out in enumerate(outs))
    if size > 1:
        holey = torch.full((5, 2), -1.0)
        work = dist.irecv(holey[:, 0], (rank - 1) % size)
        dist.send(torch.full((5, 2), float(rank))[:, 1], (rank + 1) % size)
        work.wait()
        assert holey.tolist() == [[float((rank - 1) % size), -1.0]] * 5


@pytest.mark.spread
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(1).expand(4), "share memory"),
        (lambda: torch.ones(3, 3).to_mkldnn(), "layout"),
        (lambda: torch.ones(3, device="meta"), "CPU tensors"),
        (lambda: torch.ones(3).to(torch.float8_e4m3fn), "float8.*bfloat16"),
    ],
    ids=["expanded", "sparse", "elsewhere", "float8"],
)
def test_tensors_that_are_refused(make: Callable[[], torch.Tensor], reason: str, size: int):
    """They are a TypeError that says why, and the group goes on."""
    with pytest.raises(TypeError, match=reason):
        dist.all_reduce(make())
    work = dist.all_reduce(make(), async_op=True)
    with pytest.raises(TypeError, match=reason):
        work.wait()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(size)] * 3


# ---- mismatches ----

MISMATCHES: dict[str, Callable[[int, int], object]] = {
    "count": lambda rank, size: dist.all_reduce(torch.ones(5 + 3 * (rank == 0))),
    "dtype": lambda rank, size: dist.all_reduce(torch.ones(5, dtype=torch.float64 if rank else torch.float32)),
    "same bytes": lambda rank, size: dist.all_reduce(torch.ones(5, dtype=torch.int32 if rank else torch.float32)),
    "op": lambda rank, size: dist.all_reduce(torch.ones(5), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
    "bits": lambda rank, size: dist.all_reduce(
        torch.ones(5, dtype=torch.int32), dist.ReduceOp.BAND if rank else dist.ReduceOp.BOR
    ),
    "broadcast count": lambda rank, size: dist.broadcast(torch.ones(5 + (rank == 1)), 0),
    "root": lambda rank, size: dist.broadcast(torch.ones(5), int(rank > 0)),
    "root of reduce": lambda rank, size: dist.reduce(torch.ones(5), int(rank > 0)),
    "root of gather": lambda rank, size: dist.gather(
        torch.ones(5), [torch.ones(5) for _ in range(size)] if rank < 2 else None, int(rank > 0)
    ),
    "root of scatter": lambda rank, size: dist.scatter(
        torch.ones(5), [torch.ones(5) for _ in range(size)] if rank < 2 else None, int(rank > 0)
    ),
    "gathered count": lambda rank, size: all_gather_single(
        torch.ones(size * (5 + (rank > 0))), torch.ones(5 + (rank > 0))
    ),
    "scattered count": lambda rank, size: reduce_scatter_single(
        torch.ones(5 + (rank > 0)), torch.ones(size * (5 + (rank > 0)))
    ),
    "expanded on one": lambda rank, size: dist.all_reduce(torch.ones(5) if rank else torch.ones(1).expand(5)),
    "wrong output on one": lambda rank, size: all_gather_single(torch.ones(size * 5 + (rank == 0)), torch.ones(5)),
    "call": lambda rank, size: (dist.barrier if rank else dist.all_reduce)(*() if rank else (torch.ones(5),)),
}


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("name", list(MISMATCHES))
def test_mismatches_are_errors_on_all_ranks(name: str, rank: int, size: int):
    """All ranks hear of it at once, and where all made the same call of the program, the group goes on."""
    with pytest.raises((MismatchError, TypeError, ConfigError)):
        MISMATCHES[name](rank, size)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(size)] * 3


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("count", [6, 6000])
def test_the_number_of_elements_decides(count: int, rank: int, size: int):
    """Shapes may differ in reductions to one shape, broadcasts and messages, as with Gloo; strided ones, too."""

    def ones(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        shape = (count,) if rank == 0 else (2, count // 2)
        return torch.ones(shape, dtype=dtype) if rank < 2 else torch.ones(count // 2, 2, dtype=dtype).t()

    for _ in range(3):
        tensor = ones()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, size * ones())
        tensor = ones(torch.int32)
        dist.all_reduce(tensor, dist.ReduceOp.BOR)
        assert torch.equal(tensor, ones(torch.int32))
        tensor = (rank + 1) * ones()
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, 2 * ones())
        tensor = ones()
        dist.reduce(tensor, 0)
        assert rank or torch.equal(tensor, size * ones())
        tensor = torch.empty_like(ones())
        work = dist.irecv(tensor, (rank - 1) % size)
        dist.send(3 * ones(), (rank + 1) % size)
        work.wait()
        assert torch.equal(tensor, 3 * ones())


@pytest.mark.sizes(2, 3)
def test_asynchronous_mismatches(rank: int, size: int):
    """The error comes where the work is waited for, and in its future; later works are right."""
    work = dist.all_reduce(torch.ones(5 + rank), async_op=True)
    future = work.get_future()
    later = torch.ones(3)
    after = dist.all_reduce(later, async_op=True)
    with pytest.raises(MismatchError, match="shape 6"):
        work.wait()
    assert not work.is_success()
    assert isinstance(work.exception(), MismatchError)
    with pytest.raises(RuntimeError, match="shape 6"):
        future.wait()
    after.wait()
    assert later.tolist() == [float(size)] * 3


@pytest.mark.sizes(2, 3)
def test_a_rank_that_does_not_come_is_named(rank: int, size: int):
    """A barrier with a time limit says who is missing, and its group is of no use afterwards; others are."""
    absent = rf"ranks? (\d.*\b)?{size - 1} in barrier"  # ranks that are late may be named beside it
    group = dist.new_group()
    if rank != size - 1:
        with pytest.raises(CollectiveTimeoutError, match=absent):
            dist.monitored_barrier(group, timedelta(seconds=0.3))
        with pytest.raises(TransportError):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    group = dist.new_group()
    if rank != size - 1:
        with pytest.raises(CollectiveTimeoutError, match=f"waited 0 s for {absent}"):
            dist.monitored_barrier(group, timedelta(0))
    dist.monitored_barrier(wait_all_ranks=True)
    dist.monitored_barrier(dist.new_group(backend="gloo"))


@pytest.mark.spread
@pytest.mark.sizes(2, 3, 4)  # messages go to other ranks
@pytest.mark.parametrize("limit", [timedelta(seconds=30), 30.0, 30, float("inf"), None])
def test_time_limits_are_timedeltas_or_seconds(limit: Any, rank: int, size: int):
    """As torch's own backends take them."""
    dist.monitored_barrier(None, limit)
    dist.monitored_barrier(timeout=limit, wait_all_ranks=True)
    group: Any = dist.group.WORLD
    group.barrier(timeout=limit).wait(limit)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    assert work.wait(limit)
    sent = dist.isend(torch.ones(2), (rank + 1) % size)
    received = dist.irecv(torch.empty(2), (rank - 1) % size)
    assert sent is not None
    assert received is not None
    assert received.wait(limit)
    assert sent.wait(limit)


@pytest.mark.sizes(2, 3, 4)
def test_seconds_end_waits(rank: int, size: int):
    """As fractions, and 0, of a barrier and of a message that does not come."""
    for limit, words in ((0.3, "waited 0.3 s"), (0, "waited 0 s")):
        group = dist.new_group()
        if rank != size - 1:
            with pytest.raises(CollectiveTimeoutError, match=words):
                dist.monitored_barrier(group, limit)
        dist.barrier()
    work = dist.irecv(torch.empty(2), (rank - 1) % size)
    assert work is not None
    with pytest.raises(CollectiveTimeoutError):
        work.wait(0.2)
    dist.barrier()
    sent = dist.isend(torch.ones(2), (rank + 1) % size)
    assert sent is not None
    work.wait()
    sent.wait()


@pytest.mark.spread
@pytest.mark.parametrize("limit", ["1", float("nan"), True, [1]])
def test_what_is_no_time_limit(limit: Any):
    with pytest.raises(ConfigError, match="timedelta or a number of seconds"):
        dist.monitored_barrier(None, limit)
    work: Any = dist.all_reduce(torch.ones(3), async_op=True)
    with pytest.raises(ConfigError, match="timedelta or a number of seconds"):
        work.wait(limit)
    dist.barrier()


@pytest.mark.sizes(2, 3)
def test_groups_that_are_out_of_step_are_made_anew(rank: int, size: int):
    """The error says what a program of torch.distributed can do to go on, and that works."""
    with pytest.raises(MismatchError, match="destroy this process group and create a new one") as raised:
        dist.all_reduce(torch.ones(3)) if rank else dist.barrier()
    assert "shutdown()" not in str(raised.value)
    with pytest.raises(TransportError, match="earlier"):
        dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("ringreduce")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(size)] * 3


def test_ranks_of_torch_must_be_those_of_mpi(rank: int, size: int):
    """A rank that the program gives may not contradict MPI."""
    dist.destroy_process_group()
    with pytest.raises(ConfigError, match="rank"):
        dist.init_process_group("ringreduce", rank=(rank + 1) % (size + 1), world_size=size + 1)
    dist.init_process_group("ringreduce", rank=rank, world_size=size)
    dist.destroy_process_group()
    dist.init_process_group("ringreduce", store=dist.HashStore(), rank=rank, world_size=size)
    dist.destroy_process_group()
    dist.init_process_group(backend="cpu:ringreduce", timeout=timedelta(seconds=30))


# ---- groups ----


def test_groups(rank: int, size: int):
    """Equal groups twice, groups of some ranks, in an order of their own, and overlapping ones."""
    for _ in range(2):
        everyone = dist.new_group()
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=everyone)
        assert tensor.tolist() == [float(size)] * 2
    for members in ([0], list(range(1, size)) or [0], list(range(0, size, 2))):
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.ones(2)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [float(len(members))] * 2
            tensor = torch.full((2,), float(rank))
            dist.broadcast(tensor, members[-1], group=group)
            assert tensor.tolist() == [float(members[-1])] * 2
            dist.barrier(group)
            dist.destroy_process_group(group)
    local = dist.new_group([rank], use_local_synchronization=True)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=local)
    assert tensor.item() == 1.0
    backwards = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    assert dist.get_rank(backwards) == size - 1 - rank
    out = torch.empty(size)
    all_gather_single(out, torch.tensor([float(rank)]), group=backwards)
    assert out.tolist() == [float(each) for each in range(size)][::-1]


def test_calls_of_several_groups_at_once(rank: int, size: int):
    """Asynchronous works of several groups overlap, whatever order they end in."""
    groups = [dist.new_group() for _ in range(3)]
    tensors = [torch.full((1000,), float(rank)) for _ in range(12)]
    works = [dist.all_reduce(each, group=groups[index % 3], async_op=True) for index, each in enumerate(tensors)]
    for each in reversed(works):
        each.wait()
    assert all(each.tolist() == [size * (size - 1) / 2] * 1000 for each in tensors)


def test_callbacks_of_futures_may_communicate(rank: int, size: int):
    """What they call comes at the same place on all ranks, whatever the program has submitted by then."""
    first, inner, second = (torch.full((3,), float(rank)) for _ in range(3))
    future = dist.all_reduce(first, async_op=True).get_future()

    def again(done: Any) -> Any:
        done.wait()
        return dist.all_reduce(inner, dist.ReduceOp.MAX, async_op=True).get_future().wait()

    after = future.then(again)
    work = dist.all_reduce(second, dist.ReduceOp.MIN, async_op=True)
    assert after.wait()[0] is inner
    work.wait()
    found = first[0].item(), inner[0].item(), second[0].item()
    assert found == (size * (size - 1) / 2, size - 1.0, 0.0)


def test_results_and_futures_are_lists_of_tensors(rank: int, size: int):
    """What a work and its future give are the tensors that the call wrote, in one list, as with Gloo."""
    mine, whole = torch.full((2,), float(rank)), torch.empty(2 * size)
    outs = [torch.empty(2) for _ in range(size)]
    calls: list[tuple[Any, list[torch.Tensor]]] = [
        (dist.all_gather(outs, mine, async_op=True), outs),
        (all_gather_single(whole, mine, async_op=True), [whole]),
        (dist.all_to_all(outs, [mine] * size, async_op=True), outs),
        (dist.gather(mine, outs if rank == 0 else None, 0, async_op=True), outs if rank == 0 else []),
        (dist.broadcast(mine, 0, async_op=True), [mine]),
        (reduce_scatter_single(mine, whole, async_op=True), [mine]),
        (dist.barrier(async_op=True), []),
    ]
    for work, wanted in calls:
        for found in (work.get_future().wait(), work.result()):
            assert [id(each) for each in found] == [id(each) for each in wanted]


@pytest.mark.spread
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("what", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "irecv"])
def test_the_memory_of_a_work_under_way_cannot_be_replaced(size: int, what: str):
    """Of inputs and outputs; once the work has ended it can, and nothing is written into memory that is gone."""
    rank, control, count = dist.get_rank(), MPI.COMM_WORLD.Dup(), 1 << 23  # malloc maps it, and unmaps it when freed
    mine, all_ = torch.ones(count), [torch.zeros(count) for _ in range(size)]
    seen = [mine] if what in ("all_reduce", "broadcast", "irecv") else [mine, *(all_ if rank == 0 else [])]
    if rank != 0:
        control.recv(source=0)
    if what == "irecv":
        work = dist.irecv(mine, 1) if rank == 0 else dist.isend(mine, 0) if rank == 1 else None
    elif what == "all_gather":
        work = dist.all_gather(all_, mine, async_op=True)
    elif what == "reduce_scatter":
        work = dist.reduce_scatter(mine, all_, async_op=True)
    elif what == "gather":
        work = dist.gather(mine, all_ if rank == 0 else None, async_op=True)
    elif what == "broadcast":
        work = dist.broadcast(mine, 1, async_op=True)
    else:
        work = dist.all_reduce(mine, async_op=True)
    if rank == 0:
        for each in seen:
            for resize in (each.detach().resize_, each[1:].resize_, each.untyped_storage().resize_):
                with pytest.raises(RuntimeError, match="not resizable"):
                    resize(1 << 26)
        for other in range(1, size):
            control.send(None, other)
    if work is not None:
        work.wait()
    for each in (mine, *all_):
        each.resize_(5).fill_(1)
    dist.all_reduce(mine)
    assert mine.tolist() == [size] * 5
    control.Free()


def test_profiles_show_collectives(size: int):
    """The profiler of torch shows each call with the bytes of its result and its group, asynchronous ones too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(7))
        work = dist.all_gather([torch.empty(3) for _ in range(size)], torch.ones(3), async_op=True)
        work.get_future().wait()
        work.wait()
    names = [each.name for each in profile.events() if each.name.startswith("ringreduce:")]
    ranks = ", ".join(map(str, range(size)))
    assert names == [  # in the order in which they began
        f"ringreduce:allreduce (28 bytes, group of ranks {ranks})",
        f"ringreduce:allgather ({12 * size} bytes, group of ranks {ranks})",
    ]


@pytest.mark.sizes(2, 3, 4)
def test_the_store_of_one_machine_is_a_file_in_a_private_folder(rank: int):
    """Nobody else reads it, or puts anything into it."""
    if rank == 0:
        folder = Path(process_group._folders[-1].name)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "store").is_file()


@pytest.mark.sizes(2, 3, 4)
def test_profiles_show_messages_and_monitored_barriers(rank: int, size: int):
    """With their bytes and the other side; large messages, which go on after the call, and small ones."""
    ranks = ", ".join(map(str, range(size)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for count in (3, 1 << 20):
            if rank == 0:
                dist.send(torch.ones(count), 1)
            elif rank == 1:
                dist.recv(torch.empty(count), 0 if count == 3 else None)
        dist.monitored_barrier()
    whom = {0: ["send to 1"] * 2, 1: ["recv from 0", "recv from any rank"]}.get(rank, [])
    expected = [f"ringreduce:{each} ({nbytes} bytes" for each, nbytes in zip(whom, (12, 4 << 20), strict=False)]
    found = [each.name for each in profile.events() if each.name.startswith("ringreduce:")]
    assert found == [
        f"{each}, group of ranks {ranks})" for each in (*expected, "ringreduce:monitored_barrier (0 bytes")
    ]


@pytest.mark.sizes(2, 3, 4)
def test_works_that_outlive_a_profile_write_nothing_into_its_memory(rank: int):
    """Their spans end with the profile; when the works end, the profiler has freed its memory, and others use it."""
    group = dist.new_group()
    first, second = torch.full((3,), float(rank)), torch.zeros(3)
    if rank == 0:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            works = [dist.all_reduce(first, dist.ReduceOp.MAX, group, async_op=True), dist.irecv(second, 1, group)]
        assert not any(each.is_completed() for each in works)
        names = [each.name for each in profile.events() if each.name.startswith("ringreduce:")]
        assert [each.split(" (")[0] for each in names] == ["ringreduce:allreduce", "ringreduce:recv from 1"]
        arrays = [np.zeros(2000, np.uint8) for _ in range(10_000)]
    dist.barrier()
    if rank != 0:
        works = [dist.all_reduce(first, dist.ReduceOp.MAX, group, async_op=True)]
        if rank == 1:
            works.append(dist.isend(torch.ones(3), 0, group))
    for each in works:
        each.wait()
    dist.destroy_process_group(group)  # its threads have ended what comes after the works
    assert first.tolist() == [dist.get_world_size() - 1.0] * 3
    if rank == 0:
        assert second.tolist() == [1.0] * 3
        assert not any(each.any() for each in arrays)


def test_threads_end_with_their_group():
    """A group has a thread once it has an asynchronous work, and none after it was destroyed."""
    before = {*threading.enumerate()}  # some of which may end meanwhile
    group = dist.new_group()
    assert {*threading.enumerate()} <= before
    dist.all_reduce(torch.ones(3), group=group)
    assert {*threading.enumerate()} <= before
    dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
    if dist.get_world_size() > 1:
        assert len({*threading.enumerate()} - before) == 1
    dist.destroy_process_group(group)
    assert {*threading.enumerate()} <= before


@pytest.mark.sizes(2, 3, 4)
def test_futures_of_messages_wait_for_their_own_alone(rank: int):
    """What came is there, though an earlier receive has got nothing yet, and gets it only because of that."""
    first, second, third = torch.zeros(3), torch.zeros(4), torch.ones(1)
    if rank == 0:
        early = dist.irecv(first, 1, tag=1).get_future()
        late = dist.irecv(second, 1, tag=2).get_future()
        assert late.wait()[0] is second
        assert second.tolist() == [2.0] * 4
        dist.send(third, 1, tag=3)
        early.wait()
        assert first.tolist() == [1.0] * 3
    elif rank == 1:
        dist.send(torch.full((4,), 2.0), 0, tag=2)
        dist.recv(third, 0, tag=3)
        dist.send(torch.ones(3), 0, tag=1)


def test_groups_are_seen_from_outside(rank: int, size: int, tmp_path: Path):
    """Metrics, the trace and what a rank writes down last tell of the calls of groups."""
    before = rr.metrics().collectives
    said = [str(tmp_path)]
    dist.broadcast_object_list(said)
    path = Path(said[0]) / "trace.json"
    rr.start_timeline(path)
    pair = dist.new_group(list(range(size))[-2:], use_local_synchronization=True)
    if rank >= size - 2:
        for _ in range(3):
            dist.all_reduce(torch.ones(7), dist.ReduceOp.MAX, group=pair)
        name = f"group of ranks {', '.join(map(str, range(size)[-2:]))}"
        dumped = json.loads(rr.dump(tmp_path / "dumps").read_text())
        calls = [each["calls"] for each in dumped["sets"] if each["name"].startswith(name)]
        assert [(each["collective"], each["nbytes"]) for each in calls[-1]] == [("allreduce", 28)] * 3
        now = rr.metrics().collectives["allreduce"]
        assert now.calls - (before["allreduce"].calls if "allreduce" in before else 0) == 3
    rr.stop_timeline()
    dist.barrier()
    events = json.loads(path.read_text())
    rows = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    spans = [(each["pid"], rows[each["pid"], each["tid"]]) for each in events if each["name"] == "allreduce"]
    for member in range(size)[-2:]:
        assert sum(pid == member and "group of ranks" in row for pid, row in spans) == 3


def test_works_leave_nothing_behind(size: int, growth: Callable[[Callable[[], object]], Any]) -> None:
    """1000 works that were waited for, in all three ways, leave no more of anything than 200 did."""
    tensor, every = torch.ones(100), torch.empty(100 * size)

    def work(times: int) -> None:
        for _ in range(times // 4):
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True).wait()
            all_gather_single(every, tensor, async_op=True).get_future().wait()
            works = [dist.all_reduce(tensor, dist.ReduceOp.MIN, async_op=True)]
            works[0].get_future().then(lambda done: done.value()[0]).wait()

    def left() -> tuple[int, int]:
        """Count threads and descriptors: the fewest of three times, as observers open a file for a moment."""
        counts = []
        for _ in range(3):
            work(20)
            counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
        threads, descriptors = zip(*counts, strict=True)
        return min(threads), min(descriptors)

    work(200)
    before = left()
    grown = growth(lambda: work(1000))
    threads, descriptors = (now - then for now, then in zip(left(), before, strict=True))
    assert threads <= 0
    assert descriptors < size  # a rank opens one to see whether another lives, once it has waited for that one
    assert grown.nbytes < 16 << 10
    assert grown.blocks < 250
