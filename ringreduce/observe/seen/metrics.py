"""What this rank's collectives and asynchronous operations add up to since `init`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.instruments import EngineTally, Pace, Tally
from ringreduce.observe.seen.pace import Slow, find_slow

_log = logging.getLogger(__name__)

#: Of OpenMetrics: a family's name, its type, what it means, and its values with their labels.
Family = tuple[str, str, str, Iterable[tuple[Mapping[str, str], float]]]

Nodes = Sequence[Sequence[int]]


class Quantity(NamedTuple):
    """A metric.

    Attributes:
        name: after ``ringreduce_``; behind a blank a label, if there are several values.
        attributes: of what has it; with a label, by its values.
        meaning: in a sentence.
    """

    name: str
    attributes: str | Mapping[str, str]
    meaning: str

    def family(self, sources: Iterable[tuple[Mapping[str, str], object]]) -> Family:
        """Return what is known of it. One that cannot be made is empty, and the others come.

        Args:
            sources: labels, and what has the attributes.
        """
        name, _, label = self.name.partition(" ")
        pairs = {"": self.attributes} if isinstance(self.attributes, str) else self.attributes
        samples: list[tuple[Mapping[str, str], float]] = []
        try:
            samples = [
                ({**labels, label: value} if label else labels, +number)
                for labels, source in sources
                for value, attribute in pairs.items()
                if (number := getattr(source, attribute)) is not None
            ]
        except (TypeError, ValueError, AttributeError) as error:
            _complain(name, f"{type(error).__name__}: {error}")
        return name.removesuffix("_total"), "counter" if name.endswith("_total") else "gauge", self.meaning, samples


@cache
def _complain(name: str, why: str) -> None:
    """Log once that a metric cannot be made."""
    _log.error("the metric %s is left out: %s", name, why)


_NESTED = ("collectives", "paces", "slow", "values")
#: Of the `Tally` of a collective.
_OF_COLLECTIVES = (
    Quantity("collective_calls_total", "calls", "Calls of a collective."),
    Quantity("collective_bytes_total", "nbytes", "Bytes of this rank's that these were over."),
    Quantity("collective_seconds_total", "seconds", "How long they took, waiting for other ranks included."),
)
#: Of `Metrics`.
_OF_OPERATIONS = (
    Quantity("operations_total", "operations", "Asynchronous operations and optimizer steps that have come to an end."),
    Quantity("operation_batches_total", "batches", "In how many pieces these ran."),
    Quantity("operation_seconds_total", "operations_s", "How long these took."),
    Quantity("overlapped_seconds_total", "overlapped_s", "How much of that while the program did something else."),
)
#: Of the `Pace` of this rank, in `Metrics.to_openmetrics` alone; /metrics has `ringreduce.observe.out.metric_table`.
_OF_STEPS = (
    Quantity("steps_last_total", "last", "In how many training steps this rank came last."),
    Quantity("late_seconds_total", "late_s", "How much later than the last but one it came then."),
    Quantity(
        "pace_seconds_total on",
        {"own": "own_s", "input": "loading_s", "waiting": "waited_s"},
        "Where the time of training steps went.",
    ),
)


def openmetrics(families: Iterable[Family]) -> str:
    """Return the text format of OpenMetrics 1.0; Prometheus reads it, too."""
    lines = []
    for name, kind, meaning, samples in families:
        lines += [f"# TYPE ringreduce_{name} {kind}", f"# HELP ringreduce_{name} {meaning}"]
        for labels, value in samples:
            text = ",".join(f'{label}="{_escaped(said)}"' for label, said in labels.items())
            lines.append(f"ringreduce_{name}{'_total' * (kind == 'counter')}{{{text}}} {value}")
    return "\n".join([*lines, "# EOF", ""])


def _escaped(said: object) -> str:
    """Return the value of a label as OpenMetrics has it; names of values and hosts may hold anything."""
    return str(said).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@dataclass(frozen=True, slots=True)
class Metrics:
    """A snapshot of this rank's counters, over the process sets that are registered and the groups that are open.

    Attributes:
        collectives: by name, of those that were called; those that carried out asynchronous operations and optimizer
            steps included.
        operations: asynchronous operations and optimizer steps that have come to an end.
        batches: in how many pieces they ran; what is fused runs in one.
        operations_s: how long those took (seconds).
        overlapped_s: how much of that while the program did something else than wait.
        waited_s: how long the program has waited for them, in a wait that goes on, too.
        late_rank: the rank of the world that others last had to wait for, for more than a millisecond, with an
            asynchronous operation or an optimizer step; None: there was none.
        late_s: how long (seconds).
        paces: by rank of the world, the pace of each rank in all training steps since `init`; the same on all ranks
            that have ended the same steps.
        slow: for whom the others wait in the last 128 steps (with more than 16 ranks, in eight times as many steps as
            ranks), and why; None: they hardly wait, or there were fewer than 64 steps.
        values: the last ones that this rank has reported (`ringreduce.report_value`), by name.
    """

    collectives: dict[str, Tally]
    operations: int
    batches: int
    operations_s: float
    overlapped_s: float
    waited_s: float
    late_rank: int | None
    late_s: float
    paces: dict[int, Pace] = field(default_factory=dict)
    slow: Slow | None = None
    values: dict[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """Return all of it as numbers by name: ``allreduce/seconds``, ``operations``, ``overlap``, ...; NaN: none."""
        found = {
            f"{name}/{each.name}": float(getattr(total, each.name))
            for name, total in self.collectives.items()
            for each in fields(Tally)
        }
        singles = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NESTED}
        singles["overlap"] = self.overlap
        found |= {f"value/{name}": each for name, each in self.values.items()}
        return found | {name: math.nan if value is None else float(value) for name, value in singles.items()}

    def add_to(self, writer: Any, step: int) -> None:
        """Add all `scalars` to a log of TensorBoard.

        Args:
            writer: has a method ``add_scalar(name, value, step)``, as torch's ``SummaryWriter``.
            step: of the training.
        """
        for name, value in self.scalars().items():
            writer.add_scalar(f"ringreduce/{name}", value, step)

    def to_json(self) -> str:
        """Return all `scalars` as a JSON object; what there is none of is null."""
        return json.dumps({name: None if math.isnan(value) else value for name, value in self.scalars().items()})

    def to_openmetrics(self, rank: int) -> str:
        """Return it in the text format of OpenMetrics 1.0, for a collector that reads files.

        What a job serves as well has the same name there (`ringreduce.observe.out.metric_table`).

        Args:
            rank: becomes a label.
        """
        mine = {"rank": str(rank)}
        of_collectives = [({"collective": name, **mine}, total) for name, total in self.collectives.items()]
        of_steps = [(mine, self.paces[rank])] if rank in self.paces else []
        families = [
            *(each.family(of_collectives) for each in _OF_COLLECTIVES),
            *(each.family([(mine, self)]) for each in _OF_OPERATIONS),
            *(each.family(of_steps) for each in _OF_STEPS if of_steps),
        ]
        if self.values:
            values = [({"name": name, **mine}, each) for name, each in self.values.items()]
            families.append(("value", "gauge", "What the program has reported last.", values))
        return openmetrics(families)

    @property
    def overlap(self) -> float:
        """The part of the time of asynchronous operations that cost the program nothing, 0 to 1."""
        return self.overlapped_s / self.operations_s if self.operations_s else 0.0

    @classmethod
    def of(
        cls,
        communicators: Iterable[Communicator],
        engines: Sequence[tuple[EngineTally, float, Sequence[int], Nodes]],
    ) -> Metrics:
        """Add up the counters of this process.

        Args:
            communicators: those of blocking calls, and those of engines.
            engines: of each, what it has done, how long the program has waited for it (seconds), its ranks of the
                world, and the nodes of these. Paces are those of the one that has trained most.
        """
        counted = [{**each.tallies, **each.message_tallies} for each in communicators]
        totals = {
            name: Tally(*(sum(getattr(each[name], part.name) for each in counted) for part in fields(Tally)))
            for name in (counted[0] if counted else ())
        }
        tallies = [tally for tally, *_ in engines]
        heard = [(tally.late, ranks) for tally, _, ranks, _ in engines if tally.late is not None]
        late, ranks = max(heard, default=((0.0, 0, 0.0), ()))
        trained = max(
            (each for each in engines if each[0].paces), key=lambda each: each[0].paces[0].steps, default=None
        )
        return cls(
            collectives={name: total for name, total in totals.items() if total.calls},
            operations=sum(each.operations for each in tallies),
            batches=sum(each.batches for each in tallies),
            operations_s=sum(each.seconds for each in tallies),
            overlapped_s=sum(each.overlapped_s for each in tallies),
            waited_s=sum(waited_s for _, waited_s, *_ in engines),
            late_rank=ranks[late[1]] if heard else None,
            late_s=late[2],
            paces={} if trained is None else dict(zip(trained[2], trained[0].paces, strict=True)),
            slow=None if trained is None else find_slow(trained[0].recent, trained[3], trained[2]),
        )
