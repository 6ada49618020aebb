"""`DiLoCo` and `LocalSGD`: replicas step by themselves, and exchange weights once per period; outside of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from ringreduce.common.errors import ConfigError
from ringreduce.tensorflow.calls import entry, name_of
from ringreduce.tensorflow.compression import Compression
from ringreduce.training.binding.host import ArraySpec
from ringreduce.training.optimizers.replicas import Replicas, checking, is_averaged
from ringreduce.training.options.local_options import LOCAL_OPTIONS, LocalArguments, averaging

if TYPE_CHECKING:
    from ringreduce.training.options.declared import Unpack


@LOCAL_OPTIONS.taken()
class DiLoCo(Replicas):
    """Lets replicas step by themselves, and exchange weights once per period.

        hvd.broadcast_variables(model.variables, root_rank=0)
        local = hvd.DiLoCo(model.trainable_variables, period=20)
        ...
        tape = hvd.DistributedGradientTape(tape, process_set=local.process_set)  # in a tf.function or not
        ...
        local.step()
        ...
        local.synchronize()

    A replica is a node, or one rank, or the ranks of a process set; its ranks reduce their gradients in every step. In
    every ``period``-th step all ranks average how far their weights have moved, and make an outer step with Nesterov's
    momentum; `ringreduce.training.optimizers.local` has the formulas and their sources. All ranks must make equally
    many steps. With ``quorum`` an outer step does not wait for all; `ringreduce.training.optimizers.quorum` says what
    is otherwise then.

    Variables of floats and complex numbers are exchanged through the host, floats of 16 bits in float32; others stay
    each rank's own. To average other variables, such as batch statistics or the state of an optimizer, give them a
    `LocalSGD` of their own: ``hvd.LocalSGD(model.non_trainable_variables, period=20)``.

    On each rank this takes 12 bytes of host memory for each element in float32, 16 during a delay, 8 without momentum.

    Args:
        variables: of TensorFlow or Keras, with equal values on all ranks (`broadcast_variables`), which the first step
            compares.
        **options: as for `LocalArguments`.
        compression: the wire format of differences between nodes, one of `Compression` but powersgd and topk, or its
            name. Its rounding errors are added to the next exchange, but those of `Compression.fp16` and ``bf16``.

    All arguments must agree on all ranks. To begin with synchronous steps, make them before this object.

    Attributes:
        process_set: the ranks of this replica, for `DistributedGradientTape` or `DistributedOptimizer`.

    Raises:
        ConfigError: an argument is wrong; the other ranks get a `MismatchError`. Or it is constructed in a graph.
        MismatchError: the ranks have different variables or arguments.
        UnsupportedBufferError: a variable has floats that no collective takes.
    """

    @entry
    def __init__(
        self, variables: Sequence[Any], *, compression: Any = Compression.none, **options: Unpack[LocalArguments]
    ) -> None:
        with checking():
            _require_eager()
            single = hasattr(variables, "assign") or callable(variables)  # A variable or a model.
            listed: list[Any] = [variables] if single else list(variables)
            if not all(hasattr(variable, "assign") for variable in listed):
                raise ConfigError(f"DiLoCo takes variables, got {[type(each).__name__ for each in listed]}")
            typed = [(tf.as_dtype(variable.dtype).as_numpy_dtype, variable) for variable in listed]
            self._variables = [variable for dtype, variable in typed if is_averaged(dtype)]
            specs = [ArraySpec(variable.shape, dtype) for dtype, variable in typed if is_averaged(dtype)]
            named = [(name_of(var, n), spec) for n, (var, spec) in enumerate(zip(self._variables, specs, strict=True))]
        super().__init__(compression=compression, **options)
        self.bind(named, self._read, self._write)
        self.start()

    @entry
    def step(self) -> None:
        """Begin and end the exchanges that are due; to be called after each step. Collective then, and in the first.

        Raises:
            ConfigError: it is called in a graph, or a rank has joined.
            MismatchError: the ranks began with different weights, or have loaded states of different runs or steps.
        """
        _require_eager()
        self.before_step()
        self.after_step()

    @entry
    def synchronize(self) -> None:
        """Make the variables of all ranks their average. Collective.

        Call it before an evaluation and at the end of training. It ends exchanges that are under way, and does not
        change the outer momentum.

        Raises:
            ConfigError: it is called in a graph.
        """
        _require_eager()
        super().synchronize()

    @entry
    def rejoin(self) -> None:
        """Go on in a new world, after ``shutdown()`` and ``init()``; in the same world, do nothing. Collective.

        Call it first in the function that `elastic.run` calls: its ranks average their weights.
        """
        super().rejoin()

    def _read(self, place: slice) -> Sequence[Any]:
        return [np.asarray(variable.numpy()) for variable in self._variables[place]]

    def _write(self, place: slice, arrays: Sequence[Any]) -> None:
        for variable, array in zip(self._variables[place], arrays, strict=True):
            variable.assign(array)


def LocalSGD(variables: Sequence[Any], **options: Any) -> DiLoCo:  # noqa: N802
    """Return a `DiLoCo` with other defaults: replicas average their weights once per period. Collective.

    Args:
        variables: as for `DiLoCo`.
        options: the others of `DiLoCo`; ``outer_lr`` is 1 and ``outer_momentum`` 0 unless they are given.

    Raises:
        as `DiLoCo`.
    """
    return DiLoCo(variables, **averaging(options))


def _require_eager() -> None:
    if not tf.executing_eagerly():
        raise ConfigError("DiLoCo exchanges values: call it outside of tf.function and of graphs, after each step")
