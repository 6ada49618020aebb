"""``bench``: measure one collective over sizes, types, operations and algorithms, and check its results."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import platform
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringreduce.bench.cases import COLLECTIVES, Case, Reference, rest_value, sizes
from ringreduce.bench.contenders import Device, OnGpu, OnHost, Ours
from ringreduce.bench.formats import WRITERS
from ringreduce.bench.measure import (
    Contender,
    Noise,
    ProcessorTimes,
    Summary,
    iterations_for,
    time_in_turn,
    usage,
    warmup_for,
)
from ringreduce.bench.peers import PEERS, Peer, mpi_library
from ringreduce.bench.results import CaseBound, Machine, Report, Result, Row, Settings
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.config import VERSION
from ringreduce.common.errors import ConfigError
from ringreduce.common.libraries import loaded_versions

_PROBES = 3  # timed calls of each candidate for the bound
_POISON = 0xFF  # a NaN in every float type, -1 or the largest number in the others


def run(
    world: Communicator,
    settings: Settings,
    write: Callable[[str], None] | None,
    device: Device | None = None,
    progress: Callable[[int, int], None] | None = None,
    head: bool = True,
    read: Callable[[], ProcessorTimes] = usage,
) -> Report:
    """Measure everything that ``settings`` ask for; collective.

    Args:
        world: the ranks to measure.
        settings: equal on all ranks.
        write: gets the text, row by row, on rank 0; None: nobody does.
        device: where the arrays are; None: as the settings have it.
        progress: called after each case with how many have been measured, and of how many; 0: there is no end.
        head: whether the text begins with the lines before the first result.
        read: reads how much time processes took, for tests.

    Returns:
        The report; ranks can differ in the count of wrong elements only where the exchange of counts fails.

    Raises:
        ConfigError: an algorithm, peer or root that is not there; on every rank, before anything is measured.
        UnsupportedBufferError: arrays on a GPU are asked for, and it or CuPy is missing.
    """
    show = write if write is not None and world.rank == 0 else lambda text: None
    writer = WRITERS[settings.format](settings)
    _check(world, settings)
    if device is None:
        device = OnGpu(world) if settings.device == "cuda" else OnHost(world)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(contextlib.closing(PEERS[name](world, device))) for name in settings.peers]
        bench = Bench(world, settings, peers=peers, device=device)
        rows = []
        machine = describe_machine(world, device)
        if head:
            show(writer.head(machine))
        noise = Noise(world, read)
        plan = list(bench.plan())
        for cycle in range(settings.cycles) if settings.cycles else itertools.count():
            for number, (case, algorithm) in enumerate(plan, 1 + cycle * len(plan)):
                rows.append(bench.measure(case, algorithm))
                show(writer.row(rows[-1]))
                if progress is not None:
                    progress(number, settings.cycles * len(plan))
        bounds = tuple(bench.bounds[size] for size in sorted(bench.bounds))
        report = Report(settings, machine, rows=tuple(rows), bounds=bounds, busy=noise.look().text)
        show(writer.foot(report))
    return report


class Bench:
    """The measuring of one set of settings: the buffers, seeds and bounds that its cases share.

    Attributes:
        bounds: size in bytes -> its bound, as last measured for it.
    """

    def __init__(self, world: Communicator, settings: Settings, peers: Sequence[Peer], device: Device) -> None:
        self.bounds: dict[int, CaseBound] = {}
        self._world = world
        self._settings = settings
        self._peers = peers
        self._device = device
        self._collective = COLLECTIVES[settings.collective]
        self._seed = 0
        largest = max(case.nbytes for case, _ in self.plan())
        self._ours = Ours(world, largest, device, shared=settings.shared_buffers, new_results=settings.new_results)

    def plan(self) -> Iterator[tuple[Case, str]]:
        """Yield every case and the algorithm (``"auto"`` or a name) to run it with, in the order of the table."""
        settings = self._settings
        collective = self._collective
        algorithms = [settings.algorithm]
        if algorithms == ["all"] and not collective.point_to_point:
            algorithms = self._world.algorithms(collective.name)
        ops = settings.ops if collective.reduces else (None,)
        wanted = list(sizes(settings.min_nbytes, settings.max_nbytes, settings.step_nbytes, settings.step_factor))
        for type_name, op_name in itertools.product(settings.types, ops):
            shared = collective, type_name, op_name, settings.root, self._world.size
            # All sizes below one element per rank are the same case.
            cases = dict.fromkeys(Case.of_nbytes(*shared, nbytes) for nbytes in wanted)
            yield from itertools.product(cases, algorithms)

    def measure(self, case: Case, algorithm: str) -> Row:
        """Verify and time one case; collective.

        In place, ours takes turns with the peers and with what bounds it; out of place it runs
        alone, unless that is the only form: where the collective has no other, or results are to be new arrays.
        """
        if self._settings.form == "out of place":
            return Row(self._result(case, algorithm, in_place=False, alone=False), None)
        outer = self._result(case, algorithm, in_place=False, alone=True)
        return Row(outer, self._result(case, algorithm, in_place=True, alone=False))

    def _result(self, case: Case, algorithm: str, *, in_place: bool, alone: bool) -> Result:
        """Verify ours, time it in turn with its rivals unless it runs alone, and verify it again."""
        settings = self._settings
        asked = None if algorithm == "auto" else algorithm
        ours = self._ours.contender(case, asked, in_place=in_place)
        wrong = [self._count_wrong(case, ours) for _ in range(settings.check)]
        offered = [] if alone else [peer.contender(case, new_results=settings.new_results) for peer in self._peers]
        # The peers that can do this case, and do it right, take turns with ours.
        rivals = [each for each in offered if each is not None and not self._count_wrong(case, each)]
        bound = None if alone else self._bound(case)
        group = [ours, *rivals, *([bound] if bound else [])]
        for contender in group:
            self._device.store(contender.source, lambda array: array.fill(rest_value(case.op)))
        parts = case.collective.messages * settings.aggregated
        iterations = settings.iterations or iterations_for(case.nbytes * parts)
        warmup = warmup_for(iterations) if settings.warmup is None else settings.warmup
        timed = [each.repeated(settings.aggregated) for each in group]
        times = time_in_turn(self._world, timed, iterations=iterations, warmup=warmup, watch=self._device.watch)
        found = {each.name: Summary.of_seconds(row, parts) for each, row in zip(group, times, strict=True)}
        mine = found[ours.name]
        share = None
        if settings.check:
            wrong.append(self._count_wrong(case, ours))
        if bound:
            links_us = self._device.between_nodes_us(case)
            here_us = found[bound.name].median
            method = "the links between nodes" if links_us > here_us else bound.name
            least = CaseBound(case.nbytes, max(links_us, here_us), method)
            self.bounds[case.nbytes] = least
            share = least.time_us / mine.median
        name, transport = self._device.path(case, self._name(case, algorithm), asked)
        nwrong = sum(wrong) if wrong else None
        peers = {} if alone else {peer: found.get(peer) for peer in settings.peers}
        return Result(case, name, transport, settings.buffers, in_place, mine, nwrong, share, peers)

    def _name(self, case: Case, algorithm: str) -> str:
        """Return the name of the algorithm that runs on arrays in host memory."""
        if case.collective.point_to_point:
            return "messages"
        if algorithm != "auto":
            return algorithm
        return self._world.choose(case.collective.name, case.input_nbytes, case.dtype, op=case.op).algorithm

    def _bound(self, case: Case) -> Contender | None:
        """Find the fastest way to do what the case has to do at least; the same on all ranks.

        One rank has none: what it puts in is the result, and no memory is touched. Messages have none.
        """
        has_none = self._world.size == 1 or case.collective.point_to_point
        contenders = [] if has_none else self._device.bounds(case)
        if not contenders:
            return None
        times = time_in_turn(self._world, contenders, iterations=_PROBES, warmup=1, watch=self._device.watch)
        return contenders[int(np.median(times, axis=1).argmin())]

    def _count_wrong(self, case: Case, contender: Contender) -> int:
        """Run once on fresh inputs and count wrong elements over all ranks; collective.

        A rank that finds more than the exchanged count keeps its own: the allreduce of counts may be broken, too.
        """
        self._seed += 1
        reference = Reference(case, self._seed)
        self._device.store(contender.source, lambda array: reference.fill(array, self._world.rank))
        if contender.output is not None:  # what is not overwritten is seen to be wrong
            self._device.store(contender.output, lambda array: array.view(np.uint8).fill(_POISON))
        mine = reference.count_wrong(self._device.fetch(contender.call()), self._world.rank)
        everyone = self._world.allgather(np.array([mine]))
        return max(mine, int(everyone.sum()))


def describe_machine(world: Communicator, device: Device) -> Machine:
    """Collect what a reader of the figures has to know about where they came from."""
    return Machine(
        versions={"ringreduce": VERSION, "python": platform.python_version(), **loaded_versions()},
        mpi_library=mpi_library(),
        nranks=world.size,
        placement=world.topology.describe(),
        nnodes=len(world.topology.nodes),
        cores=os.cpu_count() or 1,  # of the machine: launchers bind ranks to some of them
        cpu=_cpu_name(),
        timestamp=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        gpu=device.describe(),
    )


def _check(world: Communicator, settings: Settings) -> None:
    """Refuse what cannot be measured before anything is."""
    collective = COLLECTIVES[settings.collective]
    if settings.device != "cpu" and (collective.point_to_point or collective.name in ("reduce", "gather", "scatter")):
        raise ConfigError(f"{collective.name} takes arrays in host memory")
    if collective.of_two and world.size < 2:
        raise ConfigError(f"{collective.name} takes two ranks")
    usable = [] if collective.point_to_point else world.algorithms(settings.collective, device=settings.device)
    if settings.algorithm not in ("auto", "all", *usable):
        raise ConfigError(
            f"algorithm {settings.algorithm!r} cannot run {settings.collective} here; "
            f"choose auto, all or one of {', '.join(usable)}"
        )
    if not 0 <= settings.root < world.size:
        raise ConfigError(f"there is no rank {settings.root} to be the root; the last is rank {world.size - 1}")


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
