"""TensorFlow: differing weights, gradients that are no numbers and data that all ranks share are found; steps count."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

tf = pytest.importorskip("tensorflow")

import ringreduce as rr  # noqa: E402
import ringreduce.tensorflow as hvd  # noqa: E402
from ringreduce.runtime.process import PROCESS  # noqa: E402
from ringreduce.testing import caught  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several = pytest.mark.sizes(2, 3, 4)
v1 = tf.compat.v1
_numbers = itertools.count(1)


def train(
    called: Callable[[Any], Any],
    *,
    begin: float = 1.0,
    data: Callable[[int], float] = lambda step: RANK + step,
    after: Callable[[int, Any, Any], object] = lambda step, dense, table: None,
    steps: int = 5,
    local: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Return a dense variable and an embedding after steps; the first begins as given.

    Args:
        called: makes a step of a function.
        begin: of the dense variable.
        data: what gradients are made of, for a step.
        after: is called after each step.
        steps: how many.
        local: whether the dense variable is this rank's own.
        **options: of the tape.
    """
    options.setdefault("num_groups", next(_numbers))  # so that its steps are not those of a tape before
    dense, table = tf.Variable(tf.fill((3, 2), begin), name="dense"), tf.Variable(tf.zeros((5, 2)), name="table")

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(dense * x) + tf.reduce_sum(tf.gather(table, [1, 3]) * x)
        distributed = hvd.DistributedGradientTape(tape, **options)
        if local:
            distributed.register_local_source(dense)
        for variable, gradient in zip((dense, table), distributed.gradient(loss, [dense, table]), strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))

    made = called(step)
    for number in range(steps):
        made(tf.constant(data(number), tf.float32))
        after(number, dense, table)
    return dense, table


@pytest.mark.smoke
@several
def test_rank_0_warns_if_the_ranks_begin_with_different_weights(step: Any, warned: Any) -> None:
    """Once, in the words of TensorFlow; not where programs broadcast after the first step, as Horovod's examples do."""

    def broadcast(step: int, dense: Any, table: Any) -> None:
        if step == 0:
            hvd.broadcast_variables([dense, table], root_rank=0)

    train(step, begin=1.0 + RANK, after=broadcast)
    train(step, begin=1.0 + RANK, local=True)
    train(step, begin=1.0)
    assert not warned("different weights")
    train(step, begin=1.0 + RANK)
    found = warned("begin with different weights (dense:0 for one)")
    assert len(found) == (RANK == 0)
    assert all("broadcast_variables(model.variables, root_rank=0)" in each for each in found)


@several
@pytest.mark.parametrize("way", ["tape", "optimizer"])
def test_weights_in_sessions_are_compared(way: str, warned: Any) -> None:
    """As in functions: a warning if no broadcast came before the second step, by either interface."""
    for begin in (1.0, 1.0 + RANK):
        assert not warned("different weights")
        with tf.Graph().as_default(), v1.Session() as session:
            weights = v1.get_variable("weights", initializer=np.full((3, 2), begin, np.float32), use_resource=True)
            x = v1.placeholder(tf.float32, ())
            optimizer = v1.train.GradientDescentOptimizer(0.1)
            if way == "tape":
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(weights * x)
                distributed = hvd.DistributedGradientTape(tape, num_groups=next(_numbers))
                (gradient,) = distributed.gradient(loss, [weights])
                step = optimizer.apply_gradients([(gradient, weights)])
            else:
                step = hvd.DistributedOptimizer(optimizer).minimize(tf.reduce_sum(weights * x))
            session.run(v1.global_variables_initializer())
            for number in range(4):
                session.run(step, {x: RANK + number})
    assert len(warned("begin with different weights (weights:0 for one)")) == (RANK == 0)


