"""Options and uses of optimizers, each with each other: the pair trains as one of them does, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import cache, partial
from itertools import combinations
from typing import Any

import pytest

import ringreduce as rr
from ringreduce.common.instruments import Pace
from ringreduce.training.optimizers import refusals
from ringreduce.training.options import features as table
from ringreduce.training.strategies.late import STALENESS

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402

#: Between nodes, so that formats travel and replicas exchange weights, of ranks that share parameters.
pytestmark = pytest.mark.usefixtures("nodes_of_two")

STEPS, SAMPLES = 4, 4  # samples of a step, for each rank on average

#: What gives ranks different numbers of samples, and what loses bits of each rank's own mean.
UNEVEN, LOSSY = {table.SAMPLES, table.SHARES}, {table.COMPRESSION, table.WIRE_FORMATS}

#: What ends in the weights of a run without it, to rounding.
NEUTRAL = {
    table.BACKWARD,
    table.CLOSURE,
    table.COMPILED,
    table.ELASTIC,
    table.OVERLAP,
    table.PREDIVISION,
    table.SAMPLES,
    table.SCALER,
    table.SHARD,
    table.SHARES,
    table.SKIPPING,
    table.SKIP_UNUSED,
    table.SPLIT,
}
OPTIONS: dict[str, dict[str, Any]] = {
    table.ADASUM: {"op": hvd.Adasum},
    table.BACKWARD: {"reduce_in": "backward"},
    table.COMPRESSION: {"compression": hvd.Compression.topk(0.5)},
    table.LOCAL: {"period": 2},
    table.OVERLAP: {"overlap": True},
    table.PREDIVISION: {"gradient_predivide_factor": 2.0},
    table.SHARD: {"shard": "node"},
    table.SKIP_UNUSED: {"skip_unused": True},
    table.SPLIT: {"split_updates": True},
    STALENESS.feature: {"staleness": 1},
    table.WIRE_FORMATS: {"compression": hvd.Compression.bf16},
}


ONE_ARGUMENT = (table.COMPRESSION, table.WIRE_FORMATS)  # of which only one can be given


class Net(torch.nn.Module):
    """Looks rows up, with sparse gradients or dense ones."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Embedding(11, 5, sparse=sparse)
        self.layer = torch.nn.Linear(5, 3)

    def forward(self, indices: Any) -> Any:
        return self.layer(self.rows(indices).mean(1))


def parts(used: Collection[str]) -> list[Any]:
    """Return which samples of a training this rank has in each step: with all ranks together, the same ones."""
    if table.SHARES in used:
        paces = [
            Pace(100, 100.0 * (1 + (rank == 0)), 0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, ()) for rank in range(rr.size())
        ]
        hvd.global_process_set.engine.tally.paces = paces  # rank 0 is slow
        count = STEPS * SAMPLES * rr.size()
        sampler = hvd.DistributedSampler(range(count), shuffle=False, shares="speed", batch_size=SAMPLES)
        sampler.set_epoch(0)
        return sampler
    counts = [SAMPLES] * rr.size()
    if table.SAMPLES in used:
        counts[0] -= 2
        counts[-1] += 2
    begin = sum(counts[: rr.rank()])
    return [range(start := step * sum(counts) + begin, start + counts[rr.rank()]) for step in range(STEPS)]


@cache  # what a pair is compared with is that of many pairs
def run(*used: str) -> list[Any]:
    """Train with some of the features, and return the weights; with `JOIN`, the last rank makes fewer steps."""
    model = Net(sparse=table.SPARSE in used)
    options = {name: value for each in used for name, value in OPTIONS.get(each, {}).items()}
    wrap = hvd.LocalSGD if table.LOCAL in used else hvd.DistributedOptimizer
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), model, **options)
    state = hvd.elastic.TorchState(model, optimizer) if table.ELASTIC in used else None
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0) if table.SCALER in used else None
    if table.COMPILED in used:
        model.compile(backend="aot_eager")

    torch.manual_seed(1)
    samples = torch.randint(11, (STEPS * SAMPLES * rr.size(), 3))

    def evaluate(part: Collection[int]) -> Any:
        optimizer.zero_grad()
        loss = model(samples[list(part)]).square().mean()
        if scaler is not None:
            loss = scaler.scale(loss)
        loss.backward()
        if table.SKIPPING in used:
            optimizer.synchronize()
        return loss

    divided = parts(used)
    for step, part in enumerate(divided):
        if table.JOIN in used and table.ELASTIC not in used and (step, rr.rank() + 1) == (3, rr.size()):
            break
        make_step: Callable[..., Any] = optimizer.step if scaler is None else partial(scaler.step, optimizer)
        closure = [partial(evaluate, part)] if table.CLOSURE in used else []
        if not closure:
            evaluate(part)
        with optimizer.skip_synchronize() if table.SKIPPING in used else nullcontext():
            make_step(*closure, **({"samples": len(part)} if table.SAMPLES in used else {}))
        if scaler is not None:
            scaler.update()
        if state is not None:
            state.commit()
            with optimizer.writing():
                state.restore()
    if {table.LOCAL, STALENESS.feature} & set(used):
        optimizer.synchronize()
    if table.JOIN in used:
        hvd.join()
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.spread
@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:torch.jit", "ignore:.*overlap")
@pytest.mark.parametrize(
    ("one", "other"), [each for each in combinations(refusals.FEATURES, 2) if each != ONE_ARGUMENT]
)
def test_pairs(one: str, other: str) -> None:
    if (one, other) in refusals.REFUSED or (other, one) in refusals.REFUSED:
        if table.JOIN in (one, other):
            pytest.skip("ranks that do not join raise, which tests of each method prove")
        # DiLoCo lacks arguments and methods, and torch's GradScaler refuses closures by itself.
        others = (TypeError, AttributeError) if table.LOCAL in (one, other) else (AssertionError,)
        kinds = (rr.ConfigError, rr.MismatchError, *(others if {table.LOCAL, table.CLOSURE} & {one, other} else ()))
        if {one, other} == {table.ADASUM, table.SHARES} and rr.size() == 1:
            pytest.skip("nothing is combined")
        by_name = {one, other} & UNEVEN and {one, other} != {table.LOCAL, table.SAMPLES}
        with pytest.raises(kinds, match="do not go together" if by_name else None):
            run(one, other)
        return
    weights = run(one, other)
    everyone = hvd.allgather_object(weights)
    alike = everyone[:-1] if table.JOIN in (one, other) and rr.size() > 1 else everyone
    assert all(all(map(torch.equal, each, alike[0])) for each in alike)
    if table.JOIN in (one, other):
        return
    comparable = {one, other} & NEUTRAL and not ({one, other} & UNEVEN and {one, other} & LOSSY)
    expected = run(*sorted({one, other} - NEUTRAL)) if comparable else weights
    for each, wanted in zip(weights, expected, strict=True):
        assert torch.isfinite(each).all()
        torch.testing.assert_close(each, wanted)
    assert not torch.equal(weights[1], list(Net(sparse=False).parameters())[1])


@pytest.mark.spread
@pytest.mark.parametrize(
    ("one", "other"),
    [
        each
        for each in refusals.REFUSED
        if set(each) <= OPTIONS.keys() - {table.LOCAL} and each != (table.ADASUM, table.PREDIVISION)
    ],
)
def test_pairs_of_options_are_refused_when_the_optimizer_is_made(one: str, other: str) -> None:
    model = Net(sparse=False)
    with pytest.raises(rr.ConfigError, match=re.escape(f"{one} and {other} do not go together")):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **OPTIONS[one], **OPTIONS[other])
