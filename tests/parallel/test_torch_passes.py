"""Backward passes of any number, over any part of a model, on ranks that are held back: one process's numbers.

Models are of float64 and compared with one process that has the batches of all ranks: overlap may add up gradients in
another order, which shows in the last places alone. Ranks are held back by a barrier that they enter at different
places between their passes: whatever some ranks do before it, the others have not begun what they do after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch_models import assert_equal_on_ranks  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402

pytestmark = pytest.mark.spread

LAYERS = {"body": (5, 7), "middle": (7, 3), "head": (3, 11), "spare": (2, 3)}
EVERYTHING = ("body", "middle", "head")
WARM_UP = 4  # steps, after which buckets are reduced during the backward pass
BUCKET_NBYTES = 256  # so that each layer has a bucket, or two


class Pass(NamedTuple):
    """A backward pass.

    Attributes:
        layers: whose gradients it adds to.
        suspended: whether it is made within ``no_sync``.
        penalty: whether the loss is the square of a gradient, by a double backward pass.
    """

    layers: Sequence[str] = EVERYTHING
    suspended: bool = False
    penalty: bool = False


class Step(NamedTuple):
    """What one rank does before a step.

    Attributes:
        passes: its passes.
        hold: before which of them it waits for the other ranks to reach their holds.
    """

    passes: Sequence[Pass]
    hold: int


Steps = Callable[[int, int, int], Step]  # of a step, a rank and the number of ranks


def make_model() -> Any:
    torch.manual_seed(7)
    return torch.nn.ModuleDict({name: torch.nn.Linear(*shape) for name, shape in LAYERS.items()}).double()


def backward(model: Any, what: Pass, seed: Sequence[int], share: float) -> None:
    """Make a pass over ``share`` of the loss of one rank's batch, which ``seed`` gives."""
    generator = torch.Generator().manual_seed(hash(tuple(seed)) % 2**31)
    loss = torch.zeros((), dtype=torch.float64)
    for name in what.layers:
        x = torch.randn(4, LAYERS[name][0], generator=generator, dtype=torch.float64).requires_grad_(what.penalty)
        out = torch.tanh(model[name](x))
        if what.penalty:
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            out = slope
        loss = loss + out.square().mean()
    (share * loss).backward()


def train(steps: Steps, count: int, **options: Any) -> tuple[list[Any], Any]:
    """Train a model on this rank's part; return its weights and the optimizer."""
    rank, size, model = hvd.rank(), hvd.size(), make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    options = {"bucket_nbytes": BUCKET_NBYTES, **options}
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)
    for number in range(count):
        optimizer.zero_grad()
        step = steps(number, rank, size)
        for index, each in enumerate(step.passes):
            if index == step.hold:
                hvd.barrier()
            with optimizer.no_sync() if each.suspended else nullcontext():
                backward(model, each, (number, rank, index), 1.0)
        if step.hold >= len(step.passes):
            hvd.barrier()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], optimizer


