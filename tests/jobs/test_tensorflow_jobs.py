"""TensorFlow and Keras in jobs of their own: ranks that die, results in flight when the world ends, forked children."""

from __future__ import annotations

import sys

import launching
import pytest
from launching import RINGREDUCE, Job, needs

needs("tensorflow", "keras")

TENSORFLOW = """
import os, signal, threading
import tensorflow as tf
import ringreduce as rr, ringreduce.tensorflow as hvd

hvd.init()
me = hvd.rank()
"""
KERAS = """
import os, signal, threading
import keras, numpy as np
import ringreduce as rr, ringreduce.keras as hvd

hvd.init()
me = hvd.rank()
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), op=hvd.Sum)
model.compile(optimizer, loss=lambda _, made: keras.ops.sum(made))  # whose gradient is the number of rows
one = np.ones((1, 1), "float32")
"""

on_each_backend = pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])


def elastic(source: str, **environment: str) -> Job:
    """Run a program on three ranks, in a job that survives the death of one."""
    words = ("-x", "RINGREDUCE_TIMEOUT=10", sys.executable, "-c", source)
    return launching.run(RINGREDUCE, "run", "--elastic", "-np", 3, *words, limit_s=90, **environment)


DYING_STEP = """
weights = tf.Variable(tf.zeros(3))

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights)
    weights.assign_sub(0.5 * hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, weights))

@hvd.elastic.run
def train(state):
    while state.number < 5:
        if (me, state.number) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        step()
        state.number += 1
        state.commit()

train(hvd.elastic.TensorFlowState([weights], number=0))
print(hvd.size(), float(weights[0]))
"""


def test_training_goes_on_when_a_rank_dies_in_a_step() -> None:
    """Two steps of three ranks and three of two, each of which takes half of the number of ranks."""
    done = elastic(TENSORFLOW + DYING_STEP).well()
    assert done.stdout.splitlines() == ["2 -6.0"] * 2


DYING_FIT = """
class Dying(keras.callbacks.Callback):
    def on_batch_begin(self, batch, logs=None):
        if (me, state.epoch) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)

@hvd.elastic.run
def train(state):
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        Dying(),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    state.model.fit(one, one, epochs=5 - state.epoch, callbacks=callbacks, verbose=0)

state = hvd.elastic.KerasState(model, epoch=0)
train(state)
print(hvd.size(), state.epoch, float(model.get_weights()[0].item()))
"""


@on_each_backend
def test_fit_goes_on_when_a_rank_dies(backend: str) -> None:
    """The epochs that are committed are not trained again, on any backend."""
    done = elastic(KERAS + DYING_FIT, KERAS_BACKEND=backend).well()
    assert done.stdout.splitlines() == ["2 5 -6.0"] * 2


IN_FLIGHT = """
from mpi4py import MPI

class Watch(rr.Instrument):
    def operation_announced(self, name):
        begun.set()

def wait(call):
    try:
        call()
    except (rr.ShutdownError, rr.PeerLostError):  # of this rank's end, or of the other's, if that has come first
        print("ended")

for call in calls:
    hvd.init()
    call()  # what comes before the first operation is no operation
    if me == 0:
        begun, thread = threading.Event(), threading.Thread(target=wait, args=(call,))
        rr.global_process_set.engine.communicator.instruments.add(Watch())
        thread.start()
        begun.wait()
    MPI.COMM_WORLD.Barrier()
    hvd.shutdown()
    if me == 0:
        thread.join()
"""
CALLS = "calls = [lambda: hvd.allreduce(tf.ones(3)), lambda: tf.function(hvd.allreduce)(tf.ones(3))]"
STEPS = """
guard = hvd.callbacks.MetricAverageCallback()
calls = [lambda: hvd.allreduce(one), lambda: model.fit(one, one, callbacks=[guard], verbose=0)]
"""


def test_a_result_in_flight_ends_with_shutdown() -> None:
    """In a typed error, of an eager operation and of one in a `tf.function`; nothing hangs."""
    assert launching.run_job(2, "-c", TENSORFLOW + CALLS + IN_FLIGHT).well().stdout == "ended\n" * 2


@on_each_backend
def test_a_step_in_flight_ends_with_shutdown(backend: str) -> None:
    """So do a single value, and a step of `fit`."""
    assert launching.run_job(2, "-c", KERAS + STEPS + IN_FLIGHT, KERAS_BACKEND=backend).well().stdout == "ended\n" * 2


FORKED = """
reduce()
child = os.fork()
if not child:
    try:
        reduce()
    except rr.ConfigError as error:
        os._exit(7 if "forked" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), reduce())
"""
IN_TENSORFLOW = """
ones = tf.ones(3)
reduce = lambda: float(hvd.allreduce(ones, op=hvd.Sum)[0])
"""
IN_KERAS = "reduce = lambda: float(hvd.allreduce(one, op=hvd.Sum)[0, 0])"


@pytest.mark.parametrize("program", [TENSORFLOW + IN_TENSORFLOW, KERAS + IN_KERAS], ids=["tensorflow", "keras"])
def test_a_forked_child_cannot_reduce_and_its_rank_goes_on(program: str) -> None:
    """With the usual error, in the child alone."""
    assert launching.run_job(2, "-c", program + FORKED).well().stdout == "7 2.0\n" * 2


DEVICES = """
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
with tf.device("CPU:1"):
    mine = tf.fill([3], me + 1.0)
    made = [hvd.allreduce(mine, op=hvd.Sum), tf.function(lambda each: hvd.allreduce(each, op=hvd.Sum))(mine)]
print(mine.device[-1], *(float(tf.reduce_sum(each)) for each in made))
"""


def test_tensors_of_another_device_travel() -> None:
    """One that TensorFlow makes of the host: at once, and in a function that is placed there."""
    assert launching.run_job(2, "-c", TENSORFLOW + DEVICES).well().stdout == "1 9.0 9.0\n" * 2
