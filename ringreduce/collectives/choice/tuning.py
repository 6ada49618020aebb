"""Measured choices: a cost model of a machine, and a table of what ran fastest there, for allreduce.

Everything here is a value that is computed from other values, so ranks that hold the same table choose alike; only
`Table.save` and `Table.load` touch a file. `ringreduce.bench.tune` makes tables and their models.

The model is the alpha-beta-gamma model in which the algorithms state their cost (Thakur, Rabenseifner and Gropp,
doi:10.1177/1094342005051521), with two terms more for ranks that share memory:

    rounds * alpha + n sent * beta + barriers * sync + n touched * copy + n reduced * gamma

and one for what each message costs a processor, messages * message, as a rank may send many in a round.

Where there are several nodes, "sent" is what leaves the busiest node, since its ranks share one link.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ringreduce import algorithms
from ringreduce.algorithms import Collective
from ringreduce.collectives.call import Problem, Work, path_for
from ringreduce.common.config import VERSION
from ringreduce.common.errors import ConfigError
from ringreduce.common.files import read_file, replace_file
from ringreduce.common.quantities import format_seconds
from ringreduce.common.topology import Topology

#: Format of the file; files of other formats are not read.
_FORMAT = 2
#: Size of a file that is read, at most: ten times what `ringreduce.bench.tune` writes for thousands of ranks.
_MOST_NBYTES = 4 << 20
#: Seconds; with sizes below 2^63 nothing that is computed from such times is infinite.
_MOST_SECONDS = 1e9
#: Digits of a whole number in a file, at most: what 64 bits hold.
_MOST_DIGITS = 20
#: Characters that an error shows of a text from a file, at most.
_SHOWN = 200
#: The algorithm of the next smaller size is kept unless another one is faster by this factor: noise must not decide.
_HYSTERESIS = 1.05


def work(algorithm: str, nbytes: int, topology: Topology) -> Work:
    """Return what one of our allreduce algorithms does with ``nbytes`` bytes per rank.

    Raises:
        ConfigError: there is no such algorithm, or it cannot run there.
    """
    call = Problem(Collective.ALLREDUCE, nbytes, topology)
    return path_for(algorithm, call).cost(algorithm, call)


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the parts of an allreduce take on one machine.

    Attributes:
        alpha: seconds per round of messages.
        beta: seconds per byte sent.
        sync: seconds per barrier of the ranks of a node.
        copy: seconds per byte loaded from or stored to another rank's memory.
        gamma: seconds per byte reduced.
        message: seconds of a rank per message that it sends or receives.
        vendor_alpha: seconds that the MPI library's own allreduce takes for nothing: how it works inside is not known.
        vendor_beta: seconds that it takes per byte of the buffer.
    """

    alpha: float
    beta: float
    sync: float
    copy: float
    gamma: float
    message: float = 0.0
    vendor_alpha: float = 0.0
    vendor_beta: float = 0.0

    def predict(self, algorithm: str, nbytes: int, topology: Topology) -> float:
        """Return how many seconds an allreduce of ``nbytes`` bytes per rank should take.

        Raises:
            ConfigError: there is no such algorithm, or it cannot run there.
        """
        if not is_ours(algorithm) and self.vendor_alpha + self.vendor_beta > 0:
            return self.vendor_alpha + self.vendor_beta * nbytes
        parameters = (self.alpha, self.beta, self.sync, self.copy, self.gamma, self.message)
        return sum(factor * value for factor, value in zip(work(algorithm, nbytes, topology), parameters, strict=True))

    def scale(self, algorithm: str, seconds: float, measured: int, nbytes: int, topology: Topology) -> float:
        """Carry a time that was taken at ``measured`` bytes over to ``nbytes``; as it is where the model says nothing.

        Raises:
            ConfigError: as `predict` does.
        """
        here, there = (self.predict(algorithm, size, topology) for size in (measured, nbytes))
        return seconds * there / here if here > 0 and there > 0 else seconds


def is_ours(algorithm: str) -> bool:
    """Return whether an allreduce algorithm is none of the MPI library."""
    return algorithm in algorithms.names(Collective.ALLREDUCE)


@dataclass(frozen=True, slots=True)
class Key:
    """What a table is valid for; of any other machine it says nothing.

    Attributes:
        topology: the ranks and their nodes.
        library: what the MPI library calls itself; ``"none"`` without one.
        version: of ringreduce.
        device: what holds the data.
    """

    topology: Topology
    library: str
    version: str = VERSION
    device: str = "cpu"

    @property
    def text(self) -> str:
        """The key in one line, from which `digest` is made; its form must never change."""
        nodes = "/".join(" ".join(map(str, node)) for node in self.topology.nodes)
        return f"ranks {nodes}; {self.library}; ringreduce {self.version}; {self.device}"

    @property
    def digest(self) -> str:
        """The SHA-256 of the text, in hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def file_name(self) -> str:
        return f"allreduce-{self.digest}.json"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One algorithm at one size.

    Attributes:
        algorithm: its name.
        median_s: the median of the times in seconds.
        times_s: of each call, the slowest rank's.
    """

    algorithm: str
    median_s: float
    times_s: tuple[float, ...]

    @classmethod
    def of_times(cls, algorithm: str, times_s: Sequence[float]) -> Candidate:
        """Take the median of at least one time; they are rounded to nanoseconds, as no clock knows better."""
        times = tuple(max(1e-9, round(float(time_s), 9)) for time_s in times_s)
        return cls(algorithm, statistics.median(times), times)


