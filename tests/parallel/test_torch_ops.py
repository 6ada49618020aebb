"""Collectives on tensors, and the gradients that flow through them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402


def of_rank(rank: int, shape: tuple[int, ...], seed: int = 0) -> Any:
    """A float64 tensor that every rank can compute for every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + rank))


def everyone(shape: tuple[int, ...] = (4, 3), seed: int = 0) -> list[Any]:
    return [of_rank(rank, shape, seed) for rank in range(rr.size())]


def test_allreduce_averages_unless_told_otherwise() -> None:
    """The default op is the average; the others go by name."""
    mine, stacked = of_rank(rr.rank(), (4, 3)), torch.stack(everyone())
    torch.testing.assert_close(hvd.allreduce(mine), stacked.mean(0))
    torch.testing.assert_close(hvd.allreduce(mine, name="loss", op=hvd.Sum), stacked.sum(0))
    torch.testing.assert_close(hvd.allreduce(mine, op=hvd.Min), stacked.amin(0))
    torch.testing.assert_close(hvd.allreduce(mine, op=hvd.Max), stacked.amax(0))
    torch.testing.assert_close(hvd.allreduce(mine, op=hvd.Product), stacked.prod(0))


def test_allreduce_scales_before_and_after() -> None:
    """The factors multiply what goes in and what comes out, in place as well."""
    mine, total = of_rank(rr.rank(), (4, 3)), torch.stack(everyone()).sum(0)
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(scaled, total * 1.5)
    hvd.allreduce_(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(mine, total * 1.5)


def test_in_place_operations_return_their_tensor() -> None:
    """``allreduce_`` and ``broadcast_`` change the tensor they got, of any strides, and return it."""
    tensor = of_rank(rr.rank(), (3, 4)).t()
    assert hvd.allreduce_(tensor) is tensor
    torch.testing.assert_close(tensor, torch.stack(everyone((3, 4))).mean(0).t())
    tensor = of_rank(rr.rank(), (3, 4)).t()
    assert hvd.broadcast_(tensor, rr.size() - 1) is tensor
    torch.testing.assert_close(tensor, of_rank(rr.size() - 1, (3, 4)).t())


def test_autograd_notices_in_place_operations() -> None:
    """A value that the backward pass needs cannot be overwritten unnoticed."""
    weight = of_rank(0, (3,)).requires_grad_()
    values = weight * 1.0
    result = values.square().sum()
    hvd.allreduce_(values)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_broadcast_returns_a_new_tensor() -> None:
    """The input is left as it was."""
    mine = of_rank(rr.rank(), (4, 3))
    torch.testing.assert_close(hvd.broadcast(mine, 0), of_rank(0, (4, 3)))
    torch.testing.assert_close(mine, of_rank(rr.rank(), (4, 3)))


def test_reducescatter_gives_the_first_ranks_more() -> None:
    """The average is cut like ``tensor_split``; Sum is there too."""
    rows = 2 * rr.size() + 1
    parts = torch.stack(everyone((rows, 2))).mean(0).tensor_split(rr.size())
    torch.testing.assert_close(hvd.reducescatter(of_rank(rr.rank(), (rows, 2))), parts[rr.rank()])
    summed = hvd.reducescatter(of_rank(rr.rank(), (rows, 2)), op=hvd.Sum)
    torch.testing.assert_close(summed, parts[rr.rank()] * rr.size())


def test_alltoall_with_and_without_splits() -> None:
    """Without splits one tensor comes back, with them also the rows from each rank."""
    size, rank = rr.size(), rr.rank()
    tensor = torch.arange(size, dtype=torch.int64) + 100 * rank
    assert hvd.alltoall(tensor).tolist() == [100 * peer + rank for peer in range(size)]
    splits = list(range(size))
    result, received = hvd.alltoall(torch.full((sum(splits),), rank), torch.tensor(splits))
    assert result.tolist() == [peer for peer in range(size) for _ in range(rank)]
    assert received.tolist() == [rank] * size
    if size > 1:
        with pytest.raises(rr.ConfigError, match="do not divide"):
            hvd.alltoall(torch.zeros(size + 1))


def test_gradients_of_a_loss_over_gathered_outputs() -> None:
    """A loss of all ranks' outputs, averaged by the optimizer, has the gradients of one process."""
    inputs = torch.stack(everyone((4, 3)))

    def loss(outputs: Any) -> Any:
        return torch.logsumexp(outputs @ outputs.t(), 1).mean()

    alone = of_rank(50, (3, 2)).requires_grad_()
    loss((inputs @ alone).flatten(0, 1)).backward()
    together = of_rank(50, (3, 2)).requires_grad_()
    loss(hvd.allgather(inputs[rr.rank()] @ together)).backward()
    torch.testing.assert_close(hvd.allreduce(together.grad), alone.grad)


@pytest.mark.parametrize("wrong", [[1.0, 2.0], np.ones(3), None, 1.0], ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_tensor_is_refused(wrong: Any) -> None:
    """At the call, by every function, with an error that says what it takes; nothing is sent."""
    blocking = hvd.allgather, hvd.alltoall, hvd.reducescatter, hvd.allreduce, hvd.allreduce_
    started = (
        hvd.allgather_async,
        hvd.alltoall_async,
        hvd.reducescatter_async,
        hvd.allreduce_async,
        hvd.allreduce_async_,
    )
    grouped = (hvd.grouped_allgather, hvd.grouped_reducescatter, hvd.grouped_allreduce, hvd.grouped_allreduce_)
    from_root = (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_)
    calls = [partial(each, wrong) for each in (*blocking, *started, hvd.sparse_allreduce_async)]
    calls += [partial(each, [torch.ones(2), wrong]) for each in grouped]
    calls += [partial(each, wrong, 0) for each in from_root]
    for call in calls:
        with pytest.raises(rr.UnsupportedBufferError, match=f"expected a torch tensor, got {type(wrong).__name__}"):
            call()


def test_tensors_can_be_resized_after_blocking_calls() -> None:
    """Neither operations, nor objects, nor steps of an optimizer, nor its checks, forbid it."""
    size = rr.size()
    model = torch.nn.Linear(3, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    hvd.broadcast_parameters(model.state_dict())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    state = [each for state in optimizer.state.values() for each in state.values()]
    hvd.broadcast_optimizer_state(optimizer)
    tensor, sums = torch.ones(size, 2), torch.empty(size, 2)
    for _ in range(2):
        for call in hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter:
            call(tensor)
        hvd.allreduce_(tensor)
        hvd.grouped_allreduce_([tensor, sums.zero_()])
        hvd.allreduce_(tensor, op=hvd.Adasum)
        hvd.broadcast_(tensor, 0)
        hvd.broadcast_object({"tensor": tensor})
        rr.allreduce(tensor, out=sums)
    for number, each in enumerate([tensor, sums, *model.parameters(), *state]):
        assert each.untyped_storage().resizable(), number
