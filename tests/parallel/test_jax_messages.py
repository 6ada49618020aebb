"""JAX: messages between two ranks, and the collectives of one root, inside and outside of compiled programs."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import ringreduce as rr  # noqa: E402
import ringreduce.jax as rj  # noqa: E402

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
AFTER, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE
LEFT = rj.PROC_NULL if RANK == 0 else RANK - 1
RIGHT = rj.PROC_NULL if RANK == SIZE - 1 else RANK + 1


@pytest.fixture(params=["eager", "compiled"])
def called_here(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """The first two: a device has programs of its own."""
    return (lambda function: function) if request.param == "eager" else jax.jit  # type: ignore[no-any-return]


def rows(count: int = 7) -> Any:
    return jnp.arange(float(count)) + 100 * RANK


@pytest.mark.smoke
def test_a_ring_of_trees(called: Any) -> None:
    """Each rank gets the tree of the one before it; odd counts, several dtypes, scalars; itself in a world of one."""
    tree = {"a": rows(), "b": [jnp.full((3, 5), RANK, jnp.int32), jnp.float32(RANK), jnp.asarray(RANK, jnp.bfloat16)]}
    made = called(lambda tree: rj.sendrecv(tree, AFTER, tree, BEFORE, tag=3))(tree)
    np.testing.assert_array_equal(made["a"], np.arange(7.0) + 100 * BEFORE)
    np.testing.assert_array_equal(made["b"][0], np.full((3, 5), BEFORE))
    assert made["b"][1] == made["b"][2] == BEFORE
    assert made["b"][2].dtype == jnp.bfloat16


@pytest.mark.smoke
def test_a_row_with_edges(called: Any) -> None:
    """At the edges nothing is sent, and what would come leaves the array as it is."""

    def exchange(mine: Any) -> tuple[Any, Any]:
        from_left = rj.sendrecv(mine, RIGHT, jnp.full(7, -1.0), LEFT)
        return from_left, rj.sendrecv(mine, LEFT, jnp.full(7, -1.0), RIGHT)

    from_left, from_right = called(exchange)(rows())
    np.testing.assert_array_equal(from_left, np.full(7, -1.0) if RANK == 0 else np.arange(7.0) + 100 * (RANK - 1))
    np.testing.assert_array_equal(
        from_right, np.full(7, -1.0) if RANK == SIZE - 1 else np.arange(7.0) + 100 * (RANK + 1)
    )


@pytest.mark.smoke
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("count", [1, 40_001])
def test_one_way(called: Any, count: int) -> None:
    """Rank 0 sends to all others, in one program, though it uses nothing; the last also uses nothing of what it gets.

    The others get it by JAX and by NumPy, and answer by NumPy.
    """
    like = jax.ShapeDtypeStruct((count,), jnp.float32)

    def program(mine: Any) -> Any:
        if RANK == 0:
            for peer in range(1, SIZE):
                rj.send({"a": peer * mine, "b": mine[:1]}, peer)
                rj.send(mine, peer, tag=1)
            return mine
        made = rj.recv({"a": like, "b": mine[:1]}, 0)
        return mine if RANK == SIZE - 1 else made["a"]

    made = called(program)(jnp.full(count, 1.0 + RANK))
    assert (made == (1 if RANK == 0 else RANK if RANK < SIZE - 1 else SIZE)).all()
    if RANK > 0:
        out = np.zeros(count, np.float32)
        rr.recv(out, 0, 1)
        assert (out == 1).all()
        rr.send(out + RANK, 0, 2)
        return
    for peer in range(1, SIZE):
        answer = called(lambda like, peer=peer: rj.recv(like, peer, tag=2))(jnp.zeros(count, jnp.float32))
        assert (answer == 1 + peer).all()


@pytest.mark.smoke
def test_messages_and_collectives_in_loops_conditions_and_vmap(called: Any) -> None:
    """They come in the order of the program, whatever else ranks compute; a mapped message has all of its rows."""

    def body(carry: Any, step: Any) -> tuple[Any, Any]:
        if RANK == 0:  # It has its own later.
            carry = carry + 0 * jnp.linalg.norm(jnp.outer(carry, carry) @ jnp.outer(carry, carry))
        moved = rj.sendrecv(carry, AFTER, carry, BEFORE)
        total = rj.allreduce(moved, rj.Sum)
        kept = jax.lax.cond(
            step > 1, lambda each: rj.sendrecv(each, BEFORE, each, AFTER, tag=1), lambda each: each, moved
        )
        return kept, total.sum()

    def program(mine: Any) -> Any:
        return jax.lax.scan(body, mine, jnp.arange(4))

    kept, totals = called(program)(rows())
    shift = 2  # Two steps move on, and two come back.
    np.testing.assert_array_equal(kept, np.arange(7.0) + 100 * ((RANK - shift) % SIZE))
    assert totals.tolist() == [sum(7 * 100 * rank + 21 for rank in range(SIZE))] * 4
    if jax.default_backend() != "cpu":
        return  # There it has no order under vmap, and JAX refuses it.
    mapped = called(jax.vmap(lambda row: rj.sendrecv(row, AFTER, row, BEFORE)))(jnp.stack([rows(), 2 * rows()]))
    wanted = np.arange(7.0) + 100 * BEFORE
    np.testing.assert_array_equal(mapped, [wanted, 2 * wanted])


@pytest.mark.smoke
def test_gradients_go_back_to_the_sender(called: Any) -> None:
    """The gradient of the sum of all ranks' losses: what was sent gets the gradient of where it went, and its own."""

    def loss(mine: Any) -> Any:
        left = rj.sendrecv(mine, RIGHT, mine, LEFT)
        right = rj.sendrecv(mine, LEFT, 0 * mine, RIGHT)
        return ((RANK + 1) * left**2 + (RANK + 2) * right * mine).sum()

    grads = called(jax.grad(loss))(rows())
    values = [np.arange(7.0) + 100 * rank for rank in range(SIZE)]
    wanted = np.zeros(7)
    if RANK + 1 < SIZE:
        wanted += 2 * (RANK + 2) * values[RANK] + (RANK + 2) * values[RANK + 1]
    if RANK == 0:
        wanted += 2 * values[0]
    if RANK > 0:
        wanted += (RANK + 1) * values[RANK - 1]
    np.testing.assert_allclose(grads, wanted)


