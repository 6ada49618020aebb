"""What ``simulate`` has found, as text, JSON and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ringreduce.bench.plots import curve_style, panels, size_axis
from ringreduce.collectives.compressed import CODED
from ringreduce.common.quantities import format_nbytes, format_seconds
from ringreduce.common.topology import Topology
from ringreduce.simulate.cluster import Cluster, Simulator, describe
from ringreduce.simulate.step_times import SimulatedTraining, StepTimes, simulate_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SimulationReport:
    """What was simulated.

    Attributes:
        cluster: where.
        times: size -> algorithm -> seconds, the fastest first.
        reasons: size -> what would be chosen, and why.
        left_out: algorithm -> why it could not be simulated.
        training: what each rank does in a step; None: there is none.
        step: what a step takes.
        scaling: link rate in bytes per second -> ranks -> what a step takes there.
    """

    cluster: Cluster
    times: Mapping[int, Mapping[str, float]]
    reasons: Mapping[int, str]
    left_out: Mapping[str, str]
    training: SimulatedTraining | None = None
    step: StepTimes | None = None
    scaling: Mapping[float, Mapping[int, StepTimes]] = field(default_factory=dict)

    @property
    def assumptions(self) -> str:
        """What the figures are for, in one line."""
        cluster = self.cluster
        parts = [cluster.topology.describe(), describe(cluster.links)]
        parts += [f"rank {rank} {format_seconds(late_s)} late" for rank, late_s in cluster.late.items()]
        parts += [f"delays of {format_seconds(cluster.noise_s)} on average"] if cluster.noise_s else []
        parts += [self.training.describe()] if self.training else []
        return "; ".join(parts)


def simulate(
    cluster: Cluster,
    sizes: Iterable[int],
    algorithms: Sequence[str] | None = None,
    training: SimulatedTraining | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> SimulationReport:
    """Simulate allreduces, and a training step.

    Args:
        cluster: where.
        sizes: of the buffers of a rank, in bytes.
        algorithms: which; None: all that run there.
        training: what each rank does in a step; None: nothing.
        progress: called with how many parts of how many are done.

    Raises:
        ConfigError: none of the algorithms can be simulated there.
    """
    algorithms = _executed(cluster, algorithms)
    sizes = list(sizes)
    simulator = Simulator(cluster, algorithms)
    times = {}
    reasons = {}
    for number, nbytes in enumerate(sizes, 1):
        times[nbytes], reasons[nbytes] = simulator.times(nbytes), simulator.explain(nbytes)
        progress(number, len(sizes) + (training is not None))
    step = None if training is None else _step(training, cluster, algorithms)
    return SimulationReport(cluster, times, reasons=reasons, left_out=simulator.left_out, training=training, step=step)


def scaling(
    report: SimulationReport,
    rates: Iterable[float],
    algorithms: Sequence[str] | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> SimulationReport:
    """Simulate the training of a report on one rank, on more and more ranks of a node, and on more and more nodes.

    Args:
        report: with a training, on nodes of equal size. Rank 0 is late where one is, and all links are equal.
        rates: of links, in bytes per second.
        algorithms: which; None: all that run there.
        progress: called with how many parts of how many are done.
    """
    cluster = report.cluster
    training = report.training
    assert training is not None
    late = {0: max(cluster.late.values())} if cluster.late else {}
    topologies = list(_growing(cluster))
    found = dict[float, dict[int, StepTimes]]()
    parts = [(rate, topology) for rate in rates for topology in topologies]
    for number, (rate, topology) in enumerate(parts, 1):
        links = replace(cluster.links, between=replace(cluster.links.between, beta=1 / rate), slow={})
        there = replace(cluster, topology=topology, links=links, late=late)
        found.setdefault(rate, {})[topology.size] = _step(training, there, algorithms)
        progress(number, len(parts))
    return replace(report, scaling=found)


def to_text(report: SimulationReport) -> str:
    """Return tables: times of algorithms by size, choices, and steps."""
    lines = [f"# {report.assumptions}"]
    width = max(len(name) for times in report.times.values() for name in times)
    lines.append(f"# {'':{width}}" + "".join(f" {format_nbytes(nbytes):>10}" for nbytes in report.times))
    for name in next(iter(report.times.values())):
        cells = "".join(f" {format_seconds(times[name]):>10}" for times in report.times.values())
        lines.append(f"  {name:{width}}{cells}")
    lines += [f"# not simulated: {name}: {why}" for name, why in report.left_out.items()]
    lines += [f"{format_nbytes(nbytes):>10}  {reason}" for nbytes, reason in report.reasons.items()]
    lines += [f"training step: {_said(report.step)}"] if report.step else []
    lines += _scaling_lines(report.scaling)
    return "\n".join(lines) + "\n"


def to_dict(report: SimulationReport) -> dict[str, Any]:
    """Return what JSON shows: seconds, bytes and bytes per second."""
    return {
        "placement": report.cluster.topology.describe(),
        "links": dataclasses.asdict(report.cluster.links),
        "late": dict(report.cluster.late),
        "noise_s": report.cluster.noise_s,
        "sizes": [
            {"size": nbytes, "choice": next(iter(times)), "reason": report.reasons[nbytes], "seconds": dict(times)}
            for nbytes, times in report.times.items()
        ],
        "left_out": dict(report.left_out),
        "training": None if report.training is None else dataclasses.asdict(report.training),
        "step": None if report.step is None else _entry(report.step),
        "scaling": [
            {"rate": rate, "ranks": size, **_entry(step)}
            for rate, steps in report.scaling.items()
            for size, step in steps.items()
        ],
    }


def figure(report: SimulationReport) -> Figure:
    """Return a picture: times over sizes and, if that was simulated, the efficiency of a training over ranks.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    drawn, (axes, *others) = panels(1 + bool(report.scaling), f"simulated: {report.assumptions}")
    sizes = list(report.times)
    for number, name in enumerate(sorted(report.times[sizes[0]])):
        axes.plot(sizes, [report.times[nbytes][name] for nbytes in sizes], label=name, **curve_style(number))
    size_axis(axes)
    axes.set(ylabel="time (seconds)", yscale="log", title="allreduce, by algorithm")
    axes.legend(frameon=False, fontsize=8)
    for axes in others:
        for number, (rate, steps) in enumerate(report.scaling.items()):
            shares = [100 * step.efficiency for step in steps.values()]
            axes.plot(list(steps), shares, label=f"{rate * 8e-9:.4g} Gbit/s", **curve_style(number))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(xlabel="ranks", ylabel="efficiency (%)", ylim=(0, None), title="training, by rate of the links")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    return drawn


