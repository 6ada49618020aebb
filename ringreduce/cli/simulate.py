"""``simulate``: the options of a cluster that need not exist, and of a training on it."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import click

from ringreduce.bench import plots
from ringreduce.bench.cases import sizes
from ringreduce.cli.progress_bar import ProgressLine
from ringreduce.cli.run import Parsed, options_from
from ringreduce.cli.wrong_options import Command
from ringreduce.common.files import read_file
from ringreduce.common.launch import launch
from ringreduce.common.quantities import parse_nbytes, parse_rate, parse_seconds
from ringreduce.simulate.cluster import Cluster, Rates, links_of, topology_of
from ringreduce.simulate.report import figure, scaling, simulate, to_dict, to_text
from ringreduce.simulate.step_times import SimulatedTraining


def _nodes(text: str) -> tuple[int, ...]:
    counts = tuple(int(each) for each in text.split(",") if each.isdigit() and int(each) > 0)
    if len(counts) != len(text.split(",")):
        raise ValueError("expected ranks per node, such as 8, or 8,8,4")
    return counts


def _of_a_number(parse: Any) -> Any:
    """Return what reads ``NUMBER:...`` as a pair."""

    def read(text: str) -> tuple[int, Any]:
        number, colon, rest = text.partition(":")
        if not (number.isdigit() and colon):
            raise ValueError("expected a number, a colon and a value")
        return int(number), parse(rest)

    return read


_RATE = Parsed("rate", parse_rate)
_TIME = Parsed("time", parse_seconds)
_NBYTES = Parsed("size", parse_nbytes)
_SLOW = Parsed("link", _of_a_number(parse_rate))
_LATE = Parsed("delay", _of_a_number(parse_seconds))
#: Option -> the term of `Model` that it sets; and, for messages inside a node, the term of `Links`.
_TERMS = {
    "rates": "beta",
    "latency_s": "alpha",
    "message_s": "message",
    "barrier_s": "sync",
    "memory_rate": "copy",
    "reduction_rate": "gamma",
}
_TERMS_WITHIN = {"within_s": "alpha", "memory_rate": "beta"}
_FILE = click.Path(exists=True, dir_okay=False)
_EXAMPLES = """\b
Examples:
  python -m ringreduce simulate --nodes 2048 --ranks-per-node 8 --link 400Gbit/s --latency 2us
  python -m ringreduce simulate --nodes 3 --ranks-per-node 8,8,4 --slow-link 2:10Gbit/s --late 5:1ms
  python -m ringreduce simulate --nodes 64 --from bench-2x8.json --from bench-1x8.json --plot times.png
  python -m ringreduce simulate --nodes 128 --ranks-per-node 8 --compute 120ms --gradients 98M --overlap --scaling
