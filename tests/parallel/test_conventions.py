"""Which numbers come out by the chain rule, and which by Horovod's conventions: closed forms for both."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.common.launch import launch
from ringreduce.testing import caught

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402


@pytest.fixture
def members(by_horovod: bool, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A process set: all ranks, or all but rank 0."""
    made = hvd.global_process_set
    if request.param == "some":
        made = hvd.add_process_set(range(1, rr.size()))
    yield made
    if request.param == "some":
        hvd.remove_process_set(made)


BOTH_SETS = pytest.mark.parametrize(
    "members", ["all", pytest.param("some", marks=pytest.mark.sizes(2, 3, 4))], indirect=True
)


def weights(rank: int, shape: tuple[int, ...]) -> Any:
    """What a rank multiplies a result by before it sums it up: its gradient with respect to the result."""
    return torch.arange(1.0, 1 + int(np.prod(shape)), dtype=torch.float64).reshape(shape) * (1.0 + rank)


# ---- gradients ----


@pytest.mark.spread("by_horovod")
@BOTH_SETS
@pytest.mark.parametrize("grouped", [False, True], ids=["one", "grouped"])
def test_gradients_of_what_was_gathered(by_horovod: bool, members: Any, grouped: bool) -> None:
    """They are the sum over the ranks by the chain rule, and its average by Horovod's convention."""
    if not members.included():
        return
    count, mine = members.size(), members.rank()
    x = torch.zeros(mine + 1, 2, dtype=torch.float64, requires_grad=True)
    rows = count * (count + 1) // 2
    both = hvd.grouped_allgather([x, x], process_set=members) if grouped else None
    result = both[1] if both else hvd.allgather(x, process_set=members)
    (result * weights(mine, (rows, 2))).sum().backward()
    total = sum(weights(rank, (rows, 2)) for rank in range(count))
    start = mine * (mine + 1) // 2
    expected = total[start : start + mine + 1] / (count if by_horovod else 1)
    torch.testing.assert_close(x.grad, expected)


@BOTH_SETS
def test_gradients_of_what_was_broadcast(by_horovod: bool, members: Any) -> None:
    """On the root the sum over the ranks, or its average; zeros on the others."""
    if not members.included():
        return
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    root = members.ranks[-1]
    (hvd.broadcast(x, root, process_set=members) * weights(members.rank(), (3,))).sum().backward()
    count = members.size()
    total = sum(weights(rank, (3,)) for rank in range(count)) / (count if by_horovod else 1)
    torch.testing.assert_close(x.grad, total if rr.rank() == root else torch.zeros_like(total))


@pytest.mark.spread("by_horovod")
@BOTH_SETS
@pytest.mark.parametrize("grouped", [False, True], ids=["one", "grouped"])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=lambda op: op.value)
def test_gradients_of_what_was_reduced_and_scattered(by_horovod: bool, members: Any, op: Any, grouped: bool) -> None:
    """What the ranks have is gathered; Horovod's is P times that of the chain rule. Factors count in both."""
    if not members.included():
        return
    count, mine = members.size(), members.rank()
    x = torch.zeros(2 * count + 1, dtype=torch.float64, requires_grad=True)
    how: dict[str, Any] = {"op": op, "process_set": members, "prescale_factor": 0.5, "postscale_factor": 3.0}
    part = hvd.grouped_reducescatter([x, x], **how)[0] if grouped else hvd.reducescatter(x, **how)
    (part * weights(mine, tuple(part.shape))).sum().backward()
    lengths = [len(each) for each in np.array_split(np.empty(2 * count + 1), count)]
    by_chain_rule = 1.5 * torch.cat([weights(rank, (length,)) for rank, length in enumerate(lengths)])
    if op is hvd.Average:
        by_chain_rule /= count
    torch.testing.assert_close(x.grad, by_chain_rule * (count if by_horovod else 1))


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=lambda op: op.value)
def test_gradients_that_are_the_same_in_both(by_horovod: bool, op: Any) -> None:
    """Through allreduce and alltoall gradients flow back the way the values came."""
    size, mine = rr.size(), rr.rank()
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (hvd.allreduce(x, op=op) * weights(mine, (3,))).sum().backward()
    total = sum(weights(rank, (3,)) for rank in range(size))
    torch.testing.assert_close(x.grad, total / size if op is hvd.Average else total)
    y = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    (hvd.alltoall(y) * weights(mine, (size,))).sum().backward()
    torch.testing.assert_close(y.grad, (mine + 1.0) * torch.arange(1.0, size + 1, dtype=torch.float64))


