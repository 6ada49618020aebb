"""How gradients are reduced: one value, as a user gives it, and checked."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict

import numpy as np

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.arguments import real_number, shown, whole_number
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, SUM, ReduceOp
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.compression import has_reducers, is_wire_format, signature_of
from ringreduce.training.options.declared import Declared
from ringreduce.training.options.refusals import (
    ADASUM,
    BACKWARD,
    COMPRESSION,
    OVERLAP,
    PREDIVISION,
    SHARD,
    SHARES,
    SKIP_UNUSED,
    SPLIT,
    STALENESS,
    are_refused,
    refusal,
    require_together,
)

#: Adaptive summation, see `ringreduce.collectives.sums.adasum`.
Adasum = "adasum"

#: The exact sum, rounded once, whatever the number of ranks; see `ringreduce.collectives.sums.reproducible`.
ReproducibleSum = "reproducible sum"

Op = ReduceOp | str

_OTHER_OPS = ("sum", "min", "max", "product", "prod", Adasum, ReproducibleSum)  # than to average

#: Of buckets of sharded parameters that are not reduced before the step: each costs two meetings of the ranks.
_SHARDED_NBYTES = 256 << 20


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
        staleness: by how many steps averages are applied late; the first steps change nothing. See
            docs/recipes/staleness.md.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How gradients are reduced, as a user says it; `checked` returns what is meant. All must agree on all ranks.

    Attributes:
        op: `AVERAGE`, `SUM` or `Adasum`; checked, how losses are reduced: `AVERAGE` with Adasum.
        adasum: whether it is Adasum that combines what steps change; by `checked`.
        passes: how many backward passes come before each step.
        compression: what travels in place of a bucket: a `BucketCompression` or the class of one, or what has
            ``compress`` and ``decompress`` for the framework's arrays; None: the bucket itself.
        predivide_factor: of an average: gradients are divided by this before they are summed, and by the rest
            afterwards.
        groups: lists of parameters, or the number of lists to make; checked, the numbers of groups by the ids of their
            parameters. The gradients of a group, if of one kind, share a bucket.
        bucket_nbytes: a bucket that holds so many bytes is closed; None: as the settings say, or more with ``shard``.
        skip_unused: whether trainable parameters that no rank used keep None instead of zeros; None: as the conventions
            say.
        overlap: whether buckets are reduced during the backward pass; None: with parameters on a device, yes; on one
            node, no; else if it makes steps quicker.
        reduce_in: ``"step"`` or ``"backward"``: where gradients are reduced.
        shard: ``"node"``: a node has parameters and state once; ``"all"``: it has the parameters once, and all ranks
            have state once; None: each rank has both.
        staleness: how many steps late averages are applied.
        elementwise: whether the optimizer treats each element by itself, so that shards may end inside of parameters.
        split_updates: whether each rank updates some of the parameters; None: if the optimizer has costly updates, and
            that makes them quicker.
    """

    op: Any = AVERAGE
    adasum: bool = False
    passes: int = 1
    compression: Any = None
    predivide_factor: Any = 1.0
    groups: Any = None
    bucket_nbytes: Any = None
    skip_unused: bool | None = None
    overlap: bool | None = None
    reduce_in: Any = "step"
    shard: Any = None
    staleness: Any = 0
    elementwise: bool = False
    split_updates: bool | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **own: Any) -> Options:
        """Return the options that a binding was given.

        Args:
            arguments: of `GradientArguments`, some of them.
            own: options in place of those that these say.
        """
        given = {
            each.name: arguments[_BY_USERS.get(each.name, each.name)]
            for each in fields(cls)
            if _BY_USERS.get(each.name, each.name) in arguments
        }
        if given.get("groups") is None:
            given["groups"] = arguments.get("num_groups")
        return cls(**{**given, **own})

    @property
    def weighs(self) -> bool:
        """Whether averages may be weighted by numbers of samples; of checked options."""
        return self.op is AVERAGE and not (self.adasum and are_refused(ADASUM, SHARES))

    def checked(self, settings: Config, parameters: Sequence[Any]) -> Options:
        """Return the options with all that a user left open, given all parameters of the optimizer.

        Raises:
            ConfigError: one is wrong, or two do not go together.
        """
        op = _checked_op(self.op)
        adasum = self.op == Adasum
        _, factor = averaging(self.op, self.predivide_factor)
        if self.reduce_in not in ("step", "backward"):
            raise ConfigError(f'reduce_in is "step" or "backward", got {shown(self.reduce_in)}')
        if self.shard not in (None, "node", "all"):
            raise ConfigError(f'shard is "node", "all" or None, got {shown(self.shard)}')
        compression = _checked_compression(self.compression)
        late = whole_number("staleness", self.staleness, 0)
        used = {
            ADASUM: adasum,
            BACKWARD: self.in_backward,
            COMPRESSION: compression is not None and not is_wire_format(self.compression),
            OVERLAP: self.overlap is True,
            PREDIVISION: factor != 1.0,
            SHARD: self.shard is not None,
            SKIP_UNUSED: self.skip_unused is True,
            SPLIT: self.split_updates is True,
            STALENESS: late > 0,
        }
        require_together([name for name, is_used in used.items() if is_used])
        nbytes = self.bucket_nbytes
        if nbytes is None and self.shard is None:
            nbytes = settings.bucket_nbytes
        return replace(
            self,
            op=op,
            adasum=adasum,
            passes=whole_number("backward_passes_per_step", self.passes, 1),
            compression=compression,
            overlap=False if late else self.overlap,
            staleness=late,
            predivide_factor=factor,
            groups=_checked_groups(parameters, self.groups),
            bucket_nbytes=None if nbytes is None else whole_number("bucket_nbytes", nbytes, 1),
        )

    def settled(self, communicator: Communicator, *, on_device: bool) -> Options:
        """Return the options with what depends on where the parameters and the ranks are.

        Args:
            communicator: the ranks.
            on_device: whether the parameters are on a device.
        """
        unused = not communicator.config.conventions.zeroes_unused if self.skip_unused is None else self.skip_unused
        overlap = self.overlap
        if overlap is None and (on_device or communicator.topology.single_node):
            overlap = on_device
        nbytes = self.bucket_nbytes
        if nbytes is None:
            nbytes = max(communicator.config.bucket_nbytes, _SHARDED_NBYTES if overlap is False else 0)
        settled = replace(self, skip_unused=unused, overlap=overlap, bucket_nbytes=nbytes)
        return replace(settled, overlap=False, reduce_in="step") if self.adasum else settled

    @property
    def needs_whole_commits(self) -> bool:
        """Whether more than this rank's steps changes weights or what is to be applied to them."""
        return self.shard is not None or self.staleness > 0

    def require_on_time(self, use: str) -> None:
        """Raise the `ConfigError` of a use that does not go together with staleness, if there is some."""
        if self.staleness:
            raise refusal(use, STALENESS)

    @property
    def in_backward(self) -> bool:
        """Whether gradients are reduced at the end of the backward pass."""
        return bool(self.reduce_in == "backward")

    @property
    def compressor(self) -> Any:
        """What has ``compress`` and ``decompress``; None: buckets travel as they are, or have reducers."""
        return None if has_reducers(self.compression) else self.compression

    def in_words(self, parameters: Sequence[Any]) -> dict[str, object]:
        """Return the options that must agree, by the names that users know; ranks compare them as text."""
        return {
            "op": Adasum if self.adasum else self.op.value,
            "backward_passes_per_step": self.passes,
            "bucket_nbytes": self.bucket_nbytes,
            "compression": "none" if self.compression is None else signature_of(self.compression),
            "gradient_predivide_factor": self.predivide_factor,
            "groups": [self.groups.get(id(each)) for each in parameters] if self.groups else None,
            "overlap": self.overlap,
            "reduce_in": self.reduce_in,
            "split_updates": self.split_updates,
            "staleness": self.staleness,
            "shard": self.shard and f"{self.shard}, {'elements' if self.elementwise else 'whole parameters'}",
        }


