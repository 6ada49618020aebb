"""Optimizers whose gradients travel compressed between nodes: ranks that are threads, each a node of its own."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402
from ringreduce.runtime.process_sets import ProcessSet  # noqa: E402
from ringreduce.testing import run_process_sets  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

WIRES = [hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.fp8, hvd.Compression.int8, hvd.Compression.int4]


def model_of() -> Any:
    """Return a model, the same for every rank; torch's own generator is shared by the threads that are ranks here."""
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.2, 0.2, generator=generator)
    return model


def batch(rank: int, step: int) -> tuple[Any, Any]:
    """Return a rank's batch of a step: a fixed target function of random inputs."""
    inputs = torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, torch.tanh(inputs[:, :5] + inputs[:, 5:10])


def loss_of(model: Any, rank: int, step: int) -> Any:
    inputs, targets = batch(rank, step)
    return (model(inputs) - targets).square().mean()


def trained(process_set: ProcessSet, compression: Any, steps: int) -> tuple[Any, Any]:
    """Return a model after some steps of all ranks, and its optimizer."""
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=0.2)
    optimizer = hvd.DistributedOptimizer(inner, compression=compression, process_set=process_set)
    for step in range(steps):
        train(model, optimizer, process_set.rank(), step)
    return model, optimizer


def train(model: Any, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def alone(size: int, steps: int) -> Any:
    """Return a model that one process has trained on the batches of all ranks."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss_of(model, rank, step) / size for rank in range(size)).backward()
        optimizer.step()
    return model


def flat(model: Any) -> Any:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("compression", WIRES, ids=lambda each: each.wire)
def test_weights_are_equal_on_all_ranks_and_close_to_those_of_one_process(size: int, compression: Any) -> None:
    """After some steps, bit for bit and within what rounding moves them."""

    def check(process_set: ProcessSet) -> Any:
        model, optimizer = trained(process_set, compression, steps=5)
        assert 0.0 < optimizer.compression_error < 0.2 or size == 1
        return flat(model)

    results = run_process_sets(size, check, node_size=1)
    assert all(torch.equal(each, results[0]) for each in results)
    expected, start = flat(alone(size, 5)), flat(model_of())
    assert torch.linalg.norm(results[0] - expected) < 0.15 * torch.linalg.norm(expected - start)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "compression",
    [hvd.Compression.powersgd, hvd.Compression.powersgd(rank=1), hvd.Compression.topk(fraction=0.1)],
    ids=["powersgd", "rank 1", "topk"],
)
def test_structural_compressions_train(size: int, compression: Any) -> None:
    """Ranks have equal weights, and lose little more than one process does; training goes on from a state dict."""

    def check(process_set: ProcessSet) -> Any:
        model, optimizer = trained(process_set, compression, steps=40)
        saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        other, second = trained(process_set, compression, steps=0)
        other.load_state_dict(weights)
        second.load_state_dict(saved)
        for each, steps in ((model, optimizer), (other, second)):
            train(each, steps, process_set.rank(), 40)
        assert torch.equal(flat(other), flat(model))
        return model

    models = run_process_sets(size, check, node_size=1)
    assert all(torch.equal(flat(each), flat(models[0])) for each in models)
    single = alone(size, 41)
    final = sum(float(loss_of(models[0], 0, step).detach()) for step in range(100, 110))
    exact = sum(float(loss_of(single, 0, step).detach()) for step in range(100, 110))
    start = sum(float(loss_of(model_of(), 0, step).detach()) for step in range(100, 110))
    assert final - exact < 0.3 * (start - exact)


@pytest.mark.parametrize(
    ("compression", "kept"),
    [
        (hvd.Compression.int8, {"sent", "summed"}),
        (hvd.Compression.powersgd, {"factors", "residual"}),
        (hvd.Compression.topk, {"residual"}),
    ],
    ids=["int8", "powersgd", "topk"],
)
def test_a_state_dict_is_a_checkpoint_of_tensors(compression: Any, kept: set[str]) -> None:
    """It holds tensors, which `torch.load` takes with ``weights_only``, and which no later step changes."""

    def check(process_set: ProcessSet) -> None:
        model, optimizer = trained(process_set, compression, steps=2)
        state, file = optimizer.state_dict(), io.BytesIO()
        torch.save(state, file)
        train(model, optimizer, process_set.rank(), 2)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert loaded["compression"]["buckets"].keys() == {0}
        tensors = loaded["compression"]["buckets"][0]
        assert tensors.keys() == kept
        for name, tensor in tensors.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, state["compression"]["buckets"][0][name])
            assert not torch.equal(tensor, optimizer.state_dict()["compression"]["buckets"][0][name])

    run_process_sets(2, check, node_size=1)


def test_a_state_dict_of_another_rank_or_number_of_ranks_leaves_its_residual_out() -> None:
    """It would be added to gradients that it was not lost from; the wrapped optimizer's state is loaded."""

    def check(process_set: ProcessSet) -> None:
        _, optimizer = trained(process_set, hvd.Compression.int8, steps=2)
        saved = optimizer.state_dict()
        for name in ("rank", "size"):
            _, fresh = trained(process_set, hvd.Compression.int8, steps=0)
            fresh.load_state_dict({**saved, "compression": {**saved["compression"], name: 7}})
            assert "compression" not in fresh.state_dict()

    run_process_sets(2, check, node_size=1)


def test_parameters_of_other_dtypes_travel_as_they_are() -> None:
    """Complex gradients are averaged as without compression, beside others that are compressed."""

    def check(process_set: ProcessSet) -> None:
        weight = torch.nn.Parameter(torch.zeros(5, dtype=torch.complex128))
        narrow = torch.nn.Parameter(torch.zeros(300))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight, narrow], lr=1.0), compression=hvd.Compression.int8, process_set=process_set
        )
        third = torch.full((5,), 1j / 3, dtype=torch.complex128) * (process_set.rank() + 1)
        weight.grad, narrow.grad = third, torch.linspace(-1, 1, 300)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full((5,), -0.5j, dtype=torch.complex128), rtol=1e-15, atol=0)
        torch.testing.assert_close(narrow.detach(), -torch.linspace(-1, 1, 300), rtol=0, atol=0.01)

    run_process_sets(2, check, node_size=1)


@pytest.mark.parametrize("compression", WIRES[2:], ids=lambda each: each.wire)
def test_allreduce_takes_wire_formats(compression: Any) -> None:
    """So do groups; gradients flow through, and what are no floats is exact."""

    def check(process_set: ProcessSet) -> None:
        tensor = torch.linspace(-1, 1, 300).requires_grad_()
        total = hvd.allreduce(tensor, op=hvd.Sum, compression=compression, process_set=process_set)
        torch.testing.assert_close(total.detach(), 2 * tensor.detach(), rtol=0.2, atol=0.2)
        total.sum().backward()
        torch.testing.assert_close(tensor.grad, torch.full((300,), 2.0), rtol=0.01, atol=0)
        integers, floats = hvd.grouped_allreduce(
            [torch.tensor([2, 4]), torch.ones(3)], op=hvd.Sum, compression=compression, process_set=process_set
        )
        assert integers.tolist() == [4, 8]
        torch.testing.assert_close(floats, torch.full((3,), 2.0), rtol=0.01, atol=0)

    run_process_sets(2, check, node_size=1)
