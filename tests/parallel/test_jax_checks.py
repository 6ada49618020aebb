"""JAX: weights that differ, gradients that are no numbers and data that all ranks share are found; steps count."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import ringreduce as rr  # noqa: E402
import ringreduce.jax as rj  # noqa: E402
from ringreduce.runtime import global_process_set  # noqa: E402
from ringreduce.runtime.process import PROCESS  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several = pytest.mark.sizes(2, 3, 4)

#: Ways of making a transformation.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compressed": {"compression": "int8"},
    "late": {"staleness": 1},
    "weighted": {"samples": 3},
}


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def called(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """What calls a function as it is, or compiled."""
    return jax.jit if request.param else lambda function: function


@pytest.fixture
def small_buckets(begin_world: Callable[..., None]) -> None:
    """A world in which a compiled program reduces each array by itself."""
    begin_world(BUCKET="4")


@pytest.fixture
def checked(begin_world: Callable[..., None]) -> None:
    """The same, in which weights are compared every second step, and gradients looked at in each."""
    begin_world(BUCKET="4", CHECK="2", CHECK_FINITE="1")


def train(
    called: Callable[[Any], Any],
    *,
    begin: float = 1.0,
    data: Callable[[int], float] = lambda step: RANK + step,
    before: Callable[[int, Any], Any] = lambda step, params: params,
    steps: int = 5,
    samples: Any = None,
    params: bool = True,
    **options: Any,
) -> Any:
    """Return parameters after steps with the gradients ``{"a": data, "b": [data, ...]}``; ``a`` begins as given."""
    tx = rj.DistributedGradientTransformation(optax.sgd(1.0), **options)
    weights = {"a": jnp.full(3, begin), "b": jnp.zeros((2, 5)), "key": jax.random.key(0)}

    def grads_of(x: Any) -> Any:
        return {"a": jnp.full(3, x), "b": jnp.full((2, 5), 2 * x)}

    trained = {name: weights[name] for name in ("a", "b")}
    state = tx.init(trained)
    extra = {} if samples is None else {"samples": samples}

    @called
    def step(weights: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(grads_of(x), state, weights if params else None, **extra)
        return optax.apply_updates(weights, updates), state

    for number in range(steps):
        trained = before(number, trained)
        trained, state = step(trained, state, jnp.float32(data(number)))
    return trained


def raised(function: Callable[[], Any]) -> BaseException:
    """Return our error."""
    with pytest.raises(Exception) as error:  # noqa: PT011  # JAX raises its own, with ours
        function()
    return rj.error_of(error.value)


@pytest.mark.smoke
@several
@pytest.mark.parametrize("way", WAYS)
def test_rank_0_warns_if_the_ranks_begin_with_different_weights(called: Any, way: str, warned: Any) -> None:
    """Once, before the first step, in the words of JAX; nothing is said if weights are equal, or none are given."""
    train(called, begin=1.0, **WAYS[way])
    train(called, begin=1.0 + RANK, params=False, **WAYS[way])
    assert not warned("different weights")
    train(called, begin=1.0 + RANK, **WAYS[way])
    found = warned("begin with different weights (['a'] for one)")
    assert len(found) == (RANK == 0)
    assert all("params = broadcast_parameters(params, root_rank=0)" in each for each in found)


@several
@pytest.mark.parametrize("way", [pytest.param(each, marks=[pytest.mark.smoke] * (each == "plain")) for each in WAYS])
def test_arguments_of_the_update_agree(called: Any, way: str) -> None:
    """Numbers and arrays; a rank's own loss would let ranks step differently."""
    options = {name: each for name, each in WAYS[way].items() if name != "samples"}
    samples = {name: each for name, each in WAYS[way].items() if name == "samples"}
    params = {"a": jnp.ones(3)}

    def step(average: bool, **given: Any) -> None:
        tx = rj.DistributedGradientTransformation(optax.contrib.reduce_on_plateau(patience=1), **options)
        state = tx.init(params)

        @called
        def update(params: Any, state: Any, given: Any) -> Any:
            given = {name: rj.allreduce(each) for name, each in given.items()} if average else given
            return tx.update(params, state, params, **samples, **given)

        for _ in range(3):
            _, state = update(params, state, given)

    step(True, value=jnp.float32(RANK), grad=jnp.full(3, float(RANK)))
    error = raised(lambda: step(False, value=jnp.float32(RANK)))
    assert isinstance(error, rr.MismatchError)
    assert error.values == {rank: f"value of update() {rank}.0" for rank in range(SIZE)}
    assert "value=allreduce(value)" in str(error)
    error = raised(lambda: step(False, value=jnp.float32(1), grad=jnp.full(3, float(RANK))))
    assert isinstance(error, rr.MismatchError)
    assert all(each.startswith("grad of update() with the checksum ") for each in error.values.values())


@several
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("differ_in", [None, 0, 1, 2, 3])
def test_ranks_that_train_on_the_same_data_are_told(
    small_buckets: None, called: Any, way: str, differ_in: int | None, warned: Any
) -> None:
    """Rank 0 warns once if all gradients were equal in each of the first three steps, and names what divides data."""
    train(called, data=lambda step: float(step + (RANK if step == differ_in else 0)), **WAYS[way])
    found = warned("train on the same data")
    assert len(found) == (RANK == 0 and differ_in in (None, 3))
    assert all("x[rank()::size()]" in each and "DataLoader" not in each for each in found)


