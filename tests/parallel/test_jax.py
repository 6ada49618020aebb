"""JAX: collectives on pytrees outside and inside of compiled programs, against closed forms, and training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
from jax.experimental import sparse  # noqa: E402

import ringreduce as rr  # noqa: E402
import ringreduce.jax as rj  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
TRIANGLE = sum(range(SIZE))


@pytest.mark.smoke
def test_trees_are_reduced(called: Any) -> None:
    tree = {"a": jnp.arange(7.0) + RANK, "b": [jnp.full((3, 5), RANK, jnp.int32), jnp.float32(2.0)]}
    made = called(lambda each: rj.allreduce(each, rj.Sum))(tree)
    np.testing.assert_allclose(made["a"], np.arange(7.0) * SIZE + TRIANGLE)
    np.testing.assert_array_equal(made["b"][0], np.full((3, 5), TRIANGLE))
    assert made["b"][1] == 2.0 * SIZE
    assert made["b"][0].dtype == jnp.int32


def made_by(tx: Any, update: Any, gradients: list[Any]) -> list[float]:
    """Return the updates of one weight."""
    weight = jnp.zeros(1)
    state, made = tx.init(weight), []
    for each in gradients:
        updates, state = update(jnp.full(1, each, jnp.float32), state, weight)
        made.append(float(updates[0]))
    return made


@pytest.mark.smoke
@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("within", [lambda tx: tx, lambda tx: optax.chain(optax.scale(1.0), tx)], ids=["", "chain"])
def test_steps_that_ranks_leave_out_on_their_own_are_refused(called: Any, compression: Any, within: Any) -> None:
    """A rank with NaN was one collective behind, and its next gradients were averaged with those of another step."""
    distributed = rj.DistributedGradientTransformation(optax.sgd(1.0), compression=compression)
    inner: Any = within(distributed)
    for tx in (
        optax.apply_if_finite(inner, 5),
        optax.MultiSteps(inner, every_k_schedule=1, should_skip_update_fn=optax.skip_not_finite),
    ):
        with pytest.raises(rr.ConfigError, match="Put it inside, where it sees the averages"):
            made_by(tx, called(tx.update), [float("nan") if RANK == SIZE - 1 else 1.0])


@pytest.mark.smoke
def test_steps_that_all_ranks_leave_out_are_not_refused(called: Any) -> None:
    """What is inside sees averages; `MultiSteps` calls the transformation in the same steps everywhere."""
    mine = [float("nan") if RANK == SIZE - 1 else 1.0, RANK, 2.0]
    tx: Any
    for inner in (
        optax.apply_if_finite(optax.sgd(1.0), 5),
        optax.MultiSteps(optax.sgd(1.0), every_k_schedule=1, should_skip_update_fn=optax.skip_not_finite),
    ):
        tx = rj.DistributedGradientTransformation(inner)
        assert made_by(tx, called(tx.update), mine) == [0.0, -(SIZE - 1) / 2, -2.0]
    tx = optax.MultiSteps(rj.DistributedGradientTransformation(optax.sgd(1.0)), every_k_schedule=2)
    assert made_by(tx, jax.jit(tx.update), [RANK, RANK + 2.0] * 2) == [0.0, -(SIZE + 1) / 2] * 2


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.xfail(strict=True, reason="states of optax are the program's: nothing in them tells equal trees apart")
def test_equal_trees_in_another_order_on_a_rank_are_an_error() -> None:
    """Two models of one transformation whose later steps one rank makes in another order: all get an error."""
    tx = rj.DistributedGradientTransformation(optax.sgd(1.0))
    weights = [jnp.zeros(3), jnp.ones(3)]
    states = [tx.init(each) for each in weights]
    later = [1, 0] if RANK == SIZE - 1 else [0, 1]

    def train() -> None:
        for model in (0, 1, *later):
            tx.update(jnp.full(3, float(model)), states[model], weights[model])

    with pytest.raises(rr.MismatchError):
        train()


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "float32", "complex64"])
def test_every_dtype_travels(called: Any, dtype: str) -> None:
    values = jnp.asarray(np.arange(11) % 2).astype(jnp.bool_ if dtype == "bool" else dtype)
    made = called(lambda each: rj.allreduce(each, rj.Max if dtype != "complex64" else rj.Sum))(values)
    assert made.dtype == values.dtype
    np.testing.assert_array_equal(np.asarray(made), np.asarray(values) * (SIZE if dtype == "complex64" else 1))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_factors_are_not_rounded_to_16_bits(called: Any, dtype: str) -> None:
    """What goes in, and what comes out, is multiplied in float32 and rounded once."""

    def function(values: Any) -> Any:
        most = rj.allreduce(values, rj.Max, prescale_factor=1 / 3)
        part = rj.reducescatter(values, rj.Max, prescale_factor=1 / 3)
        total = rj.allreduce({"a": values}, rj.Sum, postscale_factor=0.3)["a"]

        def scattered(given: Any) -> Any:
            made = rj.reducescatter(given, rj.Sum, postscale_factor=0.3)
            return made.sum(), made

        gradient, mine = jax.grad(scattered, has_aux=True)(values)
        return most, total, part, mine, gradient

    def rounded(values: Any) -> Any:
        return np.asarray(jnp.asarray(values, dtype)).astype(np.float64)

    numbers = np.arange(1.0, 48.0, dtype=np.float32)
    most, total = rounded(numbers * np.float32(1 / 3)), rounded(SIZE * numbers * np.float32(0.3))
    mine = [np.array_split(each, SIZE)[RANK] for each in (most, total)]
    made = called(function)(jnp.asarray(numbers, dtype))
    for each, right in zip(made, [most, total, *mine, np.full(47, rounded(0.3))], strict=True):
        np.testing.assert_array_equal(np.asarray(each).astype(np.float64), right)


def test_rows_are_gathered_scattered_and_exchanged(called: Any) -> None:
    mine = jnp.full((2, 3), float(RANK))
    np.testing.assert_array_equal(called(rj.allgather)(mine), np.repeat(np.arange(SIZE), 2)[:, None] * np.ones(3))
    whole = jnp.arange(5.0)
    parts = np.array_split(np.arange(5.0), SIZE)
    np.testing.assert_allclose(called(rj.reducescatter)(whole), parts[RANK])
    sent = jnp.arange(float(SIZE)) + 10 * RANK
    np.testing.assert_array_equal(called(rj.alltoall)(sent), 10.0 * np.arange(SIZE) + RANK)
    root = SIZE - 1
    np.testing.assert_array_equal(called(lambda each: rj.broadcast(each, root))(mine), np.full((2, 3), float(root)))


@pytest.mark.sizes(2, 3, 4)  # each rank has a row
def test_ranks_without_a_row_are_for_outside_of_jit() -> None:
    """XLA would leave out the call on these ranks, which make nothing of it, and the others would wait."""
    np.testing.assert_array_equal(rj.reducescatter(jnp.ones(1), rj.Sum), np.full(1 - min(RANK, 1), float(SIZE)))
    with pytest.raises(rr.ConfigError, match="needs a row for each"):
        jax.jit(rj.reducescatter)(jnp.ones(1))


def test_ragged_rows_are_gathered_outside_of_jit() -> None:
    made = rj.allgather(jnp.full((RANK, 2), float(RANK)))
    np.testing.assert_array_equal(made[:, 0], np.repeat(np.arange(SIZE), np.arange(SIZE)))


@pytest.mark.smoke
def test_gradients_are_those_of_the_sum_of_all_losses(called: Any) -> None:
    weight = RANK + 1.0
    total = sum(rank + 1.0 for rank in range(SIZE))

    def gradient(function: Callable[[Any], Any]) -> Any:
        return np.asarray(called(jax.grad(lambda each: (function(each) * weight).sum()))(jnp.arange(4.0)))

    np.testing.assert_allclose(gradient(lambda each: rj.allreduce(each, rj.Sum)), np.full(4, total))
    np.testing.assert_allclose(gradient(rj.allreduce), np.full(4, total / SIZE))
    np.testing.assert_allclose(gradient(rj.allgather), np.full(4, total))
    root = SIZE - 1
    expected = np.full(4, total if root == RANK else 0.0)
    np.testing.assert_allclose(gradient(lambda each: rj.broadcast(each, root)), expected)
    owners = np.concatenate(
        [np.full(len(part), rank + 1.0) for rank, part in enumerate(np.array_split(range(4), SIZE))]
    )
    np.testing.assert_allclose(gradient(lambda each: rj.reducescatter(each, rj.Sum)), owners)


def test_second_gradients_flow() -> None:
    """Of all ranks' sums of y ** 3, where y is made of x by each collective; the first count rank + 1 times."""
    x, weight, length, total = RANK + 1.0, RANK + 1.0, 2 * SIZE, TRIANGLE + SIZE
    root = SIZE - 1

    def second(function: Callable[[Any], Any], length: int = length) -> Any:
        first = jax.grad(lambda each: (function(each) ** 3).sum())
        found = jax.jit(jax.grad(lambda each: weight * first(each).sum()))(jnp.full(length, x))
        return np.unique(np.asarray(found))

    np.testing.assert_allclose(second(lambda each: rj.allreduce(each, rj.Sum)), [6 * SIZE * total * total])
    np.testing.assert_allclose(second(rj.allgather), [6 * SIZE * weight * x])
    np.testing.assert_allclose(second(rj.alltoall), [6 * weight * x])
    np.testing.assert_allclose(second(lambda each: rj.reducescatter(each, rj.Sum)), [6 * total * total])
    np.testing.assert_allclose(second(lambda each: rj.reducescatter(each, rj.Sum), length + 1), [6 * total * total])
    expected = 6 * SIZE * weight * x if root == RANK else 0.0
    np.testing.assert_allclose(second(lambda each: rj.broadcast(each, root)), [expected])


