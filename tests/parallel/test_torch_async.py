"""Named asynchronous operations on tensors: any order, any thread, and what happens when ranks disagree."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr
from ringreduce.testing import caught

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402


def of_rank(rank: int, shape: tuple[int, ...] = (3, 5), seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * rank + seed), dtype=torch.float64)


def total(shape: tuple[int, ...] = (3, 5), seed: int = 0) -> Any:
    return torch.stack([of_rank(rank, shape, seed) for rank in range(rr.size())]).sum(0)


def test_operations_meet_by_name_in_any_order() -> None:
    """Every rank submits in an order of its own, step after step, and gets the right results."""
    order = list(range(12))
    for step in range(5):
        random.Random(100 * rr.rank() + step).shuffle(order)
        handles = {
            index: hvd.allreduce_async(of_rank(rr.rank(), (index + 1,), step), name=f"t{index}", op=hvd.Sum)
            for index in order
        }
        for index in sorted(order, key=lambda index: index * 7 % 12):
            torch.testing.assert_close(hvd.synchronize(handles[index]), total((index + 1,), step))
            assert hvd.poll(handles[index])


def test_kinds_may_be_mixed() -> None:
    """All kinds of operations are under way at once, submitted in different orders."""
    rank, size = rr.rank(), rr.size()
    mine = of_rank(rank)
    starts: list[Callable[[], Any]] = [
        lambda: hvd.allreduce_async(mine, name="sum", op=hvd.Sum),
        lambda: hvd.allgather_async(torch.full((rank, 2), rank), name="gather"),
        lambda: hvd.broadcast_async(mine, size - 1, name="root"),
        lambda: hvd.alltoall_async(torch.arange(size) + 10 * rank, name="all to all"),
        lambda: hvd.reducescatter_async(torch.ones(2 * size, 2), name="part", op=hvd.Sum),
        lambda: hvd.grouped_allreduce_async([mine, mine.float()], name="group", op=hvd.Sum),
        lambda: hvd.grouped_allgather_async([mine, torch.ones(0, 3)], name="gathers"),
        lambda: hvd.grouped_reducescatter_async([torch.ones(size, 2)], name="parts", op=hvd.Sum),
    ]
    order = list(range(len(starts)))
    random.Random(rank).shuffle(order)
    handles = {index: starts[index]() for index in order}
    results = [hvd.synchronize(handles[index]) for index in range(len(starts))]
    torch.testing.assert_close(results[0], total())
    assert results[1].tolist() == [[each, each] for each in range(size) for _ in range(each)]
    torch.testing.assert_close(results[2], of_rank(size - 1))
    assert results[3].tolist() == [rank + 10 * each for each in range(size)]
    assert results[4].tolist() == [[size] * 2] * 2
    torch.testing.assert_close(results[5][0], total())
    torch.testing.assert_close(results[5][1], total().float(), rtol=1e-5, atol=1e-5)
    assert results[6][0].shape == (3 * size, 5)
    assert results[6][1].shape == (0, 3)
    assert results[7][0].tolist() == [[size] * 2]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 0, 2)], ids=str)
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    """A scalar is reduced and broadcast; nothing at all is reduced to nothing."""
    mine = torch.full(shape, 2.0)
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == (mine * rr.size()).tolist()
    assert hvd.broadcast_(mine.clone(), 0).tolist() == mine.tolist()


def test_channels_last() -> None:
    """A tensor in channels_last is reduced as it is, and the result is laid out alike."""
    mine = of_rank(rr.rank(), (2, 3, 4, 5)).to(memory_format=torch.channels_last)
    summed = hvd.allreduce(mine, op=hvd.Sum)
    torch.testing.assert_close(summed, total((2, 3, 4, 5)))
    assert summed.is_contiguous(memory_format=torch.channels_last)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    torch.testing.assert_close(mine, summed)


def test_operations_without_a_name_meet_in_order() -> None:
    """The first with the first, the second with the second; also after some ranks have joined and others have not."""
    for _ in range(3):
        handles = [hvd.allreduce_async(torch.full((2,), float(index)), op=hvd.Sum) for index in range(4)]
        assert [hvd.synchronize(each).tolist() for each in handles] == [[rr.size() * i] * 2 for i in range(4)]
        for _ in range(rr.rank()):
            hvd.allreduce(torch.ones(3))
        hvd.join()


def test_polling_alone_brings_an_operation_to_its_end() -> None:
    """A program that only ever polls is not left waiting."""
    handle = hvd.allreduce_async(torch.ones(2), name="polled", op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [rr.size()] * 2
    assert hvd.synchronize(handle).tolist() == [rr.size()] * 2


# ---- disagreement ----

DISAGREEMENTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "shape": (lambda: hvd.allreduce(torch.ones(2), name="x"), lambda: hvd.allreduce(torch.ones(3), name="x")),
    "dtype": (
        lambda: hvd.allreduce(torch.ones(2), name="x"),
        lambda: hvd.allreduce(torch.ones(2, dtype=torch.float64), name="x"),
    ),
    "op": (lambda: hvd.allreduce(torch.ones(2), name="x"), lambda: hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum)),
    "scale": (
        lambda: hvd.allreduce(torch.ones(2), name="x"),
        lambda: hvd.allreduce(torch.ones(2), name="x", prescale_factor=2.0),
    ),
    "root": (
        lambda: hvd.broadcast(torch.ones(2), 0, name="x"),
        lambda: hvd.broadcast(torch.ones(2), rr.size() - 1, name="x"),
    ),
    "kind": (lambda: hvd.allreduce(torch.ones(2), name="x"), lambda: hvd.allgather(torch.ones(2), name="x")),
    "group": (
        lambda: hvd.allreduce(torch.ones(2), name="x"),
        lambda: hvd.grouped_allreduce([torch.ones(1), torch.ones(1)], name="x"),
    ),
    "row": (lambda: hvd.allgather(torch.ones(2, 3), name="x"), lambda: hvd.allgather(torch.ones(2, 4), name="x")),
}


@pytest.mark.spread("which")
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("which", DISAGREEMENTS)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_a_mismatch_is_the_same_error_on_all_ranks(which: str, known: bool) -> None:
    """It names the operation and what each rank submitted, and later operations work, of that name too."""
    usual, other = DISAGREEMENTS[which]
    for _ in range(3 * known):
        usual()
    error = caught(other if rr.rank() == rr.size() - 1 else usual)
    assert isinstance(error, rr.MismatchError)
    assert isinstance(error, hvd.HorovodInternalError)
    assert sorted(error.values) == list(range(rr.size()))
    assert all(text.startswith("x: ") for text in error.values.values())
    assert len({error.values[rank] for rank in range(rr.size() - 1)}) == 1
    assert error.values[rr.size() - 1] != error.values[0]
    assert hvd.allgather_object(str(error)) == [str(error)] * rr.size()
    usual()


# ---- join ----


@pytest.mark.spread
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "start",
    [
        lambda tensor: hvd.allreduce_async_(tensor, op=hvd.Sum),
        lambda tensor: hvd.allreduce_async(tensor, op=hvd.Sum),
        lambda tensor: hvd.allreduce_async(tensor, op=hvd.Sum, prescale_factor=1.0),
        lambda tensor: hvd.grouped_allreduce_async([tensor], op=hvd.Adasum),
        hvd.allgather_async,
        hvd.alltoall_async,
        hvd.reducescatter_async,
        lambda tensor: hvd.broadcast_async_(tensor, 0),
    ],
)
def test_the_memory_of_an_operation_under_way_cannot_be_replaced(start: Callable[[Any], Any], dtype: Any) -> None:
    """To resize a tensor or its storage raises at once; the operation ends as ever, and then it can be resized."""
    tensor = torch.ones(4 * rr.size(), dtype=dtype)
    handle = start(tensor)
    for resize in (tensor.detach().resize_, tensor[1:].resize_, tensor.untyped_storage().resize_):
        with pytest.raises(RuntimeError, match="not resizable"):
            resize(1 << 20)
    result = hvd.synchronize(handle)
    (result,) = result if isinstance(result, list) else (result,)
    assert result.flatten()[0].item() in (1, rr.size())
    tensor.resize_(1 << 20).fill_(2)
    assert hvd.allreduce(tensor, op=hvd.Sum)[-1].item() == 2 * rr.size()


def test_memory_of_several_operations_stays_until_the_last_has_ended() -> None:
    """In whatever order they end, by poll, too; and NumPy's view of a tensor is never left without memory."""
    tensor = torch.ones(10)
    handles = [hvd.allreduce_async(tensor, op=hvd.Sum) for _ in range(3)]
    for handle in (handles[1], handles[0]):
        hvd.synchronize(handle)
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.detach().resize_(1 << 20)  # which has the new shape after a failure
    while not hvd.poll(handles[2]):
        pass
    tensor.resize_(1 << 20).fill_(1)
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    view = tensor.numpy()
    hvd.synchronize(handle)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.detach().resize_(1 << 21)
    assert (view == rr.size()).all()


