"""``bench recovery``: how long it takes until the others go on when a rank is killed."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from ringreduce import runtime
from ringreduce.common.errors import ConfigError, PeerLostError
from ringreduce.common.launch import launch
from ringreduce.common.reduce_ops import MAX, SUM
from ringreduce.observe.status import resident_nbytes

__all__ = ["RecoveryResult", "run"]

_COUNT = 1 << 18  # 1 MiB of float32
_WARMUP_S = 0.2


@dataclass(frozen=True, slots=True)
class RecoveryResult:
    """What followed one death, in milliseconds, on the slowest of the ranks that were left.

    Attributes:
        left: how many ranks were left.
        detected_ms: from the signal to the error of the allreduce that the rank was in.
        connected_ms: from there until the ranks that are left were connected.
        begun_ms: from there until their world had begun.
        next_ms: from there to the end of the next allreduce.
        total_ms: all together.
        descriptors: files that rank 0 had open then.
        resident_nbytes: of its memory that was there then.
    """

    left: int
    detected_ms: float
    connected_ms: float
    begun_ms: float
    next_ms: float
    total_ms: float
    descriptors: int
    resident_nbytes: int


def run(layout: str, emit: Callable[[str], None]) -> list[RecoveryResult]:
    """Let the last rank be killed, again and again until one is left. Collective.

    Args:
        layout: ``"json"``, or anything else for a table.
        emit: takes what rank 0 has to say.

    Raises:
        ConfigError: the launcher ends the job with any of its ranks.
    """
    if not launch().survives_deaths:
        raise ConfigError("bench recovery lets ranks die; start it by `ringreduce run --elastic -np 4 ...`")
    results = []
    while runtime.size() > 1:
        results.append(_kill_last())
    if layout == "json":
        emit(json.dumps({"results": [asdict(each) for each in results]}) + "\n")
    else:
        emit(_table(results))
    return results


def _kill_last() -> RecoveryResult:
    data = np.ones(_COUNT, np.float32)
    doomed = runtime.rank() == runtime.size() - 1
    when = float(runtime.broadcast(np.array([time.monotonic() + _WARMUP_S]))[0])  # one clock for all of a machine
    try:
        while True:
            runtime.allreduce(data, SUM, out=data)
            data[:] = 1
            if doomed and time.monotonic() > when:
                when = time.monotonic()
                os.kill(os.getpid(), signal.SIGKILL)
    except PeerLostError as error:
        detected = time.monotonic()
        steps = runtime.go_on(error)
    begun = time.monotonic()
    data[:] = 1
    runtime.allreduce(data, SUM, out=data)
    ended = time.monotonic()
    assert (data == runtime.size()).all()
    # The rank dies within a call after that moment, of some 0.1 ms.
    times = [detected - when, steps.connected_s, steps.begun_s, ended - begun, ended - when]
    first, second, third, fourth, total = (1e3 * runtime.allreduce(np.array(times), MAX)).tolist()
    gc.collect()  # the error's traceback holds the old world
    descriptors = len(os.listdir("/proc/self/fd"))
    return RecoveryResult(runtime.size(), first, second, third, fourth, total, descriptors, resident_nbytes())


def _table(results: list[RecoveryResult]) -> str:
    lines = [
        "# milliseconds after the last rank was killed, slowest of those that are left; what rank 0 then holds",
        f"# {'left':>6}  {'detected':>9}  {'connected':>9}  {'begun':>9}  {'next step':>9}  {'total':>9}"
        f"  {'files':>5}  {'MiB':>6}",
    ]
    lines += [
        f"  {each.left:>6}  {each.detected_ms:>9.1f}  {each.connected_ms:>9.1f}  {each.begun_ms:>9.1f}"
        f"  {each.next_ms:>9.1f}  {each.total_ms:>9.1f}"
        f"  {each.descriptors:>5}  {each.resident_nbytes / 2**20:>6.1f}"
        for each in results
    ]
    return "\n".join(lines) + "\n"
