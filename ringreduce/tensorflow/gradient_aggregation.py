"""Gradients of several backward passes that make one step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.common.arguments import whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.tensorflow.calls import Host, Spec, entry, run
from ringreduce.tensorflow.slices import times


class LocalGradientAggregationHelper:
    """Sums up the gradients of passes on this rank, and reduces the sum of the last one.

    Args:
        backward_passes_per_step: so many; the same on all ranks.
        allreduce_func: takes gradients and their variables; returns averages or sums.
        sparse_as_dense: whether `tf.IndexedSlices` become tensors; else they are refused.
        average_aggregated_gradients: whether the sum is divided by the number of passes.
        process_set: the ranks that train together.
        scale_local_gradients: whether sums of local variables are divided by the number of ranks.
        ignored: what Horovod has besides.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        **ignored: Any,
    ) -> None:
        self._passes = whole_number("backward_passes_per_step", backward_passes_per_step, 1)
        self._reduce = allreduce_func
        self._sparse_as_dense = sparse_as_dense
        self._divisor = self._passes if average_aggregated_gradients else 1
        self._sums: list[Host] = []
        self._made = 0
        self._due: Any = None
        self._process_set = process_set
        self._scale_local = scale_local_gradients
        self._local: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalGradientAggregationHelper:
        """Return one with sums of its own, which reduces in the same way."""
        copied = copy.copy(self)
        copied._sums = list(map(np.copy, self._sums))
        copied._local = list(self._local)
        return copied

    def register_local_var(self, var: Any) -> None:
        """Let the gradient of a variable stay this rank's own."""
        self._local.append(var)

    @entry
    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Return what the passes have given together, reduced over the ranks after the last one. Collective then."""
        if not self._sparse_as_dense and any(isinstance(gradient, tf.IndexedSlices) for gradient in grads):
            raise ConfigError("sparse gradients of several passes cannot be summed up: use sparse_as_dense=True")
        tensors = [tf.convert_to_tensor(gradient) for gradient in grads if gradient is not None]
        variables = [variable for variable, gradient in zip(vars, grads, strict=False) if gradient is not None]

        def specs() -> list[Spec]:
            return [*((tensor.dtype, tensor.shape) for tensor in tensors), (tf.bool, [])]

        *sums, self._due = run(self._add, tensors, specs, in_order=False)
        reduced = iter(tf.cond(self._due, lambda: self._reduced(sums, variables), lambda: sums))
        return [None if gradient is None else next(reduced) for gradient in grads]

    @entry
    def apply_gradients(self, apply_grads_closure: Callable[[], Any], *ignored: Any, **options: Any) -> Any:
        """Call a function that makes a step, if one is due after the last `compute_gradients`."""
        return tf.cond(self._due, lambda: tf.group(apply_grads_closure()), tf.no_op)

    def _reduced(self, sums: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        local = set(map(id, self._local))
        shared = [number for number, variable in enumerate(variables) if id(variable) not in local]
        factor = 1.0 / self._process_set.size() if self._scale_local else 1.0
        result = [times(total, factor) for total in sums] if local else list(sums)
        reduced = self._reduce([sums[n] for n in shared], [variables[n] for n in shared]) if shared else ()
        for number, each in zip(shared, reduced, strict=True):
            result[number] = each
        return result

    def _add(self, gradients: list[Host]) -> list[Host]:
        if self._made == 0:
            self._sums = list(map(np.array, gradients))
        else:
            for total, gradient in zip(self._sums, gradients, strict=True):
                np.add(total, gradient, out=total)
        self._made = (self._made + 1) % self._passes
        sums = [np.array(total / self._divisor if self._made == 0 else total, total.dtype) for total in self._sums]
        return [*sums, np.array(self._made == 0)]
