"""Tensors of any strides and of no elements: as parameters and gradients, with ``shard`` or without; in collectives."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402

pytestmark = pytest.mark.spread

SHAPES: dict[str, Callable[[Any], Any]] = {
    "one of a row": lambda dtype: torch.arange(2.0).to(dtype).view(1, 2)[:, 1],
    "one of a matrix": lambda dtype: torch.arange(12.0).to(dtype).view(3, 4)[1:2, 1:2],
    "every second": lambda dtype: torch.arange(14.0).to(dtype)[1::2],
    "transposed": lambda dtype: torch.arange(15.0).to(dtype).view(3, 5).t(),
    "columns": lambda dtype: torch.arange(24.0).to(dtype).view(4, 6)[:, 1:4],
    "a number": lambda dtype: torch.arange(3.0).to(dtype)[2],
    "no rows": lambda dtype: torch.zeros(0, 3, dtype=dtype),
    "no columns": lambda dtype: torch.zeros(3, 4, dtype=dtype)[:, 2:2],
    "unit lengths": lambda dtype: torch.arange(30.0).to(dtype).view(5, 6)[2:3, ::2].unsqueeze(0),
}

DTYPES = torch.float32, torch.float64, torch.bfloat16


def expanded(shape: Any, value: float, dtype: Any) -> Any:
    """Return a tensor whose elements are all at the same address."""
    return torch.full((), value, dtype=dtype).expand(shape)


def spread(shape: Any, value: float, dtype: Any) -> Any:
    """Return a tensor whose elements are two apart."""
    return torch.full((*shape, 2), value, dtype=dtype)[..., 1]


def transposed(shape: Any, value: float, dtype: Any) -> Any:
    return torch.full(shape[::-1], value, dtype=dtype).permute(tuple(range(len(shape)))[::-1])


class Whole(torch.optim.SGD):
    """Not known to treat each element by itself, so that no parameter is cut."""


@pytest.mark.parametrize("options", [{}, {"bucket_nbytes": 1}, {"num_groups": 9}, {"reduce_in": "backward"}])
@pytest.mark.parametrize("shard", [None, "node", "all"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, Whole])
def test_steps(nodes: None, kind: Any, shard: str | None, options: dict[str, Any]) -> None:
    """Two steps of the average of 1 to P, exact in every dtype; gradients of autograd and of the program."""
    mean = (rr.size() + 1) / 2
    parameters = [torch.nn.Parameter(make(dtype)) for make in SHAPES.values() for dtype in DTYPES]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = hvd.DistributedOptimizer(kind(parameters, lr=1.0, momentum=0.5), shard=shard, **options)
    hvd.broadcast_parameters({str(number): each for number, each in enumerate(parameters)})
    for _ in range(2):
        optimizer.zero_grad()
        sum((parameter * (rr.rank() + 1.0)).sum().double() for parameter in parameters).backward()
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    for parameter, old in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.detach(), (old.double() - 2.5 * mean).to(old.dtype))


@pytest.mark.parametrize("shard", [None, "node", "all"])
@pytest.mark.parametrize("make_gradient", [expanded, spread, transposed])
def test_gradients_of_the_program(nodes: None, make_gradient: Callable[..., Any], shard: str | None) -> None:
    mean = (rr.size() + 1) / 2
    parameters = [torch.nn.Parameter(make(dtype)) for make in SHAPES.values() for dtype in DTYPES]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), shard=shard)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = make_gradient(parameter.shape, rr.rank() + 1.0, parameter.dtype)
        optimizer.step()
    for parameter, old in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.detach(), (old.double() - 3 * mean).to(old.dtype))


@pytest.mark.parametrize("how", ["alone", "dtype", "groups", "bucket", "added"])
@pytest.mark.parametrize("shard", [None, "node", "all"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, Whole])
def test_a_bucket_without_elements(nodes: None, kind: Any, shard: str | None, how: str) -> None:
    empty = torch.nn.Parameter(torch.zeros(0, 3, dtype=torch.float64 if how == "dtype" else torch.float32))
    other = torch.nn.Parameter(torch.ones(5))
    options: dict[str, Any] = {"groups": [[other], [empty]]} if how == "groups" else {}
    if how == "bucket":
        options = {"bucket_nbytes": 1}
    given = [empty] if how == "alone" else [other] if how == "added" else [other, empty]
    optimizer = hvd.DistributedOptimizer(kind(given, lr=1.0, momentum=0.5), shard=shard, **options)
    for step in range(3):
        if how == "added" and step == 1:
            optimizer.add_param_group({"params": [empty]})
        optimizer.zero_grad()
        (other.sum() + empty.sum()).backward()
        optimizer.step()
    assert empty.shape == (0, 3)
    assert len(optimizer.state_dict()["state"]) == (1 if how == "alone" else 2)
    assert torch.equal(other.detach(), torch.full((5,), 1.0 if how == "alone" else 1.0 - (1.0 + 1.5 + 1.75)))


@pytest.mark.parametrize("shard", [None, "node", "all"])
def test_a_parameter_without_elements_is_saved_beside_state_of_another_dtype(nodes: None, shard: str | None) -> None:
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in ((), (0, 3), (7,))]
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(parameters, lr=0.1), shard=shard)
    for _ in range(2):
        sum(each.sum() for each in parameters).backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save((parameters, optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    assert all(map(torch.equal, weights, parameters))
    assert state["state"][1]["exp_avg"].shape == (0, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_collectives(name: str, dtype: Any) -> None:
    """Results have the values that contiguous tensors give; those in place are written where they are."""
    size, rank = rr.size(), rr.rank()
    given = SHAPES[name](dtype)
    terms = [given.double() * (1 + each) for each in range(size)]
    mine = given * (1 + rank)
    strided = SHAPES[name](dtype)
    strided.copy_(mine)
    total = sum(terms).to(dtype)
    torch.testing.assert_close(hvd.allreduce(strided, op=hvd.Sum), total)
    torch.testing.assert_close(hvd.grouped_allreduce([strided, strided], op=hvd.Sum)[1], total)
    torch.testing.assert_close(hvd.broadcast(strided, root_rank=size - 1), terms[-1].to(dtype))
    if strided.dim():
        torch.testing.assert_close(hvd.allgather(strided), torch.cat(terms).to(dtype))
        many = torch.cat([given] * size)
        wide = torch.stack([many, many], dim=-1)[..., 1]
        torch.testing.assert_close(hvd.alltoall(wide), many)
        torch.testing.assert_close(hvd.reducescatter(wide, op=hvd.Sum), given * size)
    hvd.allreduce_(strided, op=hvd.Sum)
    torch.testing.assert_close(strided, total)
    hvd.broadcast_(strided, root_rank=0)
    torch.testing.assert_close(strided, total)
    torch.testing.assert_close(hvd.broadcast_object(strided), total)
    assert hvd.allreduce(expanded((3, 2), 1.0, dtype), op=hvd.Sum).eq(size).all()
