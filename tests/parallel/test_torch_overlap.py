"""Buckets that are reduced during the backward pass: the same gradients, whatever the program does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint

from torch_models import assert_equal_on_ranks  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402
from ringreduce.torch.compression import Compression  # noqa: E402
from ringreduce.training.gradients.buckets import LARGE_NBYTES  # noqa: E402
from ringreduce.training.strategies.stages import OverlapProbe  # noqa: E402

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


def train(overlap: bool | None, steps: Callable[[Any, Any, Callable[..., None]], None], **options: Any) -> list[Any]:
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


def plainly(model: Any, optimizer: Any, backward: Callable[..., None], passes: int = 1) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(passes):
            backward()
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


def with_large_layers(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    large = torch.nn.Linear(LARGE_NBYTES // 4 // 7 + 1, 7)  # whose gradients move while others come
    optimizer.add_param_group({"params": list(large.parameters())})
    for _ in range(2 * STEPS):
        optimizer.zero_grad()
        (large.weight.sum() * large.bias.sum() * (1 + hvd.rank())).backward()
        backward()
        assert optimizer.overlaps is (under_way(optimizer) > 0)
        optimizer.step()
        large.weight.data.clamp_(-1, 1)


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


def with_an_extra_pass_at_times(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        backward()
        if step % 4 == 3 and hvd.rank() == step % hvd.size():
            backward()
        optimizer.step()


def without_a_pass_on_some_ranks(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        if step < 3 or (step + hvd.rank()) % 3:
            backward()
        optimizer.step()


def with_a_diagnostic_pass_that_says_so(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == 4 and hvd.rank() == 0:
            with optimizer.no_sync():
                backward()
            optimizer.zero_grad()
        backward()
        optimizer.step()


def with_gradients_cleared_in_place(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        backward()
        if step == 4:
            optimizer.zero_grad(set_to_none=False)
            backward()
        optimizer.step()


def with_closures(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        backward()
        return 1.0

    for _ in range(STEPS):
        optimizer.step(closure)


def with_changes_by_later_hooks(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
    plainly(model, optimizer, backward)  # whose hooks are there now

    def double(parameter: Any) -> None:
        parameter.grad.mul_(2.0)

    hooks = [parameter.register_post_accumulate_grad_hook(double) for parameter in model.parameters()]
    plainly(model, optimizer, backward)
    for hook in hooks:
        hook.remove()


SAME_BITS = [
    plainly,
    with_different_graphs,
    without_a_pass_on_some_ranks,
    with_a_pass_that_is_thrown_away,
    with_a_diagnostic_pass_that_says_so,
    with_gradients_cleared_in_place,
    with_closures,
    with_changes_by_later_hooks,
    with_other_operations_in_between,
    with_other_types_later,
    with_clipping,
    with_kept_gradients,
    with_large_layers,
    with_uneven_data,
    with_a_pass_and_no_step_before_the_end,
]


WHERE_IT_MATTERS = [plainly, with_different_graphs, with_a_pass_that_is_thrown_away, with_uneven_data]


@pytest.mark.spread
@pytest.mark.parametrize(
    ("steps", "options"),
    [
        *((steps, {}) for steps in SAME_BITS),
        *((steps, {"op": hvd.Sum}) for steps in WHERE_IT_MATTERS),
        # What rounding loses in a pass that is thrown away was sent all the same.
        *(
            (steps, {"compression": Compression.int8})
            for steps in WHERE_IT_MATTERS
            if steps is not with_a_pass_that_is_thrown_away
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(list(value)),
)
def test_overlap_makes_no_difference(steps: Callable[..., None], options: dict[str, Any]) -> None:
    """Weights are those of an optimizer that reduces everything in the step, bit by bit, and equal on all ranks."""
    early, late = train(True, steps, **options), train(False, steps, **options)
    assert all(map(torch.equal, early, late))
    assert_equal_on_ranks(early)


def test_what_is_added_to_averages_is_averaged() -> None:
    """A pass on one rank that comes when buckets were reduced already is the same as if it had come before."""
    early, late = (train(overlap, with_an_extra_pass_at_times) for overlap in (True, False))
    torch.testing.assert_close(early, late, rtol=1e-5, atol=1e-6)
    assert_equal_on_ranks(early)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("passes", [1, 3])
def test_buckets_are_reduced_during_the_last_backward_pass(passes: int) -> None:
    """From the third step on every bucket is on its way when the declared passes are over, and none before."""

    def steps(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            for _ in range(passes):
                assert under_way(optimizer) == 0
                backward()
            buckets = len(list(optimizer._training.reducer.buckets))
            assert under_way(optimizer) == (0 if step < 2 else buckets > 1) * buckets
            optimizer.step()

    early = train(True, steps, backward_passes_per_step=passes)
    late = train(False, partial(plainly, passes=passes), backward_passes_per_step=passes)
    assert all(torch.equal(mine, expected) for mine, expected in zip(early, late, strict=True))


def under_way(optimizer: Any) -> int:
    """How many buckets were submitted since the last step."""
    return sum(each.part is not None for each in optimizer._training.gradients.overlap._early)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_program_that_changes_its_gradients_is_told(overlap: bool, warned: Any) -> None:
    """Nothing overlaps; rank 0 says once what each rank has changed, and the two remedies."""

    def steps(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            assert not optimizer.overlaps
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())

    train(overlap, steps)
    told = warned("were changed between")
    assert len(told) == (hvd.rank() == 0)
    assert all("synchronize()" in each and 'reduce_in="backward"' in each for each in told)


@pytest.mark.sizes(2, 3, 4)
def test_weights_that_drift_apart_are_noticed(warned: Any) -> None:
    """A write to the data of a gradient, which torch does not count, shows in the weights; rank 0 says so once."""

    def steps(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
        for step in range(18):
            optimizer.zero_grad()
            backward()
            hvd.barrier()  # which runs after the buckets that all ranks have submitted before
            if step > 3 and hvd.rank() == 1:
                model.last.weight.grad.data.neg_()
            optimizer.step()

    train(True, steps)
    told = warned("different weights by now")
    assert len(told) == (hvd.rank() == 0)


def clip_later(model: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def replace_on_one_rank(model: Any, optimizer: Any) -> None:
    if hvd.rank() == hvd.size() - 1:
        model.last.weight.grad = torch.ones_like(model.last.weight)


def clear_on_one_rank(model: Any, optimizer: Any) -> None:
    if hvd.rank() == 0:
        model.zero_grad()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("change", [clip_later, replace_on_one_rank, clear_on_one_rank])
def test_gradients_that_change_under_way_are_refused(change: Callable[..., None]) -> None:
    """All ranks raise the same error with the remedies, no weight has changed, and training goes on without overlap."""

    def steps(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
        plainly(model, optimizer, backward)
        optimizer.zero_grad()
        backward()
        hvd.barrier()
        change(model, optimizer)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(rr.ConfigError, match=r"no_sync\(\)"):
            optimizer.step()
        assert all(torch.equal(*each) for each in zip(model.parameters(), before, strict=True))
        plainly(model, optimizer, backward)

    assert_equal_on_ranks(train(True, steps))


@pytest.mark.sizes(2, 3, 4)
def test_a_rank_that_joins_in_the_middle_of_a_step_is_noticed() -> None:
    """Its gradients are in some buckets and not in others; those that step raise."""

    def steps(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
        plainly(model, optimizer, backward)
        backward()
        hvd.barrier()
        if hvd.rank():
            with pytest.raises(rr.ConfigError, match="joined without a step"):
                optimizer.step()
        hvd.join()

    train(True, steps)


@pytest.mark.sizes(2, 3, 4)
def test_overlap_begins_again_after_ranks_have_joined() -> None:
    """Also if others have withdrawn buckets meanwhile."""

    def steps(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
        for _ in range(2):
            plainly(model, optimizer, backward)
            for step in range(hvd.rank() + 1):
                optimizer.zero_grad()
                backward(whole=step % 2 == 0)
                optimizer.step()
            hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
            hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)  # its momentum
        plainly(model, optimizer, backward)
        assert optimizer.overlaps

    assert_equal_on_ranks(train(True, steps))


def test_parameters_that_are_removed_or_unused_at_first() -> None:
    """A group that goes, and a layer that some rank uses only after all have cleared what came before."""

    def steps(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            backward(whole=hvd.rank() > 0)
            optimizer.step()
        optimizer.zero_grad()
        backward(whole=hvd.rank() > 0)
        optimizer.zero_grad()
        backward()
        optimizer.step()
        extra = torch.nn.Linear(3, 3)
        optimizer.add_param_group({"params": list(extra.parameters())})
        for step in range(2 * STEPS):
            if step == STEPS:
                del optimizer.param_groups[1]
            optimizer.zero_grad()
            extra(torch.ones(1, 3)).sum().backward()
            backward()
            optimizer.step()

    early, late = train(True, steps), train(False, steps)
    assert all(map(torch.equal, early, late))
    assert_equal_on_ranks(early)


class Tied(torch.nn.Module):
    """One layer used three times, each time within a checkpoint, and a layer that is used once."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.tied, self.last = torch.nn.Linear(5, 5), torch.nn.Linear(5, 2)
        self.reentrant = reentrant

    def forward(self, x: Any) -> Any:
        x = x.requires_grad_()
        for _ in range(3):
            x = checkpoint(lambda x: torch.tanh(self.tied(x)), x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.spread
@pytest.mark.parametrize("reduce_in", ["step", "backward"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_and_tied_layers(reentrant: bool, reduce_in: str) -> None:
    """A gradient that is added to three times in a pass is reduced when it is whole."""
    trained = []
    for wrap in (True, False):
        torch.manual_seed(2)
        model = Tied(reentrant)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2)
        if wrap:
            optimizer = hvd.DistributedOptimizer(optimizer, overlap=True, bucket_nbytes=64, reduce_in=reduce_in)
        for step in range(STEPS):
            optimizer.zero_grad()
            everyone = torch.randn(hvd.size(), 3, 5, generator=torch.Generator().manual_seed(step))
            x = everyone[hvd.rank()] if wrap else everyone.flatten(0, 1)
            model(x).square().mean().backward()
            optimizer.step()
        trained.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*trained, rtol=1e-4, atol=1e-6)
    assert_equal_on_ranks(trained[0])


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


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("slower_rank", [None, 1])
def test_overlap_between_nodes_is_tried_out(
    nodes_of_one: None, monkeypatch: pytest.MonkeyPatch, slower_rank: int | None, uneven: bool
) -> None:
    """Steps are made with it and without; it stays unless it makes them slower on a rank, and changes no number."""
    monkeypatch.setattr(OverlapProbe, "slower", property(lambda _: hvd.rank() == slower_rank))
    seen: list[bool] = []

    def steps(model: Any, optimizer: Any, backward: Callable[..., None]) -> None:
        for _ in range(5):
            for step in range(12 + (hvd.rank() if uneven else 0)):
                optimizer.zero_grad()
                backward()
                if step < 12:
                    seen.append(optimizer.overlaps)
                optimizer.step()
            hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)

    weights = train(None, steps)
    tried = seen.copy()
    assert True in tried
    assert False in tried[tried.index(True) :]
    assert tried[-1] is (slower_rank is None)
    assert hvd.allgather_object(tried) == [tried] * hvd.size()
    assert all(map(torch.equal, weights, train(False, steps)))
