"""Buckets that are reduced during the backward pass: the same gradients, whatever the program does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402
from ringreduce.torch.compression import Compression  # noqa: E402

STEPS = 6
BUCKET_NBYTES = 256  # several buckets


class Net(torch.nn.Module):
    """Layers of odd sizes, one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 13)
        self.maybe = torch.nn.Linear(13, 13)
        self.last = torch.nn.Linear(13, 5)

    def forward(self, x: Any, *, whole: bool = True) -> Any:
        x = torch.relu(self.first(x))
        return self.last(torch.relu(self.maybe(x)) if whole else x)


def train(overlap: bool, steps: Callable[[Any, Any, Callable[..., None]], None], **options: Any) -> list[Any]:
    """Train a net as ``steps(model, optimizer, backward)`` says; return its weights."""
    torch.manual_seed(3)
    model = Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        overlap=overlap,
        bucket_nbytes=BUCKET_NBYTES,
        **options,
    )
    generator = torch.Generator().manual_seed(hvd.rank())

    def backward(**forward: Any) -> None:
        x = torch.randn(3, 7, generator=generator)
        model(x, **forward).square().mean().backward()

    steps(model, optimizer, backward)
    return [parameter.detach().clone() for parameter in model.parameters()]


def plainly(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward()
        optimizer.step()


def with_gradients_that_add_up(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(1 + step % 3):
            backward()
        optimizer.step()


def with_gradients_changed_behind_the_back(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        backward()
        if step >= 2 and hvd.rank() == 0:
            model.last.weight.grad.data.neg_()
        optimizer.step()


def with_different_graphs(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(whole=(step + hvd.rank()) % 3 > 0)
        optimizer.step()


def with_a_pass_that_is_thrown_away(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == 3:
            backward()
            optimizer.zero_grad()
        backward()
        optimizer.step()


def with_other_operations_in_between(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(whole=hvd.rank() > 0)
        mean = hvd.allreduce(torch.tensor([float(hvd.rank())]), name="loss")
        assert mean.item() == (hvd.size() - 1) / 2
        optimizer.step()


def with_gradients_that_change_places(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        backward()
        if step >= 2:
            grad = model.maybe.weight.grad
            grad.copy_(grad.flip(0) if hvd.rank() == 0 else grad.roll(1, dims=0))
        optimizer.step()


def with_other_types_later(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for step in range(2 * STEPS):
        if step == STEPS - 1:
            model.to(torch.float16).to(torch.float32)
        if step == STEPS:
            backward()
            model.half().float()
        optimizer.zero_grad()
        backward()
        optimizer.step()


def with_clipping(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()


def with_kept_gradients(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    kept = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward()
        optimizer.step()
        if step % 2:
            kept.append((model.last.weight.grad, model.last.weight.grad.clone()))
    for grad, copy in kept[:-1]:
        assert torch.equal(grad, copy)


def with_uneven_data(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for _ in range(STEPS + hvd.rank()):
        optimizer.zero_grad()
        backward()
        optimizer.step()
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)  # the rank with the most steps


def with_a_pass_and_no_step_before_the_end(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for epoch in range(3):
        for _ in range(3):
            optimizer.zero_grad()
            backward()
            optimizer.step()
        if hvd.rank() == 0 and epoch == 1:  # it sends what nobody needs
            backward()
        hvd.join()


@pytest.mark.parametrize(
    "steps",
    [
        plainly,
        with_gradients_that_add_up,
        with_gradients_changed_behind_the_back,
        with_different_graphs,
        with_a_pass_that_is_thrown_away,
        with_other_operations_in_between,
        with_gradients_that_change_places,
        with_other_types_later,
        with_clipping,
        with_kept_gradients,
        with_uneven_data,
        with_a_pass_and_no_step_before_the_end,
    ],
    ids=lambda steps: steps.__name__,
)
def test_overlap_makes_no_difference(steps: Callable[..., None]) -> None:
    """Weights are those of an optimizer that reduces everything in the step, bit by bit, and equal on all ranks."""
    early, late = train(True, steps), train(False, steps)
    for mine, expected in zip(early, late, strict=True):
        assert torch.equal(mine, expected)
        gathered = hvd.allgather(mine.reshape(1, -1))
        assert torch.equal(gathered, gathered[:1].expand_as(gathered))


@pytest.mark.usefixtures("nodes_of_one")  # within a node nothing is rounded, and so nothing kept
@pytest.mark.parametrize("compression", [Compression.int8, Compression.int4, Compression.powersgd(rank=2)])
@pytest.mark.parametrize("steps", [plainly, with_gradients_changed_behind_the_back])
def test_what_compression_keeps_survives_a_wrong_guess(compression: Any, steps: Callable[..., None]) -> None:
    """Error feedback goes on from what it was before a reduction that was not used."""
    early, late = (train(overlap, steps, compression=compression) for overlap in (True, False))
    for mine, expected in zip(early, late, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.sizes(2, 3, 4)
def test_buckets_are_reduced_during_the_backward_pass() -> None:
    """From the third step on every bucket is on its way before the step begins, and what it brings is used."""
    reduced: list[list[bool]] = []

    def look(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            backward()
            reduced.append([early.started for early in optimizer._buckets._early.values()])
            optimizer.step()

    train(True, look)
    assert reduced[0] == []
    assert len(reduced[1]) > 1
    assert not any(reduced[1])
    assert all(all(step) for step in reduced[2:])


@pytest.mark.sizes(2, 3, 4)
def test_a_program_that_often_changes_gradients_is_left_alone() -> None:
    """After some wrong guesses everything is reduced in the step, as without overlap."""

    def steps(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
        for _ in range(8):
            optimizer.zero_grad()
            backward()
            model.first.bias.grad.add_(1.0)
            optimizer.step()
        assert optimizer._buckets._early is None
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())

    train(True, steps)


@pytest.mark.sizes(2, 3, 4)
def test_few_wrong_guesses_in_a_row_are_forgiven() -> None:
    """A pass that is thrown away now and then does not end overlap."""

    def steps(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
        for step in range(24):
            optimizer.zero_grad()
            if step % 6 == 5:
                backward()
                optimizer.zero_grad()
            backward()
            optimizer.step()
        assert optimizer._buckets._early

    train(True, steps)


@pytest.mark.parametrize("compression", [Compression.powersgd(rank=2), Compression.topk(fraction=0.2)])
def test_a_state_that_is_saved_before_a_step_is_that_of_the_last(compression: Any) -> None:
    """What is under way does not show in a state dict, and what is loaded in between is what counts."""

    def save_and_load(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            before = optimizer.state_dict()
            backward()
            hvd.barrier()
            for name, kept in optimizer.state_dict().get("compression", {}).get("buckets", {}).items():
                for key, tensor in kept.items():
                    assert torch.equal(tensor, before["compression"]["buckets"][name][key])
            if step == 4:
                optimizer.load_state_dict(before)
            optimizer.step()

    early, late = (train(overlap, save_and_load, compression=compression) for overlap in (True, False))
    assert all(torch.equal(mine, expected) for mine, expected in zip(early, late, strict=True))


def test_a_model_can_be_used_without_its_optimizer() -> None:
    """After an optimizer is gone, or another has taken its place, nothing is started for it; also if that was done."""
    kept: list[Any] = []

    def steps(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
        plainly(model, optimizer, backward)
        if hvd.rank() == 0:
            backward()  # started, and taken up by nobody
        kept.append((model, backward))

    train(True, steps)
    gc.collect()
    model, backward = kept[0]
    backward()
    again = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), overlap=True)
    for _ in range(STEPS):
        again.zero_grad()
        backward()
        again.step()
    hvd.join()
    weights = hvd.allgather(model.first.weight.detach().reshape(1, -1), name="weights")
    assert torch.equal(weights, weights[:1].expand_as(weights))
