"""How gradients are reduced: one value, which `ringreduce.training.optimizers.user_options` checks."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.arguments import real_number, shown
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, SUM, ReduceOp
from ringreduce.training.compression import has_reducers, signature_of
from ringreduce.training.options.features import StrategyOption

#: Adaptive summation, see `ringreduce.collectives.sums.adasum`.
Adasum = "adasum"

#: The exact sum, rounded once, whatever the number of ranks; see `ringreduce.collectives.sums.reproducible`.
ReproducibleSum = "reproducible sum"

Op = ReduceOp | str

_OTHER_OPS = ("sum", "min", "max", "product", "prod", Adasum, ReproducibleSum)  # than to average

#: Of buckets of sharded parameters that are not reduced before the step: each costs two meetings of the ranks.
_SHARDED_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How gradients are reduced, as a user says it, or checked. All must agree on all ranks.

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
        strategies: the values of the options that choose strategies; checked, of all of these.
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
    strategies: Mapping[StrategyOption, Any] = field(default_factory=dict)
    elementwise: bool = False
    split_updates: bool | None = None

    @property
    def weighs(self) -> bool:
        """Whether averages may be weighted by numbers of samples; of checked options."""
        return self.op is AVERAGE and not self.adasum

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
        return self.shard is not None or self.is_late

    @property
    def chosen(self) -> list[StrategyOption]:
        """The options that choose a strategy."""
        return [option for option, value in self.strategies.items() if value != option.default]

    @property
    def is_late(self) -> bool:
        """Whether later steps apply the averages of a step; see `StrategyOption`."""
        return any(option.is_late for option in self.chosen)

    def require_allowed(self, use: str) -> None:
        """Raise a `ConfigError` for a use that does not go together with a chosen strategy."""
        for option in self.chosen:
            option.require_allowed(use)

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
            **{option.name: value for option, value in self.strategies.items()},
            "shard": self.shard and f"{self.shard}, {'elements' if self.elementwise else 'whole parameters'}",
        }


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