@pytest.mark.sizes(2, 3, 4)
def test_what_cannot_be_submitted_keeps_no_memory() -> None:
    """A name that is under way, as the other ranks have not come to it."""
    control = MPI.COMM_WORLD.Dup()
    if rr.rank() != 0:
        control.recv(source=0)
    handle, tensor = hvd.allreduce_async(torch.ones(3), name="taken"), torch.ones(3)
    if rr.rank() == 0:
        assert isinstance(caught(hvd.allreduce_async, tensor, name="taken"), rr.ConfigError)
        tensor.resize_(1 << 20)
        for other in range(1, rr.size()):
            control.send(None, other)
    assert hvd.synchronize(handle).tolist() == [1.0] * 3
    if rr.rank() != 0:
        assert isinstance(caught(hvd.allreduce, tensor, name="taken"), rr.MismatchError)  # rank 0 has refused it
    control.Free()


@pytest.mark.sizes(2, 3, 4)
def test_other_operations_after_a_join_are_an_error() -> None:
    """Nobody knows what a rank that has joined would gather or send; the others hear so, and go on."""
    if rr.rank() > 0:
        error = caught(hvd.allgather, torch.ones(2), name="late")
        while error is None:  # rank 0 has not joined yet
            error = caught(hvd.allgather, torch.ones(2), name="late")
        assert isinstance(error, rr.MismatchError)
        assert error.values[0] == "late: joined"
    hvd.join()


