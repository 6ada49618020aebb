"""All collectives on arrays of a GPU against references in wide types: results, orders of streams, torch's tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
from gpu.report import BY_NCCL, NCCL, Check, ranks

from ringreduce.bench.cases import COLLECTIVES, OPS, TYPES, Case
from ringreduce.bench.measure import Contender
from ringreduce.bench.ours import Ours
from ringreduce.bench.places import OnDevice
from ringreduce.bench.reference import Reference
from ringreduce.buffers import DTYPES
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import (
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    RingReduceError,
    UnsupportedBufferError,
)
from ringreduce.common.reduce_ops import ReduceOp

#: Elements: one, an odd number, and one beyond several segments of staging.
COUNTS = (1, 100_003)
LARGE = (9 << 20) + 5
#: Errors after which the rest of a collective's cases is left out.
ENOUGH = 5

T = TypeVar("T")
#: Makes a stream the current one for some arrays.
On = Callable[..., AbstractContextManager[object]]


class Counter:
    """Runs collectives on fresh inputs and counts wrong elements over all ranks.

    Args:
        world: the ranks.
        place: where their arrays are.
        seed: the same on all ranks.
        counts: elements of the arrays of every case.
        large: elements of one more case of each collective.
    """

    def __init__(
        self, world: Communicator, place: OnDevice, seed: int, counts: tuple[int, ...] = COUNTS, large: int = LARGE
    ) -> None:
        self.world = world
        self.place = place
        self.counts = counts
        self.large = large
        self._seed = seed

    def next_seed(self) -> int:
        """Return a number that was not used before; the same on all ranks."""
        self._seed += 1
        return self._seed

    def wrong(self, case: Case, contender: Contender) -> int:
        """Fill the input, poison the output, run once, and count."""
        reference = Reference(case, self.next_seed())
        self.place.store(contender.source, lambda array: reference.fill(array, self.world.rank))
        if contender.output is not None:
            self.place.poison(contender.output)
        return self.total(reference.count_wrong(self.place.fetch(contender.call()), self.world.rank))

    def total(self, mine: int) -> int:
        """Add up over the ranks."""
        return int(self.world.allreduce(np.array([mine]))[0])


class OutOfStepError(RuntimeError):
    """Some ranks raised what others did not: nothing collective can follow."""


def attempt(counter: Counter, work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what ``work`` returns, or what it raised if it did so on all ranks, which are in step then. Collective.

    Raises:
        OutOfStepError: it raised on some of the ranks only.
        CollectiveTimeoutError, MismatchError, PeerLostError: it raised that, or another rank was elsewhere.
    """
    found, error = None, None
    try:
        found = work()
    except (CollectiveTimeoutError, MismatchError, PeerLostError, OutOfStepError):
        raise
    except Exception as caught:  # whatever it is, what comes after it may show what it means
        error = caught
    own = "this one did not" if error is None else f"this one: {type(error).__name__}: {error}"
    try:
        raised = counter.total(int(error is not None))
    except RingReduceError as lost:
        raise OutOfStepError(f"the ranks do not meet after a call that raised on some of them; {own}") from lost
    if raised not in (0, counter.world.size):
        raise OutOfStepError(f"{raised} of {counter.world.size} ranks raised; {own}") from error
    return found, error


def check_way(counter: Counter, when: str) -> Check:
    """See whether kernels carry the allreduce: results are right without them, too. Collective.

    Args:
        counter: the ranks.
        when: of the cases this is.
    """
    world, row = counter.world, DTYPES["float32"]
    counter.place.empty(1, shared=True)  # the ranks have told each other about their GPUs
    kernels = world.gpu.kernels
    carried = world.size == 1 or (kernels is not None and kernels.supports(row, ReduceOp.SUM))
    name = f"kernels carry the allreduce, {when} the cases, {ranks(world.size)}"
    return Check(name, counter.total(int(not carried)) == 0, world.gpu.description or "not known")


def check_nccl(counter: Counter, count: int = 100_003) -> Check:
    """Ask for NCCL, which does it or refuses; the result is right either way."""
    world = counter.world
    ours = Ours(world, 4 * count, counter.place, shared=False)
    case = Case(COLLECTIVES["allreduce"], "float", "sum", 0, world.size, count)
    wrong = counter.wrong(case, ours.out_of_place(case, "nccl"))
    how = BY_NCCL if world.gpu.nccl is not None else "not NCCL, as the log says why"
    return Check(f"{NCCL}, {ranks(world.size)}", wrong == 0, f"{how}; {wrong} wrong")


