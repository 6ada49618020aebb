"""How replicas train that step by themselves: one value, as a user gives it, and checked; see `local`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass
from math import inf
from typing import Any

import numpy as np

from ringreduce.common.arguments import real_number, shown, whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.compression import is_wire_format

#: What can be averaged.
_AVERAGED = ("parameters", "buffers", "state")


@dataclass(slots=True)
class LocalOptions:
    """How replicas train, as a user says it; checked when it is made. All must agree on all ranks.

    Attributes:
        period: steps of a replica from one exchange to the next.
        outer_lr, outer_momentum: of the outer step.
        warmup_steps: how many first steps reduce the gradients over all ranks.
        fragments: how many parts the parameters are cut into, which are exchanged at different steps of a period.
        delay: steps that a replica makes while an exchange is under way.
        compression: a `WireFormat` for the differences; None: they travel as they are.
        replica: ``"node"``, ``"rank"`` or process sets that together have each rank of the world once.
        average: what is averaged: ``"parameters"``, and ``"buffers"`` and ``"state"`` if they are there.
        parameters, ranks: how many there are; not kept.

    Raises:
        ConfigError: one is wrong, or two do not go together.
    """

    period: Any
    outer_lr: Any
    outer_momentum: Any
    warmup_steps: Any
    fragments: Any
    delay: Any
    compression: Any
    replica: Any
    average: Any
    parameters: InitVar[int]
    ranks: InitVar[int]

    def __post_init__(self, parameters: int, ranks: int) -> None:
        for name, least in (("period", 1), ("warmup_steps", 0), ("fragments", 1), ("delay", 0)):
            setattr(self, name, whole_number(name, getattr(self, name), least))
        self.outer_lr = real_number("outer_lr", self.outer_lr)
        self.outer_momentum = real_number("outer_momentum", self.outer_momentum)
        self.average = self.average if isinstance(self.average, (list, tuple, set)) else [self.average]
        most = min(self.period, max(parameters, 1))
        _require(0.0 < self.outer_lr < inf, "outer_lr must be a positive number", self.outer_lr)
        _require(0.0 <= self.outer_momentum < 1.0, "outer_momentum must be from 0 to below 1", self.outer_momentum)
        _require(self.delay < self.period, f"delay must be less than the period, {self.period}", self.delay)
        _require(
            self.fragments <= most,
            f"fragments must be at most {most}, as there are {parameters} parameters and {self.period} steps",
            self.fragments,
        )
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
        self.replicas([[rank] for rank in range(ranks)])

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
        return bool(self.outer_lr == 1.0 and self.outer_momentum == 0.0 and self.compression is None)

    def in_words(self) -> dict[str, object]:
        """Return the options by the names that users know; ranks compare them as text."""
        replica = self.replica if isinstance(self.replica, str) else [each.ranks for each in self.replica]
        return {**{name: getattr(self, name) for name in self.__slots__}, "replica": replica}


def _require(right: bool, rule: str, given: object) -> None:
    if not right:
        raise ConfigError(f"{rule}; got {shown(given)}")


def cut(sizes: Sequence[int], fragments: int) -> list[slice]:
    """Return which parameters are in which fragment: whole ones, in order, so that fragments have about equal sizes.

    Args:
        sizes: elements of the parameters, in order.
        fragments: how many; at most as many as there are parameters. None of them is empty.
    """
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(sizes) else 0
    cuts = [0]
    for number in range(1, fragments):
        nearest = int(np.abs(ends - total * number / fragments).argmin()) + 1
        cuts.append(min(max(nearest, cuts[-1] + 1), len(sizes) - fragments + number))
    return [slice(*pair) for pair in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]
