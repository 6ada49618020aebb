"""`DistributedOptimizer` on real ranks against one process that trains on all ranks' data at once.

Every test trains a float64 model twice on each rank: distributed, on this rank's rows of each batch, and alone, on all
rows. The ranks must end with the same bits, and within rounding of the lone process.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
from torch_models import Model, Optimizer, assert_equal_on_ranks, mlp  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402

ROWS = 4  # of each rank in a batch
STEPS = 4

make_model = partial(mlp, 6, 5, 5, 3)
#: How the warning begins; programs filter it by that.
HOROVODS_WARNING = (
    r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\) context after optimizer\.synchronize\(\)"
)
#: loss(model, inputs, targets, rank of the data, step) -> scalar
Loss = Callable[[Model, Any, Any, int, int], Any]


@pytest.fixture(autouse=True)
def _double() -> Any:
    """Models and data are float64 unless a test says otherwise, and drawn equally on all ranks."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    yield
    torch.set_default_dtype(torch.float32)


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def squared_error(model: Model, inputs: Any, targets: Any, rank: int, step: int) -> Any:
    return (model(inputs) - targets).square().mean()


def batch(step: int, shape: tuple[int, ...] = (6,)) -> tuple[Any, Any]:
    """The data of all ranks in a step, equal on every rank: (size, ROWS, *shape) and (size, ROWS, 3)."""
    generator = torch.Generator().manual_seed(100 + step)
    leading = rr.size(), ROWS
    return torch.randn(*leading, *shape, generator=generator), torch.randn(*leading, 3, generator=generator)


def train_step(
    model: Model, optimizer: Optimizer, mine: list[int], step: int, loss: Loss = squared_error, **options: Any
) -> None:
    """One step on the data of the ranks ``mine``: the loss is the mean of theirs."""
    inputs, targets = batch(step, options.get("shape", (6,)))
    optimizer.zero_grad(set_to_none=options.get("set_to_none", True))
    for rank in mine:
        (loss(model, inputs[rank], targets[rank], rank, step) / len(mine)).backward()
    optimizer.step()


def distributed(make: Callable[[Any], Optimizer], model: Model, **options: Any) -> Optimizer:
    return hvd.DistributedOptimizer(make(model.parameters()), named_parameters=model.named_parameters(), **options)


def pair(build: Callable[[], Model] = make_model) -> tuple[Model, Model]:
    """Two equal models: the one to train alone, and the one to train distributed."""
    model = build()
    return model, copy.deepcopy(model)


def everyone() -> list[int]:
    return list(range(rr.size()))


def me() -> list[int]:
    return [rr.rank()]


def assert_same(alone: Model, together: Model, tolerance: float = 1e-11) -> None:
    """The ranks' weights are equal bit by bit, and close to those of the process that trained alone."""
    assert_equal_on_ranks(together.state_dict().values())
    torch.testing.assert_close(together.state_dict(), alone.state_dict(), rtol=tolerance, atol=tolerance)


def train_both(
    alone: Model,
    single: Optimizer,
    together: Model,
    many: Optimizer,
    *,
    steps: Iterable[int] = range(STEPS),
    loss: Loss = squared_error,
    tolerance: float = 1e-11,
    **options: Any,
) -> None:
    """Train one model on the data of all ranks, the other with the other ranks, and compare."""
    for step in steps:
        train_step(alone, single, everyone(), step, loss, **options)
        train_step(together, many, me(), step, loss, **options)
    assert_same(alone, together, tolerance)


def compare(
    make: Callable[[Any], Optimizer],
    loss: Loss = squared_error,
    build: Callable[[], Model] = make_model,
    wrap: dict[str, Any] | None = None,
    tolerance: float = 1e-11,
    **options: Any,
) -> tuple[Optimizer, Optimizer]:
    """Train both ways for a few steps, compare, and return both optimizers."""
    alone, together = pair(build)
    single, many = make(alone.parameters()), distributed(make, together, **(wrap or {}))
    train_both(alone, single, together, many, loss=loss, tolerance=tolerance, **options)
    return single, many


# ---- gradients ----


@pytest.mark.spread
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_trains_like_one_process_on_the_whole_batch(make: Any, set_to_none: bool) -> None:
    """Averaged gradients are those of the mean loss over all data, however the old ones are forgotten."""
    compare(make, set_to_none=set_to_none)


