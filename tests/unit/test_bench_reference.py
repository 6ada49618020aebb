"""The known answers of ``bench`` are right, and wrong results are counted to the element."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ringreduce.bench.cases import COLLECTIVES, OPS, TYPES, Case, Reference, rest_value

RANKS = 3
NAMES = [name for name in TYPES if name != "bfloat16"]


def inputs(reference: Reference) -> list[np.ndarray]:
    """Return what each rank puts in."""
    case = reference.case
    arrays = [np.empty(case.input_count, case.dtype) for _ in range(case.nranks)]
    for rank, array in enumerate(arrays):
        reference.fill(array, rank)
    return arrays


def reduced(arrays: list[np.ndarray], op_name: str) -> np.ndarray:
    """Reduce element by element with Python's own numbers, which neither round (here) nor wrap around."""
    dtype = arrays[0].dtype
    if dtype.kind == "b":
        combine = any if op_name in ("sum", "max") else all
    else:
        combine = {
            "sum": sum,
            "prod": math.prod,
            "min": lambda column: min(column, key=ordered),
            "max": lambda column: max(column, key=ordered),
            "avg": average,
        }[op_name]
    results = [combine(column) for column in zip(*(array.tolist() for array in arrays), strict=True)]
    if dtype.kind in "iu":
        bits = 8 * dtype.itemsize
        wrapped = np.array([int(result) % (1 << bits) for result in results], np.dtype(f"u{dtype.itemsize}"))
        return wrapped.view(dtype)
    return np.array(results).astype(dtype)


def ordered(value: complex) -> tuple[float, float]:
    return (value.real, value.imag) if isinstance(value, complex) else (value, 0)


def average(column: tuple) -> complex:
    total = sum(column)
    return int(total / abs(total)) * (abs(total) // len(column)) if isinstance(total, int) and total else total / RANKS


def example(collective: str, type_name: str = "float", op_name: str = "sum", count: int = 40) -> Reference:
    return Reference(Case(COLLECTIVES[collective], type_name, op_name, 1, RANKS, count), seed=5)


@pytest.mark.parametrize("op_name", OPS)
@pytest.mark.parametrize("type_name", NAMES)
def test_the_true_result_is_right(type_name: str, op_name: str):
    """What Python's numbers give counts as right for every type and operation, and one changed element as wrong."""
    reference = example("allreduce", type_name, op_name)
    result = reduced(inputs(reference), op_name)
    assert reference.count_wrong(result, 0) == 0
    result[17] = not result[17] if result.dtype == bool else result[17] + 1
    assert reference.count_wrong(result, 0) == 1


@pytest.mark.parametrize("op_name", OPS)
def test_bfloat16_is_exact_or_rounded(op_name: str):
    """A result that was computed in float64 and rounded once counts as right."""
    pytest.importorskip("ml_dtypes")
    reference = example("allreduce", "bfloat16", op_name)
    wide = [array.astype(np.float64) for array in inputs(reference)]
    result = reduced(wide, op_name).astype(reference.case.dtype)
    assert reference.count_wrong(result, 2) == 0
    result[3] += 1
    assert reference.count_wrong(result, 2) == 1


def outputs(collective: str, given: list[np.ndarray]) -> list[np.ndarray | None]:
    """Return what each rank must get, of 40 elements for each part; rank 1 is the root."""
    total, everything = reduced(given, "sum"), np.concatenate(given)
    parts = [slice(40 * rank, 40 * rank + 40) for rank in range(RANKS)]
    return {
        "allreduce": [total] * RANKS,
        "reduce_scatter": [total[part] for part in parts],
        "allgather": [everything] * RANKS,
        "broadcast": [given[1]] * RANKS,
        "alltoall": [np.concatenate([each[part] for each in given]) for part in parts],
        "reduce": [None, total, None],
        "gather": [None, everything, None],
        "scatter": [given[1][part] for part in parts],
        "sendrecv": [given[rank - 1] for rank in range(RANKS)],
        "latency": [given[1], given[0], None],
        "bandwidth": [None, given[0], None],
    }[collective]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_results_of_all_collectives(collective: str):
    """A root has all of it, other ranks nothing; of messages each has what its peer has sent; all else is wrong."""
    given = inputs(reference := example(collective))
    for rank, right in enumerate(outputs(collective, given)):
        assert reference.count_wrong(right, rank) == 0
        if right is not None:
            assert reference.count_wrong(None, rank) == right.size
            assert reference.count_wrong(np.concatenate([right[:-1], right[-1:] + 1]), rank) == 1


def test_swapped_blocks_are_wrong():
    """Blocks of a power of two elements that took each other's place are noticed, also beyond the table's period."""
    reference = example("allreduce", "int64", count=1 << 18)
    result = sum(inputs(reference))
    assert reference.count_wrong(result, 0) == 0
    blocks = result.reshape(4, -1)
    blocks[[0, 3]] = blocks[[3, 0]]
    assert reference.count_wrong(result, 0) == 1 << 17


def test_a_result_of_the_wrong_length_is_wrong_throughout():
    """Every element that should be there counts."""
    assert example("allreduce").count_wrong(np.zeros(39, np.float32), 0) == 40


def test_nan_is_wrong():
    """NaN compares equal to nothing, also where there is a tolerance."""
    for op_name in ("sum", "avg"):
        assert example("allreduce", "float", op_name).count_wrong(np.full(40, np.nan, np.float32), 0) == 40


def test_inputs_differ():
    """Ranks and seeds give different inputs, so that an old result or a peer's cannot pass."""
    first, second, third = inputs(example("allreduce", count=1000))
    other = inputs(Reference(example("allreduce", count=1000).case, seed=6))[0]
    for array in (second, third, other):
        assert np.count_nonzero(first != array) > 800


@pytest.mark.parametrize("op_name", OPS)
def test_rest_value_stays(op_name: str):
    """Repeated in-place calls on the rest value keep it, so that timing never meets infinities."""
    value = rest_value(OPS[op_name])
    columns = [np.full(1, value, np.float32)] * RANKS
    assert reduced(columns, op_name).tolist() == [value]
