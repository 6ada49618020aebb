"""What this rank's collectives and asynchronous operations add up to since `init`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.instruments import EngineTally, Pace, Tally
from ringreduce.observe.seen.pace import Slow, find_slow

#: Of OpenMetrics: a family's name, its type, what it means, and its values with their labels.
Family = tuple[str, str, str, Iterable[tuple[Mapping[str, str], float]]]

Nodes = Sequence[Sequence[int]]

#: Families of OpenMetrics: name, meaning, and the attribute of `Tally`, or of `Metrics`.
_TOTALS = (
    ("collective_calls", "Calls of a collective.", "calls"),
    ("collective_bytes", "Bytes of this rank's that these were over.", "nbytes"),
    ("collective_seconds", "How long they took, waiting for other ranks included.", "seconds"),
)
_NESTED = ("collectives", "paces", "slow", "values")
_PACES = (
    ("steps_last", "In how many training steps this rank came last.", "last"),
    ("late_seconds", "How much later than the last but one it came then.", "late_s"),
)
#: Where the time of training steps went, and the attribute of `Pace`.
_SPENT = {"own": "own_s", "input": "loading_s", "waiting": "waited_s"}
_SINGLES = (
    ("operations", "Asynchronous operations and optimizer steps that have come to an end.", "operations"),
    ("operation_batches", "In how many pieces these ran.", "batches"),
    ("operation_seconds", "How long these took.", "operations_s"),
    ("overlapped_seconds", "How much of that while the program did something else.", "overlapped_s"),
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
        families: list[Family] = []
        for name, meaning, part in _TOTALS:
            samples = [({"collective": key, **mine}, getattr(each, part)) for key, each in self.collectives.items()]
            families.append((name, "counter", meaning, samples))
        for name, meaning, part in _SINGLES:
            families.append((name, "counter", meaning, [(mine, getattr(self, part))]))
        if (pace := self.paces.get(rank)) is not None:
            families += [(name, "counter", meaning, [(mine, getattr(pace, part))]) for name, meaning, part in _PACES]
            spent = [({**mine, "on": on}, getattr(pace, part)) for on, part in _SPENT.items()]
            families.append(("spent_seconds", "counter", "Where the time of training steps went.", spent))
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
