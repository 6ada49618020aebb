"""`DiLoCo` and `LocalSGD`: replicas step by themselves, and exchange weights now and then; outside of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from ringreduce.common.errors import ConfigError
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.tensorflow.calls import entry, name_of
from ringreduce.tensorflow.compression import Compression
from ringreduce.training.host import ArraySpec
from ringreduce.training.replicas import Replicas, checking, is_averaged

__all__ = ["DiLoCo", "LocalSGD"]


class DiLoCo(Replicas):
    """Lets replicas step by themselves, and exchange what they have learnt once per period.

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
    momentum; `ringreduce.training.local` has the arithmetic and its sources. All ranks make equally many steps.

    Variables of floats and complex numbers are exchanged, those of 16 bits in float32, through the host; others stay
    each rank's own. Means of other things, as the statistics of batches or the state of an optimizer, are those of a
    `LocalSGD` of their own: ``hvd.LocalSGD(model.non_trainable_variables, period=20)``.

    On each rank this takes 12 bytes of host memory for each element in float32, 16 during a delay, 8 without momentum.

    Args:
        variables: of TensorFlow or Keras, with the values to begin with, equal on all ranks (`broadcast_variables`);
            the first step compares them.
        period: so many steps of a replica come between two exchanges of a variable.
        outer_lr: of the outer step; 1 is the average, where there is no momentum.
        outer_momentum: of the outer steps; less than 1.
        fragments: cut the variables into so many parts of about equal size, each of whole variables, and exchange them
            one after the other, at equal distances within the period.
        delay: make so many more steps before an exchange has to be complete; less than the period. What a replica
            learns meanwhile is kept.
        compression: the wire format of differences between nodes, one of `Compression` but powersgd and topk, or its
            name. What rounding to it loses is sent in the next exchange.
        replica: ``"node"``, ``"rank"`` or process sets, which together have each rank of the world once.

    All arguments must agree on all ranks. For synchronous steps first, make them before this object.

    Attributes:
        process_set: the ranks of this replica, for what reduces gradients.

    Raises:
        ConfigError: an argument is wrong; in `step`, `synchronize` and `rejoin`: they are called in a graph. The other
            ranks get a `MismatchError` then.
        MismatchError: the ranks have different variables or arguments.
        UnsupportedBufferError: a variable has floats that no collective takes.
    """

    @entry
    def __init__(
        self,
        variables: Sequence[Any],
        *,
        period: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        compression: Any = Compression.none,
        replica: Literal["node", "rank"] | Sequence[ProcessSet] = "node",
    ) -> None:
        with checking():
            _require_eager()
            given = list(variables)
            if not all(hasattr(each, "assign") for each in given):
                raise ConfigError(f"DiLoCo takes variables, got {[type(each).__name__ for each in given]}")
            known = [(tf.as_dtype(each.dtype).as_numpy_dtype, each) for each in given]
            self._variables = [each for dtype, each in known if is_averaged(dtype)]
            specs = [ArraySpec(each.shape, dtype) for dtype, each in known if is_averaged(dtype)]
            named = [
                (name_of(each, n), spec) for n, (each, spec) in enumerate(zip(self._variables, specs, strict=True))
            ]
        super().__init__(period, outer_lr, outer_momentum, fragments, delay, compression, replica)
        self.bind(named, self._read, self._write)
        self.start()

    @entry
    def step(self) -> None:
        """Begin or end the exchanges that are due after a step of the replica. Collective where there are some.

        Raises:
            ConfigError: it is called in a graph, or a rank has joined.
            MismatchError: the ranks began with different weights, or go on from states that do not belong together.
        """
        _require_eager()
        self.before_step()
        self.after_step()

    @entry
    def synchronize(self) -> None:
        """Make the variables of all ranks their average. Collective.

        For an evaluation and the end of a training. Ends what is under way, and leaves the outer momentum as it is.
        """
        _require_eager()
        super().synchronize()

    @entry
    def rejoin(self) -> None:
        """Go on in the world there is now, if ``shutdown()`` and ``init()`` came since the last time. Collective.

        Call it first in what `elastic.run` runs: the ranks that go on average what each has learnt.
        """
        super().rejoin()

    def _read(self, place: slice) -> Sequence[Any]:
        return [np.asarray(each.numpy()) for each in self._variables[place]]

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
    return DiLoCo(variables, **{"outer_lr": 1.0, "outer_momentum": 0.0, **options})


def _require_eager() -> None:
    if not tf.executing_eagerly():
        raise ConfigError("DiLoCo exchanges values: call it outside of tf.function and of graphs, after each step")
