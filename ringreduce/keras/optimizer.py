"""`DistributedOptimizer`: any optimizer of Keras, with gradients that are reduced over the ranks before each step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import keras

from ringreduce.common.errors import ConfigError
from ringreduce.keras.backends import reduction_of
from ringreduce.runtime import config
from ringreduce.runtime.process_sets import require_process_set
from ringreduce.training.compression.tensors import wire_format_of
from ringreduce.training.optimizers.applying import distribute_as, variables_of
from ringreduce.training.optimizers.keras_copies import distribute_again, keep_copies_distributed, saved_options
from ringreduce.training.optimizers.user_options import GRADIENT_OPTIONS, GradientArguments, checked, options_of

if TYPE_CHECKING:
    from ringreduce.training.options.declared import Unpack

_AS_SAVED = "as saved"

keep_copies_distributed(keras)


class Compression:
    """The formats in which gradients can travel between nodes."""

    none = None
    fp16 = "fp16"
    bf16 = "bf16"
    fp8 = "fp8"
    int8 = "int8"
    int4 = "int4"


@GRADIENT_OPTIONS.taken(
    "name device_dense device_sparse compression sparse_as_dense backward_passes_per_step op gradient_predivide_factor "
    "average_aggregated_gradients num_groups groups process_set scale_local_gradients staleness",
    "",
)
def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: Any, *places: Any, **options: Unpack[GradientArguments]
) -> Any:
    """Let an optimizer reduce gradients over the ranks before it clips and applies them. Local.

    All ranks then make the same steps, if they began with the same weights: see `BroadcastGlobalVariablesCallback`.
    It stays an optimizer of its class: a model that was compiled with it is saved, and loaded elsewhere, as if it had
    been trained in one process. Copies of it, and of such a model, are distributed, too. The gradients of a step travel
    as one operation, through host memory.

    An optimizer that scales losses, put around this one or given, sees gradients that are reduced: all ranks find the
    same overflows. With ``gradient_accumulation_steps``, ranks add up gradients on their own and reduce the sum;
    under a `LossScaleOptimizer` they reduce in each pass.

    Args:
        optimizer: a `keras.optimizers.Optimizer`, with variables already or without.
        **options: as for `GradientArguments`.
        compression: the format in which floats travel between nodes: one of `Compression`, or its name. Must agree on
            all ranks, as all that follow must.
        backward_passes_per_step: how many batches make a step; sets ``gradient_accumulation_steps``.
        op: `Average` or `Sum`.
        num_groups, groups: without meaning here, as all gradients travel together.
        staleness: by how many steps averages are applied late. The first steps apply zeros. See
            docs/recipes/staleness.md.

    Returns:
        The same optimizer, with two more attributes. ``optimizer.samples = n`` weights averages by n, the number of
        samples of which this rank's gradients are means from now on; on all ranks or none, and on the backend jax
        before the first step. With ``staleness``, ``optimizer.synchronize()`` applies the last averages; collective,
        and outside of `fit` and of compiled functions.

    Raises:
        ConfigError: an argument is wrong, two do not go together, or this is one already.
    """
    if not hasattr(optimizer, "apply_gradients"):
        raise ConfigError(
            f"DistributedOptimizer takes an optimizer of Keras, got one of type {type(optimizer).__name__}"
        )
    process_set = options["process_set"]
    require_process_set(process_set).included()  # Raises unless it is registered.
    given = options_of(options, compression=wire_format_of(options["compression"]), groups=None)
    chosen = checked(given, config(), [])
    if chosen.adasum:
        raise ConfigError("optimizers of Keras average or sum gradients (op Average or Sum), not op Adasum")
    reduction = reduction_of(chosen, options["sparse_as_dense"], process_set)
    return distribute_as(DistributedOptimizer, optimizer, reduction, keras.ops, options, chosen.passes)


def PartialDistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: Any, *arguments: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Return a `DistributedOptimizer` that leaves the gradients of some layers as each rank has them.

    Args:
        optimizer: as for `DistributedOptimizer`.
        *arguments: of that.
        local_layers: a layer or several, whose weights exist already; the same on all ranks.
        **options: of that.

    Raises:
        ConfigError: as `DistributedOptimizer`; or the optimizer looks at the norm of all gradients, or scales losses.
    """
    local = variables_of(local_layers)
    distributed = DistributedOptimizer(optimizer, *arguments, **options)
    for variable in local:
        distributed.register_local_var(variable)
    return distributed


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = _AS_SAVED,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a model that was saved with its optimizer, and make that a `DistributedOptimizer` with its state. Local.

    Args:
        filepath: of the model, in a format of Keras.
        custom_optimizers: classes of optimizers that are not Keras's own.
        custom_objects: other classes and functions by name, as for `keras.saving.load_model`.
        compression: as for `DistributedOptimizer`; ``"as saved"``: as the file says, else none.
        legacy_opts: without meaning here, taken for Horovod's sake.
        **options: others of `DistributedOptimizer`, in place of those with which the model was saved. Files ``.h5``
            have none.

    Raises:
        ConfigError: the model was trained by a process set, and ``process_set`` is not given; or by
            `PartialDistributedOptimizer` without a step; or an option is wrong.
    """
    classes = {**{cls.__name__: cls for cls in custom_optimizers or ()}, **(custom_objects or {})}
    model = keras.saving.load_model(filepath, custom_objects=classes)
    if model.optimizer is None:
        return model
    saved = saved_options(model.optimizer)
    together = saved.pop("process_set", None)
    if together is not None and "process_set" not in options:
        raise ConfigError(f"this model was trained by a process set of the ranks {together}: give process_set=")
    local = saved.pop("local", ())
    chosen = options if compression == _AS_SAVED else {**options, "compression": compression}
    distribute_again(model.optimizer, partial(DistributedOptimizer, **{**saved, **chosen}), local)
    return model