# ---- after a join ----


@pytest.mark.spread
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8], ids=str)
def test_averages_after_a_join(by_horovod: bool, dtype: Any) -> None:
    """They are over the ranks that are left, or over all of them; joined ranks count for nothing in all else."""
    size = rr.size()
    for step in range(rr.rank() + 1):
        values = [3 + rank for rank in range(size) if rank >= step]
        over = size if by_horovod else len(values)
        mine = torch.full((3,), 3 + rr.rank(), dtype=dtype)
        expected = {
            hvd.Sum: sum(values),
            hvd.Average: sum(values) / over if dtype.is_floating_point else sum(values) // over,
            hvd.Min: min(values),
            hvd.Max: max(values),
            hvd.Product: np.prod(values),
        }
        for op, value in expected.items():
            result = hvd.allreduce(mine, name=f"{op} {step % 2}", op=op)
            torch.testing.assert_close(result, torch.full((3,), value).to(dtype), rtol=1e-2, atol=0)
    hvd.join()


@pytest.mark.spread
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_predivide_factor": 4.0}, {"compression": hvd.Compression.bf16}, {"overlap": True}, {"op": hvd.Sum}],
    ids=["plain", "predivided", "compressed", "early", "sum"],
)
def test_steps_after_a_join(by_horovod: bool, options: dict[str, Any]) -> None:
    """An optimizer averages over the same ranks as an allreduce does, sparse gradients too."""
    size = rr.size()
    dense = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    sparse = torch.nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    torch.nn.init.zeros_(sparse.weight)
    inner = torch.optim.SGD([dense, sparse.weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, **options)
    expected = 0.0
    for step in range(rr.rank() + 1):
        values = [rank + 1.0 for rank in range(size) if rank >= step]
        optimizer.zero_grad()
        ((dense.sum() + sparse(torch.tensor([2])).sum()) * (rr.rank() + 1.0)).backward()
        optimizer.step()
        over = 1 if "op" in options else size if by_horovod else len(values)
        expected -= sum(values) / over
    rtol = 1e-2 if "compression" in options else 1e-12
    torch.testing.assert_close(dense.detach(), torch.full((4,), expected, dtype=torch.float64), rtol=rtol, atol=0)
    row = torch.zeros(5, 2, dtype=torch.float64)
    row[2] = expected
    torch.testing.assert_close(sparse.weight.detach(), row, rtol=rtol, atol=0)
    hvd.join()


# ---- optimizers ----


def test_gradients_after_the_state_of_an_optimizer_was_broadcast(by_horovod: bool) -> None:
    """By Horovod's convention they are zeros where there was no state; nothing else changes by either."""
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    inner = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    before = copy.deepcopy(model.state_dict())
    model.weight.grad = kept = torch.ones_like(model.weight)
    wrapped = hvd.DistributedOptimizer(inner)
    hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert not inner.state
    assert model.bias.grad is None
    if by_horovod:
        assert model.weight.grad.equal(torch.zeros(2, 3))
    else:
        assert model.weight.grad is kept
    assert kept.equal(torch.ones(2, 3))
    wrapped.step()
    model.weight.grad = kept
    hvd.broadcast_optimizer_state(inner, root_rank=0)
    assert model.weight.grad is kept


# ---- the choice ----


@pytest.fixture
def no_choice(no_world: None) -> Iterator[None]:
    """Take back, at the end, what a test has chosen."""
    yield
    rr.shutdown()
    rr.set_conventions("chain_rule")


@pytest.mark.sizes(2, 3, 4)
def test_ranks_with_different_conventions_are_a_mismatch(no_choice: None) -> None:
    """They would compute different things; all of them refuse to start, and say why."""
    if launch().rank == 0:
        rr.set_conventions("horovod")
    error = caught(rr.init)
    assert isinstance(error, rr.MismatchError)
    assert "HOROVOD" in error.values[0]
    assert "HOROVOD" not in error.values[1]


def test_conventions_are_chosen_before_init(no_choice: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a call or, which overrides it, by the environment; a world keeps those that it began with."""
    assert rr.Config().conventions is rr.Conventions.CHAIN_RULE
    rr.set_conventions("horovod")
    rr.init()
    assert rr.config().conventions is rr.Conventions.HOROVOD
    rr.set_conventions(rr.Conventions.HOROVOD)
    with pytest.raises(rr.ConfigError, match=r"init.*shutdown"):
        rr.set_conventions("chain_rule")
    with pytest.raises(rr.ConfigError, match="chain_rule or horovod, got 'mine'"):
        rr.set_conventions("mine")
    rr.shutdown()
    monkeypatch.setenv("RINGREDUCE_CONVENTIONS", "chain_rule")
    rr.init()
    assert rr.config().conventions is rr.Conventions.CHAIN_RULE


# ---- parameters that no rank uses ----


@pytest.mark.spread("by_horovod")
@pytest.mark.parametrize("asked", [None, True, False])
def test_gradients_of_parameters_that_no_rank_used(by_horovod: bool, asked: bool | None) -> None:
    """None by the chain rule, as on one rank; zeros by Horovod's convention, so that weight decay moves them.

    What is frozen is left alone by both.
    """
    used, unused, frozen = (torch.nn.Parameter(torch.ones(3), requires_grad=number < 2) for number in range(3))
    inner = torch.optim.SGD([used, unused, frozen], lr=0.5, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(inner, skip_unused=asked)
    (used.sum() * (rr.rank() + 1)).backward()
    optimizer.step()
    average = (rr.size() + 1) / 2
    torch.testing.assert_close(used.detach(), torch.full((3,), 1 - 0.5 * (average + 0.5)))
    zeros = rr.size() > 1 and (by_horovod if asked is None else not asked)
    torch.testing.assert_close(unused.detach(), torch.full((3,), 0.75 if zeros else 1.0))
    assert (unused.grad is None) is not zeros
    assert frozen.grad is None
    assert frozen.tolist() == [1.0] * 3


# ---- integers ----


@BOTH_SETS
def test_scaled_averages_of_integers(by_horovod: bool, members: Any) -> None:
    """Truncated before they are scaled by the chain rule, as averages are integers; once, at the end, by Horovod's."""
    for dtype, postscale in itertools.product(["uint8", "int8", "int16", "int32", "int64"], [2.0, 0.75, -1.5]):
        if not members.included() or (dtype == "uint8" and postscale < 0):
            continue
        count = members.size()
        each = [(np.arange(count * 3) - (0 if dtype == "uint8" else 4)) + 3 * rank for rank in range(count)]
        total = np.sum(each, axis=0).astype(np.float64)
        wanted = np.trunc(total * (postscale / count) if by_horovod else np.trunc(total / count) * postscale)
        mine = torch.tensor(each[members.rank()], dtype=getattr(torch, dtype))
        options = {"op": hvd.Average, "postscale_factor": postscale, "process_set": members}
        np.testing.assert_array_equal(hvd.allreduce(mine, **options), wanted)
        np.testing.assert_array_equal(hvd.grouped_allreduce([mine, mine], **options)[1], wanted)
        part = slice(3 * members.rank(), 3 * members.rank() + 3)
        np.testing.assert_array_equal(hvd.reducescatter(mine, **options), wanted[part])