@pytest.mark.smoke
@pytest.mark.sizes(2, 3)
def test_what_is_the_same_in_each_step_of_a_loop_is_sent_in_each(called_here: Any) -> None:
    """JAX computes it once, before a loop that it differentiates."""

    def loss(weight: Any, start: Any) -> Any:
        def body(total: Any, step: Any) -> Any:
            if RANK == 0:
                for peer in range(1, SIZE):
                    rj.send(jnp.full(3, 10.0) ** step, peer)
                came = jnp.zeros(3)
            elif RANK == 1:
                came = rj.recv(start, 0)
            else:
                came = rj.recv(jax.ShapeDtypeStruct((3,), jnp.float32), 0)
            return total + weight * (came.sum() + rj.reduce(start + (step if RANK == 0 else 0.0), rj.Sum).sum()), came[
                0
            ]

        return jax.lax.scan(body, 0.0, jnp.arange(4.0))

    if RANK == 0:
        called_here(loss)(2.0, jnp.zeros(3))
        return
    (_, seen), grad = called_here(jax.value_and_grad(loss, has_aux=True))(2.0, jnp.zeros(3))
    assert seen.tolist() == [1, 10, 100, 1000]
    assert grad == 3333


@pytest.mark.smoke
def test_mapped_gradients_of_unlike_losses(called_here: Any) -> None:
    """The gradient of a linear loss is the same in all rows, that of another one is not."""
    values = jnp.stack([rows(), 2 * rows()])
    power = 1 + RANK % 2

    def loss(row: Any) -> Any:
        return (rj.sendrecv(row, AFTER, row, BEFORE) ** power).sum()

    grads = called_here(jax.vmap(jax.grad(loss)))(values)
    wanted = np.ones((2, 7)) if AFTER % 2 == 0 else 2 * np.asarray(values)
    np.testing.assert_allclose(grads, wanted)