def check_results(counter: Counter, names: tuple[str, ...] = tuple(COLLECTIVES)) -> Iterator[Check]:
    """Yield a check for each collective and kind of buffers, over all types and operations, in place and out."""
    world = counter.world
    largest = max(counter.counts) * world.size * max(row.itemsize for row in TYPES.values())
    for shared in (False, True):
        ours = Ours(world, max(largest, 4 * counter.large), counter.place, shared=shared)
        kind = "shared" if shared else "private"
        for name in names:
            bad, ran, errors = [], 0, 0
            for case in _cases(name, counter):
                label = f"{case.type_name} {case.op_name} of {case.count}"
                found, error = attempt(counter, functools.partial(_wrong_in_case, counter, ours, case))
                ran += len(found or ())
                bad += [f"{label}: {each}" for each in found or () if each]
                if error is not None:
                    bad.append(f"{label}: {type(error).__name__}: {error}")
                    errors += 1
                if errors == ENOUGH:
                    bad.insert(0, f"{ENOUGH} errors, after which the rest was not tried")
                    break
            yield Check(f"{name}, {kind} buffers, {ranks(world.size)}", not bad, _detail(ran, bad))


def check_staging(counter: Counter) -> Iterator[Check]:
    """Yield a check for each algorithm that is asked for by name, which takes arrays through host memory."""
    world = counter.world
    ours = Ours(world, max(4 * counter.large, 8 * max(counter.counts)), counter.place, shared=False)
    for algorithm in world.algorithms("allreduce"):
        bad, ran = [], 0
        cases = ("float", "sum", counter.large), ("double", "avg", max(counter.counts)), ("int32", "max", 7)
        for type_name, op_name, count in cases:
            case = Case(COLLECTIVES["allreduce"], type_name, op_name, 0, world.size, count)
            for contender in (ours.out_of_place(case, algorithm), ours.in_place(case, algorithm)):
                ran += 1
                found = counter.wrong(case, contender)
                bad += [f"{type_name} {op_name} of {count}: {found}"] if found else []
        yield Check(f"allreduce through host memory, {algorithm}, {ranks(world.size)}", not bad, _detail(ran, bad))


