"""Functions of NumPy arrays on tensors: at once, in a `tf.function` or in a session; errors of ours stay what they are.

TensorFlow makes an `UnknownError` of what Python raises inside of a graph, with its text alone. Here it makes the error
itself of that text. Those that programs catch in Horovod's place are TensorFlow's as well: a `MismatchError` is a
`tf.errors.FailedPreconditionError`, what is wrong with arguments a `tf.errors.InvalidArgumentError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from ringreduce.common.errors import ConfigError, MismatchError, RingReduceError, UnsupportedBufferError
from ringreduce.tensorflow.private import (
    control_flow_of,
    creation_number,
    error_fields,
    is_for_xla,
    make_unknown_errors_by,
    possible_gradients,
)
from ringreduce.training.binding.error_text import described, original
from ringreduce.training.binding.identity import ScopedName, counters

Host = npt.NDArray[Any]
#: Dtype and shape of a result.
Spec = tuple[Any, Any]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_ALIGNMENT = 64  # For memory that is not TensorFlow's: ops abort the process if it begins elsewhere.
_NOT_DENSE: Sequence[tuple[type, str]] = (
    (tf.RaggedTensor, "make it dense by .to_tensor(), or send its .flat_values and its .row_lengths()"),
    (tf.SparseTensor, "make it dense by tf.sparse.to_dense(...)"),
)
_NO_NUMBERS = tf.string, tf.resource, tf.variant
_SHAREABLE = frozenset(  # Names of dtypes that DLPack shares.
    np.dtype(code).name for code in [*np.typecodes["AllInteger"], *"efdFD"]
)

# ---- errors ----

_KINDS: Sequence[tuple[Any, type, int]] = (
    (MismatchError, tf.errors.FailedPreconditionError, tf.errors.FAILED_PRECONDITION),
    (ConfigError, tf.errors.InvalidArgumentError, tf.errors.INVALID_ARGUMENT),
    (UnsupportedBufferError, tf.errors.InvalidArgumentError, tf.errors.INVALID_ARGUMENT),
)


def _made(cls: Any, node: Any = None, op: Any = None, message: Any = "", *more: Any) -> BaseException:
    """Make an error of TensorFlow's; if its text is that of ours, return that one."""
    if isinstance(node, BaseException):  # Python asks twice
        return node
    return original(str(message)) or Exception.__new__(cls, node, op, message, *more)


make_unknown_errors_by(_made)


@lru_cache
def _both(ours: Any, theirs: type) -> type:
    """Return the class of errors of two classes."""

    def reduced(error: Any) -> Any:
        return (ours, *ours.__reduce__(error)[1:])

    methods = {"__new__": _made, "__init__": lambda *given: None, "__str__": ours.__str__, "__reduce__": reduced}
    return type(ours.__name__, (ours, theirs), {"__module__": ours.__module__, **methods})


def _translated(error: BaseException) -> BaseException:
    """Make an error of ours one of TensorFlow's as well."""
    for ours, theirs, code in _KINDS:
        if isinstance(error, ours) and not isinstance(error, tf.errors.OpError):
            error.__dict__.update(error_fields(described(error), code))
            error.__class__ = _both(type(error), theirs)  # type: ignore[arg-type]
    return error


def entry(function: _Function) -> _Function:
    """Decorate what programs call: AutoGraph leaves it alone, and its errors are TensorFlow's as well."""

    @wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RingReduceError as error:
            _translated(error)
            raise

    return tf.autograph.experimental.do_not_convert(entered)  # type: ignore[no-any-return]


# ---- tensors ----


def tensors_of(values: Sequence[Any]) -> list[tf.Tensor]:
    """Return tensors of what can be one; see `tensor_of`."""
    return [tensor_of(value, number) for number, value in enumerate(values)]


def tensor_of(value: Any, number: int) -> tf.Tensor:
    """Return a tensor of what can be one: a variable, an array, a number.

    Args:
        value: that of a list, for example.
        number: its place in the list, for the error.

    Raises:
        UnsupportedBufferError: it is ragged or sparse, or of other elements than numbers.
    """
    require_dense(value, name_of(value, number))
    try:
        tensor = value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise UnsupportedBufferError(f"{name_of(value, number)} is no tensor, and becomes none: {error}") from error
    if tensor.dtype in _NO_NUMBERS:
        raise UnsupportedBufferError(
            f"{name_of(value, number)} is of type {tensor.dtype.name}, which no collective takes: encode strings as "
            "numbers, or use broadcast_object or allgather_object"
        )
    return tensor


def require_dense(value: Any, name: str) -> None:
    """Raise `UnsupportedBufferError` if a value of this name is a ragged or a sparse tensor."""
    for kind, remedy in _NOT_DENSE:
        if isinstance(value, kind):
            raise UnsupportedBufferError(f"{name} is a tf.{kind.__name__}, which no collective takes: {remedy}")


def _tensor(array: Any) -> tf.Tensor:
    """Return a tensor of an array that nobody writes to while it is there: on its memory, where that is possible."""
    if isinstance(array, np.ndarray) and array.dtype.name in _SHAREABLE and array.size:
        interface = array.__array_interface__
        address, read_only = interface["data"]
        if address % _ALIGNMENT == 0 and not read_only and interface["strides"] is None:
            return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.constant(array)