def test_integers_beside_floats_have_no_gradients(called: Any) -> None:
    def loss(weights: Any) -> Any:
        made = rj.allreduce({"floats": weights, "integers": jnp.arange(3)}, rj.Sum)
        return (made["floats"] * made["integers"]).sum()

    np.testing.assert_allclose(called(jax.grad(loss))(jnp.ones(3)), SIZE**2 * np.arange(3.0))


@pytest.mark.smoke
def test_control_flow_batches_and_recomputation() -> None:
    def scanned(start: Any) -> Any:
        return jax.lax.scan(lambda each, _: (rj.allreduce(each) * 2, None), start, None, length=3)[0]

    np.testing.assert_allclose(jax.jit(scanned)(jnp.full(3, float(RANK))), np.full(3, 8 * TRIANGLE / SIZE))
    through = jax.jit(jax.grad(lambda each: scanned(each).sum()))(jnp.ones(3))
    np.testing.assert_allclose(through, np.full(3, 8.0))
    chosen = jax.jit(lambda flag, each: jax.lax.cond(flag, rj.allreduce, lambda other: other, each))
    np.testing.assert_allclose(chosen(True, jnp.full(3, float(RANK))), np.full(3, TRIANGLE / SIZE))
    again = jax.checkpoint(lambda each: jnp.sin(rj.allreduce(each, rj.Sum)).sum())
    np.testing.assert_allclose(jax.jit(jax.grad(again))(jnp.ones(3)), np.full(3, SIZE * np.cos(SIZE)), rtol=1e-5)
    donated = jax.jit(lambda each: rj.allreduce(each, rj.Sum), donate_argnums=0)
    np.testing.assert_allclose(donated(jnp.ones(1000)), np.full(1000, SIZE))


