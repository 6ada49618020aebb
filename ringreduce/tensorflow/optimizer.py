"""Optimizers that average gradients over the ranks: those of Keras and those of TensorFlow 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ringreduce.common.arguments import whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.tensorflow.calls import entry
from ringreduce.tensorflow.compression import Compression
from ringreduce.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from ringreduce.tensorflow.gradients import GradientReduction
from ringreduce.tensorflow.ops import grouped_allreduce
from ringreduce.training.optimizers.applying import Distribution, distribute_as, with_methods
from ringreduce.training.optimizers.keras_copies import keep_copies_distributed
from ringreduce.training.optimizers.refusals import require_together
from ringreduce.training.optimizers.user_options import GRADIENT_OPTIONS, GradientArguments
from ringreduce.training.options.features import ACCUMULATION, ADASUM, FIRST_TENSORFLOW, KERAS
from ringreduce.training.options.options import Adasum
from ringreduce.training.strategies.late import STALENESS

if TYPE_CHECKING:
    from ringreduce.training.options.declared import Unpack


@GRADIENT_OPTIONS.taken(
    "name use_locking device_dense device_sparse compression sparse_as_dense backward_passes_per_step op "
    "gradient_predivide_factor average_aggregated_gradients num_groups groups process_set scale_local_gradients "
    "staleness",
    "",
    compression=Compression.none,
)
@entry
def DistributedOptimizer(  # noqa: N802  # used as a class, as in Horovod
    optimizer: Any, *places: Any, **options: Unpack[GradientArguments]
) -> Any:
    """Let an optimizer average gradients over the ranks before it applies them; return it.

    It stays the object that it is, with its state. ``optimizer.register_local_var(variable)`` lets the gradient of a
    variable stay this rank's own. An optimizer of Keras also gets ``samples`` and ``synchronize``; see
    `ringreduce.keras.DistributedOptimizer`.

    Args:
        optimizer: of Keras, on its backend tensorflow, or of `tf.compat.v1.train`, for sessions and eager programs.
        **options: as for `GradientArguments`.
        op: `Average` or `Sum`; or, for an optimizer of TensorFlow 1, `Adasum` of what its steps change.
        staleness: by how many steps averages are applied late; must agree. The first steps apply zeros. For optimizers
            of Keras. See docs/recipes/staleness.md.

    Raises:
        ConfigError: an argument is wrong, or two do not go together.
    """
    op = options["op"]
    process_set = options["process_set"]
    averages_passes = options["average_aggregated_gradients"]
    passes = whole_number("backward_passes_per_step", options["backward_passes_per_step"], 1)
    is_first = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    if not is_first and not hasattr(optimizer, "apply_gradients"):
        raise ConfigError(f"this is no optimizer of Keras or of TensorFlow 1, but a {type(optimizer).__name__}")
    used = {
        ADASUM: op == Adasum,
        STALENESS.feature: STALENESS.check(options["staleness"]),
        ACCUMULATION: passes > 1 or (op == Adasum and averages_passes),
        FIRST_TENSORFLOW: is_first,
        KERAS: not is_first,
    }
    require_together([name for name, is_used in used.items() if is_used])
    reduction = GradientReduction.of("DistributedOptimizer", options)
    if not is_first:
        keep_copies_distributed(tf.keras)
        return distribute_as(DistributedOptimizer, optimizer, reduction, tf.keras.ops, options, passes)
    if op == Adasum:
        return _with_adasum(optimizer, process_set)
    distribution = Distribution(reduction, tf, process_set, scale_local=options["scale_local_gradients"])
    if passes == 1:
        return _with_reduction(optimizer, distribution)
    helper = LocalGradientAggregationHelper(
        passes,
        distribution.reduced,
        sparse_as_dense=options["sparse_as_dense"],
        average_aggregated_gradients=averages_passes,
    )
    optimizer.aggregation_helper = helper  # Set on the object, so that a copy has its own.
    return _with_reduction(optimizer, distribution, helped=True)


def _with_reduction(optimizer: Any, distribution: Distribution, helped: bool = False) -> Any:
    kind = type(optimizer)

    def compute_gradients(self: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        gradients, variables = zip(*kind.compute_gradients(self, *args, **kwargs), strict=True)
        reduce = self.aggregation_helper.compute_gradients if helped else distribution.reduced
        return list(zip(reduce(gradients, variables), variables, strict=True))

    def apply_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.aggregation_helper.apply_gradients(lambda: kind.apply_gradients(self, *args, **kwargs))

    def register_local_var(self: Any, var: Any) -> None:
        distribution.local.append(var)

    methods = {"compute_gradients": entry(compute_gradients), "register_local_var": register_local_var}
    if helped:
        methods["apply_gradients"] = entry(apply_gradients)
    return with_methods(optimizer, **methods)


def _with_adasum(optimizer: Any, process_set: ProcessSet) -> Any:
    """Let the ranks combine what their steps change."""
    kind = type(optimizer)

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        grads_and_vars = list(grads_and_vars)
        variables = [variable for gradient, variable in grads_and_vars if gradient is not None]
        before = [tf.identity(variable) for variable in variables]
        with tf.control_dependencies(before):
            applied = tf.group(kind.apply_gradients(self, grads_and_vars, *args, **kwargs))
        with tf.control_dependencies([] if applied is None else [applied]):
            changes = [variable.read_value() - old for variable, old in zip(variables, before, strict=True)]
        combined = grouped_allreduce(changes, op=Adasum, process_set=process_set)
        return tf.group(*(var.assign(old + new) for var, old, new in zip(variables, before, combined, strict=True)))

    return with_methods(optimizer, apply_gradients=entry(apply_gradients))
