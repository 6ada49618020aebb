"""Ranks on the workers of a Dask cluster; see `run`."""

from __future__ import annotations

import json
import pickle
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from ringreduce.common.errors import CollectiveError, ConfigError
from ringreduce.engines import engine, run_on
from ringreduce.engines.slots import address_towards, connection_to_task, hold, slots, why_failed

if TYPE_CHECKING:
    from distributed import Client, Future

_T = TypeVar("_T")
_LOOK_EVERY_S = 0.1


def run(
    client: Client,
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    start_timeout: float = 60.0,
) -> list[_T]:
    """Call a function on new ranks, children of the workers of a Dask cluster, and wait for them.

    A task holds a thread of a worker for each rank. A rank has the environment of its worker. The function calls `init`
    itself. It, its arguments and its results go by cloudpickle between this process and the ranks. Data of the cluster
    among the arguments does not go through this process:

    - Of a Dask collection (array, dataframe, bag), and of a list or tuple of futures, each rank gets a list of the
      pieces (blocks, partitions, results) on its worker, in their order. Ranks of one worker share its pieces. Pieces
      on workers without a rank go to other ranks. The list is empty if there are too few pieces.
    - Of collections with equally many pieces, pieces i of all go to the rank that gets piece i of the first.
    - Of a single future, each rank gets the result.

    A worker keeps its data. Each rank gets a copy, and may write to its NumPy arrays.

    Args:
        client: of the cluster. Workers must have this installation at the same paths, and reach this process by TCP.
        fn: function to call.
        args: its arguments.
        kwargs: its keyword arguments.
        np: number of ranks, at most that of the threads of all workers; None: one for each worker.
        env: variables for the ranks.
        options: more options of ``ringreduce run``. With ``--elastic``, ranks that die are survived, if the function
            trains by `ringreduce.elastic.run`; and workers that end, if it keeps its state on disk.
        start_timeout: seconds to wait for workers with so many threads, if a cluster grows, and again until the tasks
            have started on all of them.

    Returns:
        The results of the ranks, in their order.

    Raises:
        ModuleNotFoundError: distributed is not installed.
        ConfigError: an argument is wrong, the client is closed, or there are too few workers or free threads.
        CollectiveError: a rank failed; the message has its traceback. Or a worker has ended, or the tasks were
            cancelled. All ranks have ended.
        Exception: that of a piece that Dask cannot compute.
    """
    distributed = engine("distributed", "dask")
    if not isinstance(client, distributed.Client) or client.asynchronous:
        raise ConfigError(f"ringreduce.dask.run takes a distributed.Client that is not asynchronous, not {client!r}")
    if client.status != "running":
        raise ConfigError(f"the client of Dask is {client.status}; ringreduce.dask.run takes one that is connected")
    data = _ClusterData(client)
    call = (fn, tuple(map(data.place, args)), {name: data.place(value) for name, value in (kwargs or {}).items()})
    held = data.held()
    threads = _threads(client, np if isinstance(np, int) else 1, start_timeout)
    count = Counter(address for addresses in held.values() for address in addresses)
    workers = _places(sorted(threads, key=lambda each: -count[each]), threads, np)
    # Libraries of a rank share the threads that its worker has for tasks.
    share = min(threads[worker] // number for worker, number in Counter(workers).items())
    names = {f"dask-{rank}": worker for rank, worker in enumerate(workers)}
    url = urlsplit(client.scheduler.address)
    address = address_towards(url.hostname if url.hostname and url.scheme != "inproc" else "127.0.0.1")
    with slots(address) as held_slots:
        tasks = _submit(client, held_slots.ticket, names, data.shares(workers, held))
        elastic = "--elastic" in options
        for task in tasks:  # it ends before the job only if it has failed, or somebody cancels it
            task.add_done_callback(lambda task: held_slots.close() if not elastic else None)
        look = partial(_look, tasks, [] if elastic else held_slots.lost, names, survives=elastic)
        try:
            held_slots.wait([*names], start_timeout, look)
            env = {"OMP_NUM_THREADS": str(max(share, 1)), **(env or {})}
            hosts = dict.fromkeys(names, 1)
            with why_failed(look):
                return run_on(held_slots, hosts, _call, call, options=options, env=env, look=look)
        finally:
            held_slots.close()
            with suppress(Exception):  # the client may be closed, or have lost the scheduler
                client.cancel(tasks)  # which wait for workers that have ended


def _threads(client: Client, least: int, limit_s: float) -> dict[str, int]:
    """Return the threads of each worker, once there are so many in all; those that there are after a time limit.

    Tasks that wait meanwhile have an adaptive cluster start workers: it does that for what it has to do.
    """
    from distributed import Event

    event = Event(f"ringreduce-{uuid.uuid4().hex}", client)
    waiting: list[Future] = []
    deadline = time.monotonic() + limit_s
    try:
        while True:
            workers = client.scheduler_info(n_workers=-1)["workers"]
            found = {address: info["nthreads"] for address, info in workers.items()}
            if sum(found.values()) >= least or time.monotonic() > deadline:
                return found
            if not waiting:
                waiting = client.map(_wait, [(event.name, number) for number in range(least)], pure=False, retries=0)
            time.sleep(_LOOK_EVERY_S)
    finally:
        if waiting:
            event.set()
            client.cancel(waiting, force=True)


def _places(order: Sequence[str], threads: Mapping[str, int], np: Any) -> list[str]:
    """Return the worker of each rank: those of one worker follow each other."""
    most = sum(threads.values())
    if not order:
        raise ConfigError("the Dask cluster has no workers, also after start_timeout")
    np = len(order) if np is None else np
    if not isinstance(np, int) or np < 1:
        raise ConfigError(f"np is the number of ranks, at least 1, not {np!r}")
    if np > most:
        raise ConfigError(f"{np} ranks take as many threads of workers, and the Dask cluster has {most}")
    ranks = dict.fromkeys(order, 0)
    while sum(ranks.values()) < np:
        ranks[min((each for each in order if ranks[each] < threads[each]), key=lambda each: ranks[each])] += 1
    return [worker for worker in order for _ in range(ranks[worker])]


def _submit(
    client: Client, ticket: str, names: Mapping[str, str], shares: Sequence[Sequence[list[Future] | Future]]
) -> list[Future]:
    """Submit the tasks that hold slots: at once, or those of two jobs could wait for each other."""
    import dask

    job = uuid.uuid4().hex[:8]
    calls = []
    for (name, worker), share in zip(names.items(), shares, strict=True):
        with dask.annotate(workers=[worker], allow_other_workers=False, retries=0):
            key = f"ringreduce-{job}-{name}"
            calls.append(dask.delayed(_hold, pure=False)(ticket, name, share, dask_key_name=key))
    return list(client.compute(calls, optimize_graph=False))


def _look(tasks: Sequence[Future], lost: Sequence[str], names: Mapping[str, str], *, survives: bool) -> None:
    """Raise why tasks have ended, if some have.

    Args:
        tasks: of the slots.
        lost: the names of slots that have ended.
        names: the workers of the slots, by name.
        survives: whether the ranks go on if a task ends.
    """
    for name in lost:
        raise CollectiveError(f"the worker {names[name]} of Dask has ended, and with it rank {[*names].index(name)}")
    for task in tasks:
        if task.status == "error" and not survives:
            raise CollectiveError(f"the task of a rank has failed: {task.exception()!r}")
        if task.done() and task.status not in (("error", "finished") if survives else ("error",)):
            raise CollectiveError(
                f"the task of a rank was {task.status}: somebody has cancelled it, or closed the client"
            )


class _DataPlace(NamedTuple):
    """Where data of the cluster belongs among the arguments: it comes as one of several objects, by number."""

    number: int


class _ClusterData:
    """The data of the cluster among the arguments of a call.

    Args:
        client: of the cluster.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._all: list[list[Future] | Future] = []

    def place(self, value: Any) -> object:
        """Return what a rank gets as an argument: the value, or a place if it is data of the cluster."""
        import dask
        from distributed import Future

        if dask.is_dask_collection(value) and not isinstance(value, Future):
            kept = self._client.persist(value)
            keys = dask.core.flatten(kept.__dask_keys__())
            value = [Future(key, self._client) for key in keys]
        is_list = isinstance(value, list | tuple) and value and all(isinstance(each, Future) for each in value)
        if not is_list and not isinstance(value, Future):
            return value
        self._all.append(list(value) if is_list else value)
        return _DataPlace(len(self._all) - 1)

    def held(self) -> dict[str, Sequence[str]]:
        """Wait for the data; return the addresses of the workers that have each piece, by key.

        Raises:
            Exception: that of a piece that could not be computed.
        """
        from distributed import wait

        pieces = [each for data in self._all if isinstance(data, list) for each in data]
        every = [*pieces, *(each for each in self._all if not isinstance(each, list))]
        for each in wait(every).done if every else ():
            if each.status != "finished":
                each.result()
        found: dict[str, Sequence[str]] = self._client.who_has(pieces) if pieces else {}
        return found

    def shares(self, workers: Sequence[str], held: Mapping[str, Sequence[str]]) -> list[list[list[Future] | Future]]:
        """Return what each rank gets for each place.

        Args:
            workers: of the ranks.
            held: as `held` returns it.
        """
        owners: dict[int, list[int]] = {}
        for data in self._all:
            if isinstance(data, list) and len(data) not in owners:
                counts = [0] * len(workers)
                owners[len(data)] = []
                for piece in data:
                    there = [rank for rank, worker in enumerate(workers) if worker in held[piece.key]]
                    rank = min(there or range(len(workers)), key=counts.__getitem__)
                    counts[rank] += 1
                    owners[len(data)].append(rank)
        return [
            [
                [piece for piece, owner in zip(data, owners[len(data)], strict=True) if owner == rank]
                if isinstance(data, list)
                else data
                for data in self._all
            ]
            for rank in range(len(workers))
        ]


# ---- in a task, on a worker ----


def _wait(event: tuple[str, int]) -> None:
    """Wait for an event of the cluster, by its name, so that a thread has something to do."""
    from distributed import Event

    Event(event[0]).wait()


def _hold(ticket: str, name: str, data: Sequence[object]) -> None:
    hold(ticket, name, partial(_send, data))


def _send(data: Sequence[object], connection: socket.socket) -> None:
    """Send objects: a line with the numbers of bytes, the pickle, and its buffers, straight from their arrays."""
    import cloudpickle

    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(pickled), *(each.raw() for each in buffers)]
    connection.sendall(json.dumps([part.nbytes for part in parts]).encode() + b"\n")
    for part in parts:
        connection.sendall(part)


# ---- in a rank ----


def _call(fn: Callable[..., _T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> _T:
    """Call the function, with the data of the cluster in its places."""
    values = [*args, *kwargs.values()]
    if any(isinstance(each, _DataPlace) for each in values):
        data = _receive()
        values = [data[each.number] if isinstance(each, _DataPlace) else each for each in values]
    return fn(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))


def _receive() -> Sequence[Any]:
    with connection_to_task() as connection, connection.makefile("rb") as stream:
        parts = [bytearray(nbytes) for nbytes in json.loads(stream.readline() or b"null") or ()]
        if not parts or any(stream.readinto(part) < len(part) for part in parts):
            raise CollectiveError("the worker of Dask could not send its data: it has ended, or its log says why")
    found: Sequence[Any] = pickle.loads(parts[0], buffers=parts[1:])
    return found