def test_sum_adds_the_gradients() -> None:
    """With op Sum, the gradients are those of the sum of the ranks' losses."""
    alone, together = pair()
    single, many = sgd(alone.parameters()), distributed(sgd, together, op=hvd.Sum)
    for step in range(STEPS):
        train_step(alone, single, everyone(), step, lambda *args: squared_error(*args) * rr.size())
        train_step(together, many, me(), step)
    assert_same(alone, together)


def test_gradients_that_are_not_zeroed_go_on_adding_up() -> None:
    """Averaging an averaged gradient with new local terms in it gives the average of everything."""
    alone, together = pair()
    single, many = sgd(alone.parameters()), distributed(sgd, together)
    for step in range(STEPS):
        inputs, targets = batch(step)
        for rank in everyone():
            (squared_error(alone, inputs[rank], targets[rank], rank, step) / rr.size()).backward()
        single.step()
        squared_error(together, inputs[rr.rank()], targets[rr.rank()], rr.rank(), step).backward()
        many.step()
    assert_same(alone, together)


class TwoHeads(torch.nn.Module):
    """A trunk and two heads, so that a loss can leave parameters unused."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(6, 5)
        self.first, self.second, self.idle = (torch.nn.Linear(5, 3) for _ in range(3))

    def forward(self, inputs: Any, second: bool) -> Any:
        return (self.second if second else self.first)(self.trunk(inputs))


@pytest.mark.spread
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("wrap", [{}, {"groups": 2}], ids=str)
@pytest.mark.parametrize("make", [sgd, adamw])
def test_ranks_may_use_different_parameters(make: Any, wrap: dict[str, Any], set_to_none: bool) -> None:
    """A parameter that only some ranks used gets zeros from the others; which they are changes from step to step."""

    def loss(model: Model, inputs: Any, targets: Any, rank: int, step: int) -> Any:
        return (model(inputs, second=(rank + step) % 2 == 1) - targets).square().mean()

    compare(make, loss, TwoHeads, wrap={**wrap, "skip_unused": True}, set_to_none=set_to_none)


def test_backward_with_a_graph_of_the_gradients() -> None:
    """Gradients that carry a graph (``create_graph=True``) are usable until the step, which takes their values."""

    def twice(model: Model, inputs: Any, targets: Any, rank: int, step: int) -> Any:
        gradients = torch.autograd.grad(
            squared_error(model, inputs, targets, rank, step), list(model.parameters()), create_graph=True
        )
        return sum(gradient.square().sum() for gradient in gradients)

    compare(sgd, twice)
    model = make_model()
    optimizer = distributed(sgd, model)
    for step in range(2):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, on the reference cycle of create_graph
            squared_error(model, inputs[0], targets[0], 0, step).backward(create_graph=True)
        assert model[0].weight.grad.grad_fn is not None
        optimizer.step()
        assert model[0].weight.grad.grad_fn is None or rr.size() == 1
    for parameter in model.parameters():
        parameter.grad = None


def test_gradients_that_the_user_assigns_are_used() -> None:
    """``p.grad = tensor`` is a gradient like any other, in whatever layout it comes."""
    model = make_model()
    before = model[0].weight.detach().clone()
    optimizer = distributed(lambda parameters: torch.optim.SGD(parameters, lr=1.0), model, skip_unused=True)
    for _ in range(2):
        model[0].weight.grad = torch.full((6, 5), float(rr.rank())).t()
        optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before - (rr.size() - 1))
    assert model[2].weight.grad is None


def embedding() -> Model:
    torch.manual_seed(3)
    return torch.nn.Embedding(5, 3, sparse=True, dtype=torch.float64)


SPARSE: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # of Adagrad itself
@pytest.mark.parametrize("kind", SPARSE)
def test_the_same_rows_on_all_ranks_make_the_step_of_one_process(kind: str) -> None:
    """Also where a row comes twice, or none comes at all."""
    alone, together = pair(embedding)
    single, many = SPARSE[kind](alone.parameters()), distributed(SPARSE[kind], together)
    for rows in ([0, 2, 2], [4], [], [2, 0, 1]):
        for model, optimizer in ((alone, single), (together, many)):
            optimizer.zero_grad()
            model(torch.tensor(rows, dtype=torch.long)).square().sum().backward()
            optimizer.step()
    assert_same(alone, together)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sparse_gradients_of_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """They are added up in float32, whatever the ranks have of a row."""
    table = torch.nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table], lr=1.0))
    large = [0.1 + 300.0 * (rank % 2) for rank in everyone()]
    values = torch.tensor([[1.0, 0.3], [1.0, 0.3], [large[rr.rank()], 2.0]], dtype=dtype)
    table.grad = torch.sparse_coo_tensor([[1, 1, 1]], values, (3, 2), check_invariants=False)
    optimizer.step()
    rows = [torch.tensor([1.0, 1.0, each], dtype=dtype).double().sum() for each in large]
    expected = torch.stack([torch.stack(rows).mean(), 2 * values[0, 1].double() + 2.0])
    if rr.size() > 1:
        assert table.grad.is_coalesced()
        assert table[1].equal(-expected.to(torch.float32).to(dtype))
        summed = hvd.sparse_allreduce_async(
            torch.sparse_coo_tensor([[1, 1, 1]], values, (3, 2), check_invariants=False)
        )()
        assert summed.to_dense()[1].equal(expected.to(torch.float32).to(dtype))
        assert_equal_on_ranks(table)


@pytest.mark.parametrize("sparse_as_dense", [True, False])
def test_sparse_gradients(sparse_as_dense: bool) -> None:
    """Sparse gradients train like dense ones, whatever rows each rank has, made dense before or gathered."""
    alone, together = pair(embedding)
    single = torch.optim.SGD(alone.parameters(), lr=1.0)
    wrap = {"sparse_as_dense": sparse_as_dense}
    many = distributed(lambda parameters: torch.optim.SGD(parameters, lr=1.0), together, **wrap)
    for step in range(3):
        for ranks, model, optimizer in ((everyone(), alone, single), (me(), together, many)):
            optimizer.zero_grad()
            for rank in ranks:
                if (rank + step) % 3 != 1:
                    loss = model(torch.tensor([rank % 5, 2, step, 2])).square().sum()
                    (loss / len(everyone()) if model is alone else loss).backward()
            optimizer.step()
    assert_same(alone, together)
    assert together.weight.grad is None or rr.size() == 1 or together.weight.grad.is_sparse != sparse_as_dense


# ---- layouts and dtypes ----


def test_channels_last_gradients_keep_their_layout() -> None:
    """Convolutions in channels_last train the same, and the optimizer sees gradients with the parameters' strides."""

    def convolutions() -> Model:
        layers = torch.nn.Conv2d(2, 4, 3), torch.nn.Tanh(), torch.nn.Conv2d(4, 3, 3)
        model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        return model.to(memory_format=torch.channels_last)

    for set_to_none in (True, False):
        _, many = compare(sgd, build=convolutions, shape=(2, 6, 6), set_to_none=set_to_none)
        weight = many.param_groups[0]["params"][0]
        assert weight.stride() == weight.grad.stride() != weight.contiguous().stride()