def check_streams(counter: Counter, on: On, *, count: int = 300_007, noise: int = 1 << 28, turns: int = 6) -> Check:
    """Race streams: inputs that come late, results read on another stream, inputs overwritten right after the call.

    Args:
        counter: the ranks and the place.
        on: ``with on(stream, *arrays)``: calls in there are on that stream.
        count: float32 elements.
        noise: bytes that the caller's stream copies, several times, before the input is there.
        turns: how often everything is done.
    """
    world, place, driver = counter.world, counter.place, counter.place.driver
    caller, reader, read = driver.make_stream(), driver.make_stream(), driver.make_event()
    loud = [place.new(noise, np.dtype(np.uint8)) for _ in range(2)]
    fresh, seen, other = (place.new(count, np.dtype(np.float32)) for _ in range(3))
    place.poison(other)
    algorithms = [None, *world.algorithms("allreduce")[:1]]
    wrong, case = 0, Case(COLLECTIVES["allreduce"], "float", "sum", 0, world.size, count)
    for shared in (False, True):
        array, out = (place.empty(4 * count, shared=shared).view(np.float32) for _ in range(2))
        for turn in range(turns):
            target = out if turn % 2 else array
            reference = Reference(case, counter.next_seed())
            place.store(fresh, functools.partial(reference.fill, rank=world.rank))
            for each in (array, out, seen):
                place.poison(each)
            for _ in range(4 + 12 * (world.rank == turn % world.size)):
                place.copy(loud[0], loud[1], caller)
            place.copy(array, fresh, caller)
            with on(caller, array, out):
                world.allreduce(array, out=target, algorithm=algorithms[turn // 2 % len(algorithms)])
            driver.record(read, caller)
            driver.wait(reader, read)
            place.copy(seen, target, reader)
            if target is out:
                place.copy(array, other, caller)
            driver.record(read, reader)
            driver.wait(caller, read)
            driver.record(read, caller)
            driver.synchronize(read)
            wrong += counter.total(reference.count_wrong(place.fetch(seen), world.rank))
    driver.free_event(read)
    for stream in (caller, reader):
        driver.free_stream(stream)
    return Check(f"streams raced on purpose, {ranks(world.size)}", wrong == 0, f"{2 * turns} turns, {wrong} wrong")


def check_torch(counter: Counter, device: str = "cuda") -> Iterator[Check]:
    """Yield a check for each type of torch's tensors: dense ones and others, in place and out, on a side stream.

    Args:
        counter: the ranks.
        device: where the tensors are; ``"cpu"`` shows that the check itself is right.
    """
    import torch

    world, rank, size = counter.world, counter.world.rank, counter.world.size
    side = torch.cuda.Stream() if device == "cuda" else None
    for name in ("float32", "float64", "bfloat16", "float16", "int64", "uint8"):
        dtype, bad = getattr(torch, name), []
        for layout in ("dense", "every other column", "transposed", "expanded input"):
            values = [_whole_numbers(counter.next_seed(), each, name) for each in range(size)]
            if layout == "expanded input":
                values = [np.repeat(each[:, :1], each.shape[1], axis=1) for each in values]
            with torch.cuda.stream(side) if side is not None else nullcontext():
                tensor = _laid_out(torch.from_numpy(values[rank].copy()).to(device=device, dtype=dtype), layout)
                out = torch.full_like(tensor, 99, memory_format=torch.contiguous_format)
                got = {"allreduce out of place": world.allreduce(tensor, out=out).cpu().double().numpy()}
                if layout != "expanded input":
                    got["allreduce in place"] = world.allreduce(tensor.clone(), "sum").cpu().double().numpy()
                    world.allreduce(tensor, out=tensor)
                    got["allreduce into itself"] = tensor.cpu().double().numpy()
            total = np.sum([each.astype(np.float64) for each in values], axis=0)
            bad += [f"{what}, {layout}" for what, each in got.items() if not np.array_equal(each, total)]
        bad += _others_of_torch(counter, torch, name, device)
        missed = counter.total(len(bad))
        yield Check(f"tensors of {name}, {ranks(size)}", missed == 0, "; ".join(bad) or f"{missed} wrong")


def _others_of_torch(counter: Counter, torch: Any, name: str, device: str) -> list[str]:
    world, rank, size = counter.world, counter.world.rank, counter.world.size
    values = [_whole_numbers(counter.next_seed(), each, name)[: 6 * size] for each in range(size)]
    tensor = torch.from_numpy(values[rank].copy()).to(device=device, dtype=getattr(torch, name))
    total = np.sum([each.astype(np.float64) for each in values], axis=0)
    parts = [np.split(each, size)[rank] for each in values]
    wanted = {
        "allgather": (world.allgather(tensor), np.concatenate(values)),
        "broadcast": (world.broadcast(tensor, size - 1), values[-1]),
        "reduce_scatter": (world.reduce_scatter(tensor), np.split(total, size)[rank]),
        "alltoall": (world.alltoall(tensor), np.concatenate(parts)),
    }
    return [what for what, (got, right) in wanted.items() if not np.array_equal(got.cpu().double().numpy(), right)]


def _whole_numbers(seed: int, rank: int, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return (129, 131) numbers whose sums over 16 ranks every type holds."""
    low = 0 if name == "uint8" else -8
    return np.random.default_rng((seed, rank)).integers(low, 9, (129, 131))


def _laid_out(tensor: Any, layout: str) -> Any:
    """Return a tensor of the same values with other strides."""
    if layout == "every other column":
        wide = tensor.repeat_interleave(2, dim=1)
        return wide[:, ::2]
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "expanded input":
        return tensor[:, :1].expand(tensor.shape)
    return tensor


def _cases(name: str, counter: Counter) -> Iterator[Case]:
    collective, nranks = COLLECTIVES[name], counter.world.size
    for type_name in TYPES:
        for op_name in OPS if collective.reduces else (None,):
            for count in counter.counts:
                yield Case(collective, type_name, op_name, nranks - 1, nranks, count)
    yield Case(collective, "float", "sum" if collective.reduces else None, 0, nranks, counter.large // nranks)


def _wrong_in_case(counter: Counter, ours: Ours, case: Case) -> list[int]:
    """Return the numbers of wrong elements, out of place and in place; nothing for what host memory has not either."""
    if case.collective.reduces:
        try:
            counter.world.allreduce(np.ones(1, case.dtype), case.op)
        except UnsupportedBufferError:  # on all ranks
            return []
    try:
        contenders = [ours.out_of_place(case, None)]
        contenders += [ours.in_place(case, None)] if case.collective.in_place else []
    except (TypeError, ValueError):
        if case.type_name == "bfloat16":  # older CuPys have none; torch's tensors have
            return []
        raise
    return [counter.wrong(case, each) for each in contenders]


def _detail(ran: int, bad: list[str]) -> str:
    return f"{ran} calls" if not bad else f"wrong: {', '.join(bad[:8])}{' ...' if len(bad) > 8 else ''}"
