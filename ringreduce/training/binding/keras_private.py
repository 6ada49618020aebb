"""Private parts of Keras's optimizers, which two bindings use: that of Keras, and that of TensorFlow as ``tf.keras``.

Each function says what it touches, why nothing public does the same, and what is done without it. It imports nothing:
it is given optimizers, and for the table of parts the library. All were tried with the versions in `TRIED`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ringreduce.common.errors import ConfigError
from ringreduce.common.private_parts import Part, lacking

#: The versions of Keras with which all of this was tried; the tests run with the last one.
TRIED = ("3.12.0", "3.15.1")


def _lacking(part: str, instead: str) -> ConfigError:
    version = getattr(sys.modules.get("keras"), "__version__", "of this version")
    return lacking(library="Keras", version=version, part=part, instead=instead)


def learning_rate_of(optimizer: Any) -> Any:
    """Return an optimizer's schedule, variable or function for the learning rate.

    The public ``learning_rate`` is what a schedule makes of a step that TensorFlow may have counted on some ranks
    already. Without ``_learning_rate``, returns None: learning rates are not compared between ranks.
    """
    return getattr(optimizer, "_learning_rate", None)


def passes_made(optimizer: Any) -> Any:
    """Return the variable that counts calls of an optimizer's ``apply``; its ``iterations`` counts steps.

    Without ``_iterations``, that is found by its name.

    Raises:
        ConfigError: there is none.
    """
    if hasattr(optimizer, "_iterations"):
        return optimizer._iterations
    found = [each for each in optimizer.variables if each.name == "iteration"]
    if not found:
        raise _lacking("Optimizer._iterations", instead="use no gradient_accumulation_steps")
    return found[0]


def trained_variables(optimizer: Any) -> Sequence[Any]:
    """Return the variables with which an optimizer was built; ``variables`` has only those that it made itself.

    Raises:
        ConfigError: this version has no ``_trainable_variables``.
    """
    found: Sequence[Any] | None = getattr(optimizer, "_trainable_variables", None)
    if found is None:
        raise _lacking("Optimizer._trainable_variables", instead="give apply() the variables, and scale no losses")
    return found


def accumulated(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the variables in which an optimizer adds up gradients until it makes a step.

    They are in ``variables``, and nothing public tells which they are. Without ``_get_variable_index``, they are taken
    to be in the order of `trained_variables`.

    Raises:
        ConfigError: this version has no ``_accumulated_gradients``.
    """
    kept: Sequence[Any] | None = getattr(optimizer, "_accumulated_gradients", None)
    if kept is None:
        raise _lacking("Optimizer._accumulated_gradients", instead="use no gradient_accumulation_steps")
    if hasattr(optimizer, "_get_variable_index"):
        return [kept[optimizer._get_variable_index(each)] for each in variables]
    places = {id(each): place for place, each in enumerate(trained_variables(optimizer))}
    return [kept[places[id(each)]] for each in variables]


def setting_object() -> Any:
    """Return the object whose method sets the attribute for which the caller, a ``__setattr__``, runs; None if none.

    By the stack: an optimizer is not told that another one, which scales losses, is put around it. Without a ``self``
    there, such a one is not recognised: wrap it by DistributedOptimizer, and not the optimizer in it.
    """
    return sys._getframe(2).f_locals.get("self")


def set_class(instance: Any, kind: type) -> None:
    """Set the class of an object whose own ``__class__`` is a property that cannot be set, by that of `object`."""
    vars(object)["__class__"].__set__(instance, kind)


def parts_of_optimizers(keras: Any) -> tuple[Part, ...]:
    """Return the parts above that have names.

    Args:
        keras: the library.
    """

    def has(*names: str) -> bool:
        optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
        optimizer.build([keras.Variable([1.0])])
        return all(hasattr(optimizer, name) for name in names)

    accumulation = "gradient_accumulation_steps and backward_passes_per_step cannot be used"
    return (
        Part("learning_rate_of", lambda: has("_learning_rate"), "learning rates are not compared between ranks"),
        Part("passes_made", lambda: has("_iterations"), accumulation),
        Part(
            "trained_variables", lambda: has("_trainable_variables"), "apply() needs variables, and no loss is scaled"
        ),
        Part("accumulated", lambda: has("_accumulated_gradients", "_get_variable_index"), accumulation),
    )