class MixedTypes(torch.nn.Module):
    """Layers of three dtypes."""

    def __init__(self, kinds: tuple[Any, ...]) -> None:
        super().__init__()
        shapes = (6, 5), (5, 5), (5, 3)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(*io, dtype=kind) for io, kind in zip(shapes, kinds, strict=True)
        )

    def forward(self, inputs: Any) -> Any:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs.to(layer.weight.dtype)))
        return inputs.double()


@pytest.mark.parametrize(
    ("kinds", "tolerance"),
    [
        ((torch.float64, torch.float32, torch.float64), 1e-5),
        ((torch.float32, torch.bfloat16, torch.float16), 3e-2),
        ((torch.bfloat16, torch.bfloat16, torch.bfloat16), 3e-2),
    ],
    ids=["double-single", "single-halves", "bfloat16"],
)
def test_dtypes_may_be_mixed(kinds: tuple[Any, ...], tolerance: float) -> None:
    """Every gradient is reduced in its parameter's dtype, and stays equal on all ranks."""
    compare(plain_sgd, build=lambda: MixedTypes(kinds), tolerance=tolerance)


def test_complex_parameters() -> None:
    """Complex gradients are averaged like real ones."""

    class Phase(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

        def forward(self, inputs: Any) -> Any:
            return (inputs.to(torch.complex128) @ self.weight).abs()

    compare(plain_sgd, build=Phase)


def test_tied_parameters_count_once() -> None:
    """A weight that two layers share gets the sum of both gradients, reduced once."""

    def tied() -> Model:
        first, second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        model = torch.nn.Sequential(first, torch.nn.Tanh(), second, torch.nn.Linear(6, 3))
        model[2].weight = model[0].weight
        return model

    compare(adamw, build=tied)


# ---- parameters come and go ----


def test_groups_can_be_added_later() -> None:
    """Parameters of a group that is added between steps are reduced from then on."""
    alone, together = pair()
    single = sgd(alone[:1].parameters())
    many = hvd.DistributedOptimizer(sgd(together[:1].parameters()))
    for step in range(STEPS):
        if step == 2:
            single.add_param_group({"params": list(alone[2:].parameters()), "lr": 0.01})
            many.add_param_group({"params": list(together[2:].parameters()), "lr": 0.01})
        train_step(alone, single, everyone(), step)
        train_step(together, many, me(), step)
        alone.zero_grad()
        together.zero_grad()
    assert_same(alone, together)
    assert len(many.param_groups) == 2


def test_parameters_can_be_frozen_and_thawed() -> None:
    """A frozen parameter is left alone on all ranks; thawed, it is reduced like the others."""
    alone, together = pair()
    for model in (alone, together):
        model[2].requires_grad_(False)
    single, many = adamw(alone.parameters()), distributed(adamw, together)
    for step in range(STEPS):
        if step == 2:
            for model in (alone, together):
                model[2].requires_grad_(True)
                model[0].requires_grad_(False)
        train_step(alone, single, everyone(), step)
        train_step(together, many, me(), step)
    assert_same(alone, together)


def test_two_optimizers_share_a_model() -> None:
    """As in adversarial training, each optimizer reduces its own parameters only, when it steps."""
    alone, together = pair()
    single = sgd(alone[:2].parameters()), sgd(alone[2:].parameters())
    many = tuple(hvd.DistributedOptimizer(sgd(part.parameters())) for part in (together[:2], together[2:]))
    for step in range(STEPS):
        train_step(alone, single[step % 2], everyone(), step)
        train_step(together, many[step % 2], me(), step)
        alone.zero_grad()
        together.zero_grad()
    assert_same(alone, together)


def test_an_optimizer_can_be_wrapped_again() -> None:
    """A second wrapper over the same parameters takes over; the first leaves nothing behind that disturbs it."""
    alone, together = pair()
    single, inner = sgd(alone.parameters()), sgd(together.parameters())
    for step in range(STEPS):
        many = hvd.DistributedOptimizer(inner)
        train_step(alone, single, everyone(), step)
        train_step(together, many, me(), step)
    assert_same(alone, together)


# ---- step, closures, clipping ----


def closure(model: Model, optimizer: Optimizer, mine: list[int], step: int) -> Callable[[], Any]:
    """What `step` takes: the mean loss over the data of the ranks ``mine``, and its gradients."""
    inputs, targets = batch(step)

    def evaluate() -> Any:
        optimizer.zero_grad()
        loss = sum(squared_error(model, inputs[rank], targets[rank], rank, step) for rank in mine) / len(mine)
        loss.backward()
        return loss

    return evaluate


def test_step_with_a_closure_leaves_equal_weights() -> None:
    """The closure's gradients are reduced before the step, and its loss is that of all data."""
    alone, together = pair()
    single, many = sgd(alone.parameters()), distributed(sgd, together)
    for step in range(STEPS):
        expected = single.step(closure(alone, single, everyone(), step)).detach()
        actual = many.step(closure(together, many, me(), step)).detach()
        torch.testing.assert_close(actual, expected)
        assert_equal_on_ranks(actual)
    assert_same(alone, together)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_calls_the_closure_many_times(line_search: str | None) -> None:
    """A line search makes the same decisions on all ranks, because gradient and loss are those of all data."""

    def make(parameters: Any) -> Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn=line_search)

    alone, together = pair()
    single, many = make(alone.parameters()), distributed(make, together)
    for _ in range(3):
        single.step(closure(alone, single, everyone(), 0))
        many.step(closure(together, many, me(), 0))
    assert_same(alone, together, tolerance=1e-7)


