"""Adaptive summation against its definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.collectives.sums.adasum import adasum
from ringreduce.testing import caught, run_ranks

SIZES = range(1, 9)
SHAPES = [(7,), (3, 5), (1,), ()]


def layers_of(rank: int, dtype: Any = np.float64) -> list[Any]:
    generator = np.random.default_rng(rank)
    return [np.array(generator.standard_normal(shape) * 2.0**index, dtype) for index, shape in enumerate(SHAPES)]


def pair(a: Any, b: Any) -> Any:
    """The definition."""
    dot = (a * b).sum()
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b


def reference(vectors: list[Any]) -> Any:
    """The tree that the module describes, in one process."""
    power = 1 << (len(vectors).bit_length() - 1)
    folded = [pair(vectors[i], vectors[power + i]) if power + i < len(vectors) else vectors[i] for i in range(power)]
    while len(folded) > 1:
        folded = [pair(folded[i], folded[i + 1]) for i in range(0, len(folded), 2)]
    return folded[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-13), (np.float32, 1e-5), (np.float16, 2e-2)])
def test_layers_are_combined_each_by_itself(size: int, dtype: Any, tolerance: float) -> None:
    """Any number of ranks, any shapes: the definition, and the same bits on all ranks."""

    def run(communicator: rr.Communicator) -> list[Any]:
        layers = layers_of(communicator.rank, dtype)
        adasum(communicator, layers)
        return layers

    results = run_ranks(size, run)
    for index in range(len(SHAPES)):
        expected = reference([layers_of(rank, dtype)[index].astype(np.float64) for rank in range(size)])
        np.testing.assert_allclose(results[0][index].astype(np.float64), expected, rtol=tolerance, atol=tolerance)
        assert all(result[index].tobytes() == results[0][index].tobytes() for result in results)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_equal_vectors_are_averaged_and_orthogonal_ones_summed(size: int) -> None:
    """The two ends of what adaptive means."""

    def run(communicator: rr.Communicator) -> tuple[Any, Any]:
        equal, orthogonal = np.array([1.0, -2.0, 3.0]), np.zeros(size)
        orthogonal[communicator.rank] = 1.0 + communicator.rank
        adasum(communicator, [equal, orthogonal])
        return equal.tolist(), orthogonal.tolist()

    assert run_ranks(size, run) == [([1.0, -2.0, 3.0], [1.0 + rank for rank in range(size)])] * size


@pytest.mark.parametrize("node_size", [1, 2, None])
def test_zeros_change_nothing(node_size: int | None) -> None:
    """A rank with nothing to say leaves the others' vector as it is, on any topology and with any strides."""

    def run(communicator: rr.Communicator) -> Any:
        memory = np.zeros((4, 6))
        strided = memory[::2, ::3]
        if communicator.rank == 1:
            strided[:] = [[1, 2], [3, 4]]
        adasum(communicator, [strided])
        return strided.tolist(), memory.sum()

    assert run_ranks(3, run, node_size=node_size) == [([[1.0, 2.0], [3.0, 4.0]], 10.0)] * 3


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64])
def test_only_real_floats(dtype: Any) -> None:
    """There is no half an integer; the error comes before anything moves."""
    errors = run_ranks(2, lambda communicator: caught(adasum, communicator, [np.ones(3, dtype)]))
    assert all(isinstance(error, rr.UnsupportedBufferError) for error in errors)
