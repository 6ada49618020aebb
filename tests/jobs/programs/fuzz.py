"""A job that makes random calls, right ones and wrong ones, and knows what must come of each.

    . scripts/_env && launch 3 600 python tests/jobs/programs/fuzz.py --steps 3000 --seed 7

All ranks draw the same steps from the seed, and what each contributes, so that every rank can compute what must come
out, in float64 and by itself. After each step the ranks compare how it ended for them. The job ends with exit code 0
and a line of counts if nothing was wrong, hung, crashed, or failed on some ranks only, and if every world was usable,
or closed, as it had to be.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import ringreduce as rr
import ringreduce.torch as hvd

PRIVATE = MPI.COMM_WORLD.Dup()
RANK, SIZE = PRIVATE.rank, PRIVATE.size

COUNTS = (0, 1, 5, SIZE * 4, 1001, 70_001)
DTYPES = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8")
OPS: dict[str, Callable[[list[np.ndarray]], np.ndarray]] = {
    "sum": lambda all_: np.sum(all_, axis=0),
    "average": lambda all_: np.mean(all_, axis=0),
    "min": lambda all_: np.min(all_, axis=0),
    "max": lambda all_: np.max(all_, axis=0),
}


class WrongError(Exception):
    """A result, or an ending, that must not be."""


class Call:
    """One collective with right arguments.

    Args:
        draw: the same on all ranks.
        framework: ``"numpy"`` for the blocking functions of ringreduce, ``"torch"`` for named operations.

    Attributes:
        name: of the function.
        options: its keyword arguments.
        data: what each rank contributes.
        expected: what must come out on this rank, in float64.
        is_for_others: whether it comes out on another rank only.
    """

    def __init__(self, draw: random.Random, framework: str) -> None:
        names = ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"]
        names += ["reduce", "gather"] if framework == "numpy" else []
        kind = draw.choice(names)
        self.name = "reduce_scatter" if (kind, framework) == ("reducescatter", "numpy") else kind
        self.framework = framework
        self.options: dict[str, Any] = {}
        self.dtype = draw.choice(DTYPES)
        count = draw.choice(COUNTS)
        if kind == "alltoall":
            count = count // SIZE * SIZE
        self.data = [values(draw.randrange(1 << 30), count, self.dtype) for _ in range(SIZE)]
        exact = [each.astype(np.float64) for each in self.data]
        root = draw.randrange(SIZE)
        if kind in ("reduce", "gather"):
            self.options["root"] = root
        if kind in ("allreduce", "reducescatter", "reduce"):
            op = draw.choice([*OPS])
            self.options["op"] = op if framework == "numpy" else getattr(hvd, op.capitalize())
            total = OPS[op](exact) if count else exact[0]
            whole = not self.dtype.startswith("float")
            if op == "average" and whole:
                total = np.trunc(total)
            if framework == "torch" and draw.random() < 0.3:
                factor = self.options["postscale_factor"] = draw.choice((0.5, 2.0))
                if op == "average" and whole:
                    total = scaled_average(np.sum(exact, axis=0), factor)
                else:
                    total = np.trunc(total * factor) if whole else total * factor
            self.expected = np.array_split(total, SIZE)[RANK] if kind == "reducescatter" else total
        elif kind in ("allgather", "gather"):
            self.expected = np.concatenate(exact)
        elif kind == "broadcast":
            self.options["root" if framework == "numpy" else "root_rank"] = root
            self.expected = exact[root]
        else:
            self.expected = np.concatenate([np.array_split(each, SIZE)[RANK] for each in exact])
        self.is_for_others = kind in ("reduce", "gather") and root != RANK
        if framework == "torch" and draw.random() < 0.5:
            self.options["name"] = f"name {draw.randrange(3)}"
        in_place = draw.random() < 0.3
        if framework == "numpy" and kind in ("allreduce", "broadcast") and in_place:
            self.options["out"] = Ellipsis  # the array itself, once it is made

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return what this rank passes: by position, and by name."""
        array: Any = self.data[RANK].copy()
        if self.framework == "torch":
            array = torch.from_numpy(array)
        return [array], {name: array if value is Ellipsis else value for name, value in self.options.items()}

    def function(self) -> Callable[..., Any]:
        return getattr(rr if self.framework == "numpy" else hvd, self.name)

    def check(self, result: Any) -> None:
        """Compare a result with what must come out."""
        if self.is_for_others:
            expect(result is None, f"{self.name} has no result here", result)
            return
        found = np.asarray(result, np.float64)
        tolerance = {"float32": 1e-5, "float64": 1e-12}.get(self.dtype, 0.0)
        if found.shape != self.expected.shape or not np.allclose(found, self.expected, tolerance, tolerance):
            raise WrongError(f"{self.name}({self.options}, {self.dtype}) gave {found[:4]}, not {self.expected[:4]}")


