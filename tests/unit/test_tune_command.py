"""``tune`` on ranks that are threads, on a machine whose times are made up: what is measured, agreed and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ringreduce
from ringreduce.algorithms import Collective
from ringreduce.bench.measure import Noise, NoiseFound, ProcessorTimes, usage
from ringreduce.bench.tune import SIZES, calls_of, tune
from ringreduce.cli import commands
from ringreduce.collectives import Problem
from ringreduce.collectives.choice.selection import choose
from ringreduce.collectives.choice.tuning import CostModel, Key, Table
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import SUM
from ringreduce.testing import caught, run_ranks

#: A machine with a quick network.
TRUTH = CostModel(alpha=2e-5, beta=1e-9, sync=2e-6, copy=1e-10, gamma=2e-10)

WORLDS = [(size, node_size) for size in (2, 4) for node_size in (None, 1, 2)]


@dataclass
class Machine:
    """Takes the times of one rank from a model, and tells the time on a clock that stands still in between.

    Attributes:
        communicator: the rank.
        speed: how fast this rank's clock runs.
        special: (algorithm, size) -> seconds, where the model is wrong.
        calls: what was measured: (size, algorithms, iterations).
        now: on the clock.
        machine: on which machine the rank runs; None: all ranks are on one.
        others: how many cores of it other processes take.
        said: what is printed.
        result: of what was done on the rank; the error, where it was refused.
    """

    communicator: Communicator
    speed: float = 1.0
    special: dict[tuple[str, int], float] = field(default_factory=dict)
    calls: list[tuple[int, tuple[str, ...], int]] = field(default_factory=list)
    now: float = 0.0
    machine: int | None = None
    others: float = 0.0
    said: list[str] = field(default_factory=list)
    result: Any = None

    def seconds(self, name: str, nbytes: int) -> float:
        return self.special.get((name, nbytes)) or TRUTH.predict(name, nbytes, self.communicator.topology)

    def measure(self, nbytes: int, names: Sequence[str], iterations: int) -> list[list[float]]:
        self.calls.append((nbytes, tuple(names), iterations))
        times = [self.seconds(name, nbytes) for name in names]
        self.now += self.speed * sum(times) * 2 * (1.25 * iterations + 3)  # two kinds of buffers; some are not timed
        return [[seconds] * iterations for seconds in times]

    def usage(self) -> ProcessorTimes:
        """Let each rank compute nine tenths of the time."""
        neighbours = 1 if self.machine is not None else self.communicator.size
        now = self.now / self.speed
        own = 0.9 * now
        return ProcessorTimes(100 + now, 500 + neighbours * own + self.others * now, 7 + own, self.machine or 0)

    def tune(
        self, directory: Path, budget_s: float = 60.0, sizes: Sequence[int] = SIZES, *, even_if_busy: bool = False
    ) -> Table:
        return tune(
            self.communicator,
            sizes,
            directory,
            self.said.append,
            budget_s,
            even_if_busy=even_if_busy,
            measure=self.measure,
            usage=self.usage,
        )

    def rule(self, nbytes: int) -> str:
        """Return what the built-in rules take."""
        topology = self.communicator.topology
        return choose(Problem(Collective.ALLREDUCE, nbytes, topology, op=SUM), Config()).algorithm

    def algorithms(self) -> list[str]:
        return self.communicator.algorithms("allreduce")


def on_ranks(
    size: int,
    node_size: int | None,
    function: Callable[[Machine], object],
    special: dict[tuple[str, int], float] | None = None,
) -> list[Machine]:
    """Do something on ranks with a machine each; return the machines, with the results."""

    def run(communicator: Communicator) -> Machine:
        machine = Machine(communicator, special=special or {})
        machine.result = function(machine)
        return machine

    return run_ranks(size, run, node_size=node_size)


@pytest.mark.parametrize(("size", "node_size"), WORLDS)
def test_the_fastest_is_found(size: int, node_size: int | None, tmp_path: Path):
    """At every size the table chooses what is fastest on the machine, and all ranks hold the same table.

    The model that is fitted predicts every algorithm at every size, though most are measured at three.
    """
    machine, *others = on_ranks(size, node_size, lambda machine: machine.tune(tmp_path))
    table = machine.result
    assert all(each.result == table for each in others)
    assert [row.nbytes for row in table.rows] == sorted(SIZES)
    for nbytes in SIZES:
        fastest = min(machine.seconds(name, nbytes) for name in machine.algorithms())
        chosen = table.choose(nbytes)
        assert chosen.seconds <= 1.05 * fastest + 2e-9  # times are kept to the nanosecond
        assert chosen.seconds == pytest.approx(machine.seconds(chosen.algorithm, nbytes), abs=1e-9)
        for name in machine.algorithms():
            predicted = table.model.predict(name, nbytes, machine.communicator.topology)
            assert predicted == pytest.approx(machine.seconds(name, nbytes), rel=1e-3), (name, nbytes)


@pytest.mark.parametrize(("size", "node_size"), WORLDS)
def test_only_what_can_win_is_measured(size: int, node_size: int | None, tmp_path: Path):
    """All at three sizes; then what is within twice the fastest, what the rules take, and neighbours' winners."""
    machine = on_ranks(size, node_size, lambda machine: machine.tune(tmp_path))[0]
    probes, rest = machine.calls[:3], machine.calls[3:]
    assert [nbytes for nbytes, _, _ in probes] == [SIZES[0], SIZES[5], SIZES[-1]]
    assert len({names for _, names, _ in probes}) == 1
    seen: dict[int, set[str]] = {}
    for nbytes, names, _ in rest:
        fastest = min(machine.seconds(name, nbytes) for name in machine.algorithms())
        for name in names:
            contending = machine.seconds(name, nbytes) <= 2 * fastest * 1.001
            assert contending or name == machine.rule(nbytes) or nbytes in seen, (name, nbytes)
        seen.setdefault(nbytes, set()).update(names)
    assert all(machine.rule(nbytes) in seen[nbytes] for nbytes in SIZES)


