"""Functions for programs: blocking and persistent collectives, messages between two ranks, communication buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, overload

import numpy as np

from ringreduce.algorithms import Collective
from ringreduce.buffers import Array
from ringreduce.collectives import Call, Feedback
from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.send_recv import PendingMessage
from ringreduce.collectives.sums.locations import located
from ringreduce.collectives.sums.prefix import prefix
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import MAX, MIN, SUM, ReduceOp
from ringreduce.engine import CollectiveOp, Engine, Operation
from ringreduce.runtime.process import PROCESS
from ringreduce.runtime.process_sets import ProcessSet, require_process_set
from ringreduce.transport.point_to_point import NoRank

A = TypeVar("A")  # An array of any library; a number, where these are taken.


def world() -> Communicator:
    """Return the communicator of all ranks.

    Raises:
        ConfigError: `init` was not called, or this process is no rank.
    """
    # All collectives begin here: in the usual case this is a call less.
    return (PROCESS.world or PROCESS.here()).communicator


def _members(process_set: ProcessSet | None) -> Communicator:
    """Return the communicator of the members of a set; None: of all ranks.

    Raises:
        ConfigError: it is no process set, it is not registered, or this rank is no member.
    """
    return world() if process_set is None else require_process_set(process_set).communicator


def _rooted(process_set: ProcessSet | None, root: int, name: str) -> tuple[Communicator, int]:
    """Return the communicator of the members, and the root's number among them; a wrong root ends the call for all."""
    communicator = _members(process_set)
    if process_set is None:
        return communicator, root
    try:
        return communicator, process_set.rank_of(root)
    except ConfigError as error:
        communicator.refuse(name, error)
        raise


@overload
def empty(
    shape: int | Sequence[int], dtype: Any = np.float32, *, device: None = None, process_set: ProcessSet | None = None
) -> Array: ...


@overload
def empty(
    shape: int | Sequence[int], dtype: Any = np.float32, *, device: str | None, process_set: ProcessSet | None = None
) -> Any: ...


