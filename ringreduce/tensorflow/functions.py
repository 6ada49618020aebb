"""Make variables and objects equal on all ranks: what a program does once, before it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.common.errors import ConfigError
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.tensorflow.calls import Host, entry, name_of, run, tensors_of
from ringreduce.training.binding.host import HOST
from ringreduce.training.calls import objects
from ringreduce.training.calls.parameters import broadcast_parameters
from ringreduce.training.calls.requests import RequestBuilder


@entry
def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Overwrite variables with the root's. Collective.

    Args:
        variables: of TensorFlow or Keras; names, shapes and dtypes must agree on all ranks, values count at the root
            only. Numbers by which processes tell equal names apart (``dense_1``) may differ.
        root_rank: whose values count, as a rank of the world; must agree.
        process_set: the ranks that take part. Nothing is done on the others.
        inplace: without meaning here, taken for Horovod's sake.

    Returns:
        The operation to run in a session; None in eager mode.
    """
    return tf.group(*(variable.assign(value) for variable, value in _received(variables, root_rank, process_set)))


@entry
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Do what `broadcast_variables` does; return the values as tensors."""
    received = _received(variables, root_rank, process_set)
    with tf.control_dependencies([variable.assign(value) for variable, value in received]):
        return [tf.identity(value) for _, value in received]


def _received(variables: Sequence[Any], root_rank: int, process_set: ProcessSet) -> list[tuple[Any, Any]]:
    """Return variables with the root's values."""
    with RequestBuilder("broadcast_parameters", None, process_set):  # The other ranks call it by this name.
        variables = list(variables)
        values = tensors_of(variables)
        names = [name_of(variable, number) for number, variable in enumerate(variables)]

    def carry_out(arrays: list[Host]) -> list[Host]:
        copies = [np.array(array) for array in arrays]
        broadcast_parameters(HOST, list(zip(names, copies, strict=True)), root_rank=root_rank, process_set=process_set)
        return copies

    # Not after other collectives of a graph: a session runs this one alone.
    specs = [(value.dtype, value.shape) for value in values]
    received = run(carry_out, values, lambda: specs, in_order=False) if variables else []
    return list(zip(variables, received, strict=True))


@entry
def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank the root's object; see `ringreduce.training.calls.objects.broadcast_object`. Collective.

    ``session`` has no meaning here, and is taken for Horovod's sake.
    """
    return objects.broadcast_object(obj, root_rank, name=name, process_set=process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that takes an object and does what `broadcast_object` does."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@entry
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Give every rank the objects of all; see `ringreduce.training.calls.objects.allgather_object`. Collective."""
    return objects.allgather_object(obj, name, process_set)


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that overwrites all variables of a graph of TensorFlow 1 with the root's.

    Raises:
        ConfigError: there is no such graph, as operations are carried out at once.
    """
    if tf.executing_eagerly():
        raise ConfigError(
            "hvd.broadcast_global_variables() does not support eager execution, in which there are no global variables:"
            " use hvd.broadcast_variables(<model/optimizer variables>)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all variables when a monitored session of TensorFlow 1 begins. Estimators are gone from TensorFlow.

    Args:
        root_rank: whose values count.
        device: without meaning here, taken for Horovod's sake.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Make the operation, once for each graph."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        session.run(self.bcast_op)