"""


@click.command("simulate", cls=Command, epilog=_EXAMPLES, short_help="Predict times on a cluster that need not exist.")
@click.option("--nodes", type=click.IntRange(1), default=2, help="How many.")
@click.option("--ranks-per-node", "ranks", type=Parsed("counts", _nodes), default="1", help="Or of each: 8,8,4.")
@click.option("--link", "rates", type=_RATE, multiple=True, help="Rate of a node's link: 100Gbit/s, 100G, 12.5GB/s.")
@options_from(Rates)
@click.option("--slow-link", "slow", type=_SLOW, multiple=True, metavar="NODE:RATE", help="Repeatable.")
@click.option("--late", type=_LATE, multiple=True, metavar="RANK:TIME", help="Repeatable.")
@click.option("--noise", type=_TIME, default="0s", help="Mean of the exponential delay of each rank.")
@click.option("--from", "reports", type=_FILE, multiple=True, help="Parameters: bench --algorithm all -J FILE.")
@click.option("-b", "--minbytes", type=_NBYTES, default="8", help="First size; takes K, M, G.")
@click.option("-e", "--maxbytes", type=_NBYTES, default="256M", help="Last size.")
@click.option("-f", "--stepfactor", type=click.IntRange(2), default=16, help="From size to size.")
@click.option("--algorithm", "algorithms", multiple=True, help="Instead of all. Repeatable.")
@options_from(SimulatedTraining)
@click.option("--scaling", "grows", is_flag=True, help="Simulate the training on 1, 2, 4, ... ranks, for each --link.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", type=click.Path(dir_okay=False), metavar="FILE", help="Draw it: .png, .svg or .pdf.")
def command(**options: Any) -> int:
    """Predict times of allreduces and training steps on a cluster, from the schedules that are executed.

    Nothing is measured and no rank is started. Times are from when the ranks begin, but for those that are late, until
    the last one ends. For each size, the fastest algorithm is named, what its time goes into, and the next one.

    With --compute and --gradients, simulate a training: efficiency is the share of its time that a rank would also need
    if it were alone. The backward pass takes two thirds of --compute; to encode for --wire takes no time.
    """
    if launch().rank:
        return 0
    if (options["compute_s"] is None) != (options["nbytes"] is None):
        raise click.UsageError("a training takes both --compute and --gradients")
    if options["grows"] and options["compute_s"] is None:
        raise click.UsageError("--scaling is of a training: give --compute and --gradients")
    if options["grows"] and len(set(options["ranks"])) > 1:
        raise click.UsageError("--scaling is on nodes of equal size")
    if options["grows"] and (options["slow"] or len(options["late"]) > 1):
        raise click.UsageError("--scaling is on equal links, with at most one rank that is --late")
    if not options["grows"] and len(options["rates"]) > 1:
        raise click.UsageError("several --link are for --scaling")
    if options["maxbytes"] < options["minbytes"]:
        raise click.UsageError("--maxbytes is smaller than --minbytes")
    if options["plot"]:
        plots.require_matplotlib(options["plot"])
    cluster = _cluster(options)
    algorithms = options["algorithms"] or None
    wanted = sizes(options["minbytes"], options["maxbytes"], step_nbytes=None, step_factor=options["stepfactor"])
    training = None if options["compute_s"] is None else _made(SimulatedTraining, options)
    report = simulate(
        cluster, wanted, algorithms=algorithms, training=training, progress=ProgressLine("simulate", done="simulated")
    )
    if options["grows"]:
        rates = options["rates"] or [1 / cluster.links.between.beta]
        report = scaling(
            report, rates, algorithms=algorithms, progress=ProgressLine("simulate, numbers of ranks", done="simulated")
        )
    click.echo(json.dumps(to_dict(report), indent=1) + "\n" if options["as_json"] else to_text(report), nl=False)
    if options["plot"]:
        plots.write(figure(report), options["plot"])
        click.echo(f"simulate: wrote {options['plot']}", err=True)
    return 0


def _cluster(options: dict[str, Any]) -> Cluster:
    ranks = options["ranks"]
    nodes = options["nodes"]
    if len(ranks) not in (1, nodes):
        raise click.UsageError(f"--ranks-per-node has {len(ranks)} counts, for {nodes} nodes")
    usual = _made(Rates, {**options, "rate": options["rates"][0] if options["rates"] else None}).links()
    links = links_of(
        (read_file(path, most_nbytes=64 << 20).decode(errors="replace") for path in options["reports"]), usual
    )
    given = {name for name, value in options.items() if value not in (None, ())}
    between = {term: getattr(usual.between, term) for name, term in _TERMS.items() if name in given}
    within = {term: getattr(usual, term) for name, term in _TERMS_WITHIN.items() if name in given}
    links = replace(links, between=replace(links.between, **between), **within)
    slow = {node: 1 / slower / links.between.beta for node, slower in options["slow"]}
    topology = topology_of(ranks if len(ranks) == nodes else ranks * nodes)
    return Cluster(topology, replace(links, slow=slow), late=dict(options["late"]), noise_s=options["noise"])


def _made(kind: type[Any], options: dict[str, Any]) -> Any:
    """Return a value whose fields are options, those that were given."""
    values = {each.name: options.get(each.name) for each in fields(kind)}
    return kind(**{name: value for name, value in values.items() if value is not None})
