"""``bench async``: what named asynchronous operations on tensors cost, from submission to the result."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import MAX, SUM
from ringreduce.runtime import global_process_set

__all__ = ["AsyncResult", "run"]


@dataclass(frozen=True, slots=True)
class AsyncResult:
    """One measurement.

    Attributes:
        name: what was measured.
        operations: how many were submitted together.
        nbytes: of each.
        median_us: microseconds from the first submission to the last result, median over the iterations, of the rank
            with the largest; ``min_us`` and ``p95_us`` likewise.
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

    Raises:
        ConfigError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("bench async measures operations on torch tensors: pip install torch")
    communicator = global_process_set.communicator
    results = [
        _measure(communicator, "latency", 1, 4, iterations or 2000, in_place=False),
        _measure(communicator, "together", 160, 64 << 10, iterations or 100, in_place=True),
    ]
    if communicator.rank == 0:
        if layout == "json":
            emit(json.dumps({"ranks": communicator.size, "results": [asdict(each) for each in results]}) + "\n")
        else:
            emit(_table(communicator, results))
    return results


def _measure(
    communicator: Communicator, name: str, operations: int, nbytes: int, iterations: int, *, in_place: bool
) -> AsyncResult:
    import torch

    import ringreduce.torch as hvd

    torch.set_num_threads(1)
    size = communicator.size
    start = hvd.allreduce_async_ if in_place else hvd.allreduce_async
    tensors = [torch.empty(nbytes // 4) for _ in range(operations)]
    names = [f"{name} {index}" for index in range(operations)]
    results = tensors
    times = np.empty(iterations)
    communicator.barrier()
    for iteration in range(-max(10, iterations // 5), iterations):  # the first make names known and the plan agreed
        for tensor in tensors:
            tensor.fill_(1.0 + communicator.rank)
        begin = time.perf_counter()
        handles = [start(tensor, name=each, op=hvd.Sum) for tensor, each in zip(tensors, names, strict=True)]
        results = [hvd.synchronize(handle) for handle in handles]
        if iteration >= 0:
            times[iteration] = time.perf_counter() - begin
    wrong = np.array([sum(int((target != size * (size + 1) / 2).sum()) for target in results)])
    communicator.allreduce(wrong, SUM, out=wrong)
    low, median, high = communicator.allreduce(np.percentile(times, [0, 50, 95]) * 1e6, MAX)
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
