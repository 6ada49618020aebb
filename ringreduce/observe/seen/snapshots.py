"""A snapshot: what a rank has done last and does now. Values, and their JSON between ranks, in files and for `top`.

Times are seconds since 1970. Every field of JSON has the name of an attribute. A reader refuses the JSON of another
version; `VERSION` is raised with any change of an attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ringreduce.common.errors import ConfigError
from ringreduce.observe.seen.resources import Counters
from ringreduce.observe.seen.step_clock import SpentOnSteps

VERSION = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SeenCall:
    """A blocking collective; ``number`` counts those of its set from 1, and ``ended`` is None while it runs."""

    number: int
    collective: str
    nbytes: int
    started: float
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class SeenOperation:
    """An asynchronous operation, and the line of the program that submitted it. A time that has not come is None."""

    name: str
    signature: str
    place: str
    submitted: float
    started: float | None = None
    ended: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SeenSet:
    """A process set, whose ``id`` is a number, or a group of torch.distributed; ``ranks`` is None if all are in it."""

    id: int | str
    name: str
    ranks: tuple[int, ...] | None = None
    calls: tuple[SeenCall, ...] = ()
    operations: tuple[SeenOperation, ...] = ()


@dataclass(frozen=True, slots=True)
class SeenFrame:
    """A frame of a stack."""

    file: str
    line: int
    function: str
    text: str


@dataclass(frozen=True, slots=True)
class SeenThread:
    """A thread and its stack, the innermost frame last."""

    name: str
    stack: tuple[SeenFrame, ...]


@dataclass(frozen=True, slots=True)
class UsedResources:
    """What a process and its host had used at some time."""

    host: str
    time: float
    resources: Counters


class RateSample(NamedTuple):
    """How many steps and samples were done at some time, and the seconds spent in communication until then."""

    time: float
    steps: int
    samples: float
    communication_s: float


class ReportedValue(NamedTuple):
    """The sum and the number of those values of a name that came since the last snapshot, and the last value of all."""

    total: float
    number: int
    last: float


class SlowRank(NamedTuple):
    """For whom the others wait in recent steps, how often and why. Rank -1: several, in turn or at once."""

    rank: int
    lateness: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a rank has done last and does now. What ranks write down when a call fails has threads, but no status.

    Attributes:
        rank, size, host, pid, time: who, and when.
        error: after which no call was possible.
        sets: what the rank is a member of. For `top`, each has its last call and the operation that waits longest.
        threads: in what is written down.
        job, command: the job is a word that its ranks share.
        began: when the world did.
        stepped: when the rank made its last step; else when it began.
        samples: those of the last ten seconds, the oldest first.
        resources: what was used until now.
        first, last: what was used at the end of the first step; about that of the last step, or None if this snapshot
            is the first one after a step.
        spent: the time since the first step; None before it.
        values: what the program reports, by name.
        slow: for whom the others wait; None: they hardly wait.
        progress, begun: steps, collectives and reports; whether there was a step or a report.
        busy, place: with what the rank is busy; where it is in the program.
        arrived: when rank 0 got it, by the clock of rank 0.
    """

    version: int = VERSION
    rank: int
    size: int
    host: str
    pid: int
    time: float
    error: str | None = None
    sets: tuple[SeenSet, ...] = ()
    threads: tuple[SeenThread, ...] = ()
    job: str = ""
    command: tuple[str, ...] = ()
    began: float = 0.0
    stepped: float = 0.0
    samples: tuple[RateSample, ...] = ()
    resources: Counters = field(default_factory=Counters)
    first: UsedResources | None = None
    last: UsedResources | None = None
    spent: SpentOnSteps | None = None
    values: dict[str, ReportedValue] = field(default_factory=dict)
    slow: SlowRank | None = None
    progress: int = 0
    begun: bool = False
    busy: str | None = None
    place: str = ""
    arrived: float | None = None

    def age_s(self, now: float) -> float:
        """Return how long ago it came; by the clock of this host, or by that of its own if nobody has sent it."""
        return max(now - (self.time if self.arrived is None else self.arrived), 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        return {name: _plain(getattr(self, name)) for name in _readers(Snapshot)}

    @classmethod
    def from_json(cls, said: Any) -> Snapshot:
        """Return the snapshot of which `to_json` has returned the values.

        Raises:
            ConfigError: it is of another version, or no snapshot.
        """
        found = said.get("version") if isinstance(said, dict) else None
        if found != VERSION:
            raise ConfigError(f"it is no snapshot of version {VERSION}, which this ringreduce reads, but {found!r}")
        return from_json(cls, said)

    def changed(self, said: Mapping[str, Any], arrived: float) -> Snapshot:
        """Return it with other attributes, of which `to_json` has returned the values, and which came then.

        Raises:
            ConfigError: they are none of a snapshot.
        """
        return replace(self, **{**_attributes(Snapshot, said), "arrived": arrived})


def _plain(value: Any) -> Any:
    """Return a value of JSON; `dataclasses.asdict` takes four times as long, and each rank does this once a second."""
    kind = type(value)
    if is_dataclass(kind):
        return {name: _plain(getattr(value, name)) for name in _readers(kind)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def from_json(kind: type[T], said: Any) -> T:
    """Return an object of a dataclass whose attributes are values of JSON, or objects of which these are the parts.

    Raises:
        ConfigError: they are none.
    """
    made: T = _object(kind, said)
    return made


def _attributes(kind: type, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a dataclass from values of JSON. Rank 0 does this for each rank, once a second."""
    readers = _readers(kind)
    try:
        return {name: value if (read := readers[name]) is None else read(value) for name, value in said.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"it is no {kind.__name__}: {error!r}") from None


@cache
def _readers(kind: type) -> dict[str, Callable[[Any], Any] | None]:
    hints = get_type_hints(kind)
    return {each.name: _reader(hints[each.name]) for each in fields(kind)}


def _reader(kind: Any) -> Callable[[Any], Any] | None:
    """Return a function that makes an object of a type from values of JSON; None: it is such a value itself."""
    inner = get_args(kind)
    if get_origin(kind) is UnionType:
        known = _reader(inner[0])
        return None if known is None else lambda said: None if said is None else known(said)
    if get_origin(kind) is tuple:
        element = _reader(inner[0])
        return tuple if element is None else lambda said: tuple(map(element, said))
    if get_origin(kind) is dict:
        entry = _reader(inner[1])
        return None if entry is None else lambda said: {name: entry(value) for name, value in said.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        return partial(_object, kind)
    return (lambda said: kind(*said)) if issubclass(kind, tuple) else None  # a NamedTuple, which JSON has as a list


def _object(kind: type, said: Mapping[str, Any]) -> Any:
    return kind(**_attributes(kind, said))