@pytest.mark.smoke
@pytest.mark.sizes(2, 3)
def test_one_wrong_array_of_a_tree_leaves_none_behind(called: Any) -> None:
    tree = {"a": jnp.ones(3), "b": jnp.full(2, 5.0)}
    wrong = {"a": jnp.zeros(4), "b": jnp.zeros(2)}
    with pytest.raises(Exception, match="the ranks disagree") as raised:
        called(lambda tree: rj.sendrecv(tree, AFTER, wrong, BEFORE))(tree)
    assert isinstance(rj.error_of(raised.value), rr.MismatchError)
    made = called(lambda each: rj.sendrecv(each, AFTER, each, BEFORE))(jnp.full(2, 9.0))
    assert made.tolist() == [9, 9]


@pytest.mark.smoke
@pytest.mark.parametrize("root", {0, SIZE - 1})
def test_collectives_of_one_root(called: Any, root: int) -> None:
    """Results that the root alone uses; the others get their own arrays back."""
    mine = {"a": rows(), "b": jnp.full((SIZE, 2), RANK, jnp.int32)}

    def program(mine: Any) -> Any:
        total = rj.reduce(mine, rj.Sum, root)
        everything = rj.gather(mine, root)
        part = rj.scatter({"b": mine["b"] + jnp.arange(SIZE)[:, None]}, root)
        return (total, everything, part) if root == RANK else part

    made = called(program)(mine)
    part = made[2] if root == RANK else made
    np.testing.assert_array_equal(part["b"], [[root + RANK] * 2])
    if root == RANK:
        total, everything, _ = made
        np.testing.assert_array_equal(total["a"], sum(np.arange(7.0) + 100 * rank for rank in range(SIZE)))
        np.testing.assert_array_equal(everything["a"], np.concatenate([np.arange(7.0) + 100 * r for r in range(SIZE)]))
        np.testing.assert_array_equal(everything["b"], np.repeat(np.arange(SIZE), SIZE)[:, None] * [1, 1])
    largest = called(lambda each: rj.reduce(each, rj.Max, root))(rows())
    np.testing.assert_array_equal(largest, np.arange(7.0) + 100 * (SIZE - 1 if root == RANK else RANK))
    keys = jax.random.split(jax.random.key(RANK), SIZE)
    given = called(lambda keys: rj.scatter(keys, root))(keys)
    own = jax.random.split(jax.random.key(root), SIZE)[RANK]
    assert (jax.random.key_data(given[0]) == jax.random.key_data(own)).all()


@pytest.mark.smoke
@pytest.mark.parametrize("op", [rj.Sum, rj.Max, rj.Product])
def test_scan(called: Any, op: Any) -> None:
    mine = jnp.arange(1.0, 8.0) * (1 + (RANK * 3) % 4)
    wanted = np.empty(7, np.float32)
    COMM.Scan(np.asarray(mine), wanted, {rj.Sum: MPI.SUM, rj.Max: MPI.MAX, rj.Product: MPI.PROD}[op])
    made = called(lambda each: rj.scan({"a": each, "b": each[:1]}, op))(mine)
    np.testing.assert_array_equal(made["a"], wanted)
    np.testing.assert_array_equal(made["b"], wanted[:1])
    with pytest.raises(Exception, match="scan takes no average"):
        called(lambda each: rj.scan(each, rj.Average))(mine)


