"""How gradients are sorted into buckets and laid out in them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.engine import Engine
from ringreduce.testing import run_engines
from ringreduce.training.binding.framework import Look
from ringreduce.training.gradients.buckets import LARGE_NBYTES, Bucket
from ringreduce.training.optimizers.reducer import GradientReducer
from ringreduce.training.optimizers.user_options import checked
from ringreduce.training.optimizers.watched import Gradients
from ringreduce.training.options.options import Options

torch = pytest.importorskip("torch")
from ringreduce.torch.tensors.gradients import TorchParameters  # noqa: E402


def make_bucket(*parameters: Any) -> Bucket:
    """A bucket in ordinary memory."""

    class Memory:
        gpu = None

        def empty(self, shape: int, dtype: Any) -> Any:
            return np.full(shape, 255, dtype)

    memory = Memory()
    return Bucket(TorchParameters(memory), parameters, memory)


def looks(bucket: Bucket) -> list[int]:
    return bucket.look([slot.parameter.grad for slot in bucket.slots])


def make_gradients(engine: Engine, parameters: list[Any], bucket_nbytes: int = 4 << 20) -> Gradients:
    """The gradients of parameters, on one rank of several."""
    memory = TorchParameters(engine.communicator)
    options = Options(op=rr.SUM, bucket_nbytes=bucket_nbytes, overlap=False, skip_unused=True)
    named = [("?", parameter) for parameter in parameters]
    chosen = checked(options, engine.communicator.config, parameters)
    return Gradients(memory, GradientReducer(memory, engine, lambda: named, "SGD", "parameters", chosen), lambda: None)


def test_places_have_the_layout_of_their_parameters() -> None:
    """Dense strides are kept, others become contiguous; places begin on cache lines and do not touch."""
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    shapes = [torch.zeros(3, 4).t(), torch.zeros(()), torch.zeros(0, 3), image, torch.zeros(1).expand(5)]
    bucket = make_bucket(*shapes)
    places = [slot.place for slot in bucket.slots]
    assert [place.stride() for place in places[:4]] == [shape.stride() for shape in shapes[:4]]
    assert places[4].stride() == (1,)
    starts = [place.data_ptr() - bucket.flat.data_ptr() for place in places if place.numel()]
    assert starts == [0, 64, 128, 128 + 512]
    assert bucket.flat.numel() * 4 == 128 + 512 + 64
    assert not bucket.flat.any()


KEEPERS = {
    "itself": lambda gradient: gradient,
    "view": lambda gradient: gradient.view(-1),
    "row": lambda gradient: gradient[0],
    "detached": lambda gradient: gradient.detach(),
    "numpy": lambda gradient: gradient.numpy(),
    "elsewhere": lambda gradient: setattr(other := torch.zeros_like(gradient), "grad", gradient) or other,
    "saved": lambda gradient: (gradient * torch.ones(2, 2, requires_grad=True)).sum(),
}


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
def test_a_kept_place_is_noticed(keep: Any) -> None:
    """A place counts as kept while anybody holds it in any form, and not for being ``p.grad``."""
    parameter = torch.zeros(2, 2, requires_grad=True)
    bucket = make_bucket(parameter)
    parameter.grad = torch.ones(2, 2)
    bucket.collect()
    kept = keep(parameter.grad)
    assert looks(bucket) == [Look.IN_PLACE]
    parameter.grad = None
    assert looks(bucket) == [Look.ALIASED]
    del kept
    assert looks(bucket) == [Look.EMPTY]


def test_hooks_end_with_their_owner() -> None:
    """When the buckets' owner is gone, parameters keep no hook, and gradients no bucket, alive."""

    def train(engine: Engine) -> None:
        parameter = torch.zeros(LARGE_NBYTES // 4, requires_grad=True)
        gradients = make_gradients(engine, [parameter], 1)
        parameter.sum().backward()
        gradients.reduce()
        assert parameter._post_accumulate_grad_hooks
        place = weakref.ref(parameter.grad)
        parameter.grad = None
        del gradients
        assert not parameter._post_accumulate_grad_hooks
        gc.collect()
        assert place() is None

    run_engines(2, train)


LARGE = (LARGE_NBYTES // 4, 1)


@pytest.mark.parametrize("keeping_ranks", [{0}, {0, 1}], ids=["rank-0", "all"])
@pytest.mark.parametrize("keep", [KEEPERS["itself"], KEEPERS["detached"]], ids=["itself", "view"])
def test_kept_gradients_keep_their_values(keep: Any, keeping_ranks: set[int]) -> None:
    """What was ``p.grad`` before `zero_grad` is not overwritten by later backward passes and reductions."""

    def train(engine: Engine) -> None:
        parameters = [torch.zeros(shape, requires_grad=True) for shape in (LARGE, (3, 1), (3, 1))]
        gradients = make_gradients(engine, parameters)
        history = []
        for step in range(1, 6):
            for parameter in parameters:
                parameter.grad = None
            # The last one has no gradient in every other step, but its place is reduced with the others.
            (sum(parameter.sum() for parameter in parameters[: 2 + step % 2]) * step).backward()
            gradients.reduce()
            for parameter in parameters[: 2 + step % 2]:
                assert (parameter.grad == 2 * step).all()
                if engine.communicator.rank in keeping_ranks and step < 4:
                    history.append((keep(parameter.grad), 2 * step))
        assert all((kept == value).all() for kept, value in history)
        history.clear()
        gradients.reduce()  # moves the gradients back to their places, which are free now
        held = parameters[0].grad
        gradients.reduce()
        assert parameters[0].grad is held

    run_engines(2, train)


def test_gradients_in_place_stay_in_place_beside_a_kept_one() -> None:
    """Reducing apart does not take the tensors away that are ``p.grad``, nor views of them."""

    def train(engine: Engine) -> None:
        parameters = [torch.zeros(2, requires_grad=True) for _ in range(2)]
        gradients = make_gradients(engine, parameters)
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        gradients.reduce()
        kept, stays = (parameter.grad for parameter in parameters)
        view = stays.view(-1)
        parameters[0].grad = torch.ones(2)
        gradients.reduce()
        assert kept.tolist() == parameters[0].grad.tolist() == [2, 2]
        assert parameters[1].grad is stays
        assert view.tolist() == [4, 4]

    run_engines(2, train)


def test_gradients_whose_data_was_replaced_are_reduced() -> None:
    """``p.grad.data = ...`` between the backward pass and the reduction counts, in every step."""

    def train(engine: Engine) -> None:
        parameter = torch.zeros(LARGE, requires_grad=True)
        gradients = make_gradients(engine, [parameter])
        for step in range(1, 4):
            parameter.grad = None
            parameter.sum().backward()
            parameter.grad.data = parameter.grad.data * 10 * step
            gradients.reduce()
            assert (parameter.grad == 20 * step).all()

    run_engines(2, train)
