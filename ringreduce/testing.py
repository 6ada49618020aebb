"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ringreduce.collectives import Context
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.call_sites import CallSite
from ringreduce.common.config import Config
from ringreduce.common.errors import RingReduceError
from ringreduce.common.lifetime import Lifetime
from ringreduce.engine import Engine
from ringreduce.gpu.devices import Gpu
from ringreduce.runtime.process_sets import Membership, ProcessSet
from ringreduce.transport.memory import MemorySegments, MemoryWorld
from ringreduce.transport.messages import Messages
from ringreduce.transport.shared.node import join
from ringreduce.transport.waiting import Waiter

T = TypeVar("T")


def run_ranks(
    size: int,
    function: Callable[[Communicator], T],
    *,
    node_size: int | None = None,
    config: Config | None = None,
    wrap: Callable[[Messages], Messages] = lambda messages: messages,
    called: Callable[[str], CallSite] = CallSite.here,
    counts_decide: bool = False,
) -> list[T]:
    """Call ``function(communicator)`` on ``size`` ranks, each a thread of this process, and return their results.

    Args:
        size: the number of ranks.
        function: what every rank does.
        node_size: ranks per node; None: all on one. 1: no shared memory, everything goes as messages.
        config: settings; None: loops are compiled, where they can be, and the time limit is 30 s.
        wrap: puts a recording or failing transport around each rank's messages.
        called: says what a rank calls, and where; see `Context`.
        counts_decide: see `Context`.

    Raises:
        Exception: the first error of the rank that failed first; the others are ended by their time limit at the
            latest.
    """
    if config is None:
        config = Config(timeout_s=30.0, caches=Config.from_environ().caches)
    settings = replace(config, node_size=node_size or config.node_size)
    world = MemoryWorld(size, settings.timeout_s)
    between_two = MemoryWorld(size)

    def run(rank: int) -> T:
        communicator = _communicator(
            world,
            rank,
            settings=settings,
            wrap=wrap,
            called=called,
            channel=between_two.messages(rank),
            counts_decide=counts_decide,
        )
        result = function(communicator)
        communicator.close()
        return result

    return run_threads(size, run, on_error=world.meeting.abort)


def _communicator(
    world: MemoryWorld,
    rank: int,
    settings: Config,
    wrap: Callable[[Messages], Messages] = lambda messages: messages,
    called: Callable[[str], CallSite] = CallSite.here,
    channel: Messages | None = None,
    counts_decide: bool = False,
) -> Communicator:
    waiter = Waiter(settings.timeout_s, crowded=True)
    messages = wrap(world.messages(rank))
    node = join(
        messages, waiter, config=settings, host="threads", make_segments=lambda pids: MemorySegments(world, rank)
    )
    waiter.crowded = True  # threads of one interpreter run one at a time
    context = Context(messages, waiter, node=node, config=settings, called=called, counts_decide=counts_decide)
    context.agreement.patience_s = 0.0  # a false suspicion costs nothing here, a test that waits does
    return Communicator(context, channel, Gpu)


def run_engines(
    size: int, function: Callable[[Engine], T], *, node_size: int | None = None, config: Config | None = None
) -> list[T]:
    """Call ``function(engine)`` on ``size`` ranks, each a thread of this process; otherwise as `run_ranks`."""
    notes = MemoryWorld(size)

    def run(communicator: Communicator) -> T:
        engine = Engine(communicator, notes.messages(communicator.rank))
        try:
            return function(engine)
        finally:
            engine.close()

    return run_ranks(size, run, node_size=node_size, config=config, called=CallSite, counts_decide=True)


def run_process_sets(
    size: int, function: Callable[[ProcessSet], T], *, node_size: int | None = None, config: Config | None = None
) -> list[T]:
    """Call ``function(process_set)`` on ``size`` ranks, each a thread of this process; otherwise as `run_ranks`.

    The process set has all ranks.
    """
    blocking = MemoryWorld(size)

    def run(engine: Engine) -> T:
        rank = engine.communicator.rank
        settings = engine.communicator.config
        process_set = ProcessSet(range(size))
        parts = Membership(_communicator(blocking, rank, settings), engine)
        process_set.register(1, list(range(size)), rank, parts, Lifetime())
        return function(process_set)

    return run_engines(size, run, node_size=node_size, config=config)


def run_threads(size: int, function: Callable[[int], T], *, on_error: Callable[[], None] = lambda: None) -> list[T]:
    """Call ``function(rank)`` on ``size`` threads at once and return their results.

    Args:
        size: the number of threads.
        function: what each does.
        on_error: called on a thread that fails, to end the others.

    Raises:
        Exception: the error of the thread that failed first.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
            on_error()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def caught(function: Callable[..., object], *arguments: Any, **options: Any) -> RingReduceError | None:
    """Return the error that a call raises on this rank, None if it succeeds: for comparing errors between ranks."""
    try:
        function(*arguments, **options)
    except RingReduceError as error:
        return error
    return None