# ---- process sets ----


def test_process_sets_overlap() -> None:
    """Each set reduces among its own members, whatever the others do."""
    sets = [
        hvd.add_process_set([rank for rank in range(rr.size()) if rank != left_out]) for left_out in range(1, rr.size())
    ]
    try:
        handles = [
            (each, hvd.allreduce_async(torch.tensor([1.0 + rr.rank()]), name="x", op=hvd.Sum, process_set=each))
            for each in (sets if rr.rank() % 2 else reversed(sets))
            if each.included()
        ]
        for each, handle in handles:
            assert hvd.synchronize(handle).item() == sum(1.0 + rank for rank in each.ranks)
            assert each.ranks[each.rank()] == rr.rank()
            assert each.size() == rr.size() - 1
        for each in sets:
            if each.included():
                root = each.ranks[-1]
                assert hvd.broadcast(torch.tensor([rr.rank()]), root, process_set=each).item() == root
                assert hvd.broadcast_object(rr.rank(), root, process_set=each) == root
                assert hvd.allgather_object(rr.rank(), process_set=each) == each.ranks
            else:
                with pytest.raises(rr.ConfigError, match="does not belong"):
                    hvd.allreduce(torch.ones(1), process_set=each)
    finally:
        assert [hvd.remove_process_set(each) for each in sets] == [True] * len(sets)
    for each in sets:
        with pytest.raises(rr.ConfigError, match="not registered"):
            each.size()


def test_process_sets_that_cannot_be() -> None:
    """A set twice, a rank that is not there, and ranks that name different sets: the same error on all."""
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set(range(rr.size()))
    with pytest.raises(ValueError, match="there is no rank"):
        hvd.add_process_set([0, rr.size()])
    with pytest.raises(ValueError, match="each once"):
        hvd.add_process_set([0, 0])
    if rr.size() > 2:
        assert isinstance(caught(hvd.add_process_set, [0, 1 + rr.rank() % 2]), rr.MismatchError)
    assert not hvd.remove_process_set(hvd.global_process_set)


def test_reproducible_sums_are_exact(world: rr.Communicator) -> None:
    """Terms that cancel leave what is left of them, with the same bits on all ranks, in groups and through autograd."""
    first, others = [1e8, 1.0, -0.5], [-1e8 / max(1, world.size - 1), 1.0, 0.25]
    tensor = torch.tensor(first if world.rank == 0 else others)
    exact = sum(torch.tensor(each, dtype=torch.float64) for each in hvd.allgather_object(tensor.double().tolist()))
    (result,) = hvd.grouped_allreduce([tensor.requires_grad_()], op=hvd.ReproducibleSum)
    assert torch.equal(result.detach(), exact.float())
    result.sum().backward()
    assert tensor.grad.tolist() == [world.size] * 3
    assert torch.equal(hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.ReproducibleSum)), exact.float())


