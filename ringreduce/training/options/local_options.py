"""How replicas train that step by themselves: one value, as a user gives it, and checked; see `local`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from math import inf
from typing import Any, Literal, TypedDict

import numpy as np

from ringreduce.common.arguments import real_number, shown, whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.compression import is_wire_format
from ringreduce.training.options.declared import Declared

#: What can be averaged.
_AVERAGED = ("parameters", "buffers", "state")


class LocalArguments(TypedDict, total=False):
    """The options of local training that every binding has. `LocalOptions` has their defaults.

    Attributes:
        period: steps of a replica from one exchange of a parameter to the next.
        outer_lr: learning rate of the outer step; 1, without momentum, makes it an average.
        outer_momentum: momentum of the outer steps; at least 0 and less than 1.
        fragments: how many parts the parameters are cut into, of whole parameters and about equal sizes. They are
            exchanged one after the other, at equal distances within the period.
        delay: steps that a replica makes while an exchange is under way; less than the period. What it learns in these
            steps is kept.
        replica: ``"node"``, ``"rank"`` or process sets that together have each rank of the world once.
        quorum: how many replicas make an outer step; see `ringreduce.training.optimizers.quorum`. None: all.
    """

    period: int
    outer_lr: float
    outer_momentum: float
    fragments: int
    delay: int
    replica: Literal["node", "rank"] | Sequence[ProcessSet]
    quorum: int | None


@dataclass(slots=True, kw_only=True)
class LocalOptions:
    """How replicas train, as a user says it; checked when it is made. All must agree on all ranks.

    Attributes:
        period, outer_lr, outer_momentum, fragments, delay, replica, quorum: as for `LocalArguments`.
        warmup_steps: how many first steps reduce the gradients over all ranks.
        compression: a `WireFormat` for the differences; None: they travel as they are.
        average: what is averaged: ``"parameters"``, and ``"buffers"`` and ``"state"`` if they are there.
        shard: ``"node"``: a node has parameters and state once; None: each rank has its own.
        ranks: how many there are; not kept.

    Raises:
        ConfigError: one is wrong, or two do not go together.
    """

    period: Any = 100
    outer_lr: Any = 0.7
    outer_momentum: Any = 0.9
    warmup_steps: Any = 0
    fragments: Any = 1
    delay: Any = 0
    compression: Any = None
    replica: Any = "node"
    quorum: Any = None
    average: Any = ("parameters",)
    shard: Any = None
    ranks: InitVar[int]

    def __post_init__(self, ranks: int) -> None:
        for name, least in (("period", 1), ("warmup_steps", 0), ("fragments", 1), ("delay", 0)):
            setattr(self, name, whole_number(name, getattr(self, name), least))
        self.outer_lr = real_number("outer_lr", self.outer_lr)
        self.outer_momentum = real_number("outer_momentum", self.outer_momentum)
        self.average = self.average if isinstance(self.average, (list, tuple, set)) else [self.average]
        _require(0.0 < self.outer_lr < inf, "outer_lr must be a positive number", self.outer_lr)
        _require(0.0 <= self.outer_momentum < 1.0, "outer_momentum must be from 0 to below 1", self.outer_momentum)
        _require(self.delay < self.period, f"delay must be less than the period, {self.period}", self.delay)
        _require(
            "parameters" in self.average and all(each in _AVERAGED for each in self.average),
            "average must have 'parameters', and may have 'buffers' and 'state'",
            self.average,
        )
        _require(
            self.compression is None or is_wire_format(self.compression),
            "compression is none, fp16, bf16, fp8, int8 or int4 of hvd.Compression",
            self.compression,
        )
        if self.shard not in (None, "node"):
            raise ConfigError(f'shard of DiLoCo is "node" or None, got {shown(self.shard)}')
        if self.shard and (self.replica != "node" or self.warmup_steps or "state" in self.average):
            given = (
                f"replica={shown(self.replica)}, warmup_steps={shown(self.warmup_steps)}, average={shown(self.average)}"
            )
            raise ConfigError(f'shard needs replica="node", no warmup_steps and no "state" in average; got {given}')
        self._require_quorum()
        self.replicas([[rank] for rank in range(ranks)])

    def _require_quorum(self) -> None:
        if self.quorum is None:
            return
        self.quorum = whole_number("quorum", self.quorum, 1)
        others = ("fragments", "delay", "compression", "shard")
        given = [name for name in others if getattr(self, name) != LocalOptions.__dataclass_fields__[name].default]
        given += ['"state" in average'] if "state" in self.average else []
        _require(not given, "quorum goes without fragments, delay, compression, shard and averaged state", given)

    def replicas(self, nodes: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the ranks of each replica, given those of each node.

        Raises:
            ConfigError: process sets have a rank twice, or lack one.
        """
        everyone = sorted(rank for node in nodes for rank in node)
        if self.replica == "node":
            return [list(node) for node in nodes]
        if self.replica == "rank":
            return [[rank] for rank in everyone]
        given = list(self.replica) if isinstance(self.replica, Iterable) else [self.replica]
        right = all(isinstance(each, ProcessSet) for each in given)
        _require(right, 'replica is "node", "rank" or a list of process sets', self.replica)
        sets = [each.ranks or everyone for each in given]
        right = sorted(rank for each in sets for rank in each) == everyone
        _require(right, f"the process sets of replica must have each of {len(everyone)} ranks once", sets)
        return sets

    @property
    def averages_weights(self) -> bool:
        """Whether the outer step is an average of weights, for which nothing has to be kept."""
        plain = self.outer_lr == 1.0 and self.outer_momentum == 0.0
        return bool(plain and self.compression is None and self.quorum is None)

    def in_words(self) -> dict[str, object]:
        """Return the options by the names that users know; ranks compare them as text."""
        replica = self.replica if isinstance(self.replica, str) else [each.ranks for each in self.replica]
        return {**{name: getattr(self, name) for name in self.__slots__}, "replica": replica}

    def cut(self, sizes: Sequence[int]) -> list[slice]:
        """Return which parameters are in which fragment: whole ones, in order, about as many elements in each.

        Args:
            sizes: elements of the parameters, in order.

        Returns:
            As many as there are fragments; none of them is empty, unless there is no parameter.

        Raises:
            ConfigError: there are too many fragments for so many parameters, or for the steps of a period.
        """
        most = min(self.period, max(len(sizes), 1))
        _require(
            self.fragments <= most,
            f"fragments must be at most {most}, as there are {len(sizes)} parameters and {self.period} steps",
            self.fragments,
        )
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(sizes) else 0
        cuts = [0]
        for number in range(1, self.fragments):
            nearest = int(np.abs(ends - total * number / self.fragments).argmin()) + 1
            cuts.append(min(max(nearest, cuts[-1] + 1), len(sizes) - self.fragments + number))
        return [slice(*pair) for pair in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]


def _require(right: bool, rule: str, given: object) -> None:
    if not right:
        raise ConfigError(f"{rule}; got {shown(given)}")


def averaging(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `LocalSGD`: those of `DiLoCo`, whose outer step is an average unless they say otherwise."""
    return {"outer_lr": 1.0, "outer_momentum": 0.0, **options}


#: Of classes that train locally.
LOCAL_OPTIONS = Declared(
    LocalArguments, {name: each.default for name, each in inspect.signature(LocalOptions).parameters.items()}
)
