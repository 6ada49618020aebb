"""Functions for programs: blocking collectives of all ranks, messages between two of them, communication buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.collectives import Call, Feedback
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.reduce_ops import SUM, ReduceOp
from ringreduce.runtime.plans import Plan
from ringreduce.runtime.process import PROCESS

__all__ = [
    "allgather",
    "allgather_init",
    "allreduce",
    "allreduce_init",
    "alltoall",
    "alltoall_init",
    "barrier",
    "broadcast",
    "broadcast_init",
    "empty",
    "explain",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_init",
    "scatter",
    "send",
    "sendrecv",
    "world",
]

A = TypeVar("A")  # an array of any library; a number, where these are taken


def world() -> Communicator:
    """Return the communicator of all ranks.

    Raises:
        ConfigError: `init` was not called, or this process is no rank.
    """
    # All collectives begin here: in the usual case this is a call less.
    return (PROCESS.world or PROCESS.here()).communicator


@overload
def empty(shape: int | Sequence[int], dtype: Any = np.float32, *, device: None = None) -> npt.NDArray[Any]: ...


@overload
def empty(shape: int | Sequence[int], dtype: Any = np.float32, *, device: str | None) -> Any: ...


def empty(shape: int | Sequence[int], dtype: Any = np.float32, *, device: str | None = None) -> Any:
    """Return a communication buffer; see `Communicator.empty`."""
    return world().empty(shape, dtype, device=device)


def allreduce(
    array: A,
    op: ReduceOp | str = SUM,
    *,
    out: Any = None,
    algorithm: str | None = None,
    deterministic: bool = False,
    compression: str | None = None,
    feedback: Feedback | None = None,
    wire: str | None = None,
) -> A:
    """Reduce arrays over all ranks; see `Communicator.allreduce`."""
    communicator = (PROCESS.world or PROCESS.here()).communicator
    if not (deterministic or compression or feedback or wire):
        return communicator.allreduce(array, op, out=out, algorithm=algorithm)
    return communicator.allreduce(
        array,
        op,
        out=out,
        algorithm=algorithm,
        deterministic=deterministic,
        compression=compression or wire,
        feedback=feedback,
    )


def reduce(
    array: A, root: int = 0, op: ReduceOp | str = SUM, *, out: Any = None, algorithm: str | None = None
) -> A | None:
    """Reduce arrays over all ranks; the root alone gets the result; see `Communicator.reduce`."""
    return world().reduce(array, root, op, out=out, algorithm=algorithm)


def reduce_scatter(array: A, op: ReduceOp | str = SUM, *, out: Any = None, algorithm: str | None = None) -> A:
    """Reduce arrays over all ranks and cut the result between them; see `Communicator.reduce_scatter`."""
    return world().reduce_scatter(array, op, out=out, algorithm=algorithm)


def allgather(array: A, *, out: Any = None, algorithm: str | None = None) -> A:
    """Concatenate the ranks' arrays along the first dimension; see `Communicator.allgather`."""
    return world().allgather(array, out=out, algorithm=algorithm)


def gather(array: A, root: int = 0, *, out: Any = None, algorithm: str | None = None) -> A | None:
    """Concatenate the ranks' arrays along the first dimension, at the root alone; see `Communicator.gather`."""
    return world().gather(array, root, out=out, algorithm=algorithm)


def scatter(array: Any, root: int = 0, *, out: Any = None, algorithm: str | None = None) -> Any:
    """Give each rank its part of the root's array; see `Communicator.scatter`."""
    return world().scatter(array, root, out=out, algorithm=algorithm)


def broadcast(array: A, root: int = 0, *, out: Any = None, algorithm: str | None = None) -> A:
    """Give every rank the root's array; see `Communicator.broadcast`."""
    return world().broadcast(array, root, out=out, algorithm=algorithm)


@overload
def alltoall(array: A, splits: None = None, *, out: Any = None, algorithm: str | None = None) -> A: ...


@overload
def alltoall(
    array: A, splits: Sequence[int], *, out: Any = None, algorithm: str | None = None
) -> tuple[A, list[int]]: ...


def alltoall(array: Any, splits: Sequence[int] | None = None, *, out: Any = None, algorithm: str | None = None) -> Any:
    """Send every rank its part and get one's own of all; see `Communicator.alltoall`."""
    return world().alltoall(array, splits, out=out, algorithm=algorithm)


def send(array: Any, dest: int, tag: int = 0) -> None:
    """Send an array to a rank that receives it; see `Communicator.send`."""
    world().send(array, dest, tag)


def recv(out: Any, source: int | None = None, tag: int = 0) -> int:
    """Receive an array that a rank sends; returns that rank; see `Communicator.recv`."""
    return world().recv(out, source, tag)


def sendrecv(array: Any, dest: int, out: Any, source: int | None = None, tag: int = 0) -> Any:
    """Send an array to one rank and receive another from one, at the same time; see `Communicator.sendrecv`."""
    return world().sendrecv(array, dest, out, source, tag)


def barrier() -> None:
    """Return when every rank has called it; see `Communicator.barrier`."""
    world().barrier()


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


def allreduce_init(array: Any, op: ReduceOp | str = SUM, *, out: Any = None, algorithm: str | None = None) -> Plan:
    """Plan an allreduce that is run again and again; see `Plan`. Collective.

    Args:
        array: as for `Communicator.allreduce`, but no number; what it holds when the plan runs counts.
        op, algorithm: as for `Communicator.allreduce`.
        out: where each result goes; None: a new array, the same for all runs.
    """
    return _planned(Call(Collective.ALLREDUCE, array, out, op, algorithm=algorithm))


def reduce_scatter_init(array: Any, op: ReduceOp | str = SUM, *, out: Any = None, algorithm: str | None = None) -> Plan:
    """Plan a reduce-scatter, collectively; arguments as for `allreduce_init` and `Communicator.reduce_scatter`."""
    return _planned(Call(Collective.REDUCE_SCATTER, array, out, op, algorithm=algorithm))


def allgather_init(array: Any, *, out: Any = None, algorithm: str | None = None) -> Plan:
    """Plan an allgather, collectively; arguments as for `allreduce_init` and `Communicator.allgather`."""
    return _planned(Call(Collective.ALLGATHER, array, out, None, algorithm=algorithm))


def broadcast_init(array: Any, root: int = 0, *, out: Any = None, algorithm: str | None = None) -> Plan:
    """Plan a broadcast, collectively; arguments as for `allreduce_init` and `Communicator.broadcast`."""
    return _planned(Call(Collective.BROADCAST, array, out, None, root, algorithm=algorithm))


def alltoall_init(array: Any, *, out: Any = None, algorithm: str | None = None) -> Plan:
    """Plan an alltoall of equal parts, collectively; arguments as for `allreduce_init` and `Communicator.alltoall`."""
    return _planned(Call(Collective.ALLTOALL, array, out, None, algorithm=algorithm))


def _planned(call: Call) -> Plan:
    communicator = world()  # raises where there is none
    return Plan(communicator, PROCESS.everyone.engine, call)