def train_alone(steps: Steps, count: int, *, average: bool = True) -> list[Any]:
    """Train a model on the parts of all ranks; return its weights."""
    size, model = hvd.size(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    for number in range(count):
        optimizer.zero_grad()
        for rank in range(size):
            for index, each in enumerate(steps(number, rank, size).passes):
                backward(model, each, (number, rank, index), 1 / size if average else 1.0)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_right(weights: Iterable[Any], expected: Iterable[Any]) -> None:
    """Equal on all ranks, bit by bit, and near to what one process computes."""
    torch.testing.assert_close(weights, expected, rtol=1e-11, atol=1e-13)
    assert_equal_on_ranks(weights)


PLAIN = Pass()
LAZY = Pass(("body",))
FEW = Pass(("body", "spare"))


def lazy_regularisation(number: int, rank: int) -> list[Pass]:
    return [PLAIN, LAZY] if number % 3 == 2 else [PLAIN]


def lazy_regularisation_that_says_so(number: int, rank: int) -> list[Pass]:
    return [PLAIN, Pass(("head", "middle"), suspended=True)] if number % 3 == 2 else [PLAIN]


def gradient_penalty(number: int, rank: int) -> list[Pass]:
    return [PLAIN, Pass(("head", "body"), penalty=True)] if number % 2 else [PLAIN]


def penalty_first(number: int, rank: int) -> list[Pass]:
    return [Pass(("head",), penalty=True), PLAIN] if number % 4 == 1 else [PLAIN]


def three_passes_at_times(number: int, rank: int) -> list[Pass]:
    return [PLAIN, LAZY, PLAIN] if number > WARM_UP and number % 2 else [PLAIN]


def more_passes_on_some_ranks(number: int, rank: int) -> list[Pass]:
    return [PLAIN] * (1 + (number + rank) % 3) if number >= WARM_UP else [PLAIN]


def other_parts_on_other_ranks(number: int, rank: int) -> list[Pass]:
    parts = [("body", "middle"), ("middle", "head"), EVERYTHING, ("head", "spare")]
    return [PLAIN, Pass(parts[(number + rank) % 4])] if number >= WARM_UP else [PLAIN]


def parts_that_some_ranks_lack(number: int, rank: int) -> list[Pass]:
    """A layer that this rank has not used is reduced with zeros, and added to by it, or another rank, later."""
    first = Pass(("body", "middle")) if number >= WARM_UP and rank % 2 else PLAIN
    return [first, FEW if (number + rank) % 3 else LAZY] if number >= WARM_UP else [PLAIN, LAZY]


def a_layer_of_some_ranks(number: int, rank: int) -> list[Pass]:
    """Others never use it until the end: zeros are reduced for them, which become a gradient in a second pass."""
    whole = Pass((*EVERYTHING, "spare")) if rank % 2 == 0 else PLAIN
    return [whole, FEW if number >= 2 * WARM_UP else LAZY] if number >= WARM_UP else [whole]


def one_layer_first(number: int, rank: int) -> list[Pass]:
    """It is added to for the second time when all others are complete."""
    return [LAZY, PLAIN] if number >= WARM_UP and number % 2 else [PLAIN]


PROGRAMS = [
    lazy_regularisation,
    lazy_regularisation_that_says_so,
    gradient_penalty,
    penalty_first,
    three_passes_at_times,
    more_passes_on_some_ranks,
    other_parts_on_other_ranks,
    parts_that_some_ranks_lack,
    a_layer_of_some_ranks,
    one_layer_first,
]


def all_at_once(number: int, rank: int, passes: int) -> int:
    """Nobody has made a second pass before all have made the first: buckets are reduced by then."""
    return 1


def one_rank_late(number: int, rank: int, passes: int) -> int:
    """A rank that begins when the others have made all their passes; each in turn."""
    return 0 if rank == number % hvd.size() else passes


def others_late(number: int, rank: int, passes: int) -> int:
    """A rank that has made all its passes before the others begin; each in turn."""
    return passes if rank == number % hvd.size() else 0


def in_the_middle(number: int, rank: int, passes: int) -> int:
    """Ranks that have made different numbers of passes."""
    return (number + rank) % (passes + 1)


HOLDS = [all_at_once, one_rank_late, others_late, in_the_middle]


def held(program: Callable[[int, int], list[Pass]], hold: Callable[[int, int, int], int]) -> Steps:
    def steps(number: int, rank: int, size: int) -> Step:
        passes = program(number, rank)
        return Step(passes, hold(number, rank, len(passes)))

    return steps


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=str)
@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_passes_of_any_number_over_any_part(program: Any, hold: Any, op: Any) -> None:
    """Whoever is late, a step has the gradients of all passes of all ranks, and no rank sees an error."""
    steps = held(program, hold)
    weights, _ = train(steps, 3 * WARM_UP, overlap=True, op=op)
    assert_right(weights, train_alone(steps, 3 * WARM_UP, average=op == hvd.Average))


@pytest.mark.parametrize("hold", [one_rank_late, all_at_once])
@pytest.mark.parametrize("program", [lazy_regularisation, three_passes_at_times, more_passes_on_some_ranks])
@pytest.mark.parametrize("options", [{}, {"op": hvd.Sum}], ids=["average", "sum"])
def test_passes_under_default_settings_between_nodes(
    nodes_of_one: None, program: Any, hold: Any, options: dict[str, Any]
) -> None:
    """The same where the network decides: overlap is tried out there without being asked for."""
    steps = held(program, hold)
    weights, _ = train(steps, 6 * WARM_UP, **options)
    assert_right(weights, train_alone(steps, 6 * WARM_UP, average=not options))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=str)
@pytest.mark.parametrize(
    "program", [parts_that_some_ranks_lack, other_parts_on_other_ranks, a_layer_of_some_ranks, one_layer_first]
)
def test_layers_that_share_a_bucket(program: Any, op: Any) -> None:
    """Some are added to after the bucket was reduced, others are not, or some rank has none of them."""
    for hold in (all_at_once, in_the_middle):
        steps = held(program, hold)
        weights, _ = train(steps, 3 * WARM_UP, overlap=True, op=op, bucket_nbytes=1 << 20)
        assert_right(weights, train_alone(steps, 3 * WARM_UP, average=op == hvd.Average))


@pytest.mark.sizes(2, 3, 4)
def test_overlap_goes_on_after_a_step_of_more_passes() -> None:
    """One step that differs ends nothing: the next one has its buckets under way when its pass is over."""
    steps = held(lazy_regularisation, one_rank_late)
    _, optimizer = train(steps, 3 * WARM_UP, overlap=True)
    assert optimizer.overlaps


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("passes", [2, 3])
def test_declared_passes_and_others(passes: int, groups: int | None) -> None:
    """Steps of the declared number of passes, and some of one more or less; buckets as the program groups them."""

    def program(number: int, rank: int) -> list[Pass]:
        more = (number % 3 - 1) * (number >= WARM_UP)
        return [*[PLAIN] * (passes + more - 1), LAZY if number % 2 else PLAIN]

    for hold in HOLDS:
        steps = held(program, hold)
        weights, _ = train(steps, 3 * WARM_UP, overlap=True, backward_passes_per_step=passes, groups=groups)
        assert_right(weights, train_alone(steps, 3 * WARM_UP))