def test_batches_are_mapped() -> None:
    """Over the second dimension; each collective sees the first alone."""
    batch = jnp.outer(jnp.arange(2.0 * SIZE), jnp.array([1.0, 10.0])) + RANK
    single = np.arange(2.0 * SIZE)[:, None] * [1.0, 10.0]

    def mapped(function: Callable[[Any], Any]) -> Any:
        return np.asarray(jax.jit(jax.vmap(function, in_axes=1, out_axes=1))(batch))

    np.testing.assert_allclose(mapped(lambda each: rj.allreduce(each, rj.Sum)), single * SIZE + TRIANGLE)
    np.testing.assert_allclose(mapped(lambda each: rj.broadcast(each, SIZE - 1)), single + SIZE - 1)
    np.testing.assert_allclose(mapped(rj.allgather), np.concatenate([single + rank for rank in range(SIZE)]))
    mine = slice(2 * RANK, 2 * RANK + 2)
    np.testing.assert_allclose(mapped(rj.reducescatter), single[mine] + TRIANGLE / SIZE)
    np.testing.assert_allclose(mapped(rj.alltoall), np.concatenate([single[mine] + rank for rank in range(SIZE)]))


#: Lengths of arrays that take four operations of 192 KiB and more; the last arrays come first.
BUCKETS = [68_751, 5, 125_001, 1, 43_750, 43_750, 68_750, 3]


