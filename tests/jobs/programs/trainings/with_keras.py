"""Random trainings in Keras, on the backend that KERAS_BACKEND names: `Model.train_on_batch` and `Model.fit`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import ringreduce.keras as hvd
from trainings import episodes
from trainings.episodes import RANK, SIZE, Episode

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.02, epsilon=1e-3),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.02, epsilon=1e-3),
    "clipped": lambda: keras.optimizers.Adam(0.02, epsilon=1e-3, global_clipnorm=0.1),
}


def _model(width: int) -> Any:
    rows, x = keras.Input((3,), dtype="int32"), keras.Input((3,))
    seen = keras.layers.Flatten()(keras.layers.Embedding(7, 2)(rows))
    hidden = keras.layers.Dense(width, activation="tanh")(keras.layers.Concatenate()([seen, x]))
    return keras.Model([rows, x], keras.layers.Dense(2)(hidden))


def _dense(optimizer: Any) -> Any:
    """Let an optimizer take dense gradients only: Keras does not add up rows of equal index, as it should."""
    if keras.backend.backend() != "tensorflow":
        return optimizer
    import tensorflow as tf

    class Dense(type(optimizer)):  # type: ignore[misc]
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            return super().apply([tf.convert_to_tensor(each) for each in grads], trainable_variables)

    optimizer.__class__ = Dense
    return optimizer


class Training(episodes.Training):
    """One model over the ranks, and the same in one process, with the data of all ranks."""

    def __init__(self, episode: Episode, number: int) -> None:
        draw = self.draw = episode.draw
        self.episode, self.number = episode, number
        width = draw.choice([1, 5, 40])
        self.model, self.alone = _model(width), _model(width)
        rng = episode.numbers()[0]
        weights = [rng.normal(size=each.shape) for each in self.model.weights]
        self.model.set_weights(weights)
        self.alone.set_weights(weights)
        name = draw.choice([*OPTIMIZERS])
        self.weighs = draw.chance(0.3)
        options: dict[str, Any] = {}
        if draw.chance(0.2):
            options["gradient_predivide_factor"] = 2.0
        if draw.chance(0.3):
            options["sparse_as_dense"] = True
        self.optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](), **options)
        if self.weighs:
            self.optimizer.samples = 1
        self.model.compile(self.optimizer, loss="mse")
        self.alone.compile(_dense(OPTIMIZERS[name]()), loss="mse")
        episode.say(f"model {number}: {name} {options} weighs={self.weighs}")

    def train(self) -> None:
        """Make one step, and compare."""
        if self.episode.draws("model.save", 0.08, can=not self.weighs):
            self._save_and_load()
        sizes = [self.draw.randrange(1, 3) if self.weighs else 2 for _ in range(SIZE)]
        self.episode.hold()
        data = [
            (np.stack([rng.permutation(7)[:3] for _ in range(n)]) % 7, rng.normal(size=(n, 3)), rng.normal(size=(n, 2)))
            for n, rng in zip(sizes, self.episode.numbers(), strict=True)
        ]
        rows, x, target = data[RANK]
        if self.weighs:
            self.optimizer.samples = sizes[RANK]
        self.model.train_on_batch([rows, x], target)
        rows, x, target = map(np.concatenate, zip(*data, strict=True))
        self.alone.train_on_batch([rows, x], target)
        self.compare()

    def _save_and_load(self) -> None:
        """Go on with a model that is loaded from a file, as each rank has saved it."""
        with tempfile.TemporaryDirectory(prefix="model-") as folder:
            self.model.save(f"{folder}/m.keras")
            self.model = hvd.load_model(f"{folder}/m.keras")
        self.optimizer = self.model.optimizer

    def compare(self) -> None:
        """Compare weights; then go on from equal ones, as a training that diverges makes much of rounding errors."""
        found, right = (
            {str(number): value for number, value in enumerate(model.get_weights())}
            for model in (self.model, self.alone)
        )
        self.episode.compare(found, right, 1e-4)  # learning rates are float32, and momentum adds up their errors
        self.alone.set_weights(self.model.get_weights())


def train(episode: Episode, way: str, folder: Path | None) -> int:
    """Train one or two models in turn; return the number of steps."""
    trainings = [Training(episode, number) for number in range(episode.draw.choice([1, 1, 2]))]
    return episodes.train_in_turn(episode, trainings, hvd.shutdown, hvd.init)


def begin() -> None:
    """Begin."""
    keras.backend.set_floatx("float64")
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    hvd.init()
