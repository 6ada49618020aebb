"""Measure messages between hosts that are encrypted beside open ones, in turn, in one run, on hosts of this machine.

    python benchmarks/sealed.py                          # as root: 2 and 4 hosts, 1 and 10 Gbit/s; 4 minutes
    python benchmarks/sealed.py --hosts 2 --rates 10gbit

A job has one rank on each host (`scripts/cluster`). It begins worlds with a key and without one, in turn; each does all
that is measured. A time is the slowest rank's, figures are medians, and messages that the speed is divided by are those
that follow each other. Processor seconds are those of all ranks, with their waits, by one call; "sealing" is the part
that they spend in the library's sealing and opening, measured in rounds of their own. The step is that of an MLP (8
layers of 1024 x 1024, 8.4 M parameters, 64 samples per rank, SGD).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import ringreduce as rr
from ringreduce.common.keys import write_secret
from ringreduce.common.quantities import format_nbytes
from ringreduce.transport.sealed import Cipher

CLUSTER = (sys.executable, str(Path(__file__).parents[1] / "scripts" / "cluster"), "--name", "sealed")
KEY, MARK = "RINGREDUCE_KEY_FILE", "measured: "
#: Bytes of an allreduce, and how many calls a turn times.
SIZES = {8: 300, 1 << 10: 300, 1 << 20: 10, 16 << 20: 3}
SMALL = 1 << 10
STEPS, LAYERS, WIDTH, SAMPLES = 3, 8, 1024, 64


class Times(NamedTuple):
    """Of one call: seconds, of the slowest rank; those of the processors, and in ciphers, of all ranks."""

    seconds: float
    processor: float
    sealing: float


class Sealing:
    """Counts the seconds that this rank seals and opens, while it is in place."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._originals = {name: getattr(Cipher, name) for name in ("seal", "open")}

    def __enter__(self) -> Sealing:
        for name, original in self._originals.items():
            setattr(Cipher, name, self._timed(original))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(Cipher, name, original)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*arguments)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def measured(call: Callable[[], object], count: int) -> Times:
    """Return the times of a call that is made so often."""
    call()  # which makes plans
    rr.barrier()
    processor, begin = time.process_time(), time.perf_counter()
    for _ in range(count):
        call()
    mine = time.perf_counter() - begin, time.process_time() - processor
    with Sealing() as sealing:
        call()
    seconds, processors, sealings = zip(*rr.allgather_object((*mine, sealing.seconds)), strict=True)
    return Times(max(seconds) / count, sum(processors) / count, sum(sealings))


def step() -> Callable[[], object]:
    """Return a step of training."""
    import torch

    import ringreduce.torch as hvd

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(rr.rank()))

    def run() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return run


def turn() -> dict[str, Times]:
    """Return what is measured in one world."""
    found = {}
    for nbytes, count in SIZES.items():
        array = np.ones(nbytes, np.uint8)
        found[str(nbytes)] = measured(partial(rr.allreduce, array, rr.MAX, out=array), count)
    found["step"] = measured(step(), STEPS)
    return found


def job(key: str, rounds: int) -> None:
    """Measure on the ranks of a job, and print what rank 0 knows."""
    found: defaultdict[str, dict[str, list[Times]]] = defaultdict(lambda: {"open": [], "sealed": []})
    for number in range(rounds + 1):
        for kind in ("open", "sealed"):
            os.environ.pop(KEY, None)
            if kind == "sealed":
                os.environ[KEY] = key
            rr.init()
            for what, times in turn().items():
                found[what][kind] += [times] * (number > 0)  # the first turn of each is not counted
            is_first = rr.rank() == 0
            rr.shutdown()
    if is_first:
        medians = {
            what: {
                kind: [statistics.median(each) for each in zip(*times, strict=True)] for kind, times in kinds.items()
            }
            for what, kinds in found.items()
        }
        print(MARK + json.dumps(medians), flush=True)


def table(hosts: int, rate: str, found: dict[str, dict[str, list[float]]]) -> None:
    """Print the rows of one job."""
    for what, kinds in found.items():
        plain, sealed = Times(*kinds["open"]), Times(*kinds["sealed"])
        row = [str(hosts), rate, what if what == "step" else f"allreduce {format_nbytes(int(what))}"]
        row += [f"{each.seconds * 1e3:.3f}" for each in (plain, sealed)]
        if what != "step" and int(what) <= SMALL:
            in_a_row = (hosts - 1).bit_length()  # by recursive doubling
            row.append(f"{(sealed.seconds - plain.seconds) / in_a_row * 1e6:+.1f} us a message")
        else:
            row.append(f"{plain.seconds / sealed.seconds:.3f}")
        row += [f"{each.processor * 1e3:.3f}" for each in (plain, sealed)] + [f"{sealed.sealing * 1e3:.3f}"]
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="how many (2 4)")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], help="of their links (1gbit 10gbit)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each world is begun (5)")
    parser.add_argument("--job", metavar="KEY", help="take part in a job as a rank")
    options = parser.parse_args()
    if options.job:
        job(options.job, options.rounds)
        return
    print("| hosts | links | call | open, ms | sealed, ms | open / sealed | processors, open, ms | sealed | sealing |")
    print("|--:|--:|---|--:|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        write_secret(Path(folder) / "key")
        program = (sys.executable, __file__, "--job", f"{folder}/key", "--rounds", str(options.rounds))
        for hosts in options.hosts:
            for rate in options.rates:
                subprocess.run([*CLUSTER, "up", str(hosts), "--rate", rate], check=True)
                try:
                    ranks = ("run", "-np", str(hosts), "--timeout", "150", *program)
                    done = subprocess.run([*CLUSTER, *ranks], stdout=subprocess.PIPE, text=True, check=True)
                finally:
                    subprocess.run([*CLUSTER, "down"], check=True)
                (line,) = [each for each in done.stdout.splitlines() if each.startswith(MARK)]
                table(hosts, rate, json.loads(line.removeprefix(MARK)))


if __name__ == "__main__":
    main()