def test_a_closure_may_return_anything() -> None:
    """A loss that is a Python number is averaged as one; what is neither that nor a tensor is returned as it is."""
    optimizer = distributed(sgd, make_model())
    assert optimizer.step(lambda: float(rr.rank())) == (rr.size() - 1) / 2
    assert optimizer.step(lambda: None) is None
    assert optimizer.step(lambda: {"loss": 1.0}) == {"loss": 1.0}


def test_clipping_between_synchronize_and_step() -> None:
    """Clipped are the reduced gradients, as in one process, and ``skip_synchronize`` keeps them."""
    alone, together = pair()
    single, many = sgd(alone.parameters()), distributed(sgd, together)
    for step in range(STEPS):
        inputs, targets = batch(step)
        single.zero_grad()
        for rank in everyone():
            (squared_error(alone, inputs[rank], targets[rank], rank, step) / rr.size()).backward()
        expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        single.step()
        many.zero_grad()
        squared_error(together, inputs[rr.rank()], targets[rr.rank()], rr.rank(), step).backward()
        many.synchronize()
        actual = torch.nn.utils.clip_grad_norm_(together.parameters(), 0.1)
        with many.skip_synchronize():
            many.step()
        torch.testing.assert_close(actual, expected)
    assert_same(alone, together)


