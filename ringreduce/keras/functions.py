"""Collectives on single values and on variables. What can become a tensor of Keras goes in, a new tensor comes out.

All raise `ConfigError` and `UnsupportedBufferError` for arguments; on all ranks `MismatchError` where these do not
agree; `CollectiveTimeoutError`, `PeerLostError`, `ShutdownError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import keras

from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE
from ringreduce.keras.backends import as_numpy, named_as
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.host import HOST
from ringreduce.training.calls.parameters import broadcast_parameters
from ringreduce.training.calls.requests import Request, RequestBuilder
from ringreduce.training.compression.tensors import wire_format_of
from ringreduce.training.options.options import Op, chosen_op, require_no_op


def _collective(
    kind: str, value: Any, name: str | None, process_set: ProcessSet, request: Callable[[RequestBuilder, Any], Request]
) -> Any:
    with RequestBuilder(kind, name, process_set) as prepare:
        result = request(prepare, as_numpy(value))
    return keras.ops.convert_to_tensor(result.carry_out())


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | None = None,
    compression: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a value over the ranks, element by element. Collective.

    Args:
        value: of any shape; shape and dtype must agree.
        name: matches it with the other ranks' calls; None: calls match in order.
        average: older form of ``op``.
        prescale_factor, postscale_factor: multiply what goes in, and the result; must agree.
        op: `Average`, `Sum`, `Min`, `Max`, `Product`, `Adasum` or `ReproducibleSum`; None: `Average`. Must agree.
        compression: as for `DistributedOptimizer`.
        process_set: the ranks that take part.
    """

    def request(prepare: RequestBuilder, array: Any) -> Request:
        kind = chosen_op(op, average)
        if op is None and average is None:
            require_no_op(name)
        targets = prepare.new_like([array])
        wire = wire_format_of(compression)
        return prepare.allreduce(
            [array],
            targets,
            kind,
            prescale_factor,
            postscale_factor,
            lambda: targets[0],
            None if wire is None else wire.wire,
        )

    return _collective("allreduce", value, name=name, process_set=process_set, request=request)


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the ranks' values along the first dimension, which may differ, in rank order. Collective.

    Args:
        value: of at least one dimension; the others and the dtype must agree.
        name, process_set: as for `allreduce`.
    """

    def request(prepare: RequestBuilder, array: Any) -> Request:
        return prepare.allgather([array], itemgetter(0))

    return _collective("allgather", value, name=name, process_set=process_set, request=request)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the root's value. Collective.

    Args:
        value: of any shape; shape and dtype must agree.
        root_rank: the sender, as a rank of the world; must agree.
        name, process_set: as for `allreduce`.
    """

    def request(prepare: RequestBuilder, array: Any) -> Request:
        return prepare.broadcast(array, process_set.rank_of(root_rank))

    return _collective("broadcast", value, name=name, process_set=process_set, request=request)


def reducescatter(
    value: Any, name: str | None = None, op: Op = AVERAGE, process_set: ProcessSet = global_process_set
) -> Any:
    """Reduce a value over the ranks and return this rank's part. Collective.

    Args:
        value: cut along the first dimension as `numpy.array_split` does; shape and dtype must agree.
        op: as for `allreduce`, but not `Adasum` and `ReproducibleSum`; must agree.
        name, process_set: as for `allreduce`.
    """

    def request(prepare: RequestBuilder, array: Any) -> Request:
        return prepare.reducescatter([array], op, 1.0, 1.0, itemgetter(0))

    return _collective("reducescatter", value, name=name, process_set=process_set, request=request)


def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite variables with the root's. Collective; outside of compiled functions.

    Args:
        variables: of a model (``model.weights``) or an optimizer (``optimizer.variables``); the same names, shapes and
            dtypes on all ranks, in the same order. Numbers by which Keras tells layers apart (``dense_1``) may differ.
        root_rank: whose values count, as a rank of the world; must agree.
        process_set: the ranks that take part. Nothing is done on the others.

    Raises:
        UnsupportedBufferError: a variable is of strings.
        MismatchError: the variables differ between ranks in more than their values; nothing was overwritten then.
    """
    with RequestBuilder("broadcast_parameters", None, process_set):
        listed = list(variables)
        names = [named_as(variable, number) for number, variable in enumerate(listed)]
        named = [(name, as_numpy(variable, name)) for name, variable in zip(names, listed, strict=True)]
    broadcast_parameters(HOST, named, root_rank=root_rank, process_set=process_set)
    for variable, (_, array) in zip(listed, named, strict=True):
        variable.assign(array)


def without(some: Iterable[Any], variables: Iterable[Any]) -> list[Any]:
    """Return variables without some of them, each once."""
    left_out = set(map(id, some))
    return list({id(variable): variable for variable in variables if id(variable) not in left_out}.values())


def broadcast_global_variables(root_rank: int) -> None:
    """Raise the error that says what to do: there are no global variables since Keras 3.

    Args:
        root_rank: whose values would count.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "Keras 3 has no global variables: give Model.fit the callback "
        f"callbacks.BroadcastGlobalVariablesCallback({root_rank}), or call broadcast_variables(model.weights, "
        f"{root_rank})"
    )
