"""JAX: late averages and averages by numbers of samples, outside and inside of compiled programs."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
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


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def called(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """What calls a function as it is, or compiled."""
    return jax.jit if request.param else lambda function: function


def parameters() -> Any:
    draw = np.random.default_rng(1)
    return {"w": jnp.asarray(draw.normal(size=(7, 13)), jnp.float32), "b": jnp.zeros(13, jnp.float32)}


def batch(rank: int, step: int) -> Any:
    return jnp.asarray(np.random.default_rng([rank, step]).normal(size=(4, 7)), jnp.float32)


@jax.jit
def gradients(params: Any, x: Any) -> Any:
    return jax.grad(lambda each: jnp.mean(jnp.tanh(x @ each["w"] + each["b"]) ** 2))(params)


def stepping(tx: Any, called: Any) -> Any:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return called(step)


def inner() -> Any:
    return optax.sgd(0.1, momentum=0.9)


def delayed(called: Any, staleness: int, steps: int, left: int) -> Any:
    """Return the parameters of one process with the averages of all ranks, each so many steps late."""
    tx, params, waiting = inner(), parameters(), deque[Any]()
    state = tx.init(params)
    step, late = stepping(tx, called), stepping(tx, lambda function: function)
    for number in range(steps + left):
        average = jax.tree.map(jnp.zeros_like, params)
        if number < steps:
            everyone = [gradients(params, batch(rank, number)) for rank in range(SIZE)]
            waiting.append(jax.tree.map(lambda *each: sum(each) / SIZE, *everyone))
        if number >= staleness:
            average = waiting.popleft()
        params, state = (step if number < steps else late)(params, state, average)
    return params


def assert_same(params: Any, expected: Any) -> None:
    """Check parameters: to the bit, unless sums of several ranks may be rounded in another order."""
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        if SIZE <= 2:
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    mine = b"".join(np.asarray(each).tobytes() for each in jax.tree.leaves(params))
    assert len(set(rj.allgather_object(mine))) == 1


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_parameters_are_those_of_one_process_that_delays(called: Any, staleness: int) -> None:
    tx, params = transformation(inner(), staleness=staleness), parameters()
    state, step = tx.init(params), stepping(tx, called)
    for number in range(7):
        params, state = step(params, state, gradients(params, batch(RANK, number)))
    assert_same(params, delayed(called, staleness, 7, 0))
    for _ in range(2):  # the second time nothing is pending
        params, state = tx.synchronize(params, state)
        assert_same(params, delayed(called, staleness, 7, staleness))


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


def test_wire_formats(nodes_of_one: None) -> None:
    tx, params = transformation(optax.sgd(1.0), staleness=1, compression="bf16"), jnp.zeros(300)
    state, step = tx.init(params), stepping(tx, jax.jit)
    for _ in range(3):
        params, state = step(params, state, jnp.full(300, 1.0 + RANK))
    params, state = tx.synchronize(params, state)
    np.testing.assert_allclose(params, -3 * (1 + (SIZE - 1) / 2), rtol=0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": rj.Adasum}, "Adasum and staleness"),
        ({"compression": rj.PowerSGD(2)}, "powersgd"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor and staleness"),
        ({"staleness": -1}, "staleness"),
        ({"staleness": 1.5}, "staleness"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(rr.ConfigError, match=words):
        transformation(optax.sgd(0.1), **{"staleness": 1, **options})


def test_late_gradients_are_not_mapped_and_the_last_are_applied_outside() -> None:
    tx = transformation(optax.sgd(1.0), staleness=1)
    state = tx.init(jnp.zeros(3))
    with pytest.raises(rr.ConfigError, match="vmap"):
        jax.vmap(lambda each: tx.update(each, state)[0])(jnp.ones([2, 3]))
    with pytest.raises(rr.ConfigError, match="outside of jit"):
        jax.jit(tx.synchronize)(jnp.zeros(3), state)


# ---- numbers of samples ----


@pytest.mark.parametrize("traced", [True, False])
def test_averages_over_samples(called: Any, traced: bool) -> None:
    """Programs see new numbers; the sum of the ranks' parts is the mean over all samples."""
    tx = transformation(optax.sgd(1.0))
    grads = {"a": jnp.full(5, 1.0 + RANK), "b": jnp.full((2, 3), 2.0 + RANK)}
    state = tx.init(grads)
    step = called(lambda grads, samples: tx.update(grads, state, samples=samples)[0])
    for shift in range(3):
        counts = [each + shift * (rank == 0) for rank, each in enumerate(COUNTS)]
        samples: Any = counts[RANK]
        made = (
            step(grads, jnp.int32(samples))
            if traced
            else called(lambda grads, samples=samples: tx.update(grads, state, samples=samples)[0])(grads)
        )
        mean = np.average(1.0 + np.arange(SIZE), weights=counts)
        np.testing.assert_allclose(made["a"], np.full(5, -mean), rtol=1e-6)
        np.testing.assert_allclose(made["b"], np.full((2, 3), -mean - 1), rtol=1e-6)


def test_a_sampler_by_speed_weights_averages(called: Any, no_world: None) -> None:
    rj.init()
    batches, tx = Batches(4, "repeat", by_speed=True), transformation(optax.sgd(1.0))
    state = tx.init(jnp.zeros(3))
    for _ in batches.of(range(4 * SIZE)):
        batches.counts = COUNTS
        made = called(lambda grads: tx.update(grads, state)[0])(jnp.full(3, 1.0 + RANK))
    np.testing.assert_allclose(made, [-np.average(1.0 + np.arange(SIZE), weights=COUNTS)] * 3, rtol=1e-6)
    compressing = transformation(optax.sgd(1.0), compression="int8")
    state = compressing.init(jnp.zeros(3))
    with pytest.raises(rr.ConfigError, match="compression"):
        compressing.update(jnp.zeros(3), state)
    rj.shutdown()


def original(function: Callable[[], Any]) -> Any:
    """Call a function that fails, and raise the error of ringreduce."""
    try:
        return function()
    except Exception as error:
        raise rj.error_of(error) from None


@pytest.mark.parametrize(
    ("samples", "options", "words"),
    [
        pytest.param(lambda: 3 if RANK == 0 else None, {}, "rank", marks=SEVERAL),
        (lambda: 2.5, {}, "samples"),
        (lambda: -1, {}, "samples"),
        (lambda: 2, {"op": rj.Sum}, "op=Average"),
        (lambda: 2, {"op": rj.Adasum}, "op=Average"),
        (lambda: 2, {"staleness": 1}, "numbers of samples and staleness"),
        (lambda: "many", {}, "samples"),
    ],
)
def test_wrong_numbers_are_refused_on_all_ranks(
    called: Any, samples: Callable[[], Any], options: dict[str, Any], words: str
) -> None:
    tx = transformation(optax.sgd(1.0), **options)
    state = tx.init(jnp.zeros(3))
    step = called(lambda grads: tx.update(grads, state, samples=samples())[0])
    with pytest.raises(rr.RingReduceError, match=words):
        original(lambda: jax.block_until_ready(step(jnp.ones(3))))


@SEVERAL
def test_ranks_with_other_staleness_hear_it(called: Any) -> None:
    for other in (0, 2):
        tx = transformation(optax.sgd(1.0), staleness=1 if RANK else other)
        state = tx.init(jnp.zeros(3))
        step = called(lambda grads, tx=tx, state=state: tx.update(grads, state)[0])
        with pytest.raises(rr.MismatchError):
            original(lambda step=step: jax.block_until_ready(step(jnp.ones(3))))


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
