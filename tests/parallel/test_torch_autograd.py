"""Gradients through collectives: the adjoint identity, in float64, for every operation that is linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402


def noise(shape: tuple[int, ...], seed: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * rr.rank() + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


LINEAR: dict[str, Callable[[list[Any]], list[Any]]] = {
    "allreduce average": lambda x: [hvd.allreduce(x[0], name="a")],
    "allreduce sum, scaled": lambda x: [hvd.allreduce(x[0], op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)],
    "grouped allreduce": lambda x: hvd.grouped_allreduce(x, name="group", op=hvd.Sum),
    "allgather": lambda x: [hvd.allgather(x[0][: 1 + rr.rank()], name="g")],
    "grouped allgather": lambda x: hvd.grouped_allgather([x[0][: 1 + rr.rank()], x[1][: rr.rank()]]),
    "broadcast": lambda x: [hvd.broadcast(x[0], rr.size() - 1, name="b")],
    "alltoall": lambda x: [hvd.alltoall(x[0][: rr.size()])],
    "alltoall with splits": lambda x: [
        hvd.alltoall(x[0][: sum(range(rr.size()))], splits=list(range(rr.size())), name="s")[0]
    ],
    "reducescatter": lambda x: [hvd.reducescatter(x[0], name="r", prescale_factor=2.0)],
    "grouped reducescatter": lambda x: hvd.grouped_reducescatter(x, op=hvd.Sum),
    "two of a kind, used in another order": lambda x: [
        sum(each * (1.0 + index) for index, each in enumerate([hvd.allreduce(x[0]), hvd.allreduce(x[0] * 2.0)]))
    ],
}


@pytest.mark.parametrize("which", LINEAR)
def test_the_backward_pass_is_the_adjoint(which: str) -> None:
    """The sum over the ranks of <F(x), y> equals that of <x, backward(y)>, for any x and y."""
    inputs = [noise((7, 3), 1).requires_grad_(), noise((8, 2), 2).requires_grad_()]
    outputs = LINEAR[which](inputs)
    cotangents = [noise(tuple(each.shape), 3 + index) for index, each in enumerate(outputs)]
    forward = sum((output * cotangent).sum() for output, cotangent in zip(outputs, cotangents, strict=True))
    forward.backward()
    backward = sum((each * each.grad).sum() for each in inputs if each.grad is not None)
    sums = hvd.allreduce(torch.stack([forward.detach(), backward.detach()]), op=hvd.Sum)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-10, atol=1e-10)


def test_gradients_of_gradients() -> None:
    """A backward pass through a collective can itself be differentiated."""
    weight = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True)
    loss = hvd.allreduce(weight**3, op=hvd.Sum).sum()
    (first,) = torch.autograd.grad(loss, [weight], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), [weight])
    torch.testing.assert_close(second, 6 * weight.detach() * rr.size())


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product, hvd.Adasum])
def test_ops_without_a_gradient_say_so(op: Any) -> None:
    """The forward pass works; asking for a gradient is an error and not a wrong number."""
    weight = torch.ones(2, requires_grad=True)
    reduced = hvd.allreduce(weight, op=op)
    with pytest.raises(rr.ConfigError, match="no gradient flows"):
        reduced.sum().backward()


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression_keeps_dtype_and_gradient(compression: Any) -> None:
    """What travels is smaller, what comes out has the dtype that went in, and gradients flow."""
    weight = torch.full((3,), 1.5 + rr.rank(), requires_grad=True)
    reduced = hvd.allreduce(weight, compression=compression, op=hvd.Sum)
    assert reduced.dtype is torch.float32
    assert reduced.tolist() == [sum(1.5 + rank for rank in range(rr.size()))] * 3
    reduced.sum().backward()
    assert weight.grad.tolist() == [rr.size()] * 3
    parts = hvd.reducescatter(torch.ones(2 * rr.size()), compression=compression, op=hvd.Sum)
    assert parts.tolist() == [rr.size()] * 2


@pytest.mark.sizes(2, 3, 4)
def test_gradients_of_unnamed_operations_meet_in_each_process_set(world: rr.Communicator) -> None:
    """Ranks that used another set before have numbered their operations by themselves, not for the set of all."""
    some = hvd.add_process_set([0])
    tensor = torch.ones(2, requires_grad=True)
    if some.included():
        hvd.allreduce(tensor, op=hvd.Sum, process_set=some).sum().backward()
        tensor.grad = None
    hvd.allreduce(tensor, op=hvd.Sum).sum().backward()
    assert tensor.grad.tolist() == [world.size] * 2
    hvd.remove_process_set(some)
