"""The commands and their options; what they do is elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import ringreduce
from ringreduce.bench import bench as benchmark
from ringreduce.bench import plots
from ringreduce.bench import tune as tuner
from ringreduce.bench.cases import COLLECTIVES, TYPES, native_dtype, sizes
from ringreduce.bench.formats import to_json
from ringreduce.bench.results import Report, Settings
from ringreduce.cli.progress_bar import ProgressLine
from ringreduce.cli.run import Parsed, options_from
from ringreduce.cli.wrong_options import RankCommand
from ringreduce.common.errors import ConfigError
from ringreduce.common.files import require_writable, write_file
from ringreduce.common.quantities import format_nbytes, parse_nbytes
from ringreduce.doctor.tables import print_table


def _say_if_alone(name: str, form: str) -> None:
    """Say, in a table, that one rank moves nothing, and how several are started."""
    if ringreduce.size() == 1 and form not in ("json", "csv"):
        click.echo(
            "# one rank, which moves nothing, so busbw is N/A; for several: "
            f"ringreduce run -np 2 python -m ringreduce bench {name}"
        )


def _write(text: str) -> None:
    click.echo(text, nl=False)


_NBYTES = Parsed("size", parse_nbytes)
_WITH_ALGORITHMS = [name for name, each in COLLECTIVES.items() if not each.point_to_point]
_EXAMPLES = """\b
Examples:
  mpirun -np 2 python -m ringreduce bench allreduce -b 8 -e 64M -f 8
  mpirun -np 2 python -m ringreduce bench allreduce -b 64K -e 64M -f 4 --buffers shared --vs mpi,gloo
  mpirun -np 2 python -m ringreduce bench allreduce -b 1M -e 256M -f 4 --device cuda --buffers shared
  mpirun -np 2 python -m ringreduce bench allreduce -b 1K -e 64M -f 4 --vs mpi,gloo --plot allreduce.png
  mpirun -np 2 python -m ringreduce bench all -b 1K -e 16M -f 8 --vs mpi --report report.html
