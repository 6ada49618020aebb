"""How replicas train that step by themselves: one value, as a user gives it, and checked; see `local`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringreduce.common.arguments import real_number, shown, whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.compression import WireFormat, has_reducers

#: What can be averaged.
_AVERAGED = ("parameters", "buffers", "state")


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How replicas train, as a user says it; `checked` returns what is meant. All must agree on all ranks.

    Attributes:
        period: so many steps of a replica come between two exchanges.
        outer_lr, outer_momentum: of the outer step.
        warmup_steps: so many first steps reduce the gradients over all ranks.
        fragments: the parameters are cut into so many, which are exchanged at different steps of a period.
        delay: so many steps are made while an exchange is under way.
        compression: a `WireFormat` for the differences; None: they travel as they are.
        replica: ``"node"``, ``"rank"`` or process sets that have each rank of the world once.
        average: what is averaged: ``"parameters"``, and ``"buffers"`` and ``"state"`` if they are there.
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

    def checked(self, parameters: int, ranks: int) -> LocalOptions:
        """Return the options, checked, given the number of parameters and that of ranks.

        Raises:
            ConfigError: one is wrong, or two do not go together.
        """
        made = replace(
            self,
            period=whole_number("period", self.period, 1),
            outer_lr=real_number("outer_lr", self.outer_lr),
            outer_momentum=real_number("outer_momentum", self.outer_momentum),
            warmup_steps=whole_number("warmup_steps", self.warmup_steps, 0),
            fragments=whole_number("fragments", self.fragments, 1),
            delay=whole_number("delay", self.delay, 0),
            compression=_checked_compression(self.compression),
            average=_checked_average(self.average),
        )
        made.replicas([[rank] for rank in range(ranks)])
        _require(0.0 < made.outer_lr < math.inf, f"outer_lr must be a positive number, got {made.outer_lr}")
        _require(0.0 <= made.outer_momentum < 1.0, f"outer_momentum must be from 0 to 1, got {made.outer_momentum}")
        _require(made.delay < made.period, f"delay must be less than the period, {made.period}; got {made.delay}")
        most = min(made.period, max(parameters, 1))
        _require(
            made.fragments <= most,
            f"fragments must be at most {most}, as there are {parameters} parameters and {made.period} steps in a "
            f"period; got {made.fragments}",
        )
        return made

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
        _require(
            all(isinstance(each, ProcessSet) for each in given),
            f'replica is "node", "rank" or a list of process sets, got {shown(self.replica)}',
        )
        sets = [each.ranks or everyone for each in given]
        _require(
            sorted(rank for each in sets for rank in each) == everyone,
            f"the process sets of replica must have each of {len(everyone)} ranks once, got {sets}",
        )
        return sets

    @property
    def averages_weights(self) -> bool:
        """Whether the outer step is an average of weights, for which nothing has to be kept."""
        return bool(self.outer_lr == 1.0 and self.outer_momentum == 0.0 and self.compression is None)

    def in_words(self) -> dict[str, object]:
        """Return the options by the names that users know; ranks compare them as text."""
        replica = self.replica if isinstance(self.replica, str) else [each.ranks for each in self.replica]
        return {**{name: getattr(self, name) for name in self.__slots__}, "replica": replica}


def _require(right: bool, otherwise: str) -> None:
    if not right:
        raise ConfigError(otherwise)


def _checked_compression(compression: Any) -> type[WireFormat] | None:
    if compression is None:
        return None
    if has_reducers(compression) and isinstance(compression, type) and issubclass(compression, WireFormat):
        return compression
    raise ConfigError(f"compression is none, fp16, bf16, fp8, int8 or int4 of hvd.Compression; got {compression!r}")


def _checked_average(average: Any) -> tuple[str, ...]:
    given = tuple(average) if isinstance(average, Iterable) and not isinstance(average, str) else (average,)
    if "parameters" not in given or any(each not in _AVERAGED for each in given):
        raise ConfigError(f"average must have 'parameters', and may have 'buffers' and 'state'; got {shown(average)}")
    return given


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