@dataclass(frozen=True, slots=True)
class MeasuredSize:
    """What was measured at one size: at least one candidate, each algorithm once."""

    nbytes: int
    candidates: tuple[Candidate, ...]

    @property
    def medians(self) -> dict[str, float]:
        """Algorithm -> median in seconds."""
        return {candidate.algorithm: candidate.median_s for candidate in self.candidates}


class Decision(NamedTuple):
    """What to run, and the next best; None and infinity where there is nothing else.

    The times are in seconds; the second's can be smaller by a few percent, see `Table.choose`.
    """

    algorithm: str
    seconds: float
    second: str | None
    second_seconds: float


@dataclass(frozen=True, slots=True)
class Table:
    """What was measured on one machine, and what follows from it.

    Attributes:
        key: the machine.
        model: fitted to it.
        rows: at least one, by ascending size.
        busy_cores: how many cores other processes took meanwhile, on the machine where it was most; 0.0: none to speak
            of.
    """

    key: Key
    model: CostModel
    rows: tuple[MeasuredSize, ...]
    busy_cores: float = 0.0

    def choose(self, nbytes: int) -> Decision:
        """Return the algorithm for ``nbytes`` bytes per rank.

        Between two measured sizes, times are interpolated (straight lines in a plot of logarithms) for the algorithms
        that were measured at both and work alike at both. Beyond them, those of the nearest size are scaled as the
        model says. The fastest is taken; but what is taken at the next smaller size stays if it is no more than 5 %
        slower, and so does, next, what is taken at the next larger one.
        """
        times, neighbours = self._times(nbytes)
        winners = self._winners()
        name = _prefer([winners[place] for place in neighbours], times)
        others = {other: seconds for other, seconds in times.items() if other != name}
        second = min(others, key=others.__getitem__, default=None)
        return Decision(
            name, seconds=times[name], second=second, second_seconds=math.inf if second is None else others[second]
        )

    def explain(self, nbytes: int) -> str:
        """Say in one line what the measurement and the model say of what `choose` takes, and what would be second."""
        chosen = self.choose(nbytes)
        model = self.model.predict(chosen.algorithm, nbytes, self.key.topology)
        text = f"{self._origin(nbytes)} {format_seconds(chosen.seconds)}, model {format_seconds(model)}; "
        if chosen.second is None:
            text += "nothing else was measured"
        else:
            percent = 100 * (chosen.second_seconds / chosen.seconds - 1)
            text += f"second {chosen.second} {format_seconds(chosen.second_seconds)} ({percent:+.0f} %)"
        if self.busy_cores:
            text += f"; measured while other processes took {self.busy_cores:.2g} cores"
        return text

    def to_json(self) -> str:
        """Return the text of a file."""
        document = {
            "format": _FORMAT,
            "key": {**asdict(self.key), "topology": self.key.topology.nodes},
            "model": asdict(self.model),
            "rows": [asdict(row) for row in self.rows],
            "busy_cores": self.busy_cores,
        }
        return json.dumps(document) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Table:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: the text says something else, or was written by another version.
        """
        try:
            document = json.loads(text, parse_int=_whole)
            if not isinstance(document, dict) or "format" not in document:
                complaint = "not a tuning table: it has no format version"
            elif document["format"] != _FORMAT:
                shown = _one_line(repr(document["format"]))
                complaint = f"a tuning table of format {shown}, where {_FORMAT} is understood"
            else:
                return _parse(document)
        except json.JSONDecodeError as error:
            complaint = f"a tuning table that is not JSON: {error}"
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            complaint = f"a damaged tuning table: {type(error).__name__}: {_one_line(str(error))}"
        raise ConfigError(complaint)

    def save(self, path: Path) -> None:
        """Write a file. Programs that read it at the same time find the old one or the new one, never a part.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, lambda file: file.write(self.to_json().encode()))
        except OSError as error:
            raise ConfigError(f"the tuning table cannot be written: {error}") from None

    @classmethod
    def load(cls, path: Path, key: Key) -> Table:
        """Read a file, or the file that a link leads to. Does not block, whatever kind of file it is.

        Raises:
            ConfigError: it cannot be read or understood, or is for another machine than ``key``.
        """
        try:
            table = cls.from_json(_read(path))
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from None
        if table.key != key:
            theirs = _one_line(table.key.text)
            ours = _one_line(key.text)
            raise ConfigError(f"{path}: a tuning table for [{theirs}], and this is [{ours}]")
        return table

    def _times(self, nbytes: int) -> tuple[dict[str, float], list[int]]:
        """Return what each algorithm should take, and the places of the rows that say so, the smaller size first."""
        upper = next((place for place, row in enumerate(self.rows) if row.nbytes >= nbytes), len(self.rows) - 1)
        row = self.rows[upper]
        if row.nbytes == nbytes:
            return row.medians, [max(0, upper - 1), upper]
        if upper and row.nbytes > nbytes:
            below = self.rows[upper - 1]
            weight = math.log(nbytes / below.nbytes) / math.log(row.nbytes / below.nbytes)
            both = {
                name: below.medians[name] ** (1 - weight) * seconds**weight
                for name, seconds in row.medians.items()
                if name in below.medians and self._works_alike(name, below.nbytes, nbytes, row.nbytes)
            }
            if both:
                return both, [upper - 1, upper]
            if weight < 0.5:
                upper -= 1
        row = self.rows[upper]
        topology = self.key.topology
        scale = self.model.scale
        return {
            name: scale(name, took, row.nbytes, nbytes=nbytes, topology=topology) for name, took in row.medians.items()
        }, [upper]

    def _works_alike(self, algorithm: str, *sizes: int) -> bool:
        """Return whether an algorithm takes the same path at these sizes; the MPI library's is not known."""
        calls = [Problem(Collective.ALLREDUCE, nbytes, self.key.topology) for nbytes in sizes]
        return not is_ours(algorithm) or len({path_for(algorithm, call) for call in calls}) == 1

    def _winners(self) -> list[str]:
        """Return what runs at each measured size: the fastest, or what runs at the size before if that is close."""
        winners: list[str] = []
        for row in self.rows:
            winners.append(_prefer(winners[-1:], row.medians))
        return winners

    def _origin(self, nbytes: int) -> str:
        """Say where the times of `choose` come from."""
        rows = [self.rows[place].nbytes for place in self._times(nbytes)[1]]
        if nbytes in rows:
            return "measured"
        if len(rows) == 1:
            return f"scaled by the model from {rows[0]} bytes"
        return f"interpolated between {rows[0]} and {rows[1]} bytes"


