"""`DiLoCo` and `LocalSGD` of JAX: trees, leaves, and errors; test_jax_suite.py has how they train."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr

jax = pytest.importorskip("jax")
pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import ringreduce.jax as rj  # noqa: E402
from ringreduce.training.data.shares import Batches  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def tree() -> Any:
    """Return arrays of odd sizes, equal on all ranks, with a leaf that stays each rank's own."""
    draw = np.random.default_rng(3)
    shapes: list[tuple[int, ...]] = [(5, 7), (7,), (3, 2, 1), ()]
    arrays = [jnp.asarray(draw.normal(size=shape).astype(np.float32)) for shape in shapes]
    return {"a": arrays[:2], "b": {"c": tuple(arrays[2:]), "own": jnp.int32(RANK)}, "none": None}


def floats(params: Any) -> list[Any]:
    return [each for each in jax.tree.leaves(params) if jnp.issubdtype(each.dtype, jnp.inexact)]


def moved(params: Any, step: int) -> Any:
    """Return what this rank's step makes of parameters: x - g, with other numbers g in each step and on each rank."""
    draw = np.random.default_rng(1000 * RANK + step)

    def less(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        return leaf - jnp.asarray(0.1 * draw.normal(size=leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(less, params)


def start() -> Any:
    return {"x": jnp.asarray([3.0, -2.0, 0.5])}


def test_a_step_without_an_exchange_returns_its_argument() -> None:
    """So it needs no value of it: here, none that there is any more."""
    params = tree()
    local = rj.DiLoCo(params, period=3, replica="rank")
    params = moved(params, 0)
    assert local.step(params) is params
    params = moved(params, 1)
    given = jax.tree.map(jnp.copy, params)
    jax.tree.map(lambda each: each.delete(), params)
    assert local.step(params) is params
    made = local.step(given)
    assert made is not given
    assert jax.tree.structure(made) == jax.tree.structure(given)
    assert made["b"]["own"] is given["b"]["own"]


def test_leaves_stay_what_they_are() -> None:
    """Dtypes, arrays of NumPy, numbers, devices; complex numbers are averaged, keys and integers are not."""
    params = {
        "complex": jnp.asarray([1 + 2j, RANK], jnp.complex64) if SIZE == 1 else jnp.asarray([1 + 2j, 0j]),
        "brain": jnp.ones(3, jnp.bfloat16),
        "half": jnp.ones(3, jnp.float16),
        "key": jax.random.key(RANK),
        "number": 2.5,
        "numpy": np.float64([1.0, 2.0]),
        "text": "relu",
        "whole": jnp.arange(3) + RANK,
    }
    local = rj.LocalSGD(params, period=1, replica="rank")
    halves = {name: params[name] + RANK for name in ("brain", "half")}
    changed = {**params, **halves, "complex": params["complex"] + RANK * (1 - 1j), "number": 2.5 + RANK}
    made = local.step(changed)
    mean = (SIZE - 1) / 2
    assert all(made[name].tolist() == [1 + mean] * 3 for name in halves)
    np.testing.assert_allclose(made["complex"], params["complex"] + mean * (1 - 1j), rtol=1e-6)
    assert (type(made["number"]), made["number"]) == (float, 2.5 + mean)
    assert isinstance(made["numpy"], np.ndarray)
    assert {name: made[name] is changed[name] for name in ("key", "text", "whole")} == dict.fromkeys(
        ("key", "text", "whole"), True
    )
    for name in ("brain", "complex", "half", "numpy"):
        assert made[name].dtype == changed[name].dtype
    assert made["half"].sharding == changed["half"].sharding


def test_other_trees_have_objects_of_their_own() -> None:
    """As the statistics of batches, which are averaged as they are."""
    params, stats = tree(), {"mean": jnp.zeros(3)}
    local, means = rj.DiLoCo(params, period=2, replica="rank"), rj.LocalSGD(stats, period=2, replica="rank")
    for step in range(2):
        params, stats = local.step(moved(params, step)), means.step({"mean": stats["mean"] + RANK})
    np.testing.assert_allclose(stats["mean"], np.full(3, SIZE - 1.0))


# ---- errors ----


def test_compiled_programs_and_other_trees_are_refused() -> None:
    params = tree()
    local = rj.DiLoCo(params, replica="rank")
    with pytest.raises(rr.ConfigError, match="outside of jit"):
        jax.jit(local.step)(params)
    with pytest.raises(rr.ConfigError, match="outside of jit"):
        jax.jit(lambda each: rj.DiLoCo(each) and each)(params)
    for other in ({**params, "more": jnp.ones(2)}, {**params, "a": [params["a"][1]] * 2}):
        with pytest.raises(rr.ConfigError, match="not the parameters"):
            local.step(other)
    with pytest.raises(rr.ConfigError, match="unknown wire format"):
        rj.DiLoCo(params, compression="zip")
    local.step(params)


@pytest.mark.sizes(2, 3, 4)
def test_ranks_have_the_same_leaves() -> None:
    """Those of other dtypes or shapes are an error on all ranks."""
    with pytest.raises(rr.RingReduceError, match="float8"):
        rj.DiLoCo({"x": jnp.ones(2, jnp.float8_e4m3fn if RANK else jnp.float32)})
    with pytest.raises(rr.MismatchError, match="shape"):
        rj.DiLoCo({"x": jnp.ones(2 + RANK)})
    different = {"x": jnp.full(2, float(RANK))}
    with pytest.raises(rr.MismatchError, match="broadcast_parameters"):
        rj.LocalSGD(different, replica="rank").step(different)


def test_a_sampler_by_speed_is_refused() -> None:
    """Replicas have weights by their numbers of ranks, not by their numbers of samples."""
    local, batches = rj.DiLoCo(start(), period=2), Batches(2, "repeat", by_speed=True)
    for _ in batches.of(range(2 * SIZE)):
        with pytest.raises(rr.ConfigError, match="do not go together"):
            local.step(start())


def test_dtypes_are_compared_as_compiled_programs_have_them() -> None:
    """Numbers of Python and float64 of NumPy become float32 in a compiled step; another dtype is an error."""
    local = rj.LocalSGD({"w": np.zeros(3), "scale": 1.0}, period=1, replica="rank")
    with pytest.raises(rr.ConfigError, match="dtypes differ"):
        local.step({"w": jnp.arange(3), "scale": jnp.float32(1.0)})
    params = local.step({"w": jnp.full(3, RANK, jnp.float32), "scale": jnp.float32(1.0)})
    assert params["w"].dtype == jnp.float32
    np.testing.assert_allclose(params["w"], np.full(3, (SIZE - 1) / 2))


def test_other_weights_begin_with_synchronize() -> None:
    """Else the next exchange would take the difference for what was learned."""
    params = start()
    local = rj.DiLoCo(params, period=1, replica="rank")
    params = local.step(params)
    params = local.synchronize(jax.tree.map(lambda each: each + 10, params))
    expected = floats(params)
    for made, each in zip(floats(local.step(params)), expected, strict=True):
        np.testing.assert_allclose(made, each, rtol=1e-6)