@pytest.fixture
def small_buckets(begin_world: Callable[..., None]) -> None:
    """A world in which a compiled program reduces 192 KiB at a time; gradients of a step 256 KiB."""
    begin_world(BUCKET="128K")


def test_large_trees_are_reduced_in_buckets(small_buckets: None) -> None:
    """So that not all gradients of a step need memory at the same time; in the same order on unlike ranks."""

    def step(weights: Any) -> Any:
        gradients = jax.grad(lambda given: sum((each * each).sum() for each in given))(weights)
        made = [weight - 0.25 * each for weight, each in zip(weights, rj.allreduce(gradients), strict=True)]
        return made, [each.sum() for each in gradients] if RANK == 0 else None  # which changes the program of this rank

    weights = [jnp.full(length, float(number + RANK)) for number, length in enumerate(BUCKETS)]
    program = jax.jit(step).lower(weights).compile()
    assert program.as_text().count(" custom-call(") == 4
    for number, each in enumerate(program(weights)[0]):
        np.testing.assert_allclose(each, np.full(BUCKETS[number], number + RANK - (number + TRIANGLE / SIZE) / 2))
    empty, full, _ = jax.jit(rj.allreduce)([jnp.ones(0), jnp.ones(BUCKETS[0]), jnp.ones(0)])
    assert empty.shape == (0,)
    np.testing.assert_array_equal(full, np.ones(BUCKETS[0]))


def test_memory_is_for_a_few_gradients_of_a_large_model() -> None:
    def loss(layers: Any) -> Any:
        made = jnp.ones((4, 1024))
        for each in layers:
            made = jnp.tanh(made @ each)
        return made.sum()

    layers = [jnp.ones((1024, 1024))] * 24
    tx = rj.DistributedGradientTransformation(optax.sgd(1.0))
    step = jax.jit(lambda given: optax.apply_updates(given, tx.update(jax.grad(loss)(given), tx.init(given))[0]))
    used = step.lower(layers).compile().memory_analysis().temp_size_in_bytes
    assert used < 8 * layers[0].nbytes


def test_arguments_of_a_program_are_not_copied() -> None:
    """Results are in new memory anyway: what reads the arguments may write there at once."""
    given = [jnp.full(length, float(RANK)) for length in BUCKETS]
    program = jax.jit(lambda tree: rj.allreduce(tree, rj.Sum)).lower(given).compile()
    assert " copy(" not in program.as_text()
    for each, made in zip(given, program(given), strict=True):
        np.testing.assert_array_equal(made, np.full(each.shape, TRIANGLE))
        np.testing.assert_array_equal(each, np.full(each.shape, RANK))


@pytest.mark.sizes(2, 3, 4)  # one rank agrees with itself
@pytest.mark.parametrize("number", [0, 2, 7, None], ids=["last bucket", "third", "first", "one bucket more"])
def test_ranks_that_disagree_on_one_of_many_buckets_hear_it(small_buckets: None, number: int | None) -> None:
    lengths = list(BUCKETS)
    if RANK == 0:
        lengths[0:0] = [1] if number is None else []
        lengths[number or 0] += number is not None
    reduce = jax.jit(lambda tree: rj.allreduce(tree, rj.Sum))
    with pytest.raises((rr.MismatchError, RuntimeError, ValueError)) as caught:
        reduce([jnp.ones(length) for length in lengths])
    assert isinstance(rj.error_of(caught.value), rr.MismatchError)
    np.testing.assert_array_equal(reduce([jnp.ones(3)])[0], np.full(3, float(SIZE)))


def test_results_stay_as_they_are() -> None:
    """Though the next step reduces into the same memory of the toolkit."""
    step = jax.jit(lambda each: rj.allreduce(each, rj.Sum))
    for make in (step, lambda each: rj.allreduce(each, rj.Sum)):
        kept = [make(jnp.full(300_000, float(number))) for number in range(3)]
        for number, each in enumerate(kept):
            np.testing.assert_array_equal(each, np.full(300_000, float(number * SIZE)))