def _prefer(favourites: Sequence[str], times: Mapping[str, float]) -> str:
    """Return the first of the favourites that is as good as the fastest, else the fastest."""
    fastest = min(times, key=times.__getitem__)
    return next((name for name in favourites if times.get(name, math.inf) <= _HYSTERESIS * times[fastest]), fastest)


def _read(path: Path) -> str:
    """Return the text of a file, which need not be one of ours."""
    return read_file(path, most_nbytes=_MOST_NBYTES).decode()


def _one_line(text: str) -> str:
    """Return a text for use in one line: without its middle if it is long, and without unprintable characters."""
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def _whole(digits: str) -> int:
    """Read a whole number of JSON; without a limit, the time for that grows with the square of its digits."""
    _require(len(digits) <= _MOST_DIGITS, f"a number of {len(digits)} digits")
    return int(digits)


def _parse(document: Mapping[str, Any]) -> Table:
    """Read the parts of a table; a KeyError, TypeError or ValueError means that something is wrong."""
    key = dict(document["key"])
    nodes = tuple(tuple(int(rank) for rank in node) for node in key.pop("topology"))
    ranks = sorted(itertools.chain(*nodes))
    _require(bool(nodes) and all(nodes) and ranks == list(range(len(ranks))), f"nodes {nodes}")
    topology = Topology(nodes)
    runnable = algorithms.names(Collective.ALLREDUCE, topology)
    for name, value in key.items():
        _require(isinstance(value, str), f"{name} is {value!r}")
    model = CostModel(**{name: _number(value) for name, value in document["model"].items()})
    rows = tuple(
        MeasuredSize(int(row["nbytes"]), tuple(map(_candidate, row["candidates"]))) for row in document["rows"]
    )
    sizes = [row.nbytes for row in rows]
    ascending = bool(sizes) and sizes == sorted(set(sizes)) and sizes[0] > 0 and sizes[-1] < 1 << 63
    _require(ascending, f"the sizes are {sizes}")
    for row in rows:
        _require(0 < len(row.medians) == len(row.candidates), f"no algorithm, or one twice, at {row.nbytes} bytes")
        for name in row.medians:
            _require(name in runnable or not is_ours(name), f"algorithm {name!r} cannot run there")
            has_model = is_ours(name) or model.vendor_alpha + model.vendor_beta > 0
            _require(has_model, f"nothing is known about algorithm {name!r}")
    return Table(Key(topology, **key), model, rows, busy_cores=_number(document["busy_cores"], "no number of cores"))


def _candidate(entry: Mapping[str, Any]) -> Candidate:
    name = entry["algorithm"]
    median = _number(entry["median_s"])
    _require(isinstance(name, str) and median > 0, f"{name!r} takes {median} s")
    return Candidate(name, median, tuple(map(_number, entry["times_s"])))


def _number(value: Any, otherwise: str = "not a time") -> float:
    number = float(value)
    _require(0 <= number <= _MOST_SECONDS, f"{value!r} is {otherwise}")
    return number


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise ValueError(complaint)