@pytest.mark.parametrize("groups", [None, 2])
def test_a_deep_copy_trains_on_its_own(groups: int | None) -> None:
    """One rank may copy for itself; copies on all ranks go on like the original, which they do not touch."""
    alone, together = pair()
    single, many = sgd(alone.parameters()), distributed(sgd, together, groups=groups, op=hvd.Average)
    train_both(alone, single, together, many, steps=range(2))
    if rr.rank() == 0:
        kept = copy.deepcopy(many)
        assert kept.state_dict()["param_groups"] == many.state_dict()["param_groups"]
        assert kept.param_groups[0]["params"][0] is not many.param_groups[0]["params"][0]
    before = copy.deepcopy(together.state_dict())
    model, optimizer = copy.deepcopy((together, many))
    assert isinstance(optimizer, torch.optim.SGD)
    assert list(optimizer._parameter_names.values()) == [name for name, _ in model.named_parameters()]
    train_both(*copy.deepcopy((alone, single)), model, optimizer, steps=range(2, STEPS))
    assert all(torch.equal(before[name], each) for name, each in together.state_dict().items())
    train_both(alone, single, together, many, steps=[STEPS])


def test_a_copy_can_begin_with_gradients_that_it_has() -> None:
    """They are reduced by its first step."""
    alone, together = pair()
    model, optimizer = copy.deepcopy((together, distributed(sgd, together)))
    train_step(alone, sgd(alone.parameters()), everyone(), 0)
    inputs, targets = batch(0)
    squared_error(model, inputs[rr.rank()], targets[rr.rank()], rr.rank(), 0).backward()
    optimizer.step()
    assert_same(alone, model)


def test_step_after_synchronize_warns() -> None:
    """Reducing twice is worth a warning, which filters of Horovod's find; for averages it changes nothing."""
    alone, together = pair()
    single, many = sgd(alone.parameters()), distributed(sgd, together)
    inputs, targets = batch(0)
    train_step(alone, single, everyone(), 0)
    squared_error(together, inputs[rr.rank()], targets[rr.rank()], rr.rank(), 0).backward()
    many.synchronize()
    with nullcontext() if rr.size() == 1 else pytest.warns(UserWarning, match=HOROVODS_WARNING):
        many.step()
    assert_same(alone, together)


def test_only_one_rank_may_look_at_gradients() -> None:
    """A backward pass on one rank alone is no collective: nobody waits for anybody."""
    alone, together = pair()
    single, many = sgd(alone.parameters()), distributed(sgd, together)
    for step in range(STEPS):
        if rr.rank() == 0:
            together(torch.ones(1, 6)).sum().backward()
        train_step(alone, single, everyone(), step)
        train_step(together, many, me(), step)
    assert_same(alone, together)