@pytest.mark.sizes(2, 3, 4)  # one rank is all ranks
def test_some_ranks_reduce_among_themselves() -> None:
    process_set = rj.add_process_set([SIZE - 1])
    try:
        if RANK == SIZE - 1:
            made = jax.jit(lambda each: rj.allreduce(each, rj.Sum, process_set=process_set))(jnp.ones(3))
            np.testing.assert_array_equal(made, np.ones(3))
    finally:
        rj.remove_process_set(process_set)


@pytest.mark.skipif(SIZE < 3, reason="a set of several ranks, and one without")
def test_a_set_of_several_ranks_reduces_and_gathers_in_a_program() -> None:
    process_set = rj.add_process_set(list(range(1, SIZE)))
    try:
        if RANK:
            sums = jax.jit(lambda each: rj.allreduce(each, process_set=process_set))(jnp.full(3, float(RANK)))
            np.testing.assert_allclose(sums, np.full(3, SIZE / 2))
            rows = jax.jit(lambda each: rj.allgather(each, process_set=process_set))(jnp.full(2, float(RANK)))
            np.testing.assert_array_equal(rows, np.repeat(np.arange(1.0, SIZE), 2))
            last = jax.jit(lambda each: rj.broadcast(each, SIZE - 1, process_set=process_set))(jnp.float32(RANK))
            assert last == SIZE - 1
    finally:
        rj.remove_process_set(process_set)


def test_programs_and_calls_outside_of_them_run_on_threads_that_start_in_any_order() -> None:
    """Two programs that compile, and a call that is not compiled, whose names say which is which."""

    def first(each: Any) -> Any:
        return rj.allreduce(each, rj.Sum)

    def second(each: Any) -> Any:
        return rj.allreduce(each * 2, rj.Sum)

    def third(each: Any) -> Any:
        return rj.allreduce(each * 3, rj.Sum)

    calls = [jax.jit(first), jax.jit(second), third]
    with ThreadPoolExecutor(3) as pool:
        order = [(RANK + number) % 3 for number in range(3)]
        results = {number: pool.submit(calls[number], jnp.ones(5)) for number in order}
        for number, each in results.items():
            np.testing.assert_array_equal(each.result(), np.full(5, SIZE * (number + 1.0)))


def test_compressed_gradients_are_not_mapped() -> None:
    """Each of a batch would need losses of its own."""
    tx = rj.DistributedGradientTransformation(optax.sgd(1.0), compression="int8")
    state = tx.init(jnp.zeros(4))
    with pytest.raises(rr.ConfigError, match="vmap"):
        jax.jit(jax.vmap(tx.update, in_axes=(0, None)))(jnp.ones((2, 4)), state)
    with pytest.raises(rr.ConfigError, match="no gradient flows"):
        jax.grad(lambda each: tx.update(each, state)[0].sum())(jnp.ones(4))


def test_what_compression_has_not_sent_is_a_part_of_the_state() -> None:
    """Each rank's own, as leaves: what was sent in all steps and what is left are the gradients, none twice."""
    tx = rj.DistributedGradientTransformation(optax.sgd(1.0), op=rj.Sum, compression=rj.TopK(fraction=0.1))
    gradients = {"w": jnp.arange(1.0, 31.0) * (RANK + 1), "steps": jnp.arange(3)}
    state = tx.init(gradients)
    update, sent = jax.jit(tx.update), np.zeros(30)
    for _ in range(3):
        updates, state = update(gradients, state)
        sent -= np.asarray(updates["w"])
        np.testing.assert_array_equal(updates["steps"], -SIZE * np.arange(3))
    (residual,) = jax.tree.leaves(state.lost)
    assert np.abs(residual).max() > 0
    left = rr.allreduce(np.asarray(residual))
    np.testing.assert_allclose(sent + left, 3 * (TRIANGLE + SIZE) * np.arange(1.0, 31.0), rtol=1e-5)


