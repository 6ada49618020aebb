"""Programs that `torch.compile` compiles, in whole or in part, against the same programs as they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch", "2.7")
import torch._dynamo as dynamo  # noqa: E402
from torch_models import Model, Optimizer, weights  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402

pytestmark = [
    pytest.mark.sizes(2),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method"),  # these two are the compiler's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

Function = Callable[..., Any]

WARM, STEPS = 4, 7  # optimizers begin to have state, gradients to be in buckets, buckets to be reduced early


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    dynamo.reset()
    dynamo.utils.counters.clear()


def compare(make: Callable[[Function], Function], backend: Any = "eager", *, graphs: bool = True) -> None:
    """Make a program twice, with and without compiling, and compare what it returns in each step.

    Args:
        make: makes it, given what compiles a function, or does not; it takes the number of the step.
        backend: of the compiler.
        graphs: whether something is to be compiled.
    """

    def run(compiler: Function) -> list[Any]:
        torch.manual_seed(3)
        program = make(compiler)
        results = []
        for step in range(STEPS):
            results.append(program(step))
            if step == WARM:
                seen.append({kind: dict(dynamo.utils.counters[kind]) for kind in ("stats", "frames")})
        seen.append({kind: dict(dynamo.utils.counters[kind]) for kind in ("stats", "frames")})
        return results

    seen: list[dict[str, dict[str, int]]] = []
    expected = run(lambda function: function)
    assert not any(each["frames"] for each in seen)
    actual = run(lambda function: torch.compile(function, backend=backend))
    torch.testing.assert_close(actual, expected)
    assert (seen[-1]["stats"].get("unique_graphs", 0) > 0) == graphs
    assert seen[-1] == seen[-2], "something is compiled again in each step"


def mlp(width: int = 30) -> Model:
    return torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def wrapped(model: Model, make: Callable[[Any], Optimizer] = sgd, **options: Any) -> Optimizer:
    return hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)


def loss(model: Model, inputs: Any) -> Any:
    return model(inputs).square().mean()


def batch(step: int) -> Any:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rr.rank()))


def whole_step(compiler: Function, model: Model, optimizer: Optimizer, step: Function | None = None) -> Function:
    """A training whose every step is one function, that is compiled; it returns the weights."""

    def train(inputs: Any) -> None:
        optimizer.zero_grad()
        loss(model, inputs).backward()
        optimizer.step()

    compiled = compiler(step or train)

    def program(number: int) -> Any:
        compiled(batch(number))
        return weights(model)

    return program


# ---- training ----


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True}, {"op": hvd.Adasum}, {"compression": hvd.Compression.powersgd}, {"split_updates": True}],
    ids=str,
)
def test_a_whole_step(options: dict[str, Any]) -> None:
    """Forward pass, backward pass and step in one function: its weights are those without compiling."""

    def make(compiler: Function) -> Function:
        model = mlp()
        return whole_step(compiler, model, wrapped(model, **options))

    compare(make)


@pytest.mark.parametrize(("what", "compiled_backward"), [("model", False), ("step", True)])
def test_hooks_run_in_compiled_backward_passes(what: str, compiled_backward: bool) -> None:
    """Large gradients are collected and reduced during the backward pass, whether it is compiled or not."""

    def make(compiler: Function) -> Function:
        model = mlp(12000)
        optimizer = wrapped(model, overlap=True)
        if what == "step":
            return whole_step(compiler, model, optimizer)
        return whole_step(lambda function: function, compiler(model), optimizer)

    with dynamo.config.patch(compiled_autograd=compiled_backward):
        compare(make, "aot_eager")


@pytest.mark.parametrize(
    "make_optimizer",
    [sgd, torch.optim.Adam, lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01))],
    ids=["SGD", "Adam", "AdamW with a tensor as rate"],
)
def test_the_method_step(make_optimizer: Callable[[Any], Optimizer]) -> None:
    """``torch.compile(optimizer.step)`` reduces the gradients, and compiles what the wrapped optimizer does."""

    def make(compiler: Function) -> Function:
        model = mlp()
        optimizer = wrapped(model, make_optimizer)
        compiled = compiler(optimizer.step)

        def train(inputs: Any) -> None:
            optimizer.zero_grad()
            loss(model, inputs).backward()
            compiled()

        return whole_step(lambda function: function, model, optimizer, train)

    compare(make)


def test_the_step_of_the_wrapped_optimizer() -> None:
    """An optimizer whose step was compiled can be wrapped."""

    def make(compiler: Function) -> Function:
        model = mlp()
        inner = sgd(model.parameters())
        inner.step = compiler(inner.step)
        return whole_step(lambda function: function, model, hvd.DistributedOptimizer(inner))

    compare(make)


def test_what_else_is_in_a_step() -> None:
    """Clipping between `synchronize` and a step, a schedule, a loss that is averaged: all of it in one function."""

    def make(compiler: Function) -> Function:
        model = mlp()
        optimizer = wrapped(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def train(inputs: Any) -> Any:
            optimizer.zero_grad(set_to_none=False)
            mine = loss(model, inputs)
            mine.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
            schedule.step()
            return hvd.allreduce(mine.detach(), name="loss") * 2

        return whole_step(compiler, model, optimizer, train)

    compare(make)


def test_a_closure() -> None:
    """A compiled step that calls a closure."""

    def make(compiler: Function) -> Function:
        model = mlp()
        optimizer = wrapped(model)

        def train(inputs: Any) -> Any:
            def closure() -> Any:
                optimizer.zero_grad()
                mine = loss(model, inputs)
                mine.backward()
                return mine

            return optimizer.step(closure)

        return whole_step(compiler, model, optimizer, train)

    compare(make)


def test_a_scaler() -> None:
    """A compiled step with a GradScaler."""

    def make(compiler: Function) -> Function:
        model = mlp()
        optimizer, scaler = wrapped(model), torch.amp.GradScaler("cpu", init_scale=4.0)

        def train(inputs: Any) -> None:
            optimizer.zero_grad()
            scaler.scale(loss(model, inputs)).backward()
            scaler.step(optimizer)
            scaler.update()

        return whole_step(compiler, model, optimizer, train)

    compare(make)


def test_batch_normalisation_over_all_ranks() -> None:
    """`SyncBatchNorm` in a compiled model."""

    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = torch.nn.Linear(6, 8), hvd.SyncBatchNorm(8), torch.nn.Linear(8, 3)

        def forward(self, inputs: Any) -> Any:
            return self.last(self.norm(self.first(inputs)).tanh())

    def make(compiler: Function) -> Function:
        model = Normed()
        return whole_step(lambda function: function, compiler(model), wrapped(model))

    compare(make, "aot_eager")


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_code_that_is_generated() -> None:
    """The same with the compiler that people use, which writes C++."""

    def make(compiler: Function) -> Function:
        model = mlp()
        return whole_step(compiler, model, wrapped(model))

    compare(make, "inductor")


# ---- collectives ----

COLLECTIVES: dict[str, Function] = {
    "allreduce": hvd.allreduce,
    "allreduce_": lambda x: hvd.allreduce_(x.detach() * 1),
    "allreduce by name": lambda x: hvd.allreduce(x, name="x", op=hvd.Sum),
    "allreduce in int8": lambda x: hvd.allreduce(x, compression=hvd.Compression.int8),
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([x, x + 1])[1],
    "allgather": hvd.allgather,
    "broadcast": lambda x: hvd.broadcast(x, 0),
    "broadcast_": lambda x: hvd.broadcast_(x.detach() * 1, 0),
    "alltoall": hvd.alltoall,
    "reducescatter": hvd.reducescatter,
    "barrier": lambda x: (hvd.barrier(), x)[1],
    "objects": lambda x: x + len(hvd.allgather_object("a")) + hvd.broadcast_object(1),
    "of ringreduce itself": lambda x: rr.allreduce(x.detach()) + rr.world().allreduce(x.detach()),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_blocking_collectives(name: str) -> None:
    """A collective in the middle of a function: results and gradients are those without compiling."""

    def make(compiler: Function) -> Function:
        compiled = compiler(lambda x: COLLECTIVES[name](x * 2) + 1)

        def program(step: int) -> tuple[Any, Any]:
            inputs = batch(step).requires_grad_()
            result = compiled(inputs)
            if result.requires_grad:
                result.square().sum().backward()
            return result.detach(), inputs.grad

        return program

    compare(make)


def test_asynchronous_collectives() -> None:
    """What was started in a function may be waited for there; a new handle is no reason to compile again."""

    def make(compiler: Function) -> Function:
        def function(inputs: Any) -> Any:
            first = hvd.allreduce_async(inputs * 2)
            others = [hvd.allgather_async(inputs), hvd.broadcast_async(inputs, 0), hvd.reducescatter_async(inputs)]
            sine = torch.sin(inputs)
            hvd.poll(first)
            return hvd.synchronize(first) + sine, [hvd.synchronize(each) * 2 for each in others]

        compiled = compiler(function)
        return lambda step: compiled(batch(step))

    compare(make)


def test_a_collective_by_itself() -> None:
    """Compiling a collective leaves it as it is."""

    def make(compiler: Function) -> Function:
        compiled = compiler(hvd.allreduce)
        return lambda step: compiled(batch(step))

    compare(make, graphs=False)


def test_who_and_how_many_are_compiled_as_numbers() -> None:
    """Asking for rank and size does not cut a function."""
    function = torch.compile(lambda x: x * hvd.rank() + hvd.size(), backend="eager", fullgraph=True)
    assert function(torch.ones(2)).tolist() == [rr.rank() + rr.size()] * 2
