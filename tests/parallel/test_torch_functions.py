"""Make models, optimizers and objects equal on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402


def model_of(rank: int) -> Any:
    """A model that every rank can make for every rank, with parameters and buffers of several dtypes and layouts."""
    generator = torch.Generator().manual_seed(rank)
    layers = torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(3, 2)
    model = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
    model[3].to(torch.bfloat16)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.randint(-100, 100, tensor.shape, generator=generator))
    return model


def assert_equal(actual: Any, expected: Any) -> None:
    """Nested containers with tensors in them are equal, dtypes and all."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_equal(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    else:
        assert actual == expected


def last() -> int:
    return rr.size() - 1


@pytest.mark.parametrize("form", ["state_dict", "named", "tensors", "generator"])
def test_broadcast_parameters_takes_all_forms(form: str) -> None:
    """A state_dict, pairs, tensors and a generator of pairs all end with the root's values, in the same memory."""
    model, expected = model_of(rr.rank()), model_of(last())
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    params = {
        "state_dict": model.state_dict(),
        "named": list(model.named_parameters()),
        "tensors": [None, *model.parameters()],
        "generator": model.named_parameters(),
    }[form]
    hvd.broadcast_parameters(params, root_rank=last())
    assert_equal(list(model.parameters()), list(expected.parameters()))
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    if form == "state_dict":
        assert_equal(dict(model.state_dict()), dict(expected.state_dict()))


def test_broadcast_parameters_refuses_other_things() -> None:
    """What is not a tensor is named, with what to use for it."""
    with pytest.raises(rr.ConfigError, match="'epoch' is of type int; use broadcast_object"):
        hvd.broadcast_parameters({"epoch": 3}, root_rank=0)


@pytest.mark.sizes(2, 3, 4)
def test_broadcast_parameters_of_different_models() -> None:
    """Nothing is overwritten when the ranks' tensors do not match; all ranks learn why."""
    tensor = torch.zeros(2 + (rr.rank() == 0))
    with pytest.raises(rr.MismatchError, match=r"broadcast_parameters: tensor 0 is w, shape \(3,\), float32") as caught:
        hvd.broadcast_parameters({"w": tensor}, root_rank=0)
    assert len(caught.value.values) == rr.size()


def optimizers(parameters: list[Any]) -> dict[str, Any]:
    return {
        "sgd": torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adamw": torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
        "tensor-lr": torch.optim.Adam(parameters, lr=torch.tensor(0.1)),
        "lbfgs": torch.optim.LBFGS(parameters, max_iter=2),
        "adagrad": torch.optim.Adagrad(parameters),
    }


def train(model: Any, optimizer: Any, steps: int) -> None:
    """Step with gradients that differ from rank to rank."""

    def closure() -> float:
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.01 * (rr.rank() + index + 1))
        return 1.0

    for _ in range(steps):
        optimizer.step(closure)


@pytest.mark.spread
@pytest.mark.parametrize(("root_steps", "steps"), [(0, 3), (2, 0), (2, 3)])
@pytest.mark.parametrize("name", ["sgd", "adamw", "tensor-lr", "lbfgs", "adagrad"])
def test_broadcast_optimizer_state(name: str, root_steps: int, steps: int) -> None:
    """Whatever state and settings a rank had, fresh or used, it has the root's afterwards; the root keeps its own."""
    root = last()
    is_root = rr.rank() == root
    model = torch.nn.Linear(3, 2)
    optimizer = optimizers(list(model.parameters()))[name]
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5) if name == "tensor-lr" else 0.5 + rr.rank()
    if is_root:
        optimizer.param_groups[0]["note"] = {"only": ["here", 1.5]}
    train(model, optimizer, root_steps if is_root else steps)
    before = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(list(model.parameters()))
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    after = optimizer.state_dict()
    if is_root:
        assert_equal(after, before)
    assert_equal(after, hvd.broadcast_object(after, root))
    assert after["param_groups"][0]["note"] == {"only": ["here", 1.5]}
    assert len(after["state"]) == len(before["state"]) or not is_root
    assert_equal(list(model.parameters()), weights)


def test_objects_travel() -> None:
    """Objects of different sizes come whole, tensors inside keep dtype, layout and values; the root gets its own."""
    size, rank = rr.size(), rr.rank()
    mine = {"rank": rank, "text": "x" * 1000 * rank, "half": torch.full((2, 3), rank, dtype=torch.bfloat16)}
    image = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    sent = {**mine, "image": image, "wide": torch.ones(1).expand(5), "grad": torch.ones(2, requires_grad=True)}
    received = hvd.broadcast_object(sent if rank == last() else None, root_rank=last())
    assert (received is sent) == (rank == last())
    assert received["rank"] == last()
    assert len(received["text"]) == 1000 * last()
    assert received["half"].equal(torch.full((2, 3), last(), dtype=torch.bfloat16))
    assert received["image"].equal(image)
    assert received["image"].stride() == image.stride()
    assert received["wide"].equal(torch.ones(5))
    assert received["grad"].requires_grad
    gathered = hvd.allgather_object(mine)
    assert [each["rank"] for each in gathered] == list(range(size))
    assert [len(each["text"]) for each in gathered] == [1000 * peer for peer in range(size)]
    assert hvd.allgather_object(None) == [None] * size


def test_lazy_tensors_travel() -> None:
    """Tensors that torch has marked as conjugated or negated, and not computed yet, arrive with their values."""
    values = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]])
    sent = {"conjugated": values.conj(), "negated": values.conj().imag, "transposed": values.mH}
    received = hvd.broadcast_object(sent if rr.rank() == last() else None, root_rank=last())
    for name, tensor in sent.items():
        assert received[name].equal(tensor)


class Stubborn:
    """Fails, on purpose, when it is packed or when it is unpacked."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __getstate__(self) -> Any:
        if self.where == "packed":
            raise OSError("not to be packed")
        return vars(self)

    def __setstate__(self, state: Any) -> None:
        raise OSError("not to be unpacked")


def test_what_cannot_be_packed_is_refused_on_all_ranks() -> None:
    """No rank waits for an object that another could not pack: all learn whose it is and why, and go on."""
    mine = Stubborn("packed") if rr.rank() == last() else torch.ones(2)
    for collective in (lambda: hvd.broadcast_object(mine, last()), lambda: hvd.allgather_object(mine)):
        with pytest.raises(rr.ConfigError, match=f"object of rank {last()} cannot be sent: OSError: not to") as caught:
            collective()
        assert isinstance(caught.value.__cause__, OSError) == (rr.rank() == last())
    assert hvd.broadcast_object(rr.rank(), last()) == last()


def test_what_cannot_be_unpacked_keeps_nobody_waiting() -> None:
    """The rank where unpacking fails raises, after it has taken part to the end; the others have their object."""
    sent = [Stubborn("unpacked"), torch.ones(2)]
    if rr.rank() == 0:
        assert hvd.broadcast_object(sent, 0) is sent
    else:
        with pytest.raises(OSError, match="not to be unpacked"):
            hvd.broadcast_object(None, 0)
    assert hvd.broadcast_object(rr.rank(), last()) == last()
