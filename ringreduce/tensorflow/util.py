"""What Horovod's programs import from ``horovod.tensorflow.util``."""

from typing import Any

import tensorflow as tf

_executing_eagerly = tf.executing_eagerly


def vars_to_refs(vars: Any) -> Any:
    """Return hashable references to variables, in the structure in which these are."""
    return tf.nest.map_structure(lambda variable: variable.ref(), tuple(vars) if isinstance(vars, list) else vars)


def refs_to_vars(refs: Any) -> Any:
    """Return the variables of references."""
    return tf.nest.map_structure(lambda reference: reference.deref(), refs)