def test_collectives_between_backward_and_step() -> None:
    """A script may average its loss before the step, though the ranks have used different parameters."""
    model = TwoHeads()
    optimizer = distributed(sgd, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        loss = (model(inputs[rr.rank()], second=rr.rank() == 0) - targets[rr.rank()]).square().mean()
        loss.backward()
        assert_equal_on_ranks(hvd.allreduce(loss.detach()))
        optimizer.step()
    for tensor in model.state_dict().values():
        assert_equal_on_ranks(tensor)


# ---- state, schedulers, errors ----


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_it(name: str) -> None:
    """Schedulers accept it as an optimizer, change the rate that is used, and see that step was called."""
    alone, together = pair()
    single, many = sgd(alone.parameters()), distributed(sgd, together)
    schedulers = SCHEDULERS[name](single), SCHEDULERS[name](many)
    for step in range(STEPS):
        train_step(alone, single, everyone(), step)
        train_step(together, many, me(), step)
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert many.param_groups[0]["lr"] == single.param_groups[0]["lr"]
    assert_same(alone, together)


def test_an_optimizer_keeps_the_state_it_had() -> None:
    """Wrapping an optimizer in the middle of a training goes on where it was."""
    alone, together = pair()
    single, inner = adamw(alone.parameters()), adamw(together.parameters())
    for step in range(2):
        train_step(alone, single, everyone(), step)
        train_step(together, inner, everyone(), step)
    many = hvd.DistributedOptimizer(inner)
    assert len(many.state) == len(inner.state) == 6
    train_both(alone, single, together, many, steps=range(2, STEPS))


def test_state_dict_round_trip() -> None:
    """A state saved from one optimizer and loaded into another continues the same training."""
    alone, together = pair()
    single, many = adamw(alone.parameters()), distributed(adamw, together)
    for step in range(STEPS):
        train_step(alone, single, everyone(), step)
        train_step(together, many, me(), step)
        if step == 1:
            saved = copy.deepcopy((together.state_dict(), many.state_dict()))
            together = make_model()
            together.load_state_dict(saved[0])
            many = distributed(adamw, together)
            many.load_state_dict(saved[1])
    assert_same(alone, together)


def test_ranks_with_different_parameters_are_told_at_once() -> None:
    """Construction compares names, shapes and dtypes, and says which rank has what."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1 + rr.rank()))
    if rr.size() == 1:
        distributed(sgd, model)
        return
    with pytest.raises(rr.MismatchError, match=r"tensor 2 is 1.weight, shape \(1, 3\), float64") as caught:
        distributed(sgd, model)
    assert sorted(caught.value.values) == everyone()
    with pytest.raises(rr.MismatchError, match="missing"):
        hvd.DistributedOptimizer(sgd(make_model().parameters() if rr.rank() else make_model()[:3].parameters()))


@pytest.mark.spread
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda rank, _: {"op": hvd.Sum if rank else hvd.Average}, "op=average"),
        (lambda rank, _: {"bucket_nbytes": 1024 + rank}, "bucket_nbytes=1024"),
        (lambda rank, _: {"overlap": rank == 0}, "overlap=True"),
        (lambda rank, _: {"gradient_predivide_factor": 2.0 + rank}, "gradient_predivide_factor=2.0"),
        (lambda rank, _: {"compression": hvd.Compression.powersgd(rank=1 + rank)}, r"compression=PowerSGD\(rank=1"),
        (lambda rank, _: {"compression": hvd.Compression.fp16 if rank else hvd.Compression.none}, "=none"),
        (lambda rank, model: {"groups": [[list(model.parameters())[rank % 2]]]}, "groups=.0, None, None, None"),
    ],
)
def test_ranks_with_different_options_are_told_at_once(options: Any, message: str) -> None:
    """Construction compares what must agree, and says which rank has what."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    different = options(rr.rank(), model)
    if rr.size() == 1:
        distributed(sgd, model, **different)
        return
    with pytest.raises(rr.MismatchError, match=f"DistributedOptimizer: .*{message}") as caught:
        distributed(sgd, model, **different)
    assert sorted(caught.value.values) == everyone()


def test_communication_time_is_counted(world: rr.Communicator) -> None:
    """The clock starts at zero and runs in collectives only."""
    model = make_model()
    optimizer = distributed(sgd, model)
    assert optimizer.communication_s == 0.0
    train_step(model, optimizer, me(), 0)
    assert (optimizer.communication_s > 0.0) == (world.size > 1)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("alike", [True, False])
def test_ranks_that_begin_with_different_weights_are_told(alike: bool, warned: Any) -> None:
    """Once, on rank 0: who forgets to broadcast trains one model for each rank. Those that joined do not count."""
    torch.manual_seed(0 if alike else rr.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).double()
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(())))
    optimizer = distributed(sgd, model)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.ones(1, 3).double()) * model.scale).sum().backward()
        optimizer.step()
    assert len(warned("different weights")) == (0 if alike or rr.rank() else 1)
