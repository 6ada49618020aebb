"""JAX: late averages and averages by numbers of samples, outside and inside of compiled programs."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import ringreduce as rr  # noqa: E402
import ringreduce.jax as rj  # noqa: E402
from ringreduce.jax.calls import LISTS  # noqa: E402
from ringreduce.training.data.shares import Batches  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SEVERAL = pytest.mark.sizes(2, 3, 4)
COUNTS = [1 + 2 * rank for rank in range(SIZE)]
transformation = rj.DistributedGradientTransformation


def stepping(tx: Any, called: Any) -> Any:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return called(step)


def test_steps_in_and_outside_of_programs_take_turns() -> None:
    """And several steps of one program, which go through one after the other."""
    tx = transformation(optax.sgd(1.0), staleness=2)
    params = jnp.zeros(3)
    state = tx.init(params)
    eager, compiled = stepping(tx, lambda function: function), stepping(tx, jax.jit)
    seen = []
    for number in range(6):
        params, state = (eager if number % 2 else compiled)(params, state, jnp.full(3, number + RANK, jnp.float32))
        seen.append(float(params[0]))
    mean = (SIZE - 1) / 2
    np.testing.assert_allclose(seen, [0, 0, *(-np.cumsum(np.arange(4) + mean))], rtol=1e-6)

    @jax.jit
    def several(params: Any, state: Any, grads: Any) -> Any:
        return jax.lax.scan(lambda carry, each: (stepping(tx, lambda f: f)(*carry, each), 0), (params, state), grads)[0]

    grads = jnp.repeat(jnp.arange(6.0, 10.0)[:, None] + RANK, 3, axis=1)
    params, state = several(params, state, grads)
    np.testing.assert_allclose(params, -(28 + 8 * mean), rtol=1e-6)
    params, state = tx.synchronize(params, state)
    np.testing.assert_allclose(params, -(45 + 10 * mean), rtol=1e-6)


def test_late_gradients_are_not_mapped_and_the_last_are_applied_outside() -> None:
    tx = transformation(optax.sgd(1.0), staleness=1)
    state = tx.init(jnp.zeros(3))
    with pytest.raises(rr.ConfigError, match="vmap"):
        jax.vmap(lambda each: tx.update(each, state)[0])(jnp.ones([2, 3]))
    with pytest.raises(rr.ConfigError, match="outside of jit"):
        jax.jit(tx.synchronize)(jnp.zeros(3), state)


# ---- numbers of samples ----


def test_numbers_may_be_constants_of_programs() -> None:
    """The sum of the ranks' parts is the mean over all samples."""
    tx = transformation(optax.sgd(1.0))
    grads = jnp.full(5, 1.0 + RANK)
    state = tx.init(grads)
    for shift in range(3):
        counts = [each + shift * (rank == 0) for rank, each in enumerate(COUNTS)]
        step = jax.jit(lambda grads, samples=counts[RANK]: tx.update(grads, state, samples=samples)[0])
        np.testing.assert_allclose(step(grads), [-np.average(1.0 + np.arange(SIZE), weights=counts)] * 5, rtol=1e-6)


def test_compression_and_a_sampler_by_speed_are_refused(no_world: None) -> None:
    rj.init()
    batches = Batches(4, "repeat", by_speed=True)
    compressing = transformation(optax.sgd(1.0), compression="int8")
    for _ in batches.of(range(4 * SIZE)):
        batches.counts = COUNTS
        state = compressing.init(jnp.zeros(3))
        with pytest.raises(rr.ConfigError, match="compression"):
            compressing.update(jnp.zeros(3), state)
    rj.shutdown()


def test_shares_and_loading_are_there() -> None:
    assert 0 < rj.share() <= 1
    assert list(rj.loading([1, 2])) == [1, 2]


def test_reducers_live_as_long_as_their_transformation() -> None:
    before = len(LISTS)
    tx = transformation(optax.sgd(1.0), staleness=1)
    tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
    assert len(LISTS) == before + 1
    with pytest.raises(rr.ConfigError, match="structure"):
        tx.synchronize({"a": jnp.ones(3)}, tx.init(jnp.ones(3)))
    del tx
    gc.collect()
    assert len(LISTS) <= before


@SEVERAL
def test_a_sampler_begins_before_a_step_is_compiled() -> None:
    """A program without weights would go on without them."""
    rr.shutdown()
    rr.init()
    tx = transformation(optax.sgd(1.0))
    state = tx.init(jnp.ones(3))
    tx.update(jnp.ones(3), state)  # at once: the next call may have weights
    for _ in Batches(4, "repeat", by_speed=True).of(range(4 * SIZE)):
        tx.update(jnp.ones(3), state)
    rr.shutdown()
    rr.init()
    jax.jit(lambda grads: tx.update(grads, state)[0])(jnp.ones(3))
    with pytest.raises(rr.ConfigError, match="compile it after the first batch"):
        next(iter(Batches(4, "repeat", by_speed=True).of(range(4 * SIZE))))
    rr.shutdown()
    rr.init()


def test_numbers_of_samples_have_32_bits() -> None:
    tx = transformation(optax.sgd(1.0))
    for samples in (np.int64(2**32 + 1), 2**40):
        with pytest.raises(rr.RingReduceError, match="below 2"):
            tx.update(jnp.ones(3), tx.init(jnp.ones(3)), samples=samples)
