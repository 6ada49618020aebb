"""Backward passes within others, as checkpoints and custom functions make them, and gradients when these return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint

import ringreduce.torch as hvd  # noqa: E402

pytestmark = pytest.mark.spread

STEPS = 7


class Net(torch.nn.Module):
    """A layer, one that is used within checkpoints, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = torch.nn.Linear(3, 5), torch.nn.Linear(5, 5)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(5, 1), torch.nn.Linear(5, 2)])


class Detour(torch.autograd.Function):
    """The identity, of which the backward pass makes another one, for a loss that is given."""

    @staticmethod
    def forward(context: Any, x: Any, loss: Callable[[], Any]) -> Any:
        context.loss = loss
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        with torch.enable_grad():
            context.loss().backward()
        return gradient, None


def one_term(net: Any, x: Any, step: int, rank: int, reentrant: bool) -> Any:
    inner = checkpoint(net.block, net.first(x), use_reentrant=reentrant)
    return net.heads[0](inner).square().mean()


def a_second_term(net: Any, x: Any, step: int, rank: int, reentrant: bool) -> Any:
    """Through a checkpoint of its own."""
    return (
        one_term(net, x, step, rank, reentrant)
        + net.heads[1](checkpoint(net.block, net.first(x), use_reentrant=reentrant)).square().mean()
    )


def on_one_rank(net: Any, x: Any, step: int, rank: int, reentrant: bool) -> Any:
    return (a_second_term if rank == 0 else one_term)(net, x, step, rank, reentrant)


def in_some_steps(net: Any, x: Any, step: int, rank: int, reentrant: bool) -> Any:
    return (a_second_term if step % 2 else one_term)(net, x, step, rank, reentrant)


def on_other_ranks_in_other_steps(net: Any, x: Any, step: int, rank: int, reentrant: bool) -> Any:
    return (a_second_term if (step + rank) % 2 else one_term)(net, x, step, rank, reentrant)


def all_within(net: Any, x: Any, step: int, rank: int, reentrant: bool) -> Any:
    """No gradient is added to outside of checkpoints, and ranks have different numbers of them."""
    x = x.requires_grad_()
    loss = checkpoint(lambda x: one_term(net, x, step, rank, False), x, use_reentrant=reentrant)
    for _ in range((step + rank) % 3):
        loss = loss + checkpoint(lambda x: net.first(x).mean(), x, use_reentrant=reentrant)
    return loss


def one_within_another(net: Any, x: Any, step: int, rank: int, reentrant: bool) -> Any:
    def outer(x: Any) -> Any:
        return on_one_rank(net, x, step, rank, reentrant)

    return checkpoint(outer, x.requires_grad_(), use_reentrant=reentrant)


def a_custom_function(net: Any, x: Any, step: int, rank: int, reentrant: bool) -> Any:
    inner = x.requires_grad_() if reentrant else net.first(x).sum(1, keepdim=True)
    detour = Detour.apply(inner, lambda: net.heads[1](net.block(net.first(x.detach()))).mean())
    return detour.square().mean()


LOSSES = [
    one_term,
    a_second_term,
    on_one_rank,
    in_some_steps,
    on_other_ranks_in_other_steps,
    all_within,
    one_within_another,
    a_custom_function,
]


def make_net() -> Any:
    torch.manual_seed(2)
    return Net().double()


def batch(step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def gradients(net: Any) -> list[Any]:
    return [None if each.grad is None else each.grad.clone() for each in net.parameters()]


def expected(loss: Any, passes: int, reentrant: bool) -> list[list[Any]]:
    """The gradients of each step of one process, for the mean of the ranks' losses."""
    net, found = make_net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(hvd.size()):
            for number in range(passes):
                loss(net, batch(step * passes + number, rank), step, rank, reentrant).backward()
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad /= hvd.size()
        found.append(gradients(net))
        optimizer.step()
    return found


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of a checkpoint within another one
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_averages_are_there_when_the_outer_pass_returns(loss: Any, reentrant: bool, overlap: bool, passes: int) -> None:
    """Ranks and steps may have different numbers of passes within the one that they all make."""
    net = make_net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.2)
    options = {"overlap": overlap, "backward_passes_per_step": passes, "bucket_nbytes": 256}
    optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters(), reduce_in="backward", **options)
    for step, averages in enumerate(expected(loss, passes, reentrant)):
        optimizer.zero_grad()
        for number in range(passes):
            x = batch(step * passes + number, hvd.rank())
            loss(net, x, step, hvd.rank(), reentrant).backward()
        for mine, theirs in zip(gradients(net), averages, strict=True):
            assert (mine is None) is (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)
        optimizer.step()


@pytest.mark.sizes(2, 3, 4)
def test_buckets_overlap_in_a_model_of_checkpoints_alone() -> None:
    """Passes within others do not count, so that one pass is found to come before each step."""
    net = make_net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.2)
    optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters(), overlap=True, bucket_nbytes=256)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step, hvd.rank()).requires_grad_()
        first = checkpoint(net.first, x, use_reentrant=True)
        checkpoint(net.block, first, use_reentrant=True).square().mean().backward()
        optimizer.step()
    assert optimizer.overlaps


def test_an_error_within_a_pass_ends_nothing() -> None:
    """The next pass is heard; nothing stays behind in the graph that was left."""
    net = make_net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.2)
    optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters(), reduce_in="backward")

    def fail(gradient: Any) -> None:
        raise ValueError("a hook fails")

    for step, averages in enumerate(expected(all_within, 1, True)):
        x = batch(step, hvd.rank())
        first = checkpoint(net.first, x.requires_grad_(), use_reentrant=True)
        first.register_hook(lambda gradient: gradient)
        x.register_hook(fail)
        with pytest.raises(ValueError, match="a hook fails"):
            first.sum().backward()
        optimizer.zero_grad()
        all_within(net, batch(step, hvd.rank()), step, hvd.rank(), True).backward()
        for mine, theirs in zip(gradients(net), averages, strict=True):
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)
        optimizer.step()
