"""Ranks in the tasks of a Spark job; see `run`, and `run_elastic`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ringreduce.common.errors import CollectiveError, ConfigError
from ringreduce.engines import engine, run_on
from ringreduce.engines.slots import Slots, connection_to_task, hold, listed, slots, why_failed
from ringreduce.engines.spark_tasks import TasksOfRanks, context_for, first_line, wait_for_cores

if TYPE_CHECKING:
    import socket

    import pyarrow
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_START_S = 60.0
_IN_FILES = "options=['--log-dir=DIR'] writes the output of the ranks to files"
#: What is refused, and why.
_NOT_TAKEN = {
    "stdout": _IN_FILES,
    "stderr": _IN_FILES,
    "prefix_output_with_timestamp": _IN_FILES,
    "executable": "ranks run the Python of their tasks, spark.pyspark.python",
    "--elastic": "Spark ends all tasks of a barrier stage with the first; ringreduce.spark.run_elastic has others",
}
#: Follows the batches of a partition: a connection that ends before was lost.
_WHOLE = b"."


def run(
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: object = None,
    stderr: object = None,
    verbose: int | None = None,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    rows: DataFrame | None = None,
    options: Sequence[str] = (),
) -> list[_T]:
    """Call a function on new ranks, children of the tasks of a Spark job, and wait for them.

    The tasks are a barrier stage: Spark starts all of them, or none, and each holds its slot until the end. Rank i is
    below the task of partition i, and has its environment. The function calls `init` itself. It, its arguments and its
    results go by cloudpickle between the driver and the ranks.

    This is ``horovod.spark.run``, too.

    Args:
        fn: function to call.
        args: its arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks, at most that of tasks that the cluster runs at a time; None: one for each partition
            of ``rows``, or as many as Spark takes for a job (``spark.default.parallelism``).
        start_timeout: seconds to wait until all tasks have started; None: 60.
        extra_mpi_args: more options for mpirun, as in a shell.
        env: variables for the ranks.
        nics: names of interfaces for messages, a list, or separated by commas.
        verbose: at least 2: write the command to standard error.
        rows: a DataFrame. Each rank gets a partition of it, as the keyword argument ``rows`` of the function: an
            iterator of `pyarrow.RecordBatch`, straight from its task, which can be read once. They are dealt out
            anew over ``num_proc`` partitions, or stay where they are if that is None; and computed first, and kept on
            the executors until the end, so that an error of Spark comes before the ranks start.
        use_mpi, use_gloo: taken for Horovod's sake: it is always MPI.
        stdout, stderr, prefix_output_with_timestamp, executable: refused; see ``options``, which has ``--log-dir=DIR``.
        options: more options of ``ringreduce run``.

    Returns:
        The results of the ranks, in their order.

    Raises:
        ModuleNotFoundError: pyspark, or for ``rows`` pandas or pyarrow, is not installed.
        ConfigError: an argument or a setting of Spark is wrong, there is no SparkContext, or it has not enough slots.
        CollectiveError: Spark cannot compute the rows. Or a rank failed, and ended the job; the message has its
            traceback. Or an executor has ended, or somebody has cancelled the job of Spark.
    """
    _refuse(
        "run",
        stdout=stdout,
        stderr=stderr,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        executable=executable,
        **{"--elastic": "--elastic" in options},
    )
    if use_gloo:
        _log.warning("use_gloo has no meaning here: there is only MPI, and no Gloo")
    words = [*_words(nics, verbose), *([] if extra_mpi_args is None else [f"--mpi-args={extra_mpi_args}"])]
    context = context_for(rows)
    if num_proc is None:
        num_proc = context.defaultParallelism if rows is None else rows.rdd.getNumPartitions()
    elif rows is not None and num_proc >= 1:
        rows = rows.repartition(num_proc)
    names = [f"spark-{rank}" for rank in range(_count(num_proc, "num_proc"))]
    hosts = dict.fromkeys(names, 1)
    inside = fn if rows is None else partial(_call_with_rows, fn)
    with (
        _computed(rows) as kept,
        _held(context, names, partial(_work, context, kept, len(names), False), start_timeout) as (held, look),
    ):
        env = _environment(context, env)
        with why_failed(look):
            found = run_on(held, hosts, inside, args, kwargs, options=[*words, *options], env=env)
        look()  # a task that has failed may have given its rank a part of its rows
        return found


def run_elastic(
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: object = None,
    stderr: object = None,
    verbose: int | None = None,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    options: Sequence[str] = (),
) -> list[_T]:
    """Call a function on new ranks, children of the tasks of a Spark job, which may die and come again.

    The function trains by `ringreduce.elastic.run`, and keeps its state on disk, in a folder that all executors see. If
    a rank dies, the others go on, if ``min_num_proc`` are left; by default no rank may die. If its task, its executor
    or a daemon of mpirun ends, all ranks begin again from the last commit, without it. Spark starts tasks again that
    have failed: ``spark.task.maxFailures=4`` allows three times, ``local[N]`` none. The ranks begin again with them at
    the next commit. See `run` for the rest.

    This is ``horovod.spark.run_elastic``, too.

    Args:
        fn: function to call.
        args: its arguments.
        kwargs: its keyword arguments.
        num_proc: least number of ranks at the start, which may be up to ``max_num_proc``; None: as many as Spark takes
            for a job (``spark.default.parallelism``).
        min_num_proc, min_np: if deaths leave fewer ranks, the job ends; if lost tasks leave fewer slots, it waits for
            others. None: ``num_proc``.
        max_num_proc, max_np: number of ranks to which it grows, and number of tasks; None: ``num_proc``.
        start_timeout: seconds to wait until ``num_proc`` tasks have started; None: 60.
        elastic_timeout: seconds to wait for enough tasks after some have ended; None: 600.
        reset_limit: how often the ranks may change; None: any number.
        env: variables for the ranks.
        nics: names of interfaces for messages, a list, or separated by commas.
        verbose: at least 2: write the command to standard error.
        stdout, stderr, prefix_output_with_timestamp: refused.
        options: more options of ``ringreduce run``, such as ``"--cooldown=60"``.

    Returns:
        The results of the ranks that have reached the end.

    Raises:
        ModuleNotFoundError: pyspark is not installed.
        ConfigError: an argument or a setting of Spark is wrong, there is no SparkContext, or it has not enough slots.
            Or too few tasks have come again in time.
        CollectiveError: a rank failed, and ended the job; the message has its traceback. Or all ranks have ended before
            a commit was on disk, a task has failed too often, or somebody has cancelled the job of Spark.
    """
    _refuse(
        "run_elastic",
        stdout=stdout,
        stderr=stderr,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
    )
    context = context_for(None)
    size = _count(context.defaultParallelism if num_proc is None else num_proc, "num_proc")
    least = _count(next((each for each in (min_num_proc, min_np) if each is not None), size), "min_num_proc")
    most = _count(next((each for each in (max_num_proc, max_np) if each is not None), size), "max_num_proc")
    if not least <= size <= most:
        raise ConfigError(f"num_proc {size} is not between min_num_proc {least} and max_num_proc {most}")
    values: dict[str, float] = {"-np": size, "--min-np": least, "--max-np": most}
    values |= {} if elastic_timeout is None else {"--start-timeout": elastic_timeout}
    values |= {} if reset_limit is None else {"--reset-limit": reset_limit}
    words = ["--elastic", *(word for name, value in values.items() for word in (name, str(value)))]
    with (
        _held(context, size, partial(_work, context, None, most, True), start_timeout) as (held, look),
        listed(lambda: dict.fromkeys(held.held(), 1), held.folder) as (program, _),
        why_failed(look),
    ):
        return run_on(
            held,
            {},
            fn,
            args,
            kwargs,
            options=[*words, "--host-discovery-script", str(program), *_words(nics, verbose), *options],
            env=_environment(context, env),
            look=look,
        )


def _refuse(name: str, **given: object) -> None:
    for each, value in given.items():
        if value:
            raise ConfigError(f"ringreduce.spark.{name} takes no {each}: {_NOT_TAKEN[each]}")


def _words(nics: str | Sequence[str] | None, verbose: int | None) -> list[str]:
    """Return the options of ``ringreduce run`` for these arguments."""
    names = nics if nics is None or isinstance(nics, str) else ",".join(nics)
    return [
        *([] if names is None else [f"--network-interface={names}"]),
        *(["--verbose"] if (verbose or 0) > 1 else []),
    ]


def _count(value: Any, name: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is a number of ranks, at least 1, not {value!r}")
    return value


def _environment(context: SparkContext, env: Mapping[str, str] | None) -> dict[str, str]:
    return {"OMP_NUM_THREADS": context.getConf().get("spark.task.cpus", "1"), **(env or {})}


@contextmanager
def _computed(rows: DataFrame | None) -> Iterator[DataFrame | None]:
    """Have the rows computed, and kept on the executors, as long as this context lasts.

    An error of Spark while a task reads looks like the end of its partition there, and the rank would go on without the
    rest.

    Raises:
        CollectiveError: they cannot be computed.
    """
    if rows is None:
        yield None
        return
    was_kept = rows.is_cached  # by the program, and perhaps not computed yet
    kept = rows.persist()
    try:
        try:
            kept.count()
        except Exception as error:
            raise CollectiveError(f"Spark cannot compute the rows: {first_line(error)}") from error
        yield kept
    finally:
        with suppress(Exception):  # as if the context was stopped meanwhile
            if not was_kept:
                kept.unpersist()


@contextmanager
def _held(
    context: SparkContext,
    names: Sequence[str] | int,
    work: Callable[[str], Callable[[], object]],
    limit_s: float | None,
) -> Iterator[tuple[Slots, Callable[[], None]]]:
    """Have tasks hold slots as long as this context lasts.

    Args:
        context: of Spark.
        names: of the slots to wait for; or their number, where ranks go on if tasks end.
        work: given the ticket of the slots, returns what runs the tasks.
        limit_s: seconds to wait for them; None: 60.

    Yields:
        The slots, and what raises why tasks have ended.
    """
    deadline = time.monotonic() + (limit_s or _START_S)
    wait_for_cores(context, names if isinstance(names, int) else len(names), deadline)
    address = context.getConf().get("spark.driver.host", "127.0.0.1")
    with slots(address) as held:
        job = TasksOfRanks(context, work(held.ticket))
        try:
            look = partial(job.look, () if isinstance(names, int) else held.lost)
            held.wait(names, max(deadline - time.monotonic(), 1.0), look)
            yield held, look
        finally:
            held.close()
            job.end()


def _work(
    context: SparkContext, rows: DataFrame | None, count: int, elastic: bool, ticket: str
) -> Callable[[], object]:
    """Return what runs so many tasks, which hold the slots."""
    body = partial(_hold, ticket, rows is not None, elastic)
    if rows is not None:
        for each in ("pandas", "pyarrow"):  # Spark takes both for that
            engine(each, "spark")
        held: Any = rows.mapInArrow(body, "ended boolean", barrier=True)
    else:
        tasks = context.parallelize(range(count), count)
        held = (tasks if elastic else tasks.barrier()).mapPartitions(body)
    return lambda: held.count()


# ---- in a task ----


def _hold(ticket: str, has_rows: bool, elastic: bool, batches: Iterator[Any]) -> Iterator[Any]:
    """Hold a slot; in an elastic job, a task that comes again holds another one."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    name = f"spark-{context.partitionId()}" + f"-{context.taskAttemptId()}" * elastic
    hold(ticket, name, partial(_send, batches if has_rows else iter(())))
    return iter(())


def _send(batches: Iterator[pyarrow.RecordBatch], connection: socket.socket) -> None:
    """Send the batches of a partition: a stream of Arrow, if there are any, and a mark."""
    from pyarrow import ipc

    with connection.makefile("wb") as sink:
        writer = None
        for batch in batches:
            writer = writer or ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
        sink.write(_WHOLE)


# ---- in a rank ----


def _call_with_rows(fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
    return fn(*args, rows=_receive(), **kwargs)


def _receive() -> Iterator[pyarrow.RecordBatch]:
    """Yield the batches of the partition.

    Raises:
        CollectiveError: the task has ended before all have come.
    """
    from pyarrow import ipc

    with connection_to_task() as connection, connection.makefile("rb") as source:
        if source.peek(1)[:1] not in (b"", _WHOLE):
            yield from ipc.open_stream(source)
        if source.read(1) != _WHOLE:
            raise CollectiveError("the task of Spark has ended, and not all of its rows have come")
