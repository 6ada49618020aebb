"""JAX: collectives of compiled programs that are not alike on the ranks, as one of them computes more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

import ringreduce as rr  # noqa: E402
import ringreduce.jax as rj  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several = pytest.mark.sizes(2, 3, 4)

_MATRIX = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)

#: Traced once, and called at many places.
total = jax.jit(lambda each: rj.allreduce(each, rj.Sum))
twice = jax.jit(lambda each: total(each) + total(2 * each))


def later(each: Any) -> Any:
    """Return the same values, which rank 0 has later than others: it computes more for them."""
    return each + 0 * jnp.linalg.norm(_MATRIX @ _MATRIX @ _MATRIX @ _MATRIX + each.sum()) if RANK == 0 else each


def _scanned(body: Callable[[Any], Any], rows: Any, **how: Any) -> Any:
    return lax.scan(lambda carry, row: (carry, body(row)), 0, rows, **how)[1]


def _rows(each: Any) -> Any:
    return jnp.stack([each, 10 * each, 100 * each])


def _while(body: Callable[[Any], Any], each: Any) -> Any:
    return lax.while_loop(lambda state: state[0] < 2, lambda state: (state[0] + 1, body(state[1]) / SIZE), (0, each))[1]


@jax.custom_vjp
def _own(each: Any) -> Any:
    return total(each)


_own.defvjp(lambda each: (total(each), None), lambda _, cotangent: (total(cotangent),))


def _pulled(function: Callable[[Any], Any], each: Any) -> Any:
    """Return a gradient that tells the argument: that of half the square of what a sum over the ranks returns."""
    return jax.grad(lambda given: (function(given) ** 2).sum() / 2)(each)


#: Functions of an array of ones times a number that is the same on all ranks; and by which factor they multiply it.
PLACES: dict[str, tuple[Callable[[Any], Any], float]] = {
    "a function under jit": (total, SIZE),
    "a function that calls another one twice": (twice, 3 * SIZE),
    "a line": (lambda each: rj.allreduce(each, rj.Sum), SIZE),
    "several collectives": (lambda each: rj.broadcast(rj.allgather(total(each))[:100]), SIZE),
    "scan": (lambda each: _scanned(total, _rows(each)).sum(0), 111 * SIZE),
    "scan, unrolled": (lambda each: _scanned(total, _rows(each), unroll=3).sum(0), 111 * SIZE),
    "scan, unrolled in part": (lambda each: _scanned(total, _rows(each), unroll=2).sum(0), 111 * SIZE),
    "map": (lambda each: lax.map(total, _rows(each)).sum(0), 111 * SIZE),
    "vmap": (lambda each: jax.vmap(total)(_rows(each)).sum(0), 111 * SIZE),
    "vmap, row by row": (lambda each: jax.vmap(rj.allgather)(_rows(each))[:, :100].sum(0), 111),
    "while_loop": (partial(_while, total), 1),
    "fori_loop": (lambda each: lax.fori_loop(0, 2, lambda _, now: total(now), each), SIZE**2),
    "cond": (lambda each: lax.cond(each[0] > 0, total, lambda now: total(2 * now), each), SIZE),
    "cond within scan": (
        lambda each: _scanned(lambda row: lax.cond(row[0] > 0, total, lambda now: now, row), _rows(each)).sum(0),
        111 * SIZE,
    ),
    "grad": (partial(_pulled, total), SIZE**2),
    "grad of scan": (partial(_pulled, lambda each: _scanned(total, _rows(each))), 10101 * SIZE**2),
    "checkpoint": (partial(_pulled, jax.checkpoint(lambda each: jnp.sqrt(total(each) ** 2))), SIZE**2),
    "custom_vjp": (partial(_pulled, _own), SIZE**2),
    "vjp": (lambda each: jax.vjp(total, each)[1](each)[0], SIZE),
    "jacrev": (lambda each: jax.jacrev(lambda now: total(now).sum())(each) * each, SIZE),
}

#: Those that are tried by default.
SHORT = ["a function under jit", "a line", "scan, unrolled", "cond within scan"]


@several
@pytest.mark.parametrize("place", [pytest.param(each, marks=[pytest.mark.smoke] * (each in SHORT)) for each in PLACES])
def test_values_are_not_mixed_where_a_rank_computes_more(place: str) -> None:
    """In a compiled program, at places that share a function; in the program's order, or XLA's."""
    function, factor = PLACES[place]

    def program(first: Any, second: Any, third: Any) -> Any:
        return function(later(first)), function(second), function(later(third))

    numbers = [1.0, 1e3, 1e6]
    compiled = jax.jit(program)
    for step in range(2):
        made = compiled(*(jnp.full(100, number + step) for number in numbers))
        for number, each in zip(numbers, made, strict=True):
            np.testing.assert_allclose(each, np.full(100, factor * (number + step)), rtol=1e-5)


@several
@pytest.mark.parametrize("how", ["plain", "samples", "int8"])
def test_gradients_of_equal_trees_are_not_mixed_where_a_rank_computes_more(how: str) -> None:
    """Of one transformation under jit, in a program that steps two models."""
    tx = rj.DistributedGradientTransformation(optax.sgd(1.0), **({"compression": "int8"} if how == "int8" else {}))
    more = {"samples": 2} if how == "samples" else {}
    update = jax.jit(lambda grads, state: tx.update(grads, state, grads, **more)[0])
    first, second = {"w": jnp.ones(100)}, {"w": jnp.full(100, 1000.0)}
    state = tx.init(first)
    made = jax.jit(lambda a, b: (update(jax.tree.map(later, a), state), update(b, state)))
    for _ in range(4):  # the first steps look at weights and gradients
        for each, right in zip(made(first, second), (1.0, 1000.0), strict=True):
            np.testing.assert_allclose(each["w"], np.full(100, -right), rtol=1e-2)


@several
def test_a_call_that_a_rank_leaves_out_is_an_error() -> None:
    """As JAX leaves out what nobody uses; the next call of the same function is not taken for it."""
    left = jax.jit(lambda a, b, c: (total(a), [total(b)][RANK:], total(c)))
    with pytest.raises((rr.MismatchError, RuntimeError, ValueError)) as caught:
        left(jnp.ones(3), jnp.full(3, 10.0), jnp.full(3, 100.0))
    assert isinstance(rj.error_of(caught.value), rr.MismatchError)
    np.testing.assert_array_equal(total(jnp.ones(3)), np.full(3, float(SIZE)))


def test_a_program_with_one_collective_is_as_it_was() -> None:
    """It takes no token, and its function none either."""
    text = jax.jit(lambda each: total(each) + 1).lower(jnp.ones(3)).as_text()
    assert "token" not in text
    assert "@ringreduce(" in text
