"""What depends on the backend of Keras: how gradients are reduced, and how `fit` raises the error of a failed step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import keras
import numpy as np

from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.compression import WireFormat, wire_format
from ringreduce.training.compression.tensors import NoneCompressor
from ringreduce.training.optimizer import ListTraining
from ringreduce.training.options import Options

#: Takes gradients and their variables; returns the averages or sums.
Reduce = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]

_KIND = "DistributedOptimizer"


def checked_compression(compression: Any) -> type[WireFormat] | None:
    """Return the wire format that a compression names, or that of another binding; None: arrays travel as they are.

    Raises:
        ConfigError: it is neither.
    """
    wire = getattr(compression, "wire", compression)
    if wire is None or getattr(wire, "compress", None) is NoneCompressor.compress:
        return None
    return wire_format(wire)


def as_numpy(value: Any) -> Any:
    """Return a copy of a tensor, the value of a variable, or what can become a tensor."""
    return np.array(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))


def settle(model: Any) -> None:
    """Let the variables of a model have their values, which the backend jax keeps elsewhere during `fit`."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


if keras.backend.backend() == "jax":
    import jax

    from ringreduce.jax import allreduce, error_of

    def reducer(options: Options, sparse_as_dense: bool, process_set: ProcessSet) -> Reduce:
        """Return a function that reduces gradients, all of them as one operation. Collective."""

        def reduce(gradients: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
            made: list[Any] = allreduce(
                list(gradients),
                options.op,
                compression=options.compression and options.compression.wire,
                prescale_factor=1.0 / options.predivide_factor,
                postscale_factor=options.predivide_factor,
                process_set=process_set,
            )
            return made

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

    def reducer(options: Options, sparse_as_dense: bool, process_set: ProcessSet) -> Reduce:
        """Return a function that reduces gradients. Collective."""
        known: dict[tuple[int, ...], ListTraining] = {}
        how = {"op": options.op, "compression": options.compression, "predivide_factor": options.predivide_factor}
        bind = partial(TorchParameters, sparse_as_dense=sparse_as_dense)

        def reduce(gradients: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
            key = tuple(map(id, variables))
            if key not in known:
                named = [(f"variable {number}", each.value) for number, each in enumerate(variables)]
                known[key] = ListTraining(_KIND, named, process_set, arrays=TENSORS, bind=bind, overlap=False, **how)
            return known[key].reduce(gradients)

        return reduce

    def prepare(model: Any) -> None:
        """Do nothing: steps are not compiled, and errors are raised as they are."""

elif keras.backend.backend() == "tensorflow":
    from ringreduce.tensorflow.compression import Compression
    from ringreduce.tensorflow.gradients import GradientReduction

    def reducer(options: Options, sparse_as_dense: bool, process_set: ProcessSet) -> Reduce:
        """Return a function that reduces gradients, all of them as one operation. Collective."""
        return GradientReduction(
            _KIND,
            op=options.op,
            compression=options.compression or Compression.none,
            sparse_as_dense=sparse_as_dense,
            predivide=options.predivide_factor,
            process_set=process_set,
        ).reduce

    def prepare(model: Any) -> None:
        """Keep XLA out of the step: it cannot call Python."""
        if model.jit_compile:
            model.jit_compile, model.train_function = False, None

else:
    raise ImportError(f"ringreduce.keras needs a backend that trains, not {keras.backend.backend()}")
