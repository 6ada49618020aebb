r"""How far simulated allreduces are from measured ones, for a JSON report of ``bench allreduce --algorithm all``.

    sudo scripts/cluster up 4 --rate 1gbit
    sudo scripts/cluster stream
    sudo -E env PATH=$PATH scripts/cluster run -np 4 --per-host 1 \
        python -m ringreduce bench allreduce -b 8 -e 256K -f 8 --algorithm all -c 0 -J 4x1.json
    python benchmarks/simulation.py 4x1.json --rate 0.956 --upto 4K --burst 16K

Large sizes, in a report of their own: -b 1M -e 16M -f 4 -n 8 -w 2.

The parameters are fitted to the times of all algorithms and sizes, or of those that ``--fitted`` and ``--upto`` select;
``--rate`` sets the rate of the links in place of the fit. Each line has a size, and simulated / measured time of each
algorithm.

``--burst`` is the number of bytes that pass a link at once when a call begins. On a virtual cluster these are 256 kB
after a rest. Between two timed calls, which a barrier separates, a link regains rate x time of them: 16 kB in 0.13 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from ringreduce.common.quantities import format_nbytes, parse_nbytes
from ringreduce.simulate.cluster import Cluster, Rates, Simulator, describe, links_of, samples_of

LARGE = 1 << 20  # bytes, from which figures count apart


def main() -> None:
    """Fit, simulate and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--fitted", metavar="ALGORITHM", help="fit to this algorithm alone")
    parser.add_argument("--upto", type=parse_nbytes, metavar="SIZE", help="fit to sizes up to this one alone")
    parser.add_argument("--rate", type=float, help="Gbit/s of a stream (fitted)")
    parser.add_argument(
        "--burst", type=parse_nbytes, default=0, metavar="SIZE", help="bytes that pass a link at once (0)"
    )
    options = parser.parse_args()
    text = options.report.read_text(encoding="utf-8")
    report = json.loads(text)
    report["results"] = [
        each
        for each in report["results"]
        if options.fitted in (None, each["algorithm"]) and each["size"] <= (options.upto or each["size"])
    ]
    rate = (options.rate or 1.0) * 1e9 / 8
    usual = Rates(rate, 1e-4, 1e-5, 1e-5, 4e9, 5e9, 1e-5, options.burst).links()
    links = links_of([json.dumps(report)], usual)
    if options.rate:
        links = replace(links, between=replace(links.between, beta=1 / rate))
    compare(text, Cluster(samples_of(text)[0].topology, links))


def compare(text: str, cluster: Cluster) -> None:
    """Print simulated / measured, and the median and the worst error."""
    print(f"# {cluster.topology.describe()}; {describe(cluster.links)}")
    measured: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in samples_of(text):
        measured[each.nbytes][each.algorithm].append(each.seconds)
    simulator, errors, losses = Simulator(cluster), defaultdict[bool, list[float]](list), list[str]()
    for nbytes, found in measured.items():
        times = {name: min(seconds) for name, seconds in found.items()}  # in place or not, what was disturbed less
        ratios = {name: simulator.times(nbytes)[name] / seconds for name, seconds in times.items()}
        print(f"{format_nbytes(nbytes):>10}", *(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
        errors[nbytes >= LARGE] += [abs(ratio - 1) for ratio in ratios.values()]
        chosen = times[next(iter(simulator.times(nbytes)))]
        losses.append(f"{sorted(times.values()).index(chosen) + 1}: {chosen / min(times.values()):.2f}")
    for large, each_error in errors.items():
        where, median, worst = "from" if large else "below", statistics.median(each_error), max(each_error)
        print(f"{where} {format_nbytes(LARGE)}: median error {median:.1%}, worst {worst:.1%}")
    print(f"rank of the chosen algorithm among those measured, and its time / the quickest one's: {', '.join(losses)}")


if __name__ == "__main__":
    main()
