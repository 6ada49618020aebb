"""Random trainings in TensorFlow: tapes and optimizers of Keras, at once and in graphs."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import ringreduce.tensorflow as hvd
from trainings import episodes
from trainings.episodes import RANK, SIZE, Episode

Numbers = dict[str, np.ndarray]


def _loss(variables: dict[str, tf.Variable], data: Any) -> tf.Tensor:
    x, target, rows = data
    hidden = tf.tanh(x @ variables["body"] + variables["bias"])
    seen = tf.gather(variables["table"], rows)
    fit = tf.reduce_mean((hidden @ variables["head"] - target) ** 2) + tf.reduce_sum(seen * target[:1])
    return fit + variables["scalar"] ** 2 + tf.reduce_sum(variables["empty"])


def _data(rng: np.random.Generator) -> tuple[tf.Tensor, ...]:
    numbers = rng.normal(size=(4, 3)), rng.normal(size=(4, 2)), rng.permutation(7)[:3]
    return tuple(map(tf.constant, numbers))


def _variables(rng: np.random.Generator, width: int) -> dict[str, tf.Variable]:
    shapes = {"body": (3, width), "bias": (width,), "head": (width, 2), "table": (7, 2), "scalar": (), "empty": (0,)}
    return {name: tf.Variable(rng.normal(size=shape), name=name) for name, shape in shapes.items()}


OPTIMIZERS = {
    "SGD": lambda: tf.keras.optimizers.SGD(0.1),
    "momentum": lambda: tf.keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: tf.keras.optimizers.Adam(0.02, epsilon=1e-3),
    "Adagrad": lambda: tf.keras.optimizers.Adagrad(0.1),
    "RMSprop": lambda: tf.keras.optimizers.RMSprop(0.02, epsilon=1e-3),
}


class Training(episodes.Training):
    """One model over the ranks, and the same in one process."""

    def __init__(self, episode: Episode, number: int) -> None:
        draw = self.draw = episode.draw
        self.episode, self.number = episode, number
        rng, width = episode.numbers()[0], draw.choice([1, 5, 40])
        self.mine = _variables(rng, width)
        self.alone = {name: tf.Variable(each) for name, each in self.mine.items()}
        name = draw.choice([*OPTIMIZERS])
        self.optimizer, self.reference = OPTIMIZERS[name](), OPTIMIZERS[name]()
        self.wraps = draw.choice(["tape", "optimizer"])
        self.weighs = draw.chance(0.3)
        self.staleness = draw.choice([0, 0, 1, 2]) if self.wraps == "optimizer" and not self.weighs else 0
        self.late: deque[list[Any]] = deque()
        options: dict[str, Any] = {"sparse_as_dense": True if self.staleness else draw.chance(0.3)}
        if draw.chance(0.2) and not self.staleness:
            options["gradient_predivide_factor"] = 2.0
        if self.wraps == "optimizer":
            late = {"staleness": self.staleness} if self.staleness else {}
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, **options, **late)
        self.options = options
        graph = draw.chance(0.5)
        self.run = tf.function(self._step) if graph else self._step
        episode.say(f"model {number}: {name} by {self.wraps} {options} late={self.staleness} graph={graph}")
        hvd.broadcast_variables(list(self.mine.values()), root_rank=0)

    def _step(self, data: Any, samples: Any) -> None:
        trained = list(self.mine.values())
        with tf.GradientTape() as tape:
            loss = _loss(self.mine, data)
        if self.wraps == "tape":
            weights = {"samples": samples} if self.weighs else {}
            gradients = hvd.DistributedGradientTape(tape, **self.options).gradient(loss, trained, **weights)
        else:
            gradients = tape.gradient(loss, trained)
        self.optimizer.apply_gradients(zip(gradients, trained, strict=True))

    def train(self) -> None:
        """Make one step, and compare."""
        samples = [self.draw.randrange(1, 9) for _ in range(SIZE)]
        weights = [n / sum(samples) if self.weighs else 1 / SIZE for n in samples]
        self.episode.hold()
        data = [_data(rng) for rng in self.episode.numbers()]
        if self.weighs and self.wraps == "optimizer":
            self.optimizer.samples = samples[RANK]
        self.run(data[RANK], tf.constant(samples[RANK]))
        trained = list(self.alone.values())
        with tf.GradientTape() as tape:
            loss = tf.add_n([_loss(self.alone, each) * weight for each, weight in zip(data, weights, strict=True)])
        self.late.append([tf.convert_to_tensor(each) for each in tape.gradient(loss, trained)])
        zeros = [tf.zeros_like(each) for each in trained]
        due = self.late.popleft() if len(self.late) > self.staleness else zeros
        self.reference.apply_gradients(zip(due, trained, strict=True))
        self.compare()

    def leave(self) -> None:
        """Apply what is late."""
        self.finish()

    def finish(self) -> None:
        """Apply what is late."""
        if self.staleness:
            self.optimizer.synchronize()
        while self.late:
            self.reference.apply_gradients(zip(self.late.popleft(), self.alone.values(), strict=True))
        self.compare()

    def compare(self) -> None:
        """Compare weights; then go on from equal ones, as a training that diverges makes much of rounding errors."""
        found, right = ({name: each.numpy() for name, each in all_.items()} for all_ in (self.mine, self.alone))
        self.episode.compare(found, right, 1e-5)  # learning rates of Keras are float32
        for name, each in self.alone.items():
            each.assign(self.mine[name])


def train(episode: Episode, way: str, folder: Path | None) -> int:
    """Train one or two models in turn; return the number of steps."""
    trainings = [Training(episode, number) for number in range(episode.draw.choice([1, 1, 2]))]
    return episodes.train_in_turn(episode, trainings, hvd.shutdown, hvd.init)


def begin() -> None:
    """Begin."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