@several
def test_gradients_that_are_equal_in_a_part_alone_are_of_different_data(
    small_buckets: None, called: Any, warned: Any
) -> None:
    """As of frozen arrays, which have zeros on all ranks; each array is a part of its own here."""
    tx = rj.DistributedGradientTransformation(optax.sgd(1.0))
    for differing in ("a", "b", "c"):
        params = {name: jnp.zeros(5) for name in ("a", "b", "c")}
        state = tx.init(params)
        step = called(lambda grads, state, params, tx=tx: tx.update(grads, state, params))
        for _ in range(4):
            step({name: jnp.full(5, float(RANK * (name == differing))) for name in params}, state, params)
    assert not warned("train on the same data")


@several
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_differ_name_the_array_and_the_rank(checked: None, called: Any, way: str) -> None:
    """RINGREDUCE_CHECK=2: an error on all ranks before the third step, as weights have become different by then."""

    def before(step: int, params: Any) -> Any:
        other = step == 2 and RANK == SIZE - 1
        return {**params, "b": params["b"].at[1, 3].add(1e-3)} if other else params

    error = raised(lambda: train(called, before=before, **WAYS[way]))
    assert isinstance(error, rr.MismatchError)
    assert "before step 2" in str(error)
    assert "the values of ['b'] have the checksum" in str(error)
    odd = [rank for rank, text in error.values.items() if "unlike most" in text]
    assert odd == ([SIZE - 1] if SIZE > 2 else [])


@pytest.mark.smoke
@several
@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_number_names_gradient_and_rank(checked: None, called: Any, way: str) -> None:
    """RINGREDUCE_CHECK_FINITE=1: an error on all ranks before it is reduced."""
    error = raised(lambda: train(called, data=lambda step: np.nan if (step, RANK) == (1, 1) else 1.0, **WAYS[way]))
    assert isinstance(error, rr.NotFiniteError)
    assert "holds NaN or infinity on rank 1" in str(error)
    assert "step 1" in str(error)
    assert any(f"gradient of {name}" in str(error) for name in ("['a']", "['b']", "array "))


@pytest.mark.smoke
@several
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a chain"])
def test_rates_that_differ_between_ranks_are_told(
    small_buckets: None, called: Any, way: str, nested: bool, warned: Any
) -> None:
    """Those of `optax.inject_hyperparams`: rank 0 warns once; in steps 1, 2, 4, 8, with staleness in the first."""

    def make() -> Any:
        inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5, momentum=0.25)
        return optax.chain(optax.clip(9.0), inner) if nested else inner

    options, differ_in = {**WAYS[way]}, 0 if way == "late" else 2
    samples = options.pop("samples", None)
    extra = {} if samples is None else {"samples": samples}
    for other in (0.0, 0.125 * (RANK == 1)):
        assert not warned("hyper-parameters")
        tx, params = rj.DistributedGradientTransformation(make(), **options), {"a": jnp.ones(3), "b": jnp.ones((2, 5))}
        state = tx.init(params)
        step = called(lambda grads, state, params, tx=tx: tx.update(grads, state, params, **extra))
        for number in range(9):
            if number == differ_in:
                inner = getattr(state, "inner", state)
                injected = inner[1] if nested else inner
                injected.hyperparams["learning_rate"] = jnp.float32(0.5 + other)
            grads = {"a": jnp.full(3, float(RANK + number)), "b": jnp.full((2, 5), 1.0)}
            _, state = step(grads, state, params)
    found = warned("hyper-parameters")
    assert len(found) == (RANK == 0)
    others = "rank 0" if SIZE == 2 else f"ranks 0, 2{'-3' * (SIZE == 4)}"
    assert all(f"learning_rate is 0.5 on {others}, 0.625 on rank 1. All ranks" in each for each in found)


class Tuned(NamedTuple):
    """A state of a program's own, that has names of optax."""

    hyperparams: Any
    inner: Any


class Held(NamedTuple):
    """Another, whose hyper-parameters have no names."""

    hyperparams: Any
    inner_state: Any


@several
@pytest.mark.parametrize(
    "state_of",
    [
        lambda inner: Tuned({"rate": 1.0}, inner),
        lambda inner: Held(jnp.ones(2), inner),
        lambda inner: Held(None, inner),
    ],
    ids=["no inner state", "an array", "nothing"],
)
def test_a_state_of_a_program_may_have_hyper_parameters(called: Any, state_of: Any, warned: Any) -> None:
    """It is updated as any state, and the `optax.inject_hyperparams` within it is found."""
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5 + 0.125 * RANK)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, within = inner.update(updates, state[1], params)
        return updates, type(state)(state[0], within)

    tx = rj.DistributedGradientTransformation(
        optax.GradientTransformation(lambda params: state_of(inner.init(params)), update)
    )
    grads = jnp.full(3, float(RANK))
    step = called(lambda grads, state: tx.update(grads, state, grads))
    updates, _ = step(grads, tx.init(grads))
    np.testing.assert_allclose(updates, np.full(3, -(SIZE - 1) / 2 * (0.5 + 0.125 * RANK)), rtol=1e-6)
    found = warned("hyper-parameters")
    assert len(found) == (RANK == 0)
    assert all("learning_rate is 0.5 on rank 0" in each for each in found)