def _step(training: SimulatedTraining, cluster: Cluster, algorithms: Sequence[str] | None) -> StepTimes:
    if cluster.topology.size == 1:
        return simulate_step(training, cluster, lambda nbytes: 0.0)
    together = Simulator(replace(cluster, late={}, noise_s=0.0), _executed(cluster, algorithms))
    return simulate_step(training, cluster, lambda nbytes: min(together.times(nbytes).values()))


def _executed(cluster: Cluster, algorithms: Sequence[str] | None) -> Sequence[str] | None:
    """Return the algorithms to choose from: between nodes, wire formats have one of their own."""
    return (CODED,) if cluster.links.wire != 1 and not cluster.topology.single_node else algorithms


def _growing(cluster: Cluster) -> Iterator[Topology]:
    nnodes = len(cluster.topology.nodes)
    local = cluster.topology.lanes
    yield from (Topology.uniform(1, ranks) for ranks in _doubled(local))
    yield from (Topology.uniform(nodes, local) for nodes in _doubled(nnodes) if nodes > 1)


def _doubled(last: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... and the last number."""
    yield from (1 << exponent for exponent in range((last - 1).bit_length()))
    yield last


def _scaling_lines(found: Mapping[float, Mapping[int, StepTimes]]) -> Iterator[str]:
    """Yield a table of steps and efficiency: a line for each number of ranks, a column for each rate of links."""
    if found:
        yield "# step and efficiency" + "".join(f" {rate * 8e-9:>12.4g} Gbit/s" for rate in found)
    for size in next(iter(found.values()), ()):
        steps = [each[size] for each in found.values()]
        cells = "".join(f" {format_seconds(step.seconds):>11} {step.efficiency:>7.1%}" for step in steps)
        yield f"{size:>15} rank{'s' * (size > 1):1}{cells}"


def _said(step: StepTimes) -> str:
    return (
        f"{format_seconds(step.seconds)}, of which {format_seconds(step.own_s)} are its own; an exchange takes "
        f"{format_seconds(step.exchange_s)}; efficiency {step.efficiency:.1%}"
    )


def _entry(step: StepTimes) -> dict[str, float]:
    return {**dataclasses.asdict(step), "efficiency": step.efficiency}