@pytest.mark.sizes(2, 3, 4)
def test_nothing_is_left_to_send_before_the_first_step(nodes_of_one: None) -> None:
    """Whatever the memory has held that is used to find out how long the residual is."""
    used = [rr.empty(1000) for _ in range(4)]
    for each in used:
        each[:] = 0.3
    del used, each
    state = rj.DistributedGradientTransformation(optax.sgd(1.0), compression="int8").init(jnp.zeros(1000))
    leaves = jax.tree.leaves(state.lost)
    assert sum(each.size for each in leaves) > 0
    for each in leaves:
        np.testing.assert_array_equal(each, np.zeros(each.size))


def test_small_results_of_many_calls_are_all_right(called: Any) -> None:
    """Also of calls of the same shapes, which use the same memory one after the other."""
    reduce = called(lambda tree: [rj.allreduce(each, rj.Sum) for each in tree])
    tree = [jnp.full(3, RANK + number, jnp.float32) for number in range(5)]
    kept = [reduce(tree) for _ in range(3)]
    for made in kept:
        for number, each in enumerate(made):
            np.testing.assert_array_equal(each, np.full(3, TRIANGLE + SIZE * number))


@pytest.mark.parametrize("how", [pytest.param("plain", marks=pytest.mark.smoke), "samples", "int8", "late"])
@pytest.mark.parametrize("trees", ["equal", "named"])
def test_models_that_ranks_step_in_another_order_are_never_mixed(called: Any, how: str, trees: str) -> None:
    """With transformations of their own, or parameters of other names; ranks that wait for different ones get an error.

    Late averages of equal gradients are these as well; no rank waits for the others there.
    """
    options = {"int8": {"compression": "int8"}, "late": {"staleness": 1}}.get(how, {})
    keys, scales = ("w", "w") if trees == "equal" else ("actor", "critic"), [1.0, 10.0]
    made = [rj.DistributedGradientTransformation(optax.sgd(1.0), **options) for _ in keys]
    shared = trees == "named" and how != "late"
    made = [made[0], made[0] if shared else made[1]]
    params = [{key: jnp.zeros(4)} for key in keys]
    states = [each.init(tree) for each, tree in zip(made, params, strict=True)]

    def stepping(number: int) -> Any:
        def change(tree: Any, state: Any, scale: Any) -> Any:
            gradients = jax.tree.map(lambda each: each * 0 + scale, tree)
            more = {"samples": 2} if how == "samples" else {}
            updates, state = made[number].update(gradients, state, tree, **more)
            return optax.apply_updates(tree, updates), state

        return called(change)

    steps = [stepping(number) for number in range(2)]

    def make_step(number: int) -> None:
        scale = jnp.float32(scales[number] * (RANK + 1))
        params[number], states[number] = steps[number](params[number], states[number], scale)
        jax.block_until_ready(params[number])

    for number in (0, 1, 1, 0, 1):
        make_step(number)
    mean, late = (TRIANGLE + SIZE) / SIZE, how == "late" and SIZE > 1
    if SIZE > 1 and how != "late":
        with pytest.raises((rr.MismatchError, RuntimeError, ValueError)) as caught:
            make_step(int(RANK > 0))
        found = rj.error_of(caught.value)
        assert isinstance(found, rr.MismatchError)
        assert sorted(found.values) == list(range(SIZE))
        for key in keys:
            assert key in str(found)
    make_step(0)  # the ranks go on
    if late:
        make_step(RANK % 2)
        make_step(1 - RANK % 2)
    for number in range(2):
        value = np.asarray(params[number][keys[number]])
        np.testing.assert_allclose(value, np.full(4, -3 * scales[number] * mean), rtol=2e-2 if how == "int8" else 1e-6)


@pytest.mark.sizes(2, 3, 4)  # one rank agrees with itself
def test_a_rank_may_make_transformations_and_trace_programs_that_others_do_not(called: Any) -> None:
    """What was used first decides, and a transformation that is made in each trace is the same in all of them."""
    for _ in range(RANK):
        rj.DistributedGradientTransformation(optax.sgd(1.0))

    def change(scale: Any) -> Any:
        tx = rj.DistributedGradientTransformation(optax.sgd(1.0))
        return tx.update({"w": scale}, tx.init({"w": scale}))[0]["w"]

    outer, made = rj.DistributedGradientTransformation(optax.sgd(1.0)), called(change)
    if RANK == 0:
        jax.make_jaxpr(lambda each: outer.update({"w": each}, outer.init({"w": each}))[0])(jnp.ones(2))
    for step in range(3):
        again = jax.jit(lambda each: change(each)) if RANK == 0 and called is jax.jit else made
        np.testing.assert_allclose(
            again(jnp.full(2, float(RANK + step))), np.full(2, -step - TRIANGLE / SIZE), rtol=1e-6
        )
        update, _ = outer.update({"w": jnp.full(2, float(RANK))}, outer.init({"w": jnp.ones(2)}))
        np.testing.assert_allclose(update["w"], np.full(2, -TRIANGLE / SIZE), rtol=1e-6)


