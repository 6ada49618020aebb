"""``bench async``: what named asynchronous operations cost, from submission to the result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from ringreduce.communicator import Communicator
from ringreduce.engine import Engine, Reduction
from ringreduce.reduce_ops import MAX, SUM
from ringreduce.runtime import global_process_set

__all__ = ["AsyncResult", "run"]


@dataclass(frozen=True, slots=True)
class AsyncResult:
    """One measurement.

    Attributes:
        name: what was measured.
        operations: how many were submitted together.
        nbytes: of each.
        median_us: microseconds from the first submission to the last result, median over the iterations of the slowest
            rank's time; ``min_us`` and ``p95_us`` likewise.
        nwrong: wrong elements, over all ranks.
    """

    name: str
    operations: int
    nbytes: int
    min_us: float
    median_us: float
    p95_us: float
    nwrong: int


def run(iterations: int | None, layout: str, emit: Callable[[str], None]) -> list[AsyncResult]:
    """Measure the latency of one small operation, and many that are submitted together. Collective.

    Args:
        iterations: timed ones of each; None: 2000 and 100.
        layout: ``"json"``, or anything else for a table.
        emit: takes what rank 0 has to say.
    """
    engine = global_process_set.engine
    results = [
        _measure(engine, "latency", 1, 4, iterations or 2000),
        _measure(engine, "together", 160, 64 << 10, iterations or 100),
    ]
    if engine.communicator.rank == 0:
        if layout == "json":
            emit(json.dumps({"ranks": engine.communicator.size, "results": [asdict(each) for each in results]}) + "\n")
        else:
            emit(_table(engine.communicator, results))
    return results


def _measure(engine: Engine, name: str, operations: int, nbytes: int, iterations: int) -> AsyncResult:
    communicator = global_process_set.communicator
    size = communicator.size
    sources = [np.full(nbytes // 4, 1.0 + communicator.rank, np.float32) for _ in range(operations)]
    targets = [np.empty_like(source) for source in sources]
    times = np.empty(iterations)
    communicator.barrier()
    for iteration in range(-max(10, iterations // 5), iterations):  # the first make names known and the plan agreed
        begin = time.perf_counter()
        submitted = []
        for index in range(operations):
            operation = Reduction(f"{name} {index}", "allreduce", SUM, [sources[index]], [targets[index]])
            engine.submit(operation)
            submitted.append(operation)
        for operation in submitted:
            engine.wait(operation)
        if iteration >= 0:
            times[iteration] = time.perf_counter() - begin
    wrong = np.array([sum(int((target != size * (size + 1) / 2).sum()) for target in targets)])
    communicator.allreduce(wrong, SUM, out=wrong)
    communicator.allreduce(times, MAX, out=times)
    low, median, high = np.percentile(times, [0, 50, 95]) * 1e6
    return AsyncResult(name, operations, nbytes, float(low), float(median), float(high), int(wrong[0]))


def _table(communicator: Communicator, results: list[AsyncResult]) -> str:
    lines = [
        f"# {communicator.topology.describe()}; from the first submission to the last result, slowest rank",
        f"# {'':>10}  {'operations':>10}  {'bytes each':>10}"
        f"  {'min us':>9}  {'median us':>9}  {'p95 us':>9}  {'#wrong':>6}",
    ]
    lines += [
        f"  {each.name:>10}  {each.operations:>10}  {each.nbytes:>10}  {each.min_us:>9.1f}  {each.median_us:>9.1f}"
        f"  {each.p95_us:>9.1f}  {each.nwrong:>6}"
        for each in results
    ]
    return "\n".join(lines) + "\n"
