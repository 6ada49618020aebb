"""What ``bench`` measures besides collectives and messages: async, overlap, recovery.

``async``: what named asynchronous operations on tensors cost, from submission to the result. ``overlap``: how much of
an asynchronous allreduce a computation hides, as in the OSU micro-benchmarks. ``recovery``: how long it takes until
the others go on when a rank is killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ringreduce import runtime
from ringreduce.bench.cases import sizes
from ringreduce.bench.contenders import OnHost
from ringreduce.bench.formats import comments, csv_of, heads_of
from ringreduce.bench.measure import Contender, Noise, time_in_turn
from ringreduce.bench.peers import PEERS
from ringreduce.bench.results import Settings
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError, PeerLostError
from ringreduce.common.launch import launch
from ringreduce.common.quantities import format_nbytes
from ringreduce.common.reduce_ops import MAX, SUM
from ringreduce.observe.resources import resident_nbytes

#: Begins an allreduce of a torch tensor; see `peers.Peer.start`.
Start = Callable[[Any], Callable[[], object]]

# Of overlap.
_ENOUGH_S = 2.0  # iterations take so long in all
_ITERATIONS = (10, 100)  # the fewest and the most
_WARMUP = 3
_PROBES = 10  # calls from which the length of the computation follows
_SIDE = 128  # of the matrices that are multiplied: they stay in a core's cache, and take some tens of microseconds

# Of recovery.
_RECOVERED = 1 << 18  # elements: 1 MiB of float32
_CALM_S = 0.2  # before a rank is killed
_STEPS = ("detected", "connected", "begun", "next", "total")


class Mode(NamedTuple):
    """What is measured besides collectives and messages.

    Attributes:
        title: is written above the table.
        form: of a line of the table, with the names of what `measure` yields.
        heads: of the columns, where they are not these names.
        measure: yields what it finds, as values by name. Collective.
        options: names of the settings that have a meaning.
        takes_torch: whether it measures operations on torch tensors.
    """

    title: str
    form: str
    heads: Mapping[str, str]
    measure: Callable[[Settings], Iterator[dict[str, Any]]]
    options: tuple[str, ...]
    takes_torch: bool = True


def run_mode(settings: Settings, write: Callable[[str], None]) -> tuple[int, str]:
    """Measure one of `MODES` in the world that is there; collective.

    Args:
        settings: equal on all ranks.
        write: gets the text, row by row, on rank 0.

    Returns:
        How many elements were wrong, and what other processes took of the machines' time, in words.

    Raises:
        ConfigError: torch or a peer is missing, or the launcher ends the job with any of its ranks.
    """
    mode = MODES[settings.collective]
    if mode.takes_torch and importlib.util.find_spec("torch") is None:
        raise ConfigError(f"bench {settings.collective} measures operations on torch tensors: pip install torch")
    noise = Noise(runtime.world()) if mode.takes_torch else None
    show = write if runtime.rank() == 0 else lambda text: None
    ranks = runtime.size()
    found: list[dict[str, Any]] = []
    title = comments(mode.title.format(placement=runtime.world().topology.describe()))
    title += heads_of(mode.form, {"nwrong": "#wrong", **mode.heads})
    for entry in mode.measure(settings):
        first = not found
        found.append(entry)
        if settings.format == "csv":
            show((",".join(entry) + "\n") * first + csv_of(list(entry), [entry]))
        elif settings.format != "json":
            show(title * first + mode.form.format_map(_cells(entry)) + "\n")
    if settings.format == "json":
        show(json.dumps({"ranks": ranks, "results": found}) + "\n")
    return sum(entry.get("nwrong", 0) for entry in found), noise.look().text if noise else ""


def _async(settings: Settings) -> Iterator[dict[str, Any]]:
    """Measure the latency of one small operation, and many that are submitted together. Collective.

    Programs do not wait for each other between such operations, so there is no barrier before each one.

    Yields:
        ``name``: what was measured; ``operations``: how many were submitted together; ``nbytes`` of each; ``min_us``,
        ``median_us`` and ``p95_us``: microseconds from the first submission to the last result, over the iterations, of
        the rank with the largest; ``nwrong``: wrong elements, over all ranks.
    """
    world = runtime.world()
    iterations = settings.iterations
    yield _submit(world, "latency", operations=1, nbytes=4, iterations=iterations or 2000)
    yield _submit(world, "together", operations=160, nbytes=64 << 10, iterations=iterations or 100)


def _submit(world: Communicator, name: str, operations: int, nbytes: int, iterations: int) -> dict[str, Any]:
    import torch

    import ringreduce.torch as hvd

    torch.set_num_threads(1)
    start = hvd.allreduce_async if operations == 1 else hvd.allreduce_async_
    tensors = [torch.empty(nbytes // 4) for _ in range(operations)]
    names = [f"{name} {index}" for index in range(operations)]
    results = tensors
    times = np.empty(iterations)
    size = world.size
    world.barrier()
    for iteration in range(-max(10, iterations // 5), iterations):  # the first make names known and the plan agreed
        for tensor in tensors:
            tensor.fill_(1.0 + world.rank)
        begin = time.perf_counter()
        handles = [start(tensor, name=each, op=hvd.Sum) for tensor, each in zip(tensors, names, strict=True)]
        results = [hvd.synchronize(handle) for handle in handles]
        if iteration >= 0:
            times[iteration] = time.perf_counter() - begin
    wrong = sum(int((target != size * (size + 1) / 2).sum()) for target in results)
    low, median, high = world.allreduce(np.percentile(times, [0, 50, 95]) * 1e6, MAX).tolist()
    found = {"name": name, "operations": operations, "nbytes": nbytes, "min_us": low, "median_us": median}
    return found | {"p95_us": high, "nwrong": int(world.allreduce(np.array([wrong]), SUM)[0])}


def hidden(allreduce_us: float, compute_us: float, both_us: float) -> float | None:
    """Return the part of the allreduce that the computation hides, at most 1; below 0 if they disturb each other.

    None where the computation, whose length was chosen before, took less than half as long or more than twice.
    """
    if not 0.5 <= compute_us / allreduce_us <= 2:
        return None
    return min(1 - (both_us - compute_us) / allreduce_us, 1.0)


def _overlap(settings: Settings) -> Iterator[dict[str, Any]]:
    """Measure asynchronous allreduces of float32 tensors of some sizes, with and without a computation. Collective.

    Each library's allreduce, a computation as long as it, and both at once take short turns.

    Yields:
        For each size and library: its ``name``; ``nbytes`` of the tensor; in microseconds, medians of the slowest rank,
        ``allreduce_us`` (begun, and waited for at once), ``compute_us`` (a computation that takes about as long) and
        ``both_us`` (begun, computed, and waited for then); ``nwrong``: wrong elements, over all ranks; ``hidden``.

    Raises:
        ConfigError: a peer is missing.
    """
    world = runtime.world()
    with contextlib.ExitStack() as stack:
        peers = {
            name: stack.enter_context(contextlib.closing(PEERS[name](world, OnHost(world)))) for name in settings.peers
        }
        starts = {"ringreduce": _start_ours, **{name: peer.start for name, peer in peers.items()}}
        for nbytes in sizes(
            settings.min_nbytes, settings.max_nbytes, step_nbytes=settings.step_nbytes, step_factor=settings.step_factor
        ):
            yield from _hide(world, starts, count=max(nbytes // 4, 1), iterations=settings.iterations)


def _start_ours(tensor: Any) -> Callable[[], object]:
    import ringreduce.torch as hvd

    handle = hvd.allreduce_async_(tensor, name=f"overlap {tensor.numel()}", op=hvd.Sum)
    return lambda: hvd.synchronize(handle)


def _hide(
    world: Communicator, starts: Mapping[str, Start], count: int, iterations: int | None
) -> Iterator[dict[str, Any]]:
    """Measure one size with all libraries."""
    import torch

    torch.set_num_threads(1)
    tensor = torch.zeros(count)
    matrix = torch.ones(_SIDE, _SIDE)
    product = torch.empty_like(matrix)

    def contender(name: str, call: Callable[[], Any]) -> Contender:
        return Contender(name, tensor.numpy(), call)

    def alone_with(start: Start) -> None:
        start(tensor)()

    def both(start: Start, compute: Callable[[], object]) -> None:
        wait = start(tensor)
        compute()
        wait()

    multiply = contender("compute", lambda: torch.mm(matrix, matrix, out=product))
    group = []
    wrong = {}
    slowest_s = 0.0
    for name, start in starts.items():
        tensor.fill_(1.0 + world.rank)
        start(tensor)()
        expected = world.size * (world.size + 1) / 2
        wrong[name] = int(world.allreduce(np.array([int((tensor != expected).sum())]), SUM)[0])
        tensor.zero_()
        alone = contender("allreduce", partial(alone_with, start))
        allreduce_s, multiply_s = np.median(
            time_in_turn(world, [alone, multiply], iterations=_PROBES, warmup=_WARMUP), axis=1
        ).tolist()
        slowest_s = max(slowest_s, allreduce_s)
        compute = multiply.repeated(max(math.ceil(allreduce_s / multiply_s), 1))
        group += [alone, compute, contender("both", partial(both, start, compute.call))]
    enough = min(max(int(_ENOUGH_S / slowest_s), _ITERATIONS[0]), _ITERATIONS[1])
    times = (
        np.median(time_in_turn(world, group, iterations=iterations or enough, warmup=_WARMUP), axis=1).reshape(-1, 3)
        * 1e6
    )
    for name, took in zip(starts, times.tolist(), strict=True):
        us = dict(zip(("allreduce_us", "compute_us", "both_us"), took, strict=True))
        yield {"name": name, "nbytes": 4 * count, **us, "nwrong": wrong[name], "hidden": hidden(**us)}


def _recovery(settings: Settings) -> Iterator[dict[str, Any]]:
    """Let the last rank be killed, again and again until one is left. Collective.

    Yields:
        ``left``: how many ranks were left; in milliseconds, on the slowest of them, ``detected_ms``: from the signal to
        the error of the allreduce that the rank was in, ``connected_ms``: from there until the ranks that are left were
        connected, ``begun_ms``: from there until their world had begun, ``next_ms``: from there to the end of the next
        allreduce, ``total_ms``: all together; of rank 0, ``descriptors``: files that it had open then, and
        ``resident_nbytes`` of its memory that was there then.

    Raises:
        ConfigError: the launcher ends the job with any of its ranks.
    """
    if not launch().survives_deaths:
        raise ConfigError("bench recovery lets ranks die; start it by `ringreduce run --elastic -np 4 ...`")
    while runtime.size() > 1:
        yield _kill_last()


def _kill_last() -> dict[str, Any]:
    data = np.ones(_RECOVERED, np.float32)
    doomed = runtime.rank() == runtime.size() - 1
    when = float(runtime.broadcast(np.array([time.monotonic() + _CALM_S]))[0])  # one clock for all of a machine
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
    found = dict(zip(_STEPS, (1e3 * runtime.allreduce(np.array(times), MAX)).tolist(), strict=True))
    gc.collect()  # the error's traceback holds the old world
    held = {"descriptors": len(os.listdir("/proc/self/fd")), "resident_nbytes": resident_nbytes()}
    return {"left": runtime.size(), **{f"{name}_ms": ms for name, ms in found.items()}, **held}


_SIZES = ("min_nbytes", "max_nbytes", "step_nbytes", "step_factor")
MODES = {
    "async": Mode(
        "{placement}; from the first submission to the last result, slowest rank",
        "{name:>12}  {operations:>10}  {nbytes:>10}  {min_us:>9}  {median_us:>9}  {p95_us:>9}  {nwrong:>6}",
        heads={"name": "", "nbytes": "bytes each", "min_us": "min us", "median_us": "median us", "p95_us": "p95 us"},
        measure=_async,
        options=("iterations", "format"),
    ),
    "overlap": Mode(
        "{placement}; float32, in place; medians of the slowest rank\n"
        "# hidden: of the allreduce, by a computation of one core that takes about as long",
        "{size:>10}  {name:<10}  {allreduce_us:>12}  {compute_us:>10}  {both_us:>9}  {hidden:>6}  {nwrong:>6}",
        heads={"name": "library", "allreduce_us": "allreduce us", "compute_us": "compute us", "both_us": "both us"},
        measure=_overlap,
        options=(*_SIZES, "iterations", "peers", "format"),
    ),
    "recovery": Mode(
        "milliseconds after the last rank was killed, slowest of those that are left; what rank 0 then holds",
        "{left:>8}" + "".join(f"  {{{name}_ms:>9}}" for name in _STEPS) + "  {files:>5}  {MiB:>6}",
        heads={**{f"{name}_ms": name for name in _STEPS}, "next_ms": "next step"},
        measure=_recovery,
        options=("format",),
        takes_torch=False,
    ),
}


def _cells(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tables show of what was found."""
    cells = {name: f"{value:.1f}" if isinstance(value, float) else value for name, value in entry.items()}
    if "hidden" in entry:
        cells["hidden"] = "N/A" if entry["hidden"] is None else f"{entry['hidden']:.0%}"
        cells["size"] = format_nbytes(entry["nbytes"])
    if "left" in entry:
        cells |= {"files": entry["descriptors"], "MiB": f"{entry['resident_nbytes'] / 2**20:.1f}"}
    return cells
