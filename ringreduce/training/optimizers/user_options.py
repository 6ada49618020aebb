"""Options as users give them: declared for all bindings, read and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, Literal, TypedDict

from ringreduce.common.arguments import shown, whole_number
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, SUM, ReduceOp
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.compression import has_reducers, is_wire_format
from ringreduce.training.optimizers.refusals import require_together
from ringreduce.training.options.declared import Declared
from ringreduce.training.options.features import (
    ADASUM,
    BACKWARD,
    COMPRESSION,
    OVERLAP,
    PREDIVISION,
    SHARD,
    SKIP_UNUSED,
    SPLIT,
)
from ringreduce.training.options.options import Adasum, Op, Options, ReproducibleSum, averaging
from ringreduce.training.strategies.chosen import STRATEGIES


class GradientArguments(TypedDict, total=False):
    """The options by which bindings reduce gradients, by the names that users know; each binding takes some.

    Attributes:
        name, use_locking, device_dense, device_sparse: without meaning here, taken for Horovod's sake.
        compression: of `Compression`; must agree on all ranks, as all that follow must.
        backward_passes_per_step: so many passes make a step; their gradients are summed up on each rank.
        op: `Average`, `Sum` or `Adasum`.
        gradient_predivide_factor: averages are divided by this before they are summed, and by the rest afterwards: for
            16-bit gradients that would overflow.
        average_aggregated_gradients: whether the sum of the passes is divided by their number.
        num_groups: how many groups of equal length to make; older name of ``groups``.
        groups: lists of parameters, or the number of lists to make: gradients of a list are reduced together.
        sparse_as_dense: whether sparse gradients become dense before they are reduced; else what the ranks have is
            gathered.
        process_set: the ranks that train together. On others the optimizer steps as it does by itself.
        scale_local_gradients: whether gradients of local variables, which are not reduced, are divided by the number of
            ranks.
        bucket_nbytes: a bucket of gradients that holds so many bytes is closed. None: `Config.bucket_nbytes`.
        skip_unused: leave the gradient of a parameter that no rank used None, so that the step does not touch it;
            False: give it zeros, which weight decay and momentum act on. None: True, and under Horovod's conventions
            False.
        overlap: reduce buckets during the backward pass; see `ringreduce.training.strategies.overlapped`. Not with
            ``powersgd``, ``topk`` or ``gradient_predivide_factor``. None: with parameters on a GPU, yes; on one node,
            no; between nodes both are tried in turn, six times six steps, and the quicker one stays.
        reduce_in: ``"step"`` or ``"backward"``: where gradients are reduced.
        shard: ``"node"``: a node has parameters and state once; ``"all"``: it has parameters once, and all ranks have
            state once; see docs/recipes/sharding.md.
        split_updates: let each rank update some of the parameters, whole ones, and give the others the results, with
            the bits of each rank updating all. For optimizers with costly updates, each of which depends on its own
            parameter and gradient alone; not with Adasum or ``shard``. None: with `torch.optim.Muon` and parameters in
            host memory, where both are tried in turn, at least four times, and the quicker one stays; with others, no.
            See docs/recipes/methods.md.
    """

    name: str | None
    use_locking: bool
    device_dense: str
    device_sparse: str
    compression: Any
    backward_passes_per_step: int
    op: Op
    gradient_predivide_factor: float
    average_aggregated_gradients: bool
    num_groups: int
    groups: int | Sequence[Sequence[Any]] | None
    sparse_as_dense: bool
    process_set: ProcessSet
    scale_local_gradients: bool
    bucket_nbytes: int | None
    skip_unused: bool | None
    overlap: bool | None
    reduce_in: Literal["step", "backward"]
    shard: Literal["node", "all"] | None
    staleness: int
    split_updates: bool | None


#: What users call fields of `Options`, where that is another name.
_BY_USERS = {"passes": "backward_passes_per_step", "predivide_factor": "gradient_predivide_factor"}
#: What users call all of these fields.
_NAMES = {each.name: _BY_USERS.get(each.name, each.name) for each in fields(Options)}

#: Of optimizers and tapes.
GRADIENT_OPTIONS = Declared(
    GradientArguments,
    {
        **{_NAMES[each.name]: each.default for each in fields(Options)},
        **{option.name: option.default for option in STRATEGIES},
        **{"name": None, "use_locking": False, "device_dense": "", "device_sparse": ""},
        **{"average_aggregated_gradients": False, "num_groups": 0, "sparse_as_dense": False},
        **{"process_set": global_process_set, "scale_local_gradients": True},
    },
    {option.name: (option.annotation, option.meaning) for option in STRATEGIES},
)


def named_options(**given: Any) -> Options:
    """Return options by their names, those of strategies among them."""
    strategies = {option: given.pop(option.name) for option in STRATEGIES if option.name in given}
    return Options(**given, strategies=strategies)


def options_of(arguments: Mapping[str, Any], **own: Any) -> Options:
    """Return the options that a binding was given.

    Args:
        arguments: of `GradientArguments`, some of them.
        own: options in place of those that these say.
    """
    given = {each: arguments[name] for each, name in _NAMES.items() if name in arguments}
    if given.get("groups") is None:
        given["groups"] = arguments.get("num_groups")
    given |= {option.name: arguments[option.name] for option in STRATEGIES if option.name in arguments}
    return named_options(**{**given, **own})


def checked(options: Options, settings: Config, parameters: Sequence[Any]) -> Options:
    """Return the options with all that a user left open, given all parameters of the optimizer.

    Raises:
        ConfigError: one is wrong, or two do not go together.
    """
    op = _checked_op(options.op)
    adasum = options.op == Adasum
    _, factor = averaging(options.op, options.predivide_factor)
    if options.reduce_in not in ("step", "backward"):
        raise ConfigError(f'reduce_in is "step" or "backward", got {shown(options.reduce_in)}')
    if options.shard not in (None, "node", "all"):
        raise ConfigError(f'shard is "node", "all" or None, got {shown(options.shard)}')
    compression = _checked_compression(options.compression)
    values = {option: option.check(options.strategies.get(option, option.default)) for option in STRATEGIES}
    chosen = replace(options, strategies=values).chosen
    used = {
        ADASUM: adasum,
        BACKWARD: options.in_backward,
        COMPRESSION: compression is not None and not is_wire_format(options.compression),
        OVERLAP: options.overlap is True,
        PREDIVISION: factor != 1.0,
        SHARD: options.shard is not None,
        SKIP_UNUSED: options.skip_unused is True,
        SPLIT: options.split_updates is True,
    }
    features = [name for name, is_used in used.items() if is_used]
    require_together(features)
    for option in chosen:
        for feature in (*features, *(each.feature for each in chosen)):
            option.require_allowed(feature)
    nbytes = options.bucket_nbytes
    if nbytes is None and options.shard is None:
        nbytes = settings.bucket_nbytes
    return replace(
        options,
        op=op,
        adasum=adasum,
        passes=whole_number("backward_passes_per_step", options.passes, 1),
        compression=compression,
        overlap=options.overlap if all(option.overlaps for option in chosen) else False,
        strategies=values,
        predivide_factor=factor,
        groups=_checked_groups(parameters, options.groups),
        bucket_nbytes=None if nbytes is None else whole_number("bucket_nbytes", nbytes, 1),
    )


def _checked_op(op: Op) -> ReduceOp:
    if op == Adasum:
        return AVERAGE
    kind = None
    with suppress(ConfigError):
        kind = ReduceOp.parse(op)
    if kind not in (AVERAGE, SUM):
        word = op.value if isinstance(op, ReduceOp) else op
        hint = "; RINGREDUCE_DETERMINISTIC=1 fixes the order of sums" if op == ReproducibleSum else ""
        raise ConfigError(
            f"DistributedOptimizer can average or sum gradients (op Average or Sum), or use Adasum; got op {word}{hint}"
        )
    return kind


def _checked_compression(compression: Any) -> Any:
    if compression is None or hasattr(compression, "compress"):
        return compression
    if has_reducers(compression):
        return compression() if isinstance(compression, type) else compression
    raise ConfigError(f"compression is one of hvd.Compression, or a Compressor class; got {compression!r}")


def _checked_groups(parameters: Sequence[Any], groups: Any) -> dict[int, int]:
    """Return the group of each parameter that has one, by id."""
    if groups is None:
        return {}
    if hasattr(groups, "shape") or not isinstance(groups, Iterable):
        number = whole_number("groups (or num_groups), unless it is lists of parameters,", groups, 0)
        length = -(-len(parameters) // number) if number else 0
        return {id(parameter): index // length for index, parameter in enumerate(parameters)} if number else {}
    known = set(map(id, parameters))
    found: dict[int, int] = {}
    for index, group in enumerate(groups):
        if hasattr(group, "shape"):
            raise ConfigError(f"groups are lists of parameters, but number {index} is a parameter; write [[...], ...]")
        for parameter in group:
            if id(parameter) not in known:
                raise ConfigError(f"group {index} holds something that is no parameter of the optimizer")
            if id(parameter) in found:
                raise ConfigError(f"a parameter is in groups {found[id(parameter)]} and {index}; it can be in one")
            found[id(parameter)] = index
    return found