#: Of optimizers and tapes.
GRADIENT_OPTIONS = Declared(
    GradientArguments,
    {
        **{_BY_USERS.get(each.name, each.name): each.default for each in fields(Options)},
        **{"name": None, "use_locking": False, "device_dense": "", "device_sparse": ""},
        **{"average_aggregated_gradients": False, "num_groups": 0, "sparse_as_dense": False},
        **{"process_set": global_process_set, "scale_local_gradients": True},
    },
)


def chosen_op(op: Op | None, average: Any) -> Op:
    """Return the op that was chosen by ``op``, or by ``average``, which is deprecated."""
    if average is not None:
        # Any text, and any op, would be true.
        if not (isinstance(average, (bool, np.bool_)) or (type(average) is int and average in (0, 1))):
            raise ConfigError(f"average= is True or False, got {shown(average)}; say op= for an operation: op='sum'")
        if op is not None:
            raise ConfigError("give op or average, not both")
        warnings.warn("average= is deprecated; say op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        return AVERAGE if average else SUM
    if op is None:
        return AVERAGE
    return op if op in (Adasum, ReproducibleSum) else ReduceOp.parse(op)


def require_no_op(name: Any) -> None:
    """Raise if a name is that of an operation, given to what averages: a program may have taken it for the op."""
    if name in _OTHER_OPS:
        raise ConfigError(
            f"this averages, and its name is {name!r}: to choose an operation, say op={name!r}; if it is to average, "
            "give it another name"
        )


def averaging(op: Op, predivide_factor: Any) -> tuple[Op, float]:
    """Return the op of gradients, and by what averages are divided before they are summed, once both are checked."""
    kind = chosen_op(op, None)
    factor = real_number("gradient_predivide_factor", predivide_factor)
    if not 0.0 < factor < math.inf:
        raise ConfigError(f"gradient_predivide_factor must be a positive number, got {factor}")
    if factor != 1.0 and kind is not AVERAGE:
        raise ConfigError("gradient_predivide_factor is a part of averaging; use it with op=Average")
    return kind, factor


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


def checked_names(parameters: Sequence[Any], named: Any) -> dict[int, str]:
    """Return the name of each parameter, by id; nothing if none were given.

    Args:
        parameters: all of the optimizer's.
        named: names and parameters, as pairs or as a mapping; None.

    Raises:
        ConfigError: it is neither; or names are missing or used twice.
    """
    if named is None:
        return {}
    if isinstance(named, Mapping):
        named = named.items()
    pairs: list[Any] = list(named) if isinstance(named, Iterable) else [named]
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ConfigError("named_parameters must be (name, parameter) pairs, as from model.named_parameters()")
    twice = sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
    if twice:
        raise ConfigError(f"named_parameters uses names more than once: {', '.join(twice)}")
    names = {id(parameter): name for name, parameter in pairs}
    unnamed = sum(id(parameter) not in names for parameter in parameters)
    if unnamed:
        raise ConfigError(
            f"named_parameters leaves {unnamed} of the optimizer's parameters without a name; name all or none"
        )
    return names