def values(seed: int, count: int, dtype: str) -> np.ndarray:
    """Return small whole numbers, whose sums are exact."""
    return np.random.default_rng(seed).integers(0, 16, count).astype(dtype)


def scaled_average(total: np.ndarray, factor: float) -> np.ndarray:
    """Return what the average of whole numbers is, scaled, by the conventions of this job."""
    if factor != 1.0 and rr.world().config.conventions.value == "horovod":
        return np.trunc(total * (factor / SIZE))  # Horovod's formula
    return np.trunc(np.trunc(total / SIZE) * factor)


def spoilt(call: Call, draw: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments that this rank must refuse."""
    args, options = call.arguments()
    if call.framework == "numpy":
        bad = [args[0].astype(object), args[0].tolist(), None, args[0].astype("datetime64[s]")]
    else:
        bad = [args[0].double().to_sparse() if args[0].dim() else None, args[0].tolist(), None, args[0].to("meta")]
    chosen = draw.choice(bad)
    return [chosen], {name: chosen if value is args[0] else value for name, value in options.items()}


def different(call: Call, draw: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments that are right by themselves, and differ from those of the other ranks."""
    args, options = call.arguments()
    if call.name in ("allgather", "alltoall", "gather") or draw.random() < 0.5:
        other = "float32" if call.dtype != "float32" else "float64"
        changed = args[0].astype(other) if call.framework == "numpy" else args[0].to(getattr(torch, other))
    else:
        joined = [args[0]] * 2 + [args[0][:1]] if len(args[0]) else [np.zeros(3, call.dtype)] * 1
        changed = np.concatenate([np.asarray(each) for each in joined])
        changed = changed if call.framework == "numpy" else torch.from_numpy(changed)
    return [changed], {name: changed if value is args[0] else value for name, value in options.items()}


def perform(function: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> Any:
    """Make a call, from the same line on all ranks; return its result or its error."""
    try:
        return function(*args, **options)
    except rr.RingReduceError as error:
        return error


def expect(condition: object, what: str, found: object = "") -> None:
    if not condition:
        raise WrongError(f"{what}; found {found!r}")


# ---- the steps ----


def right(draw: random.Random, framework: str) -> None:
    """All ranks make the same call."""
    call = Call(draw, framework)
    args, options = call.arguments()
    result = perform(call.function(), args, options)
    expect(not isinstance(result, Exception), "a right call must succeed", result)
    call.check(result)


def refused(draw: random.Random, framework: str) -> None:
    """One rank's arguments are wrong."""
    call, odd = Call(draw, framework), draw.randrange(SIZE)
    args, options = spoilt(call, draw) if odd == RANK else call.arguments()
    result = perform(call.function(), args, options)
    if odd == RANK:
        kinds = (rr.UnsupportedBufferError, rr.ConfigError)
        expect(isinstance(result, kinds), "the rank itself must say what is wrong", result)
    else:
        expect(isinstance(result, rr.MismatchError), "the others must hear of it", result)
        expect("refused" in result.values[odd] and result.in_step, "and of the rank and its reason", result)


def mismatched(draw: random.Random, framework: str) -> None:
    """One rank's arguments differ from the others'."""
    call, odd = Call(draw, framework), draw.randrange(SIZE)
    args, options = different(call, draw) if odd == RANK else call.arguments()
    result = perform(call.function(), args, options)
    expect(isinstance(result, rr.MismatchError), "all ranks must get the mismatch", result)
    expect(result.in_step and sorted(result.values) == list(range(SIZE)), "and be in step", result)


def left_out(draw: random.Random, framework: str) -> None:
    """One rank leaves out a call: where that can be seen, nothing is accepted until there is a new world."""
    odd = draw.randrange(SIZE)
    function = rr.allreduce if framework == "numpy" else hvd.allreduce
    make = np.ones if framework == "numpy" else torch.ones
    result = None
    if odd != RANK:
        result = perform(function, [make(3)], {})
    if not isinstance(result, Exception):
        result = perform(function, [make(4)], {})
    expect(isinstance(result, rr.MismatchError) and not result.in_step, "all ranks must know that they do not", result)
    for _ in range(2):
        result = perform(function, [make(4)], {})
        expect(isinstance(result, rr.TransportError), "and no later call may be accepted", result)
    rr.shutdown()
    rr.init()


def forked(draw: random.Random, framework: str) -> None:
    """One rank forks a process that tries to take part."""
    function = rr.allreduce if framework == "numpy" else hvd.allreduce
    make = np.ones if framework == "numpy" else torch.ones
    buffer = rr.empty(5)
    buffer[:] = RANK
    if draw.randrange(SIZE) == RANK:
        child = os.fork()
        if child == 0:
            buffer[:] = -1000
            result = perform(function, [make(3)], {})
            knows = (hvd.rank(), hvd.size()) == (RANK, SIZE)
            os._exit(0 if isinstance(result, rr.ConfigError) and knows else 1)
        expect(os.waitpid(child, 0)[1] == 0, "a forked process must be told that it is no rank")
    total = perform(rr.allreduce, [buffer], {"out": buffer})
    expect(np.all(np.asarray(total) == sum(range(SIZE))), "and must not disturb the ranks", total)


class _Interrupting(rr.Instrument):
    def collective_started(self, collective: str, algorithm: str, nbytes: int) -> None:
        signal.raise_signal(signal.SIGUSR1)


def interrupted(draw: random.Random, framework: str) -> None:
    """A signal handler communicates, in the midst of a collective."""
    call = Call(draw, framework)
    errors: list[object] = []

    def handler(*_: object) -> None:
        inner = rr.allreduce if framework == "numpy" else hvd.allreduce
        errors.append(perform(inner, [np.ones(3) if framework == "numpy" else torch.ones(3)], {}))

    communicator = rr.world() if framework == "numpy" else rr.global_process_set.engine.communicator
    instrument, before = _Interrupting(), signal.signal(signal.SIGUSR1, handler)
    communicator.instruments.add(instrument)
    try:
        args, options = call.arguments()
        result = perform(call.function(), args, options)
    finally:
        communicator.instruments.remove(instrument)
        signal.signal(signal.SIGUSR1, before)
    expect(not isinstance(result, Exception), "what was interrupted must go on", result)
    call.check(result)
    expect(all(isinstance(each, rr.ConfigError) for each in errors), "handlers must be told", errors)


def in_any_order(draw: random.Random, framework: str) -> None:
    """Named operations, submitted by each rank in an order of its own."""
    calls = [Call(draw, "torch") for _ in range(draw.randrange(2, 12))]
    for number, call in enumerate(calls):
        call.options["name"] = f"operation {number}"
    order = list(range(len(calls)))
    random.Random(draw.randrange(1 << 30) + RANK).shuffle(order)
    handles = {}
    for number in order:
        args, options = calls[number].arguments()
        handles[number] = getattr(hvd, f"{calls[number].name}_async")(*args, **options)
    for number in reversed(order):
        calls[number].check(hvd.synchronize(handles[number]))


def in_a_subset(draw: random.Random, framework: str) -> None:
    """A process set comes, is used by its members, and goes."""
    ranks = sorted(draw.sample(range(SIZE), draw.randrange(1, SIZE + 1)))
    if len(ranks) == SIZE:
        return
    made = rr.add_process_set(ranks)
    if made.included():
        total = hvd.allreduce(torch.full((7,), RANK + 1.0), op=hvd.Sum, process_set=made)
        expect(bool((total == sum(rank + 1 for rank in ranks)).all()), "a subset sums up its members", total)
    expect(rr.remove_process_set(made), "a set that was added can be removed")


def scaled(draw: random.Random, framework: str) -> None:
    """Integers of any width are averaged and scaled, by the conventions of this job."""
    before, after = draw.choice((1.0, 0.5, 2.0)), draw.choice((1.0, 0.5, 1.5, 2.0))
    count, dtype = draw.choice(COUNTS), draw.choice(DTYPES[2:])
    data = [values(draw.randrange(1 << 30), count, dtype) for _ in range(SIZE)]
    total = np.sum([np.trunc(each.astype(np.float64) * before) for each in data], axis=0)
    exact = scaled_average(total, after)
    given = {"op": hvd.Average, "prescale_factor": before, "postscale_factor": after}
    mine = torch.from_numpy(data[RANK].copy())
    kind = draw.choice(["allreduce", "allreduce_", "grouped_allreduce", "reducescatter"])
    result = getattr(hvd, kind)([mine] if kind.startswith("grouped") else mine, **given)
    found = np.asarray(result[0] if kind.startswith("grouped") else result, np.float64)
    exact = np.array_split(exact, SIZE)[RANK] if kind == "reducescatter" else exact
    expect(np.array_equal(found, exact), f"{kind}({given}, {mine.dtype})", (found[:4], exact[:4]))


def narrow(draw: random.Random, framework: str) -> None:
    """Floats of 16 bits by all ops, exact sums, products, and bool."""
    draws = np.random.default_rng(draw.randrange(1 << 30))
    count = draw.choice(COUNTS)
    data = [draws.integers(0, 4, count) for _ in range(SIZE)]
    dtype = draw.choice([torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.bool])
    mine, all_ = torch.from_numpy(data[RANK]).to(dtype), np.array(data, np.float64)
    if dtype is torch.bool:
        everyone = np.asarray(hvd.allgather(mine))
        expect(np.array_equal(everyone, np.concatenate(data).astype(bool)), "allgather of bool", everyone[:4])
        return
    exact = {hvd.Sum: all_.sum(0), hvd.Product: all_.prod(0), hvd.Min: all_.min(0), hvd.Max: all_.max(0)}
    if dtype.is_floating_point:
        exact |= {hvd.Average: all_.mean(0), hvd.ReproducibleSum: all_.sum(0)}
    op = draw.choice([*exact])
    found = np.asarray(hvd.allreduce(mine, op=op).double())
    expect(np.allclose(found, exact[op], 1e-2), f"allreduce({op}, {dtype})", (found[:4], exact[op][:4]))


def moved(draw: random.Random, framework: str) -> None:
    """Parts of a root's array, rows of other numbers on each rank, messages around, and objects."""
    rows = [[draw.choice((0, 1, 3, 500)) for _ in range(SIZE)] for _ in range(SIZE)]
    data = [values(draw.randrange(1 << 30), sum(each), "float32") for each in rows]
    mine, root = data[RANK], draw.randrange(SIZE)
    library = rr if framework == "numpy" else hvd
    given: Any = mine if framework == "numpy" else torch.from_numpy(mine)
    everyone = np.asarray(library.allgather(given))
    expect(np.array_equal(everyone, np.concatenate(data)), "allgather of other numbers of rows", everyone[:4])
    parts = [np.split(each, np.cumsum(counts)[:-1])[RANK] for each, counts in zip(data, rows, strict=True)]
    got, counts = library.alltoall(given, rows[RANK])
    expect(np.array_equal(np.asarray(got), np.concatenate(parts)), "alltoall with splits", np.asarray(got)[:4])
    expect([int(each) for each in counts] == [each[RANK] for each in rows], "with the numbers of rows", counts)
    whole = values(draw.randrange(1 << 30), SIZE * draw.choice((1, 7, 5000)), "float64")
    part = rr.scatter(whole if root == RANK else None, root)
    expect(np.array_equal(part, np.split(whole, SIZE)[RANK]), "scatter", part)
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    room = np.empty_like(data[left])
    rr.sendrecv(mine, right, room, left, tag=draw.randrange(3))
    expect(np.array_equal(room, data[left]), "sendrecv", room[:4])
    if SIZE > 1 and root in (RANK, left):
        tag = draw.randrange(3)
        if root == RANK:
            rr.send(whole, right, tag)
        else:
            room = np.empty_like(whole)
            expect(rr.recv(room, left if root else None, tag) == left, "recv says who has sent")
            expect(np.array_equal(room, whole), "recv", room[:4])
    rr.barrier()
    hvd.barrier()
    thing = {"rows": rows, "data": data[root]}
    said = hvd.broadcast_object(thing if root == RANK else None, root)
    expect(said["rows"] == rows and np.array_equal(said["data"], data[root]), "broadcast_object", said)
    expect(hvd.allgather_object((RANK, rows[RANK])) == [*enumerate(rows)], "allgather_object")


def compressed(draw: random.Random, framework: str) -> None:
    """Floats travel in fewer bits: within what their format rounds."""
    name, error = draw.choice([("bf16", 0.01), ("fp16", 0.001), ("fp8", 0.1), ("int8", 0.02), ("int4", 0.3)])
    count = draw.choice(COUNTS)
    data = [values(draw.randrange(1 << 30), count, "float32") for _ in range(SIZE)]
    found = hvd.allreduce(torch.from_numpy(data[RANK]), op=hvd.Sum, compression=getattr(hvd.Compression, name))
    exact = np.sum(data, axis=0, dtype=np.float64)
    # What is sent on is rounded once more with each step, and is a sum already.
    bound = error * 15 * SIZE * (SIZE + 1)
    expect(np.allclose(np.asarray(found, np.float64), exact, 0, bound), f"allreduce as {name}", (found[:4], exact[:4]))


def joined(draw: random.Random, framework: str) -> None:
    """Ranks have other numbers of steps, and join."""
    steps = [draw.randrange(4) for _ in range(SIZE)]
    dtype = draw.choice([torch.float32, torch.int32])
    for step in range(steps[RANK]):
        active = [rank + 1 for rank in range(SIZE) if steps[rank] > step]
        total = hvd.allreduce(torch.full((5,), RANK + 1, dtype=dtype), op=hvd.Sum, name=f"step {step}")
        expect(bool((total == sum(active)).all()), f"sum over the ranks that have not joined of {steps}", total)
    expect(steps[hvd.join()] == max(steps) or SIZE > 1, "join")


STEPS: dict[Callable[[random.Random, str], None], float] = {
    right: 40,
    scaled: 10,
    narrow: 10,
    moved: 8,
    compressed: 4,
    joined: 4,
    refused: 15,
    mismatched: 15,
    left_out: 2,
    forked: 5,
    interrupted: 8,
    in_any_order: 12,
    in_a_subset: 3,
}
if SIZE == 1:  # there is nobody to disagree with
    for _step in (mismatched, left_out):
        del STEPS[_step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--node-size", help="ranks of a node; what RINGREDUCE_NODE_SIZE says, if not given")
    chosen = parser.parse_args()
    if chosen.node_size is not None:
        os.environ["RINGREDUCE_NODE_SIZE"] = chosen.node_size
    rr.init()
    counts: Counter[str] = Counter()
    for number in range(chosen.steps):
        draw = random.Random(f"{chosen.seed} {number}")
        (step,) = draw.choices([*STEPS], [*STEPS.values()])
        framework = draw.choice(["numpy", "torch"])
        problem = ""
        try:
            step(draw, framework)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        everyone = PRIVATE.allgather(problem)
        if any(everyone):
            if RANK == 0:
                where = f"step {number} of seed {chosen.seed}, {step.__name__} with {framework}"
                print(f"{where}:", *enumerate(everyone), sep="\n  ", file=sys.stderr, flush=True)
            rr.shutdown()
            sys.exit(1)
        counts[step.__name__] += 1
    if RANK == 0:
        print(f"well: {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}", flush=True)
    rr.shutdown()


if __name__ == "__main__":
    main()
