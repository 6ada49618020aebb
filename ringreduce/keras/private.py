"""Keras's private parts; no other module of this binding touches any.

Each function says what it touches, why nothing public does the same, and what is done without it. Those of optimizers
are in `ringreduce.training.binding.keras_private`, as the binding of TensorFlow uses them, too. All were tried with the
versions in its `TRIED`, on the backends tensorflow, jax and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from ringreduce.common.private_parts import Part, mentions
from ringreduce.training.binding.keras_private import parts_of_optimizers


def forget_state(model: Any) -> None:
    """Let a model on the backend jax not write arrays back into its variables that a failed step has used up.

    By ``_jax_state``; the public ``jax_state_sync`` is what writes them. Without it, Keras raises its own error
    for such arrays, and not that of the step.
    """
    model._jax_state = None


def give_initial_epoch(model: Any, give: Callable[[int], int]) -> None:
    """Let `fit` begin with the epoch that a function makes of the one that `BackupAndRestore` has set, or of 0.

    By ``_initial_epoch``, which that sets; the argument ``initial_epoch`` of `fit` is read before callbacks are
    called. Without it, ranks that do not restore the backup begin with another epoch, which is an error.
    """
    if hasattr(model, "_initial_epoch"):
        model._initial_epoch = give(model._initial_epoch or 0) or None


def layers_of(model: Any) -> list[Any]:
    """Return all layers of a model, those within others included, and the model.

    By ``_flatten_layers``; the public ``layers`` has the outermost ones. Without it, they are looked for in these.
    """
    if hasattr(model, "_flatten_layers"):
        return list(model._flatten_layers())
    return [model, *(inner for layer in getattr(model, "layers", ()) for inner in layers_of(layer))]


def velocities_of(optimizer: Any) -> Sequence[Any]:
    """Return the variables in which an optimizer with momentum has its velocities.

    Some call them ``momentums``, RMSprop ``_momentums``; ``variables`` does not tell which they are. Without these,
    returns none: a changed learning rate does not correct the momentum.
    """
    velocities: Sequence[Any] = getattr(optimizer, "momentums", getattr(optimizer, "_momentums", ()))
    return velocities


def _has_velocities() -> bool:
    kinds = keras.optimizers.SGD, keras.optimizers.RMSprop
    optimizers = [kind(0.5, momentum=0.5) for kind in kinds]
    for optimizer in optimizers:
        optimizer.build([keras.Variable([1.0])])
    return all(velocities_of(optimizer) for optimizer in optimizers)


PARTS = (
    *parts_of_optimizers(keras),
    Part(
        "forget_state",
        lambda: keras.backend.backend() != "jax" or mentions(keras.Model.jax_state_sync, "_jax_state"),
        "on jax, fit() raises another error than that of a failed step",
    ),
    Part(
        "give_initial_epoch",
        lambda: hasattr(keras.Sequential([keras.layers.Identity()]), "_initial_epoch"),
        "BackupAndRestore is needed on all ranks",
    ),
    Part(
        "layers_of",
        lambda: hasattr(keras.Model, "_flatten_layers"),
        "DiLoCoCallback may average statistics of frozen layers",
    ),
    Part("velocities_of", _has_velocities, "momentum_correction of callbacks does nothing"),
)