def empty(
    shape: int | Sequence[int],
    dtype: Any = np.float32,
    *,
    device: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Return a communication buffer for the collectives of all ranks, or of a set; see `Communicator.empty`."""
    return _members(process_set).empty(shape, dtype, device=device)


def allreduce(
    array: A,
    op: ReduceOp | str = SUM,
    *,
    out: Any = None,
    algorithm: str | None = None,
    deterministic: bool = False,
    compression: str | None = None,
    feedback: Feedback | None = None,
    weights: Sequence[float] = (),
    process_set: ProcessSet | None = None,
) -> A:
    """Reduce arrays over all ranks, or over the members of a process set; see `Communicator.allreduce`.

    A collective with a ``process_set`` is called by its members alone, on all others it is a `ConfigError`. The
    numbers of roots are those of the world, as everywhere; parts and rows are in the order of the members.
    """
    communicator = (PROCESS.world or PROCESS.here()).communicator if process_set is None else _members(process_set)
    if not (deterministic or compression or feedback or len(weights)):
        return communicator.make("allreduce", array, out, op, algorithm)  # type: ignore[no-any-return]
    return communicator.allreduce(
        array,
        op,
        out=out,
        algorithm=algorithm,
        deterministic=deterministic,
        compression=compression,
        feedback=feedback,
        weights=weights,
    )


def reduce(
    array: A,
    root: int = 0,
    op: ReduceOp | str = SUM,
    *,
    out: Any = None,
    algorithm: str | None = None,
    process_set: ProcessSet | None = None,
) -> A | None:
    """Reduce arrays over all ranks; the root alone gets the result; see `Communicator.reduce`."""
    communicator, root = _rooted(process_set, root, "reduce")
    return communicator.reduce(array, root, op, out=out, algorithm=algorithm)


def reduce_scatter(
    array: A,
    op: ReduceOp | str = SUM,
    splits: Sequence[int] | None = None,
    *,
    out: Any = None,
    algorithm: str | None = None,
    process_set: ProcessSet | None = None,
) -> A:
    """Reduce arrays over all ranks and cut the result between them; see `Communicator.reduce_scatter`."""
    return _members(process_set).reduce_scatter(array, op, splits, out=out, algorithm=algorithm)


def allgather(array: A, *, out: Any = None, algorithm: str | None = None, process_set: ProcessSet | None = None) -> A:
    """Concatenate the ranks' arrays along the first dimension; see `Communicator.allgather`."""
    return _members(process_set).allgather(array, out=out, algorithm=algorithm)


def gather(
    array: A,
    root: int = 0,
    *,
    out: Any = None,
    algorithm: str | None = None,
    process_set: ProcessSet | None = None,
) -> A | None:
    """Concatenate the ranks' arrays along the first dimension, at the root alone; see `Communicator.gather`."""
    communicator, root = _rooted(process_set, root, "gather")
    return communicator.gather(array, root, out=out, algorithm=algorithm)


def scatter(
    array: Any,
    root: int = 0,
    splits: Sequence[int] | None = None,
    *,
    out: Any = None,
    algorithm: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Give each rank its part of the root's array; see `Communicator.scatter`."""
    communicator, root = _rooted(process_set, root, "scatter")
    return communicator.scatter(array, root, splits, out=out, algorithm=algorithm)


def broadcast(
    array: A,
    root: int = 0,
    *,
    out: Any = None,
    algorithm: str | None = None,
    process_set: ProcessSet | None = None,
) -> A:
    """Give every rank the root's array; see `Communicator.broadcast`."""
    communicator, root = _rooted(process_set, root, "broadcast")
    return communicator.broadcast(array, root, out=out, algorithm=algorithm)


@overload
def alltoall(
    array: A,
    splits: None = None,
    *,
    out: Any = None,
    algorithm: str | None = None,
    process_set: ProcessSet | None = None,
) -> A: ...


@overload
def alltoall(
    array: A,
    splits: Sequence[int],
    *,
    out: Any = None,
    algorithm: str | None = None,
    process_set: ProcessSet | None = None,
) -> tuple[A, list[int]]: ...


def alltoall(
    array: Any,
    splits: Sequence[int] | None = None,
    *,
    out: Any = None,
    algorithm: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Send every rank its part and get one's own of all; see `Communicator.alltoall`."""
    return _members(process_set).alltoall(array, splits, out=out, algorithm=algorithm)


def send(array: Any, dest: int | NoRank, tag: int = 0) -> None:
    """Send an array to a rank that receives it; see `Communicator.send`."""
    world().send(array, dest, tag)


def recv(out: Any, source: int | NoRank | None = None, tag: int = 0) -> int | NoRank:
    """Receive an array that a rank sends; returns that rank; see `Communicator.recv`."""
    return world().recv(out, source, tag)


def isend(array: Any, dest: int | NoRank, tag: int = 0) -> PendingMessage:
    """Begin to send an array; returns what waits for it; see `Communicator.isend`."""
    return world().isend(array, dest, tag)


def irecv(out: Any, source: int | NoRank | None = None, tag: int = 0) -> PendingMessage:
    """Begin to receive an array; returns what waits for it; see `Communicator.irecv`."""
    return world().irecv(out, source, tag)


def sendrecv(array: Any, dest: int | NoRank, out: Any, source: int | NoRank | None = None, tag: int = 0) -> Any:
    """Send an array to one rank and receive another from one, at the same time; see `Communicator.sendrecv`."""
    return world().sendrecv(array, dest, out, source=source, tag=tag)


def scan(array: Any, op: ReduceOp | str = SUM, *, out: Any = None, process_set: ProcessSet | None = None) -> Any:
    """Reduce arrays over the ranks up to each rank: rank r gets what ranks 0 to r come to. Collective.

    Args:
        array: in host memory, any shape; shape and dtype must agree on all ranks.
        op: see `ringreduce.common.reduce_ops`, but for averages; must agree.
        out: where the result goes, ``array`` itself for in place; same shape and dtype. None: a new array.
        process_set: the ranks that take part; None: all.

    Raises:
        ConfigError: of an average; UnsupportedBufferError: an array cannot be used; MismatchError: the calls differ.
    """
    return prefix(_members(process_set), array, op, out, inclusive=True)


def exscan(array: Any, op: ReduceOp | str = SUM, *, out: Any = None, process_set: ProcessSet | None = None) -> Any:
    """Reduce arrays over the ranks before each rank; rank 0's result stays as it is. See `scan`. Collective.

    A new array is undefined on rank 0, as in MPI.
    """
    return prefix(_members(process_set), array, op, out, inclusive=False)


def maxloc(array: Any, locations: Any = None, *, process_set: ProcessSet | None = None) -> tuple[Any, Any]:
    """Return the largest of the ranks' elements, and where each is: MAXLOC of MPI (4.1, section 6.9.4). Collective.

    Args:
        array: numbers in host memory, of any shape and real dtype, which must agree on all ranks.
        locations: integers that fit int64, of the same shape, or one for all elements; they may differ between ranks.
            None: the rank in the world.
        process_set: the ranks that take part; None: all.

    Returns:
        Two NumPy arrays: the largest elements, and their locations as int64; of equal elements the smallest location.
        NaN counts as the largest.

    Raises:
        UnsupportedBufferError: an array cannot be used; MismatchError: shapes or dtypes differ.
    """
    return located(_members(process_set), array, _or_rank(locations), MAX, "maxloc")


def minloc(array: Any, locations: Any = None, *, process_set: ProcessSet | None = None) -> tuple[Any, Any]:
    """Return the smallest of the ranks' elements, and where each is; NaN counts as the smallest. See `maxloc`."""
    return located(_members(process_set), array, _or_rank(locations), MIN, "minloc")


def _or_rank(locations: Any) -> Any:
    return world().rank if locations is None else locations


def barrier(process_set: ProcessSet | None = None) -> None:
    """Return when every rank has called it; see `Communicator.barrier`."""
    _members(process_set).barrier()


def explain(
    nbytes: int,
    dtype: Any = np.float32,
    collective: str = "allreduce",
    *,
    op: ReduceOp | str = SUM,
    device: str | None = None,
) -> str:
    """Say which algorithm and path a collective would take, and why; see `Communicator.explain`."""
    return world().explain(nbytes, dtype, collective, op=op, device=device)


# ---- persistent collectives: a program plans them once and runs them again and again ----


class Plan:
    """A collective with its arrays, planned once and run as often as wanted: a persistent collective of MPI-4.

    `ringreduce.allreduce_init` and its kin return plans. They are collective: the ranks compare what they plan. From
    then on all ranks run the plan, in the same order with their other calls. A plan keeps its arrays alive. What the
    input holds at each run counts, and each result goes into the same array.

        with rr.allreduce_init(array, out=array) as plan:
            for _ in range(100):
                array[:] = ...
                plan.run()  # or plan.start(), something else meanwhile, plan.wait()

    Source: MPI Forum, MPI: A Message-Passing Interface Standard, version 4.0, 2021, section 6.13.

    Args:
        communicator: of the ranks.
        engine: of the same ranks; carries out what `start` begins.
        call: to be made.

    Attributes:
        result: the array for the results.

    Raises:
        RingReduceError: as the call itself does; on making the plan, from `run` and from `wait`.
    """

    def __init__(self, communicator: Communicator, engine: Engine, call: Call) -> None:
        self._engine = engine
        self._call, self._text = communicator.plan(call)
        made = self._call
        self._make: Callable[[], Any] = partial(
            communicator.make, made.collective.value, made.array, made.out, made.op, made.algorithm, made.root
        )
        self._name = engine.new_name(f"the plan of {self._text}")
        self._under_way: Operation | None = None
        self._open = True

    @property
    def result(self) -> Any:
        return self._call.out

    def run(self) -> Any:
        """Carry the collective out, and return the result. Collective."""
        if self._under_way is not None:
            self._require_idle()
        return self._make()

    def start(self) -> None:
        """Begin the collective, on all ranks; returns at once. The arrays must not be used until `wait` returns."""
        self._require_idle()
        call = self._call
        operation = CollectiveOp(self._name, self._text, lambda communicator: communicator.run(call))
        self._engine.submit(operation)
        self._under_way = operation

    def wait(self) -> Any:
        """Wait for what `start` began, and return the result.

        Raises:
            ConfigError: it was not started.
        """
        operation = self._under_way
        self._under_way = None
        if operation is None:
            raise ConfigError(f"the plan of {self._text} was not started")
        return self._engine.wait(operation)

    def close(self) -> None:
        """Wait for what `start` began, and let go of the arrays; the plan cannot run again. Safe to call twice."""
        if self._under_way is not None:
            self.wait()
        self._open = False
        self._call = self._call._replace(array=None, out=None)
        self._make = self._require_idle

    def _require_idle(self) -> None:
        if not self._open:
            raise ConfigError(f"the plan of {self._text} is closed")
        if self._under_way is not None:
            raise ConfigError(f"the plan of {self._text} is under way; call wait() first")

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._under_way = None  # The ranks may no longer be in step.
        self.close()


def allreduce_init(array: Any, op: ReduceOp | str = SUM, *, out: Any = None, algorithm: str | None = None) -> Plan:
    """Plan an allreduce that is run again and again; see `Plan`. Collective.

    Args:
        array: as for `Communicator.allreduce`, but no number; what it holds when the plan runs counts.
        op, algorithm: as for `Communicator.allreduce`.
        out: where each result goes; None: a new array, the same for all runs.
    """
    return _planned(Call(Collective.ALLREDUCE, array, out, op=op, algorithm=algorithm))


def reduce_scatter_init(array: Any, op: ReduceOp | str = SUM, *, out: Any = None, algorithm: str | None = None) -> Plan:
    """Plan a reduce-scatter, collectively; arguments as for `allreduce_init` and `Communicator.reduce_scatter`."""
    return _planned(Call(Collective.REDUCE_SCATTER, array, out, op=op, algorithm=algorithm))


def allgather_init(array: Any, *, out: Any = None, algorithm: str | None = None) -> Plan:
    """Plan an allgather, collectively; arguments as for `allreduce_init` and `Communicator.allgather`."""
    return _planned(Call(Collective.ALLGATHER, array, out, op=None, algorithm=algorithm))


def broadcast_init(array: Any, root: int = 0, *, out: Any = None, algorithm: str | None = None) -> Plan:
    """Plan a broadcast, collectively; arguments as for `allreduce_init` and `Communicator.broadcast`."""
    return _planned(Call(Collective.BROADCAST, array, out, op=None, root=root, algorithm=algorithm))


def alltoall_init(array: Any, *, out: Any = None, algorithm: str | None = None) -> Plan:
    """Plan an alltoall of equal parts, collectively; arguments as for `allreduce_init` and `Communicator.alltoall`."""
    return _planned(Call(Collective.ALLTOALL, array, out, op=None, algorithm=algorithm))


def _planned(call: Call) -> Plan:
    communicator = world()  # Raises where there is no world.
    return Plan(communicator, PROCESS.everyone.engine, call)
