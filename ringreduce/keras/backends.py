"""What depends on the backend of Keras: how gradients are reduced, and how `fit` raises the error of a failed step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import keras
import numpy as np

from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.keras.private import forget_state
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.framework import Advice
from ringreduce.training.binding.identity import Identity, ScopedName, identity_of
from ringreduce.training.optimizers.applying import ListReduction
from ringreduce.training.optimizers.optimizer import ListTraining
from ringreduce.training.options.options import Options
from ringreduce.training.strategies.late import staleness_of

_KIND = "DistributedOptimizer"
_OBJECTS = "encode strings as numbers, or use broadcast_object or allgather_object"

_ADVICE = Advice(
    "give fit() the callback BroadcastGlobalVariablesCallback(0), or call broadcast_variables(model.weights, "
    "root_rank=0) before the first step",
    "arrays as x[rank()::size()], dataset.shard(size(), rank()) of a tf.data.Dataset, or a keras.utils.PyDataset that "
    "divides its batches, for example",
    first=1,
    schedule="comes behind MetricAverageCallback() in the list of callbacks",
)


def _how(options: Options) -> dict[str, Any]:
    names = "op", "compression", "predivide_factor"
    return {**{name: getattr(options, name) for name in names}, "staleness": staleness_of(options)}


def named_as(variable: Any, number: int) -> str:
    """Return the name of a variable, which is the same on all ranks; of what has none, its number in a list."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None)
    return ScopedName(str(path)) if path else f"variable {number}"


def _identity(number: int, variables: Sequence[Any]) -> Identity:
    """Return what tells the gradients of an optimizer, by its number, from those of others."""
    arrays = [(named_as(variable, place), tuple(variable.shape)) for place, variable in enumerate(variables)]
    return identity_of(_KIND, arrays, (number,))