@pytest.mark.smoke
@pytest.mark.sizes(2, 3)
def test_what_has_no_gradient_says_so(called: Any) -> None:
    def sends(mine: Any) -> Any:
        rj.send(mine, AFTER)
        return mine.sum()

    for function in (
        sends,
        lambda mine: rj.recv(mine, BEFORE).sum(),
        lambda mine: rj.reduce(mine, rj.Sum).sum(),
        lambda mine: rj.gather(mine).sum(),
        lambda mine: rj.scatter(mine).sum(),
        lambda mine: rj.scan(mine).sum(),
    ):
        with pytest.raises(rr.ConfigError, match="no gradient flows through"):
            jax.jit(jax.grad(function))(jnp.ones(SIZE))
    value, grad = called(jax.value_and_grad(lambda mine: (0 * jax.lax.stop_gradient(rj.scan(mine)) + mine).sum()))(
        jnp.ones(3)
    )
    assert value == 3
    assert grad.tolist() == [1, 1, 1]


@pytest.mark.smoke
@pytest.mark.sizes(2, 3)
def test_wrong_arguments(called: Any) -> None:
    """Each is an error before anything is sent, and what comes then still matches."""
    for wrong in (RANK, SIZE, -1, None, "1"):
        with pytest.raises(rr.ConfigError):
            called(lambda mine, wrong=wrong: rj.send(mine, wrong))(jnp.ones(3))
    for tag in (-1, "x", 1 << 62):
        with pytest.raises(rr.ConfigError, match="tag"):
            rj.recv(jnp.ones(3), rj.PROC_NULL, tag=tag)
    with pytest.raises(rr.ConfigError, match="source must be a whole number"):
        rj.recv(jnp.ones(3), None)
    with pytest.raises(rr.UnsupportedBufferError, match="key_data"):
        rj.send({"a": jax.random.key(1)}, AFTER)
    made = called(lambda: rj.recv({"a": jax.ShapeDtypeStruct((3,), jnp.float32)}, rj.PROC_NULL)["a"] + 1)()
    assert made.tolist() == [1, 1, 1]
    with pytest.raises(rr.UnsupportedBufferError):
        rj.send({"a": "text"}, AFTER)
    with pytest.raises(Exception, match="the ranks disagree") as raised:
        called(lambda mine: rj.sendrecv(mine, AFTER, jnp.zeros(4), BEFORE))(jnp.ones(3))
    assert isinstance(rj.error_of(raised.value), rr.MismatchError)
    np.testing.assert_array_equal(
        called(lambda mine: rj.sendrecv(mine, AFTER, mine, BEFORE))(rows()), rows() + 100 * (BEFORE - RANK)
    )


def waves(rows: int, columns: int, steps: int) -> Any:
    """Return the heights of examples/shallow_water.py, in float64 and without ranks."""
    gravity, depth, coriolis, cell, step = 9.81, 100.0, 2e-4, 5e3, 30.0
    y, x = np.meshgrid(np.arange(rows) - rows / 2, np.arange(columns) - columns / 2, indexing="ij")
    height = np.exp(-(x**2 + y**2) / 50)
    east, north = np.zeros_like(height), np.zeros((rows + 1, columns))  # north has both walls
    for _ in range(steps):
        height -= step * depth / cell * (east - np.roll(east, 1, 1) + np.diff(north, axis=0))
        both = north[1:] + north[:-1]
        northward = (both + np.roll(both, -1, 1)) / 4
        east += step * (coriolis * northward - gravity * (np.roll(height, -1, 1) - height) / cell)
        both = east[1:] + east[:-1]
        eastward = (both + np.roll(both, 1, 1)) / 4
        north[1:-1] -= step * (coriolis * eastward + gravity * np.diff(height, axis=0) / cell)
    return height


@pytest.mark.smoke
@pytest.mark.usefixtures("world")
def test_shallow_water_is_that_of_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of other numbers on some ranks, with halos in a compiled loop."""
    program = Path(__file__).parents[2] / "examples" / "shallow_water.py"
    saved = tmp_path / "heights.npy"
    monkeypatch.setattr(sys, "argv", [str(program), "--rows=31", "--columns=40", "--steps=60", f"--save={saved}"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(program), run_name="__main__")
    if RANK == 0:
        np.testing.assert_allclose(np.load(saved), waves(31, 40, 60), atol=2e-6)
