"""Measure allreduces in wire formats between hosts beside the same in float32, in turn, in one run.

    scripts/cluster up 4 --rate 1gbit
    scripts/cluster run -np 4 python benchmarks/wire_formats.py

The arrays are communication buffers of normally distributed values, averaged in place. A barrier goes before each call,
the slowest rank's time counts, figures are medians. "error" is how far the result is from that in float64, relative, in
the Euclidean norm. On one host nothing is encoded.

    python benchmarks/wire_formats.py --codecs

measures the codecs alone, on one core: bytes of float32 in a second, by NumPy and by compiled loops.
"""

from __future__ import annotations

import argparse
import json
import sys
import timeit
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ringreduce
from ringreduce.bench.measure import Contender, time_in_turn
from ringreduce.buffers.codecs import CODECS
from ringreduce.collectives.compressed import best_codec
from ringreduce.common.config import Config
from ringreduce.common.quantities import parse_nbytes
from ringreduce.native.cache import loops
from ringreduce.native.library import CODECS as LOOPS


def measure(nbytes: int, formats: list[str], iterations: int) -> list[dict[str, Any]]:
    """Return name, median time and error of float32 and each format; the times are the same on all ranks."""
    count, names = nbytes // 4, [None, *formats]
    given = np.random.default_rng(ringreduce.rank()).standard_normal(count).astype(np.float32)
    exact = ringreduce.allreduce(given.astype(np.float64), "average")
    array = ringreduce.empty(count, np.float32)
    calls = [partial(ringreduce.allreduce, array, "average", out=array, compression=name) for name in names]
    errors = []
    for call in calls:
        array[:] = given
        errors.append(float(np.linalg.norm(exact - call()) / np.linalg.norm(exact)))
    contenders = [Contender("", array, call, prepare=partial(np.copyto, array, given)) for call in calls]
    medians = np.median(time_in_turn(ringreduce.world(), contenders, iterations, 0), axis=1)
    return [
        {"name": name or "float32", "median_ms": median * 1e3, "speedup": medians[0] / median, "error": error}
        for name, median, error in zip(names, medians.tolist(), errors, strict=True)
    ]


def measure_codecs(count: int = 1 << 18, calls: int = 50) -> None:
    """Print how many GB/s each codec encodes, decodes, and adds: the best of some calls, in a core's own cache."""
    values = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    total = np.zeros_like(values)
    library = loops(Config.from_environ().caches, LOOPS).library
    print(f"{'codec':<16}{'encode':>8}{'decode':>8}{'add':>8}  GB/s")
    for name, codec in CODECS.items():
        encoded = np.empty(codec.nbytes(count), np.uint8)
        for way, each in {"NumPy": codec, "compiled": best_codec(name, library)}.items():
            if way == "NumPy" or each is not codec:
                acts = [
                    (each.encode, values, encoded),
                    (each.decode, encoded, total),
                    (each.decode_add, encoded, total),
                ]
                seconds = [min(timeit.repeat(partial(*act), number=1, repeat=calls)) for act in acts]
                print(f"{name:<6}{way:<10}" + "".join(f"{values.nbytes / each / 1e9:>8.1f}" for each in seconds))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--formats", default=",".join(CODECS), help=f"which, separated by commas ({','.join(CODECS)})")
    parser.add_argument("-b", "--nbytes", type=parse_nbytes, default=16 << 20, help="size of the arrays (16M)")
    parser.add_argument("-n", "--iters", type=int, default=11, help="timed calls of each (11)")
    parser.add_argument("-J", "--output_file", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--codecs", action="store_true", help="measure the codecs alone")
    arguments = parser.parse_args()
    if arguments.codecs:
        measure_codecs()
        return 0
    ringreduce.init()
    rows = measure(arguments.nbytes, arguments.formats.split(","), arguments.iters)
    if ringreduce.rank() == 0:
        print(f"{arguments.nbytes} bytes, {ringreduce.world().topology.describe()}; median of {arguments.iters}")
        print(f"{'format':<10}{'time (ms)':>10}{'speed-up':>10}{'error':>10}")
        for row in rows:
            print(f"{row['name']:<10}{row['median_ms']:>10.1f}{row['speedup']:>9.2f}x{row['error']:>10.2g}")
        if arguments.output_file:
            report = {"formats": {row["name"]: row for row in rows}}
            arguments.output_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    ringreduce.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