def test_the_table_is_written_where_later_runs_look(tmp_path: Path):
    """Under the name of its key; reading it gives what was returned."""
    table = on_ranks(4, 2, lambda machine: machine.tune(tmp_path / "new"))[0].result
    key = Key(table.key.topology, "none", ringreduce.__version__)
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == key.file_name
    assert Table.load(path, key) == table


def test_raw_times_are_kept(tmp_path: Path):
    """A small size gets all iterations that it can use, and all their times are in the table."""
    table = on_ranks(2, None, lambda machine: machine.tune(tmp_path))[0].result
    assert {len(each.times_s) for each in table.rows[0].candidates} == {300}
    assert {len(each.times_s) for each in table.rows[-1].candidates} == {32}


def test_winners_are_measured_beside_their_size(tmp_path: Path):
    """What wins at one size alone is measured at both sizes beside it, so that it can be chosen in between."""
    before, here = 1 << 14, 1 << 15
    machine, *_ = on_ranks(4, 1, lambda machine: machine.tune(tmp_path), special={("ring", here): 1e-6})
    first = {nbytes: names for nbytes, names, _ in reversed(machine.calls[3:])}
    assert "ring" in first[here]
    assert "ring" not in first[before]
    rows = {row.nbytes: row.medians for row in machine.result.rows}
    assert rows[before]["ring"] == pytest.approx(machine.seconds("ring", before), abs=1e-9)
    assert machine.result.choose(here - 4).algorithm == "ring"
    assert machine.result.choose(before).algorithm != "ring"


@pytest.mark.parametrize("budget_s", [0.0, 0.05, 1.0, 60.0])
def test_time_is_kept(budget_s: float, tmp_path: Path):
    """A short time leaves large sizes out, and says so; the smallest is always there."""
    slow = {(name, nbytes): 1e-7 * nbytes + 1e-4 for name in ("ring", "one_shot") for nbytes in SIZES}
    machine, *_ = on_ranks(4, 1, lambda machine: machine.tune(tmp_path, budget_s), special=slow)
    unavoidable = sum(machine.seconds(name, SIZES[0]) for name in machine.algorithms()) * 28
    unavoidable += sum(machine.seconds(name, SIZES[5]) for name in machine.algorithms()) * 14
    assert machine.now <= 1.2 * budget_s + unavoidable
    assert machine.result.rows[0].nbytes == SIZES[0]
    left_out = len(machine.result.rows) < len(SIZES)
    assert left_out == (budget_s < 60)
    assert left_out == any("and more: no time left" in text for text in machine.said)


def test_rank_0_decides(tmp_path: Path):
    """Ranks whose clocks say that the time is up go on as long as rank 0 does."""

    def run(communicator: Communicator) -> tuple[Table, list[object]]:
        machine = Machine(communicator, speed=1.0 if communicator.rank == 0 else 1e6)
        return machine.tune(tmp_path), machine.calls

    results = run_ranks(4, run, node_size=2)
    assert all(result == results[0] for result in results)
    assert len(results[0][0].rows) == len(SIZES)


