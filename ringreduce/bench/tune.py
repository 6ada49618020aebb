"""``tune``: find out which allreduce algorithm is the fastest at each size on this machine, and write it down.

First a few calls of all algorithms at three sizes, to which the cost model is fitted; then many calls, in turns, of
those that can win by the model. Rank 0 decides everything, since only its clock says how much time remains, and
sends its decisions to the others.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective, Step, schedule_for
from ringreduce.bench.measure import (
    Contender,
    Noise,
    NoiseFound,
    ProcessorTimes,
    iterations_for,
    time_in_turn,
    turn_for,
)
from ringreduce.bench.measure import usage as usage_now
from ringreduce.collectives import VENDOR, Problem, Work
from ringreduce.collectives.choice.selection import choose
from ringreduce.collectives.choice.tuning import Candidate, CostModel, Key, MeasuredSize, Table, is_ours, work
from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.pickles import gather
from ringreduce.common.errors import ConfigError
from ringreduce.common.quantities import format_nbytes, format_seconds
from ringreduce.common.reduce_ops import SUM
from ringreduce.common.topology import Topology

Array = npt.NDArray[Any]

#: What is measured: times of each algorithm in seconds, given ``(nbytes, algorithms, iterations)``. Collective; the
#: times are those of the slowest rank and the same on all ranks.
Measure = Callable[[int, Sequence[str], int], Sequence[Sequence[float]]]

#: Bytes. Between a few KiB and a few MiB the winner changes, so there the steps are smaller. The largest stands for all
#: beyond it; twice that would take more than 300 MiB of each rank, for the same choice.
SIZES = (8, 512, *(1 << exponent for exponent in (12, 14, 15, 16, 18, 20, 22, 24, 25)))

#: Size -> algorithm -> seconds.
_Times = dict[int, dict[str, list[float]]]

_PROBES = 3  # timed calls of an algorithm from which it is decided how to go on
_WARMUP = 1
_KINDS = 2  # of buffers, of which each call takes one after the other
_FIT_SHARE = 1 / 4  # of the time: the most that fitting the model may take
_COMPLETE_SHARE = 1 / 10  # kept for measuring winners beside their sizes
_RANKS_WALKED = 32  # whose schedules are compared to find out whether two algorithms do the same
_CONTENDING = 2.0  # an algorithm is measured if it should take at most so many times as long as the fastest


def tune(
    communicator: Communicator,
    sizes: Sequence[int],
    directory: Path,
    emit: Callable[[str], None],
    budget_s: float = 60.0,
    *,
    even_if_busy: bool = False,
    measure: Measure | None = None,
    usage: Callable[[], ProcessorTimes] = usage_now,
) -> Table:
    """Measure allreduce algorithms on float32 and write a table of the fastest. Collective.

    Args:
        communicator: the ranks, at least two.
        sizes: of the buffers in bytes; the same on all ranks.
        directory: where the table goes; rank 0's counts.
        emit: gets the text, in whole lines, on rank 0.
        budget_s: about how many seconds it may take; large sizes are left out where it does not suffice for them. Rank
            0's counts.
        even_if_busy: write the table although other processes took the machines' time meanwhile; it says so. The same
            on all ranks.
        measure: takes the times, for tests.
        usage: reads the time, and how much of it processes took, for tests.

    Returns:
        The table, equal on all ranks.

    Raises:
        ConfigError: there is one rank; other processes took the machines' time; or rank 0 cannot write the table. On
            all ranks.
    """
    if communicator.size == 1:
        raise ConfigError("one rank has nothing to choose from: run tune under mpirun, as the program that it is for")
    wanted = sorted({max(4, nbytes // 4 * 4) for nbytes in sizes})
    measure = measure or calls_of(communicator, wanted[-1])

    def agree(decision: Any) -> Any:
        return gather(communicator, decision)[0]

    def ask(*order: Any) -> Sequence[Sequence[float]]:
        return measure(*agree(order))

    tuning = _Tuning(communicator, wanted, say=emit, budget_s=budget_s, clock=lambda: usage().at, ask=ask)
    noise = Noise(communicator, usage)

    def carry_out(decide: Callable[[], None]) -> NoiseFound:
        """Let rank 0 decide what all measure."""
        if communicator.rank == 0:
            decide()
            agree(None)
        else:
            while (order := agree(None)) is not None:
                measure(*order)
        return noise.look()

    for decide in (tuning.fit, tuning.sweep):
        found = carry_out(decide)
        if found.cores and not even_if_busy:  # rather than measure on in vain
            raise ConfigError(
                f"{found.text}: times taken meanwhile say little about this machine at rest. End the others, "
                "or write a table all the same, in which that is said, with --even-if-busy"
            )
    table: Table = agree(tuning.table(found.cores) if communicator.rank == 0 else None)
    path = directory / table.key.file_name
    complaint = agree(_save(table, path) if communicator.rank == 0 else None)
    if complaint is not None:
        raise ConfigError(complaint)
    if communicator.rank == 0:
        told = f"# {found.text}: the table says so\n" if found.cores else ""
        emit(f"{told}{_summary(table, tuning.rules)}# written to {path}\n")
    return Table.from_json(table.to_json())  # checked, as when it is read later


def calls_of(communicator: Communicator, largest_nbytes: int) -> Measure:
    """Return what times allreduces in place, algorithm after algorithm in short turns.

    A time is the mean of a call on a communication buffer and one on a private array. The choice must do for both, as
    it must be the same on all ranks and one may pass this and another that; and what wins on one kind of buffer can
    take twice as long as another algorithm on the other kind.
    """
    count = largest_nbytes // 4
    shared = communicator.empty(count)
    private = np.zeros(count, np.float32)
    shared.fill(0)  # zeros stay zeros, however often they are summed up

    def contender(name: str, nbytes: int) -> Contender:
        # Two views, made once: what is looked up for an array is kept as long as the array.
        ours = shared[: nbytes // 4]
        theirs = private[: nbytes // 4]

        def both() -> Array:
            communicator.allreduce(ours, out=ours, algorithm=name)
            communicator.allreduce(theirs, out=theirs, algorithm=name)
            return ours

        return Contender(name, ours, both)

    def measure(nbytes: int, names: Sequence[str], iterations: int) -> Sequence[Sequence[float]]:
        contenders = [contender(name, nbytes) for name in names]
        return [
            (row / _KINDS).tolist()
            for row in time_in_turn(communicator, contenders, iterations=iterations, warmup=_WARMUP)
        ]

    return measure


@dataclass
class _Tuning:
    """One run: what was measured so far and how much time is left; for rank 0, which decides.

    Attributes:
        ask: has all ranks measure.
        rules: size -> what the built-in rules take there.
    """

    communicator: Communicator
    sizes: Sequence[int]
    say: Callable[[str], None]
    budget_s: float
    clock: Callable[[], float]
    ask: Measure

    def __post_init__(self) -> None:
        rules = replace(self.communicator.config, algorithm=None)  # whatever settings and tables say
        problems = (Problem(Collective.ALLREDUCE, nbytes, self.communicator.topology, op=SUM) for nbytes in self.sizes)
        self.rules = {problem.nbytes: choose(problem, rules).algorithm for problem in problems}
        self._deadline = self.clock() + self.budget_s
        names = self.communicator.algorithms(Collective.ALLREDUCE)
        kept = {*distinct(names, self.communicator.topology), *self.rules.values()}
        self._names = [name for name in names if name in kept]
        self._probes: _Times = {}
        self._times: _Times = {}
        self._model = fit([])

    def fit(self) -> None:
        """Fit the model to a few calls of all algorithms at the smallest size, a middle one and a large one."""
        topology = self.communicator.topology
        middle = (len(self.sizes) - 1) // 2
        self.say(f"# {topology.describe()}; fitting the model to {', '.join(self._names)}\n")
        for nbytes in dict.fromkeys((self.sizes[0], self.sizes[middle])):
            self._probe(nbytes)
        large = self._largest_affordable(self.sizes[middle + 1 :])
        if large is not None:
            self._probe(large)
        self.say(f"# {_describe(self._model)}\n")

    def sweep(self) -> None:
        """Measure at each size, the smallest first, what can win there, for as long as there is time.

        Then what is the fastest at one size at those beside it too, so that it can be chosen in between.
        """
        for place, nbytes in enumerate(self.sizes):
            names = self._affordable(nbytes)
            if not names:
                self.say(f"# {format_nbytes(nbytes)} and more: no time left\n")
                break
            self.say(f"# {format_nbytes(nbytes)}: {', '.join(names)}\n")
            begin = self.clock()
            self._time(self._times, nbytes, names=names, iterations=_PROBES)
            if more := self._further_iterations(nbytes, begin, self.sizes[place + 1 :]):
                self._time(self._times, nbytes, names=names, iterations=more)
        for nbytes, names in self._missing():
            wanted = min(map(len, self._times[nbytes].values()))  # as many as the others had there, or fewer, or none
            for iterations in (wanted, _PROBES):
                if self._cost_s(nbytes, names, iterations) <= self._left_s():
                    self._time(self._times, nbytes, names=names, iterations=iterations)
                    break

    def table(self, busy_cores: float) -> Table:
        """Return what was found."""
        rows = (
            MeasuredSize(nbytes, tuple(starmap(Candidate.of_times, times.items())))
            for nbytes, times in self._times.items()
        )
        key = Key(self.communicator.topology, self.communicator.library)
        return Table(key, self._model, tuple(rows), busy_cores)

    def _probe(self, nbytes: int) -> None:
        self._time(self._probes, nbytes, names=self._names, iterations=_PROBES)
        topology = self.communicator.topology
        self._model = fit(
            Sample(name, size, topology=topology, seconds=statistics.median(times))
            for size, found in self._probes.items()
            for name, times in found.items()
        )

    def _time(self, into: _Times, nbytes: int, names: Sequence[str], iterations: int) -> None:
        for name, times in zip(names, self.ask(nbytes, names, iterations), strict=True):
            into.setdefault(nbytes, {}).setdefault(name, []).extend(times)

    def _left_s(self) -> float:
        return self._deadline - self.clock()

    def _largest_affordable(self, among: Sequence[int]) -> int | None:
        """Return the largest size at which all algorithms can be tried in the time that fitting may take."""
        left_s = self._left_s() - (1 - _FIT_SHARE) * self.budget_s
        return max((size for size in among if self._cost_s(size, self._names, _PROBES) <= left_s), default=None)

    def _contending(self, nbytes: int) -> list[str]:
        """Return what can win at a size; the library's own and what the rules take are always of interest."""
        expected = {name: self._expected_s(name, nbytes) for name in self._names}
        limit = _CONTENDING * min(expected.values())
        always = (VENDOR, self.rules[nbytes])
        return [name for name, seconds in expected.items() if seconds <= limit or name in always]

    def _affordable(self, nbytes: int) -> list[str]:
        """Return what can win and be measured in the time that is left; at the first size all of it."""
        names = self._contending(nbytes)
        while names and self._times and self._cost_s(nbytes, names, _PROBES) > self._left_s():
            names.remove(max(names, key=lambda name: self._expected_s(name, nbytes)))
        return names

    def _further_iterations(self, nbytes: int, begin: float, later: Sequence[int]) -> int:
        """Return how many iterations more a size gets: a fair part of the time that later ones do not need at least."""
        spent_s = self.clock() - begin
        left_s = self._left_s() + spent_s - _COMPLETE_SHARE * self.budget_s
        needed_s = sum(self._cost_s(size, self._contending(size), _PROBES) for size in later)
        share_s = (left_s - min(needed_s, left_s / 2)) / (1 + len(later)) - spent_s
        per_call_s = spent_s / _calls(_PROBES)
        affordable = int(share_s / per_call_s) - _calls(0) if per_call_s > 0 else _PROBES
        # The untimed calls that begin each turn come on top; a turn has at least 8.
        return max(0, min(iterations_for(nbytes) - _PROBES, affordable * 4 // 5))

    def _missing(self) -> list[tuple[int, list[str]]]:
        """Return (size, algorithms not measured there that are the fastest at a size beside it)."""
        rows = sorted(self._times.items())
        fastest = [min(found, key=lambda name: statistics.median(found[name])) for _, found in rows]
        missing = []
        for place, (nbytes, found) in enumerate(rows):
            beside = {*fastest[max(place - 1, 0) : place], *fastest[place + 1 : place + 2]}
            missing.append((nbytes, sorted(beside - found.keys())))
        return [(nbytes, names) for nbytes, names in missing if names]

    def _cost_s(self, nbytes: int, names: Sequence[str], iterations: int) -> float:
        return _KINDS * _calls(iterations) * sum(self._expected_s(name, nbytes) for name in names)

    def _expected_s(self, name: str, nbytes: int) -> float:
        """Return what the model says, corrected as it was wrong about the algorithm at the nearest measured size."""
        # Where there are both, the latter: they are more.
        measured = [*self._probes.items(), *self._times.items()]
        known = {size: statistics.median(found[name]) for size, found in measured if name in found}
        nearest = min(known, key=lambda size: abs(math.log(size / nbytes)))
        return self._model.scale(name, known[nearest], nearest, nbytes, self.communicator.topology)


def distinct(names: Iterable[str], topology: Topology) -> list[str]:
    """Return the allreduce algorithms without those that do there what an earlier one does.

    Hierarchical is the two-shot on one node and the ring where every rank has a node of its own.
    """
    kept: dict[object, str] = {}
    for name in names:
        kept.setdefault(name if name == VENDOR else _essence(name, topology), name)
    return list(kept.values())


def _essence(algorithm: str, topology: Topology) -> object:
    """Return something that two algorithms have in common only if their first ranks do the same."""
    essence = []
    for rank in range(min(topology.size, _RANKS_WALKED)):
        schedule = schedule_for(Collective.ALLREDUCE, algorithm, rank, topology)
        # Loads come before stores, whether that is one step or two.
        parts = [part for step in schedule.steps for part in (replace(step, stores=()), Step(stores=step.stores))]
        essence.append((schedule.nblocks, *(part for part in parts if part != Step())))
    return tuple(essence)


def _calls(iterations: int) -> int:
    """Return how many calls of an algorithm so many timed ones take."""
    return _WARMUP + iterations + 2 * -(-iterations // turn_for(iterations))


def _save(table: Table, path: Path) -> str | None:
    """Write a table; return what was wrong."""
    try:
        table.save(path)
    except ConfigError as error:
        return str(error)
    return None


def _describe(model: CostModel) -> str:
    """Say the parameters of a model in the units in which one thinks of them."""
    parts = [f"round {format_seconds(model.alpha)}", f"barrier {format_seconds(model.sync)}"]
    parts += [
        f"{what} {1e-9 / seconds:.3g} GB/s"
        for what, seconds in (("send", model.beta), ("touch", model.copy), ("reduce", model.gamma))
        if seconds > 0
    ]
    return "model: " + ", ".join(parts)


def _summary(table: Table, rules: Mapping[int, str]) -> str:
    """Return the winners, a line per size, and how much faster they are than what the built-in rules take."""
    form = "{:>10}  {:<21} {:>9}  {:>9}  {:<21} {:>9}  {:<21}  {:>8}\n"
    text = "#" + form.format("", "fastest", "median", "model", "second", "median", "built-in rule", "speed-up")[1:]
    for row in table.rows:
        found = table.choose(row.nbytes)
        rule = rules[row.nbytes]
        model = table.model.predict(found.algorithm, row.nbytes, table.key.topology)
        times = [format_seconds(each) for each in (found.seconds, model, found.second_seconds)]
        gain = f"{row.medians[rule] / found.seconds:.2f}x" if rule in row.medians else "N/A"
        second = (found.second, times[2]) if found.second else ("", "")
        text += form.format(format_nbytes(row.nbytes), found.algorithm, *times[:2], *second, rule, gain)
    return text


Vector = npt.NDArray[np.float64]

#: Seconds per byte reduced, at most: a processor that shares a core reduces faster. Algorithms that send more often
#: reduce more too, and without a limit a fit can take a slow network for a slow processor.
_MOST_GAMMA = 1e-9
_GAMMA = Work._fields.index("reduced")


class Sample(NamedTuple):
    """One measured time: the slowest rank's, of one allreduce of ``nbytes`` bytes per rank."""

    algorithm: str
    nbytes: int
    topology: Topology
    seconds: float


def fit(samples: Iterable[Sample]) -> CostModel:
    """Return the model that explains measured times best.

    It minimises the sum of squares of relative errors, so that microseconds count as much as milliseconds, and no
    parameter is negative. A parameter on which nothing measured depends is 0, gamma is at most a nanosecond per byte.

    Args:
        samples: an algorithm that is none of ours is the MPI library's.
    """
    ours: list[Sample] = []
    vendor: list[Sample] = []
    for each in samples:
        (ours if is_ours(each.algorithm) else vendor).append(each)
    factors = [work(*each[:3]) for each in ours]
    seconds = [each.seconds for each in ours]
    parts = _least_squares(factors, seconds, len(Work._fields))
    if parts[_GAMMA] > _MOST_GAMMA:
        known = [each.reduced * _MOST_GAMMA for each in factors]
        parts = _least_squares([each._replace(reduced=0.0) for each in factors], seconds, count=len(parts), known=known)
        parts[_GAMMA] = _MOST_GAMMA
    whole = _least_squares([(1.0, each.nbytes) for each in vendor], [each.seconds for each in vendor], 2)
    return CostModel(*parts, *whole)


def _least_squares(
    factors: Sequence[Sequence[float]], seconds: Sequence[float], count: int, known: Sequence[float] | None = None
) -> list[float]:
    """Solve for ``count`` non-negative parameters, in the sense of least squares of relative errors.

    The best non-negative solution is the best unrestricted one of some subset of the parameters, the rest being 0;
    there are few, so all are tried. Among equals, the one with the fewest parameters.

    Args:
        factors: of the parameters, for each sample.
        seconds: for each sample.
        count: of parameters.
        known: seconds of each sample that are explained already; None: none.
    """
    best = [0.0] * count
    if not factors:
        return best
    matrix = np.array(factors, np.float64) / np.array(seconds)[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    target: Vector = 1 - np.array(known or [0.0] * len(factors)) / np.array(seconds)
    least = float(np.sum(target**2))  # the error when all are 0
    for size in range(1, count + 1):
        for subset in itertools.combinations(np.flatnonzero(scale), size):
            chosen = list(subset)
            columns = matrix[:, chosen] / scale[chosen]
            solution: Vector = np.linalg.lstsq(columns, target, rcond=None)[0]
            error = float(np.sum((columns @ solution - target) ** 2))
            if (solution >= 0).all() and error < least - 1e-12 * len(factors):
                least = error
                best = [0.0] * count
                for column, value in zip(chosen, solution / scale[chosen], strict=True):
                    best[column] = float(value)
    return best