@several
def test_hyper_parameters_are_compared_in_few_steps(called: Any) -> None:
    """In steps 1, 2, 4, 8; each other step communicates its gradients alone."""
    tx = rj.DistributedGradientTransformation(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    params, counts = jnp.zeros(3), []
    state = tx.init(params)
    step = called(lambda grads, state, params: tx.update(grads, state, params))
    for number in range(17):
        counts.append(rr.metrics().operations)
        _, state = step(jnp.full(3, float(RANK + number)), state, params)
    per_step = np.diff([*counts, rr.metrics().operations]).tolist()
    assert [number for number, each in enumerate(per_step) if each > 1 and number > 2] == [3, 7, 15]
    assert [per_step[number] for number in (3, 7, 15)] == [2] * 3


@several
def test_a_step_that_looks_at_nothing_communicates_its_gradients_alone(called: Any) -> None:
    """After the first steps each step is one operation; what is looked at before that are operations of their own."""
    counts = []

    def before(step: int, params: Any) -> Any:
        counts.append(rr.metrics().operations)
        return params

    train(called, before=before, steps=9, data=lambda step: 0.0)
    per_step = np.diff(counts).tolist()
    assert per_step[3:] == [1] * 5
    assert all(each > 1 for each in per_step[:3])


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_counted_for_top(called: Any, way: str) -> None:
    """Each reduction of gradients is a step, whatever the number of ranks."""
    recorder = PROCESS.rank_here().observer.recorder
    before = recorder.steps
    train(called, steps=7, **WAYS[way])
    assert recorder.steps - before == 7


def watched() -> int:
    """Return how many objects look at steps."""
    gc.collect()
    return sum(type(each).__module__ == "ringreduce.jax.steps" for each in gc.get_objects())


@several
@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_makes_transformations_for_ever_does_not_grow(called: Any, way: str) -> None:
    """What looks at the steps of one goes with it."""
    train(called, **WAYS[way])
    before = watched()
    for _ in range(4):
        train(called, **WAYS[way])
    assert watched() <= before


@several
def test_a_transformation_that_is_made_in_a_trace_does_not_grow(warned: Any) -> None:
    """However often it is traced anew; its steps go on, and are not compared from the beginning."""

    def step(number: int, grads: Any) -> Any:
        tx = rj.DistributedGradientTransformation(optax.sgd(1.0))
        return tx.update(grads, tx.init(grads), grads)[0]

    counts = []
    for number in range(5):
        grads = jnp.full(3, float(RANK + number))
        np.testing.assert_allclose(
            jax.jit(partial(step, number))(grads), np.full(3, -(SIZE - 1) / 2 - number), rtol=1e-6
        )
        counts.append(watched())
    assert counts[-1] <= counts[0]


@several
def test_a_world_that_has_ended_leaves_nothing_behind(no_world: None) -> None:
    """Though the transformation lives on."""
    rr.init()
    tx, grads = rj.DistributedGradientTransformation(optax.sgd(1.0)), jnp.ones(3)
    step = jax.jit(lambda grads, state: tx.update(grads, state, grads)[0])
    for _ in range(3):
        rr.init()
        step(grads, tx.init(grads))
        engine = weakref.ref(global_process_set.engine)
        rr.shutdown()
        gc.collect()
        assert engine() is None


def test_gradients_flow_through_a_step_with_weights(called: Any) -> None:
    """Meta-learning: a step's result is differentiated by the weights it was given; the loss of all ranks together.

    params - grads of all ranks averaged, where each rank's grads are 3 x params: the derivative is 1 - 3 = -2.
    """
    tx = rj.DistributedGradientTransformation(optax.sgd(1.0))

    def after(params: Any) -> Any:
        updates, _ = tx.update(3 * params, tx.init(params), params)
        return jnp.sum(optax.apply_updates(params, updates))

    np.testing.assert_allclose(called(jax.grad(after))(jnp.arange(4.0)), np.full(4, -2.0))


def test_a_step_is_mapped_with_its_weights(called: Any) -> None:
    """An ensemble: `vmap` over trees of gradients and weights, and over gradients alone."""
    tx = rj.DistributedGradientTransformation(optax.sgd(1.0))
    grads, params = jnp.arange(6.0).reshape(3, 2) + RANK, jnp.ones((3, 2))
    average = np.arange(6.0).reshape(3, 2) + (SIZE - 1) / 2

    def update(grads: Any, params: Any) -> Any:
        return tx.update(grads, tx.init(params), params)[0]

    np.testing.assert_allclose(called(jax.vmap(update))(grads, params), -average)
    np.testing.assert_allclose(called(jax.vmap(update, in_axes=(0, None)))(grads, params[0]), -average)
