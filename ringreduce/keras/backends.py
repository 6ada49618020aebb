"""What depends on the backend of Keras: how gradients are reduced, and how `fit` raises the error of a failed step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import keras
import numpy as np

from ringreduce.buffers.codecs import CODECS
from ringreduce.common.arguments import real_number
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, SUM
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.compression import WireFormat
from ringreduce.training.optimizer import ListTraining
from ringreduce.training.requests import Op, chosen_op, require_process_set

#: Takes gradients and their variables; returns the averages or sums.
Reduce = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]

_KIND = "DistributedOptimizer"


class Reduction(NamedTuple):
    """How gradients are reduced.

    Attributes:
        op: `AVERAGE` or `SUM`.
        wire: the format in which floats travel between nodes; None: as they are.
        predivide: averages are divided by this before they are summed, and by the rest afterwards.
        sparse_as_dense: whether sparse gradients are made dense first.
        process_set: the ranks that train together.
    """

    op: Any
    wire: str | None
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet

    @classmethod
    def checked(cls, op: Op, compression: Any, predivide: float, sparse_as_dense: bool, process_set: Any) -> Reduction:
        """Return what a user asks for; raise `ConfigError` if that makes no sense."""
        require_process_set(process_set).included()  # raises unless it is registered
        kind, factor = chosen_op(op, None), real_number("gradient_predivide_factor", predivide)
        if kind not in (AVERAGE, SUM):
            raise ConfigError(f"{_KIND} can average or sum gradients (op Average or Sum); got op {op}")
        if not factor > 0.0 or (factor != 1.0 and kind is not AVERAGE):
            raise ConfigError("gradient_predivide_factor is positive, and a part of averaging; use it with op=Average")
        return cls(kind, wire_of(compression), factor, sparse_as_dense, process_set)

    def reducer(self) -> Reduce:
        """Return a function that reduces gradients so, in an operation for all of them. Collective."""
        return _reducer(self)


def wire_of(compression: Any) -> str | None:
    """Return the format that a compression names, or the class of one of another binding; None: arrays as they are.

    Raises:
        ConfigError: it is neither.
    """
    wire = getattr(compression, "wire", None) if hasattr(compression, "compress") else compression
    if wire is not None and wire not in CODECS:
        raise ConfigError(f"compression is None or one of {', '.join(CODECS)}, got {compression!r}")
    return wire


def as_numpy(value: Any) -> Any:
    """Return a copy of a tensor, the value of a variable, or what can become a tensor."""
    return np.array(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))


def _wire_format(wire: str) -> type[WireFormat]:
    return type(wire, (WireFormat,), {"wire": wire})


def settle(model: Any) -> None:
    """Let the variables of a model have their values, which the backend jax keeps elsewhere during `fit`."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


if keras.backend.backend() == "jax":
    import jax

    from ringreduce.jax import allreduce, error_of

    def _reducer(how: Reduction) -> Reduce:
        def reduce(gradients: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
            made = allreduce(
                list(gradients),
                how.op,
                compression=how.wire,
                prescale_factor=1.0 / how.predivide,
                postscale_factor=how.predivide,
                process_set=how.process_set,
            )
            return list(made)

        return reduce

    def prepare(model: Any) -> None:
        """Let `fit` raise our errors, which JAX turns into its own."""
        step = model.train_function
        if step is None or hasattr(step, "__wrapped__"):
            return

        @wraps(step)
        def guarded(*arguments: Any) -> Any:
            try:
                return jax.block_until_ready(step(*arguments))
            except Exception as error:
                model._jax_state = None  # the step has used up these arrays; Keras would raise that and not the error
                raise error_of(error) from None

        model.train_function = guarded

elif keras.backend.backend() == "torch":
    from ringreduce.torch.arrays import TENSORS
    from ringreduce.torch.gradients import TorchParameters

    def _reducer(how: Reduction) -> Reduce:
        known: dict[tuple[int, ...], ListTraining] = {}
        options = {
            "op": how.op,
            "compression": None if how.wire is None else _wire_format(how.wire),
            "predivide_factor": how.predivide,
            "overlap": False,
        }
        bind = partial(TorchParameters, sparse_as_dense=how.sparse_as_dense)

        def reduce(gradients: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
            key = tuple(map(id, variables))
            if key not in known:
                named = [(f"variable {number}", each.value) for number, each in enumerate(variables)]
                known[key] = ListTraining(_KIND, named, how.process_set, arrays=TENSORS, bind=bind, **options)
            return known[key].reduce(gradients)

        return reduce

    def prepare(model: Any) -> None:
        """Do nothing: steps are not compiled, and errors are raised as they are."""

elif keras.backend.backend() == "tensorflow":
    from ringreduce.tensorflow.compression import Compression
    from ringreduce.tensorflow.gradients import GradientReduction

    def _reducer(how: Reduction) -> Reduce:
        return GradientReduction(
            _KIND,
            op=how.op,
            compression=Compression.none if how.wire is None else _wire_format(how.wire),
            sparse_as_dense=how.sparse_as_dense,
            predivide=how.predivide,
            process_set=how.process_set,
        ).reduce

    def prepare(model: Any) -> None:
        """Keep XLA out of the step: it cannot call Python."""
        model.jit_compile = False

else:
    raise ImportError(f"ringreduce.keras needs a backend that trains, not {keras.backend.backend()}")