@pytest.mark.smoke
@pytest.mark.sizes(2, 3, 4)  # one rank agrees with itself
def test_ranks_that_disagree_hear_the_same_error_and_go_on(called: Any) -> None:
    reduce = called(lambda each: rj.allreduce(each, rj.Sum))
    with pytest.raises((rr.MismatchError, RuntimeError)) as caught:
        reduce(jnp.ones(3 + (RANK == 0)))
    found = rj.error_of(caught.value)
    assert isinstance(found, rr.MismatchError)
    assert sorted(found.values) == list(range(SIZE))
    np.testing.assert_array_equal(reduce(jnp.ones(3)), np.full(3, float(SIZE)))


@pytest.mark.sizes(2, 3, 4)  # one rank agrees with itself
def test_rows_of_different_number_are_refused_in_a_program() -> None:
    """Which is made before they are known."""
    gather = jax.jit(rj.allgather)
    with pytest.raises((rr.MismatchError, RuntimeError, ValueError)) as caught:
        gather(jnp.ones((RANK + 1, 2)))
    assert isinstance(rj.error_of(caught.value), rr.MismatchError)
    np.testing.assert_array_equal(gather(jnp.ones(3)), np.ones(3 * SIZE))


@pytest.mark.sizes(2, 3, 4)  # one rank tells nobody
def test_wrong_arguments_of_one_rank_reach_all(called: Any) -> None:
    reduce = called(lambda each: rj.allreduce(each, rj.Sum, prescale_factor="x" if RANK == 0 else 1.0, name="scaled"))
    with pytest.raises((rr.ConfigError, rr.MismatchError, RuntimeError)) as caught:
        reduce(jnp.ones(3))
    assert isinstance(rj.error_of(caught.value), rr.ConfigError if RANK == 0 else rr.MismatchError)


@pytest.mark.parametrize("way", ["allreduce", "broadcast_parameters", "plain", "weighted", "compressed"])
def test_refusals_name_the_leaf_and_what_to_do(way: str) -> None:
    leaves = {
        "no array": ("text", "use broadcast_object"),
        "strings": (np.array(["a"]), "holds no numbers; .* use broadcast_object"),
        "float0": (np.zeros(3, jax.dtypes.float0), "float0.* without allow_int"),
        "ragged": (np.array([[1], [1, 2]], object), "pad rows of unequal lengths"),
        "sparse": (sparse.BCOO.fromdense(jnp.eye(3)), r"pass \.todense\(\)"),
    }
    tx = rj.DistributedGradientTransformation(optax.sgd(1.0), compression="int8" if way == "compressed" else None)
    state = tx.init({"w": jnp.ones(2)})
    samples = {"samples": 2} if way == "weighted" else {}
    calls = {"allreduce": rj.allreduce, "broadcast_parameters": rj.broadcast_parameters}
    call = calls.get(way, lambda tree: tx.update(tree, state, **samples))
    for name, (leaf, words) in leaves.items():
        if (name, way) == ("sparse", "broadcast_parameters"):
            got = call({"w": [jnp.ones(2), leaf]})
            np.testing.assert_array_equal(got["w"][1].todense(), np.eye(3))
            continue
        with pytest.raises(rr.UnsupportedBufferError, match=rf"^\['w'\]\[1\]: .*{words}"):
            call({"w": [jnp.ones(2), leaf]})


def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(rr.UnsupportedBufferError, match="no array"):
        rj.allreduce({"a": "text"})
    with pytest.raises(rr.UnsupportedBufferError, match="at least one dimension"):
        rj.allgather(jnp.float32(1.0))
    with pytest.raises(rr.ConfigError, match="no gradient flows through allreduce with op max"):
        jax.grad(lambda each: rj.allreduce(each, rj.Max).sum())(jnp.ones(2))


