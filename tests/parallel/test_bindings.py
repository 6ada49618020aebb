"""Every binding of a framework passes the suites for bindings: here NumPy's, lists and torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from suites.late_training import LATE_CHECKS
from suites.local_training import LOCAL_CHECKS, NODE_CHECKS, check_resumed, check_warm_up
from suites.trainees import Make
from suites.training import CHECKS
from suites.weighted_training import WEIGHTED_CHECKS, check_samples
from trainees.lists import Lists
from trainees.toy import Toy

import ringreduce as rr
from ringreduce.training.binding.host import ArraySpec
from ringreduce.training.compression.tensors import wire_format_of
from ringreduce.training.optimizers.optimizer import ListTraining

pytest.importorskip("torch")
from trainees.with_torch import LocalTorch, Torch


@pytest.mark.spread("check")
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"reduce_in": "backward"}], ids=str)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("make", [Toy, Torch, Lists])
def test_a_binding(make: Make, check: Callable[..., None], options: dict[str, Any]) -> None:
    """Reducing in the step, during the backward pass, or at its end."""
    check(make, **options)


@pytest.mark.spread("check")
@pytest.mark.parametrize("check", LATE_CHECKS)
@pytest.mark.parametrize("make", [Torch, Lists])
def test_late_averages(nodes_of_one: None, make: Make, check: Callable[[Make], None]) -> None:
    check(make)


@pytest.mark.spread("check")
@pytest.mark.parametrize("check", WEIGHTED_CHECKS)
@pytest.mark.parametrize("make", [Torch, Lists])
def test_numbers_of_samples(nodes_of_one: None, make: Make, check: Callable[..., None]) -> None:
    check(make)


@pytest.mark.parametrize("options", [{"overlap": True}, {"gradient_predivide_factor": 3.0}], ids=str)
@pytest.mark.parametrize("make", [Torch, Lists])
def test_numbers_of_samples_with_other_options(nodes_of_two: None, make: Make, options: dict[str, Any]) -> None:
    check_samples(make, **options)


@pytest.mark.parametrize("check", [*LOCAL_CHECKS, check_warm_up])
def test_local_training(nodes_of_one: None, check: Callable[..., None]) -> None:
    check(LocalTorch)


def test_a_warm_up_is_resumed(nodes_of_one: None) -> None:
    check_resumed(partial(LocalTorch, warmup_steps=3))


@pytest.mark.parametrize("check", [*NODE_CHECKS, check_warm_up])
def test_local_training_of_nodes(nodes_of_two: None, check: Callable[..., None]) -> None:
    check(LocalTorch)


@pytest.mark.parametrize("wire", ["fp8", "int8", "int4"])
def test_an_overflow_ends_with_its_step(nodes_of_one: None, wire: str) -> None:
    """Of lists in host memory; of torch it is tested with other options, too."""
    lengths = (3, 1, 70)
    named = [(f"parameter {length}", ArraySpec((length,), np.float32)) for length in lengths]
    training = ListTraining("lists", named, compression=wire_format_of(wire))
    for step in range(4):
        mine = [np.full(length, 1.0 + step, np.float32) for length in lengths]
        if step == 1 and rr.rank() == 0:
            mine[0] *= np.inf
        averages = training.reduce(mine, None)
        for length, average in zip(lengths, averages, strict=True):
            if step != 1:  # each is the largest of its block, and its error that of a scale
                np.testing.assert_allclose(average, np.full(length, 1.0 + step), rtol=2**-6)
