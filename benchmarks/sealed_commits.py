"""Measure writing and reading a commit that is sealed beside one that is not, in turn.

    python benchmarks/sealed_commits.py --size 1G --rounds 5 --folder /var/tmp

A commit is written, flushed to the disk, checked as a whole, and read again, as in elastic training. Figures are
medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ringreduce.common.keys import write_secret
from ringreduce.common.quantities import parse_nbytes
from ringreduce.common.sealed_files import PLAIN, KeyFile, disk_keys
from ringreduce.elastic import CommitStore


def write(content: Any, file: BinaryIO) -> None:
    """Write an array."""
    np.save(file, content)


def read(file: BinaryIO) -> Any:
    """Return an array."""
    return np.lib.format.read_array(file)


def measure(folder: Path, keys: KeyFile, content: Any) -> dict[str, float]:
    """Return the seconds of a commit."""
    store = CommitStore(folder, 1, write, read, keys)
    store.prepare()
    begin = time.perf_counter()
    store.put(1, content)
    store.settle()
    written = time.perf_counter()
    assert store.has(1)
    loaded = store.load(1)
    ended = time.perf_counter()
    assert np.array_equal(loaded, content)
    for each in folder.iterdir():
        each.unlink()
    return {"write": written - begin, "check and read": ended - written}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", type=parse_nbytes, default=1 << 30, help="bytes of the commit (1G)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (5)")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on the disk to measure (/var/tmp)")
    options = parser.parse_args()
    content = np.random.default_rng(0).standard_normal(options.size // 8)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_secret(Path(folder) / "key")
        kinds = {"open": PLAIN, "sealed": disk_keys(str(Path(folder) / "key"))}
        found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(options.rounds):
            for kind, keys in kinds.items():
                for what, seconds in measure(Path(folder) / kind, keys, content).items():
                    found[kind, what].append(seconds)
    for what in ("write", "check and read"):
        plain, sealed = (statistics.median(found[kind, what]) for kind in kinds)
        print(f"{what}: open {plain:.2f} s, sealed {sealed:.2f} s; sealed has {plain / sealed:.2f} of the open speed")


if __name__ == "__main__":
    main()