def test_rank_0_speaks(tmp_path: Path):
    """Progress and the result come from rank 0 alone, in whole lines."""
    machines = on_ranks(2, None, lambda machine: machine.tune(tmp_path, sizes=(8, 1 << 20)))
    assert [bool(machine.said) for machine in machines] == [True, False]
    lines = "".join(machines[0].said).splitlines()
    assert lines[0].startswith("# 2 ranks on 1 node; fitting the model to one_shot, two_shot, ")
    assert lines[1].startswith("# model: round 20 us, barrier 2 us, ")
    assert lines[2:4] == ["# 8 B: one_shot, two_shot", "# 1 MiB: two_shot"]
    assert [" ".join(line.split()) for line in lines[5:7]] == [
        "8 B one_shot 2.002 us 2.002 us two_shot 4.002 us one_shot 1.00x",
        "1 MiB two_shot 213.7 us 213.7 us one_shot 1.278 ms two_shot 1.00x",
    ]
    assert lines[7].startswith(f"# written to {tmp_path}/allreduce-")
    assert max(map(len, lines[:7])) <= 120


def test_what_the_rules_lose_is_shown(tmp_path: Path):
    """The speed-up over the built-in rule's algorithm stands at the end of the line."""
    special = {("recursive_doubling", 8): 10e-6, ("one_shot", 8): 4e-6}
    machine = on_ranks(4, 1, lambda machine: machine.tune(tmp_path, sizes=[8]), special=special)[0]
    line = "".join(machine.said).splitlines()[-2]
    assert line.split()[:4] == ["8", "B", "one_shot", "4"]
    assert line.split()[-2:] == ["recursive_doubling", "2.50x"]


def test_a_table_that_cannot_be_written_is_everyones_error(tmp_path: Path):
    """No rank is left to wait for rank 0, which found the folder unusable."""
    (tmp_path / "file").write_text("")
    errors = [each.result for each in on_ranks(4, 2, lambda machine: caught(machine.tune, tmp_path / "file"))]
    assert [type(error) for error in errors] == [ConfigError] * 4
    assert len({str(error) for error in errors}) == 1
    assert "cannot be written" in str(errors[0])


def busy(machine: Machine) -> Machine:
    """Let other processes take 0.3 cores of each machine."""
    machine.others = 0.3
    return machine


def test_no_table_is_written_beside_other_work(tmp_path: Path):
    """All ranks are refused alike, soon; the error says how much the others took, and how to do it all the same."""
    machines = on_ranks(4, 1, lambda machine: caught(busy(machine).tune, tmp_path))
    errors = [machine.result for machine in machines]
    assert [type(error) for error in errors] == [ConfigError] * 4
    assert len({str(error) for error in errors}) == 1
    assert "machine of ranks 0-3, other processes took 0.30 cores on average, and the ranks 3.60" in str(errors[0])
    assert "--even-if-busy" in str(errors[0])
    assert list(tmp_path.iterdir()) == []
    assert len(machines[0].calls) == 3  # to fit the model; nothing else is measured in vain


def test_other_work_that_comes_later_is_seen(tmp_path: Path):
    """What others took counts up to the end of the measurement."""

    def run(machine: Machine) -> None:
        quiet = machine.measure

        def measure(nbytes: int, names: Sequence[str], iterations: int) -> list[list[float]]:
            machine.others = 2.0 if nbytes == SIZES[-1] and len(machine.calls) > 3 else machine.others
            return quiet(nbytes, names, iterations)

        machine.measure = measure  # type: ignore[method-assign]
        assert isinstance(caught(machine.tune, tmp_path), ConfigError)

    machines = on_ranks(2, None, run)
    assert {nbytes for nbytes, _, _ in machines[0].calls} == set(SIZES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("others", "told"), [(0.3, True), (0.19, False)])
def test_a_table_can_be_made_beside_other_work(others: float, told: bool, tmp_path: Path):
    """If that is asked for: table, `explain` and output tell how much it was. What a system does for itself is not."""

    def run(machine: Machine) -> Table:
        machine.others = others
        return machine.tune(tmp_path, even_if_busy=True)

    machines = on_ranks(2, None, run)
    (path,) = tmp_path.iterdir()
    table = machines[0].result
    assert Table.load(path, table.key) == table == machines[1].result
    assert table.busy_cores == pytest.approx(others * told)
    assert table.explain(8).endswith("; measured while other processes took 0.3 cores") == told
    assert ("other processes took 0.30 cores on average" in "".join(machines[0].said)) == told