def _array(tensor: tf.Tensor) -> Host:
    """Return a view of a tensor, if it is in host memory."""
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())  # A scalar of bfloat16 cannot be read otherwise.


def is_variable(value: Any) -> bool:
    """Return whether this is a variable of TensorFlow or Keras, and no tensor."""
    return hasattr(value, "assign")


def path_of(variable: Any) -> str:
    """Return the name of a variable, which may differ between ranks in what each process has counted."""
    return str(getattr(variable, "path", None) or variable.name)


def made_as(variable: Any) -> tuple[int, ...]:
    """Return numbers that are greater for a variable that was made later, of two of the same name."""
    return (*counters(path_of(variable)), creation_number(variable))


def name_of(variable: Any, number: int) -> str:
    """Return the name of a variable, which is the same on all ranks; of a tensor, its number."""
    return ScopedName(path_of(variable)) if is_variable(variable) else f"tensor {number}"


def reader_of(variables: Sequence[Any]) -> Callable[[], list[Host | None]]:
    """Return what returns the values of variables whenever a function of `run` asks; None for tensors.

    Nothing is read before. In a graph of TensorFlow 1 values are those of a session; see `values_when`.
    """
    return lambda: [np.asarray(variable.numpy()) if hasattr(variable, "assign") else None for variable in variables]


def is_of_session() -> bool:
    """Return whether what is called now becomes a part of a graph of TensorFlow 1, also within a branch of it."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def values_when(due: Callable[[], bool], variables: Sequence[Any]) -> list[tf.Tensor]:
    """Return tensors of the values of variables in a graph of TensorFlow 1; without elements unless they are due.

    Args:
        due: is asked whenever the graph runs.
        variables: or tensors.
    """
    asked = tf.numpy_function(lambda: np.array(due()), [], tf.bool, stateful=True)
    asked.set_shape([])
    given = tensors_of(variables)
    made = tf.cond(
        asked, lambda: [tf.identity(value) for value in given], lambda: [tf.zeros([0], value.dtype) for value in given]
    )
    return list(made) if isinstance(made, (list, tuple)) else [made]


def any_rows(tensor: tf.Tensor) -> tf.TensorShape:
    """Return the shape of a tensor with any number of rows."""
    return tf.TensorShape([None]).concatenate(tensor.shape[1:])


def are_recorded(tensors: Sequence[tf.Tensor]) -> bool:
    """Return whether a gradient may be asked for of what becomes of these."""
    return not tf.executing_eagerly() or possible_gradients(tensors) != 0


def traced_name(kind: str) -> str | None:
    """Return a name for a collective of the graph that is being made, the same on all ranks; None: it runs at once.

    On which thread, and in which order, the collectives of a graph run is up to TensorFlow. The line from which a
    function is called when its graph is made differs between ranks, if some make it again.
    """
    if tf.executing_eagerly():
        return None
    graph = outermost = tf.compat.v1.get_default_graph()
    while outermost.building_function and getattr(outermost.outer_graph, "building_function", False):
        outermost = outermost.outer_graph
    return f"{graph.unique_name(kind)} of {getattr(outermost, 'name', 'the graph')}"


def run(
    function: Callable[[list[Host]], Sequence[Any]],
    tensors: Sequence[tf.Tensor],
    specs: Callable[[], Sequence[Spec]],
    *,
    in_order: bool = True,
) -> list[tf.Tensor]:
    """Return what a function makes of tensors: now, or whenever the graph that is being made runs.

    Args:
        function: takes arrays, which it only reads, and returns others, of which nobody else writes to the memory; at
            once, also None for None.
        tensors: of any number.
        specs: returns the specs of the results, at least one, for a graph.
        in_order: whether it runs after those that were added to a graph of TensorFlow 1 before. (In a `tf.function`
            all do.) Else threads of a session could wait for different ones on each rank. What comes before is run,
            too, whenever this is.

    Raises:
        ConfigError: XLA is to compile the graph.
    """
    if tf.executing_eagerly():
        made = function(list(map(_array, tensors)))
        return [None if result is None else _tensor(result) for result in made]

    def call(*arrays: Any) -> list[Any]:
        try:
            return list(function([np.asarray(array) for array in arrays]))
        except BaseException as error:
            raise RuntimeError(described(_translated(error))) from error

    graph = tf.compat.v1.get_default_graph()
    results = list(specs())
    if is_for_xla(graph):
        raise ConfigError(
            "XLA cannot compile operations of ringreduce, which run on the host, in Python: use jit_compile=False for "
            "the function or the model"
        )
    before: list[Any] = []
    if in_order and not graph.building_function:
        before = graph.get_collection_ref(f"ringreduce {control_flow_of(graph)}")
    with graph.control_dependencies(before):
        made = tf.numpy_function(call, list(tensors), [dtype for dtype, _ in results], stateful=True)
    before[:] = [made[0].op]
    for tensor, (_, shape) in zip(made, results, strict=True):
        tensor.set_shape(shape)
    return list(made)