# ---- names that come again ----


def test_a_name_may_come_again_with_anything() -> None:
    """Other values, memory, shape, dtype, op, factor or layout: each result is that of its own call."""
    rank, size = rr.rank(), rr.size()
    mine = torch.zeros(3, 4)
    calls: list[tuple[Callable[[], Any], dict[str, Any]]] = [
        (lambda: mine, {}),
        (lambda: mine, {"op": hvd.Max}),
        (lambda: mine, {"prescale_factor": 2.0}),
        (lambda: mine.double(), {}),
        (lambda: mine[:2], {}),
        (lambda: mine.t(), {}),
        (lambda: mine.clone().requires_grad_(), {}),
        (lambda: mine.repeat(1000, 5), {}),
    ]
    steps = [each for index in range(len(calls)) for each in [calls[0], calls[0], *[calls[index]] * 4]]
    for step, (make, how) in enumerate(steps):
        mine.copy_(torch.arange(12.0).view(3, 4) + 100 * step + rank)
        values = [make().detach() - rank + each for each in range(size)]
        combined = torch.stack(values).amax(0) if "op" in how else sum(values) * how.get("prescale_factor", 1.0)
        options: Any = {"op": hvd.Sum, **how}
        expected = combined.to(values[0].dtype)
        source = make()
        result = hvd.synchronize(hvd.allreduce_async(source, name="again", **options))
        assert torch.equal(result, expected)
        assert result.stride() == source.stride()
        assert torch.equal(source.detach(), values[rank])
        with torch.no_grad():
            for target in (source, source.clone()):
                target.copy_(values[rank])
                version = target._version
                assert hvd.synchronize(hvd.allreduce_async_(target, name="again in place", **options)) is target
                assert torch.equal(target, expected)
                assert target._version > version


def test_results_of_one_name_are_apart() -> None:
    """A name may come again before the result of its last operation was asked for; no result changes afterwards."""
    for _ in range(4):
        mine = torch.full((5,), 1.0)
        first = hvd.allreduce_async(mine, name="apart", op=hvd.Sum)
        while not hvd.poll(first):
            pass
        second = hvd.allreduce_async(mine * 2, name="apart", op=hvd.Sum)
        early = hvd.synchronize(second)
        assert hvd.synchronize(first).tolist() == [rr.size()] * 5
        assert early.tolist() == [2 * rr.size()] * 5
        third = hvd.synchronize(hvd.allreduce_async(mine * 3, name="apart", op=hvd.Sum))
        assert early.tolist() == [2 * rr.size()] * 5
        assert third.tolist() == [3 * rr.size()] * 5


def test_memory_that_changes_under_a_known_name() -> None:
    """Other memory is used; a tensor without enough is refused on all ranks; what is under way keeps its own."""
    for start in (hvd.allreduce_async, hvd.allreduce_async_):
        tensor, name = torch.ones(1000), f"changes {start.__name__}"
        for _ in range(4):
            assert hvd.synchronize(start(tensor.fill_(1), name=name, op=hvd.Sum))[-1] == rr.size()
        tensor.set_(torch.full((1000,), 2.0))
        assert hvd.synchronize(start(tensor, name=name, op=hvd.Sum))[-1] == 2 * rr.size()
        view = np.full(1000, 3.0, np.float32)
        tensor.set_(torch.from_numpy(view))
        handle = start(tensor, name=name, op=hvd.Sum)
        del view
        tensor.set_(torch.full((1000,), 4.0))
        hvd.synchronize(handle)
        small = torch.ones(1000)
        small.untyped_storage().resize_(4)
        error = caught(start, small, name=name, op=hvd.Sum)
        assert isinstance(error, rr.UnsupportedBufferError)
        assert hvd.synchronize(start(torch.ones(1000), name=name, op=hvd.Sum))[-1] == rr.size()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_mismatch_under_a_known_name_ends_only_that(in_place: bool) -> None:
    """The next operations of the name work, with results of their own."""
    start = hvd.allreduce_async_ if in_place else hvd.allreduce_async
    for _ in range(3):
        for _ in range(4):
            assert hvd.synchronize(start(torch.ones(3), name="known", op=hvd.Sum)).tolist() == [rr.size()] * 3
        count = 4 if rr.rank() == 0 else 3
        handle = start(torch.ones(count), name="known", op=hvd.Sum)
        assert isinstance(caught(hvd.synchronize, handle), rr.MismatchError)
