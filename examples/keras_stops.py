"""Stop a `fit` of Keras within an epoch, and go on with the next batch.

    KERAS_BACKEND=tensorflow ringreduce run --elastic -np 2 python examples/keras_stops.py

After SIGTERM the ranks write a commit and end with status 75; started again, the job goes on from it. The state counts
the steps. Each epoch is a `fit` of its remaining batches, in an order that its number decides. `CommitStateCallback`
commits after each batch, and so asks whether to stop.
"""

from __future__ import annotations

import keras
import numpy as np

import ringreduce.keras as hvd

ROWS, EPOCHS = 4, 3
hvd.init()
x = np.random.default_rng(hvd.rank()).standard_normal((20, 7)).astype("float32")
y = np.sin(x[:, :3])
BATCHES = len(x) // ROWS
keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(3)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), loss="mse")


class Counts(keras.callbacks.Callback):
    """Counts the steps."""

    def on_train_batch_end(self, batch, logs=None):
        state.step += 1


@hvd.elastic.run
def train(state):
    while state.step < EPOCHS * BATCHES:
        epoch, done = divmod(state.step, BATCHES)
        left = np.random.default_rng(epoch).permutation(len(x))[done * ROWS :]
        callbacks = [Counts(), hvd.elastic.CommitStateCallback(state)]
        epochs = {"initial_epoch": epoch, "epochs": epoch + 1}
        model.fit(x[left], y[left], batch_size=ROWS, shuffle=False, callbacks=callbacks, verbose=0, **epochs)


state = hvd.elastic.KerasState(model, step=0)
state.keep_on_disk("commits", every=1000)
train(state)