"""


@click.command(cls=RankCommand, epilog=_EXAMPLES, short_help="Measure a collective.")
@click.argument("collective", metavar="COLLECTIVE", type=click.Choice([*COLLECTIVES, "all"]))
@options_from(Settings)
@click.option(
    "--buffers",
    type=click.Choice(["shared", "private"]),
    default="private",
    help="Arrays of ringreduce.empty, or of numpy.empty.",
)
@click.option(
    "--results",
    type=click.Choice(["given", "new"]),
    default="given",
    help="Out of place: into the same array each time, or into new ones, and then nothing in place.",
)
@click.option("--plot", type=click.Path(dir_okay=False), metavar="FILE", help="Draw the curves: .png, .svg or .pdf.")
@click.option(
    "--report",
    "page",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write a page of HTML with curves, tables, and where others were faster.",
)
def bench(**options: Any) -> int:
    """Measure a COLLECTIVE: allreduce, reduce_scatter, allgather, broadcast, alltoall, reduce, gather or scatter; or
    messages: sendrecv, latency or bandwidth.

    With all, measure each of these in turn, messages where there are two ranks.

    Flags, sizes and columns are those of nccl-tests; but the size of -e is measured too where the steps jump over it,
    and -o, -d and --vs take several names with commas. The time of an iteration is the slowest rank's, the figure is
    the median over the iterations. Results are verified on fresh inputs, #wrong counts over all ranks, and the exit
    status is 1 if any element was wrong.

    The column "bound" is the share of the machine's own limit that was reached, measured in turn with the collective.
    On a node that is one hand-over of a flag between the ranks, and then the traffic of each rank's own memory: an
    allreduce reads and writes its bytes in place, others copy what comes from other ranks. Between nodes it is the
    latency of a message, and the bytes that have to cross a node's link at the rate of large messages. It is N/A for
    one rank, which moves nothing.
    "vs": how many times longer another library took, N/A where it cannot do the job or gets it wrong.

    With --device cuda, times are those between events on the stream, "bound" is the share of the GPU's own copy
    bandwidth (2 P n bytes for P ranks on it), and the peers are MPI by hand through pinned memory and Gloo on tensors.

    In sendrecv each rank sends to the next one while it receives. The other two are between ranks 0 and 1: latency is
    half the time there and back; for bandwidth, 16 messages are sent in a row, and then answered once.
    """
    plot = options.pop("plot")
    page = options.pop("page")
    settings = _settings(options)
    name = settings.collective
    several = name == "all"
    if several and (plot or settings.output_file):
        raise click.UsageError("--plot and -J are for one collective; with all there is --report")
    if not settings.cycles and (several or plot or page or settings.output_file or settings.format == "json"):
        raise click.UsageError("-N 0 comes to no end, so it takes a table of one collective alone")
    if plot or page:
        plots.require_matplotlib(plot)
    ringreduce.init()
    _require_writable([path for path in (settings.output_file, plot, page) if path])
    reports = _reports(settings)
    _say_if_alone(name, settings.format)
    if ringreduce.rank() == 0:
        if settings.output_file:
            write_file(settings.output_file, to_json(reports[0]).encode())
        if plot:
            plots.write(plots.figure(reports[0]), plot)
        if page:
            write_file(page, plots.page(reports).encode())
        for path in filter(None, (settings.output_file, plot, page)):
            click.echo(f"bench: wrote {path}", err=True)
    return int(any(report.nwrong for report in reports))


def _reports(settings: Settings) -> list[Report]:
    """Measure a collective, or all; and let rank 0 print what is found. Collective."""
    world = ringreduce.world()
    several = settings.collective == "all"
    as_json = settings.format == "json"
    wanted = [name for name, each in COLLECTIVES.items() if world.size > 1 or not each.of_two]
    names = wanted if several else [settings.collective]
    reports = []
    for number, name in enumerate(names, 1):
        progress = ProgressLine(f"bench {name}, collective {number} of {len(names)}")
        write = None if several and as_json else _write
        told = progress if as_json and world.rank == 0 else None  # nothing of JSON is seen until the end
        head = settings.format != "csv" or number == 1
        reports.append(benchmark.run(world, replace(settings, collective=name), write, progress=told, head=head))
        if reports[-1].busy and world.rank == 0:
            click.echo(f"bench {name}: {reports[-1].busy}: these are not the times of this machine at rest", err=True)
    if several and as_json and world.rank == 0:
        _write(json.dumps([report.as_dict() for report in reports], indent=1) + "\n")
    return reports


@click.command(cls=RankCommand, short_help="Say what would run, and why.")
@click.argument("collective", metavar="[COLLECTIVE]", type=click.Choice(_WITH_ALGORITHMS), default="allreduce")
@click.option("-b", "--minbytes", type=_NBYTES, default="8", help="First size; takes K, M, G.")
@click.option("-e", "--maxbytes", type=_NBYTES, show_default="64M, or --minbytes", help="Last size.")
@click.option("-f", "--stepfactor", type=click.IntRange(2), default=8, help="From size to size.")
@click.option("-d", "--datatype", metavar="TYPE", type=click.Choice(list(TYPES)), default="float", help="Element type.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where the arrays are.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON, a list of sizes.")
def explain(
    collective: str, minbytes: int, maxbytes: int | None, stepfactor: int, datatype: str, device: str, as_json: bool
) -> None:
    """Say for each size what a COLLECTIVE (allreduce unless named) would run here, and why."""
    last = _last_size(minbytes, maxbytes, 64 << 20)
    ringreduce.init()
    if device != "cpu":
        array = ringreduce.empty(1, device=device)
        ringreduce.allreduce(array, out=array)  # in which the ranks find out whether they can use what is asked for
    if ringreduce.rank() != 0:
        return
    world = ringreduce.world()
    dtype = native_dtype(TYPES[datatype])
    chosen: list[dict[str, Any]] = []
    for nbytes in sizes(minbytes, last, step_nbytes=None, step_factor=stepfactor):
        reason = ringreduce.explain(nbytes, dtype, collective, device=device)
        said = {"size": nbytes, "collective": collective, "type": datatype, "device": device, "reason": reason}
        if device == "cpu":
            choice = world.choose(collective, nbytes, dtype)
            said |= {"algorithm": choice.algorithm, "transport": choice.transport, "reason": choice.reason}
        chosen.append(said)
    if as_json:
        click.echo(json.dumps(chosen, indent=1))
        return
    where = "host" if device == "cpu" else "device"
    click.echo(f"{collective} of {datatype} in {where} memory, {world.topology.describe()}")
    if device != "cpu":
        print_table(["size", "why"], [[format_nbytes(each["size"]), each["reason"]] for each in chosen], text=1)
        return
    rows = [[format_nbytes(each["size"]), each["algorithm"], each["transport"], each["reason"]] for each in chosen]
    print_table(["size", "algorithm", "transport", "why"], rows, text=3)
    click.echo(f"all that can run here: {', '.join(world.algorithms(collective))}")
    remarks = ringreduce.explain(last, dtype, collective).splitlines()[1:]
    click.echo("".join(f"{each}\n" for each in remarks), nl=False)


def _settings(options: dict[str, Any]) -> Settings:
    """Turn options into settings, and check what needs no other rank."""
    shared = options.pop("buffers") == "shared"
    new = options.pop("results") == "new"
    given = {name: value for name, value in options.items() if value is not None}
    settings = Settings(shared_buffers=shared, new_results=new, **given)
    for name in settings.types:
        native_dtype(TYPES[name])
    last = _last_size(settings.min_nbytes, given.get("max_nbytes"), settings.max_nbytes)
    return replace(settings, max_nbytes=last)


def _require_writable(paths: Sequence[str]) -> None:
    """Check that rank 0 can write files, before anything is measured for them. Collective."""
    complaint = None
    if ringreduce.rank() == 0:
        for path in paths:
            try:
                require_writable(Path(path))
            except OSError as error:
                complaint = complaint or f"{path} cannot be written: {error.strerror}"
    complaint = ringreduce.broadcast_object(complaint) if paths else None
    if complaint is not None:
        raise click.UsageError(complaint)


def _last_size(first: int, last: int | None, usual: int) -> int:
    if last is None:
        return max(first, usual)
    if last < first:
        raise click.UsageError(f"--maxbytes {last} is smaller than --minbytes {first}")
    return last


@click.command("tune", cls=RankCommand, short_help="Find out what is the fastest here.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="where later runs look: $RINGREDUCE_TUNING, or the user's caches",
    help="Where the table goes.",
)
@click.option("--budget", type=click.FloatRange(1), default=60.0, help="Seconds that it may take, about.")
@click.option(
    "--even-if-busy", is_flag=True, help="Write the table although other processes took time meanwhile; it says so."
)
def tune(directory: Path | None, budget: float, even_if_busy: bool) -> None:
    """Measure the allreduce algorithms on these ranks, and write a table from which later runs choose.

    The table is for this placement of the ranks on nodes, this MPI library and this version of ringreduce; run this
    under mpirun just as the program that it is for. Later runs find it by themselves. Where other processes take more
    than 0.2 cores of a machine meanwhile, no table is written. For ranks that are not there, see simulate.
    """
    ringreduce.init()
    world = ringreduce.world()
    folder = directory or world.config.tuning
    if folder is None:
        raise ConfigError("tune has no folder to write to: set RINGREDUCE_TUNING or name one with --directory")
    tuner.tune(world, tuner.SIZES, Path(folder), _write, budget, even_if_busy=even_if_busy)