def test_only_the_root_counts_and_what_ranks_have_of_their_own_stays() -> None:
    own = rj.RankState({"lost": jnp.full(RANK + 1, float(RANK))})
    tree = {"w": jnp.full(3, float(RANK)), "own": own, "step": RANK, "key": jax.random.key(RANK)}
    made = rj.broadcast_parameters(tree, root_rank=SIZE - 1)
    np.testing.assert_array_equal(made["w"], np.full(3, SIZE - 1.0))
    assert made["step"] == SIZE - 1
    assert type(made["step"]) is int
    np.testing.assert_array_equal(made["own"].arrays["lost"], np.full(RANK + 1, float(RANK)))
    assert jax.random.uniform(made["key"]) == jax.random.uniform(jax.random.key(SIZE - 1))


def test_a_state_goes_back_to_its_commit_and_takes_the_values_of_rank_0() -> None:
    state = rj.elastic.JaxState(params={"w": jnp.full(3, float(RANK))}, epoch=RANK)
    state.sync()
    np.testing.assert_array_equal(state.params["w"], np.zeros(3))
    assert state.epoch == 0
    state.params, state.epoch = {"w": jnp.ones(3)}, 7
    state.restore()
    np.testing.assert_array_equal(state.params["w"], np.zeros(3))
    assert state.epoch == 0


@pytest.mark.sizes(2, 3, 4)  # one rank agrees with itself
def test_the_elastic_loop_raises_the_error_that_has_failed_a_program() -> None:
    @rj.elastic.run
    def train(state: Any) -> None:
        jax.jit(lambda each: rj.allreduce(each, rj.Sum))(jnp.ones(3 + (RANK == 0)))

    with pytest.raises(rr.MismatchError):
        train(rj.elastic.JaxState(step=0))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_travel(called: Any, impl: str) -> None:
    """As keys of their kind; their numbers are those of the ranks that they come from."""
    rank, size = rj.rank(), rj.size()
    draw = lambda keys: [int(jax.random.bits(key)) for key in keys]  # noqa: E731
    mine = jax.random.split(jax.random.key(rank, impl=impl), size)
    all_of_them = [jax.random.split(jax.random.key(each, impl=impl), size) for each in range(size)]
    got = called(lambda key: rj.broadcast({"key": key}, size - 1))(mine)["key"]
    assert jax.random.key_impl(got) == jax.random.key_impl(mine)
    assert draw(got) == draw(all_of_them[-1])
    assert draw(called(rj.allgather)(mine)) == [each for keys in all_of_them for each in draw(keys)]
    assert draw(called(rj.alltoall)(mine)) == [draw(keys)[rank] for keys in all_of_them]
    one = rj.broadcast(jax.random.key(rank, impl=impl))
    assert one.shape == ()
    assert int(jax.random.bits(one)) == int(jax.random.bits(jax.random.key(0, impl=impl)))
    for collective in (rj.allreduce, rj.reducescatter):
        with pytest.raises(rr.UnsupportedBufferError, match=r"jax\.random\.key_data"):
            collective(mine)
    with pytest.raises(rr.UnsupportedBufferError, match="at least one dimension"):
        rj.allgather(mine[0])


def test_arrays_of_foreign_byte_order_are_converted() -> None:
    """As JAX has none; strings are refused by their dtype."""
    rank, size = rj.rank(), rj.size()
    foreign = (np.arange(3) + rank).astype(np.dtype("f4").newbyteorder())
    assert np.asarray(rj.allreduce(foreign, rj.Sum)).tolist() == [size * (i + (size - 1) / 2) for i in range(3)]
    assert np.asarray(rj.broadcast(foreign)).tolist() == [0, 1, 2]
    got = rj.broadcast_parameters({"array": foreign, "number": foreign[0]}, size - 1)
    assert got["array"].tolist() == [size - 1, size, size + 1]
    assert got["number"] == size - 1
    with pytest.raises(rr.UnsupportedBufferError, match="elements of type"):
        rj.allreduce(np.zeros(2, "V4"))
