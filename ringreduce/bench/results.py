"""What a benchmark found, as plain values; `formats` writes them down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringreduce.bench.cases import COLLECTIVES, NCCL_TYPES, OPS, TYPES, Case
from ringreduce.bench.measure import Summary
from ringreduce.common.quantities import parse_nbytes
from ringreduce.common.settings import OneOf, PathOf, WholeNumber, option, switch


def _names(known: Collection[str], everything: tuple[str, ...] = ()) -> Callable[[str], tuple[str, ...]]:
    """Return what reads names out of a known set, separated by commas; ``all`` where that has a meaning."""

    def names(text: str) -> tuple[str, ...]:
        found = everything if text == "all" and everything else tuple(dict.fromkeys(text.split(",")))
        for name in found:
            if name not in known:
                raise ValueError(f"{name!r} is not one of {', '.join([*known, *(['all'] if everything else [])])}")
        return found

    return names


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for, in the form in which a report repeats it. Rows are options of ``bench``.

    Attributes:
        collective: our name of it.
        min_nbytes: the first size.
        max_nbytes: the last size.
        step_nbytes: the distance of two sizes; None: they grow by ``step_factor``.
        step_factor: the quotient of two sizes.
        iterations: timed calls per size; None: adapted to the size.
        warmup: calls before them; None: adapted to the size.
        aggregated: calls in a row that are timed as one iteration; times are of one of them.
        cycles: how often everything is measured; 0: again and again.
        check: how often results are verified before timing (and once after); 0: never.
        ops: names of the operations.
        types: names of the element types.
        root: of rooted collectives.
        algorithm: ``"auto"``, ``"all"`` or a name.
        shared_buffers: whether arrays come from ``ringreduce.empty``.
        new_results: whether calls that are not in place return new arrays, instead of the same one each time.
        peers: who else is measured.
        format: ``"nccl"``, ``"short"``, ``"json"`` or ``"csv"``.
        output_file: where to write the JSON report as well.
        per_iteration: whether to show how the iterations' times spread.
        device: ``"cpu"``, or ``"cuda"`` for arrays in the memory of a GPU.
    """

    collective: str
    # As in `Config`, a row is to be read at once.
    # fmt: off
    min_nbytes: int = option("-b --minbytes", parse_nbytes, 32 << 20, "First size; takes K, M, G.", unset="32M")
    max_nbytes: int = option("-e --maxbytes", parse_nbytes, 32 << 20, "Last size, measured too if jumped over.",
        unset="32M, or --minbytes")
    step_nbytes: int | None = option("-i --stepbytes", parse_nbytes, None, "From size to size, add this much ...")
    step_factor: int = option("-f --stepfactor", WholeNumber(2), 2, "... or multiply by it.")
    iterations: int | None = option("-n --iters", WholeNumber(1), None, "Timed iterations.", unset="300 to 16, by size")
    warmup: int | None = option("-w --warmup_iters", WholeNumber(0), None, "Calls before the timed ones.",
        unset="10 or 3, by size")
    aggregated: int = option("-m --agg_iters", WholeNumber(1), 1,
        "Calls in a row that are timed as one; the figure is that of one of them.")
    cycles: int = option("-N --run_cycles", WholeNumber(0), 1,
        "Measure everything so often; 0: until it is interrupted.")
    check: int = option("-c --check", WholeNumber(0), 1, "Verify so often, and after; 0: never.")
    ops: tuple[str, ...] = option("-o --op", _names(OPS, tuple(OPS)), ("sum",), "Operations, or all.", unset="sum")
    types: tuple[str, ...] = option("-d --datatype", _names(TYPES, NCCL_TYPES), ("float",),
        "Types, or all (those of nccl-tests).", unset="float")
    root: int = option("-r --root", WholeNumber(0), 0, "Of broadcast, reduce, gather and scatter.")
    algorithm: str = option("--algorithm", str, "auto", "auto, all, or a name as `explain` prints it.")
    shared_buffers: bool = False
    new_results: bool = False
    peers: tuple[str, ...] = option("--vs", _names(("mpi", "gloo")), (), "Measure mpi and/or gloo in turn with ours.")
    format: str = option("--format", OneOf(("nccl", "short", "json", "csv")), "nccl", "Layout; short fits a terminal.")
    output_file: str | None = option("-J --output_file", PathOf(), None, "Write the JSON report there as well.")
    per_iteration: bool = option("-I --per_iter_timing", switch, False, "Show how the iterations' times spread.")
    device: str = option("--device", OneOf(("cpu", "cuda")), "cpu",
        "Where the arrays are; on GPUs, which the ranks of a node take in turn, private ones are CuPy's own.")
    # fmt: on

    @property
    def buffers(self) -> str:
        return "shared" if self.shared_buffers else "private"

    @property
    def form(self) -> str:
        """The one that a layout with one time per row shows."""
        return "in place" if COLLECTIVES[self.collective].in_place and not self.new_results else "out of place"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a benchmark ran.

    Attributes:
        versions: package -> version, of those that took part.
        mpi_library: what the MPI library calls itself, None where none was started.
        nranks: P.
        placement: ranks and nodes in words.
        nnodes: number of nodes.
        cores: that the machine of rank 0 has.
        cpu: model name, as far as the system reports it.
        timestamp: UTC, ISO 8601.
        gpu: of arrays on a GPU, which one it is and how allreduces are done there.
    """

    versions: Mapping[str, str]
    mpi_library: str | None
    nranks: int
    placement: str
    nnodes: int
    cores: int
    cpu: str
    timestamp: str
    gpu: str | None = None


@dataclass(frozen=True, slots=True)
class CaseBound:
    """How long a case of ``nbytes`` bytes takes at least; see `ringreduce.bench.bounds`.

    On a GPU: how long it takes to copy so many bytes once for each of its ranks.
    """

    nbytes: int
    time_us: float
    method: str


@dataclass(frozen=True, slots=True)
class Result:
    """One collective on one kind of buffer, measured.

    Attributes:
        in_place: whether the result overwrote the input.
        time: of the iterations; where a call is several messages, of one of them.
        nwrong: wrong elements over all ranks; None when nothing was verified.
        bound_share: the bound's time / this median; None where there is no bound.
        peers: peer -> its times on the same job; None where it cannot do that job.
    """

    case: Case
    algorithm: str
    transport: str
    buffers: str
    in_place: bool
    time: Summary
    nwrong: int | None
    bound_share: float | None = None
    peers: Mapping[str, Summary | None] = field(default_factory=dict)

    @property
    def alg_bw(self) -> float:
        """Size / median time in GB/s (10^9)."""
        return self.case.nbytes / self.time.median / 1e3 if self.time.median else 0.0

    @property
    def bus_bw(self) -> float:
        """Algorithm bandwidth times the factor that makes it comparable with a link's, whatever P."""
        return self.alg_bw * self.case.collective.bus_factor(self.case.nranks)

    def speedup(self, peer: str) -> float | None:
        """Return how many times longer the peer took; None where it cannot do the job."""
        time = self.peers.get(peer)
        return None if time is None or not self.time.median else time.median / self.time.median

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of ``results`` in the JSON report."""
        case = self.case
        times = dataclasses.asdict(self.time)
        found = {"collective": case.collective.name, "size": case.nbytes, "count": case.count, "type": case.type_name}
        found |= {"redop": case.op_name or "none", "root": case.shown_root, "algorithm": self.algorithm}
        found |= {"transport": self.transport, "buffers": self.buffers, "in_place": self.in_place}
        found |= {"iterations": times.pop("iterations"), "time_us": times, "alg_bw": self.alg_bw, "bus_bw": self.bus_bw}
        vs = {
            peer: None if time is None else {"median_us": time.median, "speedup": self.speedup(peer)}
            for peer, time in self.peers.items()
        }
        return found | {"nwrong": self.nwrong, "bound_share": self.bound_share, "vs": vs}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: the same case out of place and, where the collective can, in place."""

    out_of_place: Result
    in_place: Result | None

    @property
    def best(self) -> Result:
        """The result that shares, spreads and speed-ups are about: the one in place, where there is one."""
        return self.in_place or self.out_of_place

    @property
    def results(self) -> tuple[Result, ...]:
        return (self.out_of_place,) if self.in_place is None else (self.out_of_place, self.in_place)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run found.

    Attributes:
        busy: what other processes took of the machines' time meanwhile, in words; empty if nothing that matters.
    """

    settings: Settings
    machine: Machine
    rows: tuple[Row, ...]
    bounds: tuple[CaseBound, ...]
    busy: str = ""

    @property
    def known_bounds(self) -> tuple[CaseBound, ...]:
        """The bounds, unless something else ran, or they do not grow with size: then they bound nothing."""
        times = [each.time_us for each in self.bounds]
        return () if self.busy or times != sorted(times) else self.bounds

    @property
    def results(self) -> list[Result]:
        return [result for row in self.rows for result in row.results]

    @property
    def nwrong(self) -> int | None:
        """Wrong elements in all; None when nothing was verified."""
        counts = [result.nwrong for result in self.results if result.nwrong is not None]
        return sum(counts) if counts else None

    @property
    def mean_bus_bw(self) -> float:
        """The mean bus bandwidth of all results in GB/s."""
        return sum(result.bus_bw for result in self.results) / len(self.results) if self.results else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON report; the figures of ``bound`` itself are those of the largest size."""
        bounds = [dataclasses.asdict(bound) for bound in self.bounds]
        return {
            "config": {**dataclasses.asdict(self.settings), **dataclasses.asdict(self.machine)},
            "bound": {**bounds[-1], "by_size": bounds} if bounds else None,
            "results": [result.as_dict() for result in self.results],
            "out_of_bounds": self.nwrong,
            "average_bus_bandwidth": self.mean_bus_bw,
            "busy": self.busy or None,
        }