def as_numpy(value: Any, name: str = "the value") -> Any:
    """Return a copy of a tensor, the value of a variable, or what can become a tensor. Sparse ones become dense.

    Raises:
        UnsupportedBufferError: it is ragged, or of other elements than numbers; ``name`` says which.
    """
    if hasattr(value, "row_splits"):  # TensorFlow's, which Keras would pad
        raise UnsupportedBufferError(
            f"{name} is a ragged tensor, which no collective takes: make it dense by .to_tensor(), or send its "
            ".flat_values and its .row_lengths()"
        )
    try:
        array = np.array(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))
    except (TypeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise UnsupportedBufferError(f"{name} is no tensor of numbers ({message}): {_OBJECTS}") from error
    if array.dtype.kind in "OSU":
        raise UnsupportedBufferError(f"{name} is no tensor of numbers, but of type {array.dtype}: {_OBJECTS}")
    return array


def settle(model: Any) -> None:
    """Let the variables of a model have their values, which the backend jax keeps elsewhere during `fit`."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


if keras.backend.backend() == "jax":
    import jax

    from ringreduce.jax import error_of
    from ringreduce.jax.lists import HostReduction, needs_host
    from ringreduce.jax.ops import reduce_gradients
    from ringreduce.jax.steps import StepReduction, Steps

    class _CompiledReduction(ListReduction):
        """Reduces gradients in the compiled program; late or weighted ones on the host."""

        def __init__(self, options: Options, process_set: ProcessSet) -> None:
            super().__init__(staleness_of(options))
            self._options = options
            self._process_set = process_set
            self._plain = False
            self._steps = Steps(_KIND, process_set, _ADVICE)

        def count(self, samples: Any) -> None:
            if self._plain and samples is not None:
                raise ConfigError(
                    "on Keras's backend jax, set optimizer.samples before the first step: this optimizer was compiled "
                    "without it; make a new one"
                )
            super().count(samples)

        def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
            given = [variable for variable, gradient in zip(variables, gradients, strict=True) if gradient is not None]
            step = self._step(given, variables)
            if self.staleness or self.samples is not None or needs_host(self._process_set, gradients):
                return self._listed(gradients, given, step)
            self._plain = True
            options = self._options
            averages: list[Any] = reduce_gradients(
                step,
                list(gradients),
                options.op,
                compression=options.compression and options.compression.wire,
                predivide_factor=options.predivide_factor,
                process_set=self._process_set,
                identity=_identity(self.number, variables),
            )
            return averages

        def _step(self, given: Sequence[Any], variables: Sequence[Any]) -> StepReduction:
            """Return a step, by the variables that have a gradient, and by all."""
            values = [variable.value for variable in variables] if self.values is None else self.values
            paths = [variable.path for variable in variables]
            with nullcontext() if self.state is None else keras.StatelessScope(self.state):
                settings = self.settings()
            return self._steps.of_lists(lambda: [variable.path for variable in given], values, lambda: paths, settings)

        def _listed(self, gradients: Sequence[Any], given: Sequence[Any], step: StepReduction) -> Sequence[Any]:
            there = [gradient for gradient in gradients if gradient is not None]

            def make() -> HostReduction:
                return HostReduction(
                    _KIND,
                    there,
                    process_set=self._process_set,
                    samples=lambda: self.samples,
                    identity=_identity(self.number, given),
                    advice=_ADVICE,
                    **_how(self._options),
                )

            reduced = iter(self.known.find(tuple(map(id, given)), make, given).reduce(there, step=step))
            return [None if gradient is None else next(reduced) for gradient in gradients]

    def reduction_of(options: Options, sparse_as_dense: bool, process_set: ProcessSet) -> ListReduction:
        """Return the reducer of all gradients, as one operation."""
        return _CompiledReduction(options, process_set)

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
                forget_state(model)  # The step has used up these arrays; Keras would raise that and not the error.
                raise error_of(error) from None

        model.train_function = guarded

elif keras.backend.backend() == "torch":
    from ringreduce.torch.tensors.arrays import TENSORS
    from ringreduce.torch.tensors.gradients import TorchParameters
    from ringreduce.training.calls.parameters import in_words
    from ringreduce.training.gradients.checks import CheckedModel

    class _EagerReduction(ListReduction):
        """Reduces gradients of steps that are not compiled."""

        def __init__(self, options: Options, sparse_as_dense: bool, process_set: ProcessSet) -> None:
            super().__init__(staleness_of(options))
            self._process_set = process_set
            self._how = _how(options)
            bind = partial(TorchParameters, sparse_as_dense=sparse_as_dense, advice=_ADVICE)
            self._how |= {"arrays": TENSORS, "bind": bind}

        def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
            training = self.known.find(tuple(map(id, variables)), partial(self._training_of, variables), variables)
            reduced: Sequence[Any] = training.reduce(gradients, self.samples)
            return reduced

        def _training_of(self, variables: Sequence[Any]) -> ListTraining:
            named = [(named_as(variable, number), variable.value) for number, variable in enumerate(variables)]
            model = CheckedModel(
                [name for name, _ in named],
                lambda: [variable.value for variable in variables],
                settings=lambda: in_words(self.settings()),
            )
            return ListTraining(
                _KIND,
                named,
                self._process_set,
                identity=_identity(self.number, variables),
                model=model,
                overlap=False,
                **self._how,
            )

    def reduction_of(options: Options, sparse_as_dense: bool, process_set: ProcessSet) -> ListReduction:
        """Return the reducer of all gradients."""
        return _EagerReduction(options, sparse_as_dense, process_set)

    def prepare(model: Any) -> None:
        """Do nothing: steps are not compiled, and errors are raised as they are."""

elif keras.backend.backend() == "tensorflow":
    from ringreduce.tensorflow.compression import Compression
    from ringreduce.tensorflow.gradients import GradientReduction

    def reduction_of(options: Options, sparse_as_dense: bool, process_set: ProcessSet) -> ListReduction:
        """Return the reducer of all gradients, as one operation."""
        reduction = GradientReduction(
            _KIND,
            op=options.op,
            compression=options.compression or Compression.none,
            sparse_as_dense=sparse_as_dense,
            predivide=options.predivide_factor,
            process_set=process_set,
            staleness=staleness_of(options),
        )
        reduction.advice = _ADVICE
        return reduction

    def prepare(model: Any) -> None:
        """Keep XLA out of the step: it cannot call Python."""
        if model.jit_compile:
            model.jit_compile = False
            model.train_function = None

else:
    raise ImportError(f"ringreduce.keras needs a backend that trains, not {keras.backend.backend()}")