@pytest.mark.parametrize(
    ("others", "ranks", "cores"),
    [((0.0, 0.0, 0.9), "rank 2", 0.9), ((1.5, 0.0, 0.9), "rank 0", 1.5), ((0.2, 0.2, 0.2), None, 0.0)],
)
def test_the_machine_with_the_most_other_work_counts(others: tuple[float, ...], ranks: str | None, cores: float):
    """Each machine is looked at for itself, and all ranks find the same."""

    def run(communicator: Communicator) -> NoiseFound:
        machine = Machine(communicator, machine=communicator.rank, others=others[communicator.rank])
        noise = Noise(communicator, machine.usage)
        machine.now = 10.0
        return noise.look()

    found = run_ranks(3, run)
    assert len(set(found)) == 1
    assert found[0].cores == pytest.approx(cores)
    assert ranks is None or f"machine of {ranks}, other" in found[0].text


@pytest.mark.parametrize("own", [64.0, 0.0])
def test_ways_to_count_may_differ(own: float):
    """A hundredth of what the ranks took may be counted for others, and more than all may be counted for the ranks."""

    def look(communicator: Communicator, everyone: float) -> float:
        moments = iter([ProcessorTimes(0.0, 0.0, 0.0, 7), ProcessorTimes(1.0, everyone, own, 7)])
        return Noise(communicator, lambda: next(moments)).look().cores

    for everyone, cores in ((own + 0.19 + 0.01 * own, 0.0), (own + 0.21 + 0.01 * own, 0.21 + 0.01 * own), (0.0, 0.0)):
        assert run_ranks(1, lambda communicator, time=everyone: look(communicator, time)) == [pytest.approx(cores)]


def test_a_system_that_says_nothing_is_taken_to_be_quiet():
    """Nothing is known there, so nothing is refused."""

    def look(communicator: Communicator) -> float:
        return Noise(communicator, lambda: ProcessorTimes(0.0, float("nan"), 0.0, 7)).look().cores

    assert run_ranks(2, look) == [0.0, 0.0]


def test_the_time_of_processors_is_read():
    """This process's time passes as it computes, and no clock goes back."""
    before = usage()
    while usage().own == before.own:
        pass
    after = usage()
    assert after.own > before.own >= 0
    assert after.at > before.at
    assert after.everyone >= before.everyone >= 0
    assert after.machine == before.machine


def test_one_rank_has_no_choice(tmp_path: Path):
    """It is told to use mpirun."""
    (error,) = run_ranks(1, lambda communicator: caught(Machine(communicator).tune, tmp_path))
    assert "under mpirun" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("size", "node_size"), [(2, None), (2, 1), (4, 2)])
def test_calls_are_timed(size: int, node_size: int | None):
    """As many times as asked for of each algorithm, positive, and equal on all ranks."""

    def run(communicator: Communicator) -> tuple[tuple[float, ...], ...]:
        measure = calls_of(communicator, 1 << 12)
        names = communicator.algorithms()
        found = [measure(nbytes, names, 9) for nbytes in (4, 1 << 12)]
        assert [len(times) for each in found for times in each] == [9] * 2 * len(names)
        assert communicator.allreduce(np.ones(3)).tolist() == [size] * 3
        return tuple(tuple(times) for each in found for times in each)

    results = run_ranks(size, run, node_size=node_size)
    assert len(set(results)) == 1
    assert min(min(times) for times in results[0]) > 0


def test_a_real_run(tmp_path: Path):
    """Nothing made up: two ranks, two sizes, a table that can be read."""

    def run(communicator: Communicator) -> Table:
        return tune(communicator, [9, 1 << 12], tmp_path, lambda text: None, 0.5, usage=Machine(communicator).usage)

    tables = run_ranks(2, run)
    assert [row.nbytes for row in tables[0].rows] == [8, 1 << 12]
    assert tables[0] == tables[1]
    (path,) = tmp_path.iterdir()
    assert Table.load(path, tables[0].key) == tables[0]


def test_help():
    """The command says what it does, within 120 columns, and starts no world."""
    result = CliRunner().invoke(commands.tune, ["--help"], max_content_width=120)
    assert result.exit_code == 0
    assert "mpirun" in result.stdout
    assert not ringreduce.is_initialized()


def test_alone_the_command_refuses(tmp_path: Path):
    """Without mpirun there is nothing to tune."""
    try:
        result = CliRunner().invoke(commands.tune, ["--directory", str(tmp_path)])
    finally:
        ringreduce.shutdown()
    assert isinstance(result.exception, ConfigError)