@several
@pytest.mark.parametrize("differ_in", [None, 0, 1, 2, 3])
def test_ranks_that_train_on_the_same_data_are_told(step: Any, differ_in: int | None, warned: Any) -> None:
    """Rank 0 warns once if all gradients were equal in each of the first three steps, and names what divides data."""
    train(step, data=lambda step: float(step + (RANK if step == differ_in else 0)))
    found = warned("train on the same data")
    assert len(found) == (RANK == 0 and differ_in in (None, 3))
    assert all("shard(size(), rank()) of a tf.data.Dataset" in each and "DataLoader" not in each for each in found)


@several
def test_sparse_gradients_alone_show_whether_data_differ(warned: Any) -> None:
    """A model of embeddings: its gradients count, though they are gathered."""
    for same, warnings in ((False, 0), (True, int(RANK == 0))):
        table = tf.Variable(tf.zeros((5, 2 + same)))
        for _ in range(4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, [1, 3])) * (1.0 if same else 1.0 + RANK)
            hvd.DistributedGradientTape(tape, op=hvd.Sum if same else hvd.Average).gradient(loss, [table])
        assert len(warned("train on the same data")) == warnings


@several
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_rates_that_differ_between_ranks_are_told(step: Any, sparse: bool, warned: Any) -> None:
    """Of optimizers of Keras: rank 0 warns once, in step 2, 4, 8 or so on."""
    for other in (0.5, 0.5 - 0.25 * (RANK == 1)):
        assert not warned("hyper-parameters")
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.5))
        table = tf.Variable(tf.ones((5, 2)))
        optimizer.build([table])

        @step
        def make_step(x: Any, table: Any = table, optimizer: Any = optimizer) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((tf.gather(table, [1, 3]) if sparse else table) * x)
            optimizer.apply(tape.gradient(loss, [table]), [table])

        for number in range(9):
            if number == 5:
                optimizer.learning_rate = other
            make_step(tf.constant(float(RANK + number)))
    found = warned("hyper-parameters")
    assert len(found) == (RANK == 0)
    assert all("learning_rate is 0.5 on rank" in each and "0.25 on rank 1." in each for each in found)


@several
@pytest.mark.parametrize("number", [0, 1], ids=["dense", "sparse"])
def test_weights_that_differ_name_the_variable_and_the_rank(checked: None, step: Any, number: int) -> None:
    """RINGREDUCE_CHECK=2: an error on all ranks before the fifth step, as weights are different by then."""

    def after(step: int, *variables: Any) -> None:
        if step == 3 and RANK == SIZE - 1:
            variables[number][1, 0].assign(7.0)

    error = caught(lambda: train(step, after=after, steps=6))
    assert isinstance(error, rr.MismatchError)
    assert "before step 4" in str(error)
    assert f"the values of {('dense', 'table')[number]}:0 have the checksum" in str(error)
    odd = [rank for rank, text in error.values.items() if "unlike most" in text]
    assert odd == ([SIZE - 1] if SIZE > 2 else [])


@several
def test_local_variables_may_differ(checked: None, step: Any) -> None:
    """What a rank has of its own is not compared."""
    dense, _ = train(step, begin=1.0 + RANK, local=True)
    everyone = rr.allgather(dense.numpy()[None])
    assert (everyone[0] != everyone[-1]).all()


@pytest.mark.smoke
@several
def test_what_is_no_number_names_gradient_and_rank(checked: None, step: Any) -> None:
    """RINGREDUCE_CHECK_FINITE=1: an error on all ranks before it is reduced, also where it is sparse."""
    for local, name in ((False, "dense:0"), (True, "table:0")):
        error = caught(lambda: train(step, data=lambda step: np.nan if RANK else 1.0, local=local))  # noqa: B023
        assert isinstance(error, rr.NotFiniteError)
        assert f"gradient of {name} holds NaN or infinity on rank" in str(error)


def test_steps_are_counted_for_top(step: Any) -> None:
    """Each reduction of gradients is a step, whatever the number of ranks."""
    recorder = PROCESS.rank_here().observer.recorder
    before = recorder.steps
    train(step, steps=7)
    assert recorder.steps - before == 7
